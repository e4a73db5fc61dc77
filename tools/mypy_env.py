"""The environment that vLLM's mypy hook runs in, as pre-commit would make it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tools.env import clean_environ
from tools.errors import WorkshopError
from tools.layout import Layout, venv_python
from tools.lock import hold
from tools.ui import step

_PIP_S = 600
_TAIL = 15


def mypy_bin(layout: Layout) -> Path:
    """Folder with `mypy`, in an environment of its own that is made on first use.

    It holds no PyTorch: with it mypy would find other things than upstream's does.

    Raises:
        WorkshopError: pip could not install it.
    """
    wanted = layout.root / "tools" / "mypy.txt"
    if not wanted.exists():
        wanted = Layout.default().root / "tools" / "mypy.txt"
    folder = layout.build / "mypy"
    stamp = folder / ".stamp"
    text = f"{sys.version}\n{hashlib.sha256(wanted.read_bytes()).hexdigest()}\n"
    if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == text):
        with hold(layout, "mypy"), step("Making build/mypy for vLLM's mypy hook"):
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder, wanted)
            stamp.write_text(text, encoding="utf-8")
    return venv_python(folder).parent


def _make(folder: Path, wanted: Path) -> None:
    flags = ("--disable-pip-version-check", "--no-input", "install", "--quiet")
    try:
        venv.EnvBuilder(symlinks=True, with_pip=True).create(folder)
        done = subprocess.run(
            [str(venv_python(folder)), "-m", "pip", *flags, "-r", str(wanted)],
            env=clean_environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PIP_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise WorkshopError("mypy's environment was not made.", str(error)) from None
    if done.returncode:
        raise WorkshopError(
            f"pip could not install {wanted.name}.",
            "\n".join(done.stderr.splitlines()[-_TAIL:]),
            "Check the network and pip's index settings, then run again.",
        )
