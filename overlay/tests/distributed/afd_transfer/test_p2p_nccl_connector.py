# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The NCCL connector under what both roles and DBO do with it.

The code of the roles and of the microbatches is the real one. NCCL and the devices are
fakes: messages are rendezvous, and what is computed runs when its stream gets there.
"""

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config.afd import AFDConfig
from vllm.distributed.afd_transfer.afd_connector import (
    nccl_link,
    p2p_nccl_connector,
)
from vllm.distributed.afd_transfer.afd_connector.base import AFDLayout, AFDTransfer
from vllm.distributed.afd_transfer.afd_connector.factory import AFDConnectorFactory
from vllm.distributed.afd_transfer.afd_connector.nccl_link import AFDNcclLink
from vllm.distributed.afd_transfer.afd_connector.p2p_nccl_connector import (
    P2pNcclAFDConnector,
    _NcclRecvHandle,
)
from vllm.distributed.afd_transfer.errors import (
    AFDError,
    AFDHandshakeError,
    AFDPeerError,
)
from vllm.distributed.afd_transfer.messages import AFDStep
from vllm.v1.worker import afd_ffn_model_runner, ubatching
from vllm.v1.worker.afd_attention_model_runner import AFDAttention
from vllm.v1.worker.afd_ffn_model_runner import AFDFFNModelRunner

from .fake_nccl import FakeStream, FakeWorld, fake_world, wait_until
from .utils import ATTENTION_PEER, FFN_PEER, SOON_S, blob_exchanges, in_threads

pytestmark = pytest.mark.skip_global_cleanup

HIDDEN_SIZE = 8
NUM_EXPERTS = 4
MAX_TOKENS = 16
LAYOUT = AFDLayout(MAX_TOKENS, 2, HIDDEN_SIZE, torch.float32, NUM_EXPERTS)
STEPS = [
    [[1], [5], [0], [MAX_TOKENS], [1]],
    [[1, 1], [0, 0], [3, 0], [0, 3], [5, 4], [MAX_TOKENS, 7], [7], [0], [2, 2]],
]


def _experts(layer: int, x: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
    y = x * 0.5 + layer
    return y if logits is None else y + logits.sum(dim=-1, keepdim=True)


class Roles:
    """A session, with what the two roles do in it."""

    def __init__(
        self,
        world: FakeWorld,
        monkeypatch: pytest.MonkeyPatch,
        connector_cls: type[P2pNcclAFDConnector] = P2pNcclAFDConnector,
        num_layers: int = 3,
        gate_on_ffn: bool = True,
        **config: Any,
    ):
        self.world = world
        self.num_layers = num_layers
        self.gate_on_ffn = gate_on_ffn
        # Announced steps, and what was said when a role failed.
        self.steps: queue.SimpleQueue = queue.SimpleQueue()
        self.said: list[BaseException] = []
        config = {"step_timeout_s": SOON_S} | config
        vllm_config: Any = SimpleNamespace(
            afd_config=AFDConfig(
                afd_role="ffn", afd_connector="P2pNcclAFDConnector", **config
            )
        )
        logits_size = 0 if gate_on_ffn else NUM_EXPERTS
        layers = [SimpleNamespace(logits_size=logits_size)] * num_layers

        def connector(role: Any, peer: str) -> P2pNcclAFDConnector:
            with world.process(role):
                return connector_cls(vllm_config, role, LAYOUT, peer)

        def session(connector: P2pNcclAFDConnector, **kwargs: Any) -> Any:
            return SimpleNamespace(
                connector=connector,
                layers=layers,
                trace=None,
                peer=connector.peer,
                fail=self.said.append,
                **kwargs,
            )

        self.on_attention = connector("attention", FFN_PEER)
        self.on_ffn = connector("ffn", ATTENTION_PEER)
        control = SimpleNamespace(check=lambda: None, send_step=self.steps.put)
        self.attention = AFDAttention(session(self.on_attention, control=control))
        self._ffn_session = session(self.on_ffn)
        self.ffn = AFDFFNModelRunner.__new__(AFDFFNModelRunner)
        self.ffn.vllm_config = vllm_config
        self.ffn._runners = list(range(num_layers))  # type: ignore[arg-type]
        self._workspace = torch.empty(MAX_TOKENS, HIDDEN_SIZE)
        self._barrier = threading.Barrier(3)
        for name, value in (
            ("create_forward_context", lambda *args: None),
            ("override_forward_context", lambda context: contextlib.nullcontext()),
            ("run_ffn_layer", self._run_ffn_layer),
        ):
            monkeypatch.setattr(afd_ffn_model_runner, name, value)
        for module in (p2p_nccl_connector, ubatching):
            monkeypatch.setattr(module, "current_stream", world.current_stream)
        monkeypatch.setattr(p2p_nccl_connector, "_WATCH_S", 0.05)
        monkeypatch.setattr(ubatching, "_THREAD_ID_TO_CONTEXT", {})
        monkeypatch.setattr(ubatching, "_CURRENT_CONTEXTS", [])
        self.comm_stream = FakeStream(world.devices["attention"])

    def connect(self, timeout_s: float = SOON_S) -> "Roles":
        ends = blob_exchanges()

        def connect(connector: P2pNcclAFDConnector, end: Callable) -> None:
            with self.world.process(connector.role):
                connector.connect(end, "127.0.0.1", timeout_s)

        in_threads(
            lambda: connect(self.on_attention, ends[0]),
            lambda: connect(self.on_ffn, ends[1]),
        )
        return self

    def _run_ffn_layer(
        self, layer: int, x: torch.Tensor, logits: torch.Tensor | None
    ) -> torch.Tensor:
        # As kernels do, whose output is in memory that they use again.
        output = self._workspace[: x.shape[0]]
        output.copy_(_experts(layer, x, logits))
        return output

    # Attention.

    def _logits(self, x: torch.Tensor) -> torch.Tensor | None:
        return None if self.gate_on_ffn else x[:, :NUM_EXPERTS] * 2

    def _model(self, x: torch.Tensor) -> torch.Tensor:
        for layer in range(self.num_layers):
            x = x + 1
            x = self.attention.exchange(layer, x, self._logits(x))
        return x * 1

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        for layer in range(self.num_layers):
            x = x + 1
            x = _experts(layer, x, self._logits(x))
        return x

    def _run_whole(self, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self._model(x) for x in xs]

    def _run_ubatches(self, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        compute = self.world.devices["attention"].compute_stream
        forward_contexts: list[Any] = [object(), object()]
        contexts = ubatching.make_ubatch_contexts(
            2,
            compute,  # type: ignore[arg-type]
            self.comm_stream,  # type: ignore[arg-type]
            forward_contexts,
            self._barrier,
        )
        run = contexts[0].run
        outputs: list[Any] = [None, None]

        def run_one(context: ubatching.UBatchContext) -> None:
            try:
                with self.world.process("attention"), context:
                    outputs[context.id] = self._model(xs[context.id])
            except BaseException as e:
                run.abort(context.id, e)

        run.start([threading.Thread(target=run_one, args=(c,)) for c in contexts])
        run.finish()
        return outputs

    def run_step(self, stage_tokens: list[int]) -> None:
        xs = [torch.rand(n, HIDDEN_SIZE) for n in stage_tokens]
        with self.world.process("attention") as device:
            self.attention.begin_step("eager", stage_tokens)
            run = self._run_ubatches if len(xs) > 1 else self._run_whole
            outputs = run(xs)
            self.attention.end_step()
            assert not self.on_attention._in_flight
            device.compute_stream.synchronize()
        for x, output in zip(xs, outputs):
            torch.testing.assert_close(output, self.expected(x))

    def run_attention(self, steps: list[list[int]]) -> None:
        try:
            for stage_tokens in steps:
                self.run_step(stage_tokens)
        finally:
            self.steps.put(None)

    # FFN.

    def run_ffn(self) -> None:
        with self.world.process("ffn"):
            while (step := self.steps.get(timeout=SOON_S)) is not None:
                self.ffn._run_step(self._ffn_session, step)
                assert not self.on_ffn._in_flight

    def run(self, steps: list[list[int]]) -> None:
        in_threads(lambda: self.run_attention(steps), self.run_ffn)

    def close(self) -> None:
        for connector in (self.on_attention, self.on_ffn):
            connector.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWorld]:
    with fake_world(monkeypatch) as world:
        yield world


@pytest.fixture
def roles(world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> Iterator[Roles]:
    """Connected."""
    roles = Roles(world, monkeypatch, step_timeout_s=0.5).connect()
    yield roles
    roles.close()


def test_is_registered():
    config = AFDConfig(afd_role="ffn", afd_connector="P2pNcclAFDConnector")
    assert AFDConnectorFactory.get_connector_class(config) is P2pNcclAFDConnector


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 7])
@pytest.mark.parametrize("gate_on_ffn", [True, False])
@pytest.mark.parametrize("max_in_flight", [1, 3, 8])
def test_the_order_of_both_roles_cannot_deadlock(
    world: FakeWorld,
    monkeypatch: pytest.MonkeyPatch,
    num_stages: int,
    num_layers: int,
    gate_on_ffn: bool,
    max_in_flight: int,
):
    monkeypatch.setattr(p2p_nccl_connector, "_MAX_IN_FLIGHT", max_in_flight)
    roles = Roles(
        world, monkeypatch, num_layers=num_layers, gate_on_ffn=gate_on_ffn
    ).connect()
    steps = STEPS[num_stages - 1]
    roles.run(steps)
    # Two to connect, and two for each layer of each stage that has rows.
    stages = sum(rows > 0 for step in steps for rows in step)
    assert world.num_messages == 2 + 2 * num_layers * stages
    assert not roles.said
    roles.close()


@pytest.mark.parametrize("seed", range(20))
def test_in_whatever_order_streams_take_turns(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch, seed: int
):
    world._rng.seed(seed)
    roles = Roles(world, monkeypatch).connect()
    roles.run([[5, 4], [3], [1, 7]])
    roles.close()


def test_stages_overlap(roles: Roles, monkeypatch: pytest.MonkeyPatch):
    """While FFN's device computes one stage, attention's computes the other one."""
    computed = [False] * roles.num_layers

    def model(x: torch.Tensor) -> torch.Tensor:
        stage = ubatching.dbo_current_ubatch_id()
        for layer in range(roles.num_layers):
            x = x + 1
            if stage == 1:
                stream = roles.world.current_stream()
                stream.add(functools.partial(computed.__setitem__, layer, True))
            x = roles.attention.exchange(layer, x, None)
        return x * 1

    def compute(layer: int, x: torch.Tensor, logits: None) -> torch.Tensor:
        if x.shape[0] == 3:
            # Stage 0 takes until attention has computed stage 1.
            stream = roles.world.current_stream()
            stream.add(lambda: None, lambda: computed[layer])
        return roles._run_ffn_layer(layer, x, logits)

    monkeypatch.setattr(roles, "_model", model)
    monkeypatch.setattr(afd_ffn_model_runner, "run_ffn_layer", compute)
    roles.run([[3, 2]])
    assert all(computed)


class _SendYieldReceive(P2pNcclAFDConnector):
    """Everything on one stream, with the yield between send and receive."""

    def submit(
        self,
        transfer: AFDTransfer,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
    ) -> _NcclRecvHandle:
        connector = self
        self._last = transfer
        stream = ubatching.current_stream()
        self._link.start(AFDNcclLink.TO_FFN, [hidden_states], stream)

        class Handle(_NcclRecvHandle):
            def done(self) -> bool:
                return False

            def wait(self) -> torch.Tensor:
                receive = [self._output]
                connector._link.start(AFDNcclLink.TO_ATTENTION, receive, stream)
                self._ended.record(stream)
                limit = connector.recv_limit(may_compile=False)
                connector._in_flight.append(
                    p2p_nccl_connector._InFlight("it", self._ended, *limit)
                )
                return super().wait()

        output = torch.empty_like(hidden_states)
        return Handle(self, [hidden_states], output, torch.cuda.Event())


def test_send_yield_receive_on_one_stream_deadlocks(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
):
    roles = Roles(
        world, monkeypatch, connector_cls=_SendYieldReceive, step_timeout_s=0.5
    ).connect()
    # Not with one stage.
    roles.run([[3], [5]])
    blocked: list[list[str]] = []
    abort = P2pNcclAFDConnector.abort

    def abort_and_note(self: P2pNcclAFDConnector, error: AFDError) -> None:
        blocked.append([w for r in world.devices for w in world.blocked(r)])
        abort(self, error)

    monkeypatch.setattr(P2pNcclAFDConnector, "abort", abort_and_note)
    start = time.monotonic()

    def attention() -> None:
        with pytest.raises(AFDPeerError, match="longer than step_timeout_s=0.5"):
            roles.run_attention([[3, 2]])

    def ffn() -> None:
        with pytest.raises(AFDPeerError, match="longer than step_timeout_s=0.5"):
            roles.run_ffn()

    in_threads(attention, ffn)
    assert time.monotonic() - start < SOON_S / 2
    # Attention sends stage 1, and FFN its answer to stage 0: nobody receives.
    assert blocked[0] == ["send", "send"]
    roles.close()


def test_a_receive_ahead_of_the_answer_is_refused(roles: Roles):
    """It would be ahead of it on the stream, too, and both would wait."""
    transfers = [AFDTransfer(1, 0, stage, 2, 3) for stage in (0, 1)]
    with roles.world.process("ffn"):
        for transfer in transfers:
            roles.on_ffn.post_recv(transfer)
        roles.on_ffn.recv(transfers[0])
        with pytest.raises(AFDError, match="to be answered before"):
            roles.on_ffn.recv(transfers[1])


# Failures.


def _lose_peer(
    roles: Roles, role: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[BaseException, float]:
    """Lose the peer of `role` in the middle of a step.

    Returns:
        What `role` raises, and how many seconds after.

    """
    on_role, on_peer = roles.on_attention, roles.on_ffn
    run_role: Callable[[], None] = lambda: roles.run_attention([[3, 2]])
    run_peer: Callable[[], None] = roles.run_ffn
    if role == "ffn":
        on_role, on_peer, run_role, run_peer = on_peer, on_role, run_peer, run_role
    lost_at = 0.0
    raised: list[BaseException] = []
    seconds: list[float] = []
    run_ffn_layer: Callable = afd_ffn_model_runner.run_ffn_layer

    def compute(layer: int, x: torch.Tensor, logits: None) -> torch.Tensor:
        nonlocal lost_at
        if layer == 1 and not lost_at:
            roles.world.freeze(on_peer.role)
            lost_at = time.monotonic()
            if how == "died":
                # The control plane sees it.
                on_role.abort(AFDPeerError(f"{on_role.peer} died"))
        return run_ffn_layer(layer, x, logits)

    def survive() -> None:
        with pytest.raises(RuntimeError) as error:
            run_role()
        seconds.append(time.monotonic() - lost_at)
        raised.append(error.value)
        # Lets the peer's thread end.
        roles.world.freeze(on_peer.role, False)
        on_peer.abort(AFDError("the test is over"))

    def be_lost() -> None:
        with contextlib.suppress(RuntimeError):
            run_peer()

    monkeypatch.setattr(afd_ffn_model_runner, "run_ffn_layer", compute)
    in_threads(survive, be_lost)
    return raised[0], seconds[0]


@pytest.mark.parametrize("role", ["attention", "ffn"])
@pytest.mark.parametrize("how", ["died", "hung"])
def test_a_lost_peer_ends_the_step(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch, role: str, how: str
):
    timeout_s = SOON_S if how == "died" else 0.5
    roles = Roles(world, monkeypatch, num_layers=20, step_timeout_s=timeout_s).connect()
    error, seconds = _lose_peer(roles, role, how, monkeypatch)
    connector = roles.on_attention if role == "attention" else roles.on_ffn
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, AFDPeerError):
        # Of a microbatch.
        cause = cause.__cause__
    assert connector.peer in str(cause)
    if how == "hung":
        assert "longer than step_timeout_s=0.5" in str(cause)
        assert "step 1, layer " in str(cause)
    assert seconds < SOON_S / 2
    # Who waits for the device is woken, by another thread.
    device = world.devices[role]
    wait_until(lambda: all(not s.ops for s in device.streams), "streams are blocked")
    own = [c for c in world.comms.values() if c.device_fake is device]
    wait_until(lambda: all(c.aborted_by for c in own), "a communicator is left")
    assert all("abort" in str(c.aborted_by) for c in own)
    start = time.monotonic()
    connector.close()
    assert time.monotonic() - start < SOON_S / 2
    assert not world.num_exits
    roles.close()


def test_a_stream_that_cannot_be_freed_ends_the_process(
    roles: Roles, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nccl_link, "_STOP_TIMEOUT_S", 0.3)
    roles.world.abort_hangs = True
    with roles.world.process("attention"):
        transfer = AFDTransfer(1, 0, 0, 1, 3)
        roles.on_attention.submit(transfer, torch.ones(3, HIDDEN_SIZE))
        with pytest.raises(AFDPeerError, match=r"waiting for the answer to step 1, "):
            roles.on_attention.finish_step()
        roles.on_attention.close()
    assert roles.world.num_exits == 1


def test_aborted_transfers_are_not_taken_for_done(roles: Roles):
    """The abort ends them on the device, without data."""
    with roles.world.process("attention"):
        transfer = AFDTransfer(1, 0, 0, 1, 3)
        handle = roles.on_attention.submit(transfer, torch.ones(3, HIDDEN_SIZE))
        assert not handle.done()
        error = AFDPeerError("gone")
        roles.on_attention.abort(error)
        roles.on_attention._link.join()
        assert handle.done()
        for call in (handle.wait, roles.on_attention.finish_step):
            with pytest.raises(AFDPeerError) as raised:
                call()
            assert raised.value is error


def test_a_host_that_waits_for_the_device_is_woken(roles: Roles):
    """What it calls in the middle of a step may wait by itself, without a limit."""
    with roles.world.process("attention") as device:
        handle = roles.on_attention.submit(
            AFDTransfer(1, 0, 0, 1, 3), torch.ones(3, HIDDEN_SIZE)
        )
        handle.wait()
        start = time.monotonic()
        device.compute_stream.synchronize()
        assert 0.4 < time.monotonic() - start < SOON_S / 2
        with pytest.raises(AFDPeerError, match="longer than step_timeout_s=0.5"):
            roles.on_attention.finish_step()


def test_a_device_that_fails_ends_the_session(roles: Roles):
    def fail() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with roles.world.process("attention"):
        roles.on_attention.submit(
            AFDTransfer(1, 0, 0, 1, 3), torch.ones(3, HIDDEN_SIZE)
        )
        roles.on_attention._in_flight[0].ended.query = fail  # type: ignore
        wait_until(lambda: roles.on_attention._error is not None, "no error")
        with pytest.raises(AFDError, match="illegal memory access"):
            roles.on_attention.check()


def test_a_transfer_that_an_abort_has_ended(roles: Roles):
    """Just when it is looked at."""
    error = AFDPeerError("gone")

    def query() -> bool:
        roles.on_attention.abort(error)
        return True

    with roles.world.process("attention"):
        roles.on_attention.submit(
            AFDTransfer(1, 0, 0, 1, 3), torch.ones(3, HIDDEN_SIZE)
        )
        roles.on_attention._in_flight[0].ended.query = query  # type: ignore
        with pytest.raises(AFDPeerError, match="gone"):
            roles.on_attention._wait_until(0)


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_an_error_of_nccl_ends_the_session(roles: Roles, role: str):
    roles.world.nccl_error = "NCCL error: unhandled cuda error"
    transfer = AFDTransfer(1, 0, 0, 1, 3)
    connector = roles.on_attention if role == "attention" else roles.on_ffn
    with (
        roles.world.process(role),
        pytest.raises(AFDPeerError, match="unhandled cuda error") as raised,
    ):
        if role == "attention":
            connector.submit(transfer, torch.ones(3, HIDDEN_SIZE))
        else:
            connector.recv(transfer)
    assert connector.peer in str(raised.value)
    assert connector._error is raised.value


def test_a_failing_microbatch_is_the_cause(roles: Roles):
    """Not what ends the other one, which may be about to submit."""
    model, calls = roles._model, 0

    def fail_in_one(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("no memory for stage 1")
        return model(x)

    roles._model = fail_in_one  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory for stage 1"):
        roles.run_attention([[3, 2]])
    assert roles.on_attention._error is None


def test_the_peer_is_told_if_a_step_does_not_end(roles: Roles):
    roles.world.freeze("ffn")
    with pytest.raises(AFDPeerError) as raised:
        roles.run_attention([[3]])
    assert roles.said == [raised.value]


def test_the_first_input_has_more_time(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
):
    roles = Roles(
        world, monkeypatch, step_timeout_s=0.1, connect_timeout_s=1.2
    ).connect()
    step = AFDStep(seq=1, kind="profile", stage_tokens=[3])
    start = time.monotonic()
    with (
        world.process("ffn"),
        pytest.raises(AFDPeerError, match="connect_timeout_s=1.2"),
    ):
        roles.ffn._run_step(roles._ffn_session, step)
    assert time.monotonic() - start > 1
    roles.close()


def test_connecting_fails_with_the_peer(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
):
    roles = Roles(world, monkeypatch)
    with (
        world.process("ffn"),
        pytest.raises(AFDHandshakeError, match="does not use NCCL") as raised,
    ):
        roles.on_ffn.connect(lambda data: b"", "127.0.0.1", SOON_S)
    assert ATTENTION_PEER in str(raised.value)
    roles.close()


def test_layouts_must_be_equal(world: FakeWorld, monkeypatch: pytest.MonkeyPatch):
    roles = Roles(world, monkeypatch)
    roles.on_ffn.layout = replace(
        LAYOUT, max_tokens=17, hidden_dtype=torch.bfloat16, logits_size=0
    )
    with pytest.raises(AFDHandshakeError) as raised:
        roles.connect()
    for name in ("max_tokens", "hidden_dtype", "logits_size"):
        assert f"{name} is" in str(raised.value)
    assert "hidden_size" not in str(raised.value)
    roles.close()


def test_abort_before_and_during_connect(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
):
    roles = Roles(world, monkeypatch)
    error = AFDPeerError("no longer there")

    def exchange(data: bytes) -> bytes:
        roles.on_attention.abort(error)
        raise AFDError("the control connection has ended")

    with world.process("attention"):
        with pytest.raises(AFDError, match="the control connection has ended"):
            roles.on_attention.connect(exchange, "127.0.0.1", SOON_S)
        with pytest.raises(AFDPeerError) as raised:
            roles.on_attention.connect(exchange, "127.0.0.1", SOON_S)
    assert raised.value is error
    roles.close()


def test_close_twice_and_use_after(roles: Roles):
    roles.run([[3, 2], [1]])
    for _ in range(2):
        roles.close()
    assert all(comm.aborted for comm in roles.world.comms.values())
    with roles.world.process("attention"):
        for call in (
            lambda: roles.on_attention.submit(
                AFDTransfer(9, 0, 0, 1, 1), torch.ones(1, HIDDEN_SIZE)
            ),
            roles.on_attention.finish_step,
        ):
            with pytest.raises(AFDError, match="closed"):
                call()


def test_a_connector_that_is_not_connected(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
):
    roles = Roles(world, monkeypatch)
    transfer = AFDTransfer(1, 0, 0, 1, 1)
    with world.process("attention"), pytest.raises(AFDError, match="not connected"):
        roles.on_attention.submit(transfer, torch.ones(1, HIDDEN_SIZE))
    with world.process("ffn"), pytest.raises(AFDError, match="not connected"):
        roles.on_ffn.recv(transfer)
    roles.close()


# What is not the next transfer, or has another size, does not reach NCCL.


@pytest.mark.parametrize(
    ("changes", "follows"),
    [
        ({"stage": 1}, True),
        ({}, False),
        ({"layer": 1}, False),
        ({"layer": 1, "stage": 1}, False),
        ({"stage": 1, "seq": 2}, False),
        ({"seq": 2}, False),
        ({"num_stages": 1, "layer": 1}, False),
    ],
)
@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_a_transfer_that_is_not_the_next_one(
    roles: Roles, role: str, changes: dict[str, int], follows: bool
):
    first = AFDTransfer(1, 0, 0, 2, 3)
    second = replace(first, **changes)
    x = torch.ones(3, HIDDEN_SIZE)
    with roles.world.process(role):
        if role == "attention":
            roles.on_attention.submit(first, x)
            start: Callable[[], Any] = lambda: roles.on_attention.submit(second, x)
        else:
            roles.on_ffn.recv(first)
            roles.on_ffn.send(first, x)
            start = lambda: roles.on_ffn.recv(second)
        if follows:
            start()
            return
        before = roles.world.num_messages
        with pytest.raises(AFDError, match="does not follow the last one"):
            start()
        assert roles.world.num_messages == before


@pytest.mark.parametrize("changes", [{"layer": 1}, {"seq": 3, "layer": 1}, {"seq": 0}])
def test_steps_begin_with_the_first_layer(roles: Roles, changes: dict[str, int]):
    transfer = AFDTransfer(2, 0, 0, 1, 1)
    x = torch.ones(1, HIDDEN_SIZE)
    with roles.world.process("attention"):
        if "seq" in changes:
            roles.on_attention.submit(transfer, x)
        with pytest.raises(AFDError, match="does not follow the last one"):
            roles.on_attention.submit(replace(transfer, **changes), x)


@pytest.mark.parametrize(
    "shape, dtype, logits, message",
    [
        ((4, HIDDEN_SIZE), torch.float32, (3, NUM_EXPERTS), "[4, 8]"),
        ((3, HIDDEN_SIZE + 1), torch.float32, (3, NUM_EXPERTS), "[3, 9]"),
        ((3, HIDDEN_SIZE), torch.bfloat16, (3, NUM_EXPERTS), "bfloat16"),
        ((3, HIDDEN_SIZE), torch.float32, (3, NUM_EXPERTS - 1), "[3, 3]"),
        ((3, HIDDEN_SIZE), torch.float32, None, "[3, 4]"),
    ],
)
def test_tensors_that_do_not_fit(
    roles: Roles,
    shape: tuple[int, int],
    dtype: torch.dtype,
    logits: tuple[int, int] | None,
    message: str,
):
    transfer = AFDTransfer(1, 0, 0, 1, 3, NUM_EXPERTS)
    connector = roles.on_attention
    with roles.world.process("attention"):
        with pytest.raises(ValueError) as raised:
            connector.submit(
                transfer,
                torch.ones(shape, dtype=dtype),
                None if logits is None else torch.ones(logits),
            )
        assert message in str(raised.value)
        # Nothing was sent, so it can be tried again.
        connector.submit(
            transfer, torch.ones(3, HIDDEN_SIZE), torch.ones(3, NUM_EXPERTS)
        )
    with roles.world.process("ffn"):
        roles.on_ffn.recv(transfer)
        with pytest.raises(ValueError, match=r"must be \[\(\[3, 8\]"):
            roles.on_ffn.send(transfer, torch.ones(2, HIDDEN_SIZE))
        with pytest.raises(AFDError, match="is not the one that was received"):
            roles.on_ffn.send(replace(transfer, layer=1), torch.ones(3, HIDDEN_SIZE))
        roles.on_ffn.send(transfer, torch.ones(3, HIDDEN_SIZE))
    with roles.world.process("attention"):
        connector.finish_step()


@pytest.mark.parametrize("changes", [{"rows": 17}, {"stage": 1}, {"logits_size": 5}])
def test_a_transfer_out_of_the_layout(roles: Roles, changes: dict[str, int]):
    transfer = replace(AFDTransfer(1, 0, 0, 1, 3), **changes)
    (name,) = changes
    with (
        roles.world.process("attention"),
        pytest.raises(ValueError, match=f"^{name} of an AFD transfer"),
    ):
        roles.on_attention.submit(transfer, torch.ones(transfer.rows, HIDDEN_SIZE))
    with (
        roles.world.process("ffn"),
        pytest.raises(ValueError, match=f"^{name} of an AFD transfer"),
    ):
        roles.on_ffn.post_recv(transfer)


# Memory.


def test_an_answer_may_be_overwritten(roles: Roles):
    """In stream order, before it is received."""
    transfer = AFDTransfer(1, 0, 0, 1, 3)
    x, answer = torch.rand(3, HIDDEN_SIZE), torch.zeros(3, HIDDEN_SIZE)
    link = roles.on_attention._link
    link.start(AFDNcclLink.TO_FFN, [x], link.streams[0])
    with roles.world.process("ffn"):
        hidden_states, _ = roles.on_ffn.recv(transfer)
        output = hidden_states * 2
        roles.on_ffn.send(transfer, output)
        output.zero_()
        hidden_states.zero_()
    wait_until(lambda: roles.world.blocked("ffn") == ["send"], "no answer")
    time.sleep(0.05)
    link.start(AFDNcclLink.TO_ATTENTION, [answer], link.streams[0])
    link.streams[0].synchronize()
    assert torch.equal(answer, x * 2)


def test_an_answer_may_be_the_input(roles: Roles):
    transfer = AFDTransfer(1, 0, 0, 1, 3)
    x = torch.rand(3, HIDDEN_SIZE)
    with roles.world.process("ffn"):
        hidden_states, _ = roles.on_ffn.recv(transfer)
        hidden_states.mul_(2)
        roles.on_ffn.send(transfer, hidden_states)
    with roles.world.process("attention") as device:
        output = roles.on_attention.submit(transfer, x).wait()
        roles.on_attention.finish_step()
        device.compute_stream.synchronize()
    assert torch.equal(output, x * 2)


def test_memory_is_allocated_once_and_given_back(roles: Roles):
    stages = roles.on_ffn._stages
    buffers = [tensor.data_ptr() for stage in stages for tensor in vars(stage).values()]
    assert len(stages) == LAYOUT.num_stages
    assert not roles.on_attention._stages
    roles.run([[n % 17] for n in range(40)] + [[n, 16 - n] for n in range(17)])
    assert buffers == [t.data_ptr() for stage in stages for t in vars(stage).values()]
    # Whatever was in use by a transfer has been let go.
    assert not roles.on_attention._in_flight and not roles.on_ffn._in_flight
    roles.close()
    assert not roles.on_ffn._stages


def test_the_host_is_not_far_ahead(roles: Roles, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(p2p_nccl_connector, "_MAX_IN_FLIGHT", 3)
    x = torch.ones(2, HIDDEN_SIZE)
    with roles.world.process("attention"):
        for layer in range(3):
            roles.on_attention.submit(AFDTransfer(1, layer, 0, 1, 2), x)
        # Nobody answers.
        with pytest.raises(AFDPeerError, match="layer 0, stage 0 of 1, 2 rows: it "):
            roles.on_attention.submit(AFDTransfer(1, 3, 0, 1, 2), x)
