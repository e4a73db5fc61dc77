# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The attention role of AFD, with the default connector and a peer that is played."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed.afd_transfer.control_utils import session as control_pair
from vllm.config.afd import AFDConfig
from vllm.distributed.afd_transfer.afd_connector.base import AFDTransfer
from vllm.distributed.afd_transfer.afd_session import AFDSession
from vllm.distributed.afd_transfer.errors import AFDError, AFDPeerError
from vllm.v1.worker import afd_attention_model_runner
from vllm.v1.worker.afd_attention_model_runner import AFDAttention
from vllm.v1.worker.afd_model_runner import make_afd_model_runner
from vllm.v1.worker.worker_base import WorkerBase

TIMEOUT_S = 60
# Of the messages' test peers, which have two layers: one with the gate on FFN.
HIDDEN_SIZE, NUM_EXPERTS = 64, 8


class Roles:
    """Sessions of both roles. FFN doubles its input with the sum of the logits."""

    def __init__(self, controls: Any):
        def make_session(role: str, control: Any) -> AFDSession:
            config: Any = SimpleNamespace(
                afd_config=AFDConfig(afd_role=role, step_timeout_s=20)
            )
            return AFDSession(config, control, control._hello)

        with ThreadPoolExecutor(2) as pool:
            sessions = list(pool.map(make_session, ("attention", "ffn"), controls))
        self.attention = AFDAttention(sessions[0])
        self.ffn = sessions[1]

    def serve_step(self) -> None:
        try:
            self._serve_step()
        except Exception as e:
            self.ffn.fail(e)
            raise

    def _serve_step(self) -> None:
        step = self.ffn.control.recv_step(timeout_s=TIMEOUT_S)
        assert step is not None
        for layer, info in enumerate(self.ffn.layers):
            for stage, rows in enumerate(step.stage_tokens):
                transfer = AFDTransfer(
                    seq=step.seq,
                    layer=layer,
                    stage=stage,
                    num_stages=len(step.stage_tokens),
                    rows=rows,
                    logits_size=info.logits_size,
                )
                self.ffn.connector.post_recv(transfer)
                x, logits = self.ffn.connector.recv(transfer)
                self.ffn.connector.send(transfer, self.expected(x, logits))

    def expected(self, x: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        if logits is not None:
            x = x + logits.sum(dim=-1, keepdim=True).to(x.dtype)
        return 2 * x

    def close(self) -> None:
        self.attention.close()
        self.ffn.close()


@pytest.fixture
def roles() -> Iterator[Roles]:
    with control_pair() as controls:
        roles = Roles(controls)
        yield roles
        roles.close()


def test_a_step_is_exchanged(roles: Roles) -> None:
    with ThreadPoolExecutor(1) as pool:
        for num_tokens in (5, 0, 128):
            served = pool.submit(roles.serve_step)
            roles.attention.begin_step("eager", [num_tokens])
            x = torch.rand(num_tokens, HIDDEN_SIZE, dtype=torch.bfloat16)
            y = roles.attention.exchange(0, x, None)
            assert torch.equal(y, roles.expected(x, None))
            logits = torch.rand(num_tokens, NUM_EXPERTS)
            z = roles.attention.exchange(1, y, logits)
            assert torch.equal(z, roles.expected(y, logits))
            roles.attention.end_step()
            served.result(TIMEOUT_S)
    stats = roles.attention.stats
    assert (stats.steps, stats.split_steps, stats.exchanges) == (3, 0, 6)


def test_a_layer_that_was_not_announced(roles: Roles) -> None:
    x = torch.rand(2, HIDDEN_SIZE, dtype=torch.bfloat16)
    with pytest.raises(AFDError, match="no step has begun"):
        roles.attention.exchange(0, x, None)
    roles.attention.begin_step("eager", [3])
    with pytest.raises(AFDError, match="layer 0 runs on 2 tokens .* on 3 tokens"):
        roles.attention.exchange(0, x, None)
    with pytest.raises(AFDError, match="layer 1 runs .* to run layer 0"):
        roles.attention.exchange(1, x, None)


def test_a_step_that_leaves_layers_out(roles: Roles) -> None:
    """The peer waits for them, so it is told."""
    roles.attention.begin_step("eager", [2])
    with pytest.raises(AFDError, match=r"ran \[0\] of the 2 MoE layers"):
        roles.attention.end_step()
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(AFDPeerError, match=r"ran \[0\] of the 2 MoE layers"),
    ):
        pool.submit(roles.serve_step).result(TIMEOUT_S)


def test_a_lost_peer_is_a_failure_of_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        afd_attention_model_runner,
        "AFDAttentionModelRunner",
        lambda config, device, on_failure: made.append((config, device, on_failure)),
    )
    worker = WorkerBase.__new__(WorkerBase)
    worker.vllm_config = SimpleNamespace(  # type: ignore[assignment]
        afd_config=AFDConfig(afd_role="attention")
    )
    worker.device = torch.device("cpu")
    make_afd_model_runner(worker)
    ((config, device, on_failure),) = made
    assert (config, device) == (worker.vllm_config, worker.device)
    reported: list[str] = []
    worker.set_failure_callback(reported.append)
    on_failure(AFDError("the FFN peer is gone"))
    assert reported == ["the FFN peer is gone"]
