"""A server whose API process is killed leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sides
from servers import Server
from sides import is_alive

from tools import checkpoint
from tools.layout import Layout
from tools.process import descendants
from tools.serve import check_port

MODEL = checkpoint.DEFAULT
# Of the API server's death, until its engine core and worker are gone.
BOUND_S = 20


@pytest.fixture
def server(layout: Layout) -> Iterator[Server]:
    side = sides.patched(layout)
    folder = checkpoint.ensure(layout, MODEL, side.python)
    started = Server(
        side, "v2", folder, layout.reports / "e2e" / "parent-death", ["--enable-dbo"]
    )
    try:
        started.wait_ready()
        yield started
    finally:
        started.process.kill()


def test_kill_9_of_the_api_server_leaves_no_process(server: Server) -> None:
    family = [server.process.pid, *descendants(server.process.pid)]
    assert len(family) > 1, "there is no engine core that could be left"
    with ThreadPoolExecutor(1) as pool:
        # Killed at work: the engine core is not waiting for a request.
        busy = pool.submit(server.complete, [5] * 100, 400)
        wait_running(server)
        os.kill(server.process.pid, signal.SIGKILL)
        assert busy.exception(BOUND_S) is not None
    assert server.process.is_gone(BOUND_S), server.process.tail()
    # One that left the group would not have been seen.
    assert not [pid for pid in family if is_alive(pid)]
    check_port("127.0.0.1", server.port)


def wait_running(server: Server) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        metrics = server.client.get("/metrics").text
        if re.search(r"^vllm:num_requests_running\{.*\} 1", metrics, re.MULTILINE):
            return
        time.sleep(0.05)
    raise AssertionError("The request did not get to the engine.")
