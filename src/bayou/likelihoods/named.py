"""Likelihoods by name, for ``bayou.fit(..., likelihood="lognormal")``, estimators, command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor

from bayou.core.specs import nearest
from bayou.likelihoods.base import Likelihood
from bayou.likelihoods.continuous import Gaussian, HeteroscedasticGaussian, StudentT
from bayou.likelihoods.counts import NegativeBinomial
from bayou.likelihoods.discrete import Bernoulli, Categorical, Poisson
from bayou.likelihoods.known_noise import KnownNoise
from bayou.likelihoods.logarithm import Log, LogNormal
from bayou.likelihoods.ordinal import Ordinal
from bayou.likelihoods.positive import Gamma, Weibull
from bayou.likelihoods.survival import Censored

NOISE = 0.5  # standard deviations of y: the initial noise by default
AUTO = "auto"  # the name that stands for a choice on held-out rows


@final
@dataclass(frozen=True)
class NamedLikelihood:
    """A likelihood by name.

    Args:
        name: the name.
        summary: one line for lists of likelihoods.
        make: makes the spec from targets in standard units.
        task: of its targets, "regression" or "classification".
        has_shift: whether y may be shifted and scaled: numbers of any sign.
    """

    name: str
    summary: str
    make: Callable[[Tensor], Likelihood]
    task: Literal["regression", "classification"] = "regression"
    has_shift: bool = False


def _ordinal(y: Tensor) -> Ordinal:
    """Make ordered classes from 0 to the largest in y."""
    return Ordinal(max(2, int(y.max()) + 1))


def _noise_per_output(y: Tensor) -> Gaussian:
    """Make Gaussian noise with a size of its own for each output."""
    outputs = y.shape[-1] if y.ndim > 1 else 1
    return Gaussian((NOISE,) * outputs, learn=True)


_LIKELIHOODS = (
    NamedLikelihood(
        "gaussian",
        "numbers with normal noise of one size",
        lambda y: Gaussian(NOISE, learn=True),
        has_shift=True,
    ),
    NamedLikelihood(
        "gaussian-per-output",
        "the same with a size of the noise for each output",
        _noise_per_output,
        has_shift=True,
    ),
    NamedLikelihood(
        "heteroscedastic",
        "numbers with normal noise whose size depends on x",
        lambda y: HeteroscedasticGaussian(),
        has_shift=True,
    ),
    NamedLikelihood(
        "heteroscedastic-softplus",
        "the same with a softplus in place of an exponential",
        lambda y: HeteroscedasticGaussian(transform="softplus"),
        has_shift=True,
    ),
    NamedLikelihood(
        "student-t",
        "numbers with outliers",
        lambda y: StudentT(scale=NOISE, learn=True),
        has_shift=True,
    ),
    NamedLikelihood(
        "lognormal",
        "positive numbers with relative noise",
        lambda y: LogNormal(NOISE, learn=True),
    ),
    NamedLikelihood(
        "heteroscedastic-lognormal",
        "positive numbers with relative noise whose size depends on x",
        lambda y: Log(HeteroscedasticGaussian()),
    ),
    NamedLikelihood(
        "gamma", "positive numbers, standard deviation ∝ mean", lambda y: Gamma(learn=True)
    ),
    NamedLikelihood("weibull", "times to an event", lambda y: Weibull(learn=True)),
    NamedLikelihood(
        "censored-weibull",
        "times to an event, some of them censored: y (N, 2) with time and 1 or 0",
        lambda y: Censored(Weibull(learn=True)),
    ),
    NamedLikelihood(
        "censored-lognormal",
        "the same with log-normal times",
        lambda y: Censored(LogNormal(NOISE, learn=True)),
    ),
    NamedLikelihood("poisson", "counts", lambda y: Poisson()),
    NamedLikelihood(
        "negative-binomial",
        "counts that vary more than those of a Poisson",
        lambda y: NegativeBinomial(learn=True),
    ),
    NamedLikelihood(
        "known-noise",
        "measurements with a known noise each: y (N, 2) with value and standard deviation",
        lambda y: KnownNoise(),
    ),
    NamedLikelihood("categorical", "classes", lambda y: Categorical(), task="classification"),
    NamedLikelihood("bernoulli", "labels 0 or 1, one output each", lambda y: Bernoulli()),
    NamedLikelihood(
        "ordinal", "ordered classes 0, 1, 2, ..., one output", _ordinal, task="classification"
    ),
)
LIKELIHOODS: dict[str, NamedLikelihood] = {named.name: named for named in _LIKELIHOODS}


def by_name(name: str, y: Tensor) -> Likelihood:
    """Return the likelihood of a name for targets of unit scale.

    Args:
        name: one of ``list_likelihoods()``.
        y: the targets, whose number of classes or outputs some likelihoods need.

    Raises:
        ValueError: for an unknown name, with the nearest one.

    >>> by_name("gamma", torch.ones(3, 1))
    Gamma(shape=1.0, learn=True, unit=1.0)
    """
    return find_likelihood(name).make(y)


def find_likelihood(name: str) -> NamedLikelihood:
    """Return the entry of a name, or raise a ValueError that suggests the nearest.

    Args:
        name: one of ``list_likelihoods()``.
    """
    if name not in LIKELIHOODS:
        raise ValueError(
            f"there is no likelihood {name!r}{nearest(name, list(LIKELIHOODS))}; the names are "
            f"{', '.join(LIKELIHOODS)}, and {AUTO!r} for a choice on held-out rows"
        )
    return LIKELIHOODS[name]


def list_likelihoods() -> dict[str, str]:
    """Return the names of likelihoods, each with a summary.

    >>> list_likelihoods()["lognormal"]
    'positive numbers with relative noise'
    """
    return {name: named.summary for name, named in LIKELIHOODS.items()}
