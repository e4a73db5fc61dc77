# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the V2 model runner counts of dual batch overlap (DBO)."""

import faulthandler
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from transformers import Qwen3MoeConfig

from tests.utils import spawn_new_process_for_each_test
from tests.v1.worker.test_gpu_dp_ubatching import FakeCudaGraphManager
from vllm import LLM, SamplingParams
from vllm.config import CUDAGraphMode, ParallelConfig, VllmConfig
from vllm.forward_context import create_forward_context
from vllm.platforms import current_platform
from vllm.v1.core.sched import scheduler
from vllm.v1.metrics.dbo import DBOStats
from vllm.v1.metrics.reader import Counter
from vllm.v1.worker.gpu import dp_utils, ubatch_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.ubatch_utils import (
    UBatchRunner,
    UBatchState,
    maybe_build_ubatch_runner,
)
from vllm.v1.worker.ubatch_utils import UBatchSlice
from vllm.v1.worker.ubatching import dbo_yield

pytestmark = pytest.mark.skip_global_cleanup

DECODE_THRESHOLD = 32
PREFILL_THRESHOLD = 512


@pytest.fixture(autouse=True)
def _cpu_env(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _stats_of_step(
    num_tokens: int,
    decode: bool = True,
    prefix_veto: bool = False,
    peer: tuple[int, bool, bool] | None = None,
    capture_sizes: tuple[int, ...] = (),
    need_eager: bool = False,
) -> DBOStats:
    """Decide on one step of rank 0, and count it.

    Args:
        num_tokens: Tokens of the step.
        decode: Whether all its requests decode one token.
        prefix_veto: Whether a prefix cache hit forbids to split it.
        peer: Tokens of the other DP rank, whether it only decodes and whether it
            allows a split. None for a single rank.
        capture_sizes: Sizes of the CUDA graphs for decodes.
        need_eager: Whether no CUDA graph may be used.

    """
    parallel_config = ParallelConfig(
        enable_dbo=True,
        data_parallel_size=1 if peer is None else 2,
        dbo_decode_token_threshold=DECODE_THRESHOLD,
        dbo_prefill_token_threshold=PREFILL_THRESHOLD,
    )

    def all_reduce(votes: torch.Tensor, group: Any) -> None:
        assert peer is not None
        peer_tokens, peer_decode, peer_allows = peer
        num_reqs = peer_tokens if peer_decode else 1
        tokens_per_req = peer_tokens // num_reqs
        votes[:, 1] = torch.tensor(
            [
                peer_tokens,
                votes[1, 0],
                tokens_per_req,
                tokens_per_req,
                int(peer_allows),
                num_reqs,
            ]
        )

    tokens_per_req = 1 if decode else num_tokens
    with (
        patch.object(dp_utils.dist, "all_reduce", all_reduce),
        patch.object(dp_utils, "get_dp_group", lambda: SimpleNamespace(cpu_group=None)),
    ):
        desc, _ = dp_utils.dispatch_cg_and_sync_dp(
            FakeCudaGraphManager(list(capture_sizes)),
            num_tokens // tokens_per_req,
            num_tokens,
            tokens_per_req,
            dp_size=parallel_config.data_parallel_size,
            dp_rank=0,
            max_query_len=tokens_per_req,
            need_eager=need_eager,
            parallel_config=parallel_config,
            allow_ubatching=not prefix_veto,
            uniform_decode=decode,
        )
    stats = dp_utils.make_dbo_stats(
        parallel_config, desc, num_tokens, decode, prefix_veto
    )
    # A reason is given if and only if the step was not split.
    assert (stats.unsplit_reason is None) == (desc.num_ubatches == 2)
    assert stats.num_yields is None
    return stats


@pytest.mark.parametrize(
    "step, reason",
    [
        ({"num_tokens": 1}, "too_small"),
        ({"num_tokens": 1, "decode": False}, "too_small"),
        ({"num_tokens": 1, "prefix_veto": True}, "too_small"),
        ({"num_tokens": 2}, "threshold"),
        ({"num_tokens": DECODE_THRESHOLD - 1}, "threshold"),
        ({"num_tokens": DECODE_THRESHOLD}, None),
        ({"num_tokens": DECODE_THRESHOLD, "decode": False}, "threshold"),
        ({"num_tokens": PREFILL_THRESHOLD - 1, "decode": False}, "threshold"),
        ({"num_tokens": PREFILL_THRESHOLD, "decode": False}, None),
        (
            {"num_tokens": PREFILL_THRESHOLD, "decode": False, "prefix_veto": True},
            "prefix_veto",
        ),
        # The veto did not cost a split here.
        (
            {"num_tokens": PREFILL_THRESHOLD - 1, "decode": False, "prefix_veto": True},
            "threshold",
        ),
        ({"num_tokens": DECODE_THRESHOLD, "capture_sizes": (64,)}, "graph"),
        (
            {
                "num_tokens": DECODE_THRESHOLD,
                "capture_sizes": (64,),
                "need_eager": True,
            },
            None,
        ),
        (
            {
                "num_tokens": DECODE_THRESHOLD,
                "capture_sizes": (64,),
                "prefix_veto": True,
            },
            "prefix_veto",
        ),
        ({"num_tokens": DECODE_THRESHOLD + 1, "capture_sizes": (64,)}, None),
        ({"num_tokens": 65, "capture_sizes": (64,)}, None),
    ],
)
def test_reason_with_one_rank(step: dict[str, Any], reason: str | None):
    assert _stats_of_step(**step).unsplit_reason == reason


# The other rank's tokens, whether it only decodes and whether it allows a split.
@pytest.mark.parametrize(
    "peer, step, reason",
    [
        ((64, True, True), {"num_tokens": 40}, None),
        # An empty last microbatch does not keep ranks from splitting alike.
        ((128, True, True), {"num_tokens": 40, "capture_sizes": (128,)}, None),
        ((64, True, False), {"num_tokens": 40}, "dp_vote"),
        ((31, True, True), {"num_tokens": 40}, "dp_vote"),
        ((1, True, True), {"num_tokens": 40}, "dp_vote"),
        # A prefill elsewhere makes the prefill threshold apply here.
        ((600, False, True), {"num_tokens": 40}, "dp_vote"),
        ((600, False, True), {"num_tokens": 600}, None),
        # This rank's own reason counts, whatever the other one says.
        ((64, True, True), {"num_tokens": 31}, "threshold"),
        ((64, True, False), {"num_tokens": 31}, "threshold"),
        ((64, True, True), {"num_tokens": 1}, "too_small"),
        ((64, True, True), {"num_tokens": 40, "prefix_veto": True}, "prefix_veto"),
        ((64, True, False), {"num_tokens": 40, "prefix_veto": True}, "prefix_veto"),
    ],
)
def test_reason_with_two_ranks(
    peer: tuple[int, bool, bool], step: dict[str, Any], reason: str | None
):
    assert _stats_of_step(peer=peer, **step).unsplit_reason == reason


def test_replayed_graph_is_a_split_step_without_yields():
    desc = BatchExecutionDescriptor(
        cg_mode=CUDAGraphMode.FULL, num_tokens=64, num_reqs=64, num_ubatches=2
    )
    stats = dp_utils.make_dbo_stats(
        ParallelConfig(enable_dbo=True), desc, 60, True, False
    )
    assert stats == DBOStats()


class _Model(torch.nn.Module):
    """Yields three times."""

    def forward(self, input_ids: torch.Tensor, **kwargs) -> torch.Tensor:
        for _ in range(3):
            dbo_yield()
        return input_ids.float()


@pytest.mark.skipif(not current_platform.is_cpu(), reason="runs threads on CPU")
@spawn_new_process_for_each_test
def test_yields_of_a_step_are_counted():
    import vllm.v1.worker.cpu.shm  # noqa: F401

    faulthandler.dump_traceback_later(60, exit=True)

    vllm_config = VllmConfig()
    vllm_config.parallel_config = ParallelConfig(enable_dbo=True)
    runner = UBatchRunner(vllm_config, torch.device("cpu"), None, [], None, 8)
    input_ids = torch.arange(11)

    def run(model: torch.nn.Module, stats: DBOStats | None) -> DBOStats | None:
        state = UBatchState(
            slices=[
                UBatchSlice(slice(0, 3), slice(0, 5)),
                UBatchSlice(slice(2, 6), slice(5, 11)),
            ],
            forward_contexts=[
                create_forward_context(None, vllm_config) for _ in range(2)
            ],
        )
        inputs = {"input_ids": input_ids, "positions": input_ids}
        output = runner.run(model, inputs, state, stats)
        assert output.tolist() == input_ids.tolist()
        return stats

    # Each of the two microbatches yields three times.
    assert run(_Model(), DBOStats()) == DBOStats(num_yields=6)
    # A dummy run has no statistics to add to.
    run(_Model(), None)
    assert run(_Model(), DBOStats()) == DBOStats(num_yields=6)


@pytest.mark.parametrize("dp_size, warns", [(1, True), (2, False)])
def test_start_says_what_would_overlap(dp_size: int, warns: bool):
    parallel_config = ParallelConfig(
        enable_dbo=True, data_parallel_size=dp_size, is_moe_model=True
    )
    with (
        patch.object(ubatch_utils, "UBatchRunner"),
        patch.object(ubatch_utils, "logger") as logger,
    ):
        maybe_build_ubatch_runner(
            Mock(parallel_config=parallel_config, afd_config=None),
            None,
            Mock(supports_ubatching=True),
            [],
            None,
            1,
        )
    assert logger.warning_once.call_count == int(warns)
    if warns:
        message = logger.warning_once.call_args.args[0]
        for flag in (
            "--data-parallel-size",
            "--enable-expert-parallel",
            "--all2all-backend",
        ):
            assert flag in message


BLOCK_SIZE = 32
HF_CONFIG = Qwen3MoeConfig(
    architectures=["Qwen3MoeForCausalLM"],
    vocab_size=256,
    hidden_size=128,
    moe_intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    num_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


def _dbo_counters(llm: LLM) -> dict[str, int]:
    """Nonzero counters of DBO; those with a reason under that."""
    counters = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:dbo_"):
            name = metric.labels.get("reason", metric.name.removeprefix("vllm:dbo_"))
            assert metric.labels["engine"] == "0"
            assert isinstance(metric, Counter)
            counters[name] = metric.value
    return counters


def _make_llm(path: str, **kwargs: Any) -> LLM:
    return LLM(
        model=path,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=BLOCK_SIZE,
        max_model_len=256,
        max_num_batched_tokens=200,
        max_num_seqs=8,
        disable_log_stats=False,
        **kwargs,
    )


def _random_prompt(num_tokens: int, prefix: tuple[int, ...] = ()) -> tuple[int, ...]:
    return (*prefix, *torch.randint(2, 250, (num_tokens,)).tolist())


def _generate(llm: LLM, prompts: list[tuple[int, ...]], max_tokens: int) -> None:
    llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        use_tqdm=False,
    )


@pytest.mark.skipif(not current_platform.is_cpu(), reason="runs an engine on CPU")
@spawn_new_process_for_each_test
def test_counters_equal_what_was_run(tmp_path):
    faulthandler.dump_traceback_later(300, exit=True)
    torch.manual_seed(0)
    HF_CONFIG.save_pretrained(tmp_path)
    llm = _make_llm(
        str(tmp_path),
        enable_dbo=True,
        dbo_decode_token_threshold=3,
        dbo_prefill_token_threshold=64,
    )
    expected = dict.fromkeys(
        [
            "steps",
            "split_steps",
            "yields",
            "too_small",
            "threshold",
            "prefix_veto",
            "dp_vote",
            "graph",
        ],
        0,
    )

    def check(**more: int) -> None:
        more["steps"] = sum(more.values())
        # Each of the two microbatches yields in each of the three layers.
        more["yields"] = more.get("split_steps", 0) * 6
        for name, count in more.items():
            expected[name] += count
        assert _dbo_counters(llm) == expected

    # Profiling and warm-up are not counted.
    check()

    with patch.object(scheduler, "logger") as logger:
        _generate(llm, [_random_prompt(63)], max_tokens=2)
        check(threshold=1, too_small=1)
        logger.info_once.assert_not_called()
        _generate(llm, [_random_prompt(64)], max_tokens=1)
        check(split_steps=1)
    logger.info_once.assert_called_once_with("DBO: first step split.", scope="process")

    # One prefill of 64 tokens, then decodes of one token.
    _generate(llm, [_random_prompt(64)], max_tokens=5)
    check(split_steps=1, too_small=4)
    # A prefill of 63 tokens, then decodes of three tokens.
    _generate(llm, [_random_prompt(21) for _ in range(3)], max_tokens=4)
    check(threshold=1, split_steps=3)
    # Decodes of two tokens.
    _generate(llm, [_random_prompt(32) for _ in range(2)], max_tokens=3)
    check(split_steps=1, threshold=2)

    # The second prompt is admitted on blocks that the first one writes, ahead of it.
    prefix = _random_prompt(2 * BLOCK_SIZE)
    prompts = [_random_prompt(3, prefix), _random_prompt(2, prefix)]
    _generate(llm, prompts, max_tokens=1)
    check(prefix_veto=1)

    # A dummy run splits, and is not counted.
    with patch.object(
        UBatchRunner, "run", autospec=True, side_effect=UBatchRunner.run
    ) as run:
        llm.collective_rpc(lambda worker: worker.model_runner._dummy_run(100) and None)
    assert run.call_count == 1
    check()


@pytest.mark.skipif(not current_platform.is_cpu(), reason="runs an engine on CPU")
@spawn_new_process_for_each_test
def test_nothing_is_counted_without_dbo(tmp_path):
    faulthandler.dump_traceback_later(300, exit=True)
    HF_CONFIG.save_pretrained(tmp_path)
    llm = _make_llm(str(tmp_path))

    client: Any = llm.llm_engine.engine_core
    engine_core = client.engine_core
    with patch.object(
        engine_core.scheduler,
        "make_stats",
        side_effect=engine_core.scheduler.make_stats,
    ) as make_stats:
        _generate(llm, [_random_prompt(64), _random_prompt(9)], max_tokens=4)
    assert make_stats.call_count >= 4
    assert not any(
        isinstance(arg, DBOStats)
        for call in make_stats.call_args_list
        for arg in (*call.args, *call.kwargs.values())
    )
    assert any(metric.name == "vllm:prompt_tokens" for metric in llm.get_metrics())
    assert _dbo_counters(llm) == {}
