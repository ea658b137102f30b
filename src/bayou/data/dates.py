"""Dates as numbers: days of ISO dates, and the encoder of a column of dates."""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final, get_args

import numpy as np
from numpy.typing import NDArray

from bayou.core.specs import Checked, later_field
from bayou.data.cell_notes import CellNotes
from bayou.data.columns import Column, quote
from bayou.data.encoders import inside_range
from bayou.data.moments import EPOCH, DateOrder, Moment
from bayou.training.sentinels import valid_range

Days = NDArray[np.float64]

PARTS: Final = ("trend", "year", "season", "weekday", "hour")
WEEKDAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
DAYS_OF_YEAR: Final = 365.25
MIN_DATE_SHARE: Final = 0.9  # of the present cells of a column of dates
MIN_RANGE: Final = 1e-6  # of a part that varies; less than a second in a day is rounding
# Dates of databases and spreadsheets that stand for a missing one or for no end, as 999 does among
# numbers.
CODES: Final = (
    datetime.date(1753, 1, 1),
    datetime.date(1899, 12, 30),
    datetime.date(1899, 12, 31),
    datetime.date(1900, 1, 1),
    datetime.date(1970, 1, 1),
    datetime.date(2099, 12, 31),
    datetime.date(2262, 4, 11),
    datetime.date(2999, 12, 31),
)
# Of dates that are right: those in the years 1 and 9999 are codes, however many there are.
YEARS: Final = (2, 9998)
_EPOCH_WEEKDAY: Final = 3  # a Thursday, from Monday = 0


def parse_dates(cells: Sequence[str], order: DateOrder = "year") -> Days:
    """Return days since 1970-01-01 with the time of day as a fraction; nan for other cells.

    A date is written 2024-02-29, 2024/2/29 or 2024-02-29T13:30:00Z, with the year first, or with
    the year at the end, 29.2.2024 or 2/29/2024, if the order says so. A time zone is left out: the
    day and the hour are those on the clock that wrote them.

    Args:
        cells: text.
        order: of dates with the year at the end, "day" or "month" first; "year" (default) does not
            take them for dates, since their day and month are not clear.
    """
    known = {cell: _parse_date(cell, order) for cell in set(cells)}
    return np.array([known[cell] for cell in cells], dtype=np.float64)


def _parse_date(cell: str, order: DateOrder) -> float:
    """Return the days of one date; nan for other text."""
    moment = Moment.parse(cell, is_day_first=order == "day")
    if moment is None or moment.year is None or (moment.year == "last" and order == "year"):
        return math.nan
    return moment.days


@final
@dataclass(frozen=True)
class Date(Checked):
    """The encoder of a column of dates: trend, year, season, weekday and hour, as far as they vary.

    The trend is (days − mean)/scale, and the year the same of its first of January. Season and hour
    are the sine and cosine of the fraction of the year and of the day, the weekday seven 0/1
    columns. A missing date is the median, with a 0/1 column that says so. Codes such as 9999-12-31,
    far from all other dates, count as missing.

    Args:
        name: of the column.
        parts: those of ``PARTS`` that it becomes.
        mean: of the training dates, in days since 1970-01-01.
        scale: their standard deviation, or 1 if it is 0.
        median: of the training dates, for a missing one.
        indicator: adds a 0/1 column for missing dates.
        low: the first training date.
        high: the last training date.
        floor: earlier dates count as missing, as 0001-01-01 does.
        ceiling: later dates count as missing, as 9999-12-31 does.
        order: what dates with the year at the end begin with, "day" or "month"; "year" (default) if
            only dates with the year first count.
    """

    name: str
    parts: tuple[str, ...]
    mean: float = 0.0
    scale: float = 1.0
    median: float = 0.0
    indicator: bool = False
    low: float = -sys.float_info.max
    high: float = sys.float_info.max
    floor: float = later_field(-sys.float_info.max)
    ceiling: float = later_field(sys.float_info.max)
    order: DateOrder = later_field("year")

    def __post_init__(self) -> None:
        """Check the types and ranges of the fields."""
        self._check_kind(str, "name")
        self._check_kind(bool, "indicator")
        self._check_words("parts")
        self._check_finite("mean", "scale", "median", "low", "high", "floor", "ceiling")
        self._check_positive("scale")
        self._check_choice("order", get_args(DateOrder))
        unknown = [component for component in self.parts if component not in PARTS]
        if unknown:
            raise ValueError(f"Date parts must be of {', '.join(PARTS)}, got {unknown[0]!r}")

    @staticmethod
    def fit(name: str, days: Days, order: DateOrder = "year") -> Date | None:
        """Fit the encoding to the training dates; None if they are all the same.

        Args:
            name: of the column.
            days: since 1970-01-01; nan where a date is missing.
            order: of the dates of new rows, see ``parse_dates``.
        """
        floor, ceiling = _valid_range(days)
        days = inside_range(days, floor, ceiling)
        is_missing = np.isnan(days)
        present = days[~is_missing]
        if not len(present):
            return None
        varying = {
            component: any(
                np.ptp(values) > MIN_RANGE for values in _columns_of(component, present, 0.0, 1.0)
            )
            for component in PARTS
        }
        parts = tuple(component for component in PARTS if varying[component])
        if not parts and not is_missing.any():
            return None
        return Date(
            name,
            parts,
            mean=float(present.mean()),
            scale=float(present.std()) or 1.0,
            median=float(np.quantile(present, 0.5, method="lower")),
            indicator=bool(is_missing.any()),
            low=float(present.min()),
            high=float(present.max()),
            floor=floor,
            ceiling=ceiling,
            order=order,
        )

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the inputs that it becomes."""
        names: list[str] = []
        for component in self.parts:
            if component == "weekday":
                names += [f"{self.name} is a {day}" for day in WEEKDAYS]
            elif component in ("season", "hour"):
                names += [f"{self.name} {component} (sine)", f"{self.name} {component} (cosine)"]
            else:
                names.append(f"{self.name} {component}")
        if self.indicator:
            names.append(f"{self.name} is missing")
        return tuple(names)

    def describe(self) -> str:
        """Return a note about what the column becomes."""
        order = "" if self.order == "year" else f" with the {self.order} first"
        return f"Column {self.name!r} has dates{order}, used as {', '.join(self.parts)}."

    def encode(self, column: Column, notes: CellNotes) -> list[NDArray[np.float64]]:
        """Return the inputs of the network, one array for each.

        Args:
            column: the cells of all rows.
            notes: to which those about unusual cells are added.
        """
        days = parse_dates(column.levels, self.order)
        valid = inside_range(days, self.floor, self.ceiling)
        is_missing = np.isnan(valid)
        is_bad = np.isnan(days) & np.array([level != "" for level in column.levels])
        notes.add(
            self.name,
            "bad",
            is_bad,
            lambda count, first: (
                f"Column {self.name!r}: {count} cells are not dates with the {self.order} first "
                f"({first}); they count as missing."
            ),
            column.describe_first,
        )
        notes.add(
            self.name,
            "sentinel",
            is_missing & ~np.isnan(days),
            self._describe_sentinels,
            column.describe_first,
        )
        if not self.indicator:
            notes.add(self.name, "missing", is_missing, self._describe_missing)
        complete = np.where(is_missing, self.median, valid)
        inputs: list[NDArray[np.float64]] = []
        for component in self.parts:
            inputs += _columns_of(component, complete, self.mean, self.scale)
        if self.indicator:
            inputs.append(is_missing.astype(np.float64))
        return inputs

    def _describe_missing(self, count: int, _: str) -> str:
        """Return a note about missing dates that are filled with the median."""
        return (
            f"Column {self.name!r}: {count} missing dates, none of them in training; filled with "
            f"the median {quote(_format_day(self.median))}."
        )

    def distance(self, column: Column) -> NDArray[np.float64]:
        """Return the distance of each date from the range of the training dates.

        It is in standard deviations, and 0 inside the range and for a missing date.

        Args:
            column: the cells of all rows.
        """
        days = inside_range(parse_dates(column.levels, self.order), self.floor, self.ceiling)
        distance = np.maximum(self.low - days, days - self.high) / self.scale
        return np.fmax(distance, 0.0)

    def _describe_sentinels(self, count: int, first: str) -> str:
        """Return a note about the dates that count as missing although they are dates."""
        subject = "1 date is" if count == 1 else f"{count:,} dates are"
        return (
            f"Column {self.name!r}: {subject} far from all others ({first}; the others lie between "
            f"{_format_day(self.low)} and {_format_day(self.high)}); counted as missing, because "
            "standardized with it the others would all be the same. If it stands for a missing "
            "date or for no end, leave the cell blank."
        )


def _valid_range(days: Days) -> tuple[float, float]:
    """Return the range outside of which a date of this column counts as missing."""
    first, last = (_days_of(datetime.date(year, 1, 1)) for year in (YEARS[0], YEARS[1] + 1))
    codes = frozenset(map(_days_of, CODES))
    floor, ceiling = valid_range(
        inside_range(days, first, last - MIN_RANGE), lambda day: math.floor(day) in codes
    )
    floor, ceiling = max(floor, first), min(ceiling, last - MIN_RANGE)
    if np.isnan(inside_range(days, floor, ceiling)).all():  # nothing else to compare them with
        return -sys.float_info.max, sys.float_info.max
    return floor, ceiling


def _days_of(date: datetime.date) -> int:
    """Return the days of a date since 1970-01-01."""
    return date.toordinal() - EPOCH


def _format_day(days: float) -> str:
    """Return the date of days since 1970-01-01, as it is written."""
    return datetime.date.fromordinal(EPOCH + math.floor(days)).isoformat()


def _columns_of(component: str, days: Days, mean: float, scale: float) -> list[Days]:
    """Return the inputs of one part of dates without missing ones."""
    if component == "trend":
        return [(days - mean) / scale]
    whole = np.floor(days)
    dates = whole.astype(np.int64).astype("datetime64[D]")
    new_year = dates.astype("datetime64[Y]").astype("datetime64[D]").astype(np.int64)
    if component == "year":
        return [(new_year.astype(np.float64) - mean) / scale]
    if component == "weekday":
        weekday = (whole + _EPOCH_WEEKDAY) % 7
        return [(weekday == index).astype(np.float64) for index in range(7)]
    fraction = days - whole if component == "hour" else (whole - new_year) / DAYS_OF_YEAR
    return [np.sin(2 * np.pi * fraction), np.cos(2 * np.pi * fraction)]
