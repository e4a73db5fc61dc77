"""Which engines the tests need and what each runs; two of them at a time."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any

import sides
import workloads
from sides import Worker

from tools import checkpoint
from tools.layout import Layout

MLA = "tiny-deepseek-v2"
WORKLOADS = workloads.everything()
# Prompts that are run together, and each alone.
TOGETHER = WORKLOADS["decode-5"]


@dataclass(frozen=True)
class Kind:
    """An engine to start.

    Attributes:
        side: `patched` or `reference`.
        runner: Model runner, `v1` or `v2`.
        dbo: Whether it is given `--enable-dbo`.
    """

    side: str
    runner: str
    dbo: bool = False


REFERENCE = Kind("reference", "v1")
DBO = Kind("patched", "v2", dbo=True)
DBO_OFF = Kind("patched", "v1")


def runs(kind: Kind, model: str) -> dict[str, dict[str, Any]]:
    """What an engine of that kind runs.

    The keys are a workload's name for a run with DBO as the engine has it,
    `<name> unsplit` for one that is never split, `<fault>` for a negative control.
    """
    if model == MLA and kind is not DBO:
        return composition_runs()
    result = {name: load.spec(dbo=kind.dbo) for name, load in WORKLOADS.items()}
    if kind is DBO:
        result |= {
            fault: WORKLOADS[name].spec(fault=fault)
            for fault, name in workloads.CONTROLS.items()
        }
        if model == MLA:
            # Upstream's fault in the rotary embedding makes the unpatched engine
            # no reference, so it is this one with DBO off.
            result |= {
                f"{name} unsplit": load.spec(dbo=False)
                for name, load in WORKLOADS.items()
            }
    return result


def composition_runs() -> dict[str, dict[str, Any]]:
    """The same prompts in one batch and one by one."""
    spec = TOGETHER.spec(dbo=False)
    return {"together": spec} | {
        f"alone-{index}": spec | {"prompts": [prompt], "arrivals": [0]}
        for index, prompt in enumerate(TOGETHER.prompts)
    }


class Jobs:
    """Engines that are running or have run, by kind and model."""

    def __init__(self, layout: Layout, wanted: Iterable[tuple[Kind, str]]) -> None:
        self.layout = layout
        self.pool = ThreadPoolExecutor(max_workers=2)
        self.stopped = Event()
        self.workers: list[Worker] = []
        self.futures: dict[tuple[Kind, str], Future[dict[str, Any]]] = {}
        for kind, model in wanted:
            self._start(kind, model)

    def results(self, kind: Kind, model: str) -> dict[str, Any]:
        """Results of an engine by key, once it has ended."""
        return self._start(kind, model).result()

    def _start(self, kind: Kind, model: str) -> Future[dict[str, Any]]:
        key = (kind, model)
        if key not in self.futures:
            self.futures[key] = self.pool.submit(self._run, kind, model)
        return self.futures[key]

    def _run(self, kind: Kind, model: str) -> dict[str, Any]:
        side = getattr(sides, kind.side)(self.layout)
        folder = checkpoint.ensure(
            self.layout, model, sides.patched(self.layout).python
        )
        if self.stopped.is_set():
            raise RuntimeError("The tests are over.")
        worker = Worker(
            side,
            kind.runner,
            folder,
            runs(kind, model),
            self.layout.reports / "e2e",
            kind.dbo,
        )
        self.workers.append(worker)
        return worker.results()

    def stop(self) -> None:
        self.stopped.set()
        self.pool.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.process.kill()
        self.pool.shutdown(wait=True)
