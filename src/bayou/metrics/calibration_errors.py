"""Calibration errors of predicted classes, with confidence intervals."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bayou.core import rng
from bayou.likelihoods.predictive import Predictive
from bayou.metrics.classes import class_probabilities, confidence_and_hits
from bayou.metrics.estimates import DRAWS, LEVEL, IntervalEstimate, bootstrap
from bayou.metrics.scores import mean_over_ties

MODES = 512  # cosines of a smoothed residual
POINTS = 1024  # of the integral of its absolute value
MIN_BANDWIDTH = 0.0035  # beyond which these cosines are too few
BISECTIONS = 24  # of the bandwidth


def smooth_ece(
    predictive: Predictive,
    y: Tensor,
    *,
    draws: int = DRAWS,
    level: float = LEVEL,
    seed: rng.Seed = 0,
) -> IntervalEstimate:
    """Compute the smooth calibration error of the most probable class, without bins.

    smECE_σ = ∫_0^1 |1/N Σ_n K_σ(t, p_n)·(1[hit_n] − p_n)| dt, with a Gaussian kernel K_σ reflected
    at 0 and 1, at the bandwidth σ = smECE_σ (Błasiok & Nakkiran 2023). It is a continuous function
    of the confidences p_n, and within a constant factor of the distance to calibration.

    Args:
        predictive: predictions of B rows, of classes.
        y: their targets, (B, *event).
        draws: of the rows, for the interval.
        level: of the interval, 0.9 by default.
        seed: of the draws.

    Returns:
        The error and its confidence interval.

    Example:
        >>> float(metrics.smooth_ece(posterior.predict(x), y))
        0.031

    References:
        Błasiok, Nakkiran: Smooth ECE, principled reliability diagrams via kernel smoothing,
        arXiv:2309.12236.
    """
    confidence, hits = confidence_and_hits(predictive, y)
    return smooth_calibration_error(confidence, hits, draws=draws, level=level, seed=seed)


def smooth_calibration_error(
    confidence: Tensor,
    hits: Tensor,
    *,
    draws: int = DRAWS,
    level: float = LEVEL,
    seed: rng.Seed = 0,
) -> IntervalEstimate:
    """Compute the smooth calibration error of probabilities of binary outcomes; see ``smooth_ece``.

    The smoothed residual is a series of cosines, since the reflected Gaussian kernel is the heat
    kernel on [0, 1]: Σ_k a_k·exp(−(πkσ)²/2)·cos(πkt) with a_k of the rows, without a grid of them.
    The bandwidth is at least 0.0035.

    Args:
        confidence: probabilities, (N,).
        hits: 1 where the outcome came and 0 where not, (N,).
        draws: of the rows, for the interval.
        level: of the interval, 0.9 by default.
        seed: of the draws.

    Returns:
        The error and its confidence interval.

    Raises:
        ValueError: for tensors of other shapes, or numbers outside of [0, 1].
    """
    _check_unit(confidence, hits)
    confidence = confidence.detach().double().cpu()
    residual = hits.detach().double().cpu() - confidence
    mode = torch.arange(MODES, dtype=torch.float64)
    waves = residual.unsqueeze(1) * torch.cos(math.pi * confidence.unsqueeze(1) * mode)
    points = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
    basis = torch.cos(math.pi * mode.unsqueeze(1) * points)
    basis[1:] *= 2  # the norm of a cosine

    def statistic(index: Tensor) -> float:
        counts = torch.bincount(index, minlength=len(residual)).double()
        return _fixed_bandwidth_error(counts @ waves / len(index), basis, mode)

    return bootstrap(statistic, len(residual), draws=draws, level=level, seed=seed)


def _fixed_bandwidth_error(coefficients: Tensor, basis: Tensor, mode: Tensor) -> float:
    """Return smECE_σ at σ = smECE_σ, which decreases in σ."""

    def error(bandwidth: float) -> float:
        decay = torch.exp(-0.5 * (math.pi * bandwidth * mode).square())
        return float(((coefficients * decay) @ basis).abs().mean())

    low = MIN_BANDWIDTH
    high = 1.0
    if error(low) <= low:
        return error(low)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if error(middle) > middle:
            low = middle
        else:
            high = middle
    return error(high)


def classwise_ece(
    predictive: Predictive,
    y: Tensor,
    bins: int = 15,
    *,
    draws: int = DRAWS,
    level: float = LEVEL,
    seed: rng.Seed = 0,
) -> IntervalEstimate:
    """Compute the calibration error of all class probabilities, the mean over the classes.

    1/C Σ_c Σ_k n_ck/N·|frequency_ck − mean p_ck| over bins ((k − 1)/K, k/K] of p_c (Kull et al.
    2019).

    Args:
        predictive: predictions of B rows, of classes.
        y: their targets, (B, *event).
        bins: K, 15 by default.
        draws: of the rows, for the interval.
        level: of the interval, 0.9 by default.
        seed: of the draws.

    Returns:
        The error and its confidence interval.
    """
    _check_bins(bins)
    p, labels = class_probabilities(predictive, y)
    p = p.cpu()
    classes = p.shape[-1]
    gap = one_hot(labels.cpu(), classes).double() - p
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    cell = torch.bucketize(p, edges[1:-1].contiguous()) + bins * torch.arange(classes)

    def statistic(index: Tensor) -> float:
        sums = torch.bincount(cell[index].flatten(), gap[index].flatten(), minlength=bins * classes)
        return float(sums.abs().sum()) / (len(index) * classes)

    return bootstrap(statistic, len(p), draws=draws, level=level, seed=seed)


def adaptive_ece(
    predictive: Predictive,
    y: Tensor,
    bins: int = 15,
    *,
    draws: int = DRAWS,
    level: float = LEVEL,
    seed: rng.Seed = 0,
) -> IntervalEstimate:
    """Compute the calibration error of the most probable class in bins of equal mass.

    Σ_k n_k/N·|accuracy_k − confidence_k|; bin k has the rows with ranks kN/K to (k + 1)N/K − 1 by
    confidence (Nixon et al. 2019), where bins of equal width have few rows of low confidence. Rows
    of equal confidence are divided between bins in expectation.

    Args:
        predictive: predictions of B rows, of classes.
        y: their targets, (B, *event).
        bins: K, 15 by default, at most the number of rows.
        draws: of the rows, for the interval.
        level: of the interval, 0.9 by default.
        seed: of the draws.

    Returns:
        The error and its confidence interval.
    """
    _check_bins(bins)
    confidence, hits = confidence_and_hits(predictive, y)
    confidence = confidence.cpu()
    gap = hits.cpu() - confidence

    def statistic(index: Tensor) -> float:
        ordered = mean_over_ties(gap[index], confidence[index])
        groups = ordered.tensor_split(min(bins, len(index)))
        return sum(abs(float(group.sum())) for group in groups) / len(index)

    return bootstrap(statistic, len(gap), draws=draws, level=level, seed=seed)


def _check_bins(bins: int) -> None:
    """Raise a ValueError unless this is a number of bins."""
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"bins must be a whole number of at least 1, got {bins!r}")


def _check_unit(confidence: Tensor, hits: Tensor) -> None:
    """Raise a ValueError unless both are N numbers in [0, 1]."""
    if confidence.ndim != 1 or confidence.shape != hits.shape or not len(hits):
        raise ValueError(
            f"confidence and hits must both be (N,), got {tuple(confidence.shape)} and "
            f"{tuple(hits.shape)}"
        )
    for name, values in (("confidence", confidence), ("hits", hits)):
        if not bool(((values >= 0) & (values <= 1)).all()):
            raise ValueError(f"{name} must lie in [0, 1], got values outside or NaN")
