"""One screen: base, series, tree, environment, and what `vllm serve` would load."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from tools.errors import WorkshopError
from tools.layout import Layout
from tools.pin import Pin, load_pin
from tools.series import load_series
from tools.state import State, base_commit, inspect, read_stamp
from tools.ui import patches


def collect(layout: Layout) -> dict[str, Any]:
    """All facts of the screen; the keys are those of `--json`.

    A part that cannot be found out holds `problem` instead of its facts.
    """
    with ThreadPoolExecutor() as pool:
        serving = pool.submit(_part, _serving, layout)
        parts = {
            "base": _part(_base, layout),
            "series": _part(_series, layout),
            "tree": _part(_tree, layout),
            "environment": _part(_environment, layout),
        }
        return {**parts, "serving": serving.result()}


def _part(find: Callable[[Layout], dict[str, Any]], layout: Layout) -> dict[str, Any]:
    try:
        return find(layout)
    except WorkshopError as error:
        return {"problem": str(error), "todo": error.todo}


def _base(layout: Layout) -> dict[str, Any]:
    pin = load_pin(layout.pin)
    return {
        "version": pin.version,
        "upstream_commit": pin.commit,
        "tree": pin.tree,
        "commit": base_commit(pin),
    }


def _series(layout: Layout) -> dict[str, Any]:
    pin = load_pin(layout.pin)
    series = load_series(layout)
    digest = series.digest(pin.tree)
    return {
        "slugs": list(series.slugs),
        "digest": digest,
        "pinned_tip_tree": pin.tip_tree,
        "tip_tree_matches": _tip_tree_matches(layout, pin, digest),
    }


def _tip_tree_matches(layout: Layout, pin: Pin, digest: str) -> bool | None:
    """Whether the series gives the pinned tip tree; None if it was not applied yet."""
    stamp = read_stamp(layout.tree)
    if stamp is None or stamp["series_digest"] != digest:
        return None
    return stamp["tip_tree"] == pin.tip_tree


def _tree(layout: Layout) -> dict[str, Any]:
    seen = inspect(layout)
    return {
        "path": str(layout.tree),
        "state": seen.state.name,
        "detail": seen.detail,
        "todo": seen.todo,
        "branch": seen.branch,
        "head": seen.head,
        "tip": seen.tip,
    }


def _environment(layout: Layout) -> dict[str, Any]:
    from tools.env import load_manifest, manifest_file

    built = load_manifest(manifest_file(layout))
    if built is None:
        return {"built": False, "todo": "make build"}
    return {
        "built": True,
        "device": built.device,
        "version": built.version,
        "torch": built.torch,
        "triton": built.triton,
        "wheel": built.wheel,
        "tree": built.tree,
    }


def _serving(layout: Layout) -> dict[str, Any]:
    from tools.doctor import serving

    found = serving(layout)
    if found.problem:
        return {"problem": found.problem, "todo": "make build"}
    return {
        "executable": str(found.executable),
        "vllm": str(found.vllm_path) if found.vllm_path else None,
        "version": found.version,
        "patched_tree": found.vllm_path == layout.tree / "vllm",
    }


def rows(facts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The screen, as (label, text); the text may have several lines."""
    show = {
        "base": _show_base,
        "series": _show_series,
        "tree": _show_tree,
        "environment": _show_environment,
        "serving": _show_serving,
    }
    labels = {"tree": "build/vllm", "environment": ".venv", "serving": "vllm serve"}
    found = []
    for part, text in show.items():
        seen = facts[part]
        lines = seen["problem"] if "problem" in seen else text(seen)
        found.append((labels.get(part, part), lines))
    if todo := next_step(facts):
        found.append(("next", todo))
    return found


def next_step(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """What to do first."""
    for part in ("base", "series", "tree", "environment", "serving"):
        if todo := facts[part].get("todo"):
            return str(todo)
    if not facts["serving"].get("patched_tree", True):
        return "make doctor"
    return "make serve" if facts["tree"].get("state") == State.APPLIED.name else ""


def _show_base(seen: Mapping[str, Any]) -> str:
    return (
        f"vLLM {seen['version']}, upstream commit {seen['upstream_commit'][:12]}\n"
        f"tree {seen['tree'][:12]}, commit {seen['commit'][:12]} in build/vllm"
    )


def _show_series(seen: Mapping[str, Any]) -> str:
    count = patches(len(seen["slugs"]))
    tip = {
        True: "matches what was applied",
        False: "DIFFERS from what was applied",
        None: "not applied yet",
    }[seen["tip_tree_matches"]]
    lines = [f"{count}, digest {seen['digest'][:12]}"]
    lines += [f"{at:2d} {slug}" for at, slug in enumerate(seen["slugs"], 1)]
    return "\n".join([*lines, f"pinned tip tree {seen['pinned_tip_tree'][:12]}: {tip}"])


def _show_tree(seen: Mapping[str, Any]) -> str:
    lines = [f"{seen['state']}: {seen['detail']}"]
    if seen["head"]:
        lines.append(f"HEAD {seen['head'][:12]} on {seen['branch'] or 'no branch'}")
    return "\n".join(lines)


def _show_environment(seen: Mapping[str, Any]) -> str:
    if not seen["built"]:
        return "not built"
    return (
        f"DEVICE={seen['device']}, vllm {seen['version']}\n"
        f"torch {seen['torch']}, triton {seen['triton']}, from {seen['wheel']}"
    )


def _show_serving(seen: Mapping[str, Any]) -> str:
    if not seen["vllm"]:
        return f"{seen['executable']} finds no vllm"
    where = "" if seen["patched_tree"] else "\nThis is NOT build/vllm."
    return f"vllm {seen['version']} from {seen['vllm']}{where}"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
@click.pass_obj
def command(layout: Layout, as_json: bool) -> None:
    """Show base, series, tree, environment and what `vllm serve` would load.

    Changes nothing, and ends with status 0 whatever it finds.
    """
    facts = collect(layout)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for label, text in rows(facts):
        for at, line in enumerate(text.splitlines()):
            click.echo(click.style(f"{'' if at else label:<12}", bold=True) + line)
