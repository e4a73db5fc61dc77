"""Upstream's hooks on commits of a fake tree."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.errors import WorkshopError
from tools.git import Git, scratch
from tools.layout import Layout
from tools.upstream_hooks import Outcome, run_hooks

CONFIG = "exclude: 'vllm/third_party/.*'\nrepos: []\n"
# As vLLM's: it takes a Python version and files, and calls `mypy` from PATH.
MYPY = """\
import subprocess
import sys

sys.exit(subprocess.run(["mypy", *sys.argv[2:]]).returncode)
"""
FAKE_MYPY = """\
#!/bin/sh
echo "found by $0" >&2
for file in "$@"; do
    grep -n BAD "$file" | sed "s|:.*||; s|.*|$file:&: error: bad  [misc]|"
done
grep -q BAD "$@" && exit 1
grep -q CRASH "$@" && exit 2
exit 0
"""

Commit = Callable[[dict[str, str]], str]


@pytest.fixture
def commit(applied: Layout, user_git: Callable[..., str]) -> Commit:
    def make(files: dict[str, str]) -> str:
        for name, text in files.items():
            path = applied.tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        user_git(applied.tree, "add", "--force", "--", *files)
        user_git(applied.tree, "commit", "-q", "-m", "x")
        return Git(applied.tree)("rev-parse", "HEAD")

    return make


def run(
    layout: Layout, before: str, after: str, *paths: str, only: tuple[str, ...] = ()
) -> dict[str, Outcome]:
    with scratch(layout.tree) as git:
        found = run_hooks(layout, git, before, after, paths, only)
        return {one.hook: one for one in found}


def messages(outcome: Outcome) -> list[str]:
    return [one.message for one in outcome.findings]


def test_only_what_is_new_counts(applied: Layout, commit: Commit) -> None:
    before = commit({".pre-commit-config.yaml": CONFIG, "vllm/a.py": "# teh first\n"})
    after = commit({"vllm/a.py": "# more\n# teh first\n# teh second\n"})
    found = run(applied, before, after, "vllm/a.py")["typos"]
    assert len(found.findings) == 1
    assert messages(found)[0].startswith("vllm/a.py:3: error: `teh` should be `the`")
    assert found.files == 1


def test_excluded_and_removed_files_are_not_looked_at(
    applied: Layout, commit: Commit
) -> None:
    before = commit({".pre-commit-config.yaml": CONFIG})
    after = commit({"vllm/third_party/x.py": "# teh\n"})
    names = ("vllm/third_party/x.py", "vllm/gone.py")
    assert run(applied, before, after, *names)["typos"] == Outcome("typos")


def test_shell_script_and_c_source(applied: Layout, commit: Commit) -> None:
    before = commit({".pre-commit-config.yaml": CONFIG})
    files = {"run.sh": "#!/bin/bash\nrm $1\n", "csrc/x.cpp": "int  main( ){}\n"}
    found = run(applied, before, commit(files), *files)
    assert "SC2086" in messages(found["shellcheck"])[0]
    assert messages(found["clang-format"])[0].startswith("csrc/x.cpp:1: ")


def test_mypy_runs_through_the_trees_script(
    applied: Layout, commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mypy/bin"
    folder.mkdir(parents=True)
    (folder / "mypy").write_text(FAKE_MYPY)
    (folder / "mypy").chmod(0o755)
    (folder / "python").symlink_to(sys.executable)
    monkeypatch.setattr("tools.mypy_env.mypy_bin", lambda layout: folder)
    config = """\
repos:
- repo: local
  hooks:
  - id: mypy-3.10
    entry: python tools/pre_commit/mypy.py "3.10"
  - id: mypy-3.11
    entry: python tools/pre_commit/mypy.py "3.11"
    stages: [manual]
"""
    script = {"tools/pre_commit/mypy.py": MYPY, ".pre-commit-config.yaml": config}
    before = commit({**script, "vllm/a.py": "BAD = 1\n"})
    after = commit({"vllm/a.py": "x = 1\nBAD = 1\nBAD = 2\n"})
    found = run(applied, before, after, "vllm/a.py")["mypy"]
    assert messages(found) == ["vllm/a.py:3: error: bad  [misc]"]
    broken = commit({"vllm/a.py": "CRASH = 1\n"})
    with pytest.raises(WorkshopError, match="mypy failed with exit status 2"):
        run(applied, before, broken, "vllm/a.py", only=("mypy",))


def test_what_cannot_be_run_is_a_humans(
    applied: Layout, commit: Commit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin:/bin")
    before = commit({".pre-commit-config.yaml": CONFIG})
    files = {"docs/x.md": "# X\n", "requirements/common.txt": "numpy\n"}
    found = run(applied, before, commit(files), *files)
    assert "npm" in found["markdownlint-cli2"].by_hand
    assert found["pip-compile"].by_hand


def test_markdownlint_where_there_is_one(
    applied: Layout, commit: Commit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "markdownlint-cli2"
    program.write_text(
        "#!/bin/sh\ngrep -q '\t' \"$1\" || exit 0\n"
        'echo "$1:1:2 error MD010/no-hard-tabs Hard tabs" >&2\nexit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    before = commit({".pre-commit-config.yaml": CONFIG})
    after = commit({"docs/x.md": "#\tX\n"})
    found = run(applied, before, after, "docs/x.md")["markdownlint-cli2"]
    assert messages(found) == ["docs/x.md:1: error MD010/no-hard-tabs Hard tabs"]


def test_scripts_of_upstreams_configuration_are_run_as_it_says(
    applied: Layout, commit: Commit
) -> None:
    config = """\
repos:
- repo: local
  hooks:
  - id: check-words
    entry: python tools/pre_commit/check_words.py
    language: python
    types: [python]
    exclude: ^tests/
  - id: check-whole
    entry: python tools/pre_commit/check_whole.py
    files: ^docs/
    pass_filenames: false
  - id: check-docker
    entry: python tools/pre_commit/check_whole.py --check
    files: ^docs/
    additional_dependencies: [dockerfile-parse]
  - id: check-tracked
    entry: python tools/pre_commit/check_tracked.py
    files: ^docs/
    pass_filenames: false
  - id: check-broken
    entry: python tools/pre_commit/check_broken.py
    files: ^docs/
    pass_filenames: false
  - id: not-a-script
    entry: bash -c "exit 1"
"""
    words = (
        "import sys\n\nbad = [n for n in sys.argv[1:] if 'BAD' in open(n).read()]\n"
        "print(*bad, sep='\\n')\nsys.exit(bool(bad))\n"
    )
    whole = "import os, sys\n\nsys.exit(os.path.exists('docs/x.md') and 'no x')\n"
    tracked = (
        "import subprocess, sys\n\n"
        "out = subprocess.run(['git', 'ls-files', 'docs/x.md'], capture_output=True, "
        "check=True, text=True)\nsys.exit(out.stdout or None)\n"
    )
    before = commit(
        {
            ".pre-commit-config.yaml": config,
            "tools/pre_commit/check_tracked.py": tracked,
            "tools/pre_commit/check_broken.py": "raise KeyError(__file__)\n",
            "tools/pre_commit/check_words.py": words,
            "tools/pre_commit/check_whole.py": whole,
        }
    )
    files = {"vllm/a.py": "BAD = 1\n", "tests/a.py": "BAD = 1\n", "docs/x.md": "# X\n"}
    found = run(applied, before, commit(files), *files)
    assert messages(found["check-words"]) == ["check_words.py: vllm/a.py"]
    assert found["check-words"].files == 1
    assert messages(found["check-whole"]) == ["check_whole.py: no x"]
    assert found["check-docker"].by_hand == "it needs dockerfile-parse"
    assert "not-a-script" not in found
    # As in a clone, where a hook may ask git.
    assert messages(found["check-tracked"]) == ["check_tracked.py: docs/x.md"]
    # It breaks without the change, too; the copies have other names.
    assert messages(found["check-broken"]) == []
