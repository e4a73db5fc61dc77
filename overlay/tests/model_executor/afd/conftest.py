# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.model_executor.afd.tiny_models import make_tiny_model
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.afd import (
    describe_moe_layers,
    moe_runners,
    run_ffn_layer,
    set_afd_exchange,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model_loader


@dataclass
class Loaded:
    """A loaded model, or the part of it that one role loads.

    Attributes:
        names: Its parameters before they are processed for the kernels.

    """

    config: VllmConfig
    model: nn.Module
    names: set[str]


def _attend(self, query, key, value, *args, **kwargs) -> torch.Tensor:
    """Causal attention of one sequence, without a KV cache."""

    def heads(tensor: torch.Tensor, count: int) -> torch.Tensor:
        return tensor.view(len(query), count, -1).transpose(0, 1).float()

    repeat = self.num_heads // self.num_kv_heads
    output = nn.functional.scaled_dot_product_attention(
        heads(query, self.num_heads),
        heads(key, self.num_kv_heads).repeat_interleave(repeat, 0),
        heads(value, self.num_kv_heads).repeat_interleave(repeat, 0),
        is_causal=True,
    )
    return output.transpose(0, 1).reshape(len(query), -1).to(query.dtype)


@pytest.fixture
def roles(dist_init, monkeypatch):
    """Attention that needs no KV cache."""
    monkeypatch.setattr(Attention, "forward", _attend)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Callable[..., Path]:
    made: dict[tuple, Path] = {}

    def make(architecture: str, **overrides) -> Path:
        key = (architecture, str(overrides))
        if key not in made:
            folder = tmp_path_factory.mktemp(architecture)
            made[key] = make_tiny_model(architecture, folder, **overrides)
        return made[key]

    return make


def role_config(folder: Path, role: str | None, **kwargs) -> VllmConfig:
    gate = kwargs.pop("gate_placement", "auto")
    afd = None if role is None else {"afd_role": role, "gate_placement": gate}
    # Model Runner V2 needs Triton; the models do not.
    with (
        patch("vllm.config.afd.HAS_TRITON", True),
        patch("vllm.config.vllm.HAS_TRITON", True),
    ):
        return EngineArgs(
            model=str(folder),
            afd_config=afd,
            dtype=kwargs.pop("dtype", "float32"),
            enforce_eager=True,
            max_model_len=256,
            skip_tokenizer_init=True,
            **kwargs,
        ).create_engine_config()


def load(folder: Path, role: str | None, **kwargs) -> Loaded:
    config = role_config(folder, role, **kwargs)
    loader = get_model_loader(config.load_config)
    names = set[str]()
    load_weights = loader.load_weights

    def record(model: nn.Module, model_config) -> None:
        names.update(n for n, _ in model.named_parameters(remove_duplicate=False))
        load_weights(model, model_config)

    with set_current_vllm_config(config), patch.object(loader, "load_weights", record):
        model = loader.load_model(vllm_config=config, model_config=config.model_config)
    return Loaded(config, model, names)


def connect(ffn: Loaded, attention: Loaded) -> list[int]:
    """Let the exchanges of `attention` run on `ffn`; returns the layers served."""
    layers = describe_moe_layers(ffn.config, ffn.model)
    runners = moe_runners(ffn.config)
    served: list[int] = []

    def exchange(layer, hidden_states, router_logits):
        served.append(layer)
        if layers[layer].gate_on_ffn:
            assert router_logits is None
        else:
            assert router_logits.shape[1] == layers[layer].logits_size
            assert str(router_logits.dtype) == f"torch.{layers[layer].logits_dtype}"
        with set_forward_context(None, ffn.config, num_tokens=len(hidden_states)):
            return run_ffn_layer(runners[layer], hidden_states.clone(), router_logits)

    set_afd_exchange(attention.config, exchange)
    return served


def logits(loaded: Loaded, rows: int = 9, run: Callable | None = None) -> torch.Tensor:
    ids = torch.arange(5, 5 + rows) * 7 % 200
    with (
        set_current_vllm_config(loaded.config),
        set_forward_context(None, loaded.config, num_tokens=rows),
        torch.inference_mode(),
    ):
        run = loaded.model if run is None else run
        hidden = run(input_ids=ids, positions=torch.arange(rows))
        return loaded.model.compute_logits(hidden)
