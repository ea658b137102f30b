"""Scores of predicted quantiles and intervals, and tests of the distribution of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.likelihoods.predictive import Predictive, check_level
from bayou.metrics.regression import observed_values, validate_targets

PIT_BINS = 20


def pinball(
    predictive: Predictive,
    y: Tensor,
    q: float | Sequence[float] = (0.05, 0.25, 0.5, 0.75, 0.95),
    scale: float = 1.0,
) -> float:
    """Compute the quantile loss, mean max(q·d, (q − 1)·d) with d = y − quantile(q).

    Its expectation is smallest at the true quantile (Koenker & Bassett 1978). The mean over many
    levels is half of the CRPS.

    Args:
        predictive: predictions of B rows, of numbers.
        y: their targets, (B, *event).
        q: a level, or several over which the loss is averaged.
        scale: the number that y was divided by.

    Raises:
        ValueError: if y are classes, or a level does not lie between 0 and 1.
    """
    validate_targets(predictive, y, "pinball")
    predictive, values, is_known = observed_values(predictive, y)
    levels = torch.as_tensor(q, dtype=torch.float64).flatten().tolist()
    if not levels:
        raise ValueError("pinball needs one level or more, got none")
    total = 0.0
    for level in levels:
        distance = (values - predictive.quantile(level).double())[is_known]
        total += float(torch.maximum(level * distance, (level - 1) * distance).mean())
    return scale * total / len(levels)


def interval_score(
    predictive: Predictive, y: Tensor, level: float = 0.9, scale: float = 1.0
) -> float:
    """Compute the interval score, mean (u − l) + 2/α·((l − y)₊ + (y − u)₊), α = 1 − level.

    Width and coverage in one number, smallest in expectation for the true central interval
    (Gneiting & Raftery 2007).

    Args:
        predictive: predictions of B rows, of numbers.
        y: their targets, (B, *event).
        level: the probability of the interval [l, u], 0.9 by default.
        scale: the number that y was divided by.

    Raises:
        ValueError: if y are classes, or the level does not lie between 0 and 1.
    """
    validate_targets(predictive, y, "interval_score")
    check_level(level)
    predictive, values, is_known = observed_values(predictive, y)
    low, high = (end.double() for end in predictive.interval(level))
    miss = (low - values).clamp_min(0.0) + (values - high).clamp_min(0.0)
    score = high - low + 2 / (1 - level) * miss
    return scale * float(score[is_known].mean())


@torch.no_grad()
def pit(predictive: Predictive, y: Tensor, seed: rng.Seed = 0) -> Tensor:
    """Compute the probability integral transform of observed y, F(y): uniform if calibrated.

    For counts it is randomized, F(y − 1) + v·(F(y) − F(y − 1)) with uniform v (Czado et al. 2009).

    Args:
        predictive: predictions of B rows, of numbers.
        y: their targets, (B, *event).
        seed: of v.

    Returns:
        Levels of the N coordinates of y that are known, (N,) in float64.

    Raises:
        ValueError: if y are classes.
    """
    validate_targets(predictive, y, "pit")
    predictive, values, is_known = observed_values(predictive, y)
    level = predictive.cdf(values.to(predictive.outputs.dtype)).double()
    if predictive.likelihood.support == "counts":
        below = predictive.cdf(values.to(predictive.outputs.dtype) - 1).double()
        below = torch.where(values > 0, below, 0.0)
        v = rng.uniform(1, level.shape, level, rng.fold(seed, "pit"))[0]
        level = below + v * (level - below)
    return level[is_known].clamp(0.0, 1.0)


@final
@dataclass(frozen=True)
class PitHistogram:
    """The levels F(y) of observed y in bins of equal width, and a test that they are uniform.

    A hump says that the predictions are too wide, a U that they are too narrow, a slope that they
    are biased.

    Args:
        edges: of the bins, (K + 1,).
        count: the levels in each bin, (K,).
        statistic: Σ_k (n_k − N/K)²/(N/K).
        p_value: P(a χ² with K − 1 degrees of freedom exceeds the statistic): small where levels are
            not uniform. Levels are taken as independent.
    """

    edges: Tensor
    count: Tensor
    statistic: float
    p_value: float

    @property
    def density(self) -> Tensor:
        """The height of each bin, 1 if levels are uniform: (K,)."""
        return self.count * len(self.count) / self.count.sum()


def pit_histogram(
    predictive: Predictive, y: Tensor, bins: int = PIT_BINS, seed: rng.Seed = 0
) -> PitHistogram:
    """Return the histogram of F(y), with Pearson's test of uniformity.

    Args:
        predictive: predictions of B rows, of numbers.
        y: their targets, (B, *event).
        bins: K, 20 by default; 5 levels or more in each make the p-value accurate.
        seed: of the levels of counts, as of ``pit``.

    Raises:
        ValueError: if y are classes, or bins is not a whole number of at least 2.

    Example:
        >>> metrics.pit_histogram(posterior.predict(x), y).p_value
        0.41
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 2:
        raise ValueError(f"bins must be a whole number of at least 2, got {bins!r}")
    levels = pit(predictive, y, seed).cpu()
    index = (levels * bins).long().clamp_max(bins - 1)
    count = torch.bincount(index, minlength=bins).double()
    expected = len(levels) / bins
    statistic = float((count - expected).square().sum() / expected)
    half = torch.tensor([(bins - 1) / 2, statistic / 2], dtype=torch.float64)
    p_value = float(torch.special.gammaincc(half[0], half[1]))
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    return PitHistogram(edges, count, statistic, p_value)


def uniformity(levels: Tensor) -> tuple[float, float]:
    """Test whether levels are uniform by Kolmogorov and Smirnov, without bins.

    D = max |empirical cdf − level|; P(D) by Kolmogorov's series with the correction of Stephens
    (1970), accurate to about .01 from 20 levels on.

    Args:
        levels: ``pit(predictive, y)``, (N,).

    Returns:
        D and its p-value.

    Raises:
        ValueError: if there are none, or some lie outside of [0, 1].
    """
    ordered = levels.detach().double().flatten().sort().values
    count = len(ordered)
    if not count or not bool(((ordered >= 0) & (ordered <= 1)).all()):
        raise ValueError("uniformity needs levels in [0, 1], got none, NaN or others")
    rank = torch.arange(1, count + 1, dtype=torch.float64, device=ordered.device)
    above = rank / count - ordered
    below = ordered - (rank - 1) / count
    distance = float(torch.maximum(above, below).max())
    root = math.sqrt(count)
    t = (root + 0.12 + 0.11 / root) * distance
    terms = [2 * (-1) ** (k - 1) * math.exp(-2 * (k * t) ** 2) for k in range(1, 101)]
    p_value = sum(terms) if t > 0.2 else 1.0
    return distance, min(max(p_value, 0.0), 1.0)
