"""Piecewise-linear functions of one variable."""

from __future__ import annotations

import torch
from torch import Tensor


def find_cell(x: Tensor, knots: Tensor) -> Tensor:
    """Return k with knots[k] ≤ x < knots[k + 1], the first or the last cell outside of them.

    Args:
        x: values, of any shape.
        knots: increasing, (K + 1,), of the dtype of x.
    """
    inner = knots[1:-1]
    if torch.compiler.is_compiling():  # a comparison with each, which ONNX has
        return (x.unsqueeze(-1) >= inner).sum(-1)
    return torch.searchsorted(inner.contiguous(), x.detach().contiguous(), right=True)


def interpolate(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """Return the linear interpolation of values at knots; constant outside of them.

    Args:
        x: where to interpolate, of any shape.
        knots: strictly increasing, (K + 1,).
        values: at the knots, (K + 1,).
    """
    if len(knots) == 1:
        return values.to(x).expand_as(x)
    knots = knots.to(x)
    values = values.to(x)
    cell = find_cell(x, knots)
    width = knots[cell + 1] - knots[cell]
    is_wide = width > 0  # knots that differ in float64 may be equal in float32
    fraction = ((x - knots[cell]) / torch.where(is_wide, width, 1.0)).clamp(0.0, 1.0)
    fraction = torch.where(is_wide, fraction, (x >= knots[cell + 1]).to(x))
    return torch.lerp(values[cell], values[cell + 1], fraction)


def slopes(knots: Tensor, values: Tensor) -> Tensor:
    """Return the slope in every cell, (K,).

    Args:
        knots: strictly increasing, (K + 1,).
        values: at the knots, (K + 1,).
    """
    return values.diff() / knots.diff()
