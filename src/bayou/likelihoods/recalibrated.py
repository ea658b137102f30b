"""Continuous y whose quantile levels are mapped by an increasing function."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from bayou.core.rng import Seed
from bayou.likelihoods import mixtures
from bayou.likelihoods.base import BoundLikelihood
from bayou.likelihoods.mixtures import average
from bayou.likelihoods.piecewise import find_cell, interpolate, slopes

# Levels whose quantiles end the cells of integrals over y, beside the knots of the map.
LOWER_LEVELS = (1e-8, 1e-6, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.35)
SUBCELLS = 4  # between two of these quantiles
MIN_LEVEL_GAP = 1e-9  # between two levels


@final
class BoundRecalibrated(BoundLikelihood):
    """P(Y ≤ y) = G(F(y)), F the cdf of a mixture 1/S Σ_s p(y | f_s), G increasing.

    The density is G'(F(y))·p(y), and the quantile at q is that of the mixture at G⁻¹(q). G is
    piecewise linear, so that densities and quantiles are exact. Y has the distribution of T(Y₀) for
    Y₀ from the mixture, T = F⁻¹∘G⁻¹∘F in each coordinate: coordinates keep their dependence, and
    the mutual information of y and f does not change. Mean, variance and entropy are integrals over
    y. The epistemic share of the variance is that of the mixture.

    All methods take f of all S samples, which determine F; values that belong to the mixture are
    the same for each sample.

    Args:
        of: p(y | f), continuous, with a cdf.
        knots: levels from 0 to 1, increasing, (K + 1,) in float64.
        values: G at the knots, increasing from 0 to 1, (K + 1,) in float64.

    Raises:
        ValueError: if y has no density or more than its values, or its likelihood has no cdf.
    """

    needs_all_samples = True

    def __init__(self, of: BoundLikelihood, knots: Tensor, values: Tensor) -> None:
        super().__init__()
        if of.support != "real" or not of.overrides("cdf"):
            raise ValueError(
                f"{type(of).__name__} has no density with a cdf, which a map of quantiles needs; "
                "use a temperature, or bayou.conformal"
            )
        self.of = of
        self.knots = knots
        self.values = values
        self.is_linear = of.is_linear_in_y

    @property
    def is_linear_in_y(self) -> bool:  # type: ignore[override]
        """Return whether a linear regression of y is a fair baseline."""
        return self.is_linear

    def _with(
        self, pair: tuple[BoundLikelihood, Tensor] | None
    ) -> tuple[BoundLikelihood, Tensor] | None:
        """Return the map of another likelihood and its outputs."""
        return None if pair is None else (self._of(pair[0]), pair[1])

    def _of(self, likelihood: BoundLikelihood) -> BoundRecalibrated:
        """Return the map of another likelihood."""
        return BoundRecalibrated(likelihood, self.knots, self.values)

    # --- levels ---

    def map_levels(self, u: Tensor) -> Tensor:
        """Compute G(u).

        Args:
            u: levels from 0 to 1.
        """
        return interpolate(u, self.knots, self.values)

    def unmap_levels(self, v: Tensor) -> Tensor:
        """Compute G⁻¹(v).

        Args:
            v: levels from 0 to 1.
        """
        return interpolate(v, self.values, self.knots)

    def log_slope(self, u: Tensor) -> Tensor:
        """Compute log G'(u).

        Args:
            u: levels from 0 to 1.
        """
        log_slopes = slopes(self.knots, self.values).log().to(u)
        return log_slopes[find_cell(u, self.knots.to(u))]

    # --- the mixture ---

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        return self.of.target_shape(f_shape)

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        self.of._validate_values(f_shape, y)

    def for_scores(self) -> BoundLikelihood:
        return self._of(self.of.for_scores())

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute log p(y_i) of the mixture for every coordinate, the same for each sample.

        Args:
            f: outputs of all samples, (S, B, *out).
            y: targets, (B, *event).
        """
        log_density = self.of.pointwise(f, y).logsumexp(0) - math.log(len(f))
        u = average(lambda f: self.of.cdf(f, y), f)
        return (log_density + self.log_slope(u)).expand(len(f), *log_density.shape)

    def log_prob(self, f: Tensor, y: Tensor, variance: Tensor | None = None) -> Tensor:
        """Compute log p(y) of the mixture, the same for each sample: (S, B).

        With several coordinates it is the density of T(Y₀), log p₀(T⁻¹(y)) + Σ_i log dT_i⁻¹/dy_i.

        Args:
            f: outputs of all samples, (S, B, *out).
            y: targets, (B, *event).
            variance: must be None.

        Raises:
            ValueError: for a variance.
        """
        if variance is not None:
            raise ValueError("a calibrated prediction is no likelihood for a fit")
        log_density = self.pointwise(f, y)[0]
        if y[0].numel() == 1:
            return log_density.reshape(1, len(y)).expand(len(f), -1)
        y = y.to(f.dtype)
        level = self.map_levels(average(lambda f: self.of.cdf(f, y), f))
        with torch.no_grad():
            origin = self._solve(f, level.unsqueeze(0))[0]
        # One Newton step at the root, which has its derivatives.
        slope = self.of.pointwise(f, origin).exp().mean(0)
        origin = origin - (average(lambda f: self.of.cdf(f, origin), f) - level) / slope.detach()
        marginal = self.of.pointwise(f, origin).logsumexp(0) - math.log(len(f))
        joint = self.of.log_prob(f, origin).logsumexp(0) - math.log(len(f))
        total = joint + (log_density - marginal).flatten(1).sum(1)
        return total.expand(len(f), -1)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute P(Y_i ≤ y_i) of the mixture, the same for each sample.

        Args:
            f: outputs of all samples, (S, B, *out), or (S, 1, B, *out) for several y.
            y: values, (B, *event) or (K, B, *event).
        """
        u = self.map_levels(average(lambda f: self.of.cdf(f, y), f))
        return u.expand(len(f), *u.shape)

    def mixture_quantile(self, f: Tensor, q: float) -> Tensor:
        level = torch.tensor(q, dtype=torch.float64)
        return self.of.mixture_quantile(f, float(self.unmap_levels(level)))

    @torch.no_grad()
    def mixture_sample(self, f: Tensor, n: int, seed: Seed = None) -> Tensor:
        y = self.of.mixture_sample(f, n, seed)
        u = mixtures.mixture_cdf(self.of.cdf, f, y)
        return self._solve(f, self.unmap_levels(u), y)

    def _solve(self, f: Tensor, level: Tensor, start: Tensor | None = None) -> Tensor:
        """Return the quantiles of the mixture at K levels of each coordinate, (K, B, *event)."""

        def mass(y: Tensor) -> Tensor:
            return mixtures.mixture_cdf(self.of.cdf, f, y)

        def slope(y: Tensor) -> Tensor:
            return mixtures.density(self.of.pointwise, f, y)

        if start is None:
            start = self.of.mixture_quantile(f, 0.5).unsqueeze(0)
        eps = torch.finfo(f.dtype).eps
        level = level.clamp(torch.finfo(f.dtype).tiny, 1 - eps)
        spread = self.of.mixture_quantile(f, 0.75) - self.of.mixture_quantile(f, 0.25)
        start = start.expand_as(level)
        low, high = mixtures.widen(mass, level, start - spread, start + spread)
        return mixtures.invert(mass, level, low, high, slope)

    # --- moments, as integrals over y ---

    def _ends(self, f: Tensor) -> Tensor:
        """Return ends of cells in which the density is smooth, increasing: (J, B, *event)."""
        upper = [1 - level for level in LOWER_LEVELS]
        levels = sorted({*LOWER_LEVELS, 0.5, *upper, *self.knots[1:-1].tolist()})
        gaps = [b - a > MIN_LEVEL_GAP for a, b in itertools.pairwise(levels)]
        levels = [level for level, keeps in zip(levels, [*gaps, True], strict=True) if keeps]
        ends = torch.stack([self.of.mixture_quantile(f, level) for level in levels])
        steps = torch.arange(SUBCELLS, dtype=f.dtype, device=f.device) / SUBCELLS
        finer = [torch.lerp(ends[:-1], ends[1:], float(step)) for step in steps]
        return torch.cat((torch.stack(finer, 1).flatten(0, 1), ends[-1:]))

    def _nodes(self, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return points y, weights w·p(y) of the mixture, and G'(F(y)): (N, B, *event) each."""
        ends = self._ends(f)
        middle = (ends[1:] + ends[:-1]) / 2
        half = (ends[1:] - ends[:-1]) / 2
        # All nodes of a cell have the slope of its middle: no knot is inside.
        slope = self.log_slope(mixtures.mixture_cdf(self.of.cdf, f, middle)).exp()
        nodes = [*mixtures.NODES, *((-node, weight) for node, weight in mixtures.NODES)]
        points = torch.cat([middle + half * node for node, _ in nodes])
        weights = torch.cat([weight * half for _, weight in nodes])
        mass = weights * mixtures.density(self.of.pointwise, f, points)
        return points, mass, slope.repeat(len(nodes), *[1] * (slope.ndim - 1))

    @torch.no_grad()
    def _moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of the mixture, and the ratio of its standard deviation to that of F."""
        center = average(self.of.mean, f)
        deviation = average(lambda f: (self.of.mean(f) - center).square(), f)
        variance = deviation + average(
            lambda f: self.of.variance(f) + self.of.function_variance(f), f
        )
        y, mass, slope = self._nodes(f)
        distance = y - center
        shift = ((slope - 1) * mass * distance).sum(0)
        change = ((slope - 1) * mass * distance.square()).sum(0)
        ratio = ((variance + change - shift.square()) / variance).clamp_min(0.0).sqrt()
        # Without a variance (a heavy tail) there is no ratio.
        return center + shift, torch.where(variance.isfinite() & (variance > 0), ratio, 1.0)

    def mean(self, f: Tensor) -> Tensor:
        """Compute E[Y] + r·(E[y | f_s] − E[Y₀]) for every sample, r = std[Y]/std[Y₀].

        Args:
            f: outputs of all samples, (S, B, *out).
        """
        mean, ratio = self._moments(f)
        means = self.of.mean(f)
        return mean + ratio * (means - means.mean(0))

    def variance(self, f: Tensor) -> Tensor:
        """Compute r²·Var[y | f_s] for every sample, r = std[Y]/std[Y₀].

        Args:
            f: outputs of all samples, (S, B, *out).
        """
        return self._moments(f)[1].square() * self.of.variance(f)

    def function_variance(self, f: Tensor) -> Tensor | float:
        variance = self.of.function_variance(f)
        if not isinstance(variance, Tensor):
            return variance
        return self._moments(f)[1].square() * variance

    def entropy(self, f: Tensor) -> Tensor:
        """Compute H[y | f_s] + H[Y] − H[Y₀] for every sample.

        Args:
            f: outputs of all samples, (S, B, *out).
        """
        return self.of.entropy(f) + self._entropy_change(f)

    def mixture_entropy(self, f: Tensor) -> Tensor:
        return self.of.mixture_entropy(f) + self._entropy_change(f)

    @torch.no_grad()
    def _entropy_change(self, f: Tensor) -> Tensor:
        """Compute H[Y] − H[Y₀] = −∫ (g·log(g·p) − log p)·p dy: (B, *event)."""
        y, mass, slope = self._nodes(f)
        tiny = torch.finfo(f.dtype).tiny
        log_density = mixtures.density(self.of.pointwise, f, y).clamp_min(tiny).log()
        return -(mass * (slope * slope.log() + (slope - 1) * log_density)).sum(0)

    def mixture_information(self, f: Tensor) -> Tensor:
        return self.of.mixture_information(f)

    @torch.no_grad()
    def mixture_crps(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute ∫ (P(Y ≤ t) − 1[t ≥ y])² dt by quadrature: (B, *event).

        Args:
            f: outputs, (S, B, *out).
            y: targets, (B, *event).
        """
        y = y.to(f.dtype)
        ends = torch.cat((self._ends(f), y.unsqueeze(0))).sort(0).values
        total = torch.zeros_like(y)
        for node, weight in (*mixtures.NODES, *((-node, w) for node, w in mixtures.NODES)):
            half = (ends[1:] - ends[:-1]) / 2
            t = (ends[1:] + ends[:-1]) / 2 + half * node
            level = self.map_levels(mixtures.mixture_cdf(self.of.cdf, f, t))
            gap = torch.where(t < y, level, 1 - level)
            total = total + (weight * half * gap.square()).sum(0)
        return total

    # --- other units ---

    def rescale(
        self, f: Tensor, shift: Tensor, scale: Tensor
    ) -> tuple[BoundLikelihood, Tensor] | None:
        return self._with(self.of.rescale(f, shift, scale))

    def temper(self, f: Tensor, temperature: float) -> tuple[BoundLikelihood, Tensor]:
        likelihood, outputs = self.of.temper(f, temperature)
        return self._of(likelihood), outputs
