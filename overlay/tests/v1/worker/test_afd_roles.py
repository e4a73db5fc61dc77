# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Both AFD roles in one process: real sessions, a model of two lines.

Layer i turns x into (i + 2) * x, plus the sum of the router logits if they travel.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed.afd_transfer.control_utils import free_port
from vllm.config.afd import AFDConfig
from vllm.distributed.afd_transfer import afd_session
from vllm.distributed.afd_transfer.control import AFDControl
from vllm.distributed.afd_transfer.errors import AFDError, AFDPeerError
from vllm.distributed.afd_transfer.messages import AFDLayerInfo
from vllm.v1.worker import (
    afd_attention_model_runner,
    afd_ffn_model_runner,
    ubatching,
)
from vllm.v1.worker.afd_attention_model_runner import AFDAttention, AFDAttentionMixin
from vllm.v1.worker.afd_ffn_model_runner import AFDFFNModelRunner

# Not one that is run concurrently.
pytestmark = pytest.mark.skip_global_cleanup

# A bound for what takes milliseconds.
TIMEOUT_S = 60
NUM_LAYERS = 3
HIDDEN_SIZE = 8
NUM_EXPERTS = 4
MAX_TOKENS = 32


class Failures:
    """What was reported to a worker."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self._came = threading.Event()

    def __call__(self, error: Exception) -> None:
        self.errors.append(error)
        self._came.set()

    def wait(self) -> Exception:
        assert self._came.wait(TIMEOUT_S), "no failure was reported"
        return self.errors[0]


class Servers:
    """Makes servers of both roles that fit together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gate_on_ffn: bool = True):
        self.gate_on_ffn = gate_on_ffn
        self.port = free_port()
        self.ffns: list[AFDFFNModelRunner] = []
        self.attentions: list[AFDAttention] = []
        self.compute: Callable[[int, torch.Tensor], Any] = lambda layer, x: None
        layers = [
            AFDLayerInfo(
                name=f"layers.{i}",
                gate_on_ffn=gate_on_ffn,
                logits_size=0 if gate_on_ffn else NUM_EXPERTS,
                logits_dtype="float32",
            )
            for i in range(NUM_LAYERS)
        ]
        monkeypatch.setattr(
            afd_session, "describe_moe_layers", lambda config, model: layers
        )
        monkeypatch.setattr(afd_session, "model_facts", lambda config: {"a": "fact"})
        monkeypatch.setattr(
            afd_ffn_model_runner, "moe_runners", lambda config: list(range(NUM_LAYERS))
        )
        monkeypatch.setattr(afd_ffn_model_runner, "run_ffn_layer", self._run_layer)
        monkeypatch.setattr(
            afd_ffn_model_runner, "create_forward_context", lambda *args: None
        )

    def _run_layer(
        self, layer: int, x: torch.Tensor, logits: torch.Tensor | None
    ) -> torch.Tensor:
        assert torch.is_inference_mode_enabled()
        self.compute(layer, x)
        y = (layer + 2) * x
        return y if logits is None else y + logits.sum(dim=-1, keepdim=True)

    def _config(self, role: str, num_ubatches: int, **kwargs: Any) -> Any:
        kwargs = {"heartbeat_timeout_s": 20, "connect_timeout_s": TIMEOUT_S} | kwargs
        return SimpleNamespace(
            afd_config=AFDConfig(afd_role=role, afd_port=self.port, **kwargs),
            model_config=SimpleNamespace(
                dtype=torch.float32, get_hidden_size=lambda: HIDDEN_SIZE
            ),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS),
            parallel_config=SimpleNamespace(num_ubatches=num_ubatches),
        )

    def start_ffn(self, on_failure: Callable, **kwargs: Any) -> AFDFFNModelRunner:
        config = self._config("ffn", 0, **kwargs)
        runner = AFDFFNModelRunner(config, torch.device("cpu"), on_failure)
        self.ffns.append(runner)
        runner.start_serving()
        return runner

    def connect(
        self, on_failure: Callable, num_ubatches: int = 1, **kwargs: Any
    ) -> AFDAttention:
        config = self._config("attention", num_ubatches, **kwargs)
        attention = AFDAttention.connect(config, torch.nn.Module(), on_failure)
        self.attentions.append(attention)
        return attention

    def close(self) -> None:
        for attention in self.attentions:
            attention.close()
        for ffn in self.ffns:
            ffn.shutdown()

    def logits(self, x: torch.Tensor) -> torch.Tensor | None:
        return None if self.gate_on_ffn else x[:, :NUM_EXPERTS].contiguous()

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        for layer in range(NUM_LAYERS):
            x = self._model_layer(layer, x)
        return x

    def _model_layer(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self._run_layer(layer, x, self.logits(x))

    def run_model(self, attention: AFDAttention, x: torch.Tensor) -> torch.Tensor:
        for layer in range(NUM_LAYERS):
            x = attention.exchange(layer, x, self.logits(x))
        return x

    def run_step(self, attention: AFDAttention, num_tokens: int) -> None:
        x = torch.rand(num_tokens, HIDDEN_SIZE)
        attention.begin_step("eager", [num_tokens])
        y = self.run_model(attention, x)
        attention.end_step()
        assert torch.equal(y, self.expected(x))


@pytest.fixture(params=[True, False], ids=["gate_on_ffn", "gate_on_attention"])
def servers(request, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    servers = Servers(monkeypatch, request.param)
    yield servers
    servers.close()


@pytest.fixture
def gate_on_ffn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    servers = Servers(monkeypatch)
    yield servers
    servers.close()


def _join(ffn: AFDFFNModelRunner) -> None:
    assert ffn._thread is not None
    ffn._thread.join(TIMEOUT_S)
    assert not ffn._thread.is_alive()


def test_steps_of_all_sizes(servers: Servers) -> None:
    failures = Failures()
    servers.start_ffn(failures)
    attention = servers.connect(failures)
    sizes = [1, 5, 0, MAX_TOKENS, 2, 1]
    for num_tokens in sizes:
        servers.run_step(attention, num_tokens)

    assert attention.stats.steps == len(sizes)
    assert attention.stats.exchanges == len(sizes) * NUM_LAYERS
    assert attention.stats.split_steps == attention.stats.overlapped == 0
    row = 2 * HIDDEN_SIZE + (0 if servers.gate_on_ffn else NUM_EXPERTS)
    assert attention.stats.bytes == sum(sizes) * NUM_LAYERS * row * 4
    assert not failures.errors


def test_either_may_start_first(gate_on_ffn: Servers) -> None:
    failures = Failures()
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(gate_on_ffn.connect, failures)
        gate_on_ffn.start_ffn(failures)
        gate_on_ffn.run_step(connecting.result(TIMEOUT_S), 3)


class _AnyContext:
    """Equal to whatever the FFN role, a thread of this process, has set instead."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


@pytest.fixture
def run_ubatches(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Runs a function in each of two microbatches, as the ubatch runner does."""
    monkeypatch.setattr(ubatching, "_THREAD_ID_TO_CONTEXT", {})
    monkeypatch.setattr(ubatching, "_CURRENT_CONTEXTS", [])
    monkeypatch.setattr(ubatching.UBatchContext, "update_stream", lambda *args: None)
    monkeypatch.setattr(ubatching, "current_stream", lambda: None)

    def run(function: Callable[[int], None]) -> None:
        barrier = threading.Barrier(3)
        stream = SimpleNamespace(wait_event=lambda event: None)
        any_context: Any = _AnyContext()
        contexts = ubatching.make_ubatch_contexts(
            2, None, stream, [any_context, any_context], barrier
        )

        def run_one(context: ubatching.UBatchContext) -> None:
            try:
                with context:
                    context.current_stream = None
                    function(context.id)
            except BaseException as e:
                context.run.abort(context.id, e)

        run = contexts[0].run
        run.start([threading.Thread(target=run_one, args=(c,)) for c in contexts])
        run.finish()

    return run


def test_stages_overlap(servers: Servers, run_ubatches: Callable) -> None:
    """While a stage is at the peer, the other one runs."""
    servers.start_ffn(Failures())
    attention = servers.connect(Failures(), num_ubatches=2)
    events: list[tuple[int, str, int]] = []

    for tokens in ([5, 6], [1, 1], [0, 3]):
        xs = [torch.rand(n, HIDDEN_SIZE) for n in tokens]
        ys: list[Any] = [None, None]

        def run_stage(stage: int, xs=xs, ys=ys) -> None:
            x = xs[stage]
            for layer in range(NUM_LAYERS):
                events.append((stage, "in", layer))
                x = attention.exchange(layer, x, servers.logits(x))
                events.append((stage, "out", layer))
            ys[stage] = x

        events.clear()
        attention.begin_step("eager", tokens)
        run_ubatches(run_stage)
        attention.end_step()
        for x, y in zip(xs, ys):
            assert torch.equal(y, servers.expected(x))
        # Stage 0 gets its answer only after stage 1 has sent.
        assert events[:4] == [(0, "in", 0), (1, "in", 0), (0, "out", 0), (0, "in", 1)]

    # Steps that are not split go on with one stage.
    servers.run_step(attention, 7)
    assert attention.stats.split_steps == 3
    assert 0 <= attention.stats.overlapped <= 6 * NUM_LAYERS


def test_failing_stage_ends_both(gate_on_ffn: Servers, run_ubatches: Callable) -> None:
    failures = Failures()
    ffn = gate_on_ffn.start_ffn(failures)
    attention = gate_on_ffn.connect(Failures(), num_ubatches=2)

    def run_stage(stage: int) -> None:
        gate_on_ffn.run_model(attention, torch.rand(2, HIDDEN_SIZE))
        if stage == 0:
            raise MemoryError("no memory for stage 0")

    attention.begin_step("eager", [2, 2])
    with pytest.raises(RuntimeError, match="no memory for stage 0") as failed:
        run_ubatches(run_stage)
    attention.abort_step(failed.value)

    assert "no memory for stage 0" in str(failures.wait())
    _join(ffn)


@pytest.mark.parametrize("in_step", [False, True])
def test_ffn_serves_the_next_one_after_a_goodbye(
    gate_on_ffn: Servers, in_step: bool
) -> None:
    failures = Failures()
    ffn = gate_on_ffn.start_ffn(failures)
    for _ in range(3):
        attention = gate_on_ffn.connect(failures)
        gate_on_ffn.run_step(attention, 3)
        if in_step:
            # As a server that is told to shut down does.
            attention.begin_step("eager", [2])
            attention.exchange(0, torch.rand(2, HIDDEN_SIZE), None)
            attention.abort_step(SystemExit())
        control = ffn._control
        attention.close()
        if in_step:
            assert control is not None
            assert control.bye_reason == "it was stopped in the middle of step 2"
    assert not failures.errors


def test_ffn_serves_the_next_one_after_a_goodbye_before_the_data_plane(
    gate_on_ffn: Servers,
) -> None:
    failures = Failures()
    gate_on_ffn.start_ffn(failures)
    config = gate_on_ffn._config("attention", 1)
    hello = afd_session.describe_server(config, torch.nn.Module())
    for _ in range(3):
        # As a server that is told to shut down while it connects does.
        AFDControl.connect(config.afd_config, hello).close()
    gate_on_ffn.run_step(gate_on_ffn.connect(failures), 3)
    assert not failures.errors


def test_ffn_ends_if_attention_fails_before_the_data_plane(
    gate_on_ffn: Servers,
) -> None:
    failures = Failures()
    ffn = gate_on_ffn.start_ffn(failures)
    config = gate_on_ffn._config("attention", 1)
    hello = afd_session.describe_server(config, torch.nn.Module())
    control = AFDControl.connect(config.afd_config, hello)
    control.fail("no such interface")
    control.close()
    error = failures.wait()
    assert isinstance(error, AFDPeerError)
    assert "no such interface" in str(error)
    _join(ffn)


@pytest.mark.parametrize("in_step", [False, True])
def test_death_of_attentions_parent_ends_ffn(
    gate_on_ffn: Servers, in_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is ended by that, too, but nobody has told the server to end."""
    failures = Failures()
    ffn = gate_on_ffn.start_ffn(failures)
    attention = gate_on_ffn.connect(Failures())
    gate_on_ffn.run_step(attention, 3)
    if in_step:
        attention.begin_step("eager", [2])
        attention.exchange(0, torch.rand(2, HIDDEN_SIZE), None)
        attention.abort_step(SystemExit())
    parent = SimpleNamespace(name="EngineCore", is_alive=lambda: False)
    monkeypatch.setattr(
        afd_attention_model_runner.multiprocessing, "parent_process", lambda: parent
    )
    attention.close()

    error = failures.wait()
    assert isinstance(error, AFDPeerError)
    assert "AFD attention peer (rank 0)" in str(error)
    assert "its parent process EngineCore died" in str(error)
    _join(ffn)


def test_second_attention_server_is_refused(gate_on_ffn: Servers) -> None:
    failures = Failures()
    gate_on_ffn.start_ffn(failures)
    attention = gate_on_ffn.connect(failures)
    with pytest.raises(AFDError, match="already serving"):
        gate_on_ffn.connect(failures)
    gate_on_ffn.run_step(attention, 3)
    assert not failures.errors


def test_failure_of_the_model_is_told_to_ffn(gate_on_ffn: Servers) -> None:
    on_ffn, on_attention = Failures(), Failures()
    ffn = gate_on_ffn.start_ffn(on_ffn)
    attention = gate_on_ffn.connect(on_attention)
    attention.begin_step("eager", [2])
    attention.exchange(0, torch.rand(2, HIDDEN_SIZE), None)
    attention.abort_step(ValueError("the attention kernel failed"))

    error = on_ffn.wait()
    assert isinstance(error, AFDPeerError)
    assert "ValueError: the attention kernel failed" in str(error)
    assert "AFD attention peer (rank 0)" in str(error)
    _join(ffn)
    # Its own doing: the exception has ended the step.
    assert not on_attention.errors
    with pytest.raises(AFDError, match="the attention kernel failed"):
        attention.begin_step("eager", [2])


def test_failure_before_the_step_is_not_told(gate_on_ffn: Servers) -> None:
    failures = Failures()
    gate_on_ffn.start_ffn(failures)
    attention = gate_on_ffn.connect(failures)
    attention.abort_step(ValueError("a batch that cannot be prepared"))
    gate_on_ffn.run_step(attention, 3)
    assert not failures.errors


def test_failure_of_ffn_ends_the_step(gate_on_ffn: Servers) -> None:
    on_ffn, on_attention = Failures(), Failures()
    ffn = gate_on_ffn.start_ffn(on_ffn)
    attention = gate_on_ffn.connect(on_attention)
    gate_on_ffn.run_step(attention, 2)

    def fail(layer: int, x: torch.Tensor) -> None:
        if layer == 1:
            raise ValueError("the experts failed")

    gate_on_ffn.compute = fail
    attention.begin_step("eager", [2])
    with pytest.raises(AFDPeerError, match="ValueError: the experts failed") as error:
        gate_on_ffn.run_model(attention, torch.rand(2, HIDDEN_SIZE))
    assert "AFD ffn peer (rank 0)" in str(error.value)
    assert on_attention.wait() is error.value
    assert str(on_ffn.wait()) == "the experts failed"
    _join(ffn)


@pytest.mark.parametrize("in_step", [False, True])
def test_ffn_shuts_down(gate_on_ffn: Servers, in_step: bool) -> None:
    on_ffn, on_attention = Failures(), Failures()
    ffn = gate_on_ffn.start_ffn(on_ffn)
    attention = gate_on_ffn.connect(on_attention)
    if in_step:
        attention.begin_step("eager", [2])
        attention.exchange(0, torch.rand(2, HIDDEN_SIZE), None)
    thread = ffn._thread
    ffn.shutdown()
    assert thread is not None and not thread.is_alive()

    assert "has shut down" in str(on_attention.wait())
    with pytest.raises(AFDPeerError, match="has shut down"):
        if in_step:
            attention.exchange(1, torch.rand(2, HIDDEN_SIZE), None)
        else:
            attention.begin_step("eager", [2])
    assert not on_ffn.errors


def test_ffn_shuts_down_while_it_waits(gate_on_ffn: Servers) -> None:
    failures = Failures()
    ffn = gate_on_ffn.start_ffn(failures)
    thread = ffn._thread
    ffn.shutdown()
    assert thread is not None and not thread.is_alive()
    assert not failures.errors
    # The port is free again.
    gate_on_ffn.start_ffn(failures)
    gate_on_ffn.run_step(gate_on_ffn.connect(failures), 2)


def test_ffn_for_which_none_comes(gate_on_ffn: Servers) -> None:
    failures = Failures()
    ffn = gate_on_ffn.start_ffn(failures, connect_timeout_s=0.2)
    error = failures.wait()
    assert isinstance(error, AFDError)
    assert "attention" in str(error) and str(gate_on_ffn.port) in str(error)
    _join(ffn)


def test_port_in_use(gate_on_ffn: Servers) -> None:
    failures = Failures()
    gate_on_ffn.start_ffn(failures)
    with pytest.raises(ValueError, match=f"afd_port={gate_on_ffn.port}"):
        gate_on_ffn.start_ffn(failures)


def test_ffn_that_does_not_answer(gate_on_ffn: Servers) -> None:
    """Its process is alive, but the step makes no progress."""
    gate_on_ffn.start_ffn(Failures())
    attention = gate_on_ffn.connect(Failures(), step_timeout_s=0.5)
    go_on = threading.Event()
    gate_on_ffn.compute = lambda layer, x: go_on.wait(TIMEOUT_S)
    attention.begin_step("eager", [2])
    try:
        with pytest.raises(AFDPeerError, match=r"step_timeout_s.*0\.5"):
            attention.exchange(0, torch.rand(2, HIDDEN_SIZE), None)
    finally:
        go_on.set()


def test_step_that_attention_does_not_go_on_with(gate_on_ffn: Servers) -> None:
    on_ffn, on_attention = Failures(), Failures()
    gate_on_ffn.start_ffn(on_ffn, step_timeout_s=0.5)
    attention = gate_on_ffn.connect(on_attention)
    attention.begin_step("eager", [2])
    assert "step_timeout_s" in str(on_ffn.wait())
    assert "step_timeout_s" in str(on_attention.wait())


@pytest.mark.parametrize("kind", ["profile", "warmup"])
def test_compilation_is_not_taken_for_a_hang(gate_on_ffn: Servers, kind: str) -> None:
    failures = Failures()
    gate_on_ffn.start_ffn(failures, step_timeout_s=0.3)
    attention = gate_on_ffn.connect(failures)
    attention.begin_step(kind, [2])
    x = torch.rand(2, HIDDEN_SIZE)
    for layer in range(NUM_LAYERS):
        # It compiles piece by piece.
        assert not failures._came.wait(0.6)
        x = attention.exchange(layer, x, None)
    attention.end_step()
    gate_on_ffn.run_step(attention, 2)
    assert not failures.errors


def test_compilation_that_does_not_end(gate_on_ffn: Servers) -> None:
    on_ffn = Failures()
    gate_on_ffn.start_ffn(on_ffn, step_timeout_s=0.3, connect_timeout_s=1.5)
    attention = gate_on_ffn.connect(Failures())
    attention.begin_step("profile", [2])
    assert "within connect_timeout_s=1.5" in str(on_ffn.wait())


@pytest.mark.parametrize(
    "layer, rows", [(1, 2), (0, 3)], ids=["other_layer", "other_rows"]
)
def test_exchange_that_was_not_announced(
    gate_on_ffn: Servers, layer: int, rows: int
) -> None:
    gate_on_ffn.start_ffn(Failures())
    attention = gate_on_ffn.connect(Failures())
    with pytest.raises(AFDError, match="no step has begun"):
        attention.exchange(0, torch.rand(2, HIDDEN_SIZE), None)
    attention.begin_step("eager", [2])
    with pytest.raises(AFDError, match="run layer 0 on 2 tokens"):
        attention.exchange(layer, torch.rand(rows, HIDDEN_SIZE), None)


def test_layers_that_cannot_be_exchanged(
    gate_on_ffn: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before anybody connects."""
    layers = [
        AFDLayerInfo(
            name=f"layers.{dtype}", gate_on_ffn=False, logits_size=4, logits_dtype=dtype
        )
        for dtype in ("float32", "bfloat16")
    ]
    monkeypatch.setattr(
        afd_session, "describe_moe_layers", lambda config, model: layers
    )
    for start in (gate_on_ffn.connect, gate_on_ffn.start_ffn):
        with pytest.raises(AFDError, match="bfloat16, float32"):
            start(Failures())


def test_model_that_leaves_layers_out(gate_on_ffn: Servers) -> None:
    failures = Failures()
    gate_on_ffn.start_ffn(failures)
    attention = gate_on_ffn.connect(Failures())
    attention.begin_step("eager", [2])
    attention.exchange(0, torch.rand(2, HIDDEN_SIZE), None)
    with pytest.raises(AFDError, match=rf"\[1\] of the {NUM_LAYERS} MoE layers"):
        attention.end_step()
    assert "MoE layers" in str(failures.wait())


class BaseRunner:
    """Stands for Model Runner V2."""

    def __init__(self, vllm_config: Any, device: torch.device):
        self.vllm_config = vllm_config
        self.model = object()
        self.error: BaseException | None = None

    def load_model(self) -> None:
        pass

    def execute_model(self, ubatches: list[int] | None = None, **kwargs: bool) -> str:
        slices = None
        if ubatches is not None:
            slices = [SimpleNamespace(num_tokens=n) for n in ubatches]
        batch = SimpleNamespace(num_tokens_after_padding=8)
        self.before_forward(batch, None, slices, **kwargs)  # type: ignore
        if self.error is not None:
            raise self.error
        return "output"

    def shutdown(self) -> None:
        self.is_shut_down = True


class Runner(AFDAttentionMixin, BaseRunner):
    pass


@pytest.mark.parametrize(
    "ubatches, flags, kind, stage_tokens",
    [
        (None, (False, False), "eager", [8]),
        ([3, 5], (False, False), "eager", [3, 5]),
        (None, (True, False), "warmup", [8]),
        (None, (True, True), "profile", [8]),
    ],
)
def test_model_runner_announces_its_batches(
    monkeypatch: pytest.MonkeyPatch,
    ubatches: list[int] | None,
    flags: tuple[bool, bool],
    kind: str,
    stage_tokens: list[int],
) -> None:
    calls: list[tuple] = []
    afd = SimpleNamespace(
        exchange=object(),
        begin_step=lambda *args: calls.append(("begin", *args)),
        end_step=lambda: calls.append(("end",)),
        abort_step=lambda error: calls.append(("abort", error)),
        close=lambda: calls.append(("close",)),
    )
    installed: list[Any] = []
    connected: list[tuple] = []
    monkeypatch.setattr(
        AFDAttention, "connect", lambda *args: connected.append(args) or afd
    )
    monkeypatch.setattr(
        afd_attention_model_runner,
        "set_afd_exchange",
        lambda config, exchange: installed.append(exchange),
    )
    runner = Runner(  # type: ignore[call-arg]
        None, torch.device("cpu"), lambda error: None
    )
    # The peer, which may be slow to load, is not waited for before this one loads.
    assert not connected
    runner.load_model()
    assert len(connected) == 1
    assert installed == [afd.exchange]

    dummy_run, is_profile = flags
    kwargs = {"dummy_run": dummy_run, "is_profile": is_profile}
    assert runner.execute_model(ubatches, **kwargs) == "output"
    assert calls == [("begin", kind, stage_tokens), ("end",)]

    calls.clear()
    runner.error = KeyError("a fault")
    with pytest.raises(KeyError):
        runner.execute_model(ubatches, **kwargs)
    assert calls == [("begin", kind, stage_tokens), ("abort", runner.error)]

    calls.clear()
    runner.shutdown()
    assert calls == [("close",)]
    assert installed == [afd.exchange, None]
    assert runner.is_shut_down
