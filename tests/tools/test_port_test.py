"""`port-test`: what it refuses, what it installs, and what it skips without kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tools.plugins
from tools.errors import WorkshopError
from tools.git import Git
from tools.layout import Layout
from tools.port_test import hooks_result, port_test, unmet, write_copy

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


def test_hooks_of_the_release_run_on_what_the_series_touches(
    applied: Layout, user_git: Callable[..., str]
) -> None:
    tree = applied.tree

    def commit(files: dict[str, str]) -> str:
        for name, text in files.items():
            (tree / name).write_text(text)
        user_git(tree, "add", "--force", "--", *files)
        user_git(tree, "commit", "-q", "-m", "x")
        return Git(tree)("rev-parse", "HEAD")

    base = commit({".pre-commit-config.yaml": "repos: []\n", "vllm/b.py": "# teh\n"})
    commit({"vllm/a.py": "# fine\n"})
    assert hooks_result(applied, tree, base).ok
    commit({"vllm/a.py": "# teh word\n"})
    result = hooks_result(applied, tree, base)
    (problem,) = result.problems
    assert problem.startswith("typos: vllm/a.py:1: error: `teh` should be `the`")
    assert result.failed == 1


def _release(tmp_path: Path) -> Path:
    """A tree with a module in git, and a compiled file that is not in git."""
    tree = tmp_path / "tree"
    (tree / "vllm").mkdir(parents=True)
    (tree / "vllm" / "slots.py").write_text("BLOCK_SIZE = None\n")
    git = Git(tree)
    git("init", "--quiet", "--template=", ".")
    git("add", "--all")
    git(
        *("-c", "user.name=t", "-c", "user.email=t@t.invalid"),
        *("commit", "--quiet", "--message=base"),
    )
    (tree / "vllm" / "_C.abi3.so").write_bytes(b"compiled")
    (tree / "vllm" / "_version.py").write_text("version = '1'\n")
    return tree


MEND = """\
Why this is needed.

--- a/vllm/slots.py
+++ b/vllm/slots.py
@@ -1 +1 @@
-BLOCK_SIZE = None
+BLOCK_SIZE = 16
"""


def test_a_copy_is_mended_and_the_tree_is_not(tmp_path: Path) -> None:
    tree, copy, mend = _release(tmp_path), tmp_path / "copy", tmp_path / "base.diff"
    (copy / "vllm").mkdir(parents=True)
    (copy / "vllm" / "old.py").write_text("")
    write_copy(tree, "HEAD", copy, mend)
    assert (copy / "vllm" / "slots.py").read_text() == "BLOCK_SIZE = None\n"
    mend.write_text(MEND)
    write_copy(tree, "HEAD", copy, mend)
    assert sorted(path.name for path in (copy / "vllm").iterdir()) == [
        "_C.abi3.so",
        "_version.py",
        "slots.py",
    ]
    assert (copy / "vllm" / "slots.py").read_text() == "BLOCK_SIZE = 16\n"
    assert (tree / "vllm" / "slots.py").read_text() == "BLOCK_SIZE = None\n"
    assert Git(tree)("status", "--porcelain", "--untracked-files=no") == ""


def test_a_mend_that_does_not_apply_is_named(tmp_path: Path) -> None:
    tree, mend = _release(tmp_path), tmp_path / "base.diff"
    mend.write_text(MEND.replace("= None", "= 8"))
    with pytest.raises(WorkshopError, match=r"base\.diff does not apply") as caught:
        write_copy(tree, "HEAD", tmp_path / "copy", mend)
    assert "vllm/slots.py" in caught.value.why
    assert str(mend) in caught.value.todo


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
