"""Further forms of the maps of ``bayou.flows.registry()``, for the conformance suite: options,
inverses, contexts.
"""

import math
from functools import partial

import torch
from torch import nn

from bayou.flows import (
    Abs,
    ActNorm,
    Affine,
    Categorical,
    Chain,
    Conditional,
    Dequantize,
    DiagonalNormal,
    DiscretizedLogistic,
    Flow,
    ImageCoupling,
    IntegerCoupling,
    Inverse,
    InverseCDF,
    LULinear,
    Max,
    ModuloAutoregressive,
    ModuloCoupling,
    OneHotMADE,
    Slice,
    Sort,
    Squeeze,
    StandardNormal,
    Uniform,
    continuous,
    conv_net,
    dequantizer,
    gated_net,
    glow_image,
    logistic_mixture,
    modulo,
    pixelcnn,
    realnvp,
    residual,
    transformer_flow,
    wavenet,
)
from bayou.flows._registry import RegisteredMap, autoencoder
from bayou.flows.models.images import rotation
from experiments.measure.vae_nets import amortized

NET = partial(conv_net, hidden=4)
GATED = partial(gated_net, hidden=4, blocks=1, heads=2)


class Positive(DiagonalNormal):
    """|N(mean, std²)|."""

    def draw(self, *args, **options):
        return super().draw(*args, **options).abs()

    def log_prob(self, x):
        normal = torch.distributions.Normal(self.mean, self.log_std.exp())
        return torch.logaddexp(normal.log_prob(x), normal.log_prob(-x)).sum(-1)


class Ordered(StandardNormal):
    """Standard normals in order."""

    def draw(self, *args, **options):
        return super().draw(*args, **options).sort(-1).values

    def log_prob(self, x):
        return super().log_prob(x) + math.lgamma(x.shape[-1] + 1)


def learned(dim):
    """A density on (0, 1) that depends on what is given."""
    return Flow(
        StandardNormal(dim),
        Chain(realnvp(dim, layers=1, hidden=(8,), context_dim=dim), Inverse(InverseCDF(dim))),
    )


def _form(kind, build, base=None):
    return RegisteredMap(lambda _: build(), kind, None if base is None else lambda _: base())


_bijective, _surjective, _stochastic, _discrete = (
    partial(_form, kind) for kind in ("bijective", "surjective", "stochastic", "discrete")
)

VARIANTS = {
    # with a context
    "amortized, sylvester_householder": _bijective(
        lambda: amortized("sylvester_householder", 3, 2, layers=2, reflections=2).transform),
    "amortized, sylvester_triangular": _bijective(
        lambda: amortized("sylvester_triangular", 3, 2, layers=3).transform),
    "amortized, iaf": _bijective(lambda: amortized("iaf", 3, 2, layers=2, hidden=(8,)).transform),
    # causal networks over sequences and images
    "wavenet, a sequence": _bijective(lambda: wavenet((3, 2), width=8)),
    "pixelcnn, two layers": _bijective(lambda: pixelcnn((2, 2, 3), width=8, layers=2)),
    "pixelcnn, given": _bijective(lambda: pixelcnn((1, 2, 2), width=8, context_dim=2)),
    "transformer, patches": _bijective(lambda: transformer_flow((1, 4, 4), width=8, patch=2)),
    # images, and whose ladj is an estimate
    "continuous, hutchinson": _bijective(lambda: continuous(3, (4,), trace="hutchinson", steps=2)),
    "residual, roulette": _bijective(lambda: residual(3, 1, (4,), 0.5, "roulette")),
    "residual images": _bijective(lambda: residual((1, 2, 4), 1, (4,), 0.5)),
    "residual images, roulette": _bijective(lambda: residual((1, 2, 4), 1, (4,), 0.5, "roulette")),
    # images
    "unsqueeze": _bijective(lambda: Inverse(Squeeze((1, 2, 4)))),
    "act norm of channels": _bijective(lambda: ActNorm((2, 1, 2))),
    "rotation": _bijective(lambda: rotation(3)),
    "channels, flipped": _bijective(lambda: ImageCoupling((3, 2, 1), Affine(), flip=True, net=NET)),
    "checkerboard": _bijective(lambda: ImageCoupling((1, 2, 4), Affine(), "checkerboard", net=NET)),
    "checkerboard, given an image": _bijective(
        lambda: ImageCoupling((1, 2, 2), Affine(), "checkerboard", True, NET, context=2)),
    "channels, given a class": _bijective(lambda: ImageCoupling((3, 2, 1), Affine(), net=NET, context_dim=2)),
    "mixture, gates and attention": _bijective(
        lambda: Inverse(ImageCoupling((2, 2, 1), logistic_mixture(2), net=GATED))),
    "dequantizer": _bijective(lambda: dequantizer((1, 2, 2), 4, steps=2, hidden=4).flow.transform),
    "glow, given a class": _surjective(
        lambda: glow_image((1, 4, 4), levels=2, steps=1, hidden=4, context_dim=2)),
    "dequantize an image": _surjective(
        lambda: Dequantize((1, 2, 2), 3, dequantizer((1, 2, 2), 3, steps=2, hidden=4)), lambda: Uniform((1, 2, 2))),
    # surjections
    "dequantize, learned": _surjective(lambda: Dequantize(2, q=learned(2))),
    "slice, conditional": _surjective(
        lambda: Slice(3, 1, Flow(StandardNormal(2), realnvp(2, layers=1, hidden=(8,), context_dim=1)))),
    "augment": _surjective(lambda: Inverse(Slice(3, 1))),
    "signs": _surjective(lambda: Inverse(Abs(2)), lambda: Positive(2, 0.3, 1.2)),
    "signs, learned": _surjective(lambda: Inverse(Abs(2, nn.Linear(2, 2))), lambda: Positive(2, 0.3, 1.2)),
    "sort, tied": _surjective(lambda: Sort(2, 2)),
    "unsort": _surjective(lambda: Inverse(Sort(3)), lambda: Ordered(3)),
    "chain of stochastic maps": _stochastic(
        lambda: Chain(Inverse(Slice(3, 2)), LULinear(3), autoencoder(3), Slice(4, 2))),
    "stochastic maps, conditional": _stochastic(
        lambda: Conditional(Chain(autoencoder(2), Slice(3, 2)), 2)),
    "unmax": _surjective(lambda: Inverse(Max(3))),
    # integers
    "integers of an image": _discrete(
        lambda: IntegerCoupling((1, 2, 2), hidden=(4,), scale=2.0),
        lambda: DiscretizedLogistic((1, 2, 2), 2, scale=0.4)),
    "integers, a mask": _discrete(
        lambda: IntegerCoupling((2, 1, 1), [[[True]], [[False]]], hidden=(4,), scale=2.0),
        lambda: DiscretizedLogistic((2, 1, 1), 4, scale=1.0)),
    "integers, given": _discrete(
        lambda: IntegerCoupling(2, hidden=(8,), scale=2.0, levels=4, context_dim=2),
        lambda: DiscretizedLogistic(2, 4, bounded=True)),
    "integers of an image, given": _discrete(
        lambda: IntegerCoupling((1, 2, 2), hidden=(4,), scale=2.0, context_dim=2),
        lambda: DiscretizedLogistic((1, 2, 2), 2, scale=0.4)),
    "shifts": _discrete(
        lambda: ModuloCoupling(3, 4, "alternate", True, (8,), scale=False), lambda: Categorical(3, 4)),
    "modulo, rows backwards": _discrete(
        lambda: ModuloAutoregressive(OneHotMADE(2, 5, 9, (8,), [1, 0]), 5), lambda: Categorical(2, 5)),
    "modulo, given": _discrete(
        lambda: modulo(2, 3, layers=2, hidden=(8,), context_dim=2), lambda: Categorical(2, 3)),
    "modulo, autoregressive, given": _discrete(
        lambda: modulo(2, 3, layers=2, hidden=(8,), autoregressive=True, context_dim=2), lambda: Categorical(2, 3)),
}  # fmt: skip
