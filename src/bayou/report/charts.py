"""Charts as SVG text: lines, bands and stacked areas that follow the light or dark theme of the page.

No plotting library is used, because a report is one file without scripts whose figures follow the reader's theme:
every mark has a CSS class, and the style sheet of the page sets its color.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

WIDTH, HEIGHT = 420.0, 270.0
SMALL: Any = {"width": 340.0, "height": 215.0}  # for three charts in a row, at the same font size
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 12.0, 40.0


@dataclass(frozen=True)
class Series:
    """One curve: x, y, a name for the legend, and the number of its color."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    points: bool = False


@dataclass
class Axes:
    """A plotting area with its own scales; ``svg()`` is the whole picture."""

    x_label: str = ""
    y_label: str = ""
    x_range: tuple[float, float] = (0.0, 1.0)
    y_range: tuple[float, float] = (0.0, 1.0)
    width: float = WIDTH
    height: float = HEIGHT
    every: float | None = None  # distance of the ticks in x; None for round numbers
    marks: list[str] = field(default_factory=list)

    def px(self, x: float) -> float:
        """x in pixels."""
        low, high = self.x_range
        return LEFT + (x - low) / ((high - low) or 1.0) * (self.width - LEFT - RIGHT)

    def py(self, y: float) -> float:
        """y in pixels, kept inside the picture."""
        low, high = self.y_range
        share = (y - low) / ((high - low) or 1.0)
        return self.height - BOTTOM - min(max(share, -0.02), 1.02) * (self.height - TOP - BOTTOM)

    def line(self, series: Series) -> None:
        """A curve; gaps where it is not finite."""
        color = f"c{series.color % 10}"
        for part in _runs(series.x, series.y):
            if len(part) > 1:
                path = "M" + "L".join(map(self._at, part))
                self.marks.append(_mark("path", f"line {color}", series.name, d=path))
            if series.points or len(part) == 1:
                for x, y in part:
                    tip = f"{series.name}: {_short(x)}, {_short(y)}"
                    self.marks.append(_mark("circle", f"dot {color}", tip, cx=self.px(x), cy=self.py(y), r=2.6))

    def band(self, x: Sequence[float], low: Sequence[float], high: Sequence[float], color: int, css: str = "") -> None:
        """The area between two curves; gaps where one of them is not finite."""
        rows = [row for row in zip(x, low, high, strict=True) if all(map(math.isfinite, row))]
        if rows:
            edge = [(a, top) for a, _, top in rows] + [(a, bottom) for a, bottom, _ in reversed(rows)]
            path = f"M{'L'.join(map(self._at, edge))}Z"
            self.marks.append(_mark("path", f"area c{color % 10} {css}", d=path))

    def dots(self, x: Sequence[float], y: Sequence[float]) -> None:
        """Data."""
        finite = [row for row in zip(x, y, strict=True) if all(map(math.isfinite, row))]
        self.marks += [_mark("circle", "data", cx=self.px(a), cy=self.py(b), r=1.9) for a, b in finite]

    def diagonal(self) -> None:
        """The line y = x, for reference."""
        low, high = max(self.x_range[0], self.y_range[0]), min(self.x_range[1], self.y_range[1])
        self.marks.append(_line("rule", self.px(low), self.py(low), self.px(high), self.py(high)))

    def _at(self, point: tuple[float, float]) -> str:
        return f"{self.px(point[0]):.1f},{self.py(point[1]):.1f}"

    def svg(self) -> str:
        """The picture as one <svg> element."""
        floor, right = self.height - BOTTOM, self.width - RIGHT
        across = ticks(*self.x_range)
        if self.every is not None:
            across = [self.every * k for k in range(math.ceil(self.x_range[1] / self.every) + 1)]
        parts = []
        for value in ticks(*self.y_range):
            y = self.py(value)
            parts.append(_line("grid", LEFT, y, right, y))
            parts.append(_text("tick", _short(value), "end", x=LEFT - 6, y=y + 3.5))
        for value in across:
            x = self.px(value)
            parts.append(_line("grid", x, TOP, x, floor))
            parts.append(_text("tick", _short(value), x=x, y=floor + 14))
        clip = f"clip-{self.width:.0f}-{self.height:.0f}"
        inside = _mark("rect", "", x=LEFT - 3, y=TOP - 3, width=right - LEFT + 6, height=floor - TOP + 4)
        parts.append(f'<clipPath id="{clip}">{inside}</clipPath>')
        parts.append(f'<g clip-path="url(#{clip})">{"".join(self.marks)}</g>')
        parts.append(_line("axis", LEFT, floor, right, floor))
        if self.x_label:
            parts.append(_text("label", self.x_label, x=(LEFT + right) / 2, y=self.height - 6))
        if self.y_label:
            turned = f"translate(11 {(TOP + floor) / 2}) rotate(-90)"
            parts.append(_text("label", self.y_label, transform=turned))
        about = " against ".join(filter(None, (self.y_label, self.x_label)))
        box = f'viewBox="0 0 {self.width:.0f} {self.height:.0f}"'
        return f'<svg class="chart" {box} role="img" aria-label="{escape(about)}">{"".join(parts)}</svg>'


def _mark(tag: str, css: str, text: str = "", **places: float | str) -> str:
    """An element with its class and coordinates; ``shown`` is its tooltip."""
    given = "".join(f' {k.replace("_", "-")}="{v if isinstance(v, str) else f"{v:.1f}"}"' for k, v in places.items())
    shown = escape(text) if tag == "text" or not text else f"<title>{escape(text)}</title>"
    return f'<{tag} class="{css}"{given}>{shown}</{tag}>'


def _line(css: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return _mark("line", css, x1=x1, y1=y1, x2=x2, y2=y2)


def _text(css: str, text: str, text_anchor: str = "middle", **places: Any) -> str:
    return _mark("text", css, text, text_anchor=text_anchor, **places)


def line_chart(
    series: Sequence[Series],
    x_label: str = "",
    y_label: str = "",
    *,
    y_range: tuple[float, float] | None = None,
    width: float = WIDTH,
    height: float = HEIGHT,
) -> str:
    """Several curves with one scale."""
    xs = [x for s in series for x in s.x if math.isfinite(x)]
    ys = [y for s in series for y in s.y if math.isfinite(y)]
    if not xs or not ys:
        return ""
    y_range = y_range or padded(min(ys), max(ys))
    axes = Axes(x_label, y_label, (min(xs), max(xs)), y_range, width, height)
    for one in series:
        axes.line(one)
    return axes.svg()


def stacked(
    x: Sequence[float], shares: Sequence[Sequence[float]], x_label: str, y_label: str, every: float | None = None
) -> str:
    """Stacked areas: shares[i][k] is the part of class k at x[i], and they sum to 1."""
    axes = Axes(x_label, y_label, (min(x), max(x)), (0.0, 1.0), every=every, **SMALL)
    below = [0.0] * len(x)
    for k in range(len(shares[0])):
        above = [b + row[k] for b, row in zip(below, shares, strict=True)]
        axes.band(x, below, above, k, "solid")
        below = above
    return axes.svg()


def legend(names: Sequence[tuple[str, int]]) -> str:
    """Names with their colors."""
    items = "".join(
        f'<span class="key"><i class="swatch c{color % 10}"></i>{escape(name)}</span>' for name, color in names
    )
    return f'<div class="legend">{items}</div>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between low and high."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = min((m * unit for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
    first_tick = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first_tick, math.floor(high / step + 1e-9) + 1)]


def padded(low: float, high: float, share: float = 0.06) -> tuple[float, float]:
    """A range with a margin; it starts at 0 where all values are positive and near 0."""
    span = (high - low) or max(abs(high), 1.0) * 0.1
    floor = 0.0 if 0 <= low < 0.4 * high else low - share * span
    return floor, high + share * span


def _runs(x: Sequence[float], y: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Consecutive runs of finite points."""
    found: list[list[tuple[float, float]]] = [[]]
    for a, b in zip(x, y, strict=True):
        if math.isfinite(a) and math.isfinite(b):
            found[-1].append((a, b))
        elif found[-1]:
            found.append([])
    return [run for run in found if run]


def _short(value: float) -> str:
    """A number as the label of a tick."""
    if value and (abs(value) >= 10_000 or abs(value) < 1e-3):
        text = f"{value:.0e}" if abs(value) < 1e-3 else f"{value / 1000:.4g}k"
        return text.replace("e-0", "e-").replace("-", "−")
    return f"{value:.4g}".replace("-", "−")
