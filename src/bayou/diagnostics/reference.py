"""A summary of training rows and held-out rows, with which new rows are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.files import StrPath, making, read_file, write_file
from bayou.diagnostics.input_columns import InputColumn, columns_of

MAX_ROWS = 2000  # training rows, and held-out rows, that are kept
MAX_NUMBERS = 4_000_000  # entries of their inputs, of each: 16 MB
KIND = "reference"  # of a file


@final
@dataclass(frozen=True, eq=False)
class ReferenceRows:
    """Training rows and held-out rows that new rows are compared with; see ``watch``.

    ``ReferenceRows.of`` makes one. It keeps a random sample of the rows, so that its file
    holds data of the training set.

    Args:
        x: inputs of training rows, (n, *shape).
        columns: their columns.
        held_x: inputs of rows that the fit has not seen, (m, *shape); None without any.
        held_y: their targets.
        rows: the number of all training rows.
        compared: indices of the inputs of a row (D,) that joint tests compare, such as all but
            those of dates, which are never the same again; None for all.
        names: of the inputs of a row (D,); None for numbered ones.
    """

    x: Tensor
    columns: tuple[InputColumn, ...]
    held_x: Tensor | None = None
    held_y: Tensor | None = None
    rows: int = 0
    compared: tuple[int, ...] | None = None
    names: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        x: Tensor,
        held_out: tuple[Tensor, Tensor] | None = None,
        *,
        names: Sequence[str] | None = None,
        columns: Sequence[InputColumn] | None = None,
        compared: Sequence[int] | None = None,
        max_rows: int = MAX_ROWS,
        seed: int = 0,
    ) -> ReferenceRows:
        """Summarize training rows and held-out rows.

        Args:
            x: inputs of all training rows, (N, *shape).
            held_out: x and y of rows that the fit has not seen. Without them it cannot be told
                whether a posterior was ever calibrated.
            names: of the inputs of a row, x (N, D).
            columns: of all training rows, instead of those of x.
            compared: indices of the inputs that joint tests compare; all by default.
            max_rows: random rows that are kept, of the training rows and of the held-out rows.
                Default: 2,000, or fewer for large arrays.
            seed: of the choice of rows.

        Raises:
            ValueError: for empty or mismatched rows.
        """
        check_rows(x, "x")
        if max_rows < 1:
            raise ValueError(f"max_rows must be 1 or more, got {max_rows}")
        if columns is None:
            columns = columns_of(x, None if names is None else tuple(names))
        for column in columns:
            if len(column) != len(x):
                raise ValueError(
                    f"the column {column.name!r} has {len(column)} rows, x has {len(x)}"
                )
        count = max(1, min(max_rows, MAX_NUMBERS // max(x[0].numel(), 1)))
        index = _some_rows(len(x), count, rng.fold(seed, "training rows"))
        held_x = None
        held_y = None
        if held_out is not None:
            held_x, held_y = held_out
            check_rows(held_x, "held-out x", held_y)
            if held_x.shape[1:] != x.shape[1:]:
                raise ValueError(
                    f"held-out x has rows of shape {tuple(held_x.shape[1:])}, training rows "
                    f"{tuple(x.shape[1:])}"
                )
            kept = _some_rows(len(held_x), count, rng.fold(seed, "held-out rows"))
            held_x = held_x.detach().cpu()[kept]
            held_y = held_y.detach().cpu()[kept]
        kept_columns = tuple(column.take(index) for column in columns)
        return cls(
            x.detach().cpu()[index],
            kept_columns,
            held_x,
            held_y,
            len(x),
            None if compared is None else tuple(compared),
            None if names is None else tuple(names),
        )

    @property
    def leaves_out_inputs(self) -> bool:
        """Whether some inputs of a row, such as those of dates, are not compared."""
        return self.compared is not None and len(self.compared) < self.x[0].numel()

    def save(self, path: StrPath) -> None:
        """Write the rows to a file of tensors and JSON, atomically.

        Args:
            path: the file.
        """
        tensors = {"x": self.x.contiguous()}
        if self.held_x is not None and self.held_y is not None:
            tensors |= {
                "held_x": self.held_x.contiguous(),
                "held_y": self.held_y.contiguous(),
            }
        for j, column in enumerate(self.columns):
            tensors[f"column.{j}"] = column.values.contiguous()
        config = {
            "kind": KIND,
            "rows": self.rows,
            "compared": self.compared,
            "names": self.names,
            "columns": [
                {"name": column.name, "levels": column.levels, "singletons": column.singletons}
                for column in self.columns
            ],
        }
        write_file(path, tensors, config)

    @classmethod
    def load(cls, path: StrPath) -> ReferenceRows:
        """Read a file that ``save`` wrote.

        Args:
            path: the file.

        Raises:
            FileError: if the file is damaged or of another type.
        """
        tensors, config = read_file(path, KIND)
        with making("reference", path):
            columns = tuple(
                _read_column(record, tensors[f"column.{j}"])
                for j, record in enumerate(config["columns"])
            )
            held_x = tensors.get("held_x")
            held_y = tensors.get("held_y")
            compared = config["compared"]
            names = config["names"]
            return cls(
                tensors["x"],
                columns,
                held_x,
                held_y,
                int(config["rows"]),
                None if compared is None else tuple(map(int, compared)),
                None if names is None else tuple(map(str, names)),
            )


def _read_column(record: dict[str, Any], values: Tensor) -> InputColumn:
    """Return a column of a file."""
    levels = tuple(map(str, record["levels"]))
    return InputColumn(str(record["name"]), values, levels, float(record["singletons"]))


def check_rows(x: object, name: str, y: object = None) -> None:
    """Raise a ValueError unless x is a tensor of rows, and y, if any, has as many rows.

    Args:
        x: inputs.
        name: of x, for the message.
        y: targets.
    """
    if not isinstance(x, Tensor) or x.ndim < 2 or not len(x):
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a tensor (N, ...) with one row or more, got {shape}")
    if not bool(x.isfinite().all()):
        raise ValueError(f"{name} has values that are not finite; fill or leave out these rows")
    if y is not None and (not isinstance(y, Tensor) or len(y) != len(x)):
        shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"{name} has {len(x)} rows, and its targets are {shape}")


def _some_rows(rows: int, count: int, seed: rng.Seed) -> Tensor:
    """Return the indices of at most ``count`` random rows, in order."""
    if rows <= count:
        return torch.arange(rows)
    return rng.permutation(rows, seed)[:count].sort().values
