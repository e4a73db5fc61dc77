# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every field of what is sliced for a microbatch (DBO) is accounted for.

A field that is neither sliced nor computed anew describes the whole batch, or
nothing. Whoever adds one has to say here what a microbatch gets.
"""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.ubatch_utils import _slice_input_batch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

pytestmark = pytest.mark.skip_global_cleanup

# The cut is inside request 1.
QUERY_LENS = [3, 5, 2, 4]
SEQ_LENS = [30, 5, 20, 4]
SLICES = [
    UBatchSlice(slice(0, 2), slice(0, 6)),
    UBatchSlice(slice(1, 4), slice(6, 14)),
]
NUM_REQS, NUM_TOKENS = len(QUERY_LENS), sum(QUERY_LENS)

# Model Runner V1: what `split_attn_metadata` does with each field.
METADATA_PER_REQUEST = {
    "block_table_tensor",
    "causal",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "is_prefilling",
    "replayssm_decode_base_cpu",
    "req_idx",
    "rswa_prefix_lens",
}
METADATA_PER_TOKEN = {"positions", "slot_mapping"}
METADATA_COMPUTED: dict[str, list[Any]] = {
    "query_start_loc": [[0, 3, 6], [0, 2, 4, 8]],
    "query_start_loc_cpu": [[0, 3, 6], [0, 2, 4, 8]],
    "seq_lens": [[30, 3], [5, 20, 4]],
    "seq_lens_cpu_upper_bound": [[30, 3], [5, 20, 4]],
    "num_reqs": [2, 3],
    "num_actual_tokens": [6, 8],
    "max_query_len": [3, 4],
    # A graph may have been captured with that of the batch.
    "max_seq_len": [30, 30],
    "mm_req_doc_ranges": [
        {0: [(0, 1)], 1: [(1, 2)]},
        {0: [(1, 2)], 1: [(2, 3)], 2: [(3, 4)]},
    ],
}
FAST_PREFILL = "--kv-sharing-fast-prefill is refused with DBO"
CONTEXT_PARALLEL = "context parallelism is refused with DBO"
METADATA_DROPPED = {
    "logits_indices_padded": FAST_PREFILL,
    "num_logits_indices": FAST_PREFILL,
    "max_logits_per_req": FAST_PREFILL,
    "dcp_local_seq_lens": CONTEXT_PARALLEL,
    "dcp_local_seq_lens_cpu_upper_bound": CONTEXT_PARALLEL,
    "_num_computed_tokens_cache": "computed on demand from the other fields",
    "_token_to_req_indices_cache": "computed on demand from the other fields",
}

# Model Runner V2: what `_slice_input_batch` does with each field.
BATCH_PER_REQUEST = {
    "req_ids",
    "idx_mapping",
    "idx_mapping_np",
    "num_computed_tokens_np",
    "prefill_len_np",
    "num_computed_prefill_tokens_np",
    "is_prefilling_np",
    "prompt_lens",
}
BATCH_PER_TOKEN = {"input_ids", "positions", "is_padding"}
BATCH_COMPUTED: dict[str, list[Any]] = {
    "num_reqs": [2, 3],
    "num_reqs_after_padding": [2, 3],
    "num_scheduled_tokens": [[3, 3], [2, 2, 4]],
    "num_tokens": [6, 8],
    "num_tokens_after_padding": [6, 8],
    "query_start_loc": [[0, 3, 6], [0, 2, 4, 8]],
    "query_start_loc_np": [[0, 3, 6], [0, 2, 4, 8]],
    "seq_lens": [[30, 3], [5, 20, 4]],
    "seq_lens_cpu_upper_bound": [[30, 3], [5, 20, 4]],
    # None without context parallelism
    "dcp_local_seq_lens": [None, None],
    "fast_prefill": [None, None],
}
SAMPLING = "sampling runs on the merged batch"
BATCH_KEPT = {
    "expanded_idx_mapping": SAMPLING,
    "expanded_local_pos": SAMPLING,
    "logits_indices": SAMPLING,
    "cu_num_logits": SAMPLING,
    "cu_num_logits_np": SAMPLING,
    "num_draft_tokens": SAMPLING,
    "num_draft_tokens_per_req": SAMPLING,
    "has_structured_output_reqs": SAMPLING,
    "has_prefill": "decides on fast prefill, before the batch is split",
    "max_query_len": "an upper bound, which holds for a part too",
    "dcp_local_seq_lens_cpu_upper_bound": CONTEXT_PARALLEL,
}


def _check_complete(cls: type, *groups: Any) -> None:
    names = [name for group in groups for name in group]
    assert len(names) == len(set(names))
    assert set(names) == {field.name for field in fields(cls)}


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _make_metadata() -> CommonAttentionMetadata:
    """Requests and tokens are told apart by their values in every field."""
    query_start_loc = torch.tensor([0, 3, 8, 10, 14], dtype=torch.int32)
    seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
    per_req = torch.arange(NUM_REQS, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc.clone(),
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens.clone(),
        num_reqs=NUM_REQS,
        num_actual_tokens=NUM_TOKENS,
        max_query_len=max(QUERY_LENS),
        max_seq_len=max(SEQ_LENS),
        block_table_tensor=per_req[:, None] * 10,
        slot_mapping=torch.arange(NUM_TOKENS) + 100,
        causal=torch.tensor([True, False, True, False]),
        logits_indices_padded=torch.arange(NUM_REQS),
        num_logits_indices=NUM_REQS,
        max_logits_per_req=1,
        encoder_seq_lens=per_req + 20,
        encoder_seq_lens_cpu=np.arange(NUM_REQS) + 20,
        dcp_local_seq_lens=per_req + 30,
        dcp_local_seq_lens_cpu_upper_bound=per_req + 30,
        positions=torch.arange(NUM_TOKENS) + 200,
        is_prefilling=torch.tensor([False, True, True, False]),
        req_idx=np.arange(NUM_REQS) + 40,
        mm_req_doc_ranges={i: [(i, i + 1)] for i in range(NUM_REQS)},
        rswa_prefix_lens=per_req + 50,
        replayssm_decode_base_cpu=per_req + 60,
        _num_computed_tokens_cache=per_req,
        _token_to_req_indices_cache=torch.zeros(NUM_TOKENS, dtype=torch.int32),
    )


def test_attention_metadata_fields():
    _check_complete(
        CommonAttentionMetadata,
        METADATA_PER_REQUEST,
        METADATA_PER_TOKEN,
        METADATA_COMPUTED,
        METADATA_DROPPED,
    )
    metadata = _make_metadata()
    for field in fields(metadata):
        assert getattr(metadata, field.name) is not None

    parts = split_attn_metadata(SLICES, metadata)
    for i, (part, ubatch) in enumerate(zip(parts, SLICES)):
        for names, part_slice in (
            (METADATA_PER_REQUEST, ubatch.request_slice),
            (METADATA_PER_TOKEN, ubatch.token_slice),
        ):
            for name in names:
                expected = _plain(getattr(metadata, name)[part_slice])
                assert _plain(getattr(part, name)) == expected, name
        for name, expected in METADATA_COMPUTED.items():
            assert _plain(getattr(part, name)) == expected[i], name
        for name in METADATA_DROPPED:
            assert getattr(part, name) is None, name


def test_attention_metadata_without_optional_fields():
    metadata = _make_metadata().replace(
        **{
            field.name: field.default
            for field in fields(CommonAttentionMetadata)
            if field.default is None and field.name not in ("seq_lens_cpu_upper_bound",)
        },
        causal=False,
    )
    for part in split_attn_metadata(SLICES, metadata):
        assert part.causal is False
        assert part.positions is None and part.mm_req_doc_ranges is None


def _make_batch() -> InputBatch:
    buffers = InputBuffers(NUM_REQS, NUM_TOKENS, torch.device("cpu"))
    batch = InputBatch.make_dummy(NUM_REQS, NUM_TOKENS, buffers)
    query_start_loc_np = np.array([0, 3, 8, 10, 14], dtype=np.int32)
    batch.req_ids = list("abcd")
    batch.idx_mapping = torch.arange(NUM_REQS) + 5
    batch.idx_mapping_np = np.arange(NUM_REQS) + 5
    batch.num_scheduled_tokens = np.array(QUERY_LENS, dtype=np.int32)
    batch.query_start_loc = torch.from_numpy(query_start_loc_np)
    batch.query_start_loc_np = query_start_loc_np
    batch.seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
    batch.seq_lens_cpu_upper_bound = batch.seq_lens.clone()
    batch.num_computed_tokens_np = np.arange(NUM_REQS) + 10
    batch.prefill_len_np = np.arange(NUM_REQS) + 20
    batch.num_computed_prefill_tokens_np = np.arange(NUM_REQS) + 30
    batch.is_prefilling_np = np.array([False, True, True, False])
    batch.prompt_lens = torch.arange(NUM_REQS) + 40
    batch.input_ids = torch.arange(NUM_TOKENS) + 100
    batch.positions = torch.arange(NUM_TOKENS) + 200
    batch.is_padding = torch.arange(NUM_TOKENS) % 3 == 0
    batch.fast_prefill = SimpleNamespace()
    return batch


def test_input_batch_fields():
    _check_complete(
        InputBatch, BATCH_PER_REQUEST, BATCH_PER_TOKEN, BATCH_COMPUTED, BATCH_KEPT
    )
    batch = _make_batch()
    for i, ubatch in enumerate(SLICES):
        part = _slice_input_batch(
            batch,
            ubatch,
            torch.zeros(NUM_REQS + 1, dtype=torch.int32),
            torch.zeros(NUM_REQS, dtype=torch.int32),
        )
        for names, part_slice in (
            (BATCH_PER_REQUEST, ubatch.request_slice),
            (BATCH_PER_TOKEN, ubatch.token_slice),
        ):
            for name in names:
                expected = _plain(getattr(batch, name)[part_slice])
                assert _plain(getattr(part, name)) == expected, name
        for name, expected in BATCH_COMPUTED.items():
            assert _plain(getattr(part, name)) == expected[i], name
        for name in BATCH_KEPT:
            assert getattr(part, name) is getattr(batch, name), name


class _Builder:
    """Keeps the metadata it is given, and can swap its block table."""

    supports_update_block_table = True

    def build(self, common_prefix_len: int, common_attn_metadata):
        return common_attn_metadata

    def update_block_table(self, metadata, block_table, slot_mapping):
        return metadata.replace(
            block_table_tensor=block_table, slot_mapping=slot_mapping
        )


def test_groups_share_metadata_only_within_a_microbatch():
    """Two groups of layers, alike but for their block tables (Model Runner V1)."""
    spec = object()
    metadata = _make_metadata()
    block_tables = [metadata.block_table_tensor, metadata.block_table_tensor + 1]
    builders = [_Builder(), _Builder()]
    groups = [
        [SimpleNamespace(get_metadata_builder=builders.__getitem__, layer_names=[name])]
        for name in ("layer.0", "layer.1")
    ]
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * 2
        ),
        attn_groups=groups,
        input_batch=SimpleNamespace(
            block_table=[
                SimpleNamespace(get_device_tensor=lambda n, table=table: table)
                for table in block_tables
            ],
            num_computed_tokens_cpu_tensor=torch.zeros(NUM_REQS),
            num_prompt_tokens_cpu_tensor=torch.zeros(NUM_REQS),
        ),
        optimistic_seq_lens_cpu=metadata.seq_lens,
        seq_lens=metadata.seq_lens,
        query_start_loc=SimpleNamespace(
            gpu=metadata.query_start_loc, cpu=metadata.query_start_loc_cpu
        ),
        positions=metadata.positions,
        model_config=SimpleNamespace(rswa_window=None),
        cache_config=SimpleNamespace(use_replayssm=False),
        routed_experts_initialized=False,
        is_mm_prefix_lm=False,
        dcp_world_size=1,
        speculative_config=None,
        _get_encoder_seq_lens=lambda *args, **kwargs: (None, None),
    )
    attn_metadata: Any
    attn_metadata, _ = GPUModelRunner._build_attention_metadata(
        runner,
        NUM_TOKENS,
        NUM_REQS,
        max(QUERY_LENS),
        ubatch_slices=SLICES,
        slot_mappings={0: metadata.slot_mapping, 1: metadata.slot_mapping},
    )

    for i, (part, ubatch) in enumerate(zip(attn_metadata, SLICES)):
        for layer, block_table in zip(("layer.0", "layer.1"), block_tables):
            assert part[layer].num_reqs == METADATA_COMPUTED["num_reqs"][i]
            assert part[layer].seq_lens.tolist() == METADATA_COMPUTED["seq_lens"][i]
            torch.testing.assert_close(
                part[layer].block_table_tensor, block_table[ubatch.request_slice]
            )
