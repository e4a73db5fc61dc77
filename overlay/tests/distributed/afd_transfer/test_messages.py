# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import random
import select
import signal
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest

from vllm.distributed.afd_transfer import messages
from vllm.distributed.afd_transfer.messages import (
    AFDAbort,
    AFDBlob,
    AFDBye,
    AFDChallenge,
    AFDChannel,
    AFDHeartbeat,
    AFDHello,
    AFDProof,
    AFDProtocolError,
    AFDReady,
    AFDRefused,
    AFDStep,
    clean_text,
    decode,
    describe_differences,
    encode,
)

from .message_utils import (
    TIMEOUT_S,
    background,
    channel_pair,
    hello,
    repeat,
    socket_pair,
    step,
)

pytestmark = [
    pytest.mark.skip_global_cleanup,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("no_leaks"),
]

EXAMPLES = [
    AFDChallenge(protocol=1, role="ffn", nonce=bytes(range(32)), has_secret=True),
    AFDProof(mac=bytes(32)),
    AFDRefused(reason="no"),
    AFDReady(),
    hello("attention"),
    hello("ffn", layers=[]),
    AFDStep(seq=0, kind="eager", stage_tokens=[0]),
    AFDStep(seq=2**53 - 1, kind="profile", stage_tokens=[3, 5]),
    AFDBlob(data=b""),
    AFDBlob(data=bytes(range(256)) * 256),
    AFDHeartbeat(),
    AFDAbort(reason="ümlaut " * 250),
    AFDBye(),
    AFDBye(reason="ümlaut " * 250),
]
ALL_TYPES = tuple(dict.fromkeys(type(m) for m in EXAMPLES))


@pytest.fixture
def channels():
    with channel_pair() as (left, right):
        yield left, right


def raw_send(channel: AFDChannel, data: bytes) -> None:
    assert channel._sock.send(data) == len(data)


def test_every_message_type_has_an_example_and_a_size():
    assert set(ALL_TYPES) == set(messages._MAX_SIZE)
    assert set(ALL_TYPES) == set(messages.AFDMessage.__subclasses__())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_round_trip(message, channels):
    left, right = channels
    frame = encode(message)
    assert struct.unpack("!I", frame[:4]) == (len(frame) - 4,)
    assert decode(frame[4:], *ALL_TYPES) == message
    sent = background(left.send, message, TIMEOUT_S)
    assert right.recv(type(message), timeout_s=TIMEOUT_S) == message
    sent.result(TIMEOUT_S)


def test_all_layers_that_are_allowed_fit_into_a_hello():
    layer = {"name": "model.layers.100.block_sparse_moe.experts", "gate_on_ffn": False}
    layer |= {"logits_size": 256, "logits_dtype": "bfloat16"}
    layers = [messages.AFDLayerInfo(**layer)] * messages.MAX_LAYERS
    facts = {f"config.{i:0249d}": "x" * 80 for i in range(messages.MAX_FACTS)}
    message = hello("ffn", layers=layers, model=facts)
    assert decode(encode(message)[4:], AFDHello) == message


def test_what_the_peer_would_refuse_is_not_sent():
    with pytest.raises(ValueError, match="AFDBlob takes .* more than the 65792"):
        encode(AFDBlob(data=bytes(messages.MAX_BLOB_SIZE + 1000)))
    with pytest.raises(ValueError, match="AFDHello takes"):
        encode(hello("ffn", model={"a": "x" * 2**20}))


def test_a_type_keeps_its_size_where_a_larger_one_may_come():
    def message(repeats: int) -> bytes:
        # A map with the same key over and over is msgpack as well.
        head = b"\xde" + struct.pack("!H", 3 + repeats)
        fields = b"\xa4type\xa7AFDStep\xa4kind\xa5eager\xacstage_tokens\x91\x02"
        return head + fields + b"\xa3seq\x01" * repeats

    assert decode(message(1), AFDStep, AFDBlob) == step(1, 2)
    with pytest.raises(AFDProtocolError, match="frame of 5.* 1 to 2048 bytes"):
        decode(message(1000), AFDStep, AFDBlob)


@pytest.mark.parametrize("size", [0, 8257, 2**20, 2**31 - 1, 2**31, 2**32 - 1])
def test_length_is_checked_before_memory_is_taken(size, channels):
    left, right = channels
    raw_send(left, struct.pack("!I", size) + b"x" * 100)
    tracemalloc.start()
    try:
        with pytest.raises(AFDProtocolError, match=f"frame of {size} bytes.*1 to 8256"):
            right.recv(AFDBye, AFDHeartbeat, timeout_s=TIMEOUT_S)
        # With what pytest and the error take.
        assert tracemalloc.get_traced_memory()[1] < 2**19
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "claim",
    [
        b"\xdd\xff\xff\xff\xff",  # array of 4 Gi
        b"\xdf\xff\xff\xff\xff",  # map of 4 Gi
        b"\xdb\xff\xff\xff\xff",  # str of 4 GiB
        b"\xc6\xff\xff\xff\xff",  # bin of 4 GiB
        b"\xdd\x00\xff\xff\xff",
    ],
)
@pytest.mark.parametrize(
    "prefix",
    [
        b"",
        b"\x82\xa4type\xa8AFDHello\xa6layers",
        b"\x82\xa4type\xa7AFDStep\xacstage_tokens",
        b"\x82\xa4type\xa7AFDBlob\xa4data",
        b"\x82\xa4type\xa8AFDAbort\xa6reason",
        b"\x82\xa4type",
    ],
)
def test_claimed_lengths_take_no_memory(prefix, claim):
    tracemalloc.start()
    try:
        with pytest.raises(AFDProtocolError):
            decode(prefix + claim, *ALL_TYPES)
        assert tracemalloc.get_traced_memory()[1] < 2**17
    finally:
        tracemalloc.stop()


def _step(**kwargs):
    fields = {"type": "AFDStep", "seq": 1, "kind": "eager", "stage_tokens": [1]}
    return {k: v for k, v in (fields | kwargs).items() if v is not ...}


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "AFDBye",
        [],
        ["AFDBye"],
        {},
        {"type": None},
        {"type": 1},
        {"type": "AFDMessage"},
        {"type": "os.system"},
        {1: 2},
        {"type": "AFDBye", "more": 1},
        _step(seq=...),
        _step(seq=-1),
        _step(seq=2**53),
        _step(seq=2**64 - 1),
        _step(seq=1.0),
        _step(seq=True),
        _step(seq="1"),
        _step(seq=None),
        _step(kind="Eager"),
        _step(kind="replay"),
        _step(kind=None),
        _step(stage_tokens=[]),
        _step(stage_tokens=[1, 2, 3]),
        _step(stage_tokens=[-1]),
        _step(stage_tokens=[[1]]),
        _step(stage_tokens={"0": 1}),
        _step(extra=None),
        {"type": "AFDBlob", "data": "text"},
        {"type": "AFDBlob", "data": bytes(messages.MAX_BLOB_SIZE + 1)},
        {"type": "AFDAbort", "reason": "x" * 2001},
        {"type": "AFDAbort", "reason": b"bytes"},
        {"type": "AFDProof", "mac": bytes(31)},
        {"type": "AFDProof", "mac": bytes(33)},
        {"type": "AFDProof", "mac": b""},
        msgspec.to_builtins(EXAMPLES[0]) | {"nonce": b"short"},
        msgspec.to_builtins(EXAMPLES[0]) | {"role": "client"},
        msgspec.to_builtins(EXAMPLES[0]) | {"has_secret": 1},
        msgspec.to_builtins(hello("ffn")) | {"layers": [{"name": "x"}]},
        msgspec.to_builtins(hello("ffn")) | {"layers": [{}] * 5000},
        msgspec.to_builtins(hello("ffn")) | {"dtype": "x" * 257},
    ],
    ids=lambda v: repr(v)[:60],
)
def test_valid_msgpack_of_a_wrong_schema(value):
    payload = msgspec.msgpack.encode(value)
    with pytest.raises(AFDProtocolError, match="no valid AFD"):
        decode(payload, *ALL_TYPES)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 60000,  # nested
        b"\x81\xa4type\x91" + b"\x91" * 60000,
        b"\x81\xa4type\xa2\xff\xfe",  # not UTF-8
        b"\xc7\x04\x05abcd",  # extension type
        encode(AFDBye())[4:] + b"\x00",
        encode(AFDBye())[4:-1],
        b"cos\nsystem\n(S'true'\ntR.",  # pickle
        b"\x80\x04}\x94\x8c\x04type\x94\x8c\x06AFDBye\x94s.",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    ],
    ids=lambda v: repr(v[:20]),
)
def test_what_is_no_message(payload):
    with pytest.raises(AFDProtocolError):
        decode(payload, *ALL_TYPES)


def test_a_message_that_may_not_come_now(channels):
    left, right = channels
    left.send(step(1), TIMEOUT_S)
    with pytest.raises(AFDProtocolError, match="no valid AFDChallenge or AFDRefused"):
        right.recv(AFDChallenge, AFDRefused, timeout_s=TIMEOUT_S)


def test_errors_do_not_carry_control_characters():
    payload = msgspec.msgpack.encode({"type": "x\n\x1b[31mERROR faked\r" + "y" * 999})
    with pytest.raises(AFDProtocolError) as error:
        decode(payload, AFDBye)
    assert "\x1b" not in str(error.value) and "\r" not in str(error.value)
    assert len(str(error.value)) < 300


def test_random_bytes_never_do_anything_but_be_refused():
    rng = random.Random(0)
    accepted = 0
    for _ in range(20000):
        data = rng.randbytes(rng.randrange(64))
        try:
            decode(data, *ALL_TYPES)
            accepted += 1
        except AFDProtocolError:
            pass
    assert accepted == 0


def test_mutated_messages_decode_to_a_message_or_are_refused():
    rng = random.Random(1)
    outcomes = {"message": 0, "refused": 0}
    payloads = [encode(m)[4:] for m in EXAMPLES if not isinstance(m, AFDBlob)]
    for _ in range(20000):
        data = bytearray(rng.choice(payloads))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(4):
                case 0:
                    data[at : at + 1] = rng.randbytes(1)
                case 1:
                    del data[at : at + rng.randrange(1, 8)]
                case 2:
                    data[at:at] = rng.randbytes(rng.randrange(1, 8))
                case 3:
                    data[at:at] = rng.choice(payloads)[: rng.randrange(1, 40)]
        try:
            message = decode(data, *ALL_TYPES)
        except AFDProtocolError:
            outcomes["refused"] += 1
            continue
        assert isinstance(message, ALL_TYPES)
        # What was accepted is within the schema.
        assert decode(encode(message)[4:], *ALL_TYPES) == message
        outcomes["message"] += 1
    assert min(outcomes.values()) > 100, outcomes


def test_random_streams_end_a_channel_in_a_named_way():
    rng = random.Random(2)
    for _ in range(300):
        with socket_pair() as (a, b), AFDChannel(b) as right:
            head = struct.pack("!I", rng.randrange(300)) * rng.randrange(2)
            a.sendall(head + rng.randbytes(rng.randrange(300)))
            a.close()
            with pytest.raises((AFDProtocolError, EOFError, ConnectionError)):
                while True:
                    right.recv(AFDStep, AFDBye, timeout_s=TIMEOUT_S)


@repeat(30)
def test_dribbled_bytes_make_a_message(channels):
    left, right = channels
    received = background(right.recv, AFDStep, timeout_s=TIMEOUT_S)
    for byte in encode(step(7, 3, 4)):
        raw_send(left, bytes([byte]))
        time.sleep(0)
    assert received.result(TIMEOUT_S) == step(7, 3, 4)


def test_dribbling_does_not_extend_the_time_for_a_message(channels):
    left, right = channels
    received = background(right.recv, AFDStep, timeout_s=0.3)
    stop = threading.Event()
    try:
        frame = iter(encode(step(1)))
        while not received.done():
            if (byte := next(frame, None)) is not None:
                raw_send(left, bytes([byte]))
            stop.wait(0.02)
        # 20 ms for each of more than 15 bytes.
        with pytest.raises(TimeoutError):
            received.result(0)
    finally:
        stop.set()


@pytest.mark.parametrize("cut", [1, 3, 4, 5, -1])
@repeat(30)
def test_truncated_frame(cut):
    with socket_pair() as (a, b), AFDChannel(b) as right:
        a.sendall(encode(step(1))[:cut])
        a.close()
        with pytest.raises(ConnectionError, match="in the middle of a message"):
            right.recv(AFDStep, timeout_s=TIMEOUT_S)


def test_end_between_messages_is_told_apart(channels):
    left, right = channels
    left.send(AFDBye(), TIMEOUT_S)
    left.end_sending()
    assert right.recv(AFDBye, timeout_s=TIMEOUT_S) == AFDBye()
    with pytest.raises(EOFError):
        right.recv(AFDBye, timeout_s=TIMEOUT_S)
    # The other direction is still open.
    right.send(AFDBye(), TIMEOUT_S)
    assert left.recv(AFDBye, timeout_s=TIMEOUT_S) == AFDBye()


@pytest.mark.parametrize("sent", [0, 2, 10])
def test_recv_is_bounded(sent, channels):
    left, right = channels
    raw_send(left, encode(step(1))[:sent])
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        right.recv(AFDStep, timeout_s=0.05)
    assert time.monotonic() - start < 10


def test_what_has_come_is_seen_though_the_time_is_over(channels):
    # As after this process was stopped for longer than the timeout.
    left, right = channels
    left.send(AFDBye(), TIMEOUT_S)
    assert right.recv(AFDBye, timeout_s=-1) == AFDBye()


@pytest.fixture
def stall(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[int, float], threading.Event]:
    """Let the nth poll from now on see nothing for a while, as all of a host does
    that is suspended. The event is set when that is over."""
    countdown, seconds = -1, 0.0
    over = threading.Event()
    poll = select.poll

    class StallingPoll:
        def __init__(self) -> None:
            self._poll = poll()
            self.register = self._poll.register

        def poll(self, timeout: float) -> list:
            nonlocal countdown
            countdown -= 1
            if countdown == 0:
                time.sleep(seconds)
                over.set()
                return []
            return self._poll.poll(timeout)

    monkeypatch.setattr(messages.select, "poll", StallingPoll)

    def stall(nth: int, for_s: float) -> threading.Event:
        nonlocal countdown, seconds
        countdown, seconds = nth, for_s
        return over

    return stall


@pytest.mark.parametrize("nth", [1, 3])
def test_a_host_that_was_suspended_gives_the_peer_more_time(channels, stall, nth):
    left, right = channels
    over = stall(nth, 3.0)
    received = background(right.recv, AFDHeartbeat, timeout_s=2)
    # The peer did not run either, and goes on a little later.
    assert over.wait(TIMEOUT_S)
    time.sleep(0.3)
    left.send(AFDHeartbeat(), 1)
    assert received.result(TIMEOUT_S) == AFDHeartbeat()


def test_a_host_that_was_suspended_gives_up_at_last(channels, stall):
    stall(2, 1.0)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        channels[0].recv(AFDHeartbeat, timeout_s=0.4)
    assert 1.3 < time.monotonic() - start < TIMEOUT_S


def test_messages_of_several_threads_do_not_mix(channels):
    left, right = channels
    left._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    count, size = 100, 20000

    def send(i: int) -> None:
        for _ in range(count):
            left.send(AFDBlob(data=bytes([i]) * size), TIMEOUT_S)

    senders = [background(send, i) for i in range(4)]
    seen = [0] * 4
    for _ in range(4 * count):
        data = right.recv(AFDBlob, timeout_s=TIMEOUT_S).data
        assert data == bytes([data[0]]) * size
        seen[data[0]] += 1
    assert seen == [count] * 4
    for sender in senders:
        sender.result(TIMEOUT_S)


def fill(channel: AFDChannel) -> None:
    """Send until the peer, which does not read, has no more room."""
    channel._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with pytest.raises(TimeoutError):
        while True:
            channel.send(AFDBlob(data=bytes(60000)), timeout_s=0.05)


def test_a_cut_frame_is_the_last(channels):
    left, right = channels
    fill(left)
    with pytest.raises(BrokenPipeError):
        left.send(AFDBye(), TIMEOUT_S)
    left.end_sending()
    with pytest.raises(ConnectionError, match="in the middle"):
        while True:
            assert right.recv(AFDBlob, AFDBye, timeout_s=TIMEOUT_S) != AFDBye()


def test_waiting_behind_a_blocked_sender_is_bounded(channels):
    left, _ = channels
    left._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    def send_all() -> None:
        while True:
            left.send(AFDBlob(data=bytes(60000)), TIMEOUT_S)

    blocked = background(send_all)
    with pytest.raises(TimeoutError, match="still being sent|timed out"):
        while True:
            left.send(AFDBye(), timeout_s=0.05)
    left.shutdown()
    with pytest.raises(OSError):
        blocked.result(TIMEOUT_S)


@pytest.mark.parametrize("how", ["shutdown", "end_sending"])
@repeat(30)
def test_a_blocked_sender_is_woken(how):
    with socket_pair() as (a, b), AFDChannel(a) as left:
        left._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

        def send_all() -> None:
            while True:
                left.send(AFDBlob(data=bytes(60000)), TIMEOUT_S)

        blocked = background(send_all)
        time.sleep(0.01)  # Either before or while it blocks.
        getattr(left, how)()
        with pytest.raises(BrokenPipeError):
            blocked.result(TIMEOUT_S)


@repeat(30)
def test_a_receiver_is_woken_by_shutdown():
    with socket_pair() as (a, b), AFDChannel(a) as left:
        waiting = background(left.recv, AFDBye, timeout_s=TIMEOUT_S)
        left.shutdown()
        with pytest.raises((EOFError, OSError)):
            waiting.result(TIMEOUT_S)


def test_nothing_is_sent_or_received_after_close(channels):
    left, _ = channels
    left.close()
    left.close()
    with pytest.raises(OSError):
        left.send(AFDBye(), TIMEOUT_S)
    with pytest.raises(OSError):
        left.recv(AFDBye, timeout_s=TIMEOUT_S)


def test_signals_do_not_disturb_a_wait(channels):
    left, right = channels
    caught = []
    previous = signal.signal(signal.SIGALRM, lambda *_: caught.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:

        def send_late() -> None:
            while len(caught) < 5:
                time.sleep(0.005)
            left.send(AFDBye(), TIMEOUT_S)

        sent = background(send_late)
        assert right.recv(AFDBye, timeout_s=TIMEOUT_S) == AFDBye()
        sent.result(TIMEOUT_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_clean_text():
    assert clean_text("plain ümlaut\nline") == "plain ümlaut line"
    assert clean_text("a\x1b[0m\r\x00b") == "a?[0m??b"
    assert clean_text("x" * 5000) == "x" * 1996 + " ..."


def test_describe_differences():
    own = {"a": 1, "b": 2, "c": 3}
    assert describe_differences(dict(own), own) == ""
    assert describe_differences({"a": 1, "b": 3, "d": "\n\x1b"}, own) == (
        "b is 3 there and 2 here; c is None there and 3 here; "
        "d is  ? there and None here"
    )
