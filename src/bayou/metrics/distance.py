"""Distances between two predictions, such as those of a method and of a long HMC run.

Both are metrics of the competition "Approximate inference in Bayesian deep learning" (Wilson et
al., NeurIPS 2021).
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from bayou.predictive import Predictive

SUPPORT_DRAWS, EDGES = (
    4096,
    256,
)  # draws of a continuous y for its range; quantiles of them with equal mass in between
ROWS = 256  # at a time, of a continuous y


def agreement(a: Predictive, b: Predictive) -> float:
    """The fraction of rows (coordinates of rows) whose most probable class is the same in both."""
    _check(a, b)
    if a.likelihood.support != "classes":
        name = type(a.likelihood).__name__
        raise ValueError(
            f"agreement is for classes (Categorical, Bernoulli), got {name}; use total_variation"
        )
    same = a.probabilities.argmax(-1) == b.probabilities.to(a.outputs.device).argmax(-1)
    return float(same.double().mean())


@torch.no_grad()
def total_variation(a: Predictive, b: Predictive) -> float:
    """mean ½·Σ_k |p(k) − q(k)| over rows (and coordinates of y): 0 for equal predictions, 1 for
    disjoint ones.

    Exact for classes. For numbers it is ½·∫|p − q| dy of the two mixtures, computed as ½·Σ |ΔF_p −
    ΔF_q| over two thousand cells with about equal mass: a lower bound, exact if p − q has one sign
    in each cell, and within 1e-3.
    """
    _check(a, b)
    if a.likelihood.support == "classes":
        p, q = (one.probabilities.detach().double() for one in (a, b))
        return 0.5 * float((p - q.to(p.device)).abs().sum(-1).mean())
    for one in (a, b):
        if not one.likelihood.overrides("cdf"):
            name = type(one.likelihood).__name__
            raise ValueError(
                f"total_variation needs P(Y ≤ y), and {name} has no cdf of its own: give it one"
            )
    rows = zip(a.outputs.split(ROWS, 1), b.outputs.split(ROWS, 1), strict=True)
    parts = [_integrals(Predictive(a.likelihood, f), Predictive(b.likelihood, g)) for f, g in rows]
    return float(torch.cat(parts).mean())


def _integrals(a: Predictive, b: Predictive) -> Tensor:
    """½·∫|p − q| dy of every coordinate: (B, *event)."""
    coarse = (
        torch.cat([_edges(one).to(a.outputs.device) for one in (a, b)]).sort(0).values
    )  # (2·EDGES, B, *event)
    between = [torch.lerp(coarse[:-1], coarse[1:], t) for t in (0.0, 0.25, 0.5, 0.75)]
    edges = torch.cat((torch.stack(between, 1).flatten(0, 1), coarse[-1:]))
    p, q = (_cdf(one, edges.to(one.outputs.device)) for one in (a, b))
    gap = p - q.to(p.device)
    nothing = torch.zeros_like(gap[:1])  # F_p − F_q at ±∞
    return 0.5 * torch.cat((nothing, gap, nothing)).diff(dim=0).abs().sum(0)


def _check(a: Predictive, b: Predictive) -> None:
    """Raise a ValueError unless both predict the same kind of y."""
    kinds = [f"{type(one.likelihood).__name__} ({one.likelihood.support})" for one in (a, b)]
    if a.likelihood.support != b.likelihood.support:
        raise ValueError(
            f"two predictions of the same y have one kind of likelihood, got {kinds[0]} and {kinds[1]}"
        )
    classes = a.likelihood.support == "classes"
    shapes = [tuple((one.probabilities if classes else one.mean).shape) for one in (a, b)]
    if shapes[0] != shapes[1] or not shapes[0][0]:
        raise ValueError(
            f"two predictions of the same y have the same rows and coordinates{' and classes' if classes else ''}, got "
            f"{shapes[0]} and {shapes[1]}; predict the same x"
        )


def _edges(predictive: Predictive) -> Tensor:
    """Quantiles of y with about equal mass between them, and the extremes: (EDGES, B, *event)."""
    drawn = predictive.sample(SUPPORT_DRAWS, seed=0).double().sort(0).values
    return drawn[torch.linspace(0, SUPPORT_DRAWS - 1, EDGES, device=drawn.device).round().long()]


def _cdf(predictive: Predictive, y: Tensor) -> Tensor:
    """P(Y_i ≤ y_i) of the mixture at K values: (K, B, *event)."""
    f = predictive.outputs.double()
    return reduce(torch.add, (predictive.likelihood.cdf(output, y) for output in f)) / len(f)
