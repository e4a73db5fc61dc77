# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FULL CUDA graphs of microbatched steps (DBO) in the V2 model runner.

Which are captured, which steps at data parallel size 1 replay them, and that a step
is cut where its graph was. The manager is the real one; graphs are fakes, except in
the test that needs a GPU.
"""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

from tests.v1.worker.test_gpu_ubatch_slicing import _make_input_batch
from vllm.config import (
    CompilationConfig,
    CUDAGraphMode,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.device_communicators import pynccl_allocator
from vllm.forward_context import create_forward_context
from vllm.v1.worker.gpu import cudagraph_utils, dp_utils
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
)
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.ubatch_utils import (
    UBatchRunner,
    UBatchState,
    create_ubatch_slices,
)
from vllm.v1.worker.ubatch_utils import UBatchSlice, UBatchSlices
from vllm.v1.worker.ubatching import dbo_yield

pytestmark = pytest.mark.skip_global_cleanup

SIZES = [1, 2, 4, 8, 16, 24, 32, 64]
THRESHOLD = 8
OFF = 10**9
NONE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.FULL
MODES = [
    CUDAGraphMode.FULL_DECODE_ONLY,
    CUDAGraphMode.FULL,
    CUDAGraphMode.FULL_AND_PIECEWISE,
]


@pytest.fixture(autouse=True)
def _graph_pool(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        cudagraph_utils,
        "get_pp_group",
        lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True),
    )
    if not torch.cuda.is_available():
        monkeypatch.setattr(
            cudagraph_utils.current_platform, "get_global_graph_pool", object
        )
    pynccl_allocator._graph_pool_id = None
    yield
    pynccl_allocator._graph_pool_id = None


def _make_manager(
    mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY,
    threshold: int = THRESHOLD,
    max_num_reqs: int = SIZES[-1],
    decode_query_len: int = 1,
    ubatch_runner: Any = "default",
    sizes: list[int] = SIZES,
) -> CudaGraphManager:
    compilation_config = CompilationConfig(
        cudagraph_mode=mode, cudagraph_capture_sizes=sizes
    )
    compilation_config.max_cudagraph_capture_size = sizes[-1]
    compilation_config.post_init_cudagraph_sizes()
    vllm_config = MagicMock(spec=VllmConfig)
    vllm_config.compilation_config = compilation_config
    vllm_config.scheduler_config = SchedulerConfig.default_factory(
        max_num_seqs=max_num_reqs
    )
    vllm_config.parallel_config = ParallelConfig(
        enable_dbo=True,
        dbo_decode_token_threshold=threshold,
        dbo_prefill_token_threshold=OFF,
    )
    vllm_config.cache_config = SimpleNamespace(use_kda_recoverssm=False)
    vllm_config.speculative_config = None
    vllm_config.num_speculative_tokens = 0
    if ubatch_runner == "default":
        ubatch_runner = SimpleNamespace(
            capture_stream=object(), abort_pending_run=MagicMock()
        )
    manager = CudaGraphManager(
        vllm_config,
        torch.device("cpu"),
        mode,
        decode_query_len=decode_query_len,
        ubatch_runner=ubatch_runner,
    )
    manager._graphs_captured = True
    return manager


def _full_descs(manager: CudaGraphManager) -> list[BatchExecutionDescriptor]:
    return manager._capture_descs[FULL]


def _dispatch(
    manager: CudaGraphManager, num_tokens: int, query_len: int = 1
) -> BatchExecutionDescriptor:
    """Dispatch a step of decodes at data parallel size 1."""
    desc, _ = dp_utils.dispatch_cg_and_sync_dp(
        manager,
        num_tokens // query_len,
        num_tokens,
        uniform_token_count=query_len,
        dp_size=1,
        dp_rank=0,
        max_query_len=query_len,
        parallel_config=manager.vllm_config.parallel_config,
        allow_ubatching=True,
        uniform_decode=query_len == manager.decode_query_len,
    )
    return desc


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("threshold", [2, THRESHOLD, 9, SIZES[-1], SIZES[-1] + 1])
def test_twin_is_captured_only_where_the_threshold_allows(
    mode: CUDAGraphMode, threshold: int
):
    """Beside the graph of the whole batch, not in its place."""
    descs = _full_descs(_make_manager(mode, threshold))
    assert sorted({d.num_tokens for d in descs if d.num_ubatches == 1}) == SIZES
    twins = [d for d in descs if d.num_ubatches == 2]
    # FULL captures one set for decodes and for mixed batches.
    assert sorted(d.num_tokens for d in twins) == [s for s in SIZES if s >= threshold]
    assert all(d.uniform_token_count == 1 for d in twins)
    # At most one twin a size: memory at most doubles.
    assert len(descs) <= 2 * len(SIZES)
    assert len(descs) == len(SIZES) + len(twins)


@pytest.mark.parametrize("mode", MODES)
def test_captures_the_same_without_microbatches(mode: CUDAGraphMode):
    descs = _full_descs(_make_manager(mode, ubatch_runner=None))
    assert len(descs) == len(SIZES)
    assert all(d.num_ubatches == 1 for d in descs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_num_reqs", [SIZES[-1], 32, 20])
def test_no_two_layouts_share_a_key(mode: CUDAGraphMode, max_num_reqs: int):
    """Graphs are stored by descriptor, and found by what a step dispatches to."""
    manager = _make_manager(mode, max_num_reqs=max_num_reqs)
    descs = _full_descs(manager)
    assert len(set(descs)) == len(descs)

    for num_tokens in range(1, max_num_reqs + 1):
        found = [
            manager.dispatch(num_tokens, num_tokens, 1, 0, num_ubatches=num_ubatches)
            for num_ubatches in (1, 2)
        ]
        for num_ubatches, desc in zip((1, 2), found):
            assert desc.num_ubatches == num_ubatches
            assert desc.num_tokens >= num_tokens
            if desc.cg_mode == FULL:
                assert desc in descs
                assert desc.num_reqs is not None and desc.num_reqs >= num_tokens
                assert desc.uniform_token_count in (None, 1)
        assert found[0] != found[1]
        # Other batches have no microbatched graph.
        mixed = manager.dispatch(1, num_tokens, None, 0, num_ubatches=2)
        assert mixed.cg_mode == NONE


def _cut(desc: BatchExecutionDescriptor, num_reqs: int, query_len: int) -> UBatchSlices:
    """Where a step with `num_reqs` real requests is cut."""
    assert desc.num_reqs is not None
    buffers = InputBuffers(desc.num_reqs, desc.num_tokens, torch.device("cpu"))
    batch = _make_input_batch(
        [query_len] * num_reqs,
        [query_len + 7] * num_reqs,
        buffers,
        num_reqs_padded=desc.num_reqs,
        num_tokens_padded=desc.num_tokens,
    )
    return create_ubatch_slices(batch, desc.num_ubatches)


@pytest.mark.parametrize("threshold", [2, THRESHOLD])
@pytest.mark.parametrize("query_len", [1, 2, 3])
@pytest.mark.parametrize("sizes", [SIZES, [8, SIZES[-1]]])
def test_every_decode_step(threshold: int, query_len: int, sizes: list[int]):
    """Real counts beside padded ones, from one request to one too many."""
    manager = _make_manager(
        threshold=threshold, decode_query_len=query_len, sizes=sizes
    )
    descs = _full_descs(manager)
    largest = max(d.num_tokens for d in descs)
    num_split = 0
    for num_reqs in range(1, largest // query_len + 2):
        num_tokens = num_reqs * query_len
        desc = _dispatch(manager, num_tokens, query_len)
        if num_tokens > largest:
            # No graph: split eagerly, without padding.
            assert (desc.cg_mode, desc.num_tokens) == (NONE, num_tokens)
            assert desc.num_ubatches == 2
            continue

        assert desc.cg_mode == FULL
        assert desc in descs
        size = min(d.num_tokens for d in descs if d.num_tokens >= num_tokens)
        assert desc.num_tokens == size
        # Equality leaves nothing for the second microbatch.
        expect_split = num_tokens >= threshold and num_tokens > size // 2
        assert desc.num_ubatches == (2 if expect_split else 1)
        if not expect_split:
            continue

        num_split += 1
        assert desc.uniform_token_count == query_len
        captured = create_ubatch_slices(
            InputBatch.make_dummy(
                desc.num_reqs,
                desc.num_tokens,
                InputBuffers(desc.num_reqs, desc.num_tokens, torch.device("cpu")),
            ),
            2,
        )
        assert _cut(desc, num_reqs, query_len) == captured
    assert num_split


def test_prefill_threshold_does_not_keep_decodes_from_their_graphs():
    manager = _make_manager(threshold=THRESHOLD)
    assert manager.vllm_config.parallel_config.dbo_prefill_token_threshold == OFF
    assert _dispatch(manager, THRESHOLD).num_ubatches == 2
    assert _dispatch(manager, THRESHOLD - 1).num_ubatches == 1


@pytest.mark.parametrize("fail", [False, True])
def test_capture(fail: bool):
    """Threads of a twin are started before its capture, on the runner's stream."""
    manager = _make_manager(CUDAGraphMode.FULL_DECODE_ONLY)
    manager._graphs_captured = False
    runner: Any = manager.ubatch_runner
    capturing: list[Any] = []
    calls: list[tuple[BatchExecutionDescriptor, bool]] = []

    @contextmanager
    def graph(graph, pool, stream):
        capturing.append(stream)
        yield
        capturing.pop()

    def create_forward_fn(desc: BatchExecutionDescriptor, warmup: bool):
        assert not capturing
        calls.append((desc, warmup))

        def forward_fn(mode: CUDAGraphMode) -> None:
            assert len(capturing) == (0 if warmup else 1)
            if not warmup:
                on_runner_stream = capturing[0] is runner.capture_stream
                assert on_runner_stream == (desc.num_ubatches > 1)
            if fail and desc.num_ubatches > 1:
                raise ValueError("capture")

        return forward_fn

    with (
        patch.object(cudagraph_utils, "graph_capture", lambda device: nullcontext()),
        patch.object(cudagraph_utils, "is_global_first_rank", lambda: False),
        patch.object(cudagraph_utils, "get_offloader", MagicMock()),
        patch.object(cudagraph_utils, "current_stream", object),
        patch.object(torch.cuda, "CUDAGraph", object),
        patch.object(torch.cuda, "graph", graph),
        pytest.raises(ValueError, match="capture") if fail else nullcontext(),
    ):
        manager.capture(create_forward_fn)

    runner.abort_pending_run.assert_called_once_with()
    if not fail:
        descs = _full_descs(manager)
        assert list(manager.graphs) == descs
        assert calls == [(desc, warmup) for desc in descs for warmup in (True, False)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures real CUDA graphs")
def test_split_step_is_captured_and_replayed(monkeypatch: pytest.MonkeyPatch):
    """A whole and a split graph of each size, replayed with other inputs.

    `pytest tests/v1/worker/test_ubatch_cudagraphs.py -k captured_and_replayed`
    """
    # No SMs for communication kernels: there may be fewer on a MIG slice.
    monkeypatch.setenv("VLLM_DBO_COMM_SMS", "0")
    device = torch.device("cuda:0")
    vllm_config = VllmConfig()
    vllm_config.parallel_config = ParallelConfig(
        enable_dbo=True, dbo_decode_token_threshold=THRESHOLD
    )
    no_attention: Any = None
    runner = UBatchRunner(vllm_config, device, no_attention, [], no_attention, 64)
    manager = _make_manager(ubatch_runner=runner, sizes=[4, 8, 16])
    manager.device = device
    inputs = torch.arange(16, device=device)
    outputs = {desc: torch.zeros(16, device=device) for desc in _full_descs(manager)}
    weight = torch.full((1, 1), 3.0, device=device)

    def model(input_ids: torch.Tensor, positions: torch.Tensor, **kwargs):
        x = input_ids.float().unsqueeze(-1)
        for _ in range(3):
            # Uses cuBLAS, which needs its workspace before the capture.
            x = x @ weight
            dbo_yield()
            x = x + positions.unsqueeze(-1)
        return x.squeeze(-1)

    def create_forward_fn(desc: BatchExecutionDescriptor, warmup: bool):
        n = desc.num_tokens
        model_inputs = {"input_ids": inputs[:n], "positions": inputs[:n]}
        if desc.num_ubatches == 1:
            return lambda mode: outputs[desc][:n].copy_(model(**model_inputs))
        state = UBatchState(
            [
                UBatchSlice(slice(0, n // 2), slice(0, n // 2)),
                UBatchSlice(slice(n // 2, n), slice(n // 2, n)),
            ],
            [create_forward_context(None, vllm_config) for _ in range(2)],
        )
        finish = runner.begin_capturable_run(
            model, model_inputs, state, for_capture=True
        )
        return lambda mode: outputs[desc][:n].copy_(finish())

    with (
        patch.object(cudagraph_utils, "graph_capture", lambda device: nullcontext()),
        patch.object(cudagraph_utils, "is_global_first_rank", lambda: False),
    ):
        manager.capture(create_forward_fn)
    torch.accelerator.synchronize()

    for seed in range(3):
        inputs.copy_(torch.arange(16, device=device) * (seed + 2) + seed)
        expected = model(inputs, inputs)
        for num_tokens, num_ubatches in ((3, 1), (8, 2), (9, 2), (16, 2)):
            desc = _dispatch(manager, num_tokens)
            assert desc.num_ubatches == num_ubatches
            manager.run_fullgraph(desc)
            torch.accelerator.synchronize()
            n = desc.num_tokens
            torch.testing.assert_close(outputs[desc][:n], expected[:n])
