# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Where the AFD FFN role waits for its attention server."""

import ipaddress
import logging
import select
import socket
import threading
import time
from typing import TYPE_CHECKING

from vllm.distributed.afd_transfer.control import AFDControl
from vllm.distributed.afd_transfer.errors import AFDError, AFDHandshakeError
from vllm.distributed.afd_transfer.handshake import (
    authenticate,
    check_hello,
    compare_hellos,
    describe_mismatches,
    expect,
    get_secret,
    send_refusal,
)
from vllm.distributed.afd_transfer.messages import (
    AFDChannel,
    AFDHello,
    AFDProtocolError,
    AFDReady,
)
from vllm.logger import init_logger
from vllm.utils.network_utils import join_host_port

if TYPE_CHECKING:
    from vllm.config.afd import AFDConfig

logger = init_logger(__name__)

# What close() waits for each thread, in seconds. They have been woken.
_JOIN_S = 1.0
# How often a wait looks at a threading.Event that it cannot wait for, in seconds.
_STOP_POLL_S = 0.2
# Of refusals of one kind one is logged in this time, in seconds.
_REFUSAL_INTERVAL_S = 1.0


class AFDListener:
    """The FFN end: waits for the attention server, one at a time.

    A thread accepts connections from `listen` on, also while a session runs. Each
    handshake has a thread of its own, so none can hold up another: their number and
    time are bounded, and the oldest goes if there are too many.

    Raises:
        ValueError: It is not possible to listen on afd_host and afd_port.

    """

    _MAX_HANDSHAKES = 16

    def __init__(self, config: "AFDConfig"):
        self._config = config
        self._secret = get_secret()
        self._where = join_host_port(config.afd_host, config.afd_port)
        self._sock = self._bind()
        self._wake, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None

        # Guards what follows.
        self._cond = threading.Condition()
        # Handshakes that go on, the oldest first.
        self._handshakes: dict[AFDChannel, threading.Thread] = {}
        # What accept() says, while it waits; and who is about to satisfy it.
        self._hello: AFDHello | None = None
        self._claimed_by: AFDChannel | None = None
        self._session: AFDControl | None = None
        self._last_refusal: str | None = None
        self._next_log: dict[str, float] = {}
        self._num_silent = 0
        self._closed = False

    def _bind(self) -> socket.socket:
        config = self._config
        problem: Exception | None = None
        try:
            candidates = socket.getaddrinfo(
                config.afd_host, config.afd_port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError) as e:
            raise ValueError(
                f"afd_host={config.afd_host!r} is no address or host name: {e}"
            ) from None
        for family, kind, protocol, _, address in candidates:
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as e:
                problem = e
                continue
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
                # Only a listening socket keeps others off the port.
                sock.listen(128)
                return sock
            except OSError as e:
                problem = e
                sock.close()
        raise ValueError(
            f"The AFD FFN role cannot listen on afd_host={config.afd_host!r}, "
            f"afd_port={config.afd_port}: {problem}. The port has to be free, and "
            "the host an address of this machine."
        )

    def listen(self) -> None:
        """Begin to answer who connects. Until then, they wait."""
        with self._cond:
            if self._thread is not None or self._closed:
                return
            self._thread = threading.Thread(
                target=self._accept_loop, name="afd-listener", daemon=True
            )
            self._thread.start()
            address = ipaddress.ip_address(self._sock.getsockname()[0])
        logger.info("Listening for an AFD attention server on %s.", self._where)
        if self._secret is None and not address.is_loopback:
            logger.warning(
                "Anyone who can reach afd_host=%r, afd_port=%d can act as the "
                "attention server: set VLLM_AFD_SECRET on both roles.",
                self._config.afd_host,
                self._config.afd_port,
            )

    def accept(
        self,
        hello: AFDHello,
        timeout_s: float | None = None,
        stop: threading.Event | None = None,
    ) -> AFDControl | None:
        """Wait for an attention server that fits.

        Who does not is refused and logged, and does not end the wait.

        Returns:
            The session, or None if `stop` was set or the listener closed.

        Raises:
            AFDHandshakeError: There was none within `timeout_s`.
            AFDError: The session from the last call goes on.

        """
        check_hello(hello)
        self.listen()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._cond:
            if self._session is not None and self._session.is_alive:
                raise AFDError(f"AFD FFN is already serving {self._session.peer}.")
            self._hello, self._session = hello, None
            self._last_refusal = None
            self._cond.notify_all()
            try:
                while self._session is None:
                    if self._closed or (stop is not None and stop.is_set()):
                        return None
                    pause = None if stop is None else _STOP_POLL_S
                    if deadline is not None:
                        left = deadline - time.monotonic()
                        if left <= 0:
                            raise self._nobody_came(timeout_s)
                        pause = left if pause is None else min(pause, left)
                    self._cond.wait(pause)
                return self._session
            finally:
                self._hello = None

    def _nobody_came(self, timeout_s: float | None) -> AFDHandshakeError:
        refused = (
            f" Of those that did not fit, the last was {self._last_refusal}"
            if self._last_refusal
            else ""
        )
        return AFDHandshakeError(
            f"No AFD attention server connected to {self._where} (afd_host, afd_port) "
            f"within {timeout_s:g} s.{refused}"
        )

    def close(self) -> None:
        """Stop listening. A session goes on. Bounded; may be called again."""
        with self._cond:
            if self._closed:
                return
            self._closed = True
            handshakes = dict(self._handshakes)
            self._cond.notify_all()
        self._wake.close()
        for channel in handshakes:
            channel.shutdown()
        for thread in (self._thread, *handshakes.values()):
            if thread is not None:
                thread.join(_JOIN_S)
        self._sock.close()
        self._woken.close()

    def _accept_loop(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            poll.poll()
            if self._closed:
                return
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as e:
                logger.warning("Cannot accept connections on %s: %s.", self._where, e)
                time.sleep(_STOP_POLL_S)  # Out of file descriptors, perhaps.
                continue
            self._begin_handshake(sock)

    def _begin_handshake(self, sock: socket.socket) -> None:
        try:
            channel = AFDChannel(sock)
        except OSError:
            sock.close()  # It has gone already.
            return
        thread = threading.Thread(
            target=self._handshake,
            args=(channel,),
            name="afd-handshake",
            daemon=True,
        )
        with self._cond:
            if self._closed:
                channel.close()
                return
            if len(self._handshakes) >= self._MAX_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                oldest.shutdown()
                del self._handshakes[oldest]
                self._cond.notify_all()
            self._handshakes[channel] = thread
            try:
                thread.start()  # close() joins those that it finds.
            except RuntimeError as e:
                logger.warning("Cannot serve %s: %s.", channel.peer_address, e)
                del self._handshakes[channel]
                channel.close()

    def _handshake(self, channel: AFDChannel) -> None:
        deadline = time.monotonic() + self._config.heartbeat_timeout_s
        session = None
        kind = "stranger"
        try:
            authenticate(channel, "ffn", self._secret, deadline)
            kind = "peer"
            session = self._agree(channel, deadline)
        except AFDHandshakeError as e:
            self._log_refusal(logging.ERROR, kind, channel, str(e))
        except AFDProtocolError as e:
            self._log_refusal(logging.WARNING, "junk", channel, f"it sent {e}")
        except (EOFError, OSError) as e:
            # A probe of the port, or a peer that tries again.
            logger.debug(
                "%s did not finish the AFD handshake: %s", channel.peer_address, e
            )
        finally:
            with self._cond:
                self._handshakes.pop(channel, None)
                if self._claimed_by is channel:
                    self._claimed_by = None
                    self._cond.notify_all()
            if session is None:
                channel.close()

    def _log_refusal(
        self, level: int, kind: str, channel: AFDChannel, reason: str
    ) -> None:
        address = channel.peer_address
        now = time.monotonic()
        with self._cond:
            self._last_refusal = f"{address}: {reason}"
            # Anyone can be refused, and as often as they like. None of a kind that
            # takes a secret is left out because of those that do not have it.
            if now < self._next_log.get(kind, now):
                self._num_silent += 1
                return
            self._next_log[kind] = now + _REFUSAL_INTERVAL_S
            num_silent, self._num_silent = self._num_silent, 0
        if num_silent:
            reason += f" (and {num_silent} more connections before it)"
        logger.log(
            level,
            "Refused a connection from %s as AFD attention server: %s",
            address,
            reason,
        )

    def _agree(self, channel: AFDChannel, deadline: float) -> AFDControl | None:
        try:
            peer_hello = expect(channel, AFDHello, deadline)
        except AFDProtocolError as e:
            send_refusal(channel, f"it was sent {e}")
            raise
        hello = self._claim(channel, deadline)
        if isinstance(hello, str):
            send_refusal(channel, hello)
            raise AFDHandshakeError(hello)
        channel.send(hello, timeout_s=deadline - time.monotonic())
        if mismatches := compare_hellos(hello, peer_hello):
            raise AFDHandshakeError(describe_mismatches(mismatches))
        # Until it says so, the peer may give up and try again.
        expect(channel, AFDReady, deadline)
        with self._cond:
            if self._hello is not hello or channel.is_shut_down:
                raise ConnectionAbortedError("nobody waits for it any more")
            session = AFDControl(self._config, channel, hello, peer_hello)
            logger.debug("%s has connected.", session.peer)
            self._session, self._hello = session, None
            # Neither close() nor newcomers may end it from here on.
            self._handshakes.pop(channel, None)
            self._cond.notify_all()
            return session

    def _claim(self, channel: AFDChannel, deadline: float) -> AFDHello | str:
        """Wait for the turn of a handshake: for accept() to be called, and for those
        ahead to fail.

        Returns:
            What to say, or why the peer has to be refused.

        """
        with self._cond:
            while True:
                if channel.is_shut_down or self._closed:
                    raise ConnectionAbortedError("the connection was closed here")
                if self._session is not None and self._session.is_alive:
                    return f"already serving {self._session.peer}"
                if self._hello is not None and self._claimed_by is None:
                    self._claimed_by = channel
                    return self._hello
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("nobody waits for it yet")
                self._cond.wait(left)
