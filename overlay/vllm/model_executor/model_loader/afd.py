# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builds and loads the part of a model that an AFD role runs.

Each decoder layer is pruned as soon as it is built, so no more than one exists in
full. Placeholders of the classes that pipeline parallelism and encoder-only servers
use take the place of what a role does not run, so the weight loaders skip it.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import regex as re
import torch
from torch import nn

from vllm.distributed.afd_transfer.messages import AFDLayerInfo
from vllm.logger import init_logger
from vllm.model_executor.afd import (
    check_moe_layer,
    describe_moe_layer,
    gate_runs_on_ffn,
    refuse,
)
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.models.utils import PPMissingLayer, StageMissingLayer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.utils import LayerFn

logger = init_logger(__name__)

# Their loader hands whole checkpoints to the model's `load_weights`, or fills in.
_LOAD_FORMATS = (
    "auto",
    "dummy",
    "fastsafetensors",
    "hf",
    "instanttensor",
    "npcache",
    "pt",
    "safetensors",
)
# A layer's experts as most checkpoints name them, one by one.
_EXPERT_NAME = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)")


@dataclass
class _Construction:
    """A role's model while it is built.

    Attributes:
        device: Where its parameters go.
        layers: MoE layers so far.
        dropped: Names of the parameters that each placeholder stands for.

    """

    device: torch.device
    layers: dict[str, AFDLayerInfo] = field(default_factory=dict)
    dropped: dict[nn.Module, list[str]] = field(default_factory=dict)

    def drop(self, parent: nn.Module, name: str, stage: str) -> None:
        """Put a placeholder in the place of a module that `stage` runs."""
        setattr(parent, name, self.release(parent.get_submodule(name), stage))

    def release(self, module: nn.Module, stage: str | None = None) -> nn.Module:
        """Free the parameters of a module; returns what stands for it."""
        placeholder = PPMissingLayer() if stage is None else StageMissingLayer(stage)
        self.dropped[placeholder] = [n for n, _ in module.named_parameters()]
        for param in module.parameters():
            # Its weight loader refers to the module and so to itself: only the
            # garbage collector would free it, some layers later.
            param.data = param.data.new_empty(0)
        return placeholder


_construction: _Construction | None = None


def build_role_model(
    model_class: type[nn.Module], vllm_config: "VllmConfig", prefix: str
) -> nn.Module:
    """Build a model with only the modules that this role runs.

    On the FFN role what is outside of the decoder layers never takes memory.

    Raises:
        ValueError: AFD cannot cut the model.

    """
    global _construction
    assert vllm_config.afd_config is not None
    load_format = vllm_config.load_config.load_format
    if load_format not in _LOAD_FORMATS:
        raise ValueError(
            f"--afd-config does not support --load-format {load_format}; it supports "
            f"{', '.join(_LOAD_FORMATS)}."
        )
    is_ffn = vllm_config.afd_config.is_ffn
    _construction = construction = _Construction(torch.get_default_device())
    try:
        with torch.device("meta") if is_ffn else construction.device:
            model = model_class(vllm_config=vllm_config, prefix=prefix)
    finally:
        _construction = None

    names = vllm_config.compilation_config.static_all_moe_layers
    if not names:
        refuse(vllm_config, "it has no MoE layer")
    if outside := [name for name in names if name not in construction.layers]:
        refuse(
            vllm_config,
            f"MoE layer {outside[0]} is not part of a layer that `make_layers` built",
        )
    if is_ffn:
        _drop_all_but_experts(model, construction)
    model.afd_layers = construction.layers
    model.afd_dropped = construction.dropped
    # Gemma 4 can use its keys as values too.
    k_eq_v = getattr(vllm_config.model_config.hf_text_config, "attention_k_eq_v", False)
    model.afd_optional_shards = {"v_proj"} if k_eq_v else set[str]()
    # Loaders call it, whichever they are.
    model.load_weights = functools.partial(load_role_weights, model)
    return model


def role_layer_fn(layer_fn: "LayerFn", vllm_config: "VllmConfig") -> "LayerFn":
    """Make decoder layers that keep only what this role runs."""
    if (construction := _construction) is None:
        return layer_fn
    assert vllm_config.afd_config is not None
    is_ffn = vllm_config.afd_config.is_ffn
    context = vllm_config.compilation_config.static_forward_context

    def make_layer(prefix: str) -> nn.Module:
        before = set(context)
        with construction.device:
            layer = layer_fn(prefix=prefix)
        if not is_ffn:
            _prune_for_attention(layer, construction)
            return layer
        layer = _prune_for_ffn(layer, vllm_config, construction)
        # Whoever is registered here stays alive.
        for name in context.keys() - before:
            if name not in construction.layers:
                del context[name]
        return layer

    return make_layer


def _runners(module: nn.Module) -> list[MoERunner]:
    return [m for m in module.modules() if isinstance(m, MoERunner)]


def _prune_for_attention(layer: nn.Module, construction: _Construction) -> None:
    moved = set[nn.Module]()
    for runner in _runners(layer):
        construction.layers[runner.layer_name] = describe_moe_layer(
            runner, runner.afd_gate_on_ffn, layer
        )
        dtype = construction.layers[runner.layer_name].logits_dtype
        runner.afd_logits_dtype = getattr(torch, dtype)
        # Loaders look their names up before they skip them.
        weights = ["w13_weight", "w2_weight"]
        if runner.moe_config.has_bias:
            weights += ["w13_bias", "w2_bias"]
        construction.dropped[runner.routed_experts] = weights
        for module in runner.afd_moved:
            moved.update(module.modules())
        runner.afd_moved.clear()
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if child in moved:
                construction.drop(parent, name, "ffn")


def _prune_for_ffn(
    layer: nn.Module, vllm_config: "VllmConfig", construction: _Construction
) -> nn.Module:
    runners = _runners(layer)
    for runner in runners:
        check_moe_layer(vllm_config, runner, runner.gate, runner.shared_expert_gate)
        gate_on_ffn = gate_runs_on_ffn(vllm_config, runner.gate)
        construction.layers[runner.layer_name] = describe_moe_layer(
            runner, gate_on_ffn, layer
        )
        if not gate_on_ffn:
            # It takes the router logits it is given.
            runner.gate = None
    if not runners:
        # Models skip layers of this class when they collect their MoE layers.
        return construction.release(layer)
    _drop_all_but_experts(layer, construction)
    return layer


def _drop_all_but_experts(root: nn.Module, construction: _Construction) -> None:
    """Replace what no MoE runner below `root` uses by placeholders."""
    kept = set[nn.Module]()
    tensors = set[int]()
    for runner in _runners(root):
        kept.update(runner.modules())
        tensors.update(id(tensor) for tensor in _router_tensors(runner))
    for module in kept:
        tensors.update(id(tensor) for tensor in _own_tensors(module))

    def is_used(module: nn.Module) -> bool:
        return any(
            m in kept or any(id(t) in tensors for t in _own_tensors(m))
            for m in module.modules()
        )

    def drop(module: nn.Module) -> None:
        for name, child in list(module.named_children()):
            if child in kept or isinstance(child, (PPMissingLayer, StageMissingLayer)):
                continue
            if is_used(child):
                drop(child)
            else:
                construction.drop(module, name, "attention")

    drop(root)


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _router_tensors(runner: MoERunner) -> Iterator[torch.Tensor]:
    """Tensors that a layer's router reads and may not own, as its bias."""
    values = list(vars(runner.router).values())
    while values:
        value = values.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, functools.partial):
            values += [value.func, *value.args, *value.keywords.values()]
        elif getattr(value, "__closure__", None):
            values += [cell.cell_contents for cell in value.__closure__]


#
# Loading
#


def load_role_weights(
    model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> set[str] | None:
    """Load the weights that this role needs from those of a whole checkpoint.

    Args:
        model: Built by `build_role_model`.
        weights: Names and tensors of the checkpoint.

    Returns:
        Names of the parameters that were loaded, None if the model cannot tell.

    Raises:
        ValueError: The checkpoint lacks a weight that this role needs.

    """
    seen = set[str]()

    def watch() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            seen.add(name)
            yield name, tensor

    with _named_placeholders(model):
        loaded = type(model).load_weights(model, watch())
    missing = _missing_experts(model, seen)
    if loaded is not None:
        loaded = set(loaded)
        # Not every loader reports all it has loaded.
        missing += _missing_parameters(model, loaded | seen)
        missing += _missing_shards(model, loaded, seen)
    if missing:
        raise ValueError(
            "The checkpoint lacks weights that this AFD role needs: "
            + ", ".join(sorted(missing)[:20])
        )
    return loaded


@contextmanager
def _named_placeholders(model: nn.Module) -> Iterator[None]:
    """Let placeholders have the parameters they stand for, without memory.

    Not every model's loader asks whether a parameter is missing before it looks it
    up by its name.
    """

    def skip(*args, **kwargs) -> bool:
        return True

    try:
        for placeholder, names in model.afd_dropped.items():
            for name in names:
                *path, leaf = name.split(".")
                parent = placeholder
                for part in path:
                    if part not in parent._modules:
                        parent.add_module(part, nn.Module())
                    parent = parent._modules[part]
                param = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)
                param.weight_loader = skip
                parent.register_parameter(leaf, param)
        yield
    finally:
        for placeholder in model.afd_dropped:
            placeholder._modules.clear()
            placeholder._parameters.clear()


def _missing_parameters(model: nn.Module, loaded: set[str]) -> list[str]:
    names = defaultdict[nn.Parameter, list[str]](list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[param].append(name)
        # As the loader of a MoE layer reports them.
        names[param].append(name.replace(".routed_experts.", "."))
    return [aliases[0] for aliases in names.values() if loaded.isdisjoint(aliases)]


def _missing_shards(model: nn.Module, loaded: set[str], seen: set[str]) -> list[str]:
    """Weights of which another part of a fused parameter was loaded."""
    missing: list[str] = []
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        for name in seen:
            for part in parts:
                if f".{part}." not in name:
                    continue
                if name.replace(f".{part}.", f".{fused}.") in loaded:
                    others = {
                        name.replace(f".{part}.", f".{p}.")
                        for p in parts
                        if p not in model.afd_optional_shards
                    }
                    missing += others - seen
    return list(set(missing))


def _missing_experts(model: nn.Module, seen: set[str]) -> list[str]:
    """Experts of a layer whose other experts are in the checkpoint."""
    runners = [r for r in _runners(model) if not hasattr(r, "afd_layer_index")]
    counts = {runner.moe_config.num_logical_experts for runner in runners}
    found = defaultdict[tuple[str, str], set[int]](set)
    for name in seen:
        if match := _EXPERT_NAME.fullmatch(name):
            found[match[1], match[3]].add(int(match[2]))
    missing = []
    for (layer, weight), experts in found.items():
        if counts and len(experts) not in counts:
            absent = set(range(min(counts))) - experts
            missing += [f"{layer}.{expert}.{weight}" for expert in absent]
    return missing
