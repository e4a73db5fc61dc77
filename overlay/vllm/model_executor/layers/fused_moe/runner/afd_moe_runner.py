# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The MoE layer of the attention role: its experts run on the AFD FFN peer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from vllm.config import get_current_vllm_config
from vllm.model_executor.afd import (
    AFDExchange,
    check_moe_layer,
    gate_runs_on_ffn,
    refuse,
)
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEQuantConfig,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import (
    FusedMoEMethodBase,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.utils import StageMissingLayer


class _RemoteMoEMethod(FusedMoEMethodBase):
    """Holds no weights and computes nothing."""

    supports_pre_processed_weights = True

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        pass

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig:
        raise RuntimeError("The experts of an AFD attention role are on its FFN peer.")


class AFDRemoteRoutedExperts(RoutedExperts):
    """Routed experts without parameters, whatever their quantization and class."""

    def __init__(
        self, *args: Any, e_score_correction_bias: Any = None, **kwargs: Any
    ) -> None:
        # Without the bias, which the base class would register.
        super().__init__(*args, **kwargs)

    def _get_quant_method(
        self,
        prefix: str,
        quant_config: QuantizationConfig | None,
        moe_config: FusedMoEConfig,
    ) -> FusedMoEMethodBase:
        return _RemoteMoEMethod(moe_config)


class AFDRemoteMoERunner(MoERunner):
    """Sends a MoE layer's input to the FFN role and returns what comes back.

    Shared experts, routed scaling and the final reduction run where the experts do.
    So does a gate which the model hands to the runner, unless `gate_placement` is
    'attention'; otherwise the router logits travel too.

    Attributes:
        afd_layer_index: Position of the layer among the model's MoE layers.
        afd_gate_on_ffn: Whether the FFN role computes the router logits.
        afd_exchange: Calls the FFN role, see `set_afd_exchange`.
        afd_moved: Modules that only the FFN role runs, until they are pruned.

    """

    afd_exchange: AFDExchange | None = None

    def __init__(
        self,
        *args: Any,
        routed_experts: RoutedExperts,
        gate: torch.nn.Module | None = None,
        shared_experts: torch.nn.Module | None = None,
        shared_expert_gate: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        vllm_config = get_current_vllm_config()
        super().__init__(  # type: ignore[misc]
            *args, routed_experts=routed_experts, **kwargs
        )
        check_moe_layer(vllm_config, self, gate, shared_expert_gate)
        self.afd_vllm_config = vllm_config
        # As described to the FFN role; known once the layer is complete.
        self.afd_logits_dtype: torch.dtype | None = None
        self.afd_gate_on_ffn = gate_runs_on_ffn(vllm_config, gate)
        self.afd_layer_index = (
            len(vllm_config.compilation_config.static_all_moe_layers) - 1
        )
        # A placeholder makes every weight loader skip the experts.
        self.routed_experts = StageMissingLayer("ffn", routed_experts)
        moved = [shared_experts, shared_expert_gate]
        if self.afd_gate_on_ffn:
            moved.append(gate)
        else:
            self.gate = gate
        # Not registered as children: a role registers only what it loads.
        self.__dict__["afd_moved"] = [m for m in moved if m is not None]

    def _select_forward(self) -> Callable:
        # Opaque to torch.compile on every platform: an exchange cannot be traced.
        return torch.ops.vllm.moe_forward

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterable[str]:
        for _ in weights:
            pass
        return ()

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if input_ids is not None or shared_experts_input is not None:
            refuse(
                self.afd_vllm_config,
                f"MoE layer {self.layer_name} takes more than hidden states and "
                "router logits",
            )
        return self._forward_entry(
            hidden_states, router_logits, None, None, self._encode_layer_name(), 0
        )

    def _forward_impl(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.afd_exchange is None:
            raise RuntimeError(
                f"MoE layer {self.layer_name} of the AFD attention role ran while no "
                "FFN role is connected."
            )
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = None
        if not self.afd_gate_on_ffn:
            if self.gate is not None:
                logits, _ = self.gate(rows)
            else:
                logits = router_logits.reshape(-1, router_logits.shape[-1])
            if self.afd_logits_dtype not in (None, logits.dtype):
                logits = self._widen(logits)
        output = self.afd_exchange(self.afd_layer_index, rows, logits)
        return output.view(hidden_states.shape)

    def _widen(self, logits: torch.Tensor) -> torch.Tensor:
        """Router logits in the type that was announced, if that loses nothing."""
        wide = self.afd_logits_dtype
        assert wide is not None
        if torch.promote_types(logits.dtype, wide) != wide:
            refuse(
                self.afd_vllm_config,
                f"MoE layer {self.layer_name} gets router logits of type "
                f"{logits.dtype}, but its modules say {wide}",
            )
        return logits.to(wide)


def select_moe_classes(
    runner_cls: type[MoERunner] | None,
    routed_experts_cls: type[RoutedExperts] | None,
    routed_experts_args: dict[str, Any] | None,
) -> tuple[type[MoERunner] | None, type[RoutedExperts] | None, dict[str, Any] | None]:
    """The classes with which this role builds a MoE layer.

    Args:
        runner_cls: Runner class the model asks for.
        routed_experts_cls: Routed-experts class the model asks for.
        routed_experts_args: Further arguments of that class.

    Raises:
        ValueError: The model brings a runner of its own, which need not be a
            function of hidden states and router logits.

    """
    vllm_config = get_current_vllm_config()
    assert vllm_config.afd_config is not None
    if runner_cls is not None and runner_cls is not MoERunner:
        refuse(vllm_config, f"it has a MoE runner of its own ({runner_cls.__name__})")
    if vllm_config.afd_config.is_ffn:
        return runner_cls, routed_experts_cls, routed_experts_args
    return AFDRemoteMoERunner, AFDRemoteRoutedExperts, None
