"""Both AFD roles on one device against one engine that does all.

    .venv/bin/python -m pytest tests/gpu/test_afd_one_gpu.py

NCCL takes no two processes on one GPU, so what goes from role to role takes the way
by the host: `HostBounceAFDConnector`. On a CPU it copies nothing, and all else is the
same.
"""

from __future__ import annotations

from typing import Any

import pytest
from compare import difference
from engines import (
    BATCHES,
    DBO_OPTIONS,
    LAYERS,
    MODES,
    TIMEOUT_S,
    TOLERANCE,
    Engines,
    Job,
    specs,
)

from tools.process import free_ports

# The first test of a pair may start three engines.
pytestmark = pytest.mark.timeout(4 * TIMEOUT_S)

# With the gate at attention, router logits travel too.
every_case = pytest.mark.parametrize(
    ("device", "gate"),
    [("cpu", "attention"), ("cuda", "attention"), ("cuda", "ffn")],
    indirect=["device"],
)
every_batch = pytest.mark.parametrize("name", BATCHES)


class Pairs:
    """Pairs of roles that have run, one at a time."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self._reports: dict[tuple[str, str], dict[str, Any]] = {}

    def report(self, device: str, gate: str) -> dict[str, Any]:
        """Of both roles."""
        key = (device, gate)
        if key not in self._reports:
            self._reports[key] = self._run(device, gate)
        return self._reports[key]

    def _run(self, device: str, gate: str) -> dict[str, Any]:
        (port,) = free_ports(1)

        def options(role: str) -> dict[str, Any]:
            config = {
                "afd_role": role,
                "afd_port": port,
                "afd_connector": "HostBounceAFDConnector",
                "afd_connector_module_path": "host_bounce",
                "gate_placement": gate,
                "heartbeat_timeout_s": 60,
            }
            return MODES["eager"].options | {"afd_config": config}

        ffn, attention = self.engines.run(
            device,
            Job(f"afd-{gate}-ffn", options("ffn")),
            Job(f"afd-{gate}-attention", options("attention") | DBO_OPTIONS, specs()),
        )
        return {"ffn": ffn, "attention": attention}


@pytest.fixture(scope="module")
def pairs(engines: Engines) -> Pairs:
    return Pairs(engines)


@every_case
@every_batch
def test_same_tokens_and_logprobs(
    engines: Engines, pairs: Pairs, device: str, gate: str, name: str
) -> None:
    found = difference(
        engines.report(device, "eager", dbo=False)["results"][name],
        pairs.report(device, gate)["attention"]["results"][name],
    )
    assert found.token is None, found
    assert found.logprob <= TOLERANCE[device], found


@every_case
@every_batch
def test_every_layer_of_every_stage_is_exchanged(
    pairs: Pairs, device: str, gate: str, name: str
) -> None:
    counters = pairs.report(device, gate)["attention"]["results"][name]["counters"]
    splits = BATCHES[name].splits
    assert counters["afd_split_steps"] == counters["dbo_split_steps"] == splits
    assert counters["afd_exchanges/true"] == 2 * LAYERS * splits
    whole = counters["afd_steps"] - splits
    assert counters["afd_exchanges/false"] == LAYERS * whole
    assert counters["afd_bytes/received"] > 0
    # Router logits, if the gate is here.
    more = counters["afd_bytes/sent"] - counters["afd_bytes/received"]
    assert (more > 0) == (gate == "attention")


@every_case
def test_both_roles_are_on_the_device(pairs: Pairs, device: str, gate: str) -> None:
    reports = pairs.report(device, gate)
    assert {report["device"] for report in reports.values()} == {device}
    assert reports["attention"]["connector"] == "HostBounceAFDConnector"
    assert reports["ffn"]["runner"] == "vllm.v1.worker.afd_ffn_model_runner"
