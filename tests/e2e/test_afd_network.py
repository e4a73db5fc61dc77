"""Both AFD roles on two hosts: a good wire, a slow and lossy one, one that is cut.

`make test-network` runs it. The hosts are network namespaces of this machine with
addresses of their own, and the second host's monotonic clock is a day ahead, where
the kernel can have it so; see hosts.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import sides
from afd_servers import ROLES, AFDPair, Spec
from hosts import Network, NoHosts
from servers import DBO_FLAGS, Server
from test_afd_faults import (
    DIED,
    MODEL,
    Client,
    Traces,
    check_logged,
    check_no_complaint,
    check_unhealthy,
    eventually,
    occupy,
)

from tools import checkpoint, trace
from tools.layout import Layout

HEARTBEAT_TIMEOUT_S = 8
# Of a cut, until both sides have logged it and the clients know: the bound, and what
# two busy cores may need on top.
NOTICE_S = HEARTBEAT_TIMEOUT_S + 7
HUNG = f"hung: .*heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S}"
# Of the slow wire, each way: what is between two towns, and a bad line.
DELAY_S = 0.004
LOSS = 0.015
# What TCP makes up for by sending again, well within the time of heartbeats.
OUTAGE_S = 1.0
CLOCK_S = 86400

OPTIONS = ("--max-num-batched-tokens=128",)
# Prompts by length; those beyond 128 take several steps.
PROMPTS = [
    [(seed * 31 + at * 7) % 200 + 3 for at in range(length)]
    for seed, length in enumerate((1, 2, 17, 40, 90, 150, 300, 25))
]
TOKENS = 12

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        "E2E_NETWORK" not in os.environ, reason="`make test-network` runs it"
    ),
]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        network = Network(CLOCK_S)
    except NoHosts as error:
        pytest.skip(str(error))
    with network:
        yield network


@pytest.fixture(autouse=True)
def wire(network: Network) -> Network:
    """The wire, good again for each test."""
    network.set_wire()
    return network


def answers(server: Server) -> list[list[str]]:
    """Greedy tokens for each prompt, first one by one, then some at once."""
    with ThreadPoolExecutor(4) as pool:
        return [
            each["tokens"]
            for each in (
                *(server.complete(prompt, TOKENS) for prompt in PROMPTS[:3]),
                *pool.map(lambda prompt: server.complete(prompt, TOKENS), PROMPTS),
            )
        ]


@pytest.fixture(scope="module")
def expected(layout: Layout) -> list[list[str]]:
    """What one server without AFD and without DBO answers."""
    side = sides.patched(layout)
    server = Server(
        side,
        "v2",
        checkpoint.ensure(layout, MODEL, side.python),
        layout.reports / "e2e" / "afd-network",
        [*OPTIONS, "--max-model-len=2048"],
    )
    try:
        server.wait_ready()
        return answers(server)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def spec(layout: Layout, network: Network) -> Spec:
    side = sides.patched(layout)
    folder = layout.reports / "e2e" / "afd-network"
    traces = folder / "traces"
    shutil.rmtree(traces, ignore_errors=True)
    traces.mkdir(parents=True)
    attention, ffn = network.hosts
    return Spec(
        side,
        checkpoint.ensure(layout, MODEL, side.python),
        folder,
        options=OPTIONS,
        attention_options=DBO_FLAGS,
        config={
            "afd_host": ffn.address,
            "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
            "step_timeout_s": 120,
            "trace_dir": str(traces),
        },
        env={
            "VLLM_AFD_SECRET": "known on both hosts",
            # vLLM's own process groups would listen on the address of the host name.
            "GLOO_SOCKET_IFNAME": "lo",
        },
        hosts={"attention": attention, "ffn": ffn},
    )


@contextmanager
def running(spec: Spec) -> Iterator[AFDPair]:
    pair = AFDPair(spec)
    try:
        pair.wait_ready()
        yield pair
    finally:
        pair.kill()


def check_cut(
    pair: AFDPair, cut: Callable[[], None], addresses: tuple[str, str]
) -> None:
    """Both roles end, and say whom they have lost; so does every client."""
    clients = occupy(pair.attention, "decode")
    traces = [Traces.of(server) for server in pair.servers.values()]
    assert all(client.is_alive() for client in clients)
    cut()
    deadline = time.monotonic() + NOTICE_S
    for role, peer in zip(ROLES, reversed(addresses), strict=True):
        check_logged(
            pair.servers[role],
            f"({HUNG}|{DIED})",
            deadline - time.monotonic(),
            f"[{peer}]" if ":" in peer else peer,
        )
        check_unhealthy(pair.servers[role])
    for client in clients:
        assert client.failed(deadline + 5 - time.monotonic()), client.outcome
    # The one that waits for its whole answer; the others have had a part of theirs.
    assert "'code': 500" in clients[-1].outcome, clients[-1].outcome
    for each in traces:
        each.check_gone()


def file_of(spec: Spec, role: str) -> trace.Trace:
    """What a role has traced so far."""
    (path,) = Path(spec.config["trace_dir"]).glob(f"afd-{role}-*.jsonl")
    return trace.read(path)


def test_the_wire_does_as_it_is_told(network: Network) -> None:
    attention, ffn = network.hosts
    with ffn.entered(), socket.create_server((ffn.address, 0)) as listener:
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        with attention.entered():
            talker = socket.create_connection(listener.getsockname(), timeout=10)

    def trips(count: int) -> list[float]:
        times = []
        for _ in range(count):
            begin = time.monotonic()
            talker.sendall(b"?")
            assert talker.recv(1) == b"?"
            times.append(time.monotonic() - begin)
        return times

    with talker:
        assert statistics.median(trips(20)) < 2 * DELAY_S
        network.set_wire(DELAY_S)
        assert min(trips(20)) >= 2 * DELAY_S
        lost = network.dropped
        network.set_wire(loss=0.2)
        trips(20)
        assert network.dropped > lost
        network.set_wire(cut=True)
        talker.settimeout(1)
        with pytest.raises(TimeoutError):
            trips(1)


def echo(listener: socket.socket) -> None:
    other, _ = listener.accept()
    with other, suppress(ConnectionError):
        while data := other.recv(4096):
            other.sendall(data)


def test_nothing_is_left_of_the_hosts_when_the_test_is_killed() -> None:
    code = (
        "import subprocess, sys; sys.path[0] = sys.argv[1]; import hosts\n"
        "host = hosts.Network().hosts[1]\n"
        "server = subprocess.Popen(host.command(['sleep', '600']))\n"
        "print(host.network, server.pid, flush=True); server.wait()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        network, pid = other.stdout.readline().split()
        assert Path(network).exists()
        assert sides.is_alive(int(pid))
        other.send_signal(signal.SIGKILL)
        eventually(lambda: not Path(network).exists(), 10)
        assert not sides.is_alive(int(pid))
    finally:
        other.kill()
        other.wait()


@pytest.fixture(scope="class")
def pair(spec: Spec, expected: list[list[str]]) -> Iterator[AFDPair]:
    """Started after the server that `expected` needs has gone: there are two cores."""
    with running(spec) as pair:
        yield pair


class TestOnePair:
    """Whatever the wire does, short of being cut for good."""

    def test_same_tokens_as_one_server(
        self, pair: AFDPair, expected: list[list[str]]
    ) -> None:
        assert answers(pair.attention) == expected
        assert pair.attention.metric("vllm:dbo_split_steps_total") > 0
        for server in pair.servers.values():
            check_no_complaint(server)

    def test_listens_on_the_configured_addresses_only(self, pair: AFDPair) -> None:
        """And on loopback, where vLLM's own process groups have their sockets."""
        ports = pair.spec.ports
        for role, own in (("attention", set()), ("ffn", {ports.afd})):
            host = pair.spec.hosts[role]
            found = host.listening()
            assert {address for address, _ in found} == {"127.0.0.1", host.address}
            assert ("127.0.0.1", getattr(ports, role)) in found
            # gloo's is one that the kernel chose.
            outside = {port for address, port in found if address == host.address}
            assert own < outside
            assert len(outside) == len(own) + 1

    def test_same_tokens_over_a_slow_wire_that_loses_packets(
        self, pair: AFDPair, wire: Network, expected: list[list[str]]
    ) -> None:
        lost = wire.dropped
        wire.set_wire(DELAY_S, LOSS)
        assert answers(pair.attention) == expected
        assert wire.dropped > lost + 5
        for server in pair.servers.values():
            assert server.is_healthy()
            check_no_complaint(server)

    def test_clocks_are_compared_over_a_slow_wire(
        self, pair: AFDPair, wire: Network, tmp_path: Path
    ) -> None:
        before = {role: len(file_of(pair.spec, role).clocks) for role in ROLES}
        wire.set_wire(DELAY_S, LOSS)
        # One a quarter of heartbeat_timeout_s; one may have been on its way.
        eventually(
            lambda: all(
                len(file_of(pair.spec, role).clocks) >= before[role] + 5
                for role in ROLES
            ),
            10 * HEARTBEAT_TIMEOUT_S,
        )
        attention, ffn = (file_of(pair.spec, role) for role in ROLES)
        ahead = (pair.ffn.host or wire.hosts[1]).clock_s * 10**9
        for each, true in ((attention, ahead), (ffn, -ahead)):
            for offset, trip in each.clocks:
                assert abs(offset - true) <= trip // 2 + 1
            for _, trip in each.clocks[before[each.role] + 1 :]:
                assert trip >= 2 * DELAY_S * 1e9

        # As if each host had been started by itself.
        copies = []
        for number, each in enumerate((attention, ffn)):
            lines = each.path.read_text().splitlines(keepends=True)
            header = json.loads(lines[0]) | {"boot_id": f"boot {number}"}
            copy = tmp_path / each.path.name
            copy.write_text("".join([json.dumps(header) + "\n", *lines[1:]]))
            copies.append(copy)
        session = trace.load(copies)
        assert "clocks compared" in session.alignment
        assert session.error_ns < 50e6
        moved = ffn.steps[0].begin - session.ffn.steps[0].begin
        assert abs(moved - ahead) <= session.error_ns + 1
        summary = trace.summarise(session)
        assert summary.exchanges > 0
        assert summary.early == 0, "received before it was sent"

    def test_a_short_outage_is_no_failure(
        self, pair: AFDPair, wire: Network, expected: list[list[str]]
    ) -> None:
        client = Client(pair.attention, 5, 150)
        eventually(lambda: client.chunks > 5, 60)
        wire.set_wire(cut=True)
        time.sleep(OUTAGE_S)
        had = client.chunks
        wire.set_wire()
        client.join(120)
        assert client.outcome == "length"
        assert had < client.chunks == 150
        assert answers(pair.attention) == expected
        for server in pair.servers.values():
            check_no_complaint(server)

    def test_link_of_attention_goes_down(self, pair: AFDPair) -> None:
        """The last test of this pair."""
        check_down(pair, "attention")


def check_down(pair: AFDPair, role: str) -> None:
    host = pair.spec.hosts[role]
    attention, ffn = (pair.spec.hosts[each] for each in ROLES)
    try:
        check_cut(pair, lambda: host.set_link(False), (attention.address, ffn.address))
    finally:
        host.set_link(True)


def test_link_of_ffn_goes_down(spec: Spec) -> None:
    with running(replace(spec, folder=spec.folder / "ffn-down")) as pair:
        check_down(pair, "ffn")


def test_wire_between_is_cut_with_ipv6(
    spec: Spec, network: Network, expected: list[list[str]]
) -> None:
    """No host sees that its link is down."""
    attention, ffn = network.hosts
    # Addresses of IPv6 went when the links did.
    for host in network.hosts:
        host.add_address6()
    spec = replace(
        spec,
        folder=spec.folder / "cut",
        config=spec.config | {"afd_host": ffn.address6},
    )
    with running(spec) as pair:
        assert answers(pair.attention) == expected
        check_cut(
            pair,
            lambda: network.set_wire(cut=True),
            (attention.address6, ffn.address6),
        )
