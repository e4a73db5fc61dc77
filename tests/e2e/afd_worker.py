"""Runs workloads in engines of which some have AFD roles; they share one import.

A program of its own, `afd_worker.py JOB.json`, for the interpreter of the patched or
of the unpatched environment. Each engine is a forked process. An FFN role serves the
attention roles that name it, one after the other.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import vllm
from extension.loaded_modules import afd_modules
from forked import run_and_exit
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from worker import Engine

_FORK = multiprocessing.get_context("fork")
_ENGINE_TIMEOUT_S = 600
_STOP_TIMEOUT_S = 60


def serve(job: dict[str, Any], stop: Any) -> dict[str, Any]:
    """Be the FFN role until `stop` is set."""
    parent = os.getppid()
    llm = LLM(job["model"], **job["options"])
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    names = [name for name, _ in runner.model.named_parameters()]
    # Nobody sets it if the program is killed.
    while not stop.wait(1):
        if os.getppid() != parent:
            raise RuntimeError("The program that started this FFN role is gone.")
    llm.llm_engine.engine_core.shutdown()
    return {"parameters": names}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run the workloads of an engine, one with the attention role or with none."""
    engine = Engine(job["model"], job["options"])
    afd = getattr(engine.runner, "afd", None)
    connector = afd.session.connector if afd else None
    results = {}
    for number, (key, spec) in enumerate(job["runs"].items(), 1):
        print(f"[{number}/{len(job['runs'])}] {key}", flush=True)
        if hasattr(connector, "fault"):
            connector.fault = spec.get("connector_fault")
        before = dict(vars(afd.stats)) if afd else {}
        results[key] = engine.run(spec)
        after = vars(afd.stats) if afd else {}
        results[key]["afd"] = {name: after[name] - before[name] for name in before}
    report = {
        "compilation": engine.compilation,
        "results": results,
        "afd_modules": afd_modules(),
        "parameters": [name for name, _ in engine.runner.model.named_parameters()],
        # Of each MoE layer.
        "gate_on_ffn": [each.gate_on_ffn for each in afd.session.layers] if afd else [],
    }
    engine.llm.llm_engine.engine_core.shutdown()
    return report


def run_elsewhere(job: dict[str, Any]) -> dict[str, Any]:
    """Have an engine in a process of its own generate a little."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    llm = LLM(
        job["model"],
        worker_extension_cls="loaded_modules.LoadedModules",
        **job["options"],
    )
    llm.generate([{"prompt_token_ids": [1, 2, 3]}] * 4, use_tqdm=False)
    ((pid, modules),) = llm.collective_rpc("loaded_modules")
    llm.llm_engine.engine_core.shutdown()
    return {"here": afd_modules(), "there": modules, "elsewhere": pid != os.getpid()}


def be_refused(job: dict[str, Any]) -> dict[str, Any]:
    """Try to start an engine."""
    try:
        LLM(job["model"], **job["options"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


_KINDS = {"run": run, "run_elsewhere": run_elsewhere, "be_refused": be_refused}


class Child:
    """A forked process that returns what a function does."""

    def __init__(self, name: str, function: Any, *args: Any) -> None:
        self.name = name
        self._receiver, sender = _FORK.Pipe(duplex=False)
        self.process = _FORK.Process(
            target=self._main, args=(sender, function, *args), name=name
        )
        self.process.start()
        sender.close()

    @staticmethod
    def _main(sender: Any, function: Any, job: dict[str, Any], *rest: Any) -> None:
        def send() -> None:
            for name, value in job.get("env", {}).items():
                os.environ[name] = value
            sender.send(function(job, *rest))

        run_and_exit(send)

    def result(self, timeout: float) -> Any:
        """What the function has returned.

        Raises:
            RuntimeError: It failed or took too long.
        """
        if not self._receiver.poll(timeout):
            raise RuntimeError(f"{self.name} took longer than {timeout:.0f} s.")
        try:
            result = self._receiver.recv()
        except EOFError:
            self.process.join(_STOP_TIMEOUT_S)
            code = self.process.exitcode
            raise RuntimeError(f"{self.name} has ended with status {code}.") from None
        self.process.join(_STOP_TIMEOUT_S)
        return result


class Ffns:
    """FFN roles, each running while there are engines that need it."""

    def __init__(self, jobs: dict[str, Any], engines: dict[str, Any]) -> None:
        self._jobs = jobs
        self._last = {job["ffn"]: name for name, job in engines.items() if job["ffn"]}
        self._running: dict[str, tuple[Child, Any]] = {}
        self.reports: dict[str, Any] = {}

    def before(self, job: dict[str, Any]) -> None:
        name = job["ffn"]
        if name and name not in self._running:
            stop = _FORK.Event()
            child = Child(f"The FFN role {name}", serve, self._jobs[name], stop)
            self._running[name] = (child, stop)

    def after(self, engine: str, job: dict[str, Any]) -> None:
        name = job["ffn"]
        if self._last.get(name) == engine:
            child, stop = self._running[name]
            stop.set()
            self.reports[name] = child.result(_STOP_TIMEOUT_S)
            del self._running[name]

    def kill(self) -> None:
        for child, _ in self._running.values():
            child.process.kill()


def main(job_file: str) -> None:
    faulthandler.enable()
    job = json.loads(Path(job_file).read_text())
    for model in {engine["model"] for engine in job["engines"].values()}:
        # Asks a process of its own about the model, unless that is in a cache.
        EngineArgs(model).create_model_config()
    ffns = Ffns(job["ffns"], job["engines"])
    reports = {}
    try:
        for name, engine in job["engines"].items():
            print(f"==> {name}", flush=True)
            ffns.before(engine)
            child = Child(name, _KINDS[engine["kind"]], engine)
            try:
                reports[name] = child.result(_ENGINE_TIMEOUT_S)
            finally:
                child.process.kill()
            ffns.after(name, engine)
    finally:
        ffns.kill()
    report = {
        "vllm": str(Path(vllm.__file__).parent),
        "engines": reports,
        "ffns": ffns.reports,
    }
    Path(job["output"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
