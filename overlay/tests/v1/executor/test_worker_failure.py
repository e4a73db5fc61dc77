# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A worker whose background work fails ends the engine, and says why."""

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.utils import fork_new_process_for_each_test
from vllm.config import DeviceConfig, ParallelConfig, VllmConfig
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import (
    MultiprocExecutor,
    _wait_for_worker_failure,
)
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker import worker_base
from vllm.v1.worker.worker_base import WorkerBase

TIMEOUT_S = 60
REASON = "the peer at 192.0.2.1:5 died"


class StubWorker(WorkerBase):
    """Has no model, and fails when it is told to."""

    def init_device(self) -> None:
        self.device = torch.device("cpu")

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        additional_config: Any = self.vllm_config.additional_config
        if additional_config.get("fail_in_load"):
            self.fail_in_background()

    def fail_in_background(self) -> None:
        thread = threading.Thread(
            target=self.report_failure, args=(ConnectionError(REASON),)
        )
        thread.start()
        thread.join()

    def fail_while_busy(self) -> None:
        self.fail_in_background()
        threading.Event().wait()


@contextmanager
def _executor(executor_class: type[Executor], **additional_config) -> Iterator:
    config = VllmConfig(
        parallel_config=ParallelConfig(
            worker_cls=f"{__name__}.{StubWorker.__name__}",
            distributed_executor_backend=executor_class,
        ),
        device_config=DeviceConfig("cpu"),
        additional_config=additional_config,
    )
    # All that is asked of it here.
    config.model_config = SimpleNamespace(
        is_multimodal_model=False, supports_multimodal_inputs=False, is_hybrid=False
    )
    executor = executor_class(config)
    try:
        yield executor
    finally:
        executor.shutdown()


@pytest.fixture(autouse=True)
def short_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a worker that does not react is given before it is terminated.
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")


@pytest.mark.parametrize("fail_in_load", [False, True])
def test_uniproc_executor_fails_with_the_reason(fail_in_load: bool) -> None:
    failed = threading.Event()
    with _executor(UniProcExecutor, fail_in_load=fail_in_load) as executor:
        executor.register_failure_callback(failed.set)
        if not fail_in_load:
            assert not failed.is_set()
            assert executor.failure_reason is None
            executor.collective_rpc("fail_in_background")

        assert failed.is_set()
        assert executor.failure_reason == REASON


# In a process of its own: when an executor is garbage collected, its zmq context
# waits for messages to a worker that has ended and never reads them.
@fork_new_process_for_each_test
@pytest.mark.parametrize("busy", [False, True])
def test_multiproc_executor_fails_with_the_reason(busy: bool) -> None:
    failed = threading.Event()
    with _executor(MultiprocExecutor) as executor:
        executor.register_failure_callback(failed.set)
        if busy:
            # Whoever waits for the worker gets to know it, too.
            with pytest.raises(RuntimeError, match=REASON):
                executor.collective_rpc("fail_while_busy")
        else:
            executor.collective_rpc("fail_in_background", non_block=True)

        assert failed.wait(TIMEOUT_S)
        assert executor.failure_reason == REASON
        for worker in executor.workers:
            worker.proc.join(TIMEOUT_S)
            assert worker.proc.exitcode is not None
        with pytest.raises(RuntimeError, match=REASON):
            executor.collective_rpc("check_health")


@pytest.mark.parametrize("reason", [None, REASON])
def test_monitor_tells_a_report_from_a_silent_death(reason: str | None) -> None:
    workers: list[Any] = []
    writers: list[Connection] = []
    for _ in range(2):
        sentinel, alive = multiprocessing.Pipe(duplex=False)
        failure_pipe, writer = multiprocessing.Pipe(duplex=False)
        proc = SimpleNamespace(sentinel=sentinel.fileno(), keep=sentinel)
        workers.append(SimpleNamespace(proc=proc, failure_pipe=failure_pipe))
        writers += [alive, writer]
    # The second one ends, and may have said why.
    if reason is not None:
        writers[3].send(reason)
    for writer in writers[2:]:
        writer.close()
    assert _wait_for_worker_failure(workers) == (workers[1].proc, reason)


def test_only_the_first_failure_is_reported() -> None:
    with _executor(UniProcExecutor) as executor:
        reasons: list[str] = []
        worker = executor.driver_worker
        worker.report_failure(ValueError())
        worker.report_failure(ValueError("a consequence"))
        worker.set_failure_callback(reasons.append)
        worker.report_failure(ValueError("another"))
        assert reasons == ["ValueError()"]


def test_failure_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets it logs it."""
    logged: list[tuple] = []
    monkeypatch.setattr(
        worker_base, "logger", SimpleNamespace(error=lambda *args: logged.append(args))
    )
    for callback in (None, lambda reason: None):
        worker = WorkerBase.__new__(WorkerBase)
        worker.rank = 0
        if callback is not None:
            worker.set_failure_callback(callback)
        worker.report_failure(ValueError(REASON))
        assert len(logged) == 1
        assert REASON in logged[0]


def test_worker_with_an_init_of_its_own() -> None:
    class OtherWorker(WorkerBase):
        def __init__(self) -> None:
            self.rank = 0

    reasons: list[str] = []
    worker = OtherWorker()
    worker.set_failure_callback(reasons.append)
    worker.report_failure(ValueError(REASON))
    assert reasons == [REASON]
    OtherWorker().set_failure_callback(reasons.append)
    assert reasons == [REASON]


@pytest.mark.parametrize("reason", [None, REASON])
def test_engine_ends_with_the_reason(reason: str | None) -> None:
    engine = EngineCoreProc.__new__(EngineCoreProc)
    with _executor(UniProcExecutor) as executor:
        executor.failure_reason = reason
        engine.model_executor = executor
        with pytest.raises(RuntimeError, match=reason or r"Executor failed\.$"):
            engine._handle_client_request(EngineCoreRequestType.EXECUTOR_FAILED, b"")
