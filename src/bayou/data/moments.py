"""Dates and times of day in text: the one parser of them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, final

DAY: Final = 86_400  # seconds
EPOCH: Final = datetime.date(1970, 1, 1).toordinal()
_YEAR_FIRST: Final = re.compile(
    r"(?P<year>\d{4})[-/.](?P<month>\d{1,2})([-/.](?P<day>\d{1,2}))?(?!\d)"
)
_YEAR_LAST: Final = re.compile(
    r"(?P<first>\d{1,2})(?P<mark>[-/.])(?P<second>\d{1,2})[-/.](?P<year>\d{4}|\d{2})(?!\d)"
)
_CLOCK: Final = re.compile(
    r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(:(?P<second>\d{2}(\.\d+)?))?\s*(?P<half>[AaPp][Mm])?"
    r"\s*(?P<zone>Z|UTC|[+-]\d{2}:?\d{2})?"
)
_LAST_MONTH: Final = 12
_CENTURY_TURN: Final = 69  # years of two digits below are of this century

YearPlace = Literal["first", "last"]
DateOrder = Literal["year", "day", "month"]  # what a date begins with


@final
@dataclass(frozen=True)
class Moment:
    """A date, a time of day or both, on the clock that wrote them.

    Args:
        day: days since 1970-01-01; 0 for a time of day alone.
        seconds: since midnight; 0 for a date alone.
        offset: how far the clock is ahead of UTC, in seconds; 0 if no zone is given.
        year: where the year of a date with a month and a day is written, "first" or "last"; None
            for a month or a time of day alone, and for a date with a time of day such as 24:00.
    """

    day: int
    seconds: float = 0.0
    offset: float = 0.0
    year: YearPlace | None = None

    @classmethod
    def parse(cls, text: str, *, is_day_first: bool = False) -> Moment | None:
        """Return the moment that a text names; None for other text.

        Dates are written ``2024-03-31``, ``2024-03``, ``31.3.2024`` or ``3/31/2024``, with or
        without a time of day ``13:30``, ``13:30:15.25Z`` or ``1:30 PM +02:00``.

        Args:
            text: a date, a time of day, or both.
            is_day_first: whether a date with the year at the end begins with the day.
        """
        text = text.strip()
        match = _YEAR_FIRST.match(text) or _YEAR_LAST.match(text)
        if match is None:
            return cls._of_clock(0, text, year=None)
        numbers = match.groupdict()
        try:
            day = _day(numbers, is_day_first)
        except ValueError:  # a month of 30 days has no 31st
            return None
        year: YearPlace | None = None
        if "first" in numbers:
            year = "last"
        elif numbers["day"] is not None:
            year = "first"
        clock = text[match.end() :]
        if not clock:
            return cls(day, year=year)
        if clock[0] not in "T ":
            return None
        return cls._of_clock(day, clock.lstrip("T "), year=year)

    @classmethod
    def _of_clock(cls, day: int, text: str, *, year: YearPlace | None) -> Moment | None:
        """Return a day with a time of day; None for other text."""
        clock = _CLOCK.fullmatch(text)
        if clock is None:
            return None
        hour = int(clock["hour"])
        if clock["half"]:
            hour = hour % 12 + (12 if clock["half"].lower() == "pm" else 0)
        minute = int(clock["minute"])
        second = float(clock["second"] or 0)
        is_of_one_day = hour < 24 and minute < 60 and second < 60
        seconds = 3600 * hour + 60 * minute + second
        return cls(day, seconds, _offset(clock["zone"]), year if is_of_one_day else None)

    @property
    def days(self) -> float:
        """Days since 1970-01-01 on the clock that wrote it, in whole seconds."""
        return self.day + int(self.seconds) / DAY

    @property
    def utc_seconds(self) -> float:
        """Seconds since 1970-01-01 in UTC."""
        return self.day * DAY + self.seconds - self.offset


def find_order(cells: Iterable[str]) -> DateOrder | None:
    """Return what dates with the year at the end begin with; None if their order is not clear.

    A number above 12 is a day. Dates with points, ``31.3.2024``, begin with the day.

    Args:
        cells: text.
    """
    dates = [match for cell in cells if (match := _YEAR_LAST.match(cell))]
    if any(int(match["first"]) > _LAST_MONTH for match in dates):
        return "day"
    if any(int(match["second"]) > _LAST_MONTH for match in dates):
        return "month"
    return "day" if any(match["mark"] == "." for match in dates) else None


def begin_with_day(cells: Iterable[str]) -> bool:
    """Return whether dates with the year at the end begin with the day.

    Where their order is not clear, the month of ``1/2/2024`` is the first number, the day of
    ``1-2-2024``.

    Args:
        cells: text.
    """
    cells = list(cells)
    order = find_order(cells)
    if order is not None:
        return order == "day"
    dates = [match for cell in cells if (match := _YEAR_LAST.match(cell))]
    return any(match["mark"] != "/" for match in dates)


def _day(numbers: dict[str, str | None], is_day_first: bool) -> int:
    """Return the day that was written, counted from 1970-01-01, or raise a ValueError."""
    year = int(numbers["year"] or 0)
    if "first" not in numbers:
        month = int(numbers["month"] or 1)
        return datetime.date(year, month, int(numbers["day"] or 1)).toordinal() - EPOCH
    if len(numbers["year"] or "") == 2:
        year += 2000 if year < _CENTURY_TURN else 1900
    first = int(numbers["first"] or 0)
    second = int(numbers["second"] or 0)
    month, day = (second, first) if is_day_first else (first, second)
    return datetime.date(year, month, day).toordinal() - EPOCH


def _offset(zone: str | None) -> float:
    """Return how far a zone is ahead of UTC, in seconds."""
    if not zone or zone in ("Z", "UTC"):
        return 0.0
    size = 3600 * int(zone[1:3]) + 60 * int(zone[-2:])
    return float(size if zone[0] == "+" else -size)
