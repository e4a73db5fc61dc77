# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One FFN server and several attention ranks, in one process: see test_afd_roles.py."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.distributed.afd_transfer.afd_connector.base import AFDTransfer
from vllm.distributed.afd_transfer.afd_connector.gloo_connector import _FENCE_TAG
from vllm.distributed.afd_transfer.control import AFDControl
from vllm.distributed.afd_transfer.errors import AFDError, AFDPeerError
from vllm.v1.worker import afd_attention_model_runner, afd_ffn_model_runner
from vllm.v1.worker.afd_attention_model_runner import AFDAttention
from vllm.v1.worker.afd_turns import AFDTurns

from .test_afd_roles import (
    HIDDEN_SIZE,
    MAX_TOKENS,
    NUM_LAYERS,
    TIMEOUT_S,
    Failures,
    Servers,
    _join,
)

pytestmark = pytest.mark.skip_global_cleanup


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    servers = Servers(monkeypatch)
    servers.num_ranks = 2
    yield servers
    servers.close()


@pytest.fixture(params=[True, False], ids=["gate_on_ffn", "gate_on_attention"])
def any_gate(request, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    servers = Servers(monkeypatch, request.param)
    servers.num_ranks = 3
    yield servers
    servers.close()


def _connect_all(servers: Servers, failures: Failures, **kwargs) -> list[AFDAttention]:
    return [
        servers.connect(failures, rank=rank, **kwargs)
        for rank in range(servers.num_ranks)
    ]


def _begin(servers: Servers, attention: AFDAttention, rows: int = 2) -> torch.Tensor:
    """Run the first layer of a step, and leave the rest for later."""
    x = torch.rand(rows, HIDDEN_SIZE)
    attention.begin_step("eager", [rows])
    return attention.exchange(0, x, servers.logits(x))


def _finish(servers: Servers, attention: AFDAttention, x: torch.Tensor) -> None:
    for layer in range(1, NUM_LAYERS):
        x = attention.exchange(layer, x, servers.logits(x))
    attention.end_step()


def _wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


# Turns.


def test_who_asked_first_gets_the_turn_first() -> None:
    turns = AFDTurns()
    order: list[int] = []

    def take(number: int) -> None:
        with turns:
            order.append(number)

    threads = [threading.Thread(target=take, args=(n,)) for n in range(20)]
    with turns:
        for number, thread in enumerate(threads):
            thread.start()
            _wait_until(lambda n=number: len(turns._queue) > n, "it asks")
    # Too late to be first, though nobody may have run yet.
    with turns:
        assert order == list(range(20))
    for thread in threads:
        thread.join(TIMEOUT_S)


def test_a_turn_ends_with_an_error() -> None:
    turns = AFDTurns()
    for _ in range(2):
        with pytest.raises(KeyError), turns:
            raise KeyError
    with turns:
        pass


# Steps.


def test_ranks_run_steps_of_their_own(any_gate: Servers) -> None:
    """As many and as large as each likes, all at once."""
    failures = Failures()
    any_gate.start_ffn(failures)
    attentions = _connect_all(any_gate, failures)
    sizes = [[MAX_TOKENS] * 20, [1, 2, 0, 5] * 30, []]

    def serve(rank: int) -> None:
        for num_tokens in sizes[rank]:
            any_gate.run_step(attentions[rank], num_tokens)

    with ThreadPoolExecutor(any_gate.num_ranks) as pool:
        list(pool.map(serve, range(any_gate.num_ranks), timeout=TIMEOUT_S))
    assert [a.stats.steps for a in attentions] == [len(s) for s in sizes]
    assert not failures.errors
    # The one that was idle is as good as the others.
    any_gate.run_step(attentions[2], 3)


def test_a_step_waits_for_no_other_rank(ranks: Servers) -> None:
    """A rank is in the middle of a step, as in a long prefill; the other decodes."""
    failures = Failures()
    ranks.start_ffn(failures)
    attentions = _connect_all(ranks, failures)
    x = _begin(ranks, attentions[0], MAX_TOKENS)
    for _ in range(10):
        ranks.run_step(attentions[1], 1)
    _finish(ranks, attentions[0], x)
    assert [a.stats.steps for a in attentions] == [1, 10]
    assert not failures.errors


def test_a_layer_waits_for_one_layer_of_the_other_rank(ranks: Servers) -> None:
    failures = Failures()
    ffn = ranks.start_ffn(failures)
    attentions = _connect_all(ranks, failures)
    computed: list[int] = []
    is_computing, go_on = threading.Event(), threading.Event()

    def compute(layer: int, x: torch.Tensor) -> None:
        computed.append(x.shape[0])
        if len(computed) == 1:
            is_computing.set()
            assert go_on.wait(TIMEOUT_S)

    ranks.compute = compute
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(_begin, ranks, attentions[0], 7)
        assert is_computing.wait(TIMEOUT_S)
        second = pool.submit(_begin, ranks, attentions[1], 1)
        _wait_until(lambda: len(ffn._turns._queue) == 1, "the other rank waits")
        assert computed == [7]
        go_on.set()
        for future in (first, second):
            future.result(TIMEOUT_S)
    assert computed == [7, 1]
    assert not failures.errors


def test_a_message_whose_end_is_late_holds_up_nobody(
    ranks: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost on its way, it comes again. FFN has computed what was in the message."""
    failures = Failures()
    ffn: Any = ranks.start_ffn(failures)
    attentions = _connect_all(ranks, failures, num_ubatches=2)
    connector: Any = attentions[0].session.connector
    start = connector._start
    late: list[tuple[str, torch.Tensor, int]] = []

    def start_but_the_end(operation: str, data: torch.Tensor, tag: int):
        if operation == "send" and tag == _FENCE_TAG + 1 and not late:
            late.append((operation, data, tag))
            return SimpleNamespace(wait=lambda *args: None)
        return start(operation, data, tag)

    monkeypatch.setattr(connector, "_start", start_but_the_end)

    def compute(layer: int, x: torch.Tensor) -> None:
        stages = ffn._sessions[0].connector._lanes
        if x.shape[0] == 2 and layer == 0:
            _wait_until(stages[1].incoming.arrived, "stage 1 has sent")

    ranks.compute = compute
    attentions[0].begin_step("eager", [2, 3])
    transfers = [AFDTransfer(1, 0, stage, 2, 2 + stage) for stage in range(2)]
    answers = [
        connector.submit(transfer, torch.rand(transfer.rows, HIDDEN_SIZE))
        for transfer in transfers
    ]
    answers[0].wait()
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(ranks.run_step, attentions[1], 1)
        try:
            step.result(10)
        finally:
            start(*late[0])
            answers[1].wait()
    assert not failures.errors


def test_turns_of_others_are_no_timeout(ranks: Servers) -> None:
    """Each layer takes most of step_timeout_s, and one has to wait for two."""
    failures = Failures()
    ranks.start_ffn(failures)
    attentions = _connect_all(ranks, failures, step_timeout_s=1)
    ranks.compute = lambda layer, x: time.sleep(0.7) if layer == 0 else None
    with ThreadPoolExecutor(2) as pool:
        for x in [pool.submit(_begin, ranks, a) for a in attentions]:
            x.result(TIMEOUT_S)
    assert not failures.errors


def test_a_hang_is_still_found(ranks: Servers) -> None:
    ranks.start_ffn(Failures())
    attentions = _connect_all(ranks, Failures(), step_timeout_s=0.3)
    go_on = threading.Event()
    ranks.compute = lambda layer, x: go_on.wait(TIMEOUT_S)
    start = time.monotonic()
    try:
        with pytest.raises(
            AFDPeerError, match=r"step_timeout_s=0\.3 for each of 2 attention ranks"
        ):
            _begin(ranks, attentions[1])
        assert 0.5 < time.monotonic() - start < 10
    finally:
        go_on.set()


def test_compilation_of_one_does_not_hold_up_the_other(ranks: Servers) -> None:
    failures = Failures()
    ranks.start_ffn(failures, step_timeout_s=0.3)
    attentions = _connect_all(ranks, failures)
    attentions[0].begin_step("profile", [2])
    ranks.run_step(attentions[1], 2)
    assert not failures._came.wait(0.6)
    ranks.run_model(attentions[0], torch.rand(2, HIDDEN_SIZE))
    attentions[0].end_step()


# What goes wrong.


@pytest.mark.parametrize("in_step", [False, True])
def test_the_loss_of_one_rank_ends_all(ranks: Servers, in_step: bool) -> None:
    on_ffn = Failures()
    on_attention = [Failures(), Failures()]
    ffn = ranks.start_ffn(on_ffn)
    attentions = [ranks.connect(on_attention[rank], rank=rank) for rank in range(2)]
    if in_step:
        _begin(ranks, attentions[0])
        _begin(ranks, attentions[1])
    # As when its process is killed.
    attentions[1].session.control._channel.shutdown()

    error = on_ffn.wait()
    assert isinstance(error, AFDPeerError)
    assert "AFD attention peer (rank 1)" in str(error)
    told = on_attention[0].wait()
    assert "AFD ffn peer (rank 0)" in str(told) and "aborted" in str(told)
    assert "AFD attention peer (rank 1)" in str(told)
    with pytest.raises(AFDPeerError, match=r"AFD attention peer \(rank 1\)"):
        if in_step:
            _finish(ranks, attentions[0], torch.rand(2, HIDDEN_SIZE))
        else:
            attentions[0].begin_step("eager", [2])
    _join(ffn)
    # Once, and for the right reason.
    assert on_ffn.errors == [error]


def test_a_failure_of_ffn_is_told_to_all_ranks(ranks: Servers) -> None:
    on_ffn = Failures()
    on_attention = [Failures(), Failures()]
    ffn = ranks.start_ffn(on_ffn)
    attentions = [ranks.connect(on_attention[rank], rank=rank) for rank in range(2)]

    def fail(layer: int, x: torch.Tensor) -> None:
        raise ValueError("the experts failed")

    ranks.compute = fail
    with pytest.raises(AFDPeerError, match="ValueError: the experts failed"):
        _begin(ranks, attentions[0])
    assert "ValueError: the experts failed" in str(on_attention[1].wait())
    assert str(on_ffn.wait()) == "the experts failed"
    _join(ffn)
    assert len(on_ffn.errors) == 1


@pytest.mark.parametrize("in_step", [False, True])
def test_a_goodbye_of_one_rank_leaves_the_others(ranks: Servers, in_step: bool) -> None:
    failures = Failures()
    ffn = ranks.start_ffn(failures)
    attentions = _connect_all(ranks, failures)
    x = _begin(ranks, attentions[0])
    ffn.afd_config.connect_timeout_s = 0.5
    if in_step:
        _begin(ranks, attentions[1])
        attentions[1].abort_step(SystemExit())
    attentions[1].close()
    _finish(ranks, attentions[0], x)
    # Longer than FFN waits for a rank while it serves none.
    assert not failures._came.wait(1.2)
    ranks.run_step(attentions[0], 3)

    ffn.afd_config.connect_timeout_s = TIMEOUT_S
    attentions[1] = ranks.connect(failures, rank=1)
    ranks.run_step(attentions[1], 3)
    ranks.run_step(attentions[0], 3)
    assert not failures.errors

    ffn.afd_config.connect_timeout_s = 0.5
    for attention in attentions:
        attention.close()
    error = failures.wait()
    assert isinstance(error, AFDError)
    assert "No AFD attention rank" in str(error)


def test_the_wait_for_a_rank_begins_when_the_last_one_leaves(ranks: Servers) -> None:
    """One that is connecting counts as there, too."""
    failures = Failures()
    ffn = ranks.start_ffn(failures)
    attentions = _connect_all(ranks, failures)
    ffn.afd_config.connect_timeout_s = 1
    attentions[1].close()
    time.sleep(0.8)
    attentions[0].close()
    # Now rank 1 has been away for longer than that.
    time.sleep(0.6)
    assert not failures.errors
    start = time.monotonic()
    assert "No AFD attention rank" in str(failures.wait())
    assert time.monotonic() - start < 0.9


def test_the_loss_of_one_rank_is_told_to_one_that_connects(
    ranks: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_ffn, on_attention = Failures(), Failures()
    connecting, go_on = threading.Event(), threading.Event()
    exchange_blob = AFDControl.exchange_blob

    def slow(control: AFDControl, data: bytes) -> bytes:
        if control.peer_hello.role == "ffn" and control.peer_hello.rank == 0:
            connecting.set()
            assert go_on.wait(TIMEOUT_S)
        return exchange_blob(control, data)

    ffn = ranks.start_ffn(on_ffn)
    lost = ranks.connect(on_attention, rank=0)
    monkeypatch.setattr(AFDControl, "exchange_blob", slow)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ranks.connect, on_attention, rank=1)
        try:
            assert connecting.wait(TIMEOUT_S)
            lost.session.control._channel.shutdown()
            assert "AFD attention peer (rank 0)" in str(on_ffn.wait())
        finally:
            go_on.set()
        with pytest.raises(AFDError, match=r"aborted: .*AFD attention peer \(rank 0\)"):
            other.result(TIMEOUT_S)
    _join(ffn)
    assert len(on_ffn.errors) == 1


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_come_is_named(ranks: Servers, missing: int) -> None:
    on_ffn, on_attention = Failures(), Failures()
    ffn = ranks.start_ffn(on_ffn, connect_timeout_s=3)
    ranks.connect(on_attention, rank=1 - missing)
    text = f"No AFD attention rank {missing} connected to 127.0.0.1:{ranks.port}"
    assert text in str(on_ffn.wait())
    # The one that has come is told so, too.
    assert text in str(on_attention.wait())
    _join(ffn)


def test_ranks_that_do_not_fit_are_refused(ranks: Servers) -> None:
    failures = Failures()
    ranks.start_ffn(failures)
    attentions = _connect_all(ranks, failures)
    with pytest.raises(AFDError, match=r"already serving .*\(rank 1\)"):
        ranks.connect(failures, rank=1)
    with pytest.raises(AFDError, match="rank: attention has 2, ffn has 0"):
        ranks.connect(failures, rank=2)
    for attention in attentions:
        ranks.run_step(attention, 3)
    assert not failures.errors


@pytest.mark.parametrize("in_step", [False, True])
def test_ffn_shuts_down(ranks: Servers, in_step: bool) -> None:
    on_ffn = Failures()
    on_attention = [Failures(), Failures()]
    ffn = ranks.start_ffn(on_ffn)
    attentions = [ranks.connect(on_attention[rank], rank=rank) for rank in range(2)]
    if in_step:
        for attention in attentions:
            _begin(ranks, attention)
    threads = list(ffn._threads)
    start = time.monotonic()
    ffn.shutdown()
    assert time.monotonic() - start < afd_ffn_model_runner._JOIN_TIMEOUT_S
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads)
    for failures in on_attention:
        assert "has shut down" in str(failures.wait())
    assert not on_ffn.errors


def test_death_of_the_parent_of_one_rank(
    ranks: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_ffn, on_attention = Failures(), Failures()
    ranks.start_ffn(on_ffn)
    attentions = _connect_all(ranks, on_attention)
    parent = SimpleNamespace(name="EngineCore_DP1", is_alive=lambda: False)
    monkeypatch.setattr(
        afd_attention_model_runner.multiprocessing, "parent_process", lambda: parent
    )
    attentions[1].close()
    for failures in (on_ffn, on_attention):
        text = str(failures.wait())
        assert "AFD attention peer (rank 1)" in text
        assert "its parent process EngineCore_DP1 died" in text


# Traces.


def test_each_rank_has_a_trace(ranks: Servers, tmp_path: Path) -> None:
    ffn = ranks.start_ffn(Failures(), trace_dir=str(tmp_path))
    attentions = _connect_all(ranks, Failures(), trace_dir=str(tmp_path))
    for _ in range(3):
        ranks.run_step(attentions[1], 2)
    ranks.run_step(attentions[0], 5)
    for attention in attentions:
        attention.close()
    _wait_until(lambda: not any(ffn._sessions), "the end of the sessions")
    found = {}
    for path in tmp_path.glob("*.jsonl"):
        header, *lines = map(json.loads, path.read_text().splitlines())
        steps = [line["stage_tokens"] for line in lines if line["type"] == "step"]
        found[header["role"], header["rank"], header["peer"].split(" at ")[0]] = steps
    assert found == {
        ("attention", 0, "AFD ffn peer (rank 0)"): [[5]],
        ("attention", 1, "AFD ffn peer (rank 0)"): [[2]] * 3,
        ("ffn", 0, "AFD attention peer (rank 0)"): [[5]],
        ("ffn", 0, "AFD attention peer (rank 1)"): [[2]] * 3,
    }


def test_computing_for_others_is_no_part_of_a_trace(
    ranks: Servers, tmp_path: Path
) -> None:
    """What ranks are shown to compute adds up to no more than there was."""
    ffn = ranks.start_ffn(Failures(), trace_dir=str(tmp_path))
    attentions = _connect_all(ranks, Failures())
    ranks.compute = lambda layer, x: time.sleep(0.02)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda a: ranks.run_step(a, 2), attentions))
    for attention in attentions:
        attention.close()
    _wait_until(lambda: not any(ffn._sessions), "the end of the sessions")
    spans = []
    for path in tmp_path.glob("*.jsonl"):
        spans += [
            (line["begin_ns"], line["end_ns"])
            for line in map(json.loads, path.read_text().splitlines())
            if line["type"] == "event" and line["event"] == "compute"
        ]
    spans.sort()
    assert len(spans) == 2 * NUM_LAYERS
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
