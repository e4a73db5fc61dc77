"""`apply`: one step, idempotent, mended after any kill, nobody's work lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.apply import apply
from tools.errors import WorkshopError
from tools.git import Git
from tools.layout import Layout
from tools.lock import hold
from tools.pin import load_pin
from tools.series import load_series
from tools.state import State, inspect, journal_file, stamp_file

UserGit = Callable[..., str]
Mtimes = Callable[[Path], dict[str, int]]


def _is_applied(layout: Layout) -> None:
    """The tree, the index and all refs are those of the series."""
    seen = inspect(layout)
    assert seen.state is State.APPLIED, seen.detail
    git = Git(layout.tree)
    assert git("status", "--porcelain", "--untracked-files=all") == ""
    assert git("rev-parse", "HEAD^{tree}") == load_pin(layout.pin).tip_tree
    assert git("write-tree") == load_pin(layout.pin).tip_tree
    assert git("symbolic-ref", "HEAD") == "refs/heads/series"
    assert not journal_file(layout.tree).exists()
    assert not list((layout.tree / ".git").rglob("*.lock"))


def test_apply_on_a_fresh_clone_fetches(bare: Layout) -> None:
    done = apply(bare)
    assert done.slugs == ("config-answer", "gadget", "gadget-docs")
    _is_applied(bare)


def test_one_commit_per_slug(workspace: Layout) -> None:
    done = apply(workspace)
    git = Git(workspace.tree)
    log = git("log", "--format=%s", "--reverse", "refs/workshop/base..HEAD")
    assert log.splitlines() == [
        "[Bugfix][CPU] Answer 42, not 41",
        "[Core] Add the gadget",
        "[Doc] Describe the gadget",
    ]
    for at, slug in enumerate(reversed(done.slugs)):
        assert git("rev-parse", f"refs/workshop/slug/{slug}") == git(
            "rev-parse", f"HEAD~{at}"
        )
    stamp = json.loads(stamp_file(workspace.tree).read_text())
    assert stamp == {
        "version": 1,
        "series_digest": load_series(workspace).digest(load_pin(workspace.pin).tree),
        "tip": done.tip,
        "tip_tree": load_pin(workspace.pin).tip_tree,
    }


def test_unchanged_files_keep_their_mtimes(workspace: Layout, mtimes: Mtimes) -> None:
    before = mtimes(workspace.tree)
    done = apply(workspace)
    after = mtimes(workspace.tree)
    changed = {
        name
        for name in after
        if not name.startswith(".git/") and after[name] != before.get(name)
    }
    assert changed == {
        "docs/gadget.md",
        "tests/test_gadget.py",
        "tests/test_x.py",
        "vllm/config.py",
        "vllm/engine/core.py",
        "vllm/gadget/__init__.py",
    }
    assert done.changed == len(changed)


def test_second_apply_changes_nothing(applied: Layout, mtimes: Mtimes) -> None:
    (applied.tree / "setup.py").touch()  # Only stat data differs from the index.
    before = mtimes(applied.tree)
    done = apply(applied)
    assert done.changed == 0
    assert mtimes(applied.tree) == before
    assert not list(applied.build.glob(".scratch-*"))


def test_a_changed_series_moves_only_what_changed(
    applied: Layout,
    mtimes: Mtimes,
    user_git: UserGit,
    set_tip_tree: Callable[[Layout, str], None],
) -> None:
    cache = applied.tree / "vllm/gadget/__pycache__"
    cache.mkdir()
    (cache / "__init__.cpython-311.pyc").write_bytes(b"stale")
    applied.series.write_text("config-answer\n")
    before = mtimes(applied.tree)
    # The tree after the first slug.
    tree = user_git(applied.tree, "rev-parse", "HEAD~2^{tree}")
    set_tip_tree(applied, tree)
    done = apply(applied)
    _is_applied(applied)
    assert done.slugs == ("config-answer",)
    # An empty folder, or one with bytecode only, would stay importable.
    assert not (applied.tree / "vllm/gadget").exists()
    after = mtimes(applied.tree)
    assert after["vllm/config.py"] == before["vllm/config.py"]
    assert after["vllm/engine/core.py"] != before["vllm/engine/core.py"]
    refs = user_git(applied.tree, "for-each-ref", "--format=%(refname)")
    assert "refs/workshop/slug/gadget" not in refs.splitlines()


def test_bytecode_of_replaced_files_is_removed(workspace: Layout) -> None:
    """Python trusts bytecode by second and size; both may be the same here."""
    cache = workspace.tree / "vllm/__pycache__"
    cache.mkdir()
    for name in ("config", "configuration", "crlf"):
        (cache / f"{name}.cpython-311.pyc").write_bytes(b"compiled before")
    apply(workspace)
    assert {path.name.split(".")[0] for path in cache.iterdir()} == {
        "configuration",
        "crlf",
    }


def test_wrong_tip_tree_is_refused_and_nothing_moves(
    workspace: Layout, mtimes: Mtimes, set_tip_tree: Callable[[Layout, str], None]
) -> None:
    given = load_pin(workspace.pin).tip_tree
    set_tip_tree(workspace, "1" * 40)
    files = mtimes(workspace.tree / "vllm")
    with pytest.raises(WorkshopError) as caught:
        apply(workspace)
    assert given in caught.value.why
    assert "1" * 40 in caught.value.why
    assert "--accept-tip" in caught.value.todo
    assert inspect(workspace).state is State.CLEAN
    assert mtimes(workspace.tree / "vllm") == files

    apply(workspace, accept_tip=True)
    _is_applied(workspace)
    assert load_pin(workspace.pin).tip_tree == given
    assert "# A comment that a rewrite keeps." in workspace.pin.read_text()


def test_patch_that_does_not_apply_is_a_hard_error(workspace: Layout) -> None:
    """Never a tree that is half patched, or a run that goes on (regressions 87, 88)."""
    mail = workspace.patches / "gadget.patch"
    mail.write_text(mail.read_text().replace("-    pass", "-    other"))
    with pytest.raises(WorkshopError, match="gadget does not apply") as caught:
        apply(workspace)
    assert "vllm/engine/core.py" in caught.value.why
    assert inspect(workspace).state is State.CLEAN


def test_file_modes_and_links(
    workspace: Layout, user_git: UserGit, set_tip_tree: Callable[[Layout, str], None]
) -> None:
    script = workspace.overlay / "docs/gadget.md"
    script.chmod(0o755)
    (workspace.overlay / "tests/test_gadget.py").unlink()
    (workspace.overlay / "tests/test_gadget.py").symlink_to("test_x.py")
    apply(workspace, accept_tip=True)
    _is_applied(workspace)
    assert os.access(workspace.tree / "docs/gadget.md", os.X_OK)
    assert not os.access(workspace.tree / "vllm/gadget/__init__.py", os.X_OK)
    assert (workspace.tree / "tests/test_gadget.py").readlink() == Path("test_x.py")


def _folder_and_file(layout: Layout, forward: bool) -> None:
    """A series whose one patch adds `docs/gadget`: a file, or a folder of one."""
    name = "docs/gadget/index.md" if forward else "docs/gadget"
    layout.series.write_text("gadget-docs\n")
    meta = layout.patches / "gadget-docs.toml"
    meta.write_text(f'why = "x"\nremoval = "x"\ntests = ["x"]\noverlay = ["{name}"]\n')
    shutil.rmtree(layout.overlay)
    (layout.overlay / name).parent.mkdir(parents=True)
    (layout.overlay / name).write_text("new\n")


@pytest.mark.parametrize("forward", [True, False])
def test_file_and_folder_change_places(workspace: Layout, forward: bool) -> None:
    _folder_and_file(workspace, not forward)
    apply(workspace, accept_tip=True)
    _folder_and_file(workspace, forward)
    apply(workspace, accept_tip=True)
    _is_applied(workspace)
    assert (workspace.tree / "docs/gadget").is_dir() is forward


def test_empty_series(workspace: Layout) -> None:
    workspace.series.write_text("# nothing\n")
    done = apply(workspace, accept_tip=True)
    assert done.slugs == ()
    assert done.tip == inspect(workspace).base
    _is_applied(workspace)


# What the user may have in the tree; each returns what must be kept.


def _edit(tree: Path, git: UserGit) -> dict[str, str]:
    (tree / "vllm/config.py").write_text("mine\n")
    return {"vllm/config.py": "mine\n"}


def _edit_elsewhere(tree: Path, git: UserGit) -> dict[str, str]:
    (tree / "README.md").write_text("mine\n")
    return {"README.md": "mine\n"}


def _deletion(tree: Path, git: UserGit) -> dict[str, str]:
    (tree / "setup.py").unlink()
    return {}


def _stage(tree: Path, git: UserGit) -> dict[str, str]:
    _edit(tree, git)
    git(tree, "add", "vllm/config.py")
    return {"vllm/config.py": "mine\n"}


def _commit(tree: Path, git: UserGit) -> dict[str, str]:
    _stage(tree, git)
    git(tree, "commit", "--quiet", "--message", "mine")
    return {"vllm/config.py": "mine\n"}


def _other_branch(tree: Path, git: UserGit) -> dict[str, str]:
    git(tree, "switch", "--quiet", "--create", "mine")
    return _edit(tree, git)


def _new_file_in_the_way(tree: Path, git: UserGit) -> dict[str, str]:
    (tree / "docs/gadget.md").write_text("mine\n")
    return {"docs/gadget.md": "mine\n"}


def _new_folder_in_the_way(tree: Path, git: UserGit) -> dict[str, str]:
    (tree / "docs/gadget.md").mkdir()
    (tree / "docs/gadget.md/notes").write_text("mine\n")
    return {"docs/gadget.md/notes": "mine\n"}


def _file_where_a_folder_goes(tree: Path, git: UserGit) -> dict[str, str]:
    (tree / "vllm/gadget").write_text("mine\n")
    return {"vllm/gadget": "mine\n"}


def _folder_for_a_file(tree: Path, git: UserGit) -> dict[str, str]:
    (tree / "vllm/config.py").unlink()
    (tree / "vllm/config.py").mkdir()
    (tree / "vllm/config.py/mine.py").write_text("mine\n")
    return {"vllm/config.py/mine.py": "mine\n"}


def _everything(tree: Path, git: UserGit) -> dict[str, str]:
    kept = _commit(tree, git) | _edit_elsewhere(tree, git)
    (tree / "tests/test_mine.py").write_text("mine\n")
    (tree / "notes.txt").write_text("mine\n")
    return {**kept, "tests/test_mine.py": "mine\n", "notes.txt": "mine\n"}


WORK = [
    _edit,
    _edit_elsewhere,
    _deletion,
    _stage,
    _commit,
    _other_branch,
    _new_file_in_the_way,
    _new_folder_in_the_way,
    _file_where_a_folder_goes,
    _folder_for_a_file,
    _everything,
]


@pytest.mark.parametrize("work", WORK)
def test_work_of_the_user_is_refused_or_put_aside(
    workspace: Layout, user_git: UserGit, work: Callable[..., dict[str, str]]
) -> None:
    tree = workspace.tree
    kept = work(tree, user_git)
    head = user_git(tree, "rev-parse", "HEAD")
    status = user_git(tree, "status", "--porcelain", "--branch")
    with pytest.raises(WorkshopError) as caught:
        apply(workspace)
    assert "FORCE=1" in caught.value.todo
    assert "make export" in caught.value.todo
    for name in kept:
        if (tree / name).exists() and work is not _everything:
            assert name.split("/")[-1] in caught.value.why or "mine" in (
                caught.value.why
            )
    assert user_git(tree, "status", "--porcelain", "--branch") == status
    assert all((tree / name).read_text() == text for name, text in kept.items())

    done = apply(workspace, force=True)
    assert done.backup
    seen = inspect(workspace)
    assert seen.state is State.APPLIED, seen.detail
    saved = user_git(tree, "ls-tree", "-r", "--name-only", done.backup).splitlines()
    for name, text in kept.items():
        assert user_git(tree, "show", f"{done.backup}:{name}") + "\n" == text
    assert ("setup.py" in saved) is (work is not _deletion)
    # What HEAD named is still there, too.
    user_git(tree, "merge-base", "--is-ancestor", head, done.backup)
    if work is _everything:
        assert (tree / "notes.txt").read_text() == "mine\n"
        assert not (tree / "tests/test_mine.py").exists()
        (tree / "notes.txt").unlink()
    _is_applied(workspace)


def test_what_was_staged_and_then_changed_is_kept_too(
    workspace: Layout, user_git: UserGit
) -> None:
    tree = workspace.tree
    (tree / "README.md").write_text("staged\n")
    user_git(tree, "add", "README.md")
    (tree / "README.md").write_text("not staged\n")
    done = apply(workspace, force=True)
    assert user_git(tree, "show", f"{done.backup}:README.md") == "not staged"
    assert user_git(tree, "show", f"{done.backup}^2:README.md") == "staged"
    _is_applied(workspace)


def test_conflicted_files_are_kept(applied: Layout, user_git: UserGit) -> None:
    tree = applied.tree
    (tree / "vllm/config.py").write_text("stashed\n")
    user_git(tree, "stash", "--quiet")
    (tree / "vllm/config.py").write_text("other\n")
    user_git(tree, "commit", "--quiet", "--all", "--message", "other")
    assert not Git(tree).ok("stash", "pop")
    text = (tree / "vllm/config.py").read_text()
    assert "<<<<<<<" in text
    with pytest.raises(WorkshopError, match="edits of yours"):
        apply(applied)
    done = apply(applied, force=True)
    assert user_git(tree, "show", f"{done.backup}:vllm/config.py") + "\n" == text
    _is_applied(applied)


def test_commits_on_series_while_head_is_elsewhere_are_kept(
    applied: Layout, user_git: UserGit
) -> None:
    tree = applied.tree
    _commit(tree, user_git)
    mine = user_git(tree, "rev-parse", "HEAD")
    user_git(tree, "checkout", "--quiet", "--detach", "refs/workshop/tip")
    with pytest.raises(WorkshopError, match="edits of yours"):
        apply(applied)
    done = apply(applied, force=True)
    assert user_git(tree, "rev-parse", f"{done.backup}-series") == mine
    _is_applied(applied)


def test_two_backups_in_one_second(workspace: Layout, user_git: UserGit) -> None:
    refs = set()
    for text in ("one\n", "two\n", "three\n"):
        (workspace.tree / "README.md").write_text(text)
        refs.add(apply(workspace, force=True).backup)
    assert len(refs) == 3
    saved = {user_git(workspace.tree, "show", f"{ref}:README.md") for ref in refs}
    assert saved == {"one", "two", "three"}


def test_harmless_untracked_files_stay(workspace: Layout) -> None:
    for name in ("notes.txt", "vllm/mine.py", "vllm/_C.abi3.so"):
        (workspace.tree / name).write_text("mine\n")
    assert apply(workspace).backup is None
    for name in ("notes.txt", "vllm/mine.py", "vllm/_C.abi3.so"):
        assert (workspace.tree / name).read_text() == "mine\n"


@pytest.mark.parametrize("force", [False, True])
def test_operation_of_the_user_is_left_alone(
    applied: Layout, user_git: UserGit, force: bool
) -> None:
    tree = applied.tree
    user_git(tree, "switch", "--quiet", "--create", "other", "HEAD~3")
    (tree / "vllm/config.py").write_text("conflict\n")
    user_git(tree, "commit", "--quiet", "--all", "--message", "other")
    assert not Git(tree).ok("rebase", "series")
    status = user_git(tree, "status", "--porcelain")
    with pytest.raises(WorkshopError) as caught:
        apply(applied, force=force)
    assert "rebase is in progress" in caught.value.why
    assert user_git(tree, "status", "--porcelain") == status


def test_foreign_tree_is_left_alone(bare: Layout) -> None:
    bare.tree.mkdir()
    (bare.tree / "precious").write_text("mine\n")
    for force in (False, True):
        with pytest.raises(WorkshopError) as caught:
            apply(bare, force=force)
        assert "mv build/vllm build/vllm.old" in caught.value.todo
    assert [path.name for path in bare.tree.iterdir()] == ["precious"]


def test_after_export_head_moves_and_no_file_does(
    applied: Layout, user_git: UserGit, mtimes: Mtimes
) -> None:
    """The user's commits say what the series says; only their hashes differ."""
    tree = applied.tree
    tip = user_git(tree, "rev-parse", "HEAD")
    user_git(tree, "rebase", "--quiet", "--force-rebase", "refs/workshop/base")
    assert user_git(tree, "rev-parse", "HEAD") != tip
    before = {k: v for k, v in mtimes(tree).items() if not k.startswith(".git/")}
    index = (tree / ".git/index").stat().st_mtime_ns
    done = apply(applied)
    assert (done.tip, done.changed, done.backup) == (tip, 0, None)
    after = {k: v for k, v in mtimes(tree).items() if not k.startswith(".git/")}
    assert after == before
    assert (tree / ".git/index").stat().st_mtime_ns == index
    _is_applied(applied)


def test_a_reworded_commit_is_not_thrown_away(
    applied: Layout, user_git: UserGit
) -> None:
    user_git(applied.tree, "commit", "--quiet", "--amend", "--message", "reworded")
    with pytest.raises(WorkshopError) as caught:
        apply(applied)
    assert "reworded" in caught.value.why


def _other_pin(layout: Layout) -> None:
    """Pretend that the pin went on to another release with the same files."""
    text = layout.pin.read_text()
    old = load_pin(layout.pin).commit
    layout.pin.write_text(text.replace(old, old[:9] + "0" * 31))


def test_base_of_another_pin(applied: Layout, user_git: UserGit) -> None:
    old = user_git(applied.tree, "rev-parse", "refs/workshop/base")
    _other_pin(applied)
    apply(applied)
    _is_applied(applied)
    new = user_git(applied.tree, "rev-parse", "refs/workshop/base")
    assert new != old
    assert user_git(applied.tree, "rev-list", "--max-parents=0", "HEAD") == new


def test_work_on_the_base_of_another_pin_is_kept(
    applied: Layout, user_git: UserGit
) -> None:
    _commit(applied.tree, user_git)
    mine = user_git(applied.tree, "rev-parse", "HEAD")
    _other_pin(applied)
    with pytest.raises(WorkshopError, match="another base"):
        apply(applied)
    assert user_git(applied.tree, "rev-parse", "HEAD") == mine
    done = apply(applied, force=True)
    user_git(applied.tree, "merge-base", "--is-ancestor", mine, str(done.backup))
    _is_applied(applied)


# Kills. A child process kills itself after its n-th step.


def _killed_apply(layout: Layout, at: int, **options: bool) -> str | None:
    """Run `apply` in a child that is killed after a step; None if it ended first."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def on_step(name: str) -> None:
            nonlocal count
            if count == at:
                os.write(write, name.encode())
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

        code = 1
        try:
            apply(layout, on_step=on_step, **options)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        name = pipe.read()
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return name
    assert os.WEXITSTATUS(status) == 0
    return None


STEPS = [
    "journal",
    "lock",
    "remove docs/old.md",
    "write docs/gadget.md",
    "write tests/test_gadget.py",
    "write tests/test_x.py",
    "write vllm/config.py",
    "write vllm/engine/core.py",
    "write vllm/gadget/__init__.py",
    "index",
    "unlock",
    "refs",
    "stamp",
    "done",
]


@pytest.fixture(scope="module")
def _before(templates: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("before") / "work"
    shutil.copytree(templates / "fetched", root, symlinks=True)
    layout = Layout(root)
    present, pin = layout.series.read_text(), layout.pin.read_text()
    facts = 'why = "x"\nremoval = "x"\ntests = ["x"]\noverlay = ["docs/old.md"]\n'
    (layout.patches / "old.toml").write_text(facts)
    shutil.copy(layout.patches / "gadget-docs.patch", layout.patches / "old.patch")
    (layout.overlay / "docs/old.md").write_text("old\n")
    layout.series.write_text("old\n")
    apply(layout, accept_tip=True)
    layout.series.write_text(present)
    layout.pin.write_text(pin)
    Git(layout.tree)("repack", "-a", "-d", "-q")
    return root


@pytest.fixture
def before(_before: Path, tmp_path: Path) -> Layout:
    """At the tip of an older series, which has a file that the present one has not."""
    shutil.copytree(_before, tmp_path / "before", symlinks=True)
    return Layout(tmp_path / "before")


@pytest.mark.parametrize(("at", "name"), list(enumerate(STEPS)), ids=STEPS)
def test_killed_after_each_step(before: Layout, at: int, name: str) -> None:
    (before.tree / "notes.txt").write_text("mine\n")
    assert _killed_apply(before, at) == name
    seen = inspect(before)
    if name != "done":
        assert seen.state is State.IN_PROGRESS
        assert seen.interrupted
    apply(before)
    assert (before.tree / "notes.txt").read_text() == "mine\n"
    (before.tree / "notes.txt").unlink()
    _is_applied(before)


def test_all_steps_are_tested(before: Layout) -> None:
    names: list[str] = []
    apply(before, on_step=names.append)
    assert names == STEPS


def test_killed_while_being_mended(before: Layout) -> None:
    for at in (4, 0, 2, 1, 3, 2, 1):
        if _killed_apply(before, at) is None:
            break
    apply(before)
    _is_applied(before)


def test_killed_and_the_series_changed_meanwhile(before: Layout) -> None:
    assert _killed_apply(before, 5)
    before.series.write_text("config-answer\n")
    apply(before, accept_tip=True)
    _is_applied(before)


def test_killed_with_locks_left_by_git(
    before: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.switch.LOCK_WAIT", 0.05)
    assert _killed_apply(before, STEPS.index("unlock"))
    git = before.tree / ".git"
    for name in ("index.lock", "HEAD.lock", "refs/heads/series.lock"):
        (git / name).write_bytes(b"")
    (git / "refs/workshop/tip.lock").write_bytes(b"")
    apply(before)
    _is_applied(before)


def test_lock_of_a_running_git_is_respected(
    before: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.switch.LOCK_WAIT", 0.05)
    assert _killed_apply(before, STEPS.index("journal"))
    lock = before.tree / ".git/index.lock"
    with lock.open("wb"), pytest.raises(WorkshopError, match=r"index\.lock exists"):
        apply(before)
    assert lock.exists()
    lock.unlink()
    apply(before)
    _is_applied(before)


def test_lock_without_an_interrupted_apply_is_not_ours_to_remove(
    workspace: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.switch.LOCK_WAIT", 0.05)
    lock = workspace.tree / ".git/index.lock"
    lock.write_bytes(b"")
    with pytest.raises(WorkshopError, match=r"index\.lock exists"):
        apply(workspace)
    assert lock.exists()
    lock.unlink()
    apply(workspace)
    _is_applied(workspace)


@pytest.mark.parametrize("name", ["vllm/config.py", "vllm/gadget/__init__.py"])
def test_edit_after_a_kill_is_refused_by_name(before: Layout, name: str) -> None:
    assert _killed_apply(before, STEPS.index("write vllm/config.py"))
    (before.tree / name).parent.mkdir(exist_ok=True)
    (before.tree / name).write_text("mine\n")
    with pytest.raises(WorkshopError) as caught:
        apply(before)
    assert f"edited: {name}" in caught.value.why
    assert (before.tree / name).read_text() == "mine\n"
    # The user's git must be able to undo the edit.
    assert not (before.tree / ".git/index.lock").exists()
    done = apply(before, force=True)
    assert Git(before.tree)("show", f"{done.backup}:{name}") == "mine"
    _is_applied(before)


def test_commit_after_a_kill_is_refused(before: Layout, user_git: UserGit) -> None:
    assert _killed_apply(before, STEPS.index("unlock"))
    (before.tree / "README.md").write_text("mine\n")
    user_git(before.tree, "commit", "--quiet", "--all", "--message", "mine")
    mine = user_git(before.tree, "rev-parse", "HEAD")
    with pytest.raises(WorkshopError) as caught:
        apply(before)
    assert mine in caught.value.why
    done = apply(before, force=True)
    user_git(before.tree, "merge-base", "--is-ancestor", mine, str(done.backup))
    _is_applied(before)


def test_killed_while_work_is_put_aside(workspace: Layout, user_git: UserGit) -> None:
    kept = _everything(workspace.tree, user_git)
    for at in (0, 3, 6, 8):
        _killed_apply(workspace, at, force=True)
    apply(workspace, force=True)
    seen = inspect(workspace)
    assert seen.state is State.APPLIED, seen.detail
    out = user_git(workspace.tree, "for-each-ref", "--format=%(refname)", "refs/backup")
    first = out.splitlines()[0]
    for name, text in kept.items():
        assert user_git(workspace.tree, "show", f"{first}:{name}") + "\n" == text


def test_edit_between_check_and_switch_is_seen(workspace: Layout) -> None:
    def edit(name: str) -> None:
        if name == "journal":
            (workspace.tree / "vllm/config.py").write_text("mine\n")

    with pytest.raises(WorkshopError, match="changed while apply"):
        apply(workspace, on_step=edit)
    assert (workspace.tree / "vllm/config.py").read_text() == "mine\n"
    assert not journal_file(workspace.tree).exists()
    assert not (workspace.tree / ".git/index.lock").exists()
    assert inspect(workspace).state is State.DIRTY


def test_users_git_waits_while_the_tree_is_switched(
    workspace: Layout, user_git: UserGit
) -> None:
    seen = []

    def commit(name: str) -> None:
        if name == "write vllm/config.py":
            seen.append(Git(workspace.tree).ok("add", "--all"))

    apply(workspace, on_step=commit)
    assert seen == [False]
    _is_applied(workspace)


# Two runs at once.


def test_two_runs_are_kept_apart(
    workspace: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib\n"
            "from tools.layout import Layout\nfrom tools.lock import hold\n"
            "with hold(Layout(pathlib.Path(sys.argv[1])), 'make other'):\n"
            "    print('held', flush=True)\n    sys.stdin.read()\n",
            str(workspace.root),
        ],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin
    assert holder.stdout
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(WorkshopError) as caught, hold(workspace, "x", wait=0.2):
            pass
        assert f"process {holder.pid}, `make other`" in caught.value.what

        timer = threading.Timer(0.3, holder.stdin.close)
        timer.start()
        apply(workspace)  # Waits for the other run.
        timer.join()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    _is_applied(workspace)


def test_lock_of_a_killed_run_does_not_stay(workspace: Layout) -> None:
    child = os.fork()
    if child == 0:
        with hold(workspace, "make killed"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert (workspace.build / ".lock-holder").exists()
    with hold(workspace, "x", wait=0):
        pass


def test_command_line(workspace: Layout, run_tools: Callable[..., object]) -> None:
    done = run_tools(workspace, "apply")
    assert done.returncode == 0, done.stderr
    assert "config-answer, gadget, gadget-docs" in done.stderr
    (workspace.tree / "vllm/config.py").write_text("mine\n")
    done = run_tools(workspace, "apply")
    assert done.returncode == 1
    assert "modified: vllm/config.py" in done.stderr
    assert "Traceback" not in done.stderr
    done = run_tools(workspace, "apply", "--force")
    assert done.returncode == 0
    assert "switch --create my-work refs/backup/" in done.stderr
