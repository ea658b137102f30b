"""Averages, roots and integrals over a mixture 1/S Σ_s p(y | f_s), for outputs f (S, B, ...)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce

import torch
from torch import Tensor

CHUNK = 1 << 22  # numbers held at a time beside the outputs
SUM_NUMBERS = 1 << 16  # numbers computed together
KNOTS = 160  # at most so many cells + 1 in a quadrature over y
NODES = (
    (-0.8611363115940526, 0.3478548451374538),
    (-0.3399810435848563, 0.6521451548625461),
)  # Gauss-Legendre, 4


def chunks(f: Tensor) -> Iterable[Tensor]:
    """A few samples at a time; all of them in a compiled graph, where sizes are symbols."""
    return (f,) if torch.compiler.is_compiling() else f.split(max(1, CHUNK // max(1, f[0].numel())))


def average(function: Callable[[Tensor], Tensor], f: Tensor) -> Tensor:
    """1/S Σ_s function(f_s), a chunk of samples at a time."""
    return reduce(torch.add, (function(part).sum(0) for part in chunks(f))) / len(f)


def by_rows(function: Callable[[Tensor], Tensor], f: Tensor, numbers: int) -> Tensor:
    """function(f), (B, ...), a few rows at a time; ``numbers``: the memory for each entry of the
    output of a row.
    """
    if torch.compiler.is_compiling():
        return function(f)
    return torch.cat(
        [function(part) for part in f.split(max(1, CHUNK // (f.shape[2:].numel() * numbers)), 1)]
    )


def entr(p: Tensor) -> Tensor:
    """−p·log p; at p = 0 the value and the gradient are 0."""
    return torch.special.entr(p.clamp_min(torch.finfo(p.dtype).tiny))


def density(pointwise: Callable[[Tensor, Tensor], Tensor], f: Tensor, y: Tensor) -> Tensor:
    """1/S Σ_s p(y_i | f_s) at K points: (S, B, *out), (K, B, *event) -> (K, B, *event)."""
    several = (
        len(f) if torch.compiler.is_compiling() else max(1, SUM_NUMBERS // max(1, y.numel()))
    )  # samples at a time
    return reduce(
        torch.add, (pointwise(part.unsqueeze(1), y).exp().sum(0) for part in f.split(several))
    ) / len(f)


def spread_knots(location: Tensor, scale: Tensor, z: Iterable[float]) -> Tensor:
    """location + scale·z of all components, in order: (S, B, *event) -> (J·S, B, *event)."""
    points = location.new_tensor(tuple(z)).reshape(-1, *[1] * location.ndim)
    return (location + scale * points).flatten(0, 1).sort(0).values


def entropy_integral(
    pointwise: Callable[[Tensor, Tensor], Tensor], f: Tensor, knots: Tensor
) -> Tensor:
    """−∫ p log p for every coordinate, by 4 Gauss-Legendre nodes in each cell between knots: (B,
    *event).

    Every component places knots over its mass; they are thinned to a fixed number.
    """
    if len(knots) > KNOTS:
        knots = knots[torch.linspace(0, len(knots) - 1, KNOTS, device=f.device).round().long()]
    middle, half = (knots[1:] + knots[:-1]) / 2, (knots[1:] - knots[:-1]) / 2
    nodes = (*NODES, *((-node, weight) for node, weight in NODES))
    parts = (
        (weight * half * entr(density(pointwise, f, middle + half * node))).sum(0)
        for node, weight in nodes
    )
    return reduce(torch.add, parts)


def widen(
    mass: Callable[[Tensor], Tensor],
    q: float | Tensor,
    low: Tensor,
    high: Tensor,
    counts: bool = False,
) -> tuple[Tensor, Tensor]:
    """A bracket low < high moved and doubled until mass(low) < q ≤ mass(high); that of counts has a
    low of −1.
    """
    for _ in range(128):
        short = mass(high) < q
        over = torch.zeros_like(short) if counts else mass(low) >= q
        if not bool((short | over).any()):
            break
        width = 2 * (high - low)
        low, high = (
            torch.where(short, high, torch.where(over, low - width, low)),
            torch.where(over, low, torch.where(short, high + width, high)),
        )
    return low, high


def invert(
    mass: Callable[[Tensor], Tensor],
    q: float | Tensor,
    low: Tensor,
    high: Tensor,
    slope: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The smallest y with mass(y) ≥ q, an increasing function, between low and high.

    With its ``slope`` y is real: Newton steps, and bisection where a step does not halve. Without
    it y is a count.
    """
    reach = 4 * torch.finfo(low.dtype).eps * torch.maximum(low.abs(), high.abs())
    y, last = low + (high - low) / 2, high - low
    for _ in range(200):
        y = y if slope else y.floor().clamp_min(0.0)
        gap = mass(y) - q
        low, high = torch.where(gap < 0, y, low), torch.where(gap < 0, high, y)
        middle, done = low + (high - low) / 2, high - low <= (reach if slope else 1)
        if slope:
            newton = y - gap / slope(y)
            step, inside = (
                (newton - y).abs(),
                (newton >= low) & (newton <= high),
            )  # false for a slope of 0
            done = done | (inside & (step <= reach))
            good = inside & (done | (step <= last / 2))
            middle, last = torch.where(good, newton, middle), torch.where(good, step, high - low)
        y = middle
        if bool(done.all()):
            break
    return y if slope else high
