"""Normalizing flows: transforms with their log-determinants, and the distributions they make."""

from bayou.flows.amortised import AmortisedAffine, AmortisedPlanar, AmortisedSylvester, PlanarField, amortised
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
from bayou.flows.causal import PixelCNN, WaveNet, pixelcnn, wavenet
from bayou.flows.cdf import InverseCDF
from bayou.flows.check import check
from bayou.flows.compose import Chain, Conditional, Inverse
from bayou.flows.conditioners import MADE, Conditioner, Recurrent
from bayou.flows.continuous import Continuous, continuous
from bayou.flows.contracting import Contracting, ContractingConv, LipSwish
from bayou.flows.coupling import Coupling, ResampledGate, coupling_mask
from bayou.flows.decoders import BernoulliDecoder, CategoricalDecoder, LogisticDecoder
from bayou.flows.determinant import Planar, Radial, Sylvester
from bayou.flows.elementwise import Additive, Affine, DeepSigmoid, Elementwise, Gate, Spline, logistic_mixture
from bayou.flows.fields import TimeConv, TimeMLP, TimeUNet
from bayou.flows.fit import FitResult, fit
from bayou.flows.flow import Flow, FlowDistribution
from bayou.flows.given import ConditionalDistribution, Given
from bayou.flows.image_nets import ImageNet, conv_net, gated_net
from bayou.flows.images import (
    ImageCoupling,
    Pointwise,
    Sigmoid,
    Squeeze,
    bits_per_dim,
    dequantizer,
    flowpp_image,
    glow_image,
    image_flow,
    split_channels,
)
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
from bayou.flows.transformer import CausalTransformer, transformer_flow
from bayou.flows.vae import VAE
from bayou.flows.vae_nets import conv_decoder, conv_encoder, dense_decoder, dense_encoder

__all__ = [
    "MADE",
    "VAE",
    "Abs",
    "ActNorm",
    "Additive",
    "Affine",
    "AmortisedAffine",
    "AmortisedPlanar",
    "AmortisedSylvester",
    "Argmax",
    "Autoencoder",
    "Autoregressive",
    "Base",
    "BatchNorm",
    "BernoulliDecoder",
    "BinaryArgmax",
    "CategoricalDecoder",
    "CausalTransformer",
    "Chain",
    "Conditional",
    "ConditionalDistribution",
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
    "ImageCoupling",
    "ImageNet",
    "Inverse",
    "InverseCDF",
    "InversionError",
    "LULinear",
    "Label",
    "Ladj",
    "LipSwish",
    "LogisticDecoder",
    "Map",
    "Max",
    "Orthogonal",
    "Permutation",
    "PixelCNN",
    "Planar",
    "PlanarField",
    "Pointwise",
    "Radial",
    "Recurrent",
    "Report",
    "ResampledGate",
    "Residual",
    "Rows",
    "Side",
    "Sigmoid",
    "Slice",
    "Sort",
    "Spline",
    "Squeeze",
    "StandardNormal",
    "StochasticPermutation",
    "Sylvester",
    "TimeConv",
    "TimeMLP",
    "TimeUNet",
    "Transform",
    "Uniform",
    "WaveNet",
    "amortised",
    "bits_per_dim",
    "catalogue",
    "check",
    "continuous",
    "conv_decoder",
    "conv_encoder",
    "conv_net",
    "coupling_mask",
    "dense_decoder",
    "dense_encoder",
    "dequantizer",
    "fit",
    "flowpp",
    "flowpp_image",
    "gated",
    "gated_net",
    "gated_resampled",
    "glow",
    "glow_image",
    "iaf",
    "image_flow",
    "logistic_mixture",
    "maf",
    "mlp",
    "naf",
    "nice",
    "pixelcnn",
    "planar",
    "radial",
    "realnvp",
    "residual",
    "reverse",
    "shuffle",
    "spline_autoregressive",
    "spline_coupling",
    "split_channels",
    "sylvester",
    "tan",
    "transformer_flow",
    "wavenet",
]
