"""Engines and both AFD roles at work beside one another, for benchmarks that ask them.

`roles.py --child KIND JSON` is the part that the patched environment runs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests" / "e2e")]

from program import RUN_TIMEOUT_S, Program, answer, vllm_versions  # noqa: E402

_COMMON = {
    "vocab_size": 256,
    "hidden_size": 1024,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
    "norm_topk_prob": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-moe-like": _COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_experts": 8,
        "decoder_sparse_step": 1,
    },
    "deepseek-like": _COMMON
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "first_k_dense_replace": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    },
}
# What the engines of a benchmark are given, whatever the model.
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "seed": 0,
}
LONGEST_PROMPT = 128
# A threshold that no step reaches.
NEVER = 10**9


def prompts_of(rows: int) -> list[int]:
    """Lengths of the prompts of a step, so that both halves are alike."""
    count = max(2, -(-rows // LONGEST_PROMPT))
    return [rows // count + (number < rows % count) for number in range(count)]


# The part that runs in the patched environment. It imports vLLM where it needs it.


class Engine:
    """An engine that does all, or one with the attention role."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        afd = job.get("afd_config")
        options: dict[str, Any] = {}
        if afd:
            # So low that the warm-up meets split steps of any size.
            options = {
                "afd_config": afd,
                "enable_dbo": True,
                "dbo_decode_token_threshold": 2,
                "dbo_prefill_token_threshold": 2,
            }
        self.llm = LLM(**job["options"], **options)
        self.engine = self.llm.llm_engine
        self.config = self.engine.vllm_config
        executor = self.engine.engine_core.engine_core.model_executor
        worker = executor.driver_worker
        self.runner = getattr(worker, "worker", worker).model_runner
        self.split = 0
        # Nanoseconds at begin and end of the model, and of each exchange, by stage.
        self.model_ns = 0, 0
        self.exchanges: list[tuple[int, int, int]] = []
        # Of the requests that decode.
        self.decoding: list[str] = []
        self._time(self.runner.model, "forward")
        if afd:
            self._time(self.runner.ubatch_runner, "run")
            self._time_exchanges()

    def _time(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            whole = name == "run" or threading.current_thread().name == "MainThread"
            begin = time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                if whole:
                    self.model_ns = begin, time.perf_counter_ns()
                    self.split += name == "run"

        setattr(owner, name, timed)

    def _time_exchanges(self) -> None:
        from vllm.model_executor.afd import set_afd_exchange
        from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_enabled

        original = self.runner.afd.exchange

        def timed(*args: Any) -> Any:
            stage = dbo_current_ubatch_id() if dbo_enabled() else 0
            begin = time.perf_counter_ns()
            output = original(*args)
            self.exchanges.append((stage, begin, time.perf_counter_ns()))
            return output

        set_afd_exchange(self.config, timed)

    def versions(self) -> dict[str, str]:
        return vllm_versions()

    def run(self, rows: int, stages: int = 1) -> dict[str, Any]:
        """Milliseconds of one prefill step of that many rows; see `_step`."""
        lengths = prompts_of(rows)
        for number, length in enumerate(lengths):
            self._add(number, length, 1)
        return self._step(len(lengths), stages)

    def begin_decode(self, rows: int, context: int) -> None:
        """Bring that many requests to where they only decode.

        Args:
            context: Tokens of each prompt.
        """
        self._split_from(NEVER)
        tokens = self.config.model_config.max_model_len - context
        self.decoding = [self._add(at, context, tokens) for at in range(rows)]
        waiting = set(self.decoding)
        # Each step takes at least one request on.
        for _ in range(rows):
            if not waiting:
                break
            waiting -= {output.request_id for output in self.engine.step()}
        if waiting:
            raise RuntimeError(f"{rows} requests of {context} tokens do not fit.")

    def decode(self, stages: int) -> dict[str, Any]:
        """Milliseconds of one step of the requests that decode; see `_step`."""
        return self._step(len(self.decoding), stages)

    def end_decode(self) -> None:
        self.engine.abort_request(self.decoding)
        self.decoding = []

    def _add(self, number: int, length: int, tokens: int) -> str:
        from vllm import SamplingParams

        ids = [(number * 31 + at * 7) % 256 for at in range(length)]
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        self.engine.add_request(f"{number}", {"prompt_token_ids": ids}, params)
        return f"{number}"

    def _split_from(self, rows: int) -> None:
        parallel = self.config.parallel_config
        parallel.dbo_decode_token_threshold = rows
        parallel.dbo_prefill_token_threshold = rows

    def _step(self, requests: int, stages: int) -> dict[str, Any]:
        """Milliseconds of a step that gives each of the requests a token.

        Returns:
            The whole `step`, and what is `outside` of the model; for the attention
            role in one stage, `pre` and `post` in the model before the first and
            after the last exchange, and `layers` between two of them.
        """
        self._split_from(2 if stages == 2 else NEVER)
        before, self.exchanges = self.split, []
        begin = time.perf_counter_ns()
        outputs = self.engine.step()
        step = time.perf_counter_ns() - begin
        if len(outputs) != requests:
            raise RuntimeError(
                f"A step served {len(outputs)} requests, not {requests}: the others "
                "do not fit the cache of keys and values."
            )
        if (self.split > before) != (stages == 2):
            raise RuntimeError(f"A step of {requests} requests is not in {stages}.")
        first, last = self.model_ns
        result = {"step": step / 1e6, "outside": (step - (last - first)) / 1e6}
        if self.exchanges and stages == 1:
            moments = [first]
            for _, start, end in self.exchanges:
                moments += [start, end]
            moments.append(last)
            spans = [
                (end - start) / 1e6
                for start, end in zip(moments[::2], moments[1::2], strict=True)
            ]
            result |= {"pre": spans[0], "layers": spans[1:-1], "post": spans[-1]}
        return result


class Ffn:
    """The FFN role; notes how long it computes."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.v1.worker import afd_ffn_model_runner as module

        self.times: list[float] = []
        original = module.run_ffn_layer

        def timed(*args: Any) -> Any:
            begin = time.perf_counter_ns()
            output = original(*args)
            self.times.append((time.perf_counter_ns() - begin) / 1e6)
            return output

        module.run_ffn_layer = timed
        self.llm = LLM(**job["options"], afd_config=job["afd_config"])

    def versions(self) -> dict[str, str]:
        return vllm_versions()

    def layers(self) -> list[float]:
        """Milliseconds of each layer run since the last call."""
        times, self.times = self.times, []
        return times


def child(kind: str, job: dict[str, Any]) -> None:
    """Do what is asked on stdin, on some of the cores."""
    os.sched_setaffinity(0, job["cores"])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    program = answer(lambda: {"engine": Engine, "ffn": Ffn}[kind](job))
    # An attention server says goodbye first; the FFN role would wait for another.
    program.llm.llm_engine.engine_core.shutdown()


# The part that starts it, run by the workshop's own interpreter.


class Child(Program):
    """A child at work, on some of the cores."""

    def __init__(
        self, layout: Any, log: Path, kind: str, cores: Sequence[int], job: Any
    ) -> None:
        import sides

        side = sides.patched(layout)
        env = side.env("v2") | {
            "OMP_NUM_THREADS": str(len(cores)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        if "afd_config" in job:
            # The roles choose the runner by themselves.
            del env["VLLM_USE_V2_MODEL_RUNNER"]
        command = [str(side.python), str(Path(__file__).resolve()), "--child", kind]
        super().__init__([*command, json.dumps(job | {"cores": list(cores)})], env, log)


@dataclass
class Roles:
    """The two AFD roles of a model, and engines beside them, all of them running.

    Attributes:
        name: Of the benchmark, for the logs.
        options: Of every engine: those of `LLM`.
        attention, ffn: Cores of the roles.
        alone: Engines that do all: name and cores.
        afd: More of the roles' `afd_config`.
        start_timeout: Seconds that each may take to start.
        versions: Of what they run.
    """

    layout: Any
    name: str
    options: dict[str, Any]
    attention: Sequence[int]
    ffn: Sequence[int]
    alone: dict[str, Sequence[int]] = field(default_factory=dict)
    afd: dict[str, Any] = field(default_factory=dict)
    start_timeout: float = RUN_TIMEOUT_S
    versions: dict[str, str] = field(default_factory=dict)
    children: dict[str, Child] = field(default_factory=dict)

    def __enter__(self) -> Roles:
        from tools.process import free_ports

        (port,) = free_ports(1)

        def afd(role: str) -> dict[str, Any]:
            return {"afd_config": {"afd_role": role, "afd_port": port, **self.afd}}

        jobs = {
            "ffn": ("ffn", self.ffn, afd("ffn")),
            "attention": ("engine", self.attention, afd("attention")),
            **{name: ("engine", cores, {}) for name, cores in self.alone.items()},
        }
        try:
            for name, (kind, cores, job) in jobs.items():
                log = self.layout.reports / "bench" / f"{self.name}-{name}.log"
                job = job | {"options": OPTIONS | self.options}
                self.children[name] = Child(self.layout, log, kind, cores, job)
                # FFN answers when it listens; the others do not disturb each other.
                self.versions = self.children[name].read(self.start_timeout)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        # Attention before FFN, which would wait for another.
        for each in reversed(self.children.values()):
            each.stop()

    def ask(self, name: str, what: str, *arguments: Any) -> Any:
        """What a method of one of them returns."""
        return self.children[name].ask(what, *arguments)


if __name__ == "__main__":
    child(sys.argv[2], json.loads(sys.argv[3]))
