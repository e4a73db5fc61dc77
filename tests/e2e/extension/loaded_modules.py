"""Tells which of AFD's modules a process has imported."""

from __future__ import annotations

import os
import sys

# Types of fields of vLLM's own config and statistics: data, and no more.
_DATA = {"vllm.config.afd", "vllm.v1.metrics.afd"}


def afd_modules() -> list[str]:
    """Modules of AFD in this process, without those that only hold data."""
    return sorted(
        name
        for name in sys.modules.keys() - _DATA
        if name.startswith("vllm.") and "afd" in name
    )


class LoadedModules:
    """A method for `collective_rpc` that a worker gets."""

    def loaded_modules(self) -> tuple[int, list[str]]:
        """Process and modules of AFD."""
        return os.getpid(), afd_modules()
