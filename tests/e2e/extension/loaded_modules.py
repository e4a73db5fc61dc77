"""Tells which of AFD's modules a process has imported."""

from __future__ import annotations

import os
import sys


def afd_modules() -> list[str]:
    """Modules of AFD in this process; its config is one of vLLM's configs."""
    return sorted(
        name
        for name in sys.modules
        if name.startswith("vllm.") and "afd" in name and name != "vllm.config.afd"
    )


class LoadedModules:
    """A method for `collective_rpc` that a worker gets."""

    def loaded_modules(self) -> tuple[int, list[str]]:
        """Process and modules of AFD."""
        return os.getpid(), afd_modules()
