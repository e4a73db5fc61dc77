"""What a handoff between two ubatches costs, and a split step that overlaps nothing.

1. Microseconds from where one ubatch's thread yields to where the other's goes on:
   with a bare `threading.Event` (the least that two threads need), `dbo_yield`, and
   the op `torch.ops.vllm.manual_dbo_yield` that models call. Short windows of each
   take turns, on one core and on all, with and without work before. The same is then
   measured between the layers of a real engine, to which loading the caches belongs.
2. Time of a step that is split against one of an engine without `--enable-dbo`, for
   some numbers of rows. On one device nothing overlaps, so this is what DBO costs
   before it gains anything. A second engine without DBO shows what two equal
   processes differ by.

`make bench ARGS='--only handoff'` runs it. `handoff.py --child MODEL [--dbo]` is the
part that the patched environment runs.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests" / "e2e")]

from program import RUN_TIMEOUT_S, Program, answer, vllm_versions  # noqa: E402

TARGET_US = 50
# Handoffs of a window, and windows of each way to hand off.
HANDOFFS, WINDOWS = 300, 100

# Each set has engines of its own: two equal processes differ by their memory's
# layout as long as they live.
SETS = 2
ROUNDS = 14
# Requests that decode together; tokens of one prompt.
SHAPES = [("decode", rows) for rows in (2, 8, 16)] + [
    ("prefill", rows) for rows in (32, 256, 1024)
]
# Timed steps of one run; the median counts.
STEPS = 3
MEASURES = ("step", "step_cpu", "model", "model_cpu")
LONGEST = max(rows for _, rows in SHAPES)


# Thread, and nanoseconds at begin and end of a call that hands off.
Call = tuple[int, int, int]
# Gives microseconds of each handoff, the threads doing some work before each.
Way = Callable[[Callable[[], Any]], list[float]]


# The part that runs in the patched environment. It imports vLLM where it needs it.


class Child:
    """One engine, and threads that hand off to each other."""

    def __init__(self, model: str, dbo: bool) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        options: dict[str, Any] = {}
        if dbo:
            options = {
                "enable_dbo": True,
                "dbo_decode_token_threshold": 2,
                "dbo_prefill_token_threshold": 2,
            }
        self.llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=LONGEST + 16,
            max_num_batched_tokens=LONGEST,
            max_num_seqs=16,
            disable_log_stats=True,
            seed=0,
            **options,
        )
        self.engine = self.llm.llm_engine
        executor = self.engine.engine_core.engine_core.model_executor
        worker = executor.driver_worker
        self.runner = getattr(worker, "worker", worker).model_runner
        self.split = 0
        # Of the last run of the model: seconds by the clock, seconds of CPU time.
        self.model_s = 0.0, 0.0
        if dbo:
            self._time(self.runner.ubatch_runner, "run")
        else:
            self._time(self.runner.model, "forward")

    def _time(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            clock, cpu = time.perf_counter(), time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.model_s = time.perf_counter() - clock, time.process_time() - cpu
                self.split += name == "run"

        setattr(owner, name, timed)

    def versions(self) -> dict[str, str]:
        return vllm_versions()

    def run(self, kind: str, rows: int) -> dict[str, float]:
        """Times of a step with that many rows: medians of `STEPS`.

        Returns:
            Seconds of the whole step by the clock (`step`) and of this process's
            CPU time (`step_cpu`), the same of the model alone (`model`,
            `model_cpu`); how many of the steps were `split`.
        """
        times: list[tuple[float, ...]] = []
        split = 0
        for timed in self._steps(kind, rows):
            before = self.split
            clock, cpu = time.perf_counter(), time.process_time()
            self.engine.step()
            step = time.perf_counter() - clock, time.process_time() - cpu
            times.append(step + self.model_s)
            if not timed:
                times.pop()
            split += timed and self.split > before
        medians = map(statistics.median, zip(*times, strict=True))
        return dict(zip(MEASURES, medians, strict=True)) | {"split": split / len(times)}

    def _steps(self, kind: str, rows: int) -> Iterator[bool]:
        """Prepare step after step; yields whether the next one is to be timed."""
        if kind == "prefill":
            for number in range(STEPS):
                self._add(f"{number}", rows, 1)
                yield True
            return
        for number in range(rows):
            self._add(f"{number}", 4, STEPS + 1)
        # All prompts fit one step; what follows decodes.
        yield False
        for _ in range(STEPS):
            yield True

    def _add(self, name: str, prompt: int, tokens: int) -> None:
        from vllm import SamplingParams

        ids = [(len(name) * 31 + at * 7) % 256 for at in range(prompt)]
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        self.engine.add_request(name, {"prompt_token_ids": ids}, params)

    def handoffs(self) -> dict[str, Any]:
        """Microseconds of one handoff, by condition and by how it is made.

        The threads hand off at once or do some of a layer's work before, and may use
        any core or one only: where the other thread is woken decides what the least
        is, and Linux keeps to its choice for long.
        """
        import torch
        from vllm.v1.worker import ubatching

        tensor = torch.ones(4)
        op = torch.ops.vllm.manual_dbo_yield
        ways: dict[str, Way] = {
            "event": _event_window,
            "dbo_yield": partial(self._ubatch_window, ubatching.dbo_yield),
            "op": partial(self._ubatch_window, lambda: op(tensor)),
        }
        left, right = torch.ones(16, 512), torch.ones(512, 512)
        cores = os.sched_getaffinity(0)
        conditions: dict[str, tuple[set[int], Callable[[], Any]]] = {
            "one_core": ({min(cores)}, lambda: None),
            "any_core": (cores, lambda: None),
            "any_core_after_work": (cores, lambda: torch.mm(left, right)),
        }
        windows: dict[tuple[str, str], list[list[float]]] = {
            (condition, way): [] for condition in conditions for way in ways
        }
        order = random.Random(0)
        try:
            # The first round warms up.
            for number in range(WINDOWS + 1):
                for condition, way in order.sample(list(windows), len(windows)):
                    affinity, work = conditions[condition]
                    # New threads inherit it.
                    os.sched_setaffinity(0, affinity)
                    found = ways[way](work)
                    if number:
                        windows[condition, way].append(found)
        finally:
            os.sched_setaffinity(0, cores)
        result: dict[str, Any] = {condition: {} for condition in conditions}
        for (condition, way), found in windows.items():
            summary = result[condition][way] = _summary(found)
            floor = result[condition]["event"]["median"]
            summary["median_to_event"] = round(summary["median"] / floor, 2)
        result["op_outside_of_a_ubatch"] = {"median": _idle_op(op, tensor)}
        return result

    def _ubatch_window(
        self, hand_off: Callable[[], None], work: Callable[[], Any]
    ) -> list[float]:
        import torch
        from vllm.forward_context import (
            create_forward_context,
            override_forward_context,
        )
        from vllm.utils.torch_utils import current_stream
        from vllm.v1.worker.ubatching import make_ubatch_contexts

        config = self.engine.vllm_config
        contexts = make_ubatch_contexts(
            2,
            compute_stream=current_stream(),
            comm_stream=torch.cuda.Stream(),
            forward_contexts=[create_forward_context({}, config) for _ in range(2)],
            ready_barrier=threading.Barrier(3),
        )
        calls: list[Call] = []

        def body(context: Any) -> None:
            with torch.inference_mode(), context:
                _calls(hand_off, work, calls)

        run = contexts[0].run
        with override_forward_context(None):
            run.start(
                [threading.Thread(target=body, args=(context,)) for context in contexts]
            )
            run.finish()
        return list(_across(calls))

    def handoffs_in_engine(self) -> dict[str, Any]:
        """The same between the layers of a real model, with little and much to do."""
        from vllm.v1.worker import ubatching

        found: list[Call] = []
        original = ubatching.dbo_yield

        def stamped() -> None:
            before = time.perf_counter_ns()
            original()
            found.append((threading.get_ident(), before, time.perf_counter_ns()))

        ubatching.dbo_yield = stamped
        result = {}
        try:
            for kind, rows in (("decode", 2), ("prefill", 256)):
                window: list[list[float]] = []
                for _ in range(30):
                    found.clear()
                    self.run(kind, rows)
                    window.append(list(_across(found)))
                result[f"{kind}-{rows}"] = _summary(window)
        finally:
            ubatching.dbo_yield = original
        return result


def _event_window(work: Callable[[], Any]) -> list[float]:
    events = threading.Event(), threading.Event()
    calls: list[Call] = []

    def body(index: int) -> None:
        mine, other = events[index], events[1 - index]

        def hand_off() -> None:
            other.set()
            mine.wait()
            mine.clear()

        mine.wait()
        mine.clear()
        _calls(hand_off, work, calls)
        other.set()

    threads = [threading.Thread(target=body, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    events[0].set()
    for thread in threads:
        thread.join()
    return list(_across(calls))


def _calls(
    hand_off: Callable[[], None], work: Callable[[], Any], calls: list[Call]
) -> None:
    thread = threading.get_ident()
    for _ in range(HANDOFFS // 2):
        work()
        before = time.perf_counter_ns()
        hand_off()
        calls.append((thread, before, time.perf_counter_ns()))


def _across(calls: Sequence[Call]) -> Iterator[float]:
    """Microseconds from where a thread calls to where the other's call returns."""
    moments = sorted(
        (moment, which, thread)
        for thread, *both in calls
        for which, moment in enumerate(both)
    )
    for (begin, first, caller), (end, second, thread) in pairwise(moments):
        # Otherwise the other thread came back in its first call or left.
        if (first, second) == (0, 1) and caller != thread:
            yield (end - begin) / 1000


def _summary(windows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Medians over windows of each one's median and 99th percentile."""
    windows = [sorted(window) for window in windows if len(window) > 1]
    medians = [statistics.median(window) for window in windows]
    tails = [window[int(len(window) * 0.99)] for window in windows]
    low, _, high = statistics.quantiles(medians, n=4)
    every = sorted(value for window in windows for value in window)
    return {
        "median": round(statistics.median(medians), 1),
        "median_quartiles": [round(low, 1), round(high, 1)],
        "p99": round(statistics.median(tails), 1),
        "p99_of_all": round(every[int(len(every) * 0.99)], 1),
        "handoffs": len(every),
    }


def _idle_op(op: Any, tensor: Any, count: int = 200) -> float:
    """Microseconds of the op where no ubatch runs."""
    times = []
    for _ in range(WINDOWS):
        start = time.perf_counter_ns()
        for _ in range(count):
            op(tensor)
        times.append((time.perf_counter_ns() - start) / 1000 / count)
    return round(statistics.median(times), 2)


def child(model: str, dbo: bool) -> None:
    """Do what is asked on stdin."""
    answer(lambda: Child(model, dbo))


# The part that starts it, run by the workshop's own interpreter.


class Engine(Program):
    """A child at work."""

    def __init__(self, layout: Any, model: Path, dbo: bool, log: Path) -> None:
        import sides

        side = sides.patched(layout)
        command = [str(side.python), str(Path(__file__).resolve())]
        command += ["--child", str(model), *(["--dbo"] if dbo else [])]
        super().__init__(command, side.env("v2"), log)


KINDS = {"dbo": True, "off": False, "control": False}


def measure(layout: Any, model: Path) -> dict[str, Any]:
    from tools.ui import step

    rows: dict[tuple[str, int], list[dict[str, dict[str, float]]]] = {
        shape: [] for shape in SHAPES
    }
    about: dict[str, Any] = {}
    for number in range(SETS):
        engines: dict[str, Engine] = {}
        try:
            with step(f"Start of the engines {number + 1} of {SETS}"):
                # Each is started first once, and one after the other.
                names = list(KINDS)
                for name in names[number % 3 :] + names[: number % 3]:
                    log = layout.reports / "bench" / f"handoff-{name}.log"
                    engines[name] = Engine(layout, model, KINDS[name], log)
                    about["versions"] = engines[name].read(RUN_TIMEOUT_S)
            if number == 0:
                with step("Handoffs"):
                    about["load_at_handoffs"] = round(os.getloadavg()[0], 1)
                    about["handoff_us"] = engines["dbo"].ask("handoffs")
                    about["handoff_us"]["in_engine"] = engines["dbo"].ask(
                        "handoffs_in_engine"
                    )
            with step(f"Split steps against whole ones {number + 1} of {SETS}"):
                order = random.Random(number)
                for round_ in range(ROUNDS + 1):
                    for shape in SHAPES:
                        found = {
                            name: engines[name].ask("run", *shape)
                            for name in order.sample(names, len(names))
                        }
                        # The first round warms up.
                        if round_:
                            rows[shape].append(found)
        finally:
            for engine in engines.values():
                engine.stop()
    return about | {"split_to_whole": compare(rows)}


def compare(rows: dict[tuple[str, int], list[dict[str, Any]]]) -> dict[str, Any]:
    """Ratios of time, paired by round, for each shape and measure."""
    from report import spread

    result: dict[str, Any] = {
        "what": "time of a step with DBO to one without, paired by round; above 1: "
        "DBO costs",
        "runner": "V2",
        "sets": SETS,
        "rounds_per_set": ROUNDS,
    }
    for (kind, count), found in rows.items():
        if any(row["dbo"]["split"] != 1 for row in found):
            raise RuntimeError(f"Not every step of {kind} {count} was split.")
        result[f"{kind}-{count}"] = {
            measure: {
                "dbo_to_off": spread(
                    [
                        row["dbo"][measure]
                        / statistics.fmean(
                            row[name][measure] for name in ("off", "control")
                        )
                        for row in found
                    ]
                ),
                "off_to_off": spread(
                    [row["control"][measure] / row["off"][measure] for row in found]
                ),
            }
            for measure in MEASURES
        }
    return result


def main() -> None:
    from report import keep, machine, output_file

    from tools import checkpoint
    from tools.layout import Layout

    output = output_file(__doc__)
    layout = Layout(ROOT)
    # Below 0 where the machine could not be left alone; the results say so.
    niceness = os.nice(0)
    prefix = f"nice -n {niceness} " if niceness else ""
    about = {
        "command": f"{prefix}make bench ARGS='--only handoff'",
        "machine": machine(),
        "target_us": TARGET_US,
    }
    model = checkpoint.ensure(layout)
    result = about | {"model": model.name} | measure(layout, model)
    result["load_after"] = round(os.getloadavg()[0], 1)
    print(json.dumps(result, indent=2))
    keep(layout, output, result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], dbo="--dbo" in sys.argv[3:])
    else:
        main()
