"""A server with DBO and the one that it is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import sides
from jobs import DBO, DBO_OFF, MLA, REFERENCE
from servers import DBO_FLAGS, Server
from sides import Kind
from workloads import MODELS

from tools import checkpoint
from tools.layout import Layout


@dataclass(frozen=True)
class Pair:
    """A server with DBO and the one that it is compared with."""

    expected: Server
    dbo: Server

    def both(self, run: Any) -> tuple[Any, Any]:
        """Results of `run(server)` for both servers, at the same time."""
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(run, (self.expected, self.dbo))
        return first, second


@pytest.fixture(scope="session", params=MODELS)
def pair(layout: Layout, request: pytest.FixtureRequest) -> Iterator[Pair]:
    model = request.param
    folder = checkpoint.ensure(layout, model, sides.patched(layout).python)
    # MLA has no chunked prefill on a CPU; the others get prompts in chunks.
    budget = 512 if model == MLA else 64
    started: list[Server] = []

    def start(kind: Kind) -> Server:
        server = Server(
            getattr(sides, kind.side)(layout),
            kind.runner,
            folder,
            layout.reports / "e2e",
            [
                f"--max-num-batched-tokens={budget}",
                *(DBO_FLAGS if kind.dbo else ()),
            ],
        )
        started.append(server)
        return server

    try:
        # Unpatched, MLA's rotary embedding is wrong on a CPU (test_rope_*).
        made = Pair(start(DBO_OFF if model == MLA else REFERENCE), start(DBO))
        for server in started:
            server.wait_ready()
            server.watch_steps()
        yield made
    finally:
        for server in started:
            server.stop()
