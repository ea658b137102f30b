"""Mean and scale of columns of numbers."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from bayou.select.far_values import flag_sentinels

MAX_CODE: Final = 10.0  # largest absolute value of a column of whole numbers that is left as it is
# Of means and standard deviations of rows that are standardized already.
STANDARD_TOLERANCE: Final = 1e-5
MAX_QUANTILE_NUMBERS: Final = 2**23  # that torch.quantile is given
# Interquartile ranges from the median, beyond which a value is left out of mean and scale.
OUTLIER_REACH: Final = 1e4


def column_scales(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of every column, (D,) each, without values that are
    absurdly far away.

    Args:
        columns: numbers, (N, D), float64.
    """
    stride = -(-columns.numel() // MAX_QUANTILE_NUMBERS)
    quartiles = torch.quantile(
        columns[::stride], torch.tensor([0.25, 0.5, 0.75]).to(columns), dim=0
    )
    reach = quartiles[2] - quartiles[0]
    is_near = (columns - quartiles[1]).abs() <= OUTLIER_REACH * reach
    is_near = (is_near | (reach == 0)) & ~flag_sentinels(columns)
    count = is_near.sum(0)
    shift = torch.where(is_near, columns, 0.0).sum(0) / count
    deviation = torch.where(is_near, columns - shift, 0.0)
    scale = (deviation.square().sum(0) / count).sqrt()
    return shift, torch.where(scale > 0, scale, 1.0)


def is_standard(shift: Tensor, scale: Tensor) -> Tensor:
    """Return which means and standard deviations are 0 and 1, up to rounding.

    Args:
        shift: means, (D,).
        scale: standard deviations, (D,).
    """
    return (shift.abs() < STANDARD_TOLERANCE) & ((scale - 1).abs() < STANDARD_TOLERANCE)


def is_coded(columns: Tensor) -> Tensor:
    """Return which columns hold codes or indicators: whole numbers of at most 10 in absolute value,
    (D,).

    Args:
        columns: numbers, (N, D).
    """
    is_whole = (columns == columns.round()).all(0)
    return is_whole & (columns.abs().amax(0) <= MAX_CODE)
