"""Posteriors: distributions over a network's named tensors, and their files."""

from bayou.core.files import FileError
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.gaussian import GaussianPosterior
from bayou.posteriors.guided import Bayesian, Guided, bayesianize
from bayou.posteriors.loading import load
from bayou.posteriors.masked import Masked
from bayou.posteriors.mixture import Mixture
from bayou.posteriors.network_draw import NetworkDraw
from bayou.posteriors.posterior import Posterior
from bayou.posteriors.updates import Updates
from bayou.posteriors.wide import WidePosterior

__all__ = [
    "Bayesian",
    "Empirical",
    "FileError",
    "GaussianPosterior",
    "Guided",
    "Masked",
    "Mixture",
    "NetworkDraw",
    "Posterior",
    "Updates",
    "WidePosterior",
    "bayesianize",
    "load",
]
