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
CLASSES, LEVELS = 3, 4  # of the discrete maps here
SMALL: dict[str, Any] = {"steps": 1, "hidden": 4}


@dataclass(frozen=True)
class Entry:
    """A map: its constructor from a size (the dimension, or the channels of small images), and its
    kind.
    """

    build: Callable[..., Map]
    kind: Kind = "bijective"
    base: Callable[[int], Base] | None = None
    """The distribution of x for ``check``, if x does not consist of real numbers."""


def _image(build: Callable[..., Map], side: int = 2, **options: Any) -> Callable[..., Map]:
    """A constructor for images as a constructor from the number of channels."""

    @wraps(build)
    def built(channels: int, **more: Any) -> Map:
        return build((channels, side, side), **{**options, **more})

    return built


def autoencoder(dim: int) -> Autoencoder:
    """A small ``Autoencoder`` with coupling flows, whose y has one entry more than x."""

    def conditional(event: int, context: int) -> Flow:
        return Flow(
            StandardNormal(event),
            builders.realnvp(event, layers=1, hidden=(8,), context_dim=context),
        )

    return Autoencoder(conditional(dim + 1, dim), conditional(dim, dim + 1))


def _classes(dim: int) -> Base:
    return Categorical(dim, CLASSES)


def _numbers(dim: int) -> Base:
    return DiscretizedLogistic(dim, LEVELS, scale=1.0)


_VECTORS: dict[str, Callable[..., Map]] = {
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

_OTHERS: dict[str, Entry] = {
    # given a context
    "amortized_affine": Entry(partial(AmortizedAffine, context_dim=2)),
    "amortized_planar": Entry(partial(Planar, layers=2, context_dim=2)),
    "amortized_sylvester": Entry(partial(Sylvester, layers=2, context_dim=2)),
    # angles
    "circular_coupling": Entry(partial(builders.circular_spline, layers=2, hidden=(8,))),
    "circular_autoregressive": Entry(partial(builders.circular_spline, layers=2, hidden=(8,), coupling=False)),
    # images, by channels
    "squeeze": Entry(_image(Squeeze)),
    "sigmoid": Entry(_image(Sigmoid, side=1, margin=0.05)),
    "pointwise": Entry(_image(Pointwise, side=1, elementwise=Affine())),
    "image_coupling": Entry(_image(ImageCoupling, elementwise=Affine(), net=partial(conv_net, hidden=4))),
    "flowpp_image": Entry(_image(flowpp_image, blocks=1, components=2, heads=2, **SMALL)),
    "split_channels": Entry(_image(split_channels), "surjective"),
    "glow_image": Entry(_image(glow_image, side=4, levels=2, **SMALL), "surjective"),
    # surjections
    "dequantize": Entry(Dequantize, "surjective"),
    "slice": Entry(partial(Slice, keep=1), "surjective"),
    "abs": Entry(Abs, "surjective"),
    "sort": Entry(Sort, "surjective"),
    "max": Entry(Max, "surjective"),
    "argmax": Entry(partial(Argmax, classes=CLASSES), "surjective"),
    "binary_argmax": Entry(partial(BinaryArgmax, classes=CLASSES), "surjective"),
    # random in both directions
    "random_order": Entry(lambda dim: Chain(Sort(dim), Inverse(Sort(dim))), "stochastic"),
    "autoencoder": Entry(autoencoder, "stochastic"),
    # integers
    "whole": Entry(IntegerIdentity, "discrete", _numbers),
    "integer_coupling": Entry(partial(IntegerCoupling, hidden=(8,), scale=LEVELS / 2), "discrete", _numbers),
    "integer": Entry(partial(integer, levels=LEVELS, layers=2, hidden=(8,), wrap=True), "discrete",
                     lambda dim: DiscretizedLogistic(dim, LEVELS, bounded=True)),
    "one_hot": Entry(partial(OneHot, classes=CLASSES), "discrete", _classes),
    "modulo_coupling": Entry(partial(ModuloCoupling, classes=CLASSES, hidden=(8,)), "discrete", _classes),
    "modulo": Entry(partial(modulo, classes=CLASSES, layers=2, hidden=(8,)), "discrete", _classes),
    "modulo_autoregressive": Entry(
        partial(modulo, classes=CLASSES, layers=2, hidden=(8,), autoregressive=True), "discrete", _classes),
}  # fmt: skip


def registry(kind: Kind | None = None) -> dict[str, Entry]:
    """All maps by name, or those of one kind, with small networks.

    Args:
        kind: "bijective" maps have exact terms in both directions; "vector" are those bijections
            that are built from a dimension, which guides accept by name. "surjective" maps lose
            information in one direction, "stochastic" maps are random in both, "discrete" maps are
            bijections of integers. By default all.

    Raises:
        ValueError: for a kind that does not exist.
    """
    if kind not in (None, *get_args(Kind)):
        raise ValueError(
            f"there is no kind {kind!r} of maps; the kinds are {', '.join(get_args(Kind))}"
        )
    vectors = {name: Entry(build) for name, build in _VECTORS.items()}
    if kind == "vector":
        return vectors
    return {
        name: entry for name, entry in (vectors | _OTHERS).items() if kind in (None, entry.kind)
    }
