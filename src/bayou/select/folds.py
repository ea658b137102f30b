"""Folds: the rows that a search learns from, and those that it holds out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.metrics import standard_error
from bayou.training.data import Rows

Fold = tuple[Rows, Rows]  # training rows and held-out rows
FOLDS: Final = 5
MIN_ROWS_OF_FEWER_FOLDS: Final = 10  # rows, below which less effort does not save folds
SINGLE_FOLD_ROWS: Final = 500  # rows, from which one fold is used instead of five


def split_folds(rows: Rows, seed: int, effort: float = 1.0) -> list[Fold]:
    """Split rows into five folds, fewer with less effort, or only the first of many rows.

    Rows of one group are in one fold, and many groups count as many rows. Rows with times have one
    fold, whose held-out rows are the latest.

    Args:
        rows: all rows.
        seed: of their order.
        effort: below 1 there are fewer folds, from 10 rows on.

    Returns:
        The training rows and the held-out rows of each fold.
    """
    count = max(1, min(FOLDS, round(effort * FOLDS)))
    if rows.n < MIN_ROWS_OF_FEWER_FOLDS:
        count = FOLDS
    blocks = rows.blocks
    units = rows.n if blocks is None else blocks.count(rows.index)
    if units >= SINGLE_FOLD_ROWS:
        count = 1
    if blocks is None:
        order = rows.index[rng.permutation(rows.n, seed)]
        held_out = [order[k::FOLDS].sort().values for k in range(count)]
    else:
        held_out = [rows.index[mask] for mask in blocks.folds(rows.index, FOLDS, seed)[:count]]
    return [(rows.without(index), rows.at(index)) for index in held_out]


def held_out_masks(rows: Rows, folds: Sequence[Fold]) -> Tensor:
    """Return which rows each fold holds out, and none in the last row, (F + 1, N).

    The last row is for a mode of all rows.

    Args:
        rows: all N rows.
        folds: training and held-out rows.
    """
    masks = [torch.isin(rows.index, held_out.index) for _, held_out in folds]
    return torch.stack([*masks, torch.zeros_like(masks[0])])


def is_within_chance(losses: Tensor, best: Tensor, errors: float) -> bool:
    """Return whether a candidate is no worse than another one on the same held-out rows.

    Args:
        losses: of the candidate, one for each held-out row.
        best: those of the other one.
        errors: standard errors of the paired difference that are chance; 0 for none.
    """
    excess = losses - best
    return float(excess.mean()) <= errors * standard_error(excess)


def describe_folds(folds: Sequence[Fold]) -> str:
    """Return how held-out rows were used, in words.

    Args:
        folds: training and held-out rows.
    """
    held_out = folds[0][1]
    blocks = held_out.blocks
    if blocks is not None and blocks.are_ordered:
        return f"on the latest {held_out.n:,} rows, held out"
    of_groups = "" if blocks is None else " of whole groups"
    if len(folds) == 1:
        return f"on {held_out.n:,} held-out rows{of_groups}"
    return f"by {len(folds)}-fold cross-validation{of_groups}"
