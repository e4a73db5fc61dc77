# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An AFD session: a real control connection, a connector that only takes notes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config.afd import AFDConfig
from vllm.distributed.afd_transfer import afd_session
from vllm.distributed.afd_transfer.afd_connector.base import AFDLayout
from vllm.distributed.afd_transfer.afd_session import (
    AFDSession,
    describe_server,
    make_layout,
)
from vllm.distributed.afd_transfer.control import AFDControl
from vllm.distributed.afd_transfer.errors import AFDError, AFDPeerError
from vllm.distributed.afd_transfer.messages import AFDLayerInfo

from .control_utils import session as control_pair
from .message_utils import TIMEOUT_S, hello, wait_until


def layer_info(gate_on_ffn: bool = False, **kwargs: Any) -> AFDLayerInfo:
    dtype = {} if gate_on_ffn else {"logits_dtype": "float32"}
    return AFDLayerInfo(name="mlp", gate_on_ffn=gate_on_ffn, **(dtype | kwargs))


class Connector:
    """Notes what the session does with it."""

    def __init__(self, layout: AFDLayout, peer: str):
        self.layout = layout
        self.peer = peer
        self.errors: list[AFDError] = []
        self.closed = 0
        self.connect: Callable[..., None] = lambda *args: None

    def abort(self, error: AFDError) -> None:
        self.errors.append(error)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def connectors(monkeypatch: pytest.MonkeyPatch) -> list[Connector]:
    made: list[Connector] = []

    def create(config: Any, role: str, layout: AFDLayout, peer: str) -> Connector:
        made.append(Connector(layout, peer))
        return made[-1]

    monkeypatch.setattr(afd_session.AFDConnectorFactory, "create_connector", create)
    return made


def make_session(
    control: AFDControl, role: str, on_failure: Callable | None = None
) -> AFDSession:
    config: Any = SimpleNamespace(afd_config=AFDConfig(afd_role=role))
    return AFDSession(config, control, control._hello, on_failure)


def test_layout_is_made_of_what_attention_says() -> None:
    layers = [layer_info(True), layer_info(logits_size=4), layer_info(logits_size=8)]
    attention = hello(
        "attention",
        layers=layers,
        max_num_batched_tokens=48,
        num_ubatches=2,
        hidden_size=16,
        dtype="bfloat16",
    )
    assert make_layout(attention) == AFDLayout(
        max_tokens=48,
        num_stages=2,
        hidden_size=16,
        hidden_dtype=torch.bfloat16,
        logits_size=8,
        logits_dtype=torch.float32,
    )
    assert make_layout(hello("attention", layers=layers[:1])).logits_size == 0


def test_layers_that_cannot_be_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [
        layer_info(logits_size=4, logits_dtype=dtype)
        for dtype in ("float32", "bfloat16")
    ]
    monkeypatch.setattr(afd_session, "describe_moe_layers", lambda *args: layers)
    monkeypatch.setattr(afd_session, "model_facts", lambda config: {})
    monkeypatch.setattr(
        afd_session.handshake, "make_hello", lambda *args: hello("ffn", layers=args[-1])
    )
    with pytest.raises(AFDError, match="bfloat16, float32"):
        describe_server(SimpleNamespace(), torch.nn.Module())


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_both_sides_have_the_same_layout(
    connectors: list[Connector], role: str
) -> None:
    with control_pair(max_tokens={"attention": 32, "ffn": 64}) as pair:
        control = pair[role == "ffn"]
        session = make_session(control, role)
        assert session.layout == connectors[0].layout
        assert session.layout.max_tokens == 32
        assert connectors[0].peer == control.peer
        session.close()


def test_connector_that_cannot_connect(
    connectors: list[Connector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer is told why, and nothing is left open."""

    def connect(*args: Any) -> None:
        raise ValueError("no such interface")

    monkeypatch.setattr(Connector, "__init__", _connects_with(connect))
    with control_pair() as (attention, ffn):
        with pytest.raises(ValueError, match="no such interface"):
            make_session(attention, "attention")
        assert connectors[0].closed == 1
        assert not attention.is_alive
        with pytest.raises(AFDPeerError, match="ValueError: no such interface"):
            ffn.recv_step(timeout_s=TIMEOUT_S)


def _connects_with(connect: Callable) -> Callable:
    init = Connector.__init__

    def new_init(self: Connector, *args: Any) -> None:
        init(self, *args)
        self.connect = connect

    return new_init


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_lost_peer_wakes_who_waits_for_data(
    connectors: list[Connector], role: str
) -> None:
    failures: list[AFDError] = []
    with control_pair() as (attention, ffn):
        ours, theirs = (attention, ffn) if role == "attention" else (ffn, attention)
        session = make_session(ours, role, failures.append)
        theirs.fail("out of memory")
        wait_until(lambda: failures, "the failure is reported")
        assert failures == connectors[0].errors == [session.error]
        assert "out of memory" in str(session.error)
        # An error that was received is not sent back, nor a goodbye.
        session.fail(ValueError("a consequence"))
        session.close()
        session.close()
        assert "a consequence" not in str(theirs.error)


@pytest.mark.parametrize("reason", [None, "it was stopped in the middle of step 2"])
def test_goodbye_of_attention(connectors: list[Connector], reason: str | None) -> None:
    failures: list[AFDError] = []
    with control_pair() as (attention, ffn):
        session = make_session(ffn, "ffn", failures.append)
        leaving = make_session(attention, "attention")
        leaving.close(reason)
        wait_until(lambda: connectors[0].errors, "the goodbye is seen")
        assert "has ended the session" in str(connectors[0].errors[0])
        assert ffn.peer_said_bye and not attention.peer_said_bye
        assert ffn.bye_reason == reason
        assert session.error is None
        assert not failures
        session.close()


def test_error_is_told_unless_the_process_is_told_to_end(
    connectors: list[Connector],
) -> None:
    with control_pair() as (attention, ffn):
        session = make_session(attention, "attention")
        session.fail(SystemExit())
        assert session.error is None
        session.fail(KeyError("a fault"))
        with pytest.raises(AFDPeerError, match="KeyError: 'a fault'"):
            ffn.recv_step(timeout_s=TIMEOUT_S)
        session.close()


def test_interrupt_wakes_who_waits_for_data(connectors: list[Connector]) -> None:
    with control_pair() as (attention, _):
        session = make_session(attention, "attention")
        session.interrupt()
        assert "was closed" in str(connectors[0].errors[0])
        session.close()
        assert connectors[0].closed == 1
