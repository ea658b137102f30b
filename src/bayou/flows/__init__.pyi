"""Normalizing flows: transforms with their log-determinants, and the distributions they make."""

from bayou.flows._registry import registry
from bayou.flows.checking.check import check
from bayou.flows.checking.report import Report
from bayou.flows.continuous_time.continuous import Continuous, continuous, refine, varied_steps
from bayou.flows.continuous_time.fields import TimeMLP
from bayou.flows.contractive.contracting import Contracting, ContractingConv, LipSwish
from bayou.flows.contractive.residual import Residual, residual
from bayou.flows.core.bases import (
    Base,
    CodecError,
    DiagonalNormal,
    GaussianMixture,
    StandardNormal,
    Uniform,
    VonMises,
)
from bayou.flows.core.compose import Chain, Conditional, Inverse
from bayou.flows.core.flow import Flow
from bayou.flows.core.implicit import SecondDerivativeError
from bayou.flows.core.nets import mlp
from bayou.flows.core.transform import Cost, InversionError, Label, Ladj, Map, Rows, Side, Transform
from bayou.flows.discrete.bijections import (
    IntegerCoupling,
    IntegerIdentity,
    ModuloAutoregressive,
    ModuloCoupling,
    OneHot,
    OneHotMADE,
    integer,
    modulo,
)
from bayou.flows.discrete.masses import Categorical, DiscretizedLogistic, Groups, quincunx
from bayou.flows.fitting.fit import FitOptions, FitResult, fit
from bayou.flows.layers.autoregressive import Autoregressive
from bayou.flows.layers.builders import (
    circular_spline,
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
from bayou.flows.layers.cdf import InverseCDF
from bayou.flows.layers.conditioners import MADE, Conditioner, Recurrent
from bayou.flows.layers.coupling import Coupling, ResampledGate, coupling_mask
from bayou.flows.layers.determinant import Planar, Radial, Sylvester
from bayou.flows.layers.elementwise import (
    Additive,
    Affine,
    BoundedAffine,
    DeepSigmoid,
    Elementwise,
    Gate,
    Spline,
    logistic_mixture,
)
from bayou.flows.layers.linear import (
    Conv1x1,
    DiagonalAffine,
    Householder,
    LULinear,
    Permutation,
    reverse,
    shuffle,
)
from bayou.flows.layers.normalization import ActNorm, BatchNorm
from bayou.flows.layers.squeeze import Squeeze
from bayou.flows.models.amortized import AmortizedAffine
from bayou.flows.models.causal import PixelCNN, WaveNet, pixelcnn, wavenet
from bayou.flows.models.decoders import BernoulliDecoder, CategoricalDecoder, LogisticDecoder
from bayou.flows.models.image_nets import ImageNet, conv_net, gated_net
from bayou.flows.models.images import (
    ImageCoupling,
    Pointwise,
    Sigmoid,
    bits_per_dim,
    dequantizer,
    flowpp_image,
    glow_image,
    image_flow,
    split_channels,
)
from bayou.flows.models.transformer import CausalTransformer, transformer_flow
from bayou.flows.models.vae import VAE
from bayou.flows.surjections.conditional import ConditionalDistribution, ConditionalFlow
from bayou.flows.surjections.maps import Abs, Autoencoder, Max, Slice, Sort
from bayou.flows.surjections.quantization import Argmax, BinaryArgmax, Dequantize

# One name per line would be longer than the rest of this file.
__all__ = [
    "MADE", "VAE", "Abs", "ActNorm", "Additive", "Affine", "AmortizedAffine",
    "Argmax", "Autoencoder", "Autoregressive", "Base", "BatchNorm", "BernoulliDecoder", "BinaryArgmax", "BoundedAffine",
    "Categorical", "CategoricalDecoder", "CausalTransformer", "Chain", "CodecError", "Conditional",
    "ConditionalDistribution", "ConditionalFlow", "Conditioner", "Continuous", "Contracting", "ContractingConv",
    "Conv1x1", "Cost", "Coupling", "DeepSigmoid", "Dequantize", "DiagonalAffine", "DiagonalNormal",
    "DiscretizedLogistic", "Elementwise", "FitOptions", "FitResult", "Flow", "Gate",
    "GaussianMixture", "Groups", "Householder", "ImageCoupling", "ImageNet", "IntegerCoupling",
    "IntegerIdentity", "Inverse", "InverseCDF", "InversionError", "LULinear", "Label", "Ladj", "LipSwish",
    "LogisticDecoder", "Map", "Max", "ModuloAutoregressive", "ModuloCoupling", "OneHot", "OneHotMADE",
    "Permutation", "PixelCNN", "Planar", "Pointwise", "Radial", "Recurrent", "Report", "ResampledGate",
    "Residual", "Rows", "SecondDerivativeError", "Side", "Sigmoid", "Slice", "Sort", "Spline", "Squeeze",
    "StandardNormal", "Sylvester", "TimeMLP", "Transform", "Uniform", "VonMises", "WaveNet",
    "bits_per_dim", "check", "circular_spline", "continuous", "conv_net", "coupling_mask",
    "dequantizer", "fit", "flowpp", "flowpp_image", "gated", "gated_net",
    "gated_resampled", "glow", "glow_image", "iaf", "image_flow", "integer", "logistic_mixture", "maf", "mlp", "modulo",
    "naf", "nice", "pixelcnn", "planar", "quincunx", "radial", "realnvp", "refine", "registry", "residual", "reverse",
    "shuffle", "spline_autoregressive", "spline_coupling", "split_channels", "sylvester", "tan", "transformer_flow",
    "varied_steps", "wavenet",
]  # fmt: skip
