# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A tiny model served by two processes with the AFD roles, against one without AFD.

Each engine runs in a process of its own, forked from one that has imported vLLM.
"""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.afd_transfer.control_utils import free_port
from tests.model_executor.afd.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON

pytestmark = [
    pytest.mark.skipif(
        not current_platform.is_cpu() or not HAS_TRITON,
        reason="runs on CPU, with TRITON_INTERPRET=1",
    ),
    pytest.mark.skip_global_cleanup,
]

# Of a whole engine's start, on a machine that has other things to do.
START_TIMEOUT_S = 300
HEARTBEAT_TIMEOUT_S = 15

# Prompt lengths of the requests that are sent at once, and tokens to generate.
BATCHES = [([7] * n, 3) for n in (1, 2, 3, 5, 8)] + [
    ([1], 2),
    ([101], 2),
    # More than a step takes: chunked prefill beside decodes.
    ([17, 2, 90, 150, 33], 4),
]
DBO = {
    "enable_dbo": True,
    "dbo_decode_token_threshold": 2,
    "dbo_prefill_token_threshold": 4,
}


def _run_engine(
    pipe: Connection, env: dict[str, str], kwargs: dict[str, Any], is_attention: bool
) -> None:
    """Serve `pipe`: batches of prompts in, tokens and logprobs or an error out."""
    os.environ.update(env)
    try:
        llm = LLM(**kwargs)
        pipe.send("ready")
        while (batch := pipe.recv()) is not None:
            prompts, max_tokens = batch
            params = SamplingParams(
                temperature=0, max_tokens=max_tokens, logprobs=4, ignore_eos=True
            )
            outputs = llm.generate(
                [{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False
            )
            pipe.send(
                [
                    (
                        list(o.outputs[0].token_ids),
                        [
                            {token: x.logprob for token, x in logprobs.items()}
                            for logprobs in o.outputs[0].logprobs or []
                        ],
                    )
                    for o in outputs
                ]
            )
        core: Any = llm.llm_engine.engine_core
        split_steps = 0
        if is_attention:
            worker = core.engine_core.model_executor.driver_worker.worker
            split_steps = worker.model_runner.afd.stats.split_steps
        core.shutdown()
        pipe.send(split_steps)
    except Exception as e:
        pipe.send(e if isinstance(e, RuntimeError) else RuntimeError(repr(e)))
    finally:
        os._exit(0)


class Engine:
    def __init__(self, model: Path, role: str | None, port: int, **kwargs: Any):
        kwargs = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "max_num_batched_tokens": 128,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 64 << 20,
        } | kwargs
        env = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        if role is None:
            env["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        else:
            kwargs["afd_config"] = {
                "afd_role": role,
                "afd_port": port,
                "connect_timeout_s": START_TIMEOUT_S,
                "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
            }
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.proc = context.Process(
            target=_run_engine,
            args=(theirs, env, kwargs, role == "attention"),
            daemon=True,
        )
        self.proc.start()
        theirs.close()

    def receive(self, timeout_s: float = START_TIMEOUT_S) -> Any:
        assert self.pipe.poll(timeout_s), "no answer"
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[tuple]:
        self.pipe.send((prompts, max_tokens))
        return self.receive()

    def end(self) -> int:
        """Shut down. Returns the number of steps that were split."""
        self.pipe.send(None)
        split_steps = self.receive()
        self.proc.join(START_TIMEOUT_S)
        assert self.proc.exitcode == 0
        return split_steps

    def signal(self, signum: int) -> None:
        assert self.proc.pid is not None
        os.kill(self.proc.pid, signum)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-qwen3-moe")
    # Not here: OpenMP does not work in forks of a process that has used it.
    proc = multiprocessing.get_context("fork").Process(
        target=make_tiny_model, args=("Qwen3MoeForCausalLM", folder)
    )
    proc.start()
    proc.join(START_TIMEOUT_S)
    assert proc.exitcode == 0
    return folder


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []
    port = free_port()

    def start(role: str | None, **kwargs: Any) -> Engine:
        engines.append(Engine(model, role, port, **kwargs))
        return engines[-1]

    yield start
    for engine in engines:
        engine.proc.kill()
        engine.proc.join(60)


def _requests() -> list[tuple[list[list[int]], int]]:
    rng = random.Random(0)
    return [
        ([[rng.randrange(3, 250) for _ in range(n)] for n in lengths], max_tokens)
        for lengths, max_tokens in BATCHES
    ]


def _assert_equal(actual: list[tuple], expected: list[tuple]) -> None:
    for (tokens, logprobs), (their_tokens, their_logprobs) in zip(actual, expected):
        assert tokens == their_tokens
        for ours, theirs in zip(logprobs, their_logprobs):
            for token in ours.keys() & theirs.keys():
                assert ours[token] == pytest.approx(theirs[token], abs=1e-4)


def test_same_output_as_without_afd(start: Callable[..., Engine]) -> None:
    reference = start(None)
    reference.receive()
    requests = _requests()
    expected = [reference.generate(*request) for request in requests]
    reference.end()

    ffn = start("ffn")
    for kwargs in ({}, DBO):
        # One after the other: the same FFN server serves both.
        attention = start("attention", **kwargs)
        attention.receive()
        for request, output in zip(requests, expected):
            _assert_equal(attention.generate(*request), output)
        assert (attention.end() > 0) == bool(kwargs)
    ffn.receive()
    ffn.end()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_ffn_is_lost_within_a_step(start: Callable[..., Engine], signum: int) -> None:
    ffn = start("ffn")
    attention = start("attention", **DBO)
    ffn.receive()
    attention.receive()
    attention.generate([[5, 6, 7]], 2)

    # Far more than it can do until then.
    attention.pipe.send(([[5, 6, 7]] * 8, 200))
    ffn.signal(signum)
    before = time.monotonic()
    with pytest.raises(RuntimeError, match="AFD ffn peer"):
        attention.receive()
    # Time enough to see that heartbeats are missing, and for a slow machine.
    assert time.monotonic() - before < 3 * HEARTBEAT_TIMEOUT_S
