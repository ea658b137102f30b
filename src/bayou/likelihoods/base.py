"""The interface of likelihoods p(y | f): a density and draws, from which the rest follows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.rng import Seed
from bayou.core.specs import Checked
from bayou.likelihoods.information import Information, Scores, score
from bayou.likelihoods.mixtures import average, by_rows, invert, widen

MONTE_CARLO_DRAWS = 2048  # of y, for quantities without a closed form
DRAWS_PER_BLOCK = 128  # of these at a time


class BoundLikelihood(nn.Module, ABC):
    """p(y | f) with its parameters. Everything but ``log_prob`` is per coordinate of y.

    Sample axes are kept. A new likelihood implements ``pointwise``, and ``sample`` or ``cdf``.
    Moments, entropies and quantiles without a closed form are averages over 2,048 seeded draws of
    y, accurate to about 2 % of a standard deviation (1/√2048), without gradients; with a ``cdf``,
    quantiles are roots, accurate to rounding, and draws are quantiles of uniform noise.

    Attributes:
        support: the values of y. Classes have no order; counts and real numbers have scores such
            as rmse and intervals.
        logits: whether f are logits, which a probit approximation may scale.
        is_ordered: whether classes have an order, so that quantiles and intervals mean something.
        is_linear_in_y: whether a linear regression of y is a fair baseline of numbers: not where f
            is on a logarithmic scale, or y has more than the values.
        needs_all_samples: whether the methods of one component need the outputs of all samples,
            (S, B, *out), and not some of them.
    """

    support: ClassVar[Literal["classes", "counts", "real"]] = "real"
    logits: ClassVar[bool] = False
    is_ordered: ClassVar[bool] = False
    is_linear_in_y: ClassVar[bool] = True
    needs_all_samples: ClassVar[bool] = False

    @abstractmethod
    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute log p(y_i | f) for every coordinate i; f and y may broadcast.

        Args:
            f: outputs, (..., B, *out).
            y: targets, (B, *event).
        """

    def sample(self, f: Tensor, n: int | None = None, seed: Seed = None) -> Tensor:
        """Draw y, by default as quantiles of uniform noise.

        A draw depends on the seed and its index alone.

        Args:
            f: outputs, (..., B, *out).
            n: the number of draws; None draws one for each f, whose leading axis is then the index
                of the draw.
            seed: the seed; None uses torch's global stream.

        Returns:
            Draws (n, *target_shape), or (*target_shape).
        """
        if not self.overrides("cdf"):
            raise NotImplementedError(f"{type(self).__name__} needs a `sample` or a `cdf`")
        u = self.draw_noise(rng.uniform, f, n, seed)
        start = torch.zeros_like(u)

        def mass(y: Tensor) -> Tensor:
            return self.cdf(f, y)

        if self.support == "counts":
            return invert(mass, u, *widen(mass, u, start - 1, start, counts=True))
        low, high = widen(mass, u, start - 1, start + 1)
        return invert(mass, u, low, high, lambda y: self.pointwise(f, y).exp())

    def draw_noise(
        self, draw: Callable[..., Tensor], f: Tensor, n: int | None, seed: Seed
    ) -> Tensor:
        """Draw the noise of ``sample``.

        Args:
            draw: rng.normal, rng.uniform or a function with their arguments.
            f: outputs, (..., B, *out).
            n: the number of draws, as for ``sample``.
            seed: the seed; None uses torch's global stream.
        """
        shape = self.target_shape(f.shape)
        return draw(shape[0], shape[1:], f, seed) if n is None else draw(n, shape, f, seed)

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        """Return the shape of y for outputs of a shape.

        It is the same, unless f has an axis of classes or of parameters.

        Args:
            f_shape: the shape of outputs.
        """
        return torch.Size(f_shape)

    def class_logits(self, f: Tensor) -> Tensor:
        """Return the logits of classes with a free normalization, (..., B, *event, K).

        Args:
            f: outputs, (..., B, *out).

        Raises:
            ValueError: for a likelihood without such logits.
        """
        raise ValueError(
            f"{type(self).__name__} has no logits of classes, of which a score could be made; "
            "use a score of probabilities, of the standard deviation or of features"
        )

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Raise a ValueError unless y fits outputs of a shape; called before a fit or a score.

        Args:
            f_shape: the shape (B, *out) of outputs.
            y: targets.
        """
        if not isinstance(y, Tensor):
            raise ValueError(f"y must be a tensor, got {type(y).__name__}; use torch.as_tensor(y)")
        expected = tuple(self.target_shape(f_shape))
        got = tuple(y.shape)
        if got != expected:
            hint = self._shape_hint(tuple(f_shape), expected, got)
            raise ValueError(
                f"y has shape {got}, but outputs of shape {tuple(f_shape)} need {expected}{hint}"
            )
        if y.is_complex() or (y.is_floating_point() and not bool(y.isfinite().all())):
            raise ValueError(
                f"y must be real and finite, got {y.dtype} with nan, inf or complex values"
            )
        if y.numel():
            self._validate_values(f_shape, y)

    def expected_log_prob(self, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """Compute E log p(y_i | F) for F ~ N(f, variance), or a lower bound of it.

        The entries of F may have any correlation.

        Args:
            f: the means of the outputs, (..., B, *out).
            variance: their variances, in the shape of f.
            y: targets, (B, *event).
        """
        raise ValueError(
            f"{type(self).__name__} has no closed form or bound of E log p(y | f) for a Gaussian "
            "f; use Gaussian, StudentT, Categorical, Bernoulli or Poisson, or VI, which draws f"
        )

    def log_prob(self, f: Tensor, y: Tensor, variance: Tensor | None = None) -> Tensor:
        """Compute log p(y | f), one number per example: (..., B).

        Args:
            f: outputs, (..., B, *out).
            y: targets, (B, *event).
            variance: of the shape of f, for ``expected_log_prob`` of F ~ N(f, variance).
        """
        shape = self.target_shape(f.shape)
        if y.ndim == 0 or shape[len(shape) - y.ndim :] != y.shape:
            raise ValueError(
                f"y has shape {tuple(y.shape)}, but outputs of shape {tuple(f.shape)} "
                f"need {tuple(shape)}"
            )
        if variance is not None:
            return _sum_event(self.expected_log_prob(f, variance, y), y)
        return _sum_event(self.pointwise(f, y), y)

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute ``log_prob``, for ``functional_call``.

        Args:
            f: outputs, (..., B, *out).
            y: targets, (B, *event).
        """
        return self.log_prob(f, y)

    # --- one component ---

    def mean(self, f: Tensor) -> Tensor:
        """Compute E[y | f]; class probabilities for a categorical y.

        Args:
            f: outputs, (..., B, *out).
        """
        return self._expectation(lambda f, y: y.to(f.dtype), f)

    def variance(self, f: Tensor) -> Tensor:
        """Compute Var[y | f], of the class indicators for a categorical y: the shape of ``mean``.

        Args:
            f: outputs, (..., B, *out).
        """

        def sample_variance(f: Tensor) -> Tensor:
            mean = self.mean(f)
            return self._expectation(lambda _, y: (y - mean).square(), f)

        return torch.cat([sample_variance(sample) for sample in f.split(1)])

    def entropy(self, f: Tensor) -> Tensor:
        """Compute H[y_i | f] in nats, differential for a continuous y.

        Args:
            f: outputs, (..., B, *out).
        """
        return self._expectation(lambda f, y: -self.pointwise(f, y), f)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute P(Y_i ≤ y_i | f).

        Args:
            f: outputs, (..., B, *out).
            y: values, (B, *event).
        """
        if len(self.target_shape(f.shape)) == y.ndim:
            return self.cdf(f.unsqueeze(0), y).squeeze(0)
        return self._expectation(lambda f, draws: (draws <= y).to(f.dtype), f)

    def log_survival(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute log P(Y_i > y_i | f).

        Args:
            f: outputs, (..., B, *out).
            y: values, (B, *event).
        """
        survival = 1 - self.cdf(f, y)
        return survival.clamp_min(torch.finfo(f.dtype).tiny).log()

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        """Compute the Fisher information of y in f, E_y[∇log p·∇log pᵀ] (Martens 2020).

        Args:
            f: outputs, (B, *out).
            seed: the seed of draws of y, if there is no closed form.
        """

        def scaled_scores() -> Iterator[Tensor]:
            for y in self._draws(f, seed):
                scores = score(self.log_prob, f.expand(len(y), *f.shape), y.detach())
                yield scores.reshape(len(y), len(f), -1) / math.sqrt(MONTE_CARLO_DRAWS)

        return Scores.of_squares(scaled_scores(), f.shape, type(self).__name__)

    def marginal(self, f: Tensor, variance: Tensor) -> tuple[BoundLikelihood, Tensor]:
        """Return a likelihood and outputs of p(y) = E p(y | F), F ~ N(f, variance).

        For logits it is the probit approximation.

        Args:
            f: the means of the outputs.
            variance: their variances.
        """
        if self.logits:
            return self, f / (1 + math.pi / 8 * variance).sqrt()
        raise ValueError(
            f"{type(self).__name__} has no closed form of p(y) for a Gaussian f; use 'linearized'"
        )

    def function_variance(self, f: Tensor) -> Tensor | float:
        """Return Var E[y | F] of a likelihood that is an average over functions F (``marginal``).

        It is 0 for any other.

        Args:
            f: outputs, (..., B, *out).
        """
        return 0.0

    def functions(self, f: Tensor, count: int) -> tuple[BoundLikelihood, Tensor]:
        """Return the likelihood and outputs of functions F where it is an average over them.

        The functions of each output are ``count`` quantiles of equal probability, independent for
        every row; a likelihood that is no such average has each output as often.

        Args:
            f: outputs, (S, B, *out).
            count: the number of functions for each output.

        Returns:
            A likelihood with a ``function_variance`` of 0 and outputs (count·S, B, *out).
        """
        return self, f.repeat(count, *[1] * (f.ndim - 1))

    def for_targets(self, f: Tensor, y: Tensor) -> tuple[BoundLikelihood, Tensor]:
        """Return a likelihood and outputs of the values of rows whose y has more than the value.

        Such a y has the noise of its row, for example. Scores compare the values, ``labels(y)``,
        with this prediction.

        Args:
            f: outputs, (S, B, *out).
            y: targets, (B, *event).
        """
        return self, f

    def labels(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value of y that each output predicts, and whether there is one.

        Args:
            y: targets, (B, *event).

        Returns:
            Values and a mask, (B, *event) both.
        """
        return y, torch.ones_like(y, dtype=torch.bool)

    def without_weights(self, f: Tensor, y: Tensor) -> tuple[BoundLikelihood, Tensor | None]:
        """Return a likelihood in which all coordinates of y count once, and their counts here.

        Args:
            f: outputs, (B, *out).
            y: targets, (B, *event).

        Returns:
            The likelihood, and how often each coordinate counts, (B, *out); None for once.
        """
        return self, None

    def for_scores(self) -> BoundLikelihood:
        """Return the same p(y | f) without weights of a fit."""
        return self

    @property
    def is_gaussian(self) -> bool:
        """Return whether y = f + σ·ε with ε ~ N(0, 1), and σ does not depend on f."""
        return False

    @property
    def gaussian_noise(self) -> float | None:
        """Return σ where y = f + σ·ε with ε ~ N(0, 1) and one σ for all; None for any other."""
        return None

    # --- mixtures over the samples of f, (S, B, *out) ---

    @property
    def traceable(self) -> tuple[str, ...]:
        """Return the statistics of a mixture that compile as one graph.

        They need neither draws of y nor branches on values.
        """
        return ()

    @torch.no_grad()
    def mixture_entropy(self, f: Tensor) -> Tensor:
        """Compute H[y_i] of 1/S Σ_s p(y | f_s): (B, *event).

        Args:
            f: outputs, (S, B, *out).
        """
        return self._by_rows(lambda f: -self._mixture_log_probs(f)[1].mean(0), f)

    def mixture_information(self, f: Tensor) -> Tensor:
        """Compute H[y_i] − 1/S Σ_s H[y_i | f_s] ≥ 0: (B, *event).

        Args:
            f: outputs, (S, B, *out).
        """
        if self.overrides("mixture_entropy"):
            return (self.mixture_entropy(f) - average(self.entropy, f)).clamp_min(0.0)

        @torch.no_grad()
        def mean_log_ratio(f: Tensor) -> Tensor:
            # At the same draws, so that most of their noise cancels.
            component, mixture = self._mixture_log_probs(f)
            return (component - mixture).mean(0).clamp_min(0.0)

        return self._by_rows(mean_log_ratio, f)

    def mixture_quantile(self, f: Tensor, q: float) -> Tensor:
        """Compute the smallest y_i with 1/S Σ_s P(Y_i ≤ y_i | f_s) ≥ q: (B, *event).

        Args:
            f: outputs, (S, B, *out).
            q: the level, between 0 and 1.
        """
        if not self.overrides("cdf"):
            return self._by_rows(lambda f: _empirical_quantile(self._mixture_draws(f), q), f)

        def mass(y: Tensor) -> Tensor:
            return average(lambda f: self.cdf(f, y), f)

        def slope(y: Tensor) -> Tensor:
            return average(lambda f: self.pointwise(f, y).exp(), f)

        low, high = self._bracket(mass, f, q)
        return invert(mass, q, low, high, slope if self.support == "real" else None)

    def mixture_sample(self, f: Tensor, n: int, seed: Seed = None) -> Tensor:
        """Draw y n times, each from one sample for all rows: (n, B, *event).

        Args:
            f: outputs, (S, B, *out).
            n: the number of draws.
            seed: the seed; None uses torch's global stream.
        """
        u = rng.uniform(n, (), f, rng.fold(seed, "sample"))
        index = (u * len(f)).long().clamp_max(len(f) - 1)
        return self.sample(f[index], seed=rng.fold(seed, "noise"))

    def mixture_crps(self, f: Tensor, y: Tensor) -> Tensor | None:
        """Compute E|Y_i − y_i| − ½·E|Y_i − Y_i'|, (B, *event); None without a closed form.

        Args:
            f: outputs, (S, B, *out).
            y: targets, (B, *event).
        """
        return None

    # --- other units, other parameters ---

    def rescale(
        self, f: Tensor, shift: Tensor, scale: Tensor
    ) -> tuple[BoundLikelihood, Tensor] | None:
        """Return a likelihood and outputs of shift + scale·y.

        Args:
            f: outputs, (S, B, *out).
            shift: the shift, which broadcasts to y.
            scale: the factor, which broadcasts to y.

        Returns:
            The pair, or None for a y without units (classes, counts, a bounded y).
        """
        return None

    def temper(self, f: Tensor, temperature: float) -> tuple[BoundLikelihood, Tensor]:
        """Return a likelihood and outputs with logits f/T, or T times the noise (Guo et al. 2017).

        Below T = 1 the logits are f_s + (1/T − 1)·mean_s f_s (f/T for one sample): p_s·(Π_r
        p_r^(1/S))^(1/T − 1) sharpens the mixture, whereas each f_s/T sharpens its own component
        only.

        Args:
            f: outputs, (S, B, *out).
            temperature: T.
        """
        if not self.logits:
            raise ValueError(
                f"{type(self).__name__} has neither logits nor a noise scale to calibrate; "
                "bayou.conformal needs none"
            )
        if temperature >= 1:
            return self, f / temperature
        return self, f + (1 / temperature - 1) * f.mean(0)

    def per_sample(
        self, outputs: Tensor, parameters: Mapping[str, Tensor]
    ) -> tuple[BoundLikelihood, Tensor]:
        """Return an equivalent likelihood and outputs for parameters that differ by sample.

        Args:
            outputs: outputs, (S, B, *out).
            parameters: parameters of the likelihood by name, (S, ...).
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no parameters to sample; keep them fixed"
        )

    # --- helpers ---

    def overrides(self, name: str) -> bool:
        """Return whether the class has its own definition of a method of this interface.

        Args:
            name: the method.
        """
        return getattr(type(self), name) is not getattr(BoundLikelihood, name)

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Raise a ValueError unless the values of y are possible."""

    def _shape_hint(
        self, f_shape: tuple[int, ...], expected: tuple[int, ...], got: tuple[int, ...]
    ) -> str:
        """Return how to give y the expected shape, or an empty string."""
        if expected == (*got, 1):
            return "; use y.unsqueeze(-1)"
        if expected == (*got, expected[-1]):
            return f"; for indices of {expected[-1]} classes use y.long() and Categorical()"
        return "; use y.squeeze(-1)" if got == (*expected, 1) else ""

    def _draws(self, f: Tensor, seed: Seed) -> Iterator[Tensor]:
        """Yield blocks of draws of y: (DRAWS_PER_BLOCK, *target_shape)."""
        for block in range(MONTE_CARLO_DRAWS // DRAWS_PER_BLOCK):
            yield self.sample(f, DRAWS_PER_BLOCK, rng.fold(seed, "draws", block))

    @torch.no_grad()
    def _expectation(self, function: Callable[[Tensor, Tensor], Tensor], f: Tensor) -> Tensor:
        """Compute E[function(f, y) | f] by draws of y, with the same noise for every sample."""

        def sample_expectation(f: Tensor) -> Tensor:
            blocks = (function(f, y).mean(0) for y in self._draws(f, 0))
            return reduce(torch.add, blocks) * DRAWS_PER_BLOCK / MONTE_CARLO_DRAWS

        return torch.cat([sample_expectation(sample) for sample in f.split(1)])

    def _by_rows(self, function: Callable[[Tensor], Tensor], f: Tensor) -> Tensor:
        """Compute a function of draws of the mixture, a few rows at a time."""
        return by_rows(function, f, max(MONTE_CARLO_DRAWS, len(f)))

    def _mixture_draws(self, f: Tensor) -> Tensor:
        """Draw as many y from every component: (k, S, B, *event), k·S ≥ MONTE_CARLO_DRAWS."""
        return self.sample(f, -(-MONTE_CARLO_DRAWS // len(f)), rng.fold(0, "mixture"))

    def _bracket(
        self, mass: Callable[[Tensor], Tensor], f: Tensor, q: float
    ) -> tuple[Tensor, Tensor]:
        """Return two values with a quantile of the mixture between them: (B, *event) each."""
        if self.support != "real":
            zero = torch.zeros(self.target_shape(f.shape[1:]), dtype=f.dtype, device=f.device)
            return widen(mass, q, zero - 1, zero, counts=True)
        y = self.sample(f, 1 + 32 // len(f), rng.fold(0, "bracket")).flatten(0, 1)
        return widen(mass, q, y.amin(0), y.amax(0))

    def _mixture_log_probs(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Compute log p(y_i | f_s) and log 1/S Σ_t p(y_i | f_t) at draws y of every component s.

        Both are (k·S, B, *event).
        """
        draws = self._mixture_draws(f)
        component = self.pointwise(f, draws).flatten(0, 1)
        y = draws.flatten(0, 1)
        mixture = reduce(torch.logaddexp, (self.pointwise(output, y) for output in f))
        return component, mixture - math.log(len(f))


def normal_functions(mean: Tensor, variance: Tensor, count: int) -> Tensor:
    """Return quantiles of N(mean, variance) of equal probability: (count·S, B, ...).

    They are scaled to have this variance.

    Args:
        mean: (S, B, ...).
        variance: in the same shape.
        count: the number of quantiles.
    """
    levels = (torch.arange(count, dtype=torch.float64, device=mean.device) + 0.5) / count
    z = torch.special.ndtri(levels)
    z = z / z.square().mean().sqrt().clamp_min(torch.finfo(z.dtype).tiny)
    z = z.to(mean).reshape(-1, *[1] * mean.ndim)
    return (mean + variance.sqrt() * z).flatten(0, 1)


def positive_mean(y: Tensor) -> float | None:
    """Return the mean of targets, the unit of a rate; None unless it is positive and finite.

    Args:
        y: targets, (N, *event).
    """
    mean = float(y.double().mean())
    return mean if 0 < mean < math.inf else None


def _sum_event(values: Tensor, y: Tensor) -> Tensor:
    """Sum values (..., B, *event) over the axes of an event of y (B, *event)."""
    if y.ndim == 1:  # sum(()) would sum everything
        return values
    return values.sum(tuple(range(1 - y.ndim, 0)))


def _empirical_quantile(draws: Tensor, q: float) -> Tensor:
    """Return the smallest of the draws (k, S, ...) that a fraction q of them does not exceed."""
    draws = draws.flatten(0, 1)
    return draws.sort(0).values[math.ceil(q * len(draws)) - 1]


class Likelihood(Checked, ABC):
    """The spec of a likelihood: frozen, with plain values that a file can hold."""

    bound: ClassVar[type[BoundLikelihood]]  # of a likelihood without parameters

    def bind(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> BoundLikelihood:
        """Return the likelihood with its parameters.

        Args:
            dtype: the dtype of the parameters; None is torch's default.
            device: the device of the parameters; None is torch's default.
        """
        return self.bound()

    def outputs(self, targets: int) -> int:
        """Return the number of outputs of a network for this many coordinates of y.

        Args:
            targets: the number of coordinates.
        """
        return targets

    def in_units(self, scale: Tensor) -> Likelihood | None:
        """Return the likelihood of shift + scale·y, for outputs in the same units.

        Args:
            scale: one positive number, or one for each coordinate of the last axis of y.

        Returns:
            The likelihood, or None where y has no units (classes, counts) or cannot be shifted
            (positive numbers; ``starting_at`` chooses their unit).
        """
        return None

    def starting_at(self, y: Tensor) -> Likelihood:
        """Return the likelihood with the unit or the cut points that suit the targets of a fit.

        A method by name calls it, so that outputs near 0 are a good start.

        Args:
            y: targets, (N, *event).
        """
        return self

    @property
    def parameter(self) -> str:
        """Return the field with the noise or the shape that can be learned; "" without one."""
        return ""

    def fixed_at(self, parameters: Mapping[str, Tensor]) -> Likelihood | None:
        """Return the likelihood whose learned parameters are fixed at these values.

        Args:
            parameters: those of the bound likelihood by name, such as {"log_scale": log σ}.

        Returns:
            The likelihood, or None where the parameters are no fields of it (cut points).
        """
        return None

    def of_log(self) -> Likelihood | None:
        """Return the likelihood of log y for the same outputs; None where it is not simpler."""
        return None

    def of_exp(self) -> Likelihood:
        """Return the likelihood of exp(y) for the same outputs, the inverse of ``of_log``."""
        from bayou.likelihoods.logarithm import Log  # which is a likelihood itself

        return Log(self)  # type: ignore[arg-type]  # which checks it

    @property
    def companion(self) -> Literal["none", "flag", "noise"]:
        """Return what follows the values on the last axis of y.

        "none", a "flag" without units for each value, or the "noise" of each, in its units.
        """
        return "none"

    @property
    def scale_axis(self) -> int | None:
        """Return the axis of f whose second half describes the scale of y; None without one."""
        return None

    @property
    def has_log_variances(self) -> bool:
        """Return whether this half are log-variances, to which a unit of y adds a constant."""
        return self.scale_axis is not None
