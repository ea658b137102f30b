"""Right-censored targets: times of which some are known only to exceed a value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from torch import Tensor

from bayou.core.rng import Seed
from bayou.likelihoods import mixtures
from bayou.likelihoods.base import BoundLikelihood, Likelihood
from bayou.likelihoods.information import Independent, Information
from bayou.likelihoods.logarithm import inner_parameters
from bayou.likelihoods.positive import Gamma

QUANTILE_KNOTS = 60  # in an integral of the cdf
TAIL = 1e-6  # probability beyond the first and the last of them


@final
class BoundCensored(BoundLikelihood):
    """y = (t, observed) on halves of the last axis: t, or a bound that t exceeds.

    Means, quantiles and draws are those of t.

    Args:
        of: the likelihood of t.
    """

    is_linear_in_y = False

    def __init__(self, of: BoundLikelihood) -> None:
        super().__init__()
        self.of = of

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        return paired_shape(self.of.target_shape(f_shape), "Censored")

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        value, observed = y.chunk(2, -1)
        if not bool(((observed == 0) | (observed == 1)).all()):
            raise ValueError(
                "the second half of a censored y must be 1 (observed) or 0 (censored), got values "
                f"in {observed.min().item():g} .. {observed.max().item():g}"
            )
        if not bool(observed.any()):
            raise ValueError("all targets are censored; 1 marks those that were observed")
        self.of._validate_values(f_shape, value)

    def _shape_hint(
        self, f_shape: tuple[int, ...], expected: tuple[int, ...], got: tuple[int, ...]
    ) -> str:
        return "; y has the times and then, for each, 1 if it was observed or 0 if it was censored"

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        value, observed = y.to(f.dtype).chunk(2, -1)
        log_density = self.of.pointwise(f, value)
        return torch.where(observed > 0, log_density, self.of.log_survival(f, value))

    def labels(self, y: Tensor) -> tuple[Tensor, Tensor]:
        value, observed = y.chunk(2, -1)
        return value, observed > 0

    def for_targets(self, f: Tensor, y: Tensor) -> tuple[BoundLikelihood, Tensor]:
        return self.of, f

    def without_weights(self, f: Tensor, y: Tensor) -> tuple[BoundLikelihood, Tensor | None]:
        """Return the likelihood of t, and the share of its information that each y has.

        It is 1 for an observed t, and for a censored one the curvature of −log P(T > t) relative
        to the information of T.

        Args:
            f: outputs, (B, *out).
            y: targets, (B, *event).
        """
        value, observed = y.to(f.dtype).chunk(2, -1)
        information = self.of.information(f)
        if not isinstance(information, Independent) or f.shape != value.shape:
            return self.of, None
        with torch.enable_grad():
            leaf = f.detach().requires_grad_()
            log_survival = self.of.log_survival(leaf, value).sum()
            (slope,) = torch.autograd.grad(log_survival, leaf, create_graph=True)
            (curvature,) = torch.autograd.grad(slope.sum(), leaf)
        share = (-curvature / information.h).clamp(0.0)
        return self.of, torch.where(observed > 0, torch.ones_like(share), share).detach()

    def sample(self, f: Tensor, n: int | None = None, seed: Seed = None) -> Tensor:
        return self.of.sample(f, n, seed)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        return self.of.cdf(f, y)

    def log_survival(self, f: Tensor, y: Tensor) -> Tensor:
        return self.of.log_survival(f, y)

    def mean(self, f: Tensor) -> Tensor:
        return self.of.mean(f)

    def variance(self, f: Tensor) -> Tensor:
        return self.of.variance(f)

    def function_variance(self, f: Tensor) -> Tensor | float:
        return self.of.function_variance(f)

    def functions(self, f: Tensor, count: int) -> tuple[BoundLikelihood, Tensor]:
        return _censor(self.of.functions(f, count))

    def entropy(self, f: Tensor) -> Tensor:
        return self.of.entropy(f)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        return self.of.information(f, seed)

    def marginal(self, f: Tensor, variance: Tensor) -> tuple[BoundLikelihood, Tensor]:
        return _censor(self.of.marginal(f, variance))

    def mixture_entropy(self, f: Tensor) -> Tensor:
        return self.of.mixture_entropy(f)

    def mixture_information(self, f: Tensor) -> Tensor:
        return self.of.mixture_information(f)

    def mixture_quantile(self, f: Tensor, q: float) -> Tensor:
        return self.of.mixture_quantile(f, q)

    def mixture_crps(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute ∫ (F(t) − 1[t ≥ y])² dt, up to y for a censored y (Avati et al. 2020).

        Only for positive t. The knots of the integral are quantiles of the mixture.

        Args:
            f: outputs, (S, B, *out).
            y: targets with their flags, (B, *event).
        """
        value, observed = y.to(f.dtype).chunk(2, -1)
        last_logit = math.log(1 / TAIL - 1)
        logits = torch.linspace(-last_logit, last_logit, QUANTILE_KNOTS, dtype=torch.float64)
        levels = logits.sigmoid()
        knots = torch.stack([self.of.mixture_quantile(f, q) for q in levels.tolist()])
        tiny = torch.finfo(f.dtype).tiny
        return mixtures.crps_integral(
            self.of.cdf, f, value, knots.clamp_min(tiny).log(), observed > 0
        )

    def temper(self, f: Tensor, temperature: float) -> tuple[BoundLikelihood, Tensor]:
        return _censor(self.of.temper(f, temperature))

    def per_sample(
        self, outputs: Tensor, parameters: Mapping[str, Tensor]
    ) -> tuple[BoundLikelihood, Tensor]:
        return _censor(self.of.per_sample(outputs, inner_parameters(parameters)))


def _censor(pair: tuple[BoundLikelihood, Tensor]) -> tuple[BoundLikelihood, Tensor]:
    """Return a likelihood and outputs for targets with flags."""
    return BoundCensored(pair[0]), pair[1]


def paired_shape(shape: Sequence[int], name: str) -> torch.Size:
    """Return the shape of y with a second number for each value on its last axis.

    Args:
        shape: of the values, (B, *event, D).
        name: of the likelihood, for an error.
    """
    if len(shape) < 2:
        raise ValueError(
            f"{name} has two numbers for each value on the last axis of y; outputs must be (B, 1) "
            f"for y (B, 2), got outputs of {len(shape)} axis"
        )
    return torch.Size((*shape[:-1], 2 * shape[-1]))


@final
@dataclass(frozen=True)
class Censored(Likelihood):
    """Right-censored targets: log p(y | f) if y was observed, log P(Y > y | f) if it exceeds y.

    y (B, 2) has the time, and 1 if the event was observed then or 0 if the row was censored then:
    the event came later, or not at all (for D values y is (B, 2·D), values first). Predictions are
    of the time of the event. Scores of values (rmse, coverage) use the observed rows; the NLL and
    the CRPS use all. Censoring must not depend on the time of the event beyond x.

    Args:
        of: the likelihood of the time, such as ``Weibull(learn=True)`` or
            ``LogNormal(0.5, learn=True)``.

    Example:
        >>> noise = bayou.likelihoods.Censored(bayou.likelihoods.Weibull(learn=True))
        >>> y = torch.stack((time, observed), 1)
        >>> posterior = bayou.fit(net, (x, y), "ensemble", likelihood=noise)
    """

    of: Likelihood

    def __post_init__(self) -> None:
        if not isinstance(self.of, Likelihood) or self.of.companion != "none":
            raise ValueError(
                f"Censored needs a likelihood of times, such as Weibull(), got {self.of!r:.60}"
            )
        if isinstance(self.of, Gamma) and self.of.learn:
            raise ValueError(
                "P(Y > y) of a Gamma has no derivative in its shape, so that censored targets "
                "cannot learn it; use Weibull(learn=True) or LogNormal(learn=True)"
            )
        if self.of.bind().support != "real":
            raise ValueError(
                f"Censored is for times, real numbers, not for {type(self.of).__name__}"
            )

    def bind(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> BoundCensored:
        return BoundCensored(self.of.bind(dtype=dtype, device=device))

    def outputs(self, targets: int) -> int:
        return self.of.outputs(targets // 2)

    def in_units(self, scale: Tensor) -> Likelihood | None:
        of = self.of.in_units(scale)
        return None if of is None else replace(self, of=of)

    def starting_at(self, y: Tensor) -> Likelihood:
        return replace(self, of=self.of.starting_at(y.chunk(2, -1)[0]))

    @property
    def parameter(self) -> str:
        return self.of.parameter

    def fixed_at(self, parameters: Mapping[str, Tensor]) -> Likelihood | None:
        of = self.of.fixed_at(inner_parameters(parameters))
        return None if of is None else replace(self, of=of)

    def of_log(self) -> Likelihood | None:
        of = self.of.of_log()
        return None if of is None else replace(self, of=of)

    def of_exp(self) -> Likelihood:
        return replace(self, of=self.of.of_exp())

    @property
    def companion(self) -> Literal["none", "flag", "noise"]:
        return "flag"

    @property
    def scale_axis(self) -> int | None:
        return self.of.scale_axis

    @property
    def has_log_variances(self) -> bool:
        return self.of.has_log_variances
