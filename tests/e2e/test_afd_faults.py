"""Real servers with the AFD roles: whatever happens to one, the other ends or goes on.

`make test` runs the three most important faults; all run in `make test-faults`, and
take about a minute each.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import sides
from afd_servers import (
    ROLES,
    START_TIMEOUT_S,
    AFDPair,
    AFDServer,
    Spec,
)
from servers import DBO_FLAGS, wait_ready
from sides import is_alive

from tools import checkpoint
from tools.layout import Layout
from tools.process import free_ports
from tools.serve import check_port
from tools.stream import lines_of

MODEL = checkpoint.DEFAULT
PROCESSES = ("api", "engine", "worker")

HEARTBEAT_TIMEOUT_S = 5
# No step is longer, also on a busy machine.
STEP_TIMEOUT_S = 30
# Of a fault, until the other side has logged it and its clients know: its bound, and
# what two busy cores may need on top.
NOTICE_S = HEARTBEAT_TIMEOUT_S + 7
# Until all processes of a server are gone: one whose parent was killed has 15 s to end
# by itself, an engine and then its worker.
END_S = 45
# What a server may leave in its folder for temporary files: the sockets that its
# processes had bound. An unpatched server leaves as many, also after SIGTERM.
SOCKETS = 7

pytestmark = pytest.mark.timeout(1800)
thorough = pytest.mark.skipif(
    "E2E_FAULTS" not in os.environ, reason="`make test-faults` runs it"
)


# Servers.


@pytest.fixture(scope="module")
def spec(layout: Layout) -> Spec:
    """All pairs have the same ports: each shows that those of the last are free."""
    side = sides.patched(layout)
    return Spec(
        side,
        checkpoint.ensure(layout, MODEL, side.python),
        layout.reports / "e2e" / "afd-faults",
        # Long prompts take many steps.
        options=("--max-num-batched-tokens=128",),
        attention_options=DBO_FLAGS,
        config={
            "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
            "step_timeout_s": STEP_TIMEOUT_S,
        },
    )


class Reference:
    """What the first pair of this module answered; each other has to do likewise."""

    def __init__(self) -> None:
        self.expected: list[list[str]] | None = None

    def check(self, server: AFDServer) -> None:
        got = [
            server.complete([seed] * length, 5)["tokens"]
            for seed, length in ((3, 1), (5, 40), (7, 150))
        ]
        if self.expected is None:
            self.expected = got
        assert got == self.expected


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@contextmanager
def running(spec: Spec, reference: Reference, name: str) -> Iterator[AFDPair]:
    pair = AFDPair(replace(spec, folder=spec.folder / name))
    try:
        pair.wait_ready()
        reference.check(pair.attention)
        yield pair
    finally:
        pair.kill()


@pytest.fixture
def pair(
    spec: Spec, reference: Reference, request: pytest.FixtureRequest
) -> Iterator[AFDPair]:
    """A pair that a test may ruin."""
    with running(spec, reference, file_name(request)) as pair:
        yield pair


def file_name(request: pytest.FixtureRequest) -> str:
    return re.sub(r"\W+", "-", request.node.name).strip("-")


# Clients.


class Client(threading.Thread):
    """Waits for a completion, streamed or at once.

    Attributes:
        chunks: How many parts of it have come.
        outcome: Why it has ended: `length`, `abort` (by the server) or `error: ...`.
    """

    def __init__(
        self,
        server: AFDServer,
        prompt: int,
        tokens: int,
        stream: bool = True,
        rank: int | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        self.body = {
            "model": server.model,
            "prompt": [9] * prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        self.stream = stream
        self.chunks = 0
        self.outcome = ""
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._ask()
        except (httpx.HTTPError, ValueError) as error:
            self.outcome = f"error: {error!r}"

    def _ask(self) -> str:
        last = "nothing"
        with (
            self.server.new_client(300) as client,
            client.stream(
                "POST", "/v1/completions", json=self.body, headers=self.headers
            ) as answer,
        ):
            for line in lines_of(answer.iter_bytes()):
                if line == "data: [DONE]":
                    return last
                data = json.loads(line.removeprefix("data: ") or "{}")
                if "error" in data:
                    return f"error: {data['error']}"
                for choice in data.get("choices", ()):
                    last = choice["finish_reason"]
                    self.chunks += 1
        return f"error: HTTP {answer.status_code} broke off" if self.stream else last

    def failed(self, timeout: float) -> bool:
        """Whether it is told, within `timeout` seconds, that there is no answer."""
        self.join(timeout)
        return not self.is_alive() and self.outcome.startswith(("error", "abort"))


PHASES = ("idle", "prefill", "decode")


def occupy(server: AFDServer, phase: str) -> list[Client]:
    """Bring an attention server into a phase; clients that wait for it."""
    if phase == "idle":
        return []
    if phase == "decode":
        clients = [Client(server, 5, 1900) for _ in range(2)]
        clients.append(Client(server, 5, 1900, stream=False))
        eventually(lambda: all(client.chunks > 2 for client in clients[:2]), 60)
        return clients
    clients = [Client(server, 2000, 10, stream=n > 0) for n in range(4)]
    eventually(lambda: server.metric("vllm:num_requests_running") > 0, 60)
    assert not any(client.chunks for client in clients), "the prefill is over"
    return clients


def eventually(
    true: Callable[[], bool], timeout: float, what: Callable[[], str] | None = None
) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(what() if what else f"Not so after {timeout} s.")
        time.sleep(0.05)


# What is left of a server.


@dataclass(frozen=True)
class Traces:
    """What must be gone once a server has ended."""

    server: AFDServer
    pids: list[int]
    memory: set[Path]
    sockets: int

    @classmethod
    def of(cls, server: AFDServer) -> Traces:
        pids = server.pids()
        memory = {path for pid in pids for path in shared_memory(pid)}
        return cls(server, pids, memory, SOCKETS * max(len(server.engines()), 1))

    def check_gone(self, timeout: float = END_S) -> None:
        """Wait until every process has ended, and see that nothing is left."""
        server = self.server
        assert server.process.is_gone(timeout), server.process.tail()
        # One that left the group would not have been seen.
        assert not [pid for pid in self.pids if is_alive(pid)]
        assert not [path for path in self.memory if path.exists()]
        sockets = [path for path in server.tmp.iterdir() if path.is_socket()]
        assert len(sockets) <= self.sockets
        if server.host:
            assert server.host.listening() == set()
        else:
            check_port("127.0.0.1", server.port)


def shared_memory(pid: int) -> set[Path]:
    """Files in /dev/shm that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    found = re.findall(r" (/dev/shm/[^\n]+)$", maps, re.MULTILINE)
    return {Path(path) for path in found if not path.endswith(" (deleted)")}


def check_unhealthy(server: AFDServer) -> None:
    def unhealthy() -> bool:
        try:
            return server.client.get("/health", timeout=5).status_code == 503
        except httpx.TransportError:
            return True

    eventually(unhealthy, NOTICE_S, lambda: f"{server.role} is still healthy.")


def check_logged(
    server: AFDServer,
    cause: str,
    timeout: float = NOTICE_S,
    address: str = "127.0.0.1",
    rank: int = 0,
) -> None:
    """Wait until a server has logged that its peer is lost, and why."""
    peer = {"attention": "ffn", "ffn": "attention"}[server.role]
    where = rf"{re.escape(address)}:\d+"
    pattern = rf"ERROR .*AFD {peer} peer \(rank {rank}\) at {where} {cause}"
    eventually(
        lambda: re.search(pattern, server.text()) is not None,
        timeout,
        lambda: f"{server.role} has not logged {pattern!r}:\n{server.process.tail()}",
    )


# A word for the end of a connection that its owner did not announce.
DIED = "(died|was lost|failed while)"
HUNG = f"hung: no sign of life for heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S}"
# FFN's worker outlives what starts it long enough to say goodbye.
LEFT = f"({DIED}|has shut down|aborted)"
# What FFN logs when attention has said so, perhaps followed by why.
GOODBYE = "has ended the session"


def check_lost(pair: AFDPair, role: str, cause: str, clients: list[Client]) -> None:
    """The peer of `role`, which is lost, ends and says why."""
    other = pair.other(role)
    traces = Traces.of(other)
    check_logged(other, cause)
    check_unhealthy(other)
    if role == "ffn":
        assert all(client.failed(NOTICE_S) for client in clients)
    traces.check_gone()


def check_ended_by_sigterm(server: AFDServer) -> None:
    traces = Traces.of(server)
    server.process.popen.terminate()
    assert server.process.wait(END_S) == 0, server.process.tail()
    traces.check_gone()


# One of a server's processes is lost.

# What `make test` runs.
IMPORTANT = {
    ("kill", "ffn", "worker", "decode"),
    ("stop", "ffn", "worker", "decode"),
    ("kill", "attention", "engine", "decode"),
}


def cases(fault: str, processes: Sequence[str]) -> list[Any]:
    """Role, process and phase, those that `make test` runs first."""
    found = itertools.product(ROLES, processes, PHASES)
    return [
        pytest.param(*each, marks=() if (fault, *each) in IMPORTANT else thorough)
        for each in sorted(found, key=lambda each: (fault, *each) not in IMPORTANT)
    ]


@pytest.mark.parametrize(("role", "process", "phase"), cases("kill", PROCESSES))
def test_kill_9(pair: AFDPair, role: str, process: str, phase: str) -> None:
    server = pair.servers[role]
    clients = occupy(pair.attention, phase)
    traces = Traces.of(server)
    os.kill(server.family()[process], signal.SIGKILL)
    if process == "worker":
        check_lost(pair, role, DIED, clients)
    elif role == "ffn":
        check_lost(pair, role, LEFT, clients)
    elif process == "engine":
        # Attention's worker outlives it long enough to say so.
        check_lost(pair, role, f"({DIED}|aborted: its parent process)", clients)
    else:
        # The engine ends in good order then, as on SIGTERM, also in the middle of a
        # step. FFN waits for another attention server.
        eventually(lambda: GOODBYE in pair.ffn.text(), NOTICE_S, pair.ffn.process.tail)
        assert pair.ffn.is_healthy()
    assert all(client.failed(NOTICE_S) for client in clients)
    traces.check_gone()
    if pair.ffn is not server and GOODBYE in pair.ffn.text():
        check_ended_by_sigterm(pair.ffn)


# Stopping one of the others keeps nobody's peer from its work, see TestUndisturbed.
@pytest.mark.parametrize(("role", "process", "phase"), cases("stop", ["worker"]))
def test_sigstop(pair: AFDPair, role: str, process: str, phase: str) -> None:
    server = pair.servers[role]
    clients = occupy(pair.attention, phase)
    traces = Traces.of(server)
    pid = server.family()[process]
    os.kill(pid, signal.SIGSTOP)
    check_lost(pair, role, HUNG, clients)
    # It finds out as soon as it can.
    os.kill(pid, signal.SIGCONT)
    check_logged(server, f"({LEFT}|hung)")
    assert all(client.failed(NOTICE_S) for client in clients)
    traces.check_gone()


# One of two attention ranks is lost, or the FFN role that serves both.

LOST = 1


@pytest.fixture
def ranks(
    spec: Spec, reference: Reference, request: pytest.FixtureRequest
) -> Iterator[AFDPair]:
    """A pair of servers, the one with the attention role of two engines."""
    spec = replace(
        spec,
        attention_options=(
            *spec.attention_options,
            "--data-parallel-size=2",
            "--api-server-count=1",
        ),
        config=spec.config | {"num_attention_ranks": 2},
    )
    with running(spec, reference, file_name(request)) as pair:
        assert len(pair.attention.engines()) == len(pair.attention.workers()) == 2
        yield pair


def occupy_ranks(server: AFDServer, phase: str) -> list[Client]:
    """Bring both ranks into a phase."""
    if phase == "idle":
        return []
    clients = [Client(server, 5, 1900, rank=rank) for rank in (0, 1) for _ in range(2)]
    eventually(lambda: all(client.chunks > 2 for client in clients), 60)
    return clients


def traces_of(pair: AFDPair) -> list[Traces]:
    return [Traces.of(server) for server in pair.servers.values()]


def check_all_lost(
    pair: AFDPair, cause: str, clients: list[Client], traces: list[Traces]
) -> None:
    """FFN has lost a rank, and everybody ends."""
    check_logged(pair.ffn, cause, rank=LOST)
    check_unhealthy(pair.attention)
    check_unhealthy(pair.ffn)
    assert all(client.failed(NOTICE_S) for client in clients)
    for each in traces:
        each.check_gone()


@thorough
@pytest.mark.parametrize("phase", ["idle", "decode"])
@pytest.mark.parametrize("process", ["engine", "worker"])
def test_kill_9_of_one_of_two_ranks(ranks: AFDPair, process: str, phase: str) -> None:
    attention = ranks.attention
    clients = occupy_ranks(attention, phase)
    found = attention.engines() if process == "engine" else attention.workers()
    traces = traces_of(ranks)
    os.kill(found[LOST], signal.SIGKILL)
    cause = f"({DIED}|aborted: its parent process EngineCore_DP{LOST} died)"
    check_all_lost(ranks, DIED if process == "worker" else cause, clients, traces)
    # Whose loss it was is said there, too.
    named = rf"EngineCore_DP{LOST}|AFD attention peer \(rank {LOST}\)"
    complaints = re.findall(r"^.*(?:WARNING|ERROR).*$", attention.text(), re.MULTILINE)
    assert any(re.search(named, line) for line in complaints)


@thorough
def test_sigstop_of_one_of_two_ranks(ranks: AFDPair) -> None:
    """Nothing else tells the other rank than FFN, which has missed heartbeats."""
    attention = ranks.attention
    clients = occupy_ranks(attention, "decode")
    traces = traces_of(ranks)
    pid = attention.workers()[LOST]
    os.kill(pid, signal.SIGSTOP)
    check_logged(ranks.ffn, HUNG, rank=LOST)
    check_logged(attention, rf"aborted: .*AFD attention peer \(rank {LOST}\) .*hung")
    os.kill(pid, signal.SIGCONT)
    check_all_lost(ranks, HUNG, clients, traces)


@thorough
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_loss_of_the_ffn_role_of_two_ranks(
    ranks: AFDPair, sent: signal.Signals
) -> None:
    clients = occupy_ranks(ranks.attention, "decode")
    traces = traces_of(ranks)
    pid = ranks.ffn.family()["worker"]
    os.kill(pid, sent)
    check_logged(ranks.attention, DIED if sent == signal.SIGKILL else HUNG)
    check_unhealthy(ranks.attention)
    assert all(client.failed(NOTICE_S) for client in clients)
    if sent == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    for each in traces:
        each.check_gone()


# While a server starts.


@thorough
@pytest.mark.parametrize("role", ROLES)
def test_killed_or_stopped_while_loading(
    spec: Spec, reference: Reference, role: str, request: pytest.FixtureRequest
) -> None:
    """The other waits, and takes one that is started later on the same ports."""
    spec = replace(spec, folder=spec.folder / file_name(request))
    other = AFDServer(spec, ROLES[1 - ROLES.index(role)])
    started = [other]
    try:
        for process in PROCESSES:
            server = AFDServer(spec, role, log_name=f"{role}-{process}")
            started.append(server)
            wait_worker(server)
            traces = Traces.of(server)
            os.kill(server.family()[process], signal.SIGKILL)
            traces.check_gone()
        server = AFDServer(spec, role)
        started.append(server)
        pid = wait_worker(server)
        os.kill(pid, signal.SIGSTOP)
        waits = {
            "attention": "Waiting for the AFD ffn server",
            "ffn": "Listening for an AFD attention server",
        }
        wait_logged(other, waits[other.role])
        os.kill(pid, signal.SIGCONT)
        wait_ready(server, other, timeout=START_TIMEOUT_S)
        reference.check(server if role == "attention" else other)
    finally:
        for each in started:
            each.kill()


@thorough
@pytest.mark.parametrize("role", ROLES)
def test_killed_while_warming_up(
    spec: Spec, role: str, request: pytest.FixtureRequest
) -> None:
    pair = AFDPair(replace(spec, folder=spec.folder / file_name(request)))
    try:
        server = pair.servers[role]
        wait_logged(pair.attention, "AFD session with")
        traces = Traces.of(server)
        other = Traces.of(pair.other(role))
        os.kill(server.family()["worker"], signal.SIGKILL)
        check_logged(other.server, LEFT)
        other.check_gone()
        traces.check_gone()
    finally:
        pair.kill()


@thorough
@pytest.mark.parametrize("role", ROLES)
def test_nobody_comes(spec: Spec, role: str, request: pytest.FixtureRequest) -> None:
    server = AFDServer(
        replace(
            spec,
            folder=spec.folder / file_name(request),
            config=spec.config | {"connect_timeout_s": 5},
        ),
        role,
    )
    try:
        where = f"127.0.0.1:{spec.ports.afd}"
        wait_logged(
            server,
            {
                "attention": f"No AFD ffn server at {where} (afd_host, afd_port) "
                "within connect_timeout_s=5: ",
                "ffn": f"No AFD attention server connected to {where} (afd_host, "
                "afd_port) within 5 s.",
            }[role],
        )
        Traces.of(server).check_gone()
    finally:
        server.kill()


def wait_worker(server: AFDServer) -> int:
    """Wait until the last of a server's processes has started; its id."""
    eventually(
        lambda: "worker" in server.family() or server.process.wait(0) is not None,
        START_TIMEOUT_S,
        lambda: f"The {server.role} server has no worker.",
    )
    assert server.process.wait(0) is None, server.process.tail()
    return server.family()["worker"]


def wait_logged(server: AFDServer, text: str) -> None:
    eventually(
        lambda: text in server.text() or server.process.wait(0) is not None,
        START_TIMEOUT_S,
        lambda: f"The {server.role} server has not logged {text!r}.",
    )
    assert text in server.text(), server.process.tail()


# A user ends them.


@thorough
def test_sigterm_of_attention_then_ffn(pair: AFDPair) -> None:
    """FFN goes on without attention, and takes another one."""
    for phase in ("idle", "decode"):
        attention = pair.attention
        clients = occupy(attention, phase)
        check_ended_by_sigterm(attention)
        assert all(client.failed(NOTICE_S) for client in clients)
        assert pair.ffn.is_healthy()
        check_no_complaint(pair.ffn)
        if phase == "idle":
            pair.servers["attention"] = AFDServer(
                replace(pair.spec, folder=pair.ffn.process.log.parent),
                "attention",
                log_name="attention-again",
            )
            pair.wait_ready()
    check_ended_by_sigterm(pair.ffn)
    check_no_complaint(pair.ffn)


@thorough
@pytest.mark.parametrize("phase", ["idle", "decode"])
def test_sigterm_of_ffn(pair: AFDPair, phase: str) -> None:
    """Attention cannot go on without FFN."""
    clients = occupy(pair.attention, phase)
    traces = Traces.of(pair.ffn)
    pair.ffn.process.popen.terminate()
    check_lost(pair, "ffn", "has shut down", clients)
    assert pair.ffn.process.wait(END_S) == 0, pair.ffn.process.tail()
    traces.check_gone()


@thorough
@pytest.mark.parametrize("role", ROLES)
def test_sigterm_while_loading(
    spec: Spec, role: str, request: pytest.FixtureRequest
) -> None:
    """Wherever it is by then: nobody else is there."""
    spec = replace(spec, folder=spec.folder / file_name(request))
    # At once, then when it has begun to load, then when it waits for the peer.
    for number, seconds in enumerate((0, 5, 20)):
        server = AFDServer(spec, role, log_name=f"{role}-{number}")
        try:
            wait_worker(server)
            time.sleep(seconds)
            traces = Traces.of(server)
            server.process.popen.terminate()
            assert server.process.wait(END_S) is not None, server.process.tail()
            traces.check_gone()
        finally:
            server.kill()


def check_no_complaint(server: AFDServer) -> None:
    # Not just "ERROR": vLLM reports one if its engine does not end in time.
    assert not re.search("ERROR .*AFD", server.text())


# A connection that breaks. Only the control connection: gloo's goes from one role to
# the other.


class Proxy:
    """Stands between attention and the port of FFN.

    Attributes:
        port: Where attention connects to.
        sent: What attention has sent, by connection.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent: list[bytearray] = []
        self._sockets: list[socket.socket] = []
        # To attention and to FFN.
        self._ends: tuple[socket.socket, ...] = ()
        self._stalled = False
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        """Take what comes, but pass nothing on."""
        self._stalled = True

    def inject(self, role: str, data: bytes) -> None:
        """Send something to a role, as if from its peer."""
        self._ends[ROLES.index(role)].sendall(data)

    def close(self) -> None:
        """End every connection."""
        self._listener.close()
        for each in self._sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # It has ended.

    def _accept(self) -> None:
        while True:
            try:
                attention, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(attention)
            try:
                ffn = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                attention.close()  # As if nobody listened here.
                continue
            self._sockets.append(ffn)
            self._ends = (attention, ffn)
            self.sent.append(bytearray())
            for source, target, record in (
                (attention, ffn, self.sent[-1]),
                (ffn, attention, None),
            ):
                threading.Thread(
                    target=self._pump, args=(source, target, record), daemon=True
                ).start()

    def _pump(
        self, source: socket.socket, target: socket.socket, record: bytearray | None
    ) -> None:
        try:
            while data := source.recv(65536):
                if record is not None:
                    record += data
                if not self._stalled:
                    target.sendall(data)
            if not self._stalled:
                target.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # The other pump, or close(), has ended it.


@dataclass(frozen=True)
class Break:
    """What happens to the control connection, and what each role says about it."""

    act: Callable[[Proxy], None]
    attention: str
    ffn: str


OVERSIZED = (2**31).to_bytes(4, "big") + b"\0" * 64

BREAKS = {
    "cut": Break(Proxy.close, DIED, DIED),
    "stalled": Break(Proxy.stall, HUNG, HUNG),
    "garbage-to-ffn": Break(
        lambda proxy: proxy.inject("ffn", OVERSIZED), "aborted: ", "sent a frame of "
    ),
    "garbage-to-attention": Break(
        lambda proxy: proxy.inject("attention", OVERSIZED),
        "sent a frame of ",
        "aborted: ",
    ),
}


@thorough
@pytest.mark.parametrize("name", BREAKS)
def test_control_connection_breaks(
    spec: Spec, reference: Reference, name: str, request: pytest.FixtureRequest
) -> None:
    proxy = Proxy(spec.ports.afd)
    spec = replace(spec, attention_config={"afd_port": proxy.port})
    try:
        with running(spec, reference, file_name(request)) as pair:
            clients = occupy(pair.attention, "decode")
            traces = [Traces.of(pair.servers[role]) for role in ROLES]
            BREAKS[name].act(proxy)
            for role in ROLES:
                check_logged(pair.servers[role], getattr(BREAKS[name], role))
                check_unhealthy(pair.servers[role])
            assert all(client.failed(NOTICE_S) for client in clients)
            for each in traces:
                each.check_gone()
    finally:
        proxy.close()


# What must not disturb a pair.


def talk(port: int, data: bytes, until_closed: bool = True) -> bytes:
    """Say something on a port; what is answered until the other end closes."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        try:
            stranger.sendall(data)
            stranger.settimeout(NOTICE_S)
            while until_closed and (more := stranger.recv(65536)):
                answer += more
        except ConnectionError:
            pass  # It was closed before all was read.
    return answer


STRANGERS: dict[str, bytes] = {
    "silence": b"",
    "empty frame": bytes(4),
    "zeros": bytes(65536),
    "text": b"GET / HTTP/1.1\r\nHost: ffn\r\n\r\n",
    "noise": bytes((n * 7919 + n // 251) % 256 for n in range(5000)),
    "oversized frame": OVERSIZED,
    "not msgpack": (40).to_bytes(4, "big") + b"\xc1" * 40,
    "wrong message": (13).to_bytes(4, "big") + b"\x81\xa4type\xa6AFDBye",
}


@thorough
class TestUndisturbed:
    """One pair for all, which has to serve on whatever comes."""

    @pytest.fixture(scope="class")
    def proxy(self, spec: Spec) -> Iterator[Proxy]:
        proxy = Proxy(spec.ports.afd)
        yield proxy
        proxy.close()

    @pytest.fixture(scope="class")
    def calm(self, spec: Spec, reference: Reference, proxy: Proxy) -> Iterator[AFDPair]:
        spec = replace(
            spec,
            folder=spec.folder / "undisturbed",
            attention_config={"afd_port": proxy.port},
            env={"VLLM_AFD_SECRET": "known to both"},
        )
        pair = AFDPair(spec)
        try:
            wait_logged(pair.ffn, "Listening for an AFD attention server")
            self.disturb(spec)
            pair.wait_ready()
            reference.check(pair.attention)
            yield pair
        finally:
            pair.kill()

    def disturb(self, spec: Spec) -> None:
        for data in STRANGERS.values():
            talk(spec.ports.afd, data)
            # Cut off, rather than waiting for an answer.
            talk(spec.ports.afd, data[: len(data) // 2], until_closed=False)

    def check_undisturbed(
        self, pair: AFDPair, reference: Reference, act: Callable[[], None]
    ) -> None:
        client = Client(pair.attention, 5, 300)
        eventually(lambda: client.chunks > 2, 60)
        act()
        client.join(120)
        assert client.outcome == "length"
        reference.check(pair.attention)
        assert pair.ffn.is_healthy()

    def test_strangers_before_and_within_a_session(
        self, calm: AFDPair, reference: Reference
    ) -> None:
        self.check_undisturbed(calm, reference, lambda: self.disturb(calm.spec))
        assert "Refused a connection from 127.0.0.1:" in calm.ffn.text()

    def test_many_silent_strangers(self, calm: AFDPair, reference: Reference) -> None:
        def crowd() -> None:
            where = ("127.0.0.1", calm.spec.ports.afd)
            crowd = [socket.create_connection(where, timeout=5) for _ in range(40)]
            for each in crowd:
                # All are sent away in the end.
                each.settimeout(NOTICE_S)
                try:
                    while each.recv(4096):
                        pass
                except ConnectionError:
                    pass
                each.close()

        self.check_undisturbed(calm, reference, crowd)

    def test_what_attention_said_is_not_believed_again(
        self, calm: AFDPair, reference: Reference, proxy: Proxy
    ) -> None:
        said = bytes(max(proxy.sent, key=len))
        assert b"AFDProof" in said
        self.check_undisturbed(
            calm, reference, lambda: talk(calm.spec.ports.afd, said) and None
        )
        assert re.search(
            "Refused a connection from .*VLLM_AFD_SECRET is not", calm.ffn.text()
        )

    def test_a_second_attention_server_is_refused(
        self, calm: AFDPair, reference: Reference
    ) -> None:
        second = AFDServer(
            calm.spec, "attention", log_name="second", port=free_ports(1)[0]
        )
        try:
            wait_logged(second, "already serving AFD attention peer (rank 0)")
            Traces.of(second).check_gone()
        finally:
            second.kill()
        assert "already serving AFD attention peer (rank 0)" in calm.ffn.text()
        reference.check(calm.attention)

    @pytest.mark.parametrize("process", ["api", "engine"])
    @pytest.mark.parametrize("role", ROLES)
    def test_a_process_that_the_peer_does_not_need_is_stopped(
        self, calm: AFDPair, reference: Reference, role: str, process: str
    ) -> None:
        pid = calm.servers[role].family()[process]
        os.kill(pid, signal.SIGSTOP)
        try:
            # Longer than the workers would take it from each other.
            time.sleep(HEARTBEAT_TIMEOUT_S + 2)
            if role == "ffn":
                reference.check(calm.attention)
        finally:
            os.kill(pid, signal.SIGCONT)
        reference.check(calm.attention)
        assert calm.ffn.is_healthy()

    @pytest.mark.parametrize("role", ROLES)
    def test_a_short_stop_is_no_failure(
        self, calm: AFDPair, reference: Reference, role: str
    ) -> None:
        pid = calm.servers[role].family()["worker"]

        def pause() -> None:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(HEARTBEAT_TIMEOUT_S / 3)
            os.kill(pid, signal.SIGCONT)

        self.check_undisturbed(calm, reference, pause)
