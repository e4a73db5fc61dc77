# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What goes with attention-FFN disaggregation (AFD), and what the errors say.

The tables in docs/features/afd.md describe the same rules.
"""

import copy
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

import vllm.envs as envs
from vllm.config import AFDConfig, CompilationMode, CUDAGraphMode, VllmConfig
from vllm.config.afd import AFDRole, _unsupported_platform, apply_afd_config
from vllm.config.model import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.llm import LLM
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform, PlatformEnum
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.executor.uniproc_executor import UniProcExecutor

pytestmark = pytest.mark.skip_global_cleanup

ATTENTION: dict[str, Any] = {"afd_config": {"afd_role": "attention"}}
FFN: dict[str, Any] = {"afd_config": {"afd_role": "ffn"}}
ROLES: dict[AFDRole, dict[str, Any]] = {"attention": ATTENTION, "ffn": FFN}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    kwargs: dict[str, Any] = dict(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    hf_configs = {
        "dense": LlamaConfig(architectures=["LlamaForCausalLM"], **kwargs),
        "moe": Qwen3MoeConfig(
            architectures=["Qwen3MoeForCausalLM"],
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            **kwargs,
        ),
    }
    paths = {}
    for name, hf_config in hf_configs.items():
        paths[name] = str(tmp_path_factory.mktemp(name))
        hf_config.save_pretrained(paths[name])
    return paths


@pytest.fixture
def make_config(models: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    # Triton may only be missing from this process.
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setattr("vllm.config.afd.HAS_TRITON", True)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if not current_platform.is_cpu():
        # The same rules hold wherever AFD will run.
        monkeypatch.setattr("vllm.config.afd._unsupported_platform", lambda config: [])

    def make(model: str = "moe", **kwargs: Any) -> VllmConfig:
        kwargs.setdefault("distributed_executor_backend", "mp")
        return EngineArgs(
            model=models[model], **copy.deepcopy(kwargs)
        ).create_engine_config()

    return make


def settings(vllm_config: VllmConfig) -> dict[str, Any]:
    """What AFD may change in the rest of the config."""
    return {
        "afd_config": vllm_config.afd_config,
        "v2": vllm_config.use_v2_model_runner,
        "mode": vllm_config.compilation_config.mode,
        "cudagraph_mode": vllm_config.compilation_config.cudagraph_mode,
        "capture_sizes": vllm_config.compilation_config.cudagraph_capture_sizes,
        "prefix_caching": vllm_config.cache_config.enable_prefix_caching,
        "tokenizer": not vllm_config.model_config.skip_tokenizer_init,
        "dbo": vllm_config.parallel_config.enable_dbo,
        "num_ubatches": vllm_config.parallel_config.num_ubatches,
    }


# The config alone.

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({}, r"needs afd_role, one of \('attention', 'ffn'\)"),
    ({"afd_host": "127.0.0.1"}, r"needs afd_role"),
    ({"afd_role": None}, r"afd_role\n.*'attention' or 'ffn'.*input_value=None"),
    ({"afd_role": "both"}, r"afd_role\n.*'attention' or 'ffn'.*input_value='both'"),
    ({"afd_role": "FFN"}, r"afd_role\n.*'attention' or 'ffn'.*input_value='FFN'"),
    ({"afd_rank": 3}, r"Unknown AFD config key afd_rank=3\. Allowed are afd_role, .*"),
    ({"role": "ffn", "port": 1}, r"key role='ffn', port=1\. Allowed .*afd_port"),
    ({"afd_port": 0}, r"afd_port\n.*greater than or equal to 1 .*input_value=0"),
    ({"afd_port": -5}, r"afd_port\n.*greater than or equal to 1 .*input_value=-5"),
    ({"afd_port": 65536}, r"afd_port\n.*less than or equal to 65535 .*65536"),
    ({"afd_port": "http"}, r"afd_port\n.*valid integer.*input_value='http'"),
    ({"afd_port": 1.5}, r"afd_port\n.*valid integer.*input_value=1.5"),
    ({"afd_port": None}, r"afd_port\n.*valid integer.*input_value=None"),
    ({"afd_host": ""}, r"afd_host\n.*at least 1 character"),
    ({"afd_host": 127}, r"afd_host\n.*valid string.*input_value=127"),
    ({"afd_connector": ""}, r"afd_connector\n.*at least 1 character"),
    ({"afd_connector": None}, r"afd_connector\n.*valid string"),
    ({"afd_connector_module_path": ""}, r"module_path\n.*at least 1 character"),
    ({"gate_placement": "both"}, r"gate_placement\n.*'auto', 'ffn' or 'attention'.*"),
    ({"num_ffn_ranks": 0}, r"num_ffn_ranks\n.*greater than or equal to 1"),
    ({"num_ffn_ranks": -1}, r"num_ffn_ranks\n.*greater than or equal to 1"),
    ({"num_attention_ranks": 0}, r"num_attention_ranks\n.*greater than or equal to 1"),
    (
        {"num_attention_ranks": 1, "num_ffn_ranks": 2},
        r"num_attention_ranks=1 must be a multiple of num_ffn_ranks=2",
    ),
    (
        {"num_attention_ranks": 3, "num_ffn_ranks": 2},
        r"num_attention_ranks=3 must be a multiple of num_ffn_ranks=2",
    ),
    ({"afd_connector_extra_config": [1]}, r"afd_connector_extra_config\n.*dictionary"),
    *(
        ({name: value}, rf"{name}\n.*{message}")
        for name in ("connect_timeout_s", "heartbeat_timeout_s", "step_timeout_s")
        for value, message in (
            (0, "greater than 0 .*input_value=0"),
            (-1.5, "greater than 0 .*input_value=-1.5"),
            (float("inf"), "finite number"),
            (float("nan"), "(finite number|greater than 0)"),
            ("soon", "valid number.*input_value='soon'"),
            (1e10, r"less than or equal to 1000000000.*input_value=1"),
        )
    ),
]


@pytest.mark.parametrize("fields, message", BAD_FIELDS)
def test_bad_field_is_named(fields: dict[str, Any], message: str):
    if "afd_role" not in fields and not message.startswith("needs"):
        fields = {"afd_role": "ffn", **fields}
    with pytest.raises(ValueError, match=message):
        AFDConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"afd_host": "::1", "afd_port": 65535},
        {"num_attention_ranks": 2, "num_ffn_ranks": 1},
        {"num_attention_ranks": 4, "num_ffn_ranks": 2},
        {"num_attention_ranks": 2, "num_ffn_ranks": 2},
        {"gate_placement": "attention", "connect_timeout_s": 0.5},
        {"afd_connector": "Mine", "afd_connector_module_path": "some.module"},
        {"afd_connector_extra_config": {"anything": [1]}},
    ],
)
@pytest.mark.parametrize("role", ROLES)
def test_good_fields(role: AFDRole, fields: dict[str, Any]):
    config = AFDConfig(afd_role=role, **fields)
    for name, value in fields.items():
        assert getattr(config, name) == value
    assert (config.is_attention, config.is_ffn) == (role == "attention", role == "ffn")
    assert ForkingPickler.loads(ForkingPickler.dumps(config)) == config


def test_hash_covers_what_changes_the_graph():
    def changed(**fields: Any) -> bool:
        base: dict[str, Any] = {"afd_role": "attention"}
        return (
            AFDConfig(**base).compute_hash()
            != AFDConfig(**{**base, **fields}).compute_hash()
        )

    assert changed(afd_role="ffn")
    assert changed(gate_placement="attention")
    assert not changed(
        afd_host="localhost",
        afd_port=1,
        connect_timeout_s=1,
        heartbeat_timeout_s=1,
        step_timeout_s=1,
        afd_connector="Mine",
        afd_connector_extra_config={"a": 1},
    )


def test_hash_of_the_whole_config(make_config):
    vllm_config = make_config()
    hashes = [vllm_config.compute_hash()]
    for role in ROLES:
        # Alone: the role also changes other parts.
        vllm_config.afd_config = AFDConfig(afd_role=role)
        hashes.append(vllm_config.compute_hash())
        vllm_config.afd_config = AFDConfig(afd_role=role, afd_port=1)
        assert vllm_config.compute_hash() == hashes[-1]
    assert len(set(hashes)) == 3


def test_secret_is_read_and_never_stored(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_AFD_SECRET", raising=False)
    assert envs.VLLM_AFD_SECRET is None
    monkeypatch.setenv("VLLM_AFD_SECRET", "open sesame")
    assert envs.VLLM_AFD_SECRET == "open sesame"
    # The factors are written to the compile cache.
    assert "open sesame" not in str(envs.compile_factors())
    assert "open sesame" not in repr(AFDConfig(afd_role="ffn"))


# The ways in.

FLAGS: list[list[str]] = [
    ["--afd-config", '{"afd_role": "ffn", "afd_port": 4242}'],
    ['--afd-config={"afd_role": "ffn", "afd_port": 4242}'],
    ["--afd-config.afd_role", "ffn", "--afd-config.afd_port", "4242"],
    ["--afd-config.afd_role=ffn", "--afd-config.afd_port=4242"],
]


@pytest.mark.parametrize("flags", FLAGS)
def test_vllm_serve_flag(models: dict[str, str], flags: list[str]):
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model", models["moe"], *flags])
    expected = AFDConfig(afd_role="ffn", afd_port=4242)
    assert EngineArgs.from_cli_args(args).afd_config == expected


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--afd-config", '{"afd_role": "fn"}'], "'attention' or 'ffn'"),
        (["--afd-config", '{"role": "ffn"}'], "Unknown AFD config key role='ffn'"),
        (["--afd-config.afd_prt", "1"], "Unknown AFD config key afd_prt=1"),
        (["--afd-config", "{}"], "needs afd_role"),
        (["--afd-config", "ffn"], "Invalid JSON"),
        (["--afd-config", '["ffn"]'], "AFDConfig"),
    ],
)
def test_vllm_serve_flag_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    parser = make_arg_parser(FlexibleArgumentParser())
    with pytest.raises(SystemExit) as exit_info:
        parser.parse_args(["--model", "some/model", *flags])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err.partition(" error: ")[2]
    assert error.startswith("argument --afd-config: ")
    assert message in error


@pytest.mark.parametrize("as_dict", [True, False])
def test_llm_argument(models: dict[str, str], as_dict: bool):
    fields: dict[str, Any] = {"afd_role": "ffn", "afd_port": 4242}
    seen: list[EngineArgs] = []

    class Stop(Exception):
        pass

    def from_engine_args(engine_args: EngineArgs, **kwargs: Any):
        seen.append(engine_args)
        raise Stop

    with (
        patch("vllm.entrypoints.llm.LLMEngine.from_engine_args", from_engine_args),
        pytest.raises(Stop),
    ):
        LLM(models["moe"], afd_config=fields if as_dict else AFDConfig(**fields))
    assert seen[0].afd_config == AFDConfig(**fields)

    with pytest.raises(ValueError, match="Unknown AFD config key prt=1"):
        LLM(models["moe"], afd_config={"afd_role": "ffn", "prt": 1})


# The rest of the config.


def test_off_by_default(make_config):
    vllm_config = make_config()
    assert vllm_config.afd_config is None
    assert vllm_config.cache_config.enable_prefix_caching
    assert vllm_config.compilation_config.mode != CompilationMode.NONE


ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "attention": (
        ATTENTION,
        {"v2": True, "prefix_caching": True, "tokenizer": True, "dbo": False},
    ),
    "attention_compiled": (
        {**ATTENTION, "compilation_config": {"mode": 3}},
        {"v2": True},
    ),
    "attention_eager": (
        {**ATTENTION, "enforce_eager": True},
        {"v2": True, "mode": CompilationMode.NONE},
    ),
    "attention_dbo": (
        {**ATTENTION, "enable_dbo": True},
        {"v2": True, "dbo": True, "num_ubatches": 2},
    ),
    "attention_ubatch_size": (
        {**ATTENTION, "ubatch_size": 2},
        {"v2": True, "num_ubatches": 2},
    ),
    "attention_no_prefix_caching": (
        {**ATTENTION, "enable_prefix_caching": False},
        {"prefix_caching": False},
    ),
    "attention_uni": ({**ATTENTION, "distributed_executor_backend": "uni"}, {}),
    "attention_kv_transfer": (
        {
            **ATTENTION,
            "kv_transfer_config": {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
            },
        },
        {},
    ),
    "ffn": (
        FFN,
        {
            "mode": CompilationMode.NONE,
            "prefix_caching": False,
            "tokenizer": False,
            "num_ubatches": 0,
        },
    ),
    "ffn_eager": ({**FFN, "enforce_eager": True}, {"mode": CompilationMode.NONE}),
    "ffn_mode_none": (
        {**FFN, "compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}},
        {"mode": CompilationMode.NONE},
    ),
    "ffn_prefix_caching": (
        {**FFN, "enable_prefix_caching": True},
        {"prefix_caching": False},
    ),
    # Ignored where nothing is captured or compiled, as without AFD.
    "ffn_eager_beats_modes": (
        {
            **FFN,
            "enforce_eager": True,
            "compilation_config": {"mode": 3, "cudagraph_mode": "FULL"},
        },
        {"mode": CompilationMode.NONE},
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(make_config, name: str):
    kwargs, expected = ACCEPTED[name]
    vllm_config = make_config(**kwargs)
    before = settings(vllm_config)
    assert before["afd_config"] == AFDConfig(**kwargs["afd_config"])
    assert before["cudagraph_mode"] == CUDAGraphMode.NONE
    assert not before["capture_sizes"]
    assert {key: before[key] for key in expected} == expected

    # The engine core runs it again on the config that the front end sends.
    received = ForkingPickler.loads(ForkingPickler.dumps(vllm_config))
    assert settings(received) == before
    received.__post_init__()
    assert settings(received) == before
    vllm_config.__post_init__()
    assert settings(vllm_config) == before


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a check of the CPU worker")
@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_ffn_reserves_no_memory_for_a_kv_cache(
    make_config, role: AFDRole, monkeypatch: pytest.MonkeyPatch
):
    from vllm.v1.worker.cpu_worker import CPUWorker

    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    # All of it: more than is free anywhere.
    vllm_config = make_config(afd_config={"afd_role": role}, gpu_memory_utilization=1.0)
    if role == "attention":
        with pytest.raises(ValueError, match="--gpu-memory-utilization"):
            CPUWorker(vllm_config, 0, 0, "")
    else:
        CPUWorker(vllm_config, 0, 0, "")


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "tensor_parallel": (
        {"tensor_parallel_size": 2},
        r"--tensor-parallel-size 2 \(only 1 so far\)",
    ),
    "data_parallel": (
        {"data_parallel_size": 2},
        r"--data-parallel-size 2 \(only 1 so far\)",
    ),
    "attention_ranks": (
        {"afd_config": {"num_attention_ranks": 2}},
        r"num_attention_ranks=2 \(only 1 so far\)",
    ),
    "ffn_ranks": (
        {"afd_config": {"num_attention_ranks": 2, "num_ffn_ranks": 2}},
        r"num_ffn_ranks=2 \(only 1 so far\)",
    ),
    "pipeline_parallel": (
        {"pipeline_parallel_size": 2},
        r"--pipeline-parallel-size 2 \(only 1\)",
    ),
    "speculative": (
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 2,
            }
        },
        r"speculative decoding \(--speculative-config\)",
    ),
    "lora": ({"enable_lora": True}, r"LoRA \(--enable-lora\)"),
    "weight_transfer": (
        {"weight_transfer_config": {"backend": "nccl"}},
        r"weight transfer \(--weight-transfer-config\)",
    ),
    "uva_offload": ({"cpu_offload_gb": 1}, r"offloading \(--cpu-offload-gb 1.*\)"),
    "prefetch_offload": (
        {"offload_group_size": 2},
        r"offloading \(--offload-group-size 2\)",
    ),
    "routed_experts": (
        {"enable_return_routed_experts": True},
        r"returned routed experts \(--enable-return-routed-experts\)",
    ),
    "quantization": (
        {"quantization": "fp8"},
        r"quantization 'fp8' \(supported: none yet\)",
    ),
    "pooling": ({"runner": "pooling"}, r"pooling models \(--runner pooling, .+\)"),
    "dense": (
        {"model": "dense"},
        r"dense models \(LlamaForCausalLM has no experts to run on the FFN role\)",
    ),
    "kv_sharing_fast_prefill": (
        {"kv_sharing_fast_prefill": True},
        r"fast prefill \(--kv-sharing-fast-prefill\)",
    ),
    "cudagraph_mode": (
        {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
        r"cudagraph_mode FULL_DECODE_ONLY \(only NONE so far\)",
    ),
}
REJECTED_ON_FFN: dict[str, tuple[dict[str, Any], str]] = {
    "dbo": ({"enable_dbo": True}, r"--enable-dbo \(set it on the attention role only"),
    "ubatch_size": ({"ubatch_size": 2}, r"--ubatch-size 2 \(set it on the attention"),
    "mode": (
        {"compilation_config": {"mode": 3}},
        r"compilation mode VLLM_COMPILE \(only NONE",
    ),
    "kv_transfer": (
        {
            "kv_transfer_config": {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
            }
        },
        r"--kv-transfer-config \(it holds no cache\)",
    ),
    "ec_transfer": (
        {
            "ec_transfer_config": {
                "ec_connector": "ECExampleConnector",
                "ec_role": "ec_consumer",
            }
        },
        r"--ec-transfer-config \(it holds no cache\)",
    ),
    "kv_offloading": (
        {"kv_offloading_size": 1.0},
        r"--kv-offloading-size 1.0 \(it holds no KV cache\)",
    ),
}


def refuse(make_config, role: AFDRole, kwargs: dict[str, Any], message: str) -> None:
    kwargs = copy.deepcopy(kwargs)
    afd_config = {"afd_role": role, **kwargs.pop("afd_config", {})}
    if role == "attention":
        # Otherwise the defaults of this would be what is refused.
        kwargs.setdefault("max_num_batched_tokens", 2048)
    with pytest.raises(ValueError) as error:
        make_config(afd_config=afd_config, **kwargs)
    assert f"AFD with afd_role='{role}' does not support" in str(error.value)
    error.match(message)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", REJECTED)
def test_rejected(make_config, name: str, role: AFDRole):
    refuse(make_config, role, *REJECTED[name])


@pytest.mark.parametrize("name", REJECTED_ON_FFN)
def test_rejected_on_ffn(make_config, name: str):
    refuse(make_config, "ffn", *REJECTED_ON_FFN[name])


def _set(path: str, value: Any) -> Callable[[VllmConfig], None]:
    def change(vllm_config: VllmConfig) -> None:
        *parents, name = path.split(".")
        target: Any = vllm_config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)

    return change


# What other checks refuse first on some platforms.
REJECTED_LATER: dict[str, tuple[Callable[[VllmConfig], None], str]] = {
    "eplb": (_set("parallel_config.enable_eplb", True), r"\(--enable-eplb\)"),
    "elastic_ep": (
        _set("parallel_config.enable_elastic_ep", True),
        r"\(--enable-elastic-ep\)",
    ),
    "pcp": (
        _set("parallel_config.prefill_context_parallel_size", 2),
        r"--prefill-context-parallel-size 2 \(only 1\)",
    ),
    "dcp": (
        _set("parallel_config.decode_context_parallel_size", 2),
        r"--decode-context-parallel-size 2 \(only 1\)",
    ),
    "nnodes": (_set("parallel_config.nnodes", 2), r"--nnodes 2 \(only 1\)"),
    "ray": (
        _set("parallel_config.distributed_executor_backend", "ray"),
        r"--distributed-executor-backend ray \(only mp and uni",
    ),
    "external_launcher": (
        _set("parallel_config.distributed_executor_backend", "external_launcher"),
        r"--distributed-executor-backend external_launcher \(only mp and uni",
    ),
    "custom_executor": (
        _set("parallel_config.distributed_executor_backend", UniProcExecutor),
        r"--distributed-executor-backend \S*UniProcExecutor\S* \(only mp and uni",
    ),
    "custom_executor_by_name": (
        _set("parallel_config.distributed_executor_backend", "some.module.Mine"),
        r"--distributed-executor-backend some.module.Mine \(only mp and uni",
    ),
    "sleep_mode": (
        _set("model_config.enable_sleep_mode", True),
        r"sleep mode \(--enable-sleep-mode\)",
    ),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", REJECTED_LATER)
def test_rejected_later(make_config, name: str, role: AFDRole):
    change, message = REJECTED_LATER[name]
    vllm_config = make_config(**ROLES[role])
    apply_afd_config(vllm_config)
    change(vllm_config)
    with pytest.raises(ValueError, match=message):
        apply_afd_config(vllm_config)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "name, message",
    [
        ("is_multimodal_model", r"multimodal models \(Qwen3MoeForCausalLM\)"),
        ("is_encoder_decoder", r"encoder-decoder models \(Qwen3MoeForCausalLM\)"),
    ],
)
def test_rejected_models(make_config, role: AFDRole, name: str, message: str):
    vllm_config = make_config(**ROLES[role])
    vars(vllm_config.model_config).pop(name, None)  # A cached property's value.
    with (
        patch.object(ModelConfig, name, True),
        pytest.raises(ValueError, match=message),
    ):
        apply_afd_config(vllm_config)


@pytest.mark.parametrize(
    "platform, own_connector, message",
    [
        ("cpu", False, None),
        ("cpu", True, None),
        (
            "cuda",
            False,
            "platform cuda with afd_connector='GlooAFDConnector' (vLLM's own "
            "connectors only serve cpu so far; afd_connector_module_path can name "
            "another)",
        ),
        ("cuda", True, None),
        ("rocm", False, "platform rocm (only cpu, and cuda with a connector of"),
        ("rocm", True, "platform rocm (only cpu, and cuda with a connector of"),
        ("xpu", True, "platform xpu (only cpu, and cuda with a connector of"),
        ("tpu", True, "platform tpu (only cpu, and cuda with a connector of"),
    ],
)
@pytest.mark.parametrize("role", ROLES)
def test_platforms(
    monkeypatch: pytest.MonkeyPatch,
    role: AFDRole,
    platform: str,
    own_connector: bool,
    message: str | None,
):
    fake = Platform()
    fake._enum = PlatformEnum[platform.upper()]
    monkeypatch.setattr("vllm.platforms.current_platform", fake)
    own: dict[str, Any] = {}
    if own_connector:
        own = {"afd_connector": "Mine", "afd_connector_module_path": "some.module"}
    config = AFDConfig(afd_role=role, **own)
    problems = _unsupported_platform(config)
    if message is None:
        assert problems == []
    else:
        (problem,) = problems
        assert problem.startswith(message)


def test_the_platform_is_checked(make_config, monkeypatch: pytest.MonkeyPatch):
    vllm_config = make_config(**FFN)
    monkeypatch.setattr("vllm.config.afd._unsupported_platform", lambda config: ["it"])
    with pytest.raises(ValueError, match="does not support it"):
        apply_afd_config(vllm_config)


def test_every_problem_is_named_at_once(make_config):
    """And each of them once."""
    with pytest.raises(ValueError) as error:
        make_config(
            "dense", **FFN, enable_dbo=True, tensor_parallel_size=2, enable_lora=True
        )
    for part in ("dense models", "--enable-dbo", "--tensor-parallel-size 2", "LoRA"):
        assert part in str(error.value)
    assert str(error.value).count("tensor-parallel-size") == 1


@pytest.mark.parametrize("role", ROLES)
def test_cudagraph_mode_where_graphs_exist(make_config, role: AFDRole):
    """A default is replaced, a choice is refused."""
    platform_cls = type(current_platform)
    with (
        patch.object(platform_cls, "support_static_graph_mode", return_value=True),
        patch.object(platform_cls, "check_and_update_config"),
    ):
        assert make_config().compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        vllm_config = make_config(**ROLES[role])
        assert vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
        assert vllm_config.compilation_config.cudagraph_capture_sizes == []
        for mode in ("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
            with pytest.raises(ValueError, match=rf"cudagraph_mode {mode} \(only NONE"):
                make_config(**ROLES[role], compilation_config={"cudagraph_mode": mode})


@pytest.mark.parametrize("enable_dbo", [False, True])
@pytest.mark.parametrize("runner", [None, "0", "1"])
def test_attention_selects_the_v2_runner(
    make_config,
    monkeypatch: pytest.MonkeyPatch,
    runner: str | None,
    enable_dbo: bool,
):
    if runner is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    kwargs = {**ATTENTION, "enable_dbo": enable_dbo}
    if runner == "0":
        with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=0 turns off"):
            make_config(**kwargs)
        return
    assert make_config(**kwargs).use_v2_model_runner


def test_attention_needs_triton(make_config, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vllm.config.afd.HAS_TRITON", False)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", False)
    with pytest.raises(ValueError, match="On CPU, set TRITON_INTERPRET=1"):
        make_config(**ATTENTION)
    # The FFN role has a runner of its own, whatever is asked for.
    for runner in ("0", "1"):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
        assert not make_config(**FFN).use_v2_model_runner


def test_a_config_without_a_model(make_config):
    apply_afd_config(
        SimpleNamespace(afd_config=None)  # type: ignore[arg-type]
    )
    vllm_config = VllmConfig(afd_config=AFDConfig(afd_role="ffn"))
    assert vllm_config.compilation_config.mode == CompilationMode.NONE


def test_checks_survive_optimized_python():
    """`python -O` drops assertions."""
    code = f"""
import pytest
assert False  # Dropped.
raise SystemExit(pytest.main([
    "-q", "-p", "no:cacheprovider", {__file__!r},
    "-k", "test_rejected or test_bad_field or test_attention_needs_triton",
]))
"""
    result = subprocess.run(
        [sys.executable, "-O", "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stdout + result.stderr
