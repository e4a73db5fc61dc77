"""`check` on a series that is right, and on what can be wrong with one."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.check import RULES, Report, check, paths_in
from tools.errors import WorkshopError
from tools.export import export
from tools.export_files import meta_text
from tools.git import Git
from tools.layout import Layout
from tools.port_status import Status, save_statuses
from tools.series import load_series
from tools.upstream_rules import (
    MAX_LINES,
    file_problems,
    message_problems,
    private_words,
    sections,
    size_problems,
    unsaid_tests,
)

SPDX = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
)
MESSAGE = """\
[Core] {title}

## Purpose

It was missing. No open pull request does this; AI assistance was used.

## Test Plan

```
pytest tests/test_gadget.py tests/test_x.py
```

## Test Result

Passed; failed before.

Co-authored-by: A Machine
"""
# A hook as vLLM's are: it takes files, prints what is wrong and fails.
HOOK = (
    SPDX
    + """\
import sys

bad = [name for name in sys.argv[1:] if "device" + "_count" in open(name).read()]
for name in bad:
    print(f"{name}:1: \\033[91merror:\\033[0m use torch.accelerator")
sys.exit(bool(bad))
"""
)
SETTINGS = """\
[tool.ruff.lint]
select = ["E", "F", "I"]

[tool.ruff.format]
docstring-code-format = true
"""
# slug -> title, files, metadata
SLUGS: dict[str, tuple[str, dict[str, str], str]] = {
    "lint-settings": (
        "Add settings",
        {
            "pyproject.toml": SETTINGS,
            "tools/pre_commit/check_torch_cuda.py": HOOK,
        },
        'tests = ["tests/test_x.py"]\n',
    ),
    "gadget": (
        "Add the gadget",
        {
            "vllm/engine/core.py": "class EngineCore:\n    gadget = True\n",
            "vllm/gadget/__init__.py": SPDX,
            "vllm/gadget/one.py": SPDX + "\nGADGET = 1\n",
            "tests/test_gadget.py": SPDX
            + "\nfrom vllm.gadget.one import GADGET\n\n\n"
            + "def test_gadget():\n    assert GADGET == 1\n",
        },
        'tests = ["tests/test_gadget.py::test_gadget", "-k", "not slow"]\n',
    ),
    "answer": (
        "Answer 42",
        {
            "vllm/config.py": "".join(f"OPTION_{at} = {at}\n" for at in range(20))
            + "\n\ndef answer():\n    return 42\n",
        },
        'tests = ["tests/test_x.py"]\n',
    ),
    "gadget-two": (
        "Make it two",
        {"vllm/gadget/one.py": SPDX + "\nGADGET = 2\n"},
        'depends_on = ["gadget"]\ntests = ["tests/test_gadget.py"]\n',
    ),
}


@pytest.fixture(scope="module")
def _good(templates: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good") / "work"
    shutil.copytree(templates / "applied", root, symlinks=True)
    layout = Layout(root)
    git = Git(layout.tree)
    git("reset", "--hard", "--quiet", "refs/workshop/base")
    for title, files, _ in SLUGS.values():
        for name, text in files.items():
            path = layout.tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        git("add", "--force", "--", *files)
        who = ("-c", "user.name=A", "-c", "user.email=a@example.invalid")
        git(*who, "commit", "--quiet", "-m", MESSAGE.format(title=title))
    for path in layout.patches.glob("*.*"):
        path.unlink()
    shutil.rmtree(layout.overlay)
    layout.series.write_text("# Order.\n")
    count = len(SLUGS)
    names = {f"HEAD~{count - at - 1}": slug for at, slug in enumerate(SLUGS)}
    export(layout, names, overwrite=True)
    for slug, (_, _, meta) in SLUGS.items():
        path = layout.patches / f"{slug}.toml"
        overlay = path.read_text().partition("overlay = ")
        path.write_text(
            f'why = "Missing."\nremoval = "Once merged."\n{meta}' + "".join(overlay[1:])
        )
    return root


@pytest.fixture
def good(_good: Path, tmp_path: Path) -> Layout:
    """A workshop whose series breaks no rule."""
    return Layout(shutil.copytree(_good, tmp_path / "work", symlinks=True).resolve())


def found(report: Report) -> set[tuple[str, str | None]]:
    return {(problem.rule, problem.slug) for problem in report.problems}


def message(report: Report, rule: str) -> str:
    return "\n".join(one.message for one in report.problems if one.rule == rule)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def mail(layout: Layout, slug: str) -> Path:
    return layout.patches / f"{slug}.patch"


def meta(layout: Layout, slug: str) -> Path:
    return layout.patches / f"{slug}.toml"


# The whole


def test_a_good_series_breaks_no_rule(
    good: Layout, mtimes: Callable[[Path], dict[str, int]]
) -> None:
    before = [mtimes(good.patches), mtimes(good.overlay), mtimes(good.tree / "vllm")]
    report = check(good)
    assert report.ok, report.text()
    assert report.notes == []
    assert report.slugs == tuple(SLUGS)
    after = [mtimes(good.patches), mtimes(good.overlay), mtimes(good.tree / "vllm")]
    assert after == before


def test_all_that_a_mail_can_have_wrong_is_in_one_report(good: Layout) -> None:
    for name in ("stray.patch", "notes.txt", "ports/0.31.0/nobody.patch"):
        (good.patches / name).parent.mkdir(parents=True, exist_ok=True)
        (good.patches / name).write_text("x\n")
    for name in ("gadget.patch", "base.diff", "other.diff"):
        (good.patches / "ports/0.31.0" / name).write_text("x\n")
    (good.overlay / "vllm/stray.py").write_text("x\n")
    with good.sdist_files.open("a") as file:
        file.write("vllm/gadget/one.py\n")
    answer = mail(good, "answer")
    edit(answer, "[Core] Answer 42", "Answer 42")
    edit(answer, "## Test Plan", "## How")
    edit(answer, "AI assistance was used", "by hand")
    edit(answer, "Co-authored-by: A", "Signed-off-by: A")
    edit(answer, "+    return 42", "+    return 42  # see overlay" + "/x")
    gadget = good.overlay / "vllm/gadget/one.py"
    gadget.write_text("GADGET = 1  # as the work" + "shop says\n")
    edit(meta(good, "gadget-two"), 'why = "Missing."', 'why = ""')
    edit(meta(good, "gadget-two"), "removal", "removed")
    report = check(good)
    expected = {
        ("orphan", None),
        ("taken", "gadget"),
        ("title", "answer"),
        ("body", "answer"),
        ("ai", "answer"),
        ("signoff", "answer"),
        ("private", "answer"),
        ("private", "gadget"),
        ("spdx", "gadget"),
        ("series", "gadget-two"),
    }
    assert expected <= found(report)
    orphans = message(report, "orphan")
    for name in (
        "stray.patch",
        "notes.txt",
        "nobody.patch",
        "other.diff",
        "vllm/stray.py",
    ):
        assert name in orphans
    for name in ("gadget.patch", "base.diff"):
        assert f"0.31.0/{name}" not in orphans
    series = message(report, "series")
    assert "unknown field 'removed'" in series
    assert "why is missing or empty" in series
    text = report.text()
    assert text.index("series and repository") < text.index("\nanswer\n")
    assert f"{len(report.problems)} problems" in text
    assert json.loads(report.json())["ok"] is False


def test_metadata_that_cannot_be_read_hides_nothing_else(good: Layout) -> None:
    meta(good, "lint-settings").write_text("why = \n")
    edit(mail(good, "answer"), "[Core] Answer 42", "Answer 42")
    good.pin.write_text("[base]\n")
    report = check(good)
    assert {("series", "lint-settings"), ("title", "answer"), ("base", None)} <= found(
        report
    )


# Rules that need the base's files


def test_an_overlay_file_that_another_patch_edits_is_no_closure_without_it(
    good: Layout,
) -> None:
    edit(meta(good, "gadget-two"), 'depends_on = ["gadget"]\n', "")
    report = check(good)
    assert found(report) == {("closure", "gadget-two")}
    assert "vllm/gadget/one.py" in message(report, "closure")


def test_a_dependency_of_the_tests_only_is_enough_for_tests(good: Layout) -> None:
    edit(meta(good, "answer"), "tests/test_x.py", "tests/test_gadget.py")
    report = check(good)
    assert found(report) == {("tests", "answer")}
    assert "tests/test_gadget.py" in message(report, "tests")
    with meta(good, "answer").open("a") as file:
        file.write('test_depends_on = ["gadget-two"]\n')
    assert check(good).ok


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("pytest tests/test_gadget.py", "tests/test_x.py"),
        ("pytest tests", "tests/test_x.py"),
        ("pytest tests/test_x.py::test_answer", ""),
    ],
)
def test_a_test_plan_names_the_tests(good: Layout, said: str, wanted: str) -> None:
    edit(mail(good, "answer"), "pytest tests/test_gadget.py tests/test_x.py", said)
    report = check(good)
    assert found(report) == ({("tests", "answer")} if wanted else set())
    if wanted:
        assert f"does not name {wanted}" in message(report, "tests")


def test_a_folder_of_a_test_plan_covers_its_files() -> None:
    names = ["tests/v1/worker/test_a.py", "tests/v1/test_b.py"]
    assert unsaid_tests(names, "run `pytest tests/v1/worker/`") == names[1:]
    assert unsaid_tests(names, "pytest tests/v1") == []
    assert unsaid_tests(names, "pytest tests") == names


def test_kept_trials_are_no_stray_file(good: Layout) -> None:
    good.trials.write_text("{}")
    assert check(good).ok


def test_a_patch_that_does_not_apply_is_named_and_the_rest_still_checked(
    good: Layout,
) -> None:
    edit(mail(good, "gadget"), "-    pass", "-    something else")
    edit(meta(good, "answer"), "tests/test_x.py", "tests/gone.py")
    report = check(good)
    # gadget-two edits a file of gadget's, so it cannot apply either.
    assert found(report) == {
        ("applies", "gadget"),
        ("applies", "gadget-two"),
        ("tests", "answer"),
    }
    assert "vllm/engine/core.py" in message(report, "applies")
    assert any(note.startswith("tip: not compared") for note in report.notes)


def test_a_hunk_that_applies_elsewhere_is_found(good: Layout) -> None:
    path = mail(good, "answer")
    lines = path.read_text().split("\n")
    at = next(at for at, line in enumerate(lines) if line.startswith("@@"))
    lines[at] = "@@ -9,4 +9,4 @@" + lines[at].split("@@", 2)[2]
    path.write_text("\n".join(lines))
    report = check(good)
    assert found(report) == {("offset", "answer")}
    assert "hunk for line 9" in message(report, "offset")


def test_bytes_that_export_would_change_are_found(good: Layout) -> None:
    edit(mail(good, "answer"), "\ndiff --git", "\n\ndiff --git")
    edit(mail(good, "gadget-two"), "From 0000", "From 1000")
    report = check(good)
    assert found(report) == {
        ("roundtrip", "answer"),
        ("roundtrip", "gadget-two"),
        ("mail", "gadget-two"),
    }
    assert "`make export`" in message(report, "roundtrip")


def test_a_new_file_in_a_mail_is_found(good: Layout) -> None:
    with mail(good, "answer").open("a") as file:
        file.write(
            "diff --git a/vllm/new.py b/vllm/new.py\nnew file mode 100644\n"
            "--- /dev/null\n+++ b/vllm/new.py\n@@ -0,0 +1 @@\n+X = 1\n"
        )
    report = check(good)
    assert ("mail", "answer") in found(report)
    assert "adds vllm/new.py" in message(report, "mail")
    assert ("tip", None) in found(report)
    assert ("roundtrip", "answer") in found(report)


def test_a_binary_file_is_found_in_the_mail_and_in_the_overlay(good: Layout) -> None:
    (good.overlay / "vllm/gadget/one.py").write_bytes(SPDX.encode() + b"# a\0b\n")
    core = good.tree / "vllm/engine/core.py"
    core.write_bytes(b"a\0b\n")
    git = Git(good.tree)
    patch = git.raw("diff", "--binary", "--full-index", "HEAD", "--", str(core))
    mail(good, "answer").write_bytes(mail(good, "answer").read_bytes() + patch)
    report = check(good)
    assert {("mail", "gadget"), ("mail", "answer")} <= found(report)
    text = message(report, "mail")
    assert "overlay/vllm/gadget/one.py, a binary file" in text
    assert "patches/answer.patch changes vllm/engine/core.py, a binary file" in text


def test_hunks_that_cannot_be_read_are_found(good: Layout) -> None:
    edit(mail(good, "answer"), "+    return 42\n", "")
    report = check(good)
    assert found(report) == {("mail", "answer"), ("applies", "answer")}
    assert "hunks cannot be read" in message(report, "mail")


def test_an_overlay_file_that_is_not_there_is_found(good: Layout) -> None:
    (good.overlay / "vllm/gadget/one.py").unlink()
    report = check(good)
    assert not report.ok
    assert "vllm/gadget/one.py" in report.text()


def test_a_folder_without_init_is_found(good: Layout) -> None:
    (good.overlay / "vllm/gadget/__init__.py").unlink()
    path = meta(good, "gadget")
    names = ["tests/test_gadget.py", "vllm/gadget/one.py"]
    path.write_text(meta_text(path.read_text(), names))
    report = check(good)
    assert ("init", "gadget") in found(report), report.text()
    assert "vllm/gadget/" in message(report, "init")
    assert ("tip", None) in found(report)


def test_lint_is_upstreams_and_names_the_patch(good: Layout) -> None:
    source = good.overlay / "tests/test_gadget.py"
    source.write_text(
        source.read_text().replace(
            "\nfrom vllm", "\nimport torch\nfrom vllm.gadget import one\nfrom vllm"
        )
        + "\n\nX = torch.cuda.device_count( )  # device_count\n"
    )
    report = check(good)
    rules = {rule for rule, slug in found(report) if slug == "gadget"}
    assert {"ruff", "format", "hooks"} <= rules
    # Both that `one` is unused and that vllm is first-party here.
    assert "F401" in message(report, "ruff")
    assert "I001" in message(report, "ruff")
    assert "\033" not in message(report, "hooks")


# The base


def test_an_absent_base_is_fetched(
    good: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(good.tree)
    assert check(good).ok
    assert "fetching it first" in capsys.readouterr().err


def test_a_base_that_cannot_be_fetched_hides_nothing_else(
    good: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(good.tree)

    def fetch(layout: Layout) -> str:
        raise WorkshopError("No network.")

    monkeypatch.setattr("tools.fetch.fetch", fetch)
    edit(mail(good, "answer"), "[Core] Answer 42", "Answer 42")
    assert found(check(good)) == {("base", None), ("title", "answer")}


# Hygiene


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("see https://pypi" + ".org/project/vllm", True),
        ("https://download.pytorch" + ".org/whl/cpu", True),
        ("index-url = https://mirror.corp.test/pypi/sim" + "ple", True),
        ("http://me:secret@127.0.0.1:9/simple and http://localhost/simple", False),
        ("https://index.invalid/simple", False),
        ("cd /wor" + "k/main", True),
        ("/home" + "/somebody/vllm", True),
        ("/workspace and a/wor" + "k/b and PyPI", False),
    ],
)
def test_hygiene_of_one_line(good: Layout, line: str, bad: bool) -> None:
    from tools import check as module

    (good.root / "notes.md").write_text(f"fine\n{line}\n")
    report = Report()
    module._check_hygiene(good, report)
    assert [one.message[:10] for one in report.problems] == ["notes.md:2"] * bad


def test_hygiene_looks_at_tracked_files_and_finds_this_checkouts_path(
    good: Layout, user_git: Callable[..., str]
) -> None:
    from tools import check as module

    (good.root / "notes.md").write_text(f"cd {good.root}\n")
    (good.root / "ignored.md").write_text(f"cd {good.root}\n")
    (good.root / ".gitignore").write_text("/build/\nignored.md\n")
    (good.root / "binary").write_bytes(b"\0" + str(good.root).encode())
    user_git(good.root, "init", "--quiet")
    user_git(good.root, "add", ".")
    user_git(good.root, "commit", "--quiet", "-m", "x")
    report = Report()
    module._check_hygiene(good, report)
    assert [one.message.split(" ")[0] for one in report.problems] == ["notes.md:1"]


# Upstream's rules on text


def rules(text: str) -> list[str]:
    return sorted({rule for rule, _ in message_problems(text)})


GOOD = MESSAGE.format(title="Do it")


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("[Core] Do", "Core: Do", "title"),
        ("[Core] Do", "[Core]Do", "title"),
        ("[Core] Do", "[] Do", "title"),
        ("## Purpose", "## Goal", "body"),
        ("## Test Result\n\nPassed; failed before.", "## Test Result", "body"),
        ("It was", "**BEFORE SUBMITTING, PLEASE READ**\nIt was", "body"),
        ("AI assistance was used", "done", "ai"),
        ("No open pull request does this", "It is new", "ai"),
        ("Co-authored-by: A Machine", "Thanks.", "ai"),
        ("Co-authored-by: A Machine", "Co-authored-by: A\n\nMore text.", "ai"),
        (
            "Co-authored-by: A Machine",
            "Co-authored-by: A\nSigned-off-by: B <b@c>",
            "signoff",
        ),
    ],
)
def test_message_problems(old: str, new: str, rule: str) -> None:
    assert rules(GOOD) == []
    assert old in GOOD
    assert rules(GOOD.replace(old, new)) == [rule]


@pytest.mark.parametrize("gap", ["\n", "-"])
def test_words_of_ai_assistance_may_be_on_two_lines(gap: str) -> None:
    assert rules(GOOD.replace("AI assistance", f"AI{gap}assistance")) == []


def test_titles_with_several_tags_are_right() -> None:
    assert rules(GOOD.replace("[Core]", "[Bugfix][CPU] ")) == []


def test_sections_are_not_fooled_by_code_or_trailers() -> None:
    body = "## A\n\n```\n## B\n```\n\n## C\n\nCo-authored-by: X\n"
    assert sections(body) == {"A": "```\n## B\n```", "C": ""}


@pytest.mark.parametrize(
    ("files", "words", "bad"),
    [
        ([("vllm/a.py", MAX_LINES)], "", False),
        ([("vllm/a.py", MAX_LINES), ("setup.py", 1)], "", True),
        ([("vllm/a.py", 1), ("tests/a.py", 9000), ("csrc/a.cu", 9000)], "", False),
        ([("vllm/a.py", 900)], "Part of the RFC in #56126.", False),
        ([("vllm/a.py", 900)], "Fixes #56126.", True),
    ],
)
def test_size(files: list[tuple[str, int]], words: str, bad: bool) -> None:
    assert bool([*size_problems(files, words)]) is bad


def test_file_problems() -> None:
    def of(path: str, text: str) -> list[str]:
        return [rule for rule, _ in file_problems(path, text.encode())]

    assert of("vllm/a.py", SPDX) == []
    assert of("vllm/a.py", "#!/usr/bin/env python3\n" + SPDX) == []
    assert of("vllm/a.py", SPDX.split("\n")[0]) == ["spdx"]
    assert of("vllm/a.rs", SPDX) == ["spdx", "spdx"]
    assert of("vllm/a.rs", SPDX.replace("#", "//")) == []
    assert of("vllm/__init__.py", "") == []
    assert of("docs/a b.md", "x") == ["filename"]


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("see patches" + "/x.patch", True),
        ("made by the Work" + "shop", True),
        ("in build" + "/vllm", True),
        ("open('/tm" + "p/x')", True),
        ("cpu_work" + "shop = 1", False),
        ("from vllm.v1.worker.gpu import x  # /worker", False),
        ("monkeypatches/x and attempt/tmp.py", False),
    ],
)
def test_private_words(line: str, bad: bool) -> None:
    assert bool([*private_words("x", [line])]) is bad


def test_paths_in_arguments_of_pytest() -> None:
    arguments = ["-k", "a or b", "tests/a.py::test", "--deselect=x", "-x", "tests/b"]
    assert list(paths_in(arguments)) == ["tests/a.py", "tests/b"]


def test_a_rule_without_a_name_is_refused() -> None:
    with pytest.raises(KeyError):
        Report().add("no such rule", None, "x")


# Command line and documentation


def test_the_command_fails_if_anything_is_wrong(
    good: Layout, run_tools: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_tools(good, "check", "--json")
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (0, True), done.stderr
    (good.patches / "stray.txt").write_text("x\n")
    done = run_tools(good, "check")
    assert done.returncode == 1
    assert "  orphan    patches/stray.txt" in done.stdout
    assert "1 problem " in done.stdout


def test_the_documentation_names_every_rule() -> None:
    text = (Path(__file__).parents[2] / "docs" / "patches.md").read_text()
    for rule in RULES:
        assert f"`{rule}`" in text


# The report that is kept in docs/


def test_report_must_be_what_would_be_written(
    good: Layout, run_tools: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (good.root / "docs").mkdir()
    assert found(check(good)) == {("report", None)}
    assert run_tools(good, "report").returncode == 0
    assert check(good).ok
    edit(good.root / "docs/report.md", "clean", "conflict")
    report = check(good)
    assert found(report) == {("report", None)}
    assert "make report" in message(report, "report")
    # It would differ anyway: said once.
    edit(mail(good, "answer"), "## Test Plan", "## How")
    report = check(good)
    assert found(report) == {("body", "answer")}
    assert report.notes == ["docs/report.md: not compared."]


def test_a_port_of_another_state_is_stale(
    good: Layout, run_tools: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (good.root / "docs").mkdir()
    series = load_series(good)
    statuses = {
        slug: Status("clean", series.patch_digest(slug)) for slug in series.slugs
    }
    save_statuses(good, "0.31.0", statuses)
    assert run_tools(good, "report").returncode == 0
    assert check(good).ok
    save_statuses(good, "0.31.0", statuses | {"gadget": Status("clean", "older")})
    assert run_tools(good, "report").returncode == 0
    report = check(good)
    assert found(report) == {("report", None)}
    told = message(report, "report")
    assert "The port to 0.31.0 is of another state of gadget:" in told
    assert "make port BASE=0.31.0" in told


# Upstream's hooks on a copy


def bring(layout: Layout, files: dict[str, str]) -> None:
    """Let the last patch bring new files, and name them."""
    for name, text in files.items():
        path = layout.overlay / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    path = meta(layout, "gadget-two")
    path.write_text(meta_text(path.read_text(), [*files]))


def test_hook_that_is_no_python_is_run_on_the_tip(good: Layout) -> None:
    """The last patch brings a script in that shellcheck objects to."""
    script = "#!/bin/bash\n# SPDX-License-Identifier: Apache-2.0\nrm $1\n"
    files = {"tools/x.sh": script, ".pre-commit-config.yaml": "repos: []\n"}
    bring(good, files)
    report = check(good)
    assert ("hooks", "gadget-two") in found(report)
    assert "shellcheck: tools/x.sh:3: " in message(report, "hooks")


def test_misspelling_is_found_and_given_to_its_patch(good: Layout) -> None:
    files = {"docs/gadget.md": "# Teh gadget\n", ".pre-commit-config.yaml": "{}\n"}
    bring(good, files)
    report = check(good)
    assert ("typos", "gadget-two") in found(report)
    assert "docs/gadget.md:1: " in message(report, "typos")
