"""Positive y whose logarithm has a Gaussian likelihood."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from bayou.core.rng import Seed
from bayou.likelihoods import mixtures
from bayou.likelihoods.base import BoundLikelihood, Likelihood
from bayou.likelihoods.continuous import Gaussian, HeteroscedasticGaussian, LocationScale
from bayou.likelihoods.information import Information

PARAMETERS = "of."  # prefix of the parameters of the likelihood of log y


@final
class BoundLog(BoundLikelihood):
    """y = exp(z), z from another likelihood.

    Args:
        of: the likelihood of log y, Gaussian.
    """

    is_linear_in_y = False

    def __init__(self, of: LocationScale) -> None:
        super().__init__()
        self.of = of

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        return self.of.target_shape(f_shape)

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        check_positive(y, "the logarithm of y")

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        log_y = y.to(f.dtype).log()
        return self.of.pointwise(f, log_y) - log_y

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        return self.of.cdf(f, y.to(f.dtype).clamp_min(0.0).log())

    def log_survival(self, f: Tensor, y: Tensor) -> Tensor:
        return self.of.log_survival(f, y.to(f.dtype).clamp_min(0.0).log())

    def sample(self, f: Tensor, n: int | None = None, seed: Seed = None) -> Tensor:
        return self.of.sample(f, n, seed).exp()

    def expected_log_prob(self, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        log_y = y.to(f.dtype).log()
        return self.of.expected_log_prob(f, variance, log_y) - log_y

    def mean(self, f: Tensor) -> Tensor:
        """Compute E[y | f] = exp(m + ½·σ²), where σ² has the variance of a random f, too.

        Args:
            f: outputs, (..., B, *out).
        """
        variance = self.of.variance(f) + self.of.function_variance(f)
        return torch.exp(self.of.mean(f) + variance / 2)

    def variance(self, f: Tensor) -> Tensor:
        noise = self.of.variance(f)
        log_square = 2 * self.of.mean(f) + noise + 2 * self.of.function_variance(f)
        return torch.expm1(noise) * torch.exp(log_square)

    def function_variance(self, f: Tensor) -> Tensor | float:
        function_variance = self.of.function_variance(f)
        if not isinstance(function_variance, Tensor):
            return 0.0
        log_square = 2 * self.of.mean(f) + self.of.variance(f) + function_variance
        return torch.expm1(function_variance) * torch.exp(log_square)

    def functions(self, f: Tensor, count: int) -> tuple[BoundLikelihood, Tensor]:
        return _exp(self.of.functions(f, count))

    def entropy(self, f: Tensor) -> Tensor:
        return self.of.entropy(f) + self.of.mean(f)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        return self.of.information(f, seed)

    def marginal(self, f: Tensor, variance: Tensor) -> tuple[BoundLikelihood, Tensor]:
        return _exp(self.of.marginal(f, variance))

    @property
    def is_gaussian(self) -> bool:
        """Return whether log y = f + σ·ε with ε ~ N(0, 1), and σ does not depend on f."""
        return self.of.is_gaussian

    @property
    def traceable(self) -> tuple[str, ...]:
        return self.of.traceable

    def mixture_entropy(self, f: Tensor) -> Tensor:
        return self.of.mixture_entropy(f) + mixtures.average(self.of.mean, f)

    def mixture_information(self, f: Tensor) -> Tensor:
        return self.of.mixture_information(f)

    def mixture_quantile(self, f: Tensor, q: float) -> Tensor:
        return self.of.mixture_quantile(f, q).exp()

    def mixture_crps(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute the CRPS of a mixture of log-normals.

        With m, s of log X: E|X − y| = y·(2Φ(z) − 1) − M·(2Φ(z − s) − 1), z = (log y − m)/s and
        M = exp(m + ½s²); E|X − X'| = M·(2Φ((m − m' + s²)/v) − 1) + M'·(2Φ((m' − m + s'²)/v) − 1),
        v² = s² + s'².

        Args:
            f: outputs, (S, B, *out).
            y: targets, (B, *event).
        """
        location, log_scale = self.of.location_log_scale(f)
        m = location.flatten(1)
        s = log_scale.exp().to(f.dtype).expand_as(location).flatten(1)
        columns = max(1, mixtures.CHUNK // len(m) ** 2)
        blocks = zip(
            m.split(columns, -1), s.split(columns, -1), y.flatten().split(columns), strict=True
        )
        return torch.cat([_log_normal_crps(*block) for block in blocks]).reshape(y.shape)

    def rescale(
        self, f: Tensor, shift: Tensor, scale: Tensor
    ) -> tuple[BoundLikelihood, Tensor] | None:
        """Return a likelihood and outputs of scale·y; None with a shift.

        Args:
            f: outputs, (S, B, *out).
            shift: the shift.
            scale: the factor, which broadcasts to y.
        """
        if bool((shift != 0).any()):
            return None
        return _exp(self.of.rescale(f, scale.log(), torch.ones_like(scale)))

    def temper(self, f: Tensor, temperature: float) -> tuple[BoundLikelihood, Tensor]:
        return _exp(self.of.temper(f, temperature))

    def per_sample(
        self, outputs: Tensor, parameters: Mapping[str, Tensor]
    ) -> tuple[BoundLikelihood, Tensor]:
        return _exp(self.of.per_sample(outputs, inner_parameters(parameters)))


def inner_parameters(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters of a likelihood by their names in the likelihood that it is made of.

    Draws of a fit in units of log y have these names already.

    Args:
        parameters: by name.
    """
    return {name.removeprefix(PARAMETERS): value for name, value in parameters.items()}


def _exp(log_y: tuple[BoundLikelihood, Tensor]) -> tuple[BoundLikelihood, Tensor]:
    """Return a likelihood and outputs of exp(y)."""
    likelihood, outputs = log_y
    if not isinstance(likelihood, LocationScale):
        raise ValueError(f"{type(likelihood).__name__} has no locations of log y")
    return BoundLog(likelihood), outputs


def _log_normal_crps(m: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Compute the CRPS of mixtures of log-normals, m and s (S, N), at y (N,)."""
    mean = torch.exp(m + s.square() / 2)
    z = (y.to(m.dtype).log() - m) / s
    spread = torch.sqrt(s.square().unsqueeze(0) + s.square().unsqueeze(1))
    shift = (m.unsqueeze(1) - m.unsqueeze(0) + s.square().unsqueeze(1)) / spread
    # By symmetry both terms of E|X − X'| have the same sum over the pairs. The terms with the mean
    # are differences of tails, which are accurate where a mean is larger than any draw.
    tails = _two_tails(shift).mean(1) - _two_tails(s - z)
    return (y * torch.erf(z * math.sqrt(0.5)) + mean * tails).mean(0)


def _two_tails(z: Tensor) -> Tensor:
    """Compute 2 − 2Φ(z)."""
    return torch.erfc(z * math.sqrt(0.5))


def check_positive(y: Tensor, what: str) -> None:
    """Raise a ValueError unless all targets are positive.

    Args:
        y: targets.
        what: what needs positive numbers, for the message.
    """
    if bool((y <= 0).any()):
        raise ValueError(
            f"{what} needs y > 0, got values in {y.min().item():.6g} .. {y.max().item():.6g}; for "
            "numbers of any sign use Gaussian, HeteroscedasticGaussian or StudentT"
        )


@final
@dataclass(frozen=True)
class Log(Likelihood):
    """Positive y whose logarithm has another likelihood: p(y | f) = p_of(log y | f)/y.

    ``LogNormal(noise)`` is ``Log(Gaussian(noise))``. A method by name standardizes log y for the
    fit, selects its noise as that of a Gaussian, and predicts y.

    Args:
        of: the likelihood of log y, ``Gaussian`` or ``HeteroscedasticGaussian``. (Of a Student-t
            log y the mean E[y] is infinite.)

    Example:
        >>> noise = bayou.HeteroscedasticGaussian()
        >>> posterior = bayou.fit(net, (x, prices), "map", likelihood=bayou.likelihoods.Log(noise))
    """

    of: Gaussian | HeteroscedasticGaussian

    def __post_init__(self) -> None:
        if not isinstance(self.of, Gaussian | HeteroscedasticGaussian):
            raise ValueError(
                "Log needs a Gaussian or HeteroscedasticGaussian of log y, whose E[y] exists, got "
                f"{self.of!r:.60}"
            )

    def bind(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> BoundLog:
        return BoundLog(self.of.bind(dtype=dtype, device=device))

    def outputs(self, targets: int) -> int:
        return self.of.outputs(targets)

    @property
    def parameter(self) -> str:
        return self.of.parameter

    def fixed_at(self, parameters: Mapping[str, Tensor]) -> Likelihood | None:
        of = self.of.fixed_at(inner_parameters(parameters))
        return Log(of) if isinstance(of, Gaussian) else None

    def of_log(self) -> Likelihood:
        return self.of

    @property
    def companion(self) -> Literal["none", "flag", "noise"]:
        return self.of.companion

    @property
    def scale_axis(self) -> int | None:
        return self.of.scale_axis

    @property
    def has_log_variances(self) -> bool:
        return self.of.has_log_variances


def LogNormal(
    noise: float | tuple[float, ...] = 0.1,
    learn: bool = False,
    units: float | tuple[float, ...] = 1.0,
) -> Log:
    """Return log-normal noise of one scale: log y ~ N(f, noise²), for y > 0.

    The median of y is exp(f) and its mean exp(f + ½·noise²): the noise is relative, for prices,
    times and amounts over several orders of magnitude.

    Args:
        noise: the standard deviation of log y, in ``units`` (default 0.1), one number or one for
            each output.
        learn: learn the noise (default False).
        units: the unit of ``noise``, one number (default 1) or one for each output.

    Example:
        >>> noise = bayou.likelihoods.LogNormal(0.5, learn=True)
        >>> posterior = bayou.fit(net, (x, prices), "laplace", likelihood=noise)
    """
    return Log(Gaussian(noise, learn, units))
