"""What bench/thresholds.py makes of times and of options; it measures nothing here."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tools.bench import BENCHMARKS
from tools.layout import Layout

BENCH = Layout.default().root / "bench"
sys.path.append(str(BENCH))

import thresholds  # noqa: E402
from thresholds import NEVER, break_even, flags, judge, parse, summarise  # noqa: E402

Pair = tuple[dict[str, float], dict[str, float]]


def pairs(
    ratios: Mapping[int, float], noise: float = 0.01, outside: float = 25
) -> dict[int, list[Pair]]:
    """Steps whose model takes two stages that many times what it takes one.

    Args:
        noise: Spread of each time, relative.
        outside: Milliseconds that both take outside of the model.
    """
    rng = random.Random(1)

    def times(model: float) -> dict[str, float]:
        model *= rng.gauss(1, noise)
        return {"step": outside + model, "outside": outside}

    return {
        rows: [(times(10), times(10 * ratio)) for _ in range(15)]
        for rows, ratio in ratios.items()
    }


@pytest.mark.parametrize(
    ("pays", "found"),
    [
        ({2: False, 4: False, 8: False}, None),
        ({2: True, 4: True, 8: True}, 2),
        ({2: False, 4: True, 8: True}, 4),
        ({2: False, 4: False, 8: True}, 8),
        # Of a gap, what is above it counts.
        ({2: True, 4: False, 8: True}, 8),
        # What does not pay at the most measured is not known to pay above.
        ({2: True, 4: True, 8: False}, None),
        ({8: True, 2: False, 4: True}, 4),
        ({}, None),
    ],
)
def test_break_even(pays: dict[int, bool], found: int | None) -> None:
    assert break_even(pays) == found


@pytest.mark.parametrize(
    ("ratios", "sure"),
    [
        ({2: 1.3, 8: 1.2, 32: 1.1}, None),
        ({2: 0.9, 8: 0.8, 32: 0.7}, 2),
        ({2: 1.2, 8: 1.1, 32: 0.9, 128: 0.8}, 32),
    ],
)
def test_it_never_pays_always_or_from_some_count_on(
    ratios: dict[int, float], sure: int | None
) -> None:
    found = summarise(pairs(ratios))["break_even"]
    assert found["model"] == {"sure": sure, "by_median": sure}
    assert found["step"] == {"sure": sure, "by_median": sure}


def test_noise_is_no_gain() -> None:
    found = summarise(pairs({4: 1.2, 16: 0.995, 64: 0.8}, noise=0.1))
    assert found["rows"][16]["model"]["two_stages"] == "unclear"
    assert found["break_even"]["model"]["sure"] == 64


def test_of_unclear_counts_the_medians_are_told() -> None:
    # Most pairs are faster, but not so many that it could not be chance.
    ratios = [0.95] * 9 + [1.05] * 6
    mixed = [
        ({"step": 10, "outside": 0}, {"step": 10 * ratio, "outside": 0})
        for ratio in ratios
    ]
    found = {"decode": summarise({8: mixed})}
    both = {"sure": None, "by_median": 8}
    assert found["decode"]["break_even"] == {"step": both, "model": both}
    text = thresholds.report("a model", found)
    assert "not shown to pay up to 8" in text
    assert "by the medians they do from 8 on" in text
    assert flags(found, "model") == f"--dbo-decode-token-threshold {NEVER}"


def test_what_is_outside_of_the_model_is_set_apart() -> None:
    # Two stages save 1 ms in the model, and cost 3 ms outside of it.
    saves = ({"step": 35, "outside": 25}, {"step": 37, "outside": 28})
    found = summarise({16: [saves] * 15})
    assert found["rows"][16]["step"]["two_stages"] == "slower"
    assert found["rows"][16]["model"]["two_stages"] == "faster"
    assert found["rows"][16]["model"]["median"] == 0.9
    assert found["rows"][16]["two_stages_ms"] == {"step": 37, "outside": 28}
    assert found["break_even"]["step"]["sure"] is None
    assert found["break_even"]["model"]["sure"] == 16


@pytest.mark.parametrize("count", range(thresholds.LEAST_ROUNDS, 40))
def test_the_interval_covers_the_median_as_often_as_it_says(count: int) -> None:
    """A pair of equals is above 1 half of the time: the chance to be misjudged."""
    from math import comb

    def misjudged(above: int) -> bool:
        ratios = [1.1] * above + [0.9] * (count - above)
        return judge(ratios)["two_stages"] != "unclear"

    chance = sum(
        comb(count, above) / 2**count for above in range(count + 1) if misjudged(above)
    )
    assert chance <= 0.05


def test_flags_and_tables() -> None:
    found = {
        "decode": summarise(pairs({2: 1.2, 8: 0.8, 32: 0.7})),
        "prefill": summarise(pairs({16: 1.2, 64: 1.1})),
    }
    assert flags(found, "step") == (
        f"--dbo-decode-token-threshold 8 --dbo-prefill-token-threshold {NEVER}"
    )
    text = thresholds.report("GlooAFDConnector, a model", found)
    assert flags(found, "model") in text
    assert "decode: two stages pay from 8 on" in text
    assert "prefill: two stages are not shown to pay up to 64" in text
    result = {
        "command": "make bench-thresholds",
        "machine": {"cores": 2, "cpu": "Some CPU"},
        "connectors": {"X": {"m": found}},
    }
    where, _, *table = thresholds.markdown(result).splitlines()
    assert "`make bench-thresholds` on 2 cores of Some CPU" in where
    assert [line.count("|") for line in table] == [7] * 3
    assert table[-1] == "| `X` | m | 8 | never | 8 | never |"
    json.dumps(found)


def test_what_is_measured_unless_told() -> None:
    output, plan = parse(["out.json"])
    assert output == Path("out.json")
    assert [str(model) for model in plan.models] == [
        "qwen3-moe-like bfloat16",
        "deepseek-like bfloat16",
    ]
    assert plan.connectors == ["GlooAFDConnector"]
    assert plan.rows["decode"][-1] == 128
    options = plan.options
    assert options["max_num_seqs"] == 128
    assert options["max_num_batched_tokens"] == 512
    assert options["max_model_len"] > plan.context + 2 * plan.rounds


def test_a_checkpoint_and_other_rows(tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    _, plan = parse(
        ["out.json", "--model", str(folder), "--decode", "", "--prefill", "64,300,8"]
    )
    (model,) = plan.models
    assert (str(model), model.folder, model.dtype) == ("some-model", folder, "auto")
    assert plan.rows == {"decode": (), "prefill": (8, 64, 300)}
    assert plan.options["max_num_batched_tokens"] == 300
    assert sum(thresholds.prompts_of(300)) == 300


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "no-such"], ["--model", "no-such", "qwen3-moe-like"]),
        (["--model", "qwen3-moe-like"] * 2, ["--model", "have one name"]),
        (["--decode", "1,2"], ["--decode", "1,2", "at least 2"]),
        (["--prefill", "2,8"], ["--prefill", "2,8", "at least 4"]),
        (["--prefill", "8;16"], ["--prefill", "8;16"]),
        (["--decode", "", "--prefill", ""], ["nothing to measure"]),
        (["--rounds", "5"], ["--rounds", "5", "at least 6"]),
        (["--context", "0"], ["--context", "0", "at least 1"]),
        (["--rows", "5"], ["--rows"]),
    ],
)
def test_bad_options(
    arguments: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["out.json", *arguments])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert all(word in shown for word in told), shown


# The verb.


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `bench` builds and starts."""
    from tools import bench
    from tools.supervise import Outcome

    done: list[Any] = []

    def supervise(command: list[str], *_: Any) -> Outcome:
        done.append([Path(command[1]).name, *command[3:]])
        return Outcome(0, 1)

    monkeypatch.setattr(bench, "build", lambda layout: done.append("build"))
    monkeypatch.setattr(bench, "build_base", lambda layout: done.append("base"))
    monkeypatch.setattr(bench, "supervise", supervise)
    return done


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., None]:
    from tools import bench

    def run(*arguments: str) -> None:
        bench.command.main([*arguments], standalone_mode=False, obj=Layout(tmp_path))

    return run


def test_options_go_to_thresholds(ran: list[Any], bench: Callable[..., None]) -> None:
    bench("--only", "thresholds", "--", "--model", "m", "--rounds", "9")
    assert ran == ["build", ["thresholds.py", "--model", "m", "--rounds", "9"]]


def test_thresholds_are_not_part_of_all(
    ran: list[Any], bench: Callable[..., None]
) -> None:
    bench()
    assert ran[:2] == ["build", "base"]
    programs = [program for program, *_ in ran[2:]]
    assert "thresholds.py" not in programs
    assert len(programs) == len(BENCHMARKS) - 1
    assert ran.count(["overlap.py"]) == ran.count(["overlap.py", "--balanced"]) == 1


def test_several_times(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ran: list[Any],
    bench: Callable[..., None],
) -> None:
    from tools import bench as module
    from tools.supervise import Outcome

    def supervise(command: list[str], *_: Any) -> Outcome:
        ran.append(Path(command[1]).stem)
        Path(command[2]).parent.mkdir(parents=True, exist_ok=True)
        Path(command[2]).write_text(f"number {len(ran)}")
        return Outcome(0, 1)

    monkeypatch.setattr(module, "supervise", supervise)
    bench("--only", "exchange", "--only", "overlap", "--times", "2")
    assert ran == ["build", "exchange", "overlap", "exchange", "overlap"]
    results = tmp_path / "bench" / "results"
    kept = {
        file.relative_to(results).as_posix(): file.read_text()
        for file in results.rglob("*.json")
    }
    assert kept == {
        "exchange.json": "number 4",
        "overlap.json": "number 5",
        "runs/exchange-1.json": "number 2",
        "runs/overlap-1.json": "number 3",
        "runs/exchange-2.json": "number 4",
        "runs/overlap-2.json": "number 5",
    }


@pytest.mark.parametrize(
    "only", [[], ["--only", "overlap"], ["--only", "thresholds", "--only", "overlap"]]
)
def test_options_of_no_or_another_benchmark(
    only: list[str], ran: list[Any], bench: Callable[..., None]
) -> None:
    from tools.errors import WorkshopError

    with pytest.raises(WorkshopError, match="--rounds 9"):
        bench(*only, "--", "--rounds", "9")
    assert ran == []


def test_help_of_the_program() -> None:
    done = subprocess.run(
        [sys.executable, BENCH / "thresholds.py", "x", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for option in ("--model", "--connector", "--decode", "--prefill", "--rounds"):
        assert option in done.stdout
