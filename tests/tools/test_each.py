"""`each`: every patch alone, every prefix, and what is declared in vain or not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tomlkit
from click.testing import CliRunner

from tools.each import _imported, command, each
from tools.errors import WorkshopError
from tools.layout import Layout


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.each._SETTLE_S", 0)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def declare(layout: Layout, slug: str, **fields: object) -> None:
    path = layout.patches / f"{slug}.toml"
    document = tomlkit.parse(path.read_text())
    document.update(fields)
    path.write_text(tomlkit.dumps(document))


def problems(layout: Layout, *slugs: str) -> dict[str, str]:
    return {found.slug: found.message for found in each(layout, slugs).findings}


def test_a_series_that_says_what_it_needs(
    built: Layout, mtimes: Callable[[Path], dict[str, int]]
) -> None:
    before = mtimes(built.tree)
    report = each(built)
    assert report.findings == []
    # Alone, as a prefix (the first is alone), and gadget-docs without gadget.
    assert report.trials == 7
    after = mtimes(built.tree)
    changed = {
        name for name in after if not name.startswith(".git/objects")
    } - before.keys()
    assert not changed
    tree = built.build / "each" / "tree"
    assert (tree / "vllm/_C.abi3.so").samefile(built.tree / "vllm/_C.abi3.so")


def test_a_second_run_tries_nothing(built: Layout) -> None:
    first = each(built)
    again = each(built)
    assert again.trials == first.trials
    assert again.ran == 0
    assert again.findings == first.findings


def test_kept_trials_serve_another_checkout(built: Layout) -> None:
    first = each(built, keep=True)
    kept = json.loads(built.trials.read_text())
    told = [
        (entry["patch"], entry["tried"]) for entry in kept.values() if "ok" in entry
    ]
    assert ("gadget-docs", "without gadget") in told
    assert str(built.root) not in built.trials.read_text()
    shutil.rmtree(built.build / "each")
    again = each(built)
    assert (again.trials, again.ran) == (first.trials, 0)


def test_all_is_tried_anew_on_request(built: Layout) -> None:
    first = each(built, keep=True)
    assert each(built, anew=True).ran == first.ran > 0


def test_only_trials_of_the_series_as_it_is_are_kept(built: Layout) -> None:
    each(built, keep=True)
    before = set(json.loads(built.trials.read_text()))
    (built.overlay / "docs/gadget.md").write_text("# Gadget\n\nIt is one.\n")
    each(built, keep=True)
    after = set(json.loads(built.trials.read_text()))
    assert len(after) == len(before)
    assert after != before


def test_what_was_tried_before_an_interrupt_is_kept(built: Layout) -> None:
    def interrupt(slug: str) -> None:
        if slug == "gadget-docs":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        each(built, on_trial=interrupt, keep=True)
    shutil.rmtree(built.build / "each")
    report = each(built)
    assert 0 < report.ran < report.trials


def test_with_a_finding_nothing_is_kept(built: Layout) -> None:
    declare(built, "gadget-docs", depends_on=[])
    assert each(built, keep=True).findings
    assert not built.trials.exists()


def test_keep_is_of_the_whole_series(built: Layout) -> None:
    done = CliRunner().invoke(command, ["--keep", "--slug", "gadget"], obj=built)
    assert isinstance(done.exception, WorkshopError)
    assert "--slug tries some" in str(done.exception)
    assert not built.trials.exists()


def test_only_what_a_change_reaches_is_tried_again(built: Layout) -> None:
    each(built)
    meta = built.patches / "gadget-docs.toml"
    meta.write_text(meta.read_text().replace("Nobody knew", "No one knew"))
    assert each(built).ran == 0
    (built.overlay / "docs/gadget.md").write_text("# Gadget\n\nIt is one.\n")
    seen: list[str] = []
    assert each(built, on_trial=seen.append).ran == 3
    assert seen == ["config-answer", "gadget", "gadget-docs"]


def test_words_of_a_mail_are_no_change(built: Layout) -> None:
    each(built)
    mail = built.patches / "gadget.patch"
    text = mail.read_text()
    edited = text.replace("## Purpose\n", "## Purpose\n\nIn other words.\n", 1)
    assert edited != text
    mail.write_text(edited)
    assert each(built).ran == 0


def test_hunks_of_a_mail_are_content(built: Layout) -> None:
    each(built)
    mail = built.patches / "config-answer.patch"
    text = mail.read_text()
    before, _, hunks = text.partition("\ndiff --git ")
    edited = hunks.replace("\n+", "\n+# ", 1)
    assert edited != hunks
    mail.write_text(f"{before}\ndiff --git {edited}")
    assert each(built, ["config-answer"]).ran > 0


def test_an_undeclared_dependency_is_named(built: Layout) -> None:
    declare(built, "gadget-docs", depends_on=[])
    found = problems(built, "gadget-docs")
    assert "cannot pass its tests on nothing" in found["gadget-docs"]
    assert "undeclared dependency: gadget; add it to" in found["gadget-docs"]


def test_hunks_that_need_another_patch(built: Layout) -> None:
    """The supplier is found by applying alone; no test is run."""
    text = (built.patches / "config-answer.patch").read_text()
    text = text.replace("41", "43").replace("42", "41").replace("43", "42")
    text = text.replace("assert answer() == 41", "assert answer() == 42")
    lines = text.splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if "a/tests/test_x.py" in line)
    end = next(i for i, line in enumerate(lines) if "a/vllm/config.py" in line)
    (built.patches / "gadget.patch").write_text("".join(lines[:at] + lines[end:]))
    declare(built, "gadget", tests=["tests/test_gadget.py"])
    found = problems(built, "gadget")
    assert "cannot apply on nothing" in found["gadget"]
    assert (
        "undeclared dependency: config-answer; add it to depends_on" in found["gadget"]
    )


def test_an_unnecessary_dependency_is_named(built: Layout) -> None:
    declare(built, "gadget", depends_on=["config-answer"])
    found = problems(built, "gadget")
    assert found["gadget"] == (
        "unnecessary dependency: it applies and passes without config-answer; remove "
        "that from depends_on"
    )


def test_an_unnecessary_dependency_of_tests_is_named(built: Layout) -> None:
    declare(built, "config-answer", test_depends_on=["gadget-docs"])
    assert "remove that from test_depends_on" in problems(built)["config-answer"]


def test_a_dependency_that_another_brings_is_no_error(built: Layout) -> None:
    declare(built, "gadget-docs", depends_on=["gadget"], test_depends_on=["gadget"])
    assert problems(built) == {}


def test_a_module_that_cannot_be_imported(built: Layout) -> None:
    (built.overlay / "vllm/gadget/__init__.py").write_text("GADGET = 1\nnonsense\n")
    found = problems(built, "gadget")
    assert "cannot be imported on nothing" in found["gadget"]
    assert "NameError" in found["gadget"]


TYPES = """\
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.gadget import GADGET

KIND = 1
"""


def test_what_is_imported_for_its_types_is_needed(built: Layout) -> None:
    name = "vllm/gadget_kind.py"
    (built.overlay / name).write_text(TYPES)
    meta = tomlkit.parse((built.patches / "gadget-docs.toml").read_text())
    overlay = [*meta["overlay"], name]
    declare(built, "gadget-docs", overlay=overlay, tests=["tests/test_x.py"])
    assert problems(built, "gadget-docs") == {}
    declare(built, "gadget-docs", depends_on=[])
    assert problems(built, "gadget-docs")["gadget-docs"] == (
        "imports vllm.gadget, which nothing it depends on brings"
    )


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("import os, vllm.a.b as b", ["vllm.a.b"]),
        ("from vllm.a import b", ["vllm.a"]),
        ("from vllm import a", ["vllm"]),
        ("from . import x", ["vllm.p"]),
        ("from ..q import x", ["vllm.q"]),
        ("from .r.s import x", ["vllm.p.r.s"]),
        ("import vllm_other", []),
        ("def f():\n    from vllm.c import d", ["vllm.c"]),
    ],
)
def test_modules_that_a_file_imports(line: str, wanted: list[str]) -> None:
    assert list(_imported(line.encode(), "vllm/p/x.py")) == wanted


def test_a_missing_package_of_another_device_is_no_error(built: Layout) -> None:
    (built.overlay / "vllm/gadget/__init__.py").write_text(
        "GADGET = 1\nimport no_such_accelerator\n"
    )
    declare(built, "gadget", tests=["tests/test_x.py"])
    assert problems(built, "gadget") == {}


def test_a_test_that_fails(built: Layout) -> None:
    (built.overlay / "tests/test_gadget.py").write_text(
        "def test_gadget():\n    assert 1 == 2\n"
    )
    found = problems(built, "gadget")
    assert "exit status 1" in found["gadget"]
    assert "each-gadget.log" in found["gadget"]
    assert "undeclared" not in found["gadget"]


def test_without_a_build(applied: Layout) -> None:
    with pytest.raises(WorkshopError, match=r"_version\.py is missing"):
        each(applied)
