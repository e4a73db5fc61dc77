# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The processes of a server end when the one that started them is killed.

They are killed while they start up, where no handler of theirs reacts to
anything yet and nothing is left to wake them.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from vllm import envs
from vllm.config import VllmConfig
from vllm.utils.parent_death import PARENT_DEATH_GRACE_PERIOD_S
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.multiproc_executor import WorkerProc

# A process that does not heed SIGTERM, such as an engine core that waits to be
# constructed, is killed when its grace period is over.
EXIT_TIMEOUT_S = (
    PARENT_DEATH_GRACE_PERIOD_S + envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS + 10
)


def _run_engine_core(ipc_dir: Path) -> None:
    # Nobody answers the handshake.
    EngineCoreProc.run_engine_core(
        vllm_config=VllmConfig(),
        local_client=True,
        handshake_address=f"ipc://{ipc_dir}/handshake",
        executor_class=None,
        log_stats=False,
    )


def _run_coordinator(ipc_dir: Path) -> None:
    DPCoordinatorProc.run_coordinator(
        engine_count=1,
        front_publish_address=f"ipc://{ipc_dir}/front_publish",
        back_output_address=f"ipc://{ipc_dir}/back_output",
        back_publish_address=f"ipc://{ipc_dir}/back_publish",
    )


def _run_loading_worker(ipc_dir: Path) -> None:
    def load_forever(self, **kwargs) -> None:
        threading.Event().wait()

    WorkerProc.__init__ = load_forever  # type: ignore[method-assign]
    _, ready_writer = multiprocessing.Pipe(duplex=False)
    WorkerProc.worker_main(
        vllm_config=VllmConfig(), local_rank=0, rank=0, ready_pipe=ready_writer
    )


def _run_parent(
    child_target: Callable[[Path], None], ipc_dir: Path, pipe: Connection
) -> None:
    child = multiprocessing.get_context("fork").Process(
        target=child_target, args=(ipc_dir,)
    )
    child.start()
    pipe.send(child.pid)
    signal.pause()


@pytest.mark.parametrize("delay_s", [0, 2])
@pytest.mark.parametrize(
    "child_target", [_run_engine_core, _run_coordinator, _run_loading_worker]
)
def test_child_ends_with_killed_parent(
    child_target: Callable[[Path], None], delay_s: float, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    parent = context.Process(target=_run_parent, args=(child_target, tmp_path, writer))
    parent.start()
    child_pid = reader.recv()
    child = psutil.Process(child_pid)
    try:
        time.sleep(delay_s)
        # An orphan stays a zombie where no init process reaps it.
        assert child.status() != psutil.STATUS_ZOMBIE

        parent.kill()

        deadline = time.monotonic() + EXIT_TIMEOUT_S
        with contextlib.suppress(psutil.NoSuchProcess):
            while child.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline, "still running"
                time.sleep(0.1)
    finally:
        parent.kill()
        parent.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child_pid, signal.SIGKILL)
