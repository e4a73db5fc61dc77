"""docs/gpu.md and `make test-gpu` have all tests that need a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.env import clean_environ
from tools.errors import WorkshopError
from tools.layout import Layout, venv_python
from tools.series import load_series
from tools.test import GPU_TESTS, Stage, gpu_tasks, run_stage

LAYOUT = Layout.default()
OURS = [f"tests/gpu/{path.name}" for path in LAYOUT.root.glob("tests/gpu/test_*.py")]
# A skip for want of a GPU, as in `skipif(torch.accelerator.device_count() < 2, ...)`.
GATE = re.compile(
    r"skipif\(\s*(not torch\.cuda\.is_available\(\)"
    r"|torch\.(accelerator|cuda)\.device_count\(\) <)"
)


def test_the_page_has_a_row_and_a_command_for_each() -> None:
    page = (LAYOUT.root / "docs/gpu.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| .+ \| [\d, ]+ \| `(.+)` \|$", page, re.MULTILINE)
    assert sorted(file for file, _ in rows) == sorted([*OURS, *GPU_TESTS])
    for file, command in rows:
        folder = "" if file in OURS else "cd build/vllm && ../../"
        assert re.fullmatch(
            re.escape(folder) + r"\.venv/bin/python -m pytest (-s )?" + re.escape(file),
            command,
        )


def test_all_files_of_the_series_with_such_tests_are_in_it() -> None:
    named = set()
    for patch in load_series(LAYOUT).patches:
        named |= {word for word in patch.meta.tests if not word.startswith("-")}
    gated = {
        str(path.relative_to(LAYOUT.overlay))
        for path in (LAYOUT.overlay / "tests").rglob("test_*.py")
        if GATE.search(path.read_text())
    }
    assert gated
    assert gated <= set(GPU_TESTS)
    assert set(GPU_TESTS) <= named


def fake_python(layout: Layout, has_gpu: bool) -> None:
    python = venv_python(layout.venv)
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nexit {int(not has_gpu)}\n")
    python.chmod(0o755)


def test_without_a_gpu_the_stage_fails(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    fake_python(layout, has_gpu=False)
    with pytest.raises(WorkshopError, match="Nothing here can run on a GPU"):
        gpu_tasks(layout)
    assert not run_stage(layout, Stage("gpu", "", gpu_tasks, True)).ok


def test_with_one_it_runs_the_workshops_and_vllms(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    fake_python(layout, has_gpu=True)
    ours, vllms = gpu_tasks(layout)
    assert ours.command[-1] == "tests/gpu"
    assert vllms.command[-len(GPU_TESTS) :] == GPU_TESTS
    assert vllms.cwd == layout.tree
    # Those of a CPU would make vLLM run slowly, or otherwise than users do.
    assert not [name for name in vllms.env if name.startswith(("OMP_", "TRITON_"))]


def test_each_of_ours_needs_the_built_environment() -> None:
    command = (sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/gpu")
    done = subprocess.run(
        (*command, "-m", "not built"),
        cwd=LAYOUT.root,
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(r"no tests collected \(\d+ deselected\)", done.stdout), done.stdout
