"""The types of the columns of a table: numbers, categories, dates, or no input."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from bayou.core.progress import spell
from bayou.data.catalogue import DataError
from bayou.data.columns import MISSING_LEVEL, OTHER_LEVELS, Column, quote
from bayou.data.dates import MIN_DATE_SHARE, Date, parse_dates
from bayou.data.encoders import Category, Number, inside_range
from bayou.data.moments import find_order
from bayou.data.reading import RawTable
from bayou.training.sentinels import valid_range

MAX_LEVELS = 50  # categories of a column; of more the rare ones are one
MIN_LEVEL_ROWS = 10  # of a category that is not rare, where there are more than MAX_LEVELS
MIN_IDENTIFIER_ROWS = 11  # of a column of row numbers or identifiers
MAX_TEXT_SHARE = 0.1  # cells of a column of numbers that are typing errors
MIN_DISTINCT_NUMBERS = 21  # in a column or target of numbers that has typing errors
_ROW_NUMBERS = (
    "c1",
    "id",
    "index",
    "no",
    "nr",
    "obs",
    "row",
    "rowid",
    "row_id",
    "rownames",
    "row.names",
    "unnamed: 0",
)
# id, customer_id, CustomerId; not humid
IDENTIFIER = re.compile(r"(?i:(.*[^a-z])?id([^a-z].*)?)|.*[a-z]I[dD]")

Index = NDArray[np.int64]


def fit_columns(
    table: RawTable,
    target: str | None,
    rows: Index,
    notes: list[str],
) -> tuple[Number | Category | Date, ...]:
    """Return the encoder of each column: its type by all rows, its statistics by training rows.

    Args:
        table: all rows.
        target: the name of the target, which is left out; None for none.
        rows: indices of the training rows.
        notes: to which those about columns are added.
    """
    inputs = {name: column for name, column in table.columns.items() if name != target}
    encoders = [_fit_column(name, column, rows, notes) for name, column in inputs.items()]
    columns = tuple(encoder for encoder in encoders if encoder is not None)
    if not columns:
        reason = " ".join(notes) if inputs else "the target is its only column."
        raise DataError(f"no column of {table.name} is left as an input: {reason}")
    return columns


def _fit_column(
    name: str,
    column: Column,
    rows: Index,
    notes: list[str],
) -> Number | Category | Date | None:
    """Return the encoder of a column; None with a note for one that is no input."""
    is_present = ~column.missing
    if not is_present.any():
        notes.append(f"Column {name!r} is empty; dropped.")
        return None
    bad_count = int(column.bad.sum())
    numbers = column.values[~np.isnan(column.values)]
    is_mostly_numbers = (
        bad_count <= MAX_TEXT_SHARE * is_present.sum()
        and len(np.unique(numbers)) >= MIN_DISTINCT_NUMBERS
    )
    is_text = bad_count and not is_mostly_numbers
    if column.is_category or is_text or column.loses_digits:
        return _fit_category(name, column, rows, notes)
    note = _describe_identifier(name, column, numbers)
    if note:
        notes.append(note)
        return None
    return _fit_number(name, column, rows, notes)


def _describe_identifier(name: str, column: Column, numbers: NDArray[np.float64]) -> str:
    """Return a note about a column of row numbers or identifiers; empty for other columns."""
    if not len(numbers) == len(column) >= MIN_IDENTIFIER_ROWS:
        return ""
    if name.lower() in _ROW_NUMBERS and bool((np.diff(numbers) == 1).all()):
        return f"Column {name!r} is a row number; dropped."
    are_distinct = len(np.unique(numbers)) == len(numbers)
    if IDENTIFIER.fullmatch(name) and are_distinct and bool((numbers == np.round(numbers)).all()):
        remedy = spell(
            "To use it as an input, rename it.",
            f"--id {name} copies it to predictions; to use it as an input, rename it.",
        )
        return (
            f"Column {name!r} has {len(numbers)} different whole numbers and the name of an "
            f"identifier; dropped. {remedy}"
        )
    return ""


def _fit_number(name: str, column: Column, rows: Index, notes: list[str]) -> Number | None:
    """Return the encoder of a column of numbers; None with a note for a constant one."""
    floor, ceiling = valid_range(column.values)
    train = inside_range(column.values[rows], floor, ceiling)
    is_missing = np.isnan(train)
    present = train[~is_missing]
    if not len(present) or (np.ptp(present) == 0 and not is_missing.any()):
        notes.append(f"Column {name!r} is constant in training; dropped.")
        return None
    encoder = Number.fit(name, train, floor, ceiling)
    if is_missing.any():
        notes.append(
            f"Column {name!r}: {int(is_missing.sum())} of {len(train)} training values are "
            "missing; replaced by the median, with an indicator column."
        )
    return encoder


def _fit_category(
    name: str, column: Column, rows: Index, notes: list[str]
) -> Category | Date | None:
    """Return the encoder of a column of categories or dates; None with a note for text and ids."""
    if column.holds_dates:
        return _fit_date(name, column, rows, notes)
    train_levels = [column.levels[i] for i in rows.tolist()]
    levels = sorted(set(train_levels))
    if len(levels) > max(20, len(rows) // 2):
        notes.append(_describe_text(name, levels, len(rows)))
        return None
    if len(levels) < 2:
        notes.append(f"Column {name!r} is constant in training; dropped.")
        return None
    kept = levels
    if len(levels) > MAX_LEVELS:
        counts = Counter(train_levels)
        frequent = [level for level, count in counts.most_common(MAX_LEVELS)]
        kept = sorted(level for level in frequent if counts[level] >= MIN_LEVEL_ROWS)
        if not kept:
            notes.append(_describe_text(name, levels, len(rows)))
            return None
        notes.append(
            f"Column {name!r} has {len(levels)} different values; the {len(kept)} most frequent "
            f"are categories, all others are one, {OTHER_LEVELS}."
        )
    if "" in kept:
        notes.append(f"Column {name!r}: missing values are a separate category.")
        kept = [*(level for level in kept if level), MISSING_LEVEL]
    has_others = len(levels) > MAX_LEVELS or _expects_unknown_levels(train_levels)
    return Category(name, tuple(kept), others=has_others)


def _expects_unknown_levels(train_levels: list[str]) -> bool:
    """Return whether new rows can be expected to have categories that no training row has.

    Of n rows that a new row belongs to an unknown category has a probability of about k/n, if k
    categories are in one row each (Good 1953). A column of its own for them, which is 0 in all
    training rows, keeps the weights of the prior: predictions are uncertain there, and not those
    of an average category.

    Args:
        train_levels: the categories of the training rows.
    """
    return 1 in Counter(train_levels).values()


def _describe_text(name: str, levels: list[str], rows: int) -> str:
    """Return a note about a column of identifiers or free text."""
    return (
        f"Column {name!r} has {len(levels)} different values in {rows} rows (such as "
        f"{quote(levels[-1])}): an identifier or free text, dropped. To use it, convert it to "
        "numbers or a few groups."
    )


def _fit_date(name: str, column: Column, rows: Index, notes: list[str]) -> Date | None:
    """Return the encoder of a column of dates; None with a note for one that is not clear."""
    order = find_order(column.levels) or "year"
    days = parse_dates(column.levels, order)
    present_count = sum(level != "" for level in column.levels)
    if np.isfinite(days).sum() < MIN_DATE_SHARE * present_count:
        notes.append(
            f"Column {name!r} has times of day, or dates whose day and month are not clear; "
            "dropped. To use it, write dates with the year first, 2024-02-29 or "
            "2024-02-29T13:30:00."
        )
        return None
    encoder = Date.fit(name, days[rows], order)
    if encoder is None:
        notes.append(f"Column {name!r} is constant in training; dropped.")
        return None
    notes.append(encoder.describe())
    return encoder
