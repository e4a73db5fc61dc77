# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CUDA graphs of both roles of AFD.

The code of the roles, of the microbatches and of the NCCL connector is the real one.
NCCL, the devices and their graphs are fakes.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.afd_transfer.afd_connector import nccl_link
from vllm.distributed.afd_transfer.afd_connector.base import AFDTransfer
from vllm.distributed.afd_transfer.afd_connector.gloo_connector import GlooAFDConnector
from vllm.distributed.afd_transfer.afd_connector.p2p_nccl_connector import (
    P2pNcclAFDConnector,
    _InFlight,
)
from vllm.distributed.afd_transfer.errors import AFDError, AFDPeerError
from vllm.distributed.afd_transfer.messages import AFDStep
from vllm.v1.worker import (
    afd_attention_model_runner,
    afd_ffn_model_runner,
    afd_graphs,
    workspace,
)
from vllm.v1.worker.afd_attention_model_runner import AFDAttentionMixin
from vllm.v1.worker.afd_graphs import AFDGraphs
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)
from vllm.v1.worker.ubatch_utils import UBatchSlice

from .fake_nccl import FakeStream, FakeWorld, fake_world, wait_until
from .test_p2p_nccl_connector import HIDDEN_SIZE, Roles
from .utils import SOON_S, in_threads

pytestmark = pytest.mark.skip_global_cleanup


def _desc(num_tokens: int, num_ubatches: int = 1) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(
        cg_mode=CUDAGraphMode.FULL,
        num_tokens=num_tokens,
        num_reqs=num_tokens,
        uniform_token_count=1,
        num_ubatches=num_ubatches,
    )


class Runner(AFDAttentionMixin):
    """The attention role's runner, and what Model Runner V2 does around it."""

    def __init__(self, roles: "GraphRoles"):
        self.roles = roles
        self.world = roles.world
        self.afd = roles.attention
        self._afd_graphs: dict[BatchExecutionDescriptor, int] = {}
        self.graphs: dict[BatchExecutionDescriptor, Any] = {}
        self.inputs: dict[BatchExecutionDescriptor, list[torch.Tensor]] = {}
        self.outputs: dict[BatchExecutionDescriptor, list[torch.Tensor]] = {}
        self.capture_stream = FakeStream(self.world.devices["attention"])

    @staticmethod
    def stage_tokens(desc: BatchExecutionDescriptor) -> list[int]:
        half = desc.num_tokens // 2
        halves = [half, desc.num_tokens - half]
        return halves if desc.num_ubatches == 2 else [desc.num_tokens]

    def _model(self, desc: BatchExecutionDescriptor) -> None:
        xs = self.inputs[desc]
        run = self.roles._run_ubatches if len(xs) > 1 else self.roles._run_whole
        self.outputs[desc] = run(xs)

    def capture_model(self, descs: list[BatchExecutionDescriptor]) -> None:
        def create_forward_fn(
            desc: BatchExecutionDescriptor, warmup: bool
        ) -> Callable[[CUDAGraphMode], None]:
            self.inputs[desc] = [
                torch.rand(n, HIDDEN_SIZE) for n in self.stage_tokens(desc)
            ]
            return lambda cg_mode: self._model(desc)

        create = self.wrap_capture(create_forward_fn)
        with self.world.process("attention"):
            for desc in descs:
                create(desc, warmup=True)(CUDAGraphMode.NONE)
                forward_fn = create(desc, warmup=False)
                graph = torch.cuda.CUDAGraph()
                stream: Any = self.capture_stream
                with (
                    self.world._on_stream(stream),
                    torch.cuda.graph(graph, stream=stream),
                ):
                    forward_fn(CUDAGraphMode.NONE)
                self.graphs[desc] = graph

    def run(self, desc: BatchExecutionDescriptor, dummy_run: bool = False) -> Any:
        slices = None
        if desc.num_ubatches == 2:
            half = desc.num_tokens // 2
            slices = [
                UBatchSlice(slice(*s), slice(*s))
                for s in ((0, half), (half, desc.num_tokens))
            ]
        batch: Any = SimpleNamespace(num_tokens_after_padding=desc.num_tokens)
        with self.world.process("attention") as device:
            self.before_forward(batch, desc, slices, dummy_run, is_profile=False)
            values = [torch.rand_like(x) for x in self.inputs[desc]]
            for x, value in zip(self.inputs[desc], values):
                x.copy_(value)
            self.graphs[desc].replay()
            stats = self.afd.end_step()
            assert not self.roles.on_attention._in_flight
            device.compute_stream.synchronize()
        for value, output in zip(values, self.outputs[desc]):
            torch.testing.assert_close(output, self.roles.expected(value))
        return stats


class GraphRoles(Roles):
    def __init__(self, world: FakeWorld, monkeypatch: pytest.MonkeyPatch, **kwargs):
        super().__init__(world, monkeypatch, **kwargs)
        monkeypatch.setattr(
            afd_graphs,
            "graph_capture",
            lambda device: contextlib.nullcontext(),
        )
        monkeypatch.setattr(afd_graphs, "current_stream", world.current_stream)
        self.runner = Runner(self)

    def run_both(self, on_attention: Callable[[], None]) -> None:
        def attention() -> None:
            try:
                on_attention()
            finally:
                self.steps.put(None)

        in_threads(attention, self.run_ffn)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWorld]:
    with fake_world(monkeypatch) as world:
        yield world


@pytest.fixture
def make_roles(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., GraphRoles]]:
    made: list[GraphRoles] = []

    def make(**kwargs: Any) -> GraphRoles:
        made.append(GraphRoles(world, monkeypatch, **kwargs))
        made[-1].connect()
        return made[-1]

    yield make
    for roles in made:
        roles.graphs.clear()
        for graph in world.graphs:
            graph.reset()
        roles.close()


DESCS = [_desc(7), _desc(7, 2), _desc(4), _desc(2, 2), _desc(1)]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7])
@pytest.mark.parametrize("gate_on_ffn", [True, False])
def test_replays_between_eager_steps(
    make_roles: Callable[..., GraphRoles], num_layers: int, gate_on_ffn: bool
):
    roles = make_roles(num_layers=num_layers, gate_on_ffn=gate_on_ffn)

    def attention() -> None:
        roles.run_step([16])
        roles.runner.capture_model(DESCS)
        before = roles.world.num_messages
        for desc in [*DESCS, *reversed(DESCS)]:
            roles.runner.run(desc)
        assert roles.world.num_messages - before == 2 * 2 * num_layers * (3 + 2 * 2)
        for desc in DESCS:
            # They have used the buffers of the connector, and FFN's workspace.
            roles.run_step([5])
            roles.run_step([9, 3])
            roles.runner.run(desc)
            roles.runner.run(desc)

    roles.run_both(attention)
    assert not roles.said
    # As many as on attention, each replayed as often.
    assert len(roles.graphs) == len(DESCS)
    replays = [graph.num_replays for graph in roles.runner.graphs.values()]
    assert replays == [4] * len(DESCS)
    on_ffn: list[Any] = [graph for _, graph in roles.graphs._graphs.values()]
    assert [graph.num_replays for graph in on_ffn] == replays


@pytest.mark.parametrize("stage_tokens", [[4, 4], [8], [7, 1]])
def test_an_eager_step_of_a_captured_size_is_not_replayed(
    make_roles: Callable[..., GraphRoles], stage_tokens: list[int]
):
    """That there is a graph is not enough: attention has to say that it replays."""
    roles = make_roles()

    def attention() -> None:
        roles.runner.capture_model([_desc(8, 2), _desc(8)])
        roles.run_step(stage_tokens)

    roles.run_both(attention)
    on_ffn: list[Any] = [graph for _, graph in roles.graphs._graphs.values()]
    assert [graph.num_replays for graph in on_ffn] == [0, 0]


def test_nothing_travels_while_it_is_captured(make_roles: Callable[..., GraphRoles]):
    roles = make_roles(num_layers=3)
    before = roles.world.num_messages
    roles.run_both(lambda: roles.runner.capture_model([_desc(4), _desc(4, 2)]))
    # Only in the warm-up before.
    assert roles.world.num_messages - before == 2 * 3 * (1 + 2)


def test_a_graph_that_is_captured_again_replaces_itself(
    make_roles: Callable[..., GraphRoles],
):
    """As attention profiles the memory of some graphs first, and drops them."""
    roles = make_roles()
    old: list[Any] = []

    def attention() -> None:
        roles.runner.capture_model(DESCS[:2])
        # What attention does next comes after FFN's capture.
        roles.runner.run(DESCS[0])
        old.extend(graph for _, graph in roles.graphs._graphs.values())
        roles.runner.capture_model(DESCS)
        for desc in DESCS:
            roles.runner.run(desc)

    roles.run_both(attention)
    assert len(roles.graphs) == len(DESCS)
    assert [graph.num_replays for graph in old] == [1, 0]


@pytest.mark.parametrize("seed", range(10))
def test_in_whatever_order_streams_take_turns(
    make_roles: Callable[..., GraphRoles], seed: int
):
    roles = make_roles()
    roles.world._rng.seed(seed)

    def attention() -> None:
        roles.runner.capture_model([_desc(5, 2), _desc(3)])
        for _ in range(3):
            roles.runner.run(_desc(5, 2))
            roles.runner.run(_desc(3))

    roles.run_both(attention)


@pytest.mark.parametrize(
    ("graph", "stage_tokens", "match"),
    [
        (1, [4], r"graph 1 with stages of \[4\] .* step 9, .* with none\. .* 1 graphs"),
        (0, [2, 2], r"graph 0 with stages of \[2, 2\] .* captured here with \[4\]"),
    ],
)
def test_a_graph_that_ffn_has_not_captured(
    make_roles: Callable[..., GraphRoles],
    graph: int,
    stage_tokens: list[int],
    match: str,
):
    roles = make_roles()
    roles.run_both(lambda: roles.runner.capture_model([_desc(4)]))
    step = AFDStep(seq=9, kind="replay", stage_tokens=stage_tokens, graph=graph)
    with roles.world.process("ffn"), pytest.raises(AFDError, match=match):
        roles.ffn._run_step(roles._ffn_session, step, (0, ""), roles.graphs)
    assert not roles.graphs.failed


def test_no_step_ends_while_the_watch_queries(
    make_roles: Callable[..., GraphRoles],
):
    """The next one may be captured, in which no thread may query."""
    queried, go_on = threading.Event(), threading.Event()

    def query() -> bool:
        if threading.current_thread().name == "afd-nccl-watch":
            queried.set()
            go_on.wait(SOON_S)
        return True

    connector = make_roles().on_attention
    ended = SimpleNamespace(query=query)
    connector._in_flight.append(_InFlight("waiting", ended, SOON_S, ""))  # type: ignore[arg-type]
    assert queried.wait(SOON_S)
    step = threading.Thread(target=connector.finish_step)
    step.start()
    step.join(0.2)
    assert step.is_alive()
    go_on.set()
    step.join(SOON_S)
    assert not step.is_alive() and not connector._in_flight


@pytest.mark.parametrize("lost", ["attention", "ffn"])
def test_a_peer_that_is_lost_in_a_replay(
    make_roles: Callable[..., GraphRoles], monkeypatch: pytest.MonkeyPatch, lost: str
):
    roles = make_roles(step_timeout_s=0.5)
    desc = _desc(4, 2)
    roles.run_both(lambda: roles.runner.capture_model([desc]))
    limit = r"replaying CUDA graph 0 in step 3: it took longer than step_timeout_s=0\.5"
    roles.world.freeze(lost)
    survivor = "ffn" if lost == "attention" else "attention"
    errors: dict[str, BaseException] = {}

    def run(role: str, function: Callable) -> None:
        try:
            function()
        except (RuntimeError, AFDError, TimeoutError) as e:
            errors[role] = e
        if role == survivor:
            # Lets the other one end, if it waits for the device.
            roles.world.freeze(lost, False)

    def ffn() -> None:
        with roles.world.process("ffn"):
            step = roles.steps.get(timeout=SOON_S)
            roles.ffn._run_step(roles._ffn_session, step, (0, ""), roles.graphs)

    in_threads(
        lambda: run("attention", lambda: roles.runner.run(desc)),
        lambda: run("ffn", ffn),
    )
    with pytest.raises(AFDPeerError, match=limit):
        raise errors[survivor]
    if survivor == "attention":
        assert roles.said == [errors["attention"]]


def test_a_failure_while_it_is_captured_is_told(make_roles: Callable[..., GraphRoles]):
    roles = make_roles()
    error = MemoryError("no memory for the graph")

    def forward_fn(cg_mode: CUDAGraphMode) -> None:
        raise error

    create = roles.runner.wrap_capture(lambda desc, warmup: forward_fn)
    with pytest.raises(MemoryError):
        create(_desc(4), warmup=False)(CUDAGraphMode.NONE)
    assert not roles.attention._step
    assert roles.said == [error]
    assert roles.steps.get(timeout=SOON_S).kind == "capture"


def test_a_model_that_leaves_layers_out_is_not_captured(
    make_roles: Callable[..., GraphRoles],
):
    roles = make_roles()
    create = roles.runner.wrap_capture(lambda desc, warmup: lambda cg_mode: None)
    with pytest.raises(AFDError, match=r"ran \[0\] of the 3 MoE layers"):
        create(_desc(4), warmup=False)(CUDAGraphMode.NONE)
    assert len(roles.said) == 1


def test_stats_of_a_replay(make_roles: Callable[..., GraphRoles]):
    roles = make_roles(num_layers=3, gate_on_ffn=False)
    stats: list[Any] = []

    def attention() -> None:
        roles.runner.capture_model([_desc(4, 2), _desc(3)])
        stats.append(roles.runner.run(_desc(4, 2)))
        stats.append(roles.runner.run(_desc(3)))
        stats.append(roles.runner.run(_desc(3), dummy_run=True))

    roles.run_both(attention)
    split, whole, dummy = stats
    assert (split.steps, split.split_steps) == (1, 1)
    assert (whole.steps, whole.split_steps) == (1, 0)
    assert split.bytes_received == 3 * 4 * HIDDEN_SIZE * 4
    assert whole.bytes_sent == 3 * 3 * (HIDDEN_SIZE + 4) * 4
    assert split.replayed_steps == whole.replayed_steps == 1
    # Nobody has seen them.
    assert split.exchanges == split.split_exchanges == split.overlapped == 0
    assert dummy is None
    assert roles.attention.stats.steps == 2


class _Trace:
    def __init__(self) -> None:
        self.steps: list[str] = []
        self.num_events = 0

    def begin_step(self, step: AFDStep) -> None:
        self.steps.append(step.kind)

    def end_step(self) -> None:
        self.steps.append("end")

    def __getattr__(self, name: str) -> Any:
        def put(*args: Any) -> None:
            self.num_events += 1

        return put


def test_a_trace_has_steps_that_run(make_roles: Callable[..., GraphRoles]):
    roles = make_roles()
    on_attention, on_ffn = _Trace(), _Trace()
    roles.attention.session.trace = on_attention  # type: ignore[assignment]
    roles._ffn_session.trace = on_ffn  # type: ignore[assignment]

    def attention() -> None:
        roles.runner.capture_model([_desc(4)])
        events = on_attention.num_events
        roles.runner.run(_desc(4))
        assert on_attention.num_events == events > 0

    roles.run_both(attention)
    assert on_attention.steps == on_ffn.steps == ["warmup", "end", "replay", "end"]


def test_attention_drops_its_graphs_before_the_connection(
    make_roles: Callable[..., GraphRoles], monkeypatch: pytest.MonkeyPatch
):
    """NCCL waits for them to be gone before it ends a communicator."""
    order: list[str] = []

    resets: list[str] = []
    graph = SimpleNamespace(reset=lambda: resets.append("reset"))

    class Base:
        cudagraph_manager: Any = SimpleNamespace(graphs={_desc(1): graph})

        def shutdown(self) -> None:
            order.append("runner")

    class Whole(AFDAttentionMixin, Base):
        def __init__(self) -> None:
            self.vllm_config: Any = None
            self.afd: Any = SimpleNamespace(close=self._close)

        def _close(self) -> None:
            assert self.cudagraph_manager is None and resets == ["reset"]
            order.append("afd")

    monkeypatch.setattr(
        afd_attention_model_runner, "set_afd_exchange", lambda *args: None
    )
    Whole().shutdown()
    assert order == ["afd", "runner"]


@pytest.fixture
def workspace_manager() -> Iterator[workspace.WorkspaceManager]:
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"))
    yield workspace.current_workspace_manager()
    workspace.reset_workspace_manager()


def test_the_workspace_stays_while_there_are_graphs(
    make_roles: Callable[..., GraphRoles],
    workspace_manager: workspace.WorkspaceManager,
):
    roles = make_roles()
    assert not workspace_manager.is_locked()
    roles.run_both(lambda: roles.runner.capture_model([_desc(4)]))
    assert workspace_manager.is_locked()
    roles.graphs.clear()
    # The next attention server may have larger steps.
    assert not workspace_manager.is_locked() and len(roles.graphs) == 0


def test_clear_without_graphs_leaves_the_workspace(
    workspace_manager: workspace.WorkspaceManager,
):
    workspace_manager.lock()
    AFDGraphs(torch.device("cpu")).clear()
    assert workspace_manager.is_locked()


def test_the_connector_can_be_captured():
    assert P2pNcclAFDConnector.supports_cuda_graphs
    assert not GlooAFDConnector.supports_cuda_graphs


def test_memory_of_graphs_is_shared(make_roles: Callable[..., GraphRoles]):
    """Only what is captured on one stream, into one pool, uses memory again."""
    roles = make_roles()
    roles.run_both(lambda: roles.runner.capture_model(DESCS))
    streams, pools = zip(*roles.world.captures)
    assert len(set(streams)) == 1
    assert list(pools) == [None] + [(0, 1)] * (len(DESCS) - 1)


def test_a_replay_that_cannot_be_ended_ends_the_process(
    make_roles: Callable[..., GraphRoles], monkeypatch: pytest.MonkeyPatch
):
    roles = make_roles(step_timeout_s=0.5)
    roles.run_both(lambda: roles.runner.capture_model([_desc(4)]))
    monkeypatch.setattr(nccl_link, "_STOP_TIMEOUT_S", 0.3)
    roles.world.abort_hangs = True
    roles.world.freeze("ffn")
    with pytest.raises(AFDPeerError, match="replaying CUDA graph 0"):
        roles.runner.run(_desc(4))
    roles.on_attention.close()
    assert roles.world.num_exits == 1


def test_communicators_outlive_graphs(
    make_roles: Callable[..., GraphRoles], monkeypatch: pytest.MonkeyPatch
):
    """Their abort ends messages, but it waits for the graphs before it returns."""
    monkeypatch.setattr(nccl_link, "_STOP_TIMEOUT_S", 0.5)
    roles = make_roles()
    roles.run_both(lambda: roles.runner.capture_model([_desc(4)]))
    comms = [c for c in roles.world.comms.values() if c.device_fake.name == "ffn"]
    roles.on_ffn.close()
    # Given up after a while: the streams are free.
    assert not roles.world.num_exits
    assert not any(comm.freed for comm in comms)
    roles.graphs.clear()
    wait_until(lambda: all(comm.freed for comm in comms), "a communicator is left")


def _serve_one(
    roles: GraphRoles,
    monkeypatch: pytest.MonkeyPatch,
    recv_step: Callable[[], AFDStep | None],
) -> list[str]:
    """Make `roles.ffn` able to serve an attention server that says goodbye.

    Returns:
        What its sessions note.

    """
    events: list[str] = []
    session = roles._ffn_session
    vars(session).update(
        fail=lambda error: events.append(f"failed: {error}"),
        close=lambda: events.append(f"closed with {len(roles.graphs)} graphs"),
    )
    vars(roles.ffn).update(
        afd_config=SimpleNamespace(num_ffn_ranks=1),
        _controls={0: None},
        _sessions={0: None},
        _graphs={0: roles.graphs},
        _failure=None,
        _stop=threading.Event(),
        _lock=threading.Lock(),
    )
    monkeypatch.setattr(afd_ffn_model_runner, "AFDSession", lambda *args: session)
    control: Any = SimpleNamespace(
        peer_said_bye=True,
        peer_hello=SimpleNamespace(rank=0, instance=""),
        recv_step=recv_step,
    )
    with roles.world.process("ffn"):
        roles.ffn._serve_one(None, 0, control)  # type: ignore[arg-type]
    return events


def test_ffn_drops_the_graphs_before_it_closes(
    make_roles: Callable[..., GraphRoles], monkeypatch: pytest.MonkeyPatch
):
    """It serves the next attention server, which captures anew."""
    roles = make_roles()
    events: list[str] = []
    graphs: list[Any] = []

    def recv_step() -> AFDStep | None:
        step = roles.steps.get(timeout=SOON_S)
        if step is None:
            graphs.extend(graph for _, graph in roles.graphs._graphs.values())
        return step

    def ffn() -> None:
        for _ in range(2):
            events.extend(_serve_one(roles, monkeypatch, recv_step))

    def attention() -> None:
        for _ in range(2):
            roles.runner.capture_model([_desc(4), _desc(3)])
            roles.runner.run(_desc(3))
            roles.steps.put(None)

    in_threads(attention, ffn)
    assert events == ["closed with 0 graphs"] * 2
    assert [graph.num_replays for graph in graphs] == [0, 1] * 2
    # Released, whoever refers to them.
    assert not any(graph.nodes for graph in graphs)


@pytest.mark.parametrize("when", ["before", "computing", "sending"])
def test_ffn_outlives_attention_that_leaves_at_a_capture(
    make_roles: Callable[..., GraphRoles], monkeypatch: pytest.MonkeyPatch, when: str
):
    roles = make_roles()
    error = AFDError("attention has ended the session")
    run_ffn_layer = afd_ffn_model_runner.run_ffn_layer

    start = roles.on_ffn._link.start

    def fail(*args: Any) -> None:
        start(*args)
        raise error

    def leave(layer: int, *args: Any) -> torch.Tensor:
        if layer == 1 and when == "computing":
            roles.on_ffn.abort(error)
        elif layer == 1:
            monkeypatch.setattr(roles.on_ffn._link, "start", fail)
        return run_ffn_layer(layer, *args)  # type: ignore[arg-type]

    if when == "before":
        roles.on_ffn.abort(error)
    monkeypatch.setattr(afd_ffn_model_runner, "run_ffn_layer", leave)
    step = AFDStep(seq=1, kind="capture", stage_tokens=[4], graph=0)
    assert _serve_one(roles, monkeypatch, lambda: step) == ["closed with 0 graphs"]
    assert not roles.graphs.failed
    assert not any(graph.nodes for graph in roles.world.graphs)


class _FailingCapture:
    """What CUDA says of a capture that was left in the middle."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: Any) -> None:
        raise RuntimeError("CUDA error: capturing stream has unjoined work")


def test_ffn_ends_if_a_capture_does_not(
    make_roles: Callable[..., GraphRoles], monkeypatch: pytest.MonkeyPatch
):
    """Also if attention has left: torch may not capture any more."""
    roles = make_roles()
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: _FailingCapture())

    def fail(*args: Any) -> torch.Tensor:
        raise MemoryError("no memory for the graph")

    monkeypatch.setattr(afd_ffn_model_runner, "run_ffn_layer", fail)
    step = AFDStep(seq=1, kind="capture", stage_tokens=[4], graph=0)
    # The cause.
    with pytest.raises(MemoryError):
        _serve_one(roles, monkeypatch, lambda: step)
    assert roles.graphs.failed


@pytest.mark.parametrize("num_stages", [1, 2])
def test_attention_says_why_a_capture_failed(
    make_roles: Callable[..., GraphRoles],
    monkeypatch: pytest.MonkeyPatch,
    num_stages: int,
):
    """Not that the capture has not come back to the stream where it began."""
    roles = make_roles()
    submit = roles.on_attention.submit
    error = AFDPeerError("the peer died")

    def lose(transfer: AFDTransfer, *args: Any) -> Any:
        handle = submit(transfer, *args)
        if roles.attention._step.kind == "capture" and transfer.layer == 1:  # type: ignore
            roles.on_attention.abort(error)
        return handle

    monkeypatch.setattr(roles.on_attention, "submit", lose)

    def attention() -> None:
        with pytest.raises(Exception) as raised:
            roles.runner.capture_model([_desc(4, num_stages)])
        cause: BaseException | None = raised.value
        while cause is not None and cause is not error:
            cause = cause.__cause__
        assert cause is error

    roles.run_both(attention)


def test_what_is_captured_goes_through_the_runner(monkeypatch: pytest.MonkeyPatch):
    captured: list[Any] = []
    monkeypatch.setattr(
        CudaGraphManager,
        "capture",
        lambda self, create_forward_fn, desc: captured.append(create_forward_fn),
    )
    manager = ModelCudaGraphManager.__new__(ModelCudaGraphManager)
    manager.use_breakable_cg = False
    manager.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    wrapped: list[Any] = []

    def wrap_capture(create_forward_fn: Any) -> str:
        wrapped.append(create_forward_fn)
        return "wrapped"

    arguments: list[Any] = [None] * 7
    manager.capture(*arguments, wrap_capture=wrap_capture)  # type: ignore[arg-type]
    manager.capture(*arguments)
    assert captured[0] == "wrapped" and len(wrapped) == 1
    # Without AFD, what it was.
    assert captured[1].__code__ is wrapped[0].__code__


def test_graphs_of_another_mode_are_refused(make_roles: Callable[..., GraphRoles]):
    """Into which vLLM may turn FULL_DECODE_ONLY, for an attention backend."""
    roles = make_roles()
    create = roles.runner.wrap_capture(lambda desc, warmup: lambda cg_mode: None)
    desc = replace(_desc(4), cg_mode=CUDAGraphMode.PIECEWISE)
    with pytest.raises(AFDError, match="mode PIECEWISE.* cudagraph_mode NONE on both"):
        create(desc, warmup=True)
