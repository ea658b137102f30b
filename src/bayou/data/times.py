"""A column of times as numbers that increase with time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bayou.data.catalogue import DataError
from bayou.data.columns import Column, quote
from bayou.data.moments import Moment, begin_with_day


def times_of(column: Column, name: str) -> NDArray[np.float64]:
    """Return the times of a column as numbers: numbers as they are, dates as seconds.

    Dates are written ``2024-03-31``, ``31.3.2024``, ``3/31/2024`` or ``2024-03``, with or without a
    time of day, or are times of day alone. Of ``1/2/2024`` the day is the second number, unless
    another cell says otherwise; of ``1.2.2024`` and ``1-2-2024`` it is the first.

    Args:
        column: the cells.
        name: of the column, for messages.

    Returns:
        Numbers (N,).

    Raises:
        DataError: for a cell that is missing, or neither a number nor a date.
    """
    is_missing = np.array([level == "" for level in column.levels])
    if is_missing.any():
        raise DataError(
            f"column {name!r} is to split the rows by time, but {int(is_missing.sum())} of "
            f"{len(column)} rows have no value there, first row {int(is_missing.argmax()) + 1}; "
            "leave these rows out, or fill them in"
        )
    if not np.isnan(column.values).any():
        return column.values
    is_day_first = begin_with_day(column.levels)
    times = np.empty(len(column))
    for row, cell in enumerate(column.levels):
        moment = Moment.parse(cell, is_day_first=is_day_first)
        if moment is None:
            raise DataError(
                f"column {name!r} is to split the rows by time, but row {row + 1} has "
                f"{quote(cell)}, which is neither a number nor a date such as 2024-03-31"
            )
        times[row] = moment.utc_seconds
    return times
