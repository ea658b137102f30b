"""Normalizing flows: transforms with their log-determinants, and the distributions they make.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bayou.flows._registry import registry as registry
    from bayou.flows.checking.check import check as check
    from bayou.flows.checking.report import Report as Report
    from bayou.flows.continuous_time.continuous import (
        Continuous as Continuous,
        continuous as continuous,
        refine as refine,
        varied_steps as varied_steps,
    )
    from bayou.flows.continuous_time.fields import TimeMLP as TimeMLP
    from bayou.flows.contractive.contracting import (
        Contracting as Contracting,
        ContractingConv as ContractingConv,
        LipSwish as LipSwish,
    )
    from bayou.flows.contractive.residual import (
        Residual as Residual,
        residual as residual,
    )
    from bayou.flows.core.bases import (
        Base as Base,
        CodecError as CodecError,
        DiagonalNormal as DiagonalNormal,
        GaussianMixture as GaussianMixture,
        StandardNormal as StandardNormal,
        Uniform as Uniform,
        VonMises as VonMises,
    )
    from bayou.flows.core.compose import (
        Chain as Chain,
        Conditional as Conditional,
        Inverse as Inverse,
    )
    from bayou.flows.core.flow import Flow as Flow
    from bayou.flows.core.implicit import SecondDerivativeError as SecondDerivativeError
    from bayou.flows.core.nets import mlp as mlp
    from bayou.flows.core.transform import (
        Cost as Cost,
        InversionError as InversionError,
        Label as Label,
        Ladj as Ladj,
        Map as Map,
        Rows as Rows,
        Side as Side,
        Transform as Transform,
    )
    from bayou.flows.discrete.bijections import (
        IntegerCoupling as IntegerCoupling,
        IntegerIdentity as IntegerIdentity,
        ModuloAutoregressive as ModuloAutoregressive,
        ModuloCoupling as ModuloCoupling,
        OneHot as OneHot,
        OneHotMADE as OneHotMADE,
        integer as integer,
        modulo as modulo,
    )
    from bayou.flows.discrete.masses import (
        Categorical as Categorical,
        DiscretizedLogistic as DiscretizedLogistic,
        Groups as Groups,
        quincunx as quincunx,
    )
    from bayou.flows.fitting.fit import (
        FitOptions as FitOptions,
        FitResult as FitResult,
        fit as fit,
    )
    from bayou.flows.layers.autoregressive import Autoregressive as Autoregressive
    from bayou.flows.layers.builders import (
        circular_spline as circular_spline,
        flowpp as flowpp,
        gated as gated,
        gated_resampled as gated_resampled,
        glow as glow,
        iaf as iaf,
        maf as maf,
        naf as naf,
        nice as nice,
        planar as planar,
        radial as radial,
        realnvp as realnvp,
        spline_autoregressive as spline_autoregressive,
        spline_coupling as spline_coupling,
        sylvester as sylvester,
        tan as tan,
    )
    from bayou.flows.layers.cdf import InverseCDF as InverseCDF
    from bayou.flows.layers.conditioners import (
        MADE as MADE,
        Conditioner as Conditioner,
        Recurrent as Recurrent,
    )
    from bayou.flows.layers.coupling import (
        Coupling as Coupling,
        ResampledGate as ResampledGate,
        coupling_mask as coupling_mask,
    )
    from bayou.flows.layers.determinant import (
        Planar as Planar,
        Radial as Radial,
        Sylvester as Sylvester,
    )
    from bayou.flows.layers.elementwise import (
        Additive as Additive,
        Affine as Affine,
        BoundedAffine as BoundedAffine,
        DeepSigmoid as DeepSigmoid,
        Elementwise as Elementwise,
        Gate as Gate,
        Spline as Spline,
        logistic_mixture as logistic_mixture,
    )
    from bayou.flows.layers.linear import (
        Conv1x1 as Conv1x1,
        DiagonalAffine as DiagonalAffine,
        Householder as Householder,
        LULinear as LULinear,
        Permutation as Permutation,
        reverse as reverse,
        shuffle as shuffle,
    )
    from bayou.flows.layers.normalization import (
        ActNorm as ActNorm,
        BatchNorm as BatchNorm,
    )
    from bayou.flows.layers.squeeze import Squeeze as Squeeze
    from bayou.flows.models.amortized import AmortizedAffine as AmortizedAffine
    from bayou.flows.models.causal import (
        PixelCNN as PixelCNN,
        WaveNet as WaveNet,
        pixelcnn as pixelcnn,
        wavenet as wavenet,
    )
    from bayou.flows.models.decoders import (
        BernoulliDecoder as BernoulliDecoder,
        CategoricalDecoder as CategoricalDecoder,
        LogisticDecoder as LogisticDecoder,
    )
    from bayou.flows.models.image_nets import (
        ImageNet as ImageNet,
        conv_net as conv_net,
        gated_net as gated_net,
    )
    from bayou.flows.models.images import (
        ImageCoupling as ImageCoupling,
        Pointwise as Pointwise,
        Sigmoid as Sigmoid,
        bits_per_dim as bits_per_dim,
        dequantizer as dequantizer,
        flowpp_image as flowpp_image,
        glow_image as glow_image,
        image_flow as image_flow,
        split_channels as split_channels,
    )
    from bayou.flows.models.transformer import (
        CausalTransformer as CausalTransformer,
        transformer_flow as transformer_flow,
    )
    from bayou.flows.models.vae import VAE as VAE
    from bayou.flows.surjections.conditional import (
        ConditionalDistribution as ConditionalDistribution,
        ConditionalFlow as ConditionalFlow,
    )
    from bayou.flows.surjections.maps import (
        Abs as Abs,
        Autoencoder as Autoencoder,
        Max as Max,
        Slice as Slice,
        Sort as Sort,
    )
    from bayou.flows.surjections.quantization import (
        Argmax as Argmax,
        BinaryArgmax as BinaryArgmax,
        Dequantize as Dequantize,
    )
else:
    from bayou.core.lazy import lazy_imports

    _MODULES, __getattr__, __dir__ = lazy_imports(__name__, __file__)
    __all__ = sorted(_MODULES)  # noqa: PLE0605
