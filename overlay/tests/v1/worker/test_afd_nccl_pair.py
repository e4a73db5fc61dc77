# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A tiny model served by both AFD roles on two GPUs, against one GPU without AFD.

pytest -s tests/v1/worker/test_afd_nccl_pair.py
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed.afd_transfer.control_utils import free_port
from tests.model_executor.afd.tiny_models import make_tiny_model

# The tests are the same, on the engines that `start` makes here.
from .test_afd_pair import (
    HEARTBEAT_TIMEOUT_S,
    START_TIMEOUT_S,
    Engine,
    _run_engine,
    test_ffn_is_lost_within_a_step,  # noqa: F401
    test_same_output_as_without_afd,  # noqa: F401
)

pytestmark = [
    pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skip_global_cleanup,
]

GPUS = {None: 0, "attention": 0, "ffn": 1}


class GPUEngine(Engine):
    def __init__(self, model: Path, role: str | None, port: int, **kwargs: Any):
        kwargs = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "max_num_batched_tokens": 128,
            "max_num_seqs": 8,
            "gpu_memory_utilization": 0.5,
            "kv_cache_memory_bytes": 64 << 20,
        } | kwargs
        visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
        env = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "CUDA_VISIBLE_DEVICES": visible[GPUS[role]],
        }
        if role is None:
            env["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        else:
            kwargs["afd_config"] = {
                "afd_role": role,
                "afd_connector": "P2pNcclAFDConnector",
                "afd_port": port,
                "connect_timeout_s": START_TIMEOUT_S,
                "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
            }
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.proc = context.Process(  # type: ignore[assignment]
            target=_run_engine,
            args=(theirs, env, kwargs, role == "attention"),
            daemon=True,
        )
        with patch.dict(os.environ, env):
            self.proc.start()
        theirs.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-qwen3-moe")
    make_tiny_model("Qwen3MoeForCausalLM", folder)
    return folder


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []
    port = free_port()

    def start(role: str | None, **kwargs: Any) -> Engine:
        engines.append(GPUEngine(model, role, port, **kwargs))
        return engines[-1]

    yield start
    for engine in engines:
        engine.proc.kill()
        engine.proc.join(60)
