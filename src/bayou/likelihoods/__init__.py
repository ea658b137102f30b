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
from bayou.likelihoods.mixtures import entr

__all__ = [
    "Bernoulli",
    "BoundBernoulli",
    "BoundCategorical",
    "BoundHeteroscedastic",
    "BoundHomoscedastic",
    "BoundLikelihood",
    "BoundPoisson",
    "Categorical",
    "FiniteLikelihood",
    "Gaussian",
    "HeteroscedasticGaussian",
    "HeteroscedasticStudentT",
    "Independent",
    "Information",
    "Likelihood",
    "LocationScale",
    "Poisson",
    "Scores",
    "Softmax",
    "StudentT",
    "Unit",
    "UnitGaussian",
    "UnitStudentT",
    "Weighted",
    "entr",
    "score",
]
