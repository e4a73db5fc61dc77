"""Puts one patch on another tree, in the object store only.

The patch is applied as it is, and also merged from the commit that it makes on its
own base. Only where both give the same tree, or only the merge works, the result
counts; a merge follows renames and takes what upstream has already.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.errors import WorkshopError
from tools.git import COMMITTER_EMAIL, COMMITTER_NAME, Git
from tools.hunks import Hunk, Sides, hunks_between, lost_lines, squash
from tools.series import Patch, add_overlay, raw_diff, read_overlay
from tools.versions import Version, tree_versions

RESULTS = ("clean", "3-way", "override", "conflict", "gone", "renamed", "upstream")

_MERGE = (
    "-c",
    "merge.conflictStyle=merge",
    "-c",
    "merge.directoryRenames=false",
    "-c",
    "merge.renames=true",
    "-c",
    "merge.renameLimit=30000",
    "merge-tree",
    "--write-tree",
    "-z",
)
# Blob of a file without content.
_EMPTY = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
_WHO = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (
        ("NAME", COMMITTER_NAME),
        ("EMAIL", COMMITTER_EMAIL),
        ("DATE", "946684800 +0000"),
    )
}


@dataclass(frozen=True)
class Attempt:
    """What became of a patch.

    Attributes:
        result: One of `RESULTS`.
        tree: The ported tree; with conflict markers when there are conflicts.
        problem: Why a human must look at it, empty if none need.
        todo: What that human can do.
        detail: What is worth knowing although it went well.
        stages: Rows for `git update-index --index-info` of paths in conflict.
        lost: What the original changes and the port does not, see `lost_between`.
    """

    result: str
    tree: str
    problem: str = ""
    todo: str = ""
    detail: str = ""
    stages: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


@dataclass
class Ground:
    """The two bases, and what git knows of files that moved between them.

    Attributes:
        git: From `tools.git.scratch`.
        version: Of the new base.
        overlay: Folder with the new files of all patches.
    """

    git: Git
    old: str
    new: str
    version: str
    overlay: Path
    _moved: dict[str, str] | None = field(default=None)

    def moved(self) -> Mapping[str, str]:
        """New path of each file that the new base has under another name."""
        if self._moved is None:
            out = self.git(
                "diff-tree",
                "-r",
                "-z",
                "--find-renames=50%",
                "-l0",
                "--diff-filter=R",
                f"{self.old}^{{tree}}",
                f"{self.new}^{{tree}}",
            )
            fields = iter(out.split("\0")[:-1])
            self._moved = {next(fields): next(fields) for _ in fields}
        return self._moved


def check_mail(path: Path, named: str) -> None:
    """Refuse hunks that nobody can read.

    Raises:
        WorkshopError: The mail holds a binary file.
    """
    data = path.read_bytes()
    found = re.search(
        rb"^(GIT binary patch|Binary files .* differ)$", data, re.MULTILINE
    )
    if found:
        heads = re.findall(rb"^diff --git a/(.*) b/", data[: found.start()], re.M)
        name = heads[-1].decode(errors="replace") if heads else "a file"
        raise _binary(f"{named} changes {name}")


def check_patch(patch: Patch, overlay: Path) -> None:
    """As `check_mail`, for the mail of a patch and its new files.

    Raises:
        WorkshopError: One of them is binary.
    """
    check_mail(patch.mail, f"patches/{patch.mail.name}")
    for name in patch.meta.overlay:
        path = overlay / name
        if path.is_file() and b"\0" in read_overlay(path)[1]:
            raise _binary(f"patches/{patch.meta_file.name} names overlay/{name}")


def _binary(what: str) -> WorkshopError:
    return WorkshopError(
        f"{what}, a binary file.",
        "Nobody can review that, and no line of it can be seen to be lost.",
        "Leave it out of the series.",
    )


def port_patch(
    ground: Ground, patch: Patch, old: str, tip: str, override: Path | None = None
) -> Attempt:
    """Put one patch on `tip`.

    Args:
        old: The patch's commit on the old base.
        tip: Commit to put it on.
        override: Mail to take instead, made for this base.

    Raises:
        WorkshopError: A mail is malformed or holds a binary file.
    """
    if override:
        return _overridden(ground, patch, old, tip, override)
    check_mail(patch.mail, f"patches/{patch.mail.name}")
    git = ground.git
    rows = raw_diff(git, old)
    there = tree_versions(git, tip)
    absent = [path for path in _old_paths(git, old) if path not in there]
    applied = _apply(ground, patch, tip, there)
    if applied is None and _is_there(ground, patch, old, tip, there):
        return Attempt("upstream", git("rev-parse", f"{tip}^{{tree}}"))
    merge = _merge(git, old, tip, f"vllm-{ground.version}", patch.slug)
    if merge.stages:
        return _conflict(ground, patch, merge, absent, there)
    attempt = _judge(ground, merge, applied, tip, absent, rows)
    return _with_lost(ground, attempt, old, tip)


def _judge(
    ground: Ground,
    merge: _Merge,
    applied: str | None,
    tip: str,
    absent: list[str],
    rows: list[tuple[str, str, str, str]],
) -> Attempt:
    """Name what a merge without conflicts is."""
    if merge.tree == ground.git("rev-parse", f"{tip}^{{tree}}") and rows:
        return Attempt("upstream", merge.tree)
    if applied == merge.tree:
        return Attempt("clean", merge.tree)
    if applied:
        return Attempt(
            "conflict",
            merge.tree,
            "Its hunks apply at other places than where a merge puts them.",
            "See that the tree holds the merge's choice in the right places.",
        )
    renamed = [
        f"{path} is now {ground.moved()[path]}"
        for path in absent
        if path in ground.moved()
    ]
    if renamed:
        return Attempt("renamed", merge.tree, detail="; ".join(renamed))
    return Attempt("3-way", merge.tree)


def _with_lost(ground: Ground, attempt: Attempt, old: str, tip: str) -> Attempt:
    lost = lost_between(ground, old, tip, attempt.tree)
    if not lost or attempt.problem:
        return attempt
    return Attempt(
        "conflict",
        attempt.tree,
        f"{len(lost)} line(s) or mode(s) that it changes got lost although nothing was "
        "in conflict.",
        "Make the changes where they belong, or go on with --continue --accept-lost.",
        lost=tuple(lost),
    )


def lost_between(ground: Ground, old: str, tip: str, tree: str) -> list[str]:
    """What a patch changes on its own base, and its port does not.

    Args:
        old: The patch's commit on the old base.
        tip: Commit that it was put on.
        tree: What that gave.

    Returns:
        `path: line` of a line to add, `path: - line` of one to remove,
        `path: - the whole file`, and `path: mode 100755`.
    """
    git = ground.git
    before, after = tree_versions(git, f"{old}^"), tree_versions(git, old)
    there, ported = tree_versions(git, tip), tree_versions(git, tree)
    # Where the new base has what the patch changes.
    places = {
        path: path if path in there else ground.moved().get(path, path)
        for path in _changed(before, after)
    }
    rows = []
    lost = []
    for path, at in sorted(places.items()):
        one, other, its = before.get(path), after.get(path), ported.get(at)
        if other is None and its and at in there:
            lost.append(f"{path}: - the whole file")
            continue
        rows.append((path, one, other, there.get(at), its))
        if other and _loses_mode(one, other, its):
            lost.append(f"{path}: mode {other[0]}")
    for at in _changed(there, ported) - {*places.values()}:
        rows.append((at, None, None, there.get(at), ported.get(at)))
    names = [version[1] for _, *versions in rows for version in versions if version]
    texts = dict(zip(names, git.blobs(names), strict=True))
    sides = [
        Sides(path, *(texts[version[1]] if version else b"" for version in versions))
        for path, *versions in rows
    ]
    return lost_lines(sides) + lost


def _changed(
    before: Mapping[str, tuple[str, str]], after: Mapping[str, tuple[str, str]]
) -> set[str]:
    return {
        path
        for path in before.keys() | after.keys()
        if before.get(path) != after.get(path)
    }


def _loses_mode(before: Version, after: tuple[str, str], ported: Version) -> bool:
    """Whether a port leaves out a file's new mode, or an empty file."""
    if before and before[0] == after[0]:
        return False
    return after[0] != ported[0] if ported else after[1] == _EMPTY


def _old_paths(git: Git, commit: str) -> list[str]:
    """Paths that must exist for a patch to change them."""
    out = git(
        "diff-tree",
        "-r",
        "-z",
        "--no-commit-id",
        "--name-only",
        "--no-renames",
        "--diff-filter=a",
        f"{commit}^",
        commit,
    )
    return [path for path in out.split("\0") if path]


def _apply(
    ground: Ground, patch: Patch, tip: str, there: Mapping[str, object]
) -> str | None:
    """The tree that the plain patch gives, None if it does not apply."""
    if any(name in there for name in patch.meta.overlay):
        return None
    git = ground.git
    git("read-tree", tip)
    if has_hunks(patch.mail) and not git.ok(
        "apply", "--cached", "--whitespace=nowarn", str(patch.mail)
    ):
        return None
    add_overlay(git, patch, ground.overlay)
    return git("write-tree")


def has_hunks(mail: Path) -> bool:
    """Whether a mail changes files of the tree, beside bringing new ones."""
    return b"\ndiff --git " in mail.read_bytes()


@dataclass(frozen=True)
class _Merge:
    tree: str
    stages: tuple[str, ...]
    messages: tuple[tuple[str, str], ...]


def _merge(git: Git, old: str, tip: str, ours: str, theirs: str) -> _Merge:
    """Merge what a commit changes into another tree; both sides have a name."""

    def commit(tree: str, *parents: str) -> str:
        flags = [flag for parent in parents for flag in ("-p", parent)]
        return git("commit-tree", f"{tree}^{{tree}}", *flags, stdin="x\n", env=_WHO)

    base = commit(f"{old}^")
    # Branches, for the names in conflict markers.
    git("update-ref", f"refs/heads/{ours}", commit(tip, base))
    git("update-ref", f"refs/heads/{theirs}", commit(old, base))
    code, out, error = git.attempt(*_MERGE, ours, theirs)
    if code not in (0, 1):
        raise WorkshopError(
            "git could not merge.",
            error.strip(),
            "`make port` needs git 2.38 or newer.",
        )
    fields = out.decode("utf-8", "surrogateescape").split("\0")
    tree, rest = fields[0], iter(fields[1:])
    stages = []
    for row in rest:
        if not row:
            break
        stages.append(row)
    messages = []
    for count in rest:
        if not count:
            break
        for _ in range(int(count)):
            next(rest)
        messages.append((next(rest), next(rest).strip()))
    return _Merge(tree, tuple(stages), tuple(messages))


def _conflict(
    ground: Ground,
    patch: Patch,
    merge: _Merge,
    absent: list[str],
    there: Mapping[str, object],
) -> Attempt:
    lines = [text for kind, text in merge.messages if kind.startswith("CONFLICT")]
    taken = [name for name in patch.meta.overlay if name in there]
    lines += [f"overlay/{name}: the new base has this file." for name in taken]
    gone = [path for path in absent if path not in ground.moved()]
    lines += [
        f"{path} is now {ground.moved()[path]}."
        for path in absent
        if path in ground.moved()
    ]
    todo = "Resolve the conflicts there (git status names them)."
    if taken:
        todo += " Of a file that upstream has too, keep what the patch still needs."
    if gone:
        todo += f" Upstream removed {', '.join(gone)}: find where its code went."
    return Attempt(
        "gone" if gone else "conflict",
        merge.tree,
        "\n".join(lines) or "The merge has conflicts.",
        todo,
        stages=merge.stages,
    )


def _is_there(
    ground: Ground,
    patch: Patch,
    old: str,
    tip: str,
    there: Mapping[str, tuple[str, str]],
) -> bool:
    """Whether a tree has all that a patch makes; whitespace does not count."""
    git = ground.git
    files = hunks_between(git, f"{old}^", old, context=3)
    before = tree_versions(git, f"{old}^")
    after = tree_versions(git, old)
    if not files or any((path in after) != (path in there) for path in files):
        return False
    kept = [path for path in files if path in after]
    contents = git.blobs([there[path][1] for path in kept])
    for path, content in zip(kept, contents, strict=True):
        mode = after[path][0]
        if path in before and before[path][0] != mode != there[path][0]:
            return False
        if not _has_all(files[path], content):
            return False
    return True


def _has_all(hunks: list[Hunk], content: bytes) -> bool:
    text = squash([content])
    for hunk in hunks:
        wanted = squash(hunk.after)
        if wanted == squash(hunk.before):
            # It changes whitespace only.
            if b"".join(hunk.after) not in content:
                return False
        elif wanted not in text:
            return False
    return True


def _overridden(
    ground: Ground, patch: Patch, old: str, tip: str, override: Path
) -> Attempt:
    check_mail(override, override.name)
    git = ground.git
    git("read-tree", tip)
    add_overlay(git, patch, ground.overlay)
    if has_hunks(override):
        code, _, error = git.attempt(
            "apply", "--cached", "--whitespace=nowarn", str(override)
        )
        if code and re.search("corrupt|without header|malformed", error):
            raise WorkshopError(
                f"The override {override.name} is malformed.",
                error.strip(),
                "Restore it from git, or remove it and run again to make it anew.",
            )
        if code:
            return _stale(ground, patch, old, tip, error)
    tree = git("write-tree")
    lost = tuple(lost_between(ground, old, tip, tree))
    if tree == git("rev-parse", f"{tip}^{{tree}}"):
        nothing = "The override leaves nothing of it."
        return Attempt("upstream", tree, detail=nothing, lost=lost)
    return Attempt("override", tree, lost=lost)


def port_from(
    ground: Ground, patch: Patch, other: str, tip: str, plain: Attempt
) -> Attempt:
    """Offer what another port made of a patch, where that has fewer conflicts.

    Args:
        other: Commit of the patch on the other release.
        plain: What the patch itself gave.
    """
    merge = _merge(ground.git, other, tip, f"vllm-{ground.version}", patch.slug)
    if len(merge.stages) >= len(plain.stages):
        return plain
    lines = [text for kind, text in merge.messages if kind.startswith("CONFLICT")]
    return Attempt(
        plain.result,
        merge.tree,
        "\n".join(["Taken from the other port.", *lines]),
        "Resolve what is in conflict there; look through the rest (git diff HEAD).",
        stages=merge.stages,
    )


def _stale(ground: Ground, patch: Patch, old: str, tip: str, error: str) -> Attempt:
    """Offer the merge of the patch itself, as the override no longer applies."""
    plain = port_patch(ground, patch, old, tip)
    return Attempt(
        plain.result if plain.problem else "conflict",
        plain.tree,
        f"Its override does not apply any more.\n{error}\n{plain.problem}".strip(),
        plain.todo
        or "Without the override the patch ports well: remove that file, --abort, and "
        "run again.",
        stages=plain.stages,
    )


def override_mail(
    ground: Ground, patch: Patch, tip: str, tree: str, commit: Callable[[str, str], str]
) -> bytes:
    """Mail that makes of the tip and the patch's overlay files the wanted tree.

    Args:
        commit: Makes a commit, with the patch's message, of a tree and a parent.
    """
    from tools.series import format_mail

    git = ground.git
    git("read-tree", tip)
    add_overlay(git, patch, ground.overlay)
    start = commit(git("write-tree"), tip)
    return format_mail(git, commit(tree, start))
