"""The two hosts of `make test-network`, where a machine cannot have them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

E2E = Path(__file__).resolve().parents[1] / "e2e"


@pytest.fixture(autouse=True)
def _e2e(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(E2E))


@pytest.mark.parametrize("tool", ["ip", "nsenter", "unshare"])
def test_a_missing_tool_is_named(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hosts import Network, NoHosts

    which = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name: None if name == tool else (which(name) or name)
    )
    with pytest.raises(NoHosts, match=rf"there is no {tool}\."):
        Network()


def test_without_the_right_to_make_namespaces() -> None:
    without: list[str] = []
    if os.geteuid() == 0:
        without = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
        if shutil.which(without[0]) is None:
            pytest.skip("there is no setpriv, which takes rights from root")
    done = subprocess.run(
        [
            *without,
            sys.executable,
            str(E2E / "wire.py"),
            "198.18.0.1/24",
            "198.18.0.2/24",
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert '"error"' in done.stdout
    assert "Operation not permitted" in done.stdout
