"""Columns of tables as ``bayou.diagnostics.watch`` compares them: numbers and categories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from bayou.data.columns import MISSING_LEVEL, OTHER_LEVELS, Column
from bayou.data.dates import Date
from bayou.data.encoders import Category, Number
from bayou.data.preprocess import TablePreprocessor
from bayou.data.reading import RawTable
from bayou.diagnostics.input_columns import InputColumn
from bayou.diagnostics.reference import ReferenceRows

if TYPE_CHECKING:
    from torch import Tensor

    from bayou.data.dataset import DataSet

Encoders = Sequence[Number | Category | Date]
MAX_UNKNOWN = 5  # examples of categories of no training row
MAX_TEXT_SHARE = 0.5  # cells that are no numbers, in a column of numbers


def reference_of(data: DataSet, max_rows: int) -> ReferenceRows:
    """Summarize the training rows and the test rows of a data set.

    Columns of dates are left out: new dates are always later.

    Args:
        data: the data set; its test rows are the held-out rows.
        max_rows: random rows of each that are kept.
    """
    held_out = data.test if len(data.test[1]) else None
    preprocessor = data.preprocessor
    if not isinstance(preprocessor, TablePreprocessor):
        names = data.feature_names or None
        return ReferenceRows.of(data.train[0], held_out, names=names, max_rows=max_rows)
    return ReferenceRows.of(
        data.train[0],
        held_out,
        names=data.feature_names,
        columns=training_columns(preprocessor.columns, data.train[0]),
        compared=compared_inputs(preprocessor.columns),
        max_rows=max_rows,
    )


def compared_inputs(encoders: Encoders) -> list[int]:
    """Return the indices of the inputs of a row that are not made of dates.

    Args:
        encoders: of the columns.
    """
    indices: list[int] = []
    start = 0
    for encoder in encoders:
        end = start + len(encoder.features)
        if isinstance(encoder, Number | Category):
            indices += range(start, end)
        start = end
    return indices


def training_columns(encoders: Encoders, x: Tensor) -> tuple[InputColumn, ...]:
    """Return columns, decoded from the inputs of the network.

    They are those of training rows, or of new rows of which nothing else is kept.

    Args:
        encoders: of the columns, which encoded them.
        x: inputs of all rows, (N, features).
    """
    columns = []
    start = 0
    inputs = x.detach().cpu().numpy()
    for encoder in encoders:
        end = start + len(encoder.features)
        block = inputs[:, start:end]
        start = end
        if isinstance(encoder, Number):
            columns.append(_numbers(encoder, block))
        elif isinstance(encoder, Category):
            codes = _codes(block, len(encoder.levels))
            levels = encoder.levels
            has_others = bool((codes == len(levels)).any())  # rare categories of training rows
            if has_others:
                levels = (*levels, OTHER_LEVELS)
            counts = np.bincount(codes, minlength=len(levels))
            singletons = float((counts == 1).sum()) / len(codes)
            columns.append(_categories(encoder.name, codes, levels, singletons))
    return tuple(columns)


def new_columns(encoders: Encoders, table: RawTable) -> tuple[list[InputColumn], list[str]]:
    """Return the columns of new rows, and sentences about what is wrong with them for certain.

    Args:
        encoders: of the columns of the training rows.
        table: new rows; columns may be missing.

    Returns:
        The columns that the table has, without dates, and sentences about missing columns and
        columns of another type.
    """
    columns = []
    mistakes = []
    for encoder in encoders:
        column = table.columns.get(encoder.name)
        if column is None:
            mistakes.append(f"Column {encoder.name!r} is missing.")
        elif isinstance(encoder, Number):
            mistakes += _describe_text(encoder.name, column)
            block = np.stack(encoder.encode(column, []), axis=1).astype(np.float32)
            is_missing = np.isnan(encoder.values(column))
            columns.append(_numbers(encoder, block, is_missing))
        elif isinstance(encoder, Category):
            block = np.stack(encoder.encode(column, []), axis=1).astype(np.float32)
            present = {level or MISSING_LEVEL for level in column.levels}
            unknown = tuple(sorted(present - set(encoder.levels))[:MAX_UNKNOWN])
            codes = _codes(block, len(encoder.levels))
            columns.append(_categories(encoder.name, codes, encoder.levels, unknown=unknown))
    return columns, mistakes


def _describe_text(name: str, column: Column) -> list[str]:
    """Return a sentence about a column of numbers that is text now."""
    present_count = int((~column.missing).sum())
    bad_count = int(column.bad.sum())
    if not present_count or bad_count <= MAX_TEXT_SHARE * present_count:
        return []
    return [
        f"Column {name!r} has text where training has numbers: {bad_count} of {present_count} "
        f"cells, {column.describe_first(column.bad)}."
    ]


def _numbers(
    encoder: Number,
    block: NDArray[np.float32],
    is_missing: NDArray[np.bool_] | None = None,
) -> InputColumn:
    """Return a column of numbers in its own units, rounded as the inputs of the network are."""
    values = block[:, 0].astype(np.float64) * encoder.scale + encoder.mean
    if is_missing is None:
        is_missing = block[:, 1] > 0 if encoder.indicator else np.zeros(len(block), bool)
    return InputColumn(encoder.name, torch.from_numpy(np.where(is_missing, np.nan, values)))


def _codes(block: NDArray[np.float32], unknown: int) -> NDArray[np.int64]:
    """Return the category of each row of 0/1 columns, or ``unknown`` where all are 0."""
    codes: NDArray[np.int64] = np.where(block.any(1), block.argmax(1), unknown)
    return codes


def _categories(
    name: str,
    codes: NDArray[np.int64],
    levels: tuple[str, ...],
    singletons: float = 0.0,
    unknown: tuple[str, ...] = (),
) -> InputColumn:
    """Return a column of categories."""
    values = torch.from_numpy(codes.astype(np.float64))
    return InputColumn(name, values, levels, singletons, unknown)
