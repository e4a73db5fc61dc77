"""Runs workloads in one in-process engine and writes down what came out.

A program of its own, `worker.py JOB.json`, so that the interpreter of the patched
or of the unpatched environment can run it. Nothing here changes what the engine
does, save for the faults that a negative control asks for.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# One process: the runner can then be reached from here.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import vllm
from extension.step_recorder import Recorder
from vllm import LLM, SamplingParams

# More tokens than any step has: never split.
NEVER = 10**9
# A workload takes a few dozen; more means that a request is never scheduled.
MOST_STEPS = 500


class Engine:
    """One engine whose thresholds and step budget change between workloads."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.llm = LLM(model, **options)
        self.engine = self.llm.llm_engine
        config = self.engine.vllm_config.compilation_config
        self.compilation = [config.mode.name, config.backend]
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.budget = self.scheduler.max_num_scheduled_tokens
        # MLA on a CPU has none; a longer prompt than the budget would wait forever.
        self.chunks = self.scheduler.scheduler_config.enable_chunked_prefill
        worker = core.model_executor.driver_worker
        self.runner = getattr(worker, "worker", worker).model_runner
        self.steps = Recorder(self.runner)

    def run(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Run one workload to its end.

        Args:
            spec: `prompts` (token ids), `arrivals` (engine step at which each prompt
                is added), `max_tokens` (of each), `budget` (tokens a step may have,
                or None), `thresholds` (decode, prefill; None for never), `fault`.
        """
        budget = spec["budget"] if self.chunks else None
        self.scheduler.max_num_scheduled_tokens = budget or self.budget
        decode, prefill = spec["thresholds"] or (NEVER, NEVER)
        self.runner.parallel_config.dbo_decode_token_threshold = decode
        self.runner.parallel_config.dbo_prefill_token_threshold = prefill
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("The prefix cache is in use between two workloads.")
        self.steps.clear()
        with FAULTS[spec["fault"]]():
            outputs = self._generate(spec)
        return {
            "tokens": [output.token_ids for output in outputs],
            "logprobs": [
                [{token: entry.logprob for token, entry in row.items()} for row in rows]
                for rows in (output.logprobs for output in outputs)
            ],
            "steps": self.steps.steps,
        }

    def _generate(self, spec: dict[str, Any]) -> list[Any]:
        prompts, arrivals = spec["prompts"], spec["arrivals"]
        params = [
            SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, logprobs=5)
            for count in spec["max_tokens"]
        ]
        outputs: dict[int, Any] = {}
        step = 0
        while len(outputs) < len(prompts):
            for index, prompt in enumerate(prompts):
                if arrivals[index] == step:
                    self.engine.add_request(
                        str(index), {"prompt_token_ids": prompt}, params[index]
                    )
            if self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    if output.finished:
                        outputs[int(output.request_id)] = output.outputs[0]
            step += 1
            if step > MOST_STEPS:
                raise RuntimeError(f"No end after {MOST_STEPS} steps.")
        return [outputs[index] for index in range(len(prompts))]


@contextmanager
def _replaced(
    name: str, make: Callable[[Any], Any], module: str = "ubatch_utils"
) -> Iterator[None]:
    owner = importlib.import_module(f"vllm.v1.worker.gpu.{module}")
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def no_fault() -> Iterator[None]:
    yield


def _with_faulty_lengths(spoil: Callable[[Any, Any, slice], None]) -> Any:
    """Change the lengths of each ubatch's requests, on the device and on the host.

    Args:
        spoil: Called with the lengths of the ubatch, those of the whole batch and
            the ubatch's requests.
    """

    def make(original: Any) -> Any:
        def faulty(batch: Any, part: Any, *rest: Any, **more: Any) -> Any:
            ubatch = original(batch, part, *rest, **more)
            for name in ("seq_lens", "seq_lens_cpu_upper_bound"):
                spoil(getattr(ubatch, name), getattr(batch, name), part.request_slice)
            return ubatch

        return faulty

    return _replaced("_slice_input_batch", make)


def second_seq_lens_off_by_one() -> Any:
    """The second ubatch sees one token too few of each of its requests."""

    def spoil(lengths: Any, _: Any, requests: slice) -> None:
        if requests.start > 0:
            lengths -= 1

    return _with_faulty_lengths(spoil)


def merged_in_wrong_order() -> Any:
    return _replaced(
        "merge_ubatch_outputs", lambda original: lambda parts: original(parts[::-1])
    )


def straddling_request_not_truncated() -> Any:
    """The first ubatch takes the whole length of the request that is cut in two."""

    def spoil(lengths: Any, whole: Any, requests: slice) -> None:
        lengths.copy_(whole[requests])

    return _with_faulty_lengths(spoil)


def no_prefix_veto() -> Any:
    """A step is split although a request reads what a later one writes."""
    return _replaced(
        "prefix_hit_precedes_writer", lambda _: lambda *args: False, "model_runner"
    )


FAULTS: dict[str | None, Callable[[], Any]] = {
    None: no_fault,
    "second_seq_lens_off_by_one": second_seq_lens_off_by_one,
    "merged_in_wrong_order": merged_in_wrong_order,
    "straddling_request_not_truncated": straddling_request_not_truncated,
    "no_prefix_veto": no_prefix_veto,
}


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    engine = Engine(job["model"], job["options"])
    results = {}
    for number, (key, spec) in enumerate(job["runs"].items(), 1):
        print(f"[{number}/{len(job['runs'])}] {key}", flush=True)
        results[key] = engine.run(spec)
    report = {
        "vllm": str(Path(vllm.__file__).parent),
        "runner": type(engine.runner).__module__,
        "compilation": engine.compilation,
        "results": results,
    }
    Path(job["output"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
