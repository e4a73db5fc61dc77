"""What a step gains from AFD in two stages, and how far that is from ideal overlap.

One core a role. In one run, and taking turns: one engine that does all on one thread
and on two, AFD in one stage and in two (one engine, whose threshold is moved), and
half of each step in one stage. From the times of the halves' layers follows the ideal
schedule: each role works on the stages in order, layer by layer, a layer of a stage
begins when its predecessor on the other role has ended, and what travels takes no
time. Only prefill is measured, whose steps are as long as one likes; what Triton's
interpreter costs outside of the model is told apart.

`make bench ARGS='--only overlap'` runs it.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from roles import MODELS, Roles, prompts_of  # noqa: E402

ROWS = (64, 256, 512, 1024, 2048)
# From here on a two-stage step is to be within `TARGETS` of the ideal schedule.
LARGE = 256
TARGETS = {"small": 1.15, "large": 1.05, "monolithic": 1.05}
DTYPES = ("bfloat16", "float32")
# Its experts take about as long as its attention.
BALANCED = {
    "qwen3-moe-balanced": MODELS["qwen3-moe-like"] | {"moe_intermediate_size": 576}
}
ROUNDS = 7


def ideal_ms(
    pre: float, layers: Sequence[float], post: float, ffn: Sequence[float]
) -> float:
    """Length of the ideal schedule of two equal stages, fill included.

    Args:
        pre: Attention's milliseconds of a half before its first exchange.
        layers: Between two exchanges; one less than there are.
        post: After the last one.
        ffn: FFN's, layer by layer.
    """
    attention = [pre, *layers]
    at = at_ffn = 0.0
    answered = [0.0, 0.0]
    for mine, theirs in zip(attention, ffn, strict=True):
        for stage in (0, 1):
            at = max(at, answered[stage]) + mine
            at_ffn = max(at_ffn, at) + theirs
            answered[stage] = at_ffn
    for stage in (0, 1):
        at = max(at, answered[stage]) + post
    return at


def engines(layout: Any, config: dict[str, Any], dtype: str, folder: Path) -> Roles:
    """Those of a model in a dtype; to be entered."""
    (folder / "config.json").write_text(json.dumps(config))
    one, other = sorted(os.sched_getaffinity(0))[:2]
    return Roles(
        layout,
        "overlap",
        {
            "model": str(folder),
            "load_format": "dummy",
            "dtype": dtype,
            "max_model_len": 256,
            "max_num_batched_tokens": max(ROWS),
            "max_num_seqs": max(map(len, map(prompts_of, ROWS))),
        },
        attention=[one],
        ffn=[other],
        alone={"mono_1": [one], "mono_2": [one, other]},
    )


def measure_round(roles: Roles, rows: int, order: random.Random) -> dict[str, Any]:
    """Each kind of step once."""
    kinds = ["mono_1", "mono_2", "one_stage", "two_stages", "half"]
    found: dict[str, Any] = {}
    for kind in order.sample(kinds, len(kinds)):
        if kind.startswith("mono"):
            found[kind] = roles.ask(kind, "run", rows)
            continue
        roles.ask("ffn", "layers")
        stages = 2 if kind == "two_stages" else 1
        found[kind] = roles.ask(
            "attention", "run", rows // 2 if kind == "half" else rows, stages
        )
        found[kind]["ffn"] = roles.ask("ffn", "layers")
    return found


def summarise(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, and what follows from them, in milliseconds."""

    def median(kind: str, key: str) -> float:
        return statistics.median(each[kind][key] for each in rounds)

    def medians(kind: str, key: str) -> list[float]:
        columns = zip(*(each[kind][key] for each in rounds), strict=True)
        return [statistics.median(column) for column in columns]

    def attention(kind: str) -> float:
        parts = sum(medians(kind, "layers"))
        return parts + median(kind, "pre") + median(kind, "post")

    steps = {
        kind: median(kind, "step")
        for kind in ("mono_1", "mono_2", "one_stage", "two_stages")
    }
    ideal = median("two_stages", "outside") + ideal_ms(
        median("half", "pre"),
        medians("half", "layers"),
        median("half", "post"),
        medians("half", "ffn"),
    )
    one, two = steps["one_stage"], steps["two_stages"]
    ratios = {
        "ratio_to_ideal": two / ideal,
        "overlap_efficiency": (one - two) / (one - ideal),
        "gain": one / two,
        "ratio_to_monolithic": two / steps["mono_2"],
        "ratio_to_monolithic_1_thread": two / steps["mono_1"],
    }
    low, high = statistics.quantiles(
        (each["two_stages"]["step"] / ideal for each in rounds), n=4
    )[::2]
    times = steps | {
        "ideal": ideal,
        "outside": median("two_stages", "outside"),
        "attention_whole": attention("one_stage"),
        "attention_halves": 2 * attention("half"),
        "ffn_whole": sum(medians("one_stage", "ffn")),
        "ffn_halves": 2 * sum(medians("half", "ffn")),
    }
    return (
        {name: round(value, 3) for name, value in ratios.items()}
        | {"ratio_to_ideal_quartiles": [round(low, 3), round(high, 3)]}
        | {"ms": {name: round(value, 1) for name, value in times.items()}}
    )


def measure(layout: Any, models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from tools.ui import say, step

    result: dict[str, Any] = {"configurations": {}}
    for model, config in models.items():
        for dtype in DTYPES:
            name = f"{model} {dtype}"
            with (
                step(f"{name}: start of the engines"),
                tempfile.TemporaryDirectory() as folder,
                engines(layout, config, dtype, Path(folder)) as roles,
            ):
                result["versions"] = roles.versions
                order = random.Random(0)
                found = {}
                for rows in ROWS:
                    # The first round warms up.
                    rounds = [
                        measure_round(roles, rows, order) for _ in range(ROUNDS + 1)
                    ]
                    found[rows] = summarise(rounds[1:])
                    say(f"    {name}, {rows} rows: {found[rows]}")
                result["configurations"][name] = found
    everything = result["configurations"].values()
    result["worst_ratio_to_ideal"] = max(
        found[rows]["ratio_to_ideal"]
        for found in everything
        for rows in ROWS
        if rows >= LARGE
    )
    result["worst_ratio_to_ideal_at_64"] = max(
        found[64]["ratio_to_ideal"] for found in everything
    )
    return result


def table(result: dict[str, Any]) -> str:
    head = (
        "rows  monolithic 1, 2 threads  AFD 1, 2 stages   ideal  to ideal  "
        "efficiency  to monolithic   A, F of halves"
    )
    lines = []
    for name, found in result["configurations"].items():
        lines += [name, head]
        for rows, row in found.items():
            ms = row["ms"]
            lines.append(
                f"{rows:>4}  {ms['mono_1']:>11.1f} {ms['mono_2']:>11.1f}"
                f" {ms['one_stage']:>9.1f} {ms['two_stages']:>7.1f}"
                f" {ms['ideal']:>7.1f} {row['ratio_to_ideal']:>9.3f}"
                f" {row['overlap_efficiency']:>11.2f}"
                f" {row['ratio_to_monolithic']:>14.3f}"
                f" {ms['attention_halves']:>9.1f} {ms['ffn_halves']:>7.1f}"
            )
    return "\n".join(lines)


def draw(result: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = result["configurations"]
    figure, axes = pyplot.subplots(
        1, len(found), figsize=(4 * len(found), 4), sharey=True, layout="constrained"
    )
    for axis, (name, by_rows) in zip(axes, found.items(), strict=True):
        rows = list(by_rows)
        for kind, label in (
            ("one_stage", "AFD, one stage"),
            ("mono_1", "one engine, 1 thread"),
            ("mono_2", "one engine, 2 threads"),
            ("two_stages", "AFD, two stages"),
        ):
            ratios = [by_rows[n]["ms"][kind] / by_rows[n]["ms"]["ideal"] for n in rows]
            axis.plot(rows, ratios, marker="o", label=label)
        axis.axhline(1, color="gray", linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xticks(rows, [str(n) for n in rows])
        axis.set_xlabel("rows of a prefill step")
        axis.set_title(name)
    axes[0].set_ylabel("time of a step / ideal overlap")
    axes[0].legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    from report import keep, machine, output_parser

    from tools.layout import Layout

    parser = output_parser(__doc__)
    parser.add_argument(
        "--balanced",
        action="store_true",
        help="Measure a model whose experts take about as long as its attention.",
    )
    given = parser.parse_args()
    layout = Layout(ROOT)
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("Two cores are needed, one for each role.")
    about = {
        "command": f"make bench ARGS='--only {given.output.stem}'",
        "machine": machine(),
        "targets": TARGETS,
        "rounds": ROUNDS,
    }
    result = about | measure(layout, BALANCED if given.balanced else MODELS)
    keep(layout, given.output, result)
    draw(result, given.output.with_suffix(".png"))
    print(table(result))


if __name__ == "__main__":
    main()
