"""What a handoff between two ubatches costs, measured where the device is a GPU, too.

    .venv/bin/python -m pytest tests/gpu/test_handoff_cost.py

Speed is not asserted. build/reports/gpu/<device>-handoff.json has the numbers.
"""

from __future__ import annotations

import pytest
import sides
from engines import HERE, TIMEOUT_S, Engines, environment
from sides import Process, report_of

from tools.layout import Layout

# A hundred are as many as `make bench` takes; a few show that it runs.
WINDOWS = {"cpu": 3, "cuda": 100}


@pytest.mark.parametrize("device", WINDOWS, indirect=True)
def test_a_handoff_is_measured(layout: Layout, engines: Engines, device: str) -> None:
    side = sides.patched(layout)
    folder = layout.reports / "gpu"
    output = folder / f"{device}-handoff.json"
    output.unlink(missing_ok=True)
    program = HERE / "handoff_cost.py"
    process = Process(
        [str(side.python), str(program), str(WINDOWS[device]), str(output)],
        environment(side, device, engines.cache),
        folder / f"{device}-handoff.log",
    )
    report = report_of(process, side, output, TIMEOUT_S)
    assert report["device"] == device
    for condition in ("one_core", "any_core", "any_core_after_work"):
        for way in ("event", "dbo_yield", "op"):
            found = report["handoff_us"][condition][way]
            assert found["handoffs"] > 100
            assert 0 < found["median"] <= found["p99"]
