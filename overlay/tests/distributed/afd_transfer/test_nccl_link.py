# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How two ranks meet with NCCL, and how that ends. NCCL and the devices are fakes."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from vllm.distributed.afd_transfer.afd_connector import nccl_link
from vllm.distributed.afd_transfer.afd_connector.nccl_link import AFDNcclLink
from vllm.distributed.afd_transfer.errors import (
    AFDError,
    AFDHandshakeError,
    AFDPeerError,
)

from .fake_nccl import FakeNccl, FakeWorld, fake_world, wait_until
from .utils import ATTENTION_PEER, FFN_PEER, SOON_S, blob_exchanges, in_threads

pytestmark = pytest.mark.skip_global_cleanup

PEERS = {"attention": FFN_PEER, "ffn": ATTENTION_PEER}
FACTS = {"protocol": "1", "max_tokens": "8"}


class End:
    """One side: a link, and the session that it is for."""

    def __init__(self, world: FakeWorld, role: Any):
        self.world = world
        self.role = role
        self.error: AFDError | None = None
        with world.process(role):
            self.link = AFDNcclLink(role, PEERS[role], self._check)

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def connect(
        self,
        exchange_blob: Callable[[bytes], bytes],
        facts: dict[str, str] = FACTS,
        timeout_s: float = SOON_S,
    ) -> None:
        self.world.set_stream(self.world.devices[self.role].compute_stream)
        self.link.connect(exchange_blob, "127.0.0.1", facts, timeout_s)

    def stop(self, error: AFDError | None = None) -> None:
        self.error = error or AFDError("over")
        self.link.stop()

    def start(self, direction: int, *tensors: torch.Tensor) -> None:
        self.link.start(direction, list(tensors), self.link.streams[0])


class Pair:
    def __init__(self, world: FakeWorld):
        self.world = world
        self.attention, self.ffn = End(world, "attention"), End(world, "ffn")

    def connect(self, **kwargs: Any) -> "Pair":
        ends = blob_exchanges()
        in_threads(
            lambda: self.attention.connect(ends[0], **kwargs),
            lambda: self.ffn.connect(ends[1], **kwargs),
        )
        return self


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with fake_world(monkeypatch) as world:
        yield Pair(world)


def meet_in_threads(pair: Pair, **facts: dict[str, str]) -> dict[str, AFDError]:
    """Have both fail to meet."""
    errors: dict[str, AFDError] = {}

    def connect(end: End, exchange: Callable[[bytes], bytes]) -> None:
        with pytest.raises(AFDError) as raised:
            end.connect(exchange, facts.get(end.role, FACTS))
        errors[end.role] = raised.value

    ends = blob_exchanges()
    in_threads(
        lambda: connect(pair.attention, ends[0]), lambda: connect(pair.ffn, ends[1])
    )
    return errors


def test_both_directions(pair: Pair):
    pair.connect()
    # One message each, which connects the communicators.
    assert pair.world.num_messages == len(pair.world.comms) / 2 == 2
    x, y = torch.arange(6.0), torch.zeros(6)
    logits, more = torch.arange(3.0), torch.zeros(3)
    pair.attention.start(AFDNcclLink.TO_FFN, x, logits)
    pair.ffn.start(AFDNcclLink.TO_FFN, y, more)
    pair.ffn.link.streams[0].synchronize()
    assert torch.equal(x, y) and torch.equal(logits, more)
    pair.attention.start(AFDNcclLink.TO_ATTENTION, x)
    pair.ffn.start(AFDNcclLink.TO_ATTENTION, y * 2)
    pair.attention.link.streams[0].synchronize()
    assert torch.equal(x, y * 2)


def test_nothing_is_no_message(pair: Pair):
    pair.connect()
    for end in (pair.attention, pair.ffn):
        end.start(AFDNcclLink.TO_FFN, torch.empty(0, 8), torch.empty(0))
        assert end.link.streams[0].query()
    assert pair.world.num_messages == 2


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_a_peer_that_does_not_come(pair: Pair, role: str):
    """It has told its part, and is not seen again."""
    end, other = (pair.attention, pair.ffn)[:: 1 if role == "attention" else -1]
    ends = blob_exchanges()

    def leave() -> None:
        def exchange(data: bytes) -> bytes:
            ends[1](data)
            raise AFDError("left")

        with pytest.raises(AFDError, match="left"):
            other.connect(exchange)

    def connect() -> None:
        start = time.monotonic()
        with pytest.raises(AFDPeerError, match="did not connect its NCCL within 0.3 s"):
            end.connect(ends[0], timeout_s=0.3)
        assert time.monotonic() - start < SOON_S / 2

    in_threads(connect, leave)
    end.stop()
    end.link.join()
    assert not pair.world.num_exits


@pytest.mark.parametrize("when", ["before", "while it waits"])
def test_the_session_ends_meanwhile(pair: Pair, when: str):
    ends = blob_exchanges()
    end = pair.ffn
    error = AFDPeerError(f"{ATTENTION_PEER} died")

    def exchange(data: bytes) -> bytes:
        if when == "before":
            end.stop(error)
        else:
            threading.Timer(0.2, end.stop, [error]).start()
        return ends[0](data)

    def peer() -> None:
        pair.world.set_stream(pair.world.devices["attention"].compute_stream)
        pair.attention.link._exchange_ids(ends[1], FACTS)

    def connect() -> None:
        with pytest.raises(AFDPeerError) as raised:
            end.connect(exchange)
        assert raised.value is error

    in_threads(connect, peer)


def test_a_communicator_that_comes_too_late_is_ended(pair: Pair):
    ends = blob_exchanges()

    def connect() -> None:
        with pytest.raises(AFDPeerError, match=ATTENTION_PEER.split("(")[0]):
            pair.ffn.connect(ends[0], timeout_s=0.2)
        pair.ffn.stop()
        pair.ffn.link.join()

    unique_ids: list[bytes] = []

    def peer() -> None:
        pair.world.set_stream(pair.world.devices["attention"].compute_stream)
        unique_ids.extend(pair.attention.link._exchange_ids(ends[1], FACTS))

    in_threads(connect, peer)
    # The peer comes, and finds one communicator that is gone.
    comm = nccl_link.PyNcclCommunicator.from_unique_id_bytes(
        unique_ids[0], 1, 2, torch.device("cpu")
    )
    wait_until(lambda: comm.peer().aborted, "the communicator is not ended")
    assert (unique_ids[1], 0) not in pair.world.comms


def test_nccl_that_is_missing(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    def load() -> None:
        raise OSError("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(nccl_link, "NCCLLibrary", load)
    with pytest.raises(AFDError, match="NCCL cannot be used on .*libnccl.so.2"):
        pair.ffn.connect(blob_exchanges()[0])


def test_pynccl_that_is_turned_off(pair: Pair):
    pair.world.disabled = True
    errors = meet_in_threads(pair)
    assert all("VLLM_DISABLE_PYNCCL" in str(e) for e in errors.values())
    assert set(errors) == {"attention", "ffn"}


def test_facts_must_be_equal(pair: Pair):
    errors = meet_in_threads(pair, ffn={"protocol": "1", "max_tokens": "9"})
    for role, here, there in (("attention", 8, 9), ("ffn", 9, 8)):
        assert isinstance(errors[role], AFDHandshakeError)
        assert PEERS[role] in str(errors[role])
        assert f"max_tokens is {there} there and {here} here" in str(errors[role])
        assert "protocol" not in str(errors[role])
    assert not pair.world.comms


def test_nccl_versions_must_be_equal(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    versions = iter(("2.29.7", "2.30.1"))
    monkeypatch.setattr(FakeNccl, "ncclGetVersion", lambda self: next(versions))
    for error in meet_in_threads(pair).values():
        assert "NCCL version is 2." in str(error)


def test_one_gpu_for_both(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nccl_link, "_gpu_uuid", lambda device: "GPU-1234")
    for error in meet_in_threads(pair).values():
        assert "same GPU" in str(error) and "GPU-1234" in str(error)
        assert "CUDA_VISIBLE_DEVICES" in str(error)


def _blob(**changes: Any) -> bytes:
    facts = {**FACTS, "NCCL version": FakeNccl.version}
    return msgspec.msgpack.encode(
        {"facts": facts, "gpu": "another", "unique_ids": []} | changes
    )


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "does not use NCCL"),
        (b"\xc1garbage", "does not use NCCL"),
        (_blob(unique_ids=None), "does not use NCCL"),
        (_blob(unique_ids=["x"]), "does not use NCCL"),
        (_blob(more=1), "does not use NCCL"),
        (_blob(facts={}), "max_tokens is None there and 8 here"),
        (_blob(), "has sent 0 unique ids of NCCL, not 2"),
        (_blob(unique_ids=[bytes(128)]), "has sent 1 unique ids of NCCL, not 2"),
    ],
)
def test_a_peer_that_says_something_else(pair: Pair, blob: bytes, message: str):
    with pytest.raises(AFDHandshakeError, match=message) as raised:
        pair.attention.connect(lambda data: blob)
    assert FFN_PEER in str(raised.value)


@pytest.mark.parametrize("text", ["a\nERROR \x1b[31m", "x" * 5000])
@pytest.mark.parametrize("place", ["name", "value", "unknown field"])
def test_a_peer_cannot_write_lines_into_the_log(pair: Pair, text: str, place: str):
    facts = {**FACTS, "NCCL version": FakeNccl.version}
    changes: dict[str, dict[str, Any]] = {
        "name": {"facts": {**facts, text: "1"}},
        "value": {"facts": {**facts, "max_tokens": text}},
        "unknown field": {text: 1},
    }
    with pytest.raises(AFDHandshakeError) as raised:
        pair.attention.connect(lambda data: _blob(**changes[place]))
    error = str(raised.value)
    assert error.startswith(FFN_PEER) and error.isprintable()
    assert len(error) < 2500


@pytest.mark.parametrize("error", [AFDPeerError("it left"), KeyboardInterrupt()])
def test_a_failing_control_connection_is_the_error(pair: Pair, error: BaseException):
    def exchange(data: bytes) -> bytes:
        raise error

    with pytest.raises(type(error)) as raised:
        pair.attention.connect(exchange)
    assert raised.value is error


def test_stop_ends_what_waits_on_the_device(pair: Pair):
    pair.connect()
    pair.attention.start(AFDNcclLink.TO_FFN, torch.ones(4))
    pair.ffn.start(AFDNcclLink.TO_ATTENTION, torch.ones(4))
    for end in (pair.attention, pair.ffn):
        assert not end.link.streams[0].query()
        start = time.monotonic()
        end.stop()
        assert time.monotonic() - start < 1
        end.link.join()
        assert end.link.streams[0].query()
        with pytest.raises(AFDError, match="over"):
            end.start(AFDNcclLink.TO_FFN, torch.ones(4))
    names = {comm.aborted_by for comm in pair.world.comms.values()}
    assert None not in names and threading.current_thread().name not in names
    assert not pair.world.num_exits


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_nothing_is_sent_after_an_abort(pair: Pair, role: str):
    """What would be made of what has not arrived any more."""
    pair.connect()
    end, other = (pair.attention, pair.ffn)[:: 1 if role == "attention" else -1]
    sends = AFDNcclLink.TO_FFN if role == "attention" else AFDNcclLink.TO_ATTENTION
    arrived = torch.zeros(4)
    end.start(1 - sends, torch.ones(4))
    end.start(sends, torch.ones(4))
    other.start(sends, arrived)
    end.stop()
    end.link.join()
    assert end.link.streams[0].query()
    assert not other.link.streams[0].query()
    assert not arrived.any()


@pytest.mark.parametrize("busy", [True, False])
def test_an_abort_that_does_not_return(
    pair: Pair, busy: bool, monkeypatch: pytest.MonkeyPatch
):
    """It ends the process if there is something on the device that it was to end."""
    monkeypatch.setattr(nccl_link, "_STOP_TIMEOUT_S", 0.3)
    lines: list[str] = []
    monkeypatch.setattr(
        nccl_link.logger, "critical", lambda text, *args: lines.append(text % args)
    )
    pair.connect()
    if busy:
        pair.attention.start(AFDNcclLink.TO_FFN, torch.ones(4))
    pair.world.abort_hangs = True
    start = time.monotonic()
    pair.attention.stop()
    pair.attention.link.join()
    assert time.monotonic() - start < SOON_S / 2
    # One has not kept the other from its abort.
    aborted = [c for c in pair.world.comms.values() if c.aborted_by is not None]
    assert len(aborted) == 2
    assert pair.world.num_exits == len(lines) == int(busy)
    assert not busy or (FFN_PEER in lines[0] and "0.3 s" in lines[0])


def test_a_device_that_has_failed_is_not_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nccl_link, "_STOP_TIMEOUT_S", 0.3)
    pair.connect()
    pair.world.abort_hangs = True
    pair.attention.start(AFDNcclLink.TO_FFN, torch.ones(4))
    pair.world.devices["attention"].broken = True
    pair.attention.stop()
    pair.attention.link.join()
    assert not pair.world.num_exits


def test_no_communicator_is_freed_in_a_call(pair: Pair):
    pair.connect()
    pair.attention.link._lock.acquire()
    pair.attention.stop()
    time.sleep(0.1)
    comms = [c for c in pair.world.comms.values() if c.rank == 1]
    assert not any(comm.aborted for comm in comms)
    pair.attention.link._lock.release()
    pair.attention.link.join()
    assert all(comm.aborted for comm in comms)


def test_a_call_that_does_not_return(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nccl_link, "_STOP_TIMEOUT_S", 1.0)
    pair.connect()
    with pair.attention.link._lock:
        pair.attention.stop()
        pair.attention.link.join()
    assert all(c.aborted for c in pair.world.comms.values() if c.rank == 1)
    assert not pair.world.num_exits


@pytest.mark.parametrize(
    ("address", "set_before", "expected"),
    [
        ("10.0.0.2", None, "=eth1"),
        ("fe80::1", None, "=eth1"),
        ("127.0.0.1", None, "=lo"),
        ("10.0.0.2", "ib0", "ib0"),
        ("10.0.0.9", None, None),
    ],
)
def test_interface_of_the_control_connection(
    monkeypatch: pytest.MonkeyPatch, address: str, set_before: str | None, expected: str
):
    addresses = {
        "lo": [SimpleNamespace(address="127.0.0.1")],
        "eth0": [SimpleNamespace(address="10.0.0.1")],
        "eth1": [
            SimpleNamespace(address="10.0.0.2"),
            SimpleNamespace(address="fe80::1%eth1"),
        ],
    }
    monkeypatch.setattr(nccl_link.psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", set_before or "")
    if set_before is None:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    nccl_link._pin_interface(address)
    assert os.environ.get("NCCL_SOCKET_IFNAME") == expected
