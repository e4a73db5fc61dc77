# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layouts of query and key that rotary embedding has to take on CPU."""

from collections.abc import Callable

import pytest
import torch

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed

if not current_platform.is_cpu():
    pytest.skip("skipping CPU-only tests", allow_module_level=True)

HEAD_SIZE = 64
NUM_Q_HEADS = 5
NUM_KV_HEADS = 3
MAX_POSITION = 97


def _contiguous(num_tokens: int, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_tokens, num_heads, HEAD_SIZE, dtype=dtype)


def _end_of_head(num_tokens: int, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """The rope part of heads that begin with a part without, as q_pe of MLA."""
    x = torch.randn(num_tokens, num_heads, HEAD_SIZE + 24, dtype=dtype)
    return x[..., 24:]


def _end_of_row(num_tokens: int, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Adjacent heads at the end of a wider row, as k_pe of MLA with one head."""
    x = torch.randn(num_tokens, 40 + num_heads * HEAD_SIZE, dtype=dtype)
    return x[:, 40:].unflatten(-1, (num_heads, HEAD_SIZE))


def _heads_first(num_tokens: int, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    # Spare rows: a kernel that takes the heads for tokens stays in bounds.
    x = torch.randn(max(num_heads, num_tokens), num_tokens, HEAD_SIZE, dtype=dtype)
    return x[:num_heads].transpose(0, 1)


def _every_other_element(
    num_tokens: int, num_heads: int, dtype: torch.dtype
) -> torch.Tensor:
    return torch.randn(num_tokens, num_heads, HEAD_SIZE * 2, dtype=dtype)[..., ::2]


# (num_tokens, num_kv_heads); no key where num_kv_heads is None
SHAPES = [(0, 1), (1, None), (1, NUM_KV_HEADS), (2, 1), (7, NUM_KV_HEADS), (33, 1)]
LAYOUTS = [_contiguous, _end_of_head, _end_of_row, _heads_first, _every_other_element]


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    return False


def _make_rope(
    is_neox_style: bool, rotary_dim: int, dtype: torch.dtype
) -> RotaryEmbedding:
    return RotaryEmbedding(
        HEAD_SIZE, rotary_dim, MAX_POSITION, 10000, is_neox_style, dtype
    )


def _base_outside(view: torch.Tensor) -> torch.Tensor:
    """The elements of the storage of view that view does not cover."""
    storage = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    mask = torch.ones_like(storage, dtype=torch.bool)
    mask.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    return storage[mask]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("rotary_dim", [HEAD_SIZE, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_head_dim_views_match_flat_rows(
    default_vllm_config,
    layout: Callable[[int, int, torch.dtype], torch.Tensor],
    is_neox_style: bool,
    rotary_dim: int,
    dtype: torch.dtype,
) -> None:
    """[num_tokens, num_heads, head_size] is rotated in place, with the bits of
    contiguous [num_tokens, num_heads * head_size], and nothing else is."""
    set_random_seed(0)
    rope = _make_rope(is_neox_style, rotary_dim, dtype)
    for num_tokens, num_kv_heads in SHAPES:
        positions = torch.randint(0, MAX_POSITION, (num_tokens,))
        tensors = [layout(num_tokens, NUM_Q_HEADS, dtype)]
        if num_kv_heads is not None:
            tensors.append(layout(num_tokens, num_kv_heads, dtype))
        flat = [x.flatten(1).clone() for x in tensors]
        outside = [_base_outside(x) for x in tensors]

        returned = rope.forward_cpu(positions, *tensors)
        rope.forward_cpu(positions, *flat)

        assert num_kv_heads is not None or returned[1] is None
        for x, out, expected, before in zip(tensors, returned, flat, outside):
            assert out is x
            torch.testing.assert_close(x.flatten(1), expected, rtol=0, atol=0)
            torch.testing.assert_close(_base_outside(x), before, rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_neox_style", [True, False])
@torch.inference_mode()
def test_head_dim_views_match_native(
    default_vllm_config,
    layout: Callable[[int, int, torch.dtype], torch.Tensor],
    is_neox_style: bool,
) -> None:
    """As above, against an implementation that does not share the kernel."""
    set_random_seed(0)
    rope = _make_rope(is_neox_style, 24, torch.float32)
    positions = torch.randint(0, MAX_POSITION, (11,))
    query = layout(11, NUM_Q_HEADS, torch.float32)
    key = layout(11, NUM_KV_HEADS, torch.float32)

    expected = rope.forward_native(positions, query.clone(), key.clone())
    rope.forward_cpu(positions, query, key)

    torch.testing.assert_close(query, expected[0])
    torch.testing.assert_close(key, expected[1])


@pytest.mark.parametrize("has_head_dim", [True, False])
@pytest.mark.parametrize("is_slice", [True, False])
@torch.inference_mode()
def test_batched_positions(
    default_vllm_config, has_head_dim: bool, is_slice: bool
) -> None:
    """[batch, seq, ...], contiguous and cut out of longer sequences."""
    set_random_seed(0)
    rope = _make_rope(True, HEAD_SIZE, torch.float32)
    positions = torch.randint(0, MAX_POSITION, (3, 7))
    seq_len = 9 if is_slice else 7
    query = torch.randn(3, seq_len, NUM_Q_HEADS, HEAD_SIZE)[:, :7]
    if not has_head_dim:
        query = query.flatten(2)
    flat = query.reshape(21, -1).clone()

    rope.forward_cpu(positions, query)
    rope.forward_cpu(positions.flatten(), flat)

    torch.testing.assert_close(query.reshape(21, -1), flat, rtol=0, atol=0)


@torch.inference_mode()
def test_flat_rows_reach_the_kernel_uncopied(default_vllm_config, monkeypatch) -> None:
    """The layouts the kernel takes as they are must not pay for the others."""
    from vllm import _custom_ops as ops

    seen: list[int] = []
    monkeypatch.setattr(
        ops,
        "rotary_embedding",
        lambda positions, query, key, *args: seen.extend(
            (query.data_ptr(), key.data_ptr())
        ),
    )
    rope = _make_rope(True, HEAD_SIZE, torch.float32)
    positions = torch.zeros(7, dtype=torch.long)
    qkv = torch.randn(7, 3 * HEAD_SIZE)
    query, key = qkv[:, :HEAD_SIZE], qkv[:, HEAD_SIZE:]
    k_pe = _end_of_row(7, 1, torch.float32)

    rope.forward_cpu(positions, query, key)
    rope.forward_cpu(positions, _contiguous(7, 2, torch.float32), k_pe)

    assert seen[:2] == [query.data_ptr(), key.data_ptr()]
    assert seen[3] == k_pe.data_ptr()
