"""Runs batches in engines and writes down what came out, and what was counted.

A program of its own, `gpu_engine.py JOB.json ...`, for the interpreter of the patched
environment. There is one engine at a time, each in a process of its own. One with the
FFN role serves those that come after it. Nothing here changes what an engine does,
save for the fault that a negative control asks for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# An engine is one process: the requests of a batch are then all there before its first
# step, so that the steps are the same in each run.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
import vllm
from forked import run_and_exit
from vllm import LLM, SamplingParams
from vllm.compilation.counter import compilation_counter
from vllm.platforms import current_platform
from vllm.v1.metrics.reader import Counter
from vllm.v1.worker.gpu import ubatch_utils

COUNTED = ("vllm:dbo_", "vllm:afd_")


class Engine:
    """One engine, as a user gets it."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.llm = LLM(model, disable_log_stats=False, **options)
        core = self.llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker
        self.runner = getattr(worker, "worker", worker).model_runner

    def facts(self) -> dict[str, Any]:
        """What has been started."""
        compilation = self.llm.llm_engine.vllm_config.compilation_config
        afd = getattr(self.runner, "afd", None)
        return {
            "vllm": str(Path(vllm.__file__).parent),
            "device": current_platform.device_type,
            "device_name": current_platform.get_device_name(),
            "torch": torch.__version__,
            "runner": type(self.runner).__module__,
            "mode": compilation.mode.name,
            "cudagraph_mode": compilation.cudagraph_mode.name,
            "graphs_traced": compilation_counter.num_graphs_seen,
            "graphs_captured": compilation_counter.num_cudagraph_captured,
            "connector": type(afd.session.connector).__name__ if afd else None,
        }

    def counters(self) -> dict[str, float]:
        """Of DBO and AFD by name, those with a further label as `name/label`."""
        found = {}
        for metric in self.llm.get_metrics():
            if isinstance(metric, Counter) and metric.name.startswith(COUNTED):
                labels = metric.labels.keys() - {"model_name", "engine"}
                words = [metric.name, *(metric.labels[each] for each in sorted(labels))]
                found["/".join(words).removeprefix("vllm:")] = metric.value
        return found

    def run(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Greedy tokens, their logprobs, and what was counted meanwhile.

        Args:
            batch: `prompts` (token ids) and `max_tokens` (of each); `wrong_order`:
                whether the halves of a step are put together in the wrong order.
        """
        before = self.counters()
        prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        params = SamplingParams(
            max_tokens=batch["max_tokens"],
            temperature=0,
            ignore_eos=True,
            logprobs=5,
        )
        with merged_in_wrong_order(batch.get("wrong_order", False)):
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        after = self.counters()
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "logprobs": [
                [{token: entry.logprob for token, entry in row.items()} for row in rows]
                for rows in (output.outputs[0].logprobs for output in outputs)
            ],
            "counters": {
                name: value - before.get(name, 0) for name, value in after.items()
            },
        }


@contextmanager
def merged_in_wrong_order(wrong: bool) -> Iterator[None]:
    original = ubatch_utils.merge_ubatch_outputs
    if wrong:
        ubatch_utils.merge_ubatch_outputs = lambda parts: original(parts[::-1])
    try:
        yield
    finally:
        ubatch_utils.merge_ubatch_outputs = original


def run(job: dict[str, Any]) -> None:
    """Be the engine of a job."""
    stop = threading.Event()
    if job["batches"] is None:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    engine = Engine(job["model"], job["options"])
    report: dict[str, Any] = engine.facts()
    if job["batches"] is None:
        parent = os.getppid()
        # Nobody sends it if the program is killed.
        while not stop.wait(0.5) and os.getppid() == parent:
            pass
    else:
        report["results"] = {
            name: engine.run(batch) for name, batch in job["batches"].items()
        }
    engine.llm.llm_engine.engine_core.shutdown()
    Path(job["output"]).write_text(json.dumps(report))


def fork(job: dict[str, Any]) -> int:
    """Process of a job's engine. It saves the time that the imports take."""
    if torch.cuda.is_initialized():
        raise RuntimeError("A fork cannot use a GPU that its parent has used.")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        run_and_exit(lambda: run(job))
    return pid


def main(job_files: list[str]) -> None:
    serving: set[int] = set()
    for job in (json.loads(Path(job_file).read_text()) for job_file in job_files):
        pid = fork(job)
        if job["batches"] is None:
            serving.add(pid)
            continue
        ended, status = os.wait()
        # The first error counts. What is left ends with this process's group.
        if ended != pid or status:
            sys.exit(f"Process {ended} has ended with status {status}.")
    for pid in serving:
        os.kill(pid, signal.SIGTERM)
        if os.waitpid(pid, 0)[1]:
            sys.exit(f"The FFN role, process {pid}, has failed.")


if __name__ == "__main__":
    main(sys.argv[1:])
