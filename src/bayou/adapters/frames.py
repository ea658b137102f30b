"""Data frames in the scikit-learn estimators, with the preprocessing of ``bayou train``."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, final

import numpy as np
from numpy.typing import NDArray

from bayou.core.progress import BayouWarning
from bayou.core.specs import Checked
from bayou.data.cell_notes import CellNotes
from bayou.data.column_types import fit_columns
from bayou.data.columns import Column, is_missing
from bayou.data.dates import Date
from bayou.data.encoders import Category, Number
from bayou.data.preprocess import encode_columns
from bayou.data.reading import RawTable, quote_names

MAX_NAMES: Final = 5  # in a message about columns, as of scikit-learn


class TableWarning(BayouWarning):
    """A column of a data frame is not used, or has unusual values."""


@final
@dataclass(frozen=True)
class FrameEncoder(Checked):
    """The encoding of the columns of a data frame as numbers, by its training rows.

    Args:
        names: of all columns of the frame of the fit, in their order.
        columns: the encoders of those that are inputs.
    """

    names: tuple[str, ...]
    columns: tuple[Number | Category | Date, ...]

    def __post_init__(self) -> None:
        """Check that every encoder is of a column."""
        self._check_words("names")
        unknown = [column.name for column in self.columns if column.name not in self.names]
        if unknown:
            raise ValueError(f"there are no columns {quote_names(unknown)}")

    @classmethod
    def fit(cls, table: RawTable, rows: NDArray[np.int64], notes: list[str]) -> Self:
        """Decide what each column is, and fit its encoder; warn of columns that are not used.

        Args:
            table: all rows, whose columns decide on their types.
            rows: indices of the rows whose statistics are taken.
            notes: to which those about columns are added.

        Raises:
            DataError: if no column can be used.
        """
        columns = fit_columns(table, None, rows, notes)
        used = {column.name for column in columns}
        unused = [name for name in table.columns if name not in used]
        if unused:
            reasons = [
                note for note in notes if note.startswith(tuple(f"Column {n!r} " for n in unused))
            ]
            warnings.warn(
                f"columns that are not used: {quote_names(unused)}. {' '.join(reasons)}",
                TableWarning,
                stacklevel=5,
            )
        return cls(tuple(table.columns), columns)

    @property
    def features(self) -> tuple[str, ...]:
        """A name for every number of an input."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def needs_order(self) -> bool:
        """Whether all inputs are numbers, whose columns scikit-learn wants in the same order."""
        return all(isinstance(column, Number) for column in self.columns)

    def encode(self, table: RawTable) -> NDArray[np.float64]:
        """Return the inputs of every row, (N, features); warn of unusual values.

        Args:
            table: with all columns that are inputs.
        """
        notes = CellNotes()
        inputs = encode_columns(self.columns, table, notes)
        for note in notes.sentences():
            warnings.warn(note, TableWarning, stacklevel=2)
        return inputs

    def check_names(self, names: Sequence[str]) -> None:
        """Raise a ValueError in the words of scikit-learn for other columns than those of the fit.

        Columns of numbers alone must have the order of the fit, which scikit-learn demands of all
        estimators; others are taken by name.

        Args:
            names: of the columns of new rows.
        """
        unseen = sorted(set(names) - set(self.names))
        missing = sorted(set(self.names) - set(names))
        message = ""
        if unseen:
            message += f"Feature names unseen at fit time:\n{_list_names(unseen)}"
        if missing:
            message += f"Feature names seen at fit time, yet now missing:\n{_list_names(missing)}"
        if not message and self.needs_order and tuple(names) != self.names:
            message = "Feature names must be in the same order as they were in fit.\n"
        if message:
            raise ValueError(
                f"The feature names should match those that were passed during fit.\n{message}"
            )

    def table_of(self, rows: NDArray[Any]) -> RawTable:
        """Return rows without names as a table with the columns of the fit.

        Args:
            rows: (N, columns), in the order of the fit.
        """
        columns = {name: Column.of(rows[:, i].tolist()) for i, name in enumerate(self.names)}
        return RawTable("X", columns)


def _list_names(names: Collection[str]) -> str:
    """Return the first names, each on a line."""
    lines = [f"- {name}\n" for name in list(names)[:MAX_NAMES]]
    if len(names) > MAX_NAMES:
        lines.append("- ...\n")
    return "".join(lines)


@final
@dataclass(frozen=True, eq=False)
class Labels:
    """The classes of y, and the class of every row.

    Args:
        classes: sorted, (C,).
        codes: indices of classes, (N,).
        order: the classes from low to high, if y says so; empty otherwise.
    """

    classes: NDArray[Any]
    codes: NDArray[np.int64]
    order: tuple[Any, ...] = ()

    @classmethod
    def of_array(cls, y: NDArray[Any]) -> Self:
        """Return the labels of an array, sorted.

        Args:
            y: (N,).
        """
        classes, codes = np.unique(y, return_inverse=True)
        return cls(classes, codes.reshape(-1).astype(np.int64))

    @classmethod
    def of_series(cls, y: object) -> Self | None:
        """Return the labels of a pandas Series or Categorical; None for what is none.

        Also None for a series of plain numbers or text, which scikit-learn reads.

        Args:
            y: anything.

        Raises:
            ValueError: for missing labels.
        """
        series: Any = y
        categorical = getattr(series, "cat", series)
        if hasattr(categorical, "categories") and hasattr(categorical, "codes"):
            codes = np.asarray(categorical.codes, dtype=np.int64)
            order = bool(categorical.ordered)
            return cls._of_values(categorical.categories.tolist(), codes, is_ordered=order)
        if not hasattr(series, "to_numpy") or hasattr(series, "columns"):
            return None
        values = series.to_numpy()
        if values.dtype.kind not in "OMm":
            is_plain = isinstance(series.dtype, np.dtype) or values.dtype.kind not in "bi"
            return None if is_plain else cls.of_array(values)  # boolean, Int64
        cells = list(series) if values.dtype.kind in "Mm" else values.tolist()
        present = [cell for cell in cells if not is_missing(cell)]
        if len(present) == len(cells) and all(isinstance(cell, str) for cell in present):
            return None
        categories = list(dict.fromkeys(present))
        index = {category: code for code, category in enumerate(categories)}
        codes = np.array([-1 if is_missing(cell) else index[cell] for cell in cells], np.int64)
        return cls._of_values(categories, codes, is_ordered=False)

    @classmethod
    def _of_values(cls, values: list[Any], codes: NDArray[np.int64], *, is_ordered: bool) -> Self:
        """Return the labels of categories and their codes, without categories of no row."""
        is_absent = codes < 0
        if is_absent.any():
            raise ValueError(
                f"Input y contains NaN: {int(is_absent.sum())} of {len(codes)} labels are missing, "
                f"first in row {int(is_absent.argmax()) + 1}; leave these rows out"
            )
        present = np.unique(codes).tolist()
        try:
            ranked = sorted(present, key=lambda code: values[code])
        except TypeError:  # values of different types
            ranked = sorted(present, key=lambda code: str(values[code]))
        new_codes = np.empty(len(values), np.int64)
        new_codes[ranked] = np.arange(len(ranked))
        order = tuple(values[code] for code in present) if is_ordered else ()
        return cls(_array_of([values[code] for code in ranked]), new_codes[codes], order)

    def ranks(self, order: Iterable[Any] | None) -> NDArray[np.int64]:
        """Return the place of each class from low to high, (C,).

        Args:
            order: the classes from low to high, also some that no row has; None (the default) for
                the order that y has, else for sorted classes.

        Raises:
            ValueError: if a class is not in the order, or is there twice.
        """
        ordered = list(self.order or self.classes.tolist()) if order is None else list(order)
        classes = self.classes.tolist()
        missing = [value for value in classes if value not in ordered]
        if missing or len(set(map(str, ordered))) < len(ordered):
            raise ValueError(
                f"order must have every class of y once, {', '.join(map(repr, classes))}; got "
                f"{', '.join(map(repr, ordered))}"
            )
        present = [value for value in ordered if value in classes]
        return np.array([present.index(value) for value in classes], np.int64)


def _array_of(values: list[Any]) -> NDArray[Any]:
    """Return values as an array (N,): of their own type if they share one, else of objects."""
    types = {type(value) for value in values}
    if len(types) == 1 and isinstance(values[0], bool | int | float | str):
        dtype = object if isinstance(values[0], str) else None
        return np.array(values, dtype=dtype)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
