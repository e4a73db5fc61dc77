# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Two NCCL communicators between an attention and an FFN rank, one for each direction.

Whatever NCCL does can last for ever if the peer does not do its part, so:

- What comes before the first message, and the first message itself, may block the
  host. A thread does it, which can be left behind.
- Later messages block streams only. Their end is the abort of the communicators. Where
  that fails, the process ends: nothing else can wake who waits for the device.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import psutil
import torch

from vllm.distributed.afd_transfer.errors import (
    AFDError,
    AFDHandshakeError,
    AFDPeerError,
)
from vllm.distributed.afd_transfer.messages import clean_text, describe_differences
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config.afd import AFDRole

logger = init_logger(__name__)

_RANKS = {"ffn": 0, "attention": 1}

# How long communicators and streams may take to end.
_STOP_TIMEOUT_S = 10.0
# How long the abort of the first communicator, which need not return before that of the
# second, has to take effect.
_ABORT_HEAD_START_S = 0.1


class _Rendezvous(msgspec.Struct, forbid_unknown_fields=True):  # type: ignore[call-arg]
    """What the two sides tell one another."""

    facts: dict[str, str]
    gpu: str
    # By communicator. From FFN, whose NCCL awaits the peer there.
    unique_ids: list[bytes]


class AFDNcclLink:
    """Sends and receives tensors on streams of the current device.

    Args:
        role: The role of this process.
        peer: Names the peer in messages.
        check: Raises why the session has ended, if it has. `stop` is called only
            when it does.

    """

    TO_FFN = 0
    TO_ATTENTION = 1

    def __init__(self, role: "AFDRole", peer: str, check: Callable[[], None]) -> None:
        self.role = role
        self.peer = peer
        self.device = _current_device()
        # All that messages are on. The first one is of the link.
        self.streams: list[torch.cuda.Stream] = []
        self._check = check
        self._rank = _RANKS[role]
        self._comms: list[PyNcclCommunicator] = []
        # Held in calls of NCCL: no communicator may be freed meanwhile.
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def connect(
        self,
        exchange_blob: Callable[[bytes], bytes],
        local_address: str,
        facts: dict[str, str],
        timeout_s: float,
    ) -> None:
        """Meet the peer.

        Args:
            exchange_blob: See `AFDConnectorBase.connect`. Called once.
            local_address: Address of this host on the control connection.
            facts: What has to be equal on both sides.
            timeout_s: Bound on the time it takes.

        Raises:
            AFDError: It failed.

        """
        deadline = time.monotonic() + timeout_s
        _pin_interface(local_address)
        unique_ids = self._exchange_ids(exchange_blob, facts)
        self.streams = [torch.cuda.Stream()]
        errors: list[BaseException] = []

        def meet() -> None:
            try:
                self._meet(unique_ids)
            except BaseException as e:
                errors.append(e)

        thread = threading.Thread(target=meet, name="afd-nccl-connect", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.05)
            self._check()
            if time.monotonic() >= deadline:
                raise AFDPeerError(
                    f"{self.peer} did not connect its NCCL within {timeout_s:g} s"
                )
        self._check()
        if errors:
            raise AFDPeerError(
                f"{self.peer} cannot be connected with NCCL: {errors[0]}"
            ) from errors[0]

    def _exchange_ids(
        self, exchange_blob: Callable[[bytes], bytes], facts: dict[str, str]
    ) -> list[bytes]:
        try:
            nccl = NCCLLibrary()
            own = _Rendezvous(
                {**facts, "NCCL version": nccl.ncclGetVersion()},
                _gpu_uuid(self.device),
                [
                    bytes(nccl.ncclGetUniqueId().internal)
                    for _ in (self.TO_FFN, self.TO_ATTENTION)
                    if self.role == "ffn"
                ],
            )
        except (OSError, RuntimeError) as e:
            raise AFDError(f"NCCL cannot be used on {self.device}: {e}") from e
        blob = exchange_blob(msgspec.msgpack.encode(own))
        try:
            theirs = msgspec.msgpack.decode(blob, type=_Rendezvous)
        except msgspec.DecodeError as e:
            raise AFDHandshakeError(
                f"{self.peer} does not use NCCL: {clean_text(str(e), 200)}"
            ) from None
        if differences := describe_differences(theirs.facts, own.facts):
            raise AFDHandshakeError(
                f"{self.peer} does not fit to this server: {differences}"
            )
        if theirs.gpu == own.gpu:
            raise AFDHandshakeError(
                f"{self.peer} uses the same GPU as this server ({own.gpu}), and NCCL "
                "needs one for each: give the roles different CUDA_VISIBLE_DEVICES"
            )
        unique_ids = own.unique_ids or theirs.unique_ids
        if len(unique_ids) != 2:
            raise AFDHandshakeError(
                f"{self.peer} has sent {len(unique_ids)} unique ids of NCCL, not 2"
            )
        return unique_ids

    def _meet(self, unique_ids: list[bytes]) -> None:
        """Create the communicators, and use each one once, which connects it."""
        torch.accelerator.set_device_index(self.device)
        stream = self.streams[0]
        torch.cuda.set_stream(stream)
        for unique_id in unique_ids:
            comm = PyNcclCommunicator.from_unique_id_bytes(
                unique_id, self._rank, 2, self.device
            )
            if comm.disabled:
                raise AFDError("PyNccl is turned off (VLLM_DISABLE_PYNCCL)")
            with self._lock:
                try:
                    self._check()
                except AFDError:
                    # Too late for `stop`, which has ended the others.
                    _abort_communicator(comm)
                    raise
                self._comms.append(comm)
        sent = torch.tensor([self._rank], device=self.device)
        received = torch.full_like(sent, -1)
        for direction in (self.TO_FFN, self.TO_ATTENTION):
            message = sent if self._sends(direction) else received
            self.start(direction, [message], stream)
        stream.synchronize()
        if received.item() != 1 - self._rank:
            raise AFDError(f"rank {received.item()} has answered")

    def _sends(self, direction: int) -> bool:
        return (direction == self.TO_FFN) == (self.role == "attention")

    def start(
        self, direction: int, tensors: list[torch.Tensor], stream: torch.cuda.Stream
    ) -> None:
        """Send or receive the tensors, as one message, in the order of the stream.

        If they have no elements, there is no message. The peer has to know that, as
        it has to know their sizes.

        Raises:
            AFDError: The session has ended.
            RuntimeError: NCCL has failed.

        """
        if not (tensors := [tensor for tensor in tensors if tensor.numel() > 0]):
            return
        with self._lock:
            self._check()
            if stream not in self.streams:
                self.streams.append(stream)
            comm = self._comms[direction]
            start = comm.send if self._sends(direction) else comm.recv
            comm.group_start()
            try:
                for tensor in tensors:
                    start(tensor, 1 - self._rank, stream)
            finally:
                comm.group_end()

    def stop(self) -> None:
        """End all messages, in a thread."""

        def stop() -> None:
            try:
                self._stop()
            finally:
                self._stopped.set()

        threading.Thread(target=stop, name="afd-nccl-stop", daemon=True).start()

    def join(self) -> None:
        """Wait until `stop`, which this or another thread calls, has ended them."""
        self._stopped.wait(2 * _STOP_TIMEOUT_S)

    def _stop(self) -> None:
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        # A call that does not return is ended by the abort as well.
        locked = self._lock.acquire(timeout=_STOP_TIMEOUT_S / 4)
        comms, self._comms = self._comms, []
        # What is received no longer must not make what is sent: the sender comes first.
        if self._sends(self.TO_ATTENTION):
            comms.reverse()
        aborts = []
        for comm in comms:
            abort = threading.Thread(
                target=_abort_communicator,
                args=(comm,),
                name="afd-nccl-abort",
                daemon=True,
            )
            abort.start()
            abort.join(_ABORT_HEAD_START_S)
            aborts.append(abort)
        for abort in aborts:
            abort.join(max(deadline - time.monotonic(), 0.0))
        if locked:
            self._lock.release()
        torch.accelerator.set_device_index(self.device)
        while not all(_is_idle(stream) for stream in self.streams):
            if time.monotonic() >= deadline:
                logger.critical(
                    "The transfers on %s to and from %s did not end within %g s of "
                    "their abort. This process ends now, as nothing else can wake who "
                    "waits for the device.",
                    self.device,
                    self.peer,
                    _STOP_TIMEOUT_S,
                )
                _end_process()
                return
            time.sleep(0.01)


def _current_device() -> torch.device:
    return torch.device("cuda", torch.accelerator.current_device_index())


def _gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _pin_interface(address: str) -> None:
    """Have NCCL meet the peer, and listen meanwhile, where the control connection is.

    Unless NCCL_SOCKET_IFNAME says where. NCCL reads it once in a process.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(address == a.address.partition("%")[0] for a in addresses):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def _is_idle(stream: torch.cuda.Stream) -> bool:
    try:
        return stream.query()
    except RuntimeError:
        # The device has failed, which ends every wait for it.
        return True


def _abort_communicator(comm: PyNcclCommunicator) -> None:
    try:
        with torch.accelerator.device_index(comm.device.index):
            comm.nccl.ncclCommAbort(comm.comm)
    except Exception as e:
        logger.warning("The abort of an NCCL communicator failed: %s", e)


def _end_process() -> None:
    os._exit(1)
