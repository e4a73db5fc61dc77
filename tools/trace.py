"""Trace files of the two AFD roles: read, checked, put on one clock, summed up.

The files are written with `trace_dir` in the AFD config; docs/features/afd.md of the
patched vLLM describes the format.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tools.errors import WorkshopError

FORMAT, VERSION = "vllm-afd-trace", 1
ROLES = ("attention", "ffn")
EVENTS = ("compute", "send", "yield", "wait", "recv")

_FIELDS: dict[str, dict[str, type]] = {
    "event": {
        "event": str,
        "begin_ns": int,
        "end_ns": int,
        "seq": int,
        "layer": int,
        "stage": int,
        "rows": int,
    },
    "step": {
        "kind": str,
        "begin_ns": int,
        "end_ns": int,
        "seq": int,
        "stage_tokens": list,
    },
    "clock": {"monotonic_ns": int, "peer_offset_ns": int, "round_trip_ns": int},
    "dropped": {"count": int},
    "end": {"monotonic_ns": int},
}
_HEADER: dict[str, type] = {
    "role": str,
    "rank": int,
    "pid": int,
    "host": str,
    "boot_id": str,
    "peer": str,
    "vllm_version": str,
    "layers": list,
    "monotonic_ns": int,
    "realtime_ns": int,
}
_STAGES = 2
# Clocks that were compared with the hosts' own idea of the time may be off by this.
_REALTIME_ERROR_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Event:
    """What a role did from `begin` to `end`, in nanoseconds."""

    role: str
    name: str
    begin: int
    end: int
    seq: int
    layer: int
    stage: int
    rows: int

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Step:
    """A step that a role ran to its end."""

    role: str
    kind: str
    begin: int
    end: int
    seq: int
    rows: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass
class Trace:
    """One file.

    Attributes:
        clocks: Clock of the peer less that of this role, and the round trip in which
            it was measured; both in nanoseconds.
        notes: What is missing of it, in words.
    """

    path: Path
    header: Mapping[str, Any]
    events: list[Event] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    clocks: list[tuple[int, int]] = field(default_factory=list)
    dropped: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def role(self) -> str:
        return self.header["role"]


@dataclass(frozen=True)
class Session:
    """Both traces of a session, on the clock of the attention role.

    Attributes:
        alignment: How the clocks were brought together, in words.
        error_ns: How far they may be apart.
    """

    attention: Trace
    ffn: Trace
    alignment: str
    error_ns: int

    @property
    def traces(self) -> tuple[Trace, Trace]:
        return self.attention, self.ffn

    @property
    def layers(self) -> list[str]:
        return self.attention.header["layers"]

    @property
    def notes(self) -> list[str]:
        return [note for each in self.traces for note in each.notes]

    def events(self) -> list[Event]:
        """Those of both roles, in the order in which they began."""
        both = [*self.attention.events, *self.ffn.events]
        return sorted(both, key=lambda each: (each.begin, each.end))


def read(path: Path) -> Trace:
    """Read a file, complete or as a killed process left it.

    Raises:
        WorkshopError: It is no such file, or damaged. Names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkshopError(f"{path} cannot be read.", str(error)) from None
    lines = text.split("\n")
    cut = lines.pop()
    if not lines:
        why = "It is empty." if not cut else "Its first line is not complete."
        raise _bad(path, 1, why)
    trace = Trace(path, _header(path, lines[0]))
    layers = len(trace.header["layers"])
    ended = False
    for number, line in enumerate(lines[1:], 2):
        try:
            found = json.loads(line)
        except ValueError as error:
            raise _bad(path, number, f"It is not JSON: {error}.") from None
        kind = _check(path, number, found)
        if ended:
            raise _bad(path, number, "There is a line after the one that ends it.")
        if kind == "event":
            trace.events.append(_event(path, number, found, trace.role, layers))
        elif kind == "step":
            trace.steps.append(_step(path, number, found, trace.role))
        elif kind == "clock":
            trace.clocks.append((found["peer_offset_ns"], found["round_trip_ns"]))
        elif kind == "dropped":
            trace.dropped += found["count"]
        ended = kind == "end"
    if cut:
        trace.notes.append(
            f"{path.name}: line {len(lines) + 1}, the last one, is not complete and "
            "was left out, as after a kill."
        )
    elif not ended:
        trace.notes.append(
            f"{path.name} was not closed: its role was killed, or still runs."
        )
    if trace.dropped:
        trace.notes.append(
            f"{path.name}: the role could not write {trace.dropped} lines; sums are "
            "too small."
        )
    return trace


def join(first: Trace, second: Trace) -> Session:
    """Bring the traces of both roles together.

    Raises:
        WorkshopError: They are of the same role, or not of one session.
    """
    if first.role == second.role:
        raise WorkshopError(
            f"Both files are of the {first.role} role.",
            f"{first.path}: line 1, role {first.role}\n"
            f"{second.path}: line 1, role {second.role}",
            "Give one file of each role.",
        )
    attention, ffn = sorted((first, second), key=lambda each: ROLES.index(each.role))
    # FFN writes a file for each attention rank that it serves.
    served = re.search(r"\(rank (\d+)\)", ffn.header["peer"])
    if served and int(served[1]) != (rank := attention.header["rank"]):
        raise _not_one(
            attention, ffn, f"FFN served attention rank {served[1]}, not {rank}."
        )
    if attention.header["layers"] != ffn.header["layers"]:
        raise _not_one(attention, ffn, "Their MoE layers differ (line 1 of each).")
    offset, error, alignment = _offset(attention, ffn)
    moved = replace(
        ffn,
        events=[
            replace(each, begin=each.begin - offset, end=each.end - offset)
            for each in ffn.events
        ],
        steps=[
            replace(each, begin=each.begin - offset, end=each.end - offset)
            for each in ffn.steps
        ],
    )
    session = Session(attention, moved, alignment, error)
    _check_session(session)
    return session


def load(files: Sequence[Path]) -> Session:
    """Read two files, in any order, and bring them together."""
    first, second = files
    return join(read(first), read(second))


def last_steps(session: Session, most: int) -> Session:
    """The last steps, as many as have no more than `most` events."""
    events = session.events()
    if len(events) <= most:
        return session
    counts: dict[int, int] = defaultdict(int)
    for each in events:
        counts[each.seq] += 1
    total, first = 0, max(counts)
    for seq in sorted(counts, reverse=True):
        total += counts[seq]
        if total > most:
            break
        first = seq
    return cut(session, first, max(counts))


def cut(session: Session, first: int, last: int) -> Session:
    """The steps from `first` to `last`, both included."""

    def some(trace: Trace) -> Trace:
        return replace(
            trace,
            events=[each for each in trace.events if first <= each.seq <= last],
            steps=[each for each in trace.steps if first <= each.seq <= last],
        )

    return replace(session, attention=some(session.attention), ffn=some(session.ffn))


def _bad(path: Path, number: int, why: str) -> WorkshopError:
    return WorkshopError(
        f"{path}, line {number}: not a line of an AFD trace.",
        why,
        "Take the files that vLLM writes with trace_dir, unchanged.",
    )


def _header(path: Path, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise _bad(path, 1, f"It is not JSON: {error}.") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise _bad(path, 1, f'It is no header with "format": "{FORMAT}".')
    if found.get("version") != VERSION:
        raise _bad(
            path,
            1,
            f"It has version {found.get('version')!r} of the format; this program "
            f"knows version {VERSION}.",
        )
    _check_fields(path, 1, found, _HEADER)
    if found["role"] not in ROLES:
        raise _bad(path, 1, f"role is {found['role']!r}, not {' or '.join(ROLES)}.")
    if not all(isinstance(each, str) for each in found["layers"]):
        raise _bad(path, 1, "layers is not a list of names.")
    return found


def _check(path: Path, number: int, found: Any) -> str:
    kind = found.get("type") if isinstance(found, dict) else None
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        known = ", ".join(_FIELDS)
        raise _bad(path, number, f"type is {kind!r}, not one of {known}.")
    _check_fields(path, number, found, fields)
    return kind


def _check_fields(
    path: Path, number: int, found: Mapping[str, Any], fields: Mapping[str, type]
) -> None:
    for name, kind in fields.items():
        # A bool is an int, but not here.
        if type(found.get(name)) is not kind:
            raise _bad(
                path, number, f"{name} is {found.get(name)!r}, not {kind.__name__}."
            )


def _check_times(path: Path, number: int, found: Mapping[str, Any]) -> None:
    if found["begin_ns"] > found["end_ns"]:
        raise _bad(path, number, "It ends before it begins.")


def _event(
    path: Path, number: int, found: Mapping[str, Any], role: str, layers: int
) -> Event:
    _check_times(path, number, found)
    if found["event"] not in EVENTS:
        known = ", ".join(EVENTS)
        raise _bad(path, number, f"event is {found['event']!r}, not one of {known}.")
    for name, most in (("layer", layers), ("stage", _STAGES - 1)):
        if not 0 <= found[name] <= most:
            raise _bad(path, number, f"{name} is {found[name]}, not 0 to {most}.")
    return Event(
        role,
        found["event"],
        found["begin_ns"],
        found["end_ns"],
        found["seq"],
        found["layer"],
        found["stage"],
        found["rows"],
    )


def _step(path: Path, number: int, found: Mapping[str, Any], role: str) -> Step:
    _check_times(path, number, found)
    rows = found["stage_tokens"]
    if not 1 <= len(rows) <= _STAGES or not all(type(each) is int for each in rows):
        raise _bad(path, number, f"stage_tokens is {rows!r}, not 1 or 2 numbers.")
    return Step(
        role,
        found["kind"],
        found["begin_ns"],
        found["end_ns"],
        found["seq"],
        tuple(rows),
    )


def _offset(attention: Trace, ffn: Trace) -> tuple[int, int, str]:
    """FFN's clock less attention's, how exact that is, and how it is known."""
    boots = {attention.header["boot_id"], ffn.header["boot_id"]}
    if len(boots) == 1 and boots != {""}:
        return 0, 0, "both roles ran on one host, with one clock"
    clocks = [(trip, offset) for offset, trip in attention.clocks]
    clocks += [(trip, -offset) for offset, trip in ffn.clocks]
    if clocks:
        trip, offset = min(clocks, key=lambda each: abs(each[0]))
        error = abs(trip) // 2
        return (
            offset,
            error,
            f"two hosts, clocks compared by {len(clocks)} heartbeats, to within "
            f"{error / 1000:,.0f} us",
        )
    first, second = (
        each.header["realtime_ns"] - each.header["monotonic_ns"]
        for each in (attention, ffn)
    )
    return (
        first - second,
        _REALTIME_ERROR_NS,
        "two hosts without a heartbeat that compares their clocks: aligned by each "
        "host's own time of day, as exact as the hosts are synchronised",
    )


def _check_session(session: Session) -> None:
    """That both files tell of the same steps at the same time."""
    attention, ffn = session.traces
    steps = {each.seq: each for each in attention.steps}
    common = [(steps[each.seq], each) for each in ffn.steps if each.seq in steps]
    if steps and ffn.steps and not common:
        raise _not_one(attention, ffn, "They have no step in common.")
    for ours, theirs in common:
        if ours.rows != theirs.rows:
            raise _not_one(
                attention,
                ffn,
                f"Step {ours.seq} has {list(ours.rows)} rows on attention, "
                f"{list(theirs.rows)} on ffn.",
            )
        late = max(ours.begin - theirs.end, theirs.begin - ours.end)
        if late > session.error_ns:
            raise _not_one(
                attention,
                ffn,
                f"Step {ours.seq} of one ended {late / 1e9:.3f} s before that of the "
                "other began.",
            )


def _not_one(attention: Trace, ffn: Trace, why: str) -> WorkshopError:
    return WorkshopError(
        "The two files are not of one session.",
        f"{why}\nattention: {attention.path}\nffn: {ffn.path}",
        "Each session has a file of its own: take two that began at the same time.",
    )


# What a session tells.


@dataclass(frozen=True)
class Overlap:
    """How well the halves of split steps overlapped, from one trace.

    All times are the mean of a split step, in nanoseconds.

    Attributes:
        steps: Split steps that both roles ran to their end.
        measured: From the begin to the end of a step.
        serial: The same computations one after the other, without any transfer.
        ideal: The same computations in the two-machine, two-stage schedule, the fill
            included, without any transfer.
        attention, ffn: Time in which the role computed.
        both: Time in which both computed at once.
        one_stage: Steps of as many rows that were not split, if the trace has such
            for a part of the split steps; `compared` says for how many.
        compared: Split steps for which there are such, and their own measured and
            ideal time.
    """

    steps: int
    measured: float
    serial: float
    ideal: float
    attention: float
    ffn: float
    both: float
    one_stage: float | None = None
    compared: tuple[int, float, float] | None = None

    @property
    def schedule_efficiency(self) -> float | None:
        """(serial - measured) / (serial - ideal): 1 is the ideal schedule, 0 none."""
        return _ratio(self.serial, self.measured, self.ideal)

    @property
    def overlap_efficiency(self) -> float | None:
        """(one stage - two stages) / (one stage - ideal), of steps of equal rows."""
        if self.one_stage is None or self.compared is None:
            return None
        return _ratio(self.one_stage, *self.compared[1:])


@dataclass(frozen=True)
class Summary:
    """What `summarise` finds.

    Attributes:
        seconds: From the first to the last event.
        step_time: Sum of the lengths of all steps, on attention, in nanoseconds.
        events, exchanges: How many; an exchange is a layer of a stage of a step.
        early: Exchanges in which something was received before it was sent.
        steps: By kind and number of stages, the number and the mean nanoseconds.
        times: By role and event, the sum of nanoseconds.
        waits: The longest, first the longest of all.
        overlap: Of split steps that served requests; of all, if none did; None if no
            step was split.
    """

    seconds: float
    step_time: int
    events: int
    exchanges: int
    early: int
    steps: Mapping[tuple[str, int], tuple[int, float]]
    times: Mapping[tuple[str, str], int]
    waits: Sequence[Event]
    overlap: Overlap | None


def summarise(session: Session, most_waits: int = 10) -> Summary:
    """Sum up a session."""
    events = session.events()
    times: dict[tuple[str, str], int] = defaultdict(int)
    for each in events:
        times[each.role, each.name] += each.length
    lengths: dict[tuple[str, int], list[int]] = defaultdict(list)
    for step in session.attention.steps:
        lengths[step.kind, len(step.rows)].append(step.length)
    exchanges, early = _exchanges(session)
    waits = sorted((each for each in events if each.name == "wait"), key=_longest)
    span = max((e.end for e in events), default=0) - min(
        (e.begin for e in events), default=0
    )
    return Summary(
        seconds=span / 1e9,
        step_time=sum(each.length for each in session.attention.steps),
        events=len(events),
        exchanges=exchanges,
        early=early,
        steps={
            key: (len(each), statistics.fmean(each))
            for key, each in sorted(lengths.items())
        },
        times=times,
        waits=waits[:most_waits],
        overlap=_overlap(session),
    )


def _longest(event: Event) -> tuple[int, int]:
    return -event.length, event.begin


def _exchanges(session: Session) -> tuple[int, int]:
    """Number of exchanges, and of those with a receive before its send."""
    sends, recvs = (
        {
            (each.role, each.seq, each.layer, each.stage): each
            for trace in session.traces
            for each in trace.events
            if each.name == name
        }
        for name in ("send", "recv")
    )
    early = 0
    for (role, *key), sent in sends.items():
        other = ROLES[1 - ROLES.index(role)]
        got = recvs.get((other, *key))
        if got is not None and got.end + session.error_ns < sent.begin:
            early += 1
    return sum(role == "attention" for role, *_ in sends), early


def _overlap(session: Session) -> Overlap | None:
    computed: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for trace in session.traces:
        for each in trace.events:
            if each.name == "compute":
                computed[each.role, each.seq].append(each)
    done = {each.seq for each in session.ffn.steps}
    steps = [each for each in session.attention.steps if each.seq in done]
    split = [each for each in steps if len(each.rows) == 2]
    if serving := [each for each in split if each.kind == "eager"]:
        split = serving
    if not split:
        return None
    whole: dict[int, list[int]] = defaultdict(list)
    for each in steps:
        if len(each.rows) == 1 and each.kind == split[0].kind:
            whole[sum(each.rows)].append(each.length)

    rows: list[tuple[float, ...]] = []
    compared: list[tuple[float, float, float]] = []
    for each in split:
        ours, theirs = computed["attention", each.seq], computed["ffn", each.seq]
        ideal = ideal_time(ours, theirs, len(session.layers))
        busy = [sum(e.length for e in part) for part in (ours, theirs)]
        rows.append((each.length, sum(busy), ideal, *busy, _both(ours, theirs)))
        if same := whole.get(sum(each.rows)):
            compared.append((statistics.fmean(same), each.length, ideal))
    means = [statistics.fmean(column) for column in zip(*rows, strict=True)]
    if not compared:
        return Overlap(len(split), *means)
    one_stage, measured, ideal = (
        statistics.fmean(column) for column in zip(*compared, strict=True)
    )
    return Overlap(len(split), *means, one_stage, (len(compared), measured, ideal))


def ideal_time(ours: Iterable[Event], theirs: Iterable[Event], layers: int) -> int:
    """Length of the two-machine schedule of a step's computations.

    Each role runs the layers in order, and within a layer the stages; a computation
    begins when its role is free and its input is there, which takes no time.

    Args:
        ours: What attention computed in the step; layer `layers` is what follows.
        theirs: What FFN computed.
        layers: Number of MoE layers.
    """
    attention: dict[tuple[int, int], int] = defaultdict(int)
    ffn: dict[tuple[int, int], int] = defaultdict(int)
    for part, events in ((attention, ours), (ffn, theirs)):
        for each in events:
            part[each.layer, each.stage] += each.length
    stages = sorted({stage for _, stage in attention})
    attention_free = ffn_free = 0
    ready = dict.fromkeys(stages, 0)
    for layer in range(layers + 1):
        for stage in stages:
            attention_free = max(attention_free, ready[stage])
            attention_free += attention[layer, stage]
            if layer < layers:
                ffn_free = max(ffn_free, attention_free) + ffn[layer, stage]
                ready[stage] = ffn_free
    return attention_free


def _both(ours: Sequence[Event], theirs: Sequence[Event]) -> int:
    """Time in which both roles computed."""
    total = at = 0
    ours, theirs = (
        sorted(each, key=lambda event: event.begin) for each in (ours, theirs)
    )
    for each in ours:
        while at < len(theirs) and theirs[at].end <= each.begin:
            at += 1
        for other in theirs[at:]:
            if other.begin >= each.end:
                break
            total += min(each.end, other.end) - max(each.begin, other.begin)
    return total


def _ratio(slow: float, measured: float, ideal: float) -> float | None:
    return (slow - measured) / (slow - ideal) if slow > ideal else None
