"""`port-test`: what it refuses, what it installs, and what it skips without kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tools.plugins
from tools.errors import WorkshopError
from tools.layout import Layout
from tools.port_test import port_test, unmet

PINS = """\
[port."0.31.0".base]
commit = "db9527a46"
tree = "1111111111111111111111111111111111111111"

[port."0.31.0".sdist]
project = "vllm"
filename = "vllm-0.31.0.tar.gz"
sha256 = "2222222222222222222222222222222222222222222222222222222222222222"

[port."0.31.0".requirements]
torch = "2.13.0"
triton = "3.6.0"
"""


def _install(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def test_a_port_that_was_not_made(workspace: Layout) -> None:
    workspace.ports_pin.write_text(PINS)
    with pytest.raises(WorkshopError, match="not on vLLM") as caught:
        port_test(workspace, "0.31.0")
    assert caught.value.todo == "make port BASE=0.31.0"
    with pytest.raises(WorkshopError, match=r"no release '0\.99\.0'"):
        port_test(workspace, "0.99.0")


def test_what_a_release_needs_in_another_version(tmp_path: Path) -> None:
    own, shared = tmp_path / "own", tmp_path / "shared"
    _install(shared, "transformers", "5.24.0")
    _install(shared, "pillow", "13.0.0")
    _install(shared, "xgrammar", "0.2.9")
    _install(own, "xgrammar", "0.2.7")
    lines = [
        "transformers >= 5.10.4, < 5.18.0",
        "pillow >= 12",
        "xgrammar == 0.2.7",
        "absent >= 1",
        "other; platform_machine == 'none'",
        "triton @ file:///nowhere/triton.whl",
        "torch == 99",
    ]
    assert unmet(lines, [own, shared]) == [lines[0], lines[3]]


def test_only_tests_that_call_a_kernel_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_kernel():\n"
        "    raise AttributeError(\n"
        "        \"'_OpNamespace' '_C' object has no attribute 'rms_norm'\")\n"
        "def test_import():\n"
        "    raise ModuleNotFoundError(\"No module named 'vllm._C'\")\n"
        "def test_wrong():\n    assert 1 == 2\n"
        "def test_right():\n    pass\n"
    )
    folder = Path(tools.plugins.__path__[0])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no_kernels", "test_it.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(folder), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "1 failed, 1 passed, 2 skipped" in done.stdout
    assert "needs compiled kernels" in done.stdout
    assert done.returncode == 1
