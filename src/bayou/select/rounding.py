"""Rounding of rows: rows that differ in their last digits are fitted alike."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from bayou.likelihoods import BoundHomoscedastic
from bayou.network.target import Target
from bayou.training.data import Rows

DIGITS: Final = 8  # of the largest number of a column; float32 has seven
# A column whose largest number is near a power of ten, such as 1, must not change its grid when
# that number changes in its last digit.
GRID_OFFSET: Final = 0.29


def round_rows(rows: Rows) -> Rows:
    """Round the float64 tensors of rows to eight digits of the largest number of each column.

    Full-batch L-BFGS amplifies a difference in the sixteenth digit by 10⁵ to 10⁹ within 40 passes,
    and selections on held-out rows amplify it further: rows that were standardized twice would have
    another mode and another prior. Rounded rows are the same, bit for bit. The rounding is smaller
    than that of float32, whose rows are left as they are, like those of a Dataset.

    Args:
        rows: rows of a pair of tensors, or of a Dataset.

    Returns:
        Rows with the same index and batch size.
    """
    if not isinstance(rows.source, tuple):
        return rows
    x, y = rows.source
    return rows.with_source((_round_inputs(x), _round_columns(y)))


def round_initial_noise(target: Target) -> Target:
    """Round the initial value of a learned noise to eight digits of its logarithm.

    The value is computed from y.

    Args:
        target: any target; a noise that is not learned is kept.
    """
    if (
        not isinstance(target.likelihood, BoundHomoscedastic)
        or not target.likelihood.log_scale.requires_grad
    ):
        return target
    likelihood = copy.deepcopy(target.likelihood)
    with torch.no_grad():
        likelihood.log_scale.copy_(likelihood.log_scale.double().round(decimals=DIGITS))
    return replace(target, likelihood=likelihood)


def _round_inputs(x: Any) -> Any:
    """Round one input, or each of a tuple; keyword arguments are left as they are."""
    if type(x) is tuple:
        return tuple(_round_inputs(item) for item in x)
    if isinstance(x, Tensor):
        return _round_columns(x)
    return x


def _round_columns(values: Tensor) -> Tensor:
    """Round the columns of a float64 table (N, D) one by one, any other float64 tensor as one."""
    if values.dtype != torch.float64:
        return values
    if values.ndim != 2:
        return _round(values, values.abs().amax())
    return _round(values, values.abs().amax(0))


def _round(values: Tensor, largest: Tensor) -> Tensor:
    """Round to a multiple of a power of ten, 8 digits below the largest value; zeros stay zeros.

    Where the power is negative, as it is for most columns, one division by a whole number leaves
    the double that is nearest to the decimal fraction.
    """
    exponent = DIGITS - (largest.log10() + GRID_OFFSET).floor()
    exponent = torch.where(largest > 0, exponent, 0.0)
    per_unit = torch.pow(10.0, exponent.abs())
    is_fine = exponent >= 0
    fine = (values * per_unit).round() / per_unit
    coarse = (values / per_unit).round() * per_unit
    return torch.where(is_fine, fine, coarse)
