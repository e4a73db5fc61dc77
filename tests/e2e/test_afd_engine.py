"""AFD against one engine that does all, in process, workload by workload.

An FFN role serves engines with the attention role one after the other: without and
with DBO, in eager mode and compiled, with and without a prefix cache and prefill in
chunks, so that every two of these settings and of the gate's placements come together.
Of some models `make test` runs two engines only; `E2E_FULL=1` runs all of more models.

What is compared with is the unpatched engine in eager mode, and for MLA, whose rotary
embedding upstream has wrong on a CPU, the patched one without AFD and DBO.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
from afd_pairs import (
    CONNECTOR_FAULTS,
    FAULTY,
    MODELS,
    OUTSIDE,
    Model,
    Pairs,
    Variant,
)
from compare import difference
from jobs import WORKLOADS, Jobs
from sides import MODE_OPTIONS
from workloads import FULL

from tools.layout import Layout


@pytest.fixture(scope="module")
def pairs(layout: Layout, request: pytest.FixtureRequest) -> Iterator[Pairs]:
    """Engines; those of the tests to be run are started."""
    started = Pairs(layout)
    for item in request.session.items:
        if item.path == request.path and "model" in getattr(item, "fixturenames", ()):
            started.start(item.callspec.params["model"])
    yield started
    started.stop()


def marks(model: Model) -> Any:
    return [pytest.mark.engines(kind, model=model.name) for kind in model.kinds]


ENGINES = [(model, variant) for model in MODELS for variant in model.variants]
every_model = pytest.mark.parametrize("model", MODELS, ids=str)
every_engine = pytest.mark.parametrize(
    ("model", "variant"), ENGINES, ids=[f"{m}-{v}" for m, v in ENGINES]
)
every_workload = pytest.mark.parametrize(
    ("model", "variant", "name"),
    [
        pytest.param(
            model, variant, name, id=f"{model}-{variant}-{name}", marks=marks(model)
        )
        for model, variant in ENGINES
        for name in variant.names
    ],
)


@every_workload
def test_same_tokens_and_logprobs(
    pairs: Pairs, jobs: Jobs, model: Model, variant: Variant, name: str
) -> None:
    found = difference(
        pairs.expected(jobs, model, name), pairs.result(model, variant, name)
    )
    assert found.equal, found


@every_engine
def test_every_layer_of_every_stage_is_exchanged(
    pairs: Pairs, model: Model, variant: Variant
) -> None:
    """Counted by the attention role, whose steps are noted apart from it."""
    layers = len(pairs.engine(model, variant)["gate_on_ffn"])
    assert layers > 0
    for name in variant.names:
        result = pairs.result(model, variant, name)
        steps, counted = result["steps"], result["afd"]
        split = sum(bool(step["slices"]) for step in steps)
        assert counted["steps"] == len(steps) > 0
        assert counted["split_steps"] == split
        assert counted["exchanges"] == layers * (len(steps) + split)
        assert counted["bytes_sent"] >= counted["bytes_received"] > 0


@every_engine
def test_a_step_has_two_stages_when_its_threshold_says_so(
    pairs: Pairs, model: Model, variant: Variant
) -> None:
    split = 0
    for name in variant.names:
        for step in pairs.result(model, variant, name)["steps"]:
            two = bool(step["slices"])
            split += two
            if step["hits"]:
                # May keep a step from being split, see test_modes.py.
                assert not two or WORKLOADS[name].must_split(step)
            else:
                assert two == (variant.dbo and WORKLOADS[name].must_split(step))
            parts = [stop - start for *_, start, stop in step["slices"]]
            assert not two or (len(parts) == 2 and min(parts) > 0)
            assert sorted(step["ran"]) == list(map(list, enumerate(parts)))
    assert split >= 10 if variant.dbo else split == 0


@every_engine
def test_compiled_code_runs(pairs: Pairs, model: Model, variant: Variant) -> None:
    """Layers are run as Python code in eager mode only."""
    report = pairs.engine(model, variant)
    backends = {"dynamo": "eager", "inductor": "inductor"}
    if variant.mode == "eager":
        assert report["compilation"][0] == "NONE"
    else:
        assert report["compilation"] == ["DYNAMO_TRACE_ONCE", backends[variant.mode]]
        steps = [step for each in report["results"].values() for step in each["steps"]]
        assert all(step["layers"] == 0 for step in steps)


@every_engine
def test_the_prefix_cache_is_used_if_there_is_one(
    pairs: Pairs, model: Model, variant: Variant
) -> None:
    steps = pairs.result(model, variant, "hit-before-its-writer")["steps"]
    assert bool(sum(step["hits"] for step in steps)) == variant.prefix


@every_engine
def test_long_prompts_are_chunked_if_they_may_be(
    pairs: Pairs, model: Model, variant: Variant
) -> None:
    """`chunked` has a budget of 64 tokens a step and prompts of 180."""
    steps = pairs.result(model, variant, "chunked")["steps"]
    assert (max(max(step["tokens"]) for step in steps) <= 64) == variant.chunked


@every_engine
def test_the_gate_is_where_it_was_put(
    pairs: Pairs, model: Model, variant: Variant
) -> None:
    """And each role has the weights that it needs for that."""
    report = pairs.engine(model, variant)
    on_ffn = set(report["gate_on_ffn"])
    if variant.gate != "auto":
        assert on_ffn == {variant.gate == "ffn"}
    ours = set(report["parameters"])
    theirs = set(pairs.ffn(model, variant.gate)["parameters"])
    assert not [name for name in ours if re.search(r"\.experts\.(?!gate)", name)]
    assert [name for name in theirs if re.search(r"\.experts\.", name)]
    assert not [name for name in theirs if re.search("attn|embed_tokens", name)]
    assert [name for name in ours if re.search("attn|attention", name)]


@every_model
def test_every_two_settings_come_together(model: Model) -> None:
    if model.dtype != "float32":
        pytest.skip("In bfloat16 it is tested without DBO")
    if not (model.pairwise or FULL):
        pytest.skip("`E2E_FULL=1` runs more than two engines of this model")
    settings: dict[str, Any] = {
        "mode": list(MODE_OPTIONS),
        "dbo": [False, True],
        "prefix": [False] if model.mla else [False, True],
        "chunked": [False] if model.mla else [False, True],
        "gate": model.gates,
    }
    for one, other in combinations(settings, 2):
        assert {
            (getattr(variant, one), getattr(variant, other))
            for variant in model.variants
        } == set(product(settings[one], settings[other])), (one, other)


@pytest.mark.parametrize("fault", CONNECTOR_FAULTS)
@pytest.mark.parametrize(
    "model", [pytest.param(OUTSIDE[0], id=str(OUTSIDE[0]), marks=marks(OUTSIDE[0]))]
)
def test_a_connector_that_mixes_answers_up_would_be_seen(
    pairs: Pairs, jobs: Jobs, model: Model, fault: str
) -> None:
    """The same connector, from outside vLLM, does no wrong in the tests above."""
    name = CONNECTOR_FAULTS[fault]
    faulty = pairs.result(model, FAULTY, fault)
    assert faulty["afd"]["split_steps"] > 0
    assert not difference(pairs.expected(jobs, model, name), faulty).equal
    right = pairs.result(model, FAULTY, name)
    assert difference(pairs.expected(jobs, model, name), right).equal


def test_without_afd_none_of_its_modules_is_imported(pairs: Pairs) -> None:
    """Neither where requests are taken nor where the engine and its worker are."""
    plain = pairs.report(MODELS[0])["engines"]["plain"]
    assert plain["elsewhere"]
    assert plain["here"] == plain["there"] == []
    # They would be seen.
    assert pairs.engine(MODELS[0], MODELS[0].variants[0])["afd_modules"]
