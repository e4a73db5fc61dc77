"""What the series costs when DBO is off, and whether a server slows down.

1. Throughput of the patched vLLM with DBO off against the unpatched, in process,
   with the same model runner (V1). Runs are interleaved, and a second unpatched
   engine shows what two equal processes differ by.
2. Latency of later requests against the first ones on a patched server with DBO, for
   short and for long prompts. An unpatched server that takes turns with it shows what
   the machine itself does meanwhile.

`make bench` runs it. Only ratios are kept: the times are this machine's.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]

import sides  # noqa: E402
from program import Program  # noqa: E402
from report import keep, machine, output_file, spread  # noqa: E402
from servers import DBO_FLAGS, Server  # noqa: E402

from tools import checkpoint  # noqa: E402
from tools.layout import Layout  # noqa: E402
from tools.ui import step  # noqa: E402

START_TIMEOUT_S = 180
RUN_TIMEOUT_S = 60
# Each set has engines of its own: two equal processes differ by their memory's
# layout as long as they live.
SETS = 3
ROUNDS = 24
WARM_UP = 3

BATCHES = 60
# Of that many batches at the begin and at the end the medians are compared.
EDGE = 20
SHORT, LONG = 8, 1500


class Engine(Program):
    """bench/engine.py at work."""

    def __init__(self, side: sides.Side, model: Path, log: Path) -> None:
        command = [str(side.python), str(ROOT / "bench" / "engine.py"), str(model)]
        super().__init__(command, side.env("v1"), log)

    def wait_ready(self) -> dict[str, str]:
        """Versions of what it runs."""
        return self.read(START_TIMEOUT_S)

    def run(self) -> dict[str, float]:
        """Tokens per second of one run, by the clock and of this process's CPU time.

        The second is the steadier where other processes want the cores too.
        """
        self.tell("run")
        result = self.read(RUN_TIMEOUT_S)
        return {
            "throughput": result["tokens"] / result["seconds"],
            "tokens_per_cpu_second": result["tokens"] / result["cpu_seconds"],
        }


def throughput(layout: Layout, model: Path) -> dict[str, Any]:
    """Ratios of throughput: patched to unpatched, and unpatched to unpatched."""
    kinds = {
        "reference": sides.reference(layout),
        "control": sides.reference(layout),
        "patched": sides.patched(layout),
    }
    rows: list[dict[str, dict[str, float]]] = []
    versions: dict[str, Any] = {}
    for number in range(SETS):
        with step(f"Throughput, DBO off: engines {number + 1} of {SETS}"):
            rows += _throughput_set(layout, model, kinds, versions, number)
    return {
        "what": "tokens per second, paired by round; above 1: the first is faster",
        "runner": "V1",
        "sets": SETS,
        "rounds_per_set": ROUNDS,
        "patched_to_unpatched": compare(rows, "patched", ("reference", "control")),
        "unpatched_to_unpatched": compare(rows, "control", ("reference",)),
        "versions": versions,
    }


def _throughput_set(
    layout: Layout,
    model: Path,
    kinds: dict[str, sides.Side],
    versions: dict[str, Any],
    number: int,
) -> list[dict[str, dict[str, float]]]:
    engines: dict[str, Engine] = {}
    try:
        # Each is started first once: the first one was seen to be slower for good.
        names = list(kinds)
        for name in names[number % 3 :] + names[: number % 3]:
            log = layout.reports / "bench" / f"engine-{name}.log"
            engines[name] = Engine(kinds[name], model, log)
            # One after the other, so that no start disturbs another.
            versions[name] = engines[name].wait_ready()
        for _ in range(WARM_UP):
            for engine in engines.values():
                engine.run()
        rows = []
        # Each follows each other equally often.
        order = random.Random(number)
        for _ in range(ROUNDS):
            rows.append(
                {name: engines[name].run() for name in order.sample(names, len(names))}
            )
        return rows
    finally:
        for engine in engines.values():
            engine.stop()


def compare(
    rows: Sequence[dict[str, dict[str, float]]], name: str, others: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Ratios of the engine `name` to the mean of `others`, for each measure."""
    return {
        measure: spread(
            [
                row[name][measure]
                / statistics.fmean(row[other][measure] for other in others)
                for row in rows
            ]
        )
        for measure in ("throughput", "tokens_per_cpu_second")
    }


def latency(layout: Layout, model: Path) -> dict[str, Any]:
    """Later requests against the first ones, two at a time so that steps split."""
    folder = layout.reports / "bench"
    flags = ["--max-model-len=2048"]
    lengths = {"short_prompts": SHORT, "long_prompts": LONG}
    rng = random.Random(0)
    servers: dict[str, Server] = {}
    try:
        with step("Latency with DBO: start of the servers"):
            for name, side, runner, more in (
                ("patched_dbo", sides.patched(layout), "v2", DBO_FLAGS),
                ("unpatched", sides.reference(layout), "v1", ()),
            ):
                servers[name] = Server(side, runner, model, folder, [*flags, *more])
                servers[name].wait_ready()
        times: dict[str, dict[str, list[float]]] = {
            name: {kind: [] for kind in lengths} for name in servers
        }
        with step(f"Latency with DBO: {BATCHES} batches of short and of long prompts"):
            for _ in range(BATCHES):
                for kind, length in lengths.items():
                    prompts = _prompts(rng, length)
                    for name, server in servers.items():
                        times[name][kind].append(_batch(server, prompts))
        # Afterwards, so that nothing is measured that does not belong to a server.
        servers["patched_dbo"].watch_steps()
        for length in lengths.values():
            _batch(servers["patched_dbo"], _prompts(rng, length))
        steps = servers["patched_dbo"].watched_steps()
    finally:
        for server in servers.values():
            server.stop()
    split = sum(bool(each["slices"]) for each in steps)
    return {
        "what": "median latency of later requests to that of the first; below 1: "
        "later ones are faster",
        "batches": BATCHES,
        "compared": EDGE,
        "prompt_tokens": lengths,
        "split_steps": round(split / len(steps), 3),
        **{
            name: {kind: later(found) for kind, found in kinds.items()}
            for name, kinds in times.items()
        },
    }


def later(times: Sequence[float]) -> float:
    """Median of the last to that of the first."""
    return round(statistics.median(times[-EDGE:]) / statistics.median(times[:EDGE]), 4)


def _prompts(rng: random.Random, length: int) -> list[list[int]]:
    return [[rng.randrange(256) for _ in range(length)] for _ in range(2)]


def _batch(server: Server, prompts: list[list[int]]) -> float:
    start = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(server.complete, prompts))
    return time.perf_counter() - start


def main() -> None:
    output = output_file(__doc__)
    layout = Layout(ROOT)
    about = {"command": "make bench", "machine": machine()}
    model = checkpoint.ensure(layout)
    result = about | {
        "model": model.name,
        "throughput_dbo_off": throughput(layout, model),
        "latency_dbo_on": latency(layout, model),
    }
    print(json.dumps(result, indent=2))
    keep(layout, output, result)


if __name__ == "__main__":
    main()
