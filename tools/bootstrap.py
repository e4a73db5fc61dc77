"""Makes `.venv` able to run `python -m tools`; standard library only.

The Makefile runs it with the system's Python before every verb. It does nothing
when `tools/requirements.txt` has not changed since the last run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
REQUIREMENTS = ROOT / "tools" / "requirements.txt"
STAMP = VENV / ".workshop-tools"


def wanted() -> str:
    """What the stamp must say: interpreter, place and requirements."""
    text = f"{sys.version_info[:2]} {VENV} ".encode() + REQUIREMENTS.read_bytes()
    return hashlib.sha256(text).hexdigest()


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036
        print(
            f"error: Python {sys.version.split()[0]} is too old; the workshop needs "
            "3.11 or newer.\n   do: make PYTHON=python3.11 ...",
            file=sys.stderr,
        )
        return 1
    python = VENV / "bin" / "python"
    stamp = wanted()
    if python.exists() and STAMP.exists() and STAMP.read_text() == stamp:
        return 0
    print("==> Making .venv for the workshop's own tools", file=sys.stderr, flush=True)
    start = time.monotonic()
    # A venv that was moved or lost its interpreter is made new around its packages.
    if not python.exists() or not works(python):
        venv.EnvBuilder(with_pip=True, upgrade_deps=False, symlinks=True).create(VENV)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    code = subprocess.call(
        [*pip, "install", "--quiet", "--requirement", str(REQUIREMENTS)]
    )
    if code:
        print(
            f"error: pip could not install {REQUIREMENTS.relative_to(ROOT)}.\n"
            "   do: check the network or your pip settings (its message is above), "
            "then run the same command again.",
            file=sys.stderr,
        )
        return 1
    temporary = STAMP.with_suffix(f".{os.getpid()}")
    temporary.write_text(stamp)
    temporary.replace(STAMP)
    print(f"    done in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return 0


def works(python: Path) -> bool:
    return (
        subprocess.call(
            [str(python), "-m", "pip", "--version"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        == 0
    )


if __name__ == "__main__":
    sys.exit(main())
