"""Shows what both AFD roles did: from two traces, a page, a picture, and Perfetto's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tools.errors import WorkshopError
from tools.layout import Layout
from tools.trace import (
    EVENTS,
    ROLES,
    Event,
    Overlap,
    Session,
    Step,
    Summary,
    cut,
    last_steps,
    load,
    summarise,
)
from tools.ui import console, say

TEMPLATE = Path(__file__).with_name("timeline.html")

# More make the page slow to load; Perfetto gets them all.
MOST_EVENTS = 200_000
_PLACE = "__DATA__"


@dataclass(frozen=True)
class Outputs:
    """The files that were written."""

    perfetto: Path
    page: Path
    picture: Path


def write(session: Session, folder: Path) -> Outputs:
    """Write trace, page and picture of a session.

    Raises:
        WorkshopError: They cannot be written, or there is nothing to show.
    """
    if not session.events():
        raise WorkshopError(
            "The traces hold no event.",
            "\n".join(str(each.path) for each in session.traces),
            "Send a request to the attention role while it traces.",
        )
    from tools.timeline_picture import draw

    outputs = Outputs(
        folder / "timeline.perfetto.json",
        folder / "timeline.html",
        folder / "timeline.png",
    )
    shown = last_steps(session, MOST_EVENTS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(perfetto(session), separators=(",", ":"))
        outputs.perfetto.write_text(text, encoding="utf-8")
        outputs.page.write_text(page(session, shown), encoding="utf-8")
        draw(shown, telling_step(shown), outputs.picture)
    except OSError as error:
        raise WorkshopError(f"{folder} cannot be written to.", str(error)) from None
    return outputs


def telling_step(session: Session) -> Step | None:
    """The step to show first: split, serving requests, and of median length among
    those with the most rows."""
    done = {each.seq for each in session.ffn.steps}
    steps = [each for each in session.attention.steps if each.seq in done]
    if not steps:
        return None

    def rank(each: Step) -> tuple[bool, bool, int]:
        return len(each.rows) == 2, each.kind == "eager", sum(each.rows)

    best = max(map(rank, steps))
    steps = sorted(
        (each for each in steps if rank(each) == best), key=lambda each: each.length
    )
    return steps[len(steps) // 2]


def perfetto(session: Session) -> dict[str, Any]:
    """A trace in Chrome's JSON format: a process a role, a thread a stage.

    Receives go on beside what a stage does, so they have threads of their own.
    """
    origin = _origin(session)
    events: list[dict[str, Any]] = []

    def name(what: str, pid: int, tid: int, text: str | int) -> None:
        key = "sort_index" if what.endswith("sort_index") else "name"
        event = {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {key: text}}
        events.append(event)

    for pid, role in enumerate(ROLES, 1):
        name("process_name", pid, 0, f"AFD {role}")
        name("process_sort_index", pid, 0, pid)
        for tid, title in enumerate(
            ("steps", "stage 0", "stage 0 recv", "stage 1", "stage 1 recv")
        ):
            name("thread_name", pid, tid, title)
            name("thread_sort_index", pid, tid, tid)

    def put(title: str, each: Event | Step, tid: int, args: dict[str, Any]) -> None:
        events.append(
            {
                "ph": "X",
                "name": title,
                "cat": each.role,
                "pid": ROLES.index(each.role) + 1,
                "tid": tid,
                "ts": (each.begin - origin) / 1000,
                "dur": each.length / 1000,
                "args": args,
            }
        )

    for trace in session.traces:
        for step in trace.steps:
            args = {"seq": step.seq, "kind": step.kind, "rows": list(step.rows)}
            put(f"step {step.seq} ({step.kind})", step, 0, args)
    for each in session.events():
        args = {
            "seq": each.seq,
            "layer": _layer_name(session, each.layer),
            "stage": each.stage,
            "rows": each.rows,
        }
        tid = 1 + 2 * each.stage + (each.name == "recv")
        put(f"{each.name} L{each.layer}", each, tid, args)
    events += _flows(session, origin)
    return {
        "displayTimeUnit": "ns",
        "otherData": {
            "alignment": session.alignment,
            **{each.role: each.path.name for each in session.traces},
        },
        "traceEvents": events,
    }


def page(session: Session, shown: Session) -> str:
    """The page, complete in itself.

    Args:
        session: What the summary is about.
        shown: What can be stepped through; a part of it, if there is too much.
    """
    data = json.dumps(_page_data(session, shown), separators=(",", ":"))
    # A name in it must not end the script.
    data = data.replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(_PLACE, data)


def describe_overlap(overlap: Overlap | None) -> list[str]:
    """What the trace tells of the overlap, and what it cannot tell."""
    if overlap is None:
        return ["No step was split, so there is nothing to overlap."]
    measured = overlap.measured
    lines = [
        f"{overlap.steps} split steps, mean {_us(measured)}. Of that time attention "
        f"computed {overlap.attention / measured:.0%}, FFN "
        f"{overlap.ffn / measured:.0%}, both at once {overlap.both / measured:.0%}.",
        f"The same computations one after the other: {_us(overlap.serial)}. In the "
        f"ideal two-stage schedule, its fill included: {_us(overlap.ideal)}. Neither "
        "has any transfer in it.",
    ]
    schedule = overlap.schedule_efficiency
    if schedule is not None:
        lines.append(
            f"Schedule efficiency {schedule:.0%}: of the time between the two, that "
            "much is saved; less than nothing means that transfers and handoffs took "
            "more than the overlap saved."
        )
    efficiency = overlap.overlap_efficiency
    if overlap.compared is None:
        lines.append(
            "overlap_efficiency, (T_one_stage - T_two_stages) / (T_one_stage - "
            "T_ideal), cannot be told from this trace: it has no step of as many rows "
            "that was not split. A second session without DBO, or with higher "
            "thresholds, tells T_one_stage."
        )
    elif efficiency is None:
        lines.append(
            f"overlap_efficiency cannot be told: steps of as many rows that were not "
            f"split take {_us(overlap.one_stage or 0)}, no more than the ideal "
            f"schedule of the halves ({_us(overlap.compared[2])})."
        )
    else:
        count, two_stages, ideal = overlap.compared
        lines.append(
            f"overlap_efficiency {efficiency:.0%}, of the {count} split steps for "
            f"which there are unsplit ones of as many rows: T_one_stage "
            f"{_us(overlap.one_stage or 0)}, T_two_stages {_us(two_stages)}, T_ideal "
            f"{_us(ideal)}. Compared within one session, not side by side."
        )
    return lines


def _origin(session: Session) -> int:
    events = session.events()
    return min(
        [each.begin for each in events[:1]]
        + [each.begin for trace in session.traces for each in trace.steps]
    )


def _layer_name(session: Session, layer: int) -> str:
    names = session.layers
    return f"{layer} ({names[layer]})" if layer < len(names) else f"{layer} (the end)"


def _flows(session: Session, origin: int) -> list[dict[str, Any]]:
    """Arrows from each send to what the peer does with it."""
    sends = {
        (each.role, each.seq, each.layer, each.stage): each
        for each in session.events()
        if each.name == "send"
    }
    flows = []
    for each in session.events():
        if each.name != "recv":
            continue
        sender = ROLES[1 - ROLES.index(each.role)]
        sent = sends.get((sender, each.seq, each.layer, each.stage))
        if sent is None:
            continue
        number = len(flows) // 2 + 1
        for phase, role, at in (("s", sender, sent.begin), ("f", each.role, each.end)):
            flows.append(
                {
                    "ph": phase,
                    "id": number,
                    "name": "exchange",
                    "cat": "exchange",
                    "pid": ROLES.index(role) + 1,
                    "tid": 1 + 2 * each.stage,
                    "ts": (at - origin) / 1000,
                }
            )
    return flows


def _page_data(session: Session, shown: Session) -> dict[str, Any]:
    summary = summarise(session)
    origin = _origin(shown)
    events = shown.events()
    first = telling_step(shown)
    place = {id(each): at for at, each in enumerate(events)}
    waits = sorted(
        (each for each in events if each.name == "wait"), key=lambda each: -each.length
    )
    notes = list(session.notes)
    if shown is not session:
        notes.append(
            f"Of {summary.events} events, the last {len(events)} can be stepped "
            "through here; the summary is about all, and the Perfetto trace has all."
        )
    if summary.early:
        notes.append(
            f"{summary.early} exchanges were received before they were sent: the "
            "clocks of the two traces do not fit together."
        )
    columns = {
        "role": [ROLES.index(each.role) for each in events],
        "kind": [EVENTS.index(each.name) for each in events],
        "begin": [each.begin - origin for each in events],
        "end": [each.end - origin for each in events],
        "seq": [each.seq for each in events],
        "layer": [each.layer for each in events],
        "stage": [each.stage for each in events],
        "rows": [each.rows for each in events],
    }
    return {
        "kinds": EVENTS,
        "roles": ROLES,
        "layers": shown.layers,
        "events": columns,
        "steps": [
            [
                each.seq,
                each.begin - origin,
                each.end - origin,
                each.kind,
                list(each.rows),
            ]
            for each in shown.attention.steps
        ],
        "first_step": first.seq if first else None,
        "about": _about(session),
        "notes": notes,
        "cards": _cards(summary),
        "overlap": describe_overlap(summary.overlap),
        "waits": [place[id(each)] for each in waits[:10]],
        "tables": {"times": _times(summary), "steps": _steps(summary)},
    }


def _about(session: Session) -> str:
    header = session.attention.header
    hosts = sorted({each.header["host"] for each in session.traces})
    return (
        f"vLLM {header['vllm_version']}, {len(session.layers)} MoE layers, "
        f"{' and '.join(hosts)}; {session.alignment}. "
        + ", ".join(f"{each.role}: {each.path.name}" for each in session.traces)
    )


def _cards(summary: Summary) -> list[tuple[str, str, str]]:
    overlap = summary.overlap
    cards = [
        ("Traced", f"{summary.seconds:.2f} s", f"{summary.events:,} events"),
        (
            "Exchanges",
            f"{summary.exchanges:,}",
            "received before they were sent: "
            + (f"{summary.early:,}" if summary.early else "none"),
        ),
    ]
    if overlap is None:
        return [*cards, ("Overlap", "none", "no step was split")]
    schedule, efficiency = overlap.schedule_efficiency, overlap.overlap_efficiency
    return [
        *cards,
        (
            "Split steps",
            f"{overlap.steps:,}",
            f"mean {_us(overlap.measured)}; ideal {_us(overlap.ideal)}",
        ),
        (
            "Both roles compute",
            f"{overlap.both / overlap.measured:.0%}",
            "of a split step's time",
        ),
        (
            "Schedule efficiency",
            "-" if schedule is None else f"{schedule:.0%}",
            "1 is the ideal schedule of the halves",
        ),
        (
            "overlap_efficiency",
            "not in this trace" if efficiency is None else f"{efficiency:.0%}",
            "against steps that were not split",
        ),
    ]


def _times(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """What each role did while steps ran. A stage that has yielded costs no time of
    its role, and a receive goes on beside what the role does."""
    lines = []
    for role in ROLES:
        times = {
            name: summary.times[role, name] for name in ("compute", "send", "wait")
        }
        times["other"] = max(summary.step_time - sum(times.values()), 0)
        for name, total in times.items():
            share = total / summary.step_time if summary.step_time else 0
            lines.append([role, name, f"{total / 1e6:,.1f}", f"{share:.1%}"])
    return ["role", "what", "ms", "of step time"], lines


def _steps(summary: Summary) -> tuple[list[str], list[list[str]]]:
    return (
        ["kind", "stages", "steps", "mean µs"],
        [
            [kind, str(stages), f"{count:,}", f"{mean / 1000:,.0f}"]
            for (kind, stages), (count, mean) in summary.steps.items()
        ],
    )


def _us(nanoseconds: float) -> str:
    return f"{nanoseconds / 1000:,.0f} µs"


def show(session: Session, summary: Summary) -> None:
    """Print the summary."""
    from rich.table import Table

    table = Table("role", "what", "ms", "of step time", title="Where the time goes")
    for line in _times(summary)[1]:
        table.add_row(*line)
    console(stderr=False).print(table)
    table = Table("role", "step", "layer", "stage", "µs", title="Largest waits")
    for each in summary.waits[:5]:
        numbers = (each.seq, each.layer, each.stage)
        table.add_row(each.role, *map(str, numbers), f"{each.length / 1000:,.0f}")
    console(stderr=False).print(table)
    click.echo(f"Clocks: {session.alignment}.")
    early = f"{summary.early} received" if summary.early else "none was received"
    click.echo(f"Exchanges: {summary.exchanges}, {early} before it was sent.")
    for line in describe_overlap(summary.overlap):
        click.echo(line)
    for note in session.notes:
        say(f"note: {note}")


def make(
    layout: Layout, files: Sequence[Path], folder: Path
) -> tuple[Session, Outputs]:
    """Make everything from two files, and say where it is.

    Raises:
        WorkshopError: A file is no trace, or they do not belong together.
    """
    session = load(files)
    outputs = write(session, folder)
    _say_where(layout, outputs)
    return session, outputs


def newest(folder: Path) -> list[Path]:
    """The newest trace of each role in a folder.

    Raises:
        WorkshopError: One is missing.
    """
    files = [
        max(found, key=lambda path: path.stat().st_mtime)
        for role in ROLES
        if (found := list(folder.glob(f"afd-{role}-*.jsonl")))
    ]
    if len(files) != len(ROLES):
        raise WorkshopError(
            f"{folder} has no traces of both roles.",
            f"Found: {', '.join(path.name for path in files) or 'none'}.",
            "Run `make demo`, or name two files.",
        )
    return files


@click.command()
@click.argument(
    "files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the results (default: build/timeline).",
)
@click.option(
    "--steps",
    metavar="FIRST-LAST",
    help="Only these steps, by number, as 100-120.",
)
@click.pass_obj
def command(
    layout: Layout, files: tuple[Path, ...], out: Path | None, steps: str | None
) -> None:
    """Show what both AFD roles did, from the trace of each.

    FILES are two that the roles write into the trace_dir of their AFD config, in any
    order; without any, those of the last `make demo`. Prints where the time went, and
    writes timeline.html, timeline.png and timeline.perfetto.json.
    """
    if files and len(files) != len(ROLES):
        raise WorkshopError(
            f"It takes 2 files, not {len(files)}.", todo="Give one of each role."
        )
    session = load(files or newest(layout.build / "demo" / "traces"))
    if steps:
        session = cut(session, *_range(steps))
        if not session.events():
            raise WorkshopError(f"--steps {steps}: the traces hold no such step.")
    folder = out or layout.build / "timeline"
    outputs = write(session, folder)
    show(session, summarise(session))
    _say_where(layout, outputs)


def _range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise WorkshopError(f"--steps {text} is not of the form 100-120, or 100.")
    return int(first), int(last or first)


def _say_where(layout: Layout, outputs: Outputs) -> None:
    for path, what in (
        (outputs.page, "to step through, in any browser"),
        (outputs.picture, "a picture of one step"),
        (outputs.perfetto, "for ui.perfetto.dev, or any viewer of Chrome's traces"),
    ):
        say(f"==> {layout.relative(path)}: {what}")
