"""Scores of predicted numbers. ``scale``: the number that y was divided by; scores are in original
units.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayou.predictive import Predictive

_CRPS_DRAWS = 1000


def _checked(predictive: Predictive, y: Tensor, what: str) -> Tensor:
    likelihood = predictive.likelihood
    if likelihood.support == "classes":
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
    """The fraction of y inside the central interval of this level; a calibrated prediction gives
    ``level``.
    """
    target = _checked(predictive, y, "coverage")
    low, high = predictive.interval(level)
    return float(((low.double() <= target) & (target <= high.double())).double().mean())


def width(predictive: Predictive, level: float = 0.9, scale: float = 1.0) -> float:
    """The mean width of the central interval of this level."""
    low, high = predictive.interval(level)
    return scale * float((high.double() - low.double()).mean())


@torch.no_grad()
def crps(
    predictive: Predictive, y: Tensor, scale: float = 1.0, draws: int = _CRPS_DRAWS, seed: int = 0
) -> float:
    """mean ∫ (F(t) − 1[t ≥ y])² dt = mean (E|Y − y| − ½·E|Y − Y'|), over examples and coordinates.

    Exact for a mixture of Gaussians (Grimit et al. 2006). Others are estimated without bias from
    ``draws`` of y.
    """
    target = _checked(predictive, y, "crps")
    exact = predictive.likelihood.mixture_crps(predictive.outputs.double(), target)
    if exact is not None:
        return scale * float(exact.mean())
    if draws < 2:
        raise ValueError(f"crps needs at least 2 draws, got {draws}")
    drawn = predictive.sample(draws, seed).double().flatten(1).sort(0).values  # (n, N)
    rank = 2 * torch.arange(draws, dtype=torch.float64, device=drawn.device) - (draws - 1)
    spread = (rank[:, None] * drawn).sum(0) / (
        draws * (draws - 1)
    )  # ½·E|Y − Y'|, pairs of different draws
    return scale * float(((drawn - target.flatten()).abs().mean(0) - spread).mean())
