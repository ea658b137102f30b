"""Normalizing flows: transforms with their log-determinants, and the distributions they make."""

from bayou.flows.autoregressive import Autoregressive
from bayou.flows.bases import Base, DiagonalNormal, GaussianMixture, Gumbel, StandardNormal, Uniform
from bayou.flows.catalogue import (
    catalogue,
    flowpp,
    gated,
    gated_resampled,
    glow,
    iaf,
    maf,
    naf,
    nice,
    planar,
    radial,
    realnvp,
    spline_autoregressive,
    spline_coupling,
    sylvester,
    tan,
)
from bayou.flows.cdf import InverseCDF
from bayou.flows.check import check
from bayou.flows.compose import Chain, Conditional, Inverse
from bayou.flows.conditioners import MADE, Conditioner, Recurrent
from bayou.flows.continuous import Continuous, continuous
from bayou.flows.contracting import Contracting, ContractingConv, LipSwish
from bayou.flows.coupling import Coupling, ResampledGate, coupling_mask
from bayou.flows.determinant import Planar, Radial, Sylvester
from bayou.flows.elementwise import Additive, Affine, DeepSigmoid, Elementwise, Gate, Spline, logistic_mixture
from bayou.flows.fields import TimeConv, TimeMLP, TimeUNet
from bayou.flows.fit import FitResult, fit
from bayou.flows.flow import Flow, FlowDistribution
from bayou.flows.given import Given
from bayou.flows.linear import (
    Conv1x1,
    DiagonalAffine,
    Householder,
    LULinear,
    Orthogonal,
    Permutation,
    reverse,
    shuffle,
)
from bayou.flows.nets import mlp
from bayou.flows.normalization import ActNorm, BatchNorm
from bayou.flows.report import Report
from bayou.flows.residual import Residual, residual
from bayou.flows.surjections import (
    Abs,
    Argmax,
    Autoencoder,
    BinaryArgmax,
    Dequantize,
    Max,
    Slice,
    Sort,
    StochasticPermutation,
)
from bayou.flows.transform import Cost, InversionError, Label, Ladj, Map, Rows, Side, Transform

__all__ = [
    "MADE",
    "Abs",
    "ActNorm",
    "Additive",
    "Affine",
    "Argmax",
    "Autoencoder",
    "Autoregressive",
    "Base",
    "BatchNorm",
    "BinaryArgmax",
    "Chain",
    "Conditional",
    "Conditioner",
    "Continuous",
    "Contracting",
    "ContractingConv",
    "Conv1x1",
    "Cost",
    "Coupling",
    "DeepSigmoid",
    "Dequantize",
    "DiagonalAffine",
    "DiagonalNormal",
    "Elementwise",
    "FitResult",
    "Flow",
    "FlowDistribution",
    "Gate",
    "GaussianMixture",
    "Given",
    "Gumbel",
    "Householder",
    "Inverse",
    "InverseCDF",
    "InversionError",
    "LULinear",
    "Label",
    "Ladj",
    "LipSwish",
    "Map",
    "Max",
    "Orthogonal",
    "Permutation",
    "Planar",
    "Radial",
    "Recurrent",
    "Report",
    "ResampledGate",
    "Residual",
    "Rows",
    "Side",
    "Slice",
    "Sort",
    "Spline",
    "StandardNormal",
    "StochasticPermutation",
    "Sylvester",
    "TimeConv",
    "TimeMLP",
    "TimeUNet",
    "Transform",
    "Uniform",
    "catalogue",
    "check",
    "continuous",
    "coupling_mask",
    "fit",
    "flowpp",
    "gated",
    "gated_resampled",
    "glow",
    "iaf",
    "logistic_mixture",
    "maf",
    "mlp",
    "naf",
    "nice",
    "planar",
    "radial",
    "realnvp",
    "residual",
    "reverse",
    "shuffle",
    "spline_autoregressive",
    "spline_coupling",
    "sylvester",
    "tan",
]
