# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The file of an AFD trace: what is in it, and what becomes of it."""

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import regex as re

from vllm.distributed.afd_transfer import trace as trace_module
from vllm.distributed.afd_transfer.afd_connector.base import AFDTransfer
from vllm.distributed.afd_transfer.messages import AFDHeartbeat, AFDStep, encode
from vllm.distributed.afd_transfer.trace import AFDTrace

from .control_utils import make_config, session, session_with_raw_peer
from .message_utils import TIMEOUT_S, hello, wait_until

pytestmark = [pytest.mark.cpu_test, pytest.mark.skip_global_cleanup]

TRANSFER = AFDTransfer(seq=1, layer=0, stage=0, num_stages=1, rows=3)


def open_trace(folder: Path, role: str = "attention") -> AFDTrace:
    config = make_config(role, trace_dir=str(folder))
    trace = AFDTrace.open(config, hello(role), "the peer")
    assert trace is not None
    return trace


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_off_by_default(tmp_path: Path):
    threads = threading.active_count()
    assert AFDTrace.open(make_config("ffn"), hello("ffn"), "the peer") is None
    assert threading.active_count() == threads


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_header_and_end(tmp_path: Path, role: str):
    before = time.monotonic_ns(), time.time_ns()
    trace = open_trace(tmp_path, role)
    trace.close()
    trace.close()
    header, end = read(trace.path)
    after = time.monotonic_ns(), time.time_ns()

    assert header == {
        "type": "header",
        "format": "vllm-afd-trace",
        "version": 1,
        "role": role,
        "rank": 0,
        "pid": os.getpid(),
        "host": header["host"],
        "boot_id": header["boot_id"],
        "peer": "the peer",
        "vllm_version": hello(role).vllm_version,
        "layers": [layer.name for layer in hello(role).layers],
        "monotonic_ns": header["monotonic_ns"],
        "realtime_ns": header["realtime_ns"],
    }
    assert before[0] <= header["monotonic_ns"] <= end["monotonic_ns"] <= after[0]
    assert before[1] <= header["realtime_ns"] <= after[1]
    assert end["type"] == "end"
    assert re.fullmatch(
        rf"afd-{role}-0-\d{{8}}-\d{{6}}-{os.getpid()}-\d+\.jsonl", trace.path.name
    )
    assert trace.path.stat().st_mode & 0o022 == 0


def test_each_session_has_a_file(tmp_path: Path):
    traces = [open_trace(tmp_path) for _ in range(3)]
    for trace in traces:
        trace.close()
    assert len(list(tmp_path.iterdir())) == 3


def test_nothing_is_written_over(tmp_path: Path):
    taken = tmp_path / "taken"
    (tmp_path / "victim").write_text("precious")
    taken.symlink_to(tmp_path / "victim")
    header = trace_module.AFDTraceHeader(
        format="", version=1, role="ffn", rank=0, pid=1, host="", boot_id="",
        peer="", vllm_version="", layers=[], monotonic_ns=0, realtime_ns=0,
    )  # fmt: skip
    with pytest.raises(FileExistsError):
        AFDTrace(taken, header)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_file_that_cannot_be_made_costs_the_trace_only(
    tmp_path: Path, caplog_vllm: pytest.LogCaptureFixture
):
    config = make_config("ffn", trace_dir=str(tmp_path))
    tmp_path.rmdir()
    assert AFDTrace.open(config, hello("ffn"), "the peer") is None
    assert str(tmp_path) in caplog_vllm.text


def test_what_cannot_be_written_is_given_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog_vllm: pytest.LogCaptureFixture,
):
    def fail(fd: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    trace = open_trace(tmp_path)
    monkeypatch.setattr(trace_module.os, "write", fail)
    trace.begin_step(AFDStep(seq=1, kind="eager", stage_tokens=[3]))
    trace._writer.join(TIMEOUT_S)
    assert "No space left on device" in caplog_vllm.text
    assert str(trace.path) in caplog_vllm.text
    for _ in range(3):
        trace.end("compute", TRANSFER)
    assert not trace._queue
    trace.close()


def test_a_slow_disk_costs_lines_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trace_module, "_MAX_QUEUED", 10)
    monkeypatch.setattr(trace_module, "_FLUSH_INTERVAL_S", 3600)
    trace = open_trace(tmp_path)
    trace.begin_step(AFDStep(seq=1, kind="eager", stage_tokens=[3]))
    for _ in range(50):
        trace.end("compute", TRANSFER)
    assert len(trace._queue) == 10
    trace.close()
    lines = read(trace.path)
    assert [line["type"] for line in lines] == (
        ["header"] + 9 * ["event"] + ["dropped", "end"]
    )
    assert lines[-2]["count"] == 41


def test_written_while_it_goes_on(tmp_path: Path):
    trace = open_trace(tmp_path)
    trace.begin_step(AFDStep(seq=1, kind="eager", stage_tokens=[3]))
    trace.end("compute", TRANSFER)
    wait_until(lambda: len(read(trace.path)) == 2, "the event is written")
    trace.close()


def test_closing_loses_nothing(tmp_path: Path):
    trace = open_trace(tmp_path)
    trace.begin_step(AFDStep(seq=1, kind="eager", stage_tokens=[3]))
    count = 3 * trace_module._CHUNK + 7
    for _ in range(count):
        trace.end("compute", TRANSFER)
    trace.end_step()
    trace.close()
    # Whoever is late changes nothing.
    trace.end("compute", TRANSFER)
    trace.clock(1, 2, 3)
    kinds = [line["type"] for line in read(trace.path)]
    assert kinds == ["header"] + count * ["event"] + ["step", "end"]


def _trace_on_and_on(folder: str, pipe: Any) -> None:
    trace = open_trace(Path(folder))
    trace.begin_step(AFDStep(seq=1, kind="eager", stage_tokens=[3]))
    pipe.send(str(trace.path))
    while True:
        trace.end("compute", TRANSFER)
        time.sleep(0.001)


def test_killed_process_leaves_all_but_the_last_moment(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_trace_on_and_on, args=(str(tmp_path), theirs), daemon=True
    )
    process.start()
    assert process.pid is not None
    try:
        assert ours.poll(TIMEOUT_S)
        path = Path(ours.recv())
        wait_until(
            lambda: len(path.read_text().splitlines()) > 20, "events are written"
        )
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join(TIMEOUT_S)
    text = path.read_text()
    lines = [json.loads(line) for line in text[: text.rindex("\n")].splitlines()]
    assert lines[0]["type"] == "header"
    events = lines[1:]
    # Without a gap, each where the last one ended.
    assert all(a["end_ns"] == b["begin_ns"] for a, b in zip(events, events[1:]))


def test_heartbeats_tell_the_clocks_of_both():
    """On one host, where the difference is known: none."""
    seen: dict[str, list[tuple[int, int, int]]] = {"attention": [], "ffn": []}
    with session(heartbeat_timeout_s=2) as ends:
        for role, control in zip(seen, ends):
            control.watch_clock(lambda *args, role=role: seen[role].append(args))
        wait_until(
            lambda: all(len(each) >= 3 for each in seen.values()), "clocks are told"
        )
    for each in seen.values():
        for now, offset, round_trip in each:
            assert 0 <= time.monotonic_ns() - now < TIMEOUT_S * 10**9
            assert round_trip >= 0
            assert abs(offset) <= round_trip // 2 + 1


def test_a_peer_with_another_clock():
    other_ns = 5 * 10**12
    seen: list[tuple[int, int, int]] = []
    with session_with_raw_peer("attention", heartbeat_timeout_s=2) as (control, raw):
        control.watch_clock(lambda *args: seen.append(args))
        beat = raw.channel.recv(AFDHeartbeat, timeout_s=TIMEOUT_S)
        assert beat.sent_ns is not None and beat.echo_ns is None
        received_ns = time.monotonic_ns() + other_ns
        time.sleep(0.2)
        sent_ns = time.monotonic_ns() + other_ns
        raw.send_raw(
            encode(
                AFDHeartbeat(
                    sent_ns=sent_ns, echo_ns=beat.sent_ns, received_ns=received_ns
                )
            )
        )
        wait_until(lambda: bool(seen), "the clock is told")
        # What it held the heartbeat for is no part of the round trip.
        ((_, offset, round_trip),) = seen
        assert abs(offset - other_ns) <= round_trip // 2 + 1
        beat = raw.channel.recv(AFDHeartbeat, timeout_s=TIMEOUT_S)
        while beat.echo_ns is None:
            beat = raw.channel.recv(AFDHeartbeat, timeout_s=TIMEOUT_S)
        assert beat.echo_ns == sent_ns
        # A heartbeat without times is one, too.
        raw.send_raw(encode(AFDHeartbeat()))
        raw.send_raw(encode(AFDHeartbeat(sent_ns=0, echo_ns=2**62 - 1)))
        control.check()


def test_a_clock_out_of_range_is_refused():
    with session_with_raw_peer("attention") as (control, raw):
        raw.send_raw(encode(AFDHeartbeat(sent_ns=2**62)))
        wait_until(lambda: control.error is not None, "it has failed")
