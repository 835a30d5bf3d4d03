"""Charts as SVG, for a page that needs no script: lines with points that say their values, and stacked areas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["COLOURS", "Axis", "Mark", "legend", "line_chart", "stacked_chart"]

COLOURS = 5
"""Classes `s0`, `f0` and so on of the page's style: strokes, and fills."""

_WIDTH, _HEIGHT = 400, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 18, 30
_MOST_POINTS = 40  # more of them would hide the line

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """How the numbers of an axis are written.

    Attributes:
        title: what they are.
        text: a number as text.
        logarithmic: whether equal steps are equal factors.
    """

    title: str
    text: Callable[[float], str]
    logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on the x axis that is named in the chart."""

    x: float
    name: str


def line_chart(title: str, x: Axis, y: Axis, series: Mapping[str, Sequence[Point]], marks: Sequence[Mark] = ()) -> str:
    """Lines over one axis; empty where there is no point."""
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    frame = _Frame(x, y, points)
    parts = [frame.grid(), *(frame.mark(mark, place) for place, mark in enumerate(marks))]
    for number, (name, line) in enumerate(series.items()):
        colour = number % COLOURS
        where = " ".join("{:.1f},{:.1f}".format(*frame.place(*point)) for point in line)
        parts.append(f'<polyline class="curve s{colour}" points="{where}"/>')
        if len(line) <= _MOST_POINTS:
            parts += [frame.dot(point, colour, f"{name}, {x.text(point[0])}: {y.text(point[1])}") for point in line]
    return _figure(title, x, y, legend(list(series), "curve") if len(series) > 1 else "", "".join(parts))


def stacked_chart(title: str, x: Axis, y: Axis, series: Mapping[str, Sequence[Point]]) -> str:
    """Areas that add up, the first one at the bottom; all have the same x. Empty where there is nothing."""
    lines = [line for line in series.values() if line]
    if not lines:
        return ""
    sums = [0.0] * len(lines[0])
    edges: list[list[Point]] = []
    for line in lines:
        sums = [below + point[1] for below, point in zip(sums, line)]
        edges.append([(point[0], total) for point, total in zip(line, sums)])
    frame = _Frame(x, y, edges[-1])
    parts = [frame.grid()]
    floor: list[Point] = [(point[0], 0.0) for point in lines[0]]
    for number, edge in enumerate(edges):
        outline = [*edge, *reversed(floor)]
        where = " ".join("{:.1f},{:.1f}".format(*frame.place(*point)) for point in outline)
        parts.append(f'<polygon class="area f{number % COLOURS}" points="{where}"/>')
        floor = edge
    return _figure(title, x, y, legend(list(series), "area"), "".join(parts))


def legend(names: Sequence[str], kind: str) -> str:
    """The names with their colours, as a list."""
    samples = {
        "curve": '<svg class="key" viewBox="0 0 24 10" aria-hidden="true">'
        '<line class="curve s{0}" x1="0" x2="24" y1="5" y2="5"/></svg>',
        "area": '<i class="f{0}"></i>',
    }
    entries = (f"<li>{samples[kind].format(i % COLOURS)}{escape(name)}</li>" for i, name in enumerate(names))
    return f'<ul class="legend">{"".join(entries)}</ul>'


class _Frame:
    """Where values lie in a chart."""

    def __init__(self, x: Axis, y: Axis, points: Sequence[Point]) -> None:
        self._x, self._y = x, y
        self._scale = math.log if x.logarithmic else float
        self._first, self._last = min(p[0] for p in points), max(p[0] for p in points)
        self._low, self._high = self._scale(self._first), self._scale(self._last)
        self._steps = _steps(max(p[1] for p in points))

    def place(self, x: float, y: float) -> Point:
        span = self._high - self._low
        across = (self._scale(x) - self._low) / span if span > 0 else 0.5
        up = y / self._steps[-1]
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _TOP + (1 - up) * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self) -> str:
        parts = []
        for value in self._steps:
            _, y = self.place(self._first, value)
            parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(self._y.text(value))}</text>'
            )
        for value in self._stops():
            x, _ = self.place(value, 0)
            anchor = "start" if x < _LEFT + 20 else "end" if x > _WIDTH - _RIGHT - 20 else "middle"
            text = escape(self._x.text(value))
            parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="{anchor}">{text}</text>')
        return "".join(parts)

    def mark(self, mark: Mark, row: int) -> str:
        x, _ = self.place(min(max(mark.x, self._first), self._last), 0)
        left = x > _WIDTH / 2
        anchor, beside = ("end", -5) if left else ("start", 5)
        return (
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{_HEIGHT - _BOTTOM}"/>'
            f'<text class="name" x="{x + beside:.1f}" y="{_TOP + 2 + 15 * row}" text-anchor="{anchor}">'
            f"{escape(mark.name)}</text>"
        )

    def dot(self, point: Point, colour: int, text: str) -> str:
        x, y = self.place(*point)
        return f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(text)}</title></circle>'

    def _stops(self) -> list[float]:
        """Round values along the x axis, four at the most."""
        if self._last <= self._first:
            return [self._first]
        if not self._x.logarithmic:
            step = _steps(self._last)[1]
            return [value for value in _multiples(step, self._last) if value >= self._first] or [self._first]
        decades = range(math.floor(math.log10(self._first)), math.ceil(math.log10(self._last)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            stops = [f * 10.0**d for d in decades for f in factors if self._first <= f * 10.0**d <= self._last]
            if len(stops) <= 4:
                break
        return stops[:: -(-len(stops) // 4)] if stops else [self._first, self._last]


def _steps(most: float) -> list[float]:
    """Zero and up to five round values above it, the last of them not below `most`."""
    if most <= 0:
        return [0.0, 1.0]
    unit = 10.0 ** math.floor(math.log10(most))
    step = next(unit * share for share in (0.2, 0.5, 1.0, 2.0) if unit * share * 5 >= most * (1 - 1e-9))
    return _multiples(step, most + step * (1 - 1e-6))


def _multiples(step: float, last: float) -> list[float]:
    return [step * i for i in range(int(last / step + 1e-9) + 1)]


def _figure(title: str, x: Axis, y: Axis, key: str, content: str) -> str:
    named = escape(f"{title}: {y.title} by {x.title}")
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{key}"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{named}">{content}</svg>'
        f'<p class="axes">{escape(y.title)} <span>by {escape(x.title)}</span></p></figure>'
    )
