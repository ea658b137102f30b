"""Vector fields v(t, z) of continuous flows: networks of a state and a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bayou.flows.contractive.contracting import FixedNet, Linear
from bayou.flows.core.nets import mlp

Pull = Callable[[Tensor], Tensor]


class TimeMLP(nn.Module):
    """v(t, z, context) of vectors: a tanh network of z, the context and Fourier features of t.

    The last layer starts at 0, so that a flow starts as the identity.

    Args:
        dim: D.
        hidden: the widths of the hidden layers.
        context_dim: the size of the context, 0 for none.
        frequencies: of the Fourier features.
    """

    def __init__(
        self, dim: int, hidden: Sequence[int] = (64, 64), context_dim: int = 0, frequencies: int = 4
    ) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.net = mlp(dim + context_dim + 2 * frequencies + 1, hidden, dim, nn.Tanh)

    def forward(self, t: Tensor, z: Tensor, context: Tensor | None = None) -> Tensor:
        """t (...), z (..., dim), context (..., context_dim) to (..., dim)."""
        out: Tensor = self.net(self._inputs(t, z, context))
        return out

    def _inputs(self, t: Tensor, z: Tensor, context: Tensor | None) -> Tensor:
        parts = [z] if context is None else [z, context.expand(*z.shape[:-1], -1)]
        return torch.cat([*parts, time_features(t, self.frequencies)], -1)

    def pullback(self, t: Tensor, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Pull]:
        """v, and u ↦ uᵀ ∂v/∂z for u (..., dim) with any additional leading dimensions."""
        parts = [
            Linear(part.weight, part.bias) if isinstance(part, nn.Linear) else part
            for part in self.net
        ]
        v, pull = FixedNet(parts).pullback(self._inputs(t, z, context))
        return v, lambda u: pull(u)[..., : z.shape[-1]]

    @property
    def with_trace(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """(t, z, context) → v and tr ∂v/∂z in closed form, for one or two hidden layers; else
        None.
        """
        return self._with_trace if len(self.net) in (3, 5) else None

    def _with_trace(
        self, t: Tensor, z: Tensor, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """With slopes d of the activations, tr(W₂·D·W₁) = Σ d∘diag(W₁W₂), tr(W₃·D₂·W₂·D₁·W₁) =
        d₂ᵀ(W₂ ∘ (W₁W₃)ᵀ)d₁.
        """
        h, slopes = self._inputs(t, z, context), []
        for layer in self.net:
            h = layer(h)
            if not isinstance(layer, nn.Linear):
                slopes.append(1 - h.square())
        first, *middle, last = (layer.weight for layer in self.net if isinstance(layer, nn.Linear))
        first = first[:, : z.shape[-1]]
        if middle:
            trace = (slopes[1] * linear(slopes[0], middle[0] * (first @ last).mT)).sum(-1)
        else:
            trace = slopes[0] @ (first * last.mT).sum(-1)
        return h, trace


def time_features(t: Tensor, frequencies: int) -> Tensor:
    """t, and sin and cos of π·k·t: (..., 2·frequencies + 1)."""
    waves = (
        math.pi * torch.arange(1, frequencies + 1, device=t.device, dtype=t.dtype) * t.unsqueeze(-1)
    )
    return torch.cat([t.unsqueeze(-1), waves.sin(), waves.cos()], -1)
