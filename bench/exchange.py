"""What it costs to send hidden states to the other role and to get as much back.

Round trips of the connectors, of gloo by itself and of a bare socket, by the clock,
between two processes with a core each; they take turns, so that all meet the same
machine. Beside them a copy of the same bytes that are in no cache: the least that a
transfer through memory takes one way.

`make bench ARGS='--only exchange'` runs it. `exchange.py --child` is the part that the
patched environment runs.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests" / "e2e")]

from program import vllm_versions  # noqa: E402

# Bytes one way, and round trips of each way in a round.
SIZES = {4 << 10: 60, 64 << 10: 60, 1 << 20: 20, 4 << 20: 10}
ROUNDS = 21
HIDDEN = 1024
# Of gloo's round trip to a bare socket's.
TARGET = 2.0
CONNECTORS = {"gloo": "GlooAFDConnector"}
TIMEOUT_S = 600
# More than caches hold.
COLD_BYTES = 256 << 20

# Makes one round trip.
Trip = Callable[[], Any]


# The part that runs in the patched environment.


def _exchange_blob(pipe: socket.socket) -> Callable[[bytes], bytes]:
    def exchange(data: bytes) -> bytes:
        pipe.sendall(struct.pack("<I", len(data)) + data)
        (size,) = struct.unpack("<I", pipe.recv(4, socket.MSG_WAITALL))
        return pipe.recv(size, socket.MSG_WAITALL)

    return exchange


def _receive(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        view = view[connection.recv_into(view) :]


class Side:
    """One of the two processes, with every way to reach the other one."""

    def __init__(
        self, role: str, pipe: socket.socket, connection: socket.socket
    ) -> None:
        import torch
        from vllm.config.afd import AFDConfig
        from vllm.distributed.afd_transfer.afd_connector.base import AFDLayout
        from vllm.distributed.afd_transfer.afd_connector.factory import (
            AFDConnectorFactory,
        )

        torch.set_num_threads(1)
        self.role = role
        self.connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        layout = AFDLayout(max(SIZES) // HIDDEN // 2, 2, HIDDEN, torch.bfloat16)
        self.connectors = {}
        for name, kind in CONNECTORS.items():
            afd = AFDConfig(
                afd_role=role,
                afd_connector=kind,
                step_timeout_s=60,
                connect_timeout_s=60,
            )
            self.connectors[name] = AFDConnectorFactory.create_connector(
                SimpleNamespace(afd_config=afd), role, layout, "the other process"
            )
            self.connectors[name].connect(_exchange_blob(pipe), "127.0.0.1", 60)
        self.bare = self._bare_gloo(pipe)
        self.seq = 0

    def _bare_gloo(self, pipe: socket.socket) -> Any:
        from torch.distributed import ProcessGroupGloo, TCPStore
        from vllm.distributed.afd_transfer.afd_connector import gloo_connector

        leads = self.role == "attention"
        if leads:
            store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
            pipe.sendall(struct.pack("<I", store.port))
        else:
            (port,) = struct.unpack("<I", pipe.recv(4, socket.MSG_WAITALL))
            store = TCPStore("127.0.0.1", port, 2, False)
        options = gloo_connector._gloo_options("127.0.0.1", 60)
        return ProcessGroupGloo(store, 0 if leads else 1, 2, options)

    def close(self) -> None:
        for connector in self.connectors.values():
            connector.close()
        self.connection.close()

    def trips(self, size: int) -> dict[str, Trip]:
        """By name, what this side does in a round trip."""
        import torch

        mine = self.role == "attention"
        data = bytearray(size)
        out, back = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))

        def plain() -> None:
            steps = [
                lambda: self.connection.sendall(data),
                lambda: _receive(self.connection, memoryview(data)),
            ]
            for step in steps if mine else reversed(steps):
                step()

        sent: list[Any] = []

        def bare() -> None:
            # It has arrived, or the other side would not have answered.
            while sent:
                sent.pop().wait()
            if mine:
                arrives = self.bare.recv([back], 1, 2)
                sent.append(self.bare.send([out], 1, 1))
                arrives.wait()
            else:
                self.bare.recv([back], 0, 1).wait()
                sent.append(self.bare.send([back], 0, 2))

        ways: dict[str, Trip] = {"socket": plain, "bare_gloo": bare}
        for name, connector in self.connectors.items():
            ways[name] = self._connector_trip(connector, size)
        return ways

    def _connector_trip(self, connector: Any, size: int) -> Trip:
        import torch
        from vllm.distributed.afd_transfer.afd_connector.base import AFDTransfer

        rows = size // HIDDEN // 2
        hidden = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)

        def transfer() -> Any:
            self.seq += 1
            return AFDTransfer(self.seq, 0, 0, 1, rows)

        def attention() -> None:
            connector.submit(transfer(), hidden).wait()

        def ffn() -> None:
            what = transfer()
            connector.post_recv(what)
            received, _ = connector.recv(what)
            connector.send(what, received)

        return attention if self.role == "attention" else ffn


def schedule() -> Iterator[tuple[int, str]]:
    """Size and way of each window, the same on both sides."""
    order = random.Random(0)
    ways = ["socket", "bare_gloo", *CONNECTORS]
    for _ in range(ROUNDS + 1):
        for size in SIZES:
            for way in order.sample(ways, len(ways)):
                yield size, way


def cold_copies(size: int) -> list[float]:
    """Microseconds of a copy of bytes that no cache holds."""
    import torch

    count = max(COLD_BYTES // size, 2)
    pool = torch.zeros(count, size, dtype=torch.uint8)
    target = torch.empty_like(pool)
    times = []
    for index in random.Random(0).sample(range(count), min(count, 200)):
        begin = time.perf_counter_ns()
        target[index].copy_(pool[index])
        times.append((time.perf_counter_ns() - begin) / 1000)
    return times


def child() -> None:
    """Measure with a forked process; the result is a line of JSON on stdout."""
    # vLLM logs to stdout, which is for the result here.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    one, other = sorted(os.sched_getaffinity(0))[:2]
    pipes = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    if pid == 0:
        try:
            os.sched_setaffinity(0, {other})
            side = Side(
                "ffn", pipes[1], socket.create_connection(listener.getsockname())
            )
            trips = {size: side.trips(size) for size in SIZES}
            for size, way in schedule():
                for _ in range(SIZES[size]):
                    trips[size][way]()
            pipes[1].recv(1)
            side.close()
        finally:
            os._exit(0)
    os.sched_setaffinity(0, {one})
    side = Side("attention", pipes[0], listener.accept()[0])
    trips = {size: side.trips(size) for size in SIZES}
    medians: dict[tuple[int, str], list[float]] = {}
    for size, way in schedule():
        times = []
        for _ in range(SIZES[size]):
            begin = time.perf_counter_ns()
            trips[size][way]()
            times.append((time.perf_counter_ns() - begin) / 1000)
        medians.setdefault((size, way), []).append(statistics.median(times))
    pipes[0].send(b".")
    side.close()
    os.waitpid(pid, 0)
    result: dict[str, Any] = {"versions": vllm_versions()}
    for size in SIZES:
        # The first round warms up.
        found = {
            way: statistics.median(each[1:])
            for (of, way), each in medians.items()
            if of == size
        }
        row: dict[str, Any] = {
            "round_trip_us": {way: round(time, 1) for way, time in found.items()},
            "cold_memcpy_us": round(statistics.median(cold_copies(size)), 1),
        }
        for way in ("bare_gloo", *CONNECTORS):
            row[f"{way}_to_socket"] = round(
                statistics.median(
                    mine / plain
                    for mine, plain in zip(
                        medians[size, way][1:], medians[size, "socket"][1:], strict=True
                    )
                ),
                2,
            )
        for way in CONNECTORS:
            row[f"{way}_gb_per_s"] = round(2 * size / found[way] / 1000, 2)
        result[str(size)] = row
    print(json.dumps(result), file=results)


# The part that starts it, run by the workshop's own interpreter.


def main() -> None:
    import sides
    from report import keep, machine, output_file

    from tools.layout import Layout
    from tools.ui import step

    output = output_file(__doc__)
    layout = Layout(ROOT)
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("Two cores are needed, one for each role.")
    side = sides.patched(layout)
    about = {
        "command": "make bench ARGS='--only exchange'",
        "machine": machine(),
        "target_gloo_to_socket": TARGET,
    }
    with step("Round trips of 4 KiB to 4 MiB"):
        done = subprocess.run(
            [side.python, __file__, "--child"],
            env=side.env("v2"),
            cwd=layout.reports,
            stdout=subprocess.PIPE,
            timeout=TIMEOUT_S,
            check=True,
        )
    result = about | json.loads(done.stdout)
    print(json.dumps(result, indent=2))
    keep(layout, output, result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child()
    else:
        main()
