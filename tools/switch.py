"""Moves `build/vllm` from one commit to another, so that any kill can be mended.

A journal with each path's content before and after is written first and removed
last. Running a journal again, whatever part of it was done, ends at the same tree;
a path that is neither as before nor as after is the user's and stops it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.errors import WorkshopError
from tools.git import Git, on_worktree, scratch
from tools.layout import Layout
from tools.state import (
    BASE_REF,
    BRANCH,
    SLUG_REFS,
    TIP_REF,
    journal_file,
    operation_in_progress,
    read_refs,
    stamp_file,
)
from tools.ui import say
from tools.versions import Version, file_version, index_versions

# Seconds to wait for a lock of git that another process may hold.
LOCK_WAIT = 3.0
# Content of a lock that is ours; git's own are empty or hold an index.
_LOCK_MARK = b"make apply\n"


@dataclass(frozen=True)
class Entry:
    """One path of a switch.

    Attributes:
        before: What lies in the tree.
        staged: What the index has.
        after: What both shall be.
    """

    path: str
    before: Version
    staged: Version
    after: Version


@dataclass(frozen=True)
class Journal:
    """All that is needed to begin or to finish a switch.

    Attributes:
        start: Commit that HEAD named before, None if it named none.
        base: Base commit.
        tip: Commit to go to.
        tip_tree: Its tree.
        series_digest: Digest of the series that it was made from.
        slugs: Commit of each slug.
        entries: The paths that differ.
    """

    start: str | None
    base: str
    tip: str
    tip_tree: str
    series_digest: str
    slugs: dict[str, str]
    entries: tuple[Entry, ...] = field(default_factory=tuple)

    def save(self, path: Path) -> None:
        write_durably(path, json.dumps({"version": 1, **asdict(self)}, indent=1))

    @classmethod
    def load(cls, path: Path) -> Journal:
        """Read a journal.

        Raises:
            WorkshopError: It is of another version of this program.
        """
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("version") != 1:
            raise WorkshopError(
                f"{path} was written by another version of this program.",
                todo="Finish `make apply` with the version that began it.",
            )

        def version(value: list[str] | None) -> Version:
            return (value[0], value[1]) if value else None

        data["entries"] = tuple(
            Entry(
                entry["path"],
                version(entry["before"]),
                version(entry["staged"]),
                version(entry["after"]),
            )
            for entry in data["entries"]
        )
        return cls(**data)


def write_durably(path: Path, text: str) -> None:
    """Replace a file in one step; after a crash it is the old or the new one."""
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Switch:
    """One run of a journal.

    Args:
        layout: Whose `build/vllm` is switched.
        journal: What to do.
        on_step: Called with the name of each step that has been done.
    """

    def __init__(
        self,
        layout: Layout,
        journal: Journal,
        on_step: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.layout = layout
        self.tree = layout.tree
        self.git_dir = layout.tree / ".git"
        self.journal = journal
        self.on_step = on_step
        self.temporary = self.git_dir / "workshop-tmp"
        self.index = self.git_dir / "index"
        self.index_lock = self.git_dir / "index.lock"

    def run(self) -> None:
        """Do what is left to do.

        Raises:
            WorkshopError: A path, the index or HEAD is not as the journal expects,
                or git is at work in the tree. Nothing of the user's is changed.
        """
        with scratch(self.tree) as private:
            self._run(on_worktree(private, self.tree))

    def _run(self, git: Git) -> None:
        saved = journal_file(self.tree)
        resumed = saved.exists()
        if resumed and _content(self.index_lock) == _LOCK_MARK:
            # Else the user's git could not mend what _check may find.
            self.index_lock.unlink()
        self._check(git)
        self.journal.save(saved)
        self.on_step("journal")
        self._take_locks(stale_is_ours=resumed)
        self.on_step("lock")
        try:
            # Again, now that no git command can change the index or commit.
            self._check(git)
        except WorkshopError:
            self.index_lock.unlink()
            if not resumed:
                saved.unlink()
            raise
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()
        self._write_files(git)
        self._write_index(git)
        self._write_refs()
        stamp = {
            "version": 1,
            "series_digest": self.journal.series_digest,
            "tip": self.journal.tip,
            "tip_tree": self.journal.tip_tree,
        }
        write_durably(stamp_file(self.tree), json.dumps(stamp, indent=1) + "\n")
        self.on_step("stamp")
        shutil.rmtree(self.temporary)
        saved.unlink()
        self.on_step("done")

    def _check(self, git: Git) -> None:
        """See that everything is as before or as after the switch."""
        problems = []
        if operation := operation_in_progress(self.tree):
            problems.append(f"{operation} is in progress")
        head = read_refs(self.tree).head
        if head not in (self.journal.start, self.journal.tip):
            problems.append(f"HEAD is {head}, a commit of yours")
        index = index_versions(git)
        for entry in self.journal.entries:
            if self._version(entry.path) not in (entry.before, entry.after):
                problems.append(f"edited: {entry.path}")
            if index.get(entry.path) not in (entry.staged, entry.after):
                problems.append(f"staged: {entry.path}")
        if problems:
            where = self.layout.relative(self.tree)
            raise WorkshopError(
                f"{where} was changed while apply was at work or interrupted.",
                "\n".join(problems),
                "Copy what you want to keep to another place and undo it in "
                f"{where}, or run `make apply FORCE=1`, which first saves it under "
                "refs/backup/.",
            )

    def _version(self, path: str) -> Version:
        """What lies at a path; ("other", "") where it is no file of ours."""
        target = self.tree / path
        for parent in target.relative_to(self.tree).parents:
            if (self.tree / parent).is_symlink():
                return ("other", "")
        if target.is_dir() and not target.is_symlink():
            return self._directory(target)
        return file_version(target)

    def _directory(self, target: Path) -> Version:
        """A folder where a file shall be: in the way unless the switch empties it."""
        removed = {
            self.tree / entry.path
            for entry in self.journal.entries
            if entry.after is None
        }
        for path in target.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                continue
            if path not in removed and "__pycache__" not in path.parts:
                return ("other", "")
        return None

    def _take_locks(self, stale_is_ours: bool) -> None:
        """Take git's own lock on the index, so that its commands keep out.

        Args:
            stale_is_ours: A run of ours was killed, which may have left locks.
        """
        refs = self.git_dir / "refs"
        others = [self.git_dir / "HEAD.lock", self.git_dir / "packed-refs.lock"]
        others += [refs / "heads" / f"{BRANCH}.lock"]
        others += (refs / "workshop").rglob("*.lock")
        for lock in others:
            if lock.exists():
                self._wait_for(lock, stale_is_ours)
        for _ in range(2):
            try:
                with self.index_lock.open("xb") as file:
                    file.write(_LOCK_MARK)
            except FileExistsError:
                self._wait_for(self.index_lock, stale_is_ours)
            else:
                return
        raise self._locked(self.index_lock)

    def _wait_for(self, lock: Path, stale_is_ours: bool) -> None:
        end = time.monotonic() + LOCK_WAIT
        while lock.exists():
            if time.monotonic() > end:
                if not stale_is_ours or _is_open(lock):
                    raise self._locked(lock)
                say(f"Removed {self.layout.relative(lock)}, left by a killed run.")
                lock.unlink(missing_ok=True)
                return
            time.sleep(0.05)

    def _locked(self, lock: Path) -> WorkshopError:
        where = self.layout.relative(lock)
        return WorkshopError(
            f"{where} exists: a git command is at work there, or was killed.",
            f"It was there for {LOCK_WAIT:.0f} s.",
            f"Let that command end, or remove {where} if there is none, then run "
            "`make apply`.",
        )

    def _write_files(self, git: Git) -> None:
        todo = [
            entry
            for entry in self.journal.entries
            if self._version(entry.path) != entry.after
        ]
        for entry in todo:
            if entry.after is None:
                (self.tree / entry.path).unlink()
                self._forget_bytecode(entry.path)
                self._prune(Path(entry.path).parent)
                self.on_step(f"remove {entry.path}")
        written = [(e.path, e.after[0], e.after[1]) for e in todo if e.after]
        blobs = git.blobs([blob for _, _, blob in written])
        for (path, mode, _), data in zip(written, blobs, strict=True):
            self._write_file(path, mode, data)
            self._forget_bytecode(path)
            self.on_step(f"write {path}")

    def _write_file(self, path: str, mode: str, data: bytes) -> None:
        target = self.tree / path
        temporary = self.temporary / "file"
        temporary.unlink(missing_ok=True)
        if mode == "120000":
            temporary.symlink_to(os.fsdecode(data))
        else:
            rights = 0o777 if mode == "100755" else 0o666
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
            with os.fdopen(os.open(temporary, flags, rights), "wb") as file:
                file.write(data)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)  # No file of anyone is left in it: see _directory.
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(target)

    def _forget_bytecode(self, path: str) -> None:
        """Remove what Python compiled of a file.

        It goes by time in seconds and size: two switches in one second could leave
        the other version's bytecode in use. And a folder with nothing else in it
        would stay importable.
        """
        source = self.tree / path
        if source.suffix == ".py":
            for left in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
                left.unlink(missing_ok=True)

    def _prune(self, folder: Path) -> None:
        """Remove folders that became empty, as git does."""
        while folder.parts:
            for path in (self.tree / folder / "__pycache__", self.tree / folder):
                try:
                    path.rmdir()
                except FileNotFoundError:
                    continue
                except OSError:
                    if path.name != "__pycache__":
                        return
            folder = folder.parent

    def _write_index(self, git: Git) -> None:
        """Set the journal's paths; the rest keeps its entries and stat data."""
        if self.journal.entries:
            new = self.git_dir / "workshop-index"
            new.with_name(f"{new.name}.lock").unlink(missing_ok=True)
            if self.index.exists():
                shutil.copyfile(self.index, new)
            private = Git(git.cwd, {**git.env, "GIT_INDEX_FILE": str(new)})
            gone = [e.path for e in self.journal.entries if e.after is None]
            kept = [(e.path, *e.after) for e in self.journal.entries if e.after]
            rows = [f"0 {'0' * 40}\t{path}\0" for path in gone]
            rows += [f"{mode} {blob}\t{path}\0" for path, mode, blob in kept]
            private("update-index", "-z", "--index-info", stdin="".join(rows))
            # It fails where files of the user differ, which is none of our business.
            private.ok("update-index", "-q", "--refresh")
            new.replace(self.index)
            self.on_step("index")
        self.index_lock.unlink()
        self.on_step("unlock")

    def _write_refs(self) -> None:
        git = Git(
            self.tree,
            {
                "GIT_COMMITTER_NAME": "vLLM workshop",
                "GIT_COMMITTER_EMAIL": "workshop@localhost",
            },
        )
        refs = read_refs(self.tree)
        wanted = {
            f"refs/heads/{BRANCH}": self.journal.tip,
            BASE_REF: self.journal.base,
            TIP_REF: self.journal.tip,
        } | {f"{SLUG_REFS}{slug}": at for slug, at in self.journal.slugs.items()}
        commands = ["start"]
        commands += [f"update {name} {commit}" for name, commit in wanted.items()]
        commands += [
            f"delete {SLUG_REFS}{slug}"
            for slug in refs.slugs
            if slug not in self.journal.slugs
        ]
        commands += ["prepare", "commit"]
        git(
            "update-ref",
            "-m",
            "make apply",
            "--stdin",
            stdin="\n".join(commands) + "\n",
        )
        self.on_step("refs")
        if refs.branch != BRANCH:
            git("symbolic-ref", "-m", "make apply", "HEAD", f"refs/heads/{BRANCH}")
            self.on_step("head")


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _is_open(path: Path) -> bool:
    """Whether a process of this user has a file open."""
    real = str(path.resolve())
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()) == real:
                return True
        except OSError:
            continue
    return False
