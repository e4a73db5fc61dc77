"""Draws one step of a timeline as a PNG, with Pillow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tools.trace import ROLES, Event, Session, Step

_WIDTH, _LEFT, _RIGHT, _TOP = 1600, 130, 24, 108
_LANE, _BAR, _THIN, _GAP = 84, 40, 10, 16
# Drawn larger, and shrunk: Pillow's own lines have steps.
_SCALE = 2

_PAGE, _BAND, _TEXT, _SOFT, _LINE = (
    "#ffffff",
    "#f1f3f7",
    "#1b1f27",
    "#59616f",
    "#d5dae2",
)
_STAGE = ("#2f6fb7", "#b8640f")
_DEEP = ("#173f70", "#6b3805")
_PALE = ("#cfdff1", "#f7e0c8")


class _Canvas:
    """Pillow's, in units of the picture."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width * _SCALE, height * _SCALE), _PAGE)
        self.draw = ImageDraw.Draw(self.image)
        self.size = width, height

    def box(self, x0: float, y0: float, x1: float, y1: float, **colors: str) -> None:
        x1 = max(x1, x0 + 0.8)
        corners = tuple(round(each * _SCALE) for each in (x0, y0, x1, y1))
        self.draw.rectangle(
            corners, width=_SCALE if "outline" in colors else 0, **colors
        )

    def line(self, points: list[tuple[float, float]], color: str, width: float) -> None:
        scaled = [(x * _SCALE, y * _SCALE) for x, y in points]
        self.draw.line(scaled, fill=color, width=round(width * _SCALE))

    def polygon(self, points: list[tuple[float, float]], color: str) -> None:
        self.draw.polygon([(x * _SCALE, y * _SCALE) for x, y in points], fill=color)

    def text(
        self, x: float, y: float, text: str, color: str, size: int = 13, at: str = "lm"
    ) -> None:
        font = ImageFont.load_default(size * _SCALE)
        self.draw.text((x * _SCALE, y * _SCALE), text, fill=color, font=font, anchor=at)

    def text_width(self, text: str, size: int = 13) -> float:
        return ImageFont.load_default(size * _SCALE).getlength(text) / _SCALE

    def hatch(self, x0: float, y0: float, x1: float, y1: float, color: str) -> None:
        """Slanted lines in a box, and its outline."""
        if x1 - x0 < 1.5:
            self.box(x0, y0, x1, y1, fill=color)
            return
        part = Image.new(
            "RGB", (round((x1 - x0) * _SCALE), round((y1 - y0) * _SCALE)), _PAGE
        )
        draw = ImageDraw.Draw(part)
        width, height = part.size
        for x in range(-height, width, 8 * _SCALE):
            draw.line([(x, height), (x + height, 0)], fill=color, width=_SCALE)
        self.image.paste(part, (round(x0 * _SCALE), round(y0 * _SCALE)))
        self.box(x0, y0, x1, y1, outline=color)

    def save(self, path: Path) -> None:
        self.image.resize(self.size, Image.Resampling.LANCZOS).save(path, optimize=True)


def draw(session: Session, step: Step | None, path: Path) -> None:
    """Draw a step, or everything if there is none.

    Raises:
        OSError: The file cannot be written.
    """
    events = session.events()
    if step is None:
        begin, end = events[0].begin, max(each.end for each in events)
        title = "AFD timeline"
    else:
        events = [each for each in events if each.seq == step.seq]
        begin = min([step.begin, *(each.begin for each in events)])
        end = max([step.end, *(each.end for each in events)])
        rows = " + ".join(map(str, step.rows))
        title = (
            f"AFD, step {step.seq} ({step.kind}): {rows} rows, "
            f"{len(session.layers)} MoE layers, {step.length / 1000:,.0f} us"
        )
    canvas = _Canvas(_WIDTH, _lane_top(4) + 12)
    span = max(end - begin, 1)

    def place(at: int) -> float:
        return _LEFT + (at - begin) / span * (_WIDTH - _LEFT - _RIGHT)

    canvas.text(16, 24, title, _TEXT, 19)
    _legend(canvas)
    for lane in range(4):
        top = _lane_top(lane)
        canvas.box(_LEFT, top, _WIDTH - _RIGHT, top + _LANE - 10, fill=_BAND)
        canvas.box(14, top + 8, 19, top + 8 + _BAR + 6 + _THIN, fill=_STAGE[lane % 2])
        canvas.text(28, top + 20, ROLES[lane // 2], _TEXT, 14)
        canvas.text(28, top + 39, f"stage {lane % 2}", _TEXT, 14)
        canvas.text(_LEFT - 8, top + _BAR + 19, "recv", _SOFT, 11, "rm")
    _axis(canvas, span, place, begin)
    for each in events:
        _bar(canvas, each, place)
    _arrows(canvas, events, place)
    canvas.save(path)


def _lane_top(lane: int) -> int:
    return _TOP + lane * _LANE + (_GAP if lane > 1 else 0)


def _lane(each: Event) -> int:
    return 2 * ROLES.index(each.role) + each.stage


def _paint(
    canvas: _Canvas, name: str, stage: int, x0: float, x1: float, top: float, bar: float
) -> None:
    if name == "compute":
        canvas.box(x0, top, x1, top + bar, fill=_STAGE[stage])
    elif name == "send":
        canvas.box(x0, top, x1, top + bar, fill=_DEEP[stage])
    elif name == "yield":
        canvas.box(x0, top + bar * 0.3, x1, top + bar * 0.7, fill=_PALE[stage])
    elif name == "wait":
        canvas.hatch(x0, top, x1, top + bar, _STAGE[stage])


def _bar(canvas: _Canvas, each: Event, place: Callable[[int], float]) -> None:
    top = _lane_top(_lane(each)) + 8
    x0, x1 = place(each.begin), place(each.end)
    if each.name == "recv":
        canvas.box(
            x0, top + _BAR + 6, x1, top + _BAR + 6 + _THIN, fill=_STAGE[each.stage]
        )
        return
    _paint(canvas, each.name, each.stage, x0, x1, top, _BAR)
    for text in (f"{each.name} L{each.layer}", each.name, f"L{each.layer}"):
        width = canvas.text_width(text, 12)
        if width + 8 > x1 - x0:
            continue
        middle = (x0 + x1) / 2, top + _BAR / 2
        if each.name == "wait":
            half = width / 2 + 4
            canvas.box(
                middle[0] - half,
                middle[1] - 9,
                middle[0] + half,
                middle[1] + 9,
                fill=_PAGE,
            )
        solid = each.name in ("compute", "send")
        canvas.text(*middle, text, "#ffffff" if solid else _TEXT, 12, "mm")
        return


def _arrows(
    canvas: _Canvas, events: list[Event], place: Callable[[int], float]
) -> None:
    sends = {
        (each.role, each.seq, each.layer, each.stage): each
        for each in events
        if each.name == "send"
    }
    received = [each for each in events if each.name == "recv"]
    if len(received) > 100:
        return
    for each in received:
        sender = ROLES[1 - ROLES.index(each.role)]
        sent = sends.get((sender, each.seq, each.layer, each.stage))
        if sent is None:
            continue
        down = sender == "attention"
        y0 = _lane_top(_lane(sent)) + 8 + (_BAR if down else 0)
        y1 = _lane_top(_lane(each)) + 8 + (0 if down else _BAR)
        x0, x1 = place(sent.end), place(each.end)
        color = _DEEP[each.stage]
        canvas.line([(x0, y0), (x1, y1)], color, 1)
        length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1)
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        canvas.polygon(
            [
                (x1, y1),
                (x1 - 8 * dx + 3 * dy, y1 - 8 * dy - 3 * dx),
                (x1 - 8 * dx - 3 * dy, y1 - 8 * dy + 3 * dx),
            ],
            color,
        )


def _axis(
    canvas: _Canvas, span: int, place: Callable[[int], float], begin: int
) -> None:
    power = 10 ** (len(str(span // 10)) - 1)
    tick = next(
        power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= 12
    )
    unit, name = (1e6, "ms") if tick >= 1e6 else (1e3, "us")
    for at in range(0, span + 1, tick):
        x = place(begin + at)
        canvas.line([(x, _TOP - 8), (x, _lane_top(4) - 10)], _LINE, 1)
        canvas.text(x, _TOP - 18, f"{at / unit:g} {name}", _SOFT, 12, "mm")


def _legend(canvas: _Canvas) -> None:
    x = 16.0
    for name, text in (
        ("compute", "compute"),
        ("send", "send"),
        ("yield", "yield: the other stage has control"),
        ("wait", "wait for the peer"),
        ("recv", "recv: posted, not yet there"),
    ):
        for stage in (0, 1):
            left = x + 24 * stage
            if name == "recv":
                canvas.box(left, 55, left + 20, 61, fill=_STAGE[stage])
            else:
                _paint(canvas, name, stage, left, left + 20, 49, 18)
        canvas.text(x + 52, 58, text, _TEXT, 13)
        x += 52 + canvas.text_width(text) + 26
