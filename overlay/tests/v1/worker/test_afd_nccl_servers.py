# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Several attention ranks served by FFN ranks over NCCL, against one GPU without AFD.

pytest -s tests/v1/worker/test_afd_nccl_servers.py
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from tests.distributed.afd_transfer.control_utils import free_port
from tests.model_executor.afd.tiny_models import make_tiny_model
from tests.utils import RemoteOpenAIServer

from .test_afd_pair import DBO, START_TIMEOUT_S, _assert_equal, _requests

pytestmark = [
    pytest.mark.skipif(torch.accelerator.device_count() < 3, reason="needs three GPUs"),
    pytest.mark.skip_global_cleanup,
]

ARGS = [
    "--dtype=float32",
    "--enforce-eager",
    "--tokens-only",
    "--max-model-len=256",
    "--max-num-batched-tokens=128",
    "--max-num-seqs=8",
    "--gpu-memory-utilization=0.5",
    "--kv-cache-memory-bytes=67108864",
]
DBO_ARGS = [
    f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
    for name, value in DBO.items()
]


def _serve(model: Path, gpus: range, args: list[str]) -> RemoteOpenAIServer:
    here = os.environ.get("CUDA_VISIBLE_DEVICES")
    all_gpus = here.split(",") if here else list(map(str, range(gpus.stop)))
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(all_gpus[i] for i in gpus),
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    return RemoteOpenAIServer(
        str(model), ARGS + args, env_dict=env, max_wait_seconds=START_TIMEOUT_S
    )


def _generate(
    server: RemoteOpenAIServer, prompts: list[list[int]], max_tokens: int
) -> list[tuple]:
    def post(prompt: list[int]) -> tuple:
        params = {
            "temperature": 0,
            "max_tokens": max_tokens,
            "logprobs": 4,
            "ignore_eos": True,
        }
        response = requests.post(
            server.url_for("inference/v1/generate"),
            json={"token_ids": prompt, "sampling_params": params},
            timeout=START_TIMEOUT_S,
        )
        response.raise_for_status()
        (choice,) = response.json()["choices"]
        logprobs = [
            {top["token"]: top["logprob"] for top in token["top_logprobs"]}
            for token in choice["logprobs"]["content"]
        ]
        return choice["token_ids"], logprobs

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(post, prompts))


def _num_steps(server: RemoteOpenAIServer) -> list[float]:
    """Those that each engine has run with AFD."""
    lines = requests.get(server.url_for("metrics"), timeout=60).text.splitlines()
    name = "vllm:afd_steps_total{"
    return [float(line.split()[-1]) for line in lines if line.startswith(name)]


@pytest.mark.parametrize(
    ("num_engines", "tp_size", "gate", "ffn_args"),
    [
        (2, 1, "ffn", []),
        (2, 1, "attention", []),
        (1, 2, "ffn", []),
        (1, 2, "ffn", ["--enable-expert-parallel"]),
        (2, 2, "ffn", []),
    ],
)
def test_same_output_as_without_afd(
    num_engines: int, tp_size: int, gate: str, ffn_args: list[str], tmp_path: Path
) -> None:
    num_ranks = num_engines * tp_size
    if torch.accelerator.device_count() < num_ranks + tp_size:
        pytest.skip(f"needs {num_ranks + tp_size} GPUs")
    make_tiny_model("Qwen3MoeForCausalLM", tmp_path)
    batches = _requests()
    with _serve(tmp_path, range(1), []) as server:
        expected = [_generate(server, *batch) for batch in batches]

    def afd_args(role: str) -> list[str]:
        config: dict[str, Any] = {
            "afd_role": role,
            "afd_connector": "P2pNcclAFDConnector",
            "afd_port": port,
            "num_attention_ranks": num_ranks,
            "num_ffn_ranks": tp_size,
            "gate_placement": gate,
        }
        return [
            f"--afd-config={json.dumps(config)}",
            f"--tensor-parallel-size={tp_size}",
        ]

    port = free_port()
    attention_args = [*afd_args("attention"), f"--data-parallel-size={num_engines}"]
    ffn_gpus = range(num_ranks, num_ranks + tp_size)
    with (
        _serve(tmp_path, ffn_gpus, afd_args("ffn") + ffn_args),
        _serve(tmp_path, range(num_ranks), attention_args + DBO_ARGS) as attention,
        ThreadPoolExecutor(2) as pool,
    ):
        # All at once, so that the engines run steps at the same time.
        jobs = [pool.submit(_generate, attention, *batch) for batch in batches]
        for job, outputs in zip(jobs, expected):
            assert len(job.result()) == len(outputs)
            _assert_equal(job.result(), outputs)
        steps = _num_steps(attention)
    assert len(steps) == num_engines and all(steps)
