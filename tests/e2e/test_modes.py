"""DBO in engines that compile the model or have a prefix cache.

What is compared with is an unpatched engine without a prefix cache, in eager mode save
for Inductor: its code alone moves logprobs of one of these models by 1.5e-4, so it is
compared with itself, and only its tokens with eager mode.
`E2E_FULL=1` adds models, seeds and unpatched engines in every mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from compare import difference
from jobs import (
    DBO,
    IN_EVERY_MODE,
    MLA,
    REFERENCE,
    SHARED,
    WORKLOADS,
    Jobs,
    expected,
    mode_controls,
)
from sides import MODE_OPTIONS, Kind
from workloads import FULL, MODELS

from tools.checkpoint import RECIPES

# MLA on a CPU has no prefix cache: vLLM turns it off. Eager mode without one is
# what test_engine.py is about.
POSSIBLE = [
    (model, Kind("patched", "v2", dbo=True, mode=mode, prefix=prefix))
    for model in MODELS
    for mode in MODE_OPTIONS
    for prefix in (False, True)
    if not (model == MLA and prefix) and (mode != "eager" or prefix)
]
# One model in every mode, and the others in one.
ENGINES = [
    (model, kind)
    for model, kind in POSSIBLE
    if FULL
    or model == MODELS[0]
    or (model == MODELS[1] and kind.mode == "eager")
    or (model == MLA and kind.mode == "inductor")
]


def eager_reference(model: str) -> Kind:
    """Which engine gives what `jobs.expected` returns."""
    return DBO if model == MLA else REFERENCE


def unpatched(kind: Kind, prefix: bool = False) -> Kind:
    """The unpatched engine in the same mode."""
    return Kind("reference", "v1", mode=kind.mode, prefix=prefix)


def references(model: str, kind: Kind) -> list[Kind]:
    """Engines that `expected_in_mode` asks."""
    compiled = [unpatched(kind)] if kind.mode == "inductor" else []
    return [eager_reference(model), *compiled]


def expected_in_mode(jobs: Jobs, model: str, kind: Kind, name: str) -> dict[str, Any]:
    """What a workload is to give; the tokens are those of eager mode."""
    if kind.mode != "inductor":
        return expected(jobs, model, name)
    # Compiled, also MLA's rotary embedding is right without the series.
    result = jobs.results(unpatched(kind), model)[name]
    assert difference(expected(jobs, model, name), result).token is None
    return result


def parameters(
    engines: list[tuple[str, Kind]],
    compared: Callable[[str, Kind], list[Kind]] = references,
) -> Any:
    """Parameters `model` and `kind`, with the engines that such a test needs."""
    return pytest.mark.parametrize(
        ("model", "kind"),
        [
            pytest.param(
                model,
                kind,
                id=f"{model}-{kind.mode}{'-prefix' * kind.prefix}",
                marks=pytest.mark.engines(kind, *compared(model, kind)),
            )
            for model, kind in engines
        ],
    )


every_engine = parameters(ENGINES)
with_prefix_cache = parameters([each for each in ENGINES if each[1].prefix])
every_workload = pytest.mark.parametrize("name", IN_EVERY_MODE)


@every_engine
@every_workload
def test_same_tokens_and_logprobs(
    jobs: Jobs, model: str, kind: Kind, name: str
) -> None:
    found = difference(
        expected_in_mode(jobs, model, kind, name), jobs.results(kind, model)[name]
    )
    assert found.equal, found


def refused(kind: Kind, results: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Steps that reach their threshold and were not split."""
    load = WORKLOADS[name]
    return [
        step
        for step in results[name]["steps"]
        if load.must_split(step) and not step["slices"]
    ]


@every_engine
@every_workload
def test_only_a_prefix_hit_keeps_a_step_from_being_split(
    jobs: Jobs, model: str, kind: Kind, name: str
) -> None:
    results = jobs.results(kind, model)
    steps = results[name]["steps"]
    assert all(WORKLOADS[name].must_split(step) for step in steps if step["slices"])
    assert all(step["hits"] for step in refused(kind, results, name))


@every_engine
@every_workload
def test_ubatches_hand_off_once_a_layer(
    jobs: Jobs, model: str, kind: Kind, name: str
) -> None:
    layers = RECIPES[model].config["num_hidden_layers"]
    for step in jobs.results(kind, model)[name]["steps"]:
        assert step["yields"] == ([0, 1] * layers if step["slices"] else [])
        assert [ubatch for ubatch, _ in step["ran"]] == ([0, 1] * bool(step["slices"]))


@every_engine
def test_compiled_code_runs(jobs: Jobs, model: str, kind: Kind) -> None:
    """Layers are run as Python code in eager mode only."""
    layers = RECIPES[model].config["num_hidden_layers"]
    results = jobs.results(kind, model)
    for name in IN_EVERY_MODE:
        for step in results[name]["steps"]:
            runs = 2 if step["slices"] else 1
            assert step["layers"] == (layers * runs if kind.mode == "eager" else 0)


@every_engine
@pytest.mark.parametrize("name", SHARED)
def test_shared_workloads_cover_what_they_are_for(
    jobs: Jobs, model: str, kind: Kind, name: str
) -> None:
    load = WORKLOADS[name]
    assert len(load.prompts) == 200
    results = jobs.results(kind, model)
    steps = results[name]["steps"]
    split = [step for step in steps if step["slices"]]
    assert sum(not step["prefill"] for step in split) >= 10, "few decodes were split"
    mixed = [
        step for step in split if step["prefill"] and {1, max(step["tokens"])} != {1}
    ]
    assert sum(1 in step["tokens"] for step in mixed) >= 30, "few mixed steps"
    odd = [step for step in split if sum(step["tokens"]) % 2]
    assert len(odd) >= 20, "few odd sizes"
    assert len(split) < len(steps)
    hits = sum(step["hits"] for step in steps)
    if kind.prefix:
        # A quarter of the prompts and more, and some of it in split steps.
        assert hits > sum(map(len, load.prompts)) / 4
        assert sum(bool(step["hits"]) for step in split) >= 10
        assert refused(kind, results, name)
    else:
        assert not hits
        assert not refused(kind, results, name)


@with_prefix_cache
def test_a_hit_before_its_writer_is_not_split(
    jobs: Jobs, model: str, kind: Kind
) -> None:
    results = jobs.results(kind, model)
    for name, count in (("hit-before-its-writer", 1), ("hit-behind-its-writer", 0)):
        assert sum(step["hits"] for step in results[name]["steps"]) > 0
        assert len(refused(kind, results, name)) == count


@every_engine
def test_a_fault_would_be_seen(jobs: Jobs, model: str, kind: Kind) -> None:
    results = jobs.results(kind, model)
    for fault, name in mode_controls(kind):
        key = f"{fault} {name}"
        assert any(step["slices"] for step in results[key]["steps"])
        # Without the veto every step is split that reaches its threshold.
        assert not refused(kind, results | {name: results[key]}, name)
        found = difference(expected_in_mode(jobs, model, kind, name), results[key])
        # Not by a little: some token is another one.
        assert not found.equal, key
        assert found.token or fault != "no_prefix_veto", key


def twin(model: str, kind: Kind) -> list[Kind]:
    """The unpatched engine in the same mode, with a prefix cache if `kind` has one."""
    return [unpatched(kind, kind.prefix)]


@parameters(
    [each for each in ENGINES if each[0] != MLA]
    if FULL
    else [each for each in ENGINES if each[0] == MODELS[0] and each[1].mode == "eager"],
    twin,
)
@every_workload
def test_same_as_unpatched_in_the_same_mode(
    jobs: Jobs, model: str, kind: Kind, name: str
) -> None:
    (other,) = twin(model, kind)
    reference, patched = (jobs.results(each, model)[name] for each in (other, kind))
    found = difference(reference, patched)
    assert found.equal, found
    for key in ("tokens", "hits"):
        assert [step[key] for step in reference["steps"]] == [
            step[key] for step in patched["steps"]
        ]
