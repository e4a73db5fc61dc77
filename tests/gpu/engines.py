"""Engines on a CPU or on one GPU, the device they need, and the batches they run."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import sides
from sides import Process, report_of

from tools import checkpoint
from tools.layout import Layout

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "gpu_engine.py"
MODEL = "tiny-qwen3-moe"
LAYERS = checkpoint.RECIPES[MODEL].config["num_hidden_layers"]
# To start, to compile, to capture and to run everything.
TIMEOUT_S = 600

# fp32, of the natural logarithm of a probability. On a GPU the number of rows decides
# which kernel is taken, and so in which order sums are.
TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}

DECODE, PREFILL, BUDGET = 4, 24, 64
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 256,
    # Makes longer prompts run in chunks, beside those that decode.
    "max_num_batched_tokens": BUDGET,
    "max_num_seqs": 16,
    "seed": 0,
}
DBO_OPTIONS = {
    "enable_dbo": True,
    "dbo_decode_token_threshold": DECODE,
    "dbo_prefill_token_threshold": PREFILL,
}
_GPU_OPTIONS = {"gpu_memory_utilization": 0.2}
# Tokens of CUDA graphs.
SIZES = [1, 2, 4, 8, 16]


@dataclass(frozen=True)
class Mode:
    """How a model is run.

    Attributes:
        options: Of the engine.
        compiled: Whether torch.compile makes its code, with the yields in it.
        graphs: Whether steps that only decode are CUDA graphs.
    """

    options: dict[str, Any]
    compiled: bool = False
    graphs: bool = False


def _compilation(mode: int, cudagraph_mode: str) -> dict[str, Any]:
    sizes = {} if cudagraph_mode == "NONE" else {"cudagraph_capture_sizes": SIZES}
    return {
        "compilation_config": {"mode": mode, "cudagraph_mode": cudagraph_mode} | sizes
    }


MODES = {
    "eager": Mode({"enforce_eager": True}),
    "graphs": Mode(_compilation(0, "FULL_DECODE_ONLY"), graphs=True),
    "compiled": Mode(_compilation(3, "NONE"), compiled=True),
    "compiled-graphs": Mode(
        _compilation(3, "FULL_DECODE_ONLY"), compiled=True, graphs=True
    ),
    # What `vllm serve` does if it is not told.
    "default": Mode({}, compiled=True, graphs=True),
}


@dataclass(frozen=True)
class Batch:
    """Prompts that are sent at once.

    Attributes:
        lengths: Of the prompts.
        splits: Steps that must be split.
        decodes: Whether only steps are split that do nothing but decode.
    """

    lengths: tuple[int, ...]
    max_tokens: int
    splits: int
    decodes: bool = False


def _batches() -> dict[str, Batch]:
    result = {
        # Prompts so short that they are prefilled in a step below the threshold.
        f"decode-{count}": Batch((2,) * count, 5, 4 * (count >= DECODE), decodes=True)
        for count in (1, DECODE - 1, DECODE, DECODE + 1, 7, 9)
    }
    result |= {
        f"prefill-{length}": Batch((length,), 2, int(length >= PREFILL))
        for length in (1, PREFILL - 1, PREFILL, PREFILL + 1)
    }
    return result | {
        # In chunks of 64 and 37 tokens.
        "prefill-101": Batch((101,), 2, 2),
        "prefill-13-7-21": Batch((13, 7, 21), 2, 1),
        # Prefilled in three steps, of 64, 64 and 25 tokens. The first prompt ends two
        # steps before the last, so that then five requests decode, four and two.
        "mixed": Batch((5, 101, 9, 33, 1), 7, 3 + 5),
    }


BATCHES = _batches()
# The batch that must betray that halves are put together in the wrong order.
WRONG_ORDER = f"decode-{DECODE + 1}"
# Under this no two best tokens are as good as equal.
_SEED = 1


def specs(control: bool = False) -> dict[str, Any]:
    """The batches as tests/gpu/gpu_engine.py reads them.

    Args:
        control: Whether one is run with a fault, too, as `wrong_order`.
    """
    rng = random.Random(_SEED)
    result: dict[str, Any] = {
        name: {
            "prompts": [
                [rng.randrange(256) for _ in range(length)] for length in batch.lengths
            ],
            "max_tokens": batch.max_tokens,
        }
        for name, batch in BATCHES.items()
    }
    if control:
        result["wrong_order"] = result[WRONG_ORDER] | {"wrong_order": True}
    return result


@cache
def _found(layout: Layout) -> tuple[str, str, bool]:
    """Versions of vLLM and PyTorch where vLLM runs, and whether there is a GPU."""
    side = sides.patched(layout)
    code = (
        "import json, torch; from importlib.metadata import version; print(json.dumps("
        "[version('vllm'), torch.__version__, torch.cuda.is_available()]))"
    )
    done = subprocess.run(
        [str(side.python), "-c", code],
        env=side.env("v2"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{side.python} cannot tell its device.\n{done.stderr}")
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def lacking(layout: Layout, device: str) -> str:
    """Why vLLM cannot run on a device; empty if it can.

    Args:
        device: `cpu` or `cuda`.
    """
    vllm, torch, has_gpu = _found(layout)
    # As vLLM itself tells what it was built for.
    built_for = "cpu" if "cpu" in vllm else "cuda"
    if built_for != device:
        return f"vLLM {vllm} is built for {built_for}, not for {device}"
    if device == "cuda" and not has_gpu:
        return f"PyTorch {torch}, which vLLM runs with, finds no GPU"
    return ""


def environment(side: sides.Side, device: str, cache: Path) -> dict[str, str]:
    """For an engine on a device.

    Args:
        cache: Where it keeps what it compiles.
    """
    env = side.env("v2")
    folders = [str(HERE), str(HERE.parent / "e2e"), env.get("PYTHONPATH")]
    env |= {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }
    if device == "cuda":
        del env["TRITON_INTERPRET"]
        env |= {
            "TRITON_CACHE_DIR": str(cache / "triton"),
            # Otherwise kernels would round fp32 to 10 bits of mantissa before they
            # multiply.
            "TRITON_F32_DEFAULT": "ieee",
        }
    return env


@dataclass(frozen=True)
class Job:
    """An engine for tests/gpu/gpu_engine.py.

    Attributes:
        batches: What it runs, None for the FFN role.
    """

    name: str
    options: dict[str, Any]
    batches: dict[str, Any] | None = None


class Engines:
    """Engines that have run."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.side = sides.patched(layout)
        self.folder = layout.reports / "gpu"
        self.cache = self.folder / "cache"
        self.cache.mkdir(parents=True, exist_ok=True)
        # Empty at first, so that what engines run has been compiled by them. What vLLM
        # has found out about the model is kept.
        for name in ("inductor", "triton"):
            shutil.rmtree(self.cache / name, ignore_errors=True)
        self._reports: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def report(self, device: str, mode: str, dbo: bool) -> dict[str, Any]:
        """Of an engine that does all."""
        key = (device, mode)
        if key not in self._reports:
            options = MODES[mode].options
            control = not MODES[mode].graphs
            self._reports[key] = self.run(
                device,
                Job(mode, options, specs()),
                Job(f"{mode}-dbo", options | DBO_OPTIONS, specs(control)),
            )
        return self._reports[key][dbo]

    def run(self, device: str, *jobs: Job) -> list[dict[str, Any]]:
        """Reports of engines that run one after the other; FFN roles run beside them.

        Raises:
            RuntimeError: One failed, took too long, or ran another vLLM.
        """
        model = checkpoint.ensure(self.layout, MODEL, self.side.python)
        files = [self.folder / f"{device}-{job.name}.job.json" for job in jobs]
        outputs = [file.with_suffix("").with_suffix(".result.json") for file in files]
        for job, file, output in zip(jobs, files, outputs, strict=True):
            output.unlink(missing_ok=True)
            options = OPTIONS | (_GPU_OPTIONS if device == "cuda" else {}) | job.options
            facts = {"model": str(model), "options": options, "batches": job.batches}
            file.write_text(json.dumps(facts | {"output": str(output)}))
        env = environment(self.side, device, self.cache)
        if any("afd_config" in job.options for job in jobs):
            # The attention role has to choose the runner by itself.
            del env["VLLM_USE_V2_MODEL_RUNNER"]
        process = Process(
            [str(self.side.python), str(PROGRAM), *map(str, files)],
            env,
            self.folder / f"{device}-{jobs[-1].name}.log",
        )
        timeout = TIMEOUT_S * len(jobs)
        report_of(process, self.side, outputs[-1], timeout)
        return [json.loads(output.read_text()) for output in outputs]
