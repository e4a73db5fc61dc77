"""What the doctor says."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: `ok`, `warning` or `error`.
        name: Stable name of the thing, e.g. `kernel-stale`.
        what: What was found.
        why: Why it matters, and what was expected.
        todo: What to do.
    """

    level: str
    name: str
    what: str
    why: str = ""
    todo: str = ""
