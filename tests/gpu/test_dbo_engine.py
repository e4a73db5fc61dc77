"""Split steps of a whole engine at data-parallel size 1 against whole steps.

    .venv/bin/python -m pytest tests/gpu/test_dbo_engine.py

On one GPU: Model Runner V2 as it is, with CUDA graphs, compiled with the yields in the
code, and as vLLM runs by default. On a CPU only as it is: tests/e2e has the rest.
"""

from __future__ import annotations

from typing import Any

import pytest
from compare import difference, gap
from engines import (
    BATCHES,
    DECODE,
    LAYERS,
    MODES,
    SIZES,
    TIMEOUT_S,
    TOLERANCE,
    WRONG_ORDER,
    Engines,
)

RUNNERS = {
    "cpu": "vllm.v1.worker.cpu.model_runner",
    "cuda": "vllm.v1.worker.gpu.model_runner",
}
# The first test of a mode starts two engines.
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)

CASES = [("cpu", "eager"), *(("cuda", mode) for mode in MODES)]
every_case = pytest.mark.parametrize(("device", "mode"), CASES, indirect=["device"])
every_batch = pytest.mark.parametrize("name", BATCHES)


def counted(engines: Engines, device: str, mode: str, name: str) -> dict[str, float]:
    """By the engine with DBO, in `llm.get_metrics()`."""
    return engines.report(device, mode, dbo=True)["results"][name]["counters"]


@every_case
@every_batch
def test_same_tokens_and_logprobs(
    engines: Engines, device: str, mode: str, name: str
) -> None:
    off, on = (
        engines.report(device, mode, dbo)["results"][name] for dbo in (False, True)
    )
    found = difference(off, on)
    assert found.token is None, found
    assert found.logprob <= TOLERANCE[device], found


@pytest.mark.parametrize(
    ("device", "mode"),
    # What a graph has captured is put together as it was then.
    [case for case in CASES if not MODES[case[1]].graphs],
    indirect=["device"],
)
def test_a_fault_would_be_seen(engines: Engines, device: str, mode: str) -> None:
    off, on = (engines.report(device, mode, dbo)["results"] for dbo in (False, True))
    found = difference(off[WRONG_ORDER], on["wrong_order"])
    assert found.token is not None or found.logprob > 10 * TOLERANCE[device]


@every_case
@every_batch
def test_steps_are_split_from_the_thresholds_on(
    engines: Engines, device: str, mode: str, name: str
) -> None:
    counters = counted(engines, device, mode, name)
    assert counters["dbo_split_steps"] == BATCHES[name].splits
    unsplit = {
        key.split("/")[1]: value
        for key, value in counters.items()
        if key.startswith("dbo_unsplit_steps/") and value
    }
    assert counters["dbo_steps"] == BATCHES[name].splits + sum(unsplit.values())
    assert unsplit.keys() <= {"threshold", "too_small"}


@every_case
@every_batch
def test_halves_yield_in_each_layer_unless_a_graph_is_replayed(
    engines: Engines, device: str, mode: str, name: str
) -> None:
    counters = counted(engines, device, mode, name)
    yields = 2 * LAYERS * counters["dbo_split_steps"]
    if not MODES[mode].graphs:
        assert counters["dbo_yields"] == yields
    elif BATCHES[name].decodes:
        # Their threads yielded when it was captured.
        assert counters["dbo_yields"] == 0
    else:
        assert 0 <= counters["dbo_yields"] <= yields


@every_case
@pytest.mark.parametrize("dbo", [False, True])
def test_the_engine_runs_as_it_was_asked_to(
    engines: Engines, device: str, mode: str, dbo: bool
) -> None:
    report: dict[str, Any] = engines.report(device, mode, dbo)
    assert report["device"] == device
    assert report["runner"] == RUNNERS[device]
    compiled = report["mode"] == "VLLM_COMPILE" and report["graphs_traced"] > 0
    assert compiled == MODES[mode].compiled, report
    assert (report["graphs_captured"] > 0) == MODES[mode].graphs, report
    if report["cudagraph_mode"] == "FULL_DECODE_ONLY":
        # Sizes from the threshold on have one of whole and one of split steps.
        split = [size for size in SIZES if dbo and size >= DECODE]
        assert report["graphs_captured"] == len(SIZES) + len(split)
    if not dbo:
        counters = report["results"]["decode-9"]["counters"]
        assert not counters.get("dbo_split_steps")


@every_case
def test_no_two_best_tokens_are_as_good_as_equal(
    engines: Engines, device: str, mode: str
) -> None:
    """Else a token might differ where nothing is wrong."""
    for result in engines.report(device, mode, dbo=False)["results"].values():
        for rows in result["logprobs"]:
            assert all(gap(row) > 3 * TOLERANCE["cuda"] for row in rows)
