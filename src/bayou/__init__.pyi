"""What ``bayou`` offers, for type checkers; ``__init__.py`` imports each name from where it says here, when used."""

from bayou import (
    diagnostics as diagnostics,
    flows as flows,
    likelihoods as likelihoods,
    metrics as metrics,
    priors as priors,
    select as select,
)
from bayou._fit import fit as fit
from bayou.adapters.sklearn import (
    BayesClassifier as BayesClassifier,
    BayesRegressor as BayesRegressor,
)
from bayou.guides import (
    FFG as FFG,
    MNF as MNF,
    SIVI as SIVI,
    UIVI as UIVI,
    Bayesian as Bayesian,
    Delta as Delta,
    Dropout as Dropout,
    Guide as Guide,
    GuideSpec as GuideSpec,
    HalfCauchy as HalfCauchy,
    Inducing as Inducing,
    JointFlow as JointFlow,
    LowRank as LowRank,
    MeanField as MeanField,
    NodeFlow as NodeFlow,
    NodeNoise as NodeNoise,
    NormalJeffreys as NormalJeffreys,
    SparseVD as SparseVD,
    bayesianize as bayesianize,
)
from bayou.likelihoods import (
    Bernoulli as Bernoulli,
    Categorical as Categorical,
    Gaussian as Gaussian,
    HeteroscedasticGaussian as HeteroscedasticGaussian,
    HeteroscedasticStudentT as HeteroscedasticStudentT,
    Likelihood as Likelihood,
    Poisson as Poisson,
    StudentTLikelihood as StudentTLikelihood,
)
from bayou.methods import (
    HMC as HMC,
    IVON as IVON,
    MAP as MAP,
    MLE as MLE,
    NUTS as NUTS,
    SGHMC as SGHMC,
    SGLD as SGLD,
    SWAG as SWAG,
    VI as VI,
    Annealed as Annealed,
    Collapsed as Collapsed,
    Cyclical as Cyclical,
    Decaying as Decaying,
    Diverged as Diverged,
    Elbo as Elbo,
    Ensemble as Ensemble,
    EnsembleError as EnsembleError,
    Laplace as Laplace,
    MCBatchNorm as MCBatchNorm,
    MCDropout as MCDropout,
    Method as Method,
    NotMixed as NotMixed,
    WorseThanMode as WorseThanMode,
    elbo as elbo,
    pSGLD as pSGLD,
)
from bayou.operations import (
    Compression as Compression,
    Conformal as Conformal,
    Continual as Continual,
    Distilled as Distilled,
    acquire as acquire,
    best_calibration as best_calibration,
    calibrate as calibrate,
    compress as compress,
    conformal as conformal,
    continual as continual,
    distil as distil,
    to_flow as to_flow,
    to_module as to_module,
)
from bayou.posteriors import (
    FileError as FileError,
    Posterior as Posterior,
    load as load,
)
from bayou.predictive import (
    Predictive as Predictive,
)
from bayou.priors import (
    DoubleExponential as DoubleExponential,
    LogUniform as LogUniform,
    Normal as Normal,
    Prior as Prior,
    ScaleMixture as ScaleMixture,
    StudentT as StudentT,
)
from bayou.progress import BayouWarning as BayouWarning
from bayou.select import list_methods as list_methods
from bayou.training.convergence import NotConverged as NotConverged

__version__: str
