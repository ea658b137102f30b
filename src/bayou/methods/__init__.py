"""Methods: ways from a target to a posterior."""

from __future__ import annotations

from typing import Any

from torch import nn

from bayou.files import StrPath
from bayou.likelihoods import Categorical, Likelihood
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
from bayou.posteriors.posterior import Posterior
from bayou.progress import Show
from bayou.specs import nearest
from bayou.target import PriorRules, Target
from bayou.training.data import as_data


def fit(
    net: nn.Module,
    data: Any,
    *,
    method: Method | None = None,
    likelihood: Likelihood | None = None,
    prior: PriorRules | None = None,
    seed: int = 0,
    checkpoint: StrPath | None = None,
    progress: Show = True,
) -> Posterior:
    """The posterior over a network's weights given data: a pair of tensors (x, y), a Dataset or a DataLoader.

    ``method``: VI(MNF()) and the like, VI() by default. ``likelihood``: Categorical() by default. ``prior``:
    Normal(1.0), or patterns → priors; without one VI and IVON learn it by unit where a network has 5,000 weights or
    more and no length is given. ``checkpoint``: a file that a killed run continues from, bit for bit.
    The network itself is not changed.
    """
    method = VI() if method is None else method
    if not isinstance(method, Method):
        name = method.__name__ if isinstance(method, type) else str(method)
        guess = nearest(name, [f"{known}()" for known in __all__ if hasattr(globals()[known], "batch_size")])
        raise ValueError(f"method must be a Method such as VI(MNF()), got {method!r}{guess}")
    batches = as_data(data, method.batch_size)
    target = Target.build(net, Categorical() if likelihood is None else likelihood, prior, batches.n)
    return method.fit(target, batches, seed=seed, checkpoint=checkpoint, progress=progress)


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
    "fit",
    "pSGLD",
]
