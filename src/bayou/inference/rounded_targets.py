"""Targets of few values, such as ratings: the noise of their rounding, below which no noise is."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

# A mean over the values: with fewer rows for each, the gaps between values say nothing about steps.
MIN_ROWS_PER_VALUE: Final = 2
# Of the largest number of a column, below which two values are one: decimals are not exact.
TOLERANCE: Final = 1e-6


@torch.no_grad()
def rounding_noises(y: Tensor) -> Tensor:
    """Return the standard deviation of the rounding error of each column of targets.

    A number that was recorded in steps of d is rounded: its error is uniform between −d/2 and d/2,
    with standard deviation d/√12. No network knows y better than that, although it may predict the
    recorded value of rows that repeat exactly, where the density of a Gaussian without this noise
    has no limit. d is the smallest gap between values.

    It is 0 for a column in which values hardly repeat, with fewer than two rows for each on
    average, and at most the standard deviation of the column, that of a constant prediction: where
    nearly all rows have one value, the step is not the size of errors.

    Args:
        y: targets, (N,), (N, D), or (N, ...), whose numbers are one column.

    Returns:
        The standard deviations in the units of y, (D,) in float64.
    """
    columns = y.detach().double()
    columns = columns.reshape(len(y), -1) if y.ndim <= 2 else columns.reshape(-1, 1)
    gaps = columns.sort(0).values.diff(dim=0)
    is_gap = gaps > TOLERANCE * columns.abs().amax(0)
    counts = 1 + is_gap.sum(0)
    repeats = (counts > 1) & (len(columns) >= MIN_ROWS_PER_VALUE * counts)
    if not bool(repeats.any()):
        return torch.zeros_like(columns[0])
    steps = torch.where(is_gap, gaps, math.inf).amin(0)
    noises = torch.minimum(steps / math.sqrt(12), columns.std(0, correction=0))
    return torch.where(repeats, noises, 0.0)


def rounding_noise(y: Tensor) -> float:
    """Return the least standard deviation of one noise for all columns of targets.

    It is the root of the mean square of ``rounding_noises``, since the square of such a noise is a
    mean over the columns.

    Args:
        y: targets, in the units of this noise.
    """
    return math.sqrt(float(rounding_noises(y).square().mean()))
