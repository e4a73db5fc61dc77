from __future__ import annotations

from pathlib import Path

import pytest
from built import layout_fixture, mark_built  # noqa: F401
from engines import Engines, lacking

from tools.layout import Layout

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_built(items, HERE)


@pytest.fixture(scope="session")
def engines(layout: Layout) -> Engines:
    return Engines(layout)


@pytest.fixture
def device(layout: Layout, request: pytest.FixtureRequest) -> str:
    """`cpu` or `cuda`: the test is skipped where vLLM cannot run on it."""
    if reason := lacking(layout, request.param):
        pytest.skip(reason)
    return request.param
