# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import datetime
import functools
import gc
import os
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import regex as re
import torch

from vllm.config.afd import AFDConfig
from vllm.distributed.afd_transfer.afd_connector.base import AFDLayout, AFDTransfer
from vllm.distributed.afd_transfer.afd_connector.factory import AFDConnectorFactory
from vllm.distributed.afd_transfer.afd_connector.gloo_connector import (
    GlooAFDConnector,
)
from vllm.distributed.afd_transfer.errors import (
    AFDError,
    AFDHandshakeError,
    AFDPeerError,
)

from .utils import (
    ATTENTION_PEER,
    FFN_PEER,
    SOON_S,
    Step,
    blob_exchanges,
    connected_pair,
    experts,
    in_threads,
    make_config,
    make_input,
    run_steps,
)

pytestmark = pytest.mark.skip_global_cleanup

LAYOUT = AFDLayout(64, 2, 48, torch.bfloat16, logits_size=8)
TRANSFER = AFDTransfer(seq=3, layer=1, stage=0, num_stages=1, rows=5, logits_size=8)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def resources() -> tuple[int, int]:
    """Threads and open files of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def resources_become(expected: tuple[int, int]) -> bool:
    """Threads that have been joined may still be listed for a moment."""
    deadline = time.monotonic() + SOON_S
    while resources() != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return resources() == expected


def exchange_once(attention, ffn, transfer: AFDTransfer) -> torch.Tensor:
    ffn.post_recv(transfer)
    handle = attention.submit(transfer, *make_input(attention.layout, transfer))
    ffn.send(transfer, experts(transfer, *ffn.recv(transfer)))
    return handle.wait()


def test_is_the_default():
    config = AFDConfig(afd_role="ffn")
    assert AFDConnectorFactory.get_connector_class(config) is GlooAFDConnector


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("logits_dtype", [None, torch.float32, torch.bfloat16])
def test_steps_of_all_shapes(dtype, logits_dtype):
    layout = AFDLayout(
        64, 2, 48, dtype, 8 if logits_dtype else 0, logits_dtype or torch.float32
    )
    logits_sizes = [8, 8, 5, 0] if logits_dtype else [0, 0, 0]
    stage_rows = [
        [0],
        [1],
        [33],
        [64],
        [0, 0],
        [1, 0],
        [0, 1],
        [1, 1],
        [2, 1],
        [33, 32],
        [64, 7],
        [7, 64],
        [64, 64],
        [1],
    ]
    steps = [Step(i + 1, rows, logits_sizes) for i, rows in enumerate(stage_rows)]
    with connected_pair(layout) as (attention, ffn):
        run_steps(attention, ffn, steps)


def test_random_steps():
    rng = random.Random(0)
    steps = [
        Step(
            seq,
            [rng.randint(0, 64) for _ in range(rng.randint(1, 2))],
            [rng.choice([0, 8]) for _ in range(rng.randint(1, 5))],
        )
        for seq in range(50)
    ]
    with connected_pair(LAYOUT) as (attention, ffn):
        run_steps(attention, ffn, steps)


def test_a_large_transfer():
    # Far larger than what a socket holds.
    layout = AFDLayout(4096, 2, 1024, torch.float32)
    with connected_pair(layout) as (attention, ffn):
        run_steps(attention, ffn, [Step(1, [4096], [0, 0]), Step(2, [4001, 95], [0])])


def test_input_of_any_strides():
    with connected_pair(LAYOUT) as (attention, ffn):
        hidden_states, router_logits = make_input(LAYOUT, TRANSFER)
        ffn.post_recv(TRANSFER)
        handle = attention.submit(
            TRANSFER,
            hidden_states.t().contiguous().t(),
            torch.stack([router_logits, router_logits], dim=2)[..., 0],
        )
        received, received_logits = ffn.recv(TRANSFER)
        assert torch.equal(received, hidden_states)
        assert torch.equal(received_logits, router_logits)
        ffn.send(TRANSFER, received.t().contiguous().t())
        assert torch.equal(handle.wait(), hidden_states)


def test_who_owns_which_memory():
    with connected_pair(LAYOUT) as (attention, ffn):
        hidden_states, router_logits = make_input(LAYOUT, TRANSFER)
        expected = hidden_states.clone()
        addresses = set()
        outputs = []
        for layer in range(3):
            transfer = replace(TRANSFER, layer=layer)
            ffn.post_recv(transfer)
            handle = attention.submit(transfer, hidden_states, router_logits)
            # The host connectors copy, so that it may be overwritten at once.
            hidden_states.zero_()
            received, _ = ffn.recv(transfer)
            addresses.add(received.data_ptr())
            output = received + 0
            ffn.send(transfer, output)
            output.zero_()
            hidden_states = handle.wait()
            outputs.append(hidden_states.clone())
            assert torch.equal(hidden_states, expected)
        # FFN reads in place. What attention got is not used again.
        assert len(addresses) == 1
        assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.parametrize("logits_size", [0, 8])
def test_an_output_may_be_the_input(logits_size):
    with connected_pair(LAYOUT) as (attention, ffn):
        ffn.post_recv(TRANSFER)
        handle = attention.submit(TRANSFER, *make_input(LAYOUT, TRANSFER))
        received, _ = ffn.recv(TRANSFER)
        received *= 2
        ffn.post_recv(replace(TRANSFER, layer=2, logits_size=logits_size))
        ffn.send(TRANSFER, received)
        assert torch.equal(handle.wait(), make_input(LAYOUT, TRANSFER)[0] * 2)


def test_done_does_not_block_and_becomes_true():
    with connected_pair(LAYOUT) as (attention, ffn):
        for layer, rows in enumerate((5, 0, 64, 1)):
            transfer = replace(TRANSFER, layer=layer, rows=rows)
            ffn.post_recv(transfer)
            handle = attention.submit(transfer, *make_input(LAYOUT, transfer))
            output = experts(transfer, *ffn.recv(transfer))
            assert not handle.done()
            ffn.send(transfer, output)
            deadline = time.monotonic() + SOON_S
            while not handle.done():
                assert time.monotonic() < deadline
            assert torch.equal(handle.wait(), output)


def test_done_if_the_session_has_failed():
    with connected_pair(LAYOUT) as (attention, _):
        handle = attention.submit(TRANSFER, *make_input(LAYOUT, TRANSFER))
        assert not handle.done()
        attention.abort(AFDPeerError("gone"))
        assert handle.done()


def test_done_if_it_is_too_late():
    config = make_config(step_timeout_s=0.1)
    with connected_pair(LAYOUT, config) as (attention, _):
        handle = attention.submit(TRANSFER, *make_input(LAYOUT, TRANSFER))
        deadline = time.monotonic() + SOON_S
        while not handle.done():
            assert time.monotonic() < deadline
        with pytest.raises(AFDPeerError, match="did not arrive within"):
            handle.wait()


class PunctualFence:
    """One that never comes, and whose wait ends as early as gloo's may: it counts
    whole milliseconds."""

    def __init__(self, connector: GlooAFDConnector):
        self._fence = connector._lanes[0].fence
        connector._lanes[0].fence = self  # type: ignore[assignment]

    def wait(self, timeout: datetime.timedelta) -> None:
        end = time.monotonic() + timeout // datetime.timedelta(milliseconds=1) / 1000
        while time.monotonic() < end:
            pass
        raise RuntimeError("Timed out waiting for recv operation to complete")


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_the_limit_is_named_though_gloo_counts_whole_milliseconds(role):
    config = make_config(step_timeout_s=0.0509)
    with connected_pair(LAYOUT, config) as (attention, ffn):
        if role == "attention":
            wait = attention.submit(TRANSFER, *make_input(LAYOUT, TRANSFER)).wait
            PunctualFence(attention)
        else:
            ffn.post_recv(TRANSFER)
            wait = functools.partial(ffn.recv, TRANSFER)
            PunctualFence(ffn)
        with pytest.raises(AFDPeerError, match=r"within step_timeout_s=0\.0509"):
            wait()


class SlowGroup:
    """A group of a process that does not run between a frame and its fence."""

    def __init__(self, connector: GlooAFDConnector):
        self._group = connector._group
        self.may_go_on = threading.Event()
        connector._group = self  # type: ignore[assignment]

    def __getattr__(self, name: str):
        return getattr(self._group, name)

    def send(self, tensors, rank, tag):
        if tag >= 100:
            assert self.may_go_on.wait(SOON_S)
        return self._group.send(tensors, rank, tag)


def test_done_means_that_wait_does_not_block():
    with connected_pair(LAYOUT) as (attention, ffn), ThreadPoolExecutor() as pool:
        for layer in range(2):
            transfer = replace(TRANSFER, layer=layer)
            group = SlowGroup(ffn)
            ffn.post_recv(transfer)
            handle = attention.submit(transfer, *make_input(LAYOUT, transfer))
            output = experts(transfer, *ffn.recv(transfer))
            sent = pool.submit(ffn.send, transfer, output)
            deadline = time.monotonic() + SOON_S
            while not handle.done():
                assert time.monotonic() < deadline
            start = time.monotonic()
            assert torch.equal(handle.wait(), output)
            assert time.monotonic() - start < 0.5
            group.may_go_on.set()
            sent.result(SOON_S)


def test_a_complete_input_is_received_before_its_fence():
    with connected_pair(LAYOUT) as (attention, ffn), ThreadPoolExecutor() as pool:
        for layer in range(2):
            transfer = replace(TRANSFER, layer=layer)
            hidden_states, router_logits = make_input(LAYOUT, transfer)
            group = SlowGroup(attention)
            ffn.post_recv(transfer)
            sent = pool.submit(attention.submit, transfer, hidden_states, router_logits)
            deadline = time.monotonic() + SOON_S
            while not ffn._lanes[0].incoming.arrived():
                assert time.monotonic() < deadline
            assert torch.equal(ffn.recv(transfer)[0], hidden_states)
            ffn.send(transfer, hidden_states)
            assert not sent.done()
            group.may_go_on.set()
            assert torch.equal(sent.result(SOON_S).wait(), hidden_states)


@pytest.mark.parametrize("ended_by", ["timeout", "abort"])
def test_a_fence_that_never_comes(ended_by):
    step_timeout_s = 1 if ended_by == "timeout" else SOON_S
    config = make_config(step_timeout_s=step_timeout_s)
    with connected_pair(LAYOUT, config) as (attention, ffn):
        group = SlowGroup(ffn)
        group.may_go_on.set()
        group.send = lambda tensors, rank, tag: (  # type: ignore[method-assign]
            SimpleNamespace(wait=lambda timeout: True)
            if tag >= 100
            else SlowGroup.send(group, tensors, rank, tag)
        )
        ffn.post_recv(TRANSFER)
        handle = attention.submit(TRANSFER, *make_input(LAYOUT, TRANSFER))
        ffn.send(TRANSFER, experts(TRANSFER, *ffn.recv(TRANSFER)))
        deadline = time.monotonic() + SOON_S
        while not handle.done():
            assert time.monotonic() < deadline
        handle.wait()
        error = AFDPeerError(f"{FFN_PEER} sent no heartbeat")
        if ended_by == "abort":
            threading.Timer(0.2, attention.abort, [error]).start()
        start = time.monotonic()
        again = replace(TRANSFER, layer=2)
        with pytest.raises(AFDPeerError, match=re.escape(FFN_PEER)) as raised:
            attention.submit(again, *make_input(LAYOUT, again))
        assert time.monotonic() - start < 3
        assert (raised.value is error) == (ended_by == "abort")
        if ended_by == "timeout":
            assert "not complete within step_timeout_s=1" in str(raised.value)


def test_a_peer_that_compiles_has_more_time():
    config = make_config(step_timeout_s=0.5)
    with connected_pair(LAYOUT, config) as (attention, ffn):
        hidden_states, router_logits = make_input(LAYOUT, TRANSFER)

        def submit() -> None:
            time.sleep(1)
            attention.submit(TRANSFER, hidden_states, router_logits)

        ffn.post_recv(TRANSFER)
        (received, _), _ = in_threads(lambda: ffn.recv(TRANSFER, True), submit)
        assert torch.equal(received, hidden_states)
        ffn.send(TRANSFER, received)

        again = replace(TRANSFER, layer=2)
        ffn.post_recv(again)
        with pytest.raises(AFDPeerError, match="within step_timeout_s=0.5"):
            ffn.recv(again)


def test_other_threads_run_during_a_wait():
    with connected_pair(LAYOUT) as (attention, ffn):
        handle = attention.submit(TRANSFER, *make_input(LAYOUT, TRANSFER))
        # This deadlocks if wait() holds the GIL.
        output, _ = in_threads(
            handle.wait,
            lambda: (
                ffn.post_recv(TRANSFER),
                ffn.send(TRANSFER, experts(TRANSFER, *ffn.recv(TRANSFER))),
            ),
        )
        assert torch.equal(output, experts(TRANSFER, *make_input(LAYOUT, TRANSFER)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq", 4),
        ("layer", 2),
        ("num_stages", 2),
        ("rows", 4),
        ("rows", 6),
        # Longer than what is expected: gloo must not take the process down.
        ("rows", 64),
        ("logits_size", 7),
    ],
)
def test_ffn_names_what_is_wrong(field, value):
    wrong = replace(TRANSFER, **{field: value})
    with connected_pair(LAYOUT) as (attention, ffn):
        ffn.post_recv(TRANSFER)
        handle = attention.submit(wrong, *make_input(LAYOUT, wrong))
        expected = getattr(TRANSFER, field)
        message = f"{field} is {value}, expected {expected}"
        with pytest.raises(AFDPeerError, match=message) as error:
            ffn.recv(TRANSFER)
        assert ATTENTION_PEER in str(error.value)
        with pytest.raises(AFDPeerError, match=f"{re.escape(FFN_PEER)} failed"):
            handle.wait()
        # It is over, and says why.
        with pytest.raises(AFDPeerError, match=message):
            ffn.post_recv(TRANSFER)


def test_attention_names_what_is_wrong():
    with connected_pair(LAYOUT) as (attention, ffn):
        handle = attention.submit(TRANSFER, *make_input(LAYOUT, TRANSFER))
        wrong = replace(TRANSFER, layer=0)
        ffn._send(ffn._lanes[0], wrong, make_input(LAYOUT, wrong)[0])
        with pytest.raises(AFDPeerError, match="layer is 0, expected 1") as error:
            handle.wait()
        assert FFN_PEER in str(error.value)


def test_a_replayed_frame_is_refused():
    with connected_pair(LAYOUT) as (attention, ffn):
        exchange_once(attention, ffn, TRANSFER)
        again = replace(TRANSFER, layer=2)
        ffn.post_recv(again)
        attention.submit(TRANSFER, *make_input(LAYOUT, TRANSFER))
        with pytest.raises(AFDPeerError, match="layer is 1, expected 2"):
            ffn.recv(again)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 100])
@pytest.mark.parametrize("content", ["garbage", "truncated"])
def test_a_short_frame(nbytes, content):
    with connected_pair(LAYOUT) as (attention, ffn):
        ffn.post_recv(TRANSFER)
        lane = attention._lanes[0]
        lane.outgoing.write(TRANSFER, *make_input(LAYOUT, TRANSFER))
        if content == "garbage":
            lane.outgoing.buffer.fill_(0xA5)
        message = lane.outgoing.buffer[:nbytes]
        sends = [
            attention._group.send([message], 0, 0),
            attention._group.send([attention._no_bytes], 0, 100),
        ]
        with pytest.raises(
            AFDPeerError, match="truncated|does not start with a header"
        ):
            ffn.recv(TRANSFER)
        del sends


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rows=65), "rows .*between 0 and 64, not 65"),
        (dict(stage=1), "stage .*between 0 and 0, not 1"),
        (dict(num_stages=3), "num_stages .*not 3"),
        (dict(logits_size=9), "logits_size .*between 0 and 8, not 9"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_sent(change, message):
    wrong = replace(TRANSFER, **change)
    with connected_pair(LAYOUT) as (attention, ffn):
        with pytest.raises(ValueError, match=message):
            attention.submit(wrong, *make_input(LAYOUT, wrong))
        with pytest.raises(ValueError, match=message):
            ffn.post_recv(wrong)
        hidden_states, router_logits = make_input(LAYOUT, TRANSFER)
        assert router_logits is not None
        for tensors in (
            (hidden_states[:4], router_logits),
            (hidden_states.float(), router_logits),
            (hidden_states[:, :47], router_logits),
            (hidden_states, router_logits.bfloat16()),
            (hidden_states, None),
        ):
            with pytest.raises(ValueError, match="of an AFD transfer"):
                attention.submit(TRANSFER, *tensors)
        # The session goes on as if nothing had been asked for.
        exchange_once(attention, ffn, TRANSFER)
        ffn.post_recv(TRANSFER)
        attention.submit(TRANSFER, hidden_states, router_logits)
        ffn.recv(TRANSFER)
        with pytest.raises(ValueError, match=r"hidden states .*not \[4, 48\]"):
            ffn.send(TRANSFER, hidden_states[:4])
        ffn.send(TRANSFER, hidden_states)


def test_calls_out_of_order():
    other = replace(TRANSFER, layer=2)
    with connected_pair(LAYOUT) as (attention, ffn):
        with pytest.raises(AFDError, match="not the one that was posted"):
            ffn.recv(TRANSFER)
        ffn.post_recv(TRANSFER)
        with pytest.raises(AFDError, match="expects an AFD transfer already"):
            ffn.post_recv(other)
        with pytest.raises(AFDError, match="not the one that was received"):
            ffn.send(TRANSFER, make_input(LAYOUT, TRANSFER)[0])
        handle = attention.submit(TRANSFER, *make_input(LAYOUT, TRANSFER))
        with pytest.raises(AFDError, match="has an AFD exchange in flight"):
            attention.submit(other, *make_input(LAYOUT, other))
        ffn.send(TRANSFER, experts(TRANSFER, *ffn.recv(TRANSFER)))
        handle.wait()
        with pytest.raises(AFDError, match="no AFD transfer is expected"):
            handle.wait()


def test_before_connect_and_after_close():
    connector = GlooAFDConnector(make_config(), "ffn", LAYOUT, ATTENTION_PEER)
    with pytest.raises(AFDError, match="is not connected"):
        connector.post_recv(TRANSFER)
    connector.close()
    connector.close()
    with pytest.raises(AFDError, match="is closed"):
        connector.post_recv(TRANSFER)
    with pytest.raises(AFDError, match="is closed"):
        connector.connect(blob_exchanges()[0], "127.0.0.1", 1)


def test_close_ends_both_sides():
    with connected_pair(LAYOUT) as (attention, ffn):
        handle = attention.submit(TRANSFER, *make_input(LAYOUT, TRANSFER))
        ffn.close()
        ffn.close()
        with pytest.raises(AFDPeerError, match=re.escape(FFN_PEER)):
            handle.wait()
        with pytest.raises(AFDError, match="is closed"):
            ffn.post_recv(TRANSFER)


def test_what_was_sent_before_close_arrives():
    with connected_pair(LAYOUT) as (attention, ffn):
        ffn.post_recv(TRANSFER)
        handle = attention.submit(TRANSFER, *make_input(LAYOUT, TRANSFER))
        output = experts(TRANSFER, *ffn.recv(TRANSFER))
        ffn.send(TRANSFER, output)
        ffn.close()
        assert torch.equal(handle.wait(), output)


def test_close_of_a_waiting_connector():
    with connected_pair(LAYOUT) as (attention, _):
        handle = attention.submit(TRANSFER, *make_input(LAYOUT, TRANSFER))
        waiting = threading.Event()

        def wait() -> None:
            waiting.set()
            with pytest.raises(AFDError, match="is closed"):
                handle.wait()

        in_threads(wait, lambda: (waiting.wait(SOON_S), attention.close()))


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_abort_wakes_both_stages(role):
    transfers = Step(1, [5, 4], [8]).layers[0]
    error = AFDPeerError(f"{FFN_PEER} sent no heartbeat")

    def abort_during_waits(connector, waits):
        ready = threading.Barrier(3)

        def wait(function):
            ready.wait(SOON_S)
            with pytest.raises(AFDPeerError) as raised:
                function()
            return raised.value, time.monotonic()

        def abort():
            ready.wait(SOON_S)
            start = time.monotonic()
            connector.abort(error)
            return start

        (first, first_end), (second, second_end), start = in_threads(
            lambda: wait(waits[0]), lambda: wait(waits[1]), abort
        )
        assert first is error and second is error
        assert max(first_end, second_end) - start < 1
        # Also later, and for all that is asked.
        with pytest.raises(AFDPeerError) as raised:
            connector.submit(TRANSFER, *make_input(LAYOUT, TRANSFER))
        assert raised.value is error

    for _ in range(30):
        with connected_pair(LAYOUT) as (attention, ffn):
            if role == "attention":
                handles = [
                    attention.submit(transfer, *make_input(LAYOUT, transfer))
                    for transfer in transfers
                ]
                abort_during_waits(attention, [handle.wait for handle in handles])
            else:
                for transfer in transfers:
                    ffn.post_recv(transfer)
                abort_during_waits(
                    ffn, [functools.partial(ffn.recv, each) for each in transfers]
                )


def test_the_reason_is_preferred_to_a_closed_connection():
    """The control plane knows why the peer hung up, but says so a moment later."""
    with connected_pair(LAYOUT) as (attention, ffn):
        handle = attention.submit(TRANSFER, *make_input(LAYOUT, TRANSFER))
        waiting = threading.Event()
        closed = threading.Event()

        def wait():
            waiting.set()
            with pytest.raises(AFDPeerError) as raised:
                handle.wait()
            return raised.value

        def fail():
            waiting.wait(SOON_S)
            ffn.close()
            closed.set()

        def report():
            closed.wait(SOON_S)
            attention.abort(AFDPeerError("out of memory"))

        error, _, _ = in_threads(wait, fail, report)
        assert "out of memory" in str(error)


@linux_only
@pytest.mark.parametrize("failure", ["none", "waiting", "sending", "expecting"])
def test_threads_and_files_are_given_back(failure):
    with connected_pair(LAYOUT) as (attention, ffn):
        exchange_once(attention, ffn, TRANSFER)
    before = resources()
    with connected_pair(LAYOUT) as (attention, ffn):
        exchange_once(attention, ffn, TRANSFER)
        assert resources() != before
        handle = raised = None
        if failure == "waiting":
            handle = attention.submit(TRANSFER, *make_input(LAYOUT, TRANSFER))
        if failure != "none":
            ffn.abort(AFDPeerError("gone"))
            # The connector does not know yet, and finds out by itself.
            with pytest.raises(AFDPeerError) as raised:
                if handle is not None:
                    handle.wait()
                while failure == "sending":
                    attention._send(
                        attention._lanes[0], TRANSFER, *make_input(LAYOUT, TRANSFER)
                    )
                    attention._lanes[0].sends.clear()
                while failure == "expecting":
                    attention._post_recv(attention._lanes[0], TRANSFER)
            assert FFN_PEER in str(raised.value)
    # Although the error, with a traceback that refers to a lot, is still there.
    assert resources_become(before)
    assert handle is None or raised is not None


@linux_only
def test_memory_does_not_grow_with_traffic():
    layout = AFDLayout(1024, 2, 256, torch.float32, logits_size=8)
    rng = random.Random(0)
    sizes = rng.sample(range(1025), 1000)
    steps = [Step(i + 1, [rows], [8]) for i, rows in enumerate(sizes)]

    def resident_bytes() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with connected_pair(layout) as (attention, ffn):
        buffers = [
            slot.buffer.data_ptr()
            for connector in (attention, ffn)
            for lane in connector._lanes
            for slot in (lane.outgoing, lane.incoming)
        ]
        # The first use of all of a slot is what makes it resident.
        run_steps(attention, ffn, [Step(0, [1024, 1024], [8] * 20)])
        run_steps(attention, ffn, steps[:100])
        before = resident_bytes()
        run_steps(attention, ffn, steps)
        # One slot is 1 MiB: keeping a buffer for each size would take 1 GiB. What the
        # allocator keeps of the outputs is some MiB, or some more.
        assert resident_bytes() - before < 64 << 20
        assert buffers == [
            slot.buffer.data_ptr()
            for connector in (attention, ffn)
            for lane in connector._lanes
            for slot in (lane.outgoing, lane.incoming)
        ]


def test_two_sessions_in_one_process():
    other = AFDLayout(16, 1, 8, torch.float32)
    with (
        connected_pair(LAYOUT) as (attention_1, ffn_1),
        connected_pair(other) as (attention_2, ffn_2),
    ):
        in_threads(
            lambda: run_steps(
                attention_1, ffn_1, [Step(i, [5, 4], [8, 8]) for i in range(50)]
            ),
            lambda: run_steps(
                attention_2, ffn_2, [Step(i, [3], [0, 0]) for i in range(50)]
            ),
        )
        attention_1.abort(AFDPeerError("gone"))
        run_steps(attention_2, ffn_2, [Step(51, [3], [0])])


def listening_sockets() -> set[tuple[str, int]]:
    """Addresses, as /proc has them, and ports on which this process listens."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if match := re.fullmatch(r"socket:\[(\d+)\]", target):
            inodes.add(match[1])
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not os.path.exists(table):
            continue
        with open(table) as file:
            for fields in map(str.split, file.readlines()[1:]):
                if fields[3] == "0A" and fields[9] in inodes:
                    address, port = fields[1].split(":")
                    sockets.add((address, int(port, 16)))
    return sockets


@linux_only
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_listens_on_the_address_of_the_control_connection_only(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.socket(family).bind((address, 0))
    except OSError:
        pytest.skip(f"no {address} here")
    as_in_proc = {
        "127.0.0.1": "0100007F",
        "127.0.0.2": "0200007F",
        "::1": "00000000000000000000000001000000",
    }[address]
    assert sys.byteorder == "little"
    before = listening_sockets()
    with connected_pair(LAYOUT, address=address) as (attention, ffn):
        sockets = listening_sockets() - before
        assert {address for address, _ in sockets} == {as_in_proc}
        exchange_once(attention, ffn, TRANSFER)


@linux_only
def test_strangers_do_not_disturb():
    """Whatever is said to the port of the data connection, the session goes on."""
    rng = random.Random(0)
    before = listening_sockets()
    with connected_pair(LAYOUT) as (attention, ffn):
        ports = {port for _, port in listening_sockets() - before}
        assert ports
        strangers = []
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200), rng.randbytes(4096)):
            for port in ports:
                stranger = socket.create_connection(("127.0.0.1", port), SOON_S)
                stranger.sendall(data)
                strangers.append(stranger)
            exchange_once(attention, ffn, TRANSFER)
        for stranger in strangers:
            stranger.close()
        exchange_once(attention, ffn, TRANSFER)


def test_layouts_must_be_equal():
    other = replace(LAYOUT, max_tokens=65, hidden_dtype=torch.float16)
    errors = []

    def connect(role, layout, end):
        connector = GlooAFDConnector(make_config(), role, layout, f"peer of {role}")
        with pytest.raises(AFDHandshakeError) as raised:
            connector.connect(end, "127.0.0.1", SOON_S)
        connector.close()
        errors.append(str(raised.value))

    attention_end, ffn_end = blob_exchanges()
    in_threads(
        lambda: connect("attention", LAYOUT, attention_end),
        lambda: connect("ffn", other, ffn_end),
    )
    for role, here, there in (("attention", 64, 65), ("ffn", 65, 64)):
        (error,) = [error for error in errors if f"peer of {role}" in error]
        assert f"max_tokens is {there} there and {here} here" in error
        assert "hidden_dtype is torch." in error
        assert "hidden_size" not in error


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xc1garbage",
        msgspec.msgpack.encode({"session": "x"}),
        msgspec.msgpack.encode({"session": 1, "layout": {}, "addresses": {}, "x": 1}),
        msgspec.msgpack.encode({"session": -1, "layout": {}, "addresses": {}}),
    ],
)
def test_a_peer_that_says_something_else(blob):
    connector = GlooAFDConnector(make_config(), "ffn", LAYOUT, ATTENTION_PEER)
    with pytest.raises(AFDHandshakeError, match=re.escape(ATTENTION_PEER)):
        connector.connect(lambda data: blob, "127.0.0.1", SOON_S)
    connector.close()


@pytest.mark.parametrize("addresses", [{}, {"0/1": b""}, {"0/1": b"x", "1/1": b"x"}])
def test_a_peer_without_an_address(addresses):
    def exchange(data: bytes) -> bytes:
        blob = msgspec.msgpack.decode(data)
        return msgspec.msgpack.encode({**blob, "addresses": addresses})

    connector = GlooAFDConnector(make_config(), "ffn", LAYOUT, ATTENTION_PEER)
    with pytest.raises(AFDHandshakeError, match="has sent no gloo address"):
        connector.connect(exchange, "127.0.0.1", SOON_S)
    connector.close()


@pytest.mark.parametrize("error", [AFDPeerError("it left"), KeyboardInterrupt()])
def test_a_failing_control_connection_is_the_error(error):
    def exchange(data: bytes) -> bytes:
        raise error

    connector = GlooAFDConnector(make_config(), "ffn", LAYOUT, ATTENTION_PEER)
    with pytest.raises(type(error)) as raised:
        connector.connect(exchange, "127.0.0.1", SOON_S)
    assert raised.value is error
    connector.close()


def test_an_address_that_is_not_of_this_host():
    connector = GlooAFDConnector(make_config(), "ffn", LAYOUT, ATTENTION_PEER)
    # TEST-NET-1: of nobody.
    with pytest.raises(AFDError, match="192.0.2.1"):
        connector.connect(blob_exchanges()[0], "192.0.2.1", SOON_S)
    connector.close()


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_a_peer_that_leaves_after_the_addresses(role):
    """It has told its address and never connects."""
    attention_end, ffn_end = blob_exchanges()
    config = make_config()
    ends = {"attention": attention_end, "ffn": ffn_end}
    connector = GlooAFDConnector(config, role, LAYOUT, "the peer")
    gone = GlooAFDConnector(
        config, "ffn" if role == "attention" else "attention", LAYOUT, "peer"
    )

    def leave(data: bytes) -> bytes:
        ends[gone.role](data)
        raise AFDError("left")

    def connect():
        with pytest.raises(AFDPeerError, match="the peer (cannot be reached|failed)"):
            connector.connect(ends[role], "127.0.0.1", 0.5)

    def connect_and_leave():
        with pytest.raises(AFDError, match="left"):
            gone.connect(leave, "127.0.0.1", SOON_S)

    start = time.monotonic()
    in_threads(connect, connect_and_leave)
    assert time.monotonic() - start < SOON_S / 2
    connector.close()
    gone.close()


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_connect_takes_no_longer_than_it_may(role):
    """Also if it takes some time to swap the addresses, and nothing comes after."""
    attention_end, ffn_end = blob_exchanges()
    ends = {"attention": attention_end, "ffn": ffn_end}
    peer_role = "ffn" if role == "attention" else "attention"
    connector = GlooAFDConnector(make_config(), role, LAYOUT, "the peer")
    peer = GlooAFDConnector(make_config(), peer_role, LAYOUT, "peer")
    peer._send = lambda *args: None  # type: ignore[method-assign]

    def swap_late(data: bytes) -> bytes:
        time.sleep(2)
        return ends[peer_role](data)

    def connect():
        start = time.monotonic()
        with pytest.raises(AFDPeerError, match="the peer .* connect_timeout_s=3"):
            connector.connect(ends[role], "127.0.0.1", 3)
        return time.monotonic() - start

    def connect_peer():
        peer.connect(swap_late, "127.0.0.1", SOON_S)

    took_s, _ = in_threads(connect, connect_peer)
    assert took_s < 4.5
    connector.close()
    peer.close()


@pytest.mark.parametrize("text", ["a\nERROR \x1b[31m", "x" * 5000])
@pytest.mark.parametrize("place", ["name", "value", "unknown field"])
def test_a_peer_cannot_write_lines_into_the_log(text, place):
    def exchange(data: bytes) -> bytes:
        blob = msgspec.msgpack.decode(data)
        if place == "unknown field":
            blob[text] = 1
        else:
            blob["layout"]["hidden_size" if place == "value" else text] = text
        return msgspec.msgpack.encode(blob)

    connector = GlooAFDConnector(make_config(), "ffn", LAYOUT, ATTENTION_PEER)
    with pytest.raises(AFDHandshakeError) as raised:
        connector.connect(exchange, "127.0.0.1", SOON_S)
    error = str(raised.value)
    assert error.startswith(ATTENTION_PEER) and error.isprintable()
    assert len(error) < 2500
    connector.close()


@linux_only
def test_a_failed_connect_gives_everything_back():
    with connected_pair(LAYOUT):
        pass
    before = resources()
    config = make_config()
    kept = []
    for address in ("127.0.0.1", "192.0.2.1"):
        connector = GlooAFDConnector(config, "ffn", LAYOUT, ATTENTION_PEER)

        def exchange(data: bytes) -> bytes:
            # It is itself, and waits for another to connect.
            blob = msgspec.msgpack.decode(data)
            return msgspec.msgpack.encode(
                {**blob, "addresses": {"0/1": blob["addresses"]["0/0"]}}
            )

        with pytest.raises(AFDPeerError) as raised:
            connector.connect(exchange, address, 0.5)
        connector.close()
        kept.append(raised.value)
    assert resources_become(before)


def test_abort_before_and_during_connect():
    config = make_config()
    connector = GlooAFDConnector(config, "ffn", LAYOUT, ATTENTION_PEER)
    connector.abort(AFDPeerError("too late"))
    with pytest.raises(AFDPeerError, match="too late"):
        connector.connect(blob_exchanges()[0], "127.0.0.1", SOON_S)

    connector = GlooAFDConnector(config, "ffn", LAYOUT, ATTENTION_PEER)

    def exchange(data: bytes) -> bytes:
        connector.abort(AFDPeerError("no longer there"))
        blob = msgspec.msgpack.decode(data)
        blob["addresses"] = {"0/1": blob["addresses"]["0/0"]}
        return msgspec.msgpack.encode(blob)

    with pytest.raises(AFDPeerError, match="no longer there"):
        connector.connect(exchange, "127.0.0.1", 0.5)
    connector.close()


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_abort_while_gloo_connects(role):
    """The peer has sent its address, and is lost before it has the other one."""
    own_end, peer_end = blob_exchanges()
    peer_role = "ffn" if role == "attention" else "attention"
    connector = GlooAFDConnector(make_config(), role, LAYOUT, "the peer")
    peer = GlooAFDConnector(make_config(), peer_role, LAYOUT, "peer")
    error = AFDPeerError("no longer there")
    ended = threading.Event()

    def lose(data: bytes) -> bytes:
        peer_end(data)
        threading.Timer(0.5, connector.abort, [error]).start()
        assert ended.wait(SOON_S)
        raise AFDError("lost")

    def connect() -> float:
        start = time.monotonic()
        try:
            with pytest.raises(AFDPeerError) as raised:
                connector.connect(own_end, "127.0.0.1", 20)
        finally:
            ended.set()
        assert raised.value is error
        return time.monotonic() - start

    def connect_peer() -> None:
        with pytest.raises(AFDError, match="lost"):
            peer.connect(lose, "127.0.0.1", SOON_S)

    took_s, _ = in_threads(connect, connect_peer)
    assert took_s < 10
    connector.close()
    peer.close()
