"""Likelihoods p(y | f) of network outputs f: log-probabilities, moments, entropies, draws.

A likelihood such as ``Gaussian(0.1)`` is a frozen spec; ``bind()`` returns the ``nn.Module`` with
its log-density. The coordinates of y are independent conditional on f. Outputs are f (..., B,
*out): a batch axis, output axes, and before them any number of sample axes, which broadcast
against the targets y (B, ...).
"""

from bayou.likelihoods.base import BoundLikelihood, Likelihood
from bayou.likelihoods.continuous import (
    BoundHeteroscedastic,
    BoundHomoscedastic,
    Gaussian,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    LocationScale,
    StudentT,
    Unit,
    UnitGaussian,
    UnitStudentT,
)
from bayou.likelihoods.counts import BoundNegativeBinomial, NegativeBinomial
from bayou.likelihoods.decisions import Decision, Newsvendor
from bayou.likelihoods.discrete import (
    Bernoulli,
    BoundBernoulli,
    BoundCategorical,
    BoundPoisson,
    Categorical,
    FiniteLikelihood,
    Poisson,
)
from bayou.likelihoods.information import Independent, Information, Scores, Softmax, Weighted, score
from bayou.likelihoods.known_noise import BoundKnownNoise, KnownNoise
from bayou.likelihoods.logarithm import BoundLog, Log, LogNormal
from bayou.likelihoods.mixtures import entr
from bayou.likelihoods.named import by_name, list_likelihoods
from bayou.likelihoods.ordinal import BoundOrdinal, Ordinal
from bayou.likelihoods.positive import BoundGamma, BoundWeibull, Gamma, Weibull
from bayou.likelihoods.survival import BoundCensored, Censored

__all__ = [
    "Bernoulli",
    "BoundBernoulli",
    "BoundCategorical",
    "BoundCensored",
    "BoundGamma",
    "BoundHeteroscedastic",
    "BoundHomoscedastic",
    "BoundKnownNoise",
    "BoundLikelihood",
    "BoundLog",
    "BoundNegativeBinomial",
    "BoundOrdinal",
    "BoundPoisson",
    "BoundWeibull",
    "Categorical",
    "Censored",
    "Decision",
    "FiniteLikelihood",
    "Gamma",
    "Gaussian",
    "HeteroscedasticGaussian",
    "HeteroscedasticStudentT",
    "Independent",
    "Information",
    "KnownNoise",
    "Likelihood",
    "LocationScale",
    "Log",
    "LogNormal",
    "NegativeBinomial",
    "Newsvendor",
    "Ordinal",
    "Poisson",
    "Scores",
    "Softmax",
    "StudentT",
    "Unit",
    "UnitGaussian",
    "UnitStudentT",
    "Weibull",
    "Weighted",
    "by_name",
    "entr",
    "list_likelihoods",
    "score",
]
