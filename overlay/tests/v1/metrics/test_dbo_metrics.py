# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How the statistics of dual batch overlap (DBO) reach the log and Prometheus."""

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock

import prometheus_client
import pytest

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.dbo import DBOLogging, DBOProm, DBOStats, UnsplitReason
from vllm.v1.metrics.ray_wrappers import RayCounterWrapper, RayPrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

pytestmark = [pytest.mark.cpu_test, pytest.mark.skip_global_cleanup]

REASONS = get_args(UnsplitReason)
ALL_STATS = [
    DBOStats(num_yields=48),
    DBOStats(),
    *(DBOStats(unsplit_reason=reason) for reason in REASONS),
]


@pytest.mark.parametrize("stats", [*ALL_STATS, None])
def test_stats_survive_the_way_to_the_frontend(stats: DBOStats | None):
    """Pickled from the worker to the engine core, msgpack from there on."""
    output = ModelRunnerOutput(req_ids=[], req_id_to_index={}, dbo_stats=stats)
    received = ForkingPickler.loads(ForkingPickler.dumps(output)).dbo_stats

    outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(dbo_stats=received))
    decoded = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
    assert decoded.scheduler_stats.dbo_stats == stats


def test_there_are_none_by_default():
    assert SchedulerStats().dbo_stats is None
    assert EMPTY_MODEL_RUNNER_OUTPUT.dbo_stats is None


def _logged(log: Callable[[Any], Any]) -> list[str]:
    log_fn = Mock()
    log(log_fn)
    return [call.args[0] % call.args[1:] for call in log_fn.call_args_list]


@pytest.mark.parametrize(
    "steps, line",
    [
        ({}, None),
        (
            {"threshold": 250, "prefix_veto": 30, "split": 120},
            "DBO: 120 of 400 steps split (threshold 250, prefix veto 30), "
            "48.0 yields per split step",
        ),
        ({"threshold": 7}, "DBO: 0 of 7 steps split (threshold 7)"),
        ({"split": 3}, "DBO: 3 of 3 steps split, 48.0 yields per split step"),
        # Nothing yields in a replayed graph, which must not spoil the average.
        ({"replay": 3}, "DBO: 3 of 3 steps split"),
        (
            {"replay": 3, "split": 1, "graph": 1},
            "DBO: 4 of 5 steps split (graph 1), 48.0 yields per split step",
        ),
        # A model whose microbatches run one after the other.
        ({"silent": 2}, "DBO: 2 of 2 steps split, 0.0 yields per split step"),
    ],
)
def test_log_line(steps: dict[str, int], line: str | None):
    kinds = {
        "split": DBOStats(num_yields=48),
        "replay": DBOStats(),
        "silent": DBOStats(num_yields=0),
        **{reason: DBOStats(unsplit_reason=reason) for reason in REASONS},
    }
    logging = DBOLogging()
    for _ in range(2):
        for kind, count in steps.items():
            for _ in range(count):
                logging.observe(kinds[kind])
        expected = [] if line is None else ["Engine 000: " + line]
        assert _logged(lambda log: logging.log(log, "Engine 000: ")) == expected
        # Each line tells of its interval only.
        assert _logged(logging.log) == []


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(
        DBOProm,
        "_counter_cls",
        staticmethod(
            lambda **kwargs: prometheus_client.Counter(**kwargs, registry=registry)
        ),
    )
    return registry


def _make_prom(use_ubatching: bool = True, use_v2_model_runner: bool = True) -> DBOProm:
    return DBOProm(
        SimpleNamespace(
            parallel_config=SimpleNamespace(use_ubatching=use_ubatching),
            use_v2_model_runner=use_v2_model_runner,
        ),
        ["model_name", "engine"],
        {idx: ["model", str(idx)] for idx in (0, 1)},
    )


def _exposed(registry: prometheus_client.CollectorRegistry) -> dict[str, float]:
    """Value by name and labels, of what `/metrics` would show."""
    lines = prometheus_client.generate_latest(registry).decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {key: float(value) for key, value in samples if "_created" not in key}


def test_prometheus_counters_of_each_engine(
    registry: prometheus_client.CollectorRegistry,
):
    prom = _make_prom()

    def expected(engine: int, *counts: float, **unsplit: float) -> dict[str, float]:
        labels = f'engine="{engine}",model_name="model"'
        names = ("steps", "split_steps", "yields")
        return {
            f"vllm:dbo_{name}_total{{{labels}}}": count
            for name, count in zip(names, counts, strict=True)
        } | {
            f'vllm:dbo_unsplit_steps_total{{{labels},reason="{reason}"}}': unsplit.get(
                reason, 0.0
            )
            for reason in REASONS
        }

    assert _exposed(registry) == expected(0, 0, 0, 0) | expected(1, 0, 0, 0)

    for stats in ALL_STATS:
        prom.observe(stats, 1)
    for reason in ("threshold", "threshold", "dp_vote"):
        prom.observe(DBOStats(unsplit_reason=reason), 0)
    assert _exposed(registry) == (
        expected(0, 3, 0, 0, threshold=2, dp_vote=1)
        | expected(1, 2 + len(REASONS), 2, 48, **dict.fromkeys(REASONS, 1))
    )


@pytest.mark.parametrize(
    "config", [{"use_ubatching": False}, {"use_v2_model_runner": False}]
)
def test_no_counters_where_nothing_counts(
    registry: prometheus_client.CollectorRegistry, config: dict[str, bool]
):
    prom = _make_prom(**config)
    prom.observe(DBOStats())
    assert _exposed(registry) == {}


def test_ray_has_the_same_counters():
    assert issubclass(RayPrometheusStatLogger._dbo_cls, DBOProm)
    assert RayPrometheusStatLogger._dbo_cls._counter_cls is RayCounterWrapper
