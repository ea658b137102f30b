"""The regularized incomplete beta function, which torch does not have."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_TERMS = 2000  # of a continued fraction


def betainc(a: Tensor, b: Tensor, x: Tensor, x_complement: Tensor) -> Tensor:
    """Compute I_x(a, b) = ∫_0^x t^(a − 1)·(1 − t)^(b − 1) dt/B(a, b), accurate for small values.

    By its continued fraction, in x or in 1 − x, whichever converges faster, which it does within a
    few √max(a, b) terms.

    Args:
        a: positive numbers.
        b: positive numbers.
        x: from 0 to 1; all arguments broadcast.
        x_complement: 1 − x, without the rounding error of this difference.
    """
    a, b, x, x_complement = torch.broadcast_tensors(a, b, x, x_complement)
    log_beta = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
    is_swapped = x > (a + 1) / (a + b + 2)
    first = torch.where(is_swapped, b, a)
    second = torch.where(is_swapped, a, b)
    base = torch.where(is_swapped, x_complement, x)
    rest = torch.where(is_swapped, x, x_complement)
    largest = float(torch.maximum(a, b).detach().amax()) if a.numel() else 1.0
    terms = min(MAX_TERMS, 20 + int(4 * largest**0.5))
    power = torch.special.xlogy(first, base) + torch.special.xlogy(second, rest)
    fraction = beta_fraction(first, second, base, terms, tolerance=torch.finfo(base.dtype).eps)
    value = torch.exp(power - log_beta) * fraction / first
    return torch.where(is_swapped, 1 - value, value).clamp(0.0, 1.0)


def beta_fraction(
    a: Tensor, b: Tensor, x: Tensor, terms: int, tolerance: float | None = None
) -> Tensor:
    """Compute the continued fraction of I_x(a, b) by the method of Lentz.

    Args:
        a: positive numbers.
        b: positive numbers.
        x: from 0 to 1.
        terms: of the fraction.
        tolerance: stop once no fraction changes by more than this share of it; None (default):
            never, so that it compiles.
    """
    c = torch.ones_like(x)
    d = 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, terms):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            c = 1 + term / c
            d = 1 / (1 + term * d)
            fraction = fraction * c * d
        if tolerance is not None and bool(((c * d - 1).detach().abs() <= tolerance).all()):
            break
    return fraction
