"""Two hosts and a wire between them: network namespaces, each with one TUN device.

Whatever a host sends to the other comes here as a packet, which is passed on: late,
now and then not at all, or not while the wire is cut, as the last line on standard
input says. The kernel's netem would do the same where it is built in; this needs TUN
devices only. Each line is answered with one on standard output.

It ends with its standard input, and so with whoever started it, however that ended, and
kills what still runs on the hosts. Nothing of them has a name outside of this process:
namespaces and devices are gone then.

    python wire.py ADDRESS[,ADDRESS...] ADDRESS[,ADDRESS...]
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEVICE = "afd0"
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
# No packet is longer, whatever the MTU.
_LONGEST = 65536


class End:
    """One host.

    Attributes:
        namespaces: Files that a process can enter: its network, and its name, which
            is its first address.
        device: What it sends comes out here, and what is written here it receives.
    """

    def __init__(self, addresses: list[str]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET | CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        socket.sethostname(addresses[0].partition("/")[0])
        self.namespaces = [
            os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY)
            for kind in ("net", "uts")
        ]
        self.device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(self.device, _TUNSETIFF, request)
        _ip("link", "set", "lo", "up")
        for address in addresses:
            # Nobody else can have it: it need not be asked for first.
            more = ["nodad"] if ":" in address else []
            _ip("address", "add", address, "dev", DEVICE, *more)
        _ip("link", "set", DEVICE, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, stdin=subprocess.DEVNULL)


class Wire:
    """Passes packets on between two ends."""

    def __init__(self, ends: list[End]) -> None:
        self._to = {
            ends[0].device: ends[1].device,
            ends[1].device: ends[0].device,
        }
        self._delay_s = self._loss = 0.0
        self._cut = False
        self._random = random.Random(0)
        self._number = itertools.count()
        # When each is due, to which device.
        self._queue: list[tuple[float, int, int, bytes]] = []
        self._passed = self._dropped = 0

    def run(self) -> None:
        """Until standard input ends."""
        while True:
            due = self._queue[0][0] - time.monotonic() if self._queue else None
            wait_s = None if due is None else max(due, 0)
            ready, _, _ = select.select([sys.stdin.fileno(), *self._to], [], [], wait_s)
            for each in ready:
                if each in self._to:
                    self._take(each)
                elif not self._obey():
                    return
            self._deliver()

    def _obey(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            return False
        wanted = json.loads(line)
        self._delay_s = wanted.get("delay_s", self._delay_s)
        self._loss = wanted.get("loss", self._loss)
        self._cut = wanted.get("cut", self._cut)
        answer(passed=self._passed, dropped=self._dropped)
        return True

    def _take(self, device: int) -> None:
        try:
            packet = os.read(device, _LONGEST)
        except OSError:
            return  # It was taken down meanwhile.
        if self._cut or self._random.random() < self._loss:
            self._dropped += 1
            return
        due = time.monotonic() + self._delay_s
        heapq.heappush(self._queue, (due, next(self._number), self._to[device], packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._queue and self._queue[0][0] <= now:
            _, _, device, packet = heapq.heappop(self._queue)
            try:
                os.write(device, packet)
                self._passed += 1
            except OSError:
                self._dropped += 1  # That end is down.


def kill_all(ends: list[End]) -> None:
    """End what runs on the hosts, also what starts while we look."""
    hosts = {os.fstat(end.namespaces[0]).st_ino for end in ends}
    for _ in range(50):
        left = [pid for pid in processes_of(hosts) if pid != os.getpid()]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def processes_of(hosts: set[int]) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # It may have gone; a zombie is on no host.
            with contextlib.suppress(OSError):
                if (entry / "ns/net").stat().st_ino in hosts:
                    yield int(entry.name)


def answer(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    try:
        ends = [End(addresses.split(",")) for addresses in sys.argv[1:]]
    except (OSError, subprocess.CalledProcessError) as error:
        answer(error=str(error))
        return
    files = f"/proc/{os.getpid()}/fd"
    answer(namespaces=[[f"{files}/{each}" for each in end.namespaces] for end in ends])
    try:
        Wire(ends).run()
    finally:
        kill_all(ends)


if __name__ == "__main__":
    main()
