"""Discrete likelihoods: classes, yes or no, counts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bayou import rng
from bayou.likelihoods.base import BoundLikelihood, Likelihood, entr
from bayou.rng import Seed


class FiniteLikelihood(BoundLikelihood):
    """y is one of K outcomes 0 .. K − 1."""

    @abstractmethod
    def log_pmf(self, f: Tensor) -> Tensor:
        """log p(y_i = k | f), the outcomes on a new or moved last axis: (*target_shape, K)."""

    @abstractmethod
    def probs(self, f: Tensor) -> Tensor:
        """What the network says: (..., B, *out, C) for classes, (..., B, *out) for a yes or no."""

    def mean(self, f: Tensor) -> Tensor:
        return self.probs(f)

    def variance(self, f: Tensor) -> Tensor:
        p = self.probs(f)
        return p * (1 - p)

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
        u = self._noise(rng.uniform, f, n, seed)
        u = u.unsqueeze(-1) if n is None else u.movedim(0, -1)
        k = torch.searchsorted(cumulative.contiguous(), u.contiguous(), right=True).clamp_max(cumulative.shape[-1] - 1)
        return k.squeeze(-1) if n is None else k.movedim(-1, 0)


@final
class BoundCategorical(FiniteLikelihood):
    """One of C classes; logits on ``class_axis`` of f."""

    def __init__(self, class_axis: int = -1) -> None:
        super().__init__()
        self.class_axis = class_axis

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        if len(f_shape) < 1 - self.class_axis:
            raise ValueError(f"outputs {tuple(f_shape)} have no batch axis before their class axis {self.class_axis}")
        shape = list(f_shape)
        del shape[self.class_axis]
        return torch.Size(shape)

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        if y.is_floating_point():
            raise ValueError(f"y must hold class indices (integers), got {y.dtype}; one-hot? y.argmax(-1)")
        low, high, classes = int(y.min()), int(y.max()), f_shape[self.class_axis]
        if low < 0 or high >= classes:
            raise ValueError(f"y must lie in 0 .. {classes - 1} for {classes} classes, got {low} .. {high}")

    def _shape_hint(self, f_shape: tuple[int, ...], expected: tuple[int, ...], got: tuple[int, ...]) -> str:
        if got == f_shape:
            return "; class indices, not one-hot vectors"
        if len(f_shape) > 2 and got == (f_shape[0], *f_shape[2:]):
            return f"; classes on axis 1? Categorical(class_axis={1 - len(f_shape)})"
        return super()._shape_hint(f_shape, expected, got)

    def log_pmf(self, f: Tensor) -> Tensor:
        return f.movedim(self.class_axis, -1).log_softmax(-1)

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        log_pmf = self.log_pmf(f)
        return log_pmf.gather(-1, y.long().expand(log_pmf.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def probs(self, f: Tensor) -> Tensor:
        return f.movedim(self.class_axis, -1).softmax(-1)


@final
@dataclass(frozen=True)
class Categorical(Likelihood):
    """p(y = c | f) = softmax(f)_c: f (B, *out, C) and y (B, *out), integers.

    Networks that put the classes elsewhere say so: ``class_axis=-3`` for f (B, C, H, W) and y (B, H, W), ``-2`` for
    (B, C, T). Probabilities always have the classes last.
    """

    class_axis: int = -1

    def __post_init__(self) -> None:
        if isinstance(self.class_axis, bool) or not isinstance(self.class_axis, int) or self.class_axis >= 0:
            raise ValueError(f"Categorical class_axis counts from the end (-1, -3 for images), got {self.class_axis!r}")

    def bind(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> BoundCategorical:
        return BoundCategorical(self.class_axis)


@final
class BoundBernoulli(FiniteLikelihood):
    """Yes (1) or no (0) for every coordinate of f, a logit."""

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError(f"y must be 0 or 1, got values in {y.min().item()} .. {y.max().item()}")

    def log_pmf(self, f: Tensor) -> Tensor:
        return torch.stack((logsigmoid(-f), logsigmoid(f)), -1)

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        return logsigmoid((2 * y.to(f.dtype) - 1) * f)

    def probs(self, f: Tensor) -> Tensor:
        return f.sigmoid()

    def sample(self, f: Tensor, n: int | None = None, seed: Seed = None) -> Tensor:
        return (self._noise(rng.uniform, f, n, seed) < f.sigmoid()).to(f.dtype)


@final
@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """p(y = 1 | f) = sigmoid(f): f and y (B, *out), y of any dtype but 0 or 1."""

    def bind(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> BoundBernoulli:
        return BoundBernoulli()


@final
class BoundPoisson(BoundLikelihood):
    """Counts with rate exp(f)."""

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
        large = 0.5 * (math.log(2 * math.pi) + 1 + rate.log()) - (1 / 12 + (1 / 24 + 19 / 360 / rate) / rate) / rate
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
        """Counts in the dtype of f, by inversion of the cdf: a draw depends on its index alone."""
        return count_quantile(lambda y: self.cdf(f, y), self._noise(rng.uniform, f, n, seed))


@final
@dataclass(frozen=True)
class Poisson(Likelihood):
    """p(y | f) = exp(f)^y·exp(−exp(f))/y!: f the log-rates, y counts, (B, *out) both."""

    def bind(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> BoundPoisson:
        return BoundPoisson()


def count_quantile(cdf: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
    """The smallest count y ≥ 0 with cdf(y) ≥ q, for every entry of q: doubling, then bisection."""
    high = torch.zeros_like(q)
    low = high - 1
    for _ in range(64):
        short = cdf(high) < q
        if not bool(short.any()):
            break
        low, high = torch.where(short, high, low), torch.where(short, 2 * high + 1, high)
    for _ in range(64):  # not while: beyond 2^24 float32 has no count in between
        if not bool((high - low > 1).any()):
            break
        middle = ((low + high) / 2).floor()
        short = cdf(middle) < q
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    return high
