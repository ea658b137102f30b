"""Flows whose parameters are a function of a context, for encoders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from bayou.flows.continuous_time.continuous import continuous
from bayou.flows.core.arguments import positive
from bayou.flows.core.bases import StandardNormal
from bayou.flows.core.compose import Chain
from bayou.flows.core.flow import Flow
from bayou.flows.core.transform import Pair, Symmetric, Transform
from bayou.flows.layers.builders import iaf
from bayou.flows.layers.determinant import Planar, Sylvester
from bayou.flows.layers.elementwise import Gate


class AmortizedAffine(Symmetric, Transform):
    """y = exp(s) ⊙ x + m, (m, s) = W·context + b: a Gaussian encoder or decoder (Kingma & Welling 2014)."""

    def __init__(self, dim: int, context_dim: int) -> None:
        super().__init__()
        self.event_shape, self.context_dim = (positive(dim, "AmortizedAffine"),), context_dim
        self.net = nn.Linear(positive(context_dim, "the context"), 2 * dim)
        nn.init.zeros_(self.net.bias)

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        shift, log_scale = self.net(context).chunk(2, -1)
        y = (x - shift) * (-log_scale).exp() if inverse else x * log_scale.exp() + shift
        ladj = log_scale.sum(-1).expand(y.shape[:-1])
        return y, -ladj if inverse else ladj


Kind = Literal[
    "gaussian", "planar", "sylvester_orthogonal", "sylvester_householder", "sylvester_triangular", "iaf", "continuous"
]


def amortized(kind: Kind, dim: int, context_dim: int, **options: Any) -> Flow:
    """q(z | context): a Gaussian followed by a flow.

    Args:
        kind: the kind of the flow.
        dim: the size of z.
        context_dim: the size of the context.
        options: those of ``Planar`` (10 layers by default) or ``Sylvester`` (4); ``layers`` and ``hidden`` of "iaf"
            (with gated updates, Kingma et al. 2016); ``hidden`` and ``steps`` of "continuous".
    """
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, _KINDS))}, got {kind!r}")
    first = AmortizedAffine(dim, context_dim)
    if kind == "gaussian":
        if options:
            raise ValueError(f"a Gaussian has no options, got {', '.join(options)}")
        return Flow(StandardNormal(dim), first)
    return Flow(StandardNormal(dim), Chain(first, _KINDS[kind](dim, context_dim=context_dim, **options)))


_KINDS: dict[str, Callable[..., Transform]] = {
    "gaussian": AmortizedAffine,
    "planar": partial(Planar, layers=10),
    "sylvester_orthogonal": partial(Sylvester, layers=4, form="orthogonal"),
    "sylvester_householder": partial(Sylvester, layers=4, form="householder"),
    "sylvester_triangular": partial(Sylvester, layers=4, form="triangular"),
    "iaf": partial(iaf, elementwise=Gate()),
    "continuous": partial(continuous, hidden=(64,), steps=4),
}
