"""The Gaussian of an encoder, whose parameters are a function of a context."""

from __future__ import annotations

from torch import Tensor, nn

from bayou.flows.core.arguments import check_size
from bayou.flows.core.transform import Pair, Symmetric, Transform


class AmortizedAffine(Symmetric, Transform):
    """y = exp(s) ⊙ x + m, (m, s) = W·context + b: a Gaussian encoder or decoder (Kingma & Welling
    2014).

    Args:
        dim: D, the size of x and y.
        context_dim: the size of the context.

    Shapes: x, y (..., D), context (..., context_dim), ladj (...).
    """

    def __init__(self, dim: int, context_dim: int) -> None:
        super().__init__()
        self.event_shape, self.context_dim = (check_size(dim, "AmortizedAffine"),), context_dim
        self.net = nn.Linear(check_size(context_dim, "the context"), 2 * dim)
        nn.init.zeros_(self.net.bias)

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        shift, log_scale = self.net(context).chunk(2, -1)
        y = (x - shift) * (-log_scale).exp() if inverse else x * log_scale.exp() + shift
        ladj = log_scale.sum(-1).expand(y.shape[:-1])
        return y, -ladj if inverse else ladj
