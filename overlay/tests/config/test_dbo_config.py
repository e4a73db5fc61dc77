# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which flags go with dual batch overlap (DBO), and what the others say.

The table in docs/design/dbo.md describes the same rules.
"""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import LlamaConfig, MambaConfig, Qwen3MoeConfig

from vllm.config import CUDAGraphMode, LoRAConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

pytestmark = pytest.mark.skip_global_cleanup

DEEPEP = "deepep_low_latency"
V1, V2 = "0", "1"
CPU_ONLY = pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU platform")


def _hf_config(model_type: str) -> Any:
    if model_type == "mamba":
        return MambaConfig(
            architectures=["MambaForCausalLM"],
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
        )
    kwargs = dict(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    if model_type == "dense":
        return LlamaConfig(architectures=["LlamaForCausalLM"], **kwargs)
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        **kwargs,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    paths = {}
    for model_type in ("moe", "dense", "mamba"):
        path = tmp_path_factory.mktemp(model_type)
        _hf_config(model_type).save_pretrained(path)
        paths[model_type] = str(path)
    return paths


@pytest.fixture
def make_config(models: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    # Triton may only be missing from this process.
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")

    def make(model: str = "moe", runner: str | None = V2, **kwargs: Any) -> VllmConfig:
        if runner is None:
            monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        else:
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
        return EngineArgs(
            model=models[model],
            skip_tokenizer_init=True,
            distributed_executor_backend="mp",
            **kwargs,
        ).create_engine_config()

    return make


@pytest.mark.parametrize(
    "kwargs, num_ubatches",
    [
        ({}, 0),
        ({"ubatch_size": 1}, 1),
        ({"enable_dbo": True}, 2),
        ({"enable_dbo": True, "model": "dense"}, 2),
        ({"enable_dbo": True, "ubatch_size": 2}, 2),
        ({"ubatch_size": 2}, 2),
        ({"enable_dbo": True, "dbo_decode_token_threshold": 2}, 2),
        ({"enable_dbo": True, "all2all_backend": "allgather_reducescatter"}, 2),
        ({"enable_dbo": True, "tensor_parallel_size": 2}, 2),
        (
            {
                "enable_dbo": True,
                "ubatch_size": 2,
                "dbo_decode_token_threshold": 2,
                "dbo_prefill_token_threshold": 12,
                "max_num_batched_tokens": 64,
                "max_num_seqs": 64,
            },
            2,
        ),
        ({"enable_dbo": True, "enable_prefix_caching": True}, 2),
        # The thresholds only matter if something is split.
        ({"dbo_decode_token_threshold": 0, "dbo_prefill_token_threshold": 0}, 0),
        (
            {"enable_dbo": True, "data_parallel_size": 2, "all2all_backend": DEEPEP},
            2,
        ),
        ({"ubatch_size": 2, "data_parallel_size": 2, "all2all_backend": DEEPEP}, 2),
        # Independent ranks have no expert all2all between them.
        ({"enable_dbo": True, "data_parallel_size": 2, "model": "dense"}, 2),
    ],
)
def test_accepted(make_config, kwargs: dict[str, Any], num_ubatches: int):
    vllm_config = make_config(**kwargs)

    def settings() -> tuple:
        parallel_config = vllm_config.parallel_config
        return (
            parallel_config.enable_dbo,
            parallel_config.ubatch_size,
            parallel_config.num_ubatches,
            parallel_config.dbo_decode_token_threshold,
            parallel_config.dbo_prefill_token_threshold,
            parallel_config.all2all_backend,
            vllm_config.compilation_config.cudagraph_mode,
        )

    before = settings()
    assert before[2] == num_ubatches
    assert before[0] is kwargs.get("enable_dbo", False)
    assert before[1] == kwargs.get("ubatch_size", 0)

    # The engine core runs it again on the config that the front end sends.
    vllm_config.__post_init__()
    assert settings() == before


DBO = {"enable_dbo": True}
DP2 = {"data_parallel_size": 2}
REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "conflict": (
        {**DBO, "ubatch_size": 3},
        r"--enable-dbo .*conflicts with --ubatch-size 3\. .*set it to 2",
    ),
    "conflict_off": ({**DBO, "ubatch_size": 1}, "conflicts with --ubatch-size 1"),
    "decode_threshold": (
        {**DBO, "dbo_decode_token_threshold": 1},
        r"--dbo-decode-token-threshold 1 must be at least the number of .*\(2\)",
    ),
    "prefill_threshold": (
        {**DBO, "dbo_prefill_token_threshold": 0},
        r"--dbo-prefill-token-threshold 0 must be at least the number of .*\(2\)",
    ),
    "threshold_of_three": (
        {**DP2, "ubatch_size": 3, "dbo_decode_token_threshold": 2},
        r"--dbo-decode-token-threshold 2 must be at least the number of .*\(3\)",
    ),
    "three_at_dp1": (
        {"ubatch_size": 3},
        "--ubatch-size 3 is not supported: .*Use --enable-dbo or --ubatch-size 2",
    ),
    "three_at_dp2": (
        {**DP2, "ubatch_size": 3, "all2all_backend": DEEPEP},
        "--ubatch-size 3 is not supported",
    ),
    "three_at_dp2_dense": (
        {**DP2, "model": "dense", "ubatch_size": 3},
        "--ubatch-size 3 is not supported",
    ),
    "all2all": (
        {**DBO, **DP2, "all2all_backend": "allgather_reducescatter"},
        "--enable-dbo with --data-parallel-size 2 does not support "
        "--all2all-backend allgather_reducescatter. Use one of deepep_low_latency, "
        "deepep_high_throughput, nixl_ep",
    ),
    "all2all_ubatch_size": (
        {**DP2, "ubatch_size": 2},
        "--ubatch-size 2 with --data-parallel-size 2 does not support --all2all-back",
    ),
    "v1_runner": ({**DBO, "runner": V1}, "--enable-dbo.*VLLM_USE_V2_MODEL_RUNNER=1"),
    "no_runner": ({**DBO, "runner": None}, "--enable-dbo.*VLLM_USE_V2_MODEL_RUNNER=1"),
    "v1_runner_ubatch_size": (
        {"ubatch_size": 2, "runner": V1},
        "--ubatch-size 2.*VLLM_USE_V2_MODEL_RUNNER=1",
    ),
    "pipeline_parallel": (
        {**DBO, "pipeline_parallel_size": 2},
        r"pipeline parallelism \(--pipeline-parallel-size 2\)",
    ),
    "lora": ({**DBO, "enable_lora": True}, r"LoRA \(--enable-lora\)"),
    "routed_experts": (
        {**DBO, "enable_return_routed_experts": True},
        r"returned routed experts \(--enable-return-routed-experts\)",
    ),
    "attention_free": (
        {**DBO, "model": "mamba"},
        "dual batch overlap with hybrid or attention-free models",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(make_config, name: str):
    kwargs, message = REJECTED[name]
    with pytest.raises(ValueError, match=message):
        make_config(**kwargs)


def test_every_unsupported_feature_is_named(make_config):
    vllm_config = make_config(enable_dbo=True)
    vllm_config.lora_config = LoRAConfig()
    parallel_config = vllm_config.parallel_config
    parallel_config.pipeline_parallel_size = 2
    parallel_config.decode_context_parallel_size = 4
    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    with pytest.raises(ValueError) as error:
        vllm_config._validate_v2_model_runner()
    for part in (
        "--enable-lora",
        "--pipeline-parallel-size 2",
        "--decode-context-parallel-size 4",
        "cudagraph_mode PIECEWISE",
    ):
        assert part in str(error.value)

    vllm_config.speculative_config = object()
    features = vllm_config._get_dbo_unsupported_features()
    assert any("--speculative-config" in feature for feature in features)


@CPU_ONLY
@pytest.mark.parametrize("parallel_kwargs", [DBO, {"ubatch_size": 2}])
def test_cpu_needs_the_v2_runner(make_config, parallel_kwargs: dict[str, Any]):
    with pytest.raises(ValueError, match="on CPU needs Model Runner V2"):
        make_config(runner=V1, **parallel_kwargs)
    vllm_config = make_config(worker_cls="auto", **parallel_kwargs)
    assert vllm_config.parallel_config.worker_cls != "auto"
    assert vllm_config.parallel_config.use_ubatching


@pytest.mark.parametrize(
    "optimization_level, cudagraph_mode, expected",
    [
        # Defaults.
        (0, None, "NONE"),
        (1, None, "FULL_DECODE_ONLY"),
        (2, None, "FULL_AND_PIECEWISE"),
        # Explicit.
        (2, "NONE", "NONE"),
        (2, "FULL_DECODE_ONLY", "FULL_DECODE_ONLY"),
        (2, "FULL", "FULL"),
        (2, "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"),
        (1, "PIECEWISE", None),
        (2, "PIECEWISE", None),
    ],
)
def test_cudagraph_mode(
    make_config,
    optimization_level: int,
    cudagraph_mode: str | None,
    expected: str | None,
):
    """PIECEWISE is replaced if it was a default and refused if it was chosen."""
    compilation_config = {}
    if cudagraph_mode is not None:
        compilation_config["cudagraph_mode"] = cudagraph_mode
    kwargs = dict(
        optimization_level=optimization_level, compilation_config=compilation_config
    )
    platform_cls = type(current_platform)
    with (
        # A CPU has no graphs.
        patch.object(platform_cls, "support_static_graph_mode", return_value=True),
        patch.object(platform_cls, "check_and_update_config"),
    ):
        if expected is None:
            with pytest.raises(ValueError, match="PIECEWISE .use NONE, FULL_DECODE"):
                make_config(enable_dbo=True, **kwargs)
            return

        vllm_config = make_config(enable_dbo=True, **copy.deepcopy(kwargs))
        assert vllm_config.compilation_config.cudagraph_mode.name == expected
        vllm_config.__post_init__()
        assert vllm_config.compilation_config.cudagraph_mode.name == expected

        if expected == "FULL_DECODE_ONLY" and cudagraph_mode is None:
            vllm_config = make_config(**kwargs)
            mode = vllm_config.compilation_config.cudagraph_mode
            assert mode == CUDAGraphMode.PIECEWISE


def test_largest_batch_is_captured(make_config):
    """It may be off the stride of the sizes, and split or not, has a graph."""
    platform_cls = type(current_platform)
    with (
        patch.object(platform_cls, "support_static_graph_mode", return_value=True),
        patch.object(platform_cls, "check_and_update_config"),
    ):
        vllm_config = make_config(
            enable_dbo=True,
            max_num_batched_tokens=700,
            max_num_seqs=700,
            compilation_config={
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "max_cudagraph_capture_size": 700,
            },
        )
    assert vllm_config.compilation_config.cudagraph_capture_sizes[-1] == 700


def test_checks_survive_optimized_python():
    """`python -O` drops assertions."""
    code = f"""
import pytest
assert False  # Dropped.
names = ["conflict", "decode_threshold", "three_at_dp1", "all2all", "no_runner"]
raise SystemExit(pytest.main([
    "-q", "-p", "no:cacheprovider", {__file__!r},
    "-k", "test_rejected and (" + " or ".join(names) + ")",
]))
"""
    result = subprocess.run(
        [sys.executable, "-O", "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stdout + result.stderr
