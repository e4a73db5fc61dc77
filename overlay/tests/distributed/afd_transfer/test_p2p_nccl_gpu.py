# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The NCCL connector on two GPUs, with a process each.

    pytest -s tests/distributed/afd_transfer/test_p2p_nccl_gpu.py

Prints how long it took until a device was free again after its peer was lost.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from vllm.distributed.afd_transfer.afd_connector.base import AFDLayout, AFDTransfer
from vllm.distributed.afd_transfer.errors import AFDError, AFDPeerError

from .utils import ATTENTION_PEER, FFN_PEER, Step, experts, make_config, make_input

pytestmark = [
    pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skip_global_cleanup,
]

START_TIMEOUT_S = 120
STEP_TIMEOUT_S = 5.0
LAYOUT = AFDLayout(512, 2, 1024, torch.bfloat16, 8, torch.float32)
STAGES = [[1], [512], [0], [1, 1], [256, 256], [0, 7], [511, 1], [300, 0], [64]] * 5


def _steps() -> list[Step]:
    return [Step(i + 1, rows, [8] * 6) for i, rows in enumerate(STAGES)]


def _make_input(transfer: AFDTransfer) -> list[torch.Tensor]:
    # All transfers here have logits.
    tensors = make_input(LAYOUT, transfer)
    return [tensor.cuda() for tensor in tensors if tensor is not None]


def _run_attention(connector: Any, steps: list[Step]) -> None:
    for step in steps:
        # Before: a copy from the host would wait for the device.
        inputs = iter([_make_input(t) for layer in step.layers for t in layer])
        outputs = []
        for transfers in step.layers:
            handles = []
            for transfer in transfers:
                handles.append((transfer, connector.submit(transfer, *next(inputs))))
            outputs += [(transfer, handle.wait()) for transfer, handle in handles]
        connector.finish_step()
        for transfer, output in outputs:
            expected = experts(transfer, *_make_input(transfer))
            torch.testing.assert_close(output, expected)


def _run_ffn(connector: Any, steps: list[Step]) -> None:
    workspace = torch.empty(512, 1024, dtype=torch.bfloat16, device="cuda")
    for step in steps:
        for transfers in step.layers:
            for transfer in transfers:
                output = workspace[: transfer.rows]
                output.copy_(experts(transfer, *connector.recv(transfer)))
                connector.send(transfer, output)
        connector.finish_step()


def _main(role: Any, pipe: Connection, case: str) -> None:
    from vllm.distributed.afd_transfer.afd_connector.p2p_nccl_connector import (
        P2pNcclAFDConnector,
    )

    torch.accelerator.set_device_index(0)
    peer = FFN_PEER if role == "attention" else ATTENTION_PEER
    config = make_config("P2pNcclAFDConnector", step_timeout_s=STEP_TIMEOUT_S)
    connector = P2pNcclAFDConnector(config, role, LAYOUT, peer)

    def exchange(data: bytes) -> bytes:
        pipe.send(data)
        return pipe.recv()

    answer: Any
    try:
        connector.connect(exchange, "127.0.0.1", START_TIMEOUT_S)
        pipe.send("connected")
        steps = _steps()
        if role == "attention":
            _run_attention(connector, steps)
        elif case == "steps":
            _run_ffn(connector, steps)
        else:
            _run_ffn(connector, steps[:1])
            pipe.send("stops")
            if case == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(START_TIMEOUT_S)
        answer = "done"
    except Exception as e:
        start = time.monotonic()
        # Hangs if nothing has ended the transfers.
        torch.accelerator.synchronize()
        answer = (
            (e if isinstance(e, AFDError) else AFDError(repr(e))),
            (time.monotonic() - start),
        )
    connector.close()
    pipe.send(answer)


@pytest.fixture
def start() -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []

    def start(case: str, gpus: tuple[int, int] = (0, 1)) -> list[Connection]:
        pipes = []
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        for role, gpu in zip(("attention", "ffn"), gpus):
            pipe, theirs = context.Pipe()
            gpus_here = (devices or "0,1").split(",")
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus_here[gpu]
            process = context.Process(
                target=_main, args=(role, theirs, case), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(pipe)
        if devices is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
        # What the control connection does.
        blobs = [_receive(pipe) for pipe in pipes]
        for pipe, blob in zip(pipes, reversed(blobs)):
            pipe.send(blob)
        return pipes

    yield start
    for process in processes:
        process.kill()
        process.join(30)


def _receive(pipe: Connection) -> Any:
    assert pipe.poll(START_TIMEOUT_S), "no answer"
    return pipe.recv()


def test_steps_of_all_shapes(start: Any):
    pipes = start("steps")
    for pipe in pipes:
        assert _receive(pipe) == "connected"
    for pipe in pipes:
        assert _receive(pipe) == "done"


@pytest.mark.parametrize("case", ["hung", "killed"])
def test_a_lost_peer_frees_the_device(start: Any, case: str):
    attention, ffn = start(case)
    assert _receive(attention) == "connected"
    assert _receive(ffn) == "connected"
    assert _receive(ffn) == "stops"
    before = time.monotonic()
    error, seconds = _receive(attention)
    elapsed = time.monotonic() - before
    print(f"{case}: error after {elapsed:.2f} s, device free {seconds:.2f} s later")
    assert isinstance(error, AFDPeerError)
    assert FFN_PEER in str(error)
    assert elapsed < STEP_TIMEOUT_S + 15


def test_one_gpu_is_refused(start: Any):
    for pipe in start("steps", gpus=(0, 0)):
        error, _ = _receive(pipe)
        assert "same GPU" in str(error)
