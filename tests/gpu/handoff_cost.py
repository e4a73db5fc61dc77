"""Measures what a handoff between two ubatches costs, with bench/handoff.py.

A program of its own, `handoff_cost.py WINDOWS OUTPUT.json`, for the interpreter of the
patched environment. The bench has an engine beside it, which is of no use here.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import handoff


def main(windows: str, output: str) -> None:
    if current_platform.is_cpu():
        # A CPU has no streams; those of the V2 runner do nothing.
        importlib.import_module("vllm.v1.worker.cpu.shm")
    handoff.WINDOWS = int(windows)
    child = object.__new__(handoff.Child)
    child.engine = SimpleNamespace(vllm_config=VllmConfig())
    with torch.device(current_platform.device_type):
        found = child.handoffs()
    report = {
        "vllm": str(Path(vllm.__file__).parent),
        "version": vllm.__version__,
        "torch": torch.__version__,
        "device": current_platform.device_type,
        "device_name": current_platform.get_device_name(),
        "target_us": handoff.TARGET_US,
        "handoff_us": found,
    }
    Path(output).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
