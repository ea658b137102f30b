"""Encoding of columns as numbers for a network, by statistics of their training values."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from bayou.data.columns import MISSING_LEVEL, Column, quote
from bayou.specs import Checked

MAX_DEVIATIONS = 1e6  # standard deviations; larger values overflow in a network


@final
@dataclass(frozen=True)
class Number(Checked):
    """A column of numbers: (value − mean)/scale, ``median`` for a missing one, and a 0/1 column for
    that if asked.

    ``low`` and ``high``: the range of the training values. ``floor`` and ``ceiling``: a value
    outside counts as missing, as 999999999 does in a column of small numbers
    (``bayou.training.sentinels``).
    """

    name: str
    mean: float = 0.0
    scale: float = 1.0
    median: float = 0.0
    indicator: bool = False
    low: float = -sys.float_info.max
    high: float = sys.float_info.max
    floor: float = -sys.float_info.max
    ceiling: float = sys.float_info.max

    def __post_init__(self) -> None:
        self._check_kind(str, "name")
        self._check_kind(bool, "indicator")
        self._check_finite("mean", "scale", "median", "low", "high", "floor", "ceiling")
        self._check_positive("scale")

    @staticmethod
    def fit(
        name: str,
        values: NDArray[np.float64],
        floor: float = -sys.float_info.max,
        ceiling: float = sys.float_info.max,
    ) -> Number:
        """Fit the encoding to the training values of a column.

        Args:
            name: of the column.
            values: nan where one is missing.
            floor: smaller values count as missing.
            ceiling: larger values count as missing.
        """
        values = inside_range(values, floor, ceiling)
        lost = np.isnan(values)
        median, low, high = (float(f(values[~lost])) for f in (np.median, np.min, np.max))
        mean, scale = mean_and_std(np.where(lost, median, values))
        return Number(name, mean, scale or 1.0, median, bool(lost.any()), low, high, floor, ceiling)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the numbers it becomes."""
        return (self.name, f"{self.name} is missing") if self.indicator else (self.name,)

    def encode(self, column: Column, notes: list[str]) -> list[NDArray[np.float64]]:
        """Columns for the network."""
        values, bad = self.values(column), column.bad
        lost = np.isnan(values)
        if bad.any():
            notes.append(not_numbers(self.name, column))
        if sentinels := self.describe_sentinels(column):
            notes.append(sentinels)
        if lost.any() and not self.indicator:
            notes.append(
                f"Column {self.name!r}: {int(lost.sum())} missing values, none of them in training; "
                f"filled with the median {self.median:g}."
            )
        filled = np.where(lost, self.median, values)
        with np.errstate(over="ignore"):
            scaled = (filled - self.mean) / self.scale
        far = np.abs(scaled) > MAX_DEVIATIONS
        if far.any():
            row = int(far.argmax())
            notes.append(
                f"Column {self.name!r}: {int(far.sum())} values are more than {MAX_DEVIATIONS:,.0f} standard "
                f"deviations from the training mean (row {row + 1}: {filled[row]:g}) and were clipped; check them."
            )
            scaled = np.clip(scaled, -MAX_DEVIATIONS, MAX_DEVIATIONS)
        return [scaled, lost.astype(np.float64)] if self.indicator else [scaled]

    def beyond(self, column: Column) -> NDArray[np.float64]:
        """The distance of each value from the range of the training values, in standard deviations;
        0 inside.
        """
        values = self.values(column)
        with np.errstate(over="ignore"):
            out = np.maximum(self.low - values, values - self.high) / self.scale
        return np.fmax(out, 0.0)  # 0 for a missing value

    def values(self, column: Column) -> NDArray[np.float64]:
        """The numbers of a column; nan where one is missing, or counts as missing."""
        return inside_range(column.values, self.floor, self.ceiling)

    def describe_sentinels(self, column: Column) -> str:
        """A note about the values that count as missing although they are numbers; empty without
        any.
        """
        flags = np.isnan(self.values(column)) & ~np.isnan(column.values)
        count = int(flags.sum())
        if not count:
            return ""
        row = int(flags.argmax())
        which = "1 value is" if count == 1 else f"{count:,} values are"
        return (
            f"Column {self.name!r}: {which} far from all others (row {row + 1}: {column.values[row]:.12g}; the others "
            f"lie between {self.low:g} and {self.high:g}); counted as missing, because standardized with it the others "
            "would all be the same. If it stands for a missing value, leave the cell blank; if it is right, use the "
            "logarithm of the column."
        )


def inside_range(values: NDArray[np.float64], floor: float, ceiling: float) -> NDArray[np.float64]:
    """The values, nan where one lies outside a range."""
    with np.errstate(invalid="ignore"):
        return np.where((values < floor) | (values > ceiling), np.nan, values)


def not_numbers(name: str, column: Column) -> str:
    """A note about cells that are not numbers."""
    row = int(column.bad.argmax())
    return (
        f"Column {name!r}: {int(column.bad.sum())} cells are not numbers (row {row + 1}: "
        f"{quote(column.text(row))}); they count as missing."
    )


def mean_and_std(x: NDArray[Any]) -> tuple[float, float]:
    """Mean and standard deviation without overflow or underflow of squares."""
    unit = float(np.abs(x).max()) or 1.0
    return float((x / unit).mean()) * unit, float((x / unit).std()) * unit


@final
@dataclass(frozen=True)
class Category(Checked):
    """A column of categories: one 0/1 column for each; a category that is not in the training rows
    is all zeros.
    """

    name: str
    levels: tuple[str, ...]

    def __post_init__(self) -> None:
        self._check_kind(str, "name")
        self._check_words("levels")

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the numbers it becomes."""
        return tuple(f"{self.name}={level}" for level in self.levels)

    def encode(self, column: Column, notes: list[str]) -> list[NDArray[np.float64]]:
        """Columns for the network."""
        index = {level: i for i, level in enumerate(self.levels)}
        found = [level or MISSING_LEVEL for level in column.levels]
        places = np.array([index.get(level, -1) for level in found])
        unknown = sorted(
            {level for level, place in zip(found, places.tolist(), strict=True) if place < 0}
        )
        if unknown:
            shown = ", ".join(map(quote, unknown[:3])) + (", ..." if len(unknown) > 3 else "")
            notes.append(
                f"Column {self.name!r}: {int((places < 0).sum())} cells have categories that are not in the training "
                f"data ({shown}); they are encoded as none of the known ones."
            )
        return [(places == i).astype(np.float64) for i in range(len(self.levels))]
