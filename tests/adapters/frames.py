"""Data frames for tests: of pandas, and of a small class with the same methods."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np


@final
@dataclass(frozen=True)
class Categories:
    """The cells of a column that a frame declares to be categorical."""

    cells: list[Any]


@final
class StandInSeries:
    """A column of ``StandIn``."""

    def __init__(self, cells: Any) -> None:
        self.dtype: Any = "category" if isinstance(cells, Categories) else None
        values = cells.cells if isinstance(cells, Categories) else cells
        has_gaps = isinstance(values, list) and any(cell is None for cell in values)
        self.values = np.array(values, dtype=object if has_gaps else None)
        self.dtype = self.dtype or self.values.dtype

    def to_numpy(self) -> np.ndarray:
        """Return the cells."""
        return self.values


@final
class StandIn:
    """A data frame that scikit-learn does not know."""

    def __init__(self, columns: Mapping[Any, Any]) -> None:
        self._columns = {name: StandInSeries(cells) for name, cells in columns.items()}

    @property
    def columns(self) -> list[Any]:
        """The names of the columns."""
        return list(self._columns)

    def __getitem__(self, name: Any) -> StandInSeries:
        return self._columns[name]

    def to_numpy(self) -> np.ndarray:
        """Return all cells, (N, columns)."""
        return np.stack([column.values.astype(object) for column in self._columns.values()], 1)


def pandas_frame(columns: Mapping[Any, Any]) -> Any:
    """Return a frame of pandas."""
    import pandas as pd

    def series(cells: Any) -> Any:
        return pd.Categorical(cells.cells) if isinstance(cells, Categories) else cells

    return pd.DataFrame({name: series(cells) for name, cells in columns.items()})


def write_csv(path: Path, columns: Mapping[str, Any]) -> Path:
    """Write columns to a CSV file; None and nan are blank."""
    cells = [
        cells.cells if isinstance(cells, Categories) else list(cells) for cells in columns.values()
    ]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in zip(*cells, strict=True):
            writer.writerow("" if cell is None or cell != cell else cell for cell in row)
    return path
