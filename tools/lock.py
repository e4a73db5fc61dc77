"""Keeps two runs that change `build/vllm` apart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.errors import WorkshopError
from tools.layout import Layout
from tools.ui import say


@contextmanager
def hold(layout: Layout, verb: str, wait: float = 60) -> Iterator[None]:
    """Hold this checkout's lock; re-entrant within one process.

    Args:
        verb: What holds it, for the message that others get.
        wait: Seconds to wait for another run to end.

    Raises:
        WorkshopError: Another run still holds it; names its process.
    """
    from filelock import FileLock, Timeout

    layout.build.mkdir(parents=True, exist_ok=True)
    lock = FileLock(layout.build / ".lock", is_singleton=True)
    holder = layout.build / ".lock-holder"
    try:
        lock.acquire(timeout=0)
    except Timeout:
        name = _read(holder)
        say(f"Waiting up to {wait:.0f} s for another run ({name}).")
        try:
            lock.acquire(timeout=wait)
        except Timeout:
            raise WorkshopError(
                f"Another run is at work in {layout.root}: {_read(holder)}.",
                f"`{verb}` waited {wait:.0f} s for {layout.relative(holder)}.",
                "Let it end, or end that process, then run this again.",
            ) from None
    try:
        if lock.lock_counter == 1:
            holder.write_text(f"process {os.getpid()}, `{verb}`\n", encoding="utf-8")
        yield
    finally:
        if lock.lock_counter == 1:
            holder.unlink(missing_ok=True)
        lock.release()


def _read(holder: Path) -> str:
    try:
        return holder.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return "process unknown"
