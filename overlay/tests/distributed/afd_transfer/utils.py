# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pairs of AFD connectors within one process, and the schedule of a real step."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from vllm.distributed.afd_transfer.afd_connector.base import (
    AFDConnectorBase,
    AFDLayout,
    AFDTransfer,
)
from vllm.distributed.afd_transfer.afd_connector.factory import AFDConnectorFactory

FFN_PEER = "AFD ffn peer (rank 0) at host-f:29700"
ATTENTION_PEER = "AFD attention peer (rank 0) at host-a:40000"

# A bound for what takes milliseconds.
SOON_S = 60.0


def make_config(
    connector: str = "GlooAFDConnector",
    module_path: str | None = None,
    step_timeout_s: float = SOON_S,
    connect_timeout_s: float = SOON_S,
) -> Any:
    """The part of a VllmConfig that connectors and their factory read."""
    return SimpleNamespace(
        afd_config=SimpleNamespace(
            afd_connector=connector,
            afd_connector_module_path=module_path,
            step_timeout_s=step_timeout_s,
            connect_timeout_s=connect_timeout_s,
        )
    )


def blob_exchanges() -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]:
    """Two ends of what the control connection does for connectors."""
    queues: tuple[queue.Queue, queue.Queue] = queue.Queue(), queue.Queue()

    def end(mine: queue.Queue, theirs: queue.Queue) -> Callable[[bytes], bytes]:
        def exchange(data: bytes) -> bytes:
            mine.put(data)
            return theirs.get(timeout=SOON_S)

        return exchange

    return end(*queues), end(*reversed(queues))


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions at the same time and return what they return."""
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(function) for function in functions]
        return [future.result(timeout=SOON_S) for future in futures]


@contextlib.contextmanager
def connected_pair(
    layout: AFDLayout, config: Any = None, address: str = "127.0.0.1"
) -> Iterator[tuple[AFDConnectorBase, AFDConnectorBase]]:
    """An attention and an FFN connector, connected to one another."""
    config = config or make_config()
    create = AFDConnectorFactory.create_connector
    attention = create(config, "attention", layout, FFN_PEER)
    ffn = create(config, "ffn", layout, ATTENTION_PEER)
    attention_end, ffn_end = blob_exchanges()
    try:
        in_threads(
            lambda: attention.connect(attention_end, address, SOON_S),
            lambda: ffn.connect(ffn_end, address, SOON_S),
        )
        yield attention, ffn
    finally:
        attention.close()
        ffn.close()


def make_input(
    layout: AFDLayout, transfer: AFDTransfer
) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(
        transfer.seq % 2**32 * 10007 + transfer.layer * 101 + transfer.stage
    )
    hidden_states = torch.randn(
        transfer.rows, layout.hidden_size, generator=generator
    ).to(layout.hidden_dtype)
    if not transfer.logits_size:
        return hidden_states, None
    router_logits = torch.randn(
        transfer.rows, transfer.logits_size, generator=generator
    ).to(layout.logits_dtype)
    return hidden_states, router_logits


def experts(
    transfer: AFDTransfer,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Stands for a MoE layer. The output depends on all that was transferred."""
    output = hidden_states * (transfer.layer + 2) + transfer.stage
    if router_logits is not None:
        output += router_logits.sum(dim=-1, keepdim=True).to(output.dtype)
    return output


class Step:
    """The transfers of one step: `layers[i]` has a transfer for each stage."""

    def __init__(self, seq: int, stage_rows: list[int], logits_sizes: list[int]):
        self.layers = [
            [
                AFDTransfer(seq, layer, stage, len(stage_rows), rows, logits_size)
                for stage, rows in enumerate(stage_rows)
            ]
            for layer, logits_size in enumerate(logits_sizes)
        ]


def run_attention(
    connector: AFDConnectorBase,
    steps: list[Step],
    next_step: Callable[[Step], None] = lambda step: None,
) -> None:
    """Each stage submits, lets the other one run, and waits, as with DBO."""
    for step in steps:
        next_step(step)
        outputs: list[tuple[AFDTransfer, torch.Tensor]] = []
        waiting: list = []

        def wait_for_first(waiting=waiting, outputs=outputs) -> None:
            transfer, handle = waiting.pop(0)
            outputs.append((transfer, handle.wait()))

        for transfers in step.layers:
            for transfer in transfers:
                if len(waiting) == len(transfers):
                    wait_for_first()
                hidden_states, router_logits = make_input(connector.layout, transfer)
                handle = connector.submit(transfer, hidden_states, router_logits)
                waiting.append((transfer, handle))
        while waiting:
            wait_for_first()
        # Only now: an output must not be overwritten by a later transfer.
        for transfer, output in outputs:
            expected = experts(transfer, *make_input(connector.layout, transfer))
            assert output.dtype == connector.layout.hidden_dtype
            assert output.shape == (transfer.rows, connector.layout.hidden_size)
            assert torch.equal(output, expected), transfer


def run_ffn(
    connector: AFDConnectorBase,
    steps: list[Step],
    wait_for_step: Callable[[], Any] = lambda: None,
) -> None:
    for step in steps:
        wait_for_step()
        for transfer in step.layers[0]:
            connector.post_recv(transfer)
        for layer, transfers in enumerate(step.layers):
            for transfer in transfers:
                output = experts(transfer, *connector.recv(transfer))
                if layer + 1 < len(step.layers):
                    connector.post_recv(step.layers[layer + 1][transfer.stage])
                connector.send(transfer, output)


def run_steps(
    attention: AFDConnectorBase, ffn: AFDConnectorBase, steps: list[Step]
) -> None:
    """Run both roles, with the FFN told of a step when it starts."""
    announced = threading.Semaphore(0)
    in_threads(
        lambda: run_attention(attention, steps, lambda step: announced.release()),
        lambda: run_ffn(ffn, steps, lambda: announced.acquire(timeout=SOON_S)),
    )
