"""Runs the commands of a build: output to a log, signs of life to the user."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.env import clean_environ, site_packages
from tools.errors import WorkshopError
from tools.layout import Layout
from tools.process import die_with_parent
from tools.ui import say, step

_SILENCE_S = 1800
_HEARTBEAT_S = 15
_TERMINAL_S = 0.5
_TAIL = 20


@dataclass(frozen=True)
class Step:
    """One command of a build.

    Attributes:
        name: `torch`, `requirements` or `vllm`.
        title: What it does, for the user.
        command: Arguments; the first is the environment's interpreter.
        env: Variables on top of `build_environ()`.
        files: Files to write first.
    """

    name: str
    title: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)


def build_environ() -> dict[str, str]:
    """This process's environment without anything that could change a build.

    No variable of vLLM's setup.py is left: without them it takes the wheel it is
    told, and nothing else.
    """
    drop = re.compile(
        r"VLLM_|SETUPTOOLS_|CARGO|PIP_(TARGET|PREFIX|ROOT|USER|EDITABLE|NO_DEPS|"
        r"NO_BUILD_ISOLATION|REQUIREMENT|REQUIRE_HASHES|QUIET|LOG|PYTHON)$|GIT_"
    )
    return {key: value for key, value in clean_environ().items() if not drop.match(key)}


def run_step(layout: Layout, each: Step, log: Path, why: str) -> None:
    """Run one command; its output goes to the log, what it is at to the user.

    Raises:
        WorkshopError: It failed, or printed nothing for half an hour. Has the last
            lines of its output.
    """
    for path, text in each.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    lines: list[str] = []
    with step(f"{each.title} ({why})"), log.open("a", encoding="utf-8") as output:
        output.write(f"$ {' '.join(each.command)}\n")
        try:
            for line in _lines(each, layout.root):
                output.write(f"{line}\n")
                lines.append(line)
            return
        except subprocess.TimeoutExpired:
            what = f"It printed nothing for {_SILENCE_S // 60} minutes and was ended."
        except subprocess.CalledProcessError as error:
            what = f"It ended with exit status {error.returncode}; its last lines:"
    tail = [line for line in lines if line.strip() and "WARNING: " not in line][-_TAIL:]
    raise WorkshopError(
        f"{each.title} failed.",
        "\n".join([what, *tail]),
        f"{_hint(each, lines)}\nAll its output is in {layout.relative(log)}. "
        "Run the same command again: it goes on from here.",
    )


def _hint(each: Step, lines: list[str]) -> str:
    text = "\n".join(lines)
    if "No space left on device" in text:
        return "Make room: the environment takes about 2 GB."
    if "No matching distribution found" in text or "Retrying (" in text:
        return (
            "Check the network and pip's index settings (`pip config list`; for "
            "PyTorch see docs/build.md)."
        )
    if each.name == "vllm":
        return "If you edited setup.py or the requirements, look there."
    return "Mend what the lines above say."


def _lines(each: Step, cwd: Path) -> Iterator[str]:
    """Output of a command, line by line, with signs of life for the user."""
    process = subprocess.Popen(
        each.command,
        cwd=cwd,
        env={**build_environ(), **each.env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A killed build leaves no pip behind that the next one would meet.
        preexec_fn=die_with_parent,
    )
    progress = _Progress(site_packages(Path(each.command[0]).parent.parent))
    try:
        with selectors.DefaultSelector() as selector:
            if process.stdout is None:
                raise WorkshopError("The output of pip cannot be read.")
            output = process.stdout.fileno()
            selector.register(output, selectors.EVENT_READ)
            rest = b""
            last = time.monotonic()
            while True:
                if selector.select(timeout=_TERMINAL_S):
                    data = os.read(output, 1 << 16)
                    if not data:
                        break
                    last = time.monotonic()
                    *whole, rest = (rest + data).split(b"\n")
                    for raw in whole:
                        line = raw.decode(errors="replace").rstrip()
                        progress(line)
                        yield line
                progress()
                if time.monotonic() - last > _SILENCE_S:
                    raise subprocess.TimeoutExpired(each.command, _SILENCE_S)
            if rest:
                yield rest.decode(errors="replace").rstrip()
        code = process.wait(timeout=60)
    finally:
        progress.end()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)
    if code:
        raise subprocess.CalledProcessError(code, each.command)


class _Progress:
    """Shows now and then what pip is at.

    Args:
        packages: Folder that it installs into.
    """

    _TELLING = re.compile(
        r"\s*(Collecting|Requirement|Downloading|Building|Preparing|Installing|Obtaining)\b"
    )

    def __init__(self, packages: Path | None) -> None:
        self.packages = packages
        self.start = self.shown = time.monotonic()
        self.doing = "starting"
        self.total = self.before = 0

    def __call__(self, line: str = "") -> None:
        """Take a line of output, and show what goes on if it is time to."""
        if line.startswith("Installing collected packages:"):
            # From here on pip says nothing, for a minute where disks are slow.
            self.total = line.count(",") + 1
            self.before = self._count()
        if self._TELLING.match(line):
            self.doing = re.split(r": | \(", line.strip())[0][:60]
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        if now - self.shown < (_TERMINAL_S if terminal else _HEARTBEAT_S):
            return
        self.shown = now
        text = f"    {now - self.start:.0f} s: {self.doing}"
        if self.total > 1:
            done = min(max(self._count() - self.before, 0), self.total)
            text += f", {done} of {self.total}"
        if terminal:
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()
        else:
            say(text)

    def end(self) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def _count(self) -> int:
        return len(list(self.packages.glob("*.dist-info"))) if self.packages else 0
