"""`port`: the series on another release, patch by patch, and nothing gets lost."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from conftest import BASE, GENERATED, SLUGS, sdist_bytes

from tools.errors import WorkshopError
from tools.git import Git, scratch
from tools.layout import Layout
from tools.pin import load_ports
from tools.port import abort, load_state, port, port_tree, resume, survey
from tools.port_status import Status, load_statuses
from tools.pr import make_pr
from tools.series import load_series

NEW = "0.31.0"
COMMIT = "db9527a46"
Files = dict[str, tuple[int, str]]
MakeRelease = Callable[[Mapping[str, "str | tuple[int, str] | None"]], None]
CONFIG = BASE["vllm/config.py"][1]
# A line is changed that the patch has as context.
NOTED = CONFIG.replace("\n\ndef answer", "\n# noted\n\ndef answer")


@pytest.fixture
def release(workspace: Layout, tmp_path: Path) -> MakeRelease:
    """Make the sdist of the other release: the base with some files changed."""

    def make(changes: Mapping[str, str | tuple[int, str] | None]) -> None:
        files: Files = dict(BASE)
        for name, change in changes.items():
            if change is None:
                del files[name]
            elif isinstance(change, tuple):
                files[name] = change
            else:
                files[name] = (files.get(name, (0o644, ""))[0], change)
        version = GENERATED["vllm/_version.py"].replace("0.30.0", NEW)
        version = version.split("'g")[0] + f"'g{COMMIT}'\n"
        data = sdist_bytes({**files, "vllm/_version.py": (0o644, version)}, NEW)
        (workspace.cache / f"vllm-{NEW}.tar.gz").write_bytes(data)
        work = tmp_path / "release"
        work.mkdir(exist_ok=True)
        git = Git(work)
        git("init", "--quiet", "--template=", ".")
        rows = "".join(
            f"100{mode:o} {git('hash-object', '-w', '--stdin', stdin=text)}\t{name}\0"
            for name, (mode, text) in files.items()
        )
        git("read-tree", "--empty")
        git("update-index", "--add", "-z", "--index-info", stdin=rows)
        workspace.ports_pin.write_text(
            f"""\
[port."{NEW}".base]
commit = "{COMMIT}"
tree = "{git("write-tree")}"

[port."{NEW}".sdist]
project = "vllm"
filename = "vllm-{NEW}.tar.gz"
sha256 = "{hashlib.sha256(data).hexdigest()}"
generated = ["PKG-INFO", "setup.cfg", "vllm.egg-info", "vllm/_version.py"]

[port."{NEW}".requirements]
torch = "2.13.0"
triton = "3.6.0"
"""
        )

    return make


def _results(statuses: Mapping[str, Status]) -> list[str]:
    return [status.result for status in statuses.values()]


def _text(layout: Layout, path: str) -> str:
    return (port_tree(layout, NEW) / path).read_text(encoding="utf-8")


def _is_done(layout: Layout) -> None:
    """Tree, index, refs and state say the same; nothing is left over."""
    state = load_state(layout, NEW)
    assert state is not None
    assert state.state == "done"
    git = Git(port_tree(layout, NEW))
    assert git("rev-parse", "HEAD") == state.head
    assert git("status", "--porcelain", "--untracked-files=all") == ""
    assert git("rev-parse", "refs/workshop/tip") == state.head
    assert not list(layout.port(NEW).glob(".scratch-*"))


def _resolve_config(workspace: Layout, release: MakeRelease) -> None:
    """Have a port stop at config-answer, and do there what a human would."""
    release({"vllm/config.py": CONFIG.replace("return 41", "return 40 + 1")})
    _stops(workspace)
    file = port_tree(workspace, NEW) / "vllm/config.py"
    file.write_text(CONFIG.replace("return 41", "return 42"))


def _stops(layout: Layout, match: str = "needs you") -> WorkshopError:
    with pytest.raises(WorkshopError, match=match) as caught:
        port(layout, NEW)
    state = load_state(layout, NEW)
    assert state is not None
    assert state.state == "stopped"
    return caught.value


def test_an_unchanged_release_takes_all_as_they_are(
    workspace: Layout, release: MakeRelease
) -> None:
    release({"README.md": "# fake vLLM, newer\n"})
    assert _results(port(workspace, NEW)) == ["clean"] * 3
    _is_done(workspace)
    assert "return 42" in _text(workspace, "vllm/config.py")
    assert _text(workspace, "docs/gadget.md") == "# Gadget\n\nIt is 1.\n"
    report = (workspace.port(NEW) / "range-diff.txt").read_text()
    assert [line.split()[2] for line in report.splitlines()] == ["="] * 3
    series = load_series(workspace)
    for slug, status in load_statuses(workspace, NEW).items():
        assert status == Status("clean", series.patch_digest(slug))


def test_a_pull_request_on_the_release(workspace: Layout, release: MakeRelease) -> None:
    """With nothing but its sdist; what was made on the pinned base stays."""
    release({"vllm/config.py": NOTED})
    pinned = make_pr(workspace, "config-answer", hooks=False)
    with pytest.raises(WorkshopError, match="its files are not here") as caught:
        make_pr(workspace, "config-answer", base=NEW, hooks=False)
    assert caught.value.todo == f"Run `make port BASE={NEW}` first."
    port(workspace, NEW)
    made = make_pr(workspace, "config-answer", base=NEW, hooks=False)
    git = Git(made.repo)
    assert "# noted" in git("show", f"{made.commit}:vllm/config.py")
    assert "return 42" in git("show", f"{made.commit}:vllm/config.py")
    assert "# noted" not in git("show", f"{pinned.commit}:vllm/config.py")
    assert b"base-commit" not in made.mail.read_bytes()
    again = next(item for item in made.items if item.name == "test-result")
    assert again.verdict == "a human's"
    assert "test-result" not in {item.name for item in pinned.items}
    with pytest.raises(WorkshopError, match=rf"0\.9\.9: .*: 0\.30\.0, {NEW}\."):
        make_pr(workspace, "config-answer", base="0.9.9", hooks=False)


def test_the_series_own_tree_is_left_alone(
    applied: Layout, templates: Path, mtimes: Callable[[Path], dict[str, int]]
) -> None:
    before = mtimes(applied.tree)
    applied.ports_pin.write_text("")
    with pytest.raises(WorkshopError, match=r"no release '0\.31\.0'"):
        port(applied, NEW)
    assert mtimes(applied.tree) == before


def test_a_second_run_gives_the_same_commits(
    workspace: Layout, release: MakeRelease
) -> None:
    release({"vllm/config.py": f"# new\n{CONFIG}"})
    port(workspace, NEW)
    first = load_state(workspace, NEW)
    port(workspace, NEW)
    second = load_state(workspace, NEW)
    assert first is not None
    assert second is not None
    assert first.commits == second.commits


def test_lines_beside_the_patch_need_a_merge(
    workspace: Layout, release: MakeRelease
) -> None:
    release({"vllm/config.py": NOTED})
    assert _results(port(workspace, NEW))[0] == "3-way"
    assert "# noted" in _text(workspace, "vllm/config.py")
    assert "return 42" in _text(workspace, "vllm/config.py")


def test_a_conflict_is_resolved_and_kept(
    workspace: Layout, release: MakeRelease
) -> None:
    release({"vllm/config.py": CONFIG.replace("return 41", "return 40 + 1")})
    error = _stops(workspace)
    assert error.what.startswith("config-answer needs you")
    assert "vllm/config.py" in error.why
    assert "--continue" in error.todo
    text = _text(workspace, "vllm/config.py")
    assert f"<<<<<<< vllm-{NEW}" in text
    assert ">>>>>>> config-answer" in text
    assert load_statuses(workspace, NEW)["config-answer"].result == "conflict"

    with pytest.raises(WorkshopError, match="waits for you"):
        port(workspace, NEW)
    with pytest.raises(WorkshopError, match="not resolved yet"):
        resume(workspace, NEW)
    file = port_tree(workspace, NEW) / "vllm/config.py"
    file.write_text(CONFIG.replace("return 41", "return 42"))
    assert _results(resume(workspace, NEW)) == ["override", "clean", "clean"]
    _is_done(workspace)

    mail = workspace.port_overrides(NEW) / "config-answer.patch"
    assert mail.read_text().splitlines()[3].startswith("Subject: [PATCH] [Bugfix][CPU]")
    assert "-    return 40 + 1\n+    return 42\n" in mail.read_text()
    state = load_state(workspace, NEW)
    assert _results(port(workspace, NEW)) == ["override", "clean", "clean"]
    assert state == load_state(workspace, NEW) or state is not None


def test_markers_left_in_are_refused(workspace: Layout, release: MakeRelease) -> None:
    release({"vllm/config.py": CONFIG.replace("return 41", "return 40 + 1")})
    _stops(workspace)
    file = port_tree(workspace, NEW) / "vllm/config.py"
    file.write_text(file.read_text() + "# edited\n")
    with pytest.raises(WorkshopError, match="not resolved") as caught:
        resume(workspace, NEW)
    assert "vllm/config.py: has conflict markers" in caught.value.why


def test_a_lost_line_raises_the_alarm(workspace: Layout, release: MakeRelease) -> None:
    release({"vllm/config.py": CONFIG.replace("return 41", "return 40 + 1")})
    _stops(workspace)
    file = port_tree(workspace, NEW) / "vllm/config.py"
    file.write_text(CONFIG.replace("return 41", "return 43"))
    with pytest.raises(WorkshopError, match="would lose 1 line") as caught:
        resume(workspace, NEW)
    assert caught.value.why == "vllm/config.py:     return 42"
    assert not (workspace.port_overrides(NEW) / "config-answer.patch").exists()

    found = resume(workspace, NEW, accept_lost=True)
    assert found["config-answer"].lost == ("vllm/config.py:     return 42",)
    # What was accepted once is no alarm again; another lost line is.
    port(workspace, NEW)
    patch = workspace.patches / "config-answer.patch"
    patch.write_text(patch.read_text().replace("return 42", "return 42  # new"))
    assert "lacks 1 line" in _stops(workspace).why


def test_an_override_that_lacks_a_line_stops(
    workspace: Layout, release: MakeRelease
) -> None:
    release({})
    _replace_patch(
        workspace,
        "config-answer",
        {"vllm/config.py": CONFIG.replace("return 41", "return 42\n    # twice")},
        "vllm/config.py",
    )
    override = workspace.port_overrides(NEW)
    override.mkdir(parents=True)
    mail = (workspace.patches / "config-answer.patch").read_text()
    lines = [line for line in mail.splitlines() if line != "+    # twice"]
    text = re.sub(r"(\+\d+),5 @@", r"\1,4 @@", "\n".join(lines)) + "\n"
    (override / "config-answer.patch").write_text(text)
    error = _stops(workspace)
    assert "lacks 1 line" in error.why
    assert "lost: vllm/config.py:     # twice" in error.why


def test_an_override_of_an_older_patch_is_told(
    workspace: Layout, release: MakeRelease
) -> None:
    _resolve_config(workspace, release)
    resume(workspace, NEW)
    patch = workspace.patches / "config-answer.patch"
    text = patch.read_text()
    assert "-    answer()" in text
    patch.write_text(
        text.replace("    assert answer() == 42", "    assert 42 == answer()")
    )
    error = _stops(workspace)
    assert "lacks 1 line" in error.why


def _leaves_out(
    layout: Layout, mine: str, expected: str, path: str = "vllm/config.py"
) -> None:
    """A human's port of config-answer loses one thing; it is told, and accepted."""
    with pytest.raises(WorkshopError, match="needs you"):
        port(layout, NEW, edit="config-answer")
    (port_tree(layout, NEW) / path).write_text(mine)
    with pytest.raises(WorkshopError, match="would lose 1 line") as caught:
        resume(layout, NEW)
    assert caught.value.why == expected
    found = resume(layout, NEW, accept_lost=True)
    assert found["config-answer"].lost == (expected,)
    assert port(layout, NEW)["config-answer"].lost == (expected,)


def _loses_nothing(layout: Layout, mine: str, path: str = "vllm/config.py") -> None:
    with pytest.raises(WorkshopError, match="needs you"):
        port(layout, NEW, edit="config-answer")
    (port_tree(layout, NEW) / path).write_text(mine)
    assert resume(layout, NEW)["config-answer"].lost == ()


def test_a_removal_that_is_left_out(workspace: Layout, release: MakeRelease) -> None:
    edited = CONFIG.replace("OPTION_3 = 3\n", "").replace("41", "42")
    _replace_patch(workspace, "config-answer", {"vllm/config.py": edited})
    release({"vllm/config.py": f"# new\n{CONFIG}"})
    mine = "# new\n" + CONFIG.replace("41", "42")
    _leaves_out(workspace, mine, "vllm/config.py: - OPTION_3 = 3")


def test_a_removal_that_is_left_out_with_other_spaces(
    workspace: Layout, release: MakeRelease
) -> None:
    edited = CONFIG.replace("OPTION_3 = 3\n", "").replace("41", "42")
    _replace_patch(workspace, "config-answer", {"vllm/config.py": edited})
    release({})
    mine = CONFIG.replace("OPTION_3 = 3", "OPTION_3  =  3").replace("41", "42")
    _leaves_out(workspace, mine, "vllm/config.py: - OPTION_3 = 3")


def test_a_removal_of_one_line_of_two(workspace: Layout, release: MakeRelease) -> None:
    twice = CONFIG.replace("= 19\n", "= 19\nOPTION_3 = 3\n")
    edited = CONFIG.replace("OPTION_3 = 3\n", "").replace("41", "42")
    _replace_patch(workspace, "config-answer", {"vllm/config.py": edited})
    release({"vllm/config.py": twice})
    _loses_nothing(
        workspace, twice.replace("OPTION_3 = 3\n", "", 1).replace("41", "42")
    )
    shutil.rmtree(workspace.port(NEW))
    shutil.rmtree(workspace.port_overrides(NEW))
    _leaves_out(workspace, twice.replace("41", "42"), "vllm/config.py: - OPTION_3 = 3")


def test_a_removal_of_what_the_release_has_not(
    workspace: Layout, release: MakeRelease
) -> None:
    """Upstream wrote the removed line anew; the port may keep what it wrote."""
    edited = CONFIG.replace("OPTION_3 = 3\n", "").replace("41", "42")
    _replace_patch(workspace, "config-answer", {"vllm/config.py": edited})
    other = CONFIG.replace("OPTION_3 = 3", "OPTION_3 = None")
    release({"vllm/config.py": other})
    _stops(workspace)
    file = port_tree(workspace, NEW) / "vllm/config.py"
    file.write_text(other.replace("41", "42"))
    assert resume(workspace, NEW)["config-answer"].lost == ()


def test_a_line_that_moves_is_no_removal(
    workspace: Layout, release: MakeRelease
) -> None:
    moved = CONFIG.replace("OPTION_3 = 3\n", "") + "OPTION_3 = 3\n"
    _replace_patch(
        workspace, "config-answer", {"vllm/config.py": moved.replace("41", "42")}
    )
    release({})
    _loses_nothing(workspace, CONFIG.replace("41", "42"))


def test_a_file_that_is_not_removed(workspace: Layout, release: MakeRelease) -> None:
    _replace_patch(
        workspace,
        "config-answer",
        {"vllm/config.py": CONFIG.replace("41", "42")},
        removed=["docs/index.md"],
    )
    release({"docs/index.md": "# Other docs\n"})
    _stops(workspace)
    git = Git(port_tree(workspace, NEW))
    git("checkout", "--quiet", "HEAD", "--", "docs/index.md")
    with pytest.raises(WorkshopError, match="would lose 1 line") as caught:
        resume(workspace, NEW)
    assert caught.value.why == "docs/index.md: - the whole file"
    git("rm", "--quiet", "--force", "docs/index.md")
    assert resume(workspace, NEW)["config-answer"].lost == ()


@pytest.mark.parametrize("base", [CONFIG, CONFIG + "# twice\n"])
def test_a_lost_line_that_stands_elsewhere(
    workspace: Layout, release: MakeRelease, base: str
) -> None:
    """It may be a line of both bases, or one that the release brought."""
    line = "# twice" if base != CONFIG else "OPTION_3 = 3"
    edited = CONFIG.replace("= 7\n", f"= 7\n{line}\n").replace("41", "42")
    _replace_patch(workspace, "config-answer", {"vllm/config.py": edited})
    release({"vllm/config.py": base})
    _leaves_out(workspace, base.replace("41", "42"), f"vllm/config.py: {line}")


@pytest.mark.parametrize("gone", [False, True])
def test_a_line_that_the_release_took_is_not_lost(
    workspace: Layout, release: MakeRelease, gone: bool
) -> None:
    """Nor is it if the release did away with a line like it elsewhere."""
    line = "OPTION_3 = 3\n"
    edited = CONFIG.replace("= 7\n", f"= 7\n{line}").replace("41", "42")
    _replace_patch(workspace, "config-answer", {"vllm/config.py": edited})
    base = CONFIG.replace("= 7\n", f"= 7\n{line}# more\n")
    base = base.replace(line, "", int(gone))
    release({"vllm/config.py": base})
    _loses_nothing(workspace, base.replace("41", "42"))


def test_a_second_loss_of_an_accepted_line(
    workspace: Layout, release: MakeRelease
) -> None:
    """What was accepted once was accepted for one line, not for all that are alike."""

    def patch(text: str) -> None:
        edits = {"vllm/config.py": text.replace("41", "42")}
        _replace_patch(workspace, "config-answer", edits)

    release({})
    once = CONFIG.replace("= 7\n", "= 7\n# mark\n")
    patch(once)
    _leaves_out(workspace, CONFIG.replace("41", "42"), "vllm/config.py: # mark")
    patch(once.replace("= 12\n", "= 12\n# mark\n"))
    assert "lacks 1 line" in _stops(workspace).why


def _upstream_moves_what_is_removed(
    workspace: Layout, release: MakeRelease
) -> tuple[str, str]:
    """The file as the patch makes it, and as the release has it."""
    removed = CONFIG.replace("OPTION_3 = 3\n", "")
    edited = removed.replace("41", "42")
    _replace_patch(workspace, "config-answer", {"vllm/config.py": edited})
    moved = removed.replace("= 12\n", "= 12\nOPTION_3 = 3\n")
    release({"vllm/config.py": moved})
    return edited, moved


def test_a_line_that_upstream_moved_stops_a_merge(
    workspace: Layout, release: MakeRelease
) -> None:
    """Both sides remove it at one place, so that nothing is in conflict."""
    edited, moved = _upstream_moves_what_is_removed(workspace, release)
    error = _stops(workspace)
    assert error.what.startswith(f"config-answer needs you on vLLM {NEW} (conflict)")
    assert "got lost although nothing was in conflict" in error.why
    assert "lost: vllm/config.py: - OPTION_3 = 3" in error.why
    assert "--accept-lost" in error.todo
    assert load_statuses(workspace, NEW)["config-answer"].lost == ()
    # The tree has no conflict; it may not go on as it is.
    assert _text(workspace, "vllm/config.py") == moved.replace("41", "42")
    with pytest.raises(WorkshopError, match="would lose 1 line"):
        resume(workspace, NEW)
    file = port_tree(workspace, NEW) / "vllm/config.py"
    file.write_text(edited)
    found = resume(workspace, NEW)["config-answer"]
    assert (found.result, found.lost) == ("override", ())
    assert _text(workspace, "vllm/config.py") == edited


def test_what_a_merge_loses_can_be_accepted(
    workspace: Layout, release: MakeRelease
) -> None:
    _upstream_moves_what_is_removed(workspace, release)
    _stops(workspace)
    found = resume(workspace, NEW, accept_lost=True)["config-answer"]
    assert found.result == "override"
    assert found.lost == ("vllm/config.py: - OPTION_3 = 3",)
    assert port(workspace, NEW)["config-answer"] == found


def test_an_added_line_that_a_merge_drops(
    workspace: Layout, release: MakeRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git does no such thing; if it did, nobody would see it."""
    from tools import port_merge

    merge = port_merge._merge

    def drop(git: Git, old: str, tip: str, ours: str, theirs: str) -> object:
        good = merge(git, old, tip, ours, theirs)
        if theirs != "config-answer":
            return good
        text = git("cat-file", "blob", f"{good.tree}:vllm/config.py")
        blob = git("hash-object", "-w", "--stdin", stdin=text.replace("42", "41"))
        git("read-tree", good.tree)
        git("update-index", "--cacheinfo", f"100644,{blob},vllm/config.py")
        return port_merge._Merge(git("write-tree"), (), ())

    monkeypatch.setattr(port_merge, "_merge", drop)
    release({"vllm/config.py": NOTED})
    error = _stops(workspace)
    assert "got lost although nothing was in conflict" in error.why
    assert "lost: vllm/config.py:     return 42" in error.why


def test_a_file_that_upstream_removed(workspace: Layout, release: MakeRelease) -> None:
    release({"vllm/engine/core.py": None})
    error = _stops(workspace)
    assert error.what.startswith(f"gadget needs you on vLLM {NEW} (gone)")
    assert "Upstream removed vllm/engine/core.py" in error.todo
    with pytest.raises(WorkshopError, match="not resolved"):
        resume(workspace, NEW)
    Git(port_tree(workspace, NEW))("rm", "--quiet", "vllm/engine/core.py")
    found = resume(workspace, NEW, accept_lost=True)
    assert _results(found) == ["clean", "override", "clean"]
    assert not (port_tree(workspace, NEW) / "vllm/engine/core.py").exists()


def test_a_file_that_upstream_renamed_is_followed(
    workspace: Layout, release: MakeRelease
) -> None:
    release(
        {"vllm/config.py": None, "vllm/settings.py": CONFIG.replace("= 3\n", "= 33\n")}
    )
    found = port(workspace, NEW)
    assert found["config-answer"].result == "renamed"
    assert found["config-answer"].detail == "vllm/config.py is now vllm/settings.py"
    assert "return 42" in _text(workspace, "vllm/settings.py")
    assert not (port_tree(workspace, NEW) / "vllm/config.py").exists()


@pytest.mark.parametrize("spaces", [False, True])
def test_a_patch_that_upstream_has_is_left_out(
    workspace: Layout, release: MakeRelease, spaces: bool
) -> None:
    _, _, edits, new, _ = SLUGS["gadget"]
    files = {**edits, **new}
    if spaces:
        files = {
            name: text.replace("GADGET = 1", "GADGET  =  1").replace("    ", "\t")
            for name, text in files.items()
        }
    release(files)
    assert _results(port(workspace, NEW)) == ["clean", "upstream", "clean"]
    _is_done(workspace)
    state = load_state(workspace, NEW)
    assert state is not None
    assert list(state.commits) == ["config-answer", "gadget-docs"]
    assert (
        _text(workspace, "vllm/gadget/__init__.py") == files["vllm/gadget/__init__.py"]
    )


def test_an_overlay_file_that_upstream_added_otherwise(
    workspace: Layout, release: MakeRelease
) -> None:
    release({"docs/gadget.md": "# Gadgets\n\nUpstream's own.\n"})
    error = _stops(workspace)
    assert error.what.startswith("gadget-docs needs you")
    assert "overlay/docs/gadget.md: the new base has this file." in error.why
    file = port_tree(workspace, NEW) / "docs/gadget.md"
    file.write_text("# Gadgets\n\nUpstream's own.\n\n# Gadget\n\nIt is 1.\n")
    assert _results(resume(workspace, NEW)) == ["clean", "clean", "override"]
    # The override adds to upstream's file; it does not replace it.
    mail = (workspace.port_overrides(NEW) / "gadget-docs.patch").read_text()
    assert "-# Gadgets" not in mail
    assert "+# Gadget\n" in mail


def test_an_overlay_file_is_mended_by_hunks(
    workspace: Layout, release: MakeRelease
) -> None:
    """`--edit` changes a patch that applies, for this release only."""
    release({})
    with pytest.raises(WorkshopError, match="gadget needs you"):
        port(workspace, NEW, edit="gadget")
    file = port_tree(workspace, NEW) / "tests/test_gadget.py"
    file.write_text(file.read_text() + "# 0.31 differs\n")
    assert _results(resume(workspace, NEW)) == ["clean", "override", "clean"]
    assert "# 0.31 differs" in _text(workspace, "tests/test_gadget.py")
    mail = (workspace.port_overrides(NEW) / "gadget.patch").read_text()
    assert "+# 0.31 differs" in mail
    assert "+GADGET = 1" not in mail


def test_an_edit_that_changes_nothing_needs_no_override(
    workspace: Layout, release: MakeRelease
) -> None:
    release({})
    with pytest.raises(WorkshopError, match="gadget needs you"):
        port(workspace, NEW, edit="gadget")
    assert _results(resume(workspace, NEW)) == ["clean"] * 3
    assert not (workspace.port_overrides(NEW) / "gadget.patch").exists()


def test_a_survey_asks_nobody(workspace: Layout, release: MakeRelease) -> None:
    release({"vllm/config.py": CONFIG.replace("return 41", "return 40 + 1")})
    assert _results(survey(workspace, NEW)) == ["conflict", "clean", "clean"]
    assert load_state(workspace, NEW) is None
    assert load_statuses(workspace, NEW) == {}


def test_abort_keeps_what_was_edited(workspace: Layout, release: MakeRelease) -> None:
    release({"vllm/config.py": CONFIG.replace("return 41", "return 40 + 1")})
    _stops(workspace)
    tree = port_tree(workspace, NEW)
    (tree / "vllm/config.py").write_text("mine\n")
    abort(workspace, NEW)
    git = Git(tree)
    assert git("status", "--porcelain") == ""
    assert git("rev-parse", "HEAD") == git("rev-parse", "refs/workshop/base")
    backup = git("for-each-ref", "--format=%(refname)", "refs/backup/")
    assert git("show", f"{backup}:vllm/config.py") == "mine"
    assert load_state(workspace, NEW) is None
    with pytest.raises(WorkshopError, match="was begun"):
        abort(workspace, NEW)


def test_abort_without_edits_keeps_nothing(
    workspace: Layout, release: MakeRelease
) -> None:
    release({"vllm/config.py": CONFIG.replace("return 41", "return 40 + 1")})
    _stops(workspace)
    abort(workspace, NEW)
    assert Git(port_tree(workspace, NEW))("for-each-ref", "refs/backup/") == ""


def test_edits_in_a_finished_port_are_not_dropped(
    workspace: Layout, release: MakeRelease
) -> None:
    release({})
    port(workspace, NEW)
    file = port_tree(workspace, NEW) / "setup.py"
    file.write_text("mine\n")
    with pytest.raises(WorkshopError, match="edits of yours") as caught:
        port(workspace, NEW)
    assert caught.value.why == "setup.py"
    assert file.read_text() == "mine\n"


@pytest.mark.parametrize("at", ["running", "config-answer", "gadget", "tree"])
def test_a_killed_port_says_so_and_is_done_again(
    workspace: Layout, release: MakeRelease, at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    release({})
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tools.layout import Layout\n"
        "from tools.port import port\n"
        "def kill(name):\n"
        f"    if name == {at!r}: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"port(Layout(Path({str(workspace.root)!r})), {NEW!r}, on_step=kill)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    state = load_state(workspace, NEW)
    assert state is not None
    assert state.state == "running"
    assert _results(port(workspace, NEW)) == ["clean"] * 3
    assert "was interrupted" in capsys.readouterr().err
    _is_done(workspace)


def test_killed_after_the_override_was_kept(
    workspace: Layout, release: MakeRelease
) -> None:
    _resolve_config(workspace, release)

    class KilledError(Exception):
        pass

    def kill(name: str) -> None:
        if name == "kept":
            raise KilledError

    with pytest.raises(KilledError):
        resume(workspace, NEW, on_step=kill)
    assert _results(resume(workspace, NEW)) == ["override", "clean", "clean"]
    _is_done(workspace)


def test_hostile_settings_change_no_byte(
    workspace: Layout, release: MakeRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    release({"vllm/config.py": NOTED})
    port(workspace, NEW)
    wanted = load_state(workspace, NEW)
    report = (workspace.port(NEW) / "range-diff.txt").read_bytes()
    tree = port_tree(workspace, NEW)
    settings = workspace.root / "hostile"
    settings.write_text(
        "[core]\n\tautocrlf = true\n\twhitespace = fix\n"
        "[apply]\n\twhitespace = fix\n"
        "[merge]\n\tconflictStyle = diff3\n\trenames = false\n"
        "[diff]\n\tnoprefix = true\n\texternal = false\n\talgorithm = patience\n"
        '[merge "ours"]\n\tdriver = true\n[color]\n\tui = always\n'
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    with (tree / ".git/config").open("a") as config:
        config.write(settings.read_text())
    (tree / ".git/info").mkdir(exist_ok=True)
    (tree / ".git/info/attributes").write_text("*.py merge=ours eol=crlf\n")
    (workspace.tree / ".git/info").mkdir(exist_ok=True)
    (workspace.tree / ".git/info/attributes").write_text("*.py merge=ours eol=crlf\n")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    port(workspace, NEW)
    found = load_state(workspace, NEW)
    assert found is not None
    assert wanted is not None
    assert found.commits == wanted.commits
    assert (workspace.port(NEW) / "range-diff.txt").read_bytes() == report
    assert b"\r" not in (tree / "vllm/config.py").read_bytes()


def _replace_patch(
    layout: Layout,
    slug: str,
    edits: Mapping[str, str],
    *paths: str,
    modes: Mapping[str, str] | None = None,
    removed: Sequence[str] = (),
) -> None:
    """Let a patch make these edits of the base instead of its own."""
    from tools.pin import load_pin
    from tools.series import Mail, commit_tree, mail_of
    from tools.state import base_commit

    subject, purpose, *_ = SLUGS[slug]
    with scratch(layout.tree) as git:
        base = base_commit(load_pin(layout.pin))
        git("read-tree", base)
        for name in {*edits, *(modes or {})}:
            text = edits.get(name, BASE[name][1])
            mode = (modes or {}).get(name, f"100{BASE[name][0]:o}")
            blob = git("hash-object", "-w", "--stdin", "--no-filters", stdin=text)
            git("update-index", "--cacheinfo", f"{mode},{blob},{name}")
        for name in removed:
            git("rm", "--quiet", "--cached", name)
        mail = Mail("Zoë", "z@example.invalid", "0 +0000", f"{subject}\n\n{purpose}\n")
        mail = Mail(mail.author, mail.email, "@0 +0000", mail.message)
        data, added = mail_of(git, commit_tree(git, git("write-tree"), base, mail))
    assert not added
    (layout.patches / f"{slug}.patch").write_bytes(data)


def test_crlf_lines_stay_so(workspace: Layout, release: MakeRelease) -> None:
    old = BASE["vllm/crlf.py"][1]
    _replace_patch(workspace, "config-answer", {"vllm/crlf.py": old + "# added\r\n"})
    release({"vllm/crlf.py": "# first\r\n" + old})
    port(workspace, NEW)
    data = (port_tree(workspace, NEW) / "vllm/crlf.py").read_bytes()
    assert data == b"# first\r\n# a line\r\n# another\r\n# added\r\n"


def test_a_mode_change_is_carried(workspace: Layout, release: MakeRelease) -> None:
    _replace_patch(workspace, "config-answer", {}, modes={"setup.py": "100755"})
    release({"setup.py": "from setuptools import setup\n\n\nsetup(name='vllm')\n"})
    found = port(workspace, NEW)
    assert found["config-answer"].result in ("clean", "3-way")
    assert os.access(port_tree(workspace, NEW) / "setup.py", os.X_OK)


def test_a_mode_change_that_upstream_has(
    workspace: Layout, release: MakeRelease
) -> None:
    _replace_patch(workspace, "config-answer", {}, modes={"setup.py": "100755"})
    release({"setup.py": (0o755, BASE["setup.py"][1])})
    assert port(workspace, NEW)["config-answer"].result == "upstream"


def test_an_override_that_leaves_nothing(
    workspace: Layout, release: MakeRelease
) -> None:
    edits = {"vllm/config.py": CONFIG.replace("41", "42")}
    _replace_patch(workspace, "config-answer", edits)
    release({})
    lost = ("vllm/config.py: -     return 41", "vllm/config.py:     return 42")
    with pytest.raises(WorkshopError, match="needs you"):
        port(workspace, NEW, edit="config-answer")
    (port_tree(workspace, NEW) / "vllm/config.py").write_text(CONFIG)
    with pytest.raises(WorkshopError, match="would lose 2 line") as caught:
        resume(workspace, NEW)
    assert caught.value.why == "\n".join(lost)
    found = resume(workspace, NEW, accept_lost=True)["config-answer"]
    assert (found.result, found.lost) == ("upstream", lost)
    edits = {"vllm/config.py": CONFIG.replace("41", "42") + "# more\n"}
    _replace_patch(workspace, "config-answer", edits)
    assert "lost: vllm/config.py: # more" in _stops(workspace).why


def test_a_file_that_moved_and_is_there_again(
    workspace: Layout, release: MakeRelease
) -> None:
    """The port may bring the old name back; the new one is where lines may get lost."""
    release({"vllm/config.py": None, "vllm/settings.py": CONFIG})
    with pytest.raises(WorkshopError, match="needs you"):
        port(workspace, NEW, edit="config-answer")
    tree = port_tree(workspace, NEW)
    (tree / "vllm/settings.py").write_text(CONFIG)
    (tree / "vllm/config.py").write_text("from vllm.settings import *\n")
    with pytest.raises(WorkshopError, match="would lose 2 line") as caught:
        resume(workspace, NEW)
    assert "vllm/config.py: -     return 41" in caught.value.why


def test_a_mode_change_that_is_left_out(
    workspace: Layout, release: MakeRelease
) -> None:
    edits = {"vllm/config.py": CONFIG.replace("41", "42")}
    _replace_patch(workspace, "config-answer", edits, modes={"setup.py": "100755"})
    release({})
    with pytest.raises(WorkshopError, match="needs you"):
        port(workspace, NEW, edit="config-answer")
    (port_tree(workspace, NEW) / "setup.py").chmod(0o644)
    with pytest.raises(WorkshopError, match="would lose 1 line") as caught:
        resume(workspace, NEW)
    assert caught.value.why == "setup.py: mode 100755"
    found = resume(workspace, NEW, accept_lost=True)["config-answer"]
    assert found.lost == ("setup.py: mode 100755",)
    assert port(workspace, NEW)["config-answer"] == found


def test_the_mode_of_a_new_file_that_is_left_out(
    workspace: Layout, release: MakeRelease
) -> None:
    (workspace.overlay / "docs/gadget.md").chmod(0o755)
    release({})
    with pytest.raises(WorkshopError, match="needs you"):
        port(workspace, NEW, edit="gadget-docs")
    (port_tree(workspace, NEW) / "docs/gadget.md").chmod(0o644)
    with pytest.raises(WorkshopError, match="would lose") as caught:
        resume(workspace, NEW)
    assert caught.value.why == "docs/gadget.md: mode 100755"


def test_an_empty_file_that_is_left_out(
    workspace: Layout, release: MakeRelease
) -> None:
    (workspace.overlay / "vllm/gadget/__init__.py").write_text("")
    release({})
    with pytest.raises(WorkshopError, match="needs you"):
        port(workspace, NEW, edit="gadget")
    (port_tree(workspace, NEW) / "vllm/gadget/__init__.py").unlink()
    with pytest.raises(WorkshopError, match="would lose") as caught:
        resume(workspace, NEW)
    assert caught.value.why == "vllm/gadget/__init__.py: mode 100644"


def test_a_binary_file_is_refused(workspace: Layout, release: MakeRelease) -> None:
    _replace_patch(workspace, "config-answer", {"setup.py": "a\0b\n"})
    release({})
    with pytest.raises(WorkshopError, match=r"setup\.py, a binary file"):
        port(workspace, NEW)
    assert load_state(workspace, NEW) is None


def test_a_binary_file_of_the_overlay_is_refused(
    workspace: Layout, release: MakeRelease
) -> None:
    (workspace.overlay / "docs/gadget.md").write_bytes(b"a\0b\n")
    release({})
    with pytest.raises(WorkshopError, match=r"docs/gadget\.md, a binary file"):
        port(workspace, NEW)
    assert load_state(workspace, NEW) is None


def test_a_malformed_hunk_header_is_named(
    workspace: Layout, release: MakeRelease
) -> None:
    release({})
    patch = workspace.patches / "config-answer.patch"
    good = patch.read_text()
    patch.write_text(good.replace("@@ -20,4 +20,4 @@", "@@ -20,4 +20,9 @@"))
    if patch.read_text() == good:
        head = next(line for line in good.splitlines() if line.startswith("@@ "))
        patch.write_text(good.replace(head, "@@ -1,99 +1,99 @@"))
    with pytest.raises(WorkshopError, match="config-answer does not apply") as caught:
        port(workspace, NEW)
    assert "corrupt patch" in caught.value.why


def test_a_malformed_override_is_named(workspace: Layout, release: MakeRelease) -> None:
    release({})
    folder = workspace.port_overrides(NEW)
    folder.mkdir(parents=True)
    good = (workspace.patches / "config-answer.patch").read_text()
    head = next(line for line in good.splitlines() if line.startswith("@@ "))
    bad = good.replace(head, "@@ -1,99 +1,99 @@")
    (folder / "config-answer.patch").write_text(bad)
    with pytest.raises(WorkshopError, match="is malformed"):
        port(workspace, NEW)


def test_an_override_of_no_patch(workspace: Layout, release: MakeRelease) -> None:
    release({})
    folder = workspace.port_overrides(NEW)
    folder.mkdir(parents=True)
    (folder / "nobody.patch").write_text("x")
    with pytest.raises(WorkshopError, match="do not exist") as caught:
        port(workspace, NEW)
    assert caught.value.why == "nobody.patch"


def test_a_mend_of_the_release_is_no_override(
    workspace: Layout, release: MakeRelease
) -> None:
    release({})
    mend = workspace.port_mend(NEW)
    mend.parent.mkdir(parents=True)
    mend.write_text("x")
    found = port(workspace, NEW)
    assert {each.result for each in found.values()} == {"clean"}


def test_an_override_that_is_not_needed_is_told(
    workspace: Layout, release: MakeRelease, capsys: pytest.CaptureFixture[str]
) -> None:
    release({})
    folder = workspace.port_overrides(NEW)
    folder.mkdir(parents=True)
    data = (workspace.patches / "config-answer.patch").read_bytes()
    (folder / "config-answer.patch").write_bytes(data)
    found = port(workspace, NEW)
    assert found["config-answer"].result == "override"
    assert "not needed any more" in capsys.readouterr().err


def test_another_sdist_is_refused(workspace: Layout, release: MakeRelease) -> None:
    release({})
    text = workspace.ports_pin.read_text()
    tree = load_ports(workspace.ports_pin)[NEW].tree
    workspace.ports_pin.write_text(text.replace(tree, "1" * 40))
    with pytest.raises(WorkshopError, match="does not give the pinned tree"):
        port(workspace, NEW)
    workspace.ports_pin.write_text(text.replace(COMMIT, "abcdef012"))
    with pytest.raises(WorkshopError, match="not made from the pinned commit") as error:
        port(workspace, NEW)
    assert "ports.pin says abcdef012" in error.value.why


def test_the_verb(
    workspace: Layout, release: MakeRelease, run_tools: Callable[..., object]
) -> None:
    release({"vllm/config.py": CONFIG.replace("return 41", "return 40 + 1")})
    done = run_tools(workspace, "port", NEW)
    assert done.returncode == 1
    assert "config-answer needs you" in done.stderr
    done = run_tools(workspace, "port", NEW, "--abort")
    assert done.returncode == 0, done.stderr
    done = run_tools(workspace, "port", NEW, "--survey")
    assert "config-answer  conflict" in done.stdout
    done = run_tools(workspace, "port", NEW, "--abort", "--continue")
    assert done.returncode == 2
    assert json.loads(json.dumps({"out": done.stdout})) == {"out": ""}
