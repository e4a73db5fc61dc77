"""The patched engine against the unpatched one, in process, workload by workload."""

from __future__ import annotations

from typing import Any

import pytest
from compare import ambiguous, difference
from jobs import DBO, DBO_OFF, MLA, REFERENCE, TOGETHER, WORKLOADS, Jobs, expected
from workloads import CONTROLS, MODELS, Workload

every_workload = pytest.mark.parametrize("name", list(WORKLOADS))
every_model = pytest.mark.parametrize("model", MODELS)
# Unpatched, MLA's rotary embedding is wrong on a CPU (test_rope_*).
no_mla = [model for model in MODELS if model != MLA]


def model_and_its_engines() -> list[Any]:
    return [
        pytest.param(
            model, marks=pytest.mark.engines(*((DBO, REFERENCE)[: 1 + (model != MLA)]))
        )
        for model in MODELS
    ]


with_engines = pytest.mark.parametrize("model", model_and_its_engines())


@with_engines
@every_workload
def test_split_steps_give_the_same_tokens_and_logprobs(
    jobs: Jobs, model: str, name: str
) -> None:
    found = difference(expected(jobs, model, name), jobs.results(DBO, model)[name])
    assert found.equal, found


@with_engines
@every_workload
def test_no_expected_token_is_a_matter_of_rounding(
    jobs: Jobs, model: str, name: str
) -> None:
    assert not ambiguous(expected(jobs, model, name))


@with_engines
@every_workload
def test_a_step_is_split_when_its_threshold_says_so(
    jobs: Jobs, model: str, name: str
) -> None:
    load = WORKLOADS[name]
    steps = jobs.results(DBO, model)[name]["steps"]
    assert [bool(step["slices"]) for step in steps] == [
        load.must_split(step) for step in steps
    ]
    if load.splits is not None:
        assert sum(bool(step["slices"]) for step in steps) == load.splits


@with_engines
@every_workload
def test_both_ubatches_ran_on_their_part(jobs: Jobs, model: str, name: str) -> None:
    for step in jobs.results(DBO, model)[name]["steps"]:
        parts = [stop - start for *_, start, stop in step["slices"]]
        assert sorted(step["ran"]) == list(map(list, enumerate(parts)))
        if parts:
            assert len(parts) == 2
            assert min(parts) > 0
            assert sum(parts) == sum(step["tokens"])


@with_engines
def test_one_request_is_cut_in_two(jobs: Jobs, model: str) -> None:
    first = jobs.results(DBO, model)["prefill-101"]["steps"][0]
    assert first["tokens"] == [101]
    # (first request, end, first token, end) of each ubatch.
    assert first["slices"] == [[0, 1, 0, 50], [0, 1, 50, 101]]


@with_engines
def test_the_workloads_cover_what_they_are_for(jobs: Jobs, model: str) -> None:
    results = jobs.results(DBO, model)
    steps = [step for name in WORKLOADS for step in results[name]["steps"]]
    split = [step for step in steps if step["slices"]]
    assert any(not step["prefill"] for step in split), "no decode was split"
    assert any(
        step["prefill"] and 1 in step["tokens"] and max(step["tokens"]) > 1
        for step in split
    ), "no mixed step was split"
    cut = [step for step in split if step["slices"][0][1] > step["slices"][1][0]]
    assert len(cut) >= 10, "few requests were in both ubatches"
    assert 0.2 < len(split) / len(steps) < 0.9
    randoms = [load for load in WORKLOADS.values() if load.name.startswith("random")]
    assert len(randoms) == 20
    assert sum(map(was_split(results), randoms)) >= 12


def was_split(results: dict[str, Any]) -> Any:
    def check(load: Workload) -> bool:
        return any(step["slices"] for step in results[load.name]["steps"])

    return check


@pytest.mark.parametrize("fault", CONTROLS)
@with_engines
def test_a_fault_would_be_seen(jobs: Jobs, model: str, fault: str) -> None:
    name = CONTROLS[fault]
    faulty = jobs.results(DBO, model)[fault]
    assert any(step["slices"] for step in faulty["steps"])
    assert not difference(expected(jobs, model, name), faulty).equal


@pytest.mark.engines(DBO_OFF, REFERENCE)
@pytest.mark.parametrize("model", no_mla)
@every_workload
def test_with_dbo_off_nothing_differs_by_a_bit(
    jobs: Jobs, model: str, name: str
) -> None:
    reference, patched = (
        jobs.results(kind, model)[name] for kind in (REFERENCE, DBO_OFF)
    )
    assert difference(reference, patched).identical
    assert reference["steps"] == patched["steps"]


def alone(results: dict[str, Any]) -> dict[str, Any]:
    """Results of prompts that ran one by one, put together."""
    parts = [results[f"alone-{index}"] for index in range(len(TOGETHER.prompts))]
    return {key: [part[key][0] for part in parts] for key in ("tokens", "logprobs")}


@pytest.mark.engines(REFERENCE, model=MLA)
def test_rope_unpatched_mla_depends_on_the_batch(jobs: Jobs) -> None:
    """Upstream's fault, the reason why MLA has another reference here."""
    results = jobs.results(REFERENCE, MLA)
    assert not difference(alone(results), results["together"]).equal


@pytest.mark.engines(DBO_OFF, model=MLA)
def test_rope_patched_mla_does_not_depend_on_the_batch(jobs: Jobs) -> None:
    results = jobs.results(DBO_OFF, MLA)
    found = difference(alone(results), results["together"])
    assert found.equal, found
