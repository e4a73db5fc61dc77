# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""AFD connector over NCCL, for tensors on two CUDA devices.

What NCCL does, and what not, shapes this file:

- A send may wait on the device for its receive, and so does what is behind it on its
  stream. So both roles start the transfers of a step in one order: layer by layer,
  stage by stage, each input followed by its answer. No two can then wait for one
  another. Attention must not yield between the two.
- A message says neither what nor how much it is. Both roles know that from the step
  as it was announced, and refuse a transfer that is not the next one before NCCL gets
  it. Should they disagree nonetheless, `step_timeout_s` is what ends the step.
- What waits does so on the device, without a limit, and so does the host in whatever
  synchronizes with it. So a thread watches the transfers, and ends the session if one
  takes too long. The host is ahead of the device by a few of them only, and polls for
  the end of all of them with each step.
"""

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm.distributed.afd_transfer.afd_connector.base import (
    AFDConnectorBase,
    AFDLayout,
    AFDRecvHandle,
    AFDTransfer,
)
from vllm.distributed.afd_transfer.afd_connector.nccl_link import AFDNcclLink
from vllm.distributed.afd_transfer.errors import AFDError, AFDPeerError
from vllm.logger import init_logger
from vllm.utils.torch_utils import current_stream
from vllm.v1.worker.ubatching import (
    dbo_enabled,
    dbo_switch_to_comm_sync,
    dbo_switch_to_compute,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.afd import AFDRole

logger = init_logger(__name__)

# Of the order of transfers, which has to be the same on both sides.
_PROTOCOL = 1

# Transfers by which the host is ahead of the device. The kernels that wait behind
# them must not fill the device's queue: a launch would wait without a limit.
_MAX_IN_FLIGHT = 8
_POLL_S = 20e-6
_WATCH_S = 0.5
# When NCCL fails, the control plane may be about to say why.
_CAUSE_GRACE_S = 0.25


class _InFlight(NamedTuple):
    what: str
    ended: torch.cuda.Event
    limit_s: float
    limit: str


class _Buffers:
    """Memory of a stage of the FFN role."""

    def __init__(self, layout: AFDLayout, device: torch.device) -> None:
        def rows_of(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(layout.max_tokens * width, dtype=dtype, device=device)

        # Not inference tensors: they are written in and out of inference mode.
        with torch.inference_mode(False):
            self.hidden_states = rows_of(layout.hidden_size, layout.hidden_dtype)
            self.router_logits = rows_of(layout.logits_size, layout.logits_dtype)


class _NcclRecvHandle(AFDRecvHandle):
    def __init__(
        self,
        connector: "P2pNcclAFDConnector",
        sent: list[torch.Tensor],
        output: torch.Tensor,
        ended: torch.cuda.Event,
    ) -> None:
        self._connector = connector
        # Kept until wait(): from then on, the stream that they are of is behind it.
        self._sent = sent
        self._output = output
        self._ended = ended

    def done(self) -> bool:
        return self._connector._error is not None or self._ended.query()

    def wait(self) -> torch.Tensor:
        """See the base class. It is the current stream that waits."""
        self._connector.check()
        current_stream().wait_event(self._ended)
        return self._output


class P2pNcclAFDConnector(AFDConnectorBase):
    """Carries hidden states between two CUDA devices, in stream order."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: "AFDRole",
        layout: AFDLayout,
        peer: str,
    ) -> None:
        super().__init__(vllm_config, role, layout, peer)
        self._link = AFDNcclLink(role, peer, self.check)
        self._stages: list[_Buffers] = []
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self._last: AFDTransfer | None = None
        self._unanswered: AFDTransfer | None = None
        self._connected = self._closed = False

    def connect(
        self,
        exchange_blob: Callable[[bytes], bytes],
        local_address: str,
        timeout_s: float,
    ) -> None:
        self.check()
        facts = {"protocol": str(_PROTOCOL)}
        facts |= {name: str(value) for name, value in vars(self.layout).items()}
        if self.role == "ffn":
            self._stages = [
                _Buffers(self.layout, self._link.device)
                for _ in range(self.layout.num_stages)
            ]
        self._link.connect(exchange_blob, local_address, facts, timeout_s)
        self._connected = True
        threading.Thread(target=self._watch, name="afd-nccl-watch", daemon=True).start()
        logger.debug("AFD data connection from %s to %s", self._link.device, self.peer)

    def submit(
        self,
        transfer: AFDTransfer,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
    ) -> AFDRecvHandle:
        self._check_next(transfer)
        given = [t for t in (hidden_states, router_logits) if t is not None]
        self._check_tensors(transfer, given, transfer.logits_size)
        self._wait_until(_MAX_IN_FLIGHT - 1)
        self._last = transfer
        sent = [tensor.contiguous() for tensor in given]
        output = torch.empty_like(sent[0])
        ended = self._transfer(
            f"waiting for the answer to {transfer}",
            *self.recv_limit(may_compile=False),
            (AFDNcclLink.TO_FFN, sent),
            (AFDNcclLink.TO_ATTENTION, [output]),
        )
        return _NcclRecvHandle(self, sent, output, ended)

    def post_recv(self, transfer: AFDTransfer) -> None:
        """See the base class. All is left to recv(): on the one stream, this would be
        ahead of the answer that the peer waits for before it sends."""
        self.check()
        transfer.check(self.layout)

    def recv(
        self, transfer: AFDTransfer, may_compile: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See the base class. It is the current stream that waits."""
        self._check_next(transfer)
        if self._unanswered is not None:
            raise AFDError(
                f"an AFD transfer ({self._unanswered}) is to be answered before the "
                f"next one is received ({transfer})"
            )
        self._wait_until(_MAX_IN_FLIGHT - 1)
        self._last = self._unanswered = transfer
        stage, rows = self._stages[transfer.stage], transfer.rows
        hidden_states = _view(stage.hidden_states, rows, self.layout.hidden_size)
        router_logits = _view(stage.router_logits, rows, transfer.logits_size)
        ended = self._transfer(
            f"waiting for {transfer}",
            *self.recv_limit(may_compile),
            (AFDNcclLink.TO_FFN, [hidden_states, router_logits]),
        )
        current_stream().wait_event(ended)
        return hidden_states, router_logits if transfer.logits_size else None

    def send(self, transfer: AFDTransfer, output: torch.Tensor) -> None:
        self.check()
        if self._unanswered != transfer:
            raise AFDError(
                f"AFD transfer to answer ({transfer}) is not the one that was "
                f"received ({self._unanswered})"
            )
        self._check_tensors(transfer, [output], logits_size=0)
        self._unanswered = None
        ended = self._transfer(
            f"answering {transfer}",
            *self.recv_limit(may_compile=False),
            (AFDNcclLink.TO_ATTENTION, [output.contiguous()]),
        )
        # The caller may go on to write to it. This delays nothing, as the next input
        # is behind it anyway.
        current_stream().wait_event(ended)

    def finish_step(self) -> None:
        self.check()
        self._wait_until(0)

    def _check_next(self, transfer: AFDTransfer) -> None:
        self.check()
        transfer.check(self.layout)
        if not self._connected:
            raise AFDError("the AFD connector is not connected")
        if not _follows(transfer, self._last):
            raise AFDError(
                f"AFD transfer ({transfer}) does not follow the last one "
                f"({self._last}): all stages of a layer come before the next layer"
            )

    def _check_tensors(
        self, transfer: AFDTransfer, given: list[torch.Tensor], logits_size: int
    ) -> None:
        layout, rows, device = self.layout, transfer.rows, self._link.device
        wanted = [([rows, layout.hidden_size], layout.hidden_dtype, device)]
        if logits_size:
            wanted.append(([rows, logits_size], layout.logits_dtype, device))
        actual = [(list(t.shape), t.dtype, t.device) for t in given]
        if actual != wanted:
            raise ValueError(
                f"the tensors of an AFD transfer must be {wanted}, not {actual} "
                f"({transfer})"
            )

    @contextlib.contextmanager
    def _comm_stream(self) -> Iterator[torch.cuda.Stream]:
        """The stream for transfers, after what the current one was given so far."""
        if self.role == "attention" and dbo_enabled():
            dbo_switch_to_comm_sync()
            try:
                yield current_stream()
            finally:
                dbo_switch_to_compute()
        else:
            stream = self._link.streams[0]
            stream.wait_stream(current_stream())
            yield stream

    def _transfer(
        self,
        what: str,
        limit_s: float,
        limit: str,
        *messages: tuple[int, list[torch.Tensor]],
    ) -> torch.cuda.Event:
        """Start messages, each of a direction and tensors.

        Returns:
            The event of their end.

        """
        ended = torch.cuda.Event()
        with self._comm_stream() as stream:
            try:
                for direction, tensors in messages:
                    self._link.start(direction, tensors, stream)
            except AFDError:
                raise
            except RuntimeError as e:
                self._failed.wait(_CAUSE_GRACE_S)
                self._fail(f"{what}: {e}")
                self.check()
            ended.record(stream)
        self._in_flight.append(_InFlight(what, ended, limit_s, limit))
        return ended

    def _wait_until(self, in_flight: int) -> None:
        """Wait until no more than `in_flight` transfers are."""
        while len(self._in_flight) > in_flight:
            while not self._in_flight[0].ended.query():
                self.check()
                time.sleep(_POLL_S)
            # abort() ends transfers, too.
            self.check()
            self._in_flight.popleft()

    def _watch(self) -> None:
        """End the session if one transfer takes too long. Runs in a thread."""
        watched: _InFlight | None = None
        since = time.monotonic()
        try:
            torch.accelerator.set_device_index(self._link.device)
            while not self._failed.wait(_WATCH_S):
                running = (t for t in tuple(self._in_flight) if not t.ended.query())
                first = next(running, None)
                if first is not watched:
                    watched, since = first, time.monotonic()
                elif first and time.monotonic() - since >= first.limit_s:
                    self._fail(f"{first.what}: it took longer than {first.limit}")
        except Exception as e:
            # As of a device that has failed.
            self.abort(AFDError(f"AFD transfers cannot be watched: {e}"))

    def _fail(self, doing: str) -> None:
        self.abort(AFDPeerError(f"{self.peer} failed while {doing}"))

    def interrupt(self) -> None:
        self._link.stop()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.abort(AFDError("the AFD connector is closed"))
        self._link.join()
        self._in_flight.clear()
        self._stages = []


def _follows(transfer: AFDTransfer, last: AFDTransfer | None) -> bool:
    """Whether it is the transfer after `last`, on both roles."""
    place = (transfer.seq, transfer.num_stages, transfer.layer, transfer.stage)
    if last is not None and last.stage + 1 < last.num_stages:
        return place == (last.seq, last.num_stages, last.layer, last.stage + 1)
    if last is not None and transfer.seq == last.seq:
        return place == (last.seq, last.num_stages, last.layer + 1, 0)
    later = last is None or transfer.seq > last.seq
    return later and transfer.layer == transfer.stage == 0


def _view(buffer: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    return buffer[: rows * width].view(rows, width)
