# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import errno
import hashlib
import os
import random
import signal
import socket
import struct
import threading
import time

import pytest
import regex as re

from vllm.distributed.afd_transfer import control as control_module
from vllm.distributed.afd_transfer.control import AFDControl
from vllm.distributed.afd_transfer.errors import (
    AFDError,
    AFDHandshakeError,
    AFDPeerError,
)
from vllm.distributed.afd_transfer.messages import (
    MAX_BLOB_SIZE,
    AFDAbort,
    AFDBlob,
    AFDBye,
    AFDChallenge,
    AFDHeartbeat,
    AFDHello,
    AFDRefused,
    AFDStep,
    encode,
)

from .control_utils import (
    RawPeer,
    free_port,
    make_config,
    make_control,
    other_role,
    session,
    session_with_process,
    session_with_raw_peer,
    stop,
)
from .message_utils import (
    TIMEOUT_S,
    afd_threads,
    background,
    hello,
    repeat,
    socket_pair,
    step,
    wait_until,
)

pytestmark = [
    pytest.mark.skip_global_cleanup,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("no_leaks"),
]

both_roles = pytest.mark.parametrize("role", ["attention", "ffn"])


def failure_of(control: AFDControl) -> AFDPeerError:
    """Wait for a session to fail because of its peer."""
    failures = []
    failed = threading.Event()

    def on_failure(error: AFDError) -> None:
        failures.append(error)
        failed.set()

    control.start(on_failure)
    assert failed.wait(TIMEOUT_S)
    (error,) = failures
    assert isinstance(error, AFDPeerError)
    assert error is control.error
    assert not control.is_alive
    # Every error names the peer, and where in the session it was.
    assert re.match(
        r"AFD (attention|ffn) peer \(rank 0\) at 127.0.0.1:\d+ ", str(error)
    )
    assert re.search(r"\((before the first step|after step \d+)\)\.$", str(error))
    with pytest.raises(AFDPeerError) as raised:
        control.check()
    assert raised.value is error
    return error


# Steps.


@pytest.mark.parametrize("first", [0, 1, 1000])
def test_steps_arrive_in_order(first):
    with session() as (attention, ffn):
        steps = [
            AFDStep(seq=first, kind="profile", stage_tokens=[128]),
            AFDStep(seq=first + 1, kind="eager", stage_tokens=[0, 128]),
            AFDStep(seq=first + 2, kind="warmup", stage_tokens=[5, 9]),
        ]
        for s in steps:
            attention.send_step(s)
        assert [ffn.recv_step(TIMEOUT_S) for _ in steps] == steps
        with pytest.raises(TimeoutError, match="no step from AFD attention peer"):
            ffn.recv_step(0.01)
        assert ffn.error is None and attention.error is None


@pytest.mark.parametrize("timeout_s", [0, 0.05])
def test_recv_step_is_bounded_and_can_go_on(timeout_s):
    with session() as (attention, ffn):
        for seq in range(3):
            start = time.monotonic()
            with pytest.raises(TimeoutError):
                ffn.recv_step(timeout_s)
            assert time.monotonic() - start < 10
            waiting = background(ffn.recv_step)
            attention.send_step(step(seq))
            assert waiting.result(TIMEOUT_S) == step(seq)


@pytest.mark.parametrize(
    "bad,problem",
    [
        (step(5), "seq must be 6"),
        (step(4), "seq must be 6"),
        (step(7), "seq must be 6"),
        (step(6, 1, 2, 3), "1 to 2 stages"),
        (AFDStep(seq=6, kind="eager", stage_tokens=[]), "1 to 2 stages"),
        (step(6, 1, 129), "max_num_batched_tokens=128"),
    ],
)
def test_a_bad_step_is_not_sent(bad, problem):
    with session() as (attention, ffn):
        attention.send_step(step(5))
        with pytest.raises(ValueError, match=problem):
            attention.send_step(bad)
        attention.send_step(step(6))
        assert ffn.recv_step(TIMEOUT_S) == step(5)
        assert ffn.recv_step(TIMEOUT_S) == step(6)


def test_two_stages_are_for_a_peer_that_announced_them():
    with (
        session(num_ubatches=1) as (attention, _),
        pytest.raises(ValueError, match="1 to 1 stages"),
    ):
        attention.send_step(step(0, 1, 2))
    with session_with_raw_peer("ffn", num_ubatches=1) as (ffn, raw):
        raw.send_raw(encode(step(0, 1, 2)))
        assert "1 to 1 stages were agreed on" in str(failure_of(ffn))


@pytest.mark.parametrize(
    "second,problem",
    [
        (step(5), "seq must be 6"),  # replayed
        (step(0), "seq must be 6"),
        (step(7), "seq must be 6"),
        (step(6, 200), "at most max_num_batched_tokens=128"),
    ],
)
@repeat(30)
def test_a_step_out_of_order_ends_the_session(second, problem):
    with session_with_raw_peer("ffn") as (ffn, raw):
        raw.send_raw(encode(step(5)) + encode(second))
        error = failure_of(ffn)
        assert "sent an invalid step" in str(error) and problem in str(error)
        with pytest.raises(AFDPeerError):
            ffn.recv_step(0)


def test_ffn_may_not_send_steps():
    with session_with_raw_peer("attention") as (attention, raw):
        raw.send_raw(encode(step(0)))
        assert "sent a step, which only attention may" in str(failure_of(attention))


def test_steps_that_are_not_taken_do_not_pile_up():
    with session_with_raw_peer("ffn") as (ffn, raw):
        raw.send_raw(b"".join(encode(step(i)) for i in range(200)))
        assert "sent more than 64 messages ahead" in str(failure_of(ffn))


# A peer that misbehaves.


@both_roles
@pytest.mark.parametrize(
    "junk,cause",
    [
        (b"GET / HTTP/1.1\r\n\r\n", "sent a frame of 1195725856 bytes"),
        (b"\xff" * 8, "sent a frame of 4294967295 bytes"),
        (bytes(8), "sent a frame of 0 bytes"),
        (struct.pack("!I", 5) + b"\xc1" * 5, "sent no valid"),
        (struct.pack("!I", 2) + b"\x91\x90", "sent no valid"),
        (encode(hello("attention")), "sent a frame of|sent no valid"),
        (encode(AFDRefused(reason="x")), "sent no valid"),
    ],
    ids=lambda v: repr(v[:8]),
)
@repeat(30)
def test_junk_in_a_session(role, junk, cause):
    with session_with_raw_peer(role) as (control, raw):
        raw.send_raw(junk)
        assert re.search(cause, str(failure_of(control)))
        # The peer is told.
        abort = raw.channel.recv(AFDAbort, timeout_s=TIMEOUT_S)
        assert f"this {role} server gave the peer up: it sent" in abort.reason
        with pytest.raises(EOFError):
            raw.channel.recv(AFDAbort, timeout_s=TIMEOUT_S)


@both_roles
def test_random_bytes_in_a_session(role):
    rng = random.Random(3)
    for _ in range(100):
        with session_with_raw_peer(role) as (control, raw):
            raw.send_raw(rng.randbytes(rng.randrange(1, 200)))
            raw.sock.shutdown(socket.SHUT_WR)
            failure_of(control)


@both_roles
@repeat(30)
def test_closed_in_the_middle_of_a_message(role):
    with session_with_raw_peer(role) as (control, raw):
        raw.send_raw(encode(AFDBlob(data=b"abc"))[:-1])
        raw.close()
        assert "closed in the middle of a message" in str(failure_of(control))


@both_roles
@repeat(30)
def test_closed_without_a_word(role):
    with session_with_raw_peer(role) as (control, raw):
        raw.close()
        assert "died: it closed the connection" in str(failure_of(control))


@both_roles
@repeat(30)
def test_reset(role):
    with session_with_raw_peer(role) as (control, raw):
        raw.sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        raw.close()
        assert "was lost: [Errno" in str(failure_of(control)) or (
            "closed the connection" in str(control.error)
        )


@both_roles
def test_a_silent_peer_has_hung(role):
    with session_with_raw_peer(role, heartbeat_timeout_s=0.3) as (control, raw):
        start = time.monotonic()
        error = failure_of(control)
        assert 0.2 < time.monotonic() - start < 10
        assert "hung: no sign of life for heartbeat_timeout_s=0.3" in str(error)
        # It reads this when it goes on.
        assert "gave the peer up: it hung" in read_abort(raw).reason


def read_abort(raw: RawPeer) -> AFDAbort:
    while not isinstance(
        message := raw.channel.recv(AFDHeartbeat, AFDAbort, timeout_s=TIMEOUT_S),
        AFDAbort,
    ):
        pass
    return message


@both_roles
def test_a_heartbeat_on_its_way_does_not_keep_the_reason_back(role):
    with session_with_raw_peer(role, heartbeat_timeout_s=0.3) as (control, raw):
        with control._channel._send_lock:
            wait_until(lambda: control.error is not None, "the failure")
            # Now the reason is to be sent.
            time.sleep(0.1)
        assert "gave the peer up: it hung" in read_abort(raw).reason
        failure_of(control)


def test_dribbling_is_no_sign_of_life():
    with session_with_raw_peer("ffn", heartbeat_timeout_s=0.3) as (ffn, raw):
        frame = encode(AFDBlob(data=bytes(1000)))
        sent = 0
        while ffn.error is None and sent < len(frame):
            raw.send_raw(frame[sent : sent + 1])
            sent += 1
            time.sleep(0.01)
        assert "hung: no sign of life" in str(failure_of(ffn))
        assert sent < len(frame)


def test_heartbeats_keep_a_session_alive():
    with session(heartbeat_timeout_s=1.5) as (attention, ffn):
        with pytest.raises(TimeoutError):
            ffn.recv_step(4.0)
        attention.send_step(step(0))
        assert ffn.recv_step(TIMEOUT_S) == step(0)


def test_a_busy_main_thread_that_holds_no_gil_starves_no_heartbeat():
    with session(heartbeat_timeout_s=2.0) as (attention, ffn):
        start = time.monotonic()
        while time.monotonic() - start < 5:
            # About a second each in C, without the GIL.
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 1_000_000)
        attention.check()
        ffn.check()


@both_roles
def test_a_peer_that_does_not_read_has_hung(role):
    with session_with_raw_peer(role, heartbeat_timeout_s=0.5) as (control, raw):
        control._channel._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        over = threading.Event()

        def send_heartbeats() -> None:
            while not over.wait(0.1):
                raw.send_raw(encode(AFDHeartbeat()))

        beating = background(send_heartbeats)
        try:
            with pytest.raises(AFDPeerError, match="hung: it has read nothing for"):
                while True:
                    control._send(AFDBlob(data=bytes(MAX_BLOB_SIZE)))
        finally:
            over.set()
        beating.result(TIMEOUT_S)
        failure_of(control)


# A peer whose process ends or stops.


@both_roles
@repeat(30)
def test_killed_process_is_noticed_at_once(role):
    with session_with_process(role, heartbeat_timeout_s=20) as (control, child, _):
        start = time.monotonic()
        child.kill()
        error = failure_of(control)
        assert time.monotonic() - start < 10
        assert "died" in str(error) or "was lost" in str(error)


@both_roles
@repeat(5)
def test_stopped_process_is_noticed_in_time(role):
    with session_with_process(role, heartbeat_timeout_s=2) as (control, child, pipe):
        stop(child)
        start = time.monotonic()
        error = failure_of(control)
        assert time.monotonic() - start < 10
        assert f"AFD {other_role(role)} peer (rank 0)" in str(error)
        assert "hung: no sign of life for heartbeat_timeout_s=2 " in str(error)
        # When it goes on, it learns why the session is over.
        assert child.pid is not None
        os.kill(child.pid, signal.SIGCONT)
        pipe.send("what happened?")
        assert pipe.poll(TIMEOUT_S)
        assert f"aborted: this {role} server gave the peer up: it hung" in pipe.recv()


# Abort.


@both_roles
@repeat(30)
def test_the_reason_of_an_abort_travels(role):
    with session() as (attention, ffn):
        here, there = (attention, ffn) if role == "attention" else (ffn, attention)
        called: list[AFDError] = []
        here.start(called.append)
        here.fail("ValueError: no such expert ü")
        error = failure_of(there)
        assert "aborted: ValueError: no such expert ü" in str(error)
        # This side has the reason as well, and is not told of its own failure.
        with pytest.raises(
            AFDError, match="was aborted: ValueError: no such"
        ) as raised:
            here.check()
        assert there.peer not in str(raised.value) and here.peer in str(raised.value)
        here.close()
        assert called == []


@both_roles
@repeat(30)
def test_who_waits_is_woken_by_an_abort(role):
    with session() as (attention, ffn):
        waits = [background(ffn.recv_step), background(ffn.exchange_blob, b"x")]
        (attention if role == "attention" else ffn).fail("reason")
        for wait in waits:
            with pytest.raises(AFDError, match="abort.*: reason"):
                wait.result(TIMEOUT_S)
        wait_until(lambda: attention.error, "the abort to arrive")
        for call in (
            lambda: attention.send_step(step(0)),
            lambda: attention.exchange_blob(b""),
            lambda: ffn.recv_step(),
        ):
            with pytest.raises(AFDError, match="abort.*: reason"):
                call()


def test_a_failure_overtakes_the_steps_before_it():
    with session() as (attention, ffn):
        attention.send_step(step(0))
        attention.fail("reason")
        failure_of(ffn)
        with pytest.raises(AFDPeerError, match="reason"):
            ffn.recv_step(0)


def test_long_and_ugly_reasons_are_cut_and_cleaned():
    with session() as (attention, ffn):
        attention.fail("\x1b[31m\nfaked line" + "x" * 10000)
        error = str(failure_of(ffn))
        assert error.isprintable() and len(error) < 2500


@pytest.mark.parametrize("unread", [False, True])
@repeat(30)
def test_the_reason_is_preferred_over_the_end_of_the_connection(unread):
    # The peer aborts and closes while this side sends, which fails at any moment.
    with session_with_raw_peer("attention") as (attention, raw):

        def send_all() -> None:
            for seq in range(10**6):
                attention.send_step(step(seq))

        sending = background(send_all)
        if unread:  # Closing now resets the connection.
            wait_until(lambda: attention._last_seq, "a step")
        raw.send_raw(encode(AFDAbort(reason="the reason")))
        raw.close()
        with pytest.raises(AFDPeerError, match="aborted: the reason"):
            sending.result(TIMEOUT_S)


@repeat(30)
def test_the_first_error_is_kept():
    with session() as (attention, ffn):
        ends = [background(attention.fail, f"reason {i}") for i in range(8)]
        ends.append(background(ffn.fail, "other"))
        for end in ends:
            end.result(TIMEOUT_S)
        first = attention.error
        attention.fail("late")
        assert attention.error is first


def test_fail_is_bounded_though_the_peer_does_not_read():
    with session_with_raw_peer("attention") as (attention, _):
        attention._channel._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

        def send_all() -> None:
            while True:
                attention._send(AFDBlob(data=bytes(MAX_BLOB_SIZE)))

        sending = background(send_all)
        time.sleep(0.1)  # Either before or while it blocks.
        start = time.monotonic()
        attention.fail("reason")
        with pytest.raises(AFDError, match="reason"):
            sending.result(TIMEOUT_S)
        attention.close()
        assert time.monotonic() - start < 9


@both_roles
@repeat(3)
def test_who_is_blocked_in_sending_is_woken_by_an_abort(role):
    with session_with_raw_peer(role, heartbeat_timeout_s=60) as (control, raw):
        control._channel._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

        def send_all() -> None:
            while True:
                control._send(AFDBlob(data=bytes(MAX_BLOB_SIZE)))

        sending = background(send_all)
        time.sleep(0.5)  # By now it blocks. If not, the outcome is the same.
        raw.send_raw(encode(AFDAbort(reason="the reason")))  # It does not close.
        with pytest.raises(AFDPeerError, match="aborted: the reason"):
            sending.result(TIMEOUT_S)
        raw.close()


# Callbacks.


@repeat(30)
def test_start_may_come_late():
    with session() as (attention, ffn):
        attention.fail("reason")
        wait_until(lambda: ffn.error, "the abort")
        failure_of(ffn)


@repeat(30)
def test_the_callback_comes_once_however_the_race_ends():
    with session() as (attention, ffn):
        called: list[AFDError] = []
        failing = background(attention.fail, "reason")
        ffn.start(called.append)
        failing.result(TIMEOUT_S)
        wait_until(lambda: called, "the callback")
        ffn._reader.join(TIMEOUT_S)
        assert called == [ffn.error]


def test_the_callback_comes_once_if_start_is_called_while_the_session_fails(
    monkeypatch,
):
    with session() as (attention, ffn):
        called: list[AFDError] = []
        # The failure is known, and has not been reported yet.
        monkeypatch.setattr(
            control_module.logger, "error", lambda *_: ffn.start(called.append)
        )
        attention.fail("reason")
        ffn._reader.join(TIMEOUT_S)
        assert called == [ffn.error]


def test_a_callback_that_raises_is_logged(caplog_vllm):
    def on_failure(error: AFDError) -> None:
        raise KeyError("a fault in the callback")

    with session() as (attention, ffn):
        ffn.start(on_failure)
        attention.fail("reason")
        ffn._reader.join(TIMEOUT_S)
        with pytest.raises(AFDPeerError, match="reason"):
            ffn.recv_step()
    assert "a fault in the callback" in caplog_vllm.text
    assert "aborted: reason" in caplog_vllm.text


@repeat(30)
def test_a_callback_may_use_and_close_the_session():
    with session() as (attention, ffn):
        done = threading.Event()

        def on_failure(error: AFDError) -> None:
            with pytest.raises(AFDPeerError):
                ffn.exchange_blob(b"x")
            ffn.fail("again")
            ffn.close()
            done.set()

        ffn.start(on_failure)
        attention.fail("reason")
        assert done.wait(TIMEOUT_S)


# Blobs.


@repeat(30)
def test_blobs_are_swapped():
    with session() as (attention, ffn):
        for data in (b"", b"1", bytes(MAX_BLOB_SIZE)):
            from_attention = background(ffn.exchange_blob, b"ffn" + data[:-3])
            assert attention.exchange_blob(data) == b"ffn" + data[:-3]
            assert from_attention.result(TIMEOUT_S) == data


def test_a_blob_has_a_limit():
    with (
        session() as (attention, _),
        pytest.raises(ValueError, match="65537 bytes; at most 65536"),
    ):
        attention.exchange_blob(bytes(MAX_BLOB_SIZE + 1))


def test_waiting_for_a_blob_is_bounded():
    with (
        session(connect_timeout_s=0.2) as (attention, _),
        pytest.raises(AFDPeerError, match=r"AFD ffn peer .* connect_timeout_s=0.2"),
    ):
        attention.exchange_blob(b"x")


@pytest.mark.parametrize("how", ["fail", "close"])
@both_roles
@repeat(30)
def test_a_peer_that_leaves_while_blobs_are_swapped(role, how):
    with session() as (attention, ffn):
        here, there = (attention, ffn) if role == "attention" else (ffn, attention)
        swap = background(here.exchange_blob, b"x")
        there.fail("reason") if how == "fail" else there.close()
        with pytest.raises(AFDError, match="reason|left|has shut down|is over"):
            swap.result(TIMEOUT_S)


# The end.


@repeat(30)
def test_bye_ends_recv_step_after_the_last_step():
    with session() as (attention, ffn):
        byes = []
        ffn.start(pytest.fail, lambda: byes.append(1))
        attention.send_step(step(0))
        attention.close()
        assert ffn.recv_step(TIMEOUT_S) == step(0)
        assert ffn.recv_step(TIMEOUT_S) is None
        assert ffn.recv_step(TIMEOUT_S) is None
        ffn._reader.join(TIMEOUT_S)
        assert byes == [1]
        assert ffn.error is None and attention.error is None
        assert not ffn.is_alive and not attention.is_alive
        with pytest.raises(AFDError, match="is over"):
            attention.send_step(step(1))


@pytest.mark.parametrize("reason", [None, "the engine\x1b\ndied" + "x" * 10000])
@repeat(30)
def test_a_goodbye_may_have_a_reason(reason, caplog_vllm):
    seen = None if reason is None else "the engine? died"
    caplog_vllm.clear()
    with session() as (attention, ffn):
        attention.close(reason)
        assert ffn.recv_step(TIMEOUT_S) is None
        assert ffn.error is None
        ffn._reader.join(TIMEOUT_S)
        assert (ffn.bye_reason or "")[:16] == (seen or "")
        (record,) = [r for r in caplog_vllm.records if "has ended" in r.getMessage()]
        assert record.levelname == ("WARNING" if reason else "INFO")
        assert (seen or "session.") in record.getMessage()
        assert record.getMessage().isprintable() and len(record.getMessage()) < 2500
    with session() as (attention, ffn):
        ffn.close(reason)
        error = str(failure_of(attention))
        assert (f"has shut down: {seen}" if reason else "has shut down (") in error
        assert error.isprintable() and len(error) < 2500


def test_the_reason_of_a_goodbye_while_blobs_are_swapped():
    with session() as (attention, ffn):
        swap = background(ffn.exchange_blob, b"")
        wait_until(lambda: attention._blobs, "the blob")
        attention.close("out of memory")
        with pytest.raises(AFDPeerError, match="plane connected: out of memory"):
            swap.result(TIMEOUT_S)


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_steps_are_as_large_as_attention_makes_them(role):
    with session_with_raw_peer(role, max_tokens={"ffn": 16384}) as (control, raw):
        if role == "attention":
            with pytest.raises(ValueError, match="max_num_batched_tokens=128"):
                control.send_step(step(0, 129))
        else:
            raw.send_raw(encode(step(0, 129)))
            assert "max_num_batched_tokens=128 rows" in str(failure_of(control))


def test_start_after_bye():
    with session() as (attention, ffn):
        attention.close()
        assert ffn.recv_step(TIMEOUT_S) is None
        byes = []
        ffn.start(pytest.fail, lambda: byes.append(1))
        assert byes == [1]


@repeat(30)
def test_attention_cannot_go_on_without_ffn():
    with session() as (attention, ffn):
        ffn.close()
        assert "has shut down" in str(failure_of(attention))


@repeat(30)
def test_both_may_leave_at_once():
    with session() as (attention, ffn):
        ends = [background(attention.close), background(ffn.close)]
        for end in ends:
            end.result(TIMEOUT_S)
        assert ffn.error is None
        assert ffn.recv_step() is None


@both_roles
@repeat(30)
def test_close_is_idempotent_from_any_thread(role):
    with session() as (attention, ffn):
        control = attention if role == "attention" else ffn
        for end in [background(control.close) for _ in range(4)]:
            end.result(TIMEOUT_S)
        control.close()
        control.fail("too late")
        assert control.error is None


@repeat(30)
def test_a_local_close_ends_recv_step():
    with session() as (_, ffn):
        waiting = background(ffn.recv_step)
        ffn.close()
        assert waiting.result(TIMEOUT_S) is None


@both_roles
def test_close_is_bounded_though_the_peer_does_not_react(role):
    with session_with_raw_peer(role) as (control, _):
        start = time.monotonic()
        control.close()
        assert time.monotonic() - start < 5
        assert not afd_threads()


def test_a_peer_that_went_on_sending_does_not_delay_close():
    with session_with_raw_peer("ffn") as (ffn, raw):
        over = threading.Event()

        def send_heartbeats() -> None:
            while not over.is_set():
                raw.send_raw(encode(AFDHeartbeat()))

        beating = background(send_heartbeats)
        start = time.monotonic()
        ffn.close()
        assert time.monotonic() - start < 5
        over.set()
        raw.channel.shutdown()
        assert isinstance(beating.exception(TIMEOUT_S), OSError | None)


def test_idle_sessions_cost_no_time():
    with session() as (attention, ffn):
        waiting = background(ffn.recv_step)
        time.sleep(0.1)
        start = time.process_time()
        time.sleep(1)
        # A busy wait would take a second, in either of them.
        assert time.process_time() - start < 0.2
        attention.close()
        assert waiting.result(TIMEOUT_S) is None


def test_ipv6():
    try:
        pair = socket_pair("::1")
        a, b = pair.__enter__()
    except OSError:
        pytest.skip("no IPv6")
    try:
        attention, ffn = make_control(a, "attention"), make_control(b, "ffn")
        assert attention.local_address == ffn.local_address == "::1"
        assert re.match(r"AFD ffn peer \(rank 0\) at \[::1\]:\d+$", attention.peer)
        attention.close()
        ffn.close()
    finally:
        pair.__exit__(None, None, None)


# Connecting, to a server that is played here.


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        yield server


def connect(port: int, **kwargs) -> AFDControl:
    return AFDControl.connect(
        make_config("attention", port, **kwargs), hello("attention")
    )


def serve(server: socket.socket) -> tuple[RawPeer, AFDHello]:
    raw = RawPeer(server.accept()[0])
    return raw, raw.handshake(hello("ffn"))


def test_a_connection_that_ends_at_once_is_closed(monkeypatch):
    class Ended(socket.socket):
        def getpeername(self):
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    made = []

    def create_connection(*args, **kwargs):
        made.append(Ended())
        return made[-1]

    monkeypatch.setattr(control_module.socket, "create_connection", create_connection)
    with pytest.raises(AFDHandshakeError, match="endpoint is not connected"):
        connect(1, connect_timeout_s=0.1)
    assert made and all(sock.fileno() == -1 for sock in made)


@repeat(30)
def test_connect(server):
    control = background(connect, server.getsockname()[1])
    raw, attention_hello = serve(server)
    attention = control.result(TIMEOUT_S)
    assert attention_hello == hello("attention")
    assert attention.peer_hello == hello("ffn")
    assert (
        attention.peer
        == f"AFD ffn peer (rank 0) at 127.0.0.1:{server.getsockname()[1]}"
    )
    assert attention.local_address == "127.0.0.1"
    raw.close()
    attention.close()


def test_nobody_listens_and_then_somebody_does():
    port = free_port()
    for _ in range(3):
        start = time.monotonic()
        with pytest.raises(
            AFDHandshakeError,
            match=rf"No AFD ffn server at 127.0.0.1:{port} \(afd_host, afd_port\) "
            r"within connect_timeout_s=0.3: .*[Rr]efused",
        ):
            connect(port, connect_timeout_s=0.3)
        assert 0.25 < time.monotonic() - start < 10
    # The next attempt works, on the same port.
    control = background(connect, port)
    time.sleep(0.1)
    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(TIMEOUT_S)
        raw, _ = serve(server)
        attention = control.result(TIMEOUT_S)
        raw.close()
        attention.close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
def test_a_host_that_does_not_exist(host):
    with pytest.raises(AFDHandshakeError, match=re.escape(host)):
        connect(1, afd_host=host, connect_timeout_s=0.2)


def test_a_server_that_does_not_answer(server):
    with pytest.raises(AFDHandshakeError, match="it does not answer"):
        connect(server.getsockname()[1], connect_timeout_s=0.5, heartbeat_timeout_s=0.2)


def test_a_server_that_answers_too_late_is_tried_again(server):
    control = background(connect, server.getsockname()[1], heartbeat_timeout_s=1)
    with RawPeer(server.accept()[0]):
        raw, _ = serve(server)
    attention = control.result(TIMEOUT_S)
    raw.close()
    attention.close()


@pytest.mark.parametrize("sent", [b"", encode(AFDRefused(reason="x"))[:-1]])
@repeat(30)
def test_a_server_that_closes_in_the_handshake_is_tried_again(server, sent):
    control = background(connect, server.getsockname()[1])
    for _ in range(2):
        with RawPeer(server.accept()[0]) as raw:
            raw.send_raw(sent)
    raw, _ = serve(server)
    attention = control.result(TIMEOUT_S)
    raw.close()
    attention.close()


@pytest.mark.parametrize(
    "junk",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\xff" * 100,
        struct.pack("!I", 3) + b"\xc1" * 3,
        encode(AFDBye()),
    ],
    ids=lambda v: repr(v[:8]),
)
@repeat(30)
def test_something_else_listens(server, junk):
    port = server.getsockname()[1]
    control = background(connect, port)
    with RawPeer(server.accept()[0]) as raw:
        raw.send_raw(junk)
        with pytest.raises(
            AFDHandshakeError, match=f"127.0.0.1:{port} .*does not speak the AFD proto"
        ):
            control.result(TIMEOUT_S)


@repeat(30)
def test_junk_instead_of_the_hello(server):
    control = background(connect, server.getsockname()[1])
    with RawPeer(server.accept()[0]) as raw:
        raw.authenticate("ffn")
        raw.send_raw(b"\xff" * 8)
        with pytest.raises(AFDHandshakeError, match="does not speak the AFD protocol"):
            control.result(TIMEOUT_S)


@repeat(30)
def test_a_refusal_is_final(server):
    control = background(connect, server.getsockname()[1])
    with RawPeer(server.accept()[0]) as raw:
        raw.authenticate("ffn")
        raw.channel.recv(AFDHello, timeout_s=TIMEOUT_S)
        raw.channel.send(AFDRefused(reason="already serving somebody"), TIMEOUT_S)
        with pytest.raises(
            AFDHandshakeError, match="AFD ffn server at .*: it refused: already serving"
        ):
            control.result(TIMEOUT_S)


def test_a_server_that_does_not_fit(server):
    control = background(connect, server.getsockname()[1])
    with RawPeer(server.accept()[0]) as raw:
        raw.authenticate("ffn")
        raw.channel.recv(AFDHello, timeout_s=TIMEOUT_S)
        raw.channel.send(hello("ffn", dtype="float32", hidden_size=65), TIMEOUT_S)
        with pytest.raises(AFDHandshakeError) as error:
            control.result(TIMEOUT_S)
    text = str(error.value)
    assert "dtype: attention has 'bfloat16', ffn has 'float32'" in text
    assert "hidden_size: attention has 64, ffn has 65" in text


def test_a_connection_to_itself_is_none(monkeypatch):
    # TCP allows it, if the kernel chooses the port that is connected to as ours.
    port = free_port()

    def create_connection(address, timeout):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        sock.connect(address)
        return sock

    monkeypatch.setattr(control_module.socket, "create_connection", create_connection)
    with pytest.raises(AFDHandshakeError, match="nothing listens there"):
        connect(port, connect_timeout_s=0.1)


def test_an_interrupt_leaves_nothing(server, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(control_module, "authenticate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        connect(server.getsockname()[1])


def test_waiting_is_logged(server, caplog_vllm, monkeypatch):
    monkeypatch.setattr(control_module, "_FIRST_LOG_S", 0.0)
    with pytest.raises(AFDHandshakeError):
        connect(free_port(), connect_timeout_s=0.2)
    assert "Waiting for the AFD ffn server at 127.0.0.1" in caplog_vllm.text


def test_waiting_to_connect_costs_no_time():
    start = time.process_time()
    with pytest.raises(AFDHandshakeError):
        connect(free_port(), connect_timeout_s=1)
    assert time.process_time() - start < 0.3


def test_the_challenge_comes_first_and_is_small(server):
    control = background(connect, server.getsockname()[1])
    with RawPeer(server.accept()[0]) as raw:
        challenge = raw.channel.recv(AFDChallenge, timeout_s=TIMEOUT_S)
        assert challenge.role == "attention" and not challenge.has_secret
        raw.channel.send(AFDRefused(reason="done"), TIMEOUT_S)
        with pytest.raises(AFDHandshakeError, match="refused: done"):
            control.result(TIMEOUT_S)
