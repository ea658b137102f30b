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
SINGLE_FOLD_ROWS: Final = 500  # rows, from which one fold is used instead of five


def split_folds(rows: Rows, seed: int, effort: float = 1.0) -> list[Fold]:
    """Split rows into five folds, fewer with less effort, or only the first of many rows.

    Args:
        rows: all rows.
        seed: of their order.
        effort: below 1 there are fewer folds.

    Returns:
        The training rows and the held-out rows of each fold.
    """
    count = max(1, min(FOLDS, round(effort * FOLDS)))
    if rows.n >= SINGLE_FOLD_ROWS:
        count = 1
    order = rows.index[rng.permutation(rows.n, seed)]
    folds = []
    for k in range(count):
        held_out = order[k::FOLDS].sort().values
        training = rows.index[torch.isin(rows.index, held_out, invert=True)]
        folds.append(
            (
                Rows(rows.source, training, rows.batch_size),
                Rows(rows.source, held_out, rows.batch_size),
            )
        )
    return folds


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
    if len(folds) == 1:
        return f"on {folds[0][1].n:,} held-out rows"
    return f"by {len(folds)}-fold cross-validation"
