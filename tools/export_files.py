"""The files that an export replaces, and how they are replaced."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.layout import Layout
from tools.series import Added, read_overlay

_TEMPORARY = ".export-"
_SKELETON = """\
# What is wrong or missing without the patch.
why = ""
# When the patch can be dropped.
removal = ""
depends_on = []
# Arguments for pytest, run in the patched tree.
tests = []
"""

# (mode, content) as git has them.
File = tuple[str, bytes]


@dataclass
class Plan:
    """Paths to set and to remove, in an order that survives being killed.

    What is no longer wanted goes before the metadata that names it, and a new slug
    enters `patches/series` last: after a kill the same export finds the rest.
    """

    layout: Layout
    files: dict[Path, File] = field(default_factory=dict)
    stale: list[Path] = field(default_factory=list)

    def changes(self) -> list[Path]:
        """Paths whose present content or mode is another one."""
        changed = [path for path, file in self.files.items() if present(path) != file]
        return [*(path for path in self.stale if present(path)), *changed]

    def run(self) -> None:
        remove_leftovers(self.layout)
        changed = set(self.changes())
        for path in self.stale:
            remove(path, self.layout.overlay)
        for path, file in self.files.items():
            if path in changed:
                place(path, file)


def present(path: Path) -> File | None:
    """Mode and content of a file, None if there is none."""
    if path.is_symlink() or path.is_file():
        return read_overlay(path)
    return None


def place(path: Path, file: File) -> None:
    """Replace a file in one step."""
    mode, data = file
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_TEMPORARY}{os.getpid()}")
    temporary.unlink(missing_ok=True)
    if mode == "120000":
        temporary.symlink_to(os.fsdecode(data))
    else:
        temporary.write_bytes(data)
        temporary.chmod(0o755 if mode == "100755" else 0o644)
    temporary.replace(path)


def remove(path: Path, top: Path) -> None:
    """Remove a file, and the folders below `top` that it leaves empty."""
    path.unlink(missing_ok=True)
    for folder in path.parents:
        if top not in folder.parents:
            return
        if folder.is_dir():
            if any(folder.iterdir()):
                return
            folder.rmdir()


def remove_leftovers(layout: Layout) -> None:
    """Remove temporary files of a run that was killed."""
    for top in (layout.patches, layout.overlay):
        for left in top.rglob(f"{_TEMPORARY}*"):
            left.unlink()


def overlay_files(layout: Layout, added: Iterable[Added]) -> dict[Path, File]:
    return {layout.overlay / file.path: (file.mode, file.data) for file in added}


def meta_text(text: str | None, paths: Sequence[str]) -> str:
    """A patch's metadata with another `overlay`; comments are kept.

    Args:
        text: Metadata as it is, None for a new patch.
        paths: Files that the patch owns.
    """
    import tomlkit
    from tomlkit.items import Array

    document = tomlkit.parse(_SKELETON if text is None else text)
    old = document.get("overlay", [])
    if set(old) == set(paths):
        return text if text is not None else tomlkit.dumps(document)
    if not paths:
        del document["overlay"]
        return tomlkit.dumps(document)
    if isinstance(old, Array):
        for at in reversed(range(len(old))):
            if old[at] not in paths:
                del old[at]
        new = [path for path in paths if path not in old]
        multiline = "\n" in old.as_string() or len(old) + len(new) > 1
    else:
        old = tomlkit.array()
        document["overlay"] = old
        new = list(paths)
        multiline = len(new) > 1
    for path in new:
        old.append(path)
    # Rewriting the layout of an array would drop its comments.
    if multiline and "#" not in old.as_string():
        old.multiline(True)
    return tomlkit.dumps(document)


def series_text(text: str, slugs: Sequence[str]) -> str:
    """`patches/series` with these slugs in this order; comments are kept.

    A comment belongs to the slug it stands above and moves or goes with it; the
    comment at the top, up to an empty line or to the first slug, is the file's own.
    """
    head: list[str] = []
    blocks: dict[str, list[str]] = {}
    waiting: list[str] = []
    for line in text.splitlines():
        slug = line.split("#", 1)[0].strip()
        if slug:
            if not blocks and not head:
                head, waiting = waiting, []
            blocks[slug] = [*waiting, line]
            waiting = []
        else:
            waiting.append(line)
            if not blocks and not line.strip():
                head, waiting = [*head, *waiting], []
    if list(blocks) == list(slugs):
        return text
    lines = list(head)
    for slug in slugs:
        lines += blocks.get(slug, [slug])
    return "\n".join([*lines, *waiting]) + "\n"


def owners(lists: Mapping[str, Sequence[Added]]) -> list[str]:
    """What keeps these files from living side by side in the overlay."""
    problems = []
    owner: dict[str, str] = {}
    for slug, added in lists.items():
        for file in added:
            if file.path in owner:
                problems.append(
                    f"{file.path} is added by {owner[file.path]} and again by {slug}."
                )
            owner.setdefault(file.path, slug)
    for path, slug in owner.items():
        for match in re.finditer("/", path):
            folder = path[: match.start()]
            if folder in owner:
                problems.append(
                    f"{folder} is a file in {owner[folder]} and a folder in {slug}."
                )
    return sorted(set(problems))
