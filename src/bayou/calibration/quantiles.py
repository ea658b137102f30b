"""An increasing map of the quantile levels of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from bayou.calibration.maps import CalibrationMap
from bayou.likelihoods import BoundLikelihood
from bayou.likelihoods.piecewise import slopes
from bayou.likelihoods.predictive import Predictive
from bayou.likelihoods.recalibrated import BoundRecalibrated

CELLS = (1, 2, 4, 5, 8, 10, 16, 20)  # of equal width, among which held-out rows choose
PRIOR_COUNTS = (1.0, 3.0, 10.0, 30.0, 100.0)  # rows that the identity counts for, likewise


@final
@dataclass(frozen=True, eq=False, repr=False)
class QuantileMap(CalibrationMap):
    """P(Y ≤ y) = G(F(y)) with an increasing piecewise-linear G (after Kuleshov et al. 2018).

    G is the cdf of the levels F(y_n) of held-out rows, so that intervals have their coverage. The
    isotonic regression of Kuleshov has steps, for which no density exists: here G has a slope in
    each of K cells of equal width, (n_k + a/K)/(n + a)·K for n_k of n levels inside. K and a have
    the highest likelihood of each row given the others, which is exact without fits; K = 1 changes
    nothing. Coordinates of y share G.

    Args:
        knots: levels from 0 to 1, increasing, (K + 1,).
        values: G at the knots, increasing from 0 to 1, (K + 1,).

    Raises:
        ValueError: for tensors of other shapes, or that do not increase from 0 to 1.
    """

    knots: Tensor
    values: Tensor
    name = "isotonic"
    key = "quantiles"
    support = "real"
    is_traceable = False

    def __post_init__(self) -> None:
        for name, tensor in (("knots", self.knots), ("values", self.values)):
            increases = tensor.ndim == 1 and len(tensor) > 1 and bool((tensor.diff() > 0).all())
            if not increases or float(tensor[0]) != 0 or float(tensor[-1]) != 1:
                raise ValueError(
                    f"QuantileMap needs {name} that increase from 0 to 1, got {tensor.tolist()}"
                )
        if self.knots.shape != self.values.shape:
            raise ValueError(
                f"QuantileMap has {len(self.knots)} knots and {len(self.values)} values; give as "
                "many"
            )

    def apply(self, likelihood: BoundLikelihood, outputs: Tensor) -> tuple[BoundLikelihood, Tensor]:
        return BoundRecalibrated(likelihood, self.knots.double(), self.values.double()), outputs

    @property
    def slopes(self) -> Tensor:
        """The slope of G in every cell, (K,): the factors of the density."""
        return slopes(self.knots, self.values)

    @classmethod
    def fit(cls, p: Predictive, y: Tensor) -> Self:
        identity = torch.tensor([0.0, 1.0], dtype=torch.float64)
        likelihood = BoundRecalibrated(p.likelihood, identity, identity)  # raises if there is none
        likelihood.validate(p.outputs.shape[1:], y)
        y = y.to(p.outputs.device)
        values, is_known = p.likelihood.labels(y)
        if values.shape != y.shape or not bool(is_known.all()):
            raise ValueError(
                f"{type(p.likelihood).__name__} has targets with more than their values, whose "
                "levels are not known; use map='temperature'"
            )
        if not len(y):
            raise ValueError("there are no rows to calibrate by")
        levels = p.cdf(y).detach().double().flatten().cpu()
        if bool(levels.isnan().any()):
            raise ValueError("predictions are NaN: there is nothing to calibrate by")
        cells, prior_count = max(
            ((cells, count) for cells in CELLS for count in PRIOR_COUNTS),
            key=lambda settings: _left_out_log_likelihood(levels, *settings),
        )
        masses = _cell_masses(levels, cells, prior_count)
        knots = torch.linspace(0, 1, cells + 1, dtype=torch.float64)
        sums = masses.cumsum(0)
        return cls(knots, torch.cat((knots[:1], sums[:-1], knots[-1:])))


def _count_levels(levels: Tensor, cells: int) -> Tensor:
    """Return the number of levels in each cell of equal width, (K,)."""
    index = (levels * cells).long().clamp(0, cells - 1)
    return torch.bincount(index, minlength=cells).double()


def _cell_masses(levels: Tensor, cells: int, prior_count: float) -> Tensor:
    """Return (n_k + a/K)/(n + a) for each of K cells."""
    counts = _count_levels(levels, cells)
    return (counts + prior_count / cells) / (len(levels) + prior_count)


def _left_out_log_likelihood(levels: Tensor, cells: int, prior_count: float) -> float:
    """Return Σ_i log g(u_i), g fitted to all levels but u_i."""
    counts = _count_levels(levels, cells)
    density = cells * (counts - 1 + prior_count / cells) / (len(levels) - 1 + prior_count)
    has_levels = counts > 0
    if cells == 1:
        return 0.0
    terms = counts[has_levels] * density[has_levels].clamp_min(1e-300).log()
    return float(terms.sum()) if len(terms) else -math.inf
