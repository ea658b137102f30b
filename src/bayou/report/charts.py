"""Charts as numbers and SVG paths, which the template of the page draws: lines, bands and stacked
areas.

No plotting library is used, because a report is one file without scripts whose figures follow the
reader's theme: every mark has a CSS class, and the style sheet of the page sets its color. Curves
also differ in dashes and in the shapes of their points, so that they can be told apart in gray.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

WIDTH, HEIGHT = 380.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 12.0, 12.0, 40.0  # margins; the left one is wider for long labels
TITLE_WIDTH, CHARACTER_WIDTH, TICK_GAP = (
    20.0,
    6.0,
    6.0,
)  # of the left margin: the name of the axis, its labels
UNITS = ((1e9, "bn"), (1e6, "M"), (1e3, "k"))  # of the labels of ticks
MIN_IN_UNITS, MAX_IN_UNITS = 1e4, 1e13  # labels with a unit; larger ones have a power of ten
MIN_PLAIN = 1e-3
MAX_DECIMALS = 6
SHAPES = (  # of points, by color, from their center: circle, square, triangle, diamond, triangle
    "m-3,0a3,3 0 1,0 6,0a3,3 0 1,0 -6,0z",
    "m-2.7,-2.7h5.4v5.4h-5.4z",
    "m0,-3.7l3.4,6h-6.8z",
    "m0,-3.9l3.9,3.9l-3.9,3.9l-3.9,-3.9z",
    "m0,3.7l3.4,-6h-6.8z",
)
POINTS = 7  # marked on a curve
MIN_LABELED_SHARE = 0.16  # of a stacked area that has its name inside


class Mark(NamedTuple):
    """A path with its CSS class and tooltip."""

    css: str
    path: str
    tip: str = ""


@dataclass(frozen=True)
class Series:
    """One curve: x, y, a name for the legend, the number of its color, and how many points are
    marked at most.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    points: int = POINTS


@dataclass
class Axes:
    """A plotting area with its own scales; the template draws its marks."""

    x_label: str = ""
    y_label: str = ""
    x_range: tuple[float, float] = (0.0, 1.0)
    y_range: tuple[float, float] = (0.0, 1.0)
    every: float | None = None  # distance of the ticks in x; None for round numbers
    marks: list[Mark] = field(default_factory=list)
    texts: list[tuple[float, float, str]] = field(default_factory=list)
    floor, right, top, width, height = HEIGHT - BOTTOM, WIDTH - RIGHT, TOP, WIDTH, HEIGHT

    @cached_property
    def left(self) -> float:
        """The left margin, which has space for the longest label of a tick."""
        longest = max(map(len, tick_labels(ticks(*self.y_range))), default=0)
        return max(LEFT, TITLE_WIDTH + CHARACTER_WIDTH * longest + TICK_GAP)

    def px(self, x: float) -> float:
        """x in pixels."""
        low, high = self.x_range
        return self.left + (x - low) / ((high - low) or 1.0) * (self.right - self.left)

    def py(self, y: float) -> float:
        """y in pixels, kept inside the picture."""
        low, high = self.y_range
        share = (y - low) / ((high - low) or 1.0)
        return self.floor - min(max(share, -0.02), 1.02) * (self.floor - TOP)

    def line(self, series: Series) -> None:
        """A curve; gaps where it is not finite."""
        css, shape = f"c{series.color % 10}", SHAPES[series.color % len(SHAPES)]
        for part in _runs(series.x, series.y):
            if len(part) > 1:
                self.marks.append(
                    Mark(f"line {css}", "M" + "L".join(map(self._at, part)), series.name)
                )
            step = math.ceil(len(part) / max(series.points, 1))
            for x, y in (
                part[(len(part) - 1) % step // 2 :: step] if series.points or len(part) == 1 else ()
            ):
                tip = f"{series.name}: {short(x)}, {short(y)}"
                self.marks.append(Mark(f"dot {css}", f"M{self._at((x, y))}{shape}", tip))

    def band(
        self,
        x: Sequence[float],
        low: Sequence[float],
        high: Sequence[float],
        color: int,
        css: str = "",
    ) -> None:
        """The area between two curves; gaps where one of them is not finite."""
        rows = [row for row in zip(x, low, high, strict=True) if all(map(math.isfinite, row))]
        if rows:
            edge = [(a, top) for a, _, top in rows] + [
                (a, bottom) for a, bottom, _ in reversed(rows)
            ]
            self.marks.append(
                Mark(f"area c{color % 10} {css}", f"M{'L'.join(map(self._at, edge))}Z")
            )

    def dots(self, x: Sequence[float], y: Sequence[float]) -> None:
        """Data."""
        finite = [row for row in zip(x, y, strict=True) if all(map(math.isfinite, row))]
        self.marks += [
            Mark("data", f"M{self._at(row)}m-1.9,0a1.9,1.9 0 1,0 3.8,0a1.9,1.9 0 1,0 -3.8,0")
            for row in finite
        ]

    def _at(self, point: tuple[float, float]) -> str:
        return f"{self.px(point[0]):.1f},{self.py(point[1]):.1f}"

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        """Places and labels of the ticks in x."""
        across = ticks(*self.x_range)
        if self.every is not None:
            across = [self.every * k for k in range(math.ceil(self.x_range[1] / self.every) + 1)]
        return [
            (self.px(value), text) for value, text in zip(across, tick_labels(across), strict=True)
        ]

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        """Places and labels of the ticks in y."""
        places = ticks(*self.y_range)
        return [
            (self.py(value), text) for value, text in zip(places, tick_labels(places), strict=True)
        ]


def line_chart(
    series: Sequence[Series],
    x_label: str = "",
    y_label: str = "",
    *,
    y_range: tuple[float, float] | None = None,
) -> Axes | None:
    """Several curves with one scale; None if none has a finite point."""
    xs = [x for s in series for x in s.x if math.isfinite(x)]
    ys = [y for s in series for y in s.y if math.isfinite(y)]
    if not xs or not ys:
        return None
    axes = Axes(x_label, y_label, (min(xs), max(xs)), y_range or padded(min(ys), max(ys)))
    for one in series:
        axes.line(one)
    return axes


def stacked(
    x: Sequence[float],
    shares: Sequence[Sequence[float]],
    names: Sequence[str],
    x_label: str,
    y_label: str,
    every: float,
) -> Axes:
    """Stacked areas with their names: shares[i][k] is the part of class k at x[i], and they sum to
    1.
    """
    axes = Axes(x_label, y_label, (min(x), max(x)), every=every)
    below = [0.0] * len(x)
    for k, name in enumerate(names):
        above = [b + row[k] for b, row in zip(below, shares, strict=True)]
        axes.band(x, below, above, k, "solid")
        at = max(range(1, len(x) - 1), key=lambda i: min(row[k] for row in shares[i - 1 : i + 2]))
        if shares[at][k] > MIN_LABELED_SHARE:
            axes.texts.append((axes.px(x[at]), axes.py((below[at] + above[at]) / 2), name))
        below = above
    return axes


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
    share = 1.0 if low == high else share
    floor = 0.0 if 0 <= low <= 0.4 * high else low - share * span
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


def short(value: float) -> str:
    """A number as text, to four digits."""
    divisor, suffix = _unit(abs(value))
    return f"{value / divisor:.4g}{suffix}".replace("-", "−")


def tick_labels(values: Sequence[float]) -> list[str]:
    """The labels of the ticks of one axis, in one unit and with the decimals that tell them apart.

    Args:
        values: the places of the ticks, in order.
    """
    divisor, suffix = _unit(max(map(abs, values), default=0.0))
    scaled = [value / divisor for value in values]
    gaps = [after - before for before, after in pairwise(scaled)]
    decimals = _decimals(scaled, min(gaps, default=1.0))
    return [f"{value:.{decimals}f}{suffix}".replace("-", "−") if value else "0" for value in scaled]


def _unit(size: float) -> tuple[float, str]:
    """The divisor of numbers up to this size, and its name."""
    if size == 0 or MIN_PLAIN <= size < MIN_IN_UNITS or not math.isfinite(size):
        return 1.0, ""
    if MIN_IN_UNITS <= size < MAX_IN_UNITS:
        return next(unit for unit in UNITS if size >= unit[0])
    power = math.floor(math.log10(size))
    return 10.0**power, f"e{power}"


def _decimals(values: Sequence[float], step: float) -> int:
    """The fewest decimals that change no value by more than a hundredth of the distance of two of
    them.
    """
    for decimals in range(MAX_DECIMALS):
        if all(abs(round(value, decimals) - value) <= 0.01 * abs(step) for value in values):
            return decimals
    return MAX_DECIMALS
