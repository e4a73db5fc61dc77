"""What a pull request says: its title and its body, from a patch's message."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tools.series import Patch
from tools.upstream_rules import SECTIONS, sections

_FENCE = re.compile(r"\s*(```|~~~)")
_ITEM = re.compile(r"\s*([-*+]|\d+[.)]) ")
# Lines that stand alone: headings, tables, quotes, comments, indented code.
_ALONE = re.compile(r"#{1,6} |\||>|<!--| {4}")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\[#])")


@dataclass(frozen=True)
class Prerequisite:
    """A patch that this one is built on.

    Attributes:
        title: Of its pull request.
        branch: That `make pr` makes of it.
    """

    slug: str
    title: str
    branch: str


def pull_request(
    message: str, patch: Patch, prerequisites: Sequence[Prerequisite]
) -> str:
    """Title, an empty line, and the body, as GitHub shows it.

    The body is the commit's message without trailers: upstream squashes a pull
    request into a commit with just that message.
    """
    title, _, body = message.partition("\n")
    found = sections(body)
    order = [*SECTIONS, *(name for name in found if name not in SECTIONS)]
    parts = [title]
    parts += [f"## {name}\n\n{unwrap(found[name])}" for name in order if name in found]
    if prerequisites:
        rows = [f"- `{one.title}` (branch `{one.branch}`)" for one in prerequisites]
        parts.append(
            "## Prerequisites\n\nThe commits before the last one are pull requests of "
            "their own:\n\n" + "\n".join(rows)
        )
    # GitHub makes a link of `#123`; what the text already names needs none.
    if related := [name for name in patch.meta.upstream if name not in body]:
        parts.append("## Related\n\n" + "\n".join(f"- {name}" for name in related))
    return "\n\n".join(parts) + "\n"


def unwrap(text: str) -> str:
    """Join the lines of paragraphs and list items: GitHub shows each as a line."""
    out: list[str] = []
    fenced = joins = False
    for line in text.split("\n"):
        if _FENCE.match(line):
            fenced = not fenced
            out.append(line)
            joins = False
        elif fenced or not line.strip():
            out.append(line)
            joins = False
        elif _ITEM.match(line):
            out.append(line)
            joins = True
        elif joins:
            out[-1] = f"{out[-1].rstrip()} {line.strip()}"
        else:
            out.append(line)
            joins = not _ALONE.match(line)
    return "\n".join(out)


def sentence_with(text: str, form: re.Pattern[str]) -> str:
    """The first sentence of a text that a form is found in; empty if none."""
    for paragraph in text.split("\n\n"):
        flat = " ".join(paragraph.split())
        for sentence in _SENTENCE.split(flat):
            if form.search(sentence):
                return sentence
    return ""
