"""Scores of predicted numbers, in original units.

``scale`` is the number that y was divided by.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayou.likelihoods.predictive import Predictive

CRPS_DRAWS = 1000


def _validate_targets(predictive: Predictive, y: Tensor, score: str) -> Tensor:
    """Return y in float64, or raise a ValueError if this score is not for them."""
    likelihood = predictive.likelihood
    if likelihood.support == "classes":
        raise ValueError(
            f"{score} is for numbers, got classes ({type(likelihood).__name__}); "
            "use accuracy, nll or brier"
        )
    likelihood.validate(predictive.outputs.shape[1:], y)
    if y.numel() == 0:
        raise ValueError("there are no examples to score")
    return y.detach().double()


def rmse(predictive: Predictive, y: Tensor, scale: float = 1.0) -> float:
    """Compute √mean (E[y] − y)², over examples and coordinates.

    Args:
        predictive: predictions of B rows, of numbers.
        y: their targets, (B, *event).
        scale: the number that y was divided by.
    """
    target = _validate_targets(predictive, y, "rmse")
    return scale * math.sqrt(float((predictive.mean.detach().double() - target).square().mean()))


def coverage(predictive: Predictive, y: Tensor, level: float = 0.9) -> float:
    """Return the fraction of y inside the central interval of a level.

    A calibrated prediction gives ``level``.

    Args:
        predictive: predictions of B rows, of numbers.
        y: their targets, (B, *event).
        level: the probability of the interval, 0.9 by default.
    """
    target = _validate_targets(predictive, y, "coverage")
    low, high = predictive.interval(level)
    return float(((low.double() <= target) & (target <= high.double())).double().mean())


def width(predictive: Predictive, level: float = 0.9, scale: float = 1.0) -> float:
    """Return the mean width of the central interval of a level.

    Args:
        predictive: predictions of B rows, of numbers.
        level: the probability of the interval, 0.9 by default.
        scale: the number that y was divided by.
    """
    low, high = predictive.interval(level)
    return scale * float((high.double() - low.double()).mean())


@torch.no_grad()
def crps(
    predictive: Predictive, y: Tensor, scale: float = 1.0, draws: int = CRPS_DRAWS, seed: int = 0
) -> float:
    """Compute the continuous ranked probability score, mean ∫ (F(t) − 1[t ≥ y])² dt.

    It equals mean (E|Y − y| − ½·E|Y − Y'|), over examples and coordinates. Exact for a mixture of
    Gaussians (Grimit et al. 2006); others are estimated without bias from draws of y.

    Args:
        predictive: predictions of B rows, of numbers.
        y: their targets, (B, *event).
        scale: the number that y was divided by.
        draws: of y, 1,000 by default, where there is no closed form.
        seed: of these draws.

    Raises:
        ValueError: if y are classes, or there are fewer than 2 draws.
    """
    target = _validate_targets(predictive, y, "crps")
    exact = predictive.likelihood.mixture_crps(predictive.outputs.double(), target)
    if exact is not None:
        return scale * float(exact.mean())
    if draws < 2:
        raise ValueError(f"crps needs at least 2 draws, got {draws}")
    drawn_y = predictive.sample(draws, seed).double().flatten(1).sort(0).values  # (n, N)
    rank = 2 * torch.arange(draws, dtype=torch.float64, device=drawn_y.device) - (draws - 1)
    # ½·E|Y − Y'| over pairs of different draws
    spread = (rank[:, None] * drawn_y).sum(0) / (draws * (draws - 1))
    return scale * float(((drawn_y - target.flatten()).abs().mean(0) - spread).mean())
