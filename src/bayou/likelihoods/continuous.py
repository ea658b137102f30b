"""Continuous likelihoods: a location, a scale, and a density of unit scale."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from bayou.core import rng
from bayou.core.constants import LOG_2PI
from bayou.core.rng import Seed
from bayou.core.specs import later_field
from bayou.likelihoods import mixtures
from bayou.likelihoods.base import BoundLikelihood, Likelihood, normal_functions
from bayou.likelihoods.information import Independent, Information
from bayou.likelihoods.special import beta_fraction

MIN_SOFTPLUS_SCALE = 1e-6  # in units of y, so that a softplus that underflows is no scale of 0


class Unit(ABC):
    """A symmetric density with location 0 and scale 1.

    Attributes:
        variance: Var[Z].
        entropy: H[Z] in nats.
        information: E[(∂log p/∂z)²], that of its location.
        scale_information: E[(1 + z·∂log p/∂z)²], that of its log-scale.
        knots: ends of cells on which it is smooth, which span its mass.
        is_gaussian: whether it is the standard normal density.
    """

    variance: float
    entropy: float
    information: float
    scale_information: float
    knots: tuple[float, ...]
    is_gaussian = False

    @abstractmethod
    def log_density(self, z: Tensor) -> Tensor:
        """Compute log p(z).

        Args:
            z: values.
        """

    @abstractmethod
    def cdf(self, z: Tensor) -> Tensor:
        """Compute P(Z ≤ z), accurate in the lower tail; P(Z > z) is cdf(−z).

        Args:
            z: values.
        """

    def log_survival(self, z: Tensor) -> Tensor:
        """Compute log P(Z > z).

        Args:
            z: values.
        """
        return self.cdf(-z).clamp_min(torch.finfo(z.dtype).tiny).log()

    @abstractmethod
    def draw(
        self, n: int, event: Sequence[int], like: Tensor, seed: Seed = None, start: int = 0
    ) -> Tensor:
        """Return draws start .. start + n − 1: (n, *event).

        Args:
            n: the number of draws.
            event: the shape of a draw.
            like: a tensor with the dtype and device.
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
        """

    def crps(self, location: Tensor, scale: Tensor, y: Tensor) -> Tensor | None:
        """Compute the CRPS of mixtures at y: (N,); None without a closed form.

        Args:
            location: locations, (S, N).
            scale: scales, (S, N).
            y: values, (N,).
        """
        return None


def _symmetric_knots(positive: tuple[float, ...]) -> tuple[float, ...]:
    """Return knots with their negatives and 0, in order."""
    return (*(-z for z in reversed(positive)), 0.0, *positive)


@final
class UnitGaussian(Unit):
    """The standard normal density N(0, 1)."""

    is_gaussian = True

    def __init__(self) -> None:
        self.variance: float = 1.0
        self.information: float = 1.0
        self.scale_information: float = 2.0
        self.entropy: float = 0.5 * (LOG_2PI + 1)
        self.knots: tuple[float, ...] = _symmetric_knots(
            (0.75, 1.5, 2.25, 3.0, 3.75, 4.5, 5.5, 7.0, 9.0)
        )

    def log_density(self, z: Tensor) -> Tensor:
        return -0.5 * z.square() - 0.5 * LOG_2PI

    def cdf(self, z: Tensor) -> Tensor:
        return 0.5 * torch.erfc(-math.sqrt(0.5) * z)

    def log_survival(self, z: Tensor) -> Tensor:
        """Compute log P(Z > z), accurate in both tails.

        It is that of ``torch.special.log_ndtr``, which ``vmap`` computes one by one.

        Args:
            z: values.
        """
        above = z.clamp_min(0.0)
        tail = (0.5 * torch.special.erfcx(math.sqrt(0.5) * above)).log() - 0.5 * above.square()
        body = torch.log1p(-0.5 * torch.erfc(-math.sqrt(0.5) * z.clamp_max(0.0)))
        return torch.where(z > 0, tail, body)

    def draw(
        self, n: int, event: Sequence[int], like: Tensor, seed: Seed = None, start: int = 0
    ) -> Tensor:
        return rng.normal(n, event, like, seed, start)

    def crps(self, location: Tensor, scale: Tensor, y: Tensor) -> Tensor:
        """Compute the CRPS of a mixture of Normals (Grimit et al. 2006).

        1/S Σ_s A(y − m_s, v_s) − 1/2S² Σ_st A(m_s − m_t, v_s + v_t), A(d, v) = E|d + √v·Z|.

        Args:
            location: m, (S, N).
            scale: √v, (S, N).
            y: values, (N,).
        """
        samples = len(location)
        i, j = torch.triu_indices(samples, samples, 1, device=location.device)
        columns = max(1, mixtures.CHUNK // samples**2)  # the pairs of a column take S² numbers
        blocks = []
        for m, v, t in zip(
            location.split(columns, -1),
            scale.square().split(columns, -1),
            y.split(columns, -1),
            strict=True,
        ):
            pairs = _expected_distance(m[i] - m[j], v[i] + v[j]).sum(0)  # once: A is even in d
            diagonal = _expected_distance(torch.zeros_like(m), 2 * v).sum(0)
            spread = (pairs + 0.5 * diagonal) / samples**2
            blocks.append(_expected_distance(t - m, v).mean(0) - spread)
        return torch.cat(blocks)


def _expected_distance(d: Tensor, variance: Tensor) -> Tensor:
    """Compute A(d, v) = E|d + √v·Z| = 2√v·φ(d/√v) + d·(2Φ(d/√v) − 1)."""
    std = variance.sqrt()
    z = d / std
    return 2 * std * torch.exp(-0.5 * (z.square() + LOG_2PI)) + d * torch.erf(z * math.sqrt(0.5))


@final
class UnitStudentT(Unit):
    """Student's t with df degrees of freedom: p(z) ∝ (1 + z²/df)^(−(df + 1)/2).

    Args:
        df: degrees of freedom.
    """

    def __init__(self, df: float) -> None:
        v = float(df)
        self.df = v
        self._log_beta = math.lgamma(v / 2) + math.lgamma(0.5) - math.lgamma((v + 1) / 2)
        self.variance: float = v / (v - 2) if v > 2 else math.inf
        self.information: float = (v + 1) / (v + 3)
        self.scale_information: float = 2 * v / (v + 3)
        digammas = torch.digamma(torch.tensor([(v + 1) / 2, v / 2], dtype=torch.float64)).tolist()
        self.entropy: float = (
            (v + 1) / 2 * (digammas[0] - digammas[1]) + 0.5 * math.log(v) + self._log_beta
        )
        reach = math.ceil(36 / v)  # beyond 2^reach some e^−25 of the mass is left
        tail = (2.0 * 2 ** (k / 2) for k in range(max(2 * reach, 6)))
        self.knots: tuple[float, ...] = _symmetric_knots((0.5, 1.0, 1.5, *tail))

    def log_density(self, z: Tensor) -> Tensor:
        v = self.df
        return -0.5 * (v + 1) * torch.log1p(z.square() / v) - 0.5 * math.log(v) - self._log_beta

    def cdf(self, z: Tensor) -> Tensor:
        """Compute P(Z ≤ z), below 0 as ½·I_x(df/2, ½) with x = df/(df + z²).

        I is the regularized incomplete beta function, by its continued fraction.

        Args:
            z: values.
        """
        x_tail = 1 / (1 + z.square() / self.df)
        x_center = 1 / (1 + self.df / z.square())
        # I_x(a, b) = 1 − I_{1−x}(b, a), whichever converges fast.
        is_swapped = x_tail > (self.df + 2) / (self.df + 5)
        half = torch.full_like(z, 0.5)
        half_df = torch.full_like(z, self.df / 2)
        a = torch.where(is_swapped, half, half_df)
        b = torch.where(is_swapped, half_df, half)
        x = torch.where(is_swapped, x_center, x_tail)
        x_complement = torch.where(is_swapped, x_tail, x_center)
        terms = min(40, 10 + int(2 * math.sqrt(self.df)))
        fraction = beta_fraction(a, b, x, terms)
        power = torch.special.xlogy(a, x) + torch.special.xlogy(b, x_complement)
        beta = torch.exp(power - self._log_beta) * fraction / a
        below = 0.5 * torch.where(is_swapped, 1 - beta, beta)
        return torch.where(z < 0, below, 1 - below)

    def draw(
        self, n: int, event: Sequence[int], like: Tensor, seed: Seed = None, start: int = 0
    ) -> Tensor:
        """Draw z = √(df·(u^(−2/df) − 1))·cos 2πv for uniform u, v (Bailey 1994).

        Args:
            n: the number of draws.
            event: the shape of a draw.
            like: a tensor with the dtype and device.
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
        """
        u = 1 - rng.uniform(n, event, like, rng.fold(seed, "radius"), start)
        angle = 2 * math.pi * rng.uniform(n, event, like, rng.fold(seed, "angle"), start)
        return (self.df * torch.expm1(-2 / self.df * u.log())).sqrt() * angle.cos()


class LocationScale(BoundLikelihood):
    """y = location + scale·z, z from a ``Unit`` density.

    Args:
        unit: the density of z.
    """

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.unit = unit

    @abstractmethod
    def location_log_scale(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the location of y, and the log of its scale (which may broadcast).

        Args:
            f: outputs, (..., B, *out).
        """

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        location, log_scale = self.location_log_scale(f)
        return self.unit.log_density((y.to(f.dtype) - location) * torch.exp(-log_scale)) - log_scale

    def mean(self, f: Tensor) -> Tensor:
        return self.location_log_scale(f)[0]

    def variance(self, f: Tensor) -> Tensor:
        location, log_scale = self.location_log_scale(f)
        return (self.unit.variance * torch.exp(2 * log_scale)).expand_as(location)

    def entropy(self, f: Tensor) -> Tensor:
        location, log_scale = self.location_log_scale(f)
        return (self.unit.entropy + log_scale).expand_as(location)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        location, log_scale = self.location_log_scale(f)
        return self.unit.cdf((y.to(f.dtype) - location) * torch.exp(-log_scale))

    def log_survival(self, f: Tensor, y: Tensor) -> Tensor:
        location, log_scale = self.location_log_scale(f)
        z = (y.to(f.dtype) - location) * torch.exp(-log_scale)
        return self.unit.log_survival(z)

    def sample(self, f: Tensor, n: int | None = None, seed: Seed = None) -> Tensor:
        location, log_scale = self.location_log_scale(f)
        return location + log_scale.exp() * self.draw_noise(self.unit.draw, f, n, seed)

    @property
    def traceable(self) -> tuple[str, ...]:
        return "entropy", "mutual_information"

    def mixture_entropy(self, f: Tensor) -> Tensor:
        def integrate_rows(f: Tensor) -> Tensor:
            location, log_scale = self.location_log_scale(f)
            knots = mixtures.spread_knots(location, log_scale.exp(), self.unit.knots)
            return mixtures.entropy_integral(self.pointwise, f, knots)

        return mixtures.by_rows(integrate_rows, f, max(4 * mixtures.KNOTS, 20 * len(f)))

    def mixture_quantile(self, f: Tensor, q: float) -> Tensor:
        """Compute a quantile of the mixture: (B, *event).

        For q > ½ it is the negative quantile of −y at 1 − q, since only the lower tail of a cdf is
        accurate.

        Args:
            f: outputs, (S, B, *out).
            q: the level, between 0 and 1.
        """
        if q <= 0.5:
            return super().mixture_quantile(f, q)
        location, log_scale = self.location_log_scale(f)
        likelihood, mirrored = self._with_log_scale(-location, log_scale)
        return -likelihood.mixture_quantile(mirrored, 1 - q)

    def mixture_crps(self, f: Tensor, y: Tensor) -> Tensor | None:
        location, log_scale = self.location_log_scale(f)
        scale = log_scale.to(f.dtype).exp().expand_as(location)
        crps = self.unit.crps(location.flatten(1), scale.flatten(1), y.flatten())
        return None if crps is None else crps.reshape(y.shape)

    def rescale(self, f: Tensor, shift: Tensor, scale: Tensor) -> tuple[BoundLikelihood, Tensor]:
        location, log_scale = self.location_log_scale(f)
        return self._with_log_scale(location * scale + shift, log_scale + scale.log())

    def temper(self, f: Tensor, temperature: float) -> tuple[BoundLikelihood, Tensor]:
        location, log_scale = self.location_log_scale(f)
        return self._with_log_scale(location, log_scale + math.log(temperature))

    def _with_log_scale(
        self, location: Tensor, log_scale: Tensor
    ) -> tuple[BoundLikelihood, Tensor]:
        """Return a likelihood and outputs with these locations and log-scales."""
        return BoundPaired(self.unit), torch.stack((location, log_scale.expand_as(location)), -1)


@final
class BoundHomoscedastic(LocationScale):
    """A likelihood whose location is f; the scale of y_k is exp(log_scale)·units_k.

    Args:
        unit: the density of unit scale.
        log_scale: the logarithm of the scale in these units, one number or one for each coordinate
            of the last axis of y: a buffer or (learned) a parameter.
        learn: whether to learn ``log_scale``.
        units: the unit of y, one number or one for each coordinate of its last axis.
    """

    log_scale: Tensor
    log_units: Tensor

    def __init__(
        self,
        unit: Unit,
        log_scale: Tensor,
        learn: bool = False,
        units: float | tuple[float, ...] = 1.0,
    ) -> None:
        super().__init__(unit)
        if learn:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)
        log_units = torch.tensor(units, dtype=torch.float64).log().to(log_scale)
        # Not in files: the spec of the likelihood holds them.
        self.register_buffer("log_units", log_units, persistent=False)

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        scales = self._log_scales.shape
        if scales and (len(f_shape) < 2 or f_shape[-1] != scales[0]):
            raise ValueError(
                f"{scales[0]} noises or units, one for each output, do not match outputs of shape "
                f"{tuple(f_shape)}; give one for each number of the last axis, or one for all"
            )
        return torch.Size(f_shape)

    def location_log_scale(self, f: Tensor) -> tuple[Tensor, Tensor]:
        return f, self._log_scales

    @property
    def _log_scales(self) -> Tensor:
        """The log of the scale of y: one number, or one for each coordinate of its last axis."""
        return self.log_scale + self.log_units

    def expected_log_prob(self, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """Compute log p at E[(y − F)²] in place of (y − f)².

        It is exact for a Gaussian, and a bound since log p is convex in z².

        Args:
            f: the means of the outputs.
            variance: their variances.
            y: targets.
        """
        square = (y.to(f.dtype) - f).square() + variance
        log_scale = self._log_scales
        z = square.clamp_min(torch.finfo(f.dtype).tiny).sqrt() * torch.exp(-log_scale)
        return self.unit.log_density(z) - log_scale

    def marginal(self, f: Tensor, variance: Tensor) -> tuple[BoundLikelihood, Tensor]:
        """Return N(f, variance + σ²), for Gaussian noise.

        Args:
            f: the means of the outputs.
            variance: their variances.
        """
        if not self.is_gaussian:
            return super().marginal(f, variance)
        log_scale = self._log_scales.detach()
        return BoundMarginal(self.unit), torch.stack((f, log_scale.expand_as(f), variance), -1)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        """Return 1/σ² for a Gaussian, or (df + 1)/(df + 3)/scale² for Student's t.

        That of a Gaussian is the Hessian of −log p too.

        Args:
            f: outputs, (B, *out).
            seed: not used, since it is in closed form.
        """
        precision = torch.exp(-2 * self._log_scales.detach())
        return Independent((self.unit.information * precision).expand_as(f))

    def temper(self, f: Tensor, temperature: float) -> tuple[BoundLikelihood, Tensor]:
        log_scale = self.log_scale.detach() + math.log(temperature)
        likelihood = BoundHomoscedastic(self.unit, log_scale)
        likelihood.log_units = self.log_units
        return likelihood, f

    @property
    def is_gaussian(self) -> bool:
        return self.unit.is_gaussian

    @property
    def gaussian_noise(self) -> float | None:
        if not self.is_gaussian or self._log_scales.numel() > 1:
            return None
        return math.exp(float(self._log_scales.detach()))

    def per_sample(
        self, outputs: Tensor, parameters: Mapping[str, Tensor]
    ) -> tuple[BoundLikelihood, Tensor]:
        log_scale = parameters["log_scale"].to(outputs)  # (S,), or (S, D)
        middle_axes = [1] * (outputs.ndim - log_scale.ndim)
        log_scale = log_scale.reshape(len(log_scale), *middle_axes, *log_scale.shape[1:])
        return self._with_log_scale(outputs, log_scale + self.log_units)


@final
class BoundPaired(LocationScale):
    """A likelihood with location and log-scale on a last axis: f (..., B, *event, 2)."""

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        return torch.Size(f_shape[:-1])

    def location_log_scale(self, f: Tensor) -> tuple[Tensor, Tensor]:
        return f[..., 0], f[..., 1]


@final
class BoundMarginal(LocationScale):
    """y = F + noise, F ~ N(location, variance).

    The last axis of f has location, log of the noise scale and variance. The density, quantiles
    and draws are those of y; ``variance`` and ``entropy`` are those of y for a known function F.
    """

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        return torch.Size(f_shape[:-1])

    def location_log_scale(self, f: Tensor) -> tuple[Tensor, Tensor]:
        return f[..., 0], 0.5 * torch.log(torch.exp(2 * f[..., 1]) + f[..., 2])

    def variance(self, f: Tensor) -> Tensor:
        return torch.exp(2 * f[..., 1])

    def entropy(self, f: Tensor) -> Tensor:
        return self.unit.entropy + f[..., 1]

    def function_variance(self, f: Tensor) -> Tensor:
        return f[..., 2]

    def functions(self, f: Tensor, count: int) -> tuple[BoundLikelihood, Tensor]:
        location, log_scale, variance = f.unbind(-1)
        locations = normal_functions(location, variance, count)
        log_scales = log_scale.repeat(count, *[1] * (log_scale.ndim - 1))
        return BoundPaired(self.unit), torch.stack((locations, log_scales), -1)

    def rescale(self, f: Tensor, shift: Tensor, scale: Tensor) -> tuple[BoundLikelihood, Tensor]:
        location, log_scale, variance = f.unbind(-1)
        new_location = location * scale + shift
        new_log_scale = log_scale + scale.log()
        new_variance = variance * scale.square()
        return self, torch.stack((new_location, new_log_scale, new_variance), -1)

    def temper(self, f: Tensor, temperature: float) -> tuple[BoundLikelihood, Tensor]:
        return self, f + f.new_tensor((0.0, math.log(temperature), 0.0))


@final
class BoundHeteroscedastic(LocationScale):
    """A likelihood with locations and what determines the scales on halves of an axis of f.

    For the last axis f is (..., B, 2·D) and y (B, D).

    Args:
        min_std: a lower bound of the scale.
        unit: the density of unit scale; None is the standard normal.
        axis: the axis of f.
        transform: "exp" for log-squared scales, "softplus" for scales before a softplus.
        units: the unit of the scales of "softplus", one number or one for each output.
    """

    log_units: Tensor

    def __init__(
        self,
        min_std: float = 0.0,
        unit: Unit | None = None,
        axis: int = -1,
        transform: str = "exp",
        units: Tensor | None = None,
    ) -> None:
        super().__init__(unit or UnitGaussian())
        self.min_std: float = float(min_std)
        self.axis = axis
        self.transform = transform
        log_units = torch.zeros(()) if units is None else units.log()
        # Not in files: the spec of the likelihood holds them.
        self.register_buffer("log_units", log_units, persistent=False)

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        if len(f_shape) < 1 - self.axis or f_shape[self.axis] % 2:
            raise ValueError(
                f"outputs {tuple(f_shape)} need an axis {self.axis} of even length: means, "
                "then log-variances"
            )
        shape = list(f_shape)
        shape[self.axis] //= 2
        return torch.Size(shape)

    def location_log_scale(self, f: Tensor) -> tuple[Tensor, Tensor]:
        location, log_variance = f.chunk(2, self.axis)
        if self.transform == "softplus":
            return location, self._softplus_scale(log_variance).log() + self.log_units
        if self.min_std:  # log(e^s + min_std²), without a tensor for the constant
            log_variance = log_variance - logsigmoid(log_variance - 2 * math.log(self.min_std))
        return location, 0.5 * log_variance

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        """Return (1/σ², ½·(∂log σ²/∂s)²) for the mean and the second half s of a Gaussian's f.

        The Hessian of −log p can be indefinite.

        Args:
            f: outputs, (B, *out).
            seed: not used, since it is in closed form.
        """
        variance = torch.exp(2 * self.location_log_scale(f)[1])
        second_half = f.chunk(2, self.axis)[1]
        if self.transform == "softplus":
            slope = 2 * second_half.sigmoid() / self._softplus_scale(second_half)
        else:
            slope = second_half.exp() / variance  # ∂log σ²/∂s: 1 without min_std
        location_information = self.unit.information / variance
        scale_information = self.unit.scale_information / 4 * slope.square()
        return Independent(torch.cat((location_information, scale_information), self.axis))

    def _softplus_scale(self, s: Tensor) -> Tensor:
        """Return the scales of a softplus, without their unit."""
        return softplus(s) + max(self.min_std, MIN_SOFTPLUS_SCALE)


def _check_units(likelihood: Likelihood, units: float | tuple[float, ...]) -> None:
    """Raise a ValueError unless the units are one or more positive, finite numbers."""
    values = units if isinstance(units, tuple) else (units,)
    is_valid = len(values) > 0 and all(
        isinstance(value, int | float) and 0 < value < math.inf for value in values
    )
    if not is_valid:
        raise ValueError(
            f"{type(likelihood).__name__} units must be a positive, finite number or a tuple of "
            f"them, got {units!r:.60}"
        )


def _scaled_units(units: float | tuple[float, ...], scale: Tensor) -> float | tuple[float, ...]:
    """Return the units multiplied by one number, or by one for each output."""
    product = torch.as_tensor(units, dtype=torch.float64) * scale.double().cpu()
    return float(product) if product.numel() == 1 else tuple(product.tolist())


class _Homoscedastic(Likelihood):
    """Noise of one scale, in ``units`` that may differ between the coordinates of y."""

    learn: bool
    units: float | tuple[float, ...]

    @abstractmethod
    def _unit_and_scale(self) -> tuple[Unit, float | tuple[float, ...]]:
        """Return the density of unit scale, and the scale, one number or one for each output."""

    def _check_scale(self, name: str) -> None:
        """Make a sequence of scales a tuple; raise a ValueError unless all are positive."""
        value = getattr(self, name)
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(self, name, value)
        if not isinstance(value, tuple):
            self._check_positive(name)
            return
        if not value or not all(
            isinstance(item, int | float) and 0 < item < math.inf for item in value
        ):
            raise ValueError(
                f"{type(self).__name__} {name} must be a positive, finite number or one for each "
                f"output, got {value!r:.60}"
            )

    def bind(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> BoundHomoscedastic:
        unit, scale = self._unit_and_scale()
        logarithms = list(map(math.log, scale)) if isinstance(scale, tuple) else math.log(scale)
        log_scale = torch.tensor(logarithms, dtype=dtype, device=device)
        return BoundHomoscedastic(unit, log_scale, self.learn, self.units)

    def in_units(self, scale: Tensor) -> Self:
        return replace(self, units=_scaled_units(self.units, scale))  # type: ignore[type-var]

    def fixed_at(self, parameters: Mapping[str, Tensor]) -> Self:
        scale = parameters["log_scale"].detach().double().exp().tolist()
        changes: dict[str, Any] = {self.parameter: scale, "learn": False}
        return replace(self, **changes)  # type: ignore[type-var]


class _Heteroscedastic(Likelihood):
    """Noise whose scale depends on x: means, then what determines it, on one axis of f."""

    axis: int

    def outputs(self, targets: int) -> int:
        return 2 * targets

    def in_units(self, scale: Tensor) -> Self | None:
        return self

    @property
    def scale_axis(self) -> int:
        return self.axis


@final
@dataclass(frozen=True)
class Gaussian(_Homoscedastic):
    """Gaussian noise of one scale: p(y | f) = N(y; f, noise²), for f and y (B, *out).

    Args:
        noise: the standard deviation, in ``units`` (default 0.1): one number, or a tuple with one
            for each output, y (B, D).
        learn: learn the noise (default False); of a tuple each number.
        units: the unit of ``noise``, one number (default 1) or one for each output: the standard
            deviation of output k is noise·units_k. A method by name uses the standard deviations
            of y.

    Example:
        >>> posterior = bayou.fit(net, (x, y), likelihood=bayou.Gaussian(0.1, learn=True))
    """

    noise: float | tuple[float, ...] = 0.1
    learn: bool = False
    units: float | tuple[float, ...] = later_field(1.0)

    def __post_init__(self) -> None:
        self._check_scale("noise")
        _check_units(self, self.units)

    @property
    def parameter(self) -> str:
        return "noise"

    def _unit_and_scale(self) -> tuple[Unit, float | tuple[float, ...]]:
        return UnitGaussian(), self.noise


@final
@dataclass(frozen=True)
class StudentT(_Homoscedastic):
    """Student-t noise of one scale, for regression with outliers.

    p(y | f) = t((y − f)/scale; df)/scale, t(z; df) ∝ (1 + z²/df)^(−(df + 1)/2), for f and y
    (B, *out).

    Args:
        df: degrees of freedom, more than 1 (default 4).
        scale: the scale of the noise, in ``units`` (default 0.1): one number, or a tuple with one
            for each output, y (B, D).
        learn: learn the scale (default False); of a tuple each number.
        units: the unit of ``scale``, one number (default 1) or one for each output.

    Example:
        >>> noise = bayou.likelihoods.StudentT(df=3.0, learn=True)
        >>> posterior = bayou.fit(net, (x, y), likelihood=noise)
    """

    df: float = 4.0
    scale: float | tuple[float, ...] = 0.1
    learn: bool = False
    units: float | tuple[float, ...] = later_field(1.0)

    def __post_init__(self) -> None:
        self._check_positive("df")
        self._check_scale("scale")
        _check_df(self, self.df)
        _check_units(self, self.units)

    @property
    def parameter(self) -> str:
        return "scale"

    def _unit_and_scale(self) -> tuple[Unit, float | tuple[float, ...]]:
        return UnitStudentT(self.df), self.scale


@final
@dataclass(frozen=True)
class HeteroscedasticGaussian(_Heteroscedastic):
    """Gaussian noise whose variance depends on x (Nix & Weigend 1994).

    p(y | f) = N(y; m, exp(s) + min_std²), f = (m, s) on one axis: f (B, 2·D), y (B, D). With a
    softplus the standard deviation is units·(log(1 + exp(s)) + max(min_std, 10⁻⁶)), which grows
    linearly where the variance of "exp" explodes.

    Args:
        min_std: a lower bound of the standard deviation (default 0).
        axis: the axis of means and log-variances in f, from the end (default −1): −3 for images
            f (B, 2·C, H, W) and y (B, C, H, W).
        transform: "exp" (default), where s is the log-variance, or "softplus".
        units: the unit of the standard deviation of "softplus", one number (default 1) or one for
            each output. A method by name uses the standard deviations of y.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 50), torch.nn.ReLU(),
        ...                           torch.nn.Linear(50, 2))
        >>> noise = bayou.HeteroscedasticGaussian(min_std=0.01)
        >>> posterior = bayou.fit(net, (x, y), likelihood=noise)
    """

    min_std: float = 0.0
    axis: int = -1
    transform: str = later_field("exp")
    units: float | tuple[float, ...] = later_field(1.0)

    def __post_init__(self) -> None:
        if self.min_std:
            self._check_positive("min_std")
        self._check_choice("transform", ("exp", "softplus"))
        _check_units(self, self.units)
        if self.transform == "exp" and self.units != 1.0:
            raise ValueError(
                "HeteroscedasticGaussian has units for transform='softplus' only; outputs of 'exp' "
                f"have those of y, got units={self.units!r:.60}"
            )
        self._check(
            ["axis"],
            lambda value: type(value) is int and value < 0,
            "a negative whole number, from the end",
        )

    def bind(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> BoundHeteroscedastic:
        units = torch.tensor(self.units, dtype=torch.float64)
        if self.axis != -1 and units.numel() > 1:
            units = units.reshape(-1, *[1] * (-1 - self.axis))
        units = units.to(dtype=dtype or torch.get_default_dtype(), device=device)
        return BoundHeteroscedastic(
            self.min_std, axis=self.axis, transform=self.transform, units=units
        )

    @property
    def has_log_variances(self) -> bool:
        return self.transform == "exp"

    def in_units(self, scale: Tensor) -> HeteroscedasticGaussian | None:
        if self.transform == "softplus":
            return replace(self, units=_scaled_units(self.units, scale))
        if not self.min_std:
            return self
        if scale.numel() > 1:
            return None
        return replace(self, min_std=self.min_std * float(scale))


@final
@dataclass(frozen=True)
class HeteroscedasticStudentT(_Heteroscedastic):
    """Student-t noise whose scale depends on x.

    p(y | f) = t((y − m)/σ; df)/σ, σ² = exp(s), f = (m, s) on the last axis: f (B, 2·D), y (B, D).
    The loss of a residual of r scales grows as log r, not r².

    Args:
        df: degrees of freedom, more than 1 (default 4).
    """

    df: float = 4.0
    axis = -1

    def __post_init__(self) -> None:
        self._check_positive("df")
        _check_df(self, self.df)

    def bind(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> BoundHeteroscedastic:
        return BoundHeteroscedastic(unit=UnitStudentT(self.df))


def _check_df(likelihood: Likelihood, df: float) -> None:
    """Raise a ValueError unless E[y] exists."""
    if df <= 1:
        name = type(likelihood).__name__
        raise ValueError(f"{name} df must exceed 1 (E[y] does not exist otherwise), got {df}")
