"""The counters of DBO that a server shows, against the steps that it ran."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pairs import Pair
from servers import Server

_COUNTER = re.compile(r"^vllm:dbo_(\w+)_total\{(.*)\} (\S+)$", re.MULTILINE)
_REASON = re.compile(r'reason="(\w+)"')
_LAYERS = 4
_METRICS_TIMEOUT_S = 20


def counters(server: Server) -> dict[str, int]:
    """Values by name; those by reason under `unsplit_steps:<reason>`."""
    answer = server.client.get("/metrics")
    assert answer.status_code == 200
    found = {}
    for name, labels, value in _COUNTER.findall(answer.text):
        assert f'model_name="{server.model}"' in labels
        assert 'engine="0"' in labels
        if reason := _REASON.search(labels):
            name = f"{name}:{reason[1]}"
        assert name not in found
        found[name] = int(float(value))
    return found


def settled_counters(server: Server, steps: int) -> dict[str, int]:
    """Counters once they have `steps` steps: an answer may precede its last count."""
    deadline = time.monotonic() + _METRICS_TIMEOUT_S
    while (found := counters(server))["steps"] < steps:
        assert time.monotonic() < deadline, found
    return found


def unsplit(found: dict[str, int]) -> int:
    return sum(
        value for name, value in found.items() if name.startswith("unsplit_steps:")
    )


def load(server: Server) -> None:
    """Steps of a single token, below and above both thresholds (2 and 16)."""
    for length in (1, 15, 16, 40):
        server.complete([length] * length)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(server.complete, [[n] * 7 * n for n in range(1, 7)]))


def test_counters_agree_with_the_steps(pair: Pair) -> None:
    server = pair.dbo
    # Answered behind the outputs of earlier steps, so those are counted then.
    server.watched_steps()
    before = counters(server)
    load(server)
    steps = server.watched_steps()
    after = settled_counters(server, before["steps"] + len(steps))
    got = {name: after[name] - before[name] for name in after}

    split = sum(bool(step["slices"]) for step in steps)
    small = sum(sum(step["tokens"]) < 2 for step in steps)
    assert split > 0
    assert small > 0
    assert {name: value for name, value in got.items() if value} == {
        "steps": len(steps),
        "split_steps": split,
        "unsplit_steps:too_small": small,
        "unsplit_steps:threshold": len(steps) - split - small,
        # Each of the two ubatches yields once per layer.
        "yields": split * 2 * _LAYERS,
    }
    assert after["split_steps"] + unsplit(after) == after["steps"]


def test_counters_are_there_from_the_start(pair: Pair) -> None:
    assert set(counters(pair.dbo)) == {
        "steps",
        "split_steps",
        "yields",
        "exchanges",
        "exchanges_overlapped",
        *(
            f"unsplit_steps:{reason}"
            for reason in ("too_small", "threshold", "prefix_veto", "dp_vote", "graph")
        ),
    }


def test_no_counters_without_dbo(pair: Pair) -> None:
    assert counters(pair.expected) == {}


def test_the_log_says_once_that_a_step_was_split(pair: Pair) -> None:
    load(pair.dbo)
    log = pair.dbo.process.log.read_text()
    assert log.count("DBO: first step split") == 1
    assert "DBO: first step split" not in pair.expected.process.log.read_text()
    assert "Dual batch overlap has nothing to overlap" in log


@pytest.mark.timeout(120)
def test_the_log_says_how_many_steps_were_split(pair: Pair) -> None:
    """The line comes with vLLM's own statistics, every ten seconds."""
    line = re.compile(
        r"Engine 000: DBO: (\d+) of (\d+) steps split.*, 8\.0 yields per split step"
    )
    deadline = time.monotonic() + 60
    while not (found := line.search(pair.dbo.process.log.read_text())):
        assert time.monotonic() < deadline
        load(pair.dbo)
    assert 0 < int(found[1]) < int(found[2])
