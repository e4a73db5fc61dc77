# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A microbatch that fails must end its step, not hang it.

Microbatches park until another one hands control to them, so whichever way one
of them ends, the others and the thread that started them have to be woken. The
step must raise the cause, leave no thread and no state behind, and the next step
must work. Streams are fakes, so no GPU is needed.
"""

import threading
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from vllm import forward_context
from vllm.config import CUDAGraphMode, ParallelConfig
from vllm.forward_context import (
    BatchDescriptor,
    ForwardContext,
    override_forward_context,
)
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.worker import gpu_ubatch_wrapper, ubatching
from vllm.v1.worker.gpu import ubatch_utils
from vllm.v1.worker.gpu.ubatch_utils import UBatchRunner, UBatchState
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper
from vllm.v1.worker.ubatch_utils import UBatchSlice
from vllm.v1.worker.ubatching import (
    dbo_current_ubatch_id,
    dbo_maybe_run_recv_hook,
    dbo_register_recv_hook,
    dbo_switch_to_comm_sync,
    dbo_yield,
    dbo_yield_and_switch_from_comm_to_compute,
)

pytestmark = pytest.mark.skip_global_cleanup

TIMEOUT_S = 5.0
REPEATS = 50
NUM_LAYERS = 3
TOKENS_PER_UBATCH = 4


class FakeEvent:
    def record(self, stream: "FakeStream | None" = None):
        if stream is not None:
            stream.cuda.fail("record_event")


class FakeStream:
    def __init__(self, cuda: "FakeCuda"):
        self.cuda = cuda

    def wait_event(self, event: FakeEvent):
        self.cuda.fail("wait_event")


class FakeCuda:
    """Tracks streams per thread, as on a GPU, and can be made to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.streams = threading.local()
        # Called with the name of each failure point that is passed
        self.fail: Callable[[str], None] = lambda point: None
        # Nesting of SM control and of graph capture
        self.depth = {"sm_control": 0, "graph": 0}

        monkeypatch.setattr(torch, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: FakeStream(self))
        monkeypatch.setattr(torch.cuda, "set_stream", self.set_stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.cuda, "current_blas_handle", self.blas_handle)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
        monkeypatch.setattr(
            torch.cuda, "graph", lambda *args, **kwargs: self.enter("graph")
        )
        monkeypatch.setattr(torch.accelerator, "set_device_index", self.set_device)
        for module in (ubatching, ubatch_utils):
            monkeypatch.setattr(module, "current_stream", self.current_stream)
        for module in (ubatch_utils, gpu_ubatch_wrapper):
            monkeypatch.setattr(
                module,
                "create_sm_control_context",
                lambda parallel_config: SMControl(self),
            )
        monkeypatch.setattr(gpu_ubatch_wrapper, "set_graph_pool_id", lambda pool: None)
        monkeypatch.setattr(
            gpu_ubatch_wrapper,
            "current_platform",
            SimpleNamespace(graph_pool_handle=lambda: None),
        )

    @contextmanager
    def enter(self, name: str):
        self.fail(name)
        self.depth[name] += 1
        try:
            yield
        finally:
            self.depth[name] -= 1

    def current_stream(self) -> FakeStream:
        if not hasattr(self.streams, "value"):
            self.streams.value = FakeStream(self)
        return self.streams.value

    def set_stream(self, stream: FakeStream) -> None:
        self.fail("set_stream")
        self.streams.value = stream

    def set_device(self, device) -> None:
        self.fail("set_device")

    def blas_handle(self) -> None:
        self.fail("blas_handle")


class SMControl:
    """Reusable, as the one it stands for."""

    def __init__(self, cuda: FakeCuda):
        self.cuda = cuda

    def __enter__(self):
        self.cuda.depth["sm_control"] += 1

    def __exit__(self, *args):
        self.cuda.depth["sm_control"] -= 1


class Model:
    """Hands off twice a layer and posts a receive hook to the next microbatch."""

    def __init__(self, cuda: FakeCuda):
        self.cuda = cuda
        self.trace: list[tuple[int, int]] = []
        # A microbatch that outlasts the others, if any
        self.last_ubatch: int | None = None

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, **kwargs):
        try:
            return self.forward(input_ids, positions)
        finally:
            # A handoff on the way out of a failed microbatch must not park it.
            dbo_yield()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor):
        fail = self.cuda.fail
        x = input_ids + positions
        fail("before the first yield")
        for layer in range(NUM_LAYERS):
            self.trace.append((layer, dbo_current_ubatch_id()))
            dbo_yield()
            fail(f"between yields {layer}")
            dbo_switch_to_comm_sync()
            fail(f"on the comm stream {layer}")
            dbo_yield_and_switch_from_comm_to_compute()
            dbo_maybe_run_recv_hook()
            dbo_register_recv_hook(lambda layer=layer: fail(f"hook {layer}"))
            x = x * 2
        fail("after the last layer")
        if dbo_current_ubatch_id() == self.last_ubatch:
            # The others end while this one is parked.
            for _ in range(2):
                dbo_yield()
                dbo_register_recv_hook(lambda: fail("hook alone"))
            fail("alone")
        return x


class Harness:
    """Runs steps of one runner and checks what each leaves behind."""

    def __init__(self, cuda: FakeCuda, num_ubatches: int, capture: bool):
        self.cuda = cuda
        self.capture = capture
        self.num_ubatches = num_ubatches
        self.model = Model(cuda)
        self.parallel_config = ParallelConfig(
            ubatch_size=num_ubatches,
            dbo_decode_token_threshold=num_ubatches,
            dbo_prefill_token_threshold=num_ubatches,
        )
        self.vllm_config = SimpleNamespace(
            parallel_config=self.parallel_config, compilation_config=None
        )
        self.slices = [
            UBatchSlice(
                slice(i, i + 1),
                slice(i * TOKENS_PER_UBATCH, (i + 1) * TOKENS_PER_UBATCH),
            )
            for i in range(num_ubatches)
        ]
        num_tokens = num_ubatches * TOKENS_PER_UBATCH
        self.inputs = {
            "input_ids": torch.arange(num_tokens),
            "positions": torch.arange(num_tokens) * 10,
            "intermediate_tensors": None,
            "inputs_embeds": None,
        }
        self.expected = torch.arange(num_tokens) * 11 * 2**NUM_LAYERS

    def _context(self, **kwargs) -> ForwardContext:
        return ForwardContext(
            no_compile_layers={}, attn_metadata={}, slot_mapping={}, **kwargs
        )

    @property
    def barrier(self) -> threading.Barrier:
        raise NotImplementedError

    def step(self) -> torch.Tensor:
        raise NotImplementedError

    def run(self, step: Callable[[], Any] | None = None) -> Any:
        """Run a step behind a watchdog and check that it leaves nothing behind.

        Returns:
            What the step returned, or the exception it raised.

        """
        before = set(threading.enumerate())
        result: list[Any] = []

        def target():
            outer = self._context()
            stream = self.cuda.current_stream()
            with override_forward_context(outer):
                try:
                    result.append((step or self.step)())
                except BaseException as e:  # noqa: BLE001
                    result.append(e)
                assert forward_context._forward_context is outer
            assert self.cuda.current_stream() is stream
            result.append("checked")

        # Microbatch threads inherit `daemon`, so a hung step does not keep the
        # test process alive.
        watched = threading.Thread(target=target, daemon=True)
        watched.start()
        watched.join(TIMEOUT_S)
        assert not watched.is_alive(), "the step hangs"
        assert result[1:] == ["checked"]

        assert set(threading.enumerate()) <= before, "a microbatch thread is left"
        assert ubatching._THREAD_ID_TO_CONTEXT == {}
        assert not any(ubatching._CURRENT_CONTEXTS)
        assert not self.barrier.broken
        assert self.barrier.n_waiting == 0
        assert self.cuda.depth == {"sm_control": 0, "graph": 0}
        return result[0]

    def check_next_step(self) -> None:
        output = self.run()
        if isinstance(output, BaseException):
            raise output
        assert torch.equal(output, self.expected)


class V2Harness(Harness):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.runner = UBatchRunner(
            self.vllm_config, torch.device("cpu", 0), None, [], None, max_num_reqs=8
        )

    @property
    def barrier(self) -> threading.Barrier:
        assert self.runner._pending_finish is None
        return self.runner.ready_barrier

    def begin(self) -> Callable[[], torch.Tensor]:
        state = UBatchState(
            self.slices, [self._context() for _ in range(self.num_ubatches)]
        )
        return self.runner.begin_capturable_run(
            self.model, self.inputs, state, for_capture=self.capture
        )

    def step(self) -> torch.Tensor:
        finish = self.begin()
        with torch.cuda.graph() if self.capture else nullcontext():
            return finish()


class V1Harness(Harness):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.runner = UBatchWrapper(
            self.model, self.vllm_config, CUDAGraphMode.NONE, torch.device("cpu", 0)
        )

    @property
    def barrier(self) -> threading.Barrier:
        return self.runner.ready_barrier

    def step(self) -> torch.Tensor:
        self.runner.clear_graphs()
        mode = CUDAGraphMode.FULL if self.capture else CUDAGraphMode.NONE
        context = self._context(
            ubatch_slices=self.slices,
            dp_metadata=object(),
            cudagraph_runtime_mode=mode,
            batch_descriptor=BatchDescriptor(num_tokens=len(self.expected)),
        )
        context.attn_metadata = [{} for _ in self.slices]
        with override_forward_context(context):
            return self.runner(**self.inputs)


HARNESSES = {
    "v2": lambda *args: V2Harness(*args, capture=False),
    "v2-capture": lambda *args: V2Harness(*args, capture=True),
    "v1": lambda *args: V1Harness(*args, capture=False),
    "v1-capture": lambda *args: V1Harness(*args, capture=True),
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    # A test that hangs must not take the others with it.
    monkeypatch.setattr(ubatching, "_THREAD_ID_TO_CONTEXT", {})
    monkeypatch.setattr(ubatching, "_CURRENT_CONTEXTS", [])
    monkeypatch.setattr(
        gpu_ubatch_wrapper.DPMetadata, "make", staticmethod(lambda *args: object())
    )
    monkeypatch.setattr(
        gpu_ubatch_wrapper,
        "create_forward_context",
        lambda *args, **kwargs: ForwardContext(
            no_compile_layers={}, attn_metadata={}, slot_mapping={}
        ),
    )
    return FakeCuda(monkeypatch)


@pytest.fixture(params=HARNESSES)
def harness(request, cuda: FakeCuda, num_ubatches: int) -> Harness:
    return HARNESSES[request.param](cuda, num_ubatches)


def _fail_once(cuda: FakeCuda, point: str, ubatch: int, error: BaseException) -> None:
    """Raise `error` the first time microbatch `ubatch` passes `point`."""
    pending = [error]
    arrivals: list[int] = []

    def fail(passed: str) -> None:
        if passed != point or not pending:
            return
        ident = threading.get_ident()
        if ident in ubatching._THREAD_ID_TO_CONTEXT:
            current = dbo_current_ubatch_id()
        else:
            # Not in its context yet: any of them may be the one to fail.
            arrivals.append(ident)
            current = len(arrivals) - 1
        if current == ubatch:
            raise pending.pop()

    cuda.fail = fail


# Where a microbatch can fail.
POINTS = [
    "set_device",
    "blas_handle",
    "set_stream",
    "before the first yield",
    "between yields 0",
    "on the comm stream 0",
    f"between yields {NUM_LAYERS - 1}",
    f"on the comm stream {NUM_LAYERS - 1}",
    "hook 0",
    # Runs as its microbatch ends.
    f"hook {NUM_LAYERS - 1}",
    "after the last layer",
    # The device, while switching streams
    "record_event",
    "wait_event",
    # All others have ended.
    "alone",
    "hook alone",
]


def _applies(harness: Harness, point: str) -> bool:
    if point == "blas_handle":
        return harness.capture
    # The V1 wrapper's eager threads run on the current device.
    return point != "set_device" or isinstance(harness, V2Harness) or harness.capture


@pytest.mark.parametrize("num_ubatches", [2, 3])
@pytest.mark.parametrize("point", POINTS)
def test_failure_ends_the_step_with_its_cause(harness: Harness, point: str):
    if not _applies(harness, point):
        pytest.skip(f"{point} is not on this path")
    for i in range(REPEATS):
        ubatch = i % harness.num_ubatches
        if point.endswith("alone"):
            harness.model.last_ubatch = ubatch
        error = ValueError(f"{point} {ubatch}")
        _fail_once(harness.cuda, point, ubatch, error)

        raised = harness.run()

        assert isinstance(raised, RuntimeError)
        assert raised.__cause__ is error
        if point not in ("set_device", "blas_handle"):
            assert f"Microbatch {ubatch} of {harness.num_ubatches}" in str(raised)
        harness.check_next_step()


@pytest.mark.parametrize("num_ubatches", [2, 3])
def test_microbatches_take_turns(harness: Harness):
    harness.check_next_step()
    assert harness.model.trace == [
        (layer, ubatch)
        for layer in range(NUM_LAYERS)
        for ubatch in range(harness.num_ubatches)
    ]


@pytest.mark.parametrize("num_ubatches", [2])
@pytest.mark.parametrize("error_cls", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("point", ["set_device", "between yields 1"])
def test_exit_is_not_wrapped(
    harness: Harness, error_cls: type[BaseException], point: str
):
    if not _applies(harness, point):
        pytest.skip(f"{point} is not on this path")
    error = error_cls()
    _fail_once(harness.cuda, point, 0, error)
    assert harness.run() is error
    harness.check_next_step()


@pytest.mark.parametrize("error_cls", [KeyboardInterrupt, SystemExit])
def test_exit_leaves_the_worker_loop(error_cls: type[BaseException]):
    """The worker sends other errors to the engine and goes on."""
    outputs: list[Any] = []
    worker = SimpleNamespace(execute_model=Mock(side_effect=[ValueError(), error_cls]))
    proc: Any = SimpleNamespace(worker=worker, rank=0, handle_output=outputs.append)
    request: tuple = ("execute_model", (), {}, 0)
    WorkerProc._execute_worker_rpc(proc, request)
    assert isinstance(outputs.pop(), ValueError)
    with pytest.raises(error_cls):
        WorkerProc._execute_worker_rpc(proc, request)
    assert outputs == []


@pytest.mark.parametrize("num_ubatches", [2, 3])
@pytest.mark.parametrize("harness", ["v1-capture"], indirect=True)
def test_graph_is_stored_under_the_tokens_of_all(harness: V1Harness):
    harness.check_next_step()
    assert list(harness.runner.cudagraphs) == [len(harness.expected)]


@pytest.mark.parametrize("num_ubatches", [2, 3])
def test_first_of_several_failures_is_the_cause(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
):
    """A sibling that turns its abort into another error does not replace it."""
    forward = harness.model.forward

    def failing_forward(*args):
        if dbo_current_ubatch_id() == 1:
            raise ValueError("first")
        try:
            return forward(*args)
        except RuntimeError as e:
            raise TypeError("second") from e

    monkeypatch.setattr(harness.model, "forward", failing_forward)
    for _ in range(REPEATS):
        assert repr(harness.run().__cause__) == "ValueError('first')"


@pytest.mark.parametrize("num_ubatches", [2, 3])
def test_starting_thread_is_interrupted(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
):
    """Ctrl-C while the step runs ends the step, not just the wait for it."""
    join = threading.Thread.join
    pending = [KeyboardInterrupt()]

    def interrupted_join(self, timeout=None):
        if pending and timeout is None:
            raise pending.pop()
        return join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted_join)
    assert isinstance(harness.run(), KeyboardInterrupt)
    harness.check_next_step()


@pytest.mark.parametrize("num_ubatches", [2, 3])
def test_thread_does_not_start(harness: Harness, monkeypatch: pytest.MonkeyPatch):
    start = threading.Thread.start
    started: list[threading.Thread] = []
    error = RuntimeError("can't start new thread")

    def failing_start(self):
        started.append(self)
        # The first one is the watchdog's.
        if len(started) == harness.num_ubatches + 1:
            raise error
        return start(self)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", failing_start)
        assert harness.run() is error
    harness.check_next_step()


@pytest.mark.parametrize("num_ubatches", [2, 3])
@pytest.mark.parametrize("harness", ["v2-capture", "v1-capture"], indirect=True)
def test_capture_fails_before_it_runs_the_microbatches(harness: Harness):
    """Parked threads are unwound without running the model."""
    error = ValueError("capture")

    def fail(point: str) -> None:
        if point == "graph":
            harness.cuda.fail = lambda point: None
            raise error

    harness.cuda.fail = fail

    def step():
        try:
            return harness.step()
        finally:
            if isinstance(harness, V2Harness):
                harness.runner.abort_pending_run()

    assert harness.run(step) is error
    assert harness.model.trace == []
    harness.check_next_step()


@pytest.mark.parametrize("num_ubatches", [2, 3])
@pytest.mark.parametrize("harness", ["v2", "v2-capture"], indirect=True)
def test_inputs_that_cannot_be_sliced(harness: V2Harness):
    positions = harness.inputs.pop("positions")
    assert isinstance(harness.run(), KeyError)
    harness.inputs["positions"] = positions
    harness.check_next_step()


@pytest.mark.parametrize("num_ubatches", [2, 3])
@pytest.mark.parametrize("last", [0, 1])
def test_microbatch_outlasts_its_siblings(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, last: int
):
    """It runs on alone, and its receive hook too, when nobody is left to yield to."""
    forward = harness.model.forward
    hooks: list[str] = []

    def uneven_forward(*args):
        output = forward(*args)
        if dbo_current_ubatch_id() == last:
            for _ in range(4):
                dbo_yield()
                dbo_register_recv_hook(lambda: hooks.append("run"))
                dbo_yield()
                dbo_maybe_run_recv_hook()
        return output

    monkeypatch.setattr(harness.model, "forward", uneven_forward)
    harness.check_next_step()
    assert len(hooks) == 4
