# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Microbatching (DBO) beside prefix cache hits within one step.

A request can be admitted on blocks that another request of the same step is only
computing now. Splitting the step must not let it read them too early.
"""

import faulthandler
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.utils import spawn_new_process_for_each_test
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.ubatch_utils import UBatchRunner, prefix_hit_precedes_writer

pytestmark = pytest.mark.skip_global_cleanup


@pytest.fixture(autouse=True)
def _cpu_env(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _hit_precedes_writer(
    reqs: list[tuple[int, int, list[int]]],
    readers: set[int],
    block_size: int = 16,
    more_groups: list[tuple[int, list[list[int]]]] | None = None,
    cp_size: int = 1,
) -> bool:
    """`reqs` are (computed tokens, scheduled tokens, block IDs), in batch order."""
    groups = [(block_size, [blocks for _, _, blocks in reqs]), *(more_groups or [])]
    # The state indices of the requests differ from their batch indices.
    return prefix_hit_precedes_writer(
        SimpleNamespace(
            block_sizes=[size for size, _ in groups],
            block_ids=[[[], *reversed(rows)] for _, rows in groups],
            cp_size=cp_size,
        ),
        np.arange(len(reqs), 0, -1),
        np.array([computed for computed, _, _ in reqs], dtype=np.int32),
        np.array([scheduled for _, scheduled, _ in reqs], dtype=np.int32),
        readers,
    )


@pytest.mark.parametrize(
    "reqs, readers, expected",
    [
        pytest.param(
            [(32, 3, [1, 2, 4]), (0, 35, [1, 2, 3])], {0}, True, id="before-its-writer"
        ),
        pytest.param(
            [(0, 35, [1, 2, 3]), (32, 40, [1, 2, 4, 5, 6])],
            {1},
            False,
            id="behind-its-writer",
        ),
        pytest.param(
            [(32, 3, [1, 2, 4]), (0, 35, [5, 6, 7])], {0}, False, id="prefix-is-old"
        ),
        pytest.param(
            [(32, 3, [1, 2, 4]), (32, 35, [1, 2, 3, 5, 6])],
            {0, 1},
            False,
            id="old-prefix-hit-twice",
        ),
        pytest.param(
            [(48, 1, [1, 2, 3, 5]), (40, 24, [1, 2, 3, 4])],
            {0},
            True,
            id="running-writer-fills-an-older-block",
        ),
        pytest.param(
            [(32, 1, [1, 2, 5]), (40, 24, [1, 2, 3, 4])],
            {0},
            False,
            id="running-writer-is-past-the-prefix",
        ),
        pytest.param(
            [(31, 1, [1, 2]), (32, 3, [1, 2, 4])],
            {1},
            False,
            id="behind-a-decode-that-fills-a-block",
        ),
        pytest.param(
            [(16, 4, [1, 2]), (32, 9, [8, 9, 4]), (0, 33, [8, 5, 6])],
            {0, 1},
            True,
            id="second-of-two-readers",
        ),
        pytest.param(
            [(16, 1, [1, 2]), (32, 16, [1, 3, 4]), (0, 48, [1, 3, 5])],
            {0, 1},
            True,
            id="three-share-a-prefix",
        ),
        pytest.param(
            [(20, 4, [9, 2]), (0, 20, [1, 2])],
            {0},
            False,
            id="partial-block-is-private",
        ),
        pytest.param([(32, 8, [1, 2, 3]), (0, 4, [4])], set(), False, id="no-hits"),
        pytest.param([(32, 8, [1, 2, 3])], {0}, False, id="single-request"),
    ],
)
def test_hit_precedes_writer(
    reqs: list[tuple[int, int, list[int]]], readers: set[int], expected: bool
):
    assert _hit_precedes_writer(reqs, readers) is expected


def test_every_kv_cache_group_counts():
    reqs = [(64, 3, [1, 2, 3]), (0, 70, [4, 5, 6])]
    groups = [(64, [[7, 8], [7, 9]])]
    assert not _hit_precedes_writer(reqs, {0}, block_size=32)
    assert _hit_precedes_writer(reqs, {0}, block_size=32, more_groups=groups)


def test_context_parallel_blocks_hold_more_tokens():
    reqs = [(32, 3, [1, 3]), (32, 30, [1, 2])]
    assert not _hit_precedes_writer(reqs, {0}, cp_size=2)
    reqs = [(32, 3, [1, 3]), (0, 33, [1, 2])]
    assert _hit_precedes_writer(reqs, {0}, cp_size=2)


BLOCK_SIZE = 32
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


@pytest.mark.skipif(not current_platform.is_cpu(), reason="compares on CPU")
@spawn_new_process_for_each_test
def test_split_steps_keep_prefix_cache_hits_right(tmp_path):
    faulthandler.dump_traceback_later(300, exit=True)

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(HF_CONFIG).save_pretrained(tmp_path)
    llm = LLM(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_dbo=True,
        enable_prefix_caching=True,
        block_size=BLOCK_SIZE,
        max_model_len=256,
        max_num_batched_tokens=200,
        max_num_seqs=8,
        # Only prefills are split.
        dbo_decode_token_threshold=10**9,
    )
    parallel_config = llm.llm_engine.vllm_config.parallel_config
    sampling_params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    def generate(
        prompts: list[list[int]], split: bool = True
    ) -> tuple[list[list[int]], int]:
        """Tokens, and how many steps were split."""
        parallel_config.dbo_prefill_token_threshold = 2 if split else 10**9
        assert llm.reset_prefix_cache()
        with patch.object(
            UBatchRunner, "run", autospec=True, side_effect=UBatchRunner.run
        ) as run:
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                sampling_params,
                use_tqdm=False,
            )
        return [list(out.outputs[0].token_ids) for out in outputs], run.call_count

    def random_tokens(n: int) -> list[int]:
        return torch.randint(2, 250, (n,)).tolist()

    prefix = random_tokens(2 * BLOCK_SIZE)
    writer = prefix + random_tokens(3)
    # The batch is sorted by the number of tokens to compute.
    reader_first = [writer, prefix + random_tokens(5), random_tokens(40)]
    reader_last = [writer, prefix + random_tokens(70), random_tokens(40)]
    disjoint = [random_tokens(67), random_tokens(69), random_tokens(40)]
    # The first prompt takes all of step 1, which ends inside a block. It fills
    # that block in step 2, when the second prompt is admitted on it.
    chunked = prefix + random_tokens(166)
    reader_of_chunk = [chunked, chunked[: 7 * BLOCK_SIZE] + random_tokens(8)]
    for prompts, expect_split in [
        (reader_first, 0),
        (reader_last, 1),
        (disjoint, 1),
        (reader_of_chunk, 1),
    ]:
        tokens, num_split = generate(prompts, split=False)
        assert num_split == 0
        assert generate(prompts) == (tokens, expect_split)

    # Without the check the reader finds blocks that its writer has yet to fill.
    with patch.object(model_runner, "prefix_hit_precedes_writer", lambda *args: False):
        tokens, num_split = generate(reader_first)
    assert num_split == 1
    assert tokens != generate(reader_first, split=False)[0]
