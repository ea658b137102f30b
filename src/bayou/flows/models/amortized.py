"""The Gaussian of an encoder, whose parameters are a function of a context."""

from __future__ import annotations

from torch import Tensor, nn

from bayou.flows.core.arguments import check_size
from bayou.flows.core.transform import Event, Pair, Symmetric, Transform


class AmortizedAffine(Symmetric, Transform):
    """An affine map y = exp(s) ⊙ x + m with (m, s) = W·context + b.

    With a standard normal base it is the Gaussian encoder or decoder of a VAE, N(m, exp(s)²), with
    ladj = Σ s (Kingma & Welling 2014).

    Args:
        dim: the number of coordinates D.
        context_dim: the size of the context.

    Shapes: x, y (..., D), context (..., context_dim), ladj (...).

    Example:
        >>> import torch
        >>> from bayou.flows import AmortizedAffine
        >>> f = AmortizedAffine(2, context_dim=16)
        >>> y, ladj = f(torch.zeros(10, 2), torch.zeros(10, 16))
        >>> y.shape, ladj.shape
        (torch.Size([10, 2]), torch.Size([10]))
    """

    def __init__(self, dim: int, context_dim: int) -> None:
        super().__init__()
        self.event_shape: Event = (check_size(dim, "AmortizedAffine"),)
        self.context_dim = context_dim
        self.net: nn.Linear = nn.Linear(check_size(context_dim, "the context"), 2 * dim)
        nn.init.zeros_(self.net.bias)

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        shift, log_scale = self.net(context).chunk(2, -1)
        ladj = log_scale.sum(-1)
        if inverse:
            y = (x - shift) * (-log_scale).exp()
            return y, -ladj.expand(y.shape[:-1])
        y = x * log_scale.exp() + shift
        return y, ladj.expand(y.shape[:-1])
