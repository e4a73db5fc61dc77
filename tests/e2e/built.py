"""What all folders of tests that need the built environment have."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tools.layout import Layout


def mark_built(items: Iterable[pytest.Item], folder: Path) -> None:
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.built)


@pytest.fixture(scope="session", name="layout")
def layout_fixture() -> Layout:
    return Layout.default()
