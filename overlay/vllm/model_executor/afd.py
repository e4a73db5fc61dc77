# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The cut of a model between the two roles of attention-FFN disaggregation (AFD).

A model is cut at its MoE runners. The FFN role keeps the runners with what they own
(routed experts, and the gate and shared experts a model hands to them); the
attention role keeps all the rest and calls the FFN role where a runner would
compute. No model file knows about it. `model_loader/afd.py` builds the two halves.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from safetensors import safe_open
from torch import nn

from vllm.distributed.afd_transfer.messages import AFDLayerInfo
from vllm.forward_context import get_forward_context
from vllm.transformers_utils.repo_utils import hf_api

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

# (index of the MoE layer, hidden states, router logits or None) -> layer's output
AFDExchange = Callable[[int, torch.Tensor, torch.Tensor | None], torch.Tensor]


def refuse(vllm_config: "VllmConfig", reason: str) -> NoReturn:
    """Raise the error for a model that AFD cannot cut."""
    model = vllm_config.model_config
    raise ValueError(
        f"--afd-config does not support {model.architecture} ({model.model}): {reason}."
    )


def gate_runs_on_ffn(vllm_config: "VllmConfig", gate: nn.Module | None) -> bool:
    """Whether a layer's gate, None if its model runs it outside, runs on FFN."""
    assert vllm_config.afd_config is not None
    return gate is not None and vllm_config.afd_config.gate_placement != "attention"


def check_moe_layer(
    vllm_config: "VllmConfig",
    runner: "MoERunner",
    gate: nn.Module | None,
    shared_expert_gate: nn.Module | None,
) -> None:
    """Check that a MoE layer is a function of hidden states and router logits.

    Args:
        vllm_config: The role's config.
        runner: The layer's runner, of either role.
        gate: Gate that the model hands to the runner.
        shared_expert_gate: Gate of the shared experts, likewise.

    Raises:
        ValueError: It is not; names the architecture, the layer and the reason.

    """
    from vllm.model_executor.layers.fused_moe.router.zero_expert_router import (
        ZeroExpertRouter,
    )

    assert vllm_config.afd_config is not None
    placement = vllm_config.afd_config.gate_placement
    router = runner.router
    reason = None
    if (
        runner.routed_input_transform is not None
        or runner.routed_output_transform is not None
    ):
        reason = "is a latent MoE"
    elif isinstance(router, ZeroExpertRouter):
        reason = "has zero experts"
    elif (
        getattr(router, "hash_indices_table", None) is not None
        or getattr(router, "bias_vl", None) is not None
    ):
        reason = "routes by token ids"
    elif isinstance(
        getattr(getattr(router, "custom_routing_function", None), "__self__", None),
        nn.Module,
    ):
        # It may read any module of the model.
        reason = "routes with a method of the model"
    elif runner.moe_config.is_sequence_parallel:
        reason = "is sequence parallel"
    elif gate is None and placement == "ffn":
        reason = (
            "gets router logits that the model computes outside of it, so "
            "gate_placement='ffn' is not possible; use 'auto' or 'attention'"
        )
    elif (
        gate is not None and shared_expert_gate is not None and placement == "attention"
    ):
        reason = (
            "computes the logits of its experts and shared experts at once, so "
            "gate_placement='attention' is not possible; use 'auto' or 'ffn'"
        )
    if reason is not None:
        refuse(vllm_config, f"MoE layer {runner.layer_name} {reason}")


def describe_moe_layer(
    runner: "MoERunner", gate_on_ffn: bool, block: nn.Module
) -> AFDLayerInfo:
    """Describe a layer before anything of `block`, which holds it, is pruned."""
    config = runner.moe_config
    size = config.num_logical_experts
    dtype = config.router_logits_dtype
    if not gate_on_ffn and dtype == config.in_dtype:
        # Not every model says in which type it computes router logits.
        shape = (size, config.hidden_dim_unpadded)
        for module in block.modules():
            weight = getattr(module, "weight", None)
            if weight is not None and weight.shape == shape:
                dtype = getattr(module, "out_dtype", None) or weight.dtype
    return AFDLayerInfo(
        name=runner.layer_name,
        gate_on_ffn=gate_on_ffn,
        logits_size=0 if gate_on_ffn else size,
        logits_dtype=str(dtype).removeprefix("torch."),
    )


def describe_moe_layers(
    vllm_config: "VllmConfig", model: nn.Module
) -> list[AFDLayerInfo]:
    """The model's MoE layers in the order in which they run.

    Both roles of a model describe the same layers.
    """
    layers: dict[str, AFDLayerInfo] | None = getattr(model, "afd_layers", None)
    if layers is None:
        refuse(vllm_config, "its class does not take a vllm_config and a prefix")
    return [
        layers[name] for name in vllm_config.compilation_config.static_all_moe_layers
    ]


# Says where and by whom a checkpoint was saved, not what it holds.
_UNSHARED_KEYS = ("_name_or_path", "transformers_version", "_commit_hash")
# Of what is longer, a digest has to do.
_MAX_FACT_LENGTH = 80
# Weights of which a few values are compared, and how many values.
_NUM_SAMPLES = 64
_SAMPLE_SIZE = 16


def model_facts(vllm_config: "VllmConfig") -> dict[str, str]:
    """What both roles must agree on about the model, by name.

    Covers the model's config without paths and versions, quantization and, where the
    checkpoint is on this host as safetensors, the names, types and shapes of its
    weights and a few values of some of them.
    """
    model_config = vllm_config.model_config

    def without_origin(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: without_origin(v)
                for k, v in value.items()
                if k not in _UNSHARED_KEYS
            }
        if isinstance(value, (list, tuple)):
            return [without_origin(item) for item in value]
        return value

    def fact(value: Any) -> str:
        text = json.dumps(value, sort_keys=True, default=str)
        if isinstance(value, str):
            text = value
        if len(text) > _MAX_FACT_LENGTH:
            text = f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:32]}"
        return text

    facts = {
        "architecture": model_config.architecture,
        "quantization": model_config.quantization,
        "load_format is dummy": vllm_config.load_config.load_format == "dummy",
        "weights": _checkpoint_weights(vllm_config),
    }
    config = without_origin(model_config.hf_config.to_dict())
    facts |= {f"config.{key}": value for key, value in config.items()}
    return {name: fact(value) for name, value in facts.items()}


def _checkpoint_weights(vllm_config: "VllmConfig") -> dict[str, Any] | None:
    """Type and shape of each weight in local safetensors files, None without any.

    Also the first values of some of them, as models that were trained from the same
    one differ in nothing else.
    """
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    folder = Path(model_config.model)
    if not folder.is_dir():
        try:
            folder = Path(
                hf_api().snapshot_download(
                    model_config.model,
                    revision=model_config.revision,
                    cache_dir=load_config.download_dir,
                    local_files_only=True,
                )
            )
        except (OSError, ValueError):
            return None
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    weights: dict[str, list[Any]] = {}
    paths: dict[str, Path] = {}
    for name in files:
        if (folder / name).is_file():
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    part = file.get_slice(key)
                    weights[key] = [part.get_dtype(), part.get_shape()]
                    paths[key] = folder / name
    for key in sorted(weights)[:: max(len(weights) // _NUM_SAMPLES, 1)]:
        num_dims = len(weights[key][1])
        if num_dims > 0:
            first = (slice(1),) * (num_dims - 1) + (slice(_SAMPLE_SIZE),)
            with safe_open(paths[key], framework="pt") as file:
                values = file.get_slice(key)[first].contiguous()
            weights[key].append(values.view(torch.uint8).flatten().tolist())
    return weights or None


def moe_runners(vllm_config: "VllmConfig") -> list["MoERunner"]:
    """This role's MoE layers, in the order of `describe_moe_layers`."""
    config = vllm_config.compilation_config
    return [
        config.static_forward_context[name] for name in config.static_all_moe_layers
    ]


def set_afd_exchange(vllm_config: "VllmConfig", exchange: AFDExchange | None) -> None:
    """Install what the MoE layers of this attention role call.

    Args:
        vllm_config: The config with which the model was built.
        exchange: Takes the index of the layer among the model's MoE layers, hidden
            states `[rows, hidden_size]` and router logits `[rows, logits_size]` or
            None where the gate runs on the FFN role. Returns the layer's output
            `[rows, hidden_size]` in memory of its own. None uninstalls.

    """
    for runner in moe_runners(vllm_config):
        runner.afd_exchange = exchange


def run_ffn_layer(
    runner: "MoERunner",
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Run one MoE layer on the FFN role, within a forward context.

    Args:
        runner: One of `moe_runners`.
        hidden_states: `[rows, hidden_size]`; its content may change.
        router_logits: `[rows, logits_size]`, None where the gate runs here.

    Returns:
        `[rows, hidden_size]` in memory that `hidden_states` does not share.

    """
    if hidden_states.shape[0] == 0:
        return torch.empty_like(hidden_states)
    # Layers are called by name here, and stages take turns.
    get_forward_context().all_moe_layers = None
    if router_logits is None:
        # The runner holds the gate and ignores this.
        router_logits = hidden_states
    output = runner(hidden_states, router_logits)
    if (
        output.untyped_storage().data_ptr()
        == hidden_states.untyped_storage().data_ptr()
    ):
        output = output.clone()
    return output
