"""Published flows of vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bayou.flows.core.arguments import positive
from bayou.flows.core.compose import Chain, Inverse
from bayou.flows.core.transform import Transform
from bayou.flows.layers.autoregressive import Autoregressive
from bayou.flows.layers.conditioners import MADE, Recurrent
from bayou.flows.layers.coupling import Coupling, Mask, ResampledGate
from bayou.flows.layers.determinant import Form, Planar, Radial, Sylvester
from bayou.flows.layers.elementwise import (
    Additive,
    Affine,
    DeepSigmoid,
    Elementwise,
    Gate,
    Spline,
    logistic_mixture,
)
from bayou.flows.layers.linear import DiagonalAffine, LULinear
from bayou.flows.layers.normalization import ActNorm

Hidden = Sequence[int]


def _couplings(
    dim: int,
    elementwise: Elementwise,
    layers: int,
    hidden: Hidden,
    context_dim: int,
    mask: Mask = "half",
) -> Chain:
    positive(layers, "the number of layers")
    return Chain(
        *(Coupling(dim, elementwise, mask, bool(i % 2), hidden, context_dim) for i in range(layers))
    )


def nice(dim: int, layers: int = 4, hidden: Hidden = (64, 64), context_dim: int = 0) -> Chain:
    """Additive couplings and a final diagonal scale (Dinh et al. 2015)."""
    return Chain(_couplings(dim, Additive(), layers, hidden, context_dim), DiagonalAffine(dim))


def realnvp(dim: int, layers: int = 4, hidden: Hidden = (64, 64), context_dim: int = 0) -> Chain:
    """Affine couplings (Dinh et al. 2017)."""
    return _couplings(dim, Affine(), layers, hidden, context_dim)


def gated(dim: int, layers: int = 2, hidden: Hidden = (50,), context_dim: int = 0) -> Chain:
    """The gated couplings of multiplicative normalizing flows with fixed alternating masks (Louizos
    & Welling 2017).
    """
    return _couplings(dim, Gate(), layers, hidden, context_dim, mask="alternate")


def gated_resampled(
    dim: int, layers: int = 2, hidden: Hidden = (50,), context_dim: int = 0
) -> Chain:
    """``gated`` with new random masks in every training pass, as published; log q is then a
    bound.
    """
    return Chain(
        *(
            ResampledGate(dim, hidden, context_dim)
            for _ in range(positive(layers, "the number of layers"))
        )
    )


def flowpp(
    dim: int, layers: int = 4, hidden: Hidden = (64, 64), components: int = 8, context_dim: int = 0
) -> Chain:
    """Mixture-of-logistics couplings (Ho et al. 2019)."""
    return _couplings(dim, logistic_mixture(components), layers, hidden, context_dim)


def spline_coupling(
    dim: int,
    layers: int = 4,
    hidden: Hidden = (64, 64),
    bins: int = 8,
    bound: float = 5.0,
    context_dim: int = 0,
) -> Chain:
    """Rational-quadratic spline couplings (Durkan et al. 2019)."""
    return _couplings(dim, Spline(bins, bound), layers, hidden, context_dim)


def iaf(
    dim: int,
    layers: int = 4,
    hidden: Hidden = (64, 64),
    context_dim: int = 0,
    residual: bool = False,
    elementwise: Elementwise | None = None,
) -> Chain:
    """Inverse autoregressive flow with fast draws (Kingma et al. 2016). Every second layer reverses
    the order.
    """
    g = elementwise or Affine()
    orders = [None, range(dim)[::-1]]
    return Chain(
        *(
            Autoregressive(
                g, MADE(dim, g.params, hidden, orders[i % 2], residual, context_dim, g.circular)
            )
            for i in range(positive(layers, "the number of layers"))
        )
    )


def _inverted(chain: Chain) -> Chain:
    return Chain(*(Inverse(t) for t in chain.transforms))


def maf(
    dim: int,
    layers: int = 4,
    hidden: Hidden = (64, 64),
    context_dim: int = 0,
    residual: bool = False,
) -> Chain:
    """Masked autoregressive flow with fast densities (Papamakarios et al. 2017)."""
    return _inverted(iaf(dim, layers, hidden, context_dim, residual))


def spline_autoregressive(
    dim: int,
    layers: int = 4,
    hidden: Hidden = (64, 64),
    bins: int = 8,
    bound: float = 5.0,
    context_dim: int = 0,
) -> Chain:
    """Autoregressive rational-quadratic splines with fast densities (Durkan et al. 2019)."""
    return _inverted(iaf(dim, layers, hidden, context_dim, elementwise=Spline(bins, bound)))


def circular_spline(
    dim: int,
    layers: int = 4,
    hidden: Hidden = (64, 64),
    bins: int = 8,
    context_dim: int = 0,
    coupling: bool = True,
) -> Chain:
    """Spline couplings of angles, or autoregressive splines with fast densities (Rezende et al.
    2020).
    """
    g = Spline(bins, math.pi, circular=True)
    if coupling:
        return _couplings(dim, g, layers, hidden, context_dim)
    return _inverted(iaf(dim, layers, hidden, context_dim, elementwise=g))


def naf(
    dim: int,
    layers: int = 2,
    hidden: Hidden = (64, 64),
    units: int = 8,
    depth: int = 2,
    context_dim: int = 0,
) -> Chain:
    """Neural autoregressive flow with deep sigmoids and fast draws (Huang et al. 2018)."""
    return iaf(dim, layers, hidden, context_dim, elementwise=DeepSigmoid(units, depth))


def tan(dim: int, layers: int = 2, hidden: int = 32, context_dim: int = 0) -> Chain:
    """Transformation autoregressive network: a linear map, then a recurrent affine one (Oliva et
    al. 2018).
    """
    positive(layers, "the number of layers")
    parts: list[Transform] = []
    for i in range(layers):
        order = range(dim)[::-1] if i % 2 else None
        parts += [
            LULinear(dim),
            Autoregressive(Affine(), Recurrent(dim, 2, hidden, order, context_dim)),
        ]
    return Chain(*parts)


def planar(dim: int, layers: int = 8) -> Planar:
    """A stack of planar flows (Rezende & Mohamed 2015)."""
    return Planar(dim, layers)


def radial(dim: int, layers: int = 8) -> Chain:
    """A stack of radial flows (Rezende & Mohamed 2015)."""
    return Chain(*(Radial(dim) for _ in range(positive(layers, "the number of layers"))))


def sylvester(
    dim: int, layers: int = 4, form: Form = "orthogonal", rank: int | None = None
) -> Sylvester:
    """A stack of Sylvester flows; the triangular form reverses the coordinates at every second
    layer.
    """
    return Sylvester(dim, layers, form, rank)


def glow(dim: int, layers: int = 4, hidden: Hidden = (64, 64), context_dim: int = 0) -> Chain:
    """Act norm, a learned linear mixing and an affine coupling, repeated (Kingma & Dhariwal 2018)
    on vectors.
    """
    positive(layers, "the number of layers")
    parts: list[Transform] = []
    for i in range(layers):
        coupling = Coupling(dim, Affine(), "half", bool(i % 2), hidden, context_dim)
        parts += [coupling, LULinear(dim), ActNorm(dim)]
    return Chain(*parts)
