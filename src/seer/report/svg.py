"""A drawing of marks over one time axis, as SVG text. Everything that is not a number is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from seer.common.process.log import printable

WIDTH, LEFT, RIGHT = 1200, 120, 100
"""Of the page, and of the columns beside the time axis, in pixels."""

PLOT = WIDTH - LEFT - RIGHT

_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
"""Seconds between lines of the grid."""

_LINES = 12
"""Lines of the grid at most."""


def ticks(most: float) -> list[float]:
    """Return round numbers for an axis from 0: the last one is at least `most`, and there are 3 to 6."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most))
    step = next(power * part for part in (0.2, 0.5, 1, 2, 5) if math.ceil(most / (power * part) - 1e-9) <= 5)
    return [number * step for number in range(math.ceil(most / step - 1e-9) + 1)]


def text_of(value: object) -> str:
    """Return a value's text for an SVG file: control characters and markup escaped."""
    return html.escape(str(printable(str(value))).replace("\n", "\\n"))


def short(value: str, most: int = 18) -> str:
    """Return a text that fits the left column."""
    return value if len(value) <= most else value[: most - 1] + "…"


def duration(seconds: float, step: float = 1.0) -> str:
    """Say how long something took, as exactly as a grid of this step needs."""
    if step < 1:
        return f"{seconds:.{1 if step >= 0.1 else 2}f} s"
    whole = round(seconds)
    if whole < 120 and step < 60:
        return f"{whole} s"
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{number} {unit}" for number, unit in parts if number) or "0 s"


def date(seconds: float) -> str:
    """Return a time since 1970 as a date; "" where there is none: simulated logs begin at 0."""
    if seconds < 1e8:
        return ""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


class Drawing:
    """Elements from top to bottom; `y` is where the next one goes. Times are from `start` to `end`."""

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, max(end, start + 0.01)
        self.seconds = self.end - self.start
        self.y = 0.0
        self._parts: list[str] = []

    def x(self, time: float) -> float:
        """Return where a time is; those outside are at the border."""
        share = (time - self.start) / self.seconds
        return LEFT + PLOT * min(1.0, max(0.0, share))

    def text(self, x: float, y: float, value: object, kind: str = "t", anchor: str = "start") -> None:
        """Write a line, `kind` being a class of the style sheet."""
        side = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{side}>{text_of(value)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, kind: str, title: str = "") -> None:
        """Draw a box, with a text that shows when a reader points at the box."""
        box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}"'
        self._parts.append(f"{box}><title>{text_of(title)}</title></rect>" if title else f"{box}/>")

    def bar(self, start: float, end: float, y: float, height: float, kind: str, title: str) -> None:
        """Draw a box over a time, visible however short the time is."""
        left = self.x(start)
        self.rect(left, y, max(0.5, self.x(end) - left - 0.3), height, kind, title)

    def line(self, x: float, y1: float, y2: float, kind: str, title: str = "") -> None:
        """Draw a vertical line."""
        mark = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" class="{kind}"'
        self._parts.append(f"{mark}><title>{text_of(title)}</title></line>" if title else f"{mark}/>")

    def curve(self, shape: str, points: Iterable[tuple[float, float]], kind: str) -> None:
        """Draw a `polyline` or a `polygon`."""
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<{shape} points="{text}" class="{kind}"/>')

    def level(self, y: float, label: str) -> None:
        """Draw a horizontal line of the grid, and what it means beside it."""
        self._parts.append(f'<line x1="{LEFT}" x2="{LEFT + PLOT}" y1="{y:.1f}" y2="{y:.1f}" class="g"/>')
        self.text(LEFT - 8, y + 3.5, label, "n", "end")

    def head(self, title: str, note: str) -> None:
        """Begin a section."""
        self.y += 34
        self.text(0, self.y, title, "h")
        self.text(WIDTH, self.y, note, "n", "end")
        self.y += 10

    def axis(self, top: float, bottom: float, tail_start: float) -> None:
        """Draw the grid of times, and the tail's shade, behind what is drawn next."""
        start, end = self.x(tail_start), self.x(self.end)
        self.rect(start, top, end - start, bottom - top, "tail")
        step = next((step for step in _STEPS if self.seconds / step <= _LINES), 0.0)
        step = step or self.seconds / _LINES
        for number in range(int(self.seconds / step) + 1):
            x = self.x(self.start + number * step)
            self.line(x, top, bottom, "g")
            self.text(x, bottom + 12, duration(number * step, step), "n", "middle")

    def legend(self, items: Sequence[tuple[str, str]]) -> None:
        """Write a row of classes and their meanings."""
        x = float(LEFT)
        for kind, meaning in items:
            width = 16 + 5.6 * len(meaning)
            if x > LEFT and x + width > WIDTH:
                x, self.y = float(LEFT), self.y + 15
            self.rect(x, self.y - 9, 12, 10, kind)
            self.text(x + 16, self.y, meaning, "n")
            x += width + 14

    def svg(self, style: str, definitions: str) -> str:
        """Return all of it as one element."""
        height = self.y + 16
        size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
            f"<defs>{definitions}</defs>\n{body}\n</svg>"
        )
