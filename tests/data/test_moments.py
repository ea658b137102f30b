"""The parser of dates and times of day, against Python's datetime."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from bayou.data.moments import Moment, begin_with_day

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LATER = timezone(timedelta(hours=2))


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("2024-02-29", datetime(2024, 2, 29, tzinfo=UTC)),
        ("1969/7/20 20:17", datetime(1969, 7, 20, 20, 17, tzinfo=UTC)),
        ("2024-02-29T13:30:15.25", datetime(2024, 2, 29, 13, 30, 15, 250_000, tzinfo=UTC)),
        ("2024-02-29T13:30:00+02:00", datetime(2024, 2, 29, 13, 30, tzinfo=LATER)),
        ("2024-02-29 1:30 PM", datetime(2024, 2, 29, 13, 30, tzinfo=UTC)),
        ("2024-02-29 13:30 UTC", datetime(2024, 2, 29, 13, 30, tzinfo=UTC)),
        ("2024-03", datetime(2024, 3, 1, tzinfo=UTC)),
        ("3/4/2024", datetime(2024, 3, 4, tzinfo=UTC)),
        ("3/4/68", datetime(2068, 3, 4, tzinfo=UTC)),
        ("3/4/70", datetime(1970, 3, 4, tzinfo=UTC)),
        ("  13:30 ", datetime(1970, 1, 1, 13, 30, tzinfo=UTC)),
    ],
)
def test_moments_are_those_of_datetime(text: str, known: datetime) -> None:
    moment = Moment.parse(text)
    assert moment is not None
    assert moment.utc_seconds == pytest.approx((known - EPOCH).total_seconds())


def test_days_are_those_of_the_clock_that_wrote_them() -> None:
    moment = Moment.parse("2024-02-29T23:30:00-05:00")
    assert moment is not None
    day = datetime(2024, 2, 29, tzinfo=UTC)
    assert moment.days == pytest.approx((day - EPOCH).days + 23.5 / 24)
    assert moment.utc_seconds == ((day - EPOCH) + timedelta(hours=28.5)).total_seconds()


def test_the_day_may_be_first() -> None:
    first, second = (Moment.parse("3/4/2024", is_day_first=flag) for flag in (False, True))
    assert first is not None
    assert second is not None
    assert second.day - first.day == 30  # April 3 and March 4
    assert begin_with_day(["1/2/2024", "31/12/2023"])
    assert begin_with_day(["1.2.2024"])
    assert not begin_with_day(["1/2/2024"])
    assert not begin_with_day(["1-2-2024", "12-31-2023"])


@pytest.mark.parametrize(
    ("text", "year"),
    [
        ("2024-02-29", "first"),
        ("2024-02-29 23:59:59", "first"),
        ("2024-02-29 24:30", None),
        ("2024-02", None),
        ("1.2.2024", "last"),
        ("1.2.2024 24:30", None),
        ("13:30", None),
    ],
)
def test_only_dates_with_a_month_and_a_day_have_a_place_of_the_year(
    text: str, year: str | None
) -> None:
    moment = Moment.parse(text)
    assert moment is not None
    assert moment.year == year
