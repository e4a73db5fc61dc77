# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Base class of the AFD connectors: what carries hidden states between the roles.

A connector serves one session with one peer. The worker that owns it calls, in
this order:

    connect()    once, after the weights are loaded and the hello was agreed on.

    Attention role, for each MoE layer and stage:
        submit()       hands over the layer's input and returns at once.
        handle.wait()  returns the layer's output. Between the two, the worker
                       may submit the other stage.

    FFN role, for each MoE layer and stage:
        post_recv()    says what the stage receives next. Called once the current
                       layer is computed, before it is answered.
        recv()         returns the layer's input.
        send()         hands over the layer's output and returns at once.

    abort()      from any thread, when the session has failed.
    close()      at the end.

Both roles know every transfer before it happens: attention announces the rows of
each stage over the control plane, and layers follow one another in model order.
Within a stage, transfers are strictly ordered and at most one exchange is in
flight. Stages interleave.

The interface fits connectors that hand tensors over on the host and connectors
that work in stream order. For the latter, submit(), recv(), send() and wait()
order their work after that of the current stream or the current stream after
theirs, without blocking the host. As such a wait cannot time out by itself,
abort() has to end transfers that the device waits for.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.distributed.afd_transfer.errors import AFDError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.afd import AFDRole


@dataclass(frozen=True)
class AFDLayout:
    """What one exchange can carry. Equal on both sides once the hello is agreed on.

    Raises:
        ValueError: A value is out of range.

    """

    max_tokens: int
    """Rows of the largest stage."""

    num_stages: int
    """Stages that a step may have: 1, or 2 with dual batch overlap."""

    hidden_size: int
    hidden_dtype: torch.dtype

    logits_size: int = 0
    """Router logits of a row, the largest over the layers. 0 if none travel."""

    logits_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name, minimum in (
            ("max_tokens", 1),
            ("num_stages", 1),
            ("hidden_size", 1),
            ("logits_size", 0),
        ):
            if (value := getattr(self, name)) < minimum:
                raise ValueError(
                    f"{name} of an AFD layout must be at least {minimum}, not {value}"
                )
        if self.num_stages > 2:
            raise ValueError(
                f"num_stages of an AFD layout must be 1 or 2, not {self.num_stages}"
            )


@dataclass(frozen=True)
class AFDTransfer:
    """Names one transfer. Travels with it and is checked on receipt."""

    seq: int
    """Number of the step."""

    layer: int
    """Index among the MoE layers of the model."""

    stage: int
    num_stages: int
    """Stages of this step."""

    rows: int
    """Rows of this stage. May be 0."""

    logits_size: int = 0
    """Router logits of a row in this layer. 0 if the gate runs on the FFN role."""

    def __str__(self) -> str:
        return (
            f"step {self.seq}, layer {self.layer}, stage {self.stage} of "
            f"{self.num_stages}, {self.rows} rows"
        )

    def check(self, layout: AFDLayout) -> None:
        """Check that the layout allows this transfer.

        Raises:
            ValueError: It does not; names the field, its value and the range.

        """
        for name, value, low, high in (
            ("seq", self.seq, 0, 2**64 - 1),
            ("layer", self.layer, 0, 2**32 - 1),
            ("num_stages", self.num_stages, 1, layout.num_stages),
            ("stage", self.stage, 0, self.num_stages - 1),
            ("rows", self.rows, 0, layout.max_tokens),
            ("logits_size", self.logits_size, 0, layout.logits_size),
        ):
            if not low <= value <= high:
                raise ValueError(
                    f"{name} of an AFD transfer must be between {low} and {high}, "
                    f"not {value} ({self})"
                )


class AFDRecvHandle(ABC):
    """An exchange in flight, on the attention role."""

    @abstractmethod
    def done(self) -> bool:
        """Whether wait() will not block: the answer is here or the exchange failed.

        Does not block.
        """

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """Wait for the answer. May be called once.

        Returns:
            The layer's output, [rows, hidden_size], in memory that the connector
            does not use again.

        Raises:
            AFDError: The session failed, or `step_timeout_s` has passed.

        """


class AFDConnectorBase(ABC):
    """Carries hidden states between an attention and an FFN rank.

    Args:
        vllm_config: The configuration, with `afd_config`.
        role: The role of this process.
        layout: What an exchange can carry. Nothing larger is ever transferred, so
            connect() can allocate all buffers.
        peer: Describes the peer in messages: its role, rank and address.

    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: "AFDRole",
        layout: AFDLayout,
        peer: str,
    ) -> None:
        if vllm_config.afd_config is None:
            raise ValueError("afd_config must be set to create an AFD connector")
        self.vllm_config = vllm_config
        self.afd_config = vllm_config.afd_config
        self.role = role
        self.layout = layout
        self.peer = peer
        self._error: AFDError | None = None
        self._error_lock = threading.Lock()
        self._failed = threading.Event()

    @abstractmethod
    def connect(
        self,
        exchange_blob: Callable[[bytes], bytes],
        local_address: str,
        timeout_s: float,
    ) -> None:
        """Set up the transport to the peer and allocate the buffers.

        Args:
            exchange_blob: Sends bytes to the peer's connector over the
                authenticated control connection and returns what that sent.
                Both sides must call it equally often.
            local_address: Address of this host on the control connection. A
                connector that listens does so on this address only.
            timeout_s: Bound on the time it takes, besides a minute that the
                transport may need to connect.

        Raises:
            AFDError: It failed; names the peer.

        """

    @abstractmethod
    def submit(
        self,
        transfer: AFDTransfer,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
    ) -> AFDRecvHandle:
        """Attention: send a layer's input and expect its output. Does not wait.

        Args:
            transfer: Names the transfer. The stage's last exchange has been
                waited for.
            hidden_states: [rows, hidden_size], of the layout's dtype. Must not be
                written to before the handle's wait() has returned.
            router_logits: [rows, logits_size], of the layout's dtype. Given
                exactly if `transfer.logits_size` is not 0. As hidden_states.

        Raises:
            ValueError: An argument does not fit the layout; nothing was sent.
            AFDError: The session has failed.

        """

    @abstractmethod
    def post_recv(self, transfer: AFDTransfer) -> None:
        """FFN: say what the stage receives next.

        Waits for no more than the end of a message of which the rest has come.
        The stage's last hidden states may be overwritten once they have been
        answered, which is when the peer may send again. A connector whose transport
        cannot receive ahead may leave the work to recv().

        Raises:
            ValueError: The transfer does not fit the layout.
            AFDError: The session has failed, or the stage still expects a transfer.

        """

    @abstractmethod
    def recv(
        self, transfer: AFDTransfer, may_compile: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """FFN: wait for a posted transfer.

        Args:
            transfer: The one that was posted.
            may_compile: Whether the peer may compile its model first, see
                `recv_limit`.

        Returns:
            hidden_states [rows, hidden_size] and router_logits
            [rows, logits_size] or None. They are valid until the stage's next
            post_recv(); what was computed from them in place may still be sent.

        Raises:
            AFDError: The session failed, `recv_limit` has passed, or something else
                than `transfer` arrived.

        """

    @abstractmethod
    def send(self, transfer: AFDTransfer, output: torch.Tensor) -> None:
        """FFN: answer a received transfer. Does not wait for the peer.

        Args:
            transfer: The one that was received.
            output: [rows, hidden_size], of the layout's dtype. The caller may drop
                it, or write to it in stream order.

        Raises:
            ValueError: The output does not fit the transfer; nothing was sent.
            AFDError: The session has failed.

        """

    @abstractmethod
    def interrupt(self) -> None:
        """End what waits on the transport, in any thread, without blocking on the
        peer. Called once, by abort(), when check() already raises."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent, bounded, does not raise."""

    def recv_limit(self, may_compile: bool) -> tuple[float, str]:
        """How long `recv` waits, in seconds, and the text that says so.

        A peer that starts may compile for longer than any step takes.
        """
        name, limit_s = "step_timeout_s", self.afd_config.step_timeout_s
        if may_compile and self.afd_config.connect_timeout_s > limit_s:
            name, limit_s = "connect_timeout_s", self.afd_config.connect_timeout_s
        return limit_s, f"{name}={limit_s:g}"

    def abort(self, error: AFDError) -> None:
        """Let this and every later wait raise `error`. For any thread.

        Only the first error counts. Does not block on the peer.
        """
        with self._error_lock:
            if self._error is not None:
                return
            self._error = error
        self._failed.set()
        self.interrupt()

    def check(self) -> None:
        """Raise the error that ended the session, if any."""
        if self._error is not None:
            raise self._error
