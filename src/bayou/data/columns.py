"""One column of a table: numbers in common notations, missing values, dates, categories."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]

MISSING = frozenset({"", "na", "n/a", "nan", "null", "?", "#n/a", "<na>", "nat"})
MISSING_NUMBER = MISSING | {"none", "-", "--", ".", "missing", "inf", "-inf", "+inf"}
MISSING_LEVEL = "(missing)"
OTHER_LEVELS = "(other)"
EXACT = 2**53  # whole numbers below are exact in float64
MAX_QUOTED = 80  # characters of a cell in a message
# Characters of a plain number; longer cells are text, and an array of them could fill the memory.
MAX_NUMBER_LENGTH = 400
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
_DECIMAL_COMMA = re.compile(r"[+-]?(\d*|\d{1,3}(\.\d{3})+),\d+([eE][+-]?\d+)?")
_CURRENCY_OR_PERCENT = re.compile(r"^[$€£¥]\s*|\s*[%€]$")
_DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))"  # a date
    r"([T ]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?.{0,6})?"  # and a time of day
    r"|\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?"  # or a time of day
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
    """Return a number in a common notation, else None.

    Notations are ``1,234.5``, ``$12``, ``7 %``, and ``3,14`` with ``decimal_comma``.

    Args:
        text: of a cell.
        decimal_comma: whether the comma is the decimal point.
    """
    text = text.strip().strip("'\"")
    try:
        return None if "_" in text else float(text)
    except ValueError:
        text = _CURRENCY_OR_PERCENT.sub("", text)
        if decimal_comma and _DECIMAL_COMMA.fullmatch(text):
            text = text.replace(".", "").replace(",", ".")
        elif _THOUSANDS.fullmatch(text):
            text = text.replace(",", "")
        try:
            return float(text)
        except ValueError:
            return None


def has_decimal_commas(columns: Iterable[list[str]]) -> bool:
    """Return whether numbers are written ``3,14``.

    Some cells must have no other reading, and no number may have a decimal point.

    Args:
        columns: the cells of each.
    """
    has_comma_column = False
    for column in columns:
        cells = [_CURRENCY_OR_PERCENT.sub("", cell.strip()) for cell in column[:1000]]
        if any("." in cell and number(cell) is not None for cell in cells):
            return False
        comma_count = sum(
            bool(_DECIMAL_COMMA.fullmatch(cell)) and not _THOUSANDS.fullmatch(cell)
            for cell in cells
        )
        present_count = sum(cell.lower() not in MISSING_NUMBER for cell in cells)
        if comma_count > 0.5 * present_count:
            has_comma_column = True
    return has_comma_column


def are_exact(numbers: Iterable[float | None]) -> bool:
    """Return whether whole numbers up to these are exact in float64.

    Args:
        numbers: the least and the largest; None for none.
    """
    return all(value is None or abs(value) < EXACT for value in numbers)


def is_missing(cell: object) -> bool:
    """Return whether a cell holds no value: None, nan, NaT or NA.

    Args:
        cell: anything.
    """
    if cell is None:
        return True
    try:
        return bool(cell != cell)
    except TypeError:  # pandas.NA is neither equal to itself nor different
        return True
    except ValueError:  # an array
        return False


def label(value: float) -> str:
    """Return a number as the name of a class or category: ``3`` for 3.0, ``""`` for nan.

    Args:
        value: the number.
    """
    if value != value:
        return ""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


@final
@dataclass(frozen=True, eq=False)
class Column:
    """The raw cells of a column, with their interpretations as numbers and as categories.

    Args:
        cells: numbers (nan if missing) or text (``""``).
        decimal_comma: whether the comma is the decimal point in text.
        is_category: whether the cells were declared to be categories, also if they are numbers or
            dates.
        first_row: the index of the first cell in its file, of which messages tell the row.
    """

    cells: Numbers | list[str]
    decimal_comma: bool = False
    is_category: bool = False
    first_row: int = 0

    @staticmethod
    def of(values: object) -> Column:
        """Return the column of any sequence.

        Args:
            values: numbers or text; integers that float64 cannot hold become text, and spans of
                time their seconds.
        """
        has_long_text = isinstance(values, list) and any(
            isinstance(value, str) and len(value) > MAX_NUMBER_LENGTH for value in values
        )
        array = np.asarray(values, dtype=object if has_long_text else None)
        if array.ndim != 1:
            raise ValueError(f"a column must be one-dimensional, got shape {array.shape}")
        if array.dtype.kind == "M":
            array = array.astype("datetime64[s]").astype(np.str_)
        if array.dtype.kind == "m":
            array = array / np.timedelta64(1, "s")
        is_exact = array.dtype.kind == "f"
        if array.dtype.kind in "iu":
            is_exact = not array.size or are_exact((int(array.min()), int(array.max())))
        if is_exact:
            return Column(array.astype(np.float64))
        return Column(["" if is_missing(cell) else str(cell) for cell in array.tolist()])

    @staticmethod
    def of_categories(values: Iterable[object]) -> Column:
        """Return the column of values that were declared to be categories.

        Args:
            values: of any type.
        """
        cells = []
        for value in values:
            if is_missing(value):
                cells.append("")
            elif isinstance(value, float | np.floating):
                cells.append(label(float(value)))
            else:
                cells.append(str(value))
        return Column(cells, is_category=True)

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self.cells)

    def text(self, row: int) -> str:
        """Return the raw text of a cell.

        Args:
            row: its index.
        """
        if isinstance(self.cells, list):
            return self.cells[row]
        return label(float(self.cells[row]))

    def describe_first(self, flags: Flags) -> str:
        """Return the first flagged cell for a message: ``row 14: 'oops'``.

        Args:
            flags: (N,), at least one of them set.
        """
        row = int(flags.argmax())
        return f"row {self.first_row + row + 1}: {quote(self.text(row))}"

    def describe_first_number(self, flags: Flags, values: Numbers, digits: str) -> str:
        """Return the first flagged number for a message: ``row 14: 1e+09``.

        Args:
            flags: (N,), at least one of them set.
            values: the numbers, (N,).
            digits: how they are formatted.
        """
        row = int(flags.argmax())
        return f"row {self.first_row + row + 1}: {values[row]:{digits}}"

    def take(self, rows: NDArray[np.int64]) -> Column:
        """Return the column of some rows.

        Args:
            rows: their indices.
        """
        if isinstance(self.cells, list):
            cells = [self.cells[i] for i in rows.tolist()]
            return Column(cells, self.decimal_comma, self.is_category)
        return Column(self.cells[rows])

    @cached_property
    def _numbers(self) -> tuple[Numbers, Flags]:
        """Numbers, nan where there is none, and which cells are neither a number nor blank."""
        try:
            values = self._plain_numbers()
            is_bad = np.zeros(len(self.cells), bool)
        except ValueError:
            values, is_bad = self._numbers_in_any_notation()
        return np.where(np.isfinite(values), values, np.nan), is_bad

    def _plain_numbers(self) -> Numbers:
        """Convert all cells at once, or raise a ValueError if one is not a plain number."""
        cells = self.cells
        if isinstance(cells, np.ndarray):
            return cells.astype(np.float64)
        # numpy reads 1_000 as a number, which is none here
        if max(map(len, cells), default=0) > MAX_NUMBER_LENGTH or "_" in "".join(cells):
            raise ValueError("not a column of plain numbers")
        return np.asarray(cells, dtype=np.str_).astype(np.float64)

    def _numbers_in_any_notation(self) -> tuple[Numbers, Flags]:
        """Convert cell by cell; the second array tells which cells are no numbers."""
        values = []
        is_bad = []
        for cell in self.cells:
            text = str(cell)
            is_blank = text.strip().lower() in MISSING_NUMBER
            value = None if is_blank else number(text, self.decimal_comma)
            values.append(np.nan if value is None else value)
            is_bad.append(value is None and not is_blank)
        return np.array(values), np.array(is_bad)

    @property
    def values(self) -> Numbers:
        """The cells as numbers; nan where a cell is blank, infinite or no number."""
        return self._numbers[0]

    @property
    def bad(self) -> Flags:
        """Which cells are neither numbers nor blank."""
        return self._numbers[1]

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
    def loses_digits(self) -> bool:
        """Whether different whole numbers become equal in float64; ``levels`` keep them apart."""
        is_large = np.abs(self.values) >= EXACT
        if not (isinstance(self.cells, list) and is_large.any()):
            return False
        large_levels = {self.levels[i] for i in np.flatnonzero(is_large).tolist()}
        return len(large_levels) > len(np.unique(self.values[is_large]))

    @property
    def holds_dates(self) -> bool:
        """Whether nine in ten of the first thousand present cells are dates or times of day."""
        if not isinstance(self.cells, list) or self.is_category:
            return False
        present = [level for level in self.levels if level][:1000]
        date_count = sum(bool(_DATE.fullmatch(cell)) for cell in present)
        return bool(present) and date_count >= 0.9 * len(present)
