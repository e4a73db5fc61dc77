# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The FFN role's listener, with real and raw attention servers."""

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import regex as re

from vllm.distributed.afd_transfer.control import AFDControl
from vllm.distributed.afd_transfer.errors import AFDError, AFDHandshakeError
from vllm.distributed.afd_transfer.handshake import expect
from vllm.distributed.afd_transfer.listener import AFDListener
from vllm.distributed.afd_transfer.messages import (
    AFDBye,
    AFDChallenge,
    AFDHello,
    AFDProof,
    AFDRefused,
    encode,
)

from .control_utils import RawPeer, free_port, make_config
from .message_utils import (
    TIMEOUT_S,
    afd_threads,
    background,
    hello,
    repeat,
    step,
    wait_until,
)
from .test_handshake import MISMATCHES

pytestmark = [
    pytest.mark.skip_global_cleanup,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("no_leaks"),
]


class Pair:
    """An FFN listener, and what connects to it. Closes what it has made."""

    def __init__(self, stack: contextlib.ExitStack, **kwargs):
        self._stack = stack
        self._kwargs = kwargs
        self.host = kwargs.get("afd_host", "127.0.0.1")
        self.port = free_port(self.host if ":" in self.host else "127.0.0.1")
        self.listener = AFDListener(make_config("ffn", self.port, **kwargs))
        stack.callback(self.listener.close)

    def _closed_at_the_end(self, control: AFDControl | None) -> AFDControl | None:
        if control is not None:
            self._stack.callback(control.close)
        return control

    def accept(self, timeout_s=TIMEOUT_S, stop=None, **fields) -> Future:
        return background(
            lambda: self._closed_at_the_end(
                self.listener.accept(hello("ffn", **fields), timeout_s, stop)
            )
        )

    def connect(self, **fields) -> Future:
        config = make_config("attention", self.port, **self._kwargs)
        return background(
            lambda: self._closed_at_the_end(
                AFDControl.connect(config, hello("attention", **fields))
            )
        )

    def raw(self) -> RawPeer:
        return self._stack.enter_context(RawPeer.connect(self.port))

    def check_session(self, attention: Future, ffn: Future) -> None:
        """A session works, in both directions."""
        attention_end, ffn_end = attention.result(TIMEOUT_S), ffn.result(TIMEOUT_S)
        assert attention_end.peer == f"AFD ffn peer (rank 0) at {self.address}"
        assert ffn_end.peer.startswith("AFD attention peer (rank 0) at ")
        attention_end.send_step(step(0, 3, 4))
        assert ffn_end.recv_step(TIMEOUT_S) == step(0, 3, 4)
        swap = background(ffn_end.exchange_blob, b"ffn")
        assert attention_end.exchange_blob(b"attention") == b"ffn"
        assert swap.result(TIMEOUT_S) == b"attention"

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@contextlib.contextmanager
def make_pair(**kwargs) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        yield Pair(stack, **kwargs)


# Meeting.


@pytest.mark.parametrize("first", ["attention", "ffn", "bound only"])
@repeat(30)
def test_either_start_order(first):
    with contextlib.ExitStack() as stack:
        if first == "attention":
            port = free_port()
            config = make_config("attention", port)
            attention = background(AFDControl.connect, config, hello("attention"))
            ffn_listener = AFDListener(make_config("ffn", port))
            stack.callback(ffn_listener.close)
            ffn = background(ffn_listener.accept, hello("ffn"), TIMEOUT_S)
        else:
            pair = stack.enter_context(make_pair())
            if first == "ffn":
                ffn = pair.accept()
                attention = pair.connect()
            else:  # FFN is still loading.
                attention = pair.connect()
                ffn = pair.accept()
        attention_end = attention.result(TIMEOUT_S)
        stack.callback(attention_end.close)
        ffn_end = ffn.result(TIMEOUT_S)
        stack.callback(ffn_end.close)
        attention_end.send_step(step(0))
        assert ffn_end.recv_step(TIMEOUT_S) == step(0)


@pytest.mark.parametrize("listening", [False, True])
def test_attention_waits_for_an_ffn_server_that_is_not_ready(listening):
    # It tries several times, and FFN outlives these attempts.
    with make_pair(heartbeat_timeout_s=1) as pair:
        if listening:
            pair.listener.listen()
        attention = pair.connect()
        time.sleep(2.5)
        assert not attention.done()
        ffn = pair.accept()
        pair.check_session(attention, ffn)


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_hosts(host):
    try:
        with make_pair(afd_host=host) as pair:
            ffn, attention = pair.accept(), pair.connect()
            attention_end, ffn_end = attention.result(TIMEOUT_S), ffn.result(TIMEOUT_S)
            assert attention_end.local_address in ("127.0.0.1", "::1")
            assert attention_end.local_address == ffn_end.local_address
            attention_end.send_step(step(0))
            assert ffn_end.recv_step(TIMEOUT_S) == step(0)
    except (ValueError, OSError) as e:
        if host == "::1":
            pytest.skip(f"no IPv6: {e}")
        raise


def test_a_late_peer_after_a_timeout():
    port = free_port()
    for _ in range(3):
        with make_listener(port) as ffn_listener:
            start = time.monotonic()
            with pytest.raises(
                AFDHandshakeError,
                match=rf"No AFD attention server connected to 127.0.0.1:{port} "
                r"\(afd_host, afd_port\) within 0.2 s\.$",
            ):
                ffn_listener.accept(hello("ffn"), 0.2)
            assert 0.1 < time.monotonic() - start < 10
            # The same listener, and the next one on this port, still work.
            ffn = background(ffn_listener.accept, hello("ffn"), TIMEOUT_S)
            attention = AFDControl.connect(
                make_config("attention", port), hello("attention")
            )
            attention.close()
            ffn.result(TIMEOUT_S).close()


@contextlib.contextmanager
def make_listener(port: int, **kwargs) -> Iterator[AFDListener]:
    with contextlib.closing(AFDListener(make_config("ffn", port, **kwargs))) as ffn:
        yield ffn


@repeat(30)
def test_a_slow_attention_server():
    with make_pair() as pair:
        ffn = pair.accept()
        raw = pair.raw()
        send = raw.sock.send

        class Dribble:
            def __getattr__(self, name):
                return getattr(raw.sock, name)

            def send(self, data):
                return send(data[:7])

        raw.channel._sock = Dribble()
        raw.handshake(hello("attention"))
        raw.send_raw(encode(step(3)))
        assert ffn.result(TIMEOUT_S).recv_step(TIMEOUT_S) == step(3)
        raw.close()


# Who does not fit.


@pytest.mark.parametrize("field,value,text", [m for m in MISMATCHES if m[0] != "role"])
def test_a_mismatch_is_named_on_both_sides(field, value, text, caplog_vllm):
    with make_pair() as pair:
        ffn = pair.accept(**{field: value})
        attention = pair.connect()
        with pytest.raises(AFDHandshakeError) as error:
            attention.result(TIMEOUT_S)
        assert text in str(error.value) and pair.address in str(error.value)
        wait_until(lambda: text in caplog_vllm.text, "FFN to log it")
        (record,) = [r for r in caplog_vllm.records if text in r.getMessage()]
        assert record.levelname == "ERROR"
        assert re.search(r"from 127.0.0.1:\d+ as AFD attention", record.getMessage())
        # FFN waits on, for one that fits.
        assert not ffn.done()
        if field != "rank":  # None fits that.
            pair.connect(**{field: value}).result(TIMEOUT_S)
            assert ffn.result(TIMEOUT_S).peer_hello.role == "attention"


def test_the_timeout_says_who_was_refused():
    with make_pair() as pair:
        for timeout_s in (0.5, 2, 8):  # The first is for an idle machine.
            ffn = pair.accept(timeout_s=timeout_s)
            with pytest.raises(AFDHandshakeError):
                pair.connect(dtype="float32").result(TIMEOUT_S)
            error = ffn.exception(TIMEOUT_S)
            assert isinstance(error, AFDHandshakeError)
            if "the last was" in str(error):
                break
        assert re.search("the last was 127.0.0.1:.* dtype: attention", str(error))
        # It is of no interest to those who wait later.
        with pytest.raises(AFDHandshakeError, match=r"within 0.2 s\.$"):
            pair.accept(timeout_s=0.2).result(TIMEOUT_S)


@contextlib.contextmanager
def secret(monkeypatch, value: str | None) -> Iterator[None]:
    with monkeypatch.context() as m:
        if value is None:
            m.delenv("VLLM_AFD_SECRET", raising=False)
        else:
            m.setenv("VLLM_AFD_SECRET", value)
        yield


@pytest.mark.parametrize(
    "on_attention,on_ffn,seen_by_attention,seen_by_ffn",
    [
        ("a", "b", "refused: VLLM_AFD_SECRET is not the same", "is not the one of"),
        (
            "a",
            None,
            "not set on its side (ffn), but set",
            "set on its side (attention)",
        ),
        (
            None,
            "b",
            "set on its side (ffn), but not",
            "not set on its side (attention)",
        ),
    ],
)
def test_secrets_that_differ(
    on_attention, on_ffn, seen_by_attention, seen_by_ffn, monkeypatch, caplog_vllm
):
    with secret(monkeypatch, on_ffn), contextlib.ExitStack() as stack:
        pair = Pair(stack)
        ffn = pair.accept()
        with secret(monkeypatch, on_attention):
            start = time.monotonic()
            for _ in range(30):
                with pytest.raises(
                    AFDHandshakeError, match=re.escape(seen_by_attention)
                ):
                    AFDControl.connect(
                        make_config("attention", pair.port), hello("attention")
                    )
        # Not as often as a stranger likes.
        wait_until(lambda: seen_by_ffn in caplog_vllm.text, "FFN's log")
        logged = caplog_vllm.text.count(seen_by_ffn)
        assert 1 <= logged <= 2 + (time.monotonic() - start)
        # FFN waits on, for one that knows it.
        pair.check_session(pair.connect(), ffn)


def test_the_model_is_not_told_without_the_secret(monkeypatch):
    monkeypatch.setenv("VLLM_AFD_SECRET", "s")
    with make_pair() as pair:
        pair.accept(timeout_s=None)
        raw = pair.raw()
        challenge = AFDChallenge(
            protocol=1, role="attention", nonce=secrets.token_bytes(32), has_secret=True
        )
        raw.channel.send(challenge, TIMEOUT_S)
        raw.channel.recv(AFDChallenge, timeout_s=TIMEOUT_S)
        raw.channel.send(AFDProof(mac=bytes(32)), TIMEOUT_S)
        raw.channel.send(hello("attention"), TIMEOUT_S)
        data = raw.recv_until_closed()
        assert b"AFDHello" not in data and b"AFDProof" not in data
        pair.listener.close()


def test_an_empty_secret_is_refused_at_start(monkeypatch):
    monkeypatch.setenv("VLLM_AFD_SECRET", "")
    with pytest.raises(ValueError, match="VLLM_AFD_SECRET is set but empty"):
        AFDListener(make_config("ffn", free_port()))


def test_a_hello_that_no_peer_would_take_is_refused_at_home():
    with make_pair() as pair:
        with pytest.raises(ValueError, match="cannot describe .* of length <= 256"):
            pair.accept(model={"a": "x" * 257}).result(TIMEOUT_S)
        with pytest.raises(ValueError, match="cannot describe this server"):
            pair.connect(layers=hello("ffn").layers * 3000).result(TIMEOUT_S)


def test_an_invalid_hello_is_answered():
    with make_pair() as pair:
        pair.accept()
        raw = pair.raw()
        raw.authenticate("attention")
        raw.channel.send(hello("attention", dtype="x" * 300), TIMEOUT_S)
        refused = raw.channel.recv(AFDRefused, timeout_s=TIMEOUT_S)
        assert "it was sent no valid AFDHello" in refused.reason
        assert raw.recv_until_closed() == b""
        pair.listener.close()


# One at a time.


@repeat(30)
def test_a_second_attention_server_is_refused_and_let_in_later():
    with make_pair() as pair:
        ffn = pair.accept()
        first = pair.connect().result(TIMEOUT_S)
        first_end = ffn.result(TIMEOUT_S)
        with pytest.raises(
            AFDHandshakeError,
            match=rf"AFD ffn server at {pair.address}: it refused: already serving "
            rf"AFD attention peer \(rank 0\) at 127.0.0.1:\d+",
        ):
            pair.connect().result(TIMEOUT_S)
        # The first is not disturbed.
        first.send_step(step(0))
        assert first_end.recv_step(TIMEOUT_S) == step(0)
        first.close()
        assert first_end.recv_step(TIMEOUT_S) is None
        first_end.close()
        second = pair.connect()
        pair.check_session(second, pair.accept())


def test_only_one_session_is_accepted_at_a_time():
    with make_pair() as pair:
        ffn, attention = pair.accept(), pair.connect()
        pair.check_session(attention, ffn)
        with pytest.raises(AFDError, match="already serving AFD attention peer"):
            pair.accept().result(TIMEOUT_S)


def test_a_second_attention_server_is_logged(caplog_vllm):
    with make_pair() as pair:
        ffn = pair.accept()
        attention = pair.connect()
        pair.check_session(attention, ffn)
        with pytest.raises(AFDHandshakeError):
            pair.connect().result(TIMEOUT_S)
        wait_until(lambda: "already serving" in caplog_vllm.text, "FFN to log it")


@pytest.mark.parametrize("how", ["bye", "eof", "abort"])
@repeat(10)
def test_the_next_one_waits_until_ffn_is_ready_for_it(how):
    # The session is over, but FFN has not yet come back to accept().
    with make_pair() as pair:
        ffn = pair.accept()
        raw = pair.raw()
        raw.handshake(hello("attention"))
        first_end = ffn.result(TIMEOUT_S)
        if how == "bye":
            raw.send_raw(encode(AFDBye()))
        elif how == "abort":
            first_end.fail("reason")
        raw.close()
        wait_until(lambda: not first_end.is_alive, "the end of the session")
        second = pair.connect()
        wait_until(lambda: "afd-handshake" in names(), "the second to come")
        assert not second.done()
        pair.check_session(second, pair.accept())


def names() -> list[str]:
    return [thread.name for thread in afd_threads()]


@repeat(10)
def test_two_at_once_one_is_served():
    with make_pair() as pair:
        both = [pair.connect(), pair.connect()]
        ffn = pair.accept()
        errors = [end.exception(TIMEOUT_S) for end in both]
        (refused,) = [e for e in errors if e is not None]
        assert "already serving AFD attention peer" in str(refused)
        pair.check_session(both[errors.index(None)], ffn)


@repeat(30)
def test_one_that_gives_up_before_it_is_ready_is_no_session():
    with make_pair() as pair:
        ffn = pair.accept()
        raw = pair.raw()
        raw.authenticate("attention")
        raw.channel.send(hello("attention"), TIMEOUT_S)
        expect(raw.channel, AFDHello, raw.deadline)
        attention = pair.connect()  # Waits for its turn.
        raw.close()
        pair.check_session(attention, ffn)


# Strangers.


JUNK = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 32,
    bytes(32),
    struct.pack("!I", 4) + b"\xc1" * 4,
    struct.pack("!I", 2) + b"\x91\x90",
    encode(step(0)),
    encode(hello("attention")),
    encode(AFDRefused(reason="x\x1b[2J")),
    b"",
    b"\x00",
    encode(AFDProof(mac=bytes(32)))[:-3],
]


@pytest.mark.parametrize("junk", JUNK, ids=lambda v: repr(v[:8]))
@repeat(30)
def test_junk_does_not_end_the_wait(junk):
    with make_pair() as pair:
        ffn = pair.accept()
        raw = pair.raw()
        raw.send_raw(junk)
        raw.close()
        pair.check_session(pair.connect(), ffn)


def test_junk_is_logged_with_its_source(caplog_vllm):
    with make_pair() as pair:
        pair.accept()
        raw = pair.raw()
        source = raw.sock.getsockname()[1]
        raw.send_raw(JUNK[0])
        assert raw.recv_until_closed() == b""
        wait_until(lambda: "Refused" in caplog_vllm.text, "FFN to log it")
        (record,) = [r for r in caplog_vllm.records if "Refused" in r.getMessage()]
        assert record.levelname == "WARNING"
        assert f"from 127.0.0.1:{source}" in record.getMessage()
        assert "it sent a frame of 1195725856 bytes" in record.getMessage()
        pair.listener.close()


def test_junk_does_not_fill_the_log(caplog_vllm):
    with make_pair() as pair:
        ffn = pair.accept()
        start = time.monotonic()
        for _ in range(200):
            raw = pair.raw()
            raw.send_raw(JUNK[0])
            assert raw.recv_until_closed() == b""
        warned = caplog_vllm.text.count("1195725856 bytes")
        assert 1 <= warned <= 2 + (time.monotonic() - start)
        # They do not hide a real refusal, which says how many were left out.
        with pytest.raises(AFDHandshakeError):
            pair.connect(dtype="float32").result(TIMEOUT_S)
        wait_until(lambda: "dtype: attention" in caplog_vllm.text, "FFN to log it")
        logged = [m for r in caplog_vllm.records if "Refused" in (m := r.getMessage())]
        silent = re.findall(r"\(and (\d+) more connections before it\)", str(logged))
        assert len(logged) + sum(map(int, silent)) == 201
        pair.check_session(pair.connect(), ffn)


@pytest.mark.parametrize("stage", ["connected", "challenged", "half a frame"])
def test_strangers_that_stay_do_not_keep_the_peer_out(stage):
    # Their time is up long after the test's.
    with make_pair(heartbeat_timeout_s=10 * TIMEOUT_S) as pair:
        ffn = pair.accept()
        for _ in range(60):
            raw = pair.raw()
            if stage == "half a frame":
                raw.send_raw(encode(AFDProof(mac=bytes(32)))[:10])
            elif stage == "challenged":
                raw.channel.send(
                    AFDChallenge(
                        protocol=1, role="attention", nonce=bytes(32), has_secret=False
                    ),
                    TIMEOUT_S,
                )
        pair.check_session(pair.connect(), ffn)
        assert names().count("afd-handshake") <= 2 * AFDListener._MAX_HANDSHAKES


def test_who_waits_for_its_turn_does_not_keep_others_out():
    # Real attention servers, as far as one can tell, before FFN accepts any.
    with make_pair() as pair:
        pair.listener.listen()
        for _ in range(40):
            raw = pair.raw()
            raw.authenticate("attention")
            raw.channel.send(hello("attention"), TIMEOUT_S)
            raw.close()
        attention = pair.connect()
        pair.check_session(attention, pair.accept())


def test_a_stranger_has_only_so_much_time():
    with make_pair(heartbeat_timeout_s=0.3) as pair:
        pair.accept()
        raw = pair.raw()
        assert raw.recv_until_closed() == b""
        raw = pair.raw()
        with contextlib.suppress(ConnectionError):
            for byte in encode(AFDProof(mac=bytes(32))) * 100:  # Dribbles.
                raw.send_raw(bytes([byte]))
                time.sleep(0.01)
        assert raw.recv_until_closed() == b""
        wait_until(lambda: "afd-handshake" not in names(), "the end of the handshakes")
        pair.listener.close()


def test_strangers_do_not_disturb_a_session():
    with make_pair() as pair:
        ffn = pair.accept()
        attention = pair.connect()
        pair.check_session(attention, ffn)
        for junk in JUNK * 5:
            pair.raw().send_raw(junk)
        attention.result().send_step(step(1))
        assert ffn.result().recv_step(TIMEOUT_S) == step(1)


# Listening.


def test_a_port_that_is_taken_is_named():
    with make_pair() as pair:
        # Though the first one does not yet answer.
        with pytest.raises(
            ValueError, match=f"afd_host='127.0.0.1', afd_port={pair.port}: .*in use"
        ):
            AFDListener(make_config("ffn", pair.port))
        pair.listener.listen()
        with pytest.raises(ValueError, match=f"afd_port={pair.port}"):
            AFDListener(make_config("ffn", pair.port))


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a..b"])
def test_a_host_to_listen_on_that_is_none(host):
    with pytest.raises(ValueError, match=f"afd_host='{re.escape(host)}'"):
        AFDListener(make_config("ffn", free_port(), afd_host=host))


@pytest.mark.parametrize(
    "host,with_secret,warned",
    [
        ("0.0.0.0", False, True),
        ("0.0.0.0", True, False),
        ("127.0.0.1", False, False),
        ("localhost", False, False),
    ],
)
def test_a_port_that_is_open_to_all_is_warned_of(
    host, with_secret, warned, monkeypatch, caplog_vllm
):
    if with_secret:
        monkeypatch.setenv("VLLM_AFD_SECRET", "s")
    with make_pair(afd_host=host) as pair:
        pair.listener.listen()
        pair.listener.listen()
        warnings = [
            r.getMessage() for r in caplog_vllm.records if r.levelname == "WARNING"
        ]
        assert len(warnings) == warned
        if warned:
            assert "afd_host='0.0.0.0'" in warnings[0]
            assert "VLLM_AFD_SECRET" in warnings[0]


def test_it_listens_on_afd_host_only():
    with make_pair(afd_host="127.0.0.2") as pair:
        pair.listener.listen()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", pair.port), timeout=TIMEOUT_S)
        socket.create_connection(("127.0.0.2", pair.port), timeout=TIMEOUT_S).close()


@pytest.mark.parametrize("first", ["attention", "ffn", "killed"])
@repeat(30)
def test_the_port_is_free_at_once(first):
    with make_pair() as pair:
        for _ in range(2):
            ffn, attention = pair.accept(), pair.connect()
            pair.check_session(attention, ffn)
            ends = [attention.result(), ffn.result()]
            if first == "killed":
                ends[0]._channel.shutdown()
            for end in ends if first == "attention" else reversed(ends):
                end.close()
            pair.listener.close()
            pair.listener = AFDListener(make_config("ffn", pair.port))
            pair._stack.callback(pair.listener.close)


@repeat(10)
def test_accept_can_be_stopped():
    with make_pair() as pair:
        stop_event = threading.Event()
        waiting = pair.accept(timeout_s=None, stop=stop_event)
        stop_event.set()
        assert waiting.result(TIMEOUT_S) is None
        assert pair.listener.accept(hello("ffn"), None, stop_event) is None


@repeat(30)
def test_close_ends_accept_and_handshakes():
    # Which would go on for longer than the test waits.
    with make_pair(heartbeat_timeout_s=10 * TIMEOUT_S) as pair:
        waiting = pair.accept(timeout_s=None)
        raw = pair.raw()
        wait_until(lambda: "afd-handshake" in names(), "the handshake")
        for end in [background(pair.listener.close) for _ in range(3)]:
            end.result(TIMEOUT_S)
        assert waiting.result(TIMEOUT_S) is None
        assert raw.recv_until_closed() == b""
        assert pair.listener.accept(hello("ffn"), 1) is None


def test_close_while_a_handshake_begins(monkeypatch):
    closing = []
    start = threading.Thread.start

    def close_and_start(thread):
        if thread.name == "afd-handshake":
            closing.append(background(pair.listener.close))
            time.sleep(1.5)  # Longer than close() waits for a thread.
        start(thread)

    with make_pair() as pair:
        monkeypatch.setattr(threading.Thread, "start", close_and_start)
        pair.listener.listen()
        raw = pair.raw()
        wait_until(lambda: closing, "the handshake")
        closing[0].result(TIMEOUT_S)
        assert raw.recv_until_closed() == b""


def test_closed_before_it_listens():
    with make_pair() as pair:
        pair.listener.close()
        assert pair.listener.accept(hello("ffn")) is None
        pair.listener.listen()
        assert "afd-listener" not in names()


@pytest.mark.parametrize("what", ["a flood", "close"])
@repeat(10)
def test_a_new_session_is_no_handshake_any_more(what, monkeypatch):
    with make_pair() as pair:
        listener = pair.listener
        agree = listener._agree
        slept = threading.Event()
        monkeypatch.setattr(listener, "_MAX_HANDSHAKES", 1)

        def agree_and_be_slow(channel, *args):
            session = agree(channel, *args)
            if session is not None:
                if what == "close":
                    listener.close()
                else:
                    pair.raw()
                    wait_until(
                        lambda: any(
                            c is not channel for c in list(listener._handshakes)
                        ),
                        "the next handshake",
                    )
                slept.set()
            return session

        monkeypatch.setattr(listener, "_agree", agree_and_be_slow)
        ffn, attention = pair.accept(), pair.connect()
        assert slept.wait(TIMEOUT_S)
        pair.check_session(attention, ffn)
        wait_until(lambda: "afd-handshake" not in names() or what != "close", "its end")
        attention.result().send_step(step(1))
        assert ffn.result().recv_step(TIMEOUT_S) == step(1)


def test_close_leaves_the_session():
    with make_pair() as pair:
        ffn, attention = pair.accept(), pair.connect()
        pair.check_session(attention, ffn)
        pair.listener.close()
        attention.result().send_step(step(1))
        assert ffn.result().recv_step(TIMEOUT_S) == step(1)


def test_a_failed_accept_does_not_end_listening(monkeypatch, caplog_vllm):
    with make_pair() as pair:
        real = pair.listener._sock

        class OutOfDescriptors:
            tries = 0

            def __getattr__(self, name):
                return getattr(real, name)

            def accept(self):
                self.tries += 1
                if self.tries <= 2:
                    raise OSError(24, "Too many open files")
                return real.accept()

        pair.listener._sock = OutOfDescriptors()
        pair.check_session(pair.connect(), pair.accept())
        assert "Cannot accept connections on 127.0.0.1" in caplog_vllm.text
        assert "Too many open files" in caplog_vllm.text


def test_waiting_costs_no_time():
    with make_pair() as pair:
        waiting = pair.accept(timeout_s=None, stop=threading.Event())
        pair.raw()
        time.sleep(0.1)
        start = time.process_time()
        time.sleep(1)
        assert time.process_time() - start < 0.2
        pair.listener.close()
        assert waiting.result(TIMEOUT_S) is None
