# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import pytest


@pytest.fixture
def no_leaks(monkeypatch):
    """A test of the control plane leaves no thread and no socket behind."""
    from .message_utils import afd_threads, sockets, wait_until

    monkeypatch.delenv("VLLM_AFD_SECRET", raising=False)
    before = sockets()
    yield
    wait_until(lambda: not afd_threads(), f"the end of {afd_threads()}")
    wait_until(lambda: sockets() <= before, f"the end of {sockets() - before}")
