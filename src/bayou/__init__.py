"""bayou: honest uncertainty from neural networks, with posteriors as rich as normalizing flows.

Names are imported when they are first used, so that ``import bayou`` and the command line cost
nothing until they need torch. The imports below are for readers and type checkers, and say where
each name is imported from.
"""

from typing import TYPE_CHECKING

__version__ = "1.0.0"

if TYPE_CHECKING:
    from bayou import (
        diagnostics as diagnostics,
        flows as flows,
        guides as guides,
        likelihoods as likelihoods,
        methods as methods,
        metrics as metrics,
        networks as networks,
        operations as operations,
        posteriors as posteriors,
        priors as priors,
        select as select,
        truth as truth,
    )
    from bayou.adapters import hub as hub, mlflow as mlflow
    from bayou.adapters.hub import from_pretrained as from_pretrained
    from bayou.adapters.laplace_torch import from_laplace as from_laplace
    from bayou.adapters.sklearn import (
        BayesClassifier as BayesClassifier,
        BayesRegressor as BayesRegressor,
    )
    from bayou.core import rng as rng
    from bayou.core.progress import BayouWarning as BayouWarning
    from bayou.guides import (
        MNF as MNF,
        Delta as Delta,
        Dropout as Dropout,
        Inducing as Inducing,
        JointFlow as JointFlow,
        LowRank as LowRank,
        MeanField as MeanField,
        NodeFlow as NodeFlow,
        NodeNoise as NodeNoise,
        SparseVD as SparseVD,
    )
    from bayou.likelihoods import (
        Bernoulli as Bernoulli,
        Categorical as Categorical,
        Gaussian as Gaussian,
        HeteroscedasticGaussian as HeteroscedasticGaussian,
        Poisson as Poisson,
    )
    from bayou.likelihoods.predictive import Predictive as Predictive
    from bayou.methods import (
        HMC as HMC,
        IVON as IVON,
        MAP as MAP,
        MCLMC as MCLMC,
        MLE as MLE,
        NUTS as NUTS,
        PSGLD as PSGLD,
        SGHMC as SGHMC,
        SGLD as SGLD,
        SWAG as SWAG,
        VI as VI,
        Annealed as Annealed,
        Ensemble as Ensemble,
        Laplace as Laplace,
        MCDropout as MCDropout,
        MixingWarning as MixingWarning,
        elbo as elbo,
    )
    from bayou.operations import ood as ood
    from bayou.operations.acquire import acquire as acquire
    from bayou.operations.calibrate import calibrate as calibrate
    from bayou.operations.compress import compress as compress
    from bayou.operations.conformal import conformal as conformal
    from bayou.operations.continual import continual as continual
    from bayou.operations.distill import distill as distill
    from bayou.posteriors import (
        Mixture as Mixture,
        Posterior as Posterior,
        bayesianize as bayesianize,
        load as load,
    )
    from bayou.priors import Normal as Normal
    from bayou.select import list_methods as list_methods
    from bayou.select.fit import fit as fit
    from bayou.select.stacking import stack as stack
    from bayou.training.convergence import ConvergenceWarning as ConvergenceWarning
else:
    from bayou.core.lazy import lazy_imports

    _MODULES, __getattr__, __dir__ = lazy_imports(__name__, __file__)
    # ``import *`` must work without the lab extra.
    __all__ = sorted(  # noqa: PLE0605
        name for name, module in _MODULES.items() if not module.startswith("bayou.adapters")
    )
