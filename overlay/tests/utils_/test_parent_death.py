# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A process ends with its parent, also with one that is killed."""

import contextlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm.utils import parent_death
from vllm.utils.parent_death import exit_with_parent

GRACE_PERIOD_S = 2.0


def _run_watched_child(
    pipe: Connection, marker: Path, stuck: bool, use_pidfd: bool
) -> None:
    """A process like EngineCore: waits for work, and cleans up on SIGTERM."""

    def clean_up(signum, frame):
        marker.write_text("cleaned up")
        sys.exit(0)

    if stuck:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, clean_up)
    if not use_pidfd:
        parent_death._open_pidfd = lambda pid: None
    exit_with_parent("Child", grace_period_s=GRACE_PERIOD_S)

    pids = [os.getpid()]
    if stuck:
        # A descendant that nobody watches goes along with the force kill.
        pids.append(subprocess.Popen(["sleep", "600"]).pid)
    pipe.send(pids)
    queue.Queue().get()


def _run_parent(
    pipe: Connection, start_method: str, marker: Path, stuck: bool, use_pidfd: bool
) -> None:
    context: Any = multiprocessing.get_context(start_method)
    context.Process(
        target=_run_watched_child, args=(pipe, marker, stuck, use_pidfd)
    ).start()
    if start_method == "fork" and use_pidfd:
        # Inherits the pipe behind the sentinel of the child, and outlives both.
        context.Process(target=time.sleep, args=(30,)).start()
    pipe.send([])
    signal.pause()


@pytest.fixture
def started_pids():
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _has_ended(process: psutil.Process) -> bool:
    # An orphan stays a zombie where no init process reaps it.
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _wait_until_ended(processes: list[psutil.Process], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not (ended := all(_has_ended(process) for process in processes)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return ended


def _start_process_tree(
    pids: list[int], start_method: str, marker: Path, stuck: bool, use_pidfd: bool
) -> tuple[BaseProcess, list[psutil.Process]]:
    """Start test -> parent -> child; return the parent and its descendants."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    parent = context.Process(
        target=_run_parent, args=(writer, start_method, marker, stuck, use_pidfd)
    )
    parent.start()
    assert parent.pid is not None
    pids.append(parent.pid)
    # One message each from the parent and the child, in any order.
    child_pids = reader.recv() + reader.recv()
    pids.extend(child.pid for child in psutil.Process(parent.pid).children(True))
    return parent, [psutil.Process(pid) for pid in child_pids]


PIDFD_OR_SENTINEL = [
    pytest.param(
        True,
        id="pidfd",
        marks=pytest.mark.skipif(
            not hasattr(os, "pidfd_open"), reason="needs os.pidfd_open"
        ),
    ),
    pytest.param(False, id="sentinel"),
]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("use_pidfd", PIDFD_OR_SENTINEL)
def test_killed_parent_ends_child(started_pids, tmp_path, start_method, use_pidfd):
    marker = tmp_path / "marker"
    parent, descendants = _start_process_tree(
        started_pids, start_method, marker, False, use_pidfd
    )
    assert not any(_has_ended(process) for process in descendants)

    parent.kill()

    assert _wait_until_ended(descendants, timeout=10)
    assert marker.read_text() == "cleaned up"


def test_killed_parent_ends_stuck_child(started_pids, tmp_path):
    """A child that does not react to SIGTERM, and its own children."""
    marker = tmp_path / "marker"
    parent, descendants = _start_process_tree(started_pids, "fork", marker, True, False)
    assert len(descendants) == 2

    parent.kill()

    assert _wait_until_ended(descendants, timeout=GRACE_PERIOD_S + 10)
    assert not marker.exists()


def test_exit_with_parent_needs_a_parent(monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    threads = threading.active_count()
    exit_with_parent("Main")
    assert threading.active_count() == threads
