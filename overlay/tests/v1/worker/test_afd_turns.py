# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FFN ranks that compute in one order, as their layers end in a reduction."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.distributed.afd_transfer.control_utils import free_port
from tests.distributed.afd_transfer.fake_nccl import wait_until
from vllm.config.afd import AFDConfig
from vllm.distributed.afd_transfer import afd_session
from vllm.distributed.afd_transfer.errors import AFDError, AFDPeerError
from vllm.distributed.afd_transfer.listener import AFDListener
from vllm.utils.network_utils import get_open_zmq_ipc_path
from vllm.v1.worker import afd_turns
from vllm.v1.worker.afd_attention_model_runner import AFDAttention
from vllm.v1.worker.afd_turns import (
    AFDFollowingTurns,
    AFDLeadingTurns,
    AFDTurn,
    AFDTurns,
)

from .test_afd_roles import (
    HIDDEN_SIZE,
    MAX_TOKENS,
    NUM_LAYERS,
    TIMEOUT_S,
    Failures,
    Servers,
)

pytestmark = pytest.mark.skip_global_cleanup

SHORT_S = 0.3
# How long an engine may stay after its turn was called off.
STAY_S = 2


def turn(engine: int = 0, seq: int = 1, layer: int = 0, instance: str = "a") -> AFDTurn:
    return AFDTurn(engine, instance, seq, layer, stage=0, rows=4)


class Bound:
    """Ends a wait that ought to have ended."""

    def __init__(self, error: str = "it takes too long", after_s: float = TIMEOUT_S):
        self._error = error
        self._deadline = time.monotonic() + after_s

    def __call__(self) -> None:
        if time.monotonic() > self._deadline:
            raise AFDError(self._error)


class Ranks:
    """Turns of each FFN rank."""

    def __init__(self, count: int) -> None:
        ready, *verdicts = (get_open_zmq_ipc_path() for _ in range(count))
        self.leader = AFDLeadingTurns(ready, verdicts)
        self.followers = [AFDFollowingTurns(ready, path, STAY_S) for path in verdicts]
        self.all: list[AFDTurns] = [self.leader, *self.followers]

    def close(self) -> None:
        for turns in self.all:
            turns.close()
        for turns in (self.leader, *self.followers):
            assert not turns._thread.is_alive()


@pytest.fixture(params=[2, 3])
def ranks(request) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()
    ranks.close()


def take(
    turns: AFDTurns, each: AFDTurn, begun: list, check: Callable[[], None] | None = None
) -> None:
    with turns.take(each, check or Bound()):
        begun.append(each)


def test_all_ranks_take_the_order_of_the_first(ranks: Ranks) -> None:
    turns = [turn(engine, seq) for engine in range(5) for seq in range(20)]
    begun: dict[AFDTurns, list[AFDTurn]] = {each: [] for each in ranks.all}
    reduction = threading.Barrier(len(ranks.all))

    def serve(turns_of: AFDTurns, engine: int) -> None:
        for each in turns:
            if each.engine == engine:
                with turns_of.take(each, Bound()):
                    begun[turns_of].append(each)
                    reduction.wait(TIMEOUT_S)

    with ThreadPoolExecutor(15) as pool:
        jobs = [
            pool.submit(serve, turns_of, engine)
            for engine in range(5)
            for turns_of in ranks.all
        ]
        for job in jobs:
            job.result(TIMEOUT_S)
    order = begun[ranks.leader]
    assert all(each == order for each in begun.values())
    assert set(order) == set(turns) and len(order) == len(turns)


def test_no_turn_begins_before_all_are_ready(ranks: Ranks) -> None:
    """And one that is not ready holds up none of another engine."""
    begun: list[AFDTurn] = []
    with ThreadPoolExecutor(6) as pool:
        early = [pool.submit(take, each, turn(0), begun) for each in ranks.all[:-1]]
        time.sleep(SHORT_S)
        assert begun == []
        for job in [pool.submit(take, each, turn(1), begun) for each in ranks.all]:
            job.result(TIMEOUT_S)
        assert begun == [turn(1)] * len(ranks.all)
        take(ranks.all[-1], turn(0), begun)
        for job in early:
            job.result(TIMEOUT_S)


def test_a_rank_is_in_one_turn_at_a_time(ranks: Ranks) -> None:
    """The others may be past the reduction, and in the next one."""
    follower = ranks.followers[0]
    others = [each for each in ranks.all if each is not follower]
    begun: list[AFDTurn] = []
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(take, each, turn(0), []) for each in others]
        with follower.take(turn(0), Bound()):
            for job in jobs:
                job.result(TIMEOUT_S)
            jobs = [pool.submit(take, each, turn(1), []) for each in others]
            late = pool.submit(take, follower, turn(1), begun)
            for job in jobs:
                job.result(TIMEOUT_S)
            time.sleep(SHORT_S)
            assert begun == []
        late.result(TIMEOUT_S)


def test_a_session_that_ends_ends_the_wait_of_the_first_rank(ranks: Ranks) -> None:
    with (
        pytest.raises(AFDError, match="it has left"),
        ranks.leader.take(turn(), Bound("it has left", SHORT_S)),
    ):
        pytest.fail("Nobody else was ready.")


def test_an_error_of_the_connection_ends_a_turn(ranks: Ranks) -> None:
    def fail(turns: AFDTurns) -> None:
        with pytest.raises(AFDPeerError), turns.take(turn(), Bound()):
            raise AFDPeerError("it is gone")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(fail, ranks.all, timeout=TIMEOUT_S))
        begun: list[AFDTurn] = []
        for job in [pool.submit(take, each, turn(1), begun) for each in ranks.all]:
            job.result(TIMEOUT_S)


def test_no_turn_begins_after_the_first_rank_has_failed_in_one(ranks: Ranks) -> None:
    """The others are in its reduction, and would take that of the next for it."""
    begun: list[AFDTurn] = []
    with ThreadPoolExecutor(6) as pool:
        for each in ranks.followers:
            pool.submit(take, each, turn(0), [])
        with pytest.raises(KeyError), ranks.leader.take(turn(0), Bound()):
            jobs = [pool.submit(take, each, turn(1), begun) for each in ranks.all]
            time.sleep(SHORT_S)
            raise KeyError
        for job in jobs:
            with pytest.raises(AFDError):
                job.result(TIMEOUT_S)
    assert begun == []


def test_close_ends_the_wait_for_the_first_rank(ranks: Ranks) -> None:
    follower = ranks.followers[0]
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(take, follower, turn(), [])
        time.sleep(SHORT_S)
        assert not job.done()
        follower.close()
        with pytest.raises(AFDError, match="take no more turns"):
            job.result(TIMEOUT_S)
    with pytest.raises(AFDError, match="take no more turns"):
        take(follower, turn(), [])


def test_a_rank_that_is_not_understood_is_the_reason(ranks: Ranks) -> None:
    """And not a turn that was called off."""
    follower = ranks.followers[0]
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(take, follower, turn(), [])
        wait_until(lambda: ranks.leader._ready.total() == 1, "it is ready")
        with ranks.leader._cond:
            ranks.leader._outboxes[0].send(b"?")
        with pytest.raises(AFDError, match="take no more turns"):
            job.result(TIMEOUT_S)


@pytest.mark.parametrize("is_ready", [True, False])
def test_the_first_rank_calls_off_turns_of_an_engine_that_has_left(
    ranks: Ranks, is_ready: bool
) -> None:
    follower = ranks.followers[0]
    leaves = Bound("it has left here, too", 2 * SHORT_S)
    with ThreadPoolExecutor(6) as pool:
        if not is_ready:
            ranks.leader.leave(0, "a")
        job = pool.submit(take, follower, turn(), [], leaves)
        if is_ready:
            time.sleep(SHORT_S)
            assert not job.done()
            ranks.leader.leave(0, "a")
        with pytest.raises(AFDError, match="it has left here, too"):
            job.result(TIMEOUT_S)
        # The others go on, and so does the one that comes back.
        for each in (turn(1), turn(0, instance="b")):
            jobs = [pool.submit(take, turns, each, []) for turns in ranks.all]
            for job in jobs:
                job.result(TIMEOUT_S)
    assert not ranks.leader._ready


def test_an_engine_that_stays_after_it_was_called_off(ranks: Ranks) -> None:
    ranks.leader.leave(3, "a")
    text = r"called off a turn of attention engine 3, .* within 2 s"
    with pytest.raises(AFDError, match=text):
        take(ranks.followers[0], turn(3), [])


def test_stop_ends_all_waits(ranks: Ranks) -> None:
    with ThreadPoolExecutor(3) as pool:
        jobs = {
            each: pool.submit(take, each, turn(n), [])
            for n, each in enumerate(ranks.all)
        }
        time.sleep(SHORT_S)
        assert not any(job.done() for job in jobs.values())
        for each in ranks.all:
            each.stop()
        for each, job in jobs.items():
            text = "shuts down" if each is ranks.leader else "has called off"
            with pytest.raises(AFDError, match=text):
                job.result(TIMEOUT_S)


# Two FFN ranks, and engines of two ranks each.


class _Group:
    """The tensor parallel group, as far as it matters: who calls is one after the
    other."""

    rank_in_group = 0
    instance = ""

    def broadcast_object(self, value: Any = None) -> Any:
        if isinstance(value, str):
            return self.instance
        if value is not None:
            self._paths = value
        return self._paths


class Reduction:
    """What both ranks have to come to, for the same layer."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._lock = threading.Lock()
        self._parts: list[tuple[int, int]] = []
        self.done: list[tuple[int, int]] = []

    def __call__(self, layer: int, x: torch.Tensor) -> None:
        with self._lock:
            self._parts.append((layer, x.shape[0]))
        if self._barrier.wait(TIMEOUT_S) == 0:
            one, other = self._parts
            assert one == other
            self.done.append(one)
            self._parts.clear()
        self._barrier.wait(TIMEOUT_S)


class Engines(Servers):
    """Engines whose ranks run in threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gate_on_ffn: bool):
        super().__init__(monkeypatch, gate_on_ffn)
        self.group = _Group()
        monkeypatch.setattr(afd_session, "get_tp_group", lambda: self.group)
        monkeypatch.setattr(afd_turns, "get_tp_group", lambda: self.group)
        self.num_ranks, self.num_ffn_ranks = 6, 2
        self.port = self._two_free_ports()
        self.failures = Failures()
        self.reduction = self.compute = Reduction()
        for rank in range(2):
            self.group.rank_in_group = rank
            self.start_ffn(self.failures, rank=rank)
        self.engines = [self.start_engine(i, "a") for i in range(3)]

    def _two_free_ports(self) -> int:
        while True:
            port = free_port()
            with socket.socket() as other:
                try:
                    other.bind(("127.0.0.1", port + 1))
                except (OSError, OverflowError):
                    continue
            return port

    def start_engine(
        self, index: int, instance: str, **kwargs: Any
    ) -> list[AFDAttention]:
        self.group.instance = instance
        return [
            self.connect(self.failures, rank=2 * index + i, **kwargs) for i in range(2)
        ]

    def run_engine(self, engine: list[AFDAttention], num_tokens: int) -> None:
        x = torch.rand(num_tokens, HIDDEN_SIZE)

        def run(rank: AFDAttention) -> None:
            rank.begin_step("eager", [num_tokens])
            y = self.run_model(rank, x)
            rank.end_step()
            assert torch.equal(y, self.expected(x))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, engine, timeout=TIMEOUT_S))

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        for layer in range(NUM_LAYERS):
            logits = self.logits(x)
            x = (layer + 2) * x
            if logits is not None:
                x = x + logits.sum(dim=-1, keepdim=True)
        return x


@pytest.fixture(params=[True, False], ids=["gate_on_ffn", "gate_on_attention"])
def engines(request, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    engines = Engines(monkeypatch, request.param)
    yield engines
    engines.close()


def test_ranks_reduce_the_same_layers(engines: Engines) -> None:
    """Each engine runs steps of its own, all at once."""
    sizes = [[1] * 30, [2, 3] * 10, [MAX_TOKENS] * 10]

    def serve(index: int) -> None:
        for num_tokens in sizes[index]:
            engines.run_engine(engines.engines[index], num_tokens)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(serve, range(3), timeout=TIMEOUT_S))
    assert not engines.failures.errors
    assert sorted(engines.reduction.done) == sorted(
        (layer, rows)
        for engine in sizes
        for rows in engine
        for layer in range(NUM_LAYERS)
    )


@pytest.mark.parametrize("kind", ["profile", "warmup"])
def test_an_answer_waits_for_the_other_rank_that_compiles(
    engines: Engines, kind: str
) -> None:
    """It needs the input of both."""
    for rank in engines.engines[0]:
        rank.close()
    early, late = engines.start_engine(0, "b", step_timeout_s=SHORT_S)
    x = torch.rand(2, HIDDEN_SIZE)
    for rank in (early, late):
        rank.begin_step(kind, [2])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engines.run_model, early, x)
        time.sleep(4 * SHORT_S)
        engines.run_model(late, x)
        assert torch.equal(answer.result(TIMEOUT_S), engines.expected(x))
    assert not engines.failures.errors


@pytest.mark.parametrize("sender", [0, 1])
def test_an_engine_whose_ranks_leave_at_different_points(
    engines: Engines, sender: int
) -> None:
    """One rank has sent a layer, the other has not: FFN goes on for the others."""
    engine = engines.engines[0]
    x = torch.rand(2, HIDDEN_SIZE)
    for rank in engine:
        rank.begin_step("eager", [2])
    with ThreadPoolExecutor(1) as pool:
        exchange = pool.submit(engine[sender].exchange, 0, x, engines.logits(x))
        time.sleep(SHORT_S)
        assert not exchange.done()
        engine[1 - sender].abort_step(SystemExit())
        engine[1 - sender].close()
        time.sleep(SHORT_S)
        engine[sender].abort_step(SystemExit())
        engine[sender].close()
        with pytest.raises(AFDError):
            exchange.result(TIMEOUT_S)
    engines.run_engine(engines.engines[1], 3)
    engine = engines.start_engine(0, "b")
    engines.run_engine(engine, 4)
    engines.run_engine(engines.engines[2], 5)
    assert not engines.failures.errors


def test_the_taken_port_of_a_rank_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] - 1
        config = AFDConfig(
            afd_role="ffn", afd_port=port, num_attention_ranks=2, num_ffn_ranks=2
        )
        with pytest.raises(
            ValueError, match=rf"afd_port={port} \+ 1 \(the FFN rank\): .*in use"
        ):
            AFDListener(config, rank=1)
