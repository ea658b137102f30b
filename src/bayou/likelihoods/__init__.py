"""Likelihoods p(y | f) of network outputs f: log-probabilities, moments, entropies, distribution functions, draws.

A likelihood the user writes, ``Gaussian(0.1)``, is a frozen *spec*; its ``bind()`` makes the ``nn.Module`` that
computes. Given f, the coordinates of y are independent. Outputs are f (..., B, *out): a batch axis, output axes, and
before them any number of sample axes, which broadcast against the targets y (B, ...).
"""

from bayou.likelihoods.base import BoundLikelihood, Likelihood, entr
from bayou.likelihoods.continuous import (
    BoundHeteroscedastic,
    BoundHomoscedastic,
    Gaussian,
    HeteroscedasticGaussian,
    LocationScale,
    StudentTLikelihood,
    Unit,
    UnitNormal,
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
    count_quantile,
)

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
    "Likelihood",
    "LocationScale",
    "Poisson",
    "StudentTLikelihood",
    "Unit",
    "UnitNormal",
    "UnitStudentT",
    "count_quantile",
    "entr",
]
