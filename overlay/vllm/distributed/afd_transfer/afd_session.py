# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One session of an attention server with an FFN server, seen from either side."""

from collections.abc import Callable

import torch
import torch.nn as nn

from vllm.config import VllmConfig
from vllm.distributed.afd_transfer import handshake
from vllm.distributed.afd_transfer.afd_connector.base import (
    AFDConnectorBase,
    AFDLayout,
)
from vllm.distributed.afd_transfer.afd_connector.factory import AFDConnectorFactory
from vllm.distributed.afd_transfer.control import AFDControl
from vllm.distributed.afd_transfer.errors import AFDError
from vllm.distributed.afd_transfer.messages import AFDHello, AFDLayerInfo
from vllm.logger import init_logger
from vllm.model_executor.afd import describe_moe_layers, model_facts

logger = init_logger(__name__)


def describe_server(vllm_config: VllmConfig, model: nn.Module) -> AFDHello:
    """Describe what this instance runs, for the peer to compare.

    Args:
        vllm_config: The config of this instance.
        model: The model, as this role has loaded it.

    Raises:
        AFDError: What its layers need cannot be exchanged.

    """
    layers = describe_moe_layers(vllm_config, model)
    # One rank a role so far.
    hello = handshake.make_hello(vllm_config, 0, model_facts(vllm_config), layers)
    # Fails before anyone connects.
    make_layout(hello)
    return hello


def make_layout(attention: AFDHello) -> AFDLayout:
    """The exchanges of a session. Both sides derive them from attention's hello.

    Raises:
        AFDError: The layers differ in what they need.

    """
    logits = {
        (layer.logits_size, layer.logits_dtype)
        for layer in attention.layers
        if layer.logits_size > 0
    }
    dtypes = {dtype for _, dtype in logits}
    if len(dtypes) > 1:
        raise AFDError(
            f"The router logits of the MoE layers have more than one dtype "
            f"({', '.join(sorted(dtypes))}), which AFD does not support."
        )
    return AFDLayout(
        max_tokens=attention.max_num_batched_tokens,
        num_stages=attention.num_ubatches,
        hidden_size=attention.hidden_size,
        hidden_dtype=getattr(torch, attention.dtype),
        logits_size=max((size for size, _ in logits), default=0),
        logits_dtype=getattr(torch, dtypes.pop()) if dtypes else torch.float32,
    )


class AFDSession:
    """The control and the data connection to one peer.

    It ends once: with an error, which wakes who waits in the data plane, or with a
    goodbye.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        control: AFDControl,
        hello: AFDHello,
        on_failure: Callable[[AFDError], None] | None = None,
    ):
        """Connect the data plane to the peer of `control`, and watch the peer.

        Args:
            vllm_config: The config of this instance.
            control: Connection to the peer. The session owns it from here on.
            hello: What this instance told the peer.
            on_failure: Called once, from any thread, when the peer is lost.

        """
        config = vllm_config.afd_config
        assert config is not None
        self.control = control
        self.peer = control.peer
        self.layers: list[AFDLayerInfo] = hello.layers
        self._on_failure = on_failure
        # None only if it could not be created.
        self.connector: AFDConnectorBase = None  # type: ignore[assignment]
        try:
            self.layout = make_layout(
                hello if config.is_attention else control.peer_hello
            )
            connector = AFDConnectorFactory.create_connector(
                vllm_config, config.afd_role, self.layout, self.peer
            )
            self.connector = connector
            # From here on, the loss of the peer ends what waits in the connector.
            control.start(self._peer_lost, self._peer_left)
            connector.connect(
                control.exchange_blob, control.local_address, config.connect_timeout_s
            )
        except BaseException as e:
            self.fail(e)
            self.close()
            raise
        logger.info(
            "AFD session with %s: %d MoE layers, %d of them with the gate on ffn, "
            "%s, %s.",
            self.peer,
            len(self.layers),
            sum(layer.gate_on_ffn for layer in self.layers),
            hello.dtype,
            config.afd_connector,
        )

    @property
    def error(self) -> AFDError | None:
        return self.control.error

    def _peer_lost(self, error: AFDError) -> None:
        if self.connector is not None:
            self.connector.abort(error)
        if self._on_failure is not None:
            self._on_failure(error)

    def _peer_left(self) -> None:
        # It may be in the middle of a step.
        self.connector.abort(AFDError(f"{self.peer} has ended the session."))

    def interrupt(self) -> None:
        """Wake who waits in the data plane, as this side shuts down."""
        self.connector.abort(AFDError(f"The session with {self.peer} was closed."))

    def fail(self, error: BaseException) -> None:
        """Tell the peer that this side cannot go on, and why."""
        if isinstance(error, Exception) and self.error is None:
            self.control.fail(f"{type(error).__name__}: {error}")

    def close(self, reason: str | None = None) -> None:
        """Say goodbye, if no error was said or received, and release everything.

        Args:
            reason: What the goodbye says, if there is something to say.

        """
        self.control.close(reason)
        if self.connector is not None:
            self.connector.close()
