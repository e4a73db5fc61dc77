# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Dual batch overlap (DBO) on CPU, with the V2 model runner.

A CPU has no streams to overlap, but splits, hands off and merges as a GPU does.
"""

import faulthandler
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.utils import spawn_new_process_for_each_test
from vllm import LLM, SamplingParams
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.forward_context import create_forward_context
from vllm.platforms import current_platform
from vllm.utils.torch_utils import current_stream
from vllm.v1.worker.gpu import ubatch_utils
from vllm.v1.worker.gpu.ubatch_utils import UBatchRunner, UBatchState
from vllm.v1.worker.ubatch_utils import UBatchSlice, create_sm_control_context
from vllm.v1.worker.ubatching import (
    dbo_current_ubatch_id,
    dbo_switch_to_comm_sync,
    dbo_switch_to_compute_sync,
    dbo_yield,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
)

pytestmark = [
    pytest.mark.skipif(not current_platform.is_cpu(), reason="tests the CPU platform"),
    pytest.mark.skip_global_cleanup,
]

HF_CONFIG = Qwen3MoeConfig(
    architectures=["Qwen3MoeForCausalLM"],
    vocab_size=256,
    hidden_size=128,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    num_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=256,
    # Large enough for the tokens to depend on the context.
    initializer_range=0.15,
    tie_word_embeddings=False,
)


@pytest.fixture(autouse=True)
def _cpu_env(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("use_v2_model_runner", [True, False])
@pytest.mark.parametrize("dbo_args", [{"enable_dbo": True}, {"ubatch_size": 2}])
def test_dbo_stays_on_with_the_v2_runner_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path, use_v2_model_runner: bool, dbo_args: dict
):
    HF_CONFIG.save_pretrained(tmp_path)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(use_v2_model_runner)))
    # Triton is usable in the interpreter, which this process did not start with.
    with patch("vllm.config.vllm.HAS_TRITON", True):
        vllm_config = VllmConfig(
            model_config=ModelConfig(model=str(tmp_path), skip_tokenizer_init=True),
            parallel_config=ParallelConfig(**dbo_args),
        )
    assert vllm_config.parallel_config.use_ubatching is use_v2_model_runner


def test_cpu_has_no_sms_to_reserve(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_DBO_COMM_SMS", "20")
    with create_sm_control_context(ParallelConfig(enable_dbo=True)):
        pass


class _HandOffModel(torch.nn.Module):
    """Hands off to the other microbatch from either stream."""

    def __init__(self):
        super().__init__()
        self.trace: list[tuple[str, int]] = []

    def forward(self, input_ids: torch.Tensor, **kwargs) -> torch.Tensor:
        def record(step: str) -> None:
            self.trace.append((step, dbo_current_ubatch_id()))

        compute_stream = current_stream()
        record("start")
        dbo_yield()
        assert current_stream() is compute_stream
        record("compute")
        dbo_yield_and_switch_from_compute_to_comm()
        assert current_stream() is not compute_stream
        dbo_switch_to_compute_sync()
        assert current_stream() is compute_stream
        dbo_switch_to_comm_sync()
        record("comm")
        dbo_yield_and_switch_from_comm_to_compute()
        assert current_stream() is compute_stream
        return input_ids.float().unsqueeze(-1)


@spawn_new_process_for_each_test
def test_microbatches_hand_off_on_either_stream():
    import vllm.v1.worker.cpu.shm  # noqa: F401

    # A lost hand-off must not hang the test run.
    faulthandler.dump_traceback_later(60, exit=True)

    vllm_config = VllmConfig()
    vllm_config.parallel_config = ParallelConfig(enable_dbo=True)
    runner = UBatchRunner(vllm_config, torch.device("cpu"), None, [], None, 8)
    model = _HandOffModel()
    input_ids = torch.arange(11)
    output = runner.run(
        model,
        {"input_ids": input_ids, "positions": input_ids},
        UBatchState(
            slices=[
                UBatchSlice(slice(0, 3), slice(0, 5)),
                UBatchSlice(slice(2, 6), slice(5, 11)),
            ],
            forward_contexts=[
                create_forward_context(None, vllm_config) for _ in range(2)
            ],
        ),
    )

    torch.testing.assert_close(output, input_ids.float().unsqueeze(-1))
    assert model.trace == [
        (step, ubatch) for step in ("start", "compute", "comm") for ubatch in (0, 1)
    ]


@spawn_new_process_for_each_test
def test_split_steps_match_whole_steps(tmp_path):
    faulthandler.dump_traceback_later(300, exit=True)

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(HF_CONFIG).save_pretrained(tmp_path)
    llm = LLM(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_dbo=True,
        enable_prefix_caching=False,
        max_model_len=128,
        # Makes the longest prompt run in chunks beside the decodes.
        max_num_batched_tokens=48,
        max_num_seqs=8,
    )
    parallel_config = llm.llm_engine.vllm_config.parallel_config
    prompts = [
        {"prompt_token_ids": [(7 * i + 13 * n) % 250 + 2 for i in range(n)]}
        for n in (5, 101, 9, 32)
    ]
    sampling_params = SamplingParams(
        temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True
    )

    def generate(threshold: int) -> tuple[list[list[int]], torch.Tensor, int]:
        """Tokens, their logprobs and how many steps were split."""
        parallel_config.dbo_decode_token_threshold = threshold
        parallel_config.dbo_prefill_token_threshold = threshold
        with patch.object(
            UBatchRunner, "run", autospec=True, side_effect=UBatchRunner.run
        ) as run:
            outputs: list[Any] = [
                output.outputs[0]
                for output in llm.generate(prompts, sampling_params, use_tqdm=False)
            ]
        logprobs = [
            [step[token].logprob for token, step in zip(out.token_ids, out.logprobs)]
            for out in outputs
        ]
        return (
            [list(out.token_ids) for out in outputs],
            torch.tensor(logprobs),
            run.call_count,
        )

    tokens, logprobs, num_split = generate(threshold=10**9)
    assert num_split == 0

    split_tokens, split_logprobs, num_split = generate(threshold=2)
    assert num_split >= 6
    assert split_tokens == tokens
    torch.testing.assert_close(split_logprobs, logprobs, rtol=0, atol=1e-4)

    # The comparison notices microbatches that are put back in the wrong order.
    merge = ubatch_utils.merge_ubatch_outputs
    with patch.object(
        ubatch_utils, "merge_ubatch_outputs", lambda outputs: merge(outputs[::-1])
    ):
        assert generate(threshold=2)[0] != tokens
