"""Runs the hooks of vLLM's `.pre-commit-config.yaml` on a copy of a commit.

Each hook looks at the files that a change touches. What it finds before the change
too is not the change's: only the rest is reported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tools.errors import WorkshopError
from tools.git import Git
from tools.layout import Layout, venv_python
from tools.upstream_lint import (
    HOOKS,
    Finding,
    python_hook,
    ruff_check,
    ruff_format,
)

CONFIG = ".pre-commit-config.yaml"
_PYTHON = "3.10"
_TIMEOUT_S = 600
_C = (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hh", ".hpp", ".hxx")
_AT = re.compile(r":\d+(?::\d+)?")
_PLACE = re.compile(r"(?P<path>[^\s:][^:]*):(?P<line>\d+)(?::\d+)?:? (?P<text>.+)")
# What runs only on files as these needs the network, Rust or Docker.
_BY_HAND = {
    "pip-compile": r"requirements/.*\.(in|txt)$",
    "actionlint": r"\.github/workflows/.*\.ya?ml$",
    "cargo": r"rust/",
    "update-dockerfile-graph": r"docker/Dockerfile$",
    "validate-docker-versions": r"docker/(Dockerfile|versions\.json)$",
}


@dataclass(frozen=True)
class Outcome:
    """What became of one hook.

    Attributes:
        hook: Its name, as upstream's configuration has it.
        files: How many files it was run on.
        findings: What the change brings in.
        by_hand: Why it was not run; empty if it was.
    """

    hook: str
    files: int = 0
    findings: tuple[Finding, ...] = ()
    by_hand: str = ""


@dataclass(frozen=True)
class Hook:
    """One hook.

    Attributes:
        takes: Whether it looks at a file.
        run: Gives what it finds in files of a tree.
        needs: A file of vLLM's tree without which there is no such hook.
        missing: Says why it cannot be run here; empty if it can.
    """

    name: str
    takes: Callable[[str], bool]
    run: Callable[[Path, Sequence[str]], Iterator[Finding]]
    needs: str = CONFIG
    missing: Callable[[], str] = lambda: ""


def run_hooks(
    layout: Layout,
    git: Git,
    before: str,
    after: str,
    paths: Sequence[str],
    only: Sequence[str] = (),
) -> Iterator[Outcome]:
    """Run hooks on what a change leaves of the files that it touches.

    Args:
        git: From `tools.git.scratch`; its index is overwritten.
        before: Commit without the change.
        after: Commit with it.
        paths: Files that it touches.
        only: Names of hooks; all unless given.

    Raises:
        WorkshopError: A hook broke.
    """
    names = git("ls-tree", "-r", "-z", "--name-only", "--full-tree", after).split("\0")
    there = set(names)
    excluded = re.compile(_excluded(git, after) or r"(?!)")
    touched = sorted(
        path for path in set(paths) if path in there and not excluded.search(path)
    )
    with ExitStack() as stack:
        trees: dict[str, Path] = {}

        def tree(commit: str) -> Path:
            if commit not in trees:
                folder = tempfile.TemporaryDirectory(prefix="hooks-")
                trees[commit] = Path(stack.enter_context(folder)).resolve()
                _checkout(git, commit, trees[commit])
            return trees[commit]

        for hook in hooks(layout):
            if (only and hook.name not in only) or hook.needs not in there:
                continue
            files = [path for path in touched if hook.takes(path)]
            if not files:
                yield Outcome(hook.name)
            elif why := hook.missing():
                yield Outcome(hook.name, len(files), by_hand=why)
            else:
                found = [*hook.run(tree(after), files)]
                if found:
                    found = _new(found, hook, tree(before), files)
                yield Outcome(hook.name, len(files), tuple(found))
    for name, form in () if only else _BY_HAND.items():
        files = [path for path in touched if re.match(form, path)]
        if files:
            yield Outcome(name, len(files), by_hand="it cannot be run here")


def _new(
    found: Sequence[Finding], hook: Hook, before: Path, files: Sequence[str]
) -> list[Finding]:
    """The findings that are not there before the change."""

    def key(finding: Finding) -> tuple[str, str | None, str]:
        return finding.rule, finding.path, _AT.sub("", finding.message)

    old = [path for path in files if (before / path).is_file()]
    known = Counter(key(one) for one in hook.run(before, old)) if old else Counter()
    new = []
    for one in found:
        if known[key(one)]:
            known[key(one)] -= 1
        else:
            new.append(one)
    return new


def _excluded(git: Git, commit: str) -> str:
    """The top-level `exclude` of upstream's configuration."""
    import yaml

    if git.resolve(f"{commit}:{CONFIG}") is None:
        return ""
    config = yaml.safe_load(git("cat-file", "blob", f"{commit}:{CONFIG}"))
    return str(config.get("exclude", "")) if isinstance(config, dict) else ""


def _checkout(git: Git, commit: str, folder: Path) -> None:
    git("read-tree", commit)
    git("checkout-index", "--all", env={"GIT_WORK_TREE": str(folder)})


def hooks(layout: Layout) -> tuple[Hook, ...]:
    """All that can be run, cheap ones first."""
    python = _suffix(".py")

    def own(script: str) -> Hook:
        return Hook(
            Path(script).stem,
            python,
            lambda root, files: python_hook(root, script, files),
            needs=script,
        )

    def whole(script: str, form: str) -> Hook:
        """A script that takes no files and looks at the whole tree."""
        return Hook(
            Path(script).stem,
            lambda path: bool(re.match(form, path)),
            lambda root, files: _whole(root, script),
            needs=script,
        )

    folder = "tools/pre_commit"
    return (
        Hook("ruff-check", python, ruff_check),
        Hook("ruff-format", python, ruff_format),
        Hook("typos", lambda path: True, _typos),
        Hook("clang-format", _suffix(*_C), _clang_format),
        Hook("shellcheck", _suffix(".sh", ".bash"), _shellcheck),
        Hook(
            "markdownlint-cli2",
            lambda path: path.endswith(".md") and Path(path).name != "CLAUDE.md",
            _markdownlint,
            missing=_no_markdownlint,
        ),
        own(f"{folder}/check_spdx_header.py"),
        whole(f"{folder}/check_init_lazy_imports.py", r"vllm/__init__\.py$"),
        *(own(script) for script in HOOKS),
        whole(f"{folder}/check_label_rules.py", r"\.github/mergify\.yml$"),
        whole(f"{folder}/check_buildkite_step_keys.py", r"\.buildkite/.*\.ya?ml$"),
        Hook(
            "mypy",
            python,
            lambda root, files: _mypy(layout, root, files),
            needs=f"{folder}/mypy.py",
        ),
    )


def _suffix(*ends: str) -> Callable[[str], bool]:
    return lambda path: path.endswith(ends)


def _run(root: Path, *command: str, path: str = "", **env: str) -> tuple[int, str]:
    """Exit status and all output; a program is looked for beside our interpreter."""
    first = path or str(Path(sys.executable).parent)
    environ = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("MYPY", "RUFF", "GIT_", "PYTHON"))
    }
    environ |= {"PATH": f"{first}{os.pathsep}{os.environ.get('PATH', '')}", **env}
    environ |= {"LC_ALL": "C.UTF-8", "NO_COLOR": "1", "PYTHONUTF8": "1"}
    program = shutil.which(command[0], path=environ["PATH"])
    if program is None:
        raise WorkshopError(
            f"{command[0]} is not installed.",
            todo="Run it through make, which installs tools/requirements.txt.",
        )
    try:
        done = subprocess.run(
            [program, *command[1:]],
            cwd=root,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise WorkshopError(f"{command[0]} took more than {_TIMEOUT_S} s.") from None
    return done.returncode, done.stdout.decode(errors="replace")


def _read(
    rule: str, status: int, output: str, files: Sequence[str]
) -> Iterator[Finding]:
    """Findings of `path:line:column: text`; output without one is a breakdown."""
    known = set(files)
    found = False
    for line in output.splitlines():
        match = _PLACE.match(line.removeprefix("./"))
        # A note of mypy's belongs to an error; one of shellcheck's is a finding.
        is_note = rule == "mypy" and bool(match) and match["text"].startswith("note:")
        if match and match["path"] in known and not is_note:
            found = True
            text = f"{match['path']}:{match['line']}: {match['text']}"
            yield Finding(rule, match["path"], text)
    if status and not found:
        tail = "\n".join(output.splitlines()[-10:])
        raise WorkshopError(f"{rule} failed with exit status {status}.", tail)


def _typos(root: Path, files: Sequence[str]) -> Iterator[Finding]:
    flags = ("--force-exclude", "--format=brief", "--color=never")
    status, output = _run(root, "typos", *flags, "--", *files)
    yield from _read("typos", status, output, files)


def _clang_format(root: Path, files: Sequence[str]) -> Iterator[Finding]:
    flags = ("--style=file", "--dry-run", "--Werror")
    status, output = _run(root, "clang-format", *flags, *files)
    yield from _read("clang-format", status, output, files)


def _shellcheck(root: Path, files: Sequence[str]) -> Iterator[Finding]:
    status, output = _run(root, "shellcheck", "-s", "bash", "--format=gcc", *files)
    yield from _read("shellcheck", status, output, files)


def _no_markdownlint() -> str:
    found = shutil.which("markdownlint-cli2")
    return "" if found else "markdownlint-cli2 (of npm) is not on PATH"


def _markdownlint(root: Path, files: Sequence[str]) -> Iterator[Finding]:
    status, output = _run(root, "markdownlint-cli2", *files)
    yield from _read("markdownlint-cli2", status, output, files)


def _whole(root: Path, script: str) -> Iterator[Finding]:
    status, output = _run(root, sys.executable, script)
    if status:
        tail = "\n".join(output.strip().splitlines()[-10:])
        yield Finding("hooks", None, f"{Path(script).name}: {tail}")


def _mypy(layout: Layout, root: Path, files: Sequence[str]) -> Iterator[Finding]:
    """Upstream's script; it groups the files and calls `mypy` from PATH."""
    from tools.mypy_env import mypy_bin

    folder = mypy_bin(layout)
    status, output = _run(
        root,
        str(venv_python(folder.parent)),
        "tools/pre_commit/mypy.py",
        _PYTHON,
        *files,
        path=str(folder),
        MYPY_CACHE_DIR=str(layout.build / "mypy-cache"),
    )
    yield from _read("mypy", status, output, files)
