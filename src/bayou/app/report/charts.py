"""Charts as numbers and SVG paths, which the template of the page draws.

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
from typing import ClassVar, NamedTuple

WIDTH = 380.0
HEIGHT = 240.0
LEFT = 50.0  # the least left margin; it is wider for long labels
RIGHT = 12.0  # margin
TOP = 12.0  # margin
BOTTOM = 40.0  # margin
TITLE_WIDTH = 20.0  # of the name of the axis, in the left margin
CHARACTER_WIDTH = 6.0  # of the labels of ticks, in the left margin
TICK_GAP = 6.0  # between the labels and the axis
UNITS = ((1e9, "bn"), (1e6, "M"), (1e3, "k"))  # of the labels of ticks
MIN_WITH_UNIT = 1e4  # labels from here on have a unit
MAX_WITH_UNIT = 1e13  # larger ones have a power of ten
MIN_PLAIN = 1e-3  # smaller ones have a power of ten
MAX_DECIMALS = 6
SHAPES = (  # of points, by color, from their center: circle, square, triangle, diamond, triangle
    "m-3,0a3,3 0 1,0 6,0a3,3 0 1,0 -6,0z",
    "m-2.7,-2.7h5.4v5.4h-5.4z",
    "m0,-3.7l3.4,6h-6.8z",
    "m0,-3.9l3.9,3.9l-3.9,3.9l-3.9,-3.9z",
    "m0,3.7l3.4,-6h-6.8z",
)
MAX_POINTS = 7  # marked on a curve
MIN_LABELED_SHARE = 0.16  # of a stacked area that has its name inside


class Mark(NamedTuple):
    """A path of the picture.

    Args:
        css: its CSS classes.
        path: the SVG path.
        tip: its tooltip.
    """

    css: str
    path: str
    tip: str = ""


@dataclass(frozen=True)
class Series:
    """One curve.

    Args:
        name: for the legend.
        x: positions.
        y: values; not finite for a gap.
        color: the number of its color.
        points: how many points are marked at most.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    points: int = MAX_POINTS


@dataclass
class Axes:
    """A plotting area with its scales; the template draws its marks.

    Args:
        x_label: the name of the horizontal axis.
        y_label: the name of the vertical axis.
        x_range: the least and the largest x.
        y_range: the least and the largest y.
        every: distance of the ticks in x; None for round numbers.
        marks: the paths.
        texts: x and y in pixels, and a name.
    """

    x_label: str = ""
    y_label: str = ""
    x_range: tuple[float, float] = (0.0, 1.0)
    y_range: tuple[float, float] = (0.0, 1.0)
    every: float | None = None
    marks: list[Mark] = field(default_factory=list)
    texts: list[tuple[float, float, str]] = field(default_factory=list)
    # In pixels, for the template.
    floor: ClassVar[float] = HEIGHT - BOTTOM
    right: ClassVar[float] = WIDTH - RIGHT
    top = TOP
    width = WIDTH
    height = HEIGHT

    @cached_property
    def left(self) -> float:
        """The left margin, which has space for the longest label of a tick."""
        longest = max(map(len, tick_labels(ticks(*self.y_range))), default=0)
        return max(LEFT, TITLE_WIDTH + CHARACTER_WIDTH * longest + TICK_GAP)

    def px(self, x: float) -> float:
        """Return x in pixels.

        Args:
            x: in the range of the axes.
        """
        low, high = self.x_range
        return self.left + (x - low) / ((high - low) or 1.0) * (self.right - self.left)

    def py(self, y: float) -> float:
        """Return y in pixels, clamped to the picture.

        Args:
            y: a value.
        """
        low, high = self.y_range
        share = (y - low) / ((high - low) or 1.0)
        return self.floor - min(max(share, -0.02), 1.02) * (self.floor - TOP)

    def line(self, series: Series) -> None:
        """Draw a curve; gaps where it is not finite.

        Args:
            series: the curve.
        """
        css = f"c{series.color % 10}"
        shape = SHAPES[series.color % len(SHAPES)]
        for piece in _finite_pieces(series.x, series.y):
            if len(piece) > 1:
                path = "M" + "L".join(map(self._at, piece))
                self.marks.append(Mark(f"line {css}", path, series.name))
            if not series.points and len(piece) > 1:
                continue
            step = math.ceil(len(piece) / max(series.points, 1))
            for x, y in piece[(len(piece) - 1) % step // 2 :: step]:
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
        """Draw the area between two curves; gaps where one of them is not finite.

        Args:
            x: positions.
            low: the lower curve.
            high: the upper curve.
            color: the number of its color.
            css: another CSS class.
        """
        rows = [row for row in zip(x, low, high, strict=True) if all(map(math.isfinite, row))]
        if rows:
            edge = [(position, upper) for position, _, upper in rows]
            edge += [(position, lower) for position, lower, _ in reversed(rows)]
            path = f"M{'L'.join(map(self._at, edge))}Z"
            self.marks.append(Mark(f"area c{color % 10} {css}", path))

    def dots(self, x: Sequence[float], y: Sequence[float]) -> None:
        """Draw data as dots.

        Args:
            x: positions.
            y: values.
        """
        for row in zip(x, y, strict=True):
            if all(map(math.isfinite, row)):
                circle = "m-1.9,0a1.9,1.9 0 1,0 3.8,0a1.9,1.9 0 1,0 -3.8,0"
                self.marks.append(Mark("data", f"M{self._at(row)}{circle}"))

    def _at(self, point: tuple[float, float]) -> str:
        """Return a point in pixels, as in an SVG path."""
        return f"{self.px(point[0]):.1f},{self.py(point[1]):.1f}"

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        """Positions and labels of the ticks in x."""
        values = ticks(*self.x_range)
        if self.every is not None:
            values = [self.every * k for k in range(math.ceil(self.x_range[1] / self.every) + 1)]
        labels = zip(values, tick_labels(values), strict=True)
        return [(self.px(value), label) for value, label in labels]

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        """Positions and labels of the ticks in y."""
        values = ticks(*self.y_range)
        labels = zip(values, tick_labels(values), strict=True)
        return [(self.py(value), label) for value, label in labels]


def line_chart(
    series: Sequence[Series],
    x_label: str = "",
    y_label: str = "",
    *,
    y_range: tuple[float, float] | None = None,
) -> Axes | None:
    """Draw several curves with one scale; None if none has a finite point.

    Args:
        series: the curves.
        x_label: the name of the horizontal axis.
        y_label: the name of the vertical axis.
        y_range: the least and the largest y; by default of the curves, with a margin.
    """
    xs = [x for curve in series for x in curve.x if math.isfinite(x)]
    ys = [y for curve in series for y in curve.y if math.isfinite(y)]
    if not xs or not ys:
        return None
    axes = Axes(x_label, y_label, (min(xs), max(xs)), y_range or add_margin(min(ys), max(ys)))
    for curve in series:
        axes.line(curve)
    return axes


def stack_areas(
    x: Sequence[float],
    shares: Sequence[Sequence[float]],
    names: Sequence[str],
    x_label: str,
    y_label: str,
    every: float,
) -> Axes:
    """Draw stacked areas with their names.

    Args:
        x: positions.
        shares: shares[i][k] is that of class k at x[i], and they sum to 1.
        names: of the classes.
        x_label: the name of the horizontal axis.
        y_label: the name of the vertical axis.
        every: distance of the ticks in x.
    """
    axes = Axes(x_label, y_label, (min(x), max(x)), every=every)
    low = [0.0] * len(x)
    for k, name in enumerate(names):
        high = [edge + row[k] for edge, row in zip(low, shares, strict=True)]
        axes.band(x, low, high, k, "solid")

        def least_share_near(i: int, k: int = k) -> float:
            return min(row[k] for row in shares[i - 1 : i + 2])

        widest = max(range(1, len(x) - 1), key=least_share_near)
        if shares[widest][k] > MIN_LABELED_SHARE:
            middle = (low[widest] + high[widest]) / 2
            axes.texts.append((axes.px(x[widest]), axes.py(middle), name))
        low = high
    return axes


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers in a range.

    Args:
        low: the least number.
        high: the largest number.
        count: how many there should be, about.
    """
    if not high > low:
        return [low]
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = min((m * unit for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
    first_tick = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first_tick, math.floor(high / step + 1e-9) + 1)]


def add_margin(low: float, high: float, share: float = 0.06) -> tuple[float, float]:
    """Return a range with a margin; it starts at 0 where all values are positive and near 0.

    Args:
        low: the least value.
        high: the largest value.
        share: of the range, on each side.
    """
    span = (high - low) or max(abs(high), 1.0) * 0.1
    share = 1.0 if low == high else share
    floor = 0.0 if 0 <= low <= 0.4 * high else low - share * span
    return floor, high + share * span


def _finite_pieces(
    x: Sequence[float],
    y: Sequence[float],
) -> list[list[tuple[float, float]]]:
    """Return the pieces of a curve between points that are not finite."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for point in zip(x, y, strict=True):
        if all(map(math.isfinite, point)):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def short(value: float) -> str:
    """Return a number as text, to four digits.

    Args:
        value: the number.
    """
    divisor, suffix = _unit(abs(value))
    return f"{value / divisor:.4g}{suffix}".replace("-", "−")


def tick_labels(values: Sequence[float]) -> list[str]:
    """Return the labels of the ticks of an axis.

    They have one unit, and the decimals that make them different.

    Args:
        values: of the ticks, in order.
    """
    divisor, suffix = _unit(max(map(abs, values), default=0.0))
    scaled = [value / divisor for value in values]
    gaps = [after - before for before, after in pairwise(scaled)]
    decimals = _decimals(scaled, min(gaps, default=1.0))
    return [f"{value:.{decimals}f}{suffix}".replace("-", "−") if value else "0" for value in scaled]


def _unit(size: float) -> tuple[float, str]:
    """Return the divisor of numbers up to this size, and its name."""
    if size == 0 or MIN_PLAIN <= size < MIN_WITH_UNIT or not math.isfinite(size):
        return 1.0, ""
    if MIN_WITH_UNIT <= size < MAX_WITH_UNIT:
        return next(unit for unit in UNITS if size >= unit[0])
    power = math.floor(math.log10(size))
    return 10.0**power, f"e{power}"


def _decimals(values: Sequence[float], step: float) -> int:
    """Return the fewest decimals that change no value by more than a hundredth of a step."""
    for decimals in range(MAX_DECIMALS):
        if all(abs(round(value, decimals) - value) <= 0.01 * abs(step) for value in values):
            return decimals
    return MAX_DECIMALS
