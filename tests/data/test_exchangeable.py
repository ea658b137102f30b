"""Rows that look ordered and rows that occur twice: the rates of the checks, and their words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bayou.data import exchangeable, load
from bayou.data.exchangeable import describe_copies, describe_order

Columns = dict[str, NDArray[np.float64]]


def as_columns(x: NDArray[np.float64]) -> Columns:
    """Return the columns of a matrix by name."""
    return {f"c{i}": column for i, column in enumerate(x.T)}


TABLES = {
    "normal": lambda random: random.normal(size=(60, 4)),
    "dependent": lambda random: random.normal(size=(60, 1)) + 0.1 * random.normal(size=(60, 4)),
    "rare": lambda random: (random.random((60, 4)) < 0.05).astype(float),
    "heavy": lambda random: random.standard_cauchy((60, 4)).round(1),
}


@pytest.mark.parametrize("kind", TABLES)
def test_the_false_positive_rate_is_one_in_the_random_orders_and_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 19 random orders it is at most 1/20 for any columns, whatever else is required."""
    for name in ("MIN_SCORE", "MIN_CORRELATION", "MIN_DRIFT"):
        monkeypatch.setattr(exchangeable, name, 0.0)
    random = np.random.default_rng(0)
    tables = 400
    count = 0
    for seed in range(tables):
        columns = as_columns(TABLES[kind](random))
        count += bool(describe_order(columns, permutations=19, seed=seed))
    rate = 1 / 20
    error = np.sqrt(rate * (1 - rate) / tables)
    assert rate - 4 * error < count / tables < rate + 4 * error


@pytest.mark.slow
def test_one_in_a_thousand_tables_is_called_ordered_by_mistake() -> None:
    random = np.random.default_rng(1)
    tables = 4000
    count = sum(bool(describe_order(as_columns(TABLES["normal"](random)))) for _ in range(tables))
    assert count <= 4 + 4 * np.sqrt(4)


@pytest.mark.parametrize("rows", [100, 1000, 30_000])
def test_a_weak_serial_correlation_is_found(rows: int) -> None:
    random = np.random.default_rng(0)
    noise = random.normal(size=rows)
    walk = np.zeros(rows)
    for row in range(1, rows):
        walk[row] = 0.6 * walk[row - 1] + noise[row]
    note = describe_order({"y": walk, "a": random.normal(size=rows)})
    assert "in neighboring rows 'y' has a rank correlation of 0." in note
    assert "--split-by-time COLUMN" in note


def test_a_drift_without_a_correlation_of_neighbors_is_found() -> None:
    random = np.random.default_rng(0)
    y = random.normal(size=4000) + 0.9 * np.linspace(0, 1, 4000)
    note = describe_order({"y": y})
    assert "'y' differs between the first and the last tenth of the rows by 0.8" in note


def test_a_correlation_too_weak_to_matter_is_not_mentioned() -> None:
    random = np.random.default_rng(0)
    noise = random.normal(size=10_001)
    assert describe_order({"y": noise[1:] + 0.05 * noise[:-1]}) == ""


@pytest.mark.parametrize("sign", [-1, 1])
def test_sorted_rows_are_named_by_their_column(sign: int) -> None:
    random = np.random.default_rng(0)
    hour = sign * np.arange(200.0)
    note = describe_order({"y": np.sin(hour / 20) + random.normal(size=200), "hour": hour})
    assert note.startswith("The rows are sorted by 'hour'.")


def test_rows_sorted_by_the_target_or_by_text_are_not_to_be_split_by_it(tmp_path: Path) -> None:
    """Neither is a column of --split-by-time."""
    random = np.random.default_rng(0)
    y = np.sort(random.normal(size=60))
    for name, cells in (("y", y), ("kind", np.repeat(["a", "b", "c"], 20))):
        columns = {"x": random.normal(size=60), "y": random.normal(size=60), name: cells}
        path = tmp_path / f"{name}.csv"
        rows = zip(*columns.values(), strict=True)
        path.write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]))
        (note,) = [text for text in load(path, target="y").notes if "sorted by" in text]
        assert f"The rows are sorted by '{name}'" in note
        assert f"--split-by-time {name}" not in note
        assert "--split-by-time COLUMN" in note


def test_constant_missing_and_few_values_are_no_order() -> None:
    columns = {"y": np.ones(50), "a": np.full(50, np.nan)}
    assert describe_order(columns) == ""
    assert describe_order({"y": np.arange(19.0)}) == ""


def test_a_table_of_random_order_has_no_note_and_an_ordered_one_has(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    walk = random.normal(size=300).cumsum()
    notes = {}
    for name, rows in (("ordered", np.arange(300)), ("shuffled", random.permutation(300))):
        path = tmp_path / f"{name}.csv"
        lines = [f"{random.normal():.3f},{walk[row]:.4f}" for row in rows]
        path.write_text("\n".join(["a,y", *lines]))
        data = load(path, target="y")
        notes[name] = [note for note in data.notes if "ordered" in note]
        has_comparison = any("by the order of rows" in note for note in data.split_notes)
        assert has_comparison == (name == "ordered")
    assert len(notes["ordered"]) == 1
    assert notes["shuffled"] == []


# --- copies --------------------------------------------------------------------------------------


def test_copies_are_counted() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(100, 3))
    y = random.normal(size=(100, 1))
    x[10:14], y[10:14] = x[0:4], y[0:4]  # four copies, two of them of training rows in the test
    x[20], y[21] = x[5], y[5]  # other targets, other inputs
    x[30], y[30] = x[0], y[0]  # the same row a third time
    train = np.setdiff1d(np.arange(100), [10, 11, 40, 41])
    notes = describe_copies(x, y, train, np.array([10, 11, 40, 41]))
    assert notes == [
        "5 of 100 rows are exact copies of another, inputs and target; 2 of the 4 test rows have "
        "one in training, which makes the scores better than on new rows: leave copies out of the "
        "file, or give --group COLUMN, --split-by-time COLUMN.",
        "1 of 100 rows has the inputs of another row, but another target.",
    ]


def test_copies_on_one_side_leak_nothing() -> None:
    x = np.random.default_rng(0).normal(size=(50, 2))
    x[1] = x[0]
    (note,) = describe_copies(x, np.zeros(50, int), np.arange(40), np.arange(40, 50))
    assert note == (
        "1 of 50 rows is an exact copy of another, inputs and target; no test row has a copy in "
        "training."
    )


def test_equal_rows_of_a_few_values_are_a_coincidence() -> None:
    x = np.random.default_rng(0).integers(0, 3, (400, 2)).astype(np.float32)
    assert describe_copies(x, np.zeros(400, int), np.arange(300), np.arange(300, 400)) == []


def test_minus_zero_is_zero() -> None:
    x = np.arange(30.0)[:, None] * np.ones(2)
    x[1:3, 0] = 0.0, -0.0
    x[1:3, 1] = 7.0
    (note,) = describe_copies(x, np.zeros(30, int), np.arange(30), np.arange(0))
    assert note.startswith("1 of 30 rows is an exact copy")
