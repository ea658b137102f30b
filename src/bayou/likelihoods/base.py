"""The interface of likelihoods p(y | f): a density and draws, from which everything else
follows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.likelihoods.information import Information, Scores, score
from bayou.likelihoods.mixtures import average, by_rows, invert, widen
from bayou.rng import Seed
from bayou.specs import Checked

MONTE_CARLO_DRAWS, BLOCK = (
    2048,
    128,
)  # draws of y for quantities without a closed form, and draws at a time


class BoundLikelihood(nn.Module, ABC):
    """p(y | f) with its parameters. Everything but ``log_prob`` is per coordinate of y, and sample
    axes are kept.

    A new likelihood implements ``pointwise`` and ``sample``. Moments, entropies and quantiles
    without a closed form are averages over 2,048 seeded draws of y, accurate to about 2 % of a
    standard deviation (1/√2048), without gradients; with a ``cdf``, quantiles are roots, accurate
    to rounding.

    ``support``: the values of y. Classes have no order; counts and real numbers have scores such as
    rmse and intervals.
    ``logits``: f are logits, which a probit approximation may scale.
    """

    support: ClassVar[Literal["classes", "counts", "real"]] = "real"
    logits: ClassVar[bool] = False

    @abstractmethod
    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y_i | f) for every coordinate i; f and y may broadcast."""

    @abstractmethod
    def sample(self, f: Tensor, n: int | None = None, seed: Seed = None) -> Tensor:
        """Draws of y: (n, *target_shape), or one for each f, whose leading axis is then the index
        of the draw.
        """

    def draw_noise(
        self, draw: Callable[..., Tensor], f: Tensor, n: int | None, seed: Seed
    ) -> Tensor:
        """The noise of ``sample``: ``draw`` is rng.normal, rng.uniform or the like."""
        shape = self.target_shape(f.shape)
        return draw(shape[0], shape[1:], f, seed) if n is None else draw(n, shape, f, seed)

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        """The shape of y for outputs of a shape: the same, unless f has an axis of classes or of
        parameters.
        """
        return torch.Size(f_shape)

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Raise a ValueError unless y fits outputs of shape (B, *out); called before a fit or a
        score.
        """
        if not isinstance(y, Tensor):
            raise ValueError(f"y must be a tensor, got {type(y).__name__}; use torch.as_tensor(y)")
        expected, got = tuple(self.target_shape(f_shape)), tuple(y.shape)
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

    def expected(self, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """E log p(y_i | F) for F ~ N(f, variance), or a lower bound of it; any correlation of the
        entries of F.
        """
        raise ValueError(
            f"{type(self).__name__} has no closed form or bound of E log p(y | f) for a Gaussian f; use Gaussian, "
            "StudentT, Categorical, Bernoulli or Poisson, or VI, which draws f"
        )

    def log_prob(self, f: Tensor, y: Tensor, variance: Tensor | None = None) -> Tensor:
        """log p(y | f), one number per example: f (..., B, *out), y (B, ...) -> (..., B).

        With a ``variance``, of the shape of f, the ``expected`` one for F ~ N(f, variance).
        """
        shape = self.target_shape(f.shape)
        if y.ndim == 0 or shape[len(shape) - y.ndim :] != y.shape:
            raise ValueError(
                f"y has shape {tuple(y.shape)}, but outputs of shape {tuple(f.shape)} need {tuple(shape)}"
            )
        value = self.pointwise(f, y) if variance is None else self.expected(f, variance, y)
        return (
            value.sum(tuple(range(1 - y.ndim, 0))) if y.ndim > 1 else value
        )  # sum(()) would sum everything

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """``log_prob``, for ``functional_call``."""
        return self.log_prob(f, y)

    # --- one component -----------------------------------------------------------------------------------------------

    def mean(self, f: Tensor) -> Tensor:
        """E[y | f]; class probabilities for a categorical y."""
        return self._expected(lambda f, y: y.to(f.dtype), f)

    def variance(self, f: Tensor) -> Tensor:
        """Var[y | f], of the class indicators for a categorical y; the shape of ``mean``."""

        def one(f: Tensor) -> Tensor:
            mean = self.mean(f)
            return self._expected(lambda _, y: (y - mean).square(), f)

        return torch.cat([one(part) for part in f.split(1)])

    def entropy(self, f: Tensor) -> Tensor:
        """H[y_i | f] in nats, differential for a continuous y."""
        return self._expected(lambda f, y: -self.pointwise(f, y), f)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        """P(Y_i ≤ y_i | f)."""
        if len(self.target_shape(f.shape)) == y.ndim:
            return self.cdf(f.unsqueeze(0), y).squeeze(0)
        return self._expected(lambda f, drawn: (drawn <= y).to(f.dtype), f)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        """The Fisher information of y in f, E_y[∇log p·∇log pᵀ] for outputs (B, *out) (Martens
        2020).
        """

        def squares() -> Iterator[Tensor]:
            for y in self._draws(f, seed):
                s = score(self.log_prob, f.expand(len(y), *f.shape), y.detach())
                yield s.reshape(len(y), len(f), -1) / math.sqrt(MONTE_CARLO_DRAWS)

        return Scores.of_squares(squares(), f.shape, type(self).__name__)

    def marginal(self, f: Tensor, variance: Tensor) -> tuple[BoundLikelihood, Tensor]:
        """A likelihood and outputs of p(y) = E p(y | F), F ~ N(f, variance): of logits by the
        probit approximation.
        """
        if self.logits:
            return self, f / (1 + math.pi / 8 * variance).sqrt()
        raise ValueError(
            f"{type(self).__name__} has no closed form of p(y) for a Gaussian f; use 'linearized'"
        )

    def function_variance(self, f: Tensor) -> Tensor | float:
        """Var E[y | F] of a likelihood that is itself an average over functions F (``marginal``); 0
        of any other.
        """
        return 0.0

    def labels(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The value of y that each output is a prediction of, and whether there is one: (B, *event)
        both.
        """
        return y, torch.ones_like(y, dtype=torch.bool)

    def unweighted(self, f: Tensor, y: Tensor) -> tuple[BoundLikelihood, Tensor | None]:
        """A likelihood in which all coordinates of y count once, and how often they count here: (B,
        *out), or once.
        """
        return self, None

    def for_scores(self) -> BoundLikelihood:
        """The same p(y | f) without weights of a fit."""
        return self

    @property
    def is_gaussian(self) -> bool:
        """Whether y = f + σ·ε with ε ~ N(0, 1), and σ does not depend on f."""
        return False

    @property
    def gaussian_noise(self) -> float | None:
        """σ where y = f + σ·ε with ε ~ N(0, 1) and one σ for all; None for any other likelihood."""
        return None

    # --- mixtures over the samples of f, (S, B, *out) ----------------------------------------------------------------

    @property
    def traceable(self) -> tuple[str, ...]:
        """The statistics of a mixture that compile as one graph: without draws of y or branches on
        values.
        """
        return ()

    @torch.no_grad()
    def mixture_entropy(self, f: Tensor) -> Tensor:
        """H[y_i] of 1/S Σ_s p(y | f_s): (B, *event)."""
        return by_rows(
            lambda f: -self._mixture_log_probs(f)[1].mean(0), f, max(MONTE_CARLO_DRAWS, len(f))
        )

    def mixture_information(self, f: Tensor) -> Tensor:
        """H[y_i] − 1/S Σ_s H[y_i | f_s] ≥ 0: (B, *event)."""
        if self._own("mixture_entropy"):
            return (self.mixture_entropy(f) - average(self.entropy, f)).clamp_min(0.0)

        @torch.no_grad()
        def difference(
            f: Tensor,
        ) -> Tensor:  # at the same draws, so that most of their noise cancels
            own, mixed = self._mixture_log_probs(f)
            return (own - mixed).mean(0).clamp_min(0.0)

        return by_rows(difference, f, max(MONTE_CARLO_DRAWS, len(f)))

    def mixture_quantile(self, f: Tensor, q: float) -> Tensor:
        """The smallest y_i with 1/S Σ_s P(Y_i ≤ y_i | f_s) ≥ q: (B, *event)."""
        if not self._own("cdf"):
            return by_rows(
                lambda f: _order(self._mixture_draws(f), q), f, max(MONTE_CARLO_DRAWS, len(f))
            )

        def mass(y: Tensor) -> Tensor:
            return average(lambda f: self.cdf(f, y), f)

        def slope(y: Tensor) -> Tensor:
            return average(lambda f: self.pointwise(f, y).exp(), f)

        return invert(
            mass, q, *self._bracket(mass, f, q), slope if self.support == "real" else None
        )

    def mixture_crps(self, f: Tensor, y: Tensor) -> Tensor | None:
        """E|Y_i − y_i| − ½·E|Y_i − Y_i'|, (B, *event); None where there is no closed form."""
        return None

    # --- other units, other parameters -------------------------------------------------------------------------------

    def rescaled(
        self, f: Tensor, shift: Tensor, scale: Tensor
    ) -> tuple[BoundLikelihood, Tensor] | None:
        """A likelihood and outputs of shift + scale·y; None for a y without units (classes, counts,
        a bounded y).
        """
        return None

    def tempered(self, f: Tensor, temperature: float) -> tuple[BoundLikelihood, Tensor]:
        """A likelihood and outputs (S, B, *out) with logits f/T, or with T times the scale of the
        noise (Guo 2017).

        Below T = 1 the logits are f_s + (1/T − 1)·mean_s f_s (f/T for one sample): p_s·(Π_r
        p_r^(1/S))^(1/T − 1) sharpens the mixture, whereas each f_s/T sharpens its own component
        only.
        """
        if self.logits:
            return self, f / temperature if temperature >= 1 else f + (
                1 / temperature - 1
            ) * f.mean(0)
        raise ValueError(
            f"{type(self).__name__} has neither logits nor a noise scale to calibrate; bayou.conformal needs none"
        )

    def per_sample(
        self, outputs: Tensor, parameters: Mapping[str, Tensor]
    ) -> tuple[BoundLikelihood, Tensor]:
        """An equivalent likelihood and outputs for parameters that differ by sample: (S, B, *out),
        (S, ...).
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no parameters to sample; keep them fixed"
        )

    # -----------------------------------------------------------------------------------------------------------------

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None: ...

    def _shape_hint(
        self, f_shape: tuple[int, ...], expected: tuple[int, ...], got: tuple[int, ...]
    ) -> str:
        if expected == (*got, 1):
            return "; use y.unsqueeze(-1)"
        return "; use y.squeeze(-1)" if got == (*expected, 1) else ""

    def _own(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(BoundLikelihood, name)

    def _draws(self, f: Tensor, seed: Seed) -> Iterator[Tensor]:
        for block in range(MONTE_CARLO_DRAWS // BLOCK):
            yield self.sample(f, BLOCK, rng.fold(seed, "draws", block))  # (BLOCK, *target_shape)

    @torch.no_grad()
    def _expected(self, function: Callable[[Tensor, Tensor], Tensor], f: Tensor) -> Tensor:
        """E[function(f, y) | f] by draws of y, with the same noise for every sample."""
        parts = (
            reduce(torch.add, (function(one, y).mean(0) for y in self._draws(one, 0)))
            * BLOCK
            / MONTE_CARLO_DRAWS
            for one in f.split(1)
        )
        return torch.cat(list(parts))

    def _mixture_draws(self, f: Tensor) -> Tensor:
        """As many draws of y from every component: (k, S, B, *event), k·S ≥ MONTE_CARLO_DRAWS."""
        return self.sample(f, -(-MONTE_CARLO_DRAWS // len(f)), rng.fold(0, "mixture"))

    def _bracket(
        self, mass: Callable[[Tensor], Tensor], f: Tensor, q: float
    ) -> tuple[Tensor, Tensor]:
        """Two values with a quantile of the mixture between them: (B, *event) each."""
        if self.support != "real":
            zero = torch.zeros(self.target_shape(f.shape[1:]), dtype=f.dtype, device=f.device)
            return widen(mass, q, zero - 1, zero, counts=True)
        y = self.sample(f, 1 + 32 // len(f), rng.fold(0, "bracket")).flatten(0, 1)
        return widen(mass, q, y.amin(0), y.amax(0))

    def _mixture_log_probs(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """log p(y_i | f_s) and log 1/S Σ_t p(y_i | f_t) at draws y of every component s: (k·S, B,
        *event).
        """
        y = self._mixture_draws(f)
        own, y = self.pointwise(f, y).flatten(0, 1), y.flatten(0, 1)
        mixed = reduce(torch.logaddexp, (self.pointwise(output, y) for output in f))
        return own, mixed - math.log(len(f))


def _order(draws: Tensor, q: float) -> Tensor:
    """The smallest of the draws (k, S, ...) that a fraction q of them does not exceed."""
    draws = draws.flatten(0, 1)
    return draws.sort(0).values[math.ceil(q * len(draws)) - 1]


class Likelihood(Checked, ABC):
    """The spec of a likelihood: frozen, with plain values that a file can hold."""

    @abstractmethod
    def bind(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> BoundLikelihood:
        """The likelihood with its parameters."""

    def outputs(self, targets: int) -> int:
        """The number of outputs of a network for this many coordinates of y."""
        return targets

    def in_units(self, scale: Tensor) -> Likelihood | None:
        """Return the likelihood of shift + scale·y, for outputs in the same units.

        Args:
            scale: one positive number, or one for each coordinate of the last axis of y.

        Returns:
            The likelihood, or None where y has no units (classes, counts).
        """
        return None

    @property
    def log_variance_axis(self) -> int | None:
        """The axis of f whose second half are log-variances of y; None where all of f are
        locations.
        """
        return None
