from __future__ import annotations

from pathlib import Path

import pytest
from engines import Engines, lacking

from tools.layout import Layout

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.built)


@pytest.fixture(scope="session")
def layout() -> Layout:
    return Layout.default()


@pytest.fixture(scope="session")
def engines(layout: Layout) -> Engines:
    return Engines(layout)


@pytest.fixture
def device(layout: Layout, request: pytest.FixtureRequest) -> str:
    """`cpu` or `cuda`: the test is skipped where vLLM cannot run on it."""
    if reason := lacking(layout, request.param):
        pytest.skip(reason)
    return request.param
