"""What the workshop prints: steps, progress bars, tables, errors.

Everything but results goes to stderr. `rich` is imported on first use only:
a no-op must stay fast.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tools.errors import WorkshopError

if TYPE_CHECKING:
    from rich.console import Console


def console(stderr: bool = True) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def patches(count: int) -> str:
    """`1 patch`, `2 patches`."""
    return f"{count} patch" if count == 1 else f"{count} patches"


@contextmanager
def step(title: str) -> Iterator[None]:
    """Announce a piece of work and say how long it took."""
    say(f"==> {title}")
    start = time.monotonic()
    yield
    seconds = time.monotonic() - start
    if seconds >= 1:
        say(f"    done in {seconds:.1f} s")


@contextmanager
def byte_progress(title: str, total: int | None) -> Iterator[Any]:
    """Yield a callable that advances a progress bar by a number of bytes.

    Without a terminal a line is printed at every tenth of the total.
    """
    if not sys.stderr.isatty():
        done = 0
        shown = 0

        def advance(count: int) -> None:
            nonlocal done, shown
            done += count
            if total and done * 10 // total > shown:
                shown = done * 10 // total
                say(f"    {title}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")

        yield advance
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        TextColumn("    {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console(),
    ) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.update(task, advance=count)


def report_error(error: WorkshopError) -> None:
    """Print what failed, why, and what to do, on stderr."""

    def block(label: str, text: str) -> None:
        lines = text.splitlines()
        say(f"{label}{lines[0]}")
        for line in lines[1:]:
            say(f"{' ' * len(label)}{line}")

    block("error: ", error.what)
    if error.why:
        block("  why: ", error.why)
    if error.todo:
        block("   do: ", error.todo)
