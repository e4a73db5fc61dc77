"""A plugin of pytest: without compiled files, tests that call a kernel are skipped.

It is loaded by path into vLLM's own tests; nothing here may import the workshop.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest

_SIGN = re.compile(
    r"'_OpNamespace' '\w+' object has no attribute"
    r"|No module named 'vllm\._\w*C\w*'"
    r"|torch\.ops\._\w*C\w*"
)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, None]:
    outcome = yield
    report = outcome.get_result()
    if not report.failed or call.excinfo is None:
        return
    shown = report.longreprtext + "".join(text for _, text in report.sections)
    if match := _SIGN.search(shown):
        path, line, _ = item.location
        report.outcome = "skipped"
        why = f"Skipped: needs compiled kernels ({match[0]})"
        report.longrepr = (path, line or 0, why)
