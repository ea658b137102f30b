"""Data as tensors of all rows or of some, and a check for training rows among held-out ones."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bayou.core import rng
from bayou.training.data import Data, Rows, as_data, join_batches, row_shapes
from bayou.training.inputs import Batch, tensors_of


def all_rows(data: Any) -> tuple[Any, Tensor]:
    """Return x and y of all rows as tensors.

    Args:
        data: a pair of tensors, a Dataset or a DataLoader.
    """
    rows = as_data(data)
    if not isinstance(rows, Rows) or not isinstance(rows.source, tuple):
        return join_batches(rows.epoch())
    x, y = rows.source
    if rows.n == len(y):  # all of them without a copy
        return x, y
    return rows.take(rows.index)


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
        return all_rows(rows.at(index))
    batches: list[Batch] = []
    for batch in islice(rows.epoch(), rows.batches):
        if batches and row_shapes(batch) != row_shapes(batches[0]):  # sequences of another length
            break
        batches.append(batch)
        if sum(len(y) for _, y in batches) >= count:
            break
    return join_batches(batches)


def as_unlabeled_data(rows: Any, batch_size: int) -> Data:
    """Return rows as batches whose y are not used.

    Args:
        rows: rows as ``fit`` takes them, or only x as a tensor.
        batch_size: rows in a batch.
    """
    if isinstance(rows, Tensor):
        rows = (rows, torch.zeros(len(rows)))
    return as_data(rows, batch_size)


def check_held_out(held_out: Any, train: Any) -> None:
    """Raise a ValueError if held-out rows are also training rows, x and y.

    As many of them are tolerated as duplicates in the training data explain.

    Args:
        held_out: the held-out rows.
        train: the training rows.
    """
    training_counts = Counter(_row_hashes(*all_rows(train)))
    held_out_hashes = _row_hashes(*all_rows(held_out))
    shared_count = sum(value in training_counts for value in held_out_hashes)
    duplicates = sum(count for count in training_counts.values() if count > 1)
    duplicate_fraction = duplicates / training_counts.total()
    if shared_count > 1 + 2 * duplicate_fraction * len(held_out_hashes):
        raise ValueError(
            f"{shared_count:,} of {len(held_out_hashes):,} held-out rows are also training rows, "
            "on which a posterior is better than on new ones; hold out other rows, and fit without "
            "them"
        )


def _row_hashes(x: Any, y: Tensor) -> list[int]:
    """Return a hash of every row.

    Numbers are compared in float32, so that equal rows have one hash despite another dtype or
    rounding of standardized numbers.
    """
    items = [item.detach().cpu() for item in (*tensors_of(x), y)]
    columns = [
        (item.float() if item.is_floating_point() else item.long()).numpy() for item in items
    ]
    return [hash(b"".join(cell.tobytes() for cell in row)) for row in zip(*columns, strict=True)]
