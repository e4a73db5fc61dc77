# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Messages of the AFD control connection, and the channel that carries them.

A frame is a length (4 bytes, big endian) and one msgpack message of the fixed schema
below, tagged with its type. Whoever reads says which types may come now. A frame
longer than the longest of them is refused before memory is taken for it, and so is
everything that does not decode to one of them.
"""

import contextlib
import errno
import functools
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union

import msgspec
from msgspec import Meta

from vllm.utils.network_utils import join_host_port

AFD_PROTOCOL_VERSION = 1

NONCE_SIZE = 32
MAC_SIZE = 32
MAX_REASON_LENGTH = 2000
MAX_BLOB_SIZE = 64 * 1024
MAX_LAYERS = 4096
MAX_FACTS = 1024
MAX_STAGES = 2

_HEADER = struct.Struct("!I")
HEADER_SIZE = _HEADER.size

# A wait is made of so many, to see whether this process runs meanwhile. One that
# takes twice as long and this longer, in seconds, says that it does not.
_TICKS = 8
_STALL_S = 0.5

_Count = Annotated[int, Meta(ge=0, lt=2**53)]
_Name = Annotated[str, Meta(max_length=256)]
_Reason = Annotated[str, Meta(max_length=MAX_REASON_LENGTH)]
_Role = Literal["attention", "ffn"]


class AFDMessage(
    msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True
):  # type: ignore[call-arg]
    """Base of all messages. The class name is the tag."""


class AFDChallenge(AFDMessage, frozen=True, kw_only=True):  # type: ignore[call-arg]
    """The first message in each direction. Its layout never changes, so that peers
    of different protocol versions can say so."""

    protocol: _Count
    role: _Role
    nonce: Annotated[bytes, Meta(min_length=NONCE_SIZE, max_length=NONCE_SIZE)]
    """Fresh for each connection, so that no recorded proof is good again."""
    has_secret: bool


class AFDProof(AFDMessage, frozen=True, kw_only=True):  # type: ignore[call-arg]
    """Shows that the sender knows the secret, without showing the secret."""

    mac: Annotated[bytes, Meta(min_length=MAC_SIZE, max_length=MAC_SIZE)]


class AFDRefused(AFDMessage, frozen=True, kw_only=True):  # type: ignore[call-arg]
    """The last message of a handshake that failed."""

    reason: _Reason


class AFDReady(AFDMessage, frozen=True, kw_only=True):  # type: ignore[call-arg]
    """Attention's last word in a handshake: the session begins."""


class AFDLayerInfo(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True
):  # type: ignore[call-arg]
    """One MoE layer, in the order in which a step runs them."""

    name: _Name
    gate_on_ffn: bool
    logits_size: _Count = 0
    """Router logits per token that attention sends. 0: none."""
    logits_dtype: _Name = ""


class AFDHello(AFDMessage, frozen=True, kw_only=True):  # type: ignore[call-arg]
    """What a role runs. Both have to agree, see `compare_hellos`."""

    vllm_version: _Name
    role: _Role
    rank: _Count
    num_attention_ranks: _Count
    num_ffn_ranks: _Count
    model: Annotated[dict[_Name, _Name], Meta(max_length=MAX_FACTS)]
    """Facts about the model, by name."""
    dtype: _Name
    hidden_size: _Count
    layers: Annotated[list[AFDLayerInfo], Meta(max_length=MAX_LAYERS)]
    gate_placement: _Name
    max_num_batched_tokens: _Count
    """Rows of the largest stage. Attention: that it makes. FFN: that it takes."""
    num_ubatches: _Count
    """Attention: the most stages of its steps. FFN: the most it takes."""
    connector: _Name


class AFDStep(AFDMessage, frozen=True, kw_only=True):  # type: ignore[call-arg]
    """Attention is about to run the model: FFN serves every MoE layer once."""

    seq: _Count
    """One more than that of the step before."""
    kind: Literal["eager", "warmup", "profile"]
    stage_tokens: Annotated[list[_Count], Meta(min_length=1, max_length=MAX_STAGES)]
    """Rows of each stage, padding included. 0 is legal."""


class AFDBlob(AFDMessage, frozen=True, kw_only=True):  # type: ignore[call-arg]
    """Opaque bytes of the connector, while it connects."""

    data: Annotated[bytes, Meta(max_length=MAX_BLOB_SIZE)]


class AFDHeartbeat(AFDMessage, frozen=True, kw_only=True):  # type: ignore[call-arg]
    """Sign of life."""


class AFDAbort(AFDMessage, frozen=True, kw_only=True):  # type: ignore[call-arg]
    """The sender cannot go on."""

    reason: _Reason


class AFDBye(AFDMessage, frozen=True, kw_only=True):  # type: ignore[call-arg]
    """The sender ends the session in good order."""

    reason: _Reason | None = None
    """Why, if there is more to say than that it was told to."""


# What a frame of each type may take, in bytes, with room for msgpack's own.
_MAX_SIZE: dict[type[AFDMessage], int] = {
    AFDChallenge: 256,
    AFDProof: 256,
    AFDReady: 256,
    AFDHeartbeat: 256,
    AFDStep: 2048,
    AFDRefused: 4 * MAX_REASON_LENGTH + 256,
    AFDAbort: 4 * MAX_REASON_LENGTH + 256,
    AFDBye: 4 * MAX_REASON_LENGTH + 256,
    AFDBlob: MAX_BLOB_SIZE + 256,
    AFDHello: 1024 * 1024,
}

_M = TypeVar("_M", bound=AFDMessage)


class AFDProtocolError(ValueError):
    """The peer sent something that is no message, or not one that may come now."""


@functools.cache
def _decoder(*types: type[AFDMessage]) -> msgspec.msgpack.Decoder:
    return msgspec.msgpack.Decoder(Union[types])  # noqa: UP007


def _names(types: tuple[type[AFDMessage], ...]) -> str:
    return " or ".join(t.__name__ for t in types)


def clean_text(text: str, max_length: int = MAX_REASON_LENGTH) -> str:
    """Text made fit for the peer's log: one line, printable, and not too long."""
    text = "".join(c if c.isprintable() else "?" for c in text.replace("\n", " "))
    if len(text) > max_length:
        text = text[: max_length - 4] + " ..."
    return text


def describe_differences(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """What the peer says differently from this side, fit for the log; "" if nothing."""
    return clean_text(
        "; ".join(
            f"{name} is {theirs.get(name)} there and {own.get(name)} here"
            for name in sorted(own.keys() | theirs.keys())
            if theirs.get(name) != own.get(name)
        )
    )


def encode(message: AFDMessage) -> bytes:
    """Make a frame.

    Raises:
        ValueError: The message is larger than the peer would take.

    """
    payload = msgspec.msgpack.encode(message)
    limit = _MAX_SIZE[type(message)]
    if len(payload) > limit:
        raise ValueError(
            f"{type(message).__name__} takes {len(payload)} bytes, "
            f"more than the {limit} that are allowed."
        )
    return _HEADER.pack(len(payload)) + payload


def check_size(size: int, *types: type[AFDMessage]) -> None:
    """Raise AFDProtocolError if no message of `types` can be `size` bytes long."""
    limit = max(_MAX_SIZE[t] for t in types)
    if not 0 < size <= limit:
        raise AFDProtocolError(
            f"a frame of {size} bytes, where {_names(types)} "
            f"of 1 to {limit} bytes may come"
        )


def decode(payload: bytes | bytearray, *types: type[_M]) -> _M:
    """Decode the payload of a frame, which has to be a message of one of `types`.

    Raises:
        AFDProtocolError: It is none, or its size is not allowed.

    """
    try:
        message = _decoder(*types).decode(payload)  # type: ignore[arg-type]
    except (ValueError, RecursionError) as e:
        # The text of the error may quote the payload.
        raise AFDProtocolError(
            f"no valid {_names(types)}: {clean_text(str(e), 200)}"
        ) from None
    check_size(len(payload), type(message))
    return message


class AFDChannel:
    """Sends and receives messages over a connected TCP socket.

    One thread may receive while others send. `shutdown` may be called at any time
    and wakes them all; `close` only once they are gone.
    """

    def __init__(self, sock: socket.socket):
        self.peer_address = join_host_port(*sock.getpeername()[:2])
        self.local_host: str = sock.getsockname()[0]
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._send_lock = threading.Lock()
        # No more can be sent: a frame was cut short, or sending is over.
        self._send_closed = False
        self.is_shut_down = False

    def send(self, message: AFDMessage, timeout_s: float) -> None:
        """Send one message.

        Raises:
            ValueError: The message is too large.
            TimeoutError: It could not be sent in time. If a part of it was, nothing
                can be sent any more.
            OSError: The connection is broken, or was shut down.

        """
        view = memoryview(encode(message))
        deadline = time.monotonic() + timeout_s
        if not self._send_lock.acquire(timeout=max(timeout_s, 0)):
            raise TimeoutError("another message is still being sent")
        try:
            if self._send_closed:
                raise BrokenPipeError("sending is over")
            size = len(view)
            try:
                while view:
                    try:
                        view = view[self._sock.send(view) :]
                    except BlockingIOError:
                        self._wait(select.POLLOUT, deadline)
            finally:
                if 0 < len(view) < size:
                    self._send_closed = True
        finally:
            self._send_lock.release()

    def recv(self, *types: type[_M], timeout_s: float) -> _M:
        """Receive the next message, which has to be one of `types`.

        Raises:
            AFDProtocolError: It is not one of `types`, or no message at all.
            TimeoutError: It was not complete in time.
            EOFError: The peer has closed the connection, after a whole message.
            OSError: The connection is broken, also in the middle of a message.

        """
        deadline = time.monotonic() + timeout_s
        header = self._recv_exactly(HEADER_SIZE, deadline, may_end=True)
        (size,) = _HEADER.unpack(header)
        check_size(size, *types)
        return decode(self._recv_exactly(size, deadline), *types)

    def _recv_exactly(
        self, size: int, deadline: float, may_end: bool = False
    ) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                received = self._sock.recv_into(view)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            if received == 0:
                if may_end and len(view) == size:
                    raise EOFError("the connection was closed")
                raise ConnectionError(
                    "the connection was closed in the middle of a message"
                )
            view = view[received:]
        return data

    def _wait(self, event: int, deadline: float) -> None:
        """Wait for the socket, also past the deadline if this process did not run.

        Polls at least once, so that what came while this process was stopped is seen
        before the time is looked at. If all of the host was, the peer had no time
        either: once, it gets as much again.
        """
        fd = self._sock.fileno()
        if fd < 0:
            raise OSError(errno.EBADF, "the connection was closed here")
        poll = select.poll()
        poll.register(fd, event)
        now = time.monotonic()
        limit = max(deadline - now, 0)
        tick = min(limit / _TICKS, 60)
        may_extend = True
        while not poll.poll(min(max(deadline - now, 0), tick) * 1000):
            before, now = now, time.monotonic()
            if may_extend and now - before > 2 * tick + _STALL_S:
                may_extend = False
                deadline = now + limit
            elif now >= deadline:
                raise TimeoutError("timed out")

    def end_sending(self) -> None:
        """Let the peer read what was sent, and the end of the connection after it."""
        self._send_closed = True
        self._shut(socket.SHUT_WR)

    def shutdown(self) -> None:
        """End the connection in both directions. Wakes who sends or receives."""
        self._send_closed = self.is_shut_down = True
        self._shut(socket.SHUT_RDWR)

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):  # The peer may have been faster.
            self._sock.shutdown(how)

    def close(self) -> None:
        """Release the socket."""
        self.shutdown()
        self._sock.close()

    def __enter__(self) -> "AFDChannel":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()
