"""A causal Transformer as conditioner, with a cache of keys and values for sequential evaluation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou.flows.core.arguments import positive
from bayou.flows.core.compose import Chain
from bayou.flows.layers.elementwise import Elementwise
from bayou.flows.models.causal import Causal, Shape, Walk, delayed, scored_at_once
from bayou.modules import Modules

SHORT = 64


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q·kᵀ/√d)·v of (N, heads, T, d), masked to the keys up to each query if causal.

    A fused kernel keeps no T × T scores, but on a CPU it has no rule for vmap and gains little where T is small.
    """
    if q.is_cuda or k.shape[-2] > SHORT:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return scores.softmax(-1) @ v


class KeyValues:
    """Keys and values of the positions so far, (N, heads, t, d) each, of ``positions`` in the end."""

    def __init__(self, positions: int) -> None:
        self.positions, self.length = positions, 0
        self.pair: list[Tensor] = []

    def add(self, *new: Tensor) -> list[Tensor]:
        """All of them, after those of the next position."""
        if torch.is_grad_enabled():  # what was read before must stay as it was
            self.pair = [torch.cat(both, 2) for both in zip(self.pair, new, strict=True)] if self.pair else list(new)
            return self.pair
        if not self.pair:
            self.pair = [one.new_zeros(*one.shape[:2], self.positions, one.shape[-1]) for one in new]
        for store, one in zip(self.pair, new, strict=True):
            store[:, :, self.length] = one.squeeze(2)
        self.length += 1
        return [store[:, :, : self.length] for store in self.pair]


class _Block(nn.Module):
    """h + attention(norm(h)), then h + mlp(norm(h)): (N, T, width); with a cache, of the next one: (N, 1, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h: Tensor, cache: KeyValues | None = None) -> Tensor:
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.read(self.norm(h)).chunk(3, -1))
        if cache is not None:
            k, v = cache.add(k, v)
        heard = attend(q, k, v, causal=cache is None)
        h = h + self.write(heard.transpose(1, 2).flatten(2))
        out: Tensor = h + self.mlp(self.norm_mlp(h))
        return out


class CausalTransformer(Causal):
    """Causal attention over the tokens of a sequence or the patches of an image (Zhai et al. 2024, TarFlow).

    A token is embedded as the one before it; a patch with those above it too, which attention would learn slowly.
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
        if width % positive(heads, "the number of heads"):
            raise ValueError(f"the width of CausalTransformer must be a multiple of its heads, got {width} and {heads}")
        row = self.event[2] // patch if len(self.event) == 3 else 1
        self.delays = sorted({1, max(row - 1, 1), row, row + 1}) if row > 1 else [1]
        self.embed, self.norm = nn.Linear(len(self.delays) * self.channels, width), nn.LayerNorm(width)
        self.blocks: Modules[_Block] = nn.ModuleList(  # type: ignore[assignment]
            _Block(width, heads) for _ in range(positive(depth, "the depth of CausalTransformer"))
        )

    def features(self, tokens: Tensor, place: Tensor) -> Tensor:
        h = self.embed(torch.cat([delayed(tokens, by) for by in self.delays], -1)) + place
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.norm(h)
        return out

    def walk(self, place: Tensor) -> Walk:
        return _TransformerWalk(self, place)


class _TransformerWalk:
    """Each block keeps its keys and values."""

    def __init__(self, net: CausalTransformer, place: Tensor) -> None:
        self.net, self.place, self.position = net, place, 0
        self.tokens: list[Tensor] = []  # as far back as a token is embedded with
        self.caches = [KeyValues(net.positions) for _ in net.blocks]

    def __call__(self, token: Tensor) -> Tensor:
        delays = self.net.delays
        self.tokens = [*(self.tokens or [token] * delays[-1]), token][1:]
        near = torch.cat([self.tokens[-by] for by in delays], -1)
        h = (self.net.embed(near) + self.place[:, self.position]).unsqueeze(1)
        for block, cache in zip(self.net.blocks, self.caches, strict=True):
            h = block(h, cache)
        self.position += 1
        out: Tensor = self.net.norm(h.squeeze(1))
        return out


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
    """Autoregressive flow over a sequence or an image by causal Transformers (Zhai et al. 2024), fast to score."""

    def build(params: int, reverse: bool) -> Causal:
        return CausalTransformer(shape, params, width, depth, heads, patch, reverse, context_dim)

    return scored_at_once(layers, elementwise, build)
