"""Every map by name, for guides, the conformance suite and the documentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal, get_args

from bayou.flows.continuous_time.continuous import continuous
from bayou.flows.contractive.residual import residual
from bayou.flows.core.bases import Base, StandardNormal
from bayou.flows.core.compose import Chain, Inverse
from bayou.flows.core.flow import Flow
from bayou.flows.core.transform import Map
from bayou.flows.discrete.bijections import (
    IntegerCoupling,
    IntegerIdentity,
    ModuloCoupling,
    OneHot,
    integer,
    modulo,
)
from bayou.flows.discrete.masses import Categorical, DiscretizedLogistic
from bayou.flows.layers import builders
from bayou.flows.layers.cdf import InverseCDF
from bayou.flows.layers.determinant import Planar, Sylvester
from bayou.flows.layers.elementwise import Affine
from bayou.flows.layers.linear import (
    Conv1x1,
    DiagonalAffine,
    Householder,
    LULinear,
    reverse,
    shuffle,
)
from bayou.flows.layers.normalization import ActNorm, BatchNorm
from bayou.flows.layers.squeeze import Squeeze
from bayou.flows.models.amortized import AmortizedAffine
from bayou.flows.models.causal import pixelcnn, wavenet
from bayou.flows.models.image_nets import conv_net
from bayou.flows.models.images import (
    ImageCoupling,
    Pointwise,
    Sigmoid,
    flowpp_image,
    glow_image,
    split_channels,
)
from bayou.flows.models.transformer import transformer_flow
from bayou.flows.surjections.maps import Abs, Autoencoder, Max, Slice, Sort
from bayou.flows.surjections.quantization import Argmax, BinaryArgmax, Dequantize

Kind = Literal["vector", "bijective", "surjective", "stochastic", "discrete"]
Builder = Callable[..., Map]

# Of the discrete maps here.
CLASSES = 3
LEVELS = 4
SMALL_IMAGE_FLOW: dict[str, int] = {"steps": 1, "hidden": 4}


@dataclass(frozen=True)
class RegisteredMap:
    """A map of the registry.

    Args:
        build: builds the map from a size: the dimension, or the channels of small images.
        kind: "bijective" (the default), "surjective", "stochastic" or "discrete".
        base: builds the distribution of x for ``check`` from the size, if x does not consist of
            real numbers; None, the default, if it does.
    """

    build: Builder
    kind: Kind = "bijective"
    base: Callable[[int], Base] | None = None


def _image(build: Builder, side: int = 2, **options: Any) -> Builder:
    """Return a builder of maps of images as a builder from the number of channels."""

    @wraps(build)
    def build_from_channels(channels: int, **more_options: Any) -> Map:
        return build((channels, side, side), **{**options, **more_options})

    return build_from_channels


def autoencoder(dim: int) -> Autoencoder:
    """Build a small ``Autoencoder`` with coupling flows, whose y has one entry more than x.

    Args:
        dim: the number of entries of x.
    """
    return Autoencoder(_coupling_flow(dim + 1, dim), _coupling_flow(dim, dim + 1))


def _coupling_flow(event: int, context_dim: int) -> Flow:
    """Build a small conditional flow of one affine coupling."""
    transform = builders.realnvp(event, layers=1, hidden=(8,), context_dim=context_dim)
    return Flow(StandardNormal(event), transform)


def _random_order(dim: int) -> Map:
    """Build a map that sorts the entries and then shuffles them."""
    return Chain(Sort(dim), Inverse(Sort(dim)))


_ONE_HOT_ROWS = partial(Categorical, classes=CLASSES)
_INTEGERS = partial(DiscretizedLogistic, levels=LEVELS, scale=1.0)
_BOUNDED_INTEGERS = partial(DiscretizedLogistic, levels=LEVELS, bounded=True)

_VECTORS: dict[str, Builder] = {
    # determinant identities
    "diagonal_affine": DiagonalAffine,
    "lu_linear": LULinear,
    "householder": Householder,
    "reverse": reverse,
    "shuffle": shuffle,
    "conv1x1": Conv1x1,
    "planar": builders.planar,
    "radial": builders.radial,
    "sylvester_orthogonal": partial(builders.sylvester, form="orthogonal"),
    "sylvester_householder": partial(builders.sylvester, form="householder"),
    "sylvester_triangular": partial(builders.sylvester, form="triangular"),
    "batch_norm": BatchNorm,
    "act_norm": ActNorm,
    # coupling
    "nice": builders.nice,
    "realnvp": builders.realnvp,
    "gated": builders.gated,
    "gated_resampled": builders.gated_resampled,
    "glow": builders.glow,
    "flowpp": builders.flowpp,
    "spline_coupling": builders.spline_coupling,
    # autoregressive
    "maf": builders.maf,
    "maf_residual": partial(builders.maf, residual=True),
    "iaf": builders.iaf,
    "naf": builders.naf,
    "tan": builders.tan,
    "spline_autoregressive": builders.spline_autoregressive,
    "wavenet": wavenet,
    "transformer_flow": transformer_flow,
    "pixelcnn": _image(pixelcnn),
    # residual, and in continuous time
    "residual": residual,
    "continuous": continuous,
    # one dimension at a time
    "inverse_cdf": InverseCDF,
}

_FURTHER_MAPS: dict[str, RegisteredMap] = {
    # with a context
    "amortized_affine": RegisteredMap(partial(AmortizedAffine, context_dim=2)),
    "amortized_planar": RegisteredMap(partial(Planar, layers=2, context_dim=2)),
    "amortized_sylvester": RegisteredMap(partial(Sylvester, layers=2, context_dim=2)),
    # angles
    "circular_coupling": RegisteredMap(
        partial(builders.circular_spline, layers=2, hidden=(8,)),
    ),
    "circular_autoregressive": RegisteredMap(
        partial(builders.circular_spline, layers=2, hidden=(8,), coupling=False),
    ),
    # images, by channels
    "squeeze": RegisteredMap(_image(Squeeze)),
    "sigmoid": RegisteredMap(_image(Sigmoid, side=1, margin=0.05)),
    "pointwise": RegisteredMap(_image(Pointwise, side=1, elementwise=Affine())),
    "image_coupling": RegisteredMap(
        _image(ImageCoupling, elementwise=Affine(), net=partial(conv_net, hidden=4)),
    ),
    "flowpp_image": RegisteredMap(
        _image(flowpp_image, blocks=1, components=2, heads=2, **SMALL_IMAGE_FLOW),
    ),
    "split_channels": RegisteredMap(_image(split_channels), "surjective"),
    "glow_image": RegisteredMap(
        _image(glow_image, side=4, levels=2, **SMALL_IMAGE_FLOW),
        "surjective",
    ),
    # surjections
    "dequantize": RegisteredMap(Dequantize, "surjective"),
    "slice": RegisteredMap(partial(Slice, keep=1), "surjective"),
    "abs": RegisteredMap(Abs, "surjective"),
    "sort": RegisteredMap(Sort, "surjective"),
    "max": RegisteredMap(Max, "surjective"),
    "argmax": RegisteredMap(partial(Argmax, classes=CLASSES), "surjective"),
    "binary_argmax": RegisteredMap(partial(BinaryArgmax, classes=CLASSES), "surjective"),
    # random in both directions
    "random_order": RegisteredMap(_random_order, "stochastic"),
    "autoencoder": RegisteredMap(autoencoder, "stochastic"),
    # integers
    "whole": RegisteredMap(IntegerIdentity, "discrete", _INTEGERS),
    "integer_coupling": RegisteredMap(
        partial(IntegerCoupling, hidden=(8,), scale=LEVELS / 2),
        "discrete",
        _INTEGERS,
    ),
    "integer": RegisteredMap(
        partial(integer, levels=LEVELS, layers=2, hidden=(8,), wrap=True),
        "discrete",
        _BOUNDED_INTEGERS,
    ),
    "one_hot": RegisteredMap(partial(OneHot, classes=CLASSES), "discrete", _ONE_HOT_ROWS),
    "modulo_coupling": RegisteredMap(
        partial(ModuloCoupling, classes=CLASSES, hidden=(8,)),
        "discrete",
        _ONE_HOT_ROWS,
    ),
    "modulo": RegisteredMap(
        partial(modulo, classes=CLASSES, layers=2, hidden=(8,)),
        "discrete",
        _ONE_HOT_ROWS,
    ),
    "modulo_autoregressive": RegisteredMap(
        partial(modulo, classes=CLASSES, layers=2, hidden=(8,), autoregressive=True),
        "discrete",
        _ONE_HOT_ROWS,
    ),
}


def registry(kind: Kind | None = None) -> dict[str, RegisteredMap]:
    """Return all maps by name, or those of one kind, with small networks.

    The conformance suite measures each of them by ``check``, and guides accept the names of those
    of kind "vector".

    Args:
        kind: "bijective" maps have exact terms in both directions; "vector" are those bijections
            that are built from a dimension, which guides accept by name. "surjective" maps lose
            information in one direction, "stochastic" maps are random in both, "discrete" maps are
            bijections of integers. By default all.

    Returns:
        By name, an entry with ``build``, a function of a size (the dimension, or the channels of
        small images) that returns the map; ``kind``; and ``base``, a function of the size that
        returns the distribution of x if x does not consist of real numbers.

    Raises:
        ValueError: for a kind that does not exist.

    Example:
        >>> import bayou.flows as flows
        >>> entry = flows.registry("discrete")["modulo"]
        >>> flow = flows.Flow(entry.base(4), entry.build(4))
        >>> flow.sample(10, seed=0).shape
        torch.Size([10, 4])
    """
    if kind not in (None, *get_args(Kind)):
        raise ValueError(
            f"there is no kind {kind!r} of maps; the kinds are {', '.join(get_args(Kind))}"
        )
    vectors = {name: RegisteredMap(build) for name, build in _VECTORS.items()}
    if kind == "vector":
        return vectors
    maps = vectors | _FURTHER_MAPS
    return {name: entry for name, entry in maps.items() if kind in (None, entry.kind)}
