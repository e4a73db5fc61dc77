"""Lines of a diff, and whether they are still there after a port."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tools.git import Git


@dataclass
class Hunk:
    """One hunk; lines are without their mark, with their line end."""

    before: list[bytes] = field(default_factory=list)
    after: list[bytes] = field(default_factory=list)
    added: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)


def hunks_between(
    git: Git, old: str, new: str, context: int = 0
) -> dict[str, list[Hunk]]:
    """Hunks of each file that two trees differ in, by its path in the new one.

    A file that is gone has its old path. Binary files have no hunks.
    """
    out = git.raw(
        "-c",
        "core.quotePath=false",
        "diff-tree",
        "-r",
        "-p",
        "--no-renames",
        "--no-ext-diff",
        "--no-textconv",
        "--no-color",
        f"--unified={context}",
        "--src-prefix=a/",
        "--dst-prefix=b/",
        f"{old}^{{tree}}",
        f"{new}^{{tree}}",
    )
    files: dict[str, list[Hunk]] = {}
    hunks: list[Hunk] = []
    old_path = ""
    left = [0, 0]
    for line in out.split(b"\n"):
        if left == [0, 0]:
            if line.startswith(b"--- "):
                old_path = _path(line)
            elif line.startswith(b"+++ "):
                hunks = files.setdefault(_path(line) or old_path, [])
            elif line.startswith(b"@@ "):
                ranges = line.split(b" ", 3)[1:3]
                left = [int((part + b",1").split(b",")[1]) for part in ranges]
                hunks.append(Hunk())
            continue
        mark, text = line[:1], line[1:] + b"\n"
        if mark in b" -":
            hunks[-1].before.append(text)
            left[0] -= 1
        if mark in b" +":
            hunks[-1].after.append(text)
            left[1] -= 1
        if mark == b"+":
            hunks[-1].added.append(text)
        elif mark == b"-":
            hunks[-1].removed.append(text)
    return files


def _path(line: bytes) -> str:
    """The path of a `---` or `+++` line, empty for `/dev/null`."""
    name = line[4:].rstrip(b"\t").decode("utf-8", "surrogateescape")
    if name.startswith('"'):
        inner = name[1:-1].encode("utf-8", "surrogateescape")
        name = inner.decode("unicode_escape")
    return "" if name == "/dev/null" else name[2:]


def squash(lines: Iterable[bytes]) -> bytes:
    """Lines without any whitespace."""
    return b"".join(b"".join(lines).split())


def added_lines(files: Mapping[str, list[Hunk]]) -> dict[str, list[bytes]]:
    return {
        path: [line for hunk in hunks for line in hunk.added]
        for path, hunks in files.items()
    }


def lost_lines(
    wanted: Mapping[str, list[bytes]],
    given: Mapping[str, list[bytes]],
    base: Mapping[str, bytes],
) -> list[str]:
    """Added lines of a patch that its port neither adds nor finds there already.

    Whitespace does not count, nor does the place.

    Args:
        wanted: Added lines of the original, by path.
        given: Added lines of the port, by path.
        base: Content of the files before the port, by the original's paths.

    Returns:
        `path: line` of each.
    """
    lost = []
    missing: list[tuple[str, bytes, bytes]] = []
    stocks = {path: Counter(squash([line]) for line in given[path]) for path in given}
    for path, lines in wanted.items():
        own = stocks.setdefault(path, Counter())
        there = Counter(squash([line]) for line in base.get(path, b"").split(b"\n"))
        for line in lines:
            key = squash([line])
            stock = own if own[key] else there
            if key and not stock[key]:
                missing.append((path, line, key))
            stock[key] -= 1
    # What is left elsewhere: the code may have moved to another file.
    left = sum((+stock for stock in stocks.values()), Counter())
    for path, line, key in missing:
        if not left[key]:
            lost.append(f"{path}: {line.decode('utf-8', 'replace').rstrip()}")
        left[key] -= 1
    return lost
