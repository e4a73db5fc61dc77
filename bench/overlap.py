"""What a step gains from AFD in two stages, and how far that is from ideal overlap.

One core a role. In one run, and taking turns: one engine that does all on one thread
and on two, AFD in one stage and in two (one engine, whose threshold is moved), and
half of each step in one stage. From the times of the halves' layers follows the ideal
schedule: each role works on the stages in order, layer by layer, a layer of a stage
begins when its predecessor on the other role has ended, and what travels takes no
time. Only prefill is measured, whose steps are as long as one likes; what Triton's
interpreter costs outside of the model is told apart.

`make bench ARGS='--only overlap'` runs it. `overlap.py --child KIND JSON` is the part
that the patched environment runs.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests" / "e2e")]

from program import RUN_TIMEOUT_S, Program, answer, vllm_versions  # noqa: E402

ROWS = (64, 256, 512, 1024, 2048)
# From here on a two-stage step is to be within `TARGETS` of the ideal schedule.
LARGE = 256
TARGETS = {"small": 1.15, "large": 1.05, "monolithic": 1.05}
DTYPES = ("bfloat16", "float32")
ROUNDS = 7

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


def prompts_of(rows: int) -> list[int]:
    """Lengths of the prompts of a step, so that both halves are alike."""
    length = min(128, rows // 2)
    return [length] * (rows // length)


# The part that runs in the patched environment. It imports vLLM where it needs it.


class Engine:
    """An engine that does all, or one with the attention role."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        afd = job.get("afd_config")
        options: dict[str, Any] = {}
        if afd:
            options = {"afd_config": afd, "enable_dbo": True}
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
        """Milliseconds of one prefill step of that many rows.

        Returns:
            The whole `step`, and what is `outside` of the model; for the attention
            role in one stage, `pre` and `post` in the model before the first and
            after the last exchange, and `layers` between two of them.
        """
        from vllm import SamplingParams

        parallel = self.config.parallel_config
        parallel.dbo_prefill_token_threshold = 2 if stages == 2 else 10**9
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        for number, length in enumerate(prompts_of(rows)):
            ids = [(number * 31 + at * 7) % 256 for at in range(length)]
            self.engine.add_request(f"{number}", {"prompt_token_ids": ids}, params)
        before, self.exchanges = self.split, []
        begin = time.perf_counter_ns()
        self.engine.step()
        step = time.perf_counter_ns() - begin
        if (self.split > before) != (stages == 2):
            raise RuntimeError(f"{rows} rows did not run in {stages} stages.")
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
        self, layout: Any, name: str, kind: str, cores: Sequence[int], job: Any
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
        log = layout.reports / "bench" / f"overlap-{name}.log"
        super().__init__([*command, json.dumps(job | {"cores": list(cores)})], env, log)


def ideal_ms(
    pre: float, layers: Sequence[float], post: float, ffn: Sequence[float]
) -> float:
    """Length of the ideal schedule of two equal stages, fill included.

    Args:
        pre: Attention's milliseconds of a half before its first exchange.
        layers: Between two exchanges; one less than there are.
        post: After the last one.
        ffn: FFN's, layer by layer.
    """
    attention = [pre, *layers]
    at = at_ffn = 0.0
    answered = [0.0, 0.0]
    for mine, theirs in zip(attention, ffn, strict=True):
        for stage in (0, 1):
            at = max(at, answered[stage]) + mine
            at_ffn = max(at_ffn, at) + theirs
            answered[stage] = at_ffn
    for stage in (0, 1):
        at = max(at, answered[stage]) + post
    return at


@dataclass
class Group:
    """The engines of a model in a dtype, all of them running."""

    layout: Any
    config: dict[str, Any]
    dtype: str
    folder: Path

    def __enter__(self) -> Group:
        from tools.process import free_ports

        (self.folder / "config.json").write_text(json.dumps(self.config))
        (port,) = free_ports(1)
        options = {
            "model": str(self.folder),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "max_model_len": 256,
            "max_num_batched_tokens": max(ROWS),
            "max_num_seqs": max(map(len, map(prompts_of, ROWS))),
            "disable_log_stats": True,
            "seed": 0,
        }
        one, other = sorted(os.sched_getaffinity(0))[:2]

        def afd(role: str) -> dict[str, Any]:
            return {"afd_config": {"afd_role": role, "afd_port": port}}

        jobs = {
            "ffn": ("ffn", [other], afd("ffn")),
            "attention": ("engine", [one], afd("attention")),
            "mono_1": ("engine", [one], {}),
            "mono_2": ("engine", [one, other], {}),
        }
        self.children: dict[str, Child] = {}
        try:
            for name, (kind, cores, job) in jobs.items():
                self.children[name] = Child(
                    self.layout, name, kind, cores, job | {"options": options}
                )
                # FFN answers when it listens; the others do not disturb each other.
                self.versions = self.children[name].read(RUN_TIMEOUT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for name in ("attention", "ffn", "mono_1", "mono_2"):
            if name in self.children:
                self.children[name].stop()

    def measure(self, rows: int, order: random.Random) -> dict[str, Any]:
        """One round: each kind of step once."""
        kinds = ["mono_1", "mono_2", "one_stage", "two_stages", "half"]
        found: dict[str, Any] = {}
        for kind in order.sample(kinds, len(kinds)):
            if kind.startswith("mono"):
                found[kind] = self.children[kind].ask("run", rows)
                continue
            attention, ffn = self.children["attention"], self.children["ffn"]
            ffn.ask("layers")
            stages = 2 if kind == "two_stages" else 1
            found[kind] = attention.ask(
                "run", rows // 2 if kind == "half" else rows, stages
            )
            found[kind]["ffn"] = ffn.ask("layers")
        return found


def summarise(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, and what follows from them, in milliseconds."""

    def median(kind: str, key: str) -> float:
        return statistics.median(each[kind][key] for each in rounds)

    def medians(kind: str, key: str) -> list[float]:
        columns = zip(*(each[kind][key] for each in rounds), strict=True)
        return [statistics.median(column) for column in columns]

    def attention(kind: str) -> float:
        parts = sum(medians(kind, "layers"))
        return parts + median(kind, "pre") + median(kind, "post")

    steps = {
        kind: median(kind, "step")
        for kind in ("mono_1", "mono_2", "one_stage", "two_stages")
    }
    ideal = median("two_stages", "outside") + ideal_ms(
        median("half", "pre"),
        medians("half", "layers"),
        median("half", "post"),
        medians("half", "ffn"),
    )
    one, two = steps["one_stage"], steps["two_stages"]
    ratios = {
        "ratio_to_ideal": two / ideal,
        "overlap_efficiency": (one - two) / (one - ideal),
        "gain": one / two,
        "ratio_to_monolithic": two / steps["mono_2"],
        "ratio_to_monolithic_1_thread": two / steps["mono_1"],
    }
    low, high = statistics.quantiles(
        (each["two_stages"]["step"] / ideal for each in rounds), n=4
    )[::2]
    times = steps | {
        "ideal": ideal,
        "outside": median("two_stages", "outside"),
        "attention_whole": attention("one_stage"),
        "attention_halves": 2 * attention("half"),
        "ffn_whole": sum(medians("one_stage", "ffn")),
        "ffn_halves": 2 * sum(medians("half", "ffn")),
    }
    return (
        {name: round(value, 3) for name, value in ratios.items()}
        | {"ratio_to_ideal_quartiles": [round(low, 3), round(high, 3)]}
        | {"ms": {name: round(value, 1) for name, value in times.items()}}
    )


def measure(layout: Any) -> dict[str, Any]:
    from tools.ui import say, step

    result: dict[str, Any] = {"configurations": {}}
    for model, config in MODELS.items():
        for dtype in DTYPES:
            name = f"{model} {dtype}"
            with (
                step(f"{name}: start of the engines"),
                tempfile.TemporaryDirectory() as folder,
                Group(layout, config, dtype, Path(folder)) as group,
            ):
                result["versions"] = group.versions
                order = random.Random(0)
                found = {}
                for rows in ROWS:
                    # The first round warms up.
                    rounds = [group.measure(rows, order) for _ in range(ROUNDS + 1)]
                    found[rows] = summarise(rounds[1:])
                    say(f"    {name}, {rows} rows: {found[rows]}")
                result["configurations"][name] = found
    everything = result["configurations"].values()
    result["worst_ratio_to_ideal"] = max(
        found[rows]["ratio_to_ideal"]
        for found in everything
        for rows in ROWS
        if rows >= LARGE
    )
    result["worst_ratio_to_ideal_at_64"] = max(
        found[64]["ratio_to_ideal"] for found in everything
    )
    return result


def table(result: dict[str, Any]) -> str:
    head = (
        "rows  monolithic 1, 2 threads  AFD 1, 2 stages   ideal  to ideal  "
        "efficiency  to monolithic   A, F of halves"
    )
    lines = []
    for name, found in result["configurations"].items():
        lines += [name, head]
        for rows, row in found.items():
            ms = row["ms"]
            lines.append(
                f"{rows:>4}  {ms['mono_1']:>11.1f} {ms['mono_2']:>11.1f}"
                f" {ms['one_stage']:>9.1f} {ms['two_stages']:>7.1f}"
                f" {ms['ideal']:>7.1f} {row['ratio_to_ideal']:>9.3f}"
                f" {row['overlap_efficiency']:>11.2f}"
                f" {row['ratio_to_monolithic']:>14.3f}"
                f" {ms['attention_halves']:>9.1f} {ms['ffn_halves']:>7.1f}"
            )
    return "\n".join(lines)


def draw(result: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = result["configurations"]
    figure, axes = pyplot.subplots(
        1, len(found), figsize=(4 * len(found), 4), sharey=True, layout="constrained"
    )
    for axis, (name, by_rows) in zip(axes, found.items(), strict=True):
        rows = list(by_rows)
        for kind, label in (
            ("one_stage", "AFD, one stage"),
            ("mono_1", "one engine, 1 thread"),
            ("mono_2", "one engine, 2 threads"),
            ("two_stages", "AFD, two stages"),
        ):
            ratios = [by_rows[n]["ms"][kind] / by_rows[n]["ms"]["ideal"] for n in rows]
            axis.plot(rows, ratios, marker="o", label=label)
        axis.axhline(1, color="gray", linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xticks(rows, [str(n) for n in rows])
        axis.set_xlabel("rows of a prefill step")
        axis.set_title(name)
    axes[0].set_ylabel("time of a step / ideal overlap")
    axes[0].legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    from report import keep, machine, output_file

    from tools.layout import Layout

    output = output_file(__doc__)
    layout = Layout(ROOT)
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("Two cores are needed, one for each role.")
    about = {
        "command": "make bench ARGS='--only overlap'",
        "machine": machine(),
        "targets": TARGETS,
        "rounds": ROUNDS,
    }
    result = about | measure(layout)
    keep(layout, output, result)
    draw(result, output.with_suffix(".png"))
    print(table(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()
