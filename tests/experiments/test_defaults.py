"""Defaults on small tables: every line can be made, rows are kept, and what is outside the limits
is said.
"""

import json

import numpy as np
import pytest

from experiments import defaults, reproduce
from experiments.defaults import TABLES

NUMBERS = [name for name, table in TABLES.items() if not table.classes]


def test_training_and_test_rows_of_tables_are_disjoint():
    assert len(NUMBERS) >= 8
    assert len(TABLES) - len(NUMBERS) >= 3
    for table in TABLES.values():
        (X, y), (X_test, y_test) = table.split(1)
        assert len(X) == len(y) == table.rows * 4 // 5
        assert len(X_test) == len(y_test) == (defaults.FRESH if table.made else table.rows - len(X))
        assert not set(map(bytes, np.hstack([X, y[:, None]]))) & set(
            map(bytes, np.hstack([X_test, y_test[:, None]]))
        )
        assert all(np.array_equal(a, b) for a, b in zip(table.split(1)[0], (X, y), strict=True))
        assert not np.array_equal(table.split(2)[0][1], y)


def test_baselines_cover_linear_data_and_rows_are_kept(tmp_path):
    told = []
    options = {"data": ["linear, 100 × 8", "wine"], "seeds": 1, "tell": told.append}
    only = ["BayesianRidge", "Gaussian process", "logistic regression"]
    page, numbers = reproduce.reproduce("defaults", tmp_path, only=only, **options)
    reproduce.reproduce("defaults", tmp_path, only=only, **options)
    assert len(told) == 3
    rows = {made["label"]: made for made in json.loads(numbers.read_text())["rows"]}
    assert all(0.8 < rows[label]["coverage"] < 0.97 for label in only[:2])
    assert rows["logistic regression"]["error"] < 10
    assert "| linear, 100 × 8 | BayesianRidge | " in page.read_text()
    with pytest.raises(ValueError, match="leave out --length"):
        reproduce.reproduce("defaults", tmp_path, length=3)
