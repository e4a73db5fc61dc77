"""Writes `docs/report.md`: each patch against upstream's checklist, on each release."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from tools.check import Problem, check, paths_in, product_lines_of
from tools.errors import WorkshopError
from tools.export_files import place
from tools.git import Git
from tools.layout import Layout
from tools.pin import load_pin
from tools.port_status import load_statuses, status_file
from tools.pr_checklist import HUMANS
from tools.series import Patch, Series, load_series, read_mail
from tools.ui import say
from tools.upstream_rules import sections, unsaid_tests

# Besides the pinned one.
RELEASES = ("0.31.0", "0.32.0", "0.33.0")
NOT_RUN, STALE = "not run", "stale"

# Column -> rules of `check` that it stands for.
COLUMNS = {
    "title": ("title",),
    "sections": ("body",),
    "lines": ("size",),
    "tests": ("tests",),
    "lint": (
        "ruff",
        "format",
        "typos",
        "mypy",
        "hooks",
        "spdx",
        "filename",
        "init",
        "private",
    ),
    "closure": ("closure", "applies", "offset"),
    "AI": ("ai",),
}
# A patch on others also has their numbers to be filled in.
_BOXES = len(HUMANS)

_HEAD = """\
# Report: each patch, upstream's checklist, four releases

Written by `make report`; `make check` fails when it is out of date.

| column | says |
| --- | --- |
| title | it is `[Area] Imperative sentence` |
| sections | Purpose, Test Plan and Test Result are there and not empty |
| lines | product lines that change; above 500 upstream wants an RFC |
| tests | test files; `a of b`: the Test Plan names only a, themselves or a folder |
| lint | upstream's hooks and rules that `make check` runs; `make pr` runs all |
| closure | it applies on nothing but its `depends_on` |
| AI | the body states AI assistance and why it is no duplicate |
| upstream | issues and pull requests that it is about |
| open | boxes that only a human can tick: {boxes}; and numbers of prerequisites |
| {version}, … | how `make port` fared: clean, 3-way, override, conflict, gone, \
renamed, upstream; `{stale}`: the patch changed since; `{not_run}` |

"""


def report_file(layout: Layout) -> Path:
    return layout.root / "docs" / "report.md"


def report_text(layout: Layout, series: Series, problems: Iterable[Problem]) -> str:
    """The report.

    Args:
        problems: That `check` found.
    """
    version = load_pin(layout.pin).version
    releases = [version, *(name for name in RELEASES if name != version)]
    ports = {name: _results(layout, series, name) for name in releases[1:]}
    broken = {(one.slug, one.rule) for one in problems}
    words = {
        "boxes": ", ".join(name for name, _ in HUMANS),
        "version": version,
        "stale": STALE,
        "not_run": NOT_RUN,
    }
    header = ["patch", *COLUMNS, "upstream", "open", *releases]
    lines = [
        _HEAD.format(**words).rstrip("\n"),
        "",
        _row(header),
        _row(["---"] * len(header)),
    ]
    pinned = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="report-") as folder:
        for patch in series.patches:
            cells = _cells(Git(Path(folder)), layout, patch, broken)
            fits = not {(patch.slug, rule) for rule in ("applies", "offset")} & broken
            here = "clean" if fits else "conflict"
            pinned[here] += 1
            found = [ports[name][patch.slug] for name in releases[1:]]
            lines.append(_row([f"`{patch.slug}`", *cells, here, *found]))
    counts = {version: pinned}
    counts |= {name: Counter(ports[name].values()) for name in releases[1:]}
    lines += ["", "| release | patches |", "| --- | --- |"]
    for name, count in counts.items():
        told = ", ".join(f"{number} {what}" for what, number in count.most_common())
        lines.append(_row([name, told]))
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(
    git: Git, layout: Layout, patch: Patch, broken: set[tuple[str | None, str]]
) -> list[str]:
    told = {
        column: "fail" if any((patch.slug, rule) in broken for rule in rules) else "ok"
        for column, rules in COLUMNS.items()
    }
    lines = str(product_lines_of(layout, patch))
    told["lines"] = lines if told["lines"] == "ok" else f"{lines} fail"
    body = read_mail(git, patch.mail).message.partition("\n")[2]
    plan = sections(body).get("Test Plan", "")
    named = [*paths_in(patch.meta.tests)]
    said = len(named) - len(unsaid_tests(named, plan))
    count = str(len(named)) if said == len(named) else f"{said} of {len(named)}"
    told["tests"] = count if told["tests"] == "ok" else f"{count} fail"
    upstream = ", ".join(patch.meta.upstream) or "-"
    return [*told.values(), upstream, str(_BOXES + bool(patch.meta.depends_on))]


def _results(layout: Layout, series: Series, version: str) -> dict[str, str]:
    """What `port` wrote of each patch, as far as it is still about that patch."""
    try:
        statuses = load_statuses(layout, version)
    except WorkshopError:
        statuses = {}  # `port` says what is wrong with it.
    found = {}
    for slug in series.slugs:
        if (status := statuses.get(slug)) is None:
            found[slug] = NOT_RUN
        elif status.digest != series.patch_digest(slug):
            found[slug] = STALE
        else:
            found[slug] = status.result
    return found


def stale_ports(layout: Layout, series: Series) -> dict[str, list[str]]:
    """Patches that changed since the series was put on a release, or that are new.

    A release that it was never put on is left out.
    """
    found = {}
    for version in RELEASES:
        if status_file(layout, version).is_file():
            results = _results(layout, series, version)
            slugs = [slug for slug in results if results[slug] in (NOT_RUN, STALE)]
            found |= {version: slugs} if slugs else {}
    return found


@click.command()
@click.pass_obj
def command(layout: Layout) -> None:
    """Write docs/report.md: each patch, upstream's checklist, four releases.

    Runs `check` first. The columns of other releases are what `port` last wrote.
    """
    found = check(layout, compare_report=False)
    path = report_file(layout)
    text = report_text(layout, load_series(layout), found.problems)
    old = path.read_text(encoding="utf-8") if path.is_file() else None
    if text == old:
        say(f"{layout.relative(path)} is as it was.")
    else:
        place(path, ("100644", text.encode()))
        say(f"Wrote {layout.relative(path)}.")
    if not found.ok:
        count = len(found.problems)
        say(f"`make check` has {count} problem(s); the report shows which columns.")
