# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Each AFD role builds and loads its part of a model, and both make the whole."""

import gc
import json
import sys
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.afd.conftest import (
    connect,
    load,
    logits,
    role_config,
)
from tests.model_executor.afd.tiny_models import TESTED
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.afd import (
    describe_moe_layers,
    model_facts,
    moe_runners,
    run_ffn_layer,
)
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.utils import (
    _model_to_pp_missing_layer_names,
    is_pp_missing_parameter,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="compares logits of CPU kernels"
)


def check_pair(whole, ffn, attention) -> None:
    assert describe_moe_layers(ffn.config, ffn.model) == describe_moe_layers(
        attention.config, attention.model
    )
    assert model_facts(ffn.config) == model_facts(attention.config)
    assert ffn.names | attention.names == whole.names
    # Only what a router reads is on both, with the module that owns it.
    for name in ffn.names & attention.names:
        assert name.endswith(
            (".e_score_correction_bias", ".expert_bias", ".per_expert_scale")
        ) or name.removesuffix("weight") + "e_score_correction_bias" in (
            ffn.names & attention.names
        )
    for role in (ffn, attention):
        assert not any(p.is_meta for p in role.model.parameters())
        context = role.config.compilation_config.static_forward_context
        moe_layers = [n for n, m in context.items() if isinstance(m, MoERunner)]
        assert moe_layers == role.config.compilation_config.static_all_moe_layers
        if role is ffn:
            assert len(context) == len(moe_layers)
        else:
            assert set(context) == set(
                whole.config.compilation_config.static_forward_context
            )


@pytest.mark.parametrize("gate_placement", ["auto", "attention"])
@pytest.mark.parametrize("architecture", sorted(TESTED))
def test_both_roles_give_the_logits_of_the_whole_model(
    architecture, gate_placement, roles, tiny_model
):
    folder = tiny_model(architecture)
    whole = load(folder, None)
    expected = logits(whole)
    assert expected.isfinite().all()
    ffn = load(folder, "ffn", gate_placement=gate_placement)
    attention = load(folder, "attention", gate_placement=gate_placement)
    check_pair(whole, ffn, attention)
    served = connect(ffn, attention)
    torch.testing.assert_close(logits(attention), expected, atol=1e-5, rtol=0)
    assert served == list(range(len(moe_runners(ffn.config))))
    if gate_placement == "attention":
        layers = describe_moe_layers(ffn.config, ffn.model)
        assert not any(layer.gate_on_ffn for layer in layers)


def test_gate_on_ffn_where_the_model_hands_it_over(roles, tiny_model):
    for architecture, on_ffn in {
        "Qwen3MoeForCausalLM": True,
        "MixtralForCausalLM": False,
    }.items():
        ffn = load(tiny_model(architecture), "ffn", gate_placement="auto")
        for layer in describe_moe_layers(ffn.config, ffn.model):
            assert layer.gate_on_ffn is on_ffn
            assert layer.logits_size == (0 if on_ffn else 8)


def test_what_a_role_misses_is_forgotten_with_its_model(roles, tiny_model):
    ffn = load(tiny_model("Llama4ForCausalLM"), "ffn")
    layers = ffn.model.model.layers
    assert is_pp_missing_parameter("0.input_layernorm.weight", layers)
    known = len(_model_to_pp_missing_layer_names)
    del ffn, layers
    gc.collect()
    assert len(_model_to_pp_missing_layer_names) < known


@pytest.mark.parametrize("role", ["ffn", "attention"])
def test_gate_on_ffn_is_refused_where_the_model_runs_it(role, roles, tiny_model):
    with pytest.raises(ValueError, match="MixtralForCausalLM.*gate_placement='ffn'"):
        load(tiny_model("MixtralForCausalLM"), role, gate_placement="ffn")


@pytest.mark.parametrize("role", ["ffn", "attention"])
def test_transformers_backend_is_refused(role, roles, tiny_model):
    with pytest.raises(ValueError, match="does not support FlexOlmoForCausalLM"):
        load(tiny_model("FlexOlmoForCausalLM"), role)


@pytest.mark.parametrize("role", ["ffn", "attention"])
def test_zero_experts_are_refused(role, roles, tiny_model):
    with pytest.raises(ValueError, match="LongcatFlashForCausalLM.*zero experts"):
        load(tiny_model("LongcatFlashForCausalLM"), role)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_routed_scaling_in_half_precision(dtype, roles, tiny_model):
    # In float16 DeepSeek scales the shared experts down instead, which run on FFN,
    # and the decoder layer, which runs on attention, makes up for it.
    folder = tiny_model("DeepseekV2ForCausalLM")
    expected = logits(load(folder, None, dtype=dtype))
    attention = load(folder, "attention", dtype=dtype)
    connect(load(folder, "ffn", dtype=dtype), attention)
    actual = logits(attention)
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=0)


def test_router_logits_of_another_type_than_the_model(roles, tiny_model):
    folder = tiny_model("Glm4MoeForCausalLM")
    expected = logits(load(folder, None, dtype="bfloat16"))
    ffn = load(folder, "ffn", dtype="bfloat16")
    attention = load(folder, "attention", dtype="bfloat16")
    connect(ffn, attention)
    actual = logits(attention)
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=0)
    layers = describe_moe_layers(ffn.config, ffn.model)
    assert {layer.logits_dtype for layer in layers} == {"float32"}


def test_tied_embeddings(roles, tiny_model):
    folder = tiny_model("Qwen3MoeForCausalLM", tie_word_embeddings=True)
    expected = logits(load(folder, None))
    ffn = load(folder, "ffn")
    assert not any("embed_tokens" in n or "lm_head" in n for n in ffn.names)
    attention = load(folder, "attention")
    connect(ffn, attention)
    torch.testing.assert_close(logits(attention), expected, atol=1e-5, rtol=0)


def test_attention_never_allocates_experts(roles, tiny_model, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("experts were allocated")

    monkeypatch.setattr(UnquantizedFusedMoEMethod, "create_weights", fail)
    for architecture in ("Qwen3MoeForCausalLM", "GptOssForCausalLM"):
        load(tiny_model(architecture), "attention")


def build(folder, role):
    config = role_config(folder, role)
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        return initialize_model(config)


@pytest.mark.parametrize("role", ["ffn", "attention"])
def test_construction_peaks_at_one_layer_over_what_is_kept(
    role, roles, tiny_model, monkeypatch
):
    folder = tiny_model("DeepseekV2ForCausalLM", num_hidden_layers=6)
    whole = build(folder, None)
    layer = max(
        sum(p.nbytes for p in layer.parameters()) for layer in whole.model.layers
    )
    del whole
    live: list[weakref.ref] = []
    peak = 0
    register = torch.nn.Module.register_parameter

    def count(module, name, param):
        nonlocal peak
        register(module, name, param)
        if param is not None:
            live.append(weakref.ref(param))
        params = {id(p): p for ref in live if (p := ref()) is not None}
        size = sum(p.nbytes for p in params.values() if not p.is_meta)
        peak = max(peak, size)

    monkeypatch.setattr(torch.nn.Module, "register_parameter", count)
    # Nothing is freed by chance.
    gc.disable()
    try:
        built = build(folder, role)
    finally:
        gc.enable()
    kept = sum(p.nbytes for p in built.parameters())
    assert kept <= peak <= kept + layer


@pytest.mark.parametrize(
    ("architecture", "role", "weight"),
    [
        # AutoWeightsLoader
        ("Qwen3MoeForCausalLM", "ffn", "model.layers.0.mlp.experts.7.down_proj.weight"),
        ("Qwen3MoeForCausalLM", "ffn", "model.layers.0.mlp.gate.weight"),
        ("Qwen3MoeForCausalLM", "attention", "model.layers.0.self_attn.k_proj.weight"),
        ("Qwen3MoeForCausalLM", "attention", "model.layers.0.self_attn.v_proj.weight"),
        ("Qwen3MoeForCausalLM", "attention", "model.norm.weight"),
        # Loaders written by hand
        ("DeepseekV3ForCausalLM", "ffn", "model.layers.2.mlp.experts.0.up_proj.weight"),
        (
            "DeepseekV3ForCausalLM",
            "ffn",
            "model.layers.1.mlp.gate.e_score_correction_bias",
        ),
        (
            "DeepseekV3ForCausalLM",
            "ffn",
            "model.layers.1.mlp.shared_experts.up_proj.weight",
        ),
        ("DeepseekV3ForCausalLM", "attention", "model.layers.0.mlp.down_proj.weight"),
        ("DeepseekV3ForCausalLM", "attention", "lm_head.weight"),
    ],
)
def test_a_missing_weight_fails_the_role_that_needs_it(
    architecture, role, weight, roles, tiny_model, tmp_path
):
    source = tiny_model(architecture)
    for path in source.iterdir():
        if path.suffix == ".json" and path.name != "model.safetensors.index.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(source / "model.safetensors")
    del weights[weight]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks weights|not initialized"):
        load(tmp_path, role)
    other = "attention" if role == "ffn" else "ffn"
    load(tmp_path, other)


def test_values_that_are_the_keys_are_not_missed(roles, tiny_model):
    folder = tiny_model("Gemma4ForCausalLM", attention_k_eq_v=True)
    assert not any("v_proj" in name for name in load_file(folder / "model.safetensors"))
    expected = logits(load(folder, None))
    attention = load(folder, "attention")
    connect(load(folder, "ffn"), attention)
    torch.testing.assert_close(logits(attention), expected, atol=1e-5, rtol=0)


def test_facts_tell_models_and_not_places_apart(roles, tiny_model, tmp_path):
    def facts_of(folder, **kwargs):
        return model_facts(role_config(folder, "ffn", **kwargs))

    def differences(folder, **kwargs):
        other = facts_of(folder, **kwargs)
        assert facts.keys() == other.keys()
        return [name for name in facts if facts[name] != other[name]]

    folder = tiny_model("Qwen3MoeForCausalLM")
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    facts = facts_of(folder)
    assert facts["architecture"] == "Qwen3MoeForCausalLM"
    assert facts["config.hidden_size"] == "128"
    assert max(len(value) for value in facts.values()) <= 80
    assert differences(tmp_path) == []
    assert differences(folder, load_format="safetensors") == []
    assert differences(folder, load_format="dummy") == ["load_format is dummy"]
    weights = load_file(tmp_path / "model.safetensors")
    trained = {k: 1.01 * v if "experts" in k else v for k, v in weights.items()}
    save_file(trained, tmp_path / "model.safetensors", {"format": "pt"})
    assert differences(tmp_path) == ["weights"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert differences(tmp_path) == []
    config = json.loads((tmp_path / "config.json").read_text())
    config["rms_norm_eps"] *= 10
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert differences(tmp_path) == ["config.rms_norm_eps"]
    weights["lm_head.weight"] = weights["lm_head.weight"].bfloat16()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert differences(tmp_path) == ["weights", "config.rms_norm_eps"]


def test_without_afd_nothing_of_it_is_used(roles, tiny_model):
    for name in [n for n in sys.modules if "afd_moe_runner" in n]:
        del sys.modules[name]
    whole = load(tiny_model("Qwen3MoeForCausalLM"), None)
    assert not any("afd_moe_runner" in name for name in sys.modules)
    assert type(whole.model) is Qwen3MoeForCausalLM
    assert not hasattr(whole.model, "afd_layers")
    runners = [m for m in whole.model.modules() if isinstance(m, MoERunner)]
    assert {type(runner) for runner in runners} == {MoERunner}


@pytest.mark.parametrize("role", ["ffn", "attention"])
def test_configs_stay_the_same_objects(role, roles, tiny_model):
    loaded = load(tiny_model("Qwen3MoeForCausalLM"), role)
    model_config = loaded.config.model_config
    assert model_config.hf_text_config is model_config.hf_config
    assert loaded.model.config is model_config.hf_config
    assert model_config.get_num_experts() == 8


def test_ffn_output_is_memory_of_its_own(roles, tiny_model):
    ffn = load(tiny_model("Qwen3MoeForCausalLM"), "ffn")

    class InPlace(torch.nn.Module):
        def forward(self, hidden_states, router_logits):
            return hidden_states.mul_(2)

    slot = torch.ones(4, 128)
    with set_forward_context(None, ffn.config, num_tokens=2):
        output = run_ffn_layer(InPlace(), slot[:2], None)
        slot.fill_(7)
        assert output.eq(2).all()
        empty = run_ffn_layer(moe_runners(ffn.config)[0], slot[:0], None)
    assert empty.shape == (0, 128)


def test_model_of_an_old_class_is_refused(roles, tiny_model):
    config = role_config(tiny_model("Qwen3MoeForCausalLM"), "attention")
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM.*take a vllm_config"):
        describe_moe_layers(config, torch.nn.Module())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("gate_placement", ["auto", "attention"])
def test_compiled_attention_role(backend, gate_placement, roles, tiny_model):
    folder = tiny_model("Qwen3MoeForCausalLM")
    ffn = load(folder, "ffn", gate_placement=gate_placement)
    attention = load(folder, "attention", gate_placement=gate_placement)
    connect(ffn, attention)
    expected = logits(attention)
    served = connect(ffn, attention)
    compiled = torch.compile(attention.model.model, backend=backend, fullgraph=True)
    actual = logits(attention, run=compiled)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    assert served == [0, 1]


def test_narrow_router_logits_travel_in_the_type_announced(roles, tiny_model):
    # As BailingMoe: a gate of its own type, whose logits become the model's type.
    folder = tiny_model("MixtralForCausalLM")
    attention = load(folder, "attention")
    connect(load(folder, "ffn"), attention)
    expected = logits(attention)
    sent = []
    for runner in attention.model.modules():
        if isinstance(runner, MoERunner):
            forward = runner._forward_impl

            def narrow(hidden, router_logits, *args, forward=forward):
                sent.append(router_logits.bfloat16().dtype)
                return forward(hidden, router_logits.bfloat16(), *args)

            runner._forward_impl = narrow  # type: ignore[method-assign]
    actual = logits(attention)
    assert sent == [torch.bfloat16] * 3
    torch.testing.assert_close(actual, expected, atol=0.5, rtol=0)


def test_router_logits_wider_than_announced_are_refused(roles, tiny_model):
    folder = tiny_model("MixtralForCausalLM")
    attention = load(folder, "attention")
    connect(load(folder, "ffn"), attention)
    runner = next(m for m in attention.model.modules() if isinstance(m, MoERunner))
    with pytest.raises(ValueError, match="MixtralForCausalLM.*float64.*float32"):
        runner._forward_impl(torch.ones(2, 128), torch.ones(2, 8).double(), None)
    with pytest.raises(ValueError, match="MixtralForCausalLM.*takes more than"):
        runner(torch.ones(2, 128), torch.ones(2, 8), input_ids=torch.ones(2))
