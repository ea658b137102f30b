"""One column of a table: numbers in common notations, missing values, dates, categories."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]

MISSING = frozenset({"", "na", "n/a", "nan", "null", "?", "#n/a", "<na>", "nat"})
MISSING_NUMBER = MISSING | {"none", "-", "--", ".", "missing", "inf", "-inf", "+inf"}
MISSING_LEVEL = "(missing)"
EXACT = 2**53
MAX_QUOTED = 80  # characters of a cell in a message
MAX_NUMBER = 400  # characters of a plain number; longer cells are text, and an array of them could fill the memory
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
_DECIMAL_COMMA = re.compile(r"[+-]?(\d*|\d{1,3}(\.\d{3})+),\d+([eE][+-]?\d+)?")
_DRESS = re.compile(r"^[$€£¥]\s*|\s*[%€]$")
_DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))([T ]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?.{0,6})?"
    r"|\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?"
)


def quote(text: str) -> str:
    """Quote a cell or a name for a message, shortened to ``MAX_QUOTED`` characters.

    Args:
        text: of any length.
    """
    if len(text) <= MAX_QUOTED:
        return repr(text)
    return f"{text[:MAX_QUOTED]!r}... ({len(text):,} characters)"


def number(text: str, decimal_comma: bool = False) -> float | None:
    """A number in a common notation, ``1,234.5``,
    ``$12``, ``7 %``, ``3,14`` with ``decimal_comma``; else None.
    """
    text = text.strip().strip("'\"")
    try:
        return None if "_" in text else float(text)
    except ValueError:
        text = _DRESS.sub("", text)
        if decimal_comma and _DECIMAL_COMMA.fullmatch(text):
            text = text.replace(".", "").replace(",", ".")
        elif _THOUSANDS.fullmatch(text):
            text = text.replace(",", "")
        try:
            return float(text)
        except ValueError:
            return None


def has_decimal_commas(columns: Iterable[list[str]]) -> bool:
    """Whether numbers are written ``3,14``: some cells have no other reading, and no number has a
    decimal point.
    """
    found = False
    for cells in columns:
        bare = [_DRESS.sub("", cell.strip()) for cell in cells[:1000]]
        if any("." in cell and number(cell) is not None for cell in bare):
            return False
        odd = sum(
            bool(_DECIMAL_COMMA.fullmatch(cell)) and not _THOUSANDS.fullmatch(cell) for cell in bare
        )
        found = found or odd > 0.5 * sum(cell.lower() not in MISSING_NUMBER for cell in bare)
    return found


def exact(numbers: Iterable[float | None]) -> bool:
    """Whether whole numbers up to these are exact in float64."""
    return all(value is None or abs(value) < EXACT for value in numbers)


def label(value: float) -> str:
    """A number as the name of a class or category: ``3`` for 3.0, ``""`` for nan."""
    if value != value:
        return ""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


@final
@dataclass(frozen=True, eq=False)
class Column:
    """The raw cells of a column, numbers (nan if missing) or text (``""``), with their
    interpretations.
    """

    cells: Numbers | list[str]
    decimal_comma: bool = False

    @staticmethod
    def of(values: Any) -> Column:
        """Any sequence."""
        is_long = isinstance(values, list) and any(
            isinstance(v, str) and len(v) > MAX_NUMBER for v in values
        )
        array = np.asarray(values, dtype=object if is_long else None)
        if array.ndim != 1:
            raise ValueError(f"a column must be one-dimensional, got shape {array.shape}")
        whole = array.dtype.kind in "iu"
        if array.dtype.kind == "f" or (
            whole and (not array.size or exact((int(array.min()), int(array.max()))))
        ):
            return Column(array.astype(np.float64))
        return Column(
            ["" if cell is None or cell != cell else str(cell) for cell in array.tolist()]
        )

    def __len__(self) -> int:
        return len(self.cells)

    def text(self, row: int) -> str:
        """The raw text of a cell."""
        return self.cells[row] if isinstance(self.cells, list) else label(float(self.cells[row]))

    def take(self, rows: NDArray[np.int64]) -> Column:
        """Some of the rows."""
        cells = (
            [self.cells[i] for i in rows.tolist()]
            if isinstance(self.cells, list)
            else self.cells[rows]
        )
        return Column(cells, self.decimal_comma)

    @cached_property
    def _parsed(self) -> tuple[Numbers, Flags]:
        """Numbers, nan where there is none, and which cells are neither a number nor blank."""
        cells = self.cells
        try:
            if isinstance(cells, list) and max(map(len, cells), default=0) > MAX_NUMBER:
                raise ValueError("not a column of plain numbers")
            values = np.asarray(
                cells, dtype=None if isinstance(cells, np.ndarray) else np.str_
            ).astype(np.float64)
            bad = np.zeros(len(cells), bool)  # fast path: every cell is a plain number
        except ValueError:
            blank = np.array([str(cell).strip().lower() in MISSING_NUMBER for cell in cells])
            pairs = zip(cells, blank, strict=True)
            read = [None if skip else number(str(cell), self.decimal_comma) for cell, skip in pairs]
            values = np.array([np.nan if value is None else value for value in read])
            bad = np.array([value is None for value in read]) & ~blank
        return np.where(np.isfinite(values), values, np.nan), bad

    @property
    def values(self) -> Numbers:
        """The cells as numbers; nan where a cell is blank, infinite or no number."""
        return self._parsed[0]

    @property
    def bad(self) -> Flags:
        """Which cells are neither numbers nor blank."""
        return self._parsed[1]

    @property
    def missing(self) -> Flags:
        """Which cells are blank, or infinite."""
        return np.isnan(self.values) & ~self.bad

    @cached_property
    def levels(self) -> list[str]:
        """The cells as categories, ``""`` for a missing one."""
        if isinstance(self.cells, np.ndarray):
            return [label(value) for value in self.cells.tolist()]
        stripped = (cell.strip() for cell in self.cells)
        return ["" if cell.lower() in MISSING else cell for cell in stripped]

    @cached_property
    def rounded(self) -> bool:
        """Whether there are whole numbers that are not exact in float64; ``levels`` keep them
        apart.
        """
        large = np.abs(self.values) >= EXACT
        if not (isinstance(self.cells, list) and large.any()):
            return False
        return len({self.levels[i] for i in np.flatnonzero(large).tolist()}) > len(
            np.unique(self.values[large])
        )

    @property
    def holds_dates(self) -> bool:
        """Whether nine in ten of the first thousand present cells are dates or times of day."""
        present = (
            [level for level in self.levels if level][:1000] if isinstance(self.cells, list) else []
        )
        return bool(present) and sum(bool(_DATE.fullmatch(cell)) for cell in present) >= 0.9 * len(
            present
        )
