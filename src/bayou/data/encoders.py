"""Encoding of columns as numbers for a network, by statistics of their training values."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from bayou.core.specs import Checked, later_field
from bayou.data.cell_notes import CellNotes
from bayou.data.columns import MISSING_LEVEL, OTHER_LEVELS, Column

MAX_DEVIATIONS = 1e6  # standard deviations; larger values overflow in a network


@final
@dataclass(frozen=True)
class Number(Checked):
    """The encoder of a column of numbers: (value − mean)/scale, the median for a missing one.

    Args:
        name: of the column.
        mean: of the training values.
        scale: their standard deviation, or 1 if it is 0.
        median: of the training values, for a missing value.
        indicator: adds a 0/1 column for missing values.
        low: the least training value.
        high: the largest training value.
        floor: smaller values count as missing, as 999999999 does in a column of small numbers
            (``bayou.training.sentinels``).
        ceiling: larger values count as missing.
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
        """Check the types and ranges of the fields."""
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
        is_missing = np.isnan(values)
        present = values[~is_missing]
        median = float(np.median(present))
        mean, scale = mean_and_std(np.where(is_missing, median, values))
        return Number(
            name,
            mean=mean,
            scale=scale or 1.0,
            median=median,
            indicator=bool(is_missing.any()),
            low=float(np.min(present)),
            high=float(np.max(present)),
            floor=floor,
            ceiling=ceiling,
        )

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the inputs that it becomes."""
        return (self.name, f"{self.name} is missing") if self.indicator else (self.name,)

    def encode(self, column: Column, notes: CellNotes) -> list[NDArray[np.float64]]:
        """Return the inputs of the network, one array for each.

        Args:
            column: the cells of all rows.
            notes: to which those about unusual values are added.
        """
        values = self.values(column)
        is_missing = np.isnan(values)
        complete = np.where(is_missing, self.median, values)
        with np.errstate(over="ignore"):
            scaled = (complete - self.mean) / self.scale
        is_far = np.abs(scaled) > MAX_DEVIATIONS
        self._add_notes(column, complete, is_missing, is_far, notes)
        scaled = np.clip(scaled, -MAX_DEVIATIONS, MAX_DEVIATIONS)
        if self.indicator:
            return [scaled, is_missing.astype(np.float64)]
        return [scaled]

    def distance(self, column: Column) -> NDArray[np.float64]:
        """Return the distance of each value from the range of the training values.

        It is in standard deviations, and 0 inside the range and for a missing value.

        Args:
            column: the cells of all rows.
        """
        values = self.values(column)
        with np.errstate(over="ignore"):
            distance = np.maximum(self.low - values, values - self.high) / self.scale
        return np.fmax(distance, 0.0)

    def values(self, column: Column) -> NDArray[np.float64]:
        """Return the numbers of a column; nan where one is missing, or counts as missing.

        Args:
            column: the cells of all rows.
        """
        return inside_range(column.values, self.floor, self.ceiling)

    def _add_notes(
        self,
        column: Column,
        complete: NDArray[np.float64],
        is_missing: NDArray[np.bool_],
        is_far: NDArray[np.bool_],
        notes: CellNotes,
    ) -> None:
        """Count the unusual cells of a column.

        Args:
            column: the cells of all rows.
            complete: their numbers, with the median for a missing one.
            is_missing: which cells are missing, or count as missing.
            is_far: which numbers are too far from the training mean.
            notes: to which the counts are added.
        """
        notes.add(
            self.name,
            "bad",
            column.bad,
            lambda count, first: (
                f"Column {self.name!r}: {count} cells are not numbers ({first}); they count as "
                "missing."
            ),
            column.describe_first,
        )
        is_sentinel = is_missing & ~np.isnan(column.values)
        notes.add(
            self.name,
            "sentinel",
            is_sentinel,
            self._describe_sentinels,
            lambda flags: column.describe_first_number(flags, column.values, ".12g"),
        )
        if not self.indicator:
            notes.add(
                self.name,
                "missing",
                is_missing,
                lambda count, _: (
                    f"Column {self.name!r}: {count} missing values, none of them in training; "
                    f"filled with the median {self.median:g}."
                ),
            )
        notes.add(
            self.name,
            "far",
            is_far,
            lambda count, first: (
                f"Column {self.name!r}: {count} values are more than {MAX_DEVIATIONS:,.0f} "
                f"standard deviations from the training mean ({first}) and were clipped; check "
                "them."
            ),
            lambda flags: column.describe_first_number(flags, complete, "g"),
        )

    def _describe_sentinels(self, count: int, first: str) -> str:
        """Return a note about the values that count as missing although they are numbers."""
        subject = "1 value is" if count == 1 else f"{count:,} values are"
        return (
            f"Column {self.name!r}: {subject} far from all others ({first}; the others lie between "
            f"{self.low:g} and {self.high:g}); counted as missing, because standardized with it "
            "the others would all be the same. If it stands for a missing value, leave the cell "
            "blank; if it is right, use the logarithm of the column."
        )


def inside_range(values: NDArray[np.float64], floor: float, ceiling: float) -> NDArray[np.float64]:
    """Return the values, nan where one lies outside a range.

    Args:
        values: any numbers.
        floor: the least value that stays.
        ceiling: the largest value that stays.
    """
    with np.errstate(invalid="ignore"):
        return np.where((values < floor) | (values > ceiling), np.nan, values)


def mean_and_std(x: NDArray[Any]) -> tuple[float, float]:
    """Return mean and standard deviation without overflow or underflow of squares.

    Args:
        x: any numbers.
    """
    unit = float(np.abs(x).max()) or 1.0
    return float((x / unit).mean()) * unit, float((x / unit).std()) * unit


@final
@dataclass(frozen=True)
class Category(Checked):
    """The encoder of a column of categories: one 0/1 column for each.

    A category that is not in the training rows has zeros only, or is among the others.

    Args:
        name: of the column.
        levels: the categories of the training rows.
        others: whether one more column stands for all other categories, the rare ones of the
            training rows and those that are not in them.
    """

    name: str
    levels: tuple[str, ...]
    others: bool = later_field(False)

    def __post_init__(self) -> None:
        """Check the types of the fields."""
        self._check_kind(str, "name")
        self._check_kind(bool, "others")
        self._check_words("levels")

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the inputs that it becomes."""
        levels = (*self.levels, OTHER_LEVELS) if self.others else self.levels
        return tuple(f"{self.name}={level}" for level in levels)

    def distance(self, column: Column) -> NDArray[np.float64]:
        """Return 0 for every row: categories have no range.

        Args:
            column: the cells of all rows.
        """
        return np.zeros(len(column))

    def encode(self, column: Column, notes: CellNotes) -> list[NDArray[np.float64]]:
        """Return the inputs of the network, one array for each.

        Args:
            column: the cells of all rows.
            notes: to which one about unknown categories is added.
        """
        index = {level: i for i, level in enumerate(self.levels)}
        levels = [level or MISSING_LEVEL for level in column.levels]
        codes = np.array([index.get(level, -1) for level in levels])
        if not self.others:
            notes.add_values(
                self.name,
                "unknown",
                int(np.count_nonzero(codes < 0)),
                set(levels) - set(self.levels),
                lambda count, values: (
                    f"Column {self.name!r}: {count} cells have categories that are not in the "
                    f"training data ({values}); they are encoded as none of the known ones."
                ),
            )
        indices = [*range(len(self.levels)), -1] if self.others else range(len(self.levels))
        return [(codes == i).astype(np.float64) for i in indices]
