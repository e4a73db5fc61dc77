"""Runs a command within a time limit, and leaves nothing of it behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tools.errors import WorkshopError
from tools.process import alive

# For pytest to tear down its fixtures, the servers among them.
GRACE_S = 60
# Enough for what has run no longer than that. An interrupt is lost in about one of a
# hundred interpreters that just start: in a callback of an import it is "ignored".
YOUNG_S = 5


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        code: Exit status; negative for a signal.
        seconds: How long it ran.
        timed_out: It was ended because of its time limit.
    """

    code: int
    seconds: float
    timed_out: bool = False


def supervise(
    command: Sequence[str],
    log: Path,
    timeout: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    grace: float = GRACE_S,
    show: bool = True,
    stop: threading.Event | None = None,
) -> Outcome:
    """Run a command in a session of its own; show its output and keep it in `log`.

    Whatever is left of the session when the command has ended, or when its time is
    up, is killed.

    Args:
        timeout: Seconds that it may take.
        grace: Seconds that it has to end by itself, interrupted, when time is up. It
            gets no more than it has run, but at least 5.
        show: Whether its output is shown as it comes.
        stop: Set to end it before that, as when time is up. If it is set already,
            nothing is run, and the outcome is that of an interrupt.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    if stop is not None and stop.is_set():
        return Outcome(-signal.SIGINT, 0.0)
    with log.open("ab") as copy:
        try:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=dict(os.environ if env is None else env)
                | {"PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise WorkshopError(
                f"{command[0]} cannot be run.", str(error), "Run `make build` first."
            ) from None
        reader = threading.Thread(
            target=_copy, args=(process.stdout, copy, show), daemon=True
        )
        reader.start()
        timed_out = False
        try:
            if not _wait(process, start + timeout, stop):
                timed_out = stop is None or not stop.is_set()
                if timed_out:
                    _say(copy, f"Still running after {timeout:.0f} s: ended.", show)
                _interrupt(process, grace, start)
        except BaseException:
            _interrupt(process, grace, start)
            raise
        finally:
            kill_session(process.pid)
            process.wait()
            # Its end of the pipe is closed now, unless something left the session.
            reader.join(5)
    return Outcome(process.returncode, time.monotonic() - start, timed_out)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does, so that what was started is stopped."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def kill_session(session: int) -> None:
    """Kill all processes of a session, also those that start while we look."""
    for _ in range(50):
        left = list(session_members(session))
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if not left:
            return
        time.sleep(0.1)


def session_members(session: int) -> Iterator[int]:
    """Processes of a session, without zombies."""
    return (each.pid for each in alive() if each.session == session)


def _wait(
    process: subprocess.Popen[bytes], deadline: float, stop: threading.Event | None
) -> bool:
    """Whether the process ended by itself, before the deadline and `stop`."""
    while (left := deadline - time.monotonic()) > 0:
        if stop is not None and stop.is_set():
            return False
        try:
            process.wait(left if stop is None else min(left, 0.5))
            return True
        except subprocess.TimeoutExpired:
            pass
    return process.poll() is not None


def _interrupt(process: subprocess.Popen[bytes], grace: float, start: float) -> None:
    try:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(min(grace, max(YOUNG_S, time.monotonic() - start)))
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass


def _copy(source: IO[bytes], copy: IO[bytes], show: bool) -> None:
    """Pass on what comes from a pipe, as soon as it comes."""
    targets = [sys.stdout.buffer, copy] if show else [copy]
    while chunk := os.read(source.fileno(), 65536):
        for target in targets:
            target.write(chunk)
            target.flush()


def _say(copy: IO[bytes], message: str, show: bool) -> None:
    if show:
        print(message, flush=True)
    copy.write(message.encode() + b"\n")
