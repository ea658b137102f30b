"""Positive numbers: the Gamma and the Weibull distribution."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.constants import LOG_2PI
from bayou.core.rng import Seed
from bayou.likelihoods import mixtures
from bayou.likelihoods.base import BoundLikelihood, Likelihood, positive_mean
from bayou.likelihoods.information import Independent, Information
from bayou.likelihoods.logarithm import check_positive
from bayou.likelihoods.special import log_minus_digamma, stirling_error

EULER = 0.5772156649015329


class Shaped(BoundLikelihood):
    """A likelihood with a log-location f for every y, and one positive parameter, the shape.

    Args:
        log_shape: its logarithm, one number: a buffer or (learned) a parameter.
        learn: whether to learn ``log_shape``.
        unit: the location of y at f = 0.
        is_paired: whether f has a last axis with the output and the log-shape of every y.
    """

    log_shape: Tensor
    is_linear_in_y = False

    def __init__(
        self, log_shape: Tensor, learn: bool = False, unit: float = 1.0, is_paired: bool = False
    ) -> None:
        super().__init__()
        if learn:
            self.log_shape = nn.Parameter(log_shape)
        else:
            self.register_buffer("log_shape", log_shape)
        self.log_unit: float = math.log(unit)
        self.is_paired = is_paired

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        return torch.Size(f_shape[:-1] if self.is_paired else f_shape)

    def log_location_shape(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log of the location of y, in its unit, and the log of the shape.

        Args:
            f: outputs, (..., B, *out).
        """
        if self.is_paired:
            return f[..., 0] + self.log_unit, f[..., 1]
        return f + self.log_unit, self.log_shape

    def per_sample(
        self, outputs: Tensor, parameters: Mapping[str, Tensor]
    ) -> tuple[BoundLikelihood, Tensor]:
        log_shape = parameters["log_shape"].reshape(-1, *[1] * (outputs.ndim - 1)).to(outputs)
        return self._with_shapes(outputs, log_shape)

    def _with_shapes(self, f: Tensor, log_shape: Tensor) -> tuple[BoundLikelihood, Tensor]:
        """Return a likelihood and outputs with these log-shapes."""
        paired = type(self)(self.log_shape.detach(), is_paired=True)
        paired.log_unit = self.log_unit
        return paired, torch.stack((f, log_shape.expand_as(f)), -1)


class PositiveLikelihood(Shaped):
    """A positive y whose logarithm has a density of one form, moved by f."""

    @abstractmethod
    def log_knots(self, log_shape: Tensor) -> Tensor:
        """Return ends of cells that span the mass of log y − log location, (J, ...).

        Args:
            log_shape: log-shapes, of any shape.
        """

    @abstractmethod
    def log_mean(self, f: Tensor) -> Tensor:
        """Compute E[log y | f].

        Args:
            f: outputs, (..., B, *out).
        """

    @abstractmethod
    def log_density(self, f: Tensor, log_y: Tensor) -> Tensor:
        """Compute the log-density of log y, also where y itself is 0 by rounding.

        Args:
            f: outputs, (..., B, *out).
            log_y: values, (B, *event).
        """

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        log_y = y.to(f.dtype).log()
        return self.log_density(f, log_y) - log_y

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        check_positive(y, type(self).__name__.removeprefix("Bound"))

    def _knots(self, f: Tensor) -> Tensor:
        """Return the knots of log y of all samples, in order: (J·S, B, *event)."""
        log_location, log_shape = self.log_location_shape(f)
        offsets = self.log_knots(log_shape.expand_as(log_location))
        return (log_location + offsets).flatten(0, 1).sort(0).values

    def mixture_entropy(self, f: Tensor) -> Tensor:
        """Compute the entropy of the mixture by quadrature: H[log y] + E[log y].

        Args:
            f: outputs, (S, B, *out).
        """

        def integrate_rows(f: Tensor) -> Tensor:
            return mixtures.entropy_integral(self.log_density, f, self._knots(f))

        entropy = mixtures.by_rows(integrate_rows, f, max(4 * mixtures.KNOTS, 20 * len(f)))
        return entropy + mixtures.average(self.log_mean, f)

    def mixture_quantile(self, f: Tensor, q: float) -> Tensor:
        """Compute a quantile of the mixture by that of log y, which is accurate near 0.

        Args:
            f: outputs, (S, B, *out).
            q: the level, between 0 and 1.
        """

        def mass(log_y: Tensor) -> Tensor:
            return mixtures.average(lambda f: self.cdf(f, log_y.exp()), f)

        def slope(log_y: Tensor) -> Tensor:
            return mixtures.average(lambda f: self.log_density(f, log_y).exp(), f)

        knots = self._knots(f)
        low, high = mixtures.widen(mass, q, knots[0], knots[-1])
        return mixtures.invert(mass, q, low, high, slope).exp()

    def mixture_crps(self, f: Tensor, y: Tensor) -> Tensor:
        return mixtures.crps_integral(self.cdf, f, y, self._knots(f))


@final
class BoundGamma(PositiveLikelihood):
    """A y > 0 with mean unit·exp(f) and variance mean²/shape."""

    def log_density(self, f: Tensor, log_y: Tensor) -> Tensor:
        log_mean, log_shape = self.log_location_shape(f)
        shape = log_shape.exp()
        log_ratio = log_y - log_mean
        power = shape * (log_ratio - torch.expm1(log_ratio))
        return power + 0.5 * (log_shape - LOG_2PI) - stirling_error(shape)

    def sample(self, f: Tensor, n: int | None = None, seed: Seed = None) -> Tensor:
        """Draw y as exp of quantiles of log y, which are accurate in any unit.

        Args:
            f: outputs, (..., B, *out).
            n: the number of draws; None draws one for each f.
            seed: the seed; None uses torch's global stream.
        """
        tiny = torch.finfo(f.dtype).tiny
        u = self.draw_noise(rng.uniform, f, n, seed).clamp_min(tiny)
        log_mean, log_shape = self.log_location_shape(f)
        knots = log_mean + self.log_knots(log_shape.expand_as(log_mean))

        def mass(log_y: Tensor) -> Tensor:
            return self.cdf(f, log_y.exp())

        ends = (knots[0].expand_as(u), knots[-1].expand_as(u))
        low, high = mixtures.widen(mass, u, *ends)
        log_y = mixtures.invert(mass, u, low, high, lambda z: self.log_density(f, z).exp())
        return log_y.exp().clamp_min(tiny)

    def expected_log_prob(self, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """Compute E log p(y | F) by E exp(−F) = exp(−f + ½·variance): exact.

        Args:
            f: the means of the outputs.
            variance: their variances.
            y: targets.
        """
        log_mean, log_shape = self.log_location_shape(f)
        ratio = y.to(f.dtype) * torch.exp(-log_mean)
        excess = log_shape.exp() * ratio * torch.expm1(variance / 2)
        return self.pointwise(f, y) - excess

    def mean(self, f: Tensor) -> Tensor:
        return self.log_location_shape(f)[0].exp()

    def variance(self, f: Tensor) -> Tensor:
        log_mean, log_shape = self.log_location_shape(f)
        return torch.exp(2 * log_mean - log_shape)

    def entropy(self, f: Tensor) -> Tensor:
        log_mean, log_shape = self.log_location_shape(f)
        shape = log_shape.exp()
        own = stirling_error(shape) + (shape - 1) * log_minus_digamma(shape)
        return log_mean + 0.5 * (LOG_2PI - log_shape) + own

    def log_mean(self, f: Tensor) -> Tensor:
        log_mean, log_shape = self.log_location_shape(f)
        return log_mean - log_minus_digamma(log_shape.exp())

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        shape, scaled = self._scaled(f, y)
        return torch.special.gammainc(shape, scaled)

    def log_survival(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute log P(Y > y), which has a gradient in f, but none in the shape.

        Args:
            f: outputs, (..., B, *out).
            y: values, (B, *event).
        """
        shape, scaled = self._scaled(f, y)
        survival = torch.special.gammaincc(shape.detach(), scaled)
        return survival.clamp_min(torch.finfo(f.dtype).tiny).log()

    def _scaled(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shape, and y in units of the scale mean/shape; they have one shape."""
        log_mean, log_shape = self.log_location_shape(f)
        scaled = y.to(f.dtype).clamp_min(0.0) * torch.exp(log_shape - log_mean)
        return log_shape.exp().expand_as(scaled), scaled

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        """Return the shape, for every output.

        Args:
            f: outputs, (B, *out).
            seed: not used, since it is in closed form.
        """
        return Independent(self.log_location_shape(f)[1].detach().exp().expand_as(f))

    def temper(self, f: Tensor, temperature: float) -> tuple[BoundLikelihood, Tensor]:
        """Return the likelihood with T times the standard deviation.

        Args:
            f: outputs, (S, B, *out).
            temperature: T.
        """
        output = f[..., 0] if self.is_paired else f
        log_shape = self.log_location_shape(f)[1] - 2 * math.log(temperature)
        return self._with_shapes(output, log_shape)

    def log_knots(self, log_shape: Tensor) -> Tensor:
        """Return knots from P(Y ≤ y) ≈ e^−30 to P(Y > y) ≈ e^−30.

        Near 0 the cdf is about y^shape, far above the mean about exp(−shape·y); in between they
        are standard deviations of log y apart.

        Args:
            log_shape: log-shapes.
        """
        shape = log_shape.exp()
        std = torch.polygamma(1, shape).sqrt()
        low = -6 * torch.rsqrt(shape) - 30 / shape
        high = torch.log1p(30 / shape + 8 * torch.rsqrt(shape))
        fractions = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08)
        below = [low * fraction for fraction in fractions]
        center = [std * step for step in (-3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0)]
        above = [high * fraction for fraction in reversed(fractions)]
        return torch.stack([*below, *center, *above])


@final
class BoundWeibull(PositiveLikelihood):
    """A y > 0 with P(Y > y) = exp(−(y/scale)^shape), scale = unit·exp(f)."""

    def log_density(self, f: Tensor, log_y: Tensor) -> Tensor:
        log_scale, log_shape = self.log_location_shape(f)
        power = log_shape.exp() * (log_y - log_scale)
        return log_shape + power - power.exp()

    def log_survival(self, f: Tensor, y: Tensor) -> Tensor:
        return -self._hazard(f, y)

    def _hazard(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the cumulative hazard (y/scale)^shape."""
        log_scale, log_shape = self.log_location_shape(f)
        return torch.exp(log_shape.exp() * (y.to(f.dtype).clamp_min(0.0).log() - log_scale))

    def expected_log_prob(self, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """Compute E log p(y | F) by E exp(−k·F) = exp(−k·f + ½·k²·variance): exact.

        Args:
            f: the means of the outputs.
            variance: their variances.
            y: targets.
        """
        shape = self.log_location_shape(f)[1].exp()
        excess = self._hazard(f, y) * torch.expm1(shape.square() * variance / 2)
        return self.pointwise(f, y) - excess

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        return -torch.expm1(-self._hazard(f, y))

    def sample(self, f: Tensor, n: int | None = None, seed: Seed = None) -> Tensor:
        log_scale, log_shape = self.log_location_shape(f)
        hazard = -torch.log1p(-self.draw_noise(rng.uniform, f, n, seed))
        return torch.exp(log_scale + hazard.clamp_min(1e-30).log() * torch.exp(-log_shape))

    def mean(self, f: Tensor) -> Tensor:
        log_scale, log_shape = self.log_location_shape(f)
        return torch.exp(log_scale + torch.lgamma(1 + torch.exp(-log_shape)))

    def variance(self, f: Tensor) -> Tensor:
        log_scale, log_shape = self.log_location_shape(f)
        inverse = torch.exp(-log_shape)
        log_square = torch.lgamma(1 + 2 * inverse)
        excess = -torch.expm1(2 * torch.lgamma(1 + inverse) - log_square)
        return torch.exp(2 * log_scale + log_square) * excess

    def entropy(self, f: Tensor) -> Tensor:
        log_scale, log_shape = self.log_location_shape(f)
        return EULER * (1 - torch.exp(-log_shape)) + log_scale - log_shape + 1

    def log_mean(self, f: Tensor) -> Tensor:
        log_scale, log_shape = self.log_location_shape(f)
        return log_scale - EULER * torch.exp(-log_shape)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        """Return shape², for every output.

        Args:
            f: outputs, (B, *out).
            seed: not used, since it is in closed form.
        """
        return Independent(torch.exp(2 * self.log_location_shape(f)[1].detach()).expand_as(f))

    def temper(self, f: Tensor, temperature: float) -> tuple[BoundLikelihood, Tensor]:
        """Return the likelihood with T times the standard deviation of log y.

        Args:
            f: outputs, (S, B, *out).
            temperature: T.
        """
        output = f[..., 0] if self.is_paired else f
        log_shape = self.log_location_shape(f)[1] - math.log(temperature)
        return self._with_shapes(output, log_shape)

    def log_knots(self, log_shape: Tensor) -> Tensor:
        # log hazards, from P(Y ≤ y) ≈ e^−30 to P(Y > y) = exp(−e^3.6)
        below = (-30.0, -21.0, -15.0, -10.0, -7.0, -5.0, -4.0, -3.0, -2.4, -1.8, -1.3, -0.8)
        above = (-0.4, 0.0, 0.4, 0.7, 1.0, 1.3, 1.6, 2.0, 2.4, 3.0, 3.6)
        inverse = torch.exp(-log_shape)
        return torch.stack([inverse * knot for knot in (*below, *above)])


class ShapedSpec(Likelihood):
    """A spec with a shape, whether it is learned, and the location of y at f = 0."""

    learn: bool
    unit: float
    bound_class: ClassVar[type[Shaped]]

    @abstractmethod
    def _shape(self) -> float:
        """Return the initial shape."""

    def bind(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Shaped:
        log_shape = torch.tensor(math.log(self._shape()), dtype=dtype, device=device)
        return self.bound_class(log_shape, self.learn, self.unit)

    def starting_at(self, y: Tensor) -> Self:
        """Return the likelihood with the mean of y as its unit.

        Args:
            y: targets, (N, *event).
        """
        mean = positive_mean(y)
        if mean is None:
            return self
        changes: dict[str, Any] = {"unit": mean}
        return replace(self, **changes)  # type: ignore[type-var]

    @property
    def parameter(self) -> str:
        return "shape"

    def fixed_at(self, parameters: Mapping[str, Tensor]) -> Self:
        shape = math.exp(float(parameters["log_shape"].detach()))
        changes: dict[str, Any] = {self.parameter: self._setting(shape), "learn": False}
        return replace(self, **changes)  # type: ignore[type-var]

    def _setting(self, shape: float) -> float:
        """Return the value of the field that makes this shape."""
        return shape


@final
@dataclass(frozen=True)
class Gamma(ShapedSpec):
    """Positive numbers whose standard deviation is a constant share of the mean.

    p(y | f) ∝ y^(shape − 1)·exp(−shape·y/mean), mean = unit·exp(f), Var[y] = mean²/shape, for f
    and y > 0 (B, *out). For claims, rainfall, durations; of shape 1 it is exponential.

    Args:
        shape: 1 over the squared coefficient of variation (default 1).
        learn: learn the shape (default False).
        unit: the mean of y at f = 0 (default 1). A method by name uses the mean of y.

    Example:
        >>> noise = bayou.likelihoods.Gamma(learn=True)
        >>> posterior = bayou.fit(net, (x, claims), "ensemble", likelihood=noise)
    """

    shape: float = 1.0
    learn: bool = False
    unit: float = 1.0
    bound_class: ClassVar[type[Shaped]] = BoundGamma

    def __post_init__(self) -> None:
        self._check_positive("shape", "unit")

    def _shape(self) -> float:
        return self.shape


@final
@dataclass(frozen=True)
class Weibull(ShapedSpec):
    """Positive times with P(Y > y | f) = exp(−(y/scale)^shape), scale = unit·exp(f).

    For f and y > 0 (B, *out). The hazard grows with time for a shape above 1 and falls below; of
    shape 1 it is exponential. For times that are partly censored, ``Censored(Weibull())``.

    Args:
        shape: the shape (default 1).
        learn: learn the shape (default False).
        unit: the scale of y at f = 0 (default 1). A method by name uses the mean of y.

    Example:
        >>> noise = bayou.likelihoods.Weibull(learn=True)
        >>> posterior = bayou.fit(net, (x, times), "map", likelihood=noise)
    """

    shape: float = 1.0
    learn: bool = False
    unit: float = 1.0
    bound_class: ClassVar[type[Shaped]] = BoundWeibull

    def __post_init__(self) -> None:
        self._check_positive("shape", "unit")

    def _shape(self) -> float:
        return self.shape
