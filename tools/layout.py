"""Where everything is in this repository."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """Paths of one checkout of this repository.

    Args:
        root: Directory that holds `vllm.pin`.
    """

    root: Path

    @classmethod
    def default(cls) -> Layout:
        return cls(Path(__file__).resolve().parent.parent)

    @property
    def pin(self) -> Path:
        return self.root / "vllm.pin"

    @property
    def ports_pin(self) -> Path:
        """The other releases that the series is ported to."""
        return self.root / "ports.pin"

    @property
    def sdist_files(self) -> Path:
        """List of the base's files, one path a line."""
        return self.root / "vllm.files"

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def series(self) -> Path:
        return self.patches / "series"

    @property
    def trials(self) -> Path:
        """Trials of `each` that are kept from checkout to checkout."""
        return self.patches / "trials.json"

    def port_overrides(self, version: str) -> Path:
        """What differs on another release: mails, and how each patch fared."""
        return self.patches / "ports" / version

    def port_mend(self, version: str) -> Path:
        """What another release itself needs to run, of no patch of the series."""
        return self.port_overrides(version) / "base.diff"

    @property
    def overlay(self) -> Path:
        return self.root / "overlay"

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def tree(self) -> Path:
        """The patched tree, a git repository of its own."""
        return self.build / "vllm"

    @property
    def base(self) -> Path:
        """The unpatched tree, the reference that tests compare with."""
        return self.build / "base"

    @property
    def port_trees(self) -> Path:
        """Holds a folder for each release that the series is put on."""
        return self.build / "port"

    def port(self, version: str) -> Path:
        """Where the series is put on another release."""
        return self.port_trees / version

    @property
    def cache(self) -> Path:
        """Downloads, by file name. `VLLM_AFD_CACHE` moves them elsewhere."""
        moved = os.environ.get("VLLM_AFD_CACHE")
        return Path(moved).expanduser() if moved else self.build / "cache"

    @property
    def reports(self) -> Path:
        return self.build / "reports"

    @property
    def venv(self) -> Path:
        """The patched environment."""
        return self.root / ".venv"

    @property
    def base_venv(self) -> Path:
        return self.base / ".venv"

    def relative(self, path: Path) -> str:
        """`path` as a user of this checkout would type it."""
        try:
            return str(path.relative_to(self.root))
        except ValueError:
            return str(path)


def venv_python(venv: Path) -> Path:
    return venv / "bin" / "python"


def running_in(venv: Path) -> bool:
    """Whether this process is run by the interpreter of `venv`."""
    return Path(sys.prefix).resolve() == venv.resolve()
