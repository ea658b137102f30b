"""Scores of predicted numbers. ``scale`` is what y was divided by: scores come out in original units."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayou.likelihoods import FiniteLikelihood, LocationScale, UnitNormal
from bayou.predictive import Predictive

_CHUNK = 1 << 22
_DRAWS = 1000


def _checked(predictive: Predictive, y: Tensor, what: str) -> Tensor:
    likelihood = predictive.likelihood
    if isinstance(likelihood, FiniteLikelihood):
        raise ValueError(
            f"{what} is for numbers, got classes ({type(likelihood).__name__}); use accuracy, nll or brier"
        )
    likelihood.validate(predictive.outputs.shape[1:], y)
    if y.numel() == 0:
        raise ValueError("there are no examples to score")
    return y.detach().double()


def rmse(predictive: Predictive, y: Tensor, scale: float = 1.0) -> float:
    """√mean (E[y] − y)², over examples and coordinates."""
    target = _checked(predictive, y, "rmse")
    return scale * math.sqrt(float((predictive.mean.detach().double() - target).square().mean()))


def coverage(predictive: Predictive, y: Tensor, level: float = 0.9) -> float:
    """The fraction of y inside the central interval of this level; a calibrated prediction gives ``level``."""
    target = _checked(predictive, y, "coverage")
    low, high = predictive.interval(level)
    return float(((low.double() <= target) & (target <= high.double())).double().mean())


def width(predictive: Predictive, level: float = 0.9, scale: float = 1.0) -> float:
    """The mean width of the central interval of this level."""
    low, high = predictive.interval(level)
    return scale * float((high.double() - low.double()).mean())


@torch.no_grad()
def crps(predictive: Predictive, y: Tensor, scale: float = 1.0, draws: int = _DRAWS, seed: int = 0) -> float:
    """mean ∫ (F(t) − 1[t ≥ y])² dt = mean (E|Y − y| − ½·E|Y − Y'|), over examples and coordinates.

    Exact for a mixture of Gaussians (Grimit et al. 2006): 1/S Σ_s A(y − m_s, v_s) − 1/2S² Σ_st A(m_s − m_t, v_s + v_t)
    with A(d, v) = 2√v φ(d/√v) + d(2Φ(d/√v) − 1). Others are estimated without bias from ``draws`` of y.
    """
    target, likelihood = _checked(predictive, y, "crps"), predictive.likelihood
    if isinstance(likelihood, LocationScale) and isinstance(likelihood.unit, UnitNormal):
        location, log_scale = likelihood.location_log_scale(predictive.outputs.double())
        variance = (2 * log_scale.double()).exp().expand_as(location)
        return scale * float(_gaussian_crps(location.flatten(1), variance.flatten(1), target.flatten()).mean())
    if draws < 2:
        raise ValueError(f"crps needs at least 2 draws, got {draws}")
    drawn = predictive.sample(draws, seed).double().flatten(1).sort(0).values  # (n, N)
    rank = 2 * torch.arange(draws, dtype=torch.float64, device=drawn.device) - (draws - 1)
    spread = (rank[:, None] * drawn).sum(0) / (draws * (draws - 1))  # ½·E|Y − Y'|, pairs of different draws
    return scale * float(((drawn - target.flatten()).abs().mean(0) - spread).mean())


def _gaussian_crps(location: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """(S, N), (S, N), (N,) -> (N,), a few columns at a time: the pairs take S² numbers each."""
    samples, parts = len(location), []
    i, j = torch.triu_indices(samples, samples, 1, device=location.device)
    for m, v, t in zip(*(x.split(max(1, _CHUNK // samples**2), -1) for x in (location, variance, y)), strict=True):
        apart = _expected_distance(m[i] - m[j], v[i] + v[j]).sum(0)  # every pair once: A is even in d
        same = _expected_distance(torch.zeros_like(m), 2 * v).sum(0)
        parts.append(_expected_distance(t - m, v).mean(0) - (apart + 0.5 * same) / samples**2)
    return torch.cat(parts)


def _expected_distance(d: Tensor, variance: Tensor) -> Tensor:
    """A(d, v) = E|d + √v·Z|."""
    std = variance.sqrt()
    z = d / std
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return 2 * std * density + d * torch.erf(z * math.sqrt(0.5))
