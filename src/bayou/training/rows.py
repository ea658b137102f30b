"""Data as whole tensors of all rows or of some, and a check for training rows among held-out
ones.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bayou import rng
from bayou.training.data import Batch, Data, Rows, as_data, combined, forward_inputs, rows_of


def all_rows(data: Any) -> tuple[Any, Tensor]:
    """Return x and y of a pair of tensors, a Dataset or a DataLoader, as whole tensors."""
    rows = as_data(data)
    if isinstance(rows, Rows) and isinstance(rows.source, tuple):
        return _take(rows, rows.index)
    return joined(rows.ordered())


def some_rows(data: Any, count: int, seed: int = 0) -> tuple[Any, Tensor]:
    """Return x and y of at most ``count`` rows: random ones of tensors, the first batches of other
    data.

    Args:
        data: a pair of tensors, a Dataset or a DataLoader.
        count: the largest number of rows.
        seed: the seed of the random choice.
    """
    rows = as_data(data)
    if isinstance(rows, Rows):
        index = rows.index[rng.permutation(rows.n, seed)[:count].sort().values]
        if isinstance(rows.source, tuple):
            return _take(rows, index)
        return joined(Rows(rows.source, index, rows.batch_size).ordered())
    batches: list[Batch] = []
    for batch in islice(rows.ordered(), rows.batches):
        if batches and row_shapes(batch) != row_shapes(batches[0]):  # sequences of another length
            break
        batches.append(batch)
        if sum(len(y) for _, y in batches) >= count:
            break
    return joined(batches)


def row_shapes(batch: Batch) -> list[torch.Size]:
    """Return the shapes of one row of all tensors of a batch."""
    x, y = batch
    return [item.shape[1:] for item in (*forward_inputs(x), y) if isinstance(item, Tensor)]


def _take(rows: Rows, index: Tensor) -> tuple[Any, Tensor]:
    """Return these rows of tensors; all of them without a copy."""
    x, y = rows.source
    if len(index) == len(y):
        return x, y
    index = index.to(y.device)
    if isinstance(x, tuple):
        return rows_of(x, index), y[index]
    return x[index], y[index]


def joined(batches: Iterable[Batch]) -> tuple[Any, Tensor]:
    """x and y of several batches, as whole tensors."""
    x, y = zip(*batches, strict=True)
    try:
        inputs = combined(torch.cat, x)
        return inputs if len(inputs) > 1 else inputs[0], torch.cat(y)
    except RuntimeError as error:
        raise ValueError(
            f"the batches cannot be joined: {error}; pad all rows to one length"
        ) from error


def unlabeled(rows: Any, batch_size: int) -> Data:
    """Rows as ``fit`` takes them, or only x."""
    return as_data((rows, torch.zeros(len(rows))) if isinstance(rows, Tensor) else rows, batch_size)


def check_held_out(held: Any, train: Any) -> None:
    """A ValueError if rows are also training rows, x and y, more of them than duplicates in the
    data explain.
    """
    seen, new = Counter(_keys(*all_rows(train))), _keys(*all_rows(held))
    shared = sum(key in seen for key in new)
    repeated = sum(count for count in seen.values() if count > 1) / seen.total()
    if shared > 1 + 2 * repeated * len(new):
        raise ValueError(
            f"{shared:,} of {len(new):,} held-out rows are also training rows, on which a posterior is better than on "
            "new ones; hold out other rows, and fit without them"
        )


def _keys(x: Any, y: Tensor) -> list[bytes]:
    parts = [item.detach().cpu() for item in (*forward_inputs(x), y) if isinstance(item, Tensor)]
    # in float32, so that equal rows are found despite another dtype or rounding of standardized
    # numbers
    numbers = [
        (part.float() if part.is_floating_point() else part.long()).numpy() for part in parts
    ]
    each = zip(*numbers, strict=True)
    return [
        hashlib.blake2b(b"".join(cell.tobytes() for cell in row), digest_size=16).digest()
        for row in each
    ]
