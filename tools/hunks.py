"""Lines of a diff, and whether they are still there after a port."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

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


@dataclass(frozen=True)
class Sides:
    """One file before and after a patch, on the patch's own base and ported.

    Attributes:
        path: On the patch's own base.
    """

    path: str
    old: bytes
    new: bytes
    base: bytes
    port: bytes


def lost_lines(files: Iterable[Sides]) -> list[str]:
    """Lines that a patch adds or removes, and its port does not.

    Lines are counted, by file, so that one which stands elsewhere in it makes up for
    no loss. An added line is not lost if the port's base has it beside the same line
    as the patched file, or the port adds it to another file; a removed one is not if
    that base has it not. Whitespace does not count, nor does the place in a file.

    Args:
        files: All that the patch or the port changes.

    Returns:
        `path: line` of an added line, `path: - line` of a removed one.
    """
    lost = []
    missing: list[tuple[str, bytes]] = []
    spare: Counter[bytes] = Counter()
    for file in files:
        old, new, base, port = (
            Counter(_keys(text)) for text in (file.old, file.new, file.base, file.port)
        )
        wanted, removed = new - old, old - new
        short = base + wanted - _taken(file) - port
        missing += [
            (file.path, line) for line in _last(file.new, file.old, short & wanted)
        ]
        spare += port - base - wanted
        kept = port - ((base | old) - removed)
        lost += [
            f"{file.path}: - {_text(line)}"
            for line in _last(file.old, file.new, kept & removed & base)
        ]
    # What is left elsewhere: the code may have moved to another file.
    for path, line in missing:
        key = squash([line])
        if spare[key] < 1:
            lost.append(f"{path}: {_text(line)}")
        spare[key] -= 1
    return lost


def _keys(text: bytes) -> list[bytes]:
    return [key for line in text.split(b"\n") if (key := squash([line]))]


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip()


def _taken(file: Sides) -> Counter[bytes]:
    """Lines that both a patch and the new base put beside the same line."""
    old, new, base = (
        Counter(pairwise([b"", *_keys(text), b""]))
        for text in (file.old, file.new, file.base)
    )
    first: Counter[bytes] = Counter()
    second: Counter[bytes] = Counter()
    for (one, other), count in ((new - old) & (base - old)).items():
        first[one] += count
        second[other] += count
    return first | second


def _last(text: bytes, other: bytes, keys: Counter[bytes]) -> list[bytes]:
    """The last lines of a text, not of the other one, that have these keys."""
    left = Counter(keys)
    lines = text.split(b"\n")
    own = Counter(lines) - Counter(other.split(b"\n"))
    found = []
    for line in reversed(lines):
        key = squash([line])
        if left[key] > 0 and own[line] > 0:
            found.append(line)
            left[key] -= 1
            own[line] -= 1
    return found[::-1]
