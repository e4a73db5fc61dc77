# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The NCCL connector between several attention and FFN ranks.

As in test_p2p_nccl_connector.py. With tensor parallelism, the ranks of each role reduce
what they compute, on the stream that they compute on.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.distributed.afd_transfer.afd_connector import nccl_link
from vllm.distributed.afd_transfer.afd_connector.base import AFDTransfer
from vllm.distributed.afd_transfer.errors import AFDError, AFDPeerError
from vllm.utils.network_utils import get_open_zmq_ipc_path
from vllm.v1.worker import afd_ffn_model_runner, ubatching
from vllm.v1.worker.afd_ffn_model_runner import AFDFFNModelRunner
from vllm.v1.worker.afd_turns import AFDFollowingTurns, AFDLeadingTurns, AFDTurns

from .fake_nccl import (
    NUM_STREAMS,
    FakeReduction,
    FakeWorld,
    fake_world,
    wait_until,
)
from .test_p2p_nccl_connector import (
    HIDDEN_SIZE,
    LAYOUT,
    MAX_TOKENS,
    NUM_EXPERTS,
    Roles,
    _experts,
)
from .utils import SOON_S, in_threads

pytestmark = pytest.mark.skip_global_cleanup

# What the engines run, each its own.
STEPS: list[list[list[int]]] = [
    [[5, 4], [1], [0, 3], [MAX_TOKENS]],
    [[1]] * 6,
    [[2, 2], [7, 1]],
]


class _OfEachProcess:
    """State of a module, as of several processes."""

    def __init__(self, world: FakeWorld, make: type):
        self._world = world
        self._of = {device: make() for device in world.devices.values()}

    def _here(self) -> Any:
        return self._of[self._world.current_stream().device]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here(), name)

    def __len__(self) -> int:
        return len(self._here())

    def __contains__(self, key: Any) -> bool:
        return key in self._here()

    def __getitem__(self, key: Any) -> Any:
        return self._here()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._here()[key] = value


class _ForwardContexts:
    """Stands for the module of that name."""

    def __init__(self, world: FakeWorld):
        self._of = _OfEachProcess(world, dict)

    @property
    def _forward_context(self) -> Any:
        return self._of.get("current")

    @_forward_context.setter
    def _forward_context(self, value: Any) -> None:
        self._of["current"] = value


class _Gate:
    """Holds a stream until it is opened."""

    def __init__(self, world: FakeWorld):
        self._world = world
        self._is_open = False

    def put(self, layer: int = 0) -> None:
        """On the current stream."""
        self._world.current_stream().add(lambda: None, lambda: self._is_open)

    def open(self) -> None:
        with self._world.changed:
            self._is_open = True
            self._world.changed.notify_all()


class _Rank(Roles):
    """An attention rank, the FFN rank that serves it, and what they do."""

    def __init__(self, ranks: "Ranks", rank: int, **kwargs: Any):
        tp_rank = rank % ranks.tp_size
        super().__init__(
            ranks.world,
            ranks.monkeypatch,
            attention=f"attention-{rank}",
            ffn=f"ffn-{tp_rank}",
            num_attention_ranks=ranks.num_engines * ranks.tp_size,
            num_ffn_ranks=ranks.tp_size,
            **kwargs,
        )
        self.rank = rank
        self.tp_rank = tp_rank
        self.engine = (rank // ranks.tp_size, "")
        # The same for all of an engine.
        self._random = torch.Generator().manual_seed(self.engine[0])
        self._reduce = ranks.reductions.get(f"attention-{self.engine[0]}")
        self.before_exchange: Callable[[int], None] = lambda layer: None

    def _input(self, num_tokens: int) -> torch.Tensor:
        return torch.rand(num_tokens, HIDDEN_SIZE, generator=self._random)

    def _model(self, x: torch.Tensor) -> torch.Tensor:
        stage = ubatching.dbo_current_ubatch_id()
        for layer in range(self.num_layers):
            x = x + 1
            if self._reduce is not None:
                # What is not a number stays so.
                x = self._reduce((layer, stage), x * (self.tp_rank == 0))
            self.before_exchange(layer)
            x = self.attention.exchange(layer, x, self._logits(x))
        return x * 1


class Ranks:
    """Engines of one attention server and one FFN server, of `tp_size` ranks each."""

    def __init__(
        self,
        world: FakeWorld,
        monkeypatch: pytest.MonkeyPatch,
        num_engines: int,
        tp_size: int = 1,
        **kwargs: Any,
    ):
        self.world = world
        self.monkeypatch = monkeypatch
        self.num_engines = num_engines
        self.tp_size = tp_size
        self.reductions: dict[str, FakeReduction] = {}
        if tp_size > 1:
            groups = {f"attention-{e}": e * tp_size for e in range(num_engines)}
            for name, first in groups.items():
                names = [f"attention-{first + i}" for i in range(tp_size)]
                self.reductions[name] = FakeReduction(world, names)
            names = [f"ffn-{i}" for i in range(tp_size)]
            self.reductions["ffn"] = FakeReduction(world, names)
        self.ranks = [
            _Rank(self, rank, **kwargs) for rank in range(num_engines * tp_size)
        ]
        self._patch()
        self.turns = self._make_turns()
        # The ranks that one FFN rank serves are of one process.
        self.ffn: list[AFDFFNModelRunner] = [
            self.ranks[tp_rank].ffn for tp_rank in range(tp_size)
        ]
        for ffn, turns in zip(self.ffn, self.turns):
            ffn._turns = turns
        for rank in self.ranks:
            rank.ffn = self.ffn[rank.tp_rank]
        self._workspaces = {
            f"ffn-{i}": torch.empty(MAX_TOKENS, HIDDEN_SIZE) for i in range(tp_size)
        }
        self.after_experts: Callable[[int, torch.Tensor], None] = lambda layer, x: None
        for rank in self.ranks:
            rank.connect()

    def _patch(self) -> None:
        """Of what each of `ranks` has patched as the only one."""
        for name, value in (
            ("_THREAD_ID_TO_CONTEXT", _OfEachProcess(self.world, dict)),
            ("_CURRENT_CONTEXTS", _OfEachProcess(self.world, list)),
            ("forward_context", _ForwardContexts(self.world)),
        ):
            self.monkeypatch.setattr(ubatching, name, value)
        self.monkeypatch.setattr(
            afd_ffn_model_runner, "run_ffn_layer", self._run_ffn_layer
        )

    def reconnect(self, rank: int) -> None:
        """As after the end of an attention server."""
        self.ranks[rank].close()
        ffn = self.ranks[rank].ffn
        self.ranks[rank] = _Rank(self, rank)
        self.ranks[rank].ffn = ffn
        self._patch()
        self.ranks[rank].connect()

    def _make_turns(self) -> list[AFDTurns]:
        if self.tp_size == 1:
            return [AFDTurns()]
        ready, *verdicts = (get_open_zmq_ipc_path() for _ in range(self.tp_size))
        return [
            AFDLeadingTurns(ready, verdicts),
            *(AFDFollowingTurns(ready, path, SOON_S) for path in verdicts),
        ]

    def _run_ffn_layer(
        self, layer: int, x: torch.Tensor, logits: torch.Tensor | None
    ) -> torch.Tensor:
        name = self.world.current_stream().device.name
        # As kernels do, whose output is in memory that they use for all ranks.
        output = self._workspaces[name][: x.shape[0]]
        output.copy_(_experts(layer, x, logits))
        if "ffn" in self.reductions:
            part = output * (name == "ffn-0")
            output.copy_(self.reductions["ffn"]((layer, x.shape[0]), part))
        self.after_experts(layer, x)
        return output

    def run(self, steps: list[list[list[int]]] = STEPS) -> None:
        """Run steps of each engine, all at once."""
        jobs: list[Callable[[], Any]] = []
        for rank, roles in enumerate(self.ranks):
            todo = steps[rank // self.tp_size % len(steps)]
            jobs.append(functools.partial(roles.run_attention, todo))
            jobs.append(roles.run_ffn)
        in_threads(*jobs)
        assert not any(roles.said for roles in self.ranks)

    def close(self) -> None:
        for turns in self.turns:
            turns.stop()
        in_threads(*(roles.close for roles in self.ranks))
        for turns in self.turns:
            turns.close()


@pytest.fixture
def make_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ranks]]:
    names = [f"attention-{i}" for i in range(8)] + [f"ffn-{i}" for i in range(4)]
    made: list[Ranks] = []
    with fake_world(monkeypatch, tuple(names)) as world:

        def make(*args: Any, **kwargs: Any) -> Ranks:
            made.append(Ranks(world, monkeypatch, *args, **kwargs))
            return made[-1]

        yield make
        for ranks in made:
            ranks.close()


# Engines of the attention role, and ranks of each and of the FFN role.
COUNTS = [(2, 1), (3, 1), (4, 1), (8, 1), (1, 2), (1, 4), (2, 2), (3, 2), (2, 4)]


@pytest.mark.parametrize(("num_engines", "tp_size"), COUNTS)
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("gate_on_ffn", [True, False])
def test_the_order_of_all_ranks_cannot_deadlock(
    make_ranks: Callable[..., Ranks],
    num_engines: int,
    tp_size: int,
    num_layers: int,
    gate_on_ffn: bool,
):
    ranks = make_ranks(
        num_engines, tp_size, num_layers=num_layers, gate_on_ffn=gate_on_ffn
    )
    ranks.run()
    # As in test_the_order_of_both_roles_cannot_deadlock.
    stages = sum(
        rows > 0
        for engine in range(num_engines)
        for step in STEPS[engine % len(STEPS)]
        for rows in step
    )
    messages = tp_size * (2 * num_engines + 2 * num_layers * stages)
    assert ranks.world.num_messages == messages


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("counts", [(3, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("seed", range(6))
def test_in_whatever_order_streams_take_turns(
    make_ranks: Callable[..., Ranks],
    num_stages: int,
    counts: tuple[int, int],
    seed: int,
):
    ranks = make_ranks(*counts)
    ranks.world._rng.seed(seed)
    steps = [[3, 2], [1, 7]] if num_stages == 2 else [[3], [8]]
    ranks.run([steps])


def _run_while_one_waits(
    ranks: Ranks, op: str, go_on: Callable[[], None], others: list[list[int]]
) -> None:
    """Run a step of engine 0, and those of the others when FFN waits for it with `op`.

    Args:
        go_on: Called after that, to let engine 0 go on.

    """
    first, *rest = ranks.ranks
    # Those of the first layer, and the input of the second.
    num_messages = ranks.world.num_messages + (2 if op == "recv" else 3)
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(first.run_attention, [[5]]),
            pool.submit(first.run_ffn),
        ]
        try:
            wait_until(
                lambda: (
                    ranks.world.num_messages == num_messages
                    and ranks.world.blocked("ffn-0") == [op]
                ),
                "it waits",
            )
            in_threads(
                *(rank.run_ffn for rank in rest),
                *(lambda rank=rank: rank.run_attention(others) for rank in rest),
            )
            assert ranks.world.blocked("ffn-0") == [op]
        finally:
            go_on()
        for job in jobs:
            job.result(SOON_S)


OTHERS = [[4], [2, 3], [MAX_TOKENS, 1]]


def test_a_rank_waits_for_none_that_has_not_sent(make_ranks: Callable[..., Ranks]):
    ranks = make_ranks(3)
    gate = _Gate(ranks.world)
    ranks.ranks[0].before_exchange = lambda layer: gate.put() if layer == 1 else None
    _run_while_one_waits(ranks, "recv", gate.open, OTHERS)


def test_it_would_if_its_stream_did(make_ranks: Callable[..., Ranks]):
    ranks = make_ranks(2)
    gate = _Gate(ranks.world)
    ranks.ranks[0].before_exchange = lambda layer: gate.put() if layer == 1 else None
    for rank in ranks.ranks:
        rank.on_ffn._is_shared = False
    for connector in (ranks.ranks[1].on_attention, ranks.ranks[1].on_ffn):
        connector.afd_config.step_timeout_s = 0.5
    with pytest.raises(AFDPeerError, match="it took longer than step_timeout_s=0.5"):
        _run_while_one_waits(ranks, "recv", gate.open, OTHERS)


def _freeze_before_the_answer(ranks: Ranks) -> Callable[[], None]:
    """Stop the device of engine 0 before it gets the answer of its second layer."""
    world = ranks.world

    def freeze() -> None:
        world.devices["attention-0"].frozen = True

    def after_experts(layer: int, x: torch.Tensor) -> None:
        if layer == 1 and x.shape[0] == 5:
            world.current_stream().add(freeze)

    ranks.after_experts = after_experts
    return lambda: world.freeze("attention-0", False)


def test_a_rank_waits_for_none_that_does_not_receive(make_ranks: Callable[..., Ranks]):
    """And the answer of that is still the right one."""
    ranks = make_ranks(3)
    _run_while_one_waits(ranks, "send", _freeze_before_the_answer(ranks), OTHERS)


def test_it_would_not_be_if_it_were_sent_from_the_workspace(
    make_ranks: Callable[..., Ranks],
):
    ranks = make_ranks(2)
    for stage in ranks.ranks[0].on_ffn._stages:
        stage.hidden_states = ranks._workspaces["ffn-0"].view(-1)
    with pytest.raises(AssertionError, match="not close"):
        _run_while_one_waits(ranks, "send", _freeze_before_the_answer(ranks), OTHERS)


def _run_engines_in_opposite_orders(ranks: Ranks, condition: Callable[[], Any]) -> None:
    """What engine 0 sends comes first on FFN rank 0, and last on FFN rank 1.

    Args:
        ranks: Two engines and two FFN ranks.
        condition: Of what comes last.

    """
    world = ranks.world
    gates = {1: _Gate(world), 2: _Gate(world)}
    for rank, gate in gates.items():
        ranks.ranks[rank].before_exchange = gate.put
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(ranks.run, [[[5]], [[3]]])
        try:
            wait_until(condition, "what comes first")
        finally:
            for gate in gates.values():
                gate.open()
        job.result(SOON_S)


def test_ffn_ranks_reduce_in_one_order(make_ranks: Callable[..., Ranks]):
    ranks = make_ranks(2, 2, num_layers=1)
    world = ranks.world
    num_messages = world.num_messages + 2
    _run_engines_in_opposite_orders(ranks, lambda: world.num_messages == num_messages)


def test_they_would_not_without_turns(
    make_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        Ranks, "_make_turns", lambda self: [AFDTurns() for _ in range(self.tp_size)]
    )
    ranks = make_ranks(2, 2, num_layers=1)
    with pytest.raises(AssertionError, match="not close"):
        _run_engines_in_opposite_orders(ranks, lambda: ranks.world.mismatches)
    # Each of the sums was of both engines.
    assert [sorted(tags) for tags in ranks.world.mismatches] == [[(0, 3), (0, 5)]] * 2
    ranks.world.mismatches.clear()


def test_an_answer_may_take_as_long_as_those_of_all_ranks(
    make_ranks: Callable[..., Ranks],
):
    ranks = make_ranks(3, step_timeout_s=40)
    connector = ranks.ranks[0].on_attention
    transfer = AFDTransfer(1, 0, 0, 1, 2, 0)
    with ranks.world.process("attention-0"):
        connector.submit(transfer, torch.ones(2, HIDDEN_SIZE))
    (in_flight,) = connector._in_flight
    assert in_flight.limit_s == 120
    assert in_flight.limit == "step_timeout_s=40 for each of 3 attention ranks"


@pytest.mark.parametrize(
    ("max_tokens", "sizes"),
    [(1, [1]), (2, [2, 1]), (100, [100, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1])],
)
def test_sizes_of_the_warm_up(max_tokens: int, sizes: list[int]):
    assert afd_ffn_model_runner._sizes(max_tokens) == sizes


@pytest.mark.parametrize("counts", [(1, 2), (2, 2)])
def test_a_rank_that_compiles_is_not_taken_for_a_hang(
    make_ranks: Callable[..., Ranks], counts: tuple[int, int]
):
    """Nor are those that wait for an answer that needs its input."""
    ranks = make_ranks(*counts, step_timeout_s=0.5)
    for rank in ranks.ranks:
        rank.attention.begin_step = (  # type: ignore[method-assign]
            lambda _, tokens, begin=rank.attention.begin_step: begin("profile", tokens)
        )
    late = ranks.ranks[1]
    model = late._model

    def compile_and_run(x: torch.Tensor) -> torch.Tensor:
        time.sleep(2)
        return model(x)

    late._model = compile_and_run  # type: ignore[method-assign]
    ranks.run([[[3]]])


def test_all_ranks_are_served_on_one_stream(
    make_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
):
    """Which is behind the one on which the weights were loaded, and warmed up."""
    ranks = make_ranks(2)
    ffn = ranks.ffn[0]
    streams: dict[int, Any] = {}
    done = threading.Barrier(3)

    def accept(hello: Any, rank: int, had_one: bool) -> None:
        streams[rank] = ranks.world.current_stream()
        done.wait(SOON_S)

    gate = _Gate(ranks.world)
    warmed_up: list[tuple[int, int, bool]] = []

    def run_ffn_layer(layer: int, x: torch.Tensor, logits: Any) -> None:
        rows = x.shape[0]
        assert logits.shape == (rows, NUM_EXPERTS)
        ranks.world.current_stream().add(
            lambda: warmed_up.append((layer, rows, gate._is_open))
        )

    layers = [SimpleNamespace(logits_size=NUM_EXPERTS)] * 2
    for name, value in (
        ("describe_server", lambda *args: SimpleNamespace(layers=layers)),
        ("make_layout", lambda hello: LAYOUT),
        ("moe_runners", lambda config: [0, 1]),
        ("run_ffn_layer", run_ffn_layer),
        ("make_turns", lambda config: AFDTurns()),
        ("current_stream", ranks.world.current_stream),
    ):
        monkeypatch.setattr(afd_ffn_model_runner, name, value)
    ffn.model, ffn.device = None, torch.device("meta")  # type: ignore[assignment]
    ffn.afd_config = ffn.vllm_config.afd_config  # type: ignore[assignment]
    ffn._listener = SimpleNamespace(listen=lambda: None)  # type: ignore[assignment]
    ffn._controls, ffn._threads = {0: None, 1: None}, []
    ffn._accept = accept  # type: ignore[method-assign]
    with ranks.world.process("ffn-0"):
        gate.put()
        threading.Timer(0.2, gate.open).start()
        ffn.start_serving()
    sizes = [MAX_TOKENS, 12, 8, 6, 4, 3, 2, 1]
    assert warmed_up == [(n, rows, True) for rows in sizes for n in (0, 1)]
    done.wait(SOON_S)
    assert streams[0] is streams[1]


@pytest.mark.parametrize("name", [None, "eth0"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_interface_is_chosen_once(
    make_ranks: Callable[..., Ranks],
    monkeypatch: pytest.MonkeyPatch,
    tp_size: int,
    name: str | None,
):
    """With tensor parallelism, before the first connection of AFD."""
    pinned: list[str] = []
    warnings: list[str] = []
    monkeypatch.setattr(nccl_link, "_pin_interface", pinned.append)
    monkeypatch.setattr(
        nccl_link.logger, "warning", lambda text, *args: warnings.append(text % args)
    )
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if name is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", name)
    make_ranks(1, tp_size)
    assert len(pinned) == (2 if tp_size == 1 else 0)
    assert len(warnings) == (4 if tp_size == 2 and name is None else 0)
    assert all("Set NCCL_SOCKET_IFNAME on both roles" in text for text in warnings)


def test_links_share_no_stream(make_ranks: Callable[..., Ranks]):
    """Though torch has few, and sessions come and go."""
    ranks = make_ranks(2)
    world = ranks.world
    stays = ranks.ranks[0].on_ffn._link.streams[0]
    compute = world.devices["ffn-0"].compute_stream
    for _ in range(NUM_STREAMS + 1):
        ranks.reconnect(1)
        assert ranks.ranks[1].on_ffn._link.streams[0] not in (stays, compute)
    assert len(world.devices["ffn-0"].pools[-1]) == NUM_STREAMS
    ranks.run()


def test_no_more_links_than_streams(make_ranks: Callable[..., Ranks]):
    ranks = make_ranks(1)
    with ranks.world.process("ffn-0"):
        streams = [nccl_link._take_stream() for _ in range(NUM_STREAMS - 1)]
        with pytest.raises(AFDError, match="32 connections with NCCL already"):
            nccl_link._take_stream()
    nccl_link._give_back_stream(streams)
