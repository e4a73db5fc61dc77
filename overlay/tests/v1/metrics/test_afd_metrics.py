# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How the statistics of AFD reach the log and Prometheus."""

from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import prometheus_client
import pytest

from vllm.config.afd import AFDConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.afd import AFDProm, AFDStats
from vllm.v1.metrics.ray_wrappers import (
    RayCounterWrapper,
    RayHistogramWrapper,
    RayPrometheusStatLogger,
)
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

pytestmark = [pytest.mark.cpu_test, pytest.mark.skip_global_cleanup]

WHOLE = AFDStats(steps=1, exchanges=48, bytes_sent=300, bytes_received=200, wait_s=0.25)
SPLIT = AFDStats(
    steps=1,
    split_steps=1,
    exchanges=96,
    split_exchanges=96,
    overlapped=72,
    bytes_sent=2**20,
    bytes_received=2**21,
    wait_s=0.002,
)


@pytest.mark.parametrize("stats", [WHOLE, SPLIT, AFDStats(), None])
def test_stats_survive_the_way_to_the_frontend(stats: AFDStats | None):
    """Pickled from the worker to the engine core, msgpack from there on."""
    output = ModelRunnerOutput(req_ids=[], req_id_to_index={}, afd_stats=stats)
    received = ForkingPickler.loads(ForkingPickler.dumps(output)).afd_stats

    outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(afd_stats=received))
    decoded = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
    assert decoded.scheduler_stats.afd_stats == stats


def test_there_are_none_by_default():
    assert SchedulerStats().afd_stats is None
    assert EMPTY_MODEL_RUNNER_OUTPUT.afd_stats is None


def test_sum_and_text():
    total = AFDStats()
    assert str(total) == (
        "0 steps, 0 of them split, 0 exchanges, 0.0 MiB sent, 0.0 MiB received, "
        "0.00 s of waiting"
    )
    for stats in (WHOLE, SPLIT, SPLIT):
        total.add(stats)
    assert str(total) == (
        "3 steps, 2 of them split, 240 exchanges (75.0% of those in split steps "
        "overlapped), 2.0 MiB sent, 4.0 MiB received, 0.25 s of waiting"
    )
    assert SPLIT.steps == 1


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    registry = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Histogram"):
        cls = getattr(prometheus_client, name)
        monkeypatch.setattr(
            AFDProm,
            f"_{name.lower()}_cls",
            staticmethod(lambda cls=cls, **kw: cls(**kw, registry=registry)),
        )
    return registry


def _make_prom(role: str | None = "attention") -> AFDProm:
    return AFDProm(
        SimpleNamespace(afd_config=AFDConfig(afd_role=role) if role else None),
        ["model_name", "engine"],
        {idx: ["model", str(idx)] for idx in (0, 1)},
    )


def _exposed(registry: prometheus_client.CollectorRegistry, engine: int) -> dict:
    """Value by name and labels, of what `/metrics` would show."""
    lines = prometheus_client.generate_latest(registry).decode().splitlines()
    label = f'engine="{engine}"'
    samples = (line.rsplit(" ", 1) for line in lines if label in line)
    return {
        key.replace(label, "").replace('model_name="model"', "").replace(",", ""): value
        for key, value in samples
        if "_created" not in key
    }


def test_metrics_of_each_engine(registry: prometheus_client.CollectorRegistry):
    prom = _make_prom()
    # All are there from the start.
    assert set(_exposed(registry, 0)) == set(_exposed(registry, 1))
    before = _exposed(registry, 0)
    for stats in (WHOLE, SPLIT, SPLIT):
        prom.observe(stats, 1)

    assert _exposed(registry, 0) == before
    exposed = _exposed(registry, 1)
    buckets = {k: exposed.pop(k) for k in list(exposed) if "_bucket" in k}
    assert {key: float(value) for key, value in exposed.items()} == {
        "vllm:afd_steps_total{}": 3,
        "vllm:afd_split_steps_total{}": 2,
        'vllm:afd_exchanges_total{split="false"}': 48,
        'vllm:afd_exchanges_total{split="true"}': 192,
        "vllm:afd_exchanges_overlapped_total{}": 144,
        'vllm:afd_bytes_total{direction="sent"}': 2**21 + 300,
        'vllm:afd_bytes_total{direction="received"}': 2**22 + 200,
        "vllm:afd_step_wait_seconds_count{}": 3,
        "vllm:afd_step_wait_seconds_sum{}": pytest.approx(0.254),
    }
    assert buckets['vllm:afd_step_wait_seconds_bucket{le="0.003"}'] == "2.0"
    assert buckets['vllm:afd_step_wait_seconds_bucket{le="0.3"}'] == "3.0"


@pytest.mark.parametrize("role", ["ffn", None])
def test_no_metrics_where_nothing_counts(
    registry: prometheus_client.CollectorRegistry, role: str | None
):
    prom = _make_prom(role)
    prom.observe(SPLIT)
    assert prometheus_client.generate_latest(registry) == b""


def test_ray_has_the_same_metrics():
    assert issubclass(RayPrometheusStatLogger._afd_cls, AFDProm)
    assert RayPrometheusStatLogger._afd_cls._counter_cls is RayCounterWrapper
    assert RayPrometheusStatLogger._afd_cls._histogram_cls is RayHistogramWrapper
