"""Functions that torch does not have: the incomplete beta function, the error of Stirling."""

from __future__ import annotations

import torch
from torch import Tensor

from bayou.core.constants import LOG_2PI

MAX_TERMS = 2000  # of a continued fraction
LARGE = 30.0  # from here on asymptotic series are exact to rounding
NEAR = 0.5  # relative difference below which a deviance is computed from the difference


def stirling_error(x: Tensor) -> Tensor:
    """Compute log Γ(x) − ((x − ½)·log x − x + ½·log 2π), which is about 1/(12x).

    Args:
        x: positive numbers.
    """
    small = x.clamp_max(LARGE)
    direct = torch.lgamma(small) - ((small - 0.5) * small.log() - small + 0.5 * LOG_2PI)
    inverse = 1 / x.clamp_min(LARGE)
    square = inverse.square()
    series = inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680)))
    return torch.where(x < LARGE, direct, series)


def log_minus_digamma(x: Tensor) -> Tensor:
    """Compute log x − ψ(x), which is about 1/(2x).

    Args:
        x: positive numbers.
    """
    small = x.clamp_max(LARGE)
    inverse = 1 / x.clamp_min(LARGE)
    square = inverse.square()
    series = inverse / 2 + square * (1 / 12 - square * (1 / 120 - square / 252))
    return torch.where(x < LARGE, small.log() - torch.digamma(small), series)


def log_beta_density(a: Tensor, b: Tensor, log_x: Tensor, log_rest: Tensor) -> Tensor:
    """Compute log (x^a·(1 − x)^b/B(a, b)) without the differences of large logarithms of Γ.

    It is ½·log(ab/(2πn)) − D + δ(n) − δ(a) − δ(b), n = a + b, with the deviance
    D = a·log(a/(nx)) + b·log(b/(n(1 − x))) and the error of Stirling δ (Loader 2000).

    Args:
        a: positive numbers.
        b: positive numbers.
        log_x: log x.
        log_rest: log (1 − x).
    """
    n = a + b
    log_n = n.log()
    difference = a * log_rest.exp() - b * log_x.exp()  # a − nx
    deviance = _deviance(a, difference, log_n + log_x) + _deviance(b, -difference, log_n + log_rest)
    errors = stirling_error(n) - stirling_error(a) - stirling_error(b)
    return 0.5 * (a.log() + b.log() - log_n - LOG_2PI) - deviance + errors


def _deviance(k: Tensor, difference: Tensor, log_m: Tensor) -> Tensor:
    """Compute k·log(k/m) + m − k, where difference = k − m."""
    m = log_m.exp()
    ratio = difference / m.clamp_min(torch.finfo(m.dtype).tiny)
    is_near = ratio.abs() < NEAR
    near = torch.where(is_near, ratio, 0.0)
    close = m * ((1 + near) * torch.log1p(near) - near)
    return torch.where(is_near, close, k * (k.log() - log_m) - difference)


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
    is_swapped = x > (a + 1) / (a + b + 2)
    first = torch.where(is_swapped, b, a)
    second = torch.where(is_swapped, a, b)
    base = torch.where(is_swapped, x_complement, x)
    rest = torch.where(is_swapped, x, x_complement)
    largest = float(torch.maximum(a, b).detach().amax()) if a.numel() else 1.0
    terms = min(MAX_TERMS, 20 + int(4 * largest**0.5))
    factor = torch.exp(log_beta_density(first, second, base.log(), rest.log()))
    fraction = beta_fraction(first, second, base, terms, tolerance=4 * torch.finfo(base.dtype).eps)
    value = factor * fraction / first
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
