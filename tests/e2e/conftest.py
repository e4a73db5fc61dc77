from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import DBO, Jobs, Kind

from tools.layout import Layout

HERE = Path(__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "engines(*kinds, model): engines whose results a test compares; the model is "
        "the test's parameter of that name unless given",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.built)


@pytest.fixture(scope="session")
def layout() -> Layout:
    return Layout.default()


@pytest.fixture(scope="session")
def jobs(layout: Layout, request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """The engines of all collected tests, two at work at a time."""
    wanted: dict[tuple[Kind, str], None] = {}
    for item in request.session.items:
        for engines in item.iter_markers("engines"):
            model = engines.kwargs.get("model")
            for kind in engines.args:
                wanted[kind, model or item.callspec.params["model"]] = None
    # The slowest first, so that the last one does not run alone for long.
    started = Jobs(layout, sorted(wanted, key=lambda key: key[0] is not DBO))
    yield started
    started.stop()
