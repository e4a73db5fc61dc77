"""`report`, and `check` of what it wrote."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tools.check import Problem
from tools.layout import Layout
from tools.pin import load_ports
from tools.report import RELEASES, report_text
from tools.series import load_series

RunTools = Callable[..., subprocess.CompletedProcess[str]]


def rows(text: str) -> dict[str, dict[str, str]]:
    """Cells of the table of patches, by slug and column."""
    lines = [line for line in text.split("\n") if line.startswith("| ")]
    at = next(at for at, line in enumerate(lines) if line.startswith("| patch |"))
    head = lines[at].strip("| ").split(" | ")
    found = {}
    for line in lines[at + 2 :]:
        if line.startswith("| release |"):
            break
        cells = line.strip("| ").split(" | ")
        found[cells[0].strip("`")] = dict(zip(head, cells, strict=True))
    return found


def status(layout: Layout, version: str, text: str) -> None:
    folder = layout.patches / "ports" / version
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.toml").write_text(text)


def test_a_row_for_each_patch_and_a_column_for_each_release(applied: Layout) -> None:
    table = rows(report_text(applied, load_series(applied), []))
    assert [*table] == ["config-answer", "gadget", "gadget-docs"]
    assert table["config-answer"]["upstream"] == "#12345"
    assert table["config-answer"]["lines"] == "2"
    assert table["gadget"]["0.30.0"] == "clean"
    assert {table["gadget"][name] for name in RELEASES} == {"not run"}
    # It depends on another, whose number a human has to fill in.
    assert int(table["gadget-docs"]["open"]) == int(table["gadget"]["open"]) + 1


def test_problems_show_in_their_column(applied: Layout) -> None:
    problems = [Problem("closure", "gadget", "x"), Problem("ruff", "gadget-docs", "y")]
    table = rows(report_text(applied, load_series(applied), problems))
    assert table["gadget"]["closure"] == "fail"
    assert table["gadget"]["lint"] == "ok"
    assert table["gadget-docs"]["lint"] == "fail"


def test_tests_that_the_plan_does_not_name(applied: Layout) -> None:
    path = applied.patches / "gadget.toml"
    path.write_text(
        path.read_text().replace(
            'tests = ["tests/test_gadget.py"]',
            'tests = ["tests/test_gadget.py", "tests/test_x.py::test_answer"]',
        )
    )
    table = rows(report_text(applied, load_series(applied), []))
    assert table["gadget"]["tests"] == "1 of 2"


def test_results_of_port_count_for_the_patch_that_they_are_of(applied: Layout) -> None:
    series = load_series(applied)
    digest = series.patch_digest("gadget")
    status(
        applied,
        "0.31.0",
        f'[gadget]\nresult = "3-way"\ndigest = "{digest}"\n'
        '[config-answer]\nresult = "clean"\ndigest = "another"\n',
    )
    status(applied, "0.32.0", "not TOML [")
    table = rows(report_text(applied, series, []))
    assert table["gadget"]["0.31.0"] == "3-way"
    assert table["config-answer"]["0.31.0"] == "stale"
    assert table["gadget-docs"]["0.31.0"] == "not run"
    assert table["gadget"]["0.32.0"] == "not run"
    (applied.overlay / "vllm/gadget/__init__.py").write_text("GADGET = 2\n")
    table = rows(report_text(applied, series, []))
    assert table["gadget"]["0.31.0"] == "stale"


def test_command_writes_once(applied: Layout, run_tools: RunTools) -> None:
    done = run_tools(applied, "report")
    assert done.returncode == 0, done.stderr
    assert "Wrote docs/report.md." in done.stderr
    path = applied.root / "docs/report.md"
    text, at = path.read_text(), path.stat().st_mtime_ns
    # The fake patches say nothing of AI, and their new files have no SPDX lines.
    assert rows(text)["gadget"]["AI"] == "fail"
    done = run_tools(applied, "report")
    assert "is as it was" in done.stderr
    assert (path.read_text(), path.stat().st_mtime_ns) == (text, at)


def test_every_release_that_is_ported_to_has_a_column() -> None:
    assert set(load_ports(Layout.default().ports_pin)) == set(RELEASES)


@pytest.mark.parametrize("version", RELEASES)
def test_results_are_of_the_release(applied: Layout, version: str) -> None:
    series = load_series(applied)
    digest = series.patch_digest("gadget")
    status(applied, version, f'[gadget]\nresult = "gone"\ndigest = "{digest}"\n')
    table = rows(report_text(applied, series, []))
    told = {name: table["gadget"][name] for name in RELEASES}
    assert told == dict.fromkeys(RELEASES, "not run") | {version: "gone"}
