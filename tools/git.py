"""The one way in which the workshop calls git.

No user, system or environment configuration reaches these calls: the bytes that
`export` writes and the hashes that `apply` makes are the same on every machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tools.errors import WorkshopError

COMMITTER_NAME = "vLLM AFD/DBO series"
COMMITTER_EMAIL = "afd-dbo-series@users.noreply.invalid"

# Settings of the repository itself that would change a result are overridden on
# the command line, which outranks them.
_OVERRIDES = {
    "advice.detachedHead": "false",
    "commit.gpgSign": "false",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.excludesFile": os.devnull,
    "core.fileMode": "true",
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.ignoreCase": "false",
    "core.quotePath": "false",
    "core.safecrlf": "false",
    "core.splitIndex": "false",
    "core.symlinks": "true",
    "core.untrackedCache": "false",
    "diff.algorithm": "myers",
    "diff.context": "3",
    "diff.interHunkContext": "0",
    "diff.mnemonicPrefix": "false",
    "diff.noprefix": "false",
    "diff.orderFile": os.devnull,
    "diff.renames": "false",
    "diff.suppressBlankEmpty": "false",
    "gc.auto": "0",
    "i18n.commitEncoding": "UTF-8",
    "i18n.logOutputEncoding": "UTF-8",
    "init.defaultBranch": "main",
    "log.showSignature": "false",
    "protocol.file.allow": "always",
}

_SCRATCH_PREFIX = ".scratch-"


class GitError(WorkshopError):
    """A git command failed."""

    def __init__(self, args: tuple[str, ...], code: int, stderr: str) -> None:
        super().__init__(f"git {' '.join(args)} failed (exit {code}).", stderr.strip())
        self.stderr = stderr


def hermetic_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("GIT_", "LC_")) and key not in ("LANG", "LANGUAGE")
    }
    env |= {
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_EDITOR": "true",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_PAGER": "cat",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
        "TZ": "UTC",
    }
    return env | dict(extra or {})


@dataclass(frozen=True)
class Git:
    """Git commands on one repository.

    Args:
        cwd: Directory in which the commands run.
        env: Variables that point git elsewhere (`GIT_DIR`, `GIT_INDEX_FILE`, ...).
    """

    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)

    def __call__(
        self,
        *args: str,
        stdin: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Run a command and return its stdout, decoded, without the last newline.

        Raises:
            GitError: The command failed; carries its stderr.
        """
        out = self.raw(*args, stdin=stdin, env=env)
        return out.decode("utf-8", "surrogateescape").removesuffix("\n")

    def raw(
        self,
        *args: str,
        stdin: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> bytes:
        """As calling the object, but returns the bytes of stdout."""
        done = self._run(args, stdin, env)
        if done.returncode:
            raise GitError(args, done.returncode, done.stderr.decode(errors="replace"))
        return done.stdout

    def attempt(
        self, *args: str, stdin: str | bytes | None = None
    ) -> tuple[int, bytes, str]:
        """Exit status, stdout and stderr of a command that may fail."""
        done = self._run(args, stdin, None)
        return done.returncode, done.stdout, done.stderr.decode(errors="replace")

    def ok(self, *args: str, stdin: str | bytes | None = None) -> bool:
        """Whether a command succeeds."""
        return self._run(args, stdin, None).returncode == 0

    def resolve(self, name: str) -> str | None:
        """Full hash of a revision, or None if there is no such object."""
        done = self._run(
            ("rev-parse", "--verify", "--quiet", "--end-of-options", name), None, None
        )
        return done.stdout.decode().strip() if done.returncode == 0 else None

    def blobs(self, names: list[str]) -> list[bytes]:
        """Contents of several blobs, in one call."""
        if not names:
            return []
        out = self.raw("cat-file", "--batch", stdin="\n".join(names) + "\n")
        contents = []
        at = 0
        for name in names:
            end = out.index(b"\n", at)
            header = out[at:end].split()
            if len(header) != 3 or header[1] != b"blob":
                raise WorkshopError(f"git has no blob {name}.", out[at:end].decode())
            size = int(header[2])
            contents.append(out[end + 1 : end + 1 + size])
            at = end + 1 + size + 1
        return contents

    def _run(
        self,
        args: tuple[str, ...],
        stdin: str | bytes | None,
        env: Mapping[str, str] | None,
    ) -> subprocess.CompletedProcess[bytes]:
        command = ["git"]
        for key, value in _OVERRIDES.items():
            command += ["-c", f"{key}={value}"]
        command += args
        if isinstance(stdin, str):
            stdin = stdin.encode("utf-8", "surrogateescape")
        try:
            return subprocess.run(
                command,
                cwd=self.cwd,
                env=hermetic_env({**self.env, **(env or {})}),
                input=stdin or b"",
                capture_output=True,
                check=False,
            )
        except FileNotFoundError:
            if not shutil.which("git"):
                raise WorkshopError(
                    "git is not installed.", todo="Install git 2.32 or newer."
                ) from None
            raise WorkshopError(f"{self.cwd} does not exist.") from None


@contextmanager
def scratch(repo: Path) -> Iterator[Git]:
    """Git on the objects of `repo`, with none of its settings, hooks or index.

    A throw-away bare repository lies beside `repo` and writes new objects into
    `repo`'s store, so that `.git/config` and `.git/info/attributes`, which no
    command line switch can turn off, do not count either. The index is empty.
    Scratch repositories that a killed run left behind are removed first.
    """
    objects = repo / ".git" / "objects"
    if not objects.is_dir():
        raise WorkshopError(
            f"{repo} is not a git repository.", todo="Run `make fetch` first."
        )
    remove_scratch(repo.parent)
    folder = Path(
        tempfile.mkdtemp(prefix=f"{_SCRATCH_PREFIX}{os.getpid()}-", dir=repo.parent)
    )
    try:
        _make_bare(folder)
        yield Git(
            folder,
            {
                "GIT_DIR": str(folder),
                "GIT_INDEX_FILE": str(folder / "index"),
                "GIT_OBJECT_DIRECTORY": str(objects),
            },
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def borrowing(folder: Path, stores: Sequence[Path], index: Path) -> Git:
    """Git on a bare repository that reads from other object stores, writes to its own.

    As private as `scratch`, but what it makes stays in the folder.

    Args:
        folder: Made unless it is there.
        stores: Folders `objects` of other repositories.
        index: File for the index.
    """
    if not (folder / "HEAD").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _make_bare(folder)
    alternates = folder / "objects" / "info" / "alternates"
    alternates.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{store.resolve()}\n" for store in stores)
    alternates.write_text(lines, encoding="utf-8")
    return Git(folder, {"GIT_DIR": str(folder), "GIT_INDEX_FILE": str(index)})


def changed_files(repo: Path) -> list[str]:
    """Tracked files that the user changed, told with the user's own settings.

    Where a checkout converts line ends, ours would take each file for a changed one.
    """
    keep = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("GIT_") or key.startswith("GIT_CONFIG")
    }
    done = subprocess.run(
        ["git", "status", "--porcelain=v1", "-z", "--no-renames", "-uno"],
        cwd=repo,
        env={**keep, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        stderr = done.stderr.decode(errors="replace")
        raise GitError(("status",), done.returncode, stderr)
    rows = done.stdout.decode("utf-8", "surrogateescape").split("\0")
    return [row[3:] for row in rows if row]


def _make_bare(folder: Path) -> None:
    """What `git init --bare` makes, as far as git needs it, without its 5 ms."""
    (folder / "objects").mkdir(exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "HEAD").write_text("ref: refs/heads/main\n", encoding="utf-8")
    (folder / "config").write_text(
        "[core]\n\trepositoryformatversion = 0\n\tbare = true\n", encoding="utf-8"
    )


def on_worktree(private: Git, repo: Path) -> Git:
    """Git on the files and the index of `repo`, else as private as `scratch`.

    Refs other than a detached HEAD are not seen: name commits by hash.

    Args:
        private: From `scratch(repo)`.
    """
    return Git(
        repo,
        {
            "GIT_DIR": str(repo / ".git"),
            "GIT_COMMON_DIR": private.env["GIT_DIR"],
            "GIT_OBJECT_DIRECTORY": private.env["GIT_OBJECT_DIRECTORY"],
            "GIT_WORK_TREE": str(repo),
        },
    )


def remove_scratch(parent: Path) -> None:
    """Remove scratch repositories whose process is gone."""
    for left in parent.glob(f"{_SCRATCH_PREFIX}*"):
        pid = left.name.removeprefix(_SCRATCH_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)
