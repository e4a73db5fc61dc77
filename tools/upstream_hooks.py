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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.errors import WorkshopError
from tools.git import Git
from tools.layout import Layout, venv_python
from tools.upstream_lint import (
    Finding,
    python_hook,
    ruff_check,
    ruff_format,
)

CONFIG = ".pre-commit-config.yaml"
_MYPY = re.compile(r'python (tools/pre_commit/mypy\.py) "([\d.]+)"')
_SCRIPT = re.compile(r"python (tools/\S+\.py)( --check)?")
# Packages that upstream's own scripts may import besides the standard library.
_INSTALLED = {"regex", "PyYAML"}
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
        whole: Whether it looks at the whole tree, whatever the files.
    """

    name: str
    takes: Callable[[str], bool]
    run: Callable[[Path, Sequence[str]], Iterator[Finding]]
    needs: str = CONFIG
    missing: Callable[[], str] = lambda: ""
    whole: bool = False


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
    config = _config(git, after)
    excluded = re.compile(str(config.get("exclude") or r"(?!)"))
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

        for hook in hooks(layout, config):
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
    known = Counter[tuple[str, str | None, str]]()
    if old or hook.whole:
        known.update(key(one) for one in hook.run(before, old))
    new = []
    for one in found:
        if known[key(one)]:
            known[key(one)] -= 1
        else:
            new.append(one)
    return new


def _config(git: Git, commit: str) -> dict[str, Any]:
    import yaml

    if git.resolve(f"{commit}:{CONFIG}") is None:
        return {}
    config = yaml.safe_load(git("cat-file", "blob", f"{commit}:{CONFIG}"))
    return config if isinstance(config, dict) else {}


def _checkout(git: Git, commit: str, folder: Path) -> None:
    """Write a commit's files, in a repository that has them: some hooks ask git."""
    copy = Git(folder)
    copy("init", "--quiet")
    objects = git.cwd / git("rev-parse", "--git-path", "objects")
    alternates = folder / ".git/objects/info/alternates"
    alternates.write_text(f"{objects.resolve()}\n", encoding="utf-8")
    copy("update-ref", "HEAD", commit)
    copy("reset", "--quiet", "--hard")


def hooks(layout: Layout, config: Mapping[str, Any]) -> tuple[Hook, ...]:
    """All that can be run, cheap ones first.

    Args:
        config: Upstream's, of the commit that is looked at.
    """
    python = _suffix(".py")
    return (
        Hook("ruff-check", python, ruff_check, needs="pyproject.toml"),
        Hook("ruff-format", python, ruff_format, needs="pyproject.toml"),
        Hook("typos", lambda path: True, _typos),
        Hook("clang-format", _suffix(*_C), _clang_format),
        Hook("shellcheck", _suffix(".sh", ".bash"), _shellcheck),
        Hook(
            "markdownlint-cli2",
            lambda path: path.endswith(".md") and Path(path).name != "CLAUDE.md",
            _markdownlint,
            missing=_no_markdownlint,
        ),
        *_scripts(config),
        *_mypys(layout, config),
    )


def _scripts(config: Mapping[str, Any]) -> Iterator[Hook]:
    """Upstream's own Python scripts, as its configuration runs them."""
    for entry in _local(config):
        match = _SCRIPT.fullmatch(str(entry.get("entry", "")))
        if match:
            yield _script(entry, match[1], (match[2] or "").split())


def _local(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        entry
        for repo in config.get("repos") or ()
        if repo.get("repo") == "local"
        for entry in repo.get("hooks") or ()
    ]


def _mypys(layout: Layout, config: Mapping[str, Any]) -> Iterator[Hook]:
    """mypy for the Python version that upstream checks at each commit."""
    for entry in _local(config):
        match = _MYPY.fullmatch(str(entry.get("entry", "")))
        if match and "stages" not in entry:
            yield Hook(
                "mypy",
                _suffix(".py"),
                partial(_mypy, layout, match[1], match[2]),
                needs=match[1],
            )


def _script(entry: Mapping[str, Any], script: str, flags: Sequence[str]) -> Hook:
    wanted = re.compile(entry.get("files", ""))
    unwanted = re.compile(entry.get("exclude") or r"(?!)")
    types = [*entry.get("types", ()), *entry.get("types_or", ())]
    ends = tuple(
        end
        for kind, end in (("python", ".py"), ("rust", ".rs"), ("proto", ".proto"))
        if kind in types
    )
    whole = entry.get("pass_filenames") is False
    needed = {str(name) for name in entry.get("additional_dependencies", ())}
    missing = ", ".join(sorted(needed - _INSTALLED))

    def takes(path: str) -> bool:
        if not wanted.search(path) or unwanted.search(path):
            return False
        return path.endswith(ends) if types else True

    def run(root: Path, files: Sequence[str]) -> Iterator[Finding]:
        return (
            _whole(root, script, flags) if whole else python_hook(root, script, files)
        )

    return Hook(
        str(entry["id"]),
        takes,
        run,
        needs=script,
        missing=lambda: f"it needs {missing}" if missing else "",
        whole=whole,
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


def _whole(root: Path, script: str, flags: Sequence[str]) -> Iterator[Finding]:
    """A script that takes no files and looks at the whole tree."""
    status, output = _run(root, sys.executable, script, *flags)
    if status:
        # The folder has another name each time.
        output = output.replace(f"{root}/", "")
        tail = "\n".join(output.strip().splitlines()[-10:])
        yield Finding("hooks", None, f"{Path(script).name}: {tail}")


def _mypy(
    layout: Layout, script: str, version: str, root: Path, files: Sequence[str]
) -> Iterator[Finding]:
    """Upstream's script; it groups the files and calls `mypy` from PATH."""
    from tools.mypy_env import mypy_bin

    folder = mypy_bin(layout)
    status, output = _run(
        root,
        str(venv_python(folder.parent)),
        script,
        version,
        *files,
        path=str(folder),
        MYPY_CACHE_DIR=str(layout.build / "mypy-cache"),
    )
    yield from _read("mypy", status, output, files)
