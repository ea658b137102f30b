"""Discrete likelihoods: classes, binary outcomes, counts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
        return self.at(self.log_pmf(f), y)

    def at(self, log_pmf: Tensor, y: Tensor) -> Tensor:
        """The log-probability of y."""
        y, _ = torch.broadcast_tensors(
            y.long(), log_pmf[..., 0]
        )  # broadcast_shapes would import sympy: half a second
        return log_pmf.expand(*y.shape, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def mean(self, f: Tensor) -> Tensor:
        p = self.log_pmf(f).exp()
        return (
            p
            if self.support == "classes"
            else (p * torch.arange(p.shape[-1], device=p.device)).sum(-1)
        )

    def variance(self, f: Tensor) -> Tensor:
        mean = self.mean(f)
        if self.support == "classes":
            return mean * (1 - mean)
        p = self.log_pmf(f).exp()
        return (p * (torch.arange(p.shape[-1], device=p.device) - mean.unsqueeze(-1)).square()).sum(
            -1
        )

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
        k = torch.searchsorted(cumulative.contiguous(), u.contiguous(), right=True).clamp_max(
            cumulative.shape[-1] - 1
        )
        return k.squeeze(-1) if n is None else k.movedim(-1, 0)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        """Σ_i Σ_k p_ik·∇log p_ik·∇log p_ikᵀ."""

        def one(f: Tensor) -> Tensor:
            return self.log_pmf(f.unsqueeze(0)).squeeze(0)

        gradients = vmap(jacrev(one))(f).reshape(len(f), -1, f[0].numel())  # (B, event·K, out)
        roots = self.log_pmf(f).mul(0.5).exp().reshape(len(f), -1, 1)
        return Scores.of_squares(
            [(roots * gradients).movedim(1, 0).detach()], f.shape, type(self).__name__
        )

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
    """One of C classes; logits on ``class_axis`` of f. ``Categorical`` describes the arguments."""

    logits = True
    weight: Tensor | None  # (C,)

    def __init__(
        self,
        class_axis: int = -1,
        ignore_index: int | None = None,
        shift: int = 0,
        label_smoothing: float = 0.0,
        weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.class_axis, self.ignore_index = class_axis, ignore_index
        self.shift, self.label_smoothing = shift, label_smoothing
        self.register_buffer("weight", weight, persistent=False)
        self.plain = ignore_index is None and not shift and not label_smoothing and weight is None

    def for_scores(self) -> BoundCategorical:
        return BoundCategorical(self.class_axis, self.ignore_index, self.shift)

    def labels(self, y: Tensor) -> tuple[Tensor, Tensor]:
        known = (
            torch.ones_like(y, dtype=torch.bool)
            if self.ignore_index is None
            else y != self.ignore_index
        )
        y = y.long().masked_fill(~known, 0)
        if self.shift:  # y_{t + shift}
            y, known = (
                torch.cat((part[..., self.shift :], torch.zeros_like(part[..., : self.shift])), -1)
                for part in (y, known)
            )
        return y, known

    def expected(self, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """By Jensen: f_y − log Σ_k exp(f_k + ½·variance_k)."""
        f, above = (part.movedim(self.class_axis, -1) for part in (f, f + variance / 2))
        return self.at(f - above.logsumexp(-1, keepdim=True), y)

    def at(self, log_pmf: Tensor, y: Tensor) -> Tensor:
        if self.plain:
            return super().at(log_pmf, y)
        y, known = self.labels(y)
        value = super().at(log_pmf, y)
        if self.weight is not None:
            value = value * self.weight[y]
        if self.label_smoothing:
            log_pmf = log_pmf if self.weight is None else log_pmf * self.weight
            value = (1 - self.label_smoothing) * value + self.label_smoothing * log_pmf.mean(-1)
        return torch.where(known, value, 0.0)

    def unweighted(self, f: Tensor, y: Tensor) -> tuple[BoundLikelihood, Tensor | None]:
        """Of −Σ_c a_c·log p_c the Hessian in f is Σ_c a_c times that of −log p_y, which is the same
        for all y.
        """
        if self.plain:
            return self, None
        y, known = self.labels(y)
        count = known.to(f.dtype)
        if self.weight is not None:
            smooth = self.label_smoothing
            count = count * ((1 - smooth) * self.weight[y] + smooth * self.weight.mean())
        return BoundCategorical(self.class_axis), count.unsqueeze(self.class_axis).expand_as(f)

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        if len(f_shape) < 1 - self.class_axis:
            raise ValueError(
                f"outputs {tuple(f_shape)} have no batch axis before their class axis {self.class_axis}"
            )
        return torch.Size(_without(f_shape, self.class_axis))

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
        classes = f_shape[self.class_axis]
        if self.weight is not None and len(self.weight) != classes:
            raise ValueError(
                f"Categorical has {len(self.weight)} weights for {classes} classes; give one for each"
            )
        if self.shift and (y.ndim < 2 or y.shape[-1] <= self.shift):
            raise ValueError(
                f"y {tuple(y.shape)} has no label {self.shift} after another, as shift={self.shift} needs: y (B, T)"
            )
        y = y if self.ignore_index is None else y[y != self.ignore_index]
        low, high = (int(y.min()), int(y.max())) if y.numel() else (0, 0)
        if low < 0 or high >= classes:
            way = (
                "use Bernoulli() for one output"
                if classes == 1
                else "count the classes from 0, or give more outputs"
            )
            void = low if low < 0 else high
            others = y[y != void]
            if others.numel() and int(others.min()) >= 0 and int(others.max()) < classes:
                way = (
                    f"{way}; if {void} marks labels to leave out, Categorical(ignore_index={void})"
                )
            raise ValueError(
                f"y must lie in 0 .. {classes - 1} for {classes} classes, got {low} .. {high}; {way}"
            )

    def _shape_hint(
        self, f_shape: tuple[int, ...], expected: tuple[int, ...], got: tuple[int, ...]
    ) -> str:
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
    """p(y = c | f) = softmax(f)_c: f (B, *out, C) and y (B, *out), integers. The coordinates of y
    are independent.

    Probabilities always have the classes last. With ``label_smoothing`` or ``weight`` a fit
    maximizes Σ_c a_c·log p_c for every label instead of log p_y, as ``torch.nn.CrossEntropyLoss``,
    which is not the log of a density; predictions and scores use p.

    Args:
        class_axis: the axis of the classes in f: −3 for f (B, C, H, W) and y (B, H, W), −2 for (B,
            C, T). By default ``bayou.fit`` finds it from the shapes of f and y; elsewhere it is the
            last.
        ignore_index: a value of y that is no class: its log-probability counts as 0, in scores it
            is left out.
        shift: the output at t predicts the label at t + shift: 1 for causal language models, f (B,
            T, C) and y (B, T). Statistics of a prediction and draws of y are those of the label
            that the output at t predicts.
        label_smoothing: ε of a_c = w_c·((1 − ε)·1[y = c] + ε/C).
        weight: w_c of every class, 1 by default.
    """

    class_axis: int | None = None
    ignore_index: int | None = None
    shift: int = 0
    label_smoothing: float = 0.0
    weight: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        axis = self.class_axis
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int) or axis >= 0):
            raise ValueError(
                f"Categorical class_axis counts from the end (-1, -3 for images), got {axis!r}"
            )
        whole = "a whole number"
        self._check(
            ["ignore_index"], lambda value: value is None or type(value) is int, f"{whole} or None"
        )
        self._check(
            ["shift"], lambda value: type(value) is int and value >= 0, f"{whole} of at least 0"
        )
        self._check(
            ["label_smoothing"],
            lambda value: isinstance(value, int | float) and 0 <= value < 1,
            "in [0, 1)",
        )
        if self.weight is not None:
            object.__setattr__(self, "weight", tuple(map(float, self.weight)))
        self._check(
            ["weight"],
            lambda value: value is None or all(0 <= w < math.inf for w in value),
            "non-negative",
        )
        if self.shift and axis not in (None, -1):
            raise ValueError(
                f"Categorical shift={self.shift} is for f (B, T, C), got class_axis={axis}"
            )

    def for_shapes(self, f_shape: Sequence[int], y_shape: Sequence[int]) -> Categorical:
        """With the axis of the classes in outputs of this shape: the last or the first after the
        rows, as y fits.

        Of sequences that both fit it is the last; for images that is an error.
        """
        axes = {
            axis for axis in (-1, 1 - len(f_shape)) if _without(f_shape, axis) == tuple(y_shape)
        }
        if len(axes) == 2 and len(f_shape) > 3:
            raise ValueError(
                f"outputs {tuple(f_shape)} and y {tuple(y_shape)} may have the classes on axis 1 or on the last; give "
                f"Categorical(class_axis={1 - len(f_shape)}) or class_axis=-1"
            )
        return replace(self, class_axis=max(axes, default=-1))

    def bind(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> BoundCategorical:
        weight = (
            None if self.weight is None else torch.tensor(self.weight, dtype=dtype, device=device)
        )
        axis = -1 if self.class_axis is None else self.class_axis
        return BoundCategorical(axis, self.ignore_index, self.shift, self.label_smoothing, weight)


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return tuple(shape[:axis]) + (tuple(shape[axis + 1 :]) if axis != -1 else ())


@final
class BoundBernoulli(FiniteLikelihood):
    """y is 0 or 1 for every coordinate of f, a logit."""

    logits = True

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError(
                f"y must be 0 or 1, got values in {y.min().item()} .. {y.max().item()}"
            )

    def log_pmf(self, f: Tensor) -> Tensor:
        return torch.stack((logsigmoid(-f), logsigmoid(f)), -1)

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        return logsigmoid((2 * y.to(f.dtype) - 1) * f)

    def expected(self, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """By Jensen: −log(1 + E exp(∓F))."""
        return logsigmoid((2 * y.to(f.dtype) - 1) * f - variance / 2)

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

    def bind(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> BoundBernoulli:
        return BoundBernoulli()


@final
class BoundPoisson(BoundLikelihood):
    """Counts with rate exp(f)."""

    support = "counts"

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        if bool((y < 0).any()) or (y.is_floating_point() and bool((y != y.round()).any())):
            raise ValueError(
                f"y must hold counts 0, 1, 2, ..., got values in {y.min().item()} .. {y.max().item()}"
            )

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        y = y.to(f.dtype)
        return y * f - f.exp() - torch.lgamma(y + 1)

    def expected(self, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        return self.pointwise(f, y) + f.exp() - torch.exp(f + variance / 2)

    def mean(self, f: Tensor) -> Tensor:
        return f.exp()

    def variance(self, f: Tensor) -> Tensor:
        return f.exp()

    def entropy(self, f: Tensor) -> Tensor:
        """Summed over the counts for rates below 50, above by ½·log(2πeλ) − 1/12λ − 1/24λ² −
        19/360λ³ (to 1e-7).
        """
        rate = f.exp().clamp_min(50.0)
        large = (
            0.5 * (LOG_2PI + 1 + rate.log()) - (1 / 12 + (1 / 24 + 19 / 360 / rate) / rate) / rate
        )
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
        """Counts in the dtype of f, by inversion of the cdf, so that a draw depends on its index
        alone.
        """
        u = self.draw_noise(rng.uniform, f, n, seed)
        bracket = widen(
            partial(self.cdf, f), u, torch.full_like(u, -1.0), torch.zeros_like(u), counts=True
        )
        return invert(partial(self.cdf, f), u, *bracket)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        return Independent(f.exp())

    def mixture_entropy(self, f: Tensor) -> Tensor:
        """Counts below 1,024 are summed one by one, above integrated."""

        def total(f: Tensor) -> Tensor:
            knots = spread_knots(f.exp(), (0.5 * f).exp(), UnitNormal().knots)
            last = min(COUNTS, int(knots[-1].max().ceil().nan_to_num(COUNTS)) + 20)
            counts = torch.arange(last, dtype=f.dtype, device=f.device).reshape(
                -1, *[1] * (f.ndim - 1)
            )
            small = entr(density(self.pointwise, f, counts)).sum(0)
            if last < COUNTS:
                return small
            return small + entropy_integral(self.pointwise, f, knots.clamp_min(last - 0.5))

        return by_rows(total, f, max(4 * KNOTS, 20 * len(f)))


@final
@dataclass(frozen=True)
class Poisson(Likelihood):
    """p(y | f) = exp(f)^y·exp(−exp(f))/y!: f the log-rates, y counts, (B, *out) both."""

    def bind(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> BoundPoisson:
        return BoundPoisson()
