"""Vector fields v(t, z) of continuous flows: networks of a state and a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bayou.flows.contractive.contracting import FrozenNet, freeze
from bayou.flows.core.nets import mlp

Pull = Callable[[Tensor], Tensor]

HIDDEN_LAYERS_WITH_TRACE = (1, 2)  # of a TimeMLP whose trace has a closed form


class TimeMLP(nn.Module):
    """A field v(t, z, context) of vectors: a tanh network of z, the context and the time.

    It reads Fourier features of t. The last layer starts at 0, so that a flow starts as the
    identity. For one or two hidden layers tr ∂v/∂z has a closed form.

    Args:
        dim: the number of coordinates D.
        hidden: the widths of the hidden layers, (64, 64) by default.
        context_dim: the size of the context; 0, the default, for none.
        frequencies: the number of Fourier features; 4 by default.

    Shapes: t (...), z (..., D), context (..., context_dim), v (..., D).
    """

    def __init__(
        self,
        dim: int,
        hidden: Sequence[int] = (64, 64),
        context_dim: int = 0,
        frequencies: int = 4,
    ) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.net: nn.Sequential = mlp(dim + context_dim + 2 * frequencies + 1, hidden, dim, nn.Tanh)

    def forward(self, t: Tensor, z: Tensor, context: Tensor | None = None) -> Tensor:
        """Return v.

        Args:
            t: times (...).
            z: states (..., dim).
            context: (..., context_dim), for a field with a context.
        """
        v: Tensor = self.net(self._features(t, z, context))
        return v

    def _features(self, t: Tensor, z: Tensor, context: Tensor | None) -> Tensor:
        """Return what the network reads: z, the context, and features of t."""
        features = [z]
        if context is not None:
            features.append(context.expand(*z.shape[:-1], -1))
        return torch.cat([*features, time_features(t, self.frequencies)], -1)

    def pullback(self, t: Tensor, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Pull]:
        """Return v, and u ↦ uᵀ ∂v/∂z.

        Args:
            t: times (...).
            z: states (..., dim).
            context: (..., context_dim), for a field with a context.

        Returns:
            v (..., dim), and a function of u (..., dim) with any additional leading dimensions.
        """
        net = FrozenNet([freeze(layer) for layer in self.net])
        v, pull = net.pullback(self._features(t, z, context))
        return v, lambda u: pull(u)[..., : z.shape[-1]]

    @property
    def with_trace(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """The function (t, z, context) → v and tr ∂v/∂z, or None without a closed form."""
        hidden_layers = (len(self.net) - 1) // 2
        if hidden_layers in HIDDEN_LAYERS_WITH_TRACE:
            return self._field_and_trace
        return None

    def _field_and_trace(
        self,
        t: Tensor,
        z: Tensor,
        context: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return v and tr ∂v/∂z, from the slopes d of the activations.

        tr(W₂·D·W₁) = Σ d∘diag(W₁W₂), tr(W₃·D₂·W₂·D₁·W₁) = d₂ᵀ(W₂ ∘ (W₁W₃)ᵀ)d₁.
        """
        h = self._features(t, z, context)
        slopes = []
        weights = []
        for layer in self.net:
            h = layer(h)
            if isinstance(layer, nn.Linear):
                weights.append(layer.weight)
            else:
                slopes.append(1 - h.square())
        first, *middle, last = weights
        first = first[:, : z.shape[-1]]
        if middle:
            trace = (slopes[1] * linear(slopes[0], middle[0] * (first @ last).mT)).sum(-1)
        else:
            trace = slopes[0] @ (first * last.mT).sum(-1)
        return h, trace


def time_features(t: Tensor, frequencies: int) -> Tensor:
    """Return t, and sin and cos of π·k·t for k = 1, 2, ...

    Args:
        t: times (...).
        frequencies: the number of k.

    Returns:
        Features (..., 2·frequencies + 1).
    """
    orders = torch.arange(1, frequencies + 1, device=t.device, dtype=t.dtype)
    phases = math.pi * orders * t.unsqueeze(-1)
    return torch.cat([t.unsqueeze(-1), phases.sin(), phases.cos()], -1)
