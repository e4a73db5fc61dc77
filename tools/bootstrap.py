"""Makes `.venv` able to run `python -m tools`; standard library only.

The Makefile runs it with the system's Python before every verb. It does nothing
when nothing changed since the last run, and mends an environment whose checkout was
moved or whose Python was removed. It must be readable by an old Python, which it
tells what is wrong.
"""

import hashlib
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, TOO_NEW = (3, 11), (3, 15)

_LOCK_WAIT_S = 900
_PIP_S = 1800
_TAIL = 15


class Failure(Exception):
    """Args: what failed, why, and what to do."""


class Environment:
    """The `.venv` of a checkout.

    Args:
        root: The checkout.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self.requirements = root / "tools" / "requirements.txt"
        self.stamp = self.folder / ".workshop-tools"
        # Exists while pip is put into a new environment, which takes seconds.
        self.unfinished = self.folder / ".workshop-unfinished"

    def wanted(self) -> str:
        """What the stamp must say: place, interpreter, requirements."""
        digest = hashlib.sha256(self.requirements.read_bytes()).hexdigest()
        return f"{self.folder}\n{os.path.realpath(self.python)}\n{digest}\n"

    def found(self) -> str:
        try:
            return self.stamp.read_text(encoding="utf-8")
        except OSError:
            return ""

    def ready(self) -> bool:
        return self.python.exists() and self.found() == self.wanted()

    def make(self) -> None:
        """Make or mend it. Interrupted at any point, the next run starts anew."""
        place = self.found().split("\n")[0]
        if place:
            # Not ready any more; the place is needed until all scripts name this one.
            self.stamp.write_text(place + "\n", encoding="utf-8")
        if not self.works():
            self.create()
        if place.startswith("/") and place != str(self.folder):
            self.retarget(place)
        self.install()
        temporary = self.stamp.with_name(f"{self.stamp.name}.{os.getpid()}")
        temporary.write_text(self.wanted(), encoding="utf-8")
        temporary.replace(self.stamp)

    def works(self) -> bool:
        """Whether its interpreter runs, finds pip, and is new enough."""
        import subprocess

        if self.unfinished.exists():
            return False
        code = (
            f"import pip, sys; sys.exit(not {OLDEST} <= sys.version_info < {TOO_NEW})"
        )
        try:
            done = subprocess.run(
                [str(self.python), "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=60,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    def create(self) -> None:
        """Make the interpreter; packages of the same Python version are kept."""
        import subprocess
        import venv

        check_version()
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        pip = self.folder / "lib" / version / "site-packages" / "pip"
        keep = pip.is_dir() and not self.unfinished.exists()
        try:
            if keep:
                # A link to a Python that is gone is not replaced by itself.
                for link in (self.folder / "bin").glob("python*"):
                    link.unlink()
            else:
                self.empty()
                self.unfinished.touch()
            venv.EnvBuilder(symlinks=True, with_pip=not keep).create(str(self.folder))
            if not keep:
                self.unfinished.unlink()
        except (subprocess.CalledProcessError, OSError) as error:
            raise Failure(
                f"Python {sys.version.split()[0]} could not make {self.folder}.",
                str(error),
                f"On Debian and Ubuntu: apt install {version}-venv. Or use another "
                "Python: make PYTHON=/path/to/python3 ...",
            ) from None

    def empty(self) -> None:
        """Remove all that is in it; the folder itself may be a link."""
        import shutil

        self.folder.mkdir(exist_ok=True)
        for entry in self.folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(str(entry))
            else:
                entry.unlink()

    def retarget(self, place: str) -> None:
        """Let scripts name this place, where they name the one they were made in."""
        old = re.compile(re.escape(os.fsencode(place)) + rb"(?=[/\"'\s])")
        new = os.fsencode(str(self.folder))
        for script in (self.folder / "bin").iterdir():
            if script.is_symlink() or not script.is_file():
                continue
            if script.stat().st_size > 1 << 16:
                continue  # No script, but a program.
            data = script.read_bytes()
            changed = old.sub(lambda match: new, data)
            if changed != data:
                temporary = script.with_name(f".{script.name}.{os.getpid()}")
                temporary.write_bytes(changed)
                temporary.chmod(script.stat().st_mode)
                temporary.replace(script)

    def install(self) -> None:
        import subprocess

        command = [str(self.python), "-m", "pip", "--disable-pip-version-check"]
        command += ["--no-input", "install", "--quiet", "--no-compile", "--requirement"]
        # Packages that an environment variable makes visible would not be installed.
        hide = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
        env = {key: value for key, value in os.environ.items() if key not in hide}
        try:
            done = subprocess.run(
                [*command, str(self.requirements)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_PIP_S,
            )
        except subprocess.TimeoutExpired:
            raise Failure(
                f"pip did not end within {_PIP_S} s.",
                "",
                "Check the network and pip's index settings, then run again.",
            ) from None
        if done.returncode:
            lines = done.stdout.decode(errors="replace").splitlines()
            tail = [line for line in lines if not line.startswith("WARNING: Location")]
            raise Failure(
                f"pip could not install {self.requirements.relative_to(self.root)}.",
                "\n".join(tail[-_TAIL:]),
                "Check the network and pip's index settings (`pip config list`), "
                "then run the same command again.",
            )


def check_version() -> None:
    found = sys.version_info[:2]
    if not OLDEST <= found < TOO_NEW:
        raise Failure(
            f"Python {sys.version.split()[0]} cannot be used.",
            "The workshop needs 3.11 or newer, and vLLM has none newer than 3.14.",
            "make PYTHON=python3.12 ...",
        )


def lock(path: Path):
    """Hold a file locked until this process ends."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")
    end = time.monotonic() + _LOCK_WAIT_S
    told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > end:
                raise Failure(
                    f"Another run has been making .venv for {_LOCK_WAIT_S} s.",
                    f"It holds {path}.",
                    "Let it end, or end it, then run again.",
                ) from None
        if not told:
            told = True
            say("Another run is making .venv; waiting for it.")
        time.sleep(0.2)


def say(text: str) -> None:
    print(text, file=sys.stderr)
    sys.stderr.flush()


def main(root: Path = ROOT) -> int:
    environment = Environment(root)
    if environment.ready():
        return 0
    try:
        if not environment.folder.exists():
            check_version()
        with lock(root / "build" / ".bootstrap.lock"):
            if environment.ready():
                return 0
            say("==> Making .venv for the workshop's own tools (about 15 s)")
            start = time.monotonic()
            environment.make()
            say(f"    done in {time.monotonic() - start:.0f} s")
    except Failure as failure:
        for label, text in zip(("error", "why", "do"), failure.args):  # noqa: B905
            for line in text.splitlines():
                say(f"{label + ':' if label else '':>6} {line}")
                label = ""
        return 1
    except OSError as error:
        say(f"error: .venv could not be made: {error}")
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
