"""Checks of what a random split assumes: rows in no order, and no row twice."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bayou.core import rng
from bayou.data.columns import quote

PERMUTATIONS: Final = 999  # 1 of 1,000 tables whose rows are in random order is called ordered
MAX_ROWS: Final = 10_000  # that are tested, in stretches over the whole table
STRETCH: Final = 100  # rows
MAX_NUMBERS: Final = 400_000  # of the tested columns together
MIN_ROWS: Final = 20
MIN_CORRELATION: Final = 0.1  # of neighboring rows; a weaker one does no harm to a random split
MIN_DRIFT: Final = 0.3  # of the mean rank from the first to the last tenth, in deviations
MIN_SCORE: Final = 3.0  # standard errors, below which no rows are permuted
MAX_COPIED_NUMBERS: Final = 20_000_000  # of tables that are searched for copies
# Different values of a column from which on copies are no coincidence: their number, and for each
# different row.
MIN_DISTINCT: Final = 21
MIN_DISTINCT_SHARE: Final = 0.2


def describe_order(
    columns: dict[str, NDArray[np.float64]],
    *,
    times: Collection[str] | None = None,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> str:
    """Return a note if rows look ordered; empty if they do not.

    A column is ranked, and two numbers are compared with those of the same rows in random orders:
    the correlation of neighboring rows, r₁ = Σ a_i·a_{i+1}/Σ a_i², and the difference of the means
    of the first and the last tenth. The largest of all columns, in standard errors, must exceed
    that of every one of 999 random orders of the rows. With this permutation test (Westfall & Young
    1993) at most 1 of 1,000 tables without an order gets a note, whatever the distribution and the
    dependence of its columns. Correlations below 0.1 with a drift below 0.3 standard deviations are
    never mentioned.

    Args:
        columns: numbers by name, the target first, (N,) each; nan for missing values.
        times: the names of columns that can split the rows by time; None (the default) for all.
        permutations: random orders that rows are compared with.
        seed: of these orders.
    """
    count = len(next(iter(columns.values())))
    if count < MIN_ROWS:
        return ""
    names, ranks = _ranks(columns)
    if not names:
        return ""
    correlations, drifts = _statistics(ranks)
    is_large = (np.abs(correlations) >= MIN_CORRELATION) | (np.abs(drifts) >= MIN_DRIFT)
    scores = _scores(correlations, drifts, len(ranks))
    largest = float(scores.max())
    if largest < MIN_SCORE or not is_large.any():
        return ""
    for number in range(permutations):
        order = rng.permutation(len(ranks), rng.fold(seed, "order", number)).numpy()
        if float(_scores(*_statistics(ranks[order]), len(ranks)).max()) >= largest:
            return ""
    usual_ways_out = (
        "--split-by-time COLUMN takes the latest rows as the test set (a column with the row "
        "number will do), --group COLUMN whole groups."
    )
    sorted_names = [name for name in names if _is_sorted(columns[name])]
    for name in sorted_names:
        if times is None or name in times:
            return (
                f"The rows are sorted by {quote(name)}. If that is time, or follows it, a random "
                f"test set is easier than new rows: --split-by-time {name}."
            )
    if sorted_names:
        return (
            f"The rows are sorted by {quote(sorted_names[0])}. If they follow time or come in "
            f"groups, too, a random test set is easier than new rows: {usual_ways_out}"
        )
    column = int(np.where(is_large, scores, 0).argmax())
    evidence = f"in neighboring rows {quote(names[column])} has a rank correlation of "
    evidence += f"{correlations[column]:.2f}"
    if abs(correlations[column]) < MIN_CORRELATION:
        evidence = f"{quote(names[column])} differs between the first and the last tenth of the "
        evidence += f"rows by {abs(drifts[column]):.1f} standard deviations of its ranks"
    return (
        f"The rows look ordered: {evidence}. If they follow time or come in groups, a random test "
        f"set is easier than new rows: {usual_ways_out}"
    )


def _ranks(
    columns: dict[str, NDArray[np.float64]],
) -> tuple[list[str], NDArray[np.float64]]:
    """Return the names of columns that vary, and their centered ranks (N, K) of unit variance."""
    count = len(next(iter(columns.values())))
    rows = _stretches(count)
    most_columns = max(1, MAX_NUMBERS // len(rows))
    names = []
    ranks = []
    for name, values in list(columns.items())[:most_columns]:
        rank = _rank(values[rows])
        scale = rank.std()
        if scale > 0:
            names.append(name)
            ranks.append((rank - rank.mean()) / scale)
    return names, np.stack(ranks, 1) if ranks else np.zeros((len(rows), 0))


def _stretches(count: int) -> NDArray[np.int64]:
    """Return the rows that are tested: all, or stretches evenly spaced over the table."""
    if count <= MAX_ROWS:
        return np.arange(count)
    starts = np.linspace(0, count - STRETCH, MAX_ROWS // STRETCH).round().astype(np.int64)
    return (starts[:, None] + np.arange(STRETCH)).reshape(-1)


def _rank(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks, the mean rank for equal values; missing values come last."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return np.asarray((last - (counts - 1) / 2)[inverse])


def _statistics(ranks: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the correlation of neighboring rows and the drift of each column, (K,) each."""
    count = len(ranks)
    tenth = count // 10
    correlations = (ranks[:-1] * ranks[1:]).sum(0) / count
    drifts = ranks[-tenth:].mean(0) - ranks[:tenth].mean(0)
    return correlations, drifts


def _scores(
    correlations: NDArray[np.float64], drifts: NDArray[np.float64], count: int
) -> NDArray[np.float64]:
    """Return the larger of correlation and drift in standard errors of rows in random order."""
    correlation_error = 1 / math.sqrt(count)
    drift_error = math.sqrt(2 / (count // 10))
    return np.maximum(np.abs(correlations) / correlation_error, np.abs(drifts) / drift_error)


def _is_sorted(values: NDArray[np.float64]) -> bool:
    """Return whether values never decrease, or never increase, and are not all the same."""
    steps = np.diff(values)
    return bool((steps >= 0).all() or (steps <= 0).all()) and bool((steps != 0).any())


def describe_copies(
    x: NDArray[Any], y: NDArray[Any], train: NDArray[np.int64], test: NDArray[np.int64]
) -> list[str]:
    """Return notes about rows that occur more than once.

    Rows of a few values are often the same by chance: there are notes only if a column has at least
    21 different values, and one for five different rows, so that copies are the same record.

    Args:
        x: inputs (N, D).
        y: targets, (N,) or (N, 1).
        train: the indices of the training rows.
        test: those of the test rows.
    """
    if not 0 < x.size <= MAX_COPIED_NUMBERS:
        return []
    inputs = _row_numbers(x)
    both = _row_numbers(np.column_stack([inputs, _row_numbers(y.reshape(len(y), -1))]))
    distinct_rows = int(both.max()) + 1
    copy_count = len(both) - distinct_rows
    conflict_count = distinct_rows - (int(inputs.max()) + 1)
    if not copy_count + conflict_count or not _has_distinct_values(x, y, distinct_rows):
        return []
    notes = []
    if copy_count:
        twin_count = int(np.isin(both[test], both[train]).sum())
        leak = "no test row has a copy in training"
        if twin_count:
            leak = (
                f"{twin_count} of the {len(test)} test rows have one in training, which makes the "
                "scores better than on new rows: leave copies out of the file, or give --group "
                "COLUMN, --split-by-time COLUMN"
            )
        verb = "rows is an exact copy" if copy_count == 1 else "rows are exact copies"
        notes.append(f"{copy_count} of {len(both)} {verb} of another, inputs and target; {leak}.")
    if conflict_count:
        verb = "rows has" if conflict_count == 1 else "rows have"
        notes.append(
            f"{conflict_count} of {len(both)} {verb} the inputs of another row, but another target."
        )
    return notes


def _row_numbers(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return a number for each row, the same for equal rows, from 0 without gaps."""
    rows = np.ascontiguousarray(values + 0.0)  # so that −0 is 0
    cells = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).reshape(-1)
    return np.unique(cells, return_inverse=True)[1].reshape(-1)


def _has_distinct_values(x: NDArray[Any], y: NDArray[Any], distinct_rows: int) -> bool:
    """Return whether a column of x or y has many different values for so many different rows."""
    columns = [*x.T, *y.reshape(len(y), -1).T]
    fewest = max(MIN_DISTINCT, MIN_DISTINCT_SHARE * distinct_rows)
    return any(len(np.unique(column)) >= fewest for column in columns)
