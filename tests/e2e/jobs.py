"""Which engines the tests need and what each runs; two of them at a time."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import sides
import workloads
from sides import Kind, Worker

from tools import checkpoint
from tools.layout import Layout

MLA = "tiny-deepseek-v2"
WORKLOADS = workloads.everything()
SHARED = [name for name in WORKLOADS if name.startswith("shared-")]
IN_EVERY_MODE = (*workloads.IN_EVERY_MODE, *SHARED)
# Prompts that are run together, and each alone.
TOGETHER = WORKLOADS["decode-5"]


REFERENCE = Kind("reference", "v1")
DBO = Kind("patched", "v2", dbo=True)
DBO_OFF = Kind("patched", "v1")


def runs(kind: Kind, model: str) -> dict[str, dict[str, Any]]:
    """What an engine of that kind runs.

    The keys are a workload's name for a run with DBO as the engine has it,
    `<name> unsplit` for one that is never split, `<fault>` for a negative control.
    """
    if kind.prefix or kind.mode != "eager":
        return mode_runs(kind)
    if model == MLA and kind != DBO:
        return composition_runs()
    result = {name: load.spec(dbo=kind.dbo) for name, load in WORKLOADS.items()}
    if kind == REFERENCE:
        result[workloads.LONG_DECODE.name] = workloads.LONG_DECODE.spec(dbo=False)
    if kind == DBO:
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


def mode_runs(kind: Kind) -> dict[str, dict[str, Any]]:
    """What an engine runs that compiles or has a prefix cache.

    `<fault> <name>` is the key of a negative control.
    """
    result = {name: WORKLOADS[name].spec(dbo=kind.dbo) for name in IN_EVERY_MODE}
    if kind.dbo:
        result |= {
            f"{fault} {name}": WORKLOADS[name].spec(fault=fault)
            for fault, name in mode_controls(kind)
        }
    return result


def mode_controls(kind: Kind) -> list[tuple[str, str]]:
    """Faults, and the workloads that must betray them."""
    controls = [("second_seq_lens_off_by_one", "decode-5")]
    if kind.prefix:
        controls.append(("no_prefix_veto", "hit-before-its-writer"))
        # Once with many requests: it takes as long as without the fault.
        if kind.mode == "eager":
            controls.append(("no_prefix_veto", SHARED[0]))
    return controls


def composition_runs() -> dict[str, dict[str, Any]]:
    """The same prompts in one batch and one by one."""
    spec = TOGETHER.spec(dbo=False)
    return {"together": spec} | {
        f"alone-{index}": spec | {"prompts": [prompt], "arrivals": [0]}
        for index, prompt in enumerate(TOGETHER.prompts)
    }


class Jobs:
    """Engines that are running or have run, by kind and model."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.folder = layout.reports / "e2e"
        # Empty at first, so that what compiled engines run has been compiled now.
        self.folder.mkdir(parents=True, exist_ok=True)
        self.cache = Path(tempfile.mkdtemp(prefix="compiled-", dir=self.folder))
        self.pool = ThreadPoolExecutor(max_workers=2)
        self.stopped = Event()
        self.workers: list[Worker] = []
        self.futures: dict[tuple[Kind, str], Future[dict[str, Any]]] = {}

    def results(self, kind: Kind, model: str) -> dict[str, Any]:
        """Results of an engine by key, once it has ended."""
        return self.start(kind, model).result()

    def start(self, kind: Kind, model: str) -> Future[dict[str, Any]]:
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
        worker = Worker(side, kind, folder, runs(kind, model), self.folder, self.cache)
        self.workers.append(worker)
        return worker.results()

    def stop(self) -> None:
        self.stopped.set()
        self.pool.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.process.kill()
        self.pool.shutdown(wait=True)
        shutil.rmtree(self.cache, ignore_errors=True)


def expected(jobs: Jobs, model: str, name: str) -> dict[str, Any]:
    """Results of the same workload that was never split, in eager mode."""
    if model == MLA:
        # Upstream's fault in the rotary embedding makes the unpatched engine no
        # reference.
        return jobs.results(DBO, model)[f"{name} unsplit"]
    return jobs.results(REFERENCE, model)[name]
