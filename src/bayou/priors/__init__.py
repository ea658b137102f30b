"""Priors over one weight tensor: log-densities, and closed-form KLs from a Gaussian.

A prior such as ``Normal(1.0)`` is a frozen spec; ``bind(shape)`` returns the ``nn.Module`` with its
log-density. With ``learn`` its hyperparameters are parameters (empirical Bayes), otherwise buffers.
"""

from bayou.priors.base import BoundPrior, Prior, check_priors
from bayou.priors.densities import (
    BoundDensity,
    BoundLogUniform,
    BoundScaleMixture,
    BoundStudentT,
    DensityPrior,
    LogUniform,
    ScaleMixture,
    StudentT,
)
from bayou.priors.joint import (
    BoundPart,
    JointCorrection,
    JointDensity,
    JointPrior,
    couplings,
    joint_rules,
)
from bayou.priors.normal import BoundNormal, BoundUnitNormal, Normal, UnitNormal

__all__ = [
    "BoundDensity",
    "BoundLogUniform",
    "BoundNormal",
    "BoundPart",
    "BoundPrior",
    "BoundScaleMixture",
    "BoundStudentT",
    "BoundUnitNormal",
    "DensityPrior",
    "JointCorrection",
    "JointDensity",
    "JointPrior",
    "LogUniform",
    "Normal",
    "Prior",
    "ScaleMixture",
    "StudentT",
    "UnitNormal",
    "check_priors",
    "couplings",
    "joint_rules",
]
