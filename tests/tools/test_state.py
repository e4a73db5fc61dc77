"""Every state of `build/vllm` is told apart, and looking changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.errors import WorkshopError
from tools.git import Git
from tools.layout import Layout
from tools.pin import load_pin
from tools.state import State, base_commit, inspect, journal_file, stamp_file

UserGit = Callable[..., str]


def test_absent(bare: Layout) -> None:
    seen = inspect(bare)
    assert seen.state is State.ABSENT
    assert seen.todo == "make apply"


def test_clean(workspace: Layout) -> None:
    seen = inspect(workspace)
    assert seen.state is State.CLEAN
    assert seen.head == seen.base == base_commit(load_pin(workspace.pin))


def test_applied(applied: Layout) -> None:
    seen = inspect(applied)
    assert seen.state is State.APPLIED, seen.detail
    assert seen.head == seen.tip
    assert list(seen.slugs or ()) == ["config-answer", "gadget", "gadget-docs"]
    assert seen.tip_tree == load_pin(applied.pin).tip_tree
    assert "3 patches" in seen.detail


def test_looking_changes_no_file(
    applied: Layout, mtimes: Callable[[Path], dict[str, int]]
) -> None:
    # A file whose stat data is not the index's makes git want to refresh it.
    (applied.tree / "setup.py").touch()
    before = mtimes(applied.tree)
    assert inspect(applied).state is State.APPLIED
    assert mtimes(applied.tree) == before


def test_stale_when_the_order_changes(applied: Layout) -> None:
    applied.series.write_text("gadget\nconfig-answer\ngadget-docs\n")
    seen = inspect(applied)
    assert seen.state is State.STALE
    assert "changed since" in seen.detail


def test_stale_when_an_overlay_file_changes(applied: Layout) -> None:
    (applied.overlay / "docs/gadget.md").write_text("# Other\n")
    assert inspect(applied).state is State.STALE


def test_prose_of_the_metadata_does_not_make_it_stale(applied: Layout) -> None:
    meta = applied.patches / "gadget.toml"
    meta.write_text(meta.read_text().replace("There was no gadget.", "None."))
    assert inspect(applied).state is State.APPLIED


@pytest.mark.parametrize("what", ["gone", "not JSON", "[]", '{"version": 2}'])
def test_stale_without_a_stamp(applied: Layout, what: str) -> None:
    if what == "gone":
        stamp_file(applied.tree).unlink()
    else:
        stamp_file(applied.tree).write_text(what)
    assert inspect(applied).state is State.STALE


def test_stale_when_head_is_detached_at_the_tip(
    applied: Layout, user_git: UserGit
) -> None:
    user_git(applied.tree, "checkout", "--quiet", "--detach")
    seen = inspect(applied)
    assert seen.state is State.STALE
    assert seen.detail == "HEAD is detached."


def test_stale_at_one_of_our_slugs(applied: Layout, user_git: UserGit) -> None:
    user_git(applied.tree, "reset", "--quiet", "--hard", "HEAD~1")
    assert inspect(applied).state is State.STALE


def test_clean_after_a_reset_to_the_base(applied: Layout, user_git: UserGit) -> None:
    user_git(applied.tree, "reset", "--quiet", "--hard", "refs/workshop/base")
    assert inspect(applied).state is State.CLEAN


def _modify(tree: Path, git: UserGit) -> None:
    (tree / "vllm/config.py").write_text("x = 1\n")


def _mode(tree: Path, git: UserGit) -> None:
    (tree / "setup.py").chmod(0o755)


def _delete(tree: Path, git: UserGit) -> None:
    (tree / "setup.py").unlink()


def _stage(tree: Path, git: UserGit) -> None:
    text = (tree / "setup.py").read_text()
    (tree / "setup.py").write_text("staged\n")
    git(tree, "add", "setup.py")
    (tree / "setup.py").write_text(text)


def _untracked(tree: Path, git: UserGit) -> None:
    (tree / "vllm/mine.py").write_text("")


def _commit(tree: Path, git: UserGit) -> None:
    git(tree, "commit", "--quiet", "--allow-empty", "--message", "mine")


def _amend(tree: Path, git: UserGit) -> None:
    git(tree, "commit", "--quiet", "--amend", "--message", "reworded")


def _branch(tree: Path, git: UserGit) -> None:
    git(tree, "switch", "--quiet", "--create", "mine")


def _series_elsewhere(tree: Path, git: UserGit) -> None:
    _commit(tree, git)
    git(tree, "checkout", "--quiet", "--detach", "HEAD~1")


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (_modify, "modified: vllm/config.py"),
        (_mode, "modified: setup.py"),
        (_delete, "modified: setup.py"),
        (_stage, "staged: setup.py"),
        (_untracked, "untracked: vllm/mine.py"),
        (_commit, " mine"),
        (_amend, " reworded"),
        (_branch, "branch mine is checked out"),
        (_series_elsewhere, " mine"),
    ],
)
def test_dirty(
    applied: Layout,
    user_git: UserGit,
    edit: Callable[[Path, UserGit], None],
    named: str,
) -> None:
    edit(applied.tree, user_git)
    seen = inspect(applied)
    assert seen.state is State.DIRTY
    assert named in seen.detail
    assert "make export" in seen.todo
    assert "FORCE=1" in seen.todo


@pytest.mark.parametrize("name", ["notes.txt", "vllm/_C.abi3.so", "build/x.o"])
def test_files_outside_the_series_and_ignored_ones_are_harmless(
    applied: Layout, name: str
) -> None:
    (applied.tree / name).parent.mkdir(exist_ok=True)
    (applied.tree / name).write_text("")
    assert inspect(applied).state is State.APPLIED


def test_what_the_user_excludes_is_harmless(applied: Layout) -> None:
    (applied.tree / ".git/info").mkdir(exist_ok=True)
    (applied.tree / ".git/info/exclude").write_text("/tests/mine/\n")
    (applied.tree / "tests/mine").mkdir()
    (applied.tree / "tests/mine/test_y.py").write_text("")
    assert inspect(applied).state is State.APPLIED


def test_foreign_folder(bare: Layout) -> None:
    bare.tree.mkdir()
    (bare.tree / "precious").write_text("")
    seen = inspect(bare)
    assert seen.state is State.FOREIGN
    assert "mv build/vllm" in seen.todo


def test_foreign_clone(bare: Layout, user_git: UserGit) -> None:
    bare.tree.mkdir()
    user_git(bare.tree, "init", "--quiet")
    user_git(bare.tree, "commit", "--quiet", "--allow-empty", "--message", "theirs")
    assert inspect(bare).state is State.FOREIGN


def test_foreign_base(applied: Layout, user_git: UserGit) -> None:
    """A patch for one base is never taken to another (regression 87)."""
    user_git(applied.tree, "update-ref", "refs/workshop/base", "HEAD")
    seen = inspect(applied)
    assert seen.state is State.FOREIGN
    assert "refs/workshop/base" in seen.detail


def test_stale_on_the_base_of_another_pin(applied: Layout) -> None:
    pin = applied.pin.read_text()
    applied.pin.write_text(pin.replace('version = "0.30.0"', 'version = "0.31.0"'))
    seen = inspect(applied)
    assert seen.state is State.STALE
    assert seen.other_base
    assert "0.31.0" in seen.detail


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("rebase-merge", True),
        ("rebase-apply", True),
        ("MERGE_HEAD", False),
        ("CHERRY_PICK_HEAD", False),
        ("REVERT_HEAD", False),
        ("BISECT_LOG", False),
    ],
)
def test_operation_of_the_user(applied: Layout, name: str, folder: bool) -> None:
    path = applied.tree / ".git" / name
    if folder:
        path.mkdir()
    else:
        path.write_text("")
    seen = inspect(applied)
    assert seen.state is State.IN_PROGRESS
    assert seen.operation
    assert "abort" in seen.todo


def test_a_real_conflict_is_in_progress(applied: Layout, user_git: UserGit) -> None:
    tree = applied.tree
    user_git(tree, "switch", "--quiet", "--create", "other", "HEAD~3")
    (tree / "vllm/config.py").write_text("conflict\n")
    user_git(tree, "commit", "--quiet", "--all", "--message", "other")
    user_git(tree, "switch", "--quiet", "series")
    assert not Git(tree).ok("cherry-pick", "other")
    assert inspect(applied).state is State.IN_PROGRESS


def test_interrupted_apply(applied: Layout) -> None:
    journal_file(applied.tree).write_text("{}")
    seen = inspect(applied)
    assert seen.state is State.IN_PROGRESS
    assert seen.interrupted
    assert seen.todo == "make apply"


def test_a_moved_tree_is_still_applied(applied: Layout, tmp_path: Path) -> None:
    shutil.copytree(applied.root, tmp_path / "moved", symlinks=True)
    assert inspect(Layout(tmp_path / "moved")).state is State.APPLIED


def test_a_broken_series_is_named(applied: Layout) -> None:
    (applied.patches / "gadget-docs.toml").unlink()
    with pytest.raises(WorkshopError, match="1 problem") as caught:
        inspect(applied)
    assert "patches/gadget-docs.toml is missing" in caught.value.why
