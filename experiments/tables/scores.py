"""Scores of all rows of the study, in the units of y: one definition for every model.

A model returns a ``Forecast``: a mixture of Gaussians, quantiles, or probabilities of classes. What
is a mixture is scored by ``bayou.metrics``; quantiles have no density, so no NLL.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from bayou import metrics
from bayou.likelihoods import Categorical, HeteroscedasticGaussian
from bayou.likelihoods.predictive import Predictive

Floats = NDArray[np.float64]
LEVELS = np.arange(1, 100) / 100  # of the quantiles that a CRPS is computed from
INTERVAL = (0.05, 0.95)
MIN_PROBABILITY = 1e-12  # of a class
MIN_STD = 1e-9  # of a Gaussian, in standard deviations of y
NUMBER_SCORES = ("nll", "crps", "rmse", "coverage", "width")
CLASS_SCORES = ("nll", "brier", "error", "ece")


@final
@dataclass(frozen=True)
class Forecast:
    """What a model predicts for N rows; one of the three kinds.

    Args:
        mean: E[y], or the point prediction that belongs to quantiles: (N,).
        means: of the components of a mixture of Gaussians with equal weights, (S, N).
        stds: of the components, (S, N).
        quantiles: at ``LEVELS``, (99, N).
        probabilities: of the classes, (N, C).
    """

    mean: Floats | None = None
    means: Floats | None = None
    stds: Floats | None = None
    quantiles: Floats | None = None
    probabilities: Floats | None = None


def gaussian(mean: Floats, std: Floats | float) -> Forecast:
    """Return the forecast of a Gaussian.

    Args:
        mean: (N,), or (S, N) of a mixture.
        std: of the same shape, or one for all rows.
    """
    means = np.atleast_2d(np.asarray(mean, np.float64))
    stds = np.broadcast_to(np.asarray(std, np.float64), means.shape)
    return Forecast(mean=means.mean(0), means=means, stds=stds)


def score(forecast: Forecast, y: NDArray[Any]) -> dict[str, float]:
    """Score a forecast.

    Args:
        forecast: of the rows.
        y: their targets, numbers in their units or codes of classes (N,).

    Returns:
        nll, crps, rmse, coverage and width of the 90 % interval for numbers, without nll for
        quantiles; nll, brier, error (a fraction) and ece for classes.
    """
    if forecast.probabilities is not None:
        return _class_scores(forecast.probabilities, y)
    if forecast.means is not None and forecast.stds is not None:
        return _mixture_scores(forecast.means, forecast.stds, y)
    if forecast.quantiles is None or forecast.mean is None:
        raise ValueError("a forecast needs probabilities, means and stds, or mean and quantiles")
    return _quantile_scores(forecast.mean, forecast.quantiles, y)


def _class_scores(probabilities: Floats, y: NDArray[Any]) -> dict[str, float]:
    """Score class probabilities (N, C)."""
    positive = np.clip(probabilities, MIN_PROBABILITY, None)
    logits = torch.as_tensor(np.log(positive), dtype=torch.float64).log_softmax(-1)
    predictive = Predictive(Categorical().bind(), logits.unsqueeze(0))
    scores = metrics.summary(predictive, torch.as_tensor(y, dtype=torch.long))
    scores["error"] = 1 - scores["accuracy"]
    return {name: scores[name] for name in CLASS_SCORES}


def _mixture_scores(means: Floats, stds: Floats, y: NDArray[Any]) -> dict[str, float]:
    """Score a mixture of Gaussians, standardized for the computation."""
    shift, scale = float(np.mean(y)), float(np.std(y)) or 1.0
    mean = torch.as_tensor((means - shift) / scale, dtype=torch.float64)
    std = torch.as_tensor(stds / scale, dtype=torch.float64).clamp_min(MIN_STD)
    outputs = torch.stack([mean, 2 * std.log()], dim=-1)  # (S, N, 2)
    predictive = Predictive(HeteroscedasticGaussian().bind(), outputs)
    target = torch.as_tensor((y - shift) / scale, dtype=torch.float64)[:, None]
    scores = metrics.summary(predictive, target, scale=scale)
    return {name: scores[name] for name in NUMBER_SCORES}


def _quantile_scores(mean: Floats, quantiles: Floats, y: NDArray[Any]) -> dict[str, float]:
    """Score a point prediction and quantiles at ``LEVELS``."""
    ordered = np.sort(quantiles, axis=0)
    low, high = (ordered[round(100 * level) - 1] for level in INTERVAL)
    return {
        "crps": quantile_crps(ordered, y),
        "rmse": float(np.sqrt(np.mean((mean - y) ** 2))),
        "coverage": float(np.mean((low <= y) & (y <= high))),
        "width": float(np.mean(high - low)),
    }


def quantile_crps(quantiles: Floats, y: NDArray[Any]) -> float:
    """Return the CRPS by its integral over levels, 2·∫ (1[y < q_α] − α)·(q_α − y) dα.

    The integral is the mean over ``LEVELS``, each the middle of a hundredth of the levels, less
    half a hundredth at either end.

    Args:
        quantiles: increasing, (99, N).
        y: (N,).
    """
    difference = quantiles - y
    pinball = ((difference > 0) - LEVELS[:, None]) * difference
    return 2 * float(pinball.mean())


def spread_levels(levels: NDArray[Any], quantiles: Floats) -> Floats:
    """Interpolate quantiles at a few levels to ``LEVELS``, linearly in the normal score of a level.

    Exact for a Gaussian; the ends are extended with the slope of the outer two.

    Args:
        levels: increasing, (K,).
        quantiles: (K, N).
    """
    normal = NormalDist()
    known = np.array([normal.inv_cdf(level) for level in levels])
    wanted = np.array([normal.inv_cdf(level) for level in LEVELS])
    ordered = np.sort(quantiles, axis=0)
    place = np.clip(np.searchsorted(known, wanted) - 1, 0, len(known) - 2)
    weight = (wanted - known[place]) / (known[place + 1] - known[place])
    return ordered[place] * (1 - weight)[:, None] + ordered[place + 1] * weight[:, None]


def residual_quantiles(mean: Floats, residuals: Floats) -> Forecast:
    """Return the split conformal prediction: held-out residuals around each point prediction.

    Args:
        mean: point predictions (N,).
        residuals: y minus prediction of M held-out rows.
    """
    count = len(residuals)
    ordered = np.sort(residuals)
    # The k-th smallest of M with k = ⌈α·(M + 1)⌉ is exceeded with probability 1 − α at most.
    below = np.clip(np.floor(LEVELS * (count + 1)), 1, count).astype(int) - 1
    above = np.clip(np.ceil(LEVELS * (count + 1)), 1, count).astype(int) - 1
    places = np.where(LEVELS < 0.5, below, above)
    return Forecast(mean=mean, quantiles=mean + ordered[places][:, None])
