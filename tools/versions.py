"""Mode and blob of files in a tree object, in the index and on disk."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from tools.git import Git

# (mode, blob) of a file; None where there is none.
Version = tuple[str, str] | None


def tree_versions(git: Git, tree: str) -> dict[str, tuple[str, str]]:
    """Mode and blob of each file of a tree."""
    found = {}
    for row in git("ls-tree", "-r", "-z", "--full-tree", tree).split("\0"):
        if row:
            facts, path = row.split("\t", 1)
            mode, _, blob = facts.split()
            found[path] = (mode, blob)
    return found


def index_versions(git: Git) -> dict[str, tuple[str, str]]:
    """Mode and blob of each entry of the index that is not in conflict."""
    found = {}
    for row in git("ls-files", "--stage", "-z").split("\0"):
        if row:
            facts, path = row.split("\t", 1)
            mode, blob, stage = facts.split()
            if stage == "0":
                found[path] = (mode, blob)
    return found


def file_version(path: Path) -> Version:
    """Mode and blob of what lies at a path, without any filter of git's."""
    try:
        if path.is_symlink():
            data, mode = os.fsencode(path.readlink()), "120000"
        else:
            data = path.read_bytes()
            mode = "100755" if path.stat().st_mode & 0o100 else "100644"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        return ("folder", "")
    return (mode, hashlib.sha1(b"blob %d\0%s" % (len(data), data)).hexdigest())
