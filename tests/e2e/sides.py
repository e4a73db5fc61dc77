"""The two environments that are compared, and how to run programs in them.

`E2E_<SIDE>_PYTHON` and `E2E_<SIDE>_TREE` (SIDE: PATCHED or REFERENCE) name another
interpreter and another source tree than those that `make build` makes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads import BLOCK_SIZE

from tools.layout import Layout, venv_python
from tools.process import alive, stat

# Each engine computes on one thread, so that two run side by side on two cores and
# every sum is taken in the same order.
_COMMON_ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
_RUNNER_ENV = {
    "v1": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "v2": {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"},
}
_RUNNER_MODULES = {
    "v1": "vllm.v1.worker.cpu_model_runner",
    "v2": "vllm.v1.worker.cpu.model_runner",
}


@dataclass(frozen=True)
class Side:
    """An environment with a vLLM.

    Attributes:
        name: `patched` or `reference`.
        python: Its interpreter.
        tree: Source tree that it must import vLLM from.
        override: Whether `tree` must be put before what is installed.
    """

    name: str
    python: Path
    tree: Path
    override: bool = False

    @classmethod
    def find(cls, name: str, venv: Path, tree: Path) -> Side:
        python = os.environ.get(f"E2E_{name.upper()}_PYTHON")
        other = os.environ.get(f"E2E_{name.upper()}_TREE")
        return cls(
            name,
            Path(python) if python else venv_python(venv),
            Path(other) if other else tree,
            override=bool(other),
        )

    def env(self, runner: str) -> dict[str, str]:
        """Environment for a process of this side.

        Args:
            runner: Model runner, `v1` or `v2`. A CPU runs `v2` under Triton's
                interpreter, which only the patched side can.
        """
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("VLLM_", "TRITON_", "OMP_", "PYTHON"))
        }
        if self.override:
            clean["PYTHONPATH"] = str(self.tree)
        return clean | _COMMON_ENV | _RUNNER_ENV[runner]


def patched(layout: Layout) -> Side:
    return Side.find("patched", layout.venv, layout.tree)


def reference(layout: Layout) -> Side:
    return Side.find("reference", layout.base_venv, layout.base)


class Process:
    """A program in its own process group, its output in a log file."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        # Not in a session of its own: `make test` ends all that its stage started
        # by session, should this process be killed.
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                command,
                env=env,
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def wait(self, timeout: float) -> int | None:
        """Exit status, or None if it still runs after `timeout` seconds."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End every process of the group at once."""
        if self.members():
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(10)

    def members(self) -> list[int]:
        """Processes of the group that are still there, zombies left out."""
        return [each.pid for each in alive() if each.group == self.pid]

    def is_gone(self, timeout: float = 10) -> bool:
        """Whether no process of the group is left within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.members():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def tail(self, lines: int = 30) -> str:
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"... {self.log}:", *text[-lines:]])


def is_alive(pid: int) -> bool:
    """Whether there is such a process that is not a zombie."""
    return stat(pid) is not None


WORKER = Path(__file__).with_name("worker.py")
ENGINE_OPTIONS = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "seed": 0,
}
# How the model is run: as it is, as the graphs that Dynamo traces, as Inductor's code.
# The last is what vLLM does on a CPU unless it is told otherwise.
MODE_OPTIONS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "dynamo": {"compilation_config": {"mode": 2, "backend": "eager"}},
    "inductor": {},
}
_COMPILATION = {
    "eager": ["NONE", "inductor"],
    "dynamo": ["DYNAMO_TRACE_ONCE", "eager"],
    "inductor": ["DYNAMO_TRACE_ONCE", "inductor"],
}
PREFIX_OPTIONS: dict[bool, dict[str, Any]] = {
    False: {"enable_prefix_caching": False},
    True: {"enable_prefix_caching": True, "block_size": BLOCK_SIZE},
}
DBO_OPTIONS = {
    "enable_dbo": True,
    "dbo_decode_token_threshold": 2,
    "dbo_prefill_token_threshold": 2,
}


def engine_options(mode: str, dbo: bool, prefix: bool) -> dict[str, Any]:
    """Of an engine; see `Kind`."""
    return (
        ENGINE_OPTIONS
        | MODE_OPTIONS[mode]
        | PREFIX_OPTIONS[prefix]
        | (DBO_OPTIONS if dbo else {})
    )


def report_of(
    process: Process, side: Side, output: Path, timeout: float
) -> dict[str, Any]:
    """What a program of a side has written to `output`, once it has ended.

    Raises:
        RuntimeError: It failed, took longer than `timeout` seconds, or ran another
            vLLM than the side's.
    """
    try:
        code = process.wait(timeout)
    finally:
        process.kill()
    if code != 0:
        what = "took too long" if code is None else f"ended with status {code}"
        raise RuntimeError(f"The program {what}.\n{process.tail()}")
    report = json.loads(output.read_text())
    if not Path(report["vllm"]).is_relative_to(side.tree.resolve()):
        raise RuntimeError(f"{report['vllm']} is not in {side.tree}.")
    return report


@dataclass(frozen=True)
class Kind:
    """An engine to start.

    Attributes:
        side: `patched` or `reference`.
        runner: Model runner, `v1` or `v2`.
        dbo: Whether it is given `--enable-dbo`.
        mode: Key of `MODE_OPTIONS`.
        prefix: Whether it has a prefix cache.
    """

    side: str
    runner: str
    dbo: bool = False
    mode: str = "eager"
    prefix: bool = False

    def __str__(self) -> str:
        words = [self.side, self.runner]
        words += ["dbo"] * self.dbo + ["prefix"] * self.prefix
        return "-".join(words + [self.mode] * (self.mode != "eager"))

    @property
    def options(self) -> dict[str, Any]:
        """Of the engine."""
        return engine_options(self.mode, self.dbo, self.prefix)


class Worker:
    """tests/e2e/worker.py at work on a job.

    Args:
        side: Whose vLLM.
        kind: What it starts.
        model: Folder of a checkpoint.
        runs: What to run, as `Workload.spec` gives it, by key.
        folder: Where job, result and log are kept.
        cache: Where the engine keeps what it compiles.
    """

    def __init__(
        self,
        side: Side,
        kind: Kind,
        model: Path,
        runs: dict[str, dict[str, Any]],
        folder: Path,
        cache: Path,
    ) -> None:
        self.side, self.kind = side, kind
        name = f"{model.name}-{kind}"
        folder.mkdir(parents=True, exist_ok=True)
        self.output = folder / f"{name}.result.json"
        self.output.unlink(missing_ok=True)
        job = folder / f"{name}.job.json"
        job.write_text(
            json.dumps(
                {
                    "model": str(model),
                    "options": kind.options,
                    "runs": runs,
                    "output": str(self.output),
                }
            )
        )
        self.process = Process(
            [str(side.python), str(WORKER), str(job)],
            side.env(kind.runner)
            | {
                "VLLM_CACHE_ROOT": str(cache / "vllm"),
                "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            },
            folder / f"{name}.log",
        )

    def results(self, timeout: float = 600) -> dict[str, Any]:
        """Results by key, once the worker has ended.

        Raises:
            RuntimeError: It failed, took too long, or ran another vLLM, another
                model runner or another compilation mode than was asked for.
        """
        report = report_of(self.process, self.side, self.output, timeout)
        if report["runner"] != _RUNNER_MODULES[self.kind.runner]:
            raise RuntimeError(f"{report['runner']} ran, not {self.kind}.")
        if report["compilation"] != _COMPILATION[self.kind.mode]:
            raise RuntimeError(f"{report['compilation']} ran, not {self.kind}.")
        return report["results"]
