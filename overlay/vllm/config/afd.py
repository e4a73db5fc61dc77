# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field, model_validator
from pydantic_core import ArgsKwargs

import vllm.envs as envs
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.config.utils import config
from vllm.logger import init_logger
from vllm.triton_utils import HAS_TRITON
from vllm.utils.hashing import safe_hash

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

logger = init_logger(__name__)

AFDRole = Literal["attention", "ffn"]
AFDGatePlacement = Literal["auto", "ffn", "attention"]

# Quantization methods whose layers were run with one part of them on each role.
SUPPORTED_QUANTIZATION: tuple[str, ...] = ()


@config
class AFDConfig:
    """Configuration for attention-FFN disaggregation (AFD).

    One vLLM instance with the attention role and one with the FFN role serve a MoE
    model together. See docs/features/afd.md.
    """

    afd_role: AFDRole = Field()
    """What this instance runs. 'attention' schedules, holds the KV cache, attends and
    samples, and takes requests. 'ffn' runs the experts for it. Required."""

    afd_connector: str = Field(default="GlooAFDConnector", min_length=1)
    """The connector that carries hidden states between the roles. Both roles need
    the same."""

    afd_connector_module_path: str | None = Field(default=None, min_length=1)
    """The Python module path to load `afd_connector` from, for one that is not part
    of vLLM."""

    afd_host: str = Field(default="127.0.0.1", min_length=1)
    """The address on which the FFN role listens, and only there. The attention role
    connects to it."""

    afd_port: int = Field(default=29700, ge=1, le=65535)
    """The TCP port on which the FFN role listens."""

    num_attention_ranks: int = Field(default=1, ge=1)
    """Number of ranks (data parallel size times tensor parallel size) with the
    attention role. A multiple of `num_ffn_ranks`. Only 1 is supported so far."""

    num_ffn_ranks: int = Field(default=1, ge=1)
    """Number of ranks with the FFN role. Only 1 is supported so far."""

    gate_placement: AFDGatePlacement = "auto"
    """The role that routes tokens to experts. 'auto': FFN where the model hands its
    gate to the MoE layer, else attention, which then sends router logits too.
    'attention' and 'ffn': always there; a model for which that is not possible is
    refused."""

    connect_timeout_s: float = Field(default=600, gt=0, le=1e9, allow_inf_nan=False)
    """Seconds to wait for the other role at start. The roles may start in either
    order. It has to cover the time in which the other one loads its weights."""

    heartbeat_timeout_s: float = Field(default=10, gt=0, le=1e9, allow_inf_nan=False)
    """Seconds without a sign of life after which the other role is taken for dead."""

    step_timeout_s: float = Field(default=300, gt=0, le=1e9, allow_inf_nan=False)
    """Seconds without progress within a step after which it fails, though the other
    role shows signs of life. Long prefills are legitimate. During the dummy runs at
    start, in which attention may compile, FFN waits for the longer of this and
    `connect_timeout_s`."""

    afd_connector_extra_config: dict[str, Any] = Field(default_factory=dict)
    """Any extra config that the connector may need."""

    @property
    def is_attention(self) -> bool:
        return self.afd_role == "attention"

    @property
    def is_ffn(self) -> bool:
        return self.afd_role == "ffn"

    def compute_hash(self) -> str:
        """WARNING: Whenever a new field is added to this config,
        ensure that it is included in the factors list if
        it affects the computation graph.

        Provide a hash that uniquely identifies all the configs
        that affect the structure of the computation
        graph from input ids/embeddings to the final hidden states,
        excluding anything before input ids/embeddings and after
        the final hidden states.
        """
        # The role decides which modules a layer has, the gate's placement what
        # goes into the exchange. Where the peer is and how it is reached do not
        # change the graph.
        factors = [self.afd_role, self.gate_placement]
        return safe_hash(str(factors).encode(), usedforsecurity=False).hexdigest()

    @model_validator(mode="before")
    @classmethod
    def _verify_keys(cls, data: Any) -> Any:
        """Name what is allowed, which pydantic's own messages leave out."""
        if isinstance(data, ArgsKwargs):
            given = dict(data.kwargs or {})
            if data.args:
                return data
        elif isinstance(data, dict):
            given = data
        else:
            return data
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        if unknown := [f"{key}={given[key]!r}" for key in given if key not in names]:
            raise ValueError(
                f"Unknown AFD config key {', '.join(unknown)}. "
                f"Allowed are {', '.join(names)}."
            )
        if "afd_role" not in given:
            raise ValueError(
                f"The AFD config needs afd_role, one of {get_args(AFDRole)}."
            )
        return data

    @model_validator(mode="after")
    def _verify_ranks(self) -> "AFDConfig":
        if self.num_attention_ranks % self.num_ffn_ranks != 0:
            raise ValueError(
                f"num_attention_ranks={self.num_attention_ranks} must be a multiple "
                f"of num_ffn_ranks={self.num_ffn_ranks}, so that each FFN rank serves "
                "as many attention ranks."
            )
        return self


def apply_afd_config(vllm_config: "VllmConfig") -> None:
    """Check that the config can run with AFD, and fit it to the role.

    `VllmConfig.__post_init__` calls this, which runs again in the engine process:
    a config that passed once passes again, unchanged.

    Raises:
        ValueError: The config cannot run with AFD. Names every flag that is in the
            way, its value and what is supported.

    """
    afd_config = vllm_config.afd_config
    if afd_config is None:
        return

    from vllm.platforms import current_platform

    if problems := [
        *_unsupported_platform(afd_config),
        *_unsupported_ranks(vllm_config, afd_config),
        *_unsupported_features(vllm_config),
        *_unsupported_model(vllm_config),
        *_unsupported_compilation(vllm_config, afd_config),
        *(_unsupported_ffn(vllm_config) if afd_config.is_ffn else ()),
    ]:
        raise ValueError(
            f"AFD with afd_role={afd_config.afd_role!r} does not support "
            f"{'; '.join(problems)}."
        )

    compilation_config = vllm_config.compilation_config
    if compilation_config.cudagraph_mode is None:
        if current_platform.support_static_graph_mode():
            logger.info_once("AFD does not support CUDA graphs yet: they are off.")
        compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    if afd_config.is_attention:
        _verify_attention_runner()
        return

    if compilation_config.mode is None:
        logger.info_once("The AFD FFN role runs eagerly: compilation mode NONE.")
        compilation_config.mode = CompilationMode.NONE
    if vllm_config.cache_config.enable_prefix_caching:
        # It holds no KV cache, so the coordinator would have no group to manage.
        logger.info_once("The AFD FFN role has no KV cache: prefix caching is off.")
        vllm_config.cache_config.enable_prefix_caching = False
    # Else a CPU worker would only start where it could reserve most of the memory.
    vllm_config.cache_config.kv_cache_memory_bytes = 0
    if vllm_config.model_config is not None:
        # It takes no requests.
        vllm_config.model_config.skip_tokenizer_init = True


def _verify_attention_runner() -> None:
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        raise ValueError(
            "AFD with afd_role='attention' needs Model Runner V2, which "
            "VLLM_USE_V2_MODEL_RUNNER=0 turns off. Unset it or set it to 1."
        )
    if not HAS_TRITON:
        raise ValueError(
            "AFD with afd_role='attention' needs Model Runner V2, which needs "
            "Triton. On CPU, set TRITON_INTERPRET=1 in the environment."
        )


def _unsupported_platform(afd_config: AFDConfig) -> list[str]:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return []
    name = current_platform._enum.name.lower()
    if not current_platform.is_cuda():
        # Their workers know nothing of AFD, or nobody has tried it.
        return [
            f"platform {name} (only cpu, and cuda with a connector of its own given by "
            "afd_connector_module_path)"
        ]
    if afd_config.afd_connector_module_path is None:
        return [
            f"platform {name} with afd_connector={afd_config.afd_connector!r} (vLLM's "
            "own connectors only serve cpu so far; afd_connector_module_path can name "
            "another)"
        ]
    return []


def _unsupported_ranks(vllm_config: "VllmConfig", afd_config: AFDConfig) -> list[str]:
    parallel_config = vllm_config.parallel_config
    problems = []
    for name in ("num_attention_ranks", "num_ffn_ranks"):
        if (count := getattr(afd_config, name)) != 1:
            problems.append(f"{name}={count} (only 1 so far)")
    for name in ("data", "tensor"):
        if (size := getattr(parallel_config, f"{name}_parallel_size")) > 1:
            problems.append(f"--{name}-parallel-size {size} (only 1 so far)")
    for name in ("pipeline", "prefill_context", "decode_context"):
        if (size := getattr(parallel_config, f"{name}_parallel_size")) > 1:
            flag = f"--{name.replace('_', '-')}-parallel-size"
            problems.append(f"{flag} {size} (only 1)")
    if parallel_config.nnodes > 1:
        problems.append(f"--nnodes {parallel_config.nnodes} (only 1)")
    return problems


def _unsupported_features(vllm_config: "VllmConfig") -> list[str]:
    parallel_config = vllm_config.parallel_config
    problems = []
    if parallel_config.enable_eplb:
        problems.append("expert load balancing (--enable-eplb)")
    if parallel_config.enable_elastic_ep:
        problems.append("elastic expert parallelism (--enable-elastic-ep)")
    backend = parallel_config.distributed_executor_backend
    if backend is not None and backend not in ("mp", "uni"):
        name = backend if isinstance(backend, str) else backend.__qualname__
        problems.append(
            f"--distributed-executor-backend {name} (only mp and uni report that "
            "the other role was lost)"
        )
    if vllm_config.speculative_config is not None:
        problems.append("speculative decoding (--speculative-config)")
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        # Later layers would run on fewer tokens than the step was announced with.
        problems.append("fast prefill (--kv-sharing-fast-prefill)")
    if vllm_config.lora_config is not None:
        problems.append("LoRA (--enable-lora)")
    if vllm_config.weight_transfer_config is not None:
        problems.append(
            "weight transfer (--weight-transfer-config), as each role holds only a "
            "part of the weights"
        )
    offload_config = vllm_config.offload_config
    if offload_config.uva.cpu_offload_gb > 0:
        problems.append(
            f"weight offloading (--cpu-offload-gb {offload_config.uva.cpu_offload_gb})"
        )
    if offload_config.prefetch.offload_group_size > 0:
        problems.append(
            "weight offloading (--offload-group-size "
            f"{offload_config.prefetch.offload_group_size})"
        )
    return problems


def _unsupported_model(vllm_config: "VllmConfig") -> list[str]:
    model_config = vllm_config.model_config
    if model_config is None:
        return []
    problems = []
    if model_config.enable_sleep_mode:
        problems.append("sleep mode (--enable-sleep-mode)")
    if model_config.enable_return_routed_experts:
        problems.append("returned routed experts (--enable-return-routed-experts)")
    if (
        model_config.quantization is not None
        and model_config.quantization not in SUPPORTED_QUANTIZATION
    ):
        problems.append(
            f"quantization {model_config.quantization!r} (supported: "
            f"{', '.join(SUPPORTED_QUANTIZATION) or 'none yet'})"
        )
    architecture = model_config.architecture
    if model_config.runner_type == "pooling":
        problems.append(f"pooling models (--runner pooling, {architecture})")
    if model_config.is_encoder_decoder:
        problems.append(f"encoder-decoder models ({architecture})")
    if model_config.is_multimodal_model:
        problems.append(f"multimodal models ({architecture})")
    if not model_config.is_moe:
        problems.append(
            f"dense models ({architecture} has no experts to run on the FFN role)"
        )
    return problems


def _unsupported_compilation(
    vllm_config: "VllmConfig", afd_config: AFDConfig
) -> list[str]:
    if vllm_config.model_config is not None and vllm_config.model_config.enforce_eager:
        return []  # Mode and cudagraph_mode become NONE.
    compilation_config = vllm_config.compilation_config
    problems = []
    mode = compilation_config.cudagraph_mode
    if mode not in (None, CUDAGraphMode.NONE):
        problems.append(f"cudagraph_mode {mode.name} (only NONE so far)")
    if afd_config.is_ffn and compilation_config.mode not in (
        None,
        CompilationMode.NONE,
    ):
        problems.append(
            f"compilation mode {compilation_config.mode.name} (only NONE: this role "
            "runs eagerly)"
        )
    return problems


def _unsupported_ffn(vllm_config: "VllmConfig") -> list[str]:
    parallel_config = vllm_config.parallel_config
    problems = []
    if parallel_config.use_ubatching:
        problems.append(
            f"{parallel_config.ubatching_flag} (set it on the attention role only: "
            "the FFN role follows)"
        )
    for name in ("kv_transfer_config", "ec_transfer_config"):
        if getattr(vllm_config, name) is not None:
            problems.append(f"--{name.replace('_', '-')} (it holds no cache)")
    if (size := vllm_config.cache_config.kv_offloading_size) is not None:
        problems.append(f"--kv-offloading-size {size} (it holds no KV cache)")
    return problems
