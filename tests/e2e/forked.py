"""The end of a forked process; for the interpreters that run vLLM."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def run_and_exit(function: Callable[[], object]) -> NoReturn:
    """Run a function, and end with status 0, or with 1 if it raised.

    What the parent has to do at its end is not done here too.
    """
    code = 1
    try:
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
