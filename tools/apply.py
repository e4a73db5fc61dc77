"""Brings `build/vllm` to the tip of the series."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import click

from tools.errors import WorkshopError
from tools.git import Git, GitError, on_worktree, scratch
from tools.layout import Layout
from tools.lock import hold
from tools.pin import Pin, load_pin, pin_with_tip_tree
from tools.series import Series, assemble, load_series
from tools.state import (
    BACKUP_REFS,
    BRANCH,
    Inspection,
    State,
    base_commit,
    inspect,
    journal_file,
    read_refs,
    refuse_edits,
)
from tools.switch import Entry, Journal, Switch, write_durably
from tools.ui import patches, say, step
from tools.versions import index_versions, tree_versions


@dataclass(frozen=True)
class Applied:
    """Result of `apply`.

    Attributes:
        tip: Commit that `build/vllm` is at.
        slugs: Patches in it, in order.
        changed: How many files were written or removed.
        backup: Ref that holds the user's work, where some was put aside.
    """

    tip: str
    slugs: tuple[str, ...]
    changed: int
    backup: str | None = None


def apply(
    layout: Layout,
    force: bool = False,
    accept_tip: bool = False,
    on_step: Callable[[str], None] = lambda name: None,
) -> Applied:
    """Bring `build/vllm` to the tip of the series.

    Does nothing when it is there. The commits are made off-tree and compared with
    `vllm.pin`; only files that differ are written then.

    Args:
        force: Put edits of the user aside under `refs/backup/` instead of refusing.
        accept_tip: Write another tip tree into `vllm.pin` instead of refusing it.
        on_step: Called after each step that changes something, for tests.

    Raises:
        WorkshopError: A patch does not apply, the tip tree is not the pinned one,
            or the tree holds something of the user's. The tree is as before then.
    """
    pin = load_pin(layout.pin)
    series = load_series(layout)
    seen = inspect(layout, pin, series)
    if seen.state is State.APPLIED:
        return Applied(str(seen.tip), series.slugs, 0)
    with hold(layout, "make apply"):
        return _apply(layout, pin, series, force, accept_tip, on_step)


def _apply(
    layout: Layout,
    pin: Pin,
    series: Series,
    force: bool,
    accept_tip: bool,
    on_step: Callable[[str], None],
) -> Applied:
    from tools.fetch import fetch

    seen = inspect(layout, pin, series)
    if seen.interrupted and not force:
        with step("Finishing an apply that was interrupted"):
            Switch(layout, Journal.load(journal_file(layout.tree)), on_step).run()
        seen = inspect(layout, pin, series)
    if seen.state in (State.FOREIGN, State.IN_PROGRESS) and not seen.interrupted:
        raise WorkshopError("The series was not applied.", seen.detail, seen.todo)
    if seen.state is State.APPLIED:
        return Applied(str(seen.tip), series.slugs, 0)
    if seen.state is State.ABSENT or (seen.other_base and (force or not seen.edits)):
        fetch(layout)
        seen = inspect(layout, pin, series)
    elif seen.other_base:
        raise refuse_edits(
            seen,
            f"build/vllm has edits of yours on another base than {pin.version}.",
        )

    edits = seen.edits
    if (edits.modified or edits.staged or edits.branch) and not force:
        # Commits may be those that export wrote; that takes the new tip to tell.
        raise _refusal(seen, {})

    with scratch(layout.tree) as git:
        base = base_commit(pin)
        with step(f"Applying {patches(len(series.patches))} to vLLM {pin.version}"):
            slugs = assemble(git, base, series.patches, layout.overlay)
        tip = slugs[series.slugs[-1]] if series.slugs else base
        tip_tree = git("rev-parse", f"{tip}^{{tree}}")
        if tip_tree != pin.tip_tree:
            _other_tip_tree(layout, pin, tip_tree, accept_tip)
        worktree = on_worktree(git, layout.tree)
        after = tree_versions(git, tip_tree)
        before = staged = index_versions(worktree)
        backup = None
        if _edits_in_the_way(seen, after) and not _is_exported(git, seen, base, tip):
            if not force:
                raise _refusal(seen, after)
            backup, saved = _save(layout, git, worktree, seen)
            before = _replaceable(git, saved, seen, after)
    journal = Journal(
        seen.head,
        base,
        tip,
        tip_tree,
        series.digest(pin.tree),
        slugs,
        _entries(before, staged, after),
    )
    Switch(layout, journal, on_step).run()
    return Applied(tip, series.slugs, len(journal.entries), backup)


def _other_tip_tree(layout: Layout, pin: Pin, tip_tree: str, accept_tip: bool) -> None:
    if not accept_tip:
        raise WorkshopError(
            "The series does not give the tip tree that vllm.pin expects.",
            f"It gives     {tip_tree}\nvllm.pin has {pin.tip_tree} (series.tip_tree)",
            "If patches/ or overlay/ were changed on purpose, accept it with "
            "`make apply ARGS=--accept-tip`\n(`make export` writes the pin by "
            "itself); else restore them from git.",
        )
    text = layout.pin.read_text(encoding="utf-8")
    write_durably(layout.pin, pin_with_tip_tree(text, tip_tree))
    say(f"vllm.pin: series.tip_tree is now {tip_tree}.")


def _collisions(seen: Inspection, after: dict[str, tuple[str, str]]) -> list[str]:
    """Untracked files where the tip has a file, or a folder of files."""
    folders = {
        name[:at] for name in after for at, char in enumerate(name) if char == "/"
    }
    return [
        name
        for name in seen.edits.untracked
        if name.rstrip("/") in after
        or name in folders
        or any(name[:at] in after for at, char in enumerate(name) if char == "/")
    ]


def _edits_in_the_way(seen: Inspection, after: dict[str, tuple[str, str]]) -> bool:
    return seen.interrupted or seen.edits.tracked or bool(_collisions(seen, after))


def _refusal(seen: Inspection, after: dict[str, tuple[str, str]]) -> WorkshopError:
    error = refuse_edits(
        seen, "The series was not applied: build/vllm has edits of yours."
    )
    if taken := _collisions(seen, after):
        error.why += "\nin the way of new files: " + ", ".join(taken)
        error.why = error.why.strip()
    return error


def _is_exported(git: Git, seen: Inspection, base: str, tip: str) -> bool:
    """Whether the user's commits are what the series now says, and nothing else.

    So it is after `make export`: same trees, authors and messages; the hashes
    differ, as the committer does.
    """
    edits = seen.edits
    if not seen.head or seen.branch != BRANCH or seen.interrupted:
        return False
    if edits.modified or edits.staged or not edits.commits:
        return False

    def content(top: str) -> list[str]:
        form = "--format=%T%x00%an%x00%ae%x00%at%x00%B%x01"
        text = git("log", form, f"{base}..{top}")
        return [" ".join(part.split()) for part in text.split("\x01")]

    return content(seen.head) == content(tip)


def _save(layout: Layout, git: Git, worktree: Git, seen: Inspection) -> tuple[str, str]:
    """Commit all that is the user's under `refs/backup/`; returns ref and commit.

    The commit's parent is HEAD; a second parent holds what was staged. No file and
    no ref of the user's is touched.
    """
    repo = Git(layout.tree)
    identity = {
        f"GIT_{role}_{what}": value
        for role in ("AUTHOR", "COMMITTER")
        for what, value in (
            ("NAME", "vLLM workshop"),
            ("EMAIL", "workshop@localhost"),
        )
    }

    def commit(tree: str, *parents: str) -> str:
        flags = [flag for parent in parents for flag in ("-p", parent)]
        return git(
            "commit-tree",
            tree,
            *flags,
            stdin="Work in build/vllm that apply put aside\n",
            env=identity,
        )

    parents = [seen.head] if seen.head else []
    try:
        index_tree = worktree("write-tree")
    except GitError:
        index_tree = None  # Paths in conflict: their files are saved below.
    # Objects outlive the scratch index, which starts as a copy of the real one.
    index = index_versions(worktree)
    git("read-tree", "--empty")
    rows = "".join(f"{m} {b}\t{path}\0" for path, (m, b) in index.items())
    git("update-index", "-z", "--index-info", stdin=rows)
    files = [*seen.edits.modified]
    files += [name for name in seen.edits.untracked if not name.endswith("/")]
    saver = Git(
        layout.tree, {**worktree.env, "GIT_INDEX_FILE": git.env["GIT_INDEX_FILE"]}
    )
    flags = ("--add", "--remove", "--replace", "-z", "--stdin")
    saver("update-index", *flags, stdin="\0".join(files))
    saved_tree = git("write-tree")
    head_tree = git("rev-parse", f"{seen.head}^{{tree}}") if seen.head else None
    if index_tree and index_tree not in (head_tree, saved_tree):
        parents.append(commit(index_tree, *parents))
    saved = commit(saved_tree, *parents)
    ref = first = BACKUP_REFS + datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for number in itertools.count(2):
        if repo.resolve(ref) is None:
            break
        ref = f"{first}-{number}"
    repo("update-ref", ref, saved)
    refs = read_refs(layout.tree)
    if refs.series and refs.series != refs.head and refs.series not in refs.ours:
        repo("update-ref", f"{ref}-{BRANCH}", refs.series)
    return ref, saved


def _replaceable(
    git: Git, saved: str, seen: Inspection, after: dict[str, tuple[str, str]]
) -> dict[str, tuple[str, str]]:
    """The files of a saved tree that the switch may replace.

    Untracked files stay where they are unless they belong to the series' folders
    or are in the way of its files.
    """
    replaced = {*seen.edits.new, *_collisions(seen, after)}
    stay = {name for name in seen.edits.untracked if name not in replaced}
    return {
        name: version
        for name, version in tree_versions(git, saved).items()
        if name not in stay
    }


def _entries(
    before: dict[str, tuple[str, str]],
    staged: dict[str, tuple[str, str]],
    after: dict[str, tuple[str, str]],
) -> tuple[Entry, ...]:
    """The paths that a switch must set, in the tree or in the index."""
    entries = []
    for path in sorted({*before, *staged, *after}):
        entry = Entry(path, before.get(path), staged.get(path), after.get(path))
        if not entry.before == entry.staged == entry.after:
            entries.append(entry)
    return tuple(entries)


@click.command()
@click.option(
    "--force",
    is_flag=True,
    help="Put edits aside under refs/backup/ instead of refusing (make FORCE=1).",
)
@click.option(
    "--accept-tip",
    is_flag=True,
    help="Write the tip tree that the series gives into vllm.pin.",
)
@click.pass_obj
def command(layout: Layout, force: bool, accept_tip: bool) -> None:
    """Bring build/vllm to the tip of the series.

    Fetches the base where there is none. Edits and commits of yours in build/vllm
    are never lost: apply refuses, or puts them aside with --force.
    """
    start = time.monotonic()
    done = apply(layout, force, accept_tip)
    seconds = time.monotonic() - start
    if done.backup:
        where = layout.relative(layout.tree)
        say(
            f"Your work is kept as {done.backup}. To get it back:\n"
            f"    git -C {where} switch --create my-work {done.backup}"
        )
    count = patches(len(done.slugs))
    if done.changed:
        say(f"Applied {count}: {', '.join(done.slugs) or 'none'}.")
        say(f"Tip {done.tip[:12]}, {done.changed} files changed, {seconds:.1f} s.")
    else:
        say(f"Nothing to do: {count} in build/vllm, tip {done.tip[:12]}.")
