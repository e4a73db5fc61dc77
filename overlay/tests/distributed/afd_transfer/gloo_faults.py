# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fail the peer of a GlooAFDConnector over and over. Run by test_gloo_faults.py.

    python -m tests.distributed.afd_transfer.gloo_faults CASE REPETITIONS

A repetition connects this process to a forked one, fails that, and checks the error
here. It is a process of its own because gloo may end it.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

import torch

from vllm.distributed.afd_transfer.afd_connector.base import AFDLayout, AFDTransfer
from vllm.distributed.afd_transfer.afd_connector.gloo_connector import (
    GlooAFDConnector,
)
from vllm.distributed.afd_transfer.afd_connector.host_frame import HostFrameSlot
from vllm.distributed.afd_transfer.errors import AFDError, AFDPeerError

from .utils import ATTENTION_PEER, FFN_PEER, SOON_S, experts, make_config, make_input

ROWS = 4096
FEW_ROWS = 5
# A frame of ROWS rows, 64 MiB, is on its way for a while.
LAYOUT = AFDLayout(ROWS, 2, 4096, torch.float32)
STEP_TIMEOUT_S = 1.0
PEERS = {"ffn": ATTENTION_PEER, "attention": FFN_PEER}


def socket_exchange(sock: socket.socket) -> Callable[[bytes], bytes]:
    def exchange(data: bytes) -> bytes:
        sock.sendall(struct.pack("<I", len(data)) + data)
        (size,) = struct.unpack("<I", sock.recv(4, socket.MSG_WAITALL))
        return sock.recv(size, socket.MSG_WAITALL)

    return exchange


def connect(role: str, sock: socket.socket, step_timeout_s: float) -> GlooAFDConnector:
    config = make_config(step_timeout_s=step_timeout_s)
    connector = GlooAFDConnector(config, role, LAYOUT, PEERS[role])
    connector.connect(socket_exchange(sock), "127.0.0.1", SOON_S)
    return connector


def transfer(rows: int, stage: int = 0, layer: int = 0) -> AFDTransfer:
    return AFDTransfer(seq=1, layer=layer, stage=stage, num_stages=2, rows=rows)


class Peer:
    """A forked process with the other role, and the connector of this one."""

    def __init__(
        self,
        role: str,
        behaviour: Callable[[GlooAFDConnector, socket.socket], None],
        step_timeout_s: float = SOON_S,
    ):
        self.sock, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.sock.close()
            status = 1
            try:
                other = "ffn" if role == "attention" else "attention"
                behaviour(connect(other, theirs, SOON_S), theirs)
                status = 0
            except AFDPeerError:
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        # A peer that is left over, stopped, would keep this process's pipes open.
        atexit.register(os.kill, self.pid, signal.SIGKILL)
        self.connector = connect(role, self.sock, step_timeout_s)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_until_stopped(self) -> None:
        self.signal(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def expect_error(self, wait: Callable[[], object], bound_s: float) -> str:
        """wait() must end with an error that names the peer, and so must close()."""
        start = time.monotonic()
        try:
            wait()
        except AFDPeerError as e:
            error = str(e)
        else:
            raise AssertionError("the peer failed and nothing was raised")
        check(time.monotonic() - start < bound_s, "the error came too late")
        check(error.startswith(PEERS[self.connector.role]), error)
        start = time.monotonic()
        self.connector.close()
        check(time.monotonic() - start < 3, "close() took too long")
        return error

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        os.waitpid(self.pid, 0)
        atexit.unregister(os.kill)
        self.sock.close()


def check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def sleep_forever(connector: GlooAFDConnector, sock: socket.socket) -> None:
    sock.recv(1)


def submit_large(connector: GlooAFDConnector, sock: socket.socket) -> None:
    sock.recv(1, socket.MSG_WAITALL)
    handle = connector.submit(transfer(ROWS), torch.ones(ROWS, LAYOUT.hidden_size))
    handle.wait()


def submit_large_with_a_forged_end(
    connector: GlooAFDConnector, sock: socket.socket
) -> None:
    """In the middle of the frame is what would end one of FEW_ROWS rows."""
    hidden_states = torch.ones(ROWS, LAYOUT.hidden_size)
    few = HostFrameSlot(LAYOUT, 0, True)
    nbytes = few.write(transfer(FEW_ROWS), hidden_states[:FEW_ROWS])
    end = few.buffer[nbytes - 8 : nbytes]
    hidden_states.view(torch.uint8).view(-1)[nbytes - 72 : nbytes - 64] = end
    sock.recv(1, socket.MSG_WAITALL)
    connector.submit(transfer(ROWS), hidden_states).wait()


class ArrivedWhole(Exception):
    """The peer was not stopped in time: the case has not happened."""


def receive_part(peer: Peer, rows: int = ROWS) -> None:
    """Let a large frame arrive in part, and stop the peer.

    Args:
        peer: Sends a frame of ROWS rows.
        rows: What is expected.

    Raises:
        ArrivedWhole: It arrived as a whole before the peer was stopped.

    """
    connector = peer.connector
    connector.post_recv(transfer(rows))
    incoming = connector._lanes[0].incoming
    received = memoryview(incoming.buffer.numpy())
    received[4096] = received[-1] = 0xA5
    peer.sock.sendall(b"x")
    deadline = time.monotonic() + SOON_S
    while received[4096] == 0xA5 or (rows < ROWS and not incoming.arrived()):
        check(time.monotonic() < deadline, "nothing arrived")
    peer.wait_until_stopped()
    if received[-1] != 0xA5:
        connector.abort(AFDError("arrived as a whole"))
        connector.close()
        peer.end()
        raise ArrivedWhole


def killed_while_ffn_waits() -> str:
    peer = Peer("ffn", sleep_forever)
    peer.connector.post_recv(transfer(5))
    threading.Timer(0.01, peer.signal, [signal.SIGKILL]).start()
    error = peer.expect_error(lambda: peer.connector.recv(transfer(5)), 5)
    peer.end()
    return error


def killed_while_attention_waits() -> str:
    peer = Peer("attention", sleep_forever)
    handle = peer.connector.submit(transfer(5), torch.ones(5, LAYOUT.hidden_size))
    threading.Timer(0.01, peer.signal, [signal.SIGKILL]).start()
    error = peer.expect_error(handle.wait, 5)
    peer.end()
    return error


def killed_before_submit() -> str:
    peer = Peer("attention", sleep_forever)
    peer.signal(signal.SIGKILL)
    os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)
    error = peer.expect_error(
        lambda: peer.connector.submit(
            transfer(5), torch.ones(5, LAYOUT.hidden_size)
        ).wait(),
        5,
    )
    peer.end()
    return error


def killed_in_the_middle_of_a_frame() -> str:
    peer = Peer("ffn", submit_large)
    receive_part(peer)
    peer.signal(signal.SIGKILL)
    error = peer.expect_error(lambda: peer.connector.recv(transfer(ROWS)), 5)
    peer.end()
    return error


def killed_while_it_receives() -> str:
    """The frame is on its way out and the peer reads no more of it."""
    peer = Peer("attention", sleep_forever)
    handle = peer.connector.submit(transfer(ROWS), torch.ones(ROWS, LAYOUT.hidden_size))
    peer.signal(signal.SIGKILL)
    error = peer.expect_error(handle.wait, 5)
    peer.end()
    return error


def stopped_while_ffn_waits() -> str:
    peer = Peer("ffn", sleep_forever, STEP_TIMEOUT_S)
    peer.connector.post_recv(transfer(5))
    peer.wait_until_stopped()
    error = peer.expect_error(
        lambda: peer.connector.recv(transfer(5)), STEP_TIMEOUT_S + 2
    )
    check("did not arrive within step_timeout_s=1" in error, error)
    peer.end()
    return error


def stopped_in_the_middle_of_a_frame() -> str:
    peer = Peer("ffn", submit_large, STEP_TIMEOUT_S)
    receive_part(peer)
    error = peer.expect_error(
        lambda: peer.connector.recv(transfer(ROWS)), STEP_TIMEOUT_S + 2
    )
    peer.end()
    return error


def stopped_in_the_middle_of_a_frame_with_a_forged_end() -> str:
    peer = Peer("ffn", submit_large_with_a_forged_end, STEP_TIMEOUT_S)
    receive_part(peer, FEW_ROWS)
    error = peer.expect_error(
        lambda: peer.connector.recv(transfer(FEW_ROWS)), STEP_TIMEOUT_S + 2
    )
    peer.end()
    return error


def stopped_while_it_receives() -> str:
    peer = Peer("attention", sleep_forever, STEP_TIMEOUT_S)
    peer.wait_until_stopped()
    handle = peer.connector.submit(transfer(ROWS), torch.ones(ROWS, LAYOUT.hidden_size))
    error = peer.expect_error(handle.wait, STEP_TIMEOUT_S + 2)
    peer.end()
    return error


def aborted(peer: Peer, wait: Callable[[], object]) -> str:
    cause = AFDPeerError(f"{PEERS[peer.connector.role]} sent no heartbeat")
    threading.Timer(0.02, peer.connector.abort, [cause]).start()
    error = peer.expect_error(wait, 1.02)
    check(error == str(cause), error)
    peer.end()
    return error


def aborted_while_the_peer_is_stopped() -> str:
    peer = Peer("ffn", sleep_forever)
    peer.connector.post_recv(transfer(5))
    peer.wait_until_stopped()
    return aborted(peer, lambda: peer.connector.recv(transfer(5)))


def aborted_in_the_middle_of_a_frame() -> str:
    peer = Peer("ffn", submit_large)
    receive_part(peer)
    return aborted(peer, lambda: peer.connector.recv(transfer(ROWS)))


def aborted_while_a_stopped_peer_receives() -> str:
    peer = Peer("attention", sleep_forever)
    peer.wait_until_stopped()
    handle = peer.connector.submit(transfer(ROWS), torch.ones(ROWS, LAYOUT.hidden_size))
    return aborted(peer, handle.wait)


def closed_while_a_stopped_peer_receives() -> str:
    """close() gives up on what the peer does not read."""
    peer = Peer("ffn", submit_large)
    peer.connector.post_recv(transfer(ROWS))
    peer.sock.sendall(b"x")
    hidden_states, _ = peer.connector.recv(transfer(ROWS))
    peer.wait_until_stopped()
    peer.connector.send(transfer(ROWS), hidden_states)
    start = time.monotonic()
    peer.connector.close()
    check(time.monotonic() - start < 3, "close() took too long")
    peer.end()
    return PEERS["ffn"]


def process_ends_without_close() -> str:
    """The interpreter ends normally with a receive in flight, and a thread in it."""
    sock, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        sock.close()
        connector = connect("ffn", theirs, SOON_S)
        for stage in range(2):
            connector.post_recv(transfer(5, stage))
        waiting = threading.Thread(
            target=lambda: connector.recv(transfer(5, 1)), daemon=True
        )
        waiting.start()
        # Ends as a script does, not by os._exit().
        raise SystemExit(0)
    theirs.close()
    connector = connect("attention", sock, SOON_S)
    handle = connector.submit(transfer(5), torch.ones(5, LAYOUT.hidden_size))
    _, status = os.waitpid(pid, 0)
    check(status == 0, f"the peer ended with status {status}")
    try:
        handle.wait()
    except AFDPeerError as e:
        error = str(e)
    connector.close()
    sock.close()
    return error


def failed_only_in_its_session() -> str:
    """After a failure, the same process serves the next peer."""
    killed_in_the_middle_of_a_frame()

    def serve(connector: GlooAFDConnector, sock: socket.socket) -> None:
        hidden_states, _ = make_input(LAYOUT, transfer(7))
        output = connector.submit(transfer(7), hidden_states).wait()
        expected = experts(transfer(7), hidden_states, None)
        sock.sendall(b"y" if torch.equal(output, expected) else b"n")
        sock.recv(1)

    peer = Peer("ffn", serve)
    peer.connector.post_recv(transfer(7))
    output = experts(transfer(7), *peer.connector.recv(transfer(7)))
    peer.connector.send(transfer(7), output)
    check(peer.sock.recv(1) == b"y", "wrong output after a failure")
    peer.connector.close()
    peer.end()
    return PEERS["ffn"]


CASES: dict[str, Callable[[], str]] = {
    case.__name__: case
    for case in (
        killed_while_ffn_waits,
        killed_while_attention_waits,
        killed_before_submit,
        killed_in_the_middle_of_a_frame,
        killed_while_it_receives,
        stopped_while_ffn_waits,
        stopped_in_the_middle_of_a_frame,
        stopped_in_the_middle_of_a_frame_with_a_forged_end,
        stopped_while_it_receives,
        aborted_while_the_peer_is_stopped,
        aborted_in_the_middle_of_a_frame,
        aborted_while_a_stopped_peer_receives,
        closed_while_a_stopped_peer_receives,
        process_ends_without_close,
        failed_only_in_its_session,
    )
}


def run(case: Callable[[], str]) -> str:
    for _ in range(20):
        with contextlib.suppress(ArrivedWhole):
            return case()
    raise AssertionError("the peer was never stopped in the middle of a frame")


def main() -> None:
    torch.set_num_threads(1)
    case, repetitions = CASES[sys.argv[1]], int(sys.argv[2])
    errors = [run(case) for _ in range(repetitions)]
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
