"""bayou: honest uncertainty from neural networks, with posteriors as rich as normalizing flows."""

from bayou import diagnostics, flows
from bayou.guides import (
    FFG,
    MNF,
    Bayesian,
    Delta,
    Dropout,
    JointFlow,
    LowRank,
    NodeFlow,
    NodeNoise,
    SparseVD,
    bayesianize,
)
from bayou.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    StudentTLikelihood,
)
from bayou.methods import MAP, MLE, VI, Elbo, elbo, fit
from bayou.posteriors import FileError, Posterior, load
from bayou.predictive import Predictive
from bayou.priors import DoubleExponential, LogUniform, Normal, ScaleMixture, StudentT

__version__ = "0.1.0"

__all__ = [
    "FFG",
    "MAP",
    "MLE",
    "MNF",
    "VI",
    "Bayesian",
    "Bernoulli",
    "Categorical",
    "Delta",
    "DoubleExponential",
    "Dropout",
    "Elbo",
    "FileError",
    "Gaussian",
    "HeteroscedasticGaussian",
    "JointFlow",
    "LogUniform",
    "LowRank",
    "NodeFlow",
    "NodeNoise",
    "Normal",
    "Poisson",
    "Posterior",
    "Predictive",
    "ScaleMixture",
    "SparseVD",
    "StudentT",
    "StudentTLikelihood",
    "bayesianize",
    "diagnostics",
    "elbo",
    "fit",
    "flows",
    "load",
]
