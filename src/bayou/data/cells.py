"""The cells of a table: numbers as people write them, missing values, dates, categories."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Cells = Numbers | list[str]

MISSING = frozenset({"", "na", "n/a", "nan", "null", "?", "#n/a", "<na>", "nat"})
MISSING_NUMBER = MISSING | {"none", "-", "--", ".", "missing", "inf", "-inf", "+inf"}
MISSING_LEVEL = "(missing)"
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
_DECIMAL_COMMA = re.compile(r"[+-]?(\d*|\d{1,3}(\.\d{3})+),\d+([eE][+-]?\d+)?")
_DRESS = re.compile(r"^[$€£¥]\s*|\s*[%€]$")
_DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))([T ]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?.{0,6})?"
)
_TIME = re.compile(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?")


@final
@dataclass(frozen=True)
class Parsed:
    """A column read as numbers: nan where a cell is blank (``missing``) or is no number (``bad``)."""

    values: Numbers
    missing: NDArray[np.bool_]
    bad: NDArray[np.bool_]


def as_cells(values: Any) -> Cells:
    """Any sequence as cells: float64 numbers with nan for what is missing, or strings with ``""``."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"a column must be one-dimensional, got shape {array.shape}")
    if array.dtype.kind in "iuf":
        return array.astype(np.float64)
    return ["" if cell is None or cell != cell else str(cell) for cell in array.tolist()]


def number(text: str, decimal_comma: bool = False) -> float | None:
    """A number as people write it, ``1,234.5``, ``$12``, ``7 %``, ``3,14`` with ``decimal_comma``; None for none."""
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


def parse(cells: Cells, decimal_comma: bool = False) -> Parsed:
    """Cells as numbers; infinite ones count as missing."""
    if isinstance(cells, np.ndarray):
        missing = ~np.isfinite(cells)
        return Parsed(np.where(missing, np.nan, cells), missing, np.zeros(len(cells), bool))
    try:
        values = np.asarray(cells, dtype=np.str_).astype(np.float64)  # quick, where every cell is a plain number
        missing, bad = ~np.isfinite(values), np.zeros(len(cells), bool)
    except ValueError:
        missing = np.array([cell.strip().lower() in MISSING_NUMBER for cell in cells], bool)
        read = [None if blank else number(cell, decimal_comma) for cell, blank in zip(cells, missing, strict=True)]
        bad = np.array([value is None for value in read], bool) & ~missing
        values = np.array([np.nan if value is None else value for value in read], np.float64)
        missing |= ~np.isfinite(values) & ~bad
    return Parsed(np.where(np.isfinite(values), values, np.nan), missing, bad)


def has_decimal_commas(columns: Iterable[Cells]) -> bool:
    """Whether numbers are written ``3,14``: some cells can be read in no other way, and no number has a point."""
    found = False
    for cells in columns:
        if isinstance(cells, list):
            bare = [_DRESS.sub("", cell.strip()) for cell in cells[:1000]]
            if any("." in cell and number(cell) is not None for cell in bare):
                return False
            odd = sum(bool(_DECIMAL_COMMA.fullmatch(cell)) and not _THOUSANDS.fullmatch(cell) for cell in bare)
            found = found or odd > 0.5 * sum(cell.lower() not in MISSING_NUMBER for cell in bare)
    return found


def levels(cells: Cells) -> list[str]:
    """Cells as categories, ``""`` for a missing one."""
    if isinstance(cells, np.ndarray):
        return [label(value) for value in cells.tolist()]
    stripped = (cell.strip() for cell in cells)
    return ["" if cell.lower() in MISSING else cell for cell in stripped]


def label(value: float) -> str:
    """A number as the name of a class or category: ``3`` for 3.0, ``""`` for nan."""
    if value != value:
        return ""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def look_like_dates(cells: Sequence[str]) -> bool:
    """Whether nine in ten of the first thousand present cells are dates or times of day."""
    present = [cell.strip() for cell in cells if cell.strip().lower() not in MISSING][:1000]
    found = sum(bool(_DATE.fullmatch(cell) or _TIME.fullmatch(cell)) for cell in present)
    return bool(present) and found >= 0.9 * len(present)
