# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tiny MoE checkpoints, one per architecture that AFD is tested with.

Needs only torch and transformers, so that tests outside of this tree can use it.
"""

from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 1024,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Of the sizes MLA kernels know.
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
_DEEPSEEK = (
    _COMMON
    | _MLA
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
    }
)
_GRANITE = _COMMON | {
    "intermediate_size": 64,
    "num_local_experts": 8,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}

# Architecture: arguments of its transformers config.
TINY_MODELS: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK
    | {"topk_method": "group_limited_greedy", "norm_topk_prob": False},
    "DeepseekV3ForCausalLM": _DEEPSEEK | {"topk_method": "noaux_tc"},
    "DeepseekV32ForCausalLM": _DEEPSEEK
    | {
        "q_lora_rank": 64,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": 64,
    },
    "Qwen3MoeForCausalLM": _COMMON
    | {"num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "Qwen2MoeForCausalLM": _COMMON
    | {
        "num_experts": 8,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [1],
        "head_dim": None,
        "hidden_size": 256,
    },
    "MixtralForCausalLM": _COMMON | {"num_local_experts": 8, "sliding_window": None},
    "Glm4MoeForCausalLM": _COMMON
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "use_qk_norm": True,
    },
    "Glm4MoeLiteForCausalLM": _DEEPSEEK
    | {
        "q_lora_rank": 64,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "OlmoeForCausalLM": _COMMON
    | {"num_experts": 8, "head_dim": None, "hidden_size": 256},
    "FlexOlmoForCausalLM": _COMMON
    | {"num_experts": 8, "intermediate_size": 64, "head_dim": None, "hidden_size": 256},
    "GraniteMoeForCausalLM": _GRANITE | {"head_dim": None, "hidden_size": 256},
    "GraniteMoeSharedForCausalLM": _GRANITE
    | {"head_dim": None, "hidden_size": 256, "shared_intermediate_size": 64},
    "GraniteMoeHybridForCausalLM": _GRANITE
    | {
        "head_dim": None,
        "hidden_size": 256,
        "shared_intermediate_size": 64,
        "layer_types": ["attention"] * 3,
        "position_embedding_type": "rope",
    },
    "GptOssForCausalLM": _COMMON
    | {
        "num_local_experts": 8,
        "intermediate_size": 128,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 32,
    },
    "PhimoeForCausalLM": _COMMON
    | {
        "num_local_experts": 8,
        "intermediate_size": 64,
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": None,
        "head_dim": None,
        "hidden_size": 256,
    },
    "Ernie4_5_MoeForCausalLM": _COMMON
    | {
        "moe_num_experts": 8,
        "moe_num_shared_experts": 1,
        "moe_k": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
        "use_bias": False,
        "head_dim": None,
        "hidden_size": 256,
    },
    "HunYuanMoEV1ForCausalLM": _COMMON
    | {
        "num_experts": 8,
        "moe_topk": 2,
        "num_shared_expert": 1,
    },
    "JambaForCausalLM": _COMMON
    | {
        "num_experts": 8,
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "DbrxForCausalLM": {
        "vocab_size": 256,
        "d_model": 256,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 1024,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": 64,
            "hidden_size": 256,
            "moe_num_experts": 8,
            "moe_top_k": 2,
        },
        "tie_word_embeddings": False,
    },
    "Llama4ForCausalLM": _COMMON
    | {
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "intermediate_size": 64,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 1,
    },
    "MiniMaxM2ForCausalLM": _COMMON
    | {
        "num_local_experts": 8,
        "intermediate_size": 64,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "ExaoneMoeForCausalLM": _COMMON
    | {
        "num_experts": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "sliding_window": 32,
        "layer_types": ["full_attention"] * 3,
    },
    "Cohere2MoeForCausalLM": _COMMON
    | {"num_experts": 8, "layer_types": ["full_attention"] * 3, "logit_scale": 0.5},
    "AfmoeForCausalLM": _COMMON
    | {
        "num_experts": 8,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "n_group": 1,
        "topk_group": 1,
        "route_scale": 2.0,
        "layer_types": ["full_attention"] * 3,
    },
    "AXK1ForCausalLM": _DEEPSEEK | {"q_lora_rank": 64},
    "LongcatFlashForCausalLM": _COMMON
    | _MLA
    | {
        "num_layers": 2,
        "n_routed_experts": 8,
        "zero_expert_num": 2,
        "zero_expert_type": "identity",
        "moe_topk": 2,
        "ffn_hidden_size": 128,
        "expert_ffn_hidden_size": 64,
        "q_lora_rank": 64,
    },
    "Gemma4ForCausalLM": _COMMON
    | {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["full_attention"] * 3,
        "global_head_dim": 64,
    },
    "Qwen3NextForCausalLM": _COMMON
    | {
        "num_experts": 8,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": True,
        "layer_types": ["full_attention"] * 3,
    },
    "Lfm2MoeForCausalLM": _COMMON
    | {
        "num_experts": 8,
        "num_dense_layers": 1,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "layer_types": ["full_attention"] * 3,
        "head_dim": None,
        "hidden_size": 256,
    },
    "MiMoV2FlashForCausalLM": _COMMON | {"n_routed_experts": 8},
    "HYV3ForCausalLM": _COMMON
    | {
        "moe_layer_freq": 1,
        "expert_hidden_dim": 64,
        "num_experts": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "route_norm": True,
        "router_scaling_factor": 2.5,
    },
    "LagunaForCausalLM": _COMMON
    | {"num_experts": 8, "shared_expert_intermediate_size": 64},
    "NemotronHForCausalLM": _COMMON
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "layers_block_type": ["attention", "moe", "attention", "moe"],
        "moe_shared_expert_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
    },
    "GlmMoeDsaForCausalLM": _DEEPSEEK
    | {"q_lora_rank": 64, "index_n_heads": 4, "index_head_dim": 128, "index_topk": 64},
    "MellumForCausalLM": _COMMON | {"num_experts": 8},
    "Qwen3_5MoeForCausalLM": _COMMON
    | {
        "num_experts": 8,
        "shared_expert_intermediate_size": 64,
        "layer_types": ["full_attention"] * 3,
    },
    "KimiLinearForCausalLM": _COMMON | _MLA | {"num_experts": 8},
    "GraniteMoeSWAForCausalLM": _GRANITE
    | {"head_dim": None, "hidden_size": 256, "shared_intermediate_size": 64},
}

# Those of which test_role_models.py compares the logits. The others are refused, or
# vLLM or transformers cannot run them whole on a CPU.
TESTED = [
    "AfmoeForCausalLM",
    "Cohere2MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Gemma4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "GraniteMoeSWAForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "JambaForCausalLM",
    "Lfm2MoeForCausalLM",
    "Llama4ForCausalLM",
    "MellumForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
]


def make_tiny_model(architecture: str, folder: Path, **overrides: Any) -> Path:
    """Write a seeded fp32 checkpoint.

    Args:
        architecture: Key of `TINY_MODELS`.
        folder: Where to.
        overrides: Arguments of the config to change.

    Returns:
        The folder.

    """
    import torch
    import transformers

    model_class = getattr(transformers, architecture)
    arguments = TINY_MODELS[architecture] | overrides
    arguments = {
        k: v for k, v in arguments.items() if v is not None or k == "q_lora_rank"
    }
    config = model_class.config_class(**arguments)
    model = model_class(config).float()
    random = torch.Generator().manual_seed(0)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for name, tensor in tensors:
            if not tensor.is_floating_point() or name not in model.state_dict():
                continue
            noise = torch.randn(tensor.shape, generator=random)
            # Wide enough apart that greedy tokens are well defined.
            if "norm" in name:
                tensor.copy_(1 + 0.1 * noise)
            else:
                tensor.copy_(0.15 * noise)
    model.save_pretrained(folder)
    return folder
