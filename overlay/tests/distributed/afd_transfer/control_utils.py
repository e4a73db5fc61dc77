# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Peers of the AFD control plane, for tests."""

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from vllm.config.afd import AFDConfig
from vllm.distributed.afd_transfer.control import AFDControl
from vllm.distributed.afd_transfer.handshake import authenticate, expect, get_secret
from vllm.distributed.afd_transfer.messages import AFDChannel, AFDHello, AFDReady

from .message_utils import TIMEOUT_S, hello, socket_pair, wait_until


def make_config(role: str, port: int = 29700, **kwargs: Any) -> AFDConfig:
    kwargs = {"connect_timeout_s": 20, "heartbeat_timeout_s": 10} | kwargs
    return AFDConfig(afd_role=role, afd_port=port, **kwargs)


def other_role(role: str) -> str:
    return "ffn" if role == "attention" else "attention"


def free_port(host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]


def make_control(
    sock: socket.socket,
    role: str,
    num_ubatches: int = 2,
    max_tokens: dict[str, int] | None = None,
    **kwargs: Any,
) -> AFDControl:
    """One end of a session, as after a handshake."""
    peer = other_role(role)
    limits = {"attention": 128, "ffn": 128} | (max_tokens or {})
    return AFDControl(
        make_config(role, **kwargs),
        AFDChannel(sock),
        hello(role, num_ubatches=num_ubatches, max_num_batched_tokens=limits[role]),
        hello(peer, num_ubatches=2, max_num_batched_tokens=limits[peer]),
    )


@contextlib.contextmanager
def session(**kwargs: Any) -> Iterator[tuple[AFDControl, AFDControl]]:
    """The attention and the FFN end of a session."""
    with socket_pair() as (a, f), contextlib.ExitStack() as stack:
        attention = make_control(a, "attention", **kwargs)
        stack.callback(attention.close)
        ffn = make_control(f, "ffn", **kwargs)
        stack.callback(ffn.close)
        yield attention, ffn


class RawPeer:
    """A peer that can do a handshake, and then send whatever it likes."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.channel = AFDChannel(sock)

    @classmethod
    def connect(cls, port: int, host: str = "127.0.0.1") -> "RawPeer":
        return cls(socket.create_connection((host, port), timeout=TIMEOUT_S))

    @property
    def deadline(self) -> float:
        return time.monotonic() + TIMEOUT_S

    def authenticate(self, role: str) -> None:
        authenticate(self.channel, role, get_secret(), self.deadline)

    def handshake(self, ours: AFDHello) -> AFDHello:
        self.authenticate(ours.role)
        if ours.role == "attention":
            self.channel.send(ours, TIMEOUT_S)
            theirs = expect(self.channel, AFDHello, self.deadline)
            self.channel.send(AFDReady(), TIMEOUT_S)
        else:
            theirs = expect(self.channel, AFDHello, self.deadline)
            self.channel.send(ours, TIMEOUT_S)
            expect(self.channel, AFDReady, self.deadline)
        return theirs

    def send_raw(self, data: bytes) -> None:
        self.sock.settimeout(TIMEOUT_S)
        self.sock.sendall(data)
        self.sock.setblocking(False)

    def recv_until_closed(self) -> bytes:
        self.sock.settimeout(TIMEOUT_S)
        data = b""
        with contextlib.suppress(ConnectionError):
            while chunk := self.sock.recv(4096):
                data += chunk
        return data

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


@contextlib.contextmanager
def session_with_raw_peer(
    role: str, **kwargs: Any
) -> Iterator[tuple[AFDControl, RawPeer]]:
    """A session whose end with `role` is real, and the other one raw."""
    with socket_pair() as (a, b), RawPeer(b) as raw:
        control = make_control(a, role, **kwargs)
        try:
            yield control, raw
        finally:
            control.close()


def _child_peer(role: str, port: int, pipe: Any, kwargs: dict[str, Any]) -> None:
    control = make_control(
        socket.create_connection(("127.0.0.1", port)), role, **kwargs
    )
    failed = threading.Event()
    control.start(lambda error: failed.set())
    pipe.send("connected")
    pipe.recv()
    failed.wait(TIMEOUT_S)
    pipe.send(str(control.error))
    os._exit(0)


# The modules are imported once, in the server that the children are forked from.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


@contextlib.contextmanager
def session_with_process(
    role: str, **kwargs: Any
) -> Iterator[tuple[AFDControl, BaseProcess, Any]]:
    """A session whose end with `role` is here, and the other one in a process.

    Yields the end, the process, and a pipe: send something to have the process send
    the error of its end, and exit.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(120)  # The first process imports vLLM.
        pipe, child_pipe = _processes.Pipe()
        stack.callback(pipe.close)
        child = _processes.Process(
            target=_child_peer,
            args=(other_role(role), server.getsockname()[1], child_pipe, kwargs),
            daemon=True,
        )
        child.start()
        child_pipe.close()
        stack.callback(child.join, TIMEOUT_S)
        stack.callback(child.kill)
        control = make_control(server.accept()[0], role, **kwargs)
        stack.callback(control.close)
        assert pipe.poll(TIMEOUT_S) and pipe.recv() == "connected"
        yield control, child, pipe


def stop(child: BaseProcess) -> None:
    """Stop a process, and wait until it is."""
    process = psutil.Process(child.pid)
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the stop")
