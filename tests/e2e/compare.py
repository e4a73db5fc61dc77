"""Equality of what two engines or servers generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# fp32, of the natural logarithm of a probability.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Difference:
    """How far two results are apart.

    Attributes:
        token: (request, position) of the first token that differs, None if equal.
        logprob: Largest difference of a logprob that both report, up to there.
        at: (request, position) of that.
    """

    token: tuple[int, int] | None
    logprob: float
    at: tuple[int, int] | None = None

    @property
    def equal(self) -> bool:
        return self.token is None and self.logprob <= TOLERANCE

    @property
    def identical(self) -> bool:
        return self.token is None and self.logprob == 0


def difference(one: dict[str, Any], other: dict[str, Any]) -> Difference:
    """Compare token ids and logprobs, per request and position.

    Args:
        one: `tokens`: a list of token ids per request; `logprobs`: per request and
            position, logprobs by token, the chosen one among them.
    """
    counts = [[len(row) for row in result["tokens"]] for result in (one, other)]
    if counts[0] != counts[1]:
        raise AssertionError(f"Numbers of tokens differ: {counts[0]}, {counts[1]}.")
    largest, at = 0.0, None
    for request, tokens in enumerate(one["tokens"]):
        for position, token in enumerate(tokens):
            rows = [
                {str(key): value for key, value in rows[request][position].items()}
                for rows in (one["logprobs"], other["logprobs"])
            ]
            both = rows[0].keys() & rows[1].keys()
            far = max((abs(rows[0][key] - rows[1][key]) for key in both), default=0)
            if far > largest:
                largest, at = far, (request, position)
            if other["tokens"][request][position] != token:
                return Difference((request, position), largest, at)
            if str(token) not in both:
                raise AssertionError(f"No logprob of the chosen token {token}.")
    return Difference(None, largest, at)


def ambiguous(result: dict[str, Any]) -> list[tuple[int, int]]:
    """(request, position) where within the tolerance another token could be the best.

    Args:
        result: As `difference` takes it, with two logprobs or more at each position.
    """
    return [
        (request, position)
        for request, rows in enumerate(result["logprobs"])
        for position, row in enumerate(rows)
        if gap(row) <= 2 * TOLERANCE
    ]


def gap(row: dict[Any, float]) -> float:
    """Between the two best logprobs."""
    best, second = sorted(row.values(), reverse=True)[:2]
    return best - second
