"""Import paths that were documented before the rooms were divided."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("lab.sklearn", "adapters.sklearn", ["BayesClassifier", "BayesRegressor"]),
        ("lab.loggers", "adapters.loggers", ["Both", "JsonlLogger", "TensorBoardLogger", "write_history"]),
        ("lab.lightning", "adapters.lightning", ["BayesianModule"]),
        ("lab.export", "operations.export", ["export"]),
        ("lab.data", "data", ["CATALOGUE", "DataError", "DataSet", "download", "load"]),
    ],
)
def test_old_names_are_the_same_objects(old: str, new: str, names: list[str]) -> None:
    try:
        there = importlib.import_module(f"bayou.{new}")
    except ImportError as missing:  # Lightning is not part of the lab: then the old name says the same
        with pytest.raises(ImportError, match=str(missing)):
            importlib.import_module(f"bayou.{old}")
        return
    here = importlib.import_module(f"bayou.{old}")
    assert all(getattr(here, name) is getattr(there, name) for name in names)
