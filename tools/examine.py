"""Proves what a running vLLM is, from its process and its port."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

from tools.env import (
    load_manifest,
    manifest_file,
    serve_env,
    stamped_version,
    vllm_script,
)
from tools.errors import WorkshopError
from tools.findings import ERROR, OK, WARNING, Finding
from tools.layout import Layout
from tools.pin import load_pin
from tools.process import Running, listener, running

_HTTP_S = 5


def examine(
    layout: Layout, pid: int | None = None, port: int | None = None
) -> list[Finding]:
    """Look at a running server, by its process or by its port.

    Raises:
        WorkshopError: There is no such process, or nothing listens there.
    """
    findings: list[Finding] = []
    if port is not None:
        findings += _served_version(layout, port)
        pid = pid or listener(port)
        if pid is None:
            findings.append(
                Finding(
                    WARNING,
                    "process",
                    f"The process that listens on port {port} cannot be seen.",
                    "It is another user's, or in another container.",
                )
            )
    if pid is not None:
        findings += _process(layout, running(pid))
    return findings


def _served_version(layout: Layout, port: int) -> Iterator[Finding]:
    url = f"http://127.0.0.1:{port}/version"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_HTTP_S) as answer:
            version = str(json.load(answer)["version"])
    except (urllib.error.HTTPError, ValueError, KeyError, TypeError) as error:
        yield Finding(
            ERROR,
            "served-version",
            f"What listens on port {port} is not vLLM.",
            f"{url}: {error}",
            "Give the port of `vllm serve`.",
        )
        return
    except OSError as error:
        raise WorkshopError(
            f"Nothing answers at {url}.",
            str(error),
            "Give the port of a running server, or its process with --pid.",
        ) from None
    pin = load_pin(layout.pin)
    built = load_manifest(manifest_file(layout))
    device = built.device if built else "cpu"
    expected = stamped_version(pin.version, device, layout.tree)
    if version == expected:
        yield Finding(
            OK, "served-version", f"Port {port} serves vLLM {version}: this series."
        )
    else:
        yield Finding(
            ERROR,
            "served-version",
            f"Port {port} serves vLLM {version}; build/vllm is {expected}.",
            "It is another vLLM, or was started before the last `make apply build`.",
            "End it and start it again with `make serve`.",
        )


def _process(layout: Layout, seen: Running) -> Iterator[Finding]:
    yield Finding(
        OK,
        "process",
        f"Process {seen.pid}: {' '.join(seen.command)[:200] or '(no command line)'}",
        f"interpreter {seen.interpreter}, folder {seen.cwd}",
    )
    packages = layout.venv / "lib"
    others = [path for path in seen.packages if not path.is_relative_to(packages)]
    if others:
        yield Finding(
            ERROR,
            "process-environment",
            f"Process {seen.pid} has libraries from {others[0]}.",
            f"The patched environment is {layout.venv}.",
            f"Start it with {vllm_script(layout.venv)}.",
        )
    elif seen.packages:
        yield Finding(OK, "process-environment", f"It runs in {layout.venv}.")
    wrong = [tree for tree in seen.vllm if tree != layout.tree / "vllm"]
    if wrong:
        yield Finding(
            ERROR,
            "process-import",
            f"Process {seen.pid} has kernels of vLLM from {wrong[0]}.",
            f"The patched ones are in {layout.tree / 'vllm'}.",
            f"Start it with {vllm_script(layout.venv)}.",
        )
    elif seen.vllm:
        yield Finding(OK, "process-import", f"It has kernels from {seen.vllm[0]}.")
    if seen.deleted:
        yield Finding(
            ERROR,
            "process-stale",
            f"Process {seen.pid} still has {seen.deleted[0]}, which was replaced.",
            "It was started before the last build.",
            "End it and start it again.",
        )
    wanted = serve_env(layout, environ={})
    unset = [
        name
        for name in ("TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER")
        if name in wanted and seen.environ.get(name) != wanted[name]
    ]
    if unset:
        yield Finding(
            WARNING,
            "process-variables",
            f"Process {seen.pid} was started without {', '.join(unset)}.",
            "On a CPU, Model Runner V2, and with it DBO, needs "
            "TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1.",
            "Start it with `make serve`, which sets and prints them.",
        )
