"""Two hosts on this machine, with a wire between them that can be slow, lossy or cut.

They are network namespaces, see wire.py.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from wire import CLONE_NEWNET, DEVICE

_WIRE = Path(__file__).with_name("wire.py")
_LISTEN = "0A"
# Of the range for tests of networks, and of one that nobody may route.
_ADDRESSES = (("198.18.0.1", "fd00:afd::1"), ("198.18.0.2", "fd00:afd::2"))


class NoHosts(Exception):
    """This machine cannot have them; says why."""


@dataclass(frozen=True)
class Host:
    """One of them.

    Attributes:
        address, address6: What the other one reaches it by.
        network: Namespace of its network.
        name: Namespace of its host name, which is its address.
        clock_s: How far its monotonic clock is ahead of this process's.
    """

    address: str
    address6: str
    network: Path
    name: Path
    clock_s: int = 0

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs a command there, as the process that is started."""
        clock = (
            ["unshare", "--time", f"--monotonic={self.clock_s}"] if self.clock_s else []
        )
        enter = ["nsenter", f"--net={self.network}", f"--uts={self.name}"]
        return [*enter, *clock, *words]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets that this thread makes within are sockets of the host."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(self.network)
            try:
                yield
            finally:
                _enter(Path(f"/proc/self/fd/{before}"))
        finally:
            os.close(before)

    def client(self, **options: Any) -> httpx.Client:
        """An HTTP client on this host."""
        return _Client(self, **options)

    def listening(self) -> set[tuple[str, int]]:
        """Addresses and TCP ports on which anybody listens there."""
        with self.entered():
            rows = [
                row.split()
                for table in ("tcp", "tcp6")
                for row in Path(f"/proc/thread-self/net/{table}")
                .read_text()
                .splitlines()[1:]
            ]
        return {_address(row[1]) for row in rows if row[3] == _LISTEN}

    def set_link(self, up: bool) -> None:
        """Take its end of the wire down, or up again."""
        self.run("ip", "link", "set", DEVICE, "up" if up else "down")

    def add_address6(self) -> None:
        """Have `address6` again, which is lost when the link goes down."""
        where = f"{self.address6}/64"
        self.run("ip", "address", "replace", where, "dev", DEVICE, "nodad")

    def run(self, *words: str) -> str:
        return subprocess.run(
            self.command(words), check=True, capture_output=True, text=True, timeout=30
        ).stdout


class Network:
    """Two hosts and their wire; as a context, gone in the end.

    Args:
        clock_s: How far the monotonic clock of the second host is ahead, where the
            kernel can have it so.

    Raises:
        NoHosts: This machine cannot have them.
    """

    def __init__(self, clock_s: int = 0) -> None:
        for tool in ("ip", "nsenter", "unshare"):
            if shutil.which(tool) is None:
                raise NoHosts(f"No network namespaces here: there is no {tool}.")
        # Ctrl-C is for the test, which may still need the wire then.
        self._process = subprocess.Popen(
            [sys.executable, str(_WIRE), *map(_with_prefixes, _ADDRESSES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        found = self._answer()
        if "error" in found:
            self.close()
            raise NoHosts(f"No network namespaces here: {found['error']}")
        if not Path("/proc/self/ns/time").exists():
            clock_s = 0
        self.hosts = tuple(
            Host(*addresses, *map(Path, namespaces), clock)
            for addresses, namespaces, clock in zip(
                _ADDRESSES, found["namespaces"], (0, clock_s), strict=True
            )
        )

    def set_wire(self, delay_s: float = 0, loss: float = 0, cut: bool = False) -> None:
        """Let each packet take `delay_s` seconds, and lose a share of them, or all."""
        self._ask(delay_s=delay_s, loss=loss, cut=cut)

    @property
    def dropped(self) -> int:
        """Packets that were lost so far."""
        return self._ask()["dropped"]

    def close(self) -> None:
        """Have the hosts gone, with all that still runs there."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()

    def _ask(self, **words: Any) -> dict[str, Any]:
        if self._process.stdin is None:
            raise RuntimeError("The wire has no standard input.")
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        try:
            return json.loads(line)
        except ValueError:
            return {"error": line.strip() or "the wire has ended"}

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Client(httpx.Client):
    def __init__(self, host: Host, **options: Any) -> None:
        super().__init__(**options)
        self._host = host

    def send(self, *args: Any, **options: Any) -> httpx.Response:
        # It may connect; what it reads and writes later is not bound to a namespace.
        with self._host.entered():
            return super().send(*args, **options)


def _enter(namespace: Path) -> None:
    fd = os.open(namespace, os.O_RDONLY)
    try:
        # os.setns came with Python 3.12.
        if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(fd)


def _with_prefixes(addresses: Sequence[str]) -> str:
    return ",".join(f"{each}/{64 if ':' in each else 24}" for each in addresses)


def _address(field: str) -> tuple[str, int]:
    """As /proc/net/tcp has it: words of the address in the machine's byte order."""
    address, port = field.split(":")
    words = [
        int(address[at : at + 8], 16).to_bytes(4, sys.byteorder)
        for at in range(0, len(address), 8)
    ]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)
