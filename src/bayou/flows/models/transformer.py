"""A causal Transformer as conditioner, with a cache of keys and values."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou.core.modules import Modules
from bayou.flows.core.arguments import check_size
from bayou.flows.core.compose import Chain
from bayou.flows.layers.elementwise import Elementwise
from bayou.flows.models.causal import Causal, NextFeatures, Shape, causal_flow, shifted

MAX_UNFUSED = 64  # keys up to which attention on a CPU is computed by matrix products


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q·kᵀ/√d)·v of (N, heads, T, d), masked to the keys up to each query if causal.

    A fused kernel does not store T × T scores, but on a CPU it does not support vmap and gains
    little for small T.
    """
    if q.is_cuda or k.shape[-2] > MAX_UNFUSED:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf
        )
    return scores.softmax(-1) @ v


class KeyValues:
    """Keys and values of the positions so far, (N, heads, t, d) each, of ``positions`` in total."""

    def __init__(self, positions: int) -> None:
        self.positions, self.length = positions, 0
        self.pair: list[Tensor] = []

    def add(self, *new: Tensor) -> list[Tensor]:
        """Append those of the next position and return all."""
        if torch.is_grad_enabled():  # autograd needs the earlier tensors unchanged
            self.pair = (
                [torch.cat(both, 2) for both in zip(self.pair, new, strict=True)]
                if self.pair
                else list(new)
            )
            return self.pair
        if not self.pair:
            self.pair = [
                one.new_zeros(*one.shape[:2], self.positions, one.shape[-1]) for one in new
            ]
        for store, one in zip(self.pair, new, strict=True):
            store[:, :, self.length] = one.squeeze(2)
        self.length += 1
        return [store[:, :, : self.length] for store in self.pair]


class _Block(nn.Module):
    """h + attention(norm(h)), then h + mlp(norm(h)): (N, T, width), or with a cache the next
    position (N, 1, width).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, h: Tensor, cache: KeyValues | None = None) -> Tensor:
        q, k, v = (
            p.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in self.read(self.norm(h)).chunk(3, -1)
        )
        if cache is not None:
            k, v = cache.add(k, v)
        attended = attend(q, k, v, causal=cache is None)
        h = h + self.write(attended.transpose(1, 2).flatten(2))
        out: Tensor = h + self.mlp(self.norm_mlp(h))
        return out


class CausalTransformer(Causal):
    """Causal attention over the tokens of a sequence or the patches of an image (Zhai et al. 2024,
    TarFlow).

    The embedding of a position is that of the preceding token, for images also of the patches
    above.

    Args:
        event, params, width, patch, reverse, context_dim: as for ``Causal``.
        depth: blocks.
        heads: attention heads; they divide the width.
    """

    def __init__(
        self,
        event: Shape,
        params: int,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        patch: int = 1,
        reverse: bool = False,
        context_dim: int = 0,
    ) -> None:
        super().__init__(event, params, width, patch, reverse, context_dim)
        if width % check_size(heads, "the number of heads"):
            raise ValueError(
                f"the width of CausalTransformer must be a multiple of its heads, got {width} and {heads}"
            )
        row = self.event[2] // patch if len(self.event) == 3 else 1
        self.delays = sorted({1, max(row - 1, 1), row, row + 1}) if row > 1 else [1]
        self.embed, self.norm = (
            nn.Linear(len(self.delays) * self.channels, width),
            nn.LayerNorm(width),
        )
        self.blocks: Modules[_Block] = nn.ModuleList(  # type: ignore[assignment]
            _Block(width, heads) for _ in range(check_size(depth, "the depth of CausalTransformer"))
        )

    def features(self, tokens: Tensor, place: Tensor) -> Tensor:
        h = self.embed(torch.cat([shifted(tokens, by) for by in self.delays], -1)) + place
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.norm(h)
        return out

    def cached(self, place: Tensor) -> NextFeatures:
        positions = iter(place.unbind(1))
        tokens: list[Tensor] = []  # the last ones, up to the largest delay
        caches = [KeyValues(self.positions) for _ in self.blocks]

        def next_features(token: Tensor) -> Tensor:
            tokens[:] = [*(tokens or [token] * self.delays[-1]), token][1:]
            near = torch.cat([tokens[-by] for by in self.delays], -1)
            h = (self.embed(near) + next(positions)).unsqueeze(1)
            for block, cache in zip(self.blocks, caches, strict=True):
                h = block(h, cache)
            out: Tensor = self.norm(h.squeeze(1))
            return out

        return next_features


def transformer_flow(
    shape: Shape,
    layers: int = 2,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    patch: int = 1,
    elementwise: Elementwise | None = None,
    context_dim: int = 0,
) -> Chain:
    """Autoregressive flow of sequences or images by causal Transformers, with fast densities (Zhai
    et al. 2024).
    """

    def build(params: int, reverse: bool) -> Causal:
        return CausalTransformer(shape, params, width, depth, heads, patch, reverse, context_dim)

    return causal_flow(layers, elementwise, build)
