"""Data as tensors of all rows or of some, and a check for training rows among held-out ones."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bayou.core import rng
from bayou.training.data import Data, Rows, as_data
from bayou.training.inputs import Batch, combine_inputs, forward_inputs, rows_of


def all_rows(data: Any) -> tuple[Any, Tensor]:
    """Return x and y of all rows as tensors.

    Args:
        data: a pair of tensors, a Dataset or a DataLoader.
    """
    rows = as_data(data)
    if isinstance(rows, Rows) and isinstance(rows.source, tuple):
        return _rows_of_tensors(rows, rows.index)
    return join_batches(rows.ordered())


def some_rows(data: Any, count: int, seed: int = 0) -> tuple[Any, Tensor]:
    """Return x and y of some rows: random ones of tensors, the first batches of other data.

    Args:
        data: a pair of tensors, a Dataset or a DataLoader.
        count: the largest number of rows.
        seed: the seed of the random choice.
    """
    rows = as_data(data)
    if isinstance(rows, Rows):
        index = rows.index[rng.permutation(rows.n, seed)[:count].sort().values]
        if isinstance(rows.source, tuple):
            return _rows_of_tensors(rows, index)
        return join_batches(Rows(rows.source, index, rows.batch_size).ordered())
    batches: list[Batch] = []
    for batch in islice(rows.ordered(), rows.batches):
        if batches and row_shapes(batch) != row_shapes(batches[0]):  # sequences of another length
            break
        batches.append(batch)
        if sum(len(y) for _, y in batches) >= count:
            break
    return join_batches(batches)


def row_shapes(batch: Batch) -> list[torch.Size]:
    """Return the shapes of one row of all tensors of a batch."""
    x, y = batch
    return [item.shape[1:] for item in (*forward_inputs(x), y) if isinstance(item, Tensor)]


def _rows_of_tensors(rows: Rows, index: Tensor) -> tuple[Any, Tensor]:
    """Return these rows of tensors; all of them without a copy."""
    x, y = rows.source
    if len(index) == len(y):
        return x, y
    index = index.to(y.device)
    if isinstance(x, tuple):
        return rows_of(x, index), y[index]
    return x[index], y[index]


def join_batches(batches: Iterable[Batch]) -> tuple[Any, Tensor]:
    """Join the rows of several batches.

    Args:
        batches: pairs (x, y).

    Returns:
        x and y of all rows.

    Raises:
        ValueError: for rows of different shapes.
    """
    x, y = zip(*batches, strict=True)
    try:
        inputs = combine_inputs(torch.cat, x)
        return inputs if len(inputs) > 1 else inputs[0], torch.cat(y)
    except RuntimeError as error:
        raise ValueError(
            f"the batches cannot be joined: {error}; pad all rows to one length"
        ) from error


def as_unlabeled_data(rows: Any, batch_size: int) -> Data:
    """Return rows as batches whose y are not used.

    Args:
        rows: rows as ``fit`` takes them, or only x as a tensor.
        batch_size: rows in a batch.
    """
    if isinstance(rows, Tensor):
        rows = (rows, torch.zeros(len(rows)))
    return as_data(rows, batch_size)


def check_held_out(held: Any, train: Any) -> None:
    """Raise a ValueError if held-out rows are also training rows, x and y.

    As many of them are tolerated as duplicates in the training data explain.

    Args:
        held: the held-out rows.
        train: the training rows.
    """
    training_counts = Counter(_row_digests(*all_rows(train)))
    held_out_digests = _row_digests(*all_rows(held))
    shared_count = sum(digest in training_counts for digest in held_out_digests)
    duplicates = sum(count for count in training_counts.values() if count > 1)
    duplicate_fraction = duplicates / training_counts.total()
    if shared_count > 1 + 2 * duplicate_fraction * len(held_out_digests):
        raise ValueError(
            f"{shared_count:,} of {len(held_out_digests):,} held-out rows are also training rows, "
            "on which a posterior is better than on new ones; hold out other rows, and fit without "
            "them"
        )


def _row_digests(x: Any, y: Tensor) -> list[bytes]:
    """Return a digest of every row.

    Numbers are compared in float32, so that equal rows have one digest despite another dtype or
    rounding of standardized numbers.
    """
    items = [item.detach().cpu() for item in (*forward_inputs(x), y) if isinstance(item, Tensor)]
    columns = [
        (item.float() if item.is_floating_point() else item.long()).numpy() for item in items
    ]
    return [
        hashlib.blake2b(b"".join(cell.tobytes() for cell in row), digest_size=16).digest()
        for row in zip(*columns, strict=True)
    ]
