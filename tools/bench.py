"""Runs the benchmarks; their results are kept in bench/results."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from tools.build import build, build_base
from tools.env import clean_environ
from tools.errors import WorkshopError
from tools.layout import Layout
from tools.supervise import supervise


@dataclass(frozen=True)
class Benchmark:
    """A program of bench/.

    Attributes:
        program: Its file.
        timeout_s: Seconds that it may take.
        base: Whether it runs the unpatched vLLM, too.
        options: Whether it has some; then it only runs when asked for.
        arguments: What it is given always.
    """

    program: str
    timeout_s: int = 2400
    base: bool = False
    options: bool = False
    arguments: tuple[str, ...] = ()


BENCHMARKS = {
    "dbo-off": Benchmark("dbo_off.py", base=True),
    "handoff": Benchmark("handoff.py"),
    "exchange": Benchmark("exchange.py"),
    "overlap": Benchmark("overlap.py"),
    "overlap-balanced": Benchmark("overlap.py", arguments=("--balanced",)),
    # Of models of any size.
    "thresholds": Benchmark("thresholds.py", timeout_s=4 * 3600, options=True),
}


@click.command()
@click.option(
    "--only",
    type=click.Choice(list(BENCHMARKS)),
    multiple=True,
    help="Run only this one; may be given several times.",
)
@click.option(
    "--times",
    type=click.IntRange(1, 99),
    metavar="N",
    help="Run all N times, by turns, and keep the results in bench/results/runs, too.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(
    layout: Layout,
    only: tuple[str, ...],
    times: int | None,
    arguments: tuple[str, ...],
) -> None:
    """Measure side by side in one run, and keep ratios.

    \b
    dbo-off     the patched vLLM with DBO off against the unpatched
    handoff     a handoff between two ubatches; a split step against a whole one
    exchange    round trips of AFD's connectors against a bare socket
    overlap     AFD in two stages against one stage, one engine and the ideal
    overlap-balanced  the same with experts that take as long as attention
    thresholds  from how many tokens on two stages pay; only runs when asked for

    ARGUMENTS after `--` are options of `--only thresholds`: models, connectors, row
    counts. `--only thresholds -- --help` shows them.

    Takes some minutes each; leave the machine alone meanwhile. Results go to
    bench/results, logs to build/reports.
    """
    if arguments and not (len(only) == 1 and BENCHMARKS[only[0]].options):
        able = [name for name, each in BENCHMARKS.items() if each.options]
        raise WorkshopError(
            f"Nothing to do with {' '.join(arguments)}.",
            f"Only a run of one benchmark can have options: {', '.join(able)}.",
            "make bench-thresholds ARGS='...'",
        )
    names = only or [name for name, each in BENCHMARKS.items() if not each.options]
    build(layout)
    if any(BENCHMARKS[name].base for name in names):
        build_base(layout)
    for count in range(1, (times or 1) + 1):
        for name in names:
            result = run(layout, name, arguments)
            if times:
                kept = result.parent / "runs" / f"{name}-{count}.json"
                kept.parent.mkdir(exist_ok=True)
                shutil.copyfile(result, kept)


def run(layout: Layout, name: str, arguments: tuple[str, ...] = ()) -> Path:
    """Run one and keep its result.

    Returns:
        The file that has it.

    Raises:
        WorkshopError: It failed, or took too long.
    """
    benchmark = BENCHMARKS[name]
    result = layout.root / "bench" / "results" / f"{name}.json"
    log = layout.reports / f"bench-{name}.log"
    log.unlink(missing_ok=True)
    program = layout.root / "bench" / benchmark.program
    outcome = supervise(
        [sys.executable, str(program), str(result), *benchmark.arguments, *arguments],
        log,
        benchmark.timeout_s,
        layout.root,
        clean_environ(),
    )
    if outcome.code or outcome.timed_out:
        why = (
            f"It took longer than {benchmark.timeout_s} s."
            if outcome.timed_out
            else f"Exit status {outcome.code}."
        )
        raise WorkshopError(
            f"The benchmark {name} failed.",
            f"{why} Its output is above, and in {layout.relative(log)}.",
        )
    return result
