"""Distances between two predictions, such as those of a method and of a long HMC run.

Both are metrics of the competition "Approximate inference in Bayesian deep learning" (Wilson et
al., NeurIPS 2021).
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from bayou.likelihoods.predictive import Predictive

SUPPORT_DRAWS = 4096  # draws of a continuous y, for its range
COARSE_EDGES = 256  # quantiles of these draws with equal mass in between
FINE_STEPS = (0.0, 0.25, 0.5, 0.75)  # of a coarse cell, where finer cells begin
ROWS = 256  # of a continuous y at a time


def agreement(a: Predictive, b: Predictive) -> float:
    """Return the fraction of rows whose most probable class is the same in both.

    Args:
        a: predictions of B rows, of classes.
        b: other predictions of the same rows.

    Raises:
        ValueError: if y are not classes, or the predictions are not of the same rows.
    """
    _check_same_targets(a, b)
    if a.likelihood.support != "classes":
        name = type(a.likelihood).__name__
        raise ValueError(
            f"agreement is for classes (Categorical, Bernoulli), got {name}; use total_variation"
        )
    is_same = a.probabilities.argmax(-1) == b.probabilities.to(a.outputs.device).argmax(-1)
    return float(is_same.double().mean())


def total_variation(a: Predictive, b: Predictive) -> float:
    """Compute the mean total variation distance: 0 for equal predictions, 1 for disjoint ones.

    ½·Σ_k |p(k) − q(k)| of each row (and coordinate of y), exact for classes. For numbers it is
    ½·∫|p − q| dy of the two mixtures, computed as ½·Σ |ΔF_p − ΔF_q| over two thousand cells with
    about equal mass: a lower bound, exact if p − q has one sign in each cell, and within 1e-3.

    Args:
        a: predictions of B rows.
        b: other predictions of the same rows.

    Raises:
        ValueError: if the predictions are not of the same rows, or their likelihood has no
            distribution function.
    """
    return float(row_total_variation(a, b).mean())


@torch.no_grad()
def row_total_variation(a: Predictive, b: Predictive) -> Tensor:
    """Compute the total variation distance of each row, the mean over the coordinates of y.

    Args:
        a: predictions of B rows.
        b: other predictions of the same rows.

    Returns:
        Distances (B,) in float64; see ``total_variation``.

    Raises:
        ValueError: as of ``total_variation``.
    """
    _check_same_targets(a, b)
    if a.likelihood.support == "classes":
        p = a.probabilities.detach().double()
        q = b.probabilities.detach().double()
        distances = 0.5 * (p - q.to(p.device)).abs().sum(-1)
        return distances.reshape(len(distances), -1).mean(1)
    for predictive in (a, b):
        if not predictive.likelihood.overrides("cdf"):
            name = type(predictive.likelihood).__name__
            raise ValueError(
                f"total_variation needs P(Y ≤ y), and {name} has no cdf of its own: give it one"
            )
    outputs = zip(a.outputs.split(ROWS, 1), b.outputs.split(ROWS, 1), strict=True)
    distances = torch.cat(
        [
            _integrate_difference(Predictive(a.likelihood, f), Predictive(b.likelihood, g))
            for f, g in outputs
        ]
    )
    return distances.reshape(len(distances), -1).mean(1)


def _integrate_difference(a: Predictive, b: Predictive) -> Tensor:
    """Return ½·∫|p − q| dy of every coordinate: (B, *event)."""
    device = a.outputs.device
    quantiles = torch.cat([_quantiles(a).to(device), _quantiles(b).to(device)])
    coarse = quantiles.sort(0).values  # (2·COARSE_EDGES, B, *event)
    between = [torch.lerp(coarse[:-1], coarse[1:], step) for step in FINE_STEPS]
    edges = torch.cat((torch.stack(between, 1).flatten(0, 1), coarse[-1:]))
    p = _mixture_cdf(a, edges)
    q = _mixture_cdf(b, edges.to(b.outputs.device))
    gap = p - q.to(p.device)
    zero_gap = torch.zeros_like(gap[:1])  # F_p − F_q at ±∞
    return 0.5 * torch.cat((zero_gap, gap, zero_gap)).diff(dim=0).abs().sum(0)


def _check_same_targets(a: Predictive, b: Predictive) -> None:
    """Raise a ValueError unless both predict the same kind of y for the same rows."""
    if a.likelihood.support != b.likelihood.support:
        names = [f"{type(p.likelihood).__name__} ({p.likelihood.support})" for p in (a, b)]
        raise ValueError(
            "two predictions of the same y have one kind of likelihood, "
            f"got {names[0]} and {names[1]}"
        )
    is_class = a.likelihood.support == "classes"
    shapes = [tuple((p.probabilities if is_class else p.mean).shape) for p in (a, b)]
    if shapes[0] != shapes[1] or not shapes[0][0]:
        axes = "rows and coordinates and classes" if is_class else "rows and coordinates"
        raise ValueError(
            f"two predictions of the same y have the same {axes}, got {shapes[0]} and {shapes[1]}; "
            "predict the same x"
        )


def _quantiles(predictive: Predictive) -> Tensor:
    """Return quantiles of y with about equal mass in between: (COARSE_EDGES, B, *event).

    The first and the last one are the extremes of the draws.
    """
    draws = predictive.sample(SUPPORT_DRAWS, seed=0).double().sort(0).values
    index = torch.linspace(0, SUPPORT_DRAWS - 1, COARSE_EDGES, device=draws.device)
    return draws[index.round().long()]


def _mixture_cdf(predictive: Predictive, y: Tensor) -> Tensor:
    """Return P(Y_i ≤ y_i) of the mixture at K values: (K, B, *event)."""
    f = predictive.outputs.double()
    if predictive.likelihood.needs_all_samples:
        return predictive.likelihood.cdf(f.unsqueeze(1), y).mean(0)
    return reduce(torch.add, (predictive.likelihood.cdf(output, y) for output in f)) / len(f)
