# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""When the V2 model runner splits a step into microbatches (DBO).

At data parallel size 1 a rank decides alone; otherwise all ranks vote and must
reach one decision.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen3MoeConfig

from vllm.config import CUDAGraphMode, ModelConfig, ParallelConfig, VllmConfig
from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    FusedMoEKernelModularImpl,
)
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_open_port
from vllm.v1.worker.gpu import dp_utils, ubatch_utils, warmup
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.ubatch_utils import UBatchRunner, maybe_build_ubatch_runner
from vllm.v1.worker.gpu.warmup import warmup_ubatch_workspaces
from vllm.v1.worker.ubatch_utils import (
    UBatchSlice,
    create_sm_control_context,
    maybe_create_ubatch_slices,
)

pytestmark = pytest.mark.skip_global_cleanup

DECODE_THRESHOLD = 32
PREFILL_THRESHOLD = 512


class FakeCudaGraphManager:
    """Dispatches uniform decodes to FULL graphs of the given sizes.

    Like the real one, it holds a graph of each size for a single batch and one
    for a microbatched batch.
    """

    def __init__(self, capture_sizes: list[int]):
        self.capture_sizes = sorted(capture_sizes)

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> BatchExecutionDescriptor:
        for size in self.capture_sizes:
            if size >= num_tokens and uniform_token_count == 1:
                return BatchExecutionDescriptor(
                    cg_mode=CUDAGraphMode.FULL,
                    num_tokens=size,
                    num_reqs=size,
                    uniform_token_count=1,
                    num_ubatches=num_ubatches,
                )
        return BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            num_ubatches=num_ubatches,
        )


def _dbo_config(**kwargs: Any) -> ParallelConfig:
    kwargs = {
        "enable_dbo": True,
        "dbo_decode_token_threshold": DECODE_THRESHOLD,
        "dbo_prefill_token_threshold": PREFILL_THRESHOLD,
        **kwargs,
    }
    return ParallelConfig(**kwargs)


def _dispatch_dp1(
    num_tokens: int,
    decode: bool = True,
    num_reqs: int | None = None,
    capture_sizes: list[int] | None = None,
    parallel_config: ParallelConfig | None = None,
    **kwargs: Any,
) -> BatchExecutionDescriptor:
    """Dispatch one step at data parallel size 1."""
    if num_reqs is None:
        num_reqs = num_tokens if decode else 1
    desc, sync = dp_utils.dispatch_cg_and_sync_dp(
        FakeCudaGraphManager(capture_sizes or []),
        num_reqs,
        num_tokens,
        uniform_token_count=1 if decode else None,
        dp_size=1,
        dp_rank=0,
        parallel_config=parallel_config or _dbo_config(),
        uniform_decode=decode,
        **{"allow_ubatching": True, **kwargs},
    )
    assert sync is None
    return desc


def _token_counts(desc: BatchExecutionDescriptor, num_tokens: int) -> list[int]:
    """Real tokens in each microbatch of a step."""
    slices, _ = maybe_create_ubatch_slices(
        desc.num_ubatches > 1,
        np.ones(num_tokens, dtype=np.int32),
        desc.num_tokens,
        num_tokens,
        desc.num_ubatches,
    )
    assert slices is not None
    return [s.num_tokens for s in slices]


@pytest.mark.parametrize(
    "num_tokens, decode, num_ubatches",
    [
        (1, True, 1),
        (DECODE_THRESHOLD - 1, True, 1),
        (DECODE_THRESHOLD, True, 2),
        (DECODE_THRESHOLD + 1, True, 2),
        # One prefill makes the prefill threshold apply to the whole batch.
        (1, False, 1),
        (DECODE_THRESHOLD, False, 1),
        (256, False, 1),
        (PREFILL_THRESHOLD - 1, False, 1),
        (PREFILL_THRESHOLD, False, 2),
        (PREFILL_THRESHOLD + 1, False, 2),
    ],
)
def test_dp1_thresholds(num_tokens: int, decode: bool, num_ubatches: int):
    desc = _dispatch_dp1(num_tokens, decode)
    assert desc.num_ubatches == num_ubatches
    assert desc.num_tokens == num_tokens


@pytest.mark.parametrize(
    "num_tokens, num_ubatches, expected",
    [(1, 2, None), (2, 2, [1, 1]), (2, 3, None), (3, 3, [1, 1, 1]), (101, 2, [50, 51])],
)
def test_dp1_eager_split_leaves_no_microbatch_empty(
    num_tokens: int, num_ubatches: int, expected: list[int] | None
):
    parallel_config = _dbo_config(
        enable_dbo=False,
        ubatch_size=num_ubatches,
        dbo_decode_token_threshold=num_ubatches,
        dbo_prefill_token_threshold=num_ubatches,
    )
    # Lower than validation permits: the split must not rely on it.
    parallel_config.dbo_decode_token_threshold = 0
    parallel_config.dbo_prefill_token_threshold = 0

    for decode in (True, False):
        desc = _dispatch_dp1(num_tokens, decode, parallel_config=parallel_config)
        if expected is None:
            assert desc.num_ubatches == 1
        else:
            assert desc.cg_mode == CUDAGraphMode.NONE
            assert _token_counts(desc, num_tokens) == expected


@pytest.mark.parametrize(
    "num_tokens, expected",
    [(2, None), (32, None), (33, [32, 1]), (48, [32, 16]), (64, [32, 32])],
)
def test_dp1_full_graph_split_leaves_no_microbatch_to_padding(
    num_tokens: int, expected: list[int] | None
):
    """A graph is split in the middle of its size, not of the real tokens."""
    desc = _dispatch_dp1(
        num_tokens,
        capture_sizes=[64],
        parallel_config=_dbo_config(dbo_decode_token_threshold=2),
    )
    # Whole or split, the step keeps its graph.
    assert desc.cg_mode == CUDAGraphMode.FULL
    assert desc.num_tokens == 64
    if expected is None:
        assert desc.num_ubatches == 1
    else:
        assert _token_counts(desc, num_tokens) == expected


def test_dp1_mixed_batch_has_no_full_graph_to_split():
    desc = _dispatch_dp1(
        PREFILL_THRESHOLD, decode=False, capture_sizes=[PREFILL_THRESHOLD]
    )
    assert desc.cg_mode == CUDAGraphMode.NONE
    assert desc.num_ubatches == 2


@pytest.mark.parametrize(
    "kwargs",
    [
        {"allow_ubatching": False},
        {"parallel_config": ParallelConfig(), "allow_ubatching": True},
    ],
)
def test_dp1_stays_whole_when_microbatching_is_off(kwargs: dict[str, Any]):
    desc = _dispatch_dp1(64, capture_sizes=[64], **kwargs)
    assert desc.num_ubatches == 1
    assert desc.cg_mode == CUDAGraphMode.FULL


def test_dp1_eager_step_splits_eagerly():
    desc = _dispatch_dp1(64, capture_sizes=[64], need_eager=True)
    assert desc.cg_mode == CUDAGraphMode.NONE
    assert desc.num_ubatches == 2


# One step of each rank: its tokens, tokens per request, and whether it can split.
Step = tuple[int, int, bool]
FULL, EAGER = CUDAGraphMode.FULL, CUDAGraphMode.NONE
# The steps, and the microbatches, graph mode and padded tokens agreed on.
VOTES: dict[str, tuple[list[Step], tuple[int, CUDAGraphMode, list[int]]]] = {
    "decodes": ([(64, 1, True), (40, 1, True)], (2, FULL, [64, 64])),
    # The second microbatch of a 128-token graph would be padding on rank 1.
    "padding": ([(128, 1, True), (40, 1, True)], (2, EAGER, [128, 128])),
    "short_prefill": ([(64, 1, True), (64, 64, True)], (1, EAGER, [64, 64])),
    "long_prefill": ([(64, 1, True), (600, 600, True)], (1, EAGER, [64, 600])),
    "long_prefills": ([(600, 600, True), (512, 512, True)], (2, EAGER, [600, 600])),
    "below_threshold": ([(64, 1, True), (31, 1, True)], (1, FULL, [64, 64])),
    "not_allowed": ([(64, 1, True), (64, 1, False)], (1, FULL, [64, 64])),
    # A rank without requests runs a dummy batch of one token, and votes like any.
    "idle_rank": ([(64, 1, True), (1, 1, True)], (1, FULL, [64, 64])),
    "one_request": ([(1, 1, True), (1, 1, True)], (1, FULL, [64, 64])),
    "idle_beside_prefill": ([(600, 600, True), (1, 1, True)], (1, EAGER, [600, 1])),
    "no_tokens": ([(64, 1, True), (0, 1, True)], (1, FULL, [64, 64])),
}


def _vote(rank: int, port: int, results: Any) -> None:
    decisions = {}
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group = SimpleNamespace(cpu_group=dist.group.WORLD)
    with patch.object(dp_utils, "get_dp_group", lambda: group):
        for name, (steps, _) in VOTES.items():
            num_tokens, tokens_per_req, allow_ubatching = steps[rank]
            desc, sync = dp_utils.dispatch_cg_and_sync_dp(
                FakeCudaGraphManager([64, 128]),
                num_tokens // tokens_per_req,
                num_tokens,
                tokens_per_req,
                dp_size=2,
                dp_rank=rank,
                parallel_config=_dbo_config(),
                allow_ubatching=allow_ubatching,
                uniform_decode=tokens_per_req == 1,
            )
            assert sync is not None
            num_tokens_across_dp = sync.num_tokens_across_dp.tolist()
            assert desc.num_tokens == num_tokens_across_dp[rank]
            decisions[name] = (desc.num_ubatches, desc.cg_mode, num_tokens_across_dp)
    results.put((rank, decisions))
    dist.destroy_process_group()


def test_dp_ranks_reach_one_decision():
    """Each rank votes on its own step, over a real process group."""
    results = mp.get_context("fork").SimpleQueue()
    mp.start_processes(
        _vote, args=(get_open_port(), results), nprocs=2, start_method="fork"
    )

    decisions = dict(results.get() for _ in range(2))
    expected = {name: decision for name, (_, decision) in VOTES.items()}
    assert decisions == {0: expected, 1: expected}


def _build_runner(parallel_config: ParallelConfig) -> tuple[Any, Mock]:
    """Call `maybe_build_ubatch_runner` and return its result and its logger."""
    vllm_config = SimpleNamespace(parallel_config=parallel_config)
    with (
        patch.object(ubatch_utils, "UBatchRunner"),
        patch.object(ubatch_utils, "logger") as logger,
    ):
        runner = maybe_build_ubatch_runner(vllm_config, None, None, [], None, 1)
    return runner, logger


def test_runner_is_built_only_for_microbatching():
    assert _build_runner(ParallelConfig())[0] is None
    assert _build_runner(_dbo_config())[0] is not None
    assert _build_runner(_dbo_config(data_parallel_size=2))[0] is not None


@pytest.mark.parametrize("dp_size, is_moe_model", [(1, True), (1, False), (2, True)])
def test_log_says_how_microbatching_is_engaged(dp_size: int, is_moe_model: bool):
    """Splitting without a point to hand off at only adds cost, so warn of it."""
    parallel_config = _dbo_config(data_parallel_size=dp_size, is_moe_model=is_moe_model)
    _, logger = _build_runner(parallel_config)

    message, *args = logger.info_once.call_args.args
    for expected in (
        f"data parallel size {dp_size}",
        f"{DECODE_THRESHOLD} tokens",
        f"{PREFILL_THRESHOLD} tokens",
    ):
        assert expected in message % tuple(args)
    assert logger.warning_once.called == (dp_size == 1)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_microbatches_carry_dp_metadata_only_with_dp(dp_size: int):
    runner = UBatchRunner.__new__(UBatchRunner)
    runner.vllm_config = VllmConfig()
    runner.parallel_config = _dbo_config(data_parallel_size=dp_size)

    slices = [
        UBatchSlice(slice(0, 1), slice(0, 5)),
        UBatchSlice(slice(0, 1), slice(5, 11)),
    ]
    contexts = runner._make_forward_contexts(slices, [{}, {}], [{}, {}], [None, None])

    for context, num_tokens in zip(contexts, [5, 6]):
        if dp_size == 1:
            assert context.dp_metadata is None
        else:
            assert context.dp_metadata is not None
            num_tokens_across_dp = context.dp_metadata.num_tokens_across_dp_cpu
            assert num_tokens_across_dp.tolist() == [num_tokens] * dp_size


OFF = 10**9


@pytest.mark.parametrize(
    "dp_size, has_runner, decode_threshold, prefill_threshold, max_num_reqs, expected",
    [
        (1, True, 32, 512, 1024, 2048),
        (1, True, OFF, 512, 1024, 2048),
        # Only decodes are split.
        (1, True, 32, OFF, 1024, 1024),
        (1, True, 1024, 2049, 1024, 1024),
        (1, True, 32, OFF, 4096, 2048),
        # The largest dummy batch is a decode, but only prefills are split.
        (1, True, OFF, 512, 2048, 2048),
        # Nothing is split.
        (1, True, OFF, OFF, 1024, None),
        (1, True, 1025, OFF, 1024, None),
        (1, False, 32, 512, 1024, None),
        (2, True, 32, 512, 1024, None),
    ],
)
def test_warmup_reaches_every_microbatch_workspace(
    dp_size: int,
    has_runner: bool,
    decode_threshold: int,
    prefill_threshold: int,
    max_num_reqs: int,
    expected: int | None,
):
    """Workspaces cannot grow after capture, so the largest split must have run."""
    parallel_config = _dbo_config(
        dbo_decode_token_threshold=decode_threshold,
        dbo_prefill_token_threshold=prefill_threshold,
    )
    runs: list[int] = []

    def dummy_run(num_tokens: int, skip_eplb: bool) -> None:
        assert skip_eplb
        for decode in (True, False):
            desc = _dispatch_dp1(num_tokens, decode, parallel_config=parallel_config)
            assert desc.num_ubatches == 2
        runs.append(num_tokens)

    warmup_ubatch_workspaces(
        SimpleNamespace(
            vllm_config=SimpleNamespace(is_mm_encoder_only=False),
            parallel_config=parallel_config,
            ubatch_runner=object() if has_runner else None,
            dp_size=dp_size,
            max_num_tokens=2048,
            max_num_reqs=max_num_reqs,
            decode_query_len=1,
            _dummy_run=dummy_run,
        )
    )

    assert runs == ([] if expected is None else [expected])
    assert parallel_config.dbo_decode_token_threshold == decode_threshold
    assert parallel_config.dbo_prefill_token_threshold == prefill_threshold


def test_kernel_warmup_runs_in_inference_mode():
    """As the steps that it stands for."""
    modes: list[bool] = []
    with patch.object(
        warmup,
        "_warmup_kernels",
        lambda *args: modes.append(torch.is_inference_mode_enabled()),
    ):
        warmup.warmup_kernels(Mock(), Mock(), Mock())
    assert modes == [True]


class _PrepareFinalize:
    """A synchronous prepare/finalize, which cannot hand off to a microbatch."""

    def __init__(self, num_dispatchers: int):
        self._num_dispatchers = num_dispatchers

    def supports_async(self) -> bool:
        return False

    def num_dispatchers(self) -> int:
        return self._num_dispatchers

    def prepare(self, hidden_states, topk_weights, topk_ids, *args, **kwargs):
        return hidden_states, None, None, None, None

    def finalize(self, output, fused_out, *args, **kwargs):
        output.copy_(fused_out)


def _run_synchronous_moe(num_dispatchers: int) -> torch.Tensor:
    kernel = FusedMoEKernelModularImpl.__new__(FusedMoEKernelModularImpl)
    kernel.prepare_finalize = _PrepareFinalize(num_dispatchers)
    kernel.fused_experts = Mock()
    hidden_states = torch.arange(6.0).view(3, 2)
    topk_weights = torch.ones(3, 1)
    topk_ids = torch.zeros(3, 1, dtype=torch.int64)
    with patch.object(modular_kernel, "dbo_enabled", lambda: True):
        a1q, *_ = kernel._prepare(hidden_states, topk_weights, topk_ids, 1, None, False)
        return kernel._finalize(
            torch.empty_like(hidden_states),
            a1q,
            hidden_states,
            topk_weights,
            topk_ids,
            False,
            None,
            None,
        )


@pytest.mark.parametrize("enable_expert_parallel", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_experts_are_local_without_expert_parallelism(
    enable_expert_parallel: bool, tp_size: int
):
    """Splitting a step does not change who has which experts."""
    num_experts = []
    for enable_dbo in (False, True):
        parallel_config = ParallelConfig(
            enable_dbo=enable_dbo,
            tensor_parallel_size=tp_size,
            enable_expert_parallel=enable_expert_parallel,
        )
        with patch.object(moe_config, "get_tensor_model_parallel_rank", lambda: 0):
            moe = moe_config.FusedMoEParallelConfig.make(
                tp_size, 1, 1, 1, parallel_config
            )
        local_num_experts, *_ = determine_expert_map(moe.ep_size, moe.ep_rank, 8)
        num_experts.append(local_num_experts)
    assert num_experts == [8 // tp_size if enable_expert_parallel else 8] * 2


def test_synchronous_moe_runs_in_a_microbatch_unless_it_communicates():
    expected = torch.arange(6.0).view(3, 2)
    torch.testing.assert_close(_run_synchronous_moe(num_dispatchers=1), expected)
    with pytest.raises(AssertionError):
        _run_synchronous_moe(num_dispatchers=2)


@pytest.mark.parametrize("dp_size, expected", [(1, 0), (2, 20)])
def test_sms_are_reserved_only_for_an_all2all(
    monkeypatch: pytest.MonkeyPatch, dp_size: int, expected: int
):
    monkeypatch.setenv("VLLM_DBO_COMM_SMS", "20")
    with (
        patch("vllm.v1.worker.ubatch_utils.current_platform"),
        patch("vllm.v1.worker.ubatch_utils.SMControlContextManager") as context,
    ):
        create_sm_control_context(_dbo_config(data_parallel_size=dp_size))
    assert context.call_args.kwargs["comm_sms"] == expected


@pytest.mark.parametrize("dp_size", [1, 2])
def test_only_dp_needs_an_all2all_backend_that_can_overlap(dp_size: int, tmp_path):
    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"], num_experts=4
    ).save_pretrained(tmp_path)
    model_config = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True)
    parallel_config = _dbo_config(
        data_parallel_size=dp_size, all2all_backend="allgather_reducescatter"
    )
    # The CPU platform turns DBO off.
    with patch.object(type(current_platform), "check_and_update_config"):
        make_config = partial(
            VllmConfig, model_config=model_config, parallel_config=parallel_config
        )
        if dp_size == 1:
            assert make_config().parallel_config.use_ubatching
        else:
            with pytest.raises((AssertionError, ValueError), match="all2all"):
                make_config()
