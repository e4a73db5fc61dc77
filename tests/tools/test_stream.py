from __future__ import annotations

from tools.stream import lines_of


def test_a_text_may_have_any_character() -> None:
    """Among them some that `str.splitlines` takes for the end of a line."""
    line = 'data: {"text": "a\u2028b\x85c\x0bd"}'
    sent = f"{line}\r\n\ndata: [DONE]\nthe end".encode()
    for size in (1, 2, 7, len(sent)):
        parts = [sent[at : at + size] for at in range(0, len(sent), size)]
        assert list(lines_of(parts)) == [line, "", "data: [DONE]", "the end"]
