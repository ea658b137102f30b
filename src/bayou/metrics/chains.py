"""Rank-normalized split R-hat, effective sample sizes, Monte-Carlo standard errors of chains.

All of Vehtari, Gelman, Simpson, Carpenter & Bürkner: Rank-normalization, folding, and localization,
Bayesian Analysis 2021. Draws are (chains C, draws K, ...), results (...).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

CHUNK_NUMBERS = 2**22  # numbers that are transformed at a time
MIN_DRAWS = 4  # per chain
MIN_RANGE = 1e-15  # of a coordinate that is not a constant


def rhat(draws: Tensor) -> Tensor:
    """Compute the rank-normalized split R-hat.

    √(((n − 1)/n·W + B/n) / W), W the variance within chains and B/n that of their means; the larger
    of that of the draws (location) and of |draw − median| (scale). Near 1 if the chains agree.

    Args:
        draws: (C, K, ...), at least 4 per chain.

    Returns:
        R-hat of each coordinate, (...).

    Raises:
        ValueError: if there are fewer draws, or some are not finite.
    """

    def location_or_scale(x: Tensor) -> Tensor:
        location = _rhat(_normal_scores(_split_chains(x)))
        scale = _rhat(_normal_scores(_split_chains(_distance_from_median(x))))
        return torch.maximum(location, scale)

    return _map_coordinates(draws, location_or_scale)


def ess_bulk(draws: Tensor) -> Tensor:
    """Compute the effective sample size of the rank-normalized draws, for means and medians.

    Args:
        draws: (C, K, ...), at least 4 per chain.

    Returns:
        The size of each coordinate, (...).
    """
    return _map_coordinates(draws, lambda x: _ess(_normal_scores(_split_chains(x))))


def ess_tail(draws: Tensor) -> Tensor:
    """Compute the smaller of the effective sample sizes of the 5 % and the 95 % quantile.

    Args:
        draws: (C, K, ...), at least 4 per chain.

    Returns:
        The size of each coordinate, (...).
    """

    def smaller_tail(x: Tensor) -> Tensor:
        levels = torch.tensor((0.05, 0.95), dtype=x.dtype, device=x.device)
        low, high = x.flatten(0, 1).quantile(levels, 0)
        low_ess = _ess(_split_chains((x <= low).to(x.dtype)))
        high_ess = _ess(_split_chains((x <= high).to(x.dtype)))
        return torch.minimum(low_ess, high_ess)

    return _map_coordinates(draws, smaller_tail)


def ess_mean(draws: Tensor) -> Tensor:
    """Compute the effective sample size for the mean: Var[w] / Var[mean of the draws].

    Args:
        draws: (C, K, ...), at least 4 per chain.
    """
    return _map_coordinates(draws, lambda x: _ess(_split_chains(x)))


def mcse(draws: Tensor) -> Tensor:
    """Compute the Monte-Carlo standard error of the mean: sd/√ESS.

    Args:
        draws: (C, K, ...), at least 4 per chain.
    """
    return _map_coordinates(draws, lambda x: x.flatten(0, 1).std(0) / _ess(_split_chains(x)).sqrt())


def _map_coordinates(draws: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of (C, K, D) in float64 to draws (C, K, ...), some coordinates at a time."""
    if draws.ndim < 2 or draws.shape[1] < MIN_DRAWS:
        raise ValueError(
            f"draws must be (chains, draws, ...) with at least {MIN_DRAWS} draws, "
            f"got {tuple(draws.shape)}"
        )
    if not bool(draws.isfinite().all()):
        raise ValueError("the draws have NaN or infinite values")
    flat = draws.detach().flatten(2) if draws.ndim > 2 else draws.detach().unsqueeze(-1)
    chunk_size = max(1, CHUNK_NUMBERS // (flat.shape[0] * flat.shape[1]))
    values = [function(chunk.double()) for chunk in flat.split(chunk_size, -1)]
    return torch.cat(values).reshape(draws.shape[2:])


def _split_chains(x: Tensor) -> Tensor:
    """Return every chain as two, (2C, K/2, D), without the middle one of an odd number of draws."""
    half = x.shape[1] // 2
    return torch.cat((x[:, :half], x[:, -half:]))


def _distance_from_median(x: Tensor) -> Tensor:
    """Return |x − median|, the median of an even number being the mean of two."""
    return (x - x.flatten(0, 1).quantile(0.5, 0)).abs()


def _normal_scores(x: Tensor) -> Tensor:
    """Return Φ⁻¹((rank − 3/8) / (S + 1/4)) over all S draws; equal draws share their mean rank."""
    flat = x.flatten(0, 1).T.contiguous()  # (D, S)
    ordered = flat.sort(-1).values
    below = torch.searchsorted(ordered, flat, right=False)
    rank = 0.5 * (below + torch.searchsorted(ordered, flat, right=True) + 1).to(x.dtype)
    return torch.special.ndtri((rank - 0.375) / (flat.shape[1] + 0.25)).T.reshape(x.shape)


def _rhat(x: Tensor) -> Tensor:
    """Return √(((n − 1)/n·W + B/n) / W); NaN for constants."""
    n = x.shape[1]
    within = x.var(1).mean(0)
    between = x.mean(1).var(0)
    return ((n - 1) / n + between / within).sqrt()


def _autocovariance(x: Tensor) -> Tensor:
    """Return 1/n Σ_i (x_i − mean)(x_{i+t} − mean) at all lags t, by FFT: (C, n, D)."""
    n = x.shape[1]
    spectrum = torch.fft.rfft(x - x.mean(1, keepdim=True), 2 * n, dim=1)
    return torch.fft.irfft(spectrum.abs().square(), 2 * n, dim=1)[:, :n] / n


def _ess(x: Tensor) -> Tensor:
    """Return the effective sample size C·n/τ̂.

    τ̂ = −1 + 2·Σ P_k with Geyer's initial positive and monotone sums P_k = ρ_2k + ρ_2k+1 and
    ρ_t = 1 − (W − mean autocovariance_t)/var⁺. The sum ends before the first P_k ≤ 0; that pair's
    even member counts once if it is positive. A constant has the size of its draws.
    """
    chains, n, _ = x.shape
    covariance = _autocovariance(x)
    within = covariance[:, 0].mean(0) * n / (n - 1)
    total = within * (n - 1) / n + (x.mean(1).var(0) if chains > 1 else 0.0)
    rho = 1 - (within - covariance.mean(0)) / total
    rho[0] = 1.0
    pair_count = max((n - 1) // 2, 1)  # the last one always ends the sum
    pairs = rho[: 2 * pair_count].unflatten(0, (pair_count, 2)).sum(1)
    is_summed = (pairs > 0).cumprod(0)
    is_summed[-1] = 0
    end = is_summed.sum(0)
    last_term = rho[: 2 * pair_count : 2].gather(0, end.unsqueeze(0))[0].clamp_min(0)
    tau = -1 + 2 * (pairs.cummin(0).values * is_summed).sum(0) + last_term
    ess = chains * n / tau.clamp_min(1 / math.log10(chains * n))
    is_constant = x.flatten(0, 1).amax(0) - x.flatten(0, 1).amin(0) < MIN_RANGE
    return torch.where(is_constant, float(chains * n), ess)
