# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What each microbatch (DBO) of the V2 model runner gets to run on.

Where a batch is cut, and what attention metadata, slots and padding the parts have.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from tests.v1.worker.test_gpu_ubatch_slicing import _make_input_batch
from vllm.config import CUDAGraphMode, ParallelConfig, VllmConfig
from vllm.forward_context import _compute_sp_num_tokens
from vllm.model_executor.models import utils as model_utils
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.ubatch_utils import UBatchRunner, create_ubatch_slices

pytestmark = pytest.mark.skip_global_cleanup

NONE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.FULL
MAX_NUM_REQS = 64
MAX_MODEL_LEN = 4096
LAYERS = ["layer.0", "layer.1"]


def _make_batch(
    query_lens: list[int], seq_lens: list[int] | None = None, **kwargs: Any
) -> InputBatch:
    num_tokens = max(sum(query_lens), kwargs.get("num_tokens_padded") or 0)
    buffers = InputBuffers(MAX_NUM_REQS, num_tokens, torch.device("cpu"))
    batch = _make_input_batch(query_lens, seq_lens or query_lens, buffers, **kwargs)
    batch.is_padding.copy_(torch.arange(len(batch.is_padding)) >= batch.num_tokens)
    return batch


@pytest.mark.parametrize(
    "query_lens, padded, requests, tokens",
    [
        # Cut in the middle of the tokens, wherever the requests end.
        ([1, 1], None, [(0, 1), (1, 2)], [1, 1]),
        ([7], None, [(0, 1), (0, 1)], [3, 4]),
        ([1] * 5, None, [(0, 2), (2, 5)], [2, 3]),
        ([42, 999], None, [(0, 2), (1, 2)], [520, 521]),
        ([999, 42], None, [(0, 1), (0, 2)], [520, 521]),
        ([4095, 4096, 4096, 4096, 1], None, [(0, 3), (2, 5)], [8192, 8192]),
        # Nothing is cut off at a boundary between requests.
        ([4, 4], None, [(0, 1), (1, 2)], [4, 4]),
        ([3, 1, 4], None, [(0, 2), (2, 3)], [4, 4]),
        # Query length 2: the cut is inside a request if their number is odd.
        ([2, 2, 2, 2], None, [(0, 2), (2, 4)], [4, 4]),
        ([2, 2, 2], None, [(0, 2), (1, 3)], [3, 3]),
        # The padding of a FULL graph goes to the end, as do its requests.
        ([1] * 5, (8, 8), [(0, 4), (4, 8)], [4, 4]),
        ([2, 2, 2], (4, 8), [(0, 2), (2, 4)], [4, 4]),
        # DP padding has no requests. What has only padding keeps the last request.
        ([1] * 5, (5, 8), [(0, 4), (4, 5)], [4, 4]),
        ([1] * 4, (4, 8), [(0, 4), (3, 4)], [4, 4]),
        ([1], (1, 8), [(0, 1), (0, 1)], [4, 4]),
    ],
)
def test_cut(
    query_lens: list[int],
    padded: tuple[int, int] | None,
    requests: list[tuple[int, int]],
    tokens: list[int],
):
    num_reqs, num_tokens = padded or (None, None)
    batch = _make_batch(
        query_lens, num_reqs_padded=num_reqs, num_tokens_padded=num_tokens
    )
    slices = create_ubatch_slices(batch, num_ubatches=2)
    assert [(s.request_slice.start, s.request_slice.stop) for s in slices] == requests
    assert [s.num_tokens for s in slices] == tokens
    assert slices[0].token_slice.stop == slices[1].token_slice.start


class _Builder:
    """Keeps what it is given; `captures` is whether for a CUDA graph."""

    supports_update_block_table = False

    def __init__(self):
        self.metadata: list[CommonAttentionMetadata] = []
        self.captures: list[bool] = []

    def build(self, common_prefix_len: int, common_attn_metadata):
        self.metadata.append(common_attn_metadata)
        self.captures.append(False)
        return common_attn_metadata

    def build_for_cudagraph_capture(self, common_attn_metadata):
        self.build(0, common_attn_metadata)
        self.captures[-1] = True
        return common_attn_metadata


class _Runner(UBatchRunner):
    """The part of the runner that prepares a step, with one layer per group."""

    def __init__(self, **parallel_kwargs: Any):
        self.vllm_config = VllmConfig()
        self.parallel_config = ParallelConfig(enable_dbo=True, **parallel_kwargs)
        self.num_ubatches = 2
        self.dcp_size, self.dcp_rank, self.cp_interleave = 1, 0, 1
        model_state: Any = SimpleNamespace(
            max_model_len=MAX_MODEL_LEN, supports_mm_inputs=False, encoder_cache=None
        )
        model_state.prepare_attn = partial(DefaultModelState.prepare_attn, model_state)
        self.model_state = model_state
        self.builders = [[_Builder(), _Builder()] for _ in LAYERS]
        attn_groups: Any = [
            [SimpleNamespace(get_metadata_builder=b.__getitem__, layer_names=[layer])]
            for b, layer in zip(self.builders, LAYERS)
        ]
        self.attn_groups = attn_groups
        kv_cache_config: Any = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=[layer]) for layer in LAYERS]
        )
        self.kv_cache_config = kv_cache_config
        self.ubatch_query_start_loc = [
            torch.zeros(MAX_NUM_REQS + 1, dtype=torch.int32) for _ in range(2)
        ]
        self.ubatch_seq_lens = [
            torch.zeros(MAX_NUM_REQS, dtype=torch.int32) for _ in range(2)
        ]
        self.ubatch_dcp_local_seq_lens = [None, None]

    def parts(
        self, batch: InputBatch, cg_mode: CUDAGraphMode = NONE, **kwargs: Any
    ) -> list[Any]:
        """The forward contexts of a step; tokens and requests have own slots."""
        num_reqs, num_tokens = len(batch.query_start_loc_np) - 1, len(batch.input_ids)
        block_tables = tuple(
            torch.arange(num_reqs, dtype=torch.int32)[:, None] + 100 * group
            for group in range(len(LAYERS))
        )
        slot_mappings = torch.stack(
            [torch.arange(num_tokens) + 1000 * group for group in range(len(LAYERS))]
        )
        state = self.prepare(batch, block_tables, slot_mappings, cg_mode, **kwargs)
        return state.forward_contexts


def test_groups_with_one_spec_keep_their_own_metadata():
    """Two groups of layers, and parts with different numbers of requests."""
    runner = _Runner()
    parts = runner.parts(_make_batch([1, 1, 2, 8], [30, 40, 50, 60]))

    expected = [([0, 1, 2, 3], [30, 40, 50, 54], 0, 6), ([3], [60], 6, 12)]
    for i, (requests, seq_lens, start, stop) in enumerate(expected):
        for group, layer in enumerate(LAYERS):
            metadata = parts[i].attn_metadata[layer]
            assert metadata.num_reqs == len(requests)
            assert metadata.num_actual_tokens == stop - start
            assert metadata.seq_lens.tolist() == seq_lens
            assert metadata.max_seq_len == max(seq_lens)
            block_table = [r + 100 * group for r in requests]
            assert metadata.block_table_tensor[:, 0].tolist() == block_table
            slots = [t + 1000 * group for t in range(start, stop)]
            assert metadata.slot_mapping.tolist() == slots
            assert parts[i].slot_mapping[layer].tolist() == slots
            # Each part has builders of its own.
            assert runner.builders[group][i].metadata == [metadata]


def _true_tokens(batch: InputBatch) -> list[tuple[int, int]]:
    """The request and the position in it of each token."""
    tokens = []
    for req, (query_len, seq_len) in enumerate(
        zip(batch.num_scheduled_tokens.tolist(), batch.seq_lens.tolist())
    ):
        tokens += [(req, seq_len - query_len + i) for i in range(query_len)]
    return tokens


def test_parts_attend_as_the_batch_does():
    """Every token has its request, position, context and slot, in random batches."""
    rng = np.random.default_rng(0)
    runner = _Runner()
    for _ in range(200):
        query_lens = rng.choice([1, 1, 1, 2, 3, 30], rng.integers(1, 12)).tolist()
        seq_lens = [q + int(rng.integers(0, 50)) for q in query_lens]
        num_padding = int(rng.choice([0, 0, 1, 40]))
        if sum(query_lens) + num_padding < 2:
            continue
        batch = _make_batch(
            query_lens, seq_lens, num_tokens_padded=sum(query_lens) + num_padding
        )

        tokens: list[tuple[int, int]] = []
        slots: list[int] = []
        for part in runner.parts(batch):
            metadata = part.attn_metadata[LAYERS[0]]
            # Metadata and block table describe the same requests.
            assert metadata.block_table_tensor.shape[0] == metadata.num_reqs
            assert metadata.query_start_loc.shape[0] == metadata.num_reqs + 1
            assert torch.equal(metadata.query_start_loc, metadata.query_start_loc_cpu)
            query_lens = metadata.naive_query_lens().tolist()
            assert sum(query_lens) == metadata.num_actual_tokens
            for req, query_len, seq_len, bound in zip(
                metadata.block_table_tensor[:, 0].tolist(),
                query_lens,
                metadata.seq_lens.tolist(),
                metadata.seq_lens_cpu_upper_bound.tolist(),
            ):
                assert query_len <= metadata.max_query_len
                assert seq_len <= bound <= metadata.max_seq_len
                tokens += [(req, seq_len - query_len + i) for i in range(query_len)]
            slots += metadata.slot_mapping[: metadata.num_actual_tokens].tolist()
        assert tokens == _true_tokens(batch)
        assert slots == list(range(len(tokens)))


@pytest.mark.parametrize(
    "cg_mode, num_reqs, num_tokens",
    [(FULL, [4, 4], [4, 4]), (NONE, [4, 1], [4, 1])],
)
def test_only_a_full_graph_gets_padded_metadata(
    cg_mode: CUDAGraphMode, num_reqs: list[int], num_tokens: list[int]
):
    # Padded requests come with a FULL graph only.
    batch = _make_batch(
        [1] * 5, num_reqs_padded=8 if cg_mode == FULL else None, num_tokens_padded=8
    )
    parts = _Runner().parts(batch, cg_mode)
    for i, part in enumerate(parts):
        metadata = part.attn_metadata[LAYERS[0]]
        assert metadata.num_reqs == num_reqs[i]
        assert metadata.num_actual_tokens == num_tokens[i]
        assert metadata.block_table_tensor.shape[0] == num_reqs[i]
        assert metadata.query_start_loc.shape[0] == num_reqs[i] + 1
        # The model runs on the padding too.
        assert part.is_padding.shape[0] == 4
    is_padding = torch.cat([part.is_padding for part in parts]).tolist()
    assert is_padding == [False] * 5 + [True] * 3


def test_part_of_padding_only():
    first, second = _Runner().parts(_make_batch([1] * 4, [9] * 4, num_tokens_padded=10))
    assert first.is_padding.tolist() == [False] * 4 + [True]
    assert second.is_padding.tolist() == [True] * 5
    metadata = second.attn_metadata[LAYERS[0]]
    assert metadata.num_actual_tokens == 0
    assert metadata.naive_query_lens().tolist() == [0]
    assert metadata.seq_lens.tolist() == [9]


def test_replay_refreshes_what_was_captured():
    """A graph reads the buffers of its capture, whatever the later step holds."""
    runner = _Runner()
    dummy = InputBatch.make_dummy(
        8, 8, InputBuffers(MAX_NUM_REQS, 8, torch.device("cpu"))
    )
    captured = [
        part.attn_metadata[LAYERS[0]]
        for part in runner.parts(dummy, FULL, for_capture=True)
    ]
    # Captured for the longest sequence that it may replay.
    assert [m.max_seq_len for m in captured] == [MAX_MODEL_LEN] * 2
    assert all(b.captures == [True] for group in runner.builders for b in group)

    batch = _make_batch(
        [1] * 6, [11, 12, 13, 14, 15, 16], num_reqs_padded=8, num_tokens_padded=8
    )
    replayed = [p.attn_metadata[LAYERS[0]] for p in runner.parts(batch, FULL)]
    for before, after in zip(captured, replayed):
        for name in ("query_start_loc", "seq_lens"):
            before_tensor, after_tensor = getattr(before, name), getattr(after, name)
            assert before_tensor.data_ptr() == after_tensor.data_ptr()
            assert before_tensor.shape == after_tensor.shape
    assert captured[0].seq_lens.tolist() == [11, 12, 13, 14]
    assert captured[1].seq_lens.tolist() == [15, 16, 0, 0]
    assert captured[1].query_start_loc.tolist() == [0, 1, 2, 2, 2]
    pointers = {m.seq_lens.data_ptr() for m in captured}
    assert len(pointers) == 2


@pytest.mark.parametrize(
    "num_reqs, num_tokens", [(1, 2), (2, 5), (4, 4), (3, 6), (2, 64), (5, 33)]
)
def test_dummy_batch_is_as_long_as_its_descriptor(num_reqs: int, num_tokens: int):
    """Whole and in parts; a dummy batch stands for a padded one."""
    buffers = InputBuffers(MAX_NUM_REQS, num_tokens, torch.device("cpu"))
    batch = InputBatch.make_dummy(num_reqs, num_tokens, buffers)
    for tensor in (batch.input_ids, batch.positions, batch.is_padding):
        assert tensor.shape[0] == num_tokens
    parts = _Runner().parts(batch)
    assert sum(part.is_padding.shape[0] for part in parts) == num_tokens
    assert all(part.is_padding.all() for part in parts)
    for part in parts:
        metadata = part.attn_metadata[LAYERS[0]]
        assert metadata.num_actual_tokens == part.is_padding.shape[0]


class _DispatchError(Exception):
    """Ends a step at its dispatch."""


def _dispatch_args(num_scheduled_tokens: dict[str, int], **kwargs: Any) -> dict:
    """Run a dummy step up to its dispatch and return how that is called."""
    scheduler_output = SchedulerOutput.make_empty()
    scheduler_output.num_scheduled_tokens = num_scheduled_tokens
    scheduler_output.total_num_scheduled_tokens = sum(num_scheduled_tokens.values())
    runner: Any = SimpleNamespace(
        parallel_config=ParallelConfig(enable_dbo=True),
        ubatch_runner=object(),
        cudagraph_manager=None,
        dp_size=1,
        dp_rank=0,
        decode_query_len=1,
        lora_config=None,
        pcp_manager=None,
        is_encoder_decoder=False,
        _prefix_hits_allow_ubatching=lambda *args: True,
    )
    runner.gather_batch_req_state = partial(
        GPUModelRunner.gather_batch_req_state, runner
    )
    with (
        patch.object(
            model_runner, "dispatch_cg_and_sync_dp", side_effect=_DispatchError
        ) as dispatch,
        pytest.raises(_DispatchError),
    ):
        GPUModelRunner.execute_model(runner, scheduler_output, dummy_run=True, **kwargs)
    return dict(dispatch.call_args.kwargs)


def test_profile_run_is_not_split():
    """It sizes memory for the largest step, which may run whole."""
    runner = Mock(is_last_pp_rank=False, supports_mm_inputs=False, max_num_tokens=64)
    runner._dummy_run.return_value = (None, None)
    with patch.object(torch.accelerator, "synchronize"):
        GPUModelRunner.profile_run(runner)
    runner._dummy_run.assert_called_once()
    assert runner._dummy_run.call_args.args == (64,)
    assert runner._dummy_run.call_args.kwargs["skip_attn"]
    assert runner._dummy_run.call_args.kwargs["is_profile"]

    tokens = {str(i): 1 for i in range(64)}
    profile_args = _dispatch_args(tokens, skip_attn_for_dummy_run=True, is_profile=True)
    assert profile_args["need_eager"] and not profile_args["allow_ubatching"]
    assert _dispatch_args(tokens)["allow_ubatching"]


def test_prefills_of_decode_length_are_no_decodes():
    """Neither equal prompts as short as a decode, nor the ends of longer ones."""

    def is_decode(prefill_len: list[int], computed: list[int]) -> bool:
        num_reqs = len(prefill_len)
        runner: Any = SimpleNamespace(
            decode_query_len=1,
            adaptive_verification=None,
            use_pp=False,
            pcp_manager=None,
            req_states=SimpleNamespace(
                req_id_to_index={str(i): i for i in range(num_reqs)},
                prefill_len=SimpleNamespace(np=np.array(prefill_len)),
                num_computed_prefill_tokens=np.array(computed),
            ),
        )
        scheduler_output = SchedulerOutput.make_empty()
        scheduler_output.num_scheduled_tokens = {str(i): 1 for i in range(num_reqs)}
        scheduler_output.total_num_scheduled_tokens = num_reqs
        batch, uniform_token_count = GPUModelRunner.gather_batch_req_state(
            runner, scheduler_output, dummy_run=False
        )
        assert batch is not None
        return uniform_token_count == 1

    assert is_decode([1, 7], [1, 7])
    assert not is_decode([1, 1], [0, 0])
    assert not is_decode([7, 9], [6, 8])
    assert not is_decode([7, 9], [7, 8])


@pytest.mark.parametrize("tp_size", [2, 8])
@pytest.mark.parametrize("num_tokens", [5, 6, 16, 17])
def test_sequence_parallel_moe_pads_each_part(num_tokens: int, tp_size: int):
    """Each part runs its own all-gather, which needs equal shares of all ranks."""
    runner = _Runner(
        data_parallel_size=2,
        tensor_parallel_size=tp_size,
        enable_expert_parallel=True,
        all2all_backend="deepep_high_throughput",
    )
    assert runner.parallel_config.use_sequence_parallel_moe
    parts = runner.parts(_make_batch([num_tokens]))
    for part, part_tokens in zip(parts, [num_tokens // 2, -(-num_tokens // 2)]):
        assert part.dp_metadata.num_tokens_across_dp_cpu.tolist() == [part_tokens] * 2
        sizes = _compute_sp_num_tokens(
            part.dp_metadata.num_tokens_across_dp_cpu, tp_size
        )
        hidden_states = torch.ones(part_tokens, 4)
        for rank in range(tp_size):
            with (
                patch.object(
                    model_utils,
                    "get_tensor_model_parallel_rank",
                    lambda rank=rank: rank,
                ),
                patch.object(
                    model_utils, "get_tensor_model_parallel_world_size", lambda: tp_size
                ),
            ):
                chunk = model_utils.sequence_parallel_chunk_impl(hidden_states)
            assert chunk.shape[0] == sizes[rank]
