"""A causal Transformer as conditioner, with a cache of keys and values for the way step by step."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou.flows.causal import Causal, Shape, Walk, delayed, scored_at_once
from bayou.flows.compose import Chain
from bayou.flows.elementwise import Elementwise
from bayou.flows.linear import positive
from bayou.modules import Modules

SHORT = 64


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q·kᵀ/√d)·v of (N, heads, T, d), masked to the keys up to each query if causal.

    A fused kernel keeps no T × T scores, but on a CPU it has no rule for vmap and gains nothing where T is small.
    """
    if q.is_cuda or q.shape[-2] > SHORT:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return scores.softmax(-1) @ v


class _Block(nn.Module):
    """h + attention(norm(h)), then h + mlp(norm(h)): (N, T, width). ``past``: keys and values of positions before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.read(self.norm(h)).chunk(3, -1))
        if past is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past, (k, v), strict=True))
        heard = attend(q, k, v, causal=past is None)
        h = h + self.write(heard.transpose(1, 2).flatten(2))
        return h + self.mlp(self.norm_mlp(h)), (k, v)


class CausalTransformer(Causal):
    """Causal attention over the tokens of a sequence or the patches of an image (Zhai et al. 2024, TarFlow)."""

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
        self.embed, self.norm = nn.Linear(self.channels, width), nn.LayerNorm(width)
        self.blocks: Modules[_Block] = nn.ModuleList(  # type: ignore[assignment]
            _Block(width, heads) for _ in range(positive(depth, "the depth of CausalTransformer"))
        )

    def features(self, tokens: Tensor, place: Tensor) -> Tensor:
        h = self.embed(delayed(tokens, 1)) + place
        for block in self.blocks:
            h, _ = block(h)
        out: Tensor = self.norm(h)
        return out

    def walk(self, place: Tensor) -> Walk:
        return _TransformerWalk(self, place)


class _TransformerWalk:
    """Each block keeps its keys and values."""

    def __init__(self, net: CausalTransformer, place: Tensor) -> None:
        self.net, self.place, self.position = net, place, 0
        self.cache: list[tuple[Tensor, Tensor]] = []

    def __call__(self, token: Tensor) -> Tensor:
        h = (self.net.embed(token) + self.place[:, self.position]).unsqueeze(1)
        for k, block in enumerate(self.net.blocks):
            if self.position == 0:
                none = h.new_zeros(len(h), block.heads, 0, self.net.width // block.heads)
                self.cache.append((none, none))
            h, self.cache[k] = block(h, self.cache[k])
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
