"""Every test that docs/cases.md names is there."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tools.layout import Layout

LAYOUT = Layout.default()
CASES = (LAYOUT.root / "docs" / "cases.md").read_text()
# `file.py::test[parameters]`, or without the file of the test before it.
_TEST = re.compile(r"`(test_\w+\.py)?::(test_\w+)(?:\[([^]`]+)\])?`")


def added_lines() -> dict[str, str]:
    """What the hunks of all patches add, by file."""
    added: dict[str, str] = {}
    for mail in sorted(LAYOUT.patches.glob("*.patch")):
        for part in re.split(r"^diff --git ", mail.read_text(), flags=re.MULTILINE)[1:]:
            if to := re.search(r"^\+\+\+ b/(.+)$", part, re.MULTILINE):
                lines = re.findall(r"^\+(?!\+\+ )(.*\n)", part, re.MULTILINE)
                added[to[1]] = added.get(to[1], "") + "".join(lines)
    return added


ADDED = added_lines()


def rows() -> list[tuple[str, str]]:
    """Number of each case and what is said of its tests."""
    return re.findall(r"^\| (\d+) \| [^|]+ \| (.+) \|$", CASES, re.MULTILINE)


def named_tests() -> Iterator[tuple[str, str, str]]:
    """File, name and parameters of each test."""
    for _, text in rows():
        file = ""
        for other, name, parameters in _TEST.findall(text):
            file = other or file
            yield file, name, parameters


def texts_of(name: str) -> Iterator[str]:
    """Test files of that name, each with what later patches add to it."""
    for folder in (LAYOUT.root, LAYOUT.overlay):
        for path in sorted((folder / "tests").rglob(name)):
            where = path.relative_to(folder)
            added = ADDED.get(where.as_posix(), "") if folder == LAYOUT.overlay else ""
            yield path.read_text() + added


@pytest.mark.parametrize(("file", "name", "parameters"), sorted({*named_tests()}))
def test_it_is_there(file: str, name: str, parameters: str) -> None:
    found = [text for text in texts_of(file) if f"def {name}(" in text]
    assert found, f"{file} has no {name}"
    for parameter in filter(None, parameters.split(", ")):
        assert re.search(rf"\b{parameter}\b", found[0]), f"no {parameter} in {file}"


def test_every_row_is_read() -> None:
    numbers = [int(number) for number, _ in rows()]
    assert numbers == sorted({*numbers})
    assert len(numbers) == len(re.findall(r"^\| +\d", CASES, re.MULTILINE))
    # No test is written in another way, and none is without a file.
    named = re.findall(r"\btest_\w+\.py|::test_", CASES.partition("## ")[2])
    assert sum("::" in each for each in named) == len([*named_tests()])
    assert all(file for file, _, _ in named_tests())
