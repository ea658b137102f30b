"""Conformal quantiles: of exchangeable scores by rank, of weighted ones with a mass at infinity."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDING = 1e-9  # tolerance of (n + 1)·level, for whole numbers with rounding errors


def conformal_rank(rows: int, level: float) -> int:
    """Return ⌈(n + 1)·level⌉, the rank of the threshold among n scores; above n it is infinite.

    Args:
        rows: the number of scores n.
        level: the coverage.
    """
    return math.ceil((rows + 1) * level - ROUNDING)


def min_rows(level: float) -> int:
    """Return the smallest number of held-out rows with a finite threshold: level/(1 − level).

    Args:
        level: the coverage.
    """
    return math.ceil(level / (1 - level) - ROUNDING)


def check_rows(rows: int, level: float, owner: str = "") -> None:
    """Raise a ValueError for fewer rows than a finite threshold needs.

    Args:
        rows: the number of held-out rows.
        level: the coverage.
        owner: a text after "held-out rows", such as " of the group 'a'".
    """
    if rows < min_rows(level):
        raise ValueError(
            f"{rows} held-out rows{owner} are too few for level={level:g}; it needs at least "
            f"{min_rows(level)}, or a lower level"
        )


def rank_quantile(scores: Tensor, level: float) -> Tensor:
    """Return the ⌈(n + 1)·level⌉-th smallest score of each coordinate: (*event,).

    Args:
        scores: (n, *event), of at least ``min_rows(level)`` rows.
        level: the coverage.
    """
    return scores.sort(0).values[conformal_rank(len(scores), level) - 1]


def weighted_quantile(scores: Tensor, weights: Tensor, new_weights: Tensor, level: float) -> Tensor:
    """Return the level quantile of Σ_i p_i·δ(s_i) + p_new·δ(∞), for each new weight.

    p_i = w_i/(Σ_j w_j + w_new) and p_new = w_new/(Σ_j w_j + w_new) (Tibshirani et al. 2019). Equal
    weights give ``rank_quantile``.

    Args:
        scores: (n, *event).
        weights: w_i ≥ 0, (n,) or (n, *event); not all of a coordinate are 0.
        new_weights: w_new ≥ 0, (M,).
        level: the coverage.

    Returns:
        Thresholds (M, *event), infinite where p_new > 1 − level.
    """
    event = scores.shape[1:]
    columns = scores.reshape(len(scores), -1).T.contiguous()  # (E, n)
    row_weights = weights.reshape(len(scores), -1).T.to(columns).expand_as(columns)
    largest = row_weights.amax(-1, keepdim=True)
    row_weights = row_weights / largest  # only ratios count, and sums stay finite
    ordered, order = columns.sort(-1)
    mass = row_weights.gather(-1, order).cumsum(-1)
    total = mass[:, -1:] + new_weights.to(columns) / largest  # (E, M)
    needed = level * total - ROUNDING
    # The first score at which the mass reaches what is needed.
    position = torch.searchsorted(mass, needed.clamp_min(torch.finfo(mass.dtype).tiny))
    infinity = torch.full_like(ordered[:, :1], torch.inf)
    thresholds = torch.cat([ordered, infinity], -1).gather(-1, position)
    return thresholds.T.reshape(len(new_weights), *event)
