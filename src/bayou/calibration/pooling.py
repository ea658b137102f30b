"""Isotonic regression by pooling adjacent violators."""

from __future__ import annotations

import torch
from torch import Tensor


def pool_adjacent_violators(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks of argmin Σ_i w_i·(v_i − m_i)² over increasing m (Ayer et al. 1955).

    Args:
        values: v, (N,).
        weights: w, positive, (N,).

    Returns:
        The mean of each block, increasing, and its number of values.
    """
    means: list[float] = []
    masses: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean = value
        mass = weight
        count = 1
        while means and means[-1] >= mean:
            total = mass + masses[-1]
            mean = (mean * mass + means.pop() * masses[-1]) / total
            mass = total
            masses.pop()
            count += counts.pop()
        means.append(mean)
        masses.append(mass)
        counts.append(count)
    return torch.tensor(means, dtype=torch.float64), torch.tensor(counts)


def isotonic_regression(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return knots and values of the increasing function with the least squared error.

    Values at equal x are averaged. The function is constant in each block of pooled x and linear
    between blocks (that of ``sklearn.isotonic.IsotonicRegression``).

    Args:
        x: (N,).
        y: (N,).

    Returns:
        Knots, strictly increasing, and the values at them, increasing: (K,) each in float64.

    Raises:
        ValueError: for tensors of other shapes, none, or NaN.

    Example:
        >>> isotonic_regression(torch.tensor([1.0, 2, 3]), torch.tensor([0.0, 2, 1]))
        (tensor([1., 2., 3.], dtype=torch.float64), tensor([0.0000, 1.5000, 1.5000], ...))
    """
    if x.ndim != 1 or x.shape != y.shape or not len(x):
        raise ValueError(
            f"isotonic_regression needs x and y of one shape (N,), got {tuple(x.shape)} and "
            f"{tuple(y.shape)}"
        )
    x = x.detach().double().cpu()
    y = y.detach().double().cpu()
    if not bool(x.isfinite().all() & y.isfinite().all()):
        raise ValueError("isotonic_regression needs finite numbers, got NaN or infinity")
    places, index, counts = x.unique(return_inverse=True, return_counts=True)
    weights = counts.double()
    values = torch.zeros_like(places).index_add_(0, index, y) / weights
    means, sizes = pool_adjacent_violators(values, weights)
    last = sizes.cumsum(0) - 1
    first = last - sizes + 1
    has_width = last > first  # a block of one place has one knot
    ends = torch.stack((first, last), 1)
    keeps = torch.stack((torch.ones_like(has_width), has_width), 1)
    return places[ends[keeps]], means.unsqueeze(1).expand(-1, 2)[keeps]
