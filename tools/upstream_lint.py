"""Runs ruff and upstream's own Python hooks, with upstream's own settings."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.errors import WorkshopError
from tools.git import Git

# Those of `.pre-commit-config.yaml` that need nothing but Python and take files.
HOOKS = (
    "tools/pre_commit/check_boolean_context_manager.py",
    "tools/pre_commit/check_forbidden_imports.py",
    "tools/pre_commit/check_torch_cuda.py",
    "tools/pre_commit/validate_config.py",
)
_SETTINGS = "pyproject.toml"
_TIMEOUT_S = 120
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\w[\w.]*)[ \t]+import\b|import[ \t]+([\w., \t]+))",
    re.MULTILINE,
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Finding:
    """Something that a linter objects to.

    Attributes:
        rule: `ruff`, `format` or `hooks`.
        path: File in vLLM's tree, None where the linter names none.
    """

    rule: str
    path: str | None
    message: str


def lint(git: Git, tip: str, paths: Sequence[str]) -> Iterator[Finding]:
    """Lint files of a commit.

    Args:
        git: From `tools.git.scratch`.
        tip: Commit whose files and settings are used.
        paths: Files in vLLM's tree; only Python is looked at.

    Raises:
        WorkshopError: A linter cannot be run.
    """
    blobs = _blobs(git, tip)
    files = sorted(path for path in paths if path.endswith(".py") and path in blobs)
    if not files:
        return
    if _SETTINGS not in blobs:
        raise WorkshopError(f"vLLM's tree has no {_SETTINGS} with ruff's settings.")
    hooks = [hook for hook in HOOKS if hook in blobs]
    with tempfile.TemporaryDirectory(prefix="lint-") as folder:
        root = Path(folder)
        _write(git, blobs, root, [*files, *hooks, _SETTINGS])
        yield from ruff_check(root, files)
        yield from ruff_format(root, files)
        for hook in hooks:
            yield from python_hook(root, hook, files)


def _blobs(git: Git, tip: str) -> dict[str, str]:
    rows = git("ls-tree", "-r", "-z", "--full-tree", tip).split("\0")[:-1]
    found = {}
    for row in rows:
        facts, path = row.split("\t", 1)
        mode, _, blob = facts.split()
        if mode != "120000":
            found[path] = blob
    return found


def _write(
    git: Git, blobs: Mapping[str, str], root: Path, paths: Sequence[str]
) -> None:
    names = sorted(set(paths))
    wanted: set[Path] = set()
    for name, data in zip(names, git.blobs([blobs[n] for n in names]), strict=True):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        wanted.add(Path(name).parent / "__init__.py")
        # ruff takes an import for first-party, and a folder for a package, by the
        # files that are there: empty ones will do.
        for match in _IMPORT.finditer(data.decode(errors="replace")):
            for module in re.findall(r"\w[\w.]*", match[1] or match[2]):
                place = Path(*module.split("."))
                wanted |= {place.with_name(f"{place.name}.py"), place / "__init__.py"}
    folders = {
        name[:at] for name in blobs for at, char in enumerate(name) if char == "/"
    }
    for path in wanted:
        if str(path) in blobs:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
        elif path.name == "__init__.py" and str(path.parent) in folders:
            (root / path).parent.mkdir(parents=True, exist_ok=True)


def _run(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if "RUFF" not in key}
    try:
        return subprocess.run(
            [sys.executable, *args],
            cwd=root,
            env={**env, "PYTHONUTF8": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise WorkshopError(
            f"{' '.join(args[:3])} took more than {_TIMEOUT_S} s."
        ) from None


def _ruff(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    done = _run(root, "-m", "ruff", *args)
    if done.returncode not in (0, 1):
        raise WorkshopError(f"ruff {args[0]} failed.", done.stderr.strip())
    return done


def ruff_check(root: Path, files: Sequence[str]) -> Iterator[Finding]:
    flags = ("--no-cache", "--no-respect-gitignore", "--output-format=json")
    done = _ruff(root, "check", *flags, "--", *files)
    for entry in json.loads(done.stdout or "[]"):
        path = str(Path(entry["filename"]).relative_to(root.resolve()))
        row = entry["location"]["row"]
        text = f"{path}:{row}: {entry['code']} {entry['message']}"
        yield Finding("ruff", path, text)


def ruff_format(root: Path, files: Sequence[str]) -> Iterator[Finding]:
    flags = ("--no-cache", "--no-respect-gitignore", "--check")
    done = _ruff(root, "format", *flags, "--", *files)
    for line in done.stdout.splitlines():
        if line.startswith("Would reformat: "):
            path = line.removeprefix("Would reformat: ")
            yield Finding("format", path, f"{path} is not formatted (ruff format).")


def python_hook(root: Path, hook: str, files: Sequence[str]) -> Iterator[Finding]:
    if importlib.util.find_spec("regex") is None:
        raise WorkshopError(
            "vLLM's hooks need the package `regex`.",
            todo="Run it through make, which installs tools/requirements.txt.",
        )
    done = _run(root, hook, *files)
    if done.returncode == 0:
        return
    name = Path(hook).name
    lines = _COLOUR.sub("", done.stdout + done.stderr).splitlines()
    named = [(path, line) for line in lines for path in files if path in line]
    if not named:
        text = "\n".join(lines[-5:]) or f"exit {done.returncode}"
        yield Finding("hooks", None, f"{name}: {text}")
    for path, line in named:
        if "✅" not in line:
            yield Finding("hooks", path, f"{name}: {line.strip()}")
