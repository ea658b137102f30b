"""Tables as people have them: odd delimiters, missing values, wrong columns; and new rows at
prediction time.
"""

from __future__ import annotations

import gzip
import json
import os
import time
import tracemalloc
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bayou.data import DataError, load, reading
from bayou.data.columns import Column, number
from bayou.data.encoders import Category, Number
from bayou.data.preprocess import Preprocessor, TablePreprocessor


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def table(
    path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]], delimiter: str = ","
) -> Path:
    lines = [delimiter.join(map(str, row)) for row in (header, *rows)]
    return write(path, "\n".join(lines) + "\n")


def flowers(path: Path, n: int = 60, delimiter: str = ",") -> Path:
    """Two numbers, a category, and three classes."""
    random = np.random.default_rng(0)
    rows = [
        (
            f"{random.normal():.3f}",
            f"{5 + 2 * random.normal():.3f}",
            ("red", "blue", "white")[i % 3],
            f"kind {i % 3}",
        )
        for i in range(n)
    ]
    return table(path, ("length", "width", "color", "species"), rows, delimiter)


# --- a plain table ---------------------------------------------------------------------------------------------------


def test_classification_of_a_plain_table(tmp_path: Path) -> None:
    data = load(flowers(tmp_path / "flowers.csv"), target="species")
    assert data.task == "classification"
    assert data.class_names == ("kind 0", "kind 1", "kind 2")
    assert data.feature_names == ("length", "width", "color=blue", "color=red", "color=white")
    assert (len(data.train[1]), len(data.test[1])) == (48, 12)
    assert data.train[0].dtype == torch.float32
    assert data.train[1].dtype == torch.int64
    assert torch.bincount(data.test[1]).tolist() == [4, 4, 4]  # each class in proportion
    torch.testing.assert_close(data.train[0][:, :2].mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        data.train[0][:, :2].std(0, correction=0), torch.ones(2), atol=1e-5, rtol=0
    )
    assert bool((data.train[0][:, 2:].sum(1) == 1).all())


def test_statistics_come_from_the_training_rows_only(tmp_path: Path) -> None:
    """Moving a test row far away changes nothing about the training rows."""
    path = flowers(tmp_path / "a.csv")
    before = load(path, target="species")
    lines = path.read_text().splitlines()
    x = before.preprocessor.transform(path)
    test_row = next(
        i for i in range(len(x)) if any(torch.equal(x[i], row) for row in before.test[0])
    )
    cells = lines[1 + test_row].split(",")
    lines[1 + test_row] = ",".join(["1000", *cells[1:]])
    after = load(write(tmp_path / "b.csv", "\n".join(lines)), target="species")
    assert torch.equal(before.train[0], after.train[0])
    assert before.preprocessor == after.preprocessor
    assert not torch.equal(before.test[0], after.test[0])


def test_regression_in_original_units(tmp_path: Path) -> None:
    rows = [(i, 1e6 + 3 * i + (i % 7)) for i in range(100)]
    data = load(table(tmp_path / "line.csv", ("x", "price"), rows), target="price")
    assert data.task == "regression"
    assert data.train[1].shape == (80, 1)
    assert data.train[1].dtype == torch.float32
    assert abs(float(data.train[1].mean())) < 1e-5
    y = torch.cat([data.train[1], data.test[1]])
    original = data.preprocessor.original(y.double()).flatten().sort().values
    expected = torch.tensor([price for _, price in rows], dtype=torch.float64).sort().values
    torch.testing.assert_close(original, expected, atol=1e-3, rtol=0)


def test_splits_are_a_function_of_seed_and_split(tmp_path: Path) -> None:
    path = flowers(tmp_path / "flowers.csv")
    same, again = load(path, target="species", seed=3), load(path, target="species", seed=3)
    assert torch.equal(same.train[0], again.train[0])
    for other in (
        load(path, target="species", seed=4),
        load(path, target="species", seed=3, split=1),
    ):
        assert not torch.equal(same.test[0], other.test[0])
    assert len(load(path, target="species", test_fraction=0.5).test[1]) == 30


def test_thousands_of_rows_are_quick(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    columns = [np.char.mod("%.5f", random.normal(size=20_000)) for _ in range(10)]
    columns.append(
        np.where(random.random(20_000) < 0.01, "", np.char.mod("%.3f", random.normal(size=20_000)))
    )
    columns.append(random.choice(["a", "b", "c"], 20_000))
    path = table(
        tmp_path / "large.csv", [f"x{i}" for i in range(12)], list(zip(*columns, strict=True))
    )
    start = time.process_time()
    data = load(path, target="x11")
    assert time.process_time() - start < 4.0
    assert abs(data.n - 16_000) <= 2  # each class is rounded


# --- files as they come ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|", " "])
def test_delimiters_are_found(tmp_path: Path, delimiter: str) -> None:
    rows = [(i, i * i, "no" if i % 2 else "yes") for i in range(20)]
    data = load(table(tmp_path / "t.csv", ("a", "b", "answer"), rows, delimiter), target="answer")
    assert data.feature_names == ("a", "b")
    assert data.class_names == ("no", "yes")


def test_tsv_and_gzip(tmp_path: Path) -> None:
    plain = flowers(tmp_path / "t.tsv", delimiter="\t")
    packed = tmp_path / "t.csv.gz"
    packed.write_bytes(gzip.compress(flowers(tmp_path / "t.csv").read_bytes()))
    one, two = load(plain, target="species"), load(packed, target="species")
    assert torch.equal(one.train[0], two.train[0])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp1252"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    text = flowers(tmp_path / "t.csv").read_text().replace("length", "länge")
    data = load(write(tmp_path / "e.csv", text, encoding), target="species")
    assert data.feature_names[0] == "länge"


def test_quotes_thousands_currency_and_decimal_commas(tmp_path: Path) -> None:
    rows = [f'"{i},{500 + i % 9}.5","${i}.25",{i % 2}' for i in range(1, 30)]
    data = load(write(tmp_path / "q.csv", "\n".join(["a,b,y", *rows])), target="y")
    first = data.preprocessor.columns[0]  # type: ignore[attr-defined]
    assert isinstance(first, Number)
    assert 1_500 < first.mean < 30_000
    rows = [f"{i},5;{i % 2}" for i in range(20)]
    data = load(write(tmp_path / "s.csv", "\n".join(["a;y", *rows])), target="y")
    torch.testing.assert_close(
        data.preprocessor.transform({"a": ["3.5"]}),
        data.preprocessor.transform(write(tmp_path / "n.csv", "a;z\n3,5;1\n")),
    )


@pytest.mark.parametrize(
    ("text", "comma", "expected"),
    [
        ("1.5", False, 1.5),
        (" '12' ", False, 12.0),
        ("1,234,567.5", False, 1234567.5),
        ("€ 3", False, 3.0),
        ("12 %", False, 12.0),
        ("-3,14", True, -3.14),
        ("1.234.567,5", True, 1234567.5),
        ("1.234,5", False, None),
        ("0,125", False, None),
        ("0,125", True, 0.125),
        ("1e-3", False, 1e-3),
        ("1,23", False, None),
        ("1_000", False, None),
        ("twelve", False, None),
    ],
)
def test_numbers_as_people_write_them(text: str, comma: bool, expected: float | None) -> None:
    assert number(text, comma) == expected


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
def test_decimal_commas_whatever_the_delimiter(tmp_path: Path, delimiter: str) -> None:
    cells = [f"{i}.37".replace(".", ",") for i in range(40)]
    quote = '"' if delimiter == "," else ""
    rows = [(quote + cell + quote, quote + cell + quote) for cell in cells]
    data = load(table(tmp_path / "comma.csv", ("a", "y"), rows, delimiter), target="y")
    assert data.task == "regression"
    assert abs(data.y_mean - 19.87) < 4


def test_thousands_are_not_taken_for_decimal_commas(tmp_path: Path) -> None:
    rows = [(f'"{i},500"', i % 2) for i in range(1, 40)]
    data = load(table(tmp_path / "t.csv", ("a", "y"), rows), target="y")
    assert data.preprocessor.columns[0].mean > 1000  # type: ignore[attr-defined]


def test_lines_that_end_as_on_old_macs(tmp_path: Path) -> None:
    text = flowers(tmp_path / "f.csv").read_text()
    data = load(write(tmp_path / "mac.csv", text.replace("\n", "\r")), target="species")
    assert torch.equal(data.train[0], load(tmp_path / "f.csv", target="species").train[0])


def test_huge_values_do_not_overflow(tmp_path: Path) -> None:
    """A column of them is standardized as any other; one that is far from the rest is moved, and
    said so.
    """
    rows = [(f"{(i % 7) - 3}e300", i, i * 1.5) for i in range(60)]
    data = load(table(tmp_path / "huge.csv", ("a", "b", "y"), rows), target="y")
    torch.testing.assert_close(data.train[0].std(0, correction=0), torch.ones(2), atol=1e-4, rtol=0)
    new = data.preprocessor.rows({"a": [0.0, 0.0], "b": ["1e300", "3"]})
    assert bool(torch.isfinite(new.x).all())
    assert new.x[0, 1] == 1e6
    assert any(
        "'b': 1 values are more than 1,000,000 standard deviations" in note for note in new.notes
    )


def measured(
    sentinel: object = None, row: int = 17, equal: bool = False
) -> list[tuple[object, ...]]:
    generator = np.random.default_rng(0)
    a, b, noise = generator.normal(size=(3, 200))
    if equal:
        a = np.where(a > 1, np.round(a), 0.0)
    rows: list[tuple[object, ...]] = [(f"{a[i]:.4f}", f"{b[i]:.4f}", f"{a[i] + b[i] + 0.1 * noise[i]:.4f}")
                                      for i in range(200)]  # fmt: skip
    if sentinel is not None:
        rows[row] = (sentinel, *rows[row][1:])
    return rows


@pytest.mark.parametrize("equal", [False, True], ids=["normal", "mostly zeros"])
@pytest.mark.parametrize("row", [17, 18], ids=["training row", "test row"])
def test_one_sentinel_does_not_destroy_a_column(tmp_path: Path, row: int, equal: bool) -> None:
    whole = load(table(tmp_path / "whole.csv", ("a", "b", "y"), measured(equal=equal)), target="y")
    blank = load(
        table(tmp_path / "blank.csv", ("a", "b", "y"), measured("", row, equal)), target="y"
    )
    data = load(
        table(tmp_path / "odd.csv", ("a", "b", "y"), measured("999999999", row, equal)), target="y"
    )
    assert 0.9 < float(data.train[0][:, 0].std() / whole.train[0][:, 0].std()) < 1.1  # it was 2e-8
    assert torch.equal(data.train[0], blank.train[0])
    assert torch.equal(data.test[0], blank.test[0])
    (note,) = [note for note in data.notes if "far from all others" in note]
    assert note.startswith(
        f"Column 'a': 1 value is far from all others (row {row + 1}: 999999999; the others lie "
    )
    assert "leave the cell blank" in note
    assert "logarithm" in note
    again = Preprocessor.from_json(json.loads(json.dumps(data.preprocessor.to_json())))
    new = again.rows({"a": [0.0, 999999999.0], "b": [0.0, 0.0]})
    assert any("row 2: 999999999" in note for note in new.notes)
    assert bool((new.x.abs() < 20).all())
    assert new.distance is not None
    assert new.distance[1] == 0
    assert not any("far from all others" in note for note in whole.notes)


def test_a_sentinel_in_the_target_is_refused(tmp_path: Path) -> None:
    rows = [(a, b, "999999999" if i == 40 else y) for i, (a, b, y) in enumerate(measured())]
    path = table(tmp_path / "odd.csv", ("a", "b", "y"), rows)
    with pytest.raises(
        DataError, match=r"'y' is 999999999 in row 41, far from all others .*leave the cell blank"
    ):
        load(path, target="y")


def test_incomes_are_measurements(tmp_path: Path) -> None:
    incomes = np.exp(10 + 1.5 * np.random.default_rng(0).normal(size=400))
    rows = [(f"{income:.2f}", i % 7) for i, income in enumerate(incomes)]
    data = load(
        table(tmp_path / "incomes.csv", ("income", "y"), rows), target="y", task="regression"
    )
    assert data.feature_names == ("income",)
    assert not data.notes


def test_what_is_odd_in_test_rows_is_said_too(tmp_path: Path) -> None:
    path = flowers(tmp_path / "f.csv")
    before = load(path, target="species")
    x = before.preprocessor.transform(path)
    held = next(i for i in range(len(x)) if any(torch.equal(x[i], row) for row in before.test[0]))
    lines = path.read_text().splitlines()
    lines[1 + held] = ",".join(["inf", *lines[1 + held].split(",")[1:]])
    data = load(write(tmp_path / "g.csv", "\n".join(lines)), target="species")
    assert (
        sum("'length': 1 missing values, none of them in training" in note for note in data.notes)
        == 1
    )


def test_missing_and_infinite_cells() -> None:
    parsed = Column(["1", "", "NA", "inf", "x", "-", "2"])
    assert parsed.missing.tolist() == [False, True, True, True, False, True, False]
    assert parsed.bad.tolist() == [False, False, False, False, True, False, False]
    assert np.isnan(parsed.values).tolist() == [False, True, True, True, True, True, False]


def test_no_header(tmp_path: Path) -> None:
    rows = [f"{i * 0.5},{i % 5},{'ab'[i % 2]}" for i in range(1, 30)]
    data = load(write(tmp_path / "n.csv", "\n".join(rows)), target="c3")
    assert data.feature_names == ("c1", "c2")
    assert data.n + len(data.test[1]) == 29
    assert any("c1 to c3" in note for note in data.notes)
    assert data.preprocessor.transform(write(tmp_path / "new.csv", "1.5,2\n2.5,3\n")).shape == (
        2,
        2,
    )
    with pytest.raises(DataError, match="'species'.*columns are 'c1', 'c2', 'c3'.*taken as data"):
        load(tmp_path / "n.csv", target="species")


def test_a_header_of_years_is_one_if_the_target_is_in_it(tmp_path: Path) -> None:
    rows = [(i, i + 0.5, i * 0.1) for i in range(20)]
    data = load(table(tmp_path / "y.csv", ("2019", "2020", "growth"), rows), target="growth")
    assert data.feature_names == ("2019", "2020")


def test_duplicate_and_blank_column_names(tmp_path: Path) -> None:
    rows = [(i, i * 2 + i % 3, i % 4, i % 2) for i in range(20)]
    data = load(table(tmp_path / "d.csv", ("", "a", "a", "y"), rows), target="y")
    assert data.feature_names == ("a", "a.2")  # the first column only is a row number
    assert any("several columns named 'a'" in note for note in data.notes)
    assert any("is a row number" in note for note in data.notes)
    with pytest.raises(DataError, match="several columns named 'a'"):
        load(tmp_path / "d.csv", target="a")


def test_trailing_delimiters_and_short_rows(tmp_path: Path) -> None:
    rows = [f"{i},{i % 3},{i % 2}," for i in range(20)]
    data = load(write(tmp_path / "t.csv", "\n".join(["a,b,y", *rows])), target="y")
    assert data.feature_names == ("a", "b")
    rows = ["1,2,0", "2,3,1", "3,1,0", "4,4,1", "5,5"] + [f"{i},{i % 3},{i % 2}" for i in range(20)]
    data = load(write(tmp_path / "s.csv", "\n".join(["a,b,y", *rows])), target="y")
    assert any("1 rows are shorter" in note for note in data.notes)
    assert any("1 of 25 rows have no value in 'y'" in note for note in data.notes)


# --- columns ---------------------------------------------------------------------------------------------------------


def columns_of(rows: list[dict[str, Any]], path: Path, target: str = "y", **more: Any) -> Any:
    return load(
        table(path, list(rows[0]), [list(row.values()) for row in rows]), target=target, **more
    )


def test_missing_values(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    rows = [
        {
            "age": "" if i % 10 == 0 else i,
            "town": "NA" if i % 7 == 0 else "AB"[i % 2],
            "y": f"{random.normal():.4f}",
        }
        for i in range(100)
    ]
    data = columns_of(rows, tmp_path / "m.csv")
    assert data.feature_names == ("age", "age is missing", "town=A", "town=B", "town=(missing)")
    flags = torch.cat([data.train[0], data.test[0]])[:, 1]
    assert flags.sum() == 10
    age = data.preprocessor.columns[0]
    x = data.preprocessor.transform({"age": ["", age.median], "town": ["A", "A"]})
    assert x[0, 0] == x[1, 0]
    assert x[:, 1].tolist() == [1.0, 0.0]
    assert bool(torch.isfinite(data.train[0]).all())


def test_what_cannot_be_used_is_dropped_with_a_note(tmp_path: Path) -> None:
    rows = [
        {
            "when": f"2024-01-{1 + i % 28:02d}",
            "name": f"customer number {i}",
            "same": 7,
            "word": "always",
            "empty": "",
            "x": i * 0.7,
            "id": i,
            "y": i % 2,
        }
        for i in range(60)
    ]
    data = columns_of(rows, tmp_path / "u.csv")
    assert data.feature_names == ("x",)
    notes = " ".join(data.notes)
    for said in (
        "'when' has dates",
        "'name' has 48 different values",
        "'same' is constant",
        "'word' is constant",
        "'empty' is empty",
        "'id' is a row number",
    ):
        assert said in notes
    rows = data.preprocessor.rows(tmp_path / "u.csv")
    assert rows.notes == []  # dropped columns are no surprise at prediction time


@pytest.mark.parametrize(
    ("name", "values", "used"),
    [
        ("customer_id", range(100, 160), False),
        ("CustomerId", [7 * i % 60 for i in range(60)], False),
        ("id", [5 * i for i in range(60)], False),
        ("ID", list(range(60)), False),
        ("humid", range(100, 160), True),
        ("amount", range(100, 160), True),
        ("customer_id", [i % 30 for i in range(60)], True),
        ("customer_id", [i + 0.5 for i in range(60)], True),
    ],
)
def test_integers_that_name_rows_are_noticed(
    name: str, values: Any, used: bool, tmp_path: Path
) -> None:
    rows = [{name: value, "x": i % 7, "y": i % 2} for i, value in enumerate(values)]
    data = columns_of(rows, tmp_path / "i.csv")
    assert data.feature_names == ((name, "x") if used else ("x",))
    assert any(repr(name) in note and "dropped" in note for note in data.notes) is not used


def test_columns_can_be_left_out(tmp_path: Path) -> None:
    path = flowers(tmp_path / "f.csv")
    data = load(path, target="species", drop=["color"], id="width")
    assert data.feature_names == ("length",)
    rows = data.preprocessor.rows(path)
    assert rows.notes == []
    assert rows.ids == [line.split(",")[1] for line in path.read_text().splitlines()[1:]]
    assert data.preprocessor.rows({"length": [1.0]}).ids is None
    with pytest.raises(DataError, match="no column 'colour' .did you mean 'color'"):
        load(path, target="species", drop=["colour"])
    with pytest.raises(DataError, match="'species' is the target"):
        load(path, target="species", id="species")
    with pytest.raises(DataError, match="--drop and --id are for a file"):
        load("moons", drop=["x1"])


def test_distance_is_measured_from_the_range_of_training() -> None:
    """max_j max(low_j − x_j, x_j − high_j, 0)/std_j; a missing number is nowhere."""
    columns = (
        Number("a", 10.0, 2.0, 11.0, True, 6.0, 14.0),
        Number("b", 0.0, 1.0, 0.0, False, -1.0, 1.0),
    )
    preprocessor = TablePreprocessor((*columns, Category("c", ("u",))), "y", "regression")
    values = {"a": [6, 14, 18, 2, np.nan, 18], "b": [0, 1, 0, -2.5, 3, 4], "c": ["u"] * 6}
    assert preprocessor.rows(values).distance.tolist() == [0.0, 0.0, 2.0, 2.0, 2.0, 3.0]  # type: ignore[union-attr]


def test_typing_errors_in_a_column_of_numbers(tmp_path: Path) -> None:
    rows = [{"x": "oops" if i == 13 else i * 1.5, "y": i % 2} for i in range(100)]
    data = columns_of(rows, tmp_path / "w.csv")
    assert data.feature_names[0] == "x"
    assert any("1 cells are not numbers (row 14: 'oops')" in note for note in data.notes)


# --- the target ------------------------------------------------------------------------------------------------------


def test_the_task_is_detected_and_can_be_overridden(tmp_path: Path) -> None:
    rows = [{"x": i * 0.3, "y": 3 + i % 6} for i in range(120)]
    data = columns_of(rows, tmp_path / "q.csv")
    assert data.class_names == ("3", "4", "5", "6", "7", "8")
    assert any("--task regression" in note for note in data.notes)
    assert load(tmp_path / "q.csv", target="y", task="regression").train[1].shape == (96, 1)
    many = [{"x": i * 0.3, "y": i} for i in range(120)]
    assert columns_of(many, tmp_path / "i.csv").task == "regression"
    truth = [{"x": i * 0.3, "y": "True" if i % 3 else "False"} for i in range(30)]
    assert columns_of(truth, tmp_path / "b.csv").class_names == ("False", "True")


def test_a_class_with_one_example(tmp_path: Path) -> None:
    rows = [{"x": i * 0.3, "y": "rare" if i == 5 else "ab"[i % 2]} for i in range(50)]
    data = columns_of(rows, tmp_path / "r.csv")
    rare = data.class_names.index("rare")
    assert (data.train[1] == rare).sum() == 1
    assert (data.test[1] == rare).sum() == 0
    assert any("A class has only one example" in note for note in data.notes)


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("", "y", "is empty"),
        ("  \n\n", "y", "is empty"),
        ("a,b,y\n", "y", "a header but no rows"),
        ("a,y\n1,0\n2,1\n", "y", "has 2 rows with a target; at least 5"),
        ("a,y\n" + "1,yes\n" * 9, "y", "has only one class, 'yes'"),
        ("a,y\n" + "1,3.5\n" * 9, "y", "3.5 in every row"),
        ("a,yield\n" + "1,3\n" * 9, "yeild", "did you mean 'yield'.*columns are 'a', 'yield'"),
        ("a,Yield\n" + "1,3\n" * 9, "yield", "did you mean 'Yield'"),
        ("a,y\n" + "1,3\n" * 9, None, "give --target, one of 'a', 'y'"),
        ("a,y\n" + "1,\n2,NA\n" * 9 + "3,1\n4,2\n", "y", "18 of 20 rows .* have no value in 'y'"),
        ("y\n" + "1\n2\n" * 9, "y", "the target is its only column"),
        ("a,y\n" + "1,0\n1,1\n" * 9, "y", "left as an input: .*'a' is constant"),
        ("a,y\n1,0\n2,1,5\n" + "1,0\n" * 9, "y", "row 2 of .* has 3 cells where the header has 2"),
        (
            "a,y\n" + "\n".join(f"{i},name{i}" for i in range(40)),
            "y",
            "40 different values in 40 rows",
        ),
        ("a,y\n" + "\n".join(f"{i},2024-01-{1 + i % 5:02d}" for i in range(40)), "y", "has dates"),
        (
            "a,y\n" + "\n".join(f"{i},{i + 0.5}" for i in range(40)) + "\n1,many",
            "y",
            "row 41 has 'many'",
        ),
        (
            "a,y\n" + "1,0\n2,1\n" * 9 + '3,"0\n' + "4,1\n" * 9,
            "y",
            "row 19 of .* an unclosed quote",
        ),
        (
            "a,y\n" + "\n".join(f"{i},{i}.5e300" for i in range(40)),
            "y",
            "standard deviation of .*e.301; .* other units",
        ),
        (
            "a,y\n" + "\n".join(f"{i},{i}.5e-300" for i in range(40)),
            "y",
            "standard deviation of .*; .* other units",
        ),
    ],
)
def test_refusals_help(tmp_path: Path, text: str, target: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(write(tmp_path / "bad.csv", text), target=target)


def test_refusals_of_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        load(tmp_path / "absent.csv", target="y")
    with pytest.raises(DataError, match="is a folder"):
        load(tmp_path, target="y")
    with pytest.raises(DataError, match="Excel"):
        load(write(tmp_path / "x.csv", "PK\x03\x04..."), target="y")
    with pytest.raises(DataError, match="save it as CSV"):
        load(write(tmp_path / "x.xlsx", "PK\x03\x04..."), target="y")
    (tmp_path / "b.csv").write_bytes(bytes(range(256)))
    with pytest.raises(DataError, match="not text"):
        load(tmp_path / "b.csv", target="y")
    with pytest.raises(DataError, match="cannot read"):
        load(write(tmp_path / "x.csv.gz", "not gzip"), target="y")
    with pytest.raises(DataError, match="as NPZ"):
        load(write(tmp_path / "x.npz", "not npz"), target="y")
    path = flowers(tmp_path / "f.csv")
    with pytest.raises(DataError, match="'red'|'kind 0'.*not a number"):
        load(path, target="species", task="regression")
    with pytest.raises(DataError, match="strictly between 0 and 1"):
        load(path, target="species", test_fraction=1.5)
    with pytest.raises(DataError, match="task must be"):
        load(path, target="species", task="ranking")  # type: ignore[arg-type]


# --- new rows --------------------------------------------------------------------------------------------------------


def test_new_rows_in_any_order_with_and_without_a_target(tmp_path: Path) -> None:
    path = flowers(tmp_path / "f.csv")
    preprocessor = load(path, target="species").preprocessor
    whole = preprocessor.rows(path)
    assert whole.y is not None
    shuffled = table(
        tmp_path / "n.csv", ("color", "width", "length"), [("red", 5, 0.5), ("blue", 6, 1.5)]
    )
    rows = preprocessor.rows(shuffled)
    assert rows.y is None
    assert rows.notes == []
    same = preprocessor.transform({"length": [0.5, 1.5], "width": [5, 6], "color": ["red", "blue"]})
    assert torch.equal(rows.x, same)


def test_new_rows_that_are_odd(tmp_path: Path) -> None:
    preprocessor = load(flowers(tmp_path / "f.csv"), target="species").preprocessor
    path = table(
        tmp_path / "n.csv",
        ("length", "width", "color", "mood", "species"),
        [(1, 2, "green", "ok", "kind 0"), ("", "x", "", "ok", "kind 1"), (3, 1, "red", "ok", "")],
    )
    rows = preprocessor.rows(path)
    said = " ".join(rows.notes)
    assert rows.x[0, 2:].tolist() == [0.0, 0.0, 0.0]
    assert (
        "'color': 2 cells have categories that are not in the training data ('(missing)', 'green')"
        in said
    )
    assert "'length': 1 missing values" in said
    assert "'width': 1 cells are not numbers (row 2: 'x')" in said
    assert "ignored: 'mood'" in said
    assert bool(torch.isfinite(rows.x).all())
    assert rows.y is None  # one is missing
    scored = preprocessor.rows(path, need_target=True)
    assert scored.y is not None
    assert scored.y.tolist() == [0, 1]
    assert scored.kept == [0, 1]
    with pytest.raises(DataError, match="no column 'width' .did you mean 'widht'"):
        preprocessor.rows({"length": [1], "widht": [2], "color": ["red"]})
    with pytest.raises(
        DataError, match="its columns are 'c1', 'c2', 'c3'. The first line holds numbers"
    ):
        preprocessor.rows(write(tmp_path / "bare.csv", "1,2,red\n3,4,blue\n"))
    with pytest.raises(DataError, match="no target column 'species'"):
        preprocessor.rows({"length": [1], "width": [2], "color": ["red"]}, need_target=True)
    with pytest.raises(DataError, match="'kind 9' is not one of the classes"):
        preprocessor.rows(
            {"length": [1], "width": [2], "color": ["red"], "species": ["kind 9"]}, need_target=True
        )
    with pytest.raises(DataError, match="different lengths"):
        preprocessor.rows({"length": [1, 2], "width": [2], "color": ["red"]})


def test_preprocessors_go_to_json_and_back(tmp_path: Path) -> None:
    path = flowers(tmp_path / "f.csv")
    for source in (load(path, target="species"), load(path, target="width"), load("digits")):
        text = json.dumps(source.preprocessor.to_json(), allow_nan=False)
        again = Preprocessor.from_json(json.loads(text))
        assert again == source.preprocessor
    data = load(path, target="width")
    again = Preprocessor.from_json(json.loads(json.dumps(data.preprocessor.to_json())))
    assert torch.equal(again.transform(path), data.preprocessor.transform(path))
    for bad in (
        {},
        [],
        {"spec": "Tree", "fields": {}},
        {"spec": "TablePreprocessor", "fields": {}},
    ):
        with pytest.raises(DataError):
            Preprocessor.from_json(bad)


def test_encoding_by_hand() -> None:
    columns = (Number("a", 10.0, 2.0, 11.0, True), Category("b", ("u", "v")))
    preprocessor = TablePreprocessor(columns, "y", "regression", y_mean=1.0, y_scale=4.0)
    rows = preprocessor.rows(
        {"b": ["v", "u"], "a": [14, float("nan")], "y": [5, 9]}, need_target=True
    )
    assert rows.x.tolist() == [[2.0, 0.0, 0.0, 1.0], [0.5, 1.0, 1.0, 0.0]]
    assert rows.y is not None
    assert rows.y.tolist() == [[1.0], [2.0]]
    assert preprocessor.original(rows.y).tolist() == [[5.0], [9.0]]


# --- NPZ and Parquet -------------------------------------------------------------------------------------------------


def test_npz_of_rows_and_of_columns(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(50, 3)), random.normal(size=50)
    np.savez(tmp_path / "m.npz", x=x, y=y, x_test=x[:7], y_test=y[:7], x_ood=x + 9)
    data = load(tmp_path / "m.npz")
    assert (data.n, len(data.test[1])) == (50, 7)
    assert torch.equal(data.train[0][:7], data.test[0])
    assert data.ood is not None
    assert float(data.ood.mean()) > 5
    np.savez(tmp_path / "c.npz", height=y, weight=x[:, 0], sex=np.array(["m", "f"] * 25))
    assert load(tmp_path / "c.npz", target="sex").feature_names == ("height", "weight")
    np.savez(tmp_path / "o.npz", x=np.array([{}, {}]), y=y)
    with pytest.raises(DataError, match="Python objects are not read"):
        load(tmp_path / "o.npz")
    np.savez(tmp_path / "n.npz", x=x)
    with pytest.raises(DataError, match="no array 'y'"):
        load(tmp_path / "n.npz")
    np.savez(tmp_path / "l.npz", x=x, y=y[:9])
    with pytest.raises(DataError, match="one target for each row"):
        load(tmp_path / "l.npz")


def test_npz_of_images(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (40, 12, 10, 3), dtype=np.uint8)
    np.savez(tmp_path / "i.npz", images=images, labels=np.arange(40) % 4)
    data = load(tmp_path / "i.npz")
    assert data.input_shape == (3, 12, 10)
    assert data.class_names == ("0", "1", "2", "3")
    assert abs(float(data.train[0].mean())) < 1e-5
    rows = data.preprocessor.rows(tmp_path / "i.npz")
    assert rows.y is not None
    assert torch.equal(rows.x, data.preprocessor.transform(images.transpose(0, 3, 1, 2)))


@pytest.mark.peers
def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "a": pa.array([float(i) if i % 5 else None for i in range(40)]),
        "b": pa.array(["uv"[i % 2] for i in range(40)]).dictionary_encode(),
        "c": pa.array([[i] for i in range(40)]),
        "y": pa.array([i % 3 == 0 for i in range(40)]),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    data = load(tmp_path / "t.parquet", target="y")
    assert data.feature_names == ("a", "a is missing", "b=u", "b=v")
    assert data.class_names == ("False", "True")
    assert any("'c' has the type list" in note for note in data.notes)
    with pytest.raises(DataError, match="as Parquet"):
        load(write(tmp_path / "bad.parquet", "x"), target="y")


@pytest.mark.peers
def test_large_whole_numbers_of_parquet_are_read_and_can_be_dropped(tmp_path: Path) -> None:
    import decimal

    import pyarrow as pa
    import pyarrow.parquet as pq

    large = [LARGE + i % 2 for i in range(40)]
    columns = {
        "a": pa.array([float(i) for i in range(40)]),
        "key": pa.array([None, *(LARGE + i for i in range(39))]),
        "y": pa.array(large),
        "z": pa.array([decimal.Decimal(value) for value in large], pa.decimal128(38, 0)),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    for target in ("y", "z"):
        data = load(tmp_path / "t.parquet", target=target, drop=("key",))
        assert data.class_names == (str(LARGE), str(LARGE + 1))
    assert data.preprocessor.rows(tmp_path / "t.parquet", need_target=True).y.unique().tolist() == [
        0,
        1,
    ]


@pytest.mark.peers
def test_a_parquet_file_of_too_many_rows_is_refused_by_its_header(
    tmp_path: Path, monkeypatch: Any
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(
        pa.table({"a": pa.array(np.zeros(100_000)), "y": pa.array(np.zeros(100_000))}),
        tmp_path / "t.parquet",
    )
    monkeypatch.setenv("BAYOU_MAX_BYTES", "1000000")
    assert (tmp_path / "t.parquet").stat().st_size < 10_000
    with pytest.raises(
        DataError, match="t.parquet needs at least 1,600,000 bytes.*set BAYOU_MAX_BYTES"
    ):
        load(tmp_path / "t.parquet", target="y")


def test_parquet_without_pyarrow_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DataError, match="needs pyarrow"):
        load(write(tmp_path / "t.parquet", "x"), target="y")


# --- what a file may say ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("Number", {"name": "a", "scale": -5}, "Number scale must be positive and finite, got -5"),
        (
            "Number",
            {"name": "a", "scale": float("inf")},
            "Number scale must be a finite number, got inf",
        ),
        ("Number", {"name": "a", "mean": None}, "Number mean must be a finite number, got None"),
        ("Number", {"name": "a", "low": "0"}, "Number low must be a finite number, got '0'"),
        ("Number", {"name": "a", "indicator": 1}, "Number indicator must be a bool, got 1"),
        ("Number", {"name": ["a"]}, "Number name must be a str"),
        (
            "Category",
            {"name": "a", "levels": {"tuple": ["u", "u"]}},
            "Category levels must be different words",
        ),
        (
            "Category",
            {"name": "a", "levels": {"tuple": [1, 2]}},
            "Category levels must be different words",
        ),
        ("Category", {"name": "a", "levels": {"tuple": ["u"]}, "scale": 2}, "scale"),
        ("Color", {"name": "a"}, "Color"),
        ("Number", {"name": "y"}, "different names"),
    ],
)
def test_a_preprocessor_that_cannot_be_is_refused(
    name: str, fields: dict[str, Any], says: str
) -> None:
    known = TablePreprocessor((), "y", "regression").to_json()
    known["fields"]["columns"] = {"tuple": [{"spec": name, "fields": fields}]}
    with pytest.raises(DataError, match=f"this does not describe a preprocessor: .*{says}"):
        Preprocessor.from_json(known)


# --- whole numbers beyond 2^53 ---------------------------------------------------------------------------------------

LARGE = 2**53


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_classes_that_float64_does_not_tell_apart_stay_apart(kind: str, tmp_path: Path) -> None:
    y, path = [LARGE + i % 2 for i in range(40)], tmp_path / f"t.{kind}"
    if kind == "csv":
        table(path, ("a", "y"), [(i, value) for i, value in enumerate(y)])
    else:
        np.savez(path, a=np.arange(40), y=np.array(y))
    data = load(path, target="y")
    assert data.class_names == (str(LARGE), str(LARGE + 1))
    rows = data.preprocessor.rows(path, need_target=True)
    assert rows.y is not None
    assert rows.y.tolist() == [i % 2 for i in range(40)]
    other = Preprocessor.from_json(data.preprocessor.to_json())
    with pytest.raises(DataError, match=f"'{LARGE + 3}' is not one of the classes"):
        other.rows({"a": [1], "y": np.array([LARGE + 3])}, need_target=True)


def test_large_whole_numbers_of_a_column_are_categories_where_rounding_joins_them(
    tmp_path: Path,
) -> None:
    rows = [
        (LARGE + i % 2, 1_700_000_000_000_000_000 + 10**9 * i, LARGE + i, i / 7) for i in range(40)
    ]
    data = load(
        table(tmp_path / "t.csv", ("a", "nanoseconds", "name", "y"), rows), target="y", id="name"
    )
    assert data.feature_names == (f"a={LARGE}", f"a={LARGE + 1}", "nanoseconds")
    assert data.preprocessor.rows(tmp_path / "t.csv").ids == [str(LARGE + i) for i in range(40)]


# --- files that are larger than they look, or no files ---------------------------------------------------------------


def test_many_columns_take_time_in_proportion() -> None:
    seconds = []
    for count in (2000, 20_000):
        names = [*(f"x{i}" for i in range(count)), *["twice"] * count]
        start = time.process_time()
        found, _ = reading._distinct_names(names)
        seconds.append(time.process_time() - start)
        assert found[-1] == f"twice.{count}"
    assert seconds[1] < 40 * seconds[0]  # ×10 for what is linear, ×100 for what is not


def test_new_rows_with_many_columns_take_time_in_proportion() -> None:
    seconds = []
    for count in (1000, 10_000):
        columns = tuple(Number(f"x{i}") for i in range(count))
        known = TablePreprocessor(
            columns, "y", "regression", dropped=tuple(f"z{i}" for i in range(count))
        )
        source = {f"{kind}{i}": [1.0] for kind in "xz" for i in range(count)}
        start = time.process_time()
        known.rows(source)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 40 * seconds[0]


def npy(shape: str, content: bytes = bytes(80)) -> bytes:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + content


NPZ: dict[str, tuple[list[tuple[str, bytes]], str]] = {
    "terabytes": ([("x.npy", npy("(1000000000000, 10)"))], "as NPZ"),
    "negative": ([("x.npy", npy("(-5, 2)"))], "as NPZ"),
    "no shape": ([("x.npy", npy("'wide'"))], "as NPZ"),
    "twice": (
        [("x.npy", npy("(10,)")), ("x.npy", npy("(10,)"))],
        "several arrays with the same name",
    ),
    "a text": ([("../../x.txt", b"hello")], "as NPZ"),
    "nothing": ([], "no rows"),
    "empty": ([("x.npy", b"")], "as NPZ"),
}


@pytest.mark.parametrize("name", NPZ)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_forged_npz_file_is_refused(name: str, tmp_path: Path) -> None:
    members, says = NPZ[name]
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for member, content in members:
            archive.writestr(member, content)
    with pytest.raises(DataError, match=says):
        reading.read_file(tmp_path / "x.npz")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", npy("(10,)"), b"\x80\x04N.", b"\xff" * 99])
def test_what_is_no_npz_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    for read in (lambda path: load(path, target="y"), reading.read_file):
        with pytest.raises(DataError, match=r"cannot read x\.npz as NPZ"):
            read(tmp_path / "x.npz")


@pytest.mark.parametrize("name", ["bomb.csv.gz", "bomb.npz", "long.csv"])
def test_a_file_that_unpacks_to_more_than_is_allowed_is_refused(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    path = tmp_path / name
    if name == "bomb.npz":
        np.savez_compressed(path, x=np.zeros((10_000, 2)), y=np.zeros(10_000))
    else:
        text = b"a,y\n" + b"1,2\n" * 50_000
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    monkeypatch.setenv("BAYOU_MAX_BYTES", "100000")
    with pytest.raises(
        DataError, match=f"{name} needs at least .* bytes .* limit is 100,000; set BAYOU_MAX_BYTES"
    ):
        reading.read_file(path)
    monkeypatch.setenv("BAYOU_MAX_BYTES", "1000000")
    assert reading.read_file(path).rows >= 10_000
    monkeypatch.setenv("BAYOU_MAX_BYTES", "lots")
    with pytest.raises(DataError, match="BAYOU_MAX_BYTES must be a number of bytes, got 'lots'"):
        reading.read_file(path)


@pytest.mark.skipif(os.name != "posix", reason="pipes with a name")
@pytest.mark.parametrize("ending", ["csv", "csv.gz", "npz", "parquet"])
def test_pipes_and_devices_are_refused_unopened(ending: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"pipe.{ending}")
    os.symlink("/dev/zero", tmp_path / f"device.{ending}")
    for name in ("pipe", "device"):
        with pytest.raises(DataError, match="a pipe or device, not a file"):
            load(tmp_path / f"{name}.{ending}", target="y")


def test_a_cell_of_megabytes_is_shortened_in_notes_and_messages(tmp_path: Path) -> None:
    long = "x" * 2_000_000
    lines = [f"{n},{'ab'[n % 2]},{n % 5}" for n in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["number,letter,y", *lines]) + "\n")
    data = load(str(tmp_path / "a.csv"), target="y", task="regression")
    columns = {"number": ["1", long, *map(str, range(50))], "letter": [long, *"b" * 51]}
    tracemalloc.start()
    rows = data.preprocessor.rows(columns)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum("... (2,000,000 characters)" in note for note in rows.notes) == 2
    assert max(map(len, rows.notes)) < 400
    assert peak < 50_000_000  # an array of strings of that length would have 400 MB
    with pytest.raises(DataError, match="2,000,000 characters") as error:
        data.preprocessor.rows(columns | {"y": [long] * 52}, need_target=True)
    assert len(str(error.value)) < 400
