"""What ``bayou`` offers, for type checkers; ``__init__.py`` imports each name from where it says here, when used."""

from bayou import (
    diagnostics as diagnostics,
)
from bayou import (
    flows as flows,
)
from bayou.adapters.sklearn import (
    BayesClassifier as BayesClassifier,
)
from bayou.adapters.sklearn import (
    BayesRegressor as BayesRegressor,
)
from bayou.guides import (
    FFG as FFG,
)
from bayou.guides import (
    MNF as MNF,
)
from bayou.guides import (
    Bayesian as Bayesian,
)
from bayou.guides import (
    Delta as Delta,
)
from bayou.guides import (
    Dropout as Dropout,
)
from bayou.guides import (
    JointFlow as JointFlow,
)
from bayou.guides import (
    LowRank as LowRank,
)
from bayou.guides import (
    NodeFlow as NodeFlow,
)
from bayou.guides import (
    NodeNoise as NodeNoise,
)
from bayou.guides import (
    SparseVD as SparseVD,
)
from bayou.guides import (
    bayesianize as bayesianize,
)
from bayou.likelihoods import (
    Bernoulli as Bernoulli,
)
from bayou.likelihoods import (
    Categorical as Categorical,
)
from bayou.likelihoods import (
    Gaussian as Gaussian,
)
from bayou.likelihoods import (
    HeteroscedasticGaussian as HeteroscedasticGaussian,
)
from bayou.likelihoods import (
    Poisson as Poisson,
)
from bayou.likelihoods import (
    StudentTLikelihood as StudentTLikelihood,
)
from bayou.methods import (
    HMC as HMC,
)
from bayou.methods import (
    IVON as IVON,
)
from bayou.methods import (
    MAP as MAP,
)
from bayou.methods import (
    MLE as MLE,
)
from bayou.methods import (
    NUTS as NUTS,
)
from bayou.methods import (
    SGHMC as SGHMC,
)
from bayou.methods import (
    SGLD as SGLD,
)
from bayou.methods import (
    SWAG as SWAG,
)
from bayou.methods import (
    VI as VI,
)
from bayou.methods import (
    Cyclical as Cyclical,
)
from bayou.methods import (
    Decaying as Decaying,
)
from bayou.methods import (
    Diverged as Diverged,
)
from bayou.methods import (
    Elbo as Elbo,
)
from bayou.methods import (
    Ensemble as Ensemble,
)
from bayou.methods import (
    EnsembleError as EnsembleError,
)
from bayou.methods import (
    Laplace as Laplace,
)
from bayou.methods import (
    MCBatchNorm as MCBatchNorm,
)
from bayou.methods import (
    MCDropout as MCDropout,
)
from bayou.methods import (
    elbo as elbo,
)
from bayou.methods import (
    fit as fit,
)
from bayou.methods import (
    pSGLD as pSGLD,
)
from bayou.posteriors import (
    FileError as FileError,
)
from bayou.posteriors import (
    Posterior as Posterior,
)
from bayou.posteriors import (
    load as load,
)
from bayou.predictive import (
    Predictive as Predictive,
)
from bayou.priors import (
    DoubleExponential as DoubleExponential,
)
from bayou.priors import (
    LogUniform as LogUniform,
)
from bayou.priors import (
    Normal as Normal,
)
from bayou.priors import (
    ScaleMixture as ScaleMixture,
)
from bayou.priors import (
    StudentT as StudentT,
)

__version__: str
