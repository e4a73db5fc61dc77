"""Runs the benchmarks; their results are kept in bench/results."""

from __future__ import annotations

import sys

import click

from tools.build import build, build_base
from tools.env import clean_environ
from tools.errors import WorkshopError
from tools.layout import Layout
from tools.supervise import supervise

BENCHMARKS = {
    "dbo-off": "dbo_off.py",
    "handoff": "handoff.py",
    "exchange": "exchange.py",
    "overlap": "overlap.py",
}
_TIMEOUT_S = 2400


@click.command()
@click.option(
    "--only",
    type=click.Choice(list(BENCHMARKS)),
    multiple=True,
    help="Run only this one; may be given several times.",
)
@click.pass_obj
def command(layout: Layout, only: tuple[str, ...]) -> None:
    """Measure side by side in one run, and keep ratios.

    \b
    dbo-off   the patched vLLM with DBO off against the unpatched
    handoff   a handoff between two ubatches; a split step against a whole one
    exchange  round trips of AFD's connectors against a bare socket
    overlap   AFD in two stages against one stage, one engine and the ideal

    Takes some minutes each; leave the machine alone meanwhile. Results go to
    bench/results, logs to build/reports.
    """
    build(layout)
    build_base(layout)
    for name in only or BENCHMARKS:
        result = layout.root / "bench" / "results" / f"{name}.json"
        log = layout.reports / f"bench-{name}.log"
        log.unlink(missing_ok=True)
        program = layout.root / "bench" / BENCHMARKS[name]
        outcome = supervise(
            [sys.executable, str(program), str(result)],
            log,
            _TIMEOUT_S,
            layout.root,
            clean_environ(),
        )
        if outcome.code or outcome.timed_out:
            why = (
                f"It took longer than {_TIMEOUT_S} s."
                if outcome.timed_out
                else f"Exit status {outcome.code}."
            )
            raise WorkshopError(
                f"The benchmark {name} failed.",
                f"{why} Its output is above, and in {layout.relative(log)}.",
            )
