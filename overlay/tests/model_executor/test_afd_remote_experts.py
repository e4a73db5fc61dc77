# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The cut of a model between the AFD roles, without a model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config import AFDConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor import afd
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.afd_moe_runner import (
    AFDRemoteMoERunner,
    AFDRemoteRoutedExperts,
    select_moe_classes,
)
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

pytestmark = pytest.mark.cpu_test


class OwnRunner(MoERunner):
    pass


class OwnExperts(RoutedExperts):
    pass


def config_of(role: str) -> VllmConfig:
    vllm_config = VllmConfig()
    vllm_config.afd_config = AFDConfig(afd_role=role)
    return vllm_config


def bare_layer(name: str) -> AFDRemoteMoERunner:
    """A layer without a model around it."""
    layer = AFDRemoteMoERunner.__new__(AFDRemoteMoERunner)
    torch.nn.Module.__init__(layer)
    layer.layer_name = name
    layer.afd_layer_index = 3
    layer.afd_gate_on_ffn = True
    return layer


def test_each_instance_of_a_process_has_an_exchange_of_its_own():
    configs, layers = [], []
    for i in range(2):
        config = config_of("attention")
        layers.append(bare_layer(f"layers.{i}"))
        config.compilation_config.static_forward_context["layer"] = layers[i]
        config.compilation_config.static_all_moe_layers = ["layer"]
        configs.append(config)
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="layers.0 .*no FFN role is connected"):
        layers[0]._forward_impl(x, x, None)

    for config, factor in zip(configs, (10, 20)):

        def exchange(i, x, logits, f=factor):
            return x * f + i

        afd.set_afd_exchange(config, exchange)
    assert layers[0]._forward_impl(x, x, None).eq(13).all()
    afd.set_afd_exchange(configs[0], None)
    assert layers[1]._forward_impl(x, x, None).eq(23).all()
    with pytest.raises(RuntimeError, match="no FFN role is connected"):
        layers[0]._forward_impl(x, x, None)


@pytest.mark.parametrize("runner_cls", [None, MoERunner])
@pytest.mark.parametrize("experts_cls", [None, OwnExperts])
def test_attention_builds_remote_layers(runner_cls, experts_cls):
    with set_current_vllm_config(config_of("attention")):
        chosen = select_moe_classes(runner_cls, experts_cls, {"key": 1})
    assert chosen == (AFDRemoteMoERunner, AFDRemoteRoutedExperts, None)


@pytest.mark.parametrize("experts_cls", [None, OwnExperts])
def test_ffn_builds_what_the_model_asks_for(experts_cls):
    with set_current_vllm_config(config_of("ffn")):
        chosen = select_moe_classes(None, experts_cls, {"key": 1})
    assert chosen == (None, experts_cls, {"key": 1})


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_a_runner_of_the_models_own_is_refused_by_name(role):
    vllm_config = config_of(role)
    with set_current_vllm_config(vllm_config):
        vllm_config.model_config = SimpleNamespace(
            architecture="OddForCausalLM", model="some/odd-model"
        )
        with pytest.raises(ValueError, match="OddForCausalLM.*OwnRunner"):
            select_moe_classes(OwnRunner, None, None)


@pytest.mark.parametrize("gate_on_ffn", [False, True])
def test_ffn_layer_gets_the_logits_unless_it_has_the_gate(gate_on_ffn):
    hidden_states, logits = torch.randn(3, 8), torch.randn(3, 4)
    calls = []

    def runner(hidden_states: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        calls.append(logits)
        return hidden_states * 2

    with set_forward_context(None, VllmConfig(), num_tokens=3):
        output = afd.run_ffn_layer(
            runner, hidden_states.clone(), None if gate_on_ffn else logits
        )
    torch.testing.assert_close(output, hidden_states * 2)
    assert len(calls) == 1
    assert (calls[0] is logits) is not gate_on_ffn


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, :4]])
def test_ffn_output_does_not_share_the_slot_of_its_input(view):
    hidden_states = torch.randn(3, 8)
    with set_forward_context(None, VllmConfig(), num_tokens=3):
        output = afd.run_ffn_layer(lambda x, _: view(x), hidden_states, None)
    expected = view(hidden_states).clone()
    hidden_states.zero_()
    torch.testing.assert_close(output, expected)


def test_ffn_layer_of_no_rows_does_not_compute():
    def runner(*args: Any) -> torch.Tensor:
        raise AssertionError("called")

    with set_forward_context(None, VllmConfig(), num_tokens=0):
        output = afd.run_ffn_layer(runner, torch.empty(0, 8), torch.empty(0, 4))
    assert output.shape == (0, 8)
