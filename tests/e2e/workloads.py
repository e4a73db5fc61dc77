"""What the engines are given: seeded prompts, when they arrive, when to split."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MODELS = ("tiny-qwen3-moe", "tiny-mixtral", "tiny-deepseek-v2")
# Above any step's number of tokens.
NEVER = 10**9
# Of the KV cache, in tokens; MLA on a CPU has another one.
BLOCK_SIZE = 32
# Runs also what takes too long for every `make test`.
FULL = os.environ.get("E2E_FULL") == "1"
# Under these no model here has two best tokens that are as good as equal
# (test_engine.py looks).
SHARED_SEEDS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Workload:
    """Prompts for one engine, and the thresholds under which it splits.

    Attributes:
        prompts: Token ids of each prompt.
        decode: Decode threshold, in tokens.
        prefill: Prefill threshold, in tokens.
        arrivals: Engine step at which each prompt is added; all at once if empty.
        max_tokens: Of each prompt, or of all.
        budget: Most tokens a step may have (`max_num_batched_tokens`), which cuts
            longer prefills into chunks.
        splits: Steps that must be split, where the workload was made for a number.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    decode: int = NEVER
    prefill: int = NEVER
    arrivals: tuple[int, ...] = ()
    max_tokens: int | tuple[int, ...] = 4
    budget: int | None = None
    splits: int | None = None

    def spec(self, dbo: bool = True, fault: str | None = None) -> dict[str, Any]:
        """The workload as tests/e2e/worker.py reads it."""
        return {
            "prompts": self.prompts,
            "arrivals": self.arrivals or (0,) * len(self.prompts),
            "max_tokens": self.max_tokens
            if isinstance(self.max_tokens, tuple)
            else (self.max_tokens,) * len(self.prompts),
            "budget": self.budget,
            "thresholds": (self.decode, self.prefill) if dbo else None,
            "fault": fault,
        }

    def must_split(self, step: dict[str, Any]) -> bool:
        """Whether a step is to be split: its kind decides which threshold counts."""
        tokens = sum(step["tokens"])
        return tokens >= (self.prefill if step["prefill"] else self.decode)


@dataclass
class _Prompts:
    """Distinct prompts from one seed."""

    seed: int
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def __call__(self, *lengths: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(self.random.randrange(256) for _ in range(length))
            for length in lengths
        )


def decode_batches() -> Iterator[Workload]:
    """1 to 9 requests that decode together, each step split in two."""
    prompts = _Prompts(1)
    for count in range(1, 10):
        lengths = [prompts.random.randrange(3, 20) for _ in range(count)]
        yield Workload(
            f"decode-{count}",
            prompts(*lengths),
            decode=2,
            splits=0 if count == 1 else 3,
        )


def prefills() -> Iterator[Workload]:
    """Prefills alone and together; the first is one request in both ubatches."""
    prompts = _Prompts(2)
    for lengths in ((101,), (2,), (3,), (1, 1), (40, 90, 33), (32,) * 4, (64, 1, 7)):
        name = "-".join(map(str, lengths))
        yield Workload(
            f"prefill-{name}", prompts(*lengths), prefill=2, max_tokens=3, splits=1
        )


def thresholds() -> Iterator[Workload]:
    """One token below, at and above each threshold."""
    prompts = _Prompts(3)
    for count in (4, 5, 6):
        yield Workload(
            f"threshold-decode-{count}-of-5",
            prompts(*[6] * count),
            decode=5,
            max_tokens=3,
            splits=0 if count < 5 else 2,
        )
    for length in (39, 40, 41):
        yield Workload(
            f"threshold-prefill-{length}-of-40",
            prompts(length),
            prefill=40,
            max_tokens=2,
            splits=int(length >= 40),
        )
    # A step in which one request decodes and another prefills counts as prefill,
    # however low the decode threshold is. Once both decode, they split.
    for length in (48, 49, 50):
        yield Workload(
            f"threshold-mixed-{length + 1}-of-50",
            prompts(10, length),
            decode=2,
            prefill=50,
            arrivals=(0, 2),
            max_tokens=6,
            splits=3 + int(length >= 49),
        )


def mixed() -> Iterator[Workload]:
    """Requests that join while others decode, and prefills in chunks."""
    prompts = _Prompts(4)
    yield Workload(
        "mixed",
        prompts(10, 20, 60, 37, 5),
        decode=2,
        prefill=2,
        arrivals=(0, 0, 2, 4, 5),
        max_tokens=6,
    )
    yield Workload(
        "chunked",
        prompts(10, 20, 180, 37, 5, 90),
        decode=2,
        prefill=2,
        arrivals=(0, 0, 2, 4, 5, 6),
        max_tokens=6,
        budget=64,
    )
    # The last chunk of the long prompt is one token.
    yield Workload("chunk-of-one", prompts(65, 129), decode=2, prefill=2, budget=64)


def randoms(count: int = 20) -> Iterator[Workload]:
    for seed in range(count):
        prompts = _Prompts(100 + seed)
        rng = prompts.random
        requests = rng.randrange(1, 9)
        yield Workload(
            f"random-{seed}",
            prompts(
                *(
                    rng.choice((1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 100))
                    for _ in range(requests)
                )
            ),
            decode=rng.choice((2, 3, 5)),
            prefill=rng.choice((2, 17, 64)),
            arrivals=tuple(rng.randrange(5) for _ in range(requests)),
            budget=rng.choice((None, 64)),
        )


def prefix_hits() -> Iterator[Workload]:
    """A request that finds in the prefix cache what the same step computes.

    A batch is sorted by the number of tokens to compute, so the tails decide which
    of the two comes first.
    """
    prompts = _Prompts(5)
    (prefix,) = prompts(2 * BLOCK_SIZE)
    for name, tail in (("before", 5), ("behind", 70)):
        writer, reader, other = prompts(3, tail, 40)
        yield Workload(
            f"hit-{name}-its-writer",
            (prefix + writer, prefix + reader, other),
            prefill=2,
        )


def shared(requests: int = 200) -> Iterator[Workload]:
    """Requests that share prefixes and come in bursts, as in conversations.

    Each conversation has a prefix of its own, and the first of its requests often
    come together: then one finds in the prefix cache what another computes in the
    same step.
    """
    for seed in SHARED_SEEDS if FULL else SHARED_SEEDS[:1]:
        prompts = _Prompts(200 + seed)
        rng = prompts.random
        rows: list[tuple[int, ...]] = []
        arrivals: list[int] = []
        at = 0
        while len(rows) < requests:
            (prefix,) = prompts(rng.choice((32, 33, 47, 64, 65, 96, 101, 128, 160)))
            for _ in range(rng.randrange(4, 12)):
                (tail,) = prompts(rng.choice((1, 2, 3, 5, 7, 15, 17, 31, 33, 50)))
                rows.append(prefix + tail)
                arrivals.append(at)
                if rng.random() < 0.2:
                    (other,) = prompts(rng.choice((1, 2, 3, 9, 30, 61, 100)))
                    rows.append(other)
                    arrivals.append(at)
                at += rng.choice((0, 0, 0, 1, 1, 2))
            at += rng.choice((0, 3, 6))
        yield Workload(
            f"shared-{seed}",
            tuple(rows[:requests]),
            decode=3,
            prefill=17,
            arrivals=tuple(arrivals[:requests]),
            max_tokens=tuple(rng.randrange(1, 6) for _ in range(requests)),
            budget=(None, 160)[seed % 2],
        )


# One that goes on for long, of which the reference only is an engine.
LONG_DECODE = Workload("long-decode", ((7,) * 3,), max_tokens=200)


def everything() -> dict[str, Workload]:
    made = (
        decode_batches(),
        prefills(),
        thresholds(),
        mixed(),
        randoms(),
        prefix_hits(),
        shared(),
    )
    return {workload.name: workload for group in made for workload in group}


# Fault -> workload that must betray it.
CONTROLS = {
    "second_seq_lens_off_by_one": "decode-3",
    "merged_in_wrong_order": "decode-3",
    "straddling_request_not_truncated": "prefill-101",
}
# Runs of engines that compile or have a prefix cache, beside `shared-*`.
IN_EVERY_MODE = (
    "decode-1",
    "decode-2",
    "decode-5",
    "decode-9",
    "prefill-2",
    "prefill-101",
    "prefill-64-1-7",
    "mixed",
    "chunked",
    "chunk-of-one",
    "random-3",
    "hit-before-its-writer",
    "hit-behind-its-writer",
)
