# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tests for extracting a precompiled wheel in setup.py."""

import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SETUP_PY = Path(__file__).parents[2] / "setup.py"

X86_CPU_LIBRARIES = ["_C.abi3.so", "_C_AVX2.abi3.so", "_C_AVX512.abi3.so"]
ANY_DEVICE_LIBRARIES = ["fs_io_C.abi3.so", "spinloop.abi3.so"]


@pytest.fixture
def setup_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module, without building or downloading anything."""
    if not SETUP_PY.exists():
        pytest.skip("setup.py is not part of this installation")
    setuptools = pytest.importorskip("setuptools")
    pytest.importorskip("setuptools_rust")
    setuptools_scm = pytest.importorskip("setuptools_scm")

    monkeypatch.chdir(SETUP_PY.parent)
    monkeypatch.setattr(setuptools, "setup", lambda **kwargs: None)
    # The real one writes vllm/_version.py.
    monkeypatch.setattr(setuptools_scm, "get_version", lambda *args, **kwargs: "0.0.0")
    # setup.py sets these by itself: have them restored after the test.
    for name in ("SETUPTOOLS_SCM_PRETEND_VERSION", "VLLM_RS_BUILD_VERSION"):
        monkeypatch.setenv(name, "0.0.0")
    for name in ("envs", "rust_build"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    for name in (
        "VLLM_USE_PRECOMPILED",
        "VLLM_USE_PRECOMPILED_RUST",
        "VLLM_PRECOMPILED_WHEEL_LOCATION",
    ):
        monkeypatch.delenv(name, raising=False)

    spec = importlib.util.spec_from_file_location("vllm_setup", SETUP_PY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _extract(
    setup_module: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    members: list[str],
    extract_extensions: bool = True,
) -> tuple[dict[str, list[str]], list[str]]:
    """Extract a wheel of members; return package data and the files written."""
    wheel = tmp_path / "vllm-0.0.0-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as f:
        for member in members:
            f.writestr(member, member)
    target = tmp_path / "source"
    target.mkdir()
    monkeypatch.chdir(target)

    package_data = (
        setup_module.precompiled_wheel_utils.extract_precompiled_and_patch_package(
            str(wheel),
            None,
            extract_extensions=extract_extensions,
            extract_rust_frontend=True,
        )
    )

    written = [path for path in target.rglob("*") if path.is_file()]
    for path in written:
        assert path.read_text() == path.relative_to(target).as_posix()
    return package_data, sorted(p.relative_to(target).as_posix() for p in written)


def test_cpu_wheel_gives_every_isa_variant(setup_module, tmp_path, monkeypatch):
    """CpuPlatform.import_kernels() picks one by the features of the host, which
    need not be the _C that the host of an editable install was built for."""
    libraries = sorted(X86_CPU_LIBRARIES + ANY_DEVICE_LIBRARIES)
    package_data, written = _extract(
        setup_module,
        tmp_path,
        monkeypatch,
        [f"vllm/{name}" for name in libraries]
        + ["vllm/__init__.py", "vllm/platforms/cpu.py", "vllm-0.0.0.dist-info/RECORD"],
    )
    assert written == [f"vllm/{name}" for name in libraries]
    assert {pkg: sorted(names) for pkg, names in package_data.items()} == {
        "vllm": libraries
    }


def test_every_cpu_extension_is_extracted(setup_module, tmp_path, monkeypatch):
    """A CPU extension that setup.py builds is one a precompiled wheel carries."""
    monkeypatch.setattr(setup_module, "VLLM_TARGET_DEVICE", "cpu")
    members = sorted(
        f"{ext.name.replace('.', '/')}.abi3.so" for ext in setup_module.ext_modules
    )
    assert "vllm/_C.abi3.so" in members
    _, written = _extract(setup_module, tmp_path, monkeypatch, members)
    assert written == members


def test_cuda_wheel_is_extracted_as_before(setup_module, tmp_path, monkeypatch):
    extracted = [
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/_moe_C_stable_libtorch.abi3.so",
        "vllm/third_party/deep_gemm/include/a.cuh",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "vllm/vllm_flash_attn/layers/rotary.py",
    ]
    package_data, written = _extract(
        setup_module,
        tmp_path,
        monkeypatch,
        extracted + ["vllm/_C_OTHER.abi3.so", "vllm/vllm_flash_attn/__init__.py"],
    )
    assert written == extracted
    assert package_data["vllm"] == [
        "_C_stable_libtorch.abi3.so",
        "_moe_C_stable_libtorch.abi3.so",
    ]


def test_rust_only_leaves_extensions_alone(setup_module, tmp_path, monkeypatch):
    members = [f"vllm/{name}" for name in X86_CPU_LIBRARIES] + ["vllm/vllm-rs"]
    _, written = _extract(
        setup_module, tmp_path, monkeypatch, members, extract_extensions=False
    )
    assert written == ["vllm/vllm-rs"]
