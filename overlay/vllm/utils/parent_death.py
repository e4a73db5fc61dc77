# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ends processes whose parent was killed and could not end them."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import connection

from vllm.logger import init_logger
from vllm.utils.system_utils import kill_process_tree

logger = init_logger(__name__)

# How long a process may take to shut down by itself after its parent has died.
PARENT_DEATH_GRACE_PERIOD_S = 15.0


def _open_pidfd(pid: int) -> int | None:
    """File descriptor that is readable once pid has exited, where supported."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        # The process is gone already, or the call is blocked (e.g. seccomp).
        return None


def exit_with_parent(
    process_name: str,
    before_exit: Callable[[], None] | None = None,
    grace_period_s: float = PARENT_DEATH_GRACE_PERIOD_S,
) -> None:
    """End this process when the process that started it dies.

    A parent that is killed cannot terminate its children. On its death the main
    thread gets SIGTERM, as from a parent that shuts down. If this process still
    runs after the grace period, it is killed together with its descendants.

    Does nothing in a process that was not started through `multiprocessing`.

    Args:
        process_name: What to call this process in the log.
        before_exit: Called in the watching thread before SIGTERM.
        grace_period_s: Seconds that the reaction to SIGTERM may take.

    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    # The sentinel is a pipe that stays open as long as any process holds its
    # other end. Processes which the parent forks later inherit that end.
    pidfd = _open_pidfd(parent.pid) if parent.pid is not None else None

    def watch_parent() -> None:
        waitables: list[int] = [parent.sentinel]
        if pidfd is not None:
            waitables.append(pidfd)
        connection.wait(waitables)

        logger.warning(
            "[shutdown] %s: parent process %s (pid %s) died; exiting",
            process_name,
            parent.name,
            parent.pid,
        )
        if before_exit is not None:
            before_exit()
        main_thread_id = threading.main_thread().ident
        assert main_thread_id is not None
        # Not os.kill(): the signal must interrupt a wait of the main thread, the
        # only one that runs Python's signal handlers.
        signal.pthread_kill(main_thread_id, signal.SIGTERM)
        time.sleep(grace_period_s)
        logger.error(
            "[shutdown] %s: still running %.0fs after its parent process died; "
            "force killing",
            process_name,
            grace_period_s,
        )
        kill_process_tree(os.getpid())

    threading.Thread(target=watch_parent, daemon=True, name="ParentWatcher").start()
