"""One split of a table as arrays for other libraries: the rows that bayou learns from.

``matrix`` has the inputs of bayou's network, categories one-hot and numbers standardized.
``mixed`` has every column as it is, categories as codes, for libraries that split on them.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import numpy as np
from numpy.typing import NDArray

from bayou.data import DataSet, load
from bayou.data.columns import Column
from bayou.data.dates import parse_dates
from bayou.data.reading import read_file

Floats = NDArray[np.float64]
POSITION = "position in the file"
UNKNOWN = -1.0  # the code of a category that no training row has


@final
@dataclass(frozen=True)
class Rows:
    """Training and test rows of one split, in the units of the user.

    Args:
        task: "classification" or "regression".
        x: training inputs as in bayou's network, (N, features).
        y: training targets (N,): numbers in their units, or codes of classes.
        x_test: test inputs.
        y_test: test targets.
        classes: the number of classes; 0 for numbers.
        mixed: training inputs of every column, nan where a number is missing, (N, columns).
        mixed_test: the same of the test rows.
        categories: the columns of ``mixed`` that have codes of categories.
        notes: sentences about the preprocessing.
    """

    task: str
    x: Floats
    y: NDArray[Any]
    x_test: Floats
    y_test: NDArray[Any]
    classes: int
    mixed: Floats
    mixed_test: Floats
    categories: tuple[int, ...]
    notes: tuple[str, ...]

    def first(self, count: int, seed: int) -> Rows:
        """Return the same with a random part of the training rows.

        Args:
            count: of training rows.
            seed: of the permutation.
        """
        if count >= len(self.y):
            return self
        kept = np.random.default_rng(seed).permutation(len(self.y))[:count]
        parts = {name: getattr(self, name)[kept] for name in ("x", "y", "mixed")}
        return Rows(**(self.__dict__ | parts))


def read_rows(settings: Mapping[str, Any]) -> Rows:
    """Return one split of a table.

    Args:
        settings: as ``sources.Table.settings`` returns them.
    """
    options = dict(settings)
    data = load(options.pop("data"), **options)
    x, x_test = (inputs.double().numpy() for inputs in (data.train[0], data.test[0]))
    y, y_test = _targets(data, data.train[1]), _targets(data, data.test[1])
    mixed, mixed_test = x, x_test
    categories: tuple[int, ...] = ()
    if str(settings["data"]).endswith(".csv"):
        mixed, mixed_test, categories = mixed_columns(settings)
    return Rows(
        data.task,
        x,
        y,
        x_test,
        y_test,
        len(data.class_names),
        mixed,
        mixed_test,
        categories,
        tuple(data.notes),
    )


def _targets(data: DataSet, y: Any) -> NDArray[Any]:
    """Return targets in their units: numbers, or codes of classes."""
    if data.task == "classification":
        return y.numpy()
    return data.preprocessor.original(y.double()).numpy()[:, 0]


def mixed_columns(settings: Mapping[str, Any]) -> tuple[Floats, Floats, tuple[int, ...]]:
    """Return all columns of a CSV file but target and dropped ones, split as bayou splits them.

    Args:
        settings: the file, its target, the columns to drop and the split.

    Returns:
        Training rows, test rows, and the places of the columns with codes of categories.
    """
    train, test = row_numbers(settings)
    table = read_file(Path(settings["data"]), (settings["target"],))
    skipped = {settings["target"], *settings.get("drop", ())}
    inputs: list[Floats] = []
    categories: list[int] = []
    for name, column in table.columns.items():
        if name not in skipped:
            values, is_category = encode_column(column, train)
            if is_category:
                categories.append(len(inputs))
            inputs.append(values)
    matrix = np.stack(inputs, axis=1)
    return matrix[train], matrix[test], tuple(categories)


def row_numbers(settings: Mapping[str, Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which rows of a CSV file bayou learns from, and which it tests on.

    The file is loaded with one more column, the number of the row, which is read from the inputs.

    Args:
        settings: the file, its target, the columns to drop and the split.
    """
    path = Path(settings["data"])
    numbered = path.with_name(f"numbered-{path.name}")
    with path.open(newline="") as source, numbered.open("w", newline="") as stream:
        lines = (line for line in csv.reader(source) if line)
        writer = csv.writer(stream)
        writer.writerow([*next(lines), POSITION])
        writer.writerows([*line, number + 0.5] for number, line in enumerate(lines))
    options = {**settings, "data": str(numbered)}
    data = load(options.pop("data"), **options)
    numbered.unlink()
    place = data.feature_names.index(POSITION)
    encoder = next(c for c in cast(Any, data.preprocessor).columns if c.name == POSITION)
    positions = [
        x[:, place].double().numpy() * encoder.scale + encoder.mean - 0.5
        for x in (data.train[0], data.test[0])
    ]
    train, test = (np.rint(position).astype(np.int64) for position in positions)
    return train, test


def encode_column(column: Column, train: NDArray[np.int64]) -> tuple[Floats, bool]:
    """Return a column as numbers, and whether they are codes of categories.

    Dates are days since 1970. A missing number is nan, a missing category a category.

    Args:
        column: the cells of all rows.
        train: indices of the training rows, whose categories have codes.
    """
    if column.holds_dates:
        return parse_dates(column.levels), False
    if not column.bad.any():
        return column.values, False
    known = {level: code for code, level in enumerate(sorted({column.levels[i] for i in train}))}
    return np.array([float(known.get(level, UNKNOWN)) for level in column.levels]), True
