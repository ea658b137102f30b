"""Targets whose measurement noise is known for each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from bayou.core.constants import LOG_2PI
from bayou.core.rng import Seed
from bayou.likelihoods.base import BoundLikelihood, Likelihood, normal_functions
from bayou.likelihoods.continuous import BoundHomoscedastic, BoundPaired, UnitGaussian
from bayou.likelihoods.survival import paired_shape


@final
class BoundKnownNoise(BoundLikelihood):
    """y = (value, std) on halves of the last axis: value ~ N(f, std²).

    Args:
        has_variance: whether f has a last axis with the mean and the variance of the output.
    """

    is_linear_in_y = False

    def __init__(self, has_variance: bool = False) -> None:
        super().__init__()
        self.has_variance = has_variance

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        return paired_shape(f_shape[:-1] if self.has_variance else f_shape, "KnownNoise")

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        std = y.chunk(2, -1)[1]
        if bool((std <= 0).any()):
            raise ValueError(
                "the second half of y must be the standard deviation of each value, above 0, got "
                f"{std.min().item():.6g}"
            )

    def _shape_hint(
        self, f_shape: tuple[int, ...], expected: tuple[int, ...], got: tuple[int, ...]
    ) -> str:
        return "; y has the values and then, for each, the standard deviation of its noise"

    def _moments(self, f: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the mean and the variance of the output."""
        return (f[..., 0], f[..., 1]) if self.has_variance else (f, 0.0)

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        value, std = y.to(f.dtype).chunk(2, -1)
        mean, variance = self._moments(f)
        total = std.square() + variance
        return -0.5 * ((value - mean).square() / total + total.log() + LOG_2PI)

    def expected_log_prob(self, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        std = y.to(f.dtype).chunk(2, -1)[1]
        return self.pointwise(f, y) - 0.5 * variance / std.square()

    def marginal(self, f: Tensor, variance: Tensor) -> tuple[BoundLikelihood, Tensor]:
        return BoundKnownNoise(has_variance=True), torch.stack((f, variance), -1)

    def labels(self, y: Tensor) -> tuple[Tensor, Tensor]:
        value = y.chunk(2, -1)[0]
        return value, torch.ones_like(value, dtype=torch.bool)

    def for_targets(self, f: Tensor, y: Tensor) -> tuple[BoundLikelihood, Tensor]:
        """Return N(f, std²) with the noise of each row.

        Args:
            f: outputs, (S, B, *out).
            y: targets, (B, *event).
        """
        std = y.to(f.dtype).chunk(2, -1)[1]
        mean, variance = self._moments(f)
        log_std = 0.5 * torch.log(std.square() + variance)
        return BoundPaired(UnitGaussian()), torch.stack((mean, log_std.expand_as(mean)), -1)

    def without_weights(self, f: Tensor, y: Tensor) -> tuple[BoundLikelihood, Tensor]:
        """Return a Gaussian with a noise of 1, and 1/std².

        Args:
            f: outputs, (B, *out).
            y: targets, (B, *event).
        """
        unit = BoundHomoscedastic(UnitGaussian(), f.new_zeros(()))
        return unit, y.to(f.dtype).chunk(2, -1)[1].square().reciprocal()

    @property
    def is_gaussian(self) -> bool:
        return True

    # --- the value without its noise ---

    def mean(self, f: Tensor) -> Tensor:
        return self._moments(f)[0]

    def variance(self, f: Tensor) -> Tensor:
        return torch.zeros_like(self.mean(f))

    def function_variance(self, f: Tensor) -> Tensor | float:
        return self._moments(f)[1]

    def functions(self, f: Tensor, count: int) -> tuple[BoundLikelihood, Tensor]:
        if not self.has_variance:
            return super().functions(f, count)
        mean, variance = f.unbind(-1)
        return BoundKnownNoise(), normal_functions(mean, variance, count)

    def entropy(self, f: Tensor) -> Tensor:
        return torch.full_like(self.mean(f), -math.inf)

    def sample(self, f: Tensor, n: int | None = None, seed: Seed = None) -> Tensor:
        if self.has_variance:
            likelihood, outputs = self._value(f)
            return likelihood.sample(outputs, n, seed)
        return f.clone() if n is None else f.expand(n, *f.shape).clone()

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        if self.has_variance:
            likelihood, outputs = self._value(f)
            return likelihood.cdf(outputs, y)
        return (f <= y).to(f.dtype)

    def mixture_entropy(self, f: Tensor) -> Tensor:
        if self.has_variance:
            likelihood, outputs = self._value(f)
            return likelihood.mixture_entropy(outputs)
        return torch.full_like(f[0], -math.inf)

    def mixture_information(self, f: Tensor) -> Tensor:
        return torch.full_like(self.mean(f[0]), math.inf)

    def mixture_quantile(self, f: Tensor, q: float) -> Tensor:
        if self.has_variance:
            likelihood, outputs = self._value(f)
            return likelihood.mixture_quantile(outputs, q)
        return f.sort(0).values[math.ceil(q * len(f)) - 1]

    def mixture_crps(self, f: Tensor, y: Tensor) -> Tensor | None:
        likelihood, outputs = self.for_targets(f, y)
        return likelihood.mixture_crps(outputs, self.labels(y)[0])

    def _value(self, f: Tensor) -> tuple[BoundLikelihood, Tensor]:
        """Return the distribution of the value itself, N(mean, variance)."""
        mean, variance = f.unbind(-1)
        return BoundPaired(UnitGaussian()), torch.stack((mean, 0.5 * variance.log()), -1)


@final
@dataclass(frozen=True)
class KnownNoise(Likelihood):
    """Measurements with a known standard deviation for each row: value ~ N(f, std²).

    y (B, 2) has the value and the standard deviation of its noise (for D values y is (B, 2·D),
    values first). No noise is known for new rows: means, quantiles, intervals and draws of a
    prediction are those of the value without noise. Scores compare rows with the noise of each:
    ``predictive.log_prob(y)`` and the metrics add it.

    Example:
        >>> y = torch.stack((value, std), 1)
        >>> posterior = bayou.fit(net, (x, y), "laplace", likelihood=bayou.likelihoods.KnownNoise())
    """

    def bind(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> BoundKnownNoise:
        return BoundKnownNoise()

    def outputs(self, targets: int) -> int:
        return targets // 2

    def in_units(self, scale: Tensor) -> KnownNoise:
        return self

    @property
    def companion(self) -> Literal["none", "flag", "noise"]:
        return "noise"
