"""Methods: ways from a target to a posterior."""

from bayou.methods.annealed import Annealed
from bayou.methods.elbo import Elbo, elbo
from bayou.methods.ensemble import Ensemble, EnsembleError
from bayou.methods.hmc import HMC, NUTS
from bayou.methods.ivon import IVON
from bayou.methods.langevin import SGHMC, SGLD, Cyclical, Decaying, pSGLD
from bayou.methods.laplace import Laplace
from bayou.methods.mcmc import Diverged
from bayou.methods.method import Method
from bayou.methods.own_rows import Collapsed, WorseThanMode
from bayou.methods.point import MAP, MLE
from bayou.methods.probe import NotMixed
from bayou.methods.stochastic import MCBatchNorm, MCDropout
from bayou.methods.swag import SWAG
from bayou.methods.vi import VI

__all__ = [
    "HMC",
    "IVON",
    "MAP",
    "MLE",
    "NUTS",
    "SGHMC",
    "SGLD",
    "SWAG",
    "VI",
    "Annealed",
    "Collapsed",
    "Cyclical",
    "Decaying",
    "Diverged",
    "Elbo",
    "Ensemble",
    "EnsembleError",
    "Laplace",
    "MCBatchNorm",
    "MCDropout",
    "Method",
    "NotMixed",
    "WorseThanMode",
    "elbo",
    "pSGLD",
]
