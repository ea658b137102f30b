"""Dates and columns of many categories as inputs, against Python's datetime and counts."""

import datetime
import json
import math

import numpy as np
import pytest

from bayou.core.specs import from_json, to_json
from bayou.data import load
from bayou.data.cell_notes import CellNotes
from bayou.data.columns import Column
from bayou.data.dates import PARTS, WEEKDAYS, Date, parse_dates
from bayou.data.moments import find_order
from bayou.data.preprocess import Preprocessor

EPOCH = datetime.datetime(1970, 1, 1)


@pytest.mark.parametrize(
    ("cell", "known"),
    [
        ("2024-02-29", datetime.datetime(2024, 2, 29)),
        ("2024/2/9", datetime.datetime(2024, 2, 9)),
        ("1900.12.31", datetime.datetime(1900, 12, 31)),
        ("2024-02-29T13:30", datetime.datetime(2024, 2, 29, 13, 30)),
        ("2024-02-29 13:30:15.25", datetime.datetime(2024, 2, 29, 13, 30, 15)),
        ("2024-02-29T13:30:00Z", datetime.datetime(2024, 2, 29, 13, 30)),
        ("2024-02-29T13:30:00+02:00", datetime.datetime(2024, 2, 29, 13, 30)),
    ],
)
def test_iso_dates_are_days_since_1970(cell, known):
    (days,) = parse_dates([cell])
    assert days == pytest.approx((known - EPOCH).total_seconds() / 86_400, abs=1e-9)


@pytest.mark.parametrize("cell", ["", "2023-02-29", "29/02/2024", "13:30", "2024-13-01", "soon"])
def test_other_text_is_no_date(cell):
    assert math.isnan(parse_dates([cell])[0])


def dates(count=300):
    start = datetime.datetime(2019, 12, 30, 5)
    return [start + datetime.timedelta(days=5 * i, hours=i % 11) for i in range(count)]


def test_the_inputs_are_those_of_datetime():
    moments = dates()
    cells = [moment.isoformat() for moment in moments]
    days = np.array([(moment - EPOCH).total_seconds() / 86_400 for moment in moments])
    encoder = Date.fit("when", parse_dates(cells))
    assert encoder.parts == PARTS
    inputs = dict(zip(encoder.features, encoder.encode(Column.of(cells), CellNotes()), strict=True))
    np.testing.assert_allclose(inputs["when trend"], (days - days.mean()) / days.std(), atol=1e-9)
    new_years = [datetime.datetime(moment.year, 1, 1) for moment in moments]
    first_days = np.array([(day - EPOCH).days for day in new_years])
    np.testing.assert_allclose(inputs["when year"], (first_days - days.mean()) / days.std())
    season = [2 * np.pi * (m.timetuple().tm_yday - 1) / 365.25 for m in moments]
    np.testing.assert_allclose(inputs["when season (sine)"], np.sin(season))
    np.testing.assert_allclose(inputs["when season (cosine)"], np.cos(season))
    hour = [2 * np.pi * m.hour / 24 for m in moments]
    np.testing.assert_allclose(inputs["when hour (sine)"], np.sin(hour), atol=1e-8)
    for number, name in enumerate(WEEKDAYS):
        known = [m.weekday() == number for m in moments]
        np.testing.assert_array_equal(inputs[f"when is a {name}"], known)


@pytest.mark.parametrize(
    ("cells", "parts"),
    [
        (["2024-01-01", "2025-01-01"], ("trend", "year", "weekday")),
        (["2024-01-01", "2024-01-08"], ("trend", "season")),
        (["2024-01-01T01:00", "2024-01-01T13:00"], ("trend", "hour")),
        (["2024-01-01T13:30", "2024-01-08T13:30"], ("trend", "season")),
    ],
)
def test_parts_that_do_not_vary_are_left_out(cells, parts):
    assert Date.fit("when", parse_dates(cells)).parts == parts


def test_missing_dates_are_the_median_with_an_indicator_and_bad_ones_are_told():
    cells = ["2024-01-01", "", "2024-01-03", "2024-01-05"]
    encoder = Date.fit("when", parse_dates(cells))
    notes = CellNotes()
    inputs = dict(zip(encoder.features, encoder.encode(Column.of([*cells, "x"]), notes)))  # noqa: B905
    assert inputs["when is missing"].tolist() == [0, 1, 0, 0, 1]
    assert inputs["when trend"][1] == inputs["when trend"][2] == inputs["when trend"][4]
    assert "1 cells are not dates with the year first (row 5: 'x')" in notes.sentences()[0]
    without = Date.fit("when", parse_dates([cells[0], cells[2]]))
    without.encode(Column.of(cells), notes)
    assert "filled with the median '2024-01-01'" in notes.sentences()[-1]
    far = encoder.distance(Column.of(["2023-01-01", "2024-01-02", ""]))
    assert far[0] > 10
    assert far[1:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("written", "order"),
    [
        ("{0.day}.{0.month}.{0.year}", "day"),
        ("{0.day:02d}/{0.month:02d}/{0.year}", "day"),
        ("{0.month:02d}/{0.day:02d}/{0.year} 00:00", "month"),
        ("{0.month}-{0.day}-{0:%y}", "month"),
    ],
)
def test_dates_with_the_year_at_the_end_are_those_with_the_year_first(written, order):
    days = [datetime.date(2023, 11, 3) + datetime.timedelta(days=9 * i) for i in range(40)]
    cells = [written.format(day) for day in days]
    assert find_order(cells) == order
    expected = parse_dates([day.isoformat() for day in days])
    np.testing.assert_array_equal(parse_dates(cells, order), expected)
    assert np.isnan(parse_dates(cells)).all()
    encoder = Date.fit("when", expected, order)
    assert f"has dates with the {order} first, used as trend" in encoder.describe()
    new = Column.of([written.format(datetime.date(2024, 2, 1)), "2024-02-01", "x"])
    notes = CellNotes()
    trend = encoder.encode(new, notes)[0]
    assert trend[0] == trend[1]
    assert f"are not dates with the {order} first (row 3: 'x')" in notes.sentences()[0]


@pytest.mark.parametrize("cells", [["1/2/2024", "11/12/2023"], ["1-2-2024"], ["2024-01-31"]])
def test_an_order_that_nothing_shows_is_not_guessed(cells):
    assert find_order(cells) is None


def test_the_order_of_dates_is_in_the_settings_of_a_run_only_where_the_year_is_not_first():
    days = parse_dates(["2024-01-31", "2024-02-15"])
    assert "order" not in to_json(Date.fit("when", days))
    encoder = Date.fit("when", days, "day")
    assert from_json(to_json(encoder), Date) == encoder


def spread(years):
    """Return 100 dates, evenly in so many years before 2024."""
    last = datetime.date(2024, 1, 1)
    step = years * 365 / 100
    return [(last - datetime.timedelta(days=round(step * i))).isoformat() for i in range(100)]


@pytest.mark.parametrize(
    ("years", "code"),
    [
        (1, "9999-12-31"),
        (100, "9999-12-31T23:59:59"),
        (30, "0001-01-01"),
        (30, "2999-12-31"),
        (5, "1900-01-01"),
        (5, "2262-04-11T23:47:16"),
    ],
)
def test_a_code_among_dates_counts_as_missing(years, code):
    """The other dates have the inputs that they have beside an empty cell."""
    cells = spread(years)
    expected = Date.fit("until", parse_dates(["", *cells]))
    encoder = Date.fit("until", parse_dates([code, *cells]))
    assert encoder.features == expected.features
    assert (encoder.mean, encoder.scale, encoder.low) == (
        expected.mean, expected.scale, expected.low
    )  # fmt: skip
    notes = CellNotes()
    inputs = encoder.encode(Column.of([code, *cells]), notes)
    np.testing.assert_array_equal(inputs, expected.encode(Column.of(["", *cells]), CellNotes()))
    assert inputs[-1].tolist() == [1.0] + 100 * [0.0]
    start = f"Column 'until': 1 date is far from all others (row 1: '{code}'; the others lie "
    range_of_others = f"between {cells[-1]} and 2024-01-01); counted as missing"
    assert notes.sentences()[0].startswith(f"{start}{range_of_others}")
    assert encoder.distance(Column.of([code])).tolist() == [0.0]


def test_open_ends_may_be_most_of_the_dates():
    encoder = Date.fit("until", parse_dates([*spread(3), *300 * ["9999-12-31"]]))
    assert encoder.high < 20_000
    assert "trend" in encoder.parts
    assert encoder.indicator


@pytest.mark.parametrize("code", ["9999-12-31", "0001-01-01"])
def test_codes_in_new_rows_alone_count_as_missing(code):
    encoder = Date.fit("until", parse_dates(spread(3)))
    notes = CellNotes()
    inputs = encoder.encode(Column.of([code, "2023-01-01"]), notes)
    assert np.abs(inputs[0]).max() < 3
    sentinels, missing = notes.sentences()
    assert "counted as missing" in sentinels
    assert "1 missing dates, none of them in training" in missing


def test_dates_that_are_right_are_kept():
    for cells in (spread(150), [*spread(150), "1900-01-01"], ["1970-01-01", *spread(60)]):
        days = parse_dates(cells)
        encoder = Date.fit("born", days)
        assert not encoder.indicator
        assert (encoder.low, encoder.high) == (days.min(), days.max())
    only = Date.fit("until", parse_dates(["9999-12-31", "9999-01-01"]))
    assert only.high - only.low == 364


def test_numpy_dates_are_read_as_text():
    column = Column.of(np.array(["2024-02-29T13:30:00", "NaT"], dtype="datetime64[ns]"))
    assert column.levels == ["2024-02-29T13:30:00", ""]


def write(path, rows, header="when,city,y"):
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_file_with_dates_and_many_cities_is_read_and_new_rows_alike(tmp_path):
    moments = dates(400)
    # cities 0 .. 59 have 6 rows each or fewer but for 0 and 1
    cities = [i % 2 if i < 100 else i % 80 for i in range(400)]
    rows = [
        (moment.date().isoformat(), f"c{city}", i * 0.5)
        for i, (moment, city) in enumerate(zip(moments, cities, strict=True))
    ]
    data = load(write(tmp_path / "t.csv", rows), target="y", task="regression")
    city_features = [name for name in data.feature_names if name.startswith("city=")]
    assert city_features == ["city=c0", "city=c1", "city=(other)"]
    assert any("'when' has dates, used as trend, year, season, weekday." in n for n in data.notes)
    assert any("the 2 most frequent are categories, all others are one" in n for n in data.notes)
    preprocessor = Preprocessor.from_json(json.loads(json.dumps(data.preprocessor.to_json())))
    assert preprocessor == data.preprocessor
    new = write(tmp_path / "new.csv", [("2030-01-01", "elsewhere", 1), ("", "c0", 2)])
    prepared = preprocessor.rows(new)
    index = [data.feature_names.index(name) for name in city_features]
    assert prepared.x[:, index].tolist() == [[0, 0, 1], [1, 0, 0]]
    assert prepared.distance[0] > 1
    assert any("1 missing dates, none of them in training" in note for note in prepared.notes)
