# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`torch.ops.vllm.manual_dbo_yield` hands off after each self-attention (DBO).

It has to hand off however the model is compiled, and to be absent where another
yield or no yield is wanted. `test_ubatching.py` has the fakes of the streams.
"""

import runpy
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.v1.worker.test_ubatching import TOKENS_PER_UBATCH, FakeCuda, V2Harness
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.worker import ubatching
from vllm.v1.worker.gpu import ubatch_utils
from vllm.v1.worker.ubatching import (
    UBatchContext,
    attention_layers_yield,
    dbo_current_ubatch_id,
)

pytestmark = pytest.mark.skip_global_cleanup

NUM_LAYERS = 3
OP = torch.ops.vllm.manual_dbo_yield.default


def _tensor() -> torch.Tensor:
    return torch.ones(4, device=current_platform.device_type)


def test_op_outside_of_a_microbatch_does_nothing():
    x = _tensor()
    assert torch.ops.vllm.manual_dbo_yield(x) is None
    assert torch.equal(x, torch.ones_like(x))


def test_op_in_another_thread_than_the_microbatches(monkeypatch: pytest.MonkeyPatch):
    """DBO may be running, but not in this thread."""
    monkeypatch.setattr(ubatching, "_THREAD_ID_TO_CONTEXT", {-1: 0})
    torch.ops.vllm.manual_dbo_yield(_tensor())


def test_op_is_well_defined():
    torch.library.opcheck(OP, (_tensor(),))
    assert OP._schema.arguments[0].alias_info.is_write
    assert torch.ops.vllm.manual_dbo_yield(torch.ones(4, device="meta")) is None


def test_module_can_be_executed_again():
    runpy.run_path(ubatching.__file__)
    assert torch.ops.vllm.manual_dbo_yield.default is OP


class Layers(torch.nn.Module):
    """Yields once a layer."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **kwargs):
        x = input_ids + positions
        for _ in range(NUM_LAYERS):
            residual = x
            x = x * 2
            torch.ops.vllm.manual_dbo_yield(x)
            x = x + residual
        return x


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> V2Harness:
    monkeypatch.setattr(ubatching, "_THREAD_ID_TO_CONTEXT", {})
    monkeypatch.setattr(ubatching, "_CURRENT_CONTEXTS", [])
    return V2Harness(FakeCuda(monkeypatch), 2, capture=False)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="the streams are fakes")
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "inductor"])
def test_microbatches_alternate_however_the_model_is_compiled(
    harness: V2Harness, monkeypatch: pytest.MonkeyPatch, backend: str | None
):
    model: Any = Layers()
    if backend is not None:
        torch._dynamo.reset()
        model = torch.compile(model, backend=backend, fullgraph=True)
        # As in vLLM, compile on the main thread, without microbatches.
        with torch.inference_mode():
            model(torch.arange(TOKENS_PER_UBATCH), torch.arange(TOKENS_PER_UBATCH))
    harness.model = model
    harness.expected = torch.arange(2 * TOKENS_PER_UBATCH) * 11 * 3**NUM_LAYERS

    yields: list[int] = []
    cpu_yield = UBatchContext._cpu_yield

    def counting_yield(self):
        yields.append(dbo_current_ubatch_id())
        cpu_yield(self)

    monkeypatch.setattr(UBatchContext, "_cpu_yield", counting_yield)
    for _ in range(3):
        yields.clear()
        harness.check_next_step()
        # Equally often, or one of them would wait for the other.
        assert yields == [0, 1] * NUM_LAYERS


@pytest.mark.parametrize("num_layers", [0, 1])
def test_warns_of_a_model_that_never_hands_off(
    harness: V2Harness, monkeypatch: pytest.MonkeyPatch, num_layers: int
):
    """A layer with a forward of its own may go past every yield."""

    def model(input_ids: torch.Tensor, positions: torch.Tensor, **kwargs):
        x = input_ids + positions
        for _ in range(num_layers):
            torch.ops.vllm.manual_dbo_yield(x)
        return x

    logger = Mock()
    monkeypatch.setattr(ubatch_utils, "logger", logger)
    harness.model = model  # type: ignore[assignment]
    harness.expected = torch.arange(2 * TOKENS_PER_UBATCH) * 11
    harness.check_next_step()
    assert logger.warning_once.called == (num_layers == 0)


@pytest.mark.parametrize(
    "expected, kwargs",
    [
        (False, {}),
        (True, {"enable_dbo": True}),
        (True, {"ubatch_size": 2}),
        (True, {"enable_dbo": True, "is_moe_model": True}),
        (True, {"enable_dbo": True, "tensor_parallel_size": 2, "is_moe_model": True}),
        # The expert all2all yields in the same layer.
        (False, {"enable_dbo": True, "data_parallel_size": 2, "is_moe_model": True}),
        (True, {"enable_dbo": True, "data_parallel_size": 2, "is_moe_model": False}),
        (False, {"data_parallel_size": 2, "is_moe_model": False}),
    ],
)
def test_one_yield_per_layer(expected: bool, kwargs: dict[str, Any]):
    vllm_config: Any = SimpleNamespace(parallel_config=ParallelConfig(**kwargs))
    assert attention_layers_yield(vllm_config) is expected


# What the attention layers of CPUs read of it.
_MODEL_CONFIG: Any = SimpleNamespace(
    dtype=torch.float32,
    is_mm_prefix_lm=False,
    rswa_window=None,
    hf_text_config=None,
)


def _make_attention(attn_type: str = AttentionType.DECODER) -> Attention:
    return Attention(
        num_heads=2, head_size=64, scale=1.0, prefix="layers.0", attn_type=attn_type
    )


def _make_mla_attention() -> MLAAttention:
    kv_b_proj: Any = torch.nn.Linear(512, 256, bias=False)
    return MLAAttention(
        num_heads=2,
        scale=1.0,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        q_lora_rank=None,
        kv_lora_rank=512,
        kv_b_proj=kv_b_proj,
        prefix="layers.0",
    )


def _num_traced_yields(layer: torch.nn.Module, *inputs: torch.Tensor, **kwargs) -> int:
    """Count the op in the graph that `torch.compile` makes of `layer`."""
    targets: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs):
        targets.extend(node.target for node in gm.graph.nodes)
        # Attention cannot run without a KV cache.
        return lambda *args: (torch.empty(4, 128),)

    torch._dynamo.reset()
    torch.compile(layer, backend=backend, fullgraph=True)(*inputs, **kwargs)
    assert any("unified" in str(target) for target in targets)
    return sum("manual_dbo_yield" in str(target) for target in targets)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="needs a fixed backend")
@pytest.mark.parametrize("enable_dbo", [True, False])
@pytest.mark.parametrize("layer", ["attention", "mla"])
def test_graph_has_the_op_with_dbo_only(layer: str, enable_dbo: bool):
    vllm_config = VllmConfig()
    vllm_config.parallel_config = ParallelConfig(enable_dbo=enable_dbo)
    vllm_config.model_config = _MODEL_CONFIG
    with set_current_vllm_config(vllm_config):
        if layer == "attention":
            attn: torch.nn.Module = _make_attention()
            inputs = [torch.empty(4, 128)] * 3
            kwargs = {}
        else:
            attn = _make_mla_attention()
            inputs = [
                torch.empty(4, 2, 128),
                torch.empty(4, 512),
                torch.empty(4, 1, 64),
            ]
            kwargs = {"output_shape": (4, 128)}
        assert _num_traced_yields(attn, *inputs, **kwargs) == int(enable_dbo)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="needs a fixed backend")
def test_encoder_attention_does_not_yield():
    vllm_config = VllmConfig()
    vllm_config.parallel_config = ParallelConfig(enable_dbo=True)
    vllm_config.model_config = _MODEL_CONFIG
    with set_current_vllm_config(vllm_config):
        assert not _make_attention(AttentionType.ENCODER_ONLY).use_dbo_yield


def test_compile_cache_tells_the_graphs_apart():
    assert (
        ParallelConfig(enable_dbo=True).compute_hash()
        != ParallelConfig(enable_dbo=False).compute_hash()
    )
