"""Splits by group and by time: which rows they hold out, and what a report says about them."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayou.data import DataSet, load
from bayou.data.columns import Column
from bayou.data.splits import EncodedRows, SplitRule, compare_splits, rule_of_groups
from bayou.data.times import times_of
from tests.data.errors import refused

Row = tuple[Any, ...]


def write_rows(path: Path, header: str, rows: list[Row]) -> Path:
    """Write rows as a CSV file."""
    lines = [",".join(map(str, row)) for row in (header.split(), *rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def visits(tmp_path: Path) -> Path:
    """A file of 40 patients with eight visits each, whose y depends on the patient."""
    random = np.random.default_rng(0)
    features = random.normal(size=(40, 3))
    levels = random.normal(size=40)
    rows = []
    for visit in random.permutation(320):
        patient = visit % 40
        start = date(2021, 1, 1) + timedelta(days=int(visit))
        numbers = [*features[patient], random.normal()]
        y = numbers[3] + levels[patient] + 0.1 * random.normal()
        rows.append((f"P{patient}", start, *(f"{value:.6f}" for value in (*numbers, y))))
    return write_rows(tmp_path / "visits.csv", "patient_id day a b c d y", rows)


def cells(path: Path, name: str) -> np.ndarray:
    """Return a column of a file as text."""
    header, *lines = path.read_text().splitlines()
    place = header.split(",").index(name)
    return np.array([line.split(",")[place] for line in lines])


def test_rows(path: Path, data: DataSet) -> np.ndarray:
    """Return the numbers of the test rows, found by y."""
    y = np.array(cells(path, "y"), float)
    test = data.test[1].double().numpy()[:, 0] * data.y_scale + data.y_mean
    nearest = np.abs(y[None] - test[:, None])
    assert nearest.min(1).max() < 1e-5
    return nearest.argmin(1)


test_rows.__test__ = False  # type: ignore[attr-defined]


def test_no_group_is_on_both_sides(visits: Path) -> None:
    data = load(visits, target="y", group="patient_id")
    patients = cells(visits, "patient_id")
    is_test = np.zeros(320, bool)
    is_test[test_rows(visits, data)] = True
    assert is_test.sum() == 64
    assert not set(patients[is_test]) & set(patients[~is_test])
    assert not any("patient" in name for name in data.feature_names)
    assert data.feature_names[-4:] == ("a", "b", "c", "d")
    assert data.groups is not None
    training_patients = patients[~is_test]
    groups = data.groups.numpy()
    pairs = set(zip(groups, training_patients, strict=True))
    assert len(pairs) == len(set(groups)) == len(set(training_patients)) == 32


def test_other_splits_hold_out_other_groups(visits: Path) -> None:
    first, second = (
        set(test_rows(visits, load(visits, target="y", group="patient_id", split=split)).tolist())
        for split in (0, 1)
    )
    assert first != second


def test_the_latest_rows_are_the_test_rows(visits: Path) -> None:
    data = load(visits, target="y", split_by_time="day", drop=["day"])
    days = cells(visits, "day")
    latest = test_rows(visits, data)
    assert len(latest) == 64
    assert min(days[latest]) > max(np.delete(days, latest))
    assert data.times is not None
    assert np.array_equal(np.argsort(data.times.numpy()), np.argsort(np.delete(days, latest)))
    with refused("there is one split by time, 0; got 1"):
        load(visits, target="y", split_by_time="day", split=1)


def test_a_time_of_numbers_is_an_input_too(tmp_path: Path) -> None:
    rows = [(year, i % 7, i) for i, year in enumerate(np.arange(100) // 4 + 1990)]
    path = write_rows(tmp_path / "t.csv", "year a y", rows)
    data = load(path, target="y", split_by_time="year")
    assert data.feature_names == ("year", "a")
    assert sorted(test_rows(path, data)) == list(range(80, 100))


@pytest.mark.parametrize("kind", ["group", "split_by_time"])
def test_test_rows_with_new_classes_are_mentioned(tmp_path: Path, kind: str) -> None:
    rows = [(i // 10, f"{i / 7:.3f}", "new" if i >= 90 else "ab"[i % 2]) for i in range(100)]
    path = write_rows(tmp_path / "t.csv", "when x y", rows)
    for split in range(20 if kind == "group" else 1):
        data = load(path, target="y", **{kind: "when"}, split=split)
        is_seen = bool((data.train[1] == data.class_names.index("new")).any())
        note = "A class has test rows, but no training rows, with this split."
        assert (note in data.notes) == (not is_seen)


def test_rows_without_a_group_are_groups_of_their_own(tmp_path: Path) -> None:
    rows = [("" if i % 2 else f"g{i % 4}", i % 7, i / 3) for i in range(60)]
    data = load(write_rows(tmp_path / "t.csv", "shop a y", rows), target="y", group="shop")
    assert data.groups is not None
    assert "30 rows have no value in 'shop': each is a group of its own." in data.notes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group": "patient_id", "split_by_time": "day"}, "got --group and --split-by-time; give"),
        ({"group": "y"}, "'y' is the target; --group needs another column"),
        ({"group": "patient"}, "no column 'patient' .did you mean 'patient_id'"),
        ({"split_by_time": "patient_id"}, "'P.*neither a number nor a date such as 2024-03-31"),
    ],
)
def test_unusable_columns_are_errors(visits: Path, options: dict[str, Any], words: str) -> None:
    with refused(words):
        load(visits, target="y", **options)


def test_large_errors_have_no_exponent() -> None:
    rows = EncodedRows(np.zeros((2, 1)), np.zeros((2, 1)))
    assert rows.format(25842.3) == "25,842"
    assert rows.format(0.16664) == "0.1666"


def test_columns_in_one_option_are_an_error_that_says_so(visits: Path) -> None:
    with refused("'patient_id, day'; give the option once for each column; its columns are"):
        load(visits, target="y", drop=["patient_id, day"])


@pytest.mark.parametrize("option", ["group", "split_by_time"])
def test_two_groups_or_times_are_too_few(tmp_path: Path, option: str) -> None:
    path = write_rows(tmp_path / "t.csv", "g a y", [(i % 2, i, i / 3) for i in range(60)])
    with refused("column 'g' has 2 different .* needs at least 3"):
        load(path, target="y", **{option: "g"})


@pytest.mark.parametrize("option", ["group", "split_by_time"])
def test_two_groups_or_times_are_left_for_the_fit(tmp_path: Path, option: str) -> None:
    rows = [(max(0, i - 57), f"{i % 7}", i / 3) for i in range(60)]  # 58 rows, one and one
    path = write_rows(tmp_path / "t.csv", "g a y", rows)
    for split in range(1 if option == "split_by_time" else 6):
        data = load(path, target="y", **{option: "g"}, split=split, test_fraction=0.5)
        blocks = data.groups if option == "group" else data.times
        assert blocks is not None
        assert len(blocks.unique()) == 2


def test_a_row_without_a_time_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.csv", "g a y", [(i or "", i, i / 3) for i in range(60)])
    with refused("1 of 60 rows have no value there, first row 1"):
        load(path, target="y", split_by_time="g")


# --- what changes with another split ------------------------------------------------------------


def test_a_split_by_group_is_compared_with_a_random_one(visits: Path) -> None:
    at_random = load(visits, target="y").split_notes
    by_group = load(visits, target="y", group="patient_id").split_notes
    assert at_random[0] == "Test rows: 64 of 320 rows, at random (--split)."
    assert any("Split by group (--group patient_id)" in note for note in at_random)
    assert any("Split by time (--split-by-time day)" in note for note in at_random)
    assert by_group[0].startswith("Test rows: 64 of 320 rows, all those of 8 of 40 groups")
    assert len(by_group) == 2
    assert by_group[1].startswith("Split at random, the RMSE of a reference model")
    assert by_group[1].endswith(": lower.")


def test_nothing_is_compared_without_groups_and_dates(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = [tuple(f"{value:.4f}" for value in row) for row in random.normal(size=(100, 3))]
    data = load(write_rows(tmp_path / "t.csv", "a b y", rows), target="y")
    assert data.split_notes == ["Test rows: 20 of 100 rows, at random (--split)."]


def test_the_reference_errors_are_those_of_known_and_new_groups() -> None:
    random = np.random.default_rng(0)
    number = np.arange(100).repeat(10)
    features = random.normal(size=(100, 2))
    levels = random.normal(size=100)
    y = (levels[number] + 0.1 * random.normal(size=1000))[:, None]
    rule = rule_of_groups(Column.of([f"g{i}" for i in number]), "g", [])
    rows = EncodedRows(features[number], y, unit=10.0)
    model, errors = compare_splits(rows, [SplitRule(), rule])
    assert model == "mean of 5 neighbors"
    # Five rows of the same group: 0.1·√(1 + 1/5). Rows of another group: the levels of two groups.
    assert 0.9 < errors["at random"] / (10 * 0.1 * np.sqrt(1.2)) < 1.2
    assert 10 < errors["by group (--group g)"] < 20


def test_the_reference_error_of_classes_is_a_percentage() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(1000, 2))
    y = (x[:, 0] + 0.5 * random.normal(size=1000) > 0).astype(int)
    number = Column.of([f"g{i % 50}" for i in range(1000)])
    rows = EncodedRows(x, y, is_classification=True)
    _, errors = compare_splits(rows, [SplitRule(), rule_of_groups(number, "g", [])])
    for error in errors.values():  # the best possible: arctan(0.5)/π = 14.8 %, ± 1.1 of 1,000 rows
        assert 14.8 - 4 * 1.1 < error < 14.8 + 4 * 1.1


# --- times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cells",
    [
        ["2023-12-31", "2024-01-01", "2024-02-01"],
        ["2023/12/31", "2024/1/1", "2024/02/01"],
        ["2023-12", "2024-01", "2024-02"],
        ["31.12.2023", "1.1.2024", "1.2.2024"],
        ["12/31/2023", "1/1/2024", "2/1/2024"],
        ["31/12/2023", "1/1/2024", "1/2/2024"],
        ["1/2/2023", "1/3/2023", "2/1/2023"],
        ["31.12.99", "1.1.00", "1.2.24"],
        ["2024-01-01T09:59:59", "2024-01-01T10:00", "2024-01-01T10:00:00.5"],
        ["2024-01-01 12:30 AM", "2024-01-01 1:00 AM", "2024-01-01 12:05 PM"],
        ["2024-01-01T12:00+05:00", "2024-01-01T12:00Z", "2024-01-01T12:00-0330"],
        ["9:59", "10:00", "10:00:01"],
        ["-5", "9", "1e3"],
    ],
)
def test_times_increase(cells: list[str]) -> None:
    times = times_of(Column(cells), "t")
    assert bool((np.diff(times) > 0).all())
    assert np.array_equal(times_of(Column(cells[::-1]), "t"), times[::-1])


def test_dates_are_seconds() -> None:
    first, second = times_of(Column(["2024-02-28", "2024-03-01 06:00"]), "t")
    assert second - first == 2.25 * 86400  # a leap year


@pytest.mark.parametrize("cell", ["2024-13-01", "30.2.2024", "soon", "2024-01-01 noon"])
def test_what_is_no_time_is_an_error(cell: str) -> None:
    with refused("row 2 has .*neither a number nor a date"):
        times_of(Column(["2024-01-01", cell]), "t")
