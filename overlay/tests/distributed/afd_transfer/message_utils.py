# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the tests of the AFD control plane share."""

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from vllm.distributed.afd_transfer.messages import (
    AFDChannel,
    AFDHello,
    AFDLayerInfo,
    AFDStep,
)

# Nothing in these tests takes this long; a wait that does has hung.
TIMEOUT_S = 30.0


def hello(role: str, /, **kwargs: Any) -> AFDHello:
    defaults: dict[str, Any] = dict(
        vllm_version="0.30.0",
        role=role,
        rank=0,
        num_attention_ranks=1,
        num_ffn_ranks=1,
        model={"architecture": "Moe", "weights": "cafe"},
        dtype="bfloat16",
        hidden_size=64,
        layers=[
            AFDLayerInfo(name="model.layers.0.mlp", gate_on_ffn=True),
            AFDLayerInfo(
                name="model.layers.1.mlp",
                gate_on_ffn=False,
                logits_size=8,
                logits_dtype="float32",
            ),
        ],
        gate_placement="auto",
        max_num_batched_tokens=128,
        num_ubatches=2,
        connector="GlooAFDConnector",
    )
    return AFDHello(**(defaults | kwargs))


def step(seq: int, *stage_tokens: int) -> AFDStep:
    return AFDStep(seq=seq, kind="eager", stage_tokens=list(stage_tokens or (1,)))


def repeat(times: int) -> Callable:
    """Run a test several times, and say which time failed."""

    def decorator(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            for i in range(times):
                try:
                    test(*args, **kwargs)
                except Exception as e:
                    raise AssertionError(f"repetition {i} of {times}") from e

        return run

    return decorator


def background(fn: Callable, *args: Any, **kwargs: Any) -> Future:
    """Run a call in a thread. Wait for it with `result(TIMEOUT_S)`."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, name="test-background", daemon=True).start()
    return future


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {TIMEOUT_S} s: {what}")
        time.sleep(0.002)


@contextlib.contextmanager
def socket_pair(host: str = "127.0.0.1") -> Iterator[tuple[socket.socket, ...]]:
    """Two connected TCP sockets."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        connected = socket.create_connection(server.getsockname()[:2])
        accepted, _ = server.accept()
    with connected, accepted:
        yield connected, accepted


@contextlib.contextmanager
def channel_pair() -> Iterator[tuple[AFDChannel, AFDChannel]]:
    with socket_pair() as (a, b), AFDChannel(a) as left, AFDChannel(b) as right:
        yield left, right


def sockets() -> set[str]:
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {link for link in links if link.startswith("socket:")}


def afd_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("afd-")]
