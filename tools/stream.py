"""Lines of a streamed HTTP answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def lines_of(parts: Iterable[bytes]) -> Iterator[str]:
    """Lines of an answer, from its bytes as they come.

    They end at a newline only: clients that follow `str.splitlines` end one at U+2028
    and U+0085, too, which the text of a completion may have.
    """
    rest = b""
    for part in parts:
        *complete, rest = (rest + part).split(b"\n")
        for line in complete:
            yield line.removesuffix(b"\r").decode()
    if rest:
        yield rest.decode()
