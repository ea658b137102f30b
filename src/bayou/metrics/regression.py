"""Scores of predicted numbers, in original units.

``scale`` is the number that y was divided by.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayou.likelihoods.predictive import Predictive

CRPS_DRAWS = 1000


def validate_targets(predictive: Predictive, y: Tensor, score: str) -> None:
    """Raise a ValueError if this score is not for these targets.

    Args:
        predictive: predictions of B rows.
        y: their targets.
        score: its name.
    """
    likelihood = predictive.likelihood
    needs_order_only = score in ("crps", "coverage")
    if likelihood.support == "classes" and not (needs_order_only and likelihood.is_ordered):
        raise ValueError(
            f"{score} is for numbers, got classes ({type(likelihood).__name__}); "
            "use accuracy, nll or brier"
        )
    likelihood.validate(predictive.outputs.shape[1:], y)
    if y.numel() == 0:
        raise ValueError("there are no examples to score")


def observed_values(predictive: Predictive, y: Tensor) -> tuple[Predictive, Tensor, Tensor]:
    """Return the prediction of the values in y, these values in float64, and which are known.

    The noise of a row that y has is in the prediction. A censored value is not known.

    Args:
        predictive: predictions of B rows.
        y: their targets, (B, *event).

    Returns:
        The prediction, the values, and which of them are known.
    """
    values, is_known = predictive.likelihood.labels(y)
    of_rows = predictive.likelihood.for_targets(predictive.outputs, y)
    return Predictive(*of_rows), values.detach().double(), is_known


def rmse(predictive: Predictive, y: Tensor, scale: float = 1.0) -> float:
    """Compute √mean (E[y] − y)², over examples and coordinates; censored ones are left out.

    Args:
        predictive: predictions of B rows, of numbers.
        y: their targets, (B, *event).
        scale: the number that y was divided by.
    """
    validate_targets(predictive, y, "rmse")
    predictive, values, is_known = observed_values(predictive, y)
    squares = (predictive.mean.detach().double() - values).square()
    return scale * math.sqrt(float(squares[is_known].mean()))


def coverage(predictive: Predictive, y: Tensor, level: float = 0.9) -> float:
    """Return the fraction of y inside the central interval of a level.

    A calibrated prediction gives ``level``. Censored y are left out.

    Args:
        predictive: predictions of B rows, of numbers.
        y: their targets, (B, *event).
        level: the probability of the interval, 0.9 by default.
    """
    validate_targets(predictive, y, "coverage")
    predictive, values, is_known = observed_values(predictive, y)
    low, high = predictive.interval(level)
    is_inside = (low.double() <= values) & (values <= high.double())
    return float(is_inside[is_known].double().mean())


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
    Gaussians (Grimit et al. 2006) and of log-normals, a sum for counts and ordered classes (the
    ranked probability score), by quadrature for Gamma, Weibull and censored targets (up to the
    time of censoring); others are estimated without bias from draws of y.

    Args:
        predictive: predictions of B rows, of numbers.
        y: their targets, (B, *event).
        scale: the number that y was divided by.
        draws: of y, 1,000 by default, where there is no closed form.
        seed: of these draws.

    Raises:
        ValueError: if y are classes, or there are fewer than 2 draws.
    """
    validate_targets(predictive, y, "crps")
    exact = predictive.likelihood.mixture_crps(predictive.outputs.double(), y.detach().double())
    if exact is not None:
        return scale * float(exact.mean())
    if draws < 2:
        raise ValueError(f"crps needs at least 2 draws, got {draws}")
    predictive, target, _ = observed_values(predictive, y)
    drawn_y = predictive.sample(draws, seed).double().flatten(1).sort(0).values  # (n, N)
    rank = 2 * torch.arange(draws, dtype=torch.float64, device=drawn_y.device) - (draws - 1)
    # ½·E|Y − Y'| over pairs of different draws
    spread = (rank[:, None] * drawn_y).sum(0) / (draws * (draws - 1))
    return scale * float(((drawn_y - target.flatten()).abs().mean(0) - spread).mean())
