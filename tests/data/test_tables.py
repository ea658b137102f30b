"""Tables as people have them: odd delimiters, missing values, wrong columns; and new rows at
prediction time.
"""

import gzip
import json
import os
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayou.data import DataError, load, reading
from bayou.data.columns import Column, number
from bayou.data.encoders import Category, Number
from bayou.data.preprocess import Preprocessor, TablePreprocessor
from tests.data.errors import refused

LARGE = 2**53


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def write_rows(path, header, rows, delimiter=","):
    lines = [delimiter.join(map(str, row)) for row in (header.split(), *rows)]
    return write(path, "\n".join(lines) + "\n")


def write_flowers(path, delimiter=","):
    """Write 60 rows of two numbers, a category, and three classes."""
    random = np.random.default_rng(0)
    rows = []
    for i in range(60):
        length, width = f"{random.normal():.3f}", f"{5 + 2 * random.normal():.3f}"
        rows.append((length, width, ("red", "blue", "white")[i % 3], f"kind-{i % 3}"))
    return write_rows(path, "length width color species", rows, delimiter)


@pytest.fixture
def flowers(tmp_path):
    return write_flowers(tmp_path / "flowers.csv")


@pytest.fixture
def species(flowers):
    return load(flowers, target="species")


@pytest.fixture
def make(tmp_path):
    """A data set of rows."""

    def make_data(header, rows, **options):
        path = write_rows(tmp_path / "t.csv", header, rows)
        return load(path, **{"target": "y"} | options)

    return make_data


def has_note(rows, words):
    return any(words in note for note in rows.notes)


def to_json_and_back(preprocessor):
    return Preprocessor.from_json(json.loads(json.dumps(preprocessor.to_json(), allow_nan=False)))


# --- a plain table ------------------------------------------------------------------------------


def test_classification_of_a_plain_table(species):
    data = species
    assert data.task == "classification"
    assert data.class_names == ("kind-0", "kind-1", "kind-2")
    assert data.feature_names == ("length", "width", "color=blue", "color=red", "color=white")
    assert (len(data.train[1]), len(data.test[1])) == (48, 12)
    assert data.train[0].dtype == torch.float32
    assert data.train[1].dtype == torch.int64
    assert torch.bincount(data.test[1]).tolist() == [4, 4, 4]  # each class in proportion
    numbers = data.train[0][:, :2]
    assert_close(numbers.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    assert_close(numbers.std(0, correction=0), torch.ones(2), atol=1e-5, rtol=0)
    assert (data.train[0][:, 2:].sum(1) == 1).all()


def test_changes_of_a_test_row_do_not_change_training_rows(flowers):
    before = load(flowers, target="species")
    x = before.preprocessor.transform(flowers)
    row = next(i for i in range(len(x)) if any(torch.equal(x[i], y) for y in before.test[0]))
    lines = flowers.read_text().splitlines()
    for cell in ("1000", "inf"):
        lines[1 + row] = ",".join([cell, *lines[1 + row].split(",")[1:]])
        after = load(write(flowers, "\n".join(lines)), target="species")
        assert torch.equal(before.train[0], after.train[0])
        assert before.preprocessor == after.preprocessor
        assert not torch.equal(before.test[0], after.test[0])
    assert any("'length': 1 missing values, none of them in training" in n for n in after.notes)


def test_regression_in_original_units(make):
    prices = [1e6 + 3 * i + (i % 7) for i in range(100)]
    data = make("x y", list(enumerate(prices)))
    assert data.task == "regression"
    assert data.train[1].shape == (80, 1)
    assert data.train[1].dtype == torch.float32
    assert abs(float(data.train[1].mean())) < 1e-5
    y = torch.cat([data.train[1], data.test[1]])
    original = data.preprocessor.original(y.double()).flatten().sort().values
    expected = torch.tensor(prices, dtype=torch.float64).sort().values
    assert_close(original, expected, atol=1e-3, rtol=0)


def test_splits_are_a_function_of_seed_and_split(flowers):
    data = load(flowers, target="species", seed=3)
    assert torch.equal(data.train[0], load(flowers, target="species", seed=3).train[0])
    for options in ({"seed": 4}, {"seed": 3, "split": 1}):
        assert not torch.equal(data.test[0], load(flowers, target="species", **options).test[0])
    assert len(load(flowers, target="species", test_fraction=0.5).test[1]) == 30


# --- files as they come -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "delimiter"),
    [("t.csv", ","), ("t.csv", ";"), ("t.tsv", "\t"), ("t.txt", "|"), ("t.csv", " ")],
)
def test_delimiters(tmp_path, species, name, delimiter):
    data = load(write_flowers(tmp_path / name, delimiter), target="species")
    assert torch.equal(data.train[0], species.train[0])


def test_gzip_and_line_endings_of_old_macs(tmp_path, flowers):
    expected = load(flowers, target="species")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(flowers.read_bytes()))
    write(tmp_path / "mac.csv", flowers.read_text().replace("\n", "\r"))
    for name in ("t.csv.gz", "mac.csv"):
        assert torch.equal(load(tmp_path / name, target="species").train[0], expected.train[0])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp1252"])
def test_encodings(flowers, encoding):
    text = flowers.read_text().replace("length", "länge")
    assert load(write(flowers, text, encoding), target="species").feature_names[0] == "länge"


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
def test_numbers_as_people_write_them(text, comma, expected):
    assert number(text, comma) == expected


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
def test_decimal_commas(tmp_path, delimiter):
    quote = '"' if delimiter == "," else ""
    rows = [(f"{quote}{i},5{quote}", f"{quote}{i},37{quote}") for i in range(40)]
    data = load(write_rows(tmp_path / "t.csv", "a y", rows, delimiter), target="y")
    assert data.task == "regression"
    assert abs(data.y_mean - 19.87) < 4
    new = write(tmp_path / "n.csv", "a;z\n3,5;1\n")
    assert_close(data.preprocessor.transform({"a": ["3.5"]}), data.preprocessor.transform(new))


@pytest.mark.parametrize("cell", ['"{i},500"', '"{i},{h}.5"', "${i}000.25"])
def test_thousands_and_currency(make, cell):
    data = make("a y", [(cell.format(i=i, h=500 + i % 9), i % 2) for i in range(1, 40)])
    column = data.preprocessor.columns[0]
    assert isinstance(column, Number)
    assert 10_000 < column.mean < 30_000


def test_missing_and_infinite_cells():
    column = Column(["1", "", "NA", "inf", "x", "-", "2"])
    assert column.missing.tolist() == [False, True, True, True, False, True, False]
    assert column.bad.tolist() == [False, False, False, False, True, False, False]
    assert np.isnan(column.values).tolist() == [False, True, True, True, True, True, False]
    assert column.describe_first(column.bad) == "row 5: 'x'"


def test_no_header(tmp_path):
    rows = [f"{i * 0.5},{i % 5},{'ab'[i % 2]}" for i in range(1, 30)]
    path = write(tmp_path / "n.csv", "\n".join(rows))
    data = load(path, target="c3")
    assert data.feature_names == ("c1", "c2")
    assert data.n + len(data.test[1]) == 29
    assert has_note(data, "c1 to c3")
    new = write(tmp_path / "new.csv", "1.5,2\n2.5,3\n")
    assert data.preprocessor.transform(new).shape == (2, 2)
    with refused("'species'.*columns are 'c1', 'c2', 'c3'.*taken as data"):
        load(path, target="species")


def test_a_header_of_years_is_one_if_it_has_the_target(make):
    data = make("2019 2020 y", [(i, i + 0.5, i * 0.1) for i in range(20)])
    assert data.feature_names == ("2019", "2020")


def test_duplicate_and_blank_column_names(tmp_path):
    lines = [f"{i},{i * 2 + i % 3},{i % 4},{i % 2}" for i in range(20)]
    path = write(tmp_path / "d.csv", "\n".join([",a,a,y", *lines]))
    data = load(path, target="y")
    assert data.feature_names == ("a", "a.2")  # the first column only is a row number
    assert has_note(data, "several columns named 'a'")
    assert has_note(data, "is a row number")
    with refused("several columns named 'a'"):
        load(path, target="a")


def test_trailing_delimiters_and_short_rows(tmp_path):
    rows = [f"{i},{i % 3},{i % 2}" for i in range(20)]
    trailing = "\n".join(["a,b,y", *(f"{row}," for row in rows)])
    assert load(write(tmp_path / "t.csv", trailing), target="y").feature_names == ("a", "b")
    data = load(write(tmp_path / "s.csv", "\n".join(["a,b,y", "5,5", *rows])), target="y")
    assert has_note(data, "1 rows are shorter")
    assert has_note(data, "1 of 21 rows have no value in 'y'")


# --- columns ------------------------------------------------------------------------------------


def test_missing_values(make):
    random = np.random.default_rng(1)
    rows = [
        ("" if i % 10 == 0 else i, "NA" if i % 7 == 0 else "AB"[i % 2], f"{random.normal():.4f}")
        for i in range(100)
    ]
    data = make("age town y", rows)
    assert data.feature_names == ("age", "age is missing", "town=A", "town=B", "town=(missing)")
    assert torch.cat([data.train[0], data.test[0]])[:, 1].sum() == 10
    age = data.preprocessor.columns[0]
    x = data.preprocessor.transform({"age": ["", age.median], "town": ["A", "A"]})
    assert x[0, 0] == x[1, 0]
    assert x[:, 1].tolist() == [1.0, 0.0]
    assert torch.isfinite(data.train[0]).all()


def test_unusable_columns_are_dropped_with_a_note(make, tmp_path):
    rows = [
        (f"{1 + i % 12:02d}/01/2024", f"customer-{i}", 7, "always", "", i * 0.7, i, i % 2)
        for i in range(60)
    ]
    data = make("when name same word empty x id y", rows)
    assert data.feature_names == ("x",)
    notes = " ".join(data.notes)
    for note in (
        "'when' has times of day, or dates whose day and month are not clear; dropped",
        "'name' has 48 different values",
        "'same' is constant",
        "'word' is constant",
        "'empty' is empty",
        "'id' is a row number",
    ):
        assert note in notes
    assert data.preprocessor.rows(tmp_path / "t.csv").notes == []


@pytest.mark.parametrize(
    ("name", "values", "is_used"),
    [
        ("customer_id", range(100, 160), False),
        ("CustomerId", [7 * i % 60 for i in range(60)], False),
        ("id", [5 * i for i in range(60)], False),
        ("ID", range(60), False),
        ("humid", range(100, 160), True),
        ("amount", range(100, 160), True),
        ("customer_id", [i % 30 for i in range(60)], True),
        ("customer_id", [i + 0.5 for i in range(60)], True),
    ],
)
def test_columns_of_identifiers_are_dropped(name, values, is_used, make):
    data = make(f"{name} x y", [(value, i % 7, i % 2) for i, value in enumerate(values)])
    assert data.feature_names == ((name, "x") if is_used else ("x",))
    assert any(repr(name) in note and "dropped" in note for note in data.notes) is not is_used


def test_columns_can_be_left_out(flowers):
    data = load(flowers, target="species", drop=["color"], id="width")
    assert data.feature_names == ("length",)
    rows = data.preprocessor.rows(flowers)
    assert rows.notes == []
    assert rows.ids == [line.split(",")[1] for line in flowers.read_text().splitlines()[1:]]
    assert data.preprocessor.rows({"length": [1.0]}).ids is None
    with refused("no column 'colour' .did you mean 'color'"):
        load(flowers, target="species", drop=["colour"])
    with refused("'species' is the target"):
        load(flowers, target="species", id="species")
    with refused("used as published; --drop is for a file"):
        load("moons", drop=["x1"])


def test_distance_is_measured_from_the_range_of_training():
    """max_j max(low_j − x_j, x_j − high_j, 0)/std_j; a missing number has none."""
    columns = (
        Number("a", 10.0, 2.0, 11.0, True, 6.0, 14.0),
        Number("b", 0.0, 1.0, 0.0, False, -1.0, 1.0),
    )
    preprocessor = TablePreprocessor((*columns, Category("c", ("u",))), "y", "regression")
    values = {"a": [6, 14, 18, 2, np.nan, 18], "b": [0, 1, 0, -2.5, 3, 4], "c": ["u"] * 6}
    distance = preprocessor.rows(values).distance
    assert distance.tolist() == [0.0, 0.0, 2.0, 2.0, 2.0, 3.0]


def test_typing_errors_in_a_column_of_numbers(make):
    data = make("x y", [("oops" if i == 13 else i * 1.5, i % 2) for i in range(100)])
    assert data.feature_names[0] == "x"
    assert has_note(data, "1 cells are not numbers (row 14: 'oops')")


def test_huge_values_do_not_overflow(make):
    """A value of new rows that is far from the rest is clipped, with a note."""
    data = make("a b y", [(f"{(i % 7) - 3}e300", i, i * 1.5) for i in range(60)])
    std = data.train[0].std(0, correction=0)
    assert_close(std, torch.ones(2), atol=1e-4, rtol=0)
    new = data.preprocessor.rows({"a": [0.0, 0.0], "b": ["1e300", "3"]})
    assert torch.isfinite(new.x).all()
    assert new.x[0, 1] == 1e6
    note = "'b': 1 values are more than 1,000,000 standard deviations"
    assert any(note in text for text in new.notes)


# --- sentinels ----------------------------------------------------------------------------------


def measure(sentinel=None, row=17, mostly_zeros=False):
    """Return rows of a, b and y; in one of them a has a sentinel."""
    generator = np.random.default_rng(0)
    a, b, noise = generator.normal(size=(3, 200))
    if mostly_zeros:
        a = np.where(a > 1, np.round(a), 0.0)
    rows = np.stack([a, b, a + b + 0.1 * noise], 1).round(4).tolist()
    if sentinel is not None:
        rows[row][0] = sentinel
    return rows


@pytest.mark.parametrize("mostly_zeros", [False, True])
@pytest.mark.parametrize("row", [17, 18], ids=["training row", "test row"])
def test_one_sentinel_does_not_destroy_a_column(make, row, mostly_zeros):
    whole, blank, data = (
        make("a b y", measure(cell, row, mostly_zeros)) for cell in (None, "", 999999999)
    )
    assert 0.9 < float(data.train[0][:, 0].std() / whole.train[0][:, 0].std()) < 1.1  # not 2e-8
    assert torch.equal(data.train[0], blank.train[0])
    assert torch.equal(data.test[0], blank.test[0])
    (note,) = [note for note in data.notes if "far from all others" in note]
    start = f"Column 'a': 1 value is far from all others (row {row + 1}: 999999999; the others lie "
    assert note.startswith(start)
    assert "leave the cell blank" in note
    assert "logarithm" in note
    new = to_json_and_back(data.preprocessor).rows({"a": [0.0, 999999999.0], "b": [0.0, 0.0]})
    assert has_note(new, "row 2: 999999999")
    assert (new.x.abs() < 20).all()
    assert new.distance[1] == 0
    assert not has_note(whole, "far from all others")


def test_a_sentinel_in_the_target_is_refused(make):
    rows = measure()
    rows[40][2] = 999999999
    message = r"'y' is 999999999 in row 41, far from all others .*leave the cell blank"
    with refused(message):
        make("a b y", rows)


def test_incomes_are_measurements(make):
    incomes = np.exp(10 + 1.5 * np.random.default_rng(0).normal(size=400))
    rows = [(f"{income:.2f}", i % 7) for i, income in enumerate(incomes)]
    data = make("income y", rows, task="regression")
    assert data.feature_names == ("income",)
    assert not has_note(data, "'income'")


# --- the target ---------------------------------------------------------------------------------


def test_the_task_is_inferred_and_can_be_overridden(make):
    few = [(i * 0.3, 3 + i % 6) for i in range(120)]
    data = make("x y", few)
    assert data.class_names == ("3", "4", "5", "6", "7", "8")
    assert has_note(data, "--task regression")
    assert make("x y", few, task="regression").train[1].shape == (96, 1)
    assert make("x y", [(i * 0.3, i) for i in range(120)]).task == "regression"
    texts = [(i * 0.3, "True" if i % 3 else "False") for i in range(30)]
    assert make("x y", texts).class_names == ("False", "True")


def test_a_class_with_one_example_is_used_for_training(make):
    data = make("x y", [(i * 0.3, "rare" if i == 5 else "ab"[i % 2]) for i in range(50)])
    rare = data.class_names.index("rare")
    assert (data.train[1] == rare).sum() == 1
    assert (data.test[1] == rare).sum() == 0
    assert has_note(data, "A class has only one example")


def lines_of(cell):
    return "a,y\n" + "\n".join(f"{i},{cell.format(i=i, day=1 + i % 5)}" for i in range(40))


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
        ("a,y\n" + "1,0\n2,1\n" * 9 + '3,"0\n' + "4,1\n" * 9, "y", "row 19 of .* unclosed quote"),
        (lines_of("name{i}"), "y", "40 different values in 40 rows"),
        (lines_of("2024-01-0{day}"), "y", "has dates"),
        (lines_of("{i}.5") + "\n1,many", "y", "must be a number, got row 41: 'many' .1 such rows"),
        (lines_of("{i}.5e300"), "y", "standard deviation of .*e.301; .* other units"),
        (lines_of("{i}.5e-300"), "y", "standard deviation of .*; .* other units"),
    ],
)
def test_unusable_tables_are_errors(tmp_path, text, target, message):
    with refused(message):
        load(write(tmp_path / "bad.csv", text), target=target)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.csv", None, "there is no file"),
        ("", None, "is a folder"),
        ("x.csv", b"PK\x03\x04...", "Excel"),
        ("x.xlsx", b"PK\x03\x04...", "save it as CSV"),
        ("b.csv", bytes(range(256)), "not text"),
        ("x.csv.gz", b"not gzip", "cannot read"),
        ("x.npz", b"", r"cannot read x\.npz as NPZ"),
        ("x.npz", b"PK\x03\x04", r"cannot read x\.npz as NPZ"),
        ("x.npz", b"\x80\x04N.", r"cannot read x\.npz as NPZ"),
    ],
)
def test_unusable_files_are_errors(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    for read in (lambda path: load(path, target="y"), reading.read_file):
        with refused(message):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "regression"}, "must be a number, got row 1: 'kind-0'; --task classification"),
        ({"test_fraction": 1.5}, "strictly between 0 and 1"),
        ({"task": "ranking"}, "task must be"),
    ],
)
def test_invalid_options_are_errors(flowers, options, message):
    with refused(message):
        load(flowers, target="species", **options)


# --- new rows -----------------------------------------------------------------------------------


def test_new_rows_in_any_order_with_and_without_a_target(tmp_path, flowers, species):
    preprocessor = species.preprocessor
    assert preprocessor.rows(flowers).y is not None
    cells = [("red", 5, 0.5), ("blue", 6, 1.5)]
    rows = preprocessor.rows(write_rows(tmp_path / "n.csv", "color width length", cells))
    assert rows.y is None
    assert rows.notes == []
    columns = {"length": [0.5, 1.5], "width": [5, 6], "color": ["red", "blue"]}
    assert torch.equal(rows.x, preprocessor.transform(columns))


def test_notes_about_new_rows(tmp_path, species):
    preprocessor = species.preprocessor
    cells = [
        (1, 2, "green", "ok", "kind-0"),
        ("", "x", "", "ok", "kind-1"),
        (3, 1, "red", "ok", ""),
    ]
    path = write_rows(tmp_path / "n.csv", "length width color mood species", cells)
    rows = preprocessor.rows(path)
    notes = " ".join(rows.notes)
    for note in (
        "'color': 2 cells have categories that are not in the training data ('(missing)', 'green')",
        "'length': 1 missing values",
        "'width': 1 cells are not numbers (row 2: 'x')",
        "ignored: 'mood'",
    ):
        assert note in notes
    assert rows.x[0, 2:].tolist() == [0.0, 0.0, 0.0]
    assert torch.isfinite(rows.x).all()
    assert rows.y is None  # one is missing
    labeled = preprocessor.rows(path, need_target=True)
    assert labeled.y.tolist() == [0, 1]
    assert labeled.kept == [0, 1]


ROW = {"length": [1], "width": [2], "color": ["red"]}


@pytest.mark.parametrize(
    ("columns", "need_target", "message"),
    [
        ({"length": [1], "widht": [2], "color": ["red"]}, False, "'width' .did you mean 'widht'"),
        (ROW, True, "no target column 'species'"),
        (ROW | {"species": ["kind-9"]}, True, "'kind-9' is not one of the classes"),
        (ROW | {"length": [1, 2]}, False, "different lengths"),
        (np.zeros((2, 2)), False, r"rows of numbers must be \(N, 3\)"),
    ],
)
def test_unusable_new_rows_are_errors(columns, need_target, message, species):
    with refused(message):
        species.preprocessor.rows(columns, need_target=need_target)


def test_new_rows_without_a_header_are_an_error(tmp_path, species):
    path = write(tmp_path / "bare.csv", "1,2,red\n3,4,blue\n")
    with refused("columns are 'c1', 'c2', 'c3'. The first line holds"):
        species.preprocessor.rows(path)


def test_preprocessors_go_to_json_and_back(flowers, species):
    data = load(flowers, target="width")
    for preprocessor in (
        data.preprocessor,
        species.preprocessor,
        load("digits").preprocessor,
    ):
        assert to_json_and_back(preprocessor) == preprocessor
    again = to_json_and_back(data.preprocessor)
    assert torch.equal(again.transform(flowers), data.preprocessor.transform(flowers))


def test_encoding_by_hand():
    columns = (Number("a", 10.0, 2.0, 11.0, True), Category("b", ("u", "v")))
    preprocessor = TablePreprocessor(columns, "y", "regression", y_mean=1.0, y_scale=4.0)
    cells = {"b": ["v", "u"], "a": [14, float("nan")], "y": [5, 9]}
    rows = preprocessor.rows(cells, need_target=True)
    assert rows.x.tolist() == [[2.0, 0.0, 0.0, 1.0], [0.5, 1.0, 1.0, 0.0]]
    assert rows.y.tolist() == [[1.0], [2.0]]
    assert preprocessor.original(rows.y).tolist() == [[5.0], [9.0]]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Number", {"scale": -5}, "Number scale must be positive and finite, got -5"),
        ("Number", {"scale": float("inf")}, "Number scale must be a finite number, got inf"),
        ("Number", {"mean": None}, "Number mean must be a finite number, got None"),
        ("Number", {"low": "0"}, "Number low must be a finite number, got '0'"),
        ("Number", {"indicator": 1}, "Number indicator must be a bool, got 1"),
        ("Number", {"name": ["a"]}, "Number name must be a str"),
        ("Category", {"levels": {"tuple": ["u", "u"]}}, "levels must be different words"),
        ("Category", {"levels": {"tuple": [1, 2]}}, "levels must be different words"),
        ("Category", {"levels": {"tuple": ["u"]}, "scale": 2}, "scale"),
        ("Color", {}, "Color"),
        ("Number", {"name": "y"}, "different names"),
    ],
)
def test_invalid_json_of_a_preprocessor_is_an_error(name, fields, message):
    values = TablePreprocessor((), "y", "regression").to_json()
    values["fields"]["columns"] = {"tuple": [{"spec": name, "fields": {"name": "a"} | fields}]}
    with refused(f"this does not describe a preprocessor: .*{message}"):
        Preprocessor.from_json(values)
    with pytest.raises(DataError):
        Preprocessor.from_json({"spec": name, "fields": {}})


# --- NPZ and Parquet ----------------------------------------------------------------------------


def test_npz_of_rows_and_of_columns(tmp_path):
    random = np.random.default_rng(0)
    x = random.normal(size=(50, 3))
    y = random.normal(size=50)
    path = tmp_path / "m.npz"
    np.savez(path, x=x, y=y, x_test=x[:7], y_test=y[:7], x_ood=x + 9)
    data = load(path)
    assert (data.n, len(data.test[1])) == (50, 7)
    assert torch.equal(data.train[0][:7], data.test[0])
    assert float(data.ood.mean()) > 5
    np.savez(path, height=y, weight=x[:, 0], sex=np.array(["m", "f"] * 25))
    assert load(path, target="sex").feature_names == ("height", "weight")
    for arrays, message in (
        ({"x": np.array([{}, {}]), "y": y}, "Python objects are not read"),
        ({"x": x}, "no array 'y'"),
        ({"x": x, "y": y[:9]}, "one target for each row"),
    ):
        np.savez(path, **arrays)
        with refused(message):
            load(path)


def test_npz_of_images(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (40, 12, 10, 3), dtype=np.uint8)
    np.savez(tmp_path / "i.npz", images=images, labels=np.arange(40) % 4)
    data = load(tmp_path / "i.npz")
    assert data.input_shape == (3, 12, 10)
    assert data.class_names == ("0", "1", "2", "3")
    assert abs(float(data.train[0].mean())) < 1e-5
    rows = data.preprocessor.rows(tmp_path / "i.npz")
    assert rows.y is not None
    assert torch.equal(rows.x, data.preprocessor.transform(images.transpose(0, 3, 1, 2)))


@pytest.mark.peers
def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import decimal

    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "t.parquet"
    large = [LARGE + i % 2 for i in range(40)]
    columns = {
        "a": pa.array([float(i) if i % 5 else None for i in range(40)]),
        "b": pa.array(["uv"[i % 2] for i in range(40)]).dictionary_encode(),
        "c": pa.array([[i] for i in range(40)]),
        "key": pa.array([None, *(LARGE + i for i in range(39))]),
        "y": pa.array([i % 3 == 0 for i in range(40)]),
        "large": pa.array(large),
        "decimal": pa.array([decimal.Decimal(value) for value in large], pa.decimal128(38, 0)),
    }
    pq.write_table(pa.table(columns), path)
    data = load(path, target="y", drop=("key", "large", "decimal"))
    assert data.feature_names == ("a", "a is missing", "b=u", "b=v")
    assert data.class_names == ("False", "True")
    assert has_note(data, "'c' has the type list")
    for target in ("large", "decimal"):
        data = load(path, target=target, drop=("key",))
        assert data.class_names == (str(LARGE), str(LARGE + 1))
        y = data.preprocessor.rows(path, need_target=True).y
        assert y is not None
        assert y.unique().tolist() == [0, 1]

    zeros = pa.array(np.zeros(100_000))
    pq.write_table(pa.table({"a": zeros, "y": zeros}), path)
    monkeypatch.setenv("BAYOU_MAX_BYTES", "1000000")
    assert path.stat().st_size < 10_000
    with refused("at least 1,600,000 bytes.*set BAYOU_MAX_BYTES"):
        load(path, target="y")
    with refused("as Parquet"):
        load(write(path, "x"), target="y")


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with refused("needs pyarrow"):
        load(write(tmp_path / "t.parquet", "x"), target="y")


# --- whole numbers beyond 2^53 ------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["csv", "npz"])
def test_classes_that_are_equal_in_float64_stay_apart(suffix, tmp_path):
    y = [LARGE + i % 2 for i in range(40)]
    path = tmp_path / f"t.{suffix}"
    if suffix == "csv":
        write_rows(path, "a y", list(enumerate(y)))
    else:
        np.savez(path, a=np.arange(40), y=np.array(y))
    data = load(path, target="y")
    assert data.class_names == (str(LARGE), str(LARGE + 1))
    rows = data.preprocessor.rows(path, need_target=True)
    assert rows.y.tolist() == [i % 2 for i in range(40)]
    unknown = {"a": [1], "y": np.array([LARGE + 3])}
    with refused(f"'{LARGE + 3}' is not one of the classes"):
        to_json_and_back(data.preprocessor).rows(unknown, need_target=True)


def test_large_whole_numbers_are_categories_where_rounding_joins_them(make, tmp_path):
    rows = [
        (LARGE + i % 2, 1_700_000_000_000_000_000 + 10**9 * i, LARGE + i, i / 7) for i in range(40)
    ]
    data = make("a nanoseconds name y", rows, id="name")
    assert data.feature_names == (f"a={LARGE}", f"a={LARGE + 1}", "nanoseconds")
    assert data.preprocessor.rows(tmp_path / "t.csv").ids == [str(LARGE + i) for i in range(40)]


# --- files that are larger than they look, or no files ------------------------------------------


def test_many_columns_take_time_in_proportion(tmp_path):
    seconds = []
    for count in (1000, 10_000):
        names = [*(f"x{i}" for i in range(count)), *["twice"] * count]
        path = write_rows(tmp_path / "t.csv", " ".join(names), [[1.0] * 2 * count])
        columns = tuple(Number(f"x{i}") for i in range(count))
        preprocessor = TablePreprocessor(columns, "y", "regression")
        start = time.process_time()
        rows = preprocessor.rows(path)
        seconds.append(time.process_time() - start)
        assert rows.x.shape == (1, count)
    assert seconds[1] < 40 * seconds[0]  # ×10 for what is linear, ×100 for what is not


def npy(shape):
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
    return start + header.encode() + bytes(80)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("x.npy", npy("(1000000000000, 10)"))], "as NPZ"),
        ([("x.npy", npy("(-5, 2)"))], "as NPZ"),
        ([("x.npy", npy("'wide'"))], "as NPZ"),
        ([("x.npy", npy("(10,)"))] * 2, "several arrays with the same name"),
        ([("../../x.txt", b"hello")], "as NPZ"),
        ([], "no rows"),
    ],
    ids=["terabytes", "negative", "no shape", "twice", "a text", "nothing"],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_forged_npz_files_are_refused(members, message, tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for member, content in members:
            archive.writestr(member, content)
    with refused(message):
        reading.read_file(tmp_path / "x.npz")


@pytest.mark.parametrize("name", ["bomb.csv.gz", "bomb.npz", "long.csv"])
def test_files_that_unpack_to_more_than_the_limit_are_refused(name, tmp_path, monkeypatch):
    path = tmp_path / name
    if name == "bomb.npz":
        np.savez_compressed(path, x=np.zeros((10_000, 2)), y=np.zeros(10_000))
    else:
        text = b"a,y\n" + b"1,2\n" * 50_000
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    message = f"{name} needs at least .* bytes .* limit is 100,000; set BAYOU_MAX_BYTES"
    monkeypatch.setenv("BAYOU_MAX_BYTES", "100000")
    with refused(message):
        reading.read_file(path)
    monkeypatch.setenv("BAYOU_MAX_BYTES", "1000000")
    assert reading.read_file(path).rows >= 10_000
    monkeypatch.setenv("BAYOU_MAX_BYTES", "lots")
    with refused("BAYOU_MAX_BYTES must be a number of bytes, got 'lots'"):
        reading.read_file(path)


@pytest.mark.skipif(os.name != "posix", reason="pipes with a name")
@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "npz", "parquet"])
def test_pipes_and_devices_are_refused_unopened(suffix, tmp_path):
    os.mkfifo(tmp_path / f"pipe.{suffix}")
    os.symlink("/dev/zero", tmp_path / f"device.{suffix}")
    for name in ("pipe", "device"):
        with refused("a pipe or device, not a file"):
            load(tmp_path / f"{name}.{suffix}", target="y")


def test_long_cells_are_shortened_in_notes_and_messages(make):
    rows = [(n, "ab"[n % 2], n % 5) for n in range(60)]
    preprocessor = make("number letter y", rows, task="regression").preprocessor
    long = "x" * 500_000
    columns = {"number": ["1", long, *map(str, range(50))], "letter": [long, *"b" * 51]}
    tracemalloc.start()
    notes = preprocessor.rows(columns).notes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum("... (500,000 characters)" in note for note in notes) == 2
    assert max(map(len, notes)) < 400
    assert peak < 12_500_000  # an array of strings of that length would have 100 MB
    with pytest.raises(DataError, match="500,000 characters") as error:
        preprocessor.rows(columns | {"y": [long] * 52}, need_target=True)
    assert len(str(error.value)) < 400
