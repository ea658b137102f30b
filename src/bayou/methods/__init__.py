"""Methods: ways from a target to a posterior."""

from bayou.inference.baseline_checks import CollapseWarning, WorseThanModeWarning
from bayou.inference.chains import DivergenceError
from bayou.inference.elbo import Elbo, elbo
from bayou.inference.method import Method
from bayou.inference.probe import MixingWarning
from bayou.methods.annealed import Annealed
from bayou.methods.ensemble import Ensemble, EnsembleError
from bayou.methods.hmc import HMC, NUTS
from bayou.methods.ivon import IVON
from bayou.methods.ivon_optimizer import IVONOptimizer
from bayou.methods.langevin import PSGLD, SGHMC, SGLD, Cyclical, Decaying
from bayou.methods.laplace import Laplace
from bayou.methods.mclmc import MCLMC
from bayou.methods.point import MAP, MLE
from bayou.methods.stochastic import MCDropout
from bayou.methods.swag import SWAG
from bayou.methods.tfb import TFB
from bayou.methods.vbll import VBLL
from bayou.methods.vi import VI
from bayou.methods.wide import Wide

__all__ = [
    "HMC",
    "IVON",
    "MAP",
    "MCLMC",
    "MLE",
    "NUTS",
    "PSGLD",
    "SGHMC",
    "SGLD",
    "SWAG",
    "TFB",
    "VBLL",
    "VI",
    "Annealed",
    "CollapseWarning",
    "Cyclical",
    "Decaying",
    "DivergenceError",
    "Elbo",
    "Ensemble",
    "EnsembleError",
    "IVONOptimizer",
    "Laplace",
    "MCDropout",
    "Method",
    "MixingWarning",
    "Wide",
    "WorseThanModeWarning",
    "elbo",
]
