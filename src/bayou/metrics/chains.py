"""Rank-normalized split R-hat, effective sample sizes, Monte-Carlo standard errors of chains.

All of Vehtari, Gelman, Simpson, Carpenter & Bürkner (2021); draws are (chains C, draws K, ...),
results (...).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

CHUNK_NUMBERS = 2**22  # numbers that are transformed at a time
MIN_DRAWS = 4  # per chain


def rhat(draws: Tensor) -> Tensor:
    """Rank-normalized split R-hat: the larger of that of the draws (location) and of |draw −
    median| (scale).
    """
    return _each(
        draws,
        lambda x: torch.maximum(_rhat(_scored(_split(x))), _rhat(_scored(_split(_folded(x))))),
    )


def ess_bulk(draws: Tensor) -> Tensor:
    """Effective sample size of the rank-normalized draws, for the bulk of the distribution."""
    return _each(draws, lambda x: _ess(_scored(_split(x))))


def ess_tail(draws: Tensor) -> Tensor:
    """The smaller of the effective sample sizes of the 5 % and the 95 % quantile."""

    def tail(x: Tensor) -> Tensor:
        levels = torch.tensor((0.05, 0.95), dtype=x.dtype, device=x.device)
        below, above = (
            _ess(_split((x <= q).to(x.dtype))) for q in x.flatten(0, 1).quantile(levels, 0)
        )
        return torch.minimum(below, above)

    return _each(draws, tail)


def ess_mean(draws: Tensor) -> Tensor:
    """Effective sample size for the mean: Var[w] / Var[mean of the draws]."""
    return _each(draws, lambda x: _ess(_split(x)))


def mcse(draws: Tensor) -> Tensor:
    """Monte-Carlo standard error of the mean: sd/√ESS."""
    return _each(draws, lambda x: x.flatten(0, 1).std(0) / _ess(_split(x)).sqrt())


def _each(draws: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of (C, K, D) in float64, for draws (C, K, ...), some coordinates at a time."""
    if draws.ndim < 2 or draws.shape[1] < MIN_DRAWS:
        raise ValueError(
            f"draws must be (chains, draws, ...) with at least {MIN_DRAWS} draws, got {tuple(draws.shape)}"
        )
    if not bool(draws.isfinite().all()):
        raise ValueError("the draws have NaN or infinite values")
    flat = draws.detach().flatten(2) if draws.ndim > 2 else draws.detach().unsqueeze(-1)
    size = max(1, CHUNK_NUMBERS // (flat.shape[0] * flat.shape[1]))
    parts = [function(part.double()) for part in flat.split(size, -1)]
    return torch.cat(parts).reshape(draws.shape[2:])


def _split(x: Tensor) -> Tensor:
    """Every chain as two, (2C, K/2, D); of an odd number of draws the middle one is left out."""
    half = x.shape[1] // 2
    return torch.cat((x[:, :half], x[:, -half:]))


def _folded(x: Tensor) -> Tensor:
    """|x − median|, the median of an even number being the mean of two."""
    return (x - x.flatten(0, 1).quantile(0.5, 0)).abs()


def _scored(x: Tensor) -> Tensor:
    """Φ⁻¹((rank − 3/8) / (S + 1/4)) over all S draws of all chains; equal draws share their mean
    rank.
    """
    flat = x.flatten(0, 1).T.contiguous()  # (D, S)
    ordered = flat.sort(-1).values
    below = torch.searchsorted(ordered, flat, right=False)
    rank = 0.5 * (below + torch.searchsorted(ordered, flat, right=True) + 1).to(x.dtype)
    return torch.special.ndtri((rank - 0.375) / (flat.shape[1] + 0.25)).T.reshape(x.shape)


def _rhat(x: Tensor) -> Tensor:
    """√(((n − 1)/n·W + B/n) / W): W the mean variance within chains, B/n that of their means; NaN
    for constants.
    """
    n = x.shape[1]
    within, between = x.var(1).mean(0), x.mean(1).var(0)
    return ((n - 1) / n + between / within).sqrt()


def _autocovariance(x: Tensor) -> Tensor:
    """1/n Σ_i (x_i − mean)(x_{i+t} − mean) at all lags t, by FFT: (C, n, D)."""
    n = x.shape[1]
    spectrum = torch.fft.rfft(x - x.mean(1, keepdim=True), 2 * n, dim=1)
    return torch.fft.irfft(spectrum.abs().square(), 2 * n, dim=1)[:, :n] / n


def _ess(x: Tensor) -> Tensor:
    """C·n/τ̂, τ̂ = −1 + 2·Σ P_k with Geyer's initial positive and monotone sums P_k = ρ_2k +
    ρ_2k+1.

    ρ_t = 1 − (W − mean autocovariance_t)/var⁺. The sum ends before the first P_k ≤ 0; that pair's
    even member counts once if it is positive. A constant has the size of its draws.
    """
    chains, n, _ = x.shape
    covariance = _autocovariance(x)
    within = covariance[:, 0].mean(0) * n / (n - 1)
    total = within * (n - 1) / n + (x.mean(1).var(0) if chains > 1 else 0.0)
    rho = 1 - (within - covariance.mean(0)) / total
    rho[0] = 1.0
    last = max((n - 1) // 2, 1)  # pairs 0 .. last − 1 may count
    pairs = rho[: 2 * last].unflatten(0, (last, 2)).sum(1)
    counting = (pairs > 0).cumprod(0)
    counting[-1] = 0  # the last pair always ends the sum
    end = counting.sum(0)
    after = rho[: 2 * last : 2].gather(0, end.unsqueeze(0))[0].clamp_min(0)
    tau = -1 + 2 * (pairs.cummin(0).values * counting).sum(0) + after
    ess = chains * n / tau.clamp_min(1 / math.log10(chains * n))
    constant = x.flatten(0, 1).amax(0) - x.flatten(0, 1).amin(0) < 1e-15
    return torch.where(constant, float(chains * n), ess)
