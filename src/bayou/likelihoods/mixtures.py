"""Averages, roots and integrals over a mixture 1/S Σ_s p(y | f_s), for outputs f (S, B, ...)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce

import torch
from torch import Tensor

CHUNK = 1 << 22  # numbers held at a time beside the outputs
SUM_NUMBERS = 1 << 16  # numbers computed together
KNOTS = 160  # maximum cells + 1 in a quadrature over y
MAX_DOUBLINGS = 128  # of a bracket
MAX_ROOT_STEPS = 200  # of Newton's method or bisection
# Node and weight of half of a Gauss-Legendre rule with 4 nodes.
NODES = (
    (-0.8611363115940526, 0.3478548451374538),
    (-0.3399810435848563, 0.6521451548625461),
)


def chunks(f: Tensor) -> Iterable[Tensor]:
    """Split a few samples off at a time; all of them in a compiled graph, where sizes are symbols.

    Args:
        f: outputs, (S, B, ...).
    """
    if torch.compiler.is_compiling():
        return (f,)
    return f.split(max(1, CHUNK // max(1, f[0].numel())))


def average(function: Callable[[Tensor], Tensor], f: Tensor) -> Tensor:
    """Compute 1/S Σ_s function(f_s), a chunk of samples at a time.

    Args:
        function: maps outputs (s, B, ...) to values with a leading axis of s samples.
        f: outputs, (S, B, ...).
    """
    return reduce(torch.add, (function(chunk).sum(0) for chunk in chunks(f))) / len(f)


def by_rows(function: Callable[[Tensor], Tensor], f: Tensor, numbers: int) -> Tensor:
    """Compute function(f), (B, ...), a few rows at a time.

    Args:
        function: maps outputs (S, b, ...) to values (b, ...).
        f: outputs, (S, B, ...).
        numbers: the numbers in memory for each entry of the output of a row.
    """
    if torch.compiler.is_compiling():
        return function(f)
    rows = max(1, CHUNK // (f.shape[2:].numel() * numbers))
    return torch.cat([function(block) for block in f.split(rows, 1)])


def entr(p: Tensor) -> Tensor:
    """Compute −p·log p; at p = 0 the value and the gradient are 0.

    Args:
        p: probabilities or densities.
    """
    return torch.special.entr(p.clamp_min(torch.finfo(p.dtype).tiny))


def density(pointwise: Callable[[Tensor, Tensor], Tensor], f: Tensor, y: Tensor) -> Tensor:
    """Compute 1/S Σ_s p(y_i | f_s) at K points: (K, B, *event).

    Args:
        pointwise: computes log p(y_i | f) of (f, y).
        f: outputs, (S, B, *out).
        y: points, (K, B, *event).
    """
    samples = len(f)
    if not torch.compiler.is_compiling():
        samples = max(1, SUM_NUMBERS // max(1, y.numel()))
    sums = (pointwise(block.unsqueeze(1), y).exp().sum(0) for block in f.split(samples))
    return reduce(torch.add, sums) / len(f)


def spread_knots(location: Tensor, scale: Tensor, z: Iterable[float]) -> Tensor:
    """Return location + scale·z of all components, in order: (J·S, B, *event).

    Args:
        location: locations, (S, B, *event).
        scale: scales, which broadcast to the locations.
        z: J knots of a density of unit scale.
    """
    points = location.new_tensor(tuple(z)).reshape(-1, *[1] * location.ndim)
    return (location + scale * points).flatten(0, 1).sort(0).values


def entropy_integral(
    pointwise: Callable[[Tensor, Tensor], Tensor], f: Tensor, knots: Tensor
) -> Tensor:
    """Compute −∫ p log p for every coordinate: (B, *event).

    Each cell between knots has 4 Gauss-Legendre nodes. Every component places knots over its mass;
    they are thinned to a fixed number.

    Args:
        pointwise: computes log p(y_i | f) of (f, y).
        f: outputs, (S, B, *out).
        knots: ends of the cells in order, (J, B, *event).
    """
    if len(knots) > KNOTS:
        knots = knots[torch.linspace(0, len(knots) - 1, KNOTS, device=f.device).round().long()]
    middle = (knots[1:] + knots[:-1]) / 2
    half = (knots[1:] - knots[:-1]) / 2
    nodes = (*NODES, *((-node, weight) for node, weight in NODES))
    terms = (
        (weight * half * entr(density(pointwise, f, middle + half * node))).sum(0)
        for node, weight in nodes
    )
    return reduce(torch.add, terms)


def widen(
    mass: Callable[[Tensor], Tensor],
    q: float | Tensor,
    low: Tensor,
    high: Tensor,
    counts: bool = False,
) -> tuple[Tensor, Tensor]:
    """Move and double a bracket low < high until mass(low) < q ≤ mass(high).

    Args:
        mass: an increasing function, the cdf.
        q: the level.
        low: lower ends.
        high: upper ends.
        counts: whether y is a count, whose bracket has a low of −1.
    """
    for _ in range(MAX_DOUBLINGS):
        is_short = mass(high) < q
        is_over = torch.zeros_like(is_short) if counts else mass(low) >= q
        if not bool((is_short | is_over).any()):
            break
        width = 2 * (high - low)
        new_low = torch.where(is_short, high, torch.where(is_over, low - width, low))
        new_high = torch.where(is_over, low, torch.where(is_short, high + width, high))
        low = new_low
        high = new_high
    return low, high


def invert(
    mass: Callable[[Tensor], Tensor],
    q: float | Tensor,
    low: Tensor,
    high: Tensor,
    slope: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the smallest y between low and high with mass(y) ≥ q.

    With a ``slope`` y is real: Newton steps, and bisection where a step does not halve. Without
    it y is a count.

    Args:
        mass: an increasing function, the cdf.
        q: the level.
        low: lower ends, with mass(low) < q.
        high: upper ends, with mass(high) ≥ q.
        slope: the derivative of mass, for a real y.
    """
    tolerance = 4 * torch.finfo(low.dtype).eps * torch.maximum(low.abs(), high.abs())
    y = low + (high - low) / 2
    last_step = high - low
    for _ in range(MAX_ROOT_STEPS):
        y = y if slope else y.floor().clamp_min(0.0)
        gap = mass(y) - q
        low = torch.where(gap < 0, y, low)
        high = torch.where(gap < 0, high, y)
        middle = low + (high - low) / 2
        is_done = high - low <= (tolerance if slope else 1)
        if slope:
            newton = y - gap / slope(y)
            step = (newton - y).abs()
            is_inside = (newton >= low) & (newton <= high)  # false for a slope of 0
            is_done = is_done | (is_inside & (step <= tolerance))
            is_good = is_inside & (is_done | (step <= last_step / 2))
            middle = torch.where(is_good, newton, middle)
            last_step = torch.where(is_good, step, high - low)
        y = middle
        if bool(is_done.all()):
            break
    return y if slope else high


def crps_integral(
    cdf: Callable[[Tensor, Tensor], Tensor],
    f: Tensor,
    y: Tensor,
    log_knots: Tensor,
    is_observed: Tensor | None = None,
) -> Tensor:
    """Compute ∫ (F(t) − 1[t ≥ y])² dt of a mixture of positive y for every coordinate: (B, *event).

    It is integrated over log t, each cell between knots with 4 Gauss-Legendre nodes. A target that
    was censored at y counts up to y only: ∫_0^y F(t)² dt (Avati et al. 2020).

    Args:
        cdf: computes P(Y ≤ t | f) of (f, t).
        f: outputs, (S, B, *out).
        y: targets, (B, *event).
        log_knots: ends of the cells in order, which span the mass of log t: (J, B, *event).
        is_observed: which targets are not censored, (B, *event); None for all.
    """
    if len(log_knots) > KNOTS:
        index = torch.linspace(0, len(log_knots) - 1, KNOTS, device=f.device).round().long()
        log_knots = log_knots[index]
    log_y = y.to(f.dtype).log()
    knots = torch.cat((log_knots, log_y.unsqueeze(0))).sort(0).values
    total = torch.zeros_like(log_y)
    for side in ("below", "above"):
        ends = knots.clamp(max=log_y) if side == "below" else knots.clamp(min=log_y)
        middle = (ends[1:] + ends[:-1]) / 2
        half = (ends[1:] - ends[:-1]) / 2
        part = torch.zeros_like(log_y)
        for node, weight in (*NODES, *((-node, weight) for node, weight in NODES)):
            t = (middle + half * node).exp()
            mass = mixture_cdf(cdf, f, t)
            height = mass if side == "below" else 1 - mass
            part = part + (weight * half * t * height.square()).sum(0)
        if side == "above" and is_observed is not None:
            part = torch.where(is_observed, part, 0.0)
        total = total + part
    return total


def mixture_cdf(cdf: Callable[[Tensor, Tensor], Tensor], f: Tensor, y: Tensor) -> Tensor:
    """Compute 1/S Σ_s P(Y ≤ y | f_s) at K points, a few samples at a time: (K, B, *event).

    Args:
        cdf: computes P(Y ≤ y | f) of (f, y).
        f: outputs, (S, B, *out).
        y: points, (K, B, *event).
    """
    samples = max(1, SUM_NUMBERS // max(1, y.numel()))
    sums = (cdf(block.unsqueeze(1), y).sum(0) for block in f.split(samples))
    return reduce(torch.add, sums) / len(f)


def crps_sum(cdf: Callable[[Tensor, Tensor], Tensor], f: Tensor, y: Tensor, last: int) -> Tensor:
    """Compute Σ_k (F(k) − 1[k ≥ y])² of a mixture of counts or ordered classes: (B, *event).

    This is the ranked probability score (Epstein 1969).

    Args:
        cdf: computes P(Y ≤ k | f) of (f, k).
        f: outputs, (S, B, *out).
        y: targets, (B, *event).
        last: the count up to which is summed, above all of y and of the mass.
    """
    total = torch.zeros_like(y, dtype=f.dtype)
    block_size = max(1, SUM_NUMBERS // max(1, y.numel()))
    for block in torch.arange(last + 1, device=f.device).split(block_size):
        k = block.to(f.dtype).reshape(-1, *[1] * y.ndim).expand(-1, *y.shape)
        reached = (k >= y).to(f.dtype)
        total = total + (mixture_cdf(cdf, f, k) - reached).square().sum(0)
    return total
