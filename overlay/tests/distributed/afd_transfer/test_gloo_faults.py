# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whatever the peer does, the survivor has a named error, in time, and lives on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import gloo_faults
from .utils import ATTENTION_PEER, FFN_PEER

pytestmark = pytest.mark.skip_global_cleanup

# More show what happens seldom, in minutes a case.
REPETITIONS = int(os.environ.get("AFD_FAULT_REPETITIONS", "3"))
REPOSITORY = Path(__file__).parents[3]


@pytest.mark.skipif(sys.platform != "linux", reason="stops and forks processes")
@pytest.mark.parametrize("case", gloo_faults.CASES)
def test_fault(case: str):
    # A hang is ended by the timeout, a crash of gloo's thread is the exit status.
    result = subprocess.run(
        [sys.executable, "-m", gloo_faults.__name__, case, str(REPETITIONS)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    errors = json.loads(result.stdout.splitlines()[-1])
    assert len(errors) == REPETITIONS
    for error in errors:
        assert error.startswith((ATTENTION_PEER, FFN_PEER)), error
