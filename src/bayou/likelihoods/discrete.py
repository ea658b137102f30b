"""Discrete likelihoods: classes, binary outcomes, counts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.nn.functional import logsigmoid

from bayou import rng
from bayou.constants import LOG_2PI
from bayou.likelihoods.base import BoundLikelihood, Likelihood
from bayou.likelihoods.continuous import UnitNormal
from bayou.likelihoods.information import Independent, Information, Scores, Softmax
from bayou.likelihoods.mixtures import (
    KNOTS,
    average,
    by_rows,
    density,
    entr,
    entropy_integral,
    invert,
    spread_knots,
    widen,
)
from bayou.rng import Seed

COUNTS = 1024


class FiniteLikelihood(BoundLikelihood):
    """y is one of K outcomes 0 .. K − 1, with the log-probabilities ``log_pmf``."""

    support = "classes"

    @abstractmethod
    def log_pmf(self, f: Tensor) -> Tensor:
        """log p(y_i = k | f), the outcomes on a new or moved last axis: (*target_shape, K)."""

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        log_pmf = self.log_pmf(f)
        shape = torch.broadcast_shapes(y.shape, log_pmf.shape[:-1])
        return log_pmf.expand(*shape, -1).gather(-1, y.long().expand(shape).unsqueeze(-1)).squeeze(-1)

    def mean(self, f: Tensor) -> Tensor:
        p = self.log_pmf(f).exp()
        return p if self.support == "classes" else (p * torch.arange(p.shape[-1], device=p.device)).sum(-1)

    def variance(self, f: Tensor) -> Tensor:
        mean = self.mean(f)
        if self.support == "classes":
            return mean * (1 - mean)
        p = self.log_pmf(f).exp()
        return (p * (torch.arange(p.shape[-1], device=p.device) - mean.unsqueeze(-1)).square()).sum(-1)

    def entropy(self, f: Tensor) -> Tensor:
        return entr(self.log_pmf(f).exp()).sum(-1)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        cumulative = self.log_pmf(f).exp().cumsum(-1)
        k = y.long().expand(cumulative.shape[:-1])
        last = cumulative.shape[-1] - 1
        value = cumulative.gather(-1, k.clamp(0, last).unsqueeze(-1)).squeeze(-1)
        return torch.where(k < 0, 0.0, torch.where(k >= last, 1.0, value)).to(f.dtype)

    def sample(self, f: Tensor, n: int | None = None, seed: Seed = None) -> Tensor:
        cumulative = self.log_pmf(f).exp().cumsum(-1)
        u = self.draw_noise(rng.uniform, f, n, seed)
        u = u.unsqueeze(-1) if n is None else u.movedim(0, -1)
        k = torch.searchsorted(cumulative.contiguous(), u.contiguous(), right=True).clamp_max(cumulative.shape[-1] - 1)
        return k.squeeze(-1) if n is None else k.movedim(-1, 0)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        """Σ_i Σ_k p_ik·∇log p_ik·∇log p_ikᵀ."""

        def one(f: Tensor) -> Tensor:
            return self.log_pmf(f.unsqueeze(0)).squeeze(0)

        gradients = vmap(jacrev(one))(f).reshape(len(f), -1, f[0].numel())  # (B, event·K, out)
        roots = self.log_pmf(f).mul(0.5).exp().reshape(len(f), -1, 1)
        return Scores.of_squares([(roots * gradients).movedim(1, 0).detach()], f.shape, type(self).__name__)

    @property
    def traceable(self) -> tuple[str, ...]:
        return "entropy", "mutual_information"

    def mixture_pmf(self, f: Tensor) -> Tensor:
        """1/S Σ_s p(y_i = k | f_s): (B, *event, K)."""
        return average(lambda f: self.log_pmf(f).exp(), f)

    def mixture_entropy(self, f: Tensor) -> Tensor:
        return entr(self.mixture_pmf(f)).sum(-1)

    def mixture_information(self, f: Tensor) -> Tensor:
        """E_s KL(p_s ‖ p), without cancellation."""
        tiny = torch.finfo(f.dtype).tiny
        log_pmf = self.mixture_pmf(f).clamp_min(tiny).log()

        def divergence(f: Tensor) -> Tensor:
            log_p = self.log_pmf(f).clamp_min(math.log(tiny))
            return (log_p.exp() * (log_p - log_pmf)).sum(-1)

        return average(divergence, f).clamp_min(0.0)

    def mixture_quantile(self, f: Tensor, q: float) -> Tensor:
        cumulative = self.mixture_pmf(f).cumsum(-1)
        return (cumulative < q).sum(-1).clamp_max(cumulative.shape[-1] - 1)


@final
class BoundCategorical(FiniteLikelihood):
    """One of C classes; logits on ``class_axis`` of f."""

    logits = True

    def __init__(self, class_axis: int = -1) -> None:
        super().__init__()
        self.class_axis = class_axis

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        if len(f_shape) < 1 - self.class_axis:
            raise ValueError(f"outputs {tuple(f_shape)} have no batch axis before their class axis {self.class_axis}")
        shape = list(f_shape)
        del shape[self.class_axis]
        return torch.Size(shape)

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        if isinstance(y, Tensor) and y.is_floating_point():
            one_hot = y.shape == torch.Size(f_shape) and bool(
                (y.sum(self.class_axis) == 1).all() and (y * y == y).all()
            )
            hint = "for numbers pass likelihood=bayou.Gaussian(0.1, learn=True), for classes pass y.long()"
            raise ValueError(
                f"Categorical(), the default likelihood, needs class indices (integers) in y, got {y.dtype}; "
                + (f"for one-hot vectors pass y.argmax({self.class_axis})" if one_hot else hint)
            )
        super().validate(f_shape, y)

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        low, high, classes = int(y.min()), int(y.max()), f_shape[self.class_axis]
        if low < 0 or high >= classes:
            way = "use Bernoulli() for one output" if classes == 1 else "count the classes from 0, or give more outputs"
            raise ValueError(f"y must lie in 0 .. {classes - 1} for {classes} classes, got {low} .. {high}; {way}")

    def _shape_hint(self, f_shape: tuple[int, ...], expected: tuple[int, ...], got: tuple[int, ...]) -> str:
        if got == f_shape:
            return "; class indices, not one-hot vectors"
        if len(f_shape) > 2 and got == (f_shape[0], *f_shape[2:]):
            return f"; classes on axis 1? Categorical(class_axis={1 - len(f_shape)})"
        return super()._shape_hint(f_shape, expected, got)

    def log_pmf(self, f: Tensor) -> Tensor:
        return f.movedim(self.class_axis, -1).log_softmax(-1)

    def mean(self, f: Tensor) -> Tensor:
        return f.movedim(self.class_axis, -1).softmax(-1)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        return Softmax(f, self.class_axis)


@final
@dataclass(frozen=True)
class Categorical(Likelihood):
    """p(y = c | f) = softmax(f)_c: f (B, *out, C) and y (B, *out), integers.

    Probabilities always have the classes last.

    Args:
        class_axis: the axis of the classes in f: −3 for f (B, C, H, W) and y (B, H, W), −2 for (B, C, T).
    """

    class_axis: int = -1

    def __post_init__(self) -> None:
        if isinstance(self.class_axis, bool) or not isinstance(self.class_axis, int) or self.class_axis >= 0:
            raise ValueError(f"Categorical class_axis counts from the end (-1, -3 for images), got {self.class_axis!r}")

    def bind(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> BoundCategorical:
        return BoundCategorical(self.class_axis)


@final
class BoundBernoulli(FiniteLikelihood):
    """y is 0 or 1 for every coordinate of f, a logit."""

    logits = True

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError(f"y must be 0 or 1, got values in {y.min().item()} .. {y.max().item()}")

    def log_pmf(self, f: Tensor) -> Tensor:
        return torch.stack((logsigmoid(-f), logsigmoid(f)), -1)

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        return logsigmoid((2 * y.to(f.dtype) - 1) * f)

    def mean(self, f: Tensor) -> Tensor:
        return f.sigmoid()

    def sample(self, f: Tensor, n: int | None = None, seed: Seed = None) -> Tensor:
        return (self.draw_noise(rng.uniform, f, n, seed) < f.sigmoid()).to(f.dtype)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        return Independent(f.sigmoid() * (-f).sigmoid())

    def mixture_quantile(self, f: Tensor, q: float) -> Tensor:
        return super().mixture_quantile(f, q).to(f.dtype)


@final
@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """p(y = 1 | f) = sigmoid(f): f and y (B, *out), y of any dtype but 0 or 1."""

    def bind(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> BoundBernoulli:
        return BoundBernoulli()


@final
class BoundPoisson(BoundLikelihood):
    """Counts with rate exp(f)."""

    support = "counts"

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        if bool((y < 0).any()) or (y.is_floating_point() and bool((y != y.round()).any())):
            raise ValueError(f"y must hold counts 0, 1, 2, ..., got values in {y.min().item()} .. {y.max().item()}")

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        y = y.to(f.dtype)
        return y * f - f.exp() - torch.lgamma(y + 1)

    def mean(self, f: Tensor) -> Tensor:
        return f.exp()

    def variance(self, f: Tensor) -> Tensor:
        return f.exp()

    def entropy(self, f: Tensor) -> Tensor:
        """Summed over the counts for rates below 50, above by ½·log(2πeλ) − 1/12λ − 1/24λ² − 19/360λ³ (to 1e-7)."""
        rate = f.exp().clamp_min(50.0)
        large = 0.5 * (LOG_2PI + 1 + rate.log()) - (1 / 12 + (1 / 24 + 19 / 360 / rate) / rate) / rate
        small = f.clamp_max(math.log(50.0))
        log_zero = -small.exp()
        total = torch.zeros_like(f)
        for count in range(130):
            total = total + entr((count * small + log_zero - math.lgamma(count + 1)).exp())
        return torch.where(f.exp() > 50.0, large, total)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        """P(Y ≤ y) = Q(⌊y⌋ + 1, λ), the regularized upper incomplete gamma function."""
        y = y.to(f.dtype).floor()
        return torch.where(y < 0, 0.0, torch.special.gammaincc(y.clamp_min(0.0) + 1, f.exp()))

    def sample(self, f: Tensor, n: int | None = None, seed: Seed = None) -> Tensor:
        """Counts in the dtype of f, by inversion of the cdf, so that a draw depends on its index alone."""
        u = self.draw_noise(rng.uniform, f, n, seed)
        bracket = widen(partial(self.cdf, f), u, torch.full_like(u, -1.0), torch.zeros_like(u), counts=True)
        return invert(partial(self.cdf, f), u, *bracket)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        return Independent(f.exp())

    def mixture_entropy(self, f: Tensor) -> Tensor:
        """Counts below 1,024 are summed one by one, above integrated."""

        def total(f: Tensor) -> Tensor:
            knots = spread_knots(f.exp(), (0.5 * f).exp(), UnitNormal().knots)
            last = min(COUNTS, int(knots[-1].max().ceil().nan_to_num(COUNTS)) + 20)
            counts = torch.arange(last, dtype=f.dtype, device=f.device).reshape(-1, *[1] * (f.ndim - 1))
            small = entr(density(self.pointwise, f, counts)).sum(0)
            if last < COUNTS:
                return small
            return small + entropy_integral(self.pointwise, f, knots.clamp_min(last - 0.5))

        return by_rows(total, f, max(4 * KNOTS, 20 * len(f)))


@final
@dataclass(frozen=True)
class Poisson(Likelihood):
    """p(y | f) = exp(f)^y·exp(−exp(f))/y!: f the log-rates, y counts, (B, *out) both."""

    def bind(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> BoundPoisson:
        return BoundPoisson()
