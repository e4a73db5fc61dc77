"""A program that measures, asked over its stdin and answering on its stdout."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Of what a program is asked, also to begin.
RUN_TIMEOUT_S = 300


class Program:
    """The program at work; each answer is a line of JSON.

    Args:
        command: The program and its arguments.
        env: Its environment.
        log: What it writes to stderr is added to this file.
    """

    def __init__(self, command: Sequence[str], env: dict[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command,
                env=env,
                cwd=log.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                process_group=0,
            )
        self.log = log
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)

    def tell(self, line: str) -> None:
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, name: str, *arguments: Any) -> Any:
        """What a method of the program returns; see `answer`."""
        self.tell(json.dumps([name, *arguments]))
        return self.read(RUN_TIMEOUT_S)

    def read(self, timeout: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            RuntimeError: There is none within `timeout` seconds, or it has ended.
        """
        # The program writes a line at once, so what can be read is a whole line.
        if not self.selector.select(timeout):
            raise RuntimeError(f"The engine said nothing for {timeout} s: {self.log}")
        line = self.process.stdout.readline()
        if not line:
            last = self.log.read_text(errors="replace").splitlines()[-3:]
            raise RuntimeError("\n".join([f"The engine has ended: {self.log}", *last]))
        return json.loads(line)

    def stop(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.selector.close()


def answer(make: Callable[[], Any]) -> Any:
    """Be the program: say `versions()` of an object, then call its methods as asked.

    Args:
        make: Makes it. What it prints goes to stderr.

    Returns:
        The object, when nothing more is asked.
    """
    # vLLM logs to stdout, which is for the answers here.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    program = make()
    print(json.dumps(program.versions()), file=answers)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(program, name)(*arguments)), file=answers)
    return program


def vllm_versions() -> dict[str, str]:
    """Of what this program runs."""
    import torch
    import vllm

    return {"vllm": vllm.__version__, "torch": torch.__version__}
