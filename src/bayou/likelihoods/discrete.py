"""Discrete likelihoods: classes, binary outcomes, counts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.nn.functional import logsigmoid

from bayou.core import rng
from bayou.core.constants import LOG_2PI
from bayou.core.rng import Seed
from bayou.core.specs import later_field
from bayou.likelihoods.base import BoundLikelihood, Likelihood, positive_mean
from bayou.likelihoods.continuous import UnitGaussian
from bayou.likelihoods.information import Independent, Information, Scores, Softmax
from bayou.likelihoods.mixtures import (
    KNOTS,
    SUM_NUMBERS,
    average,
    by_rows,
    density,
    entr,
    entropy_integral,
    spread_knots,
)

MAX_SUMMED_COUNTS = 1024  # in an entropy; larger ones are integrated
MAX_SUMMED_RATE = 50.0  # of a Poisson, whose entropy is summed over the counts
ENTROPY_COUNTS = 130  # in that sum
MAX_SCORED_COUNTS = 8192  # in a sum for a score or an entropy
COUNT_TAIL = 1e-7  # probability of the counts that such a sum leaves out


class FiniteLikelihood(BoundLikelihood):
    """A y that is one of K outcomes 0 .. K − 1, with the log-probabilities ``log_pmf``."""

    support: ClassVar[Literal["classes", "counts", "real"]] = "classes"

    @abstractmethod
    def log_pmf(self, f: Tensor) -> Tensor:
        """Compute log p(y_i = k | f), the outcomes on a last axis: (*target_shape, K).

        Args:
            f: outputs, (..., B, *out).
        """

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        return self.at(self.log_pmf(f), y)

    def at(self, log_pmf: Tensor, y: Tensor) -> Tensor:
        """Return the log-probability of y.

        Args:
            log_pmf: log-probabilities of the outcomes, (*target_shape, K).
            y: outcomes, (B, *event).
        """
        # broadcast_shapes would import sympy: half a second.
        y, _ = torch.broadcast_tensors(y.long(), log_pmf[..., 0])
        return log_pmf.expand(*y.shape, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def outputs_of(self, log_pmf: Tensor) -> Tensor:
        """Return outputs with these probabilities, in the axes of the outputs of a network.

        Args:
            log_pmf: log-probabilities of the outcomes, (..., B, *event, K).

        Raises:
            ValueError: if outputs cannot have any probabilities.
        """
        raise ValueError(
            f"outputs of {type(self).__name__} cannot have any probabilities of classes; only "
            "Categorical and Bernoulli have maps of probabilities: use map='temperature'"
        )

    def mean(self, f: Tensor) -> Tensor:
        p = self.log_pmf(f).exp()
        if self.support == "classes":
            return p
        return (p * torch.arange(p.shape[-1], device=p.device)).sum(-1)

    def variance(self, f: Tensor) -> Tensor:
        mean = self.mean(f)
        if self.support == "classes":
            return mean * (1 - mean)
        p = self.log_pmf(f).exp()
        deviation = torch.arange(p.shape[-1], device=p.device) - mean.unsqueeze(-1)
        return (p * deviation.square()).sum(-1)

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
        k = torch.searchsorted(cumulative.contiguous(), u.contiguous(), right=True)
        k = k.clamp_max(cumulative.shape[-1] - 1)
        return k.squeeze(-1) if n is None else k.movedim(-1, 0)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        """Compute Σ_i Σ_k p_ik·∇log p_ik·∇log p_ikᵀ.

        Args:
            f: outputs, (B, *out).
            seed: not used, since the sum is exact.
        """

        def example_log_pmf(f: Tensor) -> Tensor:
            return self.log_pmf(f.unsqueeze(0)).squeeze(0)

        gradients = vmap(jacrev(example_log_pmf))(f).reshape(
            len(f), -1, f[0].numel()
        )  # (B, event·K, out)
        roots = self.log_pmf(f).mul(0.5).exp().reshape(len(f), -1, 1)
        rows = (roots * gradients).movedim(1, 0).detach()
        return Scores.of_squares([rows], f.shape, type(self).__name__)

    @property
    def traceable(self) -> tuple[str, ...]:
        return "entropy", "mutual_information"

    def mixture_pmf(self, f: Tensor) -> Tensor:
        """Compute 1/S Σ_s p(y_i = k | f_s): (B, *event, K).

        Args:
            f: outputs, (S, B, *out).
        """
        return average(lambda f: self.log_pmf(f).exp(), f)

    def mixture_entropy(self, f: Tensor) -> Tensor:
        return entr(self.mixture_pmf(f)).sum(-1)

    def mixture_information(self, f: Tensor) -> Tensor:
        """Compute E_s KL(p_s ‖ p), without cancellation.

        Args:
            f: outputs, (S, B, *out).
        """
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
    """One of C classes; logits on ``class_axis`` of f.

    Args:
        class_axis: the axis of the classes in f.
        ignore_index: a value of y that is no class.
        shift: the output at t predicts the label at t + shift.
        label_smoothing: ε of the weights of a fit.
        weight: the weight of every class in a fit, (C,).
    """

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
        self.class_axis = class_axis
        self.ignore_index = ignore_index
        self.shift = shift
        self.label_smoothing = label_smoothing
        self.register_buffer("weight", weight, persistent=False)
        self.is_plain: bool = (
            ignore_index is None and not shift and not label_smoothing and weight is None
        )

    def for_scores(self) -> BoundCategorical:
        return BoundCategorical(self.class_axis, self.ignore_index, self.shift)

    def labels(self, y: Tensor) -> tuple[Tensor, Tensor]:
        is_label = torch.ones_like(y, dtype=torch.bool)
        if self.ignore_index is not None:
            is_label = y != self.ignore_index
        y = y.long().masked_fill(~is_label, 0)
        if self.shift:
            y = self._shift_labels(y)
            is_label = self._shift_labels(is_label)
        return y, is_label

    def _shift_labels(self, values: Tensor) -> Tensor:
        """Return values_{t + shift}, with zeros at the end."""
        end = torch.zeros_like(values[..., : self.shift])
        return torch.cat((values[..., self.shift :], end), -1)

    def expected_log_prob(self, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """Compute the bound f_y − log Σ_k exp(f_k + ½·variance_k), by Jensen.

        Args:
            f: the means of the logits.
            variance: their variances.
            y: labels.
        """
        logits = f.movedim(self.class_axis, -1)
        raised_logits = (f + variance / 2).movedim(self.class_axis, -1)
        return self.at(logits - raised_logits.logsumexp(-1, keepdim=True), y)

    def at(self, log_pmf: Tensor, y: Tensor) -> Tensor:
        if self.is_plain:
            return super().at(log_pmf, y)
        y, is_label = self.labels(y)
        value = super().at(log_pmf, y)
        if self.weight is not None:
            value = value * self.weight[y]
        if self.label_smoothing:
            log_pmf = log_pmf if self.weight is None else log_pmf * self.weight
            value = (1 - self.label_smoothing) * value + self.label_smoothing * log_pmf.mean(-1)
        return torch.where(is_label, value, 0.0)

    def without_weights(self, f: Tensor, y: Tensor) -> tuple[BoundLikelihood, Tensor | None]:
        """Return the likelihood without weights, and Σ_c a_c of every label.

        The Hessian in f of −Σ_c a_c·log p_c is Σ_c a_c times that of −log p_y, which is the same
        for all y.

        Args:
            f: logits, (B, *out).
            y: labels, (B, *event).
        """
        if self.is_plain:
            return self, None
        y, is_label = self.labels(y)
        count = is_label.to(f.dtype)
        if self.weight is not None:
            smooth = self.label_smoothing
            count = count * ((1 - smooth) * self.weight[y] + smooth * self.weight.mean())
        return BoundCategorical(self.class_axis), count.unsqueeze(self.class_axis).expand_as(f)

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        if len(f_shape) < 1 - self.class_axis:
            raise ValueError(
                f"outputs {tuple(f_shape)} have no batch axis before their class axis "
                f"{self.class_axis}"
            )
        return torch.Size(_remove_axis(f_shape, self.class_axis))

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        if isinstance(y, Tensor) and y.is_floating_point():
            is_one_hot = y.shape == torch.Size(f_shape) and bool(
                (y.sum(self.class_axis) == 1).all() and (y * y == y).all()
            )
            hint = (
                "for numbers pass likelihood=bayou.Gaussian(0.1, learn=True), "
                "for classes pass y.long()"
            )
            if is_one_hot:
                hint = f"for one-hot vectors pass y.argmax({self.class_axis})"
            raise ValueError(
                f"Categorical() needs class indices (integers) in y, got {y.dtype}; {hint}"
            )
        super().validate(f_shape, y)

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        classes = f_shape[self.class_axis]
        if self.weight is not None and len(self.weight) != classes:
            raise ValueError(
                f"Categorical has {len(self.weight)} weights for {classes} classes; "
                "give one for each"
            )
        if self.shift and (y.ndim < 2 or y.shape[-1] <= self.shift):
            raise ValueError(
                f"y {tuple(y.shape)} has no label {self.shift} after another, as "
                f"shift={self.shift} needs: y (B, T)"
            )
        labels = y if self.ignore_index is None else y[y != self.ignore_index]
        if labels.numel() == 0:
            return
        low = int(labels.min())
        high = int(labels.max())
        if low >= 0 and high < classes:
            return
        hint = "count the classes from 0, or give more outputs"
        if classes == 1:
            hint = "use Bernoulli() for one output"
        void = low if low < 0 else high
        rest = labels[labels != void]
        if rest.numel() and int(rest.min()) >= 0 and int(rest.max()) < classes:
            hint = f"{hint}; if {void} marks labels to leave out, Categorical(ignore_index={void})"
        raise ValueError(
            f"y must lie in 0 .. {classes - 1} for {classes} classes, got {low} .. {high}; {hint}"
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

    def outputs_of(self, log_pmf: Tensor) -> Tensor:
        return log_pmf.movedim(-1, self.class_axis)

    def class_logits(self, f: Tensor) -> Tensor:
        return f.movedim(self.class_axis, -1)

    def mean(self, f: Tensor) -> Tensor:
        return f.movedim(self.class_axis, -1).softmax(-1)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        return Softmax(f, self.class_axis)


@final
@dataclass(frozen=True)
class Categorical(Likelihood):
    """Classes: p(y = c | f) = softmax(f)_c, for f (B, *out, C) and integers y (B, *out).

    The coordinates of y are independent. Probabilities always have the classes last. With
    ``label_smoothing`` or ``weight`` a fit maximizes Σ_c a_c·log p_c for every label instead of
    log p_y, as ``torch.nn.CrossEntropyLoss``, which is not the log of a density; predictions and
    scores use p.

    Args:
        class_axis: the axis of the classes in f: −3 for f (B, C, H, W) and y (B, H, W), −2 for (B,
            C, T). By default (None) ``bayou.fit`` finds it from the shapes of f and y; elsewhere
            it is the last.
        ignore_index: a value of y that is no class (default None): its log-probability counts as
            0, in scores it is left out.
        shift: the output at t predicts the label at t + shift (default 0): 1 for causal language
            models, f (B, T, C) and y (B, T). Statistics of a prediction and draws of y are those
            of the label that the output at t predicts.
        label_smoothing: ε of a_c = w_c·((1 − ε)·1[y = c] + ε/C) (default 0).
        weight: w_c of every class, 1 by default.

    Example:
        >>> posterior = bayou.fit(net, (x, labels), likelihood=bayou.Categorical())
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
        self._check(
            ["ignore_index"],
            lambda value: value is None or type(value) is int,
            "a whole number or None",
        )
        self._check(
            ["shift"],
            lambda value: type(value) is int and value >= 0,
            "a whole number of at least 0",
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
        """Return the likelihood with the axis of the classes in outputs of this shape.

        It is the last or the first after the rows, as y fits. Of sequences that both fit it is the
        last; for images that is an error.

        Args:
            f_shape: the shape of outputs.
            y_shape: the shape of targets.
        """
        axes = {
            axis for axis in (-1, 1 - len(f_shape)) if _remove_axis(f_shape, axis) == tuple(y_shape)
        }
        if len(axes) == 2 and len(f_shape) > 3:
            raise ValueError(
                f"outputs {tuple(f_shape)} and y {tuple(y_shape)} may have the classes on axis 1 "
                f"or on the last; give Categorical(class_axis={1 - len(f_shape)}) or class_axis=-1"
            )
        return replace(self, class_axis=max(axes, default=-1))

    def bind(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> BoundCategorical:
        weight = None
        if self.weight is not None:
            weight = torch.tensor(self.weight, dtype=dtype, device=device)
        axis = -1 if self.class_axis is None else self.class_axis
        return BoundCategorical(axis, self.ignore_index, self.shift, self.label_smoothing, weight)


def _remove_axis(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """Return a shape without one axis, counted from the end."""
    sizes_after = tuple(shape[axis + 1 :]) if axis != -1 else ()
    return tuple(shape[:axis]) + sizes_after


@final
class BoundBernoulli(FiniteLikelihood):
    """A y that is 0 or 1 for every coordinate of f, a logit."""

    logits = True

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError(
                f"y must be 0 or 1, got values in {y.min().item()} .. {y.max().item()}"
            )

    def log_pmf(self, f: Tensor) -> Tensor:
        return torch.stack((logsigmoid(-f), logsigmoid(f)), -1)

    def outputs_of(self, log_pmf: Tensor) -> Tensor:
        return log_pmf[..., 1] - log_pmf[..., 0]

    def class_logits(self, f: Tensor) -> Tensor:
        """Return −f/2 and f/2, which treat both classes alike.

        Args:
            f: outputs, (..., B, *out).
        """
        return torch.stack((-f / 2, f / 2), -1)

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        return logsigmoid((2 * y.to(f.dtype) - 1) * f)

    def expected_log_prob(self, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """Compute the bound −log(1 + E exp(∓F)), by Jensen.

        Args:
            f: the means of the logits.
            variance: their variances.
            y: 0 or 1.
        """
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
    """Binary outcomes: p(y = 1 | f) = sigmoid(f), for f and y (B, *out).

    y has the values 0 and 1 in any dtype.

    Example:
        >>> posterior = bayou.fit(net, (x, y), likelihood=bayou.Bernoulli())
    """

    bound: ClassVar[type[BoundLikelihood]] = BoundBernoulli


@final
class BoundPoisson(BoundLikelihood):
    """Counts with rate unit·exp(f).

    Args:
        unit: the rate at f = 0.
    """

    support: ClassVar[Literal["classes", "counts", "real"]] = "counts"
    is_linear_in_y = False

    def __init__(self, unit: float = 1.0) -> None:
        super().__init__()
        self.log_unit: float = math.log(unit)

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        check_counts(y)

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        y = y.to(f.dtype)
        log_rate = f + self.log_unit
        return y * log_rate - log_rate.exp() - torch.lgamma(y + 1)

    def expected_log_prob(self, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        return self.pointwise(f, y) - self.mean(f) * torch.expm1(variance / 2)

    def mean(self, f: Tensor) -> Tensor:
        return torch.exp(f + self.log_unit)

    def variance(self, f: Tensor) -> Tensor:
        return self.mean(f)

    def entropy(self, f: Tensor) -> Tensor:
        """Compute H[y | f], for rates below 50 as a sum over the counts.

        Above it is ½·log(2πeλ) − 1/12λ − 1/24λ² − 19/360λ³ (to 1e-7).

        Args:
            f: log-rates, (..., B, *out).
        """
        rate = self.mean(f).clamp_min(MAX_SUMMED_RATE)
        large = (
            0.5 * (LOG_2PI + 1 + rate.log()) - (1 / 12 + (1 / 24 + 19 / 360 / rate) / rate) / rate
        )
        log_rate = (f + self.log_unit).clamp_max(math.log(MAX_SUMMED_RATE))
        log_zero = -log_rate.exp()
        total = torch.zeros_like(f)
        for count in range(ENTROPY_COUNTS):
            total = total + entr((count * log_rate + log_zero - math.lgamma(count + 1)).exp())
        return torch.where(self.mean(f) > MAX_SUMMED_RATE, large, total)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute P(Y ≤ y) = Q(⌊y⌋ + 1, λ), the regularized upper incomplete gamma function.

        Args:
            f: log-rates, (..., B, *out).
            y: values, (B, *out).
        """
        y = y.to(f.dtype).floor()
        return torch.where(y < 0, 0.0, torch.special.gammaincc(y.clamp_min(0.0) + 1, self.mean(f)))

    def log_survival(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute log P(Y > y), by the regularized lower incomplete gamma function in float64.

        Args:
            f: log-rates, (..., B, *out).
            y: values, (B, *out).
        """
        count = y.double().floor()
        value = torch.special.gammainc(count.clamp_min(0.0) + 1, self.mean(f.double()))
        return torch.where(count < 0, 0.0, value.log()).to(f.dtype)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        return Independent(self.mean(f))

    def mixture_entropy(self, f: Tensor) -> Tensor:
        """Compute the entropy of the mixture: (B, *out).

        Counts below 1,024 are summed one by one, above integrated.

        Args:
            f: log-rates, (S, B, *out).
        """

        def entropy_of_rows(f: Tensor) -> Tensor:
            rate = self.mean(f)
            knots = spread_knots(rate, rate.sqrt(), UnitGaussian().knots)
            largest = int(knots[-1].max().ceil().nan_to_num(MAX_SUMMED_COUNTS))
            stop = min(MAX_SUMMED_COUNTS, largest + 20)
            counts = torch.arange(stop, dtype=f.dtype, device=f.device)
            counts = counts.reshape(-1, *[1] * (f.ndim - 1))
            total = entr(density(self.pointwise, f, counts)).sum(0)
            if stop < MAX_SUMMED_COUNTS:
                return total
            return total + entropy_integral(self.pointwise, f, knots.clamp_min(stop - 0.5))

        return by_rows(entropy_of_rows, f, max(4 * KNOTS, 20 * len(f)))

    def mixture_crps(self, f: Tensor, y: Tensor) -> Tensor | None:
        return count_crps(self, f, y)


def check_counts(y: Tensor) -> None:
    """Raise a ValueError unless all targets are counts.

    Args:
        y: targets.
    """
    if bool((y < 0).any()) or (y.is_floating_point() and bool((y != y.round()).any())):
        raise ValueError(
            f"y must hold counts 0, 1, 2, ..., got values in {y.min().item()} .. {y.max().item()}"
        )


def count_crps(likelihood: BoundLikelihood, f: Tensor, y: Tensor) -> Tensor | None:
    """Compute Σ_k (F(k) − 1[k ≥ y])² of a mixture of counts: (B, *event).

    Args:
        likelihood: p(y | f) of counts, with a cdf.
        f: outputs, (S, B, *out).
        y: targets, (B, *event).

    Returns:
        None where more than 8,192 counts are probable.
    """
    last = max(float(y.max()), float(likelihood.mixture_quantile(f, 1 - COUNT_TAIL).max()))
    if not last <= MAX_SCORED_COUNTS:
        return None
    mass = torch.zeros_like(y, dtype=f.dtype)
    total = torch.zeros_like(mass)
    for counts, probabilities in _count_probabilities(likelihood, f, int(last) + 1):
        cumulative = mass + probabilities.cumsum(0)
        total = total + (cumulative - (counts >= y).to(f.dtype)).square().sum(0)
        mass = cumulative[-1]
    return total


def _count_probabilities(
    likelihood: BoundLikelihood, f: Tensor, last: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of counts 0 .. last and their probabilities in a mixture: (K, B, *event)."""
    event = likelihood.target_shape(f.shape[1:])
    block_size = max(1, SUM_NUMBERS // max(1, event.numel()))
    for block in torch.arange(last + 1, device=f.device).split(block_size):
        counts = block.to(f.dtype).reshape(-1, *[1] * len(event)).expand(-1, *event)
        yield counts, density(likelihood.pointwise, f, counts)


def count_entropy(likelihood: BoundLikelihood, f: Tensor) -> Tensor:
    """Compute H[y] of a mixture of counts as a sum, or by draws of y above 8,192: (B, *event).

    Args:
        likelihood: p(y | f) of counts, with a cdf.
        f: outputs, (S, B, *out).
    """
    last = float(likelihood.mixture_quantile(f.double(), 1 - COUNT_TAIL).max())
    if not last <= MAX_SCORED_COUNTS:
        return BoundLikelihood.mixture_entropy(likelihood, f)
    dtype = f.dtype
    f = f.double()
    total = torch.zeros(likelihood.target_shape(f.shape[1:]), dtype=f.dtype, device=f.device)
    for _, probabilities in _count_probabilities(likelihood, f, int(last)):
        total = total + entr(probabilities).sum(0)
    return total.to(dtype)


@final
@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts: p(y | f) = λ^y·exp(−λ)/y! with the rate λ = unit·exp(f), for f and y (B, *out).

    y has the values 0, 1, 2, ... in any dtype.

    Args:
        unit: the rate at f = 0 (default 1). A method by name uses the mean of y.

    Example:
        >>> posterior = bayou.fit(net, (x, counts), likelihood=bayou.likelihoods.Poisson())
    """

    unit: float = later_field(1.0)

    def __post_init__(self) -> None:
        self._check_positive("unit")

    def bind(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> BoundPoisson:
        return BoundPoisson(self.unit)

    def starting_at(self, y: Tensor) -> Poisson:
        mean = positive_mean(y)
        return self if mean is None else replace(self, unit=mean)
