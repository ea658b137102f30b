"""Priors that are not normal."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from bayou.core import rng
from bayou.core.constants import LOG_2PI
from bayou.core.rng import Seed
from bayou.likelihoods.continuous import UnitStudentT
from bayou.priors.base import BoundPrior, Prior, log_of

EULER_GAMMA = 0.5772156649015329


@final
class BoundScaleMixture(BoundPrior):
    """The scale mixture of one tensor, with logit_pi and the logs of both scales."""

    logit_pi: Tensor
    log_scale1: Tensor
    log_scale2: Tensor

    def log_prob(self, w: Tensor) -> Tensor:
        w = self._event(w)
        first = self._component(w, logsigmoid(self.logit_pi), self.log_scale1)
        second = self._component(w, logsigmoid(-self.logit_pi), self.log_scale2)
        return self._sum(torch.logaddexp(first, second) - 0.5 * LOG_2PI)

    def _component(self, w: Tensor, log_weight: Tensor, log_scale: Tensor) -> Tensor:
        """Compute log of weight·N(w; 0, scale²), up to the constant −½·log 2π."""
        return log_weight - log_scale - 0.5 * (w * torch.exp(-log_scale)).square()

    def sample(self, n: int, seed: Seed = None, start: int = 0) -> Tensor:
        u = rng.uniform(n, self.shape, self.logit_pi, rng.fold(seed, "component"), start)
        is_first = u < self.logit_pi.sigmoid()
        noise = rng.normal(n, self.shape, self.logit_pi, rng.fold(seed, "normal"), start)
        return torch.where(is_first, self.log_scale1, self.log_scale2).exp() * noise


@final
@dataclass(frozen=True)
class ScaleMixture(Prior):
    """A mixture of two Normals around 0 (Blundell et al. 2015, arXiv:1505.05424).

    p(w) = pi·N(w; 0, scale1²) + (1 − pi)·N(w; 0, scale2²) for every weight. It has no closed KL
    from a Gaussian, so that variational methods estimate it from their draws.

    Args:
        pi: the weight of the first component (default 0.5).
        scale1: its standard deviation (default 1).
        scale2: that of the second component (default 0.0025).
        learn: learn pi and both scales (default False).
    """

    pi: float = 0.5
    scale1: float = 1.0
    scale2: float = 0.0025
    learn: bool = False

    def __post_init__(self) -> None:
        self._check_positive("scale1", "scale2")
        if not 0 < self.pi < 1:
            raise ValueError(
                "ScaleMixture pi must lie strictly between 0 and 1, "
                f"got {self.pi}; Normal is 0 or 1"
            )

    def _bind(
        self, shape: Sequence[int], reference: Tensor, fan_in: int | None, axes: tuple[int, int]
    ) -> BoundScaleMixture:
        logit_pi = torch.full_like(reference, math.log(self.pi) - math.log1p(-self.pi))
        return BoundScaleMixture(
            shape,
            self.learn,
            logit_pi=logit_pi,
            log_scale1=log_of(self.scale1, reference),
            log_scale2=log_of(self.scale2, reference),
        )


@final
class BoundLogUniform(BoundPrior):
    """The log-uniform prior of one tensor."""

    def log_prob(self, w: Tensor) -> Tensor:
        """Compute log p(w) = −Σ (log|w| + c).

        The prior is improper; c makes it agree with ``kl`` (KL → 0 as α → ∞).

        Args:
            w: values of the tensor, (..., *shape).
        """
        return self._sum(-w.abs().log() - 0.5 * (EULER_GAMMA + math.log(2) + LOG_2PI + 1))

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        """Compute −KL ≈ Σ k1·s(k2 + k3·log α) − ½·log(1 + 1/α) − k1, α = std²/mean².

        The approximation is within .0094 (Molchanov et al. 2017).

        Args:
            mean: the mean of every entry.
            std: the standard deviation of every entry.
        """
        tiny = torch.finfo(mean.dtype).tiny  # a mean of 0 has KL 0 and gradient 0, not nan
        log_alpha = 2 * (self._event(std).log() - self._event(mean).abs().clamp_min(tiny).log())
        gate = torch.sigmoid(-1.87320 - 1.48695 * log_alpha)
        return self._sum(0.63576 * gate - 0.5 * logsigmoid(log_alpha))

    def sample(self, n: int, seed: Seed = None, start: int = 0) -> Tensor:
        raise ValueError("LogUniform is improper: it has no draws")


@final
@dataclass(frozen=True)
class LogUniform(Prior):
    """The log-uniform prior p(w) ∝ 1/|w|, improper, of variational dropout.

    It is the prior under which the noise of a weight depends on α = std²/mean² alone, and makes
    weights sparse (Kingma et al. 2015, arXiv:1506.02557; Molchanov et al. 2017, arXiv:1701.05369).
    """

    def _bind(
        self, shape: Sequence[int], reference: Tensor, fan_in: int | None, axes: tuple[int, int]
    ) -> BoundLogUniform:
        return BoundLogUniform(shape)


@final
class BoundStudentT(BoundPrior):
    """The Student-t distribution of one tensor.

    Args:
        shape: the shape of the tensor.
        df: degrees of freedom.
        log_scale: the logarithm of the scale.
        learn: whether the scale is a parameter.
    """

    log_scale: Tensor

    def __init__(
        self, shape: Sequence[int], df: float, log_scale: Tensor, learn: bool = False
    ) -> None:
        super().__init__(shape, learn, log_scale=log_scale)
        self.unit: UnitStudentT = UnitStudentT(df)

    def log_prob(self, w: Tensor) -> Tensor:
        z = self._event(w) * torch.exp(-self.log_scale)
        return self._sum(self.unit.log_density(z) - self.log_scale)

    def sample(self, n: int, seed: Seed = None, start: int = 0) -> Tensor:
        return self.log_scale.exp() * self.unit.draw(n, self.shape, self.log_scale, seed, start)


@final
@dataclass(frozen=True)
class StudentT(Prior):
    """A Student-t prior, with heavy tails as those of trained weights (Fortuin et al. 2022).

    p(w) = t(w/scale; df)/scale, t(z; df) ∝ (1 + z²/df)^(−(df + 1)/2) for every weight
    (arXiv:2102.06571). It has no closed KL from a Gaussian.

    Args:
        df: degrees of freedom (default 4).
        scale: the scale of w (default 1).
        learn: learn the scale (default False).
    """

    df: float = 4.0
    scale: float = 1.0
    learn: bool = False

    def __post_init__(self) -> None:
        self._check_positive("df", "scale")

    def _bind(
        self, shape: Sequence[int], reference: Tensor, fan_in: int | None, axes: tuple[int, int]
    ) -> BoundStudentT:
        return BoundStudentT(shape, self.df, log_of(self.scale, reference), self.learn)


@final
class BoundDensity(BoundPrior):
    """A density of one tensor as its prior.

    Args:
        shape: the shape of the tensor.
        density: an object with ``log_prob``, or a function.
    """

    def __init__(self, shape: Sequence[int], density: Any) -> None:
        super().__init__(shape)
        self.density = density

    def log_prob(self, w: Tensor) -> Tensor:
        w = self._event(w)
        value: Tensor = getattr(self.density, "log_prob", self.density)(w)
        if value.shape != w.shape[: w.ndim - len(self.shape)]:
            raise ValueError(
                f"log_prob of {type(self.density).__name__} gave shape {tuple(value.shape)} for a "
                f"tensor of shape {tuple(w.shape)}; it must sum over the trailing axes "
                f"{tuple(self.shape)}"
            )
        return value

    def kl(self, mean: Tensor, std: Tensor) -> Tensor | None:
        kl = getattr(self.density, "kl", None)
        return None if kl is None else kl(mean, std)

    def sample(self, n: int, seed: Seed = None, start: int = 0) -> Tensor:
        sample = getattr(self.density, "sample", None)
        if sample is None:
            raise ValueError(
                f"{type(self.density).__name__} gives a density but has no sample(n, seed, start)"
            )
        draws: Tensor = sample(n, seed, start)
        return draws


@final
@dataclass(frozen=True)
class DensityPrior(Prior):
    """Any density p(w) as a prior.

    A module is copied when it is bound, so that the posterior that it belongs to does not change.

    Args:
        density: an object with ``log_prob``, or a function: tensors w (..., *shape) to log p(w)
            (...). Its ``kl(mean, std)`` and ``sample(n, seed, start)`` are used if it has them.
        learn: train the parameters of a module too (default False).

    Example:
        >>> laplace = bayou.priors.DensityPrior(lambda w: -w.abs().sum((-2, -1)))
        >>> prior = {"*.weight": laplace, "*": bayou.Normal(1.0)}
        >>> posterior = bayou.fit(net, (x, y), method=bayou.VI(), prior=prior)
    """

    density: Any
    learn: bool = False

    def __post_init__(self) -> None:
        if not hasattr(self.density, "log_prob") and not callable(self.density):
            raise ValueError(
                f"DensityPrior needs an object with log_prob or a function, got {self.density!r}"
            )

    def _bind(
        self, shape: Sequence[int], reference: Tensor, fan_in: int | None, axes: tuple[int, int]
    ) -> BoundPrior:
        density = self.density
        if isinstance(density, nn.Module):
            density = copy.deepcopy(density).requires_grad_(self.learn).to(reference)
        if isinstance(density, BoundPrior):  # itself, so that a Normal keeps its closed forms
            if density.shape != torch.Size(shape):
                raise ValueError(
                    f"the prior is for a tensor of shape {tuple(density.shape)}, got {tuple(shape)}"
                )
            return density
        return BoundDensity(shape, density)
