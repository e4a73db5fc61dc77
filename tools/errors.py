"""Errors that a user can act on."""

from __future__ import annotations


class WorkshopError(Exception):
    """A failure that is reported without a traceback.

    Args:
        what: What failed, in one sentence that names the file, flag or value.
        why: What was found, and what was expected. May have several lines.
        todo: What to do next. May have several lines.
    """

    def __init__(self, what: str, why: str = "", todo: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.todo = todo

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.todo) if part)
