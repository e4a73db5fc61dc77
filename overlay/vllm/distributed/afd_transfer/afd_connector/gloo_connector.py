# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""AFD connector over gloo, for tensors in host memory on any two hosts.

What gloo does when something goes wrong shapes this file:

- A message longer than the receive posted for it ends the process, in gloo's own
  thread. So each receive is posted with the whole slot, the two sides compare the
  layout before the first message, and a sender checks its rows.
- A receive that has arrived in part is not woken when the connection ends. So a
  frame is followed by an empty message, the fence, which cannot arrive in part,
  and it is the fence that is waited for, unless the frame is there already.
- A wait that times out closes the connection and wakes the other waits. That is
  how waits are interrupted.
"""

import contextlib
import datetime
import math
import secrets
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal, NoReturn

import msgspec
import regex as re
import torch
from torch.distributed import ProcessGroupGloo, Store, Work

from vllm.distributed.afd_transfer.afd_connector.base import (
    AFDConnectorBase,
    AFDLayout,
    AFDRecvHandle,
    AFDTransfer,
)
from vllm.distributed.afd_transfer.afd_connector.host_frame import (
    AFDFrameError,
    HostFrameSlot,
)
from vllm.distributed.afd_transfer.errors import (
    AFDError,
    AFDHandshakeError,
    AFDPeerError,
)
from vllm.distributed.afd_transfer.messages import clean_text, describe_differences
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.afd import AFDRole

logger = init_logger(__name__)

_RANKS = {"ffn": 0, "attention": 1}

# Tags: frames use the stage.
_FENCE_TAG = 100
_INTERRUPT_TAG = 200

# gloo cannot be interrupted while it connects, and both sides are there when it does.
# If one of them is lost then, a thread is left behind for that long.
_RENDEZVOUS_TIMEOUT_S = 60.0
_POLL_S = 0.05

# How long close() waits for what was sent last.
_CLOSE_TIMEOUT = datetime.timedelta(seconds=1)

# When the connection ends, the control plane may be about to say why.
_CAUSE_GRACE_S = 0.25


class _Rendezvous(msgspec.Struct, forbid_unknown_fields=True):  # type: ignore[call-arg]
    """What the two connectors tell one another in connect()."""

    session: int
    layout: dict[str, int | str]
    addresses: dict[str, bytes]


def _describe_layout(layout: AFDLayout) -> dict[str, int | str]:
    return {
        name: str(value) if isinstance(value, torch.dtype) else value
        for name, value in vars(layout).items()
    }


class _BlobStore(Store):
    """The store through which gloo learns the peer's address.

    gloo sets its own address and then waits for that of the peer. In between, the
    two are exchanged over the control connection, so that no store listens.
    """

    def __init__(
        self,
        exchange: Callable[[dict[str, bytes]], dict[str, bytes]],
    ) -> None:
        super().__init__()
        self._exchange = exchange
        self._own: dict[str, bytes] = {}
        self._peer: dict[str, bytes] | None = None
        self.error: BaseException | None = None

    def set(self, key: str, value: bytes) -> None:
        self._own[key] = bytes(value)

    def get(self, key: str) -> bytes:
        if key in self._own:
            return self._own[key]
        if self._peer is None:
            # gloo would turn the exception into another.
            try:
                self._peer = self._exchange(self._own)
            except BaseException as e:
                self.error = e
                raise
        return self._peer[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class _Lane:
    """One stage: a slot and what is in flight in each direction."""

    def __init__(self, stage: int, outgoing: HostFrameSlot, incoming: HostFrameSlot):
        self.stage = stage
        self.outgoing = outgoing
        self.incoming = incoming
        self.sends: list[Work] = []
        self.recv: Work | None = None
        self.fence: Work | None = None
        self.expected: AFDTransfer | None = None
        self.received: AFDTransfer | None = None


class _GlooRecvHandle(AFDRecvHandle):
    def __init__(
        self, connector: "GlooAFDConnector", lane: _Lane, transfer: AFDTransfer
    ) -> None:
        self._connector = connector
        self._lane = lane
        self._transfer = transfer
        self._deadline = time.monotonic() + connector.step_timeout_s

    def done(self) -> bool:
        # gloo says whether a receive is complete only to those who wait for it.
        return (
            self._connector._error is not None
            or self._lane.incoming.arrived()
            or time.monotonic() >= self._deadline
        )

    def wait(self) -> torch.Tensor:
        timeout_s = max(self._deadline - time.monotonic(), 0.001)
        output, _ = self._connector._wait(
            self._lane, self._transfer, timeout_s, self._connector._step_limit
        )
        return output.clone()


class GlooAFDConnector(AFDConnectorBase):
    """Carries hidden states in host memory over a TCP connection of gloo."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: "AFDRole",
        layout: AFDLayout,
        peer: str,
    ) -> None:
        super().__init__(vllm_config, role, layout, peer)
        self.step_timeout_s = self.afd_config.step_timeout_s
        self._step_timeout = _timedelta(self.step_timeout_s)
        self._step_limit = f"step_timeout_s={self.step_timeout_s:g}"
        self._rank = _RANKS[role]
        self._group: ProcessGroupGloo | None = None
        self._lanes: list[_Lane] = []
        self._no_bytes = torch.empty(0, dtype=torch.uint8)
        self._closed = False

    def connect(
        self,
        exchange_blob: Callable[[bytes], bytes],
        local_address: str,
        timeout_s: float,
    ) -> None:
        """See the base class. At most a minute of it is spent in gloo."""
        deadline = time.monotonic() + timeout_s
        self.check()
        session = secrets.randbits(64)
        peer_session = 0

        def exchange(addresses: dict[str, bytes]) -> dict[str, bytes]:
            nonlocal peer_session
            blob = exchange_blob(
                msgspec.msgpack.encode(
                    _Rendezvous(session, _describe_layout(self.layout), addresses)
                )
            )
            peer = self._decode_rendezvous(blob)
            # gloo trusts what is in an address, so it must be of an authenticated
            # peer. That there is one is worth a check.
            if len(peer.addresses) != len(addresses) or not all(
                peer.addresses.values()
            ):
                raise AFDHandshakeError(f"{self.peer} has sent no gloo address")
            peer_session = peer.session
            return peer.addresses

        rendezvous_timeout_s = min(timeout_s, _RENDEZVOUS_TIMEOUT_S)
        store = _BlobStore(exchange)
        try:
            self._group = self._meet(store, local_address, rendezvous_timeout_s)
        except Exception as e:
            self.check()
            if store.error is not None:
                raise store.error from None
            raise AFDPeerError(
                f"{self.peer} cannot be reached by gloo from {local_address} within "
                f"{rendezvous_timeout_s:g} s: {_message(e)}"
            ) from e

        self._lanes = [
            _Lane(
                stage,
                HostFrameSlot(self.layout, session, self.role == "attention"),
                HostFrameSlot(self.layout, peer_session, self.role == "ffn"),
            )
            for stage in range(self.layout.num_stages)
        ]
        if self._error is not None:
            self.interrupt()
            self.check()
        # Proves that this is the peer that the control connection leads to.
        first = AFDTransfer(seq=0, layer=0, stage=0, num_stages=1, rows=0)
        nothing = torch.empty(
            0, self.layout.hidden_size, dtype=self.layout.hidden_dtype
        )
        self._post_recv(self._lanes[0], first)
        self._send(self._lanes[0], first, nothing)
        left_s = max(deadline - time.monotonic(), 0.001)
        self._wait(self._lanes[0], first, left_s, f"connect_timeout_s={timeout_s:g}")
        self._lanes[0].received = None
        logger.debug("AFD data connection from %s to %s", local_address, self.peer)

    def _meet(self, store: Store, address: str, timeout_s: float) -> ProcessGroupGloo:
        """Connect to the peer, as long as the session has not ended."""
        met: Future[ProcessGroupGloo] = Future()

        def meet() -> None:
            try:
                options = _gloo_options(address, timeout_s)
                met.set_result(ProcessGroupGloo(store, self._rank, 2, options))
            except BaseException as e:
                met.set_exception(e)

        threading.Thread(target=meet, name="afd-gloo-connect", daemon=True).start()
        while not met.done():
            futures.wait([met], _POLL_S)
            self.check()
        return met.result()

    def _decode_rendezvous(self, blob: bytes) -> _Rendezvous:
        try:
            rendezvous = msgspec.msgpack.decode(blob, type=_Rendezvous)
        except msgspec.DecodeError as e:
            raise AFDHandshakeError(
                f"{self.peer} does not use {type(self).__name__}: "
                f"{clean_text(str(e), 200)}"
            ) from None
        if differences := describe_differences(
            rendezvous.layout, _describe_layout(self.layout)
        ):
            raise AFDHandshakeError(f"{self.peer} has another layout: {differences}")
        return rendezvous

    def submit(
        self,
        transfer: AFDTransfer,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
    ) -> AFDRecvHandle:
        lane = self._lane(transfer)
        if lane.expected is not None:
            raise AFDError(
                f"stage {transfer.stage} has an AFD exchange in flight "
                f"({lane.expected}); wait for it before the next ({transfer})"
            )
        self._send(lane, transfer, hidden_states, router_logits)
        self._post_recv(lane, transfer)
        return _GlooRecvHandle(self, lane, transfer)

    def post_recv(self, transfer: AFDTransfer) -> None:
        lane = self._lane(transfer)
        if lane.expected is not None:
            raise AFDError(
                f"stage {transfer.stage} expects an AFD transfer already "
                f"({lane.expected}); receive it before the next ({transfer})"
            )
        self._post_recv(lane, transfer)

    def recv(
        self, transfer: AFDTransfer, may_compile: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        lane = self._lane(transfer)
        if lane.expected != transfer:
            raise AFDError(
                f"AFD transfer to receive ({transfer}) is not the one that was "
                f"posted ({lane.expected})"
            )
        return self._wait(lane, transfer, *self.recv_limit(may_compile))

    def send(self, transfer: AFDTransfer, output: torch.Tensor) -> None:
        lane = self._lane(transfer)
        if lane.received != transfer:
            raise AFDError(
                f"AFD transfer to answer ({transfer}) is not the one that was "
                f"received ({lane.received})"
            )
        self._send(lane, transfer, output)
        lane.received = None

    def _lane(self, transfer: AFDTransfer) -> _Lane:
        self.check()
        transfer.check(self.layout)
        if not self._lanes:
            raise AFDError("the AFD connector is not connected")
        return self._lanes[transfer.stage]

    def _send(
        self,
        lane: _Lane,
        transfer: AFDTransfer,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
    ) -> None:
        deadline = time.monotonic() + self.step_timeout_s
        try:
            # The slot is free: the peer has sent something since, so it has it all
            # (only the first frame of connect() may still be on its way).
            # A work may be waited for once, and keeps the connection open: no local
            # variable of a frame that a traceback refers to may hold it.
            while lane.sends:
                lane.sends.pop().wait(self._step_timeout)
            nbytes = lane.outgoing.write(transfer, hidden_states, router_logits)
            lane.sends = [
                self._start("send", lane.outgoing.buffer[:nbytes], lane.stage),
                self._start("send", self._no_bytes, _FENCE_TAG + lane.stage),
            ]
        except RuntimeError as e:
            self._fail(e, "sending", transfer, self._last_was_late(deadline))

    def _post_recv(self, lane: _Lane, transfer: AFDTransfer) -> None:
        lane.incoming.clear(transfer)
        deadline = time.monotonic() + self.step_timeout_s
        try:
            if lane.fence is not None:
                # The last frame was complete before its fence came.
                lane.fence.wait(self._step_timeout)
                lane.fence = None
            lane.recv = self._start("recv", lane.incoming.buffer, lane.stage)
            lane.fence = self._start("recv", self._no_bytes, _FENCE_TAG + lane.stage)
        except RuntimeError as e:
            self._fail(e, "expecting", transfer, self._last_was_late(deadline))
        lane.expected = transfer

    def _wait(
        self, lane: _Lane, transfer: AFDTransfer, timeout_s: float, limit: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.check()
        if lane.expected != transfer or lane.recv is None:
            raise AFDError(f"no AFD transfer is expected here ({transfer})")
        deadline = time.monotonic() + timeout_s
        try:
            if lane.fence is not None and not lane.incoming.arrived():
                lane.fence.wait(_timedelta(timeout_s))
                lane.fence = None
            # The whole frame is here, so this cannot sleep within a part of it.
            lane.recv.wait(self._step_timeout)
        except RuntimeError as e:
            late = time.monotonic() >= deadline
            cause = f"it did not arrive within {limit}" if late else None
            self._fail(e, "waiting for", transfer, cause)
        lane.recv = lane.expected = None
        try:
            views = lane.incoming.read(transfer)
        except AFDFrameError as e:
            self._fail(e, "waiting for", transfer)
        lane.received = transfer
        return views

    def _last_was_late(self, deadline: float) -> str | None:
        """Say so if it is what a wait for the end of the last message ended with."""
        if time.monotonic() < deadline:
            return None
        limit = f"step_timeout_s={self.step_timeout_s:g}"
        return f"the last message was not complete within {limit}"

    def _start(
        self, operation: Literal["send", "recv"], data: torch.Tensor, tag: int
    ) -> Work:
        if self._group is None:
            self.check()
            raise AFDError("the AFD connector is not connected")
        return getattr(self._group, operation)([data], 1 - self._rank, tag)

    def _fail(
        self,
        error: Exception,
        doing: str,
        transfer: AFDTransfer,
        cause: str | None = None,
    ) -> NoReturn:
        """End the session with what the transport says, and raise that."""
        if isinstance(error, AFDError):
            raise error
        if cause is None:
            cause = _message(error)
            if not isinstance(error, AFDFrameError):
                self._failed.wait(_CAUSE_GRACE_S)
        peer_error = AFDPeerError(
            f"{self.peer} failed while {doing} {transfer}: {cause}"
        )
        self.abort(peer_error)
        raise self._error or peer_error from error

    def interrupt(self) -> None:
        group = self._group
        if group is None:
            return
        # Nothing is sent with this tag, so the wait times out.
        with contextlib.suppress(RuntimeError):
            group.recv([self._no_bytes], 1 - self._rank, _INTERRUPT_TAG).wait(
                datetime.timedelta(milliseconds=1)
            )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # What was sent last may still be on its way.
        if self._error is None:
            with contextlib.suppress(RuntimeError):
                for lane in self._lanes:
                    while lane.sends:
                        lane.sends.pop(0).wait(_CLOSE_TIMEOUT)
        self.abort(AFDError("the AFD connector is closed"))
        for lane in self._lanes:
            lane.sends = []
            lane.recv = lane.fence = None
        self._lanes = []
        self._group = None


def _timedelta(seconds: float) -> datetime.timedelta:
    # gloo drops what is less than a millisecond, and would be done before the time.
    return datetime.timedelta(milliseconds=math.ceil(seconds * 1000))


def _gloo_options(local_address: str, timeout_s: float) -> ProcessGroupGloo._Options:
    """Listen on one address only. The timeout is that of connecting."""
    options = ProcessGroupGloo._Options()
    options._threads = 1
    options._timeout = _timedelta(timeout_s)
    options._devices = [
        ProcessGroupGloo.create_device(hostname=local_address, lazy_init=False)
    ]
    return options


def _message(error: BaseException) -> str:
    """What gloo says, without its source file and advice."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error)).split(". ", 1)[0].strip()
