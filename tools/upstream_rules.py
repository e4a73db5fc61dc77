"""What vLLM's contribution rules ask of a patch, as far as a program can tell.

Each function takes text and yields `(rule, what is wrong)`. The rules are those of
`AGENTS.md`, the pull request template, the contributing guide and the hooks in
`.pre-commit-config.yaml` of the pinned base.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

TITLE = re.compile(r"(\[[^][]+\])+ +\S.*")

SECTIONS = ("Purpose", "Test Plan", "Test Result")

# Changed lines beyond which upstream expects an RFC, and folders that do not count.
MAX_LINES = 500
UNCOUNTED = ("tests/", "docs/", "csrc/", "benchmarks/")

SPDX = (
    "SPDX-License-Identifier: Apache-2.0",
    "SPDX-FileCopyrightText: Copyright contributors to the vLLM project",
)
_COMMENT = {".py": "# ", ".rs": "// ", ".proto": "// "}

_FENCE = re.compile(r"^\s*(```|~~~)")
_HEADING = re.compile(r"^## +(.+?) *$")
_TRAILER = re.compile(r"^[A-Za-z][A-Za-z-]*-by: +\S")
AI = re.compile(r"\bAI\b[-\s]+assist", re.IGNORECASE)
DUPLICATE = re.compile(r"duplicat|pull requests?\b|\bPRs?\b", re.IGNORECASE)
_TEMPLATE = re.compile(r"BEFORE SUBMITTING|PLEASE FILL IN")
_RFC = re.compile(
    r"\bRFC\b[^\n]*(#\d+|vllm-project/vllm/issues/\d+)"
    r"|(#\d+|vllm-project/vllm/issues/\d+)[^\n]*\bRFC\b"
)

# Words that mean something here and nothing upstream. `[k]` keeps this file from
# matching itself.
PRIVATE = {
    "overlay/": re.compile(r"(?<![\w-])overlay/"),
    "patches/": re.compile(r"(?<![\w-])patches/"),
    "build/vllm": re.compile(r"\bbuild/vllm\b"),
    "the workshop": re.compile(r"\bworkshop\b", re.IGNORECASE),
    "a path below /tmp": re.compile(r"(?<![\w.])/tmp/"),
    "a path of one machine": re.compile(
        r"(?<![\w.-])/wor[k](?![\w-])|(?<![\w.])/(home|Users)/[a-z][\w.-]*/"
    ),
}


def message_problems(message: str) -> Iterator[tuple[str, str]]:
    """What is wrong with a commit message: title, body, trailers."""
    title, _, body = message.partition("\n")
    if not TITLE.fullmatch(title):
        yield "title", f"{title!r} is not of the form `[Area] Imperative sentence`."
    found = sections(body)
    for name in SECTIONS:
        if name not in found:
            yield "body", f"There is no `## {name}`."
        elif not found[name]:
            yield "body", f"`## {name}` is empty."
    if match := _TEMPLATE.search(message):
        yield "body", f"{match[0]!r} of upstream's template is left in."
    if not AI.search(body):
        yield "ai", "The body does not say that AI assistance was used."
    if not DUPLICATE.search(body):
        yield (
            "ai",
            "The body does not say why this is no duplicate of an open pull request.",
        )
    last = body.strip().rsplit("\n\n", 1)[-1]
    if not re.search(r"^Co-authored-by: +\S", last, re.MULTILINE | re.IGNORECASE):
        yield "ai", "There is no `Co-authored-by:` trailer in the last paragraph."
    if re.search(r"^Signed-off-by:", message, re.MULTILINE | re.IGNORECASE):
        yield "signoff", "`Signed-off-by:` is for the human who submits it to add."


def sections(body: str) -> dict[str, str]:
    """Text below each `## Heading`, without the trailers at the end."""
    lines = body.rstrip().split("\n")
    while lines and (_TRAILER.match(lines[-1]) or not lines[-1].strip()):
        lines.pop()
    found: dict[str, list[str]] = {}
    name = None
    fenced = False
    for line in lines:
        fenced ^= bool(_FENCE.match(line))
        heading = None if fenced else _HEADING.match(line)
        if heading:
            name = heading[1]
            found.setdefault(name, [])
        elif name is not None:
            found[name].append(line)
    return {name: "\n".join(text).strip() for name, text in found.items()}


def unsaid_tests(names: Iterable[str], plan: str) -> list[str]:
    """Test files that a Test Plan names neither by themselves nor by a folder."""
    words = {word.strip("`'\"(),").split("::")[0].rstrip("/") for word in plan.split()}
    # All of `tests` would name none.
    return [
        name
        for name in names
        if not {name, *(str(path) for path in Path(name).parents[:-2])} & words
    ]


def product_lines(changed: Iterable[tuple[str, int]]) -> int:
    """How many of the changed lines count."""
    return sum(count for path, count in changed if not path.startswith(UNCOUNTED))


def size_problems(
    changed: Iterable[tuple[str, int]], message: str
) -> Iterator[tuple[str, str]]:
    """Whether a patch is too large to go without an RFC.

    Args:
        changed: Path and number of changed lines of each file.
    """
    total = product_lines(changed)
    if total > MAX_LINES and not _RFC.search(message):
        yield (
            "size",
            f"{total} lines change outside {', '.join(UNCOUNTED)}; above {MAX_LINES} "
            "upstream wants an RFC: link it (`RFC: #123`) or split the patch.",
        )


def private_words(where: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Words that must not reach upstream.

    Args:
        where: What the lines are of, for the message.
    """
    for number, line in enumerate(lines, 1):
        for word, form in PRIVATE.items():
            if form.search(line):
                yield "private", f"{where}:{number} names {word}: {line.strip()[:80]}"


def file_problems(path: str, data: bytes) -> Iterator[tuple[str, str]]:
    """What is wrong with a new file's name or header."""
    if " " in path:
        yield "filename", f"{path!r}: upstream allows no space in a file name."
    suffix = path[path.rfind(".") :] if "." in path else ""
    comment = _COMMENT.get(suffix)
    if comment is None or not data:
        return
    lines = {line.strip() for line in data.decode(errors="replace").splitlines()}
    for text in SPDX:
        if comment + text not in lines:
            yield "spdx", f"{path} has no line `{comment}{text}`."
