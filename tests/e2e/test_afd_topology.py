"""Real servers with more than one attention rank: two engines, one FFN role (2A1F).

What happens when one of the ranks is lost is in test_afd_faults.py.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sides
from afd_pairs import MODELS
from afd_servers import AFDPair, AFDServer, Spec
from afd_traffic import ask, check_answers, check_traffic, mixed_requests
from jobs import REFERENCE, Jobs, expected
from servers import DBO_FLAGS
from workloads import LONG_DECODE

from tools import trace
from tools.layout import Layout
from tools.stream import lines_of

RANKS = 2
MODEL = MODELS[0]
REQUESTS = 40

# Steps of each rank, those that were split, and what went through them.
COUNTERS = ("steps", "split_steps", "exchanges", "bytes")

pytestmark = [
    pytest.mark.engines(REFERENCE, model=MODEL.name),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def traces(layout: Layout) -> Path:
    folder = layout.reports / "e2e" / "afd-topology" / "traces"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def pair(layout: Layout, traces: Path) -> Iterator[AFDPair]:
    side = sides.patched(layout)
    spec = Spec(
        side,
        MODEL.folder(layout, side),
        layout.reports / "e2e" / "afd-topology",
        # Long prompts are prefilled in many chunks.
        options=("--max-num-batched-tokens=64",),
        attention_options=(
            *DBO_FLAGS,
            f"--data-parallel-size={RANKS}",
            # The default is one for each rank, which takes longer to start.
            "--api-server-count=1",
        ),
        config={
            "num_attention_ranks": RANKS,
            "heartbeat_timeout_s": 60,
            "trace_dir": str(traces),
        },
    )
    with AFDPair(spec) as pair:
        yield pair


def counted(server: AFDServer, rank: int) -> dict[str, float]:
    return {
        name: server.metric(f"vllm:afd_{name}_total", engine=str(rank))
        for name in COUNTERS
    }


def eventually_counted(server: AFDServer, rank: int) -> dict[str, float]:
    """Once the answers have been sent; the counts may come a little later."""
    deadline = time.monotonic() + 30
    while not all(found := counted(server, rank).values()):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return counted(server, rank)


def test_one_rank_serves_while_the_other_is_idle(pair: AFDPair, jobs: Jobs) -> None:
    """Each in turn, and neither takes part in the steps of the other."""
    idle = dict.fromkeys(COUNTERS, 0.0)
    for rank in range(RANKS):
        requests = mixed_requests(12, 10 + rank)
        with ThreadPoolExecutor(len(requests)) as pool:
            got = pool.map(lambda each: each.send(pair.attention, rank), requests)  # noqa: B023
            check_answers(list(got), MODEL, jobs, requests)
        eventually_counted(pair.attention, rank)
        for later in range(rank + 1, RANKS):
            assert counted(pair.attention, later) == idle


def test_same_tokens_and_logprobs_as_without_afd(pair: AFDPair, jobs: Jobs) -> None:
    """Requests go to both ranks, which split steps of different sizes."""
    before = [counted(pair.attention, rank) for rank in range(RANKS)]
    check_traffic(pair.attention, MODEL, jobs, mixed_requests(REQUESTS, 0))
    for rank in range(RANKS):
        after = eventually_counted(pair.attention, rank)
        assert all(after[name] > before[rank][name] for name in COUNTERS)


class Decoding(threading.Thread):
    """A long completion of one rank, as a stream.

    Attributes:
        tokens: Those that have come.
    """

    def __init__(self, server: AFDServer, rank: int) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.rank = rank
        self.tokens: list[int] = []
        self.text = ""
        self.start()

    def run(self) -> None:
        # Many more steps than the prefill has.
        prompt = list(LONG_DECODE.prompts[0])
        body = completion(prompt, LONG_DECODE.max_tokens)
        with self.server.client.stream(
            "POST",
            "/v1/completions",
            json=body
            | {"model": self.server.model, "stream": True, "return_token_ids": True},
            headers={"X-data-parallel-rank": str(self.rank)},
        ) as answer:
            for line in lines_of(answer.iter_bytes()):
                self.text += line
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    for choice in chunk["choices"]:
                        self.tokens += choice["token_ids"] or ()


def completion(prompt: list[int], tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
        "logprobs": 0,
        "stream": False,
    }


def test_one_rank_prefills_while_the_other_decodes(pair: AFDPair, jobs: Jobs) -> None:
    server = pair.attention
    prompt = [at * 7 % 250 for at in range(1200)]  # 19 chunks.

    def prefill(rank: int) -> list[str]:
        (choice,) = ask(server, "/v1/completions", completion(prompt, 2), rank)
        return choice["logprobs"]["tokens"]

    # Alone, and on the other rank than below.
    alone = prefill(0)
    decoding = Decoding(server, 0)
    while len(decoding.tokens) < 5:
        assert decoding.is_alive(), decoding.text
        time.sleep(0.01)
    before = len(decoding.tokens)
    assert prefill(1) == alone
    during = len(decoding.tokens) - before
    assert decoding.is_alive(), "the decode was over before the prefill"
    assert during > 3, "the decode stood still while the other rank prefilled"
    decoding.join(300)
    assert not decoding.is_alive()
    (wanted,) = expected(jobs, MODEL.name, LONG_DECODE.name)["tokens"]
    assert decoding.tokens == wanted
    assert pair.ffn.is_healthy()


def test_sigterm_ends_all_and_leaves_nothing(pair: AFDPair, traces: Path) -> None:
    """The last test of the pair."""
    assert len(pair.attention.engines()) == len(pair.attention.workers()) == RANKS
    pids = pair.attention.pids()
    for server in (pair.attention, pair.ffn):
        server.process.popen.terminate()
        assert server.process.wait(60) == 0, server.process.tail()
        assert server.process.is_gone()
    assert not [pid for pid in pids if sides.is_alive(pid)]
    # Each rank has said goodbye.
    for rank in range(RANKS):
        text = f"AFD attention peer (rank {rank}) at "
        goodbye = [
            line
            for line in pair.ffn.text().splitlines()
            if text in line and "has ended the session" in line
        ]
        assert len(goodbye) == 1
    assert not re.search("ERROR .*AFD", pair.ffn.text())
    check_traces(traces)


def check_traces(folder: Path) -> None:
    """Each rank has one, and FFN has one of its session with that rank."""
    for rank in range(RANKS):
        (ours,) = folder.glob(f"afd-attention-{rank}-*.jsonl")
        attention = trace.read(ours)
        (ffn,) = (
            each
            for each in map(trace.read, folder.glob("afd-ffn-0-*.jsonl"))
            if f"(rank {rank})" in each.header["peer"]
        )
        session = trace.join(attention, ffn)
        assert session.notes == []
        steps = [(step.seq, step.rows) for step in attention.steps]
        assert steps == [(step.seq, step.rows) for step in ffn.steps]
        assert any(len(rows) == 2 for _, rows in steps)
        assert trace.summarise(session).early == 0, "received before it was sent"
