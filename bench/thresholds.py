"""From how many tokens on it pays to split a step: the two thresholds of DBO.

For a model and a connector, AFD in one stage and in two take turns on one pair of
roles, whose thresholds are moved: steps that only decode some number of requests, and
prefills of some number of tokens. Each pair of steps gives a ratio; where the 95 %
interval of its median is below 1, two stages are faster. The break-even is the
smallest measured count from which on that holds at every count.

Break-even is told of whole steps and of the model alone. On a CPU what surrounds the
model runs in Triton's interpreter and takes tens of milliseconds; whole steps tell
what pays there, the model alone what pays where kernels are compiled.

`make bench-thresholds` runs it: two small models, about eight minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from report import keep, machine, spread  # noqa: E402
from roles import LONGEST_PROMPT, MODELS, NEVER, Roles, prompts_of  # noqa: E402

from tools.env import disjoint_cores  # noqa: E402
from tools.errors import WorkshopError  # noqa: E402
from tools.layout import Layout  # noqa: E402
from tools.ui import say, step  # noqa: E402

CONNECTOR = "GlooAFDConnector"
DECODE = (2, 4, 8, 16, 32, 64, 128)
PREFILL = (8, 16, 32, 64, 128, 256, 512)
# A batch needs a token for each stage; prompts of one token count as decodes.
LEAST = {"decode": 2, "prefill": 4}
CONTEXT = 32
ROUNDS = 15
# With fewer pairs not even the whole range of ratios is a 95 % interval.
LEAST_ROUNDS = 6
# A role loads a checkpoint of any size.
START_TIMEOUT_S = 1800

FLAGS = {
    "decode": "--dbo-decode-token-threshold",
    "prefill": "--dbo-prefill-token-threshold",
}
# Times of a step in one stage, and of one in two.
Pair = tuple[Mapping[str, float], Mapping[str, float]]

PARTS = {"step": "whole steps", "model": "the model alone"}


@dataclass(frozen=True)
class Model:
    """What is served.

    Attributes:
        name: Of the folder, or the key of `MODELS`.
        folder: Checkpoint; None: made of `MODELS`, with dummy weights.
        dtype: As `--dtype`.
    """

    name: str
    folder: Path | None
    dtype: str

    def __str__(self) -> str:
        return self.name if self.dtype == "auto" else f"{self.name} {self.dtype}"


@dataclass(frozen=True)
class Plan:
    """What to measure; see the options."""

    models: Sequence[Model]
    connectors: Sequence[str]
    module: str | None
    rows: Mapping[str, Sequence[int]]
    context: int
    rounds: int

    @property
    def options(self) -> dict[str, int]:
        """Of the engines: so much that each batch is one step."""
        prefill = self.rows["prefill"]
        prompts = [len(prompts_of(rows)) for rows in prefill]
        requests = max(self.rows["decode"], default=1)
        # Some decode while prompts of others still wait.
        tokens = self.context + requests + 2 * (self.rounds + 1)
        return {
            "max_model_len": max(tokens, LONGEST_PROMPT) + 1,
            "max_num_batched_tokens": max([*prefill, requests + self.context]),
            "max_num_seqs": max([*prompts, requests]),
        }


# What is made of the times.


def judge(ratios: Sequence[float]) -> dict[str, Any]:
    """How far ratios of two stages to one are spread, and what that says."""
    told = spread(ratios)
    low, high = told["median_95"]
    verdict = "faster" if high < 1 else "slower" if low > 1 else "unclear"
    return told | {"two_stages": verdict}


def break_even(pays: Mapping[int, bool]) -> int | None:
    """The smallest count from which on two stages pay at every count, if any."""
    found = None
    for rows in sorted(pays, reverse=True):
        if not pays[rows]:
            break
        found = rows
    return found


def summarise(pairs: Mapping[int, Sequence[Pair]]) -> dict[str, Any]:
    """Verdicts at each row count, and the break-even that follows."""
    rows: dict[int, dict[str, Any]] = {}
    for count, found in pairs.items():
        rows[count] = {
            part: judge([ms(two, part) / ms(one, part) for one, two in found])
            for part in PARTS
        }
        for name, steps in zip(
            ("one_stage_ms", "two_stages_ms"), zip(*found, strict=True), strict=True
        ):
            rows[count][name] = {
                key: round(statistics.median(each[key] for each in steps), 2)
                for key in ("step", "outside")
            }
    return {
        "break_even": {
            part: {
                "sure": break_even(
                    {n: row[part]["two_stages"] == "faster" for n, row in rows.items()}
                ),
                "by_median": break_even(
                    {n: row[part]["median"] < 1 for n, row in rows.items()}
                ),
            }
            for part in PARTS
        },
        "rows": rows,
    }


def ms(times: Mapping[str, float], part: str) -> float:
    return times["step"] - (times["outside"] if part == "model" else 0)


def flags(found: Mapping[str, Any], part: str) -> str:
    """The flags to use; a kind of batch that was not measured has none."""
    return " ".join(
        f"{flag} {found[kind]['break_even'][part]['sure'] or NEVER}"
        for kind, flag in FLAGS.items()
        if kind in found
    )


# What is said of it.


def report(name: str, found: Mapping[str, Any]) -> str:
    """Table, break-even and flags of a model and a connector."""
    head = (
        f"{'':>7} {'rows':>5}  {'outside of the model':>21}"
        f"  {'whole steps':>17} {'two to one (95 %)':>21} {'':>8}"
        f"  {'the model alone':>17} {'two to one (95 %)':>21}"
    )
    lines = [f"{name}; ms of one stage and of two", head]
    for kind in FLAGS:
        for rows, row in found.get(kind, {"rows": {}})["rows"].items():
            one, two = row["one_stage_ms"], row["two_stages_ms"]
            cells = [f"{kind:>7} {rows:>5}  {one['outside']:>11} {two['outside']:>9}"]
            for part in PARTS:
                low, high = row[part]["median_95"]
                ratio = f"{row[part]['median']:.3f} ({low:.3f}-{high:.3f})"
                cells.append(
                    f"{ms(one, part):>8.1f} {ms(two, part):>8.1f} {ratio:>21}"
                    f" {row[part]['two_stages']:>8}"
                )
            lines.append("  ".join(cells))
    for part, what in PARTS.items():
        lines.append(f"By {what}:")
        lines += [
            f"  {kind}: {told(kind, found[kind], part)}"
            for kind in FLAGS
            if kind in found
        ]
        lines.append(f"  {flags(found, part)}")
    return "\n".join(lines)


def told(kind: str, found: Mapping[str, Any], part: str) -> str:
    """A sentence about a break-even."""
    least, most = min(found["rows"]), max(found["rows"])
    sure, median = (found["break_even"][part][key] for key in ("sure", "by_median"))
    if sure is None:
        sentence = f"two stages are not shown to pay up to {most}, so split none"
        if median is not None:
            sentence += f"; by the medians they do from {median} on: more --rounds"
        return sentence
    sentence = f"two stages pay from {sure} on"
    if sure == least:
        sentence += ", the least measured"
    if median != sure:
        sentence += f"; by the medians from {median} on"
    return sentence


def markdown(result: Mapping[str, Any]) -> str:
    """What the documentation recommends."""
    where = result["machine"]
    columns = [(part, kind) for part in PARTS for kind in FLAGS]
    head = [f"{kind}, {PARTS[part]}" for part, kind in columns]
    lines = [["connector", "model", *head], ["---"] * (2 + len(head))]
    for connector, models in result["connectors"].items():
        for model, found in models.items():
            cells = [
                str(found[kind]["break_even"][part]["sure"] or "never")
                if kind in found
                else "-"
                for part, kind in columns
            ]
            lines.append([f"`{connector}`", model, *cells])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return (
        f"Splitting pays from so many tokens on, by `{result['command']}` on "
        f"{where['cores']} cores of {where['cpu']}, half of them for each role:\n\n"
        f"{table}"
    )


# Measuring.


def measure_kind(
    roles: Roles, plan: Plan, kind: str, order: random.Random
) -> dict[int, list[Pair]]:
    """By row count, pairs of steps, the one or the other of them first."""
    found: dict[int, list[Pair]] = {}
    for rows in plan.rows[kind]:
        if kind == "decode":
            roles.ask("attention", "begin_decode", rows, plan.context)
            ask = partial(roles.ask, "attention", "decode")
        else:
            ask = partial(roles.ask, "attention", "run", rows)
        # The first round warms up.
        rounds = [
            {stages: ask(stages) for stages in order.sample((1, 2), 2)}
            for _ in range(plan.rounds + 1)
        ]
        found[rows] = [(times[1], times[2]) for times in rounds[1:]]
        if kind == "decode":
            roles.ask("attention", "end_decode")
    return found


def measure_model(
    layout: Layout, plan: Plan, model: Model, connector: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """What `summarise` says of each kind, and the versions of what ran."""
    attention, ffn = (
        [int(core) for core in cores.split(",")] for cores in disjoint_cores(2)
    )
    afd = {"afd_connector": connector}
    if plan.module is not None:
        afd["afd_connector_module_path"] = plan.module
    options = plan.options | {"dtype": model.dtype}
    with ExitStack() as stack:
        if model.folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (folder / "config.json").write_text(json.dumps(MODELS[model.name]))
            options |= {"model": str(folder), "load_format": "dummy"}
        else:
            options["model"] = str(model.folder)
        with step("Start of the roles"):
            roles = stack.enter_context(
                Roles(
                    layout,
                    "thresholds",
                    options,
                    attention,
                    ffn,
                    afd=afd,
                    start_timeout=START_TIMEOUT_S,
                )
            )
        found = {}
        order = random.Random(0)
        for kind, rows in plan.rows.items():
            if rows:
                with step(f"{kind} of {', '.join(map(str, rows))} rows"):
                    found[kind] = summarise(measure_kind(roles, plan, kind, order))
        return found, roles.versions


def measure(layout: Layout, plan: Plan) -> dict[str, Any]:
    result: dict[str, Any] = {"connectors": {}}
    for connector in plan.connectors:
        models = result["connectors"][connector] = {}
        for model in plan.models:
            name = f"{connector}, {model}"
            with step(name):
                found, result["versions"] = measure_model(
                    layout, plan, model, connector
                )
            print(report(name, found), flush=True)
            models[str(model)] = {"flags": {part: flags(found, part) for part in PARTS}}
            models[str(model)] |= found
    return result


# What is asked for.


def counts(kind: str, text: str) -> tuple[int, ...]:
    """Row counts such as `2,4,8`; none of an empty text."""
    least = LEAST[kind]
    words = [word for word in text.split(",") if text]
    if not all(word.strip().isdecimal() and int(word) >= least for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers of at least {least}, such as 16,64,256"
        )
    return tuple(sorted({int(word) for word in words}))


def at_least(least: int, text: str) -> int:
    if not (text.isdecimal() and int(text) >= least):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of at least {least}"
        )
    return int(text)


def model_of(text: str, dtype: str | None) -> Model:
    if text in MODELS:
        return Model(text, None, dtype or "bfloat16")
    folder = Path(text)
    if not (folder / "config.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a folder with a config.json nor one of "
            f"{', '.join(MODELS)}"
        )
    return Model(folder.resolve().name, folder.resolve(), dtype or "auto")


def parse(arguments: Sequence[str]) -> tuple[Path, Plan]:
    """Where the result is to be written, and what to measure."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="make bench-thresholds",
        description=description,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    # `tools bench` gives it.
    add("output", type=Path, help=argparse.SUPPRESS)
    add(
        "--model",
        action="append",
        help=f"a checkpoint's folder, or one of {', '.join(MODELS)}, made with dummy "
        "weights; may be given several times (default: these)",
    )
    add("--dtype", help="(default: bfloat16 for those, else the checkpoint's)")
    add(
        "--connector",
        action="append",
        help=f"may be given several times (default: {CONNECTOR})",
    )
    add("--connector-module", help="Python module of a connector not part of vLLM")
    for kind, default in (("decode", DECODE), ("prefill", PREFILL)):
        add(
            f"--{kind}",
            type=partial(counts, kind),
            metavar="ROWS",
            default=default,
            help="row counts, with commas; '' for none "
            f"(default: {','.join(map(str, default))})",
        )
    add(
        "--context",
        type=partial(at_least, 1),
        metavar="TOKENS",
        default=CONTEXT,
        help="tokens of each request before it decodes (default: %(default)s)",
    )
    add(
        "--rounds",
        type=partial(at_least, LEAST_ROUNDS),
        metavar="N",
        default=ROUNDS,
        help="pairs of steps at each row count (default: %(default)s)",
    )
    given = parser.parse_args(arguments)
    if not given.decode and not given.prefill:
        parser.error("--decode and --prefill are both empty: nothing to measure")
    models = []
    for text in given.model or MODELS:
        try:
            models.append(model_of(text, given.dtype))
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument --model: {error}")
    if len(set(map(str, models))) < len(models):
        names = ", ".join(map(str, models))
        parser.error(f"argument --model: two of {names} have one name")
    return given.output, Plan(
        models,
        given.connector or [CONNECTOR],
        given.connector_module,
        {"decode": given.decode, "prefill": given.prefill},
        given.context,
        given.rounds,
    )


def main() -> None:
    output, plan = parse(sys.argv[1:])
    layout = Layout(ROOT)
    given = shlex.join(sys.argv[2:])
    about = {
        "what": "time of a step in two stages to one in one, paired; below 1: two are "
        "faster. break_even: smallest rows from which on that is so at every count, "
        "sure: by the 95 % interval of each median",
        "command": "make bench-thresholds" + (f' ARGS="{given}"' if given else ""),
        "machine": machine(),
        "context": plan.context,
        "rounds": plan.rounds,
    }
    start = time.monotonic()
    try:
        result = about | measure(layout, plan)
    except (WorkshopError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    result["seconds"] = round(time.monotonic() - start)
    keep(layout, output, result)
    say(f"    it took {result['seconds']} s")
    print(markdown(result))


if __name__ == "__main__":
    main()
