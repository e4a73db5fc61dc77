from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from built import layout_fixture, mark_built  # noqa: F401
from jobs import Jobs
from pairs import pair  # noqa: F401  A fixture.

from tools.layout import Layout

HERE = Path(__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "engines(*kinds, model): engines whose results a test compares; the model is "
        "the test's parameter of that name unless given",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_built(items, HERE)


@pytest.fixture(scope="session")
def all_jobs(layout: Layout) -> Iterator[Jobs]:
    started = Jobs(layout)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def jobs(all_jobs: Jobs, request: pytest.FixtureRequest) -> Jobs:
    """Engines, two at work at a time; those of the module's tests are started.

    Not those of later modules too, which may have servers to start meanwhile.
    """
    for item in request.session.items:
        if item.path != request.path:
            continue
        for engines in item.iter_markers("engines"):
            model = engines.kwargs.get("model")
            for kind in engines.args:
                all_jobs.start(kind, model or item.callspec.params["model"])
    return all_jobs
