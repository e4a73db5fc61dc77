# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The control connection between an attention and an FFN peer.

It is one TCP connection, which lives as long as the session: if the peer's process
dies, its end is seen at once; if the peer stops, or its host is gone, its heartbeats
are missed (TCP's keepalive would take longer, and knows nothing of stopped processes).
Attention makes it with `AFDControl.connect`, FFN gets it from `AFDListener.accept`.
"""

import collections
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.distributed.afd_transfer.errors import (
    AFDError,
    AFDHandshakeError,
    AFDPeerError,
)
from vllm.distributed.afd_transfer.handshake import (
    authenticate,
    check_hello,
    compare_hellos,
    describe_mismatches,
    expect,
    get_secret,
)
from vllm.distributed.afd_transfer.messages import (
    MAX_BLOB_SIZE,
    AFDAbort,
    AFDBlob,
    AFDBye,
    AFDChannel,
    AFDHeartbeat,
    AFDHello,
    AFDMessage,
    AFDProtocolError,
    AFDReady,
    AFDStep,
    clean_text,
)
from vllm.logger import init_logger
from vllm.utils.network_utils import join_host_port

if TYPE_CHECKING:
    from vllm.config.afd import AFDConfig

logger = init_logger(__name__)

# Heartbeats sent per heartbeat_timeout_s.
_HEARTBEATS_PER_TIMEOUT = 4
# What a peer may send ahead of what is read here. Attention is at most a step ahead.
_MAX_QUEUED = 64
# How long an orderly end waits for the peer to take the last message, in seconds.
_LINGER_S = 1.0
# When a wait for the peer is logged first, and how often after that, in seconds.
_FIRST_LOG_S = 5.0
_LOG_INTERVAL_S = 30.0


def _peer_name(hello: AFDHello, address: str) -> str:
    return f"AFD {hello.role} peer (rank {hello.rank}) at {address}"


class AFDControl:
    """An authenticated connection to one peer.

    From the start, one thread reads and one sends heartbeats. Once the session has
    failed, `error` says why and every method but `close` raises it.
    """

    peer: str
    """Names the peer in messages."""
    peer_hello: AFDHello
    local_address: str
    """The address of this end, without the port."""
    error: AFDError | None
    bye_reason: str | None
    """What the peer's goodbye said, if it has ended the session for a reason."""

    def __init__(
        self,
        config: "AFDConfig",
        channel: AFDChannel,
        hello: AFDHello,
        peer_hello: AFDHello,
    ):
        """Begin the session. Called with the handshake done, see `connect`."""
        self.peer = _peer_name(peer_hello, channel.peer_address)
        self.peer_hello = peer_hello
        self.local_address = channel.local_host
        self.error = self.bye_reason = None
        self._config = config
        self._channel = channel
        self._hello = hello
        self._max_stages = min(hello.num_ubatches, peer_hello.num_ubatches)
        self._max_tokens = min(
            hello.max_num_batched_tokens, peer_hello.max_num_batched_tokens
        )
        self._last_seq: int | None = None

        # Guards what follows. Notified of whatever recv_step or exchange_blob
        # may wait for.
        self._cond = threading.Condition()
        self._steps: collections.deque[AFDStep] = collections.deque()
        self._blobs: collections.deque[bytes] = collections.deque()
        self._peer_said_bye = False
        self._closed = False
        self._on_failure: Callable[[AFDError], None] | None = None
        self._on_bye: Callable[[], None] | None = None

        # No more heartbeats: the session is over.
        self._over = threading.Event()
        name = f"afd-control-{hello.role}"
        self._reader = threading.Thread(
            target=self._read, name=f"{name}-reader", daemon=True
        )
        self._heart = threading.Thread(
            target=self._beat, name=f"{name}-heartbeat", daemon=True
        )
        self._reader.start()
        self._heart.start()

    @property
    def is_alive(self) -> bool:
        """Whether the session goes on."""
        return not self._over.is_set()

    # Connecting, on attention.

    @classmethod
    def connect(cls, config: "AFDConfig", hello: AFDHello) -> "AFDControl":
        """Connect to the FFN server, which may start later than this one.

        Raises:
            AFDHandshakeError: There was none within connect_timeout_s, or what is
                there refused, or does not fit this server.
            ValueError: VLLM_AFD_SECRET is empty, or `hello` too large.

        """
        check_hello(hello)
        secret = get_secret()
        where = join_host_port(config.afd_host, config.afd_port)
        deadline = time.monotonic() + config.connect_timeout_s
        next_log = time.monotonic() + _FIRST_LOG_S
        pause = 0.05
        while True:
            attempt_deadline = min(
                deadline, time.monotonic() + config.heartbeat_timeout_s
            )
            try:
                return cls._connect_once(config, hello, secret, attempt_deadline)
            except AFDHandshakeError as e:
                raise AFDHandshakeError(f"AFD ffn server at {where}: {e}") from None
            except AFDProtocolError as e:
                raise AFDHandshakeError(
                    f"What listens on {where} (afd_host, afd_port) does not "
                    f"speak the AFD protocol: {e}"
                ) from None
            except TimeoutError:
                cause = "it does not answer (it may still be loading)"
            except EOFError:
                cause = "it closed the connection during the handshake"
            except (OSError, UnicodeError) as e:
                cause = str(e)
            now = time.monotonic()
            if now >= deadline:
                raise AFDHandshakeError(
                    f"No AFD ffn server at {where} (afd_host, afd_port) within "
                    f"connect_timeout_s={config.connect_timeout_s:g}: {cause}."
                )
            if now >= next_log:
                logger.info("Waiting for the AFD ffn server at %s: %s.", where, cause)
                next_log = now + _LOG_INTERVAL_S
            time.sleep(min(pause, deadline - now))
            pause = min(2 * pause, 1.0)

    @classmethod
    def _connect_once(
        cls, config: "AFDConfig", hello: AFDHello, secret: bytes | None, deadline: float
    ) -> "AFDControl":
        sock = socket.create_connection(
            (config.afd_host, config.afd_port),
            timeout=max(deadline - time.monotonic(), 0.01),
        )
        try:
            channel = AFDChannel(sock)
        except OSError:
            sock.close()  # It has gone already.
            raise
        try:
            if sock.getsockname() == sock.getpeername():
                # TCP connects a port to itself if the kernel happens to choose it.
                raise ConnectionRefusedError("nothing listens there")
            authenticate(channel, "attention", secret, deadline)
            channel.send(hello, timeout_s=deadline - time.monotonic())
            peer_hello = expect(channel, AFDHello, deadline)
            if mismatches := compare_hellos(hello, peer_hello):
                raise AFDHandshakeError(describe_mismatches(mismatches))
            channel.send(AFDReady(), timeout_s=deadline - time.monotonic())
            control = cls(config, channel, hello, peer_hello)
        except BaseException:
            channel.close()
            raise
        logger.debug("Connected to %s.", control.peer)
        return control

    # The session.

    def start(
        self,
        on_failure: Callable[[AFDError], None],
        on_bye: Callable[[], None] | None = None,
    ) -> None:
        """Have failures reported.

        Args:
            on_failure: Called once, from a thread of this object (from this call, if
                it was too late), when the peer died, hung, aborted or misbehaved; on
                attention also if it shut down. Not called for our own `fail`.
            on_bye: On FFN, called likewise when the peer has ended the session in
                good order. It may be within a step.

        """
        with self._cond:
            self._on_failure, self._on_bye = on_failure, on_bye
            failed = isinstance(self.error, AFDPeerError)
            ended = self._peer_said_bye and not self._closed
        if failed:
            self._report_failure()
        elif ended:
            self._report_bye()

    def check(self) -> None:
        """Raise `error` if the session has failed."""
        if self.error is not None:
            raise self.error

    def exchange_blob(self, data: bytes) -> bytes:
        """Swap small opaque bytes with the peer, which has to do so as well.

        Raises:
            ValueError: `data` is too large.
            AFDError: The peer failed, left, or sent nothing in connect_timeout_s.

        """
        if len(data) > MAX_BLOB_SIZE:
            raise ValueError(
                f"A blob of {len(data)} bytes; at most {MAX_BLOB_SIZE} are allowed."
            )
        self._send(AFDBlob(data=data))
        timeout_s = self._config.connect_timeout_s
        with self._cond:
            if not self._cond.wait_for(lambda: self._blobs or self._ended, timeout_s):
                raise AFDPeerError(
                    f"{self.peer} did not connect its data plane within "
                    f"connect_timeout_s={timeout_s:g}."
                )
            self.check()
            if not self._blobs:
                why = f": {self.bye_reason}" if self.bye_reason else ""
                raise AFDPeerError(
                    f"{self.peer} left while the data plane connected{why}."
                )
            return self._blobs.popleft()

    def send_step(self, step: AFDStep) -> None:
        """Announce a step to FFN.

        Raises:
            ValueError: The step is not one that the peer would take.
            AFDError: The session has failed.

        """
        if problem := self._check_step(step):
            raise ValueError(f"AFD step {step}: {problem}")
        self._last_seq = step.seq
        self._send(step)

    def recv_step(self, timeout_s: float | None = None) -> AFDStep | None:
        """Wait for attention to announce a step.

        Returns:
            The step, or None if there are no more: the peer has said bye, or `close`
            was called here.

        Raises:
            TimeoutError: There was none within `timeout_s`.
            AFDError: The session has failed. Steps not yet received are dropped.

        """
        with self._cond:
            if not self._cond.wait_for(lambda: self._steps or self._ended, timeout_s):
                raise TimeoutError(f"no step from {self.peer} within {timeout_s} s")
            self.check()
            if self._closed or not self._steps:
                return None
            return self._steps.popleft()

    def fail(self, reason: str) -> None:
        """End the session because this side cannot go on, and tell the peer why."""
        error = AFDError(f"The session with {self.peer} was aborted: {reason}")
        if self._set_error(error):
            self._send_last(AFDAbort(reason=clean_text(reason)), _LINGER_S)

    def close(self, reason: str | None = None) -> None:
        """End the session, and tell the peer why if there is something to say.
        Takes at most a few seconds; may be called again."""
        with self._cond:
            if self._closed:
                return
            self._closed = True
            in_good_order = self.error is None and not self._peer_said_bye
            self._cond.notify_all()
        self._over.set()
        if in_good_order:
            said = clean_text(reason) if reason else None
            self._send_last(AFDBye(reason=said), _LINGER_S)
        # The peer closes its end once it has read ours: a close before that could
        # destroy what is on its way.
        self._join(self._reader, _LINGER_S)
        self._channel.shutdown()
        self._join(self._reader, _LINGER_S)
        self._join(self._heart, _LINGER_S)
        self._channel.close()

    # Internals.

    @property
    def _ended(self) -> bool:
        return self.error is not None or self._peer_said_bye or self._closed

    @staticmethod
    def _join(thread: threading.Thread, timeout_s: float) -> None:
        if thread is not threading.current_thread():
            thread.join(timeout_s)

    def _check_step(self, step: AFDStep) -> str | None:
        """Say why a step, sent or received, is not the next one."""
        if self._last_seq is not None and step.seq != self._last_seq + 1:
            return f"seq must be {self._last_seq + 1}"
        if not 1 <= len(step.stage_tokens) <= self._max_stages:
            return f"1 to {self._max_stages} stages were agreed on"
        if max(step.stage_tokens) > self._max_tokens:
            return f"a stage has at most max_num_batched_tokens={self._max_tokens} rows"
        return None

    def _send(self, message: AFDMessage) -> None:
        if self._ended:
            self.check()
            raise AFDError(f"The session with {self.peer} is over.")
        try:
            self._channel.send(message, self._config.heartbeat_timeout_s)
        except OSError as e:  # TimeoutError is one.
            self._send_failed(e)
            self.check()
            raise AFDError(f"The session with {self.peer} is over.") from None

    def _send_failed(self, error: OSError) -> None:
        if isinstance(error, TimeoutError):
            self._peer_failed(
                "hung: it has read nothing for "
                f"heartbeat_timeout_s={self._config.heartbeat_timeout_s:g}",
                tell=True,
            )
            return
        # The peer may have said why before it closed the connection.
        self._join(self._reader, _LINGER_S)
        self._peer_failed(f"was lost: {error}")

    def _send_last(self, message: AFDMessage, timeout_s: float) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(message, timeout_s)
        self._channel.end_sending()

    def _set_error(self, error: AFDError) -> bool:
        """Keep the first error, unless the session has already ended."""
        with self._cond:
            if self._ended:
                return False
            self.error = error
            self._cond.notify_all()
        self._over.set()
        return True

    def _peer_failed(self, what: str, tell: bool = False) -> None:
        after = (
            f"after step {self._last_seq}"
            if self._last_seq is not None
            else "before the first step"
        )
        error = AFDPeerError(f"{self.peer} {what} ({after}).")
        if not self._set_error(error):
            return
        logger.error("%s", error)
        if tell:
            # It may only have been stopped, and read this when it goes on.
            reason = f"this {self._hello.role} server gave the peer up: it {what}"
            self._send_last(AFDAbort(reason=clean_text(reason)), _LINGER_S)
        self._channel.end_sending()  # Wakes who is still sending.
        self._report_failure()

    def _report_failure(self) -> None:
        with self._cond:
            on_failure, self._on_failure = self._on_failure, None
            error = self.error
        if on_failure is not None and error is not None:
            self._call(on_failure, error)

    def _report_bye(self) -> None:
        with self._cond:
            on_bye, self._on_bye = self._on_bye, None
        if on_bye is not None:
            self._call(on_bye)

    def _call(self, callback: Callable, *args) -> None:
        try:
            callback(*args)
        except Exception:
            logger.exception("A callback of the session with %s failed.", self.peer)

    def _beat(self) -> None:
        interval = self._config.heartbeat_timeout_s / _HEARTBEATS_PER_TIMEOUT
        while not self._over.wait(interval):
            try:
                self._channel.send(AFDHeartbeat(), self._config.heartbeat_timeout_s)
            except OSError as e:
                self._send_failed(e)
                return

    def _read(self) -> None:
        timeout_s = self._config.heartbeat_timeout_s
        try:
            while True:
                message = self._channel.recv(
                    AFDStep,
                    AFDBlob,
                    AFDHeartbeat,
                    AFDAbort,
                    AFDBye,
                    timeout_s=timeout_s,
                )
                if self._ended:
                    continue  # Only waits for the end of the connection.
                self._handle(message)
        except AFDProtocolError as e:
            self._peer_failed(f"sent {e}", tell=True)
        except TimeoutError:
            self._peer_failed(
                f"hung: no sign of life for heartbeat_timeout_s={timeout_s:g}",
                tell=True,
            )
        except EOFError:
            self._peer_failed("died: it closed the connection without a word")
        except OSError as e:
            self._peer_failed(f"was lost: {e}")

    def _handle(self, message: AFDMessage) -> None:
        if isinstance(message, AFDAbort):
            self._peer_failed(f"aborted: {clean_text(message.reason)}")
        elif isinstance(message, AFDBye):
            self._handle_bye(message)
        elif isinstance(message, AFDStep):
            if self._hello.role != "ffn":
                raise AFDProtocolError("a step, which only attention may do")
            if problem := self._check_step(message):
                raise AFDProtocolError(f"an invalid step {message}: {problem}")
            self._last_seq = message.seq
            self._enqueue(self._steps, message)
        elif isinstance(message, AFDBlob):
            self._enqueue(self._blobs, message.data)

    def _handle_bye(self, bye: AFDBye) -> None:
        reason = clean_text(bye.reason) if bye.reason else None
        why = f": {reason}" if reason else ""
        if self._hello.role == "attention":
            self._peer_failed(f"has shut down{why}")
            return
        with self._cond:
            self.bye_reason = reason
            self._peer_said_bye = True
            self._cond.notify_all()
        self._over.set()
        self._channel.end_sending()
        log = logger.warning if reason else logger.info
        log("%s has ended the session%s.", self.peer, why)
        self._report_bye()

    def _enqueue(self, queue: collections.deque, item: object) -> None:
        with self._cond:
            if len(queue) >= _MAX_QUEUED:
                raise AFDProtocolError(f"more than {_MAX_QUEUED} messages ahead")
            queue.append(item)
            self._cond.notify_all()
