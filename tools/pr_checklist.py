"""Upstream's checklist for one patch: what passes, what fails, what is a human's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tools.upstream_hooks import Outcome

PASS, FAIL, HUMAN = "pass", "fail", "a human's"

# What only a human can do or vouch for; no program ticks these.
HUMANS = (
    ("signed-off", "Signed-off-by of the human who submits it, on each commit"),
    ("author", "the author is that human: the patch carries a placeholder"),
    ("reviewed", "“I reviewed every line and can defend it”"),
    ("gpu", "run on a GPU what the Test Plan names"),
    ("duplicates", "search upstream's open pull requests and issues again"),
    ("evaluation", "evaluation results, if the output of a model can change"),
    ("push", "push the branch and open the pull request"),
)
# Rules of `check` that are items here, and what they are called.
RULES = {
    "title": "title is `[Area] Imperative sentence`",
    "body": "Purpose, Test Plan and Test Result are there and not empty",
    "ai": "AI statement, why it is no duplicate, Co-authored-by",
    "signoff": "no Signed-off-by is made up",
    "size": "at most 500 product lines, or an RFC is linked",
    "private": "nothing of this repository is named",
    "init": "new folders under vllm/ are packages",
    "spdx": "new source files have the SPDX lines",
    "filename": "no space in a file name",
    "mail": "the mail is well formed",
}


@dataclass(frozen=True)
class Item:
    """One line of the checklist.

    Attributes:
        verdict: `PASS`, `FAIL` or `HUMAN`.
        detail: What was found, or what is to be done; may have several lines.
    """

    name: str
    verdict: str
    what: str
    detail: str = ""


def rule_items(problems: Iterable[tuple[str, str]]) -> list[Item]:
    """Items of the rules that `check` knows.

    Args:
        problems: Rule and message of what is wrong with the patch.
    """
    found: dict[str, list[str]] = {}
    for rule, message in problems:
        found.setdefault(rule, []).append(message)
    return [
        Item(
            rule, FAIL if rule in found else PASS, what, "\n".join(found.get(rule, []))
        )
        for rule, what in RULES.items()
    ]


def hook_items(outcomes: Iterable[Outcome]) -> list[Item]:
    """Items of upstream's hooks; those with no file to look at are left out."""
    items = []
    for one in outcomes:
        what = f"upstream's hook, {one.files} file{'' if one.files == 1 else 's'}"
        if one.by_hand:
            detail = f"Run it where it can be run: {one.by_hand}."
            items.append(Item(one.hook, HUMAN, what, detail))
        elif one.findings:
            detail = "\n".join(finding.message for finding in one.findings)
            items.append(Item(one.hook, FAIL, what, detail))
        elif one.files:
            items.append(Item(one.hook, PASS, what))
    return items


def human_items() -> list[Item]:
    return [Item(name, HUMAN, what) for name, what in HUMANS]


def failed(items: Sequence[Item]) -> list[Item]:
    return [item for item in items if item.verdict == FAIL]


def text(title: str, items: Sequence[Item]) -> str:
    """The checklist as Markdown; a human's boxes are open, none is ticked."""
    lines = [f"# {title}", ""]
    for verdict, heading in (
        (FAIL, "Fails"),
        (HUMAN, "A human's"),
        (PASS, "Passes"),
    ):
        chosen = [item for item in items if item.verdict == verdict]
        if not chosen:
            continue
        lines += [f"## {heading}", ""]
        for item in chosen:
            box = "[ ] " if verdict == HUMAN else ""
            lines.append(f"- {box}**{item.name}**: {item.what}")
            if item.detail:
                lines += ["", "  ```text"]
                lines += [f"  {line}" for line in item.detail.splitlines()]
                lines += ["  ```", ""]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
