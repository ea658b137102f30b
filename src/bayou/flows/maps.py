"""Every map there is under one name, of all kinds: the list that the conformance suite and the table of the docs read.

``catalogue`` has the flows of vectors among them, which guides take by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal, get_args

from bayou.flows.amortised import AmortisedAffine, AmortisedPlanar, AmortisedSylvester
from bayou.flows.bases import Base, StandardNormal
from bayou.flows.catalogue import catalogue, realnvp
from bayou.flows.discrete import IntegerCoupling, ModuloCoupling, OneHot, Whole, integer, modulo
from bayou.flows.elementwise import Affine
from bayou.flows.flow import Flow
from bayou.flows.image_nets import conv_net, sized
from bayou.flows.images import ImageCoupling, Pointwise, Sigmoid, Squeeze, flowpp_image, glow_image, split_channels
from bayou.flows.masses import Categorical, DiscretizedLogistic
from bayou.flows.quantization import Argmax, BinaryArgmax, Dequantize
from bayou.flows.surjections import Abs, Autoencoder, Max, Slice, Sort, StochasticPermutation
from bayou.flows.transform import Map

Kind = Literal["bijective", "surjective", "stochastic", "discrete"]
CLASSES, LEVELS = 3, 4  # of the discrete maps here
SMALL: dict[str, Any] = {"steps": 1, "hidden": 4}


@dataclass(frozen=True)
class Entry:
    """A map: how it is built from a size (its dimension, or the channels of small images), what it is."""

    build: Callable[..., Map]
    kind: Kind = "bijective"
    base: Callable[[int], Base] | None = None
    """The distribution of x where the map takes no real numbers, for ``check``."""


def _image(build: Callable[..., Map], side: int = 2, **options: Any) -> Callable[..., Map]:
    """A constructor for images as one that takes the number of channels."""

    @wraps(build)
    def built(channels: int, **more: Any) -> Map:
        return build((channels, side, side), **{**options, **more})

    return built


def autoencoder(dim: int) -> Autoencoder:
    """y ~ p(y|x) with one number more, x ~ q(x|y): a VAE as a map, here with couplings for both."""

    def given(event: int, context: int) -> Flow:
        return Flow(StandardNormal(event), realnvp(event, layers=1, hidden=(8,), context_dim=context))

    return Autoencoder(given(dim + 1, dim), given(dim, dim + 1))


def _classes(dim: int) -> Base:
    return Categorical(dim, CLASSES)


def _numbers(dim: int) -> Base:
    return DiscretizedLogistic(dim, LEVELS, scale=1.0)


_OTHERS: dict[str, Entry] = {
    # given a context
    "amortised_affine": Entry(partial(AmortisedAffine, context_dim=2)),
    "amortised_planar": Entry(partial(AmortisedPlanar, context_dim=2, layers=2)),
    "amortised_sylvester": Entry(partial(AmortisedSylvester, context_dim=2, layers=2)),
    # images, by channels
    "squeeze": Entry(_image(Squeeze)),
    "sigmoid": Entry(_image(Sigmoid, side=1, margin=0.05)),
    "pointwise": Entry(_image(Pointwise, side=1, elementwise=Affine())),
    "image_coupling": Entry(_image(ImageCoupling, elementwise=Affine(), net=sized(conv_net, hidden=4))),
    "flowpp_image": Entry(_image(flowpp_image, blocks=1, components=2, heads=2, **SMALL)),
    "split_channels": Entry(_image(split_channels), "surjective"),
    "glow_image": Entry(_image(glow_image, side=4, levels=2, **SMALL), "surjective"),
    # what loses something on one of its ways
    "dequantize": Entry(Dequantize, "surjective"),
    "slice": Entry(partial(Slice, keep=1), "surjective"),
    "abs": Entry(Abs, "surjective"),
    "sort": Entry(Sort, "surjective"),
    "max": Entry(Max, "surjective"),
    "argmax": Entry(partial(Argmax, classes=CLASSES), "surjective"),
    "binary_argmax": Entry(partial(BinaryArgmax, classes=CLASSES), "surjective"),
    # what is random on both
    "stochastic_permutation": Entry(StochasticPermutation, "stochastic"),
    "autoencoder": Entry(autoencoder, "stochastic"),
    # whole numbers
    "whole": Entry(Whole, "discrete", _numbers),
    "integer_coupling": Entry(partial(IntegerCoupling, hidden=(8,), scale=LEVELS / 2), "discrete", _numbers),
    "integer": Entry(partial(integer, levels=LEVELS, layers=2, hidden=(8,), wrap=True), "discrete",
                     lambda dim: DiscretizedLogistic(dim, LEVELS, bounded=True)),
    "one_hot": Entry(partial(OneHot, classes=CLASSES), "discrete", _classes),
    "modulo_coupling": Entry(partial(ModuloCoupling, classes=CLASSES, hidden=(8,)), "discrete", _classes),
    "modulo": Entry(partial(modulo, classes=CLASSES, layers=2, hidden=(8,)), "discrete", _classes),
    "modulo_autoregressive": Entry(
        partial(modulo, classes=CLASSES, layers=2, hidden=(8,), autoregressive=True), "discrete", _classes),
}  # fmt: skip


def maps(kind: Kind | None = None) -> dict[str, Entry]:
    """Every map by name, or those of a kind; networks and numbers of classes are small here.

    "bijective" terms are exact both ways; "surjective" maps lose something on one way, "stochastic" ones are random on
    both, and "discrete" ones are bijections of whole numbers.
    """
    if kind not in (None, *get_args(Kind)):
        raise ValueError(f"there is no kind {kind!r} of maps; the kinds are {', '.join(get_args(Kind))}")
    every = {name: Entry(build) for name, build in catalogue().items()} | _OTHERS
    return {name: entry for name, entry in every.items() if kind in (None, entry.kind)}
