"""Engines with the attention role, the FFN roles they share, and what they run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import afd_models
import sides
from afd_models import AFD_MODELS
from jobs import DBO, REFERENCE, WORKLOADS, Jobs, expected
from sides import (
    ENGINE_OPTIONS,
    MODE_OPTIONS,
    Kind,
    Process,
    Side,
    engine_options,
    report_of,
)
from workloads import FULL

from tools import checkpoint
from tools.layout import Layout
from tools.process import free_ports

WORKER = Path(__file__).with_name("afd_worker.py")
EXTENSION = Path(__file__).with_name("extension")
# Of a program, and of each of its engines, on a machine that others use too.
START_TIMEOUT_S = 300
ENGINE_TIMEOUT_S = 120

_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"

# What eager engines with DBO run, and what all do.
BROAD = [
    name
    for name in WORKLOADS
    if not name.startswith(("shared-", "random-"))
    or name in ("random-0", "random-3", "random-5", "random-6")
]
NARROW = [
    "decode-1",
    "decode-5",
    "prefill-2",
    "prefill-101",
    "mixed",
    "chunked",
    "random-3",
    "hit-before-its-writer",
]
# What a connector does wrong -> workload that must betray it.
CONNECTOR_FAULTS = {"swapped_stages": "decode-4", "last_layer": "decode-5"}


@dataclass(frozen=True)
class Variant:
    """Settings of an engine with the attention role.

    Attributes:
        mode: Key of `MODE_OPTIONS`.
        dbo: Whether it has DBO.
        prefix: Whether it has a prefix cache.
        chunked: Whether it prefills in chunks.
        gate: `gate_placement` of both roles.
    """

    mode: str
    dbo: bool
    prefix: bool
    chunked: bool
    gate: str

    def __str__(self) -> str:
        flags = ("dbo", "prefix", "chunked")
        words = [self.mode, *(name for name in flags if getattr(self, name))]
        return "-".join([*words, f"gate_{self.gate}"])

    @property
    def options(self) -> dict[str, Any]:
        """Of the engine, without its role."""
        return engine_options(self.mode, self.dbo, self.prefix) | {
            "enable_chunked_prefill": self.chunked
        }

    @property
    def names(self) -> list[str]:
        """Workloads that it runs."""
        return BROAD if self.mode == "eager" and self.dbo else NARROW


@dataclass(frozen=True)
class Model:
    """A checkpoint and how it is tested.

    Attributes:
        name: Key of `tools.checkpoint.RECIPES`, or an architecture of `AFD_MODELS`.
        gates: Values of `gate_placement`.
        mla: Whether it attends with MLA, which on a CPU has neither a prefix cache
            nor chunked prefill.
        pairwise: Whether every two settings are tested together, not just two
            engines.
        dtype: What it is run in.
    """

    name: str
    gates: tuple[str, ...]
    mla: bool
    pairwise: bool = False
    dtype: str = "float32"

    def __str__(self) -> str:
        return self.name.removesuffix("ForCausalLM")

    @property
    def variants(self) -> list[Variant]:
        if self.dtype == "bfloat16":
            # Halves of a batch are rounded otherwise than the whole: without DBO.
            return [
                Variant("dynamo", False, True, False, self.gates[0]),
                Variant("eager", False, False, True, self.gates[-1]),
            ]
        if self.pairwise or FULL:
            return list(every_pair(self.gates, self.mla))
        cached = not self.mla
        return [
            Variant("dynamo", False, cached, False, self.gates[0]),
            Variant("eager", True, False, cached, self.gates[-1]),
        ]

    @property
    def unpatched(self) -> bool:
        """Whether the unpatched engine is the reference.

        Its rotary embedding for MLA is wrong on a CPU (test_rope_*).
        """
        return not self.mla

    @property
    def shares_reference(self) -> bool:
        """Whether the other tests have a reference of it."""
        return self.name in checkpoint.RECIPES

    @property
    def kinds(self) -> list[Kind]:
        """Engines of `Jobs` that give what it is compared with."""
        if not self.shares_reference:
            return []
        return [REFERENCE if self.unpatched else DBO]

    def folder(self, layout: Layout, side: Side) -> Path:
        if self.shares_reference:
            return checkpoint.ensure(layout, self.name, side.python)
        return afd_models.ensure(layout, self.name, side.python, side.tree)


def every_pair(gates: tuple[str, ...], mla: bool) -> Iterator[Variant]:
    """Engines in which every two settings come together; six are enough.

    The two engines of a mode differ in all other settings, and from mode to mode one
    of these changes sides.
    """
    for second in (False, True):
        for at, mode in enumerate(MODE_OPTIONS):
            dbo = second ^ (at == 0)
            yield Variant(
                mode,
                dbo,
                prefix=not mla and dbo ^ (at == 1),
                chunked=not mla and dbo ^ (at == 2),
                gate=gates[-1] if second else gates[0],
            )


MODELS = [
    Model("tiny-qwen3-moe", ("ffn", "attention"), mla=False, pairwise=True),
    Model("tiny-mixtral", ("auto",), mla=False, pairwise=True),
    Model("tiny-deepseek-v2", ("ffn", "attention"), mla=True, pairwise=True),
]
# What every `make test` runs beside these.
_ALWAYS = (
    "DeepseekV3ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "OlmoeForCausalLM",
    "GraniteMoeForCausalLM",
    "GptOssForCausalLM",
)
MODELS += [
    Model(
        model.architecture,
        model.gate_placements,
        mla=model.mla,
        dtype=model.dtype,
    )
    for model in AFD_MODELS
    if FULL or model.architecture in _ALWAYS
]
# Whose connector comes from outside vLLM and can be told to do wrong.
FAULTY = next(each for each in MODELS[0].variants if each.dbo and each.mode == "eager")
OUTSIDE = (MODELS[0], FAULTY.gate)


def runs(model: Model, variant: Variant) -> dict[str, Any]:
    result = {name: WORKLOADS[name].spec(dbo=variant.dbo) for name in variant.names}
    if (model, variant) == (OUTSIDE[0], FAULTY):
        result |= {
            fault: WORKLOADS[name].spec() | {"connector_fault": fault}
            for fault, name in CONNECTOR_FAULTS.items()
        }
    return result


def afd_config(role: str, gate: str, port: int, outside: bool = False) -> Any:
    config = {
        "afd_role": role,
        "afd_port": port,
        "gate_placement": gate,
        # Of two engines that compile side by side on a busy machine.
        "heartbeat_timeout_s": 60,
    }
    if outside:
        config |= {
            "afd_connector": "FaultyConnector",
            "afd_connector_module_path": "afd_connectors",
        }
    return {"afd_config": config}


@dataclass
class Program:
    """What one run of tests/e2e/afd_worker.py does.

    Attributes:
        name: Of its files.
        side: Whose vLLM it is.
        runner: Model runner of engines without a role, `v1` or `v2`.
        engines: Engines by name, as the worker takes them.
        ffns: FFN roles by name, likewise.
    """

    name: str
    side: Side
    runner: str = "v2"
    engines: dict[str, Any] = field(default_factory=dict)
    ffns: dict[str, Any] = field(default_factory=dict)

    def add(
        self,
        name: str,
        model: Path,
        options: dict[str, Any],
        kind: str = "run",
        ffn: str | None = None,
        runs: dict[str, Any] | None = None,
    ) -> None:
        """Add an engine; see `_KINDS` of the worker."""
        runner = self.side.env(self.runner)[_RUNNER_VARIABLE]
        self.engines[name] = {
            "kind": kind,
            "model": str(model),
            "options": self._options(model, options),
            "ffn": ffn,
            "runs": runs or {},
            # The attention role has to choose the runner by itself.
            "env": {} if "afd_config" in options else {_RUNNER_VARIABLE: runner},
        }

    @staticmethod
    def _options(model: Path, options: dict[str, Any]) -> dict[str, Any]:
        """With what the checkpoint needs: some have no tokenizer."""
        has_tokenizer = (model / "tokenizer.json").is_file()
        return options if has_tokenizer else options | {"skip_tokenizer_init": True}

    def add_pairs(self, model: Model, layout: Layout) -> None:
        """All engines of a model that have a role, and what they need."""
        folder = model.folder(layout, self.side)
        if not (model.unpatched or model.shares_reference):
            self.add(
                f"{model} monolithic",
                folder,
                Variant("eager", False, False, False, "").options
                | {"dtype": model.dtype},
                runs={name: WORKLOADS[name].spec(dbo=False) for name in BROAD},
            )
        for gate, port in zip(model.gates, free_ports(len(model.gates)), strict=True):
            outside = (model, gate) == OUTSIDE
            ffn = f"{model} {gate}"
            self.ffns[ffn] = {
                "model": str(folder),
                "options": ENGINE_OPTIONS
                | {"enforce_eager": True, "dtype": model.dtype}
                | afd_config("ffn", gate, port, outside),
            }
            for variant in model.variants:
                if variant.gate == gate:
                    self.add(
                        f"{model} {variant}",
                        folder,
                        variant.options
                        | {"dtype": model.dtype}
                        | afd_config("attention", gate, port, outside),
                        ffn=ffn,
                        runs=runs(model, variant),
                    )

    def run(
        self, folder: Path, started: Callable[[Process], None] | None = None
    ) -> dict[str, Any]:
        """What the worker reports: `engines` and `ffns`, by name.

        Args:
            folder: Where its files are kept.
            started: Called with the process.

        Raises:
            RuntimeError: It failed, took too long, or ran another vLLM.
        """
        folder.mkdir(parents=True, exist_ok=True)
        output, job = (
            folder / f"{self.name}.{kind}.json" for kind in ("result", "job")
        )
        output.unlink(missing_ok=True)
        job.write_text(
            json.dumps(
                {"engines": self.engines, "ffns": self.ffns, "output": str(output)}
            )
        )
        env = self.side.env(self.runner)
        del env[_RUNNER_VARIABLE]
        path = [str(EXTENSION), *filter(None, [env.get("PYTHONPATH")])]
        cache = folder / "cache"
        process = Process(
            [str(self.side.python), str(WORKER), str(job)],
            env
            | {
                "PYTHONPATH": ":".join(path),
                "VLLM_CACHE_ROOT": str(cache / "vllm"),
                # Inductor's own cache, in which equal code is found whatever the
                # engine's settings are, saves two thirds of the time.
                "VLLM_DISABLE_COMPILE_CACHE": "1",
                "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
            },
            folder / f"{self.name}.log",
        )
        if started:
            started(process)
        timeout = START_TIMEOUT_S + ENGINE_TIMEOUT_S * len(self.engines)
        return report_of(process, self.side, output, timeout)


def others() -> list[Model]:
    """Models whose engines share a program."""
    return [model for model in MODELS if not model.pairwise]


class Pairs:
    """Programs that are running or have run, two at a time, the longest first."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.folder = layout.reports / "e2e" / "afd"
        # Empty at first, so that what runs was compiled by these engines. What vLLM
        # has found out about the models is kept.
        shutil.rmtree(self.folder / "cache" / "inductor", ignore_errors=True)
        self.pool = ThreadPoolExecutor(max_workers=2)
        self.stopped = Event()
        self.processes: list[Process] = []
        self.futures: dict[str, Future[dict[str, Any]]] = {}

    def start(self, model: Model) -> None:
        """Start what gives the results of a model."""
        if model.pairwise:
            self._start(str(model), lambda: self._pairs(str(model), [model]))
        else:
            self._start("others", lambda: self._pairs("others", others()))
        if self._has_reference(model):
            self._start("reference", self._reference)

    def _start(self, name: str, run: Callable[[], Any]) -> Future[dict[str, Any]]:
        if name not in self.futures:
            self.futures[name] = self.pool.submit(run)
        return self.futures[name]

    def _pairs(self, name: str, models: list[Model]) -> dict[str, Any]:
        program = Program(name, sides.patched(self.layout))
        for model in models:
            program.add_pairs(model, self.layout)
        if OUTSIDE[0] in models:
            program.add(
                "plain",
                OUTSIDE[0].folder(self.layout, program.side),
                Variant("eager", True, False, True, "").options
                # The worker is in the engine's process.
                | {"distributed_executor_backend": "uni"},
                kind="run_elsewhere",
            )
        return self._run(program)

    def _reference(self) -> dict[str, Any]:
        """Unpatched engines of models that no other tests have one of."""
        program = Program("reference", sides.reference(self.layout), "v1")
        for model in filter(self._has_reference, MODELS):
            program.add(
                str(model),
                model.folder(self.layout, sides.patched(self.layout)),
                Variant("eager", False, False, True, "").options
                | {"dtype": model.dtype},
                runs={name: WORKLOADS[name].spec(dbo=False) for name in BROAD},
            )
        return self._run(program)

    @staticmethod
    def _has_reference(model: Model) -> bool:
        return model.unpatched and not model.shares_reference

    def _run(self, program: Program) -> dict[str, Any]:
        if self.stopped.is_set():
            raise RuntimeError("The tests are over.")
        return program.run(self.folder, self.processes.append)

    def report(self, model: Model) -> dict[str, Any]:
        """Of the program that runs the model's engines."""
        self.start(model)
        return self.futures[str(model) if model.pairwise else "others"].result()

    def engine(self, model: Model, variant: Variant) -> dict[str, Any]:
        """What an engine with the attention role reports."""
        return self.report(model)["engines"][f"{model} {variant}"]

    def ffn(self, model: Model, gate: str) -> dict[str, Any]:
        return self.report(model)["ffns"][f"{model} {gate}"]

    def result(self, model: Model, variant: Variant, name: str) -> dict[str, Any]:
        """Of a workload."""
        return self.engine(model, variant)["results"][name]

    def expected(self, shared: Jobs, model: Model, name: str) -> dict[str, Any]:
        """Of a workload without AFD and without DBO, in eager mode."""
        if model.shares_reference:
            return expected(shared, model.name, name)
        self.start(model)
        if self._has_reference(model):
            engines = self.futures["reference"].result()["engines"]
            return engines[str(model)]["results"][name]
        return self.report(model)["engines"][f"{model} monolithic"]["results"][name]

    def stop(self) -> None:
        self.stopped.set()
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in self.processes:
            process.kill()
        self.pool.shutdown(wait=True)
