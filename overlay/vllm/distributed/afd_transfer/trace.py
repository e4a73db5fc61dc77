# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writes what a role does, event by event, to a file in `trace_dir`.

One file holds one session, as seen by one role: a JSON object a line, a header first.
Its schema is fixed, see below, and described in docs/features/afd.md. Whoever runs
the steps only appends to a queue; a thread encodes and writes. So a process that is
killed loses what it did in the last `_FLUSH_INTERVAL_S`, and at most half a line is
left of it.

Times are of CLOCK_MONOTONIC, which processes of one host share. With heartbeats the
peers tell each other their clocks, so that the traces of two hosts can be aligned.
"""

import collections
import itertools
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from vllm.distributed.afd_transfer.afd_connector.base import AFDTransfer
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config.afd import AFDConfig
    from vllm.distributed.afd_transfer.messages import AFDHello, AFDStep

logger = init_logger(__name__)

AFD_TRACE_FORMAT = "vllm-afd-trace"
AFD_TRACE_VERSION = 1

_FLUSH_INTERVAL_S = 0.5
# Lines not yet written, about 150 bytes each. More are dropped, and counted.
_MAX_QUEUED = 200_000
# Encoded at once. Nothing else runs in this process meanwhile.
_CHUNK = 1000
_CLOSE_TIMEOUT_S = 5.0

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Of this process, to tell apart the files of its sessions.
_session_numbers = itertools.count(1)

# - compute: what the role itself computes. On attention, what precedes the MoE layer;
#   with the number of layers as its layer, what follows the last one.
# - send: handing over to the connector.
# - yield: attention gave control to the other stage, until it got it back.
# - wait: nothing to do but wait for the peer.
# - recv: from posting the receive until what was expected is there.
AFDTraceEventName: TypeAlias = Literal["compute", "send", "yield", "wait", "recv"]


class _Line(msgspec.Struct, tag_field="type", gc=False):  # type: ignore[call-arg]
    """Base of all lines; `type` says which it is."""


class AFDTraceHeader(_Line, tag="header", kw_only=True):  # type: ignore[call-arg]
    format: str
    version: int
    role: str
    rank: int
    pid: int
    host: str
    boot_id: str
    """Equal on two hosts exactly if they are one, with one clock. May be empty."""
    peer: str
    vllm_version: str
    layers: list[str]
    """Names of the MoE layers. Their indices are the `layer` of events."""
    monotonic_ns: int
    realtime_ns: int
    """Taken together with `monotonic_ns`."""


class AFDTraceEvent(_Line, tag="event"):  # type: ignore[call-arg]
    event: AFDTraceEventName
    begin_ns: int
    end_ns: int
    seq: int
    layer: int
    stage: int
    rows: int


class AFDTraceStep(_Line, tag="step"):  # type: ignore[call-arg]
    """A step that the model ran to its end. Comes after its events."""

    kind: str
    begin_ns: int
    end_ns: int
    seq: int
    stage_tokens: list[int]


class AFDTraceClock(_Line, tag="clock"):  # type: ignore[call-arg]
    """The peer's clock, from a heartbeat: its value, less ours at the same time. It
    is exact to half of the round trip."""

    monotonic_ns: int
    peer_offset_ns: int
    round_trip_ns: int


class AFDTraceDropped(_Line, tag="dropped"):  # type: ignore[call-arg]
    """Lines that are missing here, as the disk was too slow."""

    count: int


class AFDTraceEnd(_Line, tag="end"):  # type: ignore[call-arg]
    """The last line of a file that was closed."""

    monotonic_ns: int


class AFDTrace:
    """The trace of one session.

    Steps are traced by one thread at a time. Each stage has a cursor, the end of its
    last event, which is where its next one begins.
    """

    def __init__(self, path: Path, header: AFDTraceHeader):
        """Create the file.

        Raises:
            OSError: It cannot be created.

        """
        self.path = path
        self._num_layers = len(header.layers)
        self._queue: collections.deque[_Line] = collections.deque([header])
        self._capacity = _MAX_QUEUED
        self._dropped = 0
        self._encoder = msgspec.json.Encoder()
        # Not through a link, nor over what is there.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._fd = os.open(path, flags, 0o644)

        self._step: AFDStep | None = None
        self._begin_ns = 0
        self._cursor: list[int] = []
        self._posted: list[int] = []
        self._started: list[bool] = []
        # The stage that has had its last answer.
        self._last: AFDTransfer | None = None

        self._stop = threading.Event()
        self._writer = threading.Thread(
            target=self._write, name="afd-trace", daemon=True
        )
        self._writer.start()

    @classmethod
    def open(
        cls, config: "AFDConfig", hello: "AFDHello", peer: str
    ) -> "AFDTrace | None":
        """Begin the trace of a session, if traces are wanted and can be written.

        Args:
            config: Has the directory.
            hello: What this instance told the peer.
            peer: Names the peer.

        """
        if config.trace_dir is None:
            return None
        header = AFDTraceHeader(
            format=AFD_TRACE_FORMAT,
            version=AFD_TRACE_VERSION,
            role=hello.role,
            rank=hello.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            boot_id=_boot_id(),
            peer=peer,
            vllm_version=hello.vllm_version,
            layers=[layer.name for layer in hello.layers],
            monotonic_ns=time.monotonic_ns(),
            realtime_ns=time.time_ns(),
        )
        name = (
            f"afd-{hello.role}-{hello.rank}-{time.strftime('%Y%m%d-%H%M%S')}-"
            f"{os.getpid()}-{next(_session_numbers)}.jsonl"
        )
        try:
            trace = cls(Path(config.trace_dir) / name, header)
        except OSError as e:
            # A server is worth more than its trace.
            logger.error("No AFD trace is written: %s", e)
            return None
        logger.info("AFD trace: %s", trace.path)
        return trace

    # What the roles call.

    def begin_step(self, step: "AFDStep") -> None:
        """A step begins. FFN expects the first layer of each stage from here on."""
        num_stages = len(step.stage_tokens)
        now = time.monotonic_ns()
        self._step = step
        self._begin_ns = now
        self._cursor = [now] * num_stages
        self._posted = [now] * num_stages
        self._started = [False] * num_stages
        self._last = None

    def begin(self, stage: int) -> None:
        """Nothing of the stage was going on before this."""
        self._cursor[stage] = time.monotonic_ns()

    def end(self, event: AFDTraceEventName, transfer: AFDTransfer) -> None:
        """The stage has done `event` since its last one, and ends it."""
        now = time.monotonic_ns()
        stage = transfer.stage
        self._put_event(event, self._cursor[stage], now, transfer)
        self._cursor[stage] = now

    def posted(self, stage: int) -> None:
        """A receive of the stage is posted."""
        self._cursor[stage] = self._posted[stage] = time.monotonic_ns()

    def received(self, transfer: AFDTransfer) -> None:
        """What the stage was waiting for is there."""
        self.end("wait", transfer)
        stage = transfer.stage
        self._put_event("recv", self._posted[stage], self._cursor[stage], transfer)

    def handing_off(self, transfer: AFDTransfer) -> None:
        """On attention, a stage has sent, and gives control to the other stage."""
        self.end("send", transfer)
        stage = transfer.stage
        now = self._posted[stage] = self._cursor[stage]
        self._started[stage] = True
        for other, started in enumerate(self._started):
            if not started:
                self._cursor[other] = now

    def handed_back(self, transfer: AFDTransfer) -> None:
        """On attention, a stage has control again."""
        if transfer.num_stages > 1:
            self.end("yield", transfer)
            self._end_stage(self._cursor[transfer.stage])

    def answered(self, transfer: AFDTransfer) -> None:
        """On attention, a stage has the answer to what it sent."""
        self.received(transfer)
        if transfer.layer + 1 == self._num_layers:
            self._last = transfer

    def _end_stage(self, now: int) -> None:
        """A stage that has had its last answer has ended by now, if there is one."""
        last, self._last = self._last, None
        if last is not None:
            self._put_event(
                "compute", self._cursor[last.stage], now, last, self._num_layers
            )

    def end_step(self) -> None:
        """The step has ended."""
        step = self._step
        if step is None:
            return
        now = time.monotonic_ns()
        self._end_stage(now)
        self._put(
            AFDTraceStep(step.kind, self._begin_ns, now, step.seq, step.stage_tokens)
        )

    def clock(self, monotonic_ns: int, peer_offset_ns: int, round_trip_ns: int) -> None:
        """A heartbeat told the peer's clock. For any thread."""
        self._put(AFDTraceClock(monotonic_ns, peer_offset_ns, round_trip_ns))

    def close(self) -> None:
        """Write what is left. May be called again."""
        if self._stop.is_set():
            return
        self._capacity = 0
        self._note_dropped()
        self._queue.append(AFDTraceEnd(time.monotonic_ns()))
        self._stop.set()
        self._writer.join(_CLOSE_TIMEOUT_S)

    # Internals.

    def _put_event(
        self,
        event: AFDTraceEventName,
        begin_ns: int,
        end_ns: int,
        transfer: AFDTransfer,
        layer: int | None = None,
    ) -> None:
        self._put(
            AFDTraceEvent(
                event,
                begin_ns,
                end_ns,
                transfer.seq,
                transfer.layer if layer is None else layer,
                transfer.stage,
                transfer.rows,
            )
        )

    def _put(self, line: _Line) -> None:
        if len(self._queue) < self._capacity:
            self._queue.append(line)
        else:
            self._dropped += 1

    def _note_dropped(self) -> None:
        dropped, self._dropped = self._dropped, 0
        if dropped:
            self._queue.append(AFDTraceDropped(dropped))

    def _write(self) -> None:
        try:
            stopped = False
            while not stopped:
                # Looked at first, so that nothing put before is left behind.
                stopped = self._stop.wait(_FLUSH_INTERVAL_S)
                self._flush()
        except OSError as e:
            self._capacity = 0
            self._queue.clear()
            logger.error("The AFD trace %s ends here: %s", self.path, e)
        finally:
            os.close(self._fd)

    def _flush(self) -> None:
        if not self._stop.is_set():
            self._note_dropped()
        while self._queue:
            count = min(len(self._queue), _CHUNK)
            lines = [self._queue.popleft() for _ in range(count)]
            data = memoryview(self._encoder.encode_lines(lines))
            while data:
                data = data[os.write(self._fd, data) :]


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
