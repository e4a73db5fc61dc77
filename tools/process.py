"""Facts about processes, from `/proc`, and what starting servers needs of them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.errors import WorkshopError

_LISTEN = "0A"
_PR_SET_PDEATHSIG = 1
# How the names begin that vLLM gives its processes, and what we call them.
_TITLES = {"VLLM::Engine": "engine", "VLLM::Worker": "worker"}


@dataclass(frozen=True)
class Running:
    """A process and its descendants, which are a server's engine and workers.

    Attributes:
        pid: Of the process itself.
        command: Its command line.
        interpreter: Its executable, links followed.
        cwd: Its folder.
        environ: The variables that it was started with.
        packages: `site-packages` folders that libraries are mapped from.
        vllm: `vllm` folders that kernels are mapped from.
        deleted: Mapped libraries of vLLM whose file was replaced or removed.
    """

    pid: int
    command: tuple[str, ...]
    interpreter: str
    cwd: str
    environ: dict[str, str]
    packages: tuple[Path, ...]
    vllm: tuple[Path, ...]
    deleted: tuple[Path, ...]


def running(pid: int) -> Running:
    """Look at a process.

    Raises:
        WorkshopError: There is none, or it is another user's.
    """
    proc = Path(f"/proc/{pid}")
    try:
        command = _fields(proc / "cmdline")
        environ = dict(
            entry.split("=", 1) for entry in _fields(proc / "environ") if "=" in entry
        )
        interpreter = str((proc / "exe").readlink())
        cwd = str((proc / "cwd").readlink())
    except (FileNotFoundError, ProcessLookupError):
        raise WorkshopError(
            f"There is no process {pid}.", todo="`pgrep -f vllm` lists servers."
        ) from None
    except PermissionError:
        raise WorkshopError(
            f"Process {pid} is another user's.", todo="Run this as that user."
        ) from None
    mapped: dict[str, bool] = {}
    for each in (pid, *descendants(pid)):
        mapped |= _libraries(each)
    packages = {
        Path(path[: match.end()])
        for path in mapped
        if (match := re.search(r"/lib/python3\.\d+/site-packages(?=/)", path))
    }
    own = {
        Path(path): gone
        for path, gone in mapped.items()
        if Path(path).parent.name == "vllm"
    }
    return Running(
        pid,
        command,
        interpreter,
        cwd,
        environ,
        tuple(sorted(packages)),
        tuple(sorted({path.parent for path in own})),
        tuple(sorted(path for path, gone in own.items() if gone)),
    )


@dataclass(frozen=True)
class Stat:
    """Where a process belongs.

    Attributes:
        pid: Of the process.
        group: Its process group.
        session: Its session.
    """

    pid: int
    group: int
    session: int


def stat(pid: int) -> Stat | None:
    """Look at a process; None if there is none, or only a zombie."""
    try:
        # pid (name) state ppid pgrp session ...; the name may hold anything.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, _, group, session = text.rpartition(")")[2].split()[:4]
    return None if state in "ZX" else Stat(pid, int(group), int(session))


def alive() -> Iterator[Stat]:
    """All processes, without zombies."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := stat(int(entry.name))):
            yield found


def descendants(pid: int) -> list[int]:
    """Children of a process, their children, and so on."""
    found: list[int] = []
    queue = [pid]
    while queue:
        try:
            for task in Path(f"/proc/{queue.pop()}/task").iterdir():
                more = [int(word) for word in (task / "children").read_text().split()]
                found += more
                queue += more
        except OSError:
            continue  # Gone meanwhile, or another user's.
    return found


def family(pid: int) -> dict[str, int]:
    """Processes of a `vllm serve` by what they are: `api`, `engine`, `worker`.

    Of several of a kind, the first; those that have not started are left out.
    """
    found = {"api": pid}
    for child in descendants(pid):
        title = _title(child)
        for prefix, kind in _TITLES.items():
            if title.startswith(prefix):
                found.setdefault(kind, child)
    return found


def _title(pid: int) -> str:
    if stat(pid) is None:
        return ""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def memory(pid: int, name: str) -> int:
    """Bytes of a field of a process's status, such as `VmHWM`; 0 if it has none."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    return int(kib[1]) * 1024 if kib else 0


def die_with_parent() -> None:
    """Have SIGTERM sent to this process when its parent ends; for `preexec_fn`."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    except (OSError, AttributeError):
        pass  # Not Linux.


def _first_ephemeral_port() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        return max(int(text.split()[0]), 16000)
    except (OSError, ValueError, IndexError):
        return 32768


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on, all different.

    If possible below those that connections get, one of which could take it before
    a server does.
    """
    probes = [socket.socket() for _ in range(count)]
    below = random.SystemRandom().sample(range(15000, _first_ephemeral_port()), 99)
    candidates = itertools.chain(below, itertools.repeat(0))
    try:
        for probe in probes:
            for port in candidates:
                with contextlib.suppress(OSError):
                    probe.bind(("127.0.0.1", port))
                    break
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def listener(port: int) -> int | None:
    """A process that listens on a TCP port; None if it cannot be seen."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == _LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    holders = {
        int(process.name)
        for process in (Path("/proc").glob("[0-9]*") if inodes else ())
        if inodes.intersection(_open_files(process))
    }
    # A server's children may have inherited the socket: the oldest is the server.
    return min(holders, default=None)


def _open_files(process: Path) -> Iterator[str]:
    try:
        for link in (process / "fd").iterdir():
            try:
                yield os.readlink(link)  # noqa: PTH115 (it need not be a path)
            except FileNotFoundError:
                continue  # Closed meanwhile, as the one that lists them is.
    except OSError:
        return  # Gone meanwhile, or another user's.


def _fields(path: Path) -> tuple[str, ...]:
    text = path.read_bytes().decode(errors="surrogateescape")
    return tuple(entry for entry in text.split("\0") if entry)


def _libraries(pid: int) -> dict[str, bool]:
    """Mapped `.so` files, and whether the file is gone."""
    found = {}
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return {}
    for match in re.finditer(r" (/[^\n]*\.so[^\n]*)$", text, re.MULTILINE):
        path = match[1]
        found[path.removesuffix(" (deleted)")] = path.endswith(" (deleted)")
    return found
