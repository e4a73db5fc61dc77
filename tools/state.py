"""What `build/vllm` is: which base, which tip, and whose edits.

Nothing here writes to the tree, its index or its refs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from tools.errors import WorkshopError
from tools.git import COMMITTER_EMAIL, COMMITTER_NAME, Git, on_worktree, scratch
from tools.layout import Layout
from tools.pin import Pin, load_pin
from tools.series import Series, load_series
from tools.ui import patches
from tools.versions import file_version, index_versions

BRANCH = "series"
BASE_REF = "refs/workshop/base"
TIP_REF = "refs/workshop/tip"
SLUG_REFS = "refs/workshop/slug/"
BACKUP_REFS = "refs/backup/"

# Untracked files elsewhere are none of the series' business.
_SERIES_FOLDERS = ("vllm/", "tests/")

_OPERATIONS = {
    "rebase-merge": "a rebase",
    "rebase-apply": "an am or a rebase",
    "MERGE_HEAD": "a merge",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "BISECT_LOG": "a bisect",
}


class State(Enum):
    """States of `build/vllm`.

    ABSENT: there is none. CLEAN: at the base. APPLIED: at the tip of the present
    series. STALE: at something else that the workshop made. DIRTY: with edits or
    commits of the user. FOREIGN: not made by the workshop. IN_PROGRESS: in the
    middle of an apply, or of a git operation of the user.
    """

    ABSENT = "absent"
    CLEAN = "clean"
    APPLIED = "applied"
    STALE = "stale"
    DIRTY = "dirty"
    FOREIGN = "foreign"
    IN_PROGRESS = "in progress"


@dataclass(frozen=True)
class Edits:
    """What the user changed since the workshop last wrote.

    Attributes:
        modified: Tracked files whose content or mode differs from the index.
        staged: Files whose index entry differs from HEAD.
        untracked: Untracked files that git does not ignore, anywhere.
        commits: `hash subject` of commits that the workshop did not make.
        branch: The branch checked out, if it is not ours.
    """

    modified: tuple[str, ...] = ()
    staged: tuple[str, ...] = ()
    untracked: tuple[str, ...] = ()
    commits: tuple[str, ...] = ()
    branch: str | None = None

    @property
    def tracked(self) -> bool:
        """Whether there is more than untracked files."""
        return bool(self.modified or self.staged or self.commits or self.branch)

    @property
    def new(self) -> tuple[str, ...]:
        """Untracked files where the series' files are."""
        return tuple(
            name for name in self.untracked if name.startswith(_SERIES_FOLDERS)
        )

    def __bool__(self) -> bool:
        return self.tracked or bool(self.new)

    def describe(self, limit: int = 20) -> str:
        lines = [f"branch {self.branch} is checked out"] if self.branch else []
        for kind, entries in (
            ("commit", self.commits),
            ("modified", self.modified),
            ("staged", self.staged),
            ("untracked", self.new),
        ):
            lines += [f"{kind}: {entry}" for entry in entries[:limit]]
            if len(entries) > limit:
                lines.append(f"{kind}: and {len(entries) - limit} more")
        return "\n".join(lines)


@dataclass(frozen=True)
class Inspection:
    """Result of `inspect`.

    Attributes:
        detail: What was found, in a line or a few.
        todo: The next step.
        head: Commit that HEAD names.
        branch: Branch checked out, None when HEAD is detached.
        base: Commit that the tree was made from.
        tip: Tip that `apply` last made.
        slugs: Commit of each applied slug.
        edits: What the user changed.
        other_base: The tree's base is not the one of `vllm.pin`.
        operation: The user's own git operation in progress.
        interrupted: An apply was interrupted.
        tip_tree: Tree of HEAD, when the state is APPLIED.
        series_digest: Digest of the present series.
    """

    state: State
    detail: str
    todo: str = ""
    head: str | None = None
    branch: str | None = None
    base: str | None = None
    tip: str | None = None
    slugs: dict[str, str] | None = None
    edits: Edits = Edits()
    other_base: bool = False
    operation: str | None = None
    interrupted: bool = False
    tip_tree: str | None = None
    series_digest: str | None = None


def base_object(pin: Pin) -> bytes:
    """The base commit, byte for byte: the same on every machine."""
    who = f"{COMMITTER_NAME} <{COMMITTER_EMAIL}> 946684800 +0000"
    return (
        f"tree {pin.tree}\nauthor {who}\ncommitter {who}\n\n"
        f"vLLM {pin.version}\n\n"
        f"The files of the source distribution; upstream commit {pin.commit}.\n"
    ).encode()


def base_commit(pin: Pin) -> str:
    """Hash of the base commit."""
    data = base_object(pin)
    return hashlib.sha1(b"commit %d\0%s" % (len(data), data)).hexdigest()


def stamp_file(tree: Path) -> Path:
    """Where `apply` says which series `build/vllm` holds."""
    return tree / ".git" / "workshop.json"


def journal_file(tree: Path) -> Path:
    """Exists while `apply` moves `build/vllm` from one commit to another."""
    return tree / ".git" / "workshop-switch.json"


@dataclass(frozen=True)
class Refs:
    """The refs of `build/vllm` that matter here."""

    head: str | None
    branch: str | None
    series: str | None
    base: str | None
    tip: str | None
    slugs: dict[str, str]

    @property
    def ours(self) -> set[str]:
        """Commits that the workshop made."""
        return {name for name in (self.base, self.tip, *self.slugs.values()) if name}


def read_refs(tree: Path) -> Refs:
    out = Git(tree)(
        "for-each-ref",
        "--format=%(HEAD)%(objectname) %(refname)",
        "refs/heads",
        "refs/workshop",
    )
    refs: dict[str, str] = {}
    head = branch = None
    for line in out.splitlines():
        commit, name = line[1:].split(" ", 1)
        refs[name] = commit
        if line[0] == "*":
            head, branch = commit, name.removeprefix("refs/heads/")
    if head is None:
        head = Git(tree).resolve("HEAD")
        if head is None:
            text = (tree / ".git" / "HEAD").read_text(encoding="utf-8").strip()
            branch = text.removeprefix("ref: refs/heads/")
    return Refs(
        head,
        branch,
        refs.get(f"refs/heads/{BRANCH}"),
        refs.get(BASE_REF),
        refs.get(TIP_REF),
        {
            name.removeprefix(SLUG_REFS): commit
            for name, commit in refs.items()
            if name.startswith(SLUG_REFS)
        },
    )


def operation_in_progress(tree: Path) -> str | None:
    """The user's own rebase, am, merge, ... that has not ended."""
    return operation_in(tree / ".git")


def operation_in(git_dir: Path) -> str | None:
    """As `operation_in_progress`, where the repository's folder is elsewhere."""
    for name, what in _OPERATIONS.items():
        if (git_dir / name).exists():
            return what
    return None


def find_edits(worktree: Git, refs: Refs) -> Edits:
    """All that the user changed.

    Args:
        worktree: From `tools.git.on_worktree`.
    """

    def names(*args: str) -> tuple[str, ...]:
        return tuple(name for name in worktree(*args).split("\0") if name)

    exclude = worktree.cwd / ".git" / "info" / "exclude"
    extra = [f"--exclude-from={exclude}"] if exclude.is_file() else []
    commits: list[str] = []
    if tops := [top for top in {refs.head, refs.series} - refs.ours if top]:
        known = sorted(refs.ours)
        log = ("log", "--no-decorate", "--format=%h %s", *tops, "--not", *known)
        commits = worktree(*log).splitlines()
    return Edits(
        modified=_modified(worktree),
        staged=names(
            "diff-index",
            "--cached",
            "--name-only",
            "-z",
            "--no-renames",
            refs.head or refs.tip or str(refs.base),
            "--",
        ),
        untracked=names("ls-files", "--others", "--exclude-standard", *extra, "-z"),
        commits=tuple(commits),
        branch=None if refs.branch in (BRANCH, None) else refs.branch,
    )


def _modified(worktree: Git) -> tuple[str, ...]:
    """Tracked files that differ from the index in more than their stat data.

    `git diff` would tell, but writes the index when stat data differs.
    """
    out = worktree("diff-files", "--name-only", "-z", "--no-renames", "--")
    suspects = sorted({name for name in out.split("\0") if name})
    if not suspects:
        return ()
    index = index_versions(worktree)
    return tuple(
        name
        for name in suspects
        if file_version(worktree.cwd / name) != index.get(name)
        or name not in index  # In conflict.
    )


def find_foreign(layout: Layout, pin: Pin) -> Inspection | None:
    """The report on a `build/vllm` that the workshop did not make, else None."""
    tree = layout.tree
    where = layout.relative(tree)
    away = f"Move it away (mv {where} {where}.old), then run `make apply`."
    if not (tree / ".git" / "HEAD").is_file():
        return Inspection(State.FOREIGN, f"{where} is not a git repository.", away)
    base = Git(tree).resolve(BASE_REF)
    if base and _is_our_base(tree, base, pin):
        return None
    found = f"{BASE_REF} is {base}" if base else f"it has no {BASE_REF}"
    return Inspection(
        State.FOREIGN, f"{where} was not made by this workshop: {found}.", away
    )


def inspect(
    layout: Layout, pin: Pin | None = None, series: Series | None = None
) -> Inspection:
    """Find out what `build/vllm` is, in some ten milliseconds.

    Raises:
        WorkshopError: The pin or the series cannot be read.
    """
    tree = layout.tree
    where = layout.relative(tree)
    pin = pin or load_pin(layout.pin)
    series = series or load_series(layout)
    if not tree.exists() and not tree.is_symlink():
        return Inspection(State.ABSENT, f"{where} does not exist.", "make apply")
    if foreign := find_foreign(layout, pin):
        return foreign
    refs = read_refs(tree)
    seen = Inspection(
        State.STALE,
        "",
        "make apply",
        head=refs.head,
        branch=refs.branch,
        base=refs.base,
        tip=refs.tip,
        slugs=refs.slugs,
        other_base=refs.base != base_commit(pin),
        series_digest=series.digest(pin.tree),
    )
    if operation := operation_in_progress(tree):
        return replace(
            seen,
            state=State.IN_PROGRESS,
            detail=f"{operation[0].upper()}{operation[1:]} is in progress in {where}.",
            todo="Finish or abort it (git status there says how), then run again.",
            operation=operation,
        )
    with scratch(tree) as private:
        edits = find_edits(on_worktree(private, tree), refs)
    seen = replace(seen, edits=edits)
    if journal_file(tree).exists():
        return replace(
            seen,
            state=State.IN_PROGRESS,
            detail=f"An apply in {where} was interrupted.",
            interrupted=True,
        )
    if edits:
        return replace(
            seen,
            state=State.DIRTY,
            detail=f"{where} has edits of yours:\n{edits.describe()}",
            todo=keep_or_drop(),
        )
    if seen.other_base:
        detail = f"{where} has another base than vllm.pin's {pin.version}."
        return replace(seen, detail=detail)
    if problem := _why_stale(refs, series, pin, str(seen.series_digest), tree):
        if refs.head == refs.base:
            return replace(
                seen, state=State.CLEAN, detail="At the base; no patch is applied."
            )
        return replace(seen, detail=problem)
    return replace(
        seen,
        state=State.APPLIED,
        detail=f"At the tip of the series, {patches(len(series.patches))}.",
        todo="",
        tip_tree=pin.tip_tree,
    )


def keep_or_drop() -> str:
    """What to do about edits."""
    return (
        "To keep them in the series: commit them in build/vllm, then `make export`.\n"
        "To drop them: `make apply FORCE=1`, which first saves them under "
        f"{BACKUP_REFS}."
    )


def refuse_edits(seen: Inspection, what: str) -> WorkshopError:
    """The error for edits in the way of `what`."""
    return WorkshopError(what, seen.edits.describe(), keep_or_drop())


def _is_our_base(tree: Path, commit: str, pin: Pin) -> bool:
    """Whether a commit is the pinned base, or that of another pin."""
    if commit == base_commit(pin):
        return True
    text = Git(tree)("cat-file", "commit", commit)
    return f"\ncommitter {COMMITTER_NAME} <{COMMITTER_EMAIL}>" in text and (
        "\nparent " not in text
    )


def _why_stale(
    refs: Refs, series: Series, pin: Pin, digest: str, tree: Path
) -> str | None:
    """Why the tree is not what `apply` would make of the present series."""
    stamp = read_stamp(tree)
    if stamp is None:
        return "It has no record of an apply."
    if refs.head != refs.tip or refs.head != stamp["tip"]:
        return "HEAD is not at the tip of the series."
    if stamp["series_digest"] != digest:
        return "patches/ or overlay/ changed since the last apply."
    if stamp["tip_tree"] != pin.tip_tree:
        return "vllm.pin expects another tip tree."
    if set(refs.slugs) != set(series.slugs):
        return "Refs of some patches are missing."
    if refs.branch != BRANCH:
        return "HEAD is detached."
    return None


def read_stamp(tree: Path) -> dict[str, str] | None:
    """Contents of `workshop.json`, or None if there is none that can be used."""
    try:
        data = json.loads(stamp_file(tree).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    keys = ("series_digest", "tip", "tip_tree")
    if not isinstance(data, dict) or data.get("version") != 1:
        return None
    if not all(isinstance(data.get(key), str) for key in keys):
        return None
    return {key: data[key] for key in keys}
