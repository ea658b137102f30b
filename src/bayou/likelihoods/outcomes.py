"""Finitely many values of y that stand for all, by which expectations over y are sums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bayou.likelihoods.base import BoundLikelihood
from bayou.likelihoods.discrete import FiniteLikelihood

COARSE_QUANTILES = 17  # of the mixture, the ends of intervals of y
INTERVAL_CELLS = 32  # of equal width in each of these
CELLS = (COARSE_QUANTILES - 1) * INTERVAL_CELLS
TAIL = 1e-6  # probability beyond the first and the last quantile
MAX_COUNTS = 4096  # counts that are summed one by one; of more, several share a cell


@final
@dataclass(frozen=True, eq=False)
class Outcomes:
    """Finitely many values of y for every row, with their probabilities.

    Args:
        likelihood: p(y | f).
        f: outputs of some rows, (S, b, *out).
        functions: the same as an average over functions: a likelihood and outputs (F, b, *out).
        values: K values of y for each of the n coordinates, (K, n).
        probabilities: of these values, (K, n).
        by_function: given each function, (F, K, n).
    """

    likelihood: BoundLikelihood
    f: Tensor
    functions: tuple[BoundLikelihood, Tensor]
    values: Tensor
    probabilities: Tensor
    by_function: Tensor


def outcomes_of(likelihood: BoundLikelihood, f: Tensor, functions: int) -> Outcomes:
    """Return the values of y that the expectations of some rows sum over.

    Args:
        likelihood: p(y | f).
        f: outputs, (S, b, *out).
        functions: how many functions stand for each output of a closed form; 0 for none.
    """
    pair = likelihood.functions(f, functions) if functions else (likelihood, f)
    if isinstance(likelihood, FiniteLikelihood):
        pmf = likelihood.log_pmf(f).exp().movedim(-1, 1).flatten(2)
        numbers = torch.arange(pmf.shape[1], device=f.device).to(f.dtype)
        values = numbers.unsqueeze(-1).expand(-1, pmf.shape[-1])
        return Outcomes(likelihood, f, pair, values, pmf.mean(0), pmf)
    if likelihood.support == "counts":
        edges = _count_edges(likelihood, f)  # the cell (low, high] has the counts low + 1 .. high
        values = (edges[1:] + edges[:-1] + 1) / 2
    else:
        edges = _edges(likelihood, f)
        values = (edges[1:] + edges[:-1]) / 2
    by_function = _cell_probabilities(*pair, edges)
    probabilities = by_function.mean(0)
    if functions:
        probabilities = _cell_probabilities(likelihood, f, edges).mean(0)
    return Outcomes(likelihood, f, pair, values.flatten(1), probabilities, by_function)


def _cell_probabilities(likelihood: BoundLikelihood, f: Tensor, edges: Tensor) -> Tensor:
    """Compute the probabilities of cells of y; the first and the last extend to infinity."""
    inner = likelihood.cdf(f.unsqueeze(1), edges[1:-1]).flatten(2)
    start = torch.zeros_like(inner[:, :1])
    cumulative = torch.cat((start, inner, start + 1), 1)
    return cumulative.diff(dim=1).clamp_min(0.0)


def _edges(likelihood: BoundLikelihood, f: Tensor) -> Tensor:
    """Return the ends of cells of a real y, narrow where the mixture has its mass: (K + 1, ...)."""
    last_logit = math.log(1 / TAIL - 1)
    logits = torch.linspace(-last_logit, last_logit, COARSE_QUANTILES, dtype=torch.float64)
    levels = logits.sigmoid().tolist()
    knots = torch.stack([likelihood.mixture_quantile(f, level) for level in levels])
    steps = torch.arange(INTERVAL_CELLS, dtype=knots.dtype, device=knots.device) / INTERVAL_CELLS
    steps = steps.reshape(1, -1, *[1] * (knots.ndim - 1))
    inner = knots[:-1].unsqueeze(1) + steps * knots.diff(dim=0).unsqueeze(1)
    return torch.cat((inner.flatten(0, 1), knots[-1:]))


def _count_edges(likelihood: BoundLikelihood, f: Tensor) -> Tensor:
    """Return the ends of cells of counts, each with one count where there are not too many."""
    largest = likelihood.mixture_quantile(f, 1 - TAIL).double()  # (b, *event)
    width = max(1, math.ceil((float(largest.max()) + 1) / MAX_COUNTS))
    last = math.ceil((float(largest.max()) + 1) / width)
    ends = width * torch.arange(last + 1, dtype=f.dtype, device=f.device) - 1
    return ends.reshape(-1, *[1] * largest.ndim).expand(-1, *largest.shape)
