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
from bayou.flows.models.causal import Causal, NextFeatures, Shape, causal_flow, shift

MAX_UNFUSED = 64  # keys up to which attention on a CPU is computed by matrix products


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Compute softmax(q·kᵀ/√d)·v.

    A fused kernel does not store T × T scores, but on a CPU it does not support vmap and gains
    little for small T.

    Args:
        q: queries (N, heads, T, d).
        k: keys (N, heads, S, d).
        v: values (N, heads, S, d).
        causal: whether a query reads only the keys up to its own position.

    Returns:
        The mean values (N, heads, T, d).
    """
    if q.is_cuda or k.shape[-2] > MAX_UNFUSED:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        is_later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(is_later, -math.inf)
    return scores.softmax(-1) @ v


class _TransformerBlock(nn.Module):
    """A layer h ← h + attention(norm(h)), then h ← h + mlp(norm(h)).

    It maps (N, T, width), or with a cache the next position (N, 1, width). The cache is empty at
    first and then has the keys and the values of the positions so far, (N, heads, t, d) each.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.norm_mlp = nn.LayerNorm(width)
        self.read = nn.Linear(width, 3 * width)
        self.write = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, h: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        q, k, v = (
            tensor.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for tensor in self.read(self.norm(h)).chunk(3, -1)
        )
        if cache:
            k = torch.cat([cache[0], k], 2)
            v = torch.cat([cache[1], v], 2)
        if cache is not None:
            cache[:] = k, v
        attended = attend(q, k, v, causal=cache is None)
        h = h + self.write(attended.transpose(1, 2).flatten(2))
        out: Tensor = h + self.mlp(self.norm_mlp(h))
        return out


class CausalTransformer(Causal):
    """A conditioner of sequences or images by causal attention over tokens or patches.

    A token attends to all tokens up to itself. The input at a position is an embedding of the
    preceding token, for images also of the patches above, so that it contains no information of
    the token itself. Draws are computed with a cache of keys and values (Zhai et al. 2024,
    TarFlow).

    Args:
        event: (L,) or (L, C), or (C, H, W), whose positions are pixels or patches in raster order.
        params: the number of parameters P per coordinate.
        width: the size of the embeddings, a multiple of ``heads``; 64 by default.
        depth: the number of Transformer blocks, 2 by default.
        heads: the number of attention heads, 4 by default.
        patch: the side of a patch of an image; 1 by default.
        reverse: whether to process the coordinates from the last to the first; False by default.
        context_dim: the size of the context; 0, the default, for none.

    Shapes: x (..., D), context (..., context_dim), output (..., D, P).

    Raises:
        ValueError: unless the heads divide the width and the patch divides the image.

    Example:
        >>> import torch
        >>> from bayou.flows import CausalTransformer
        >>> net = CausalTransformer((1, 8, 8), params=2, patch=2)
        >>> net.positions, net.channels
        (16, 4)
        >>> net(torch.zeros(10, 64)).shape
        torch.Size([10, 64, 2])
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
                "the width of CausalTransformer must be a multiple of its heads, got "
                f"{width} and {heads}"
            )
        # Distances from a token to the earlier ones that its input embeds.
        self.delays: list[int] = [1]
        row_length = self.event[2] // patch if len(self.event) == 3 else 1
        if row_length > 1:
            self.delays = sorted({1, max(row_length - 1, 1), row_length, row_length + 1})
        self.embed: nn.Linear = nn.Linear(len(self.delays) * self.channels, width)
        self.norm: nn.LayerNorm = nn.LayerNorm(width)
        check_size(depth, "the depth of CausalTransformer")
        self.blocks: Modules[_TransformerBlock] = nn.ModuleList(  # type: ignore[assignment]
            _TransformerBlock(width, heads) for _ in range(depth)
        )

    def features(self, tokens: Tensor, embeddings: Tensor) -> Tensor:
        neighbors = torch.cat([shift(tokens, delay) for delay in self.delays], -1)
        h = self.embed(neighbors) + embeddings
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.norm(h)
        return out

    def start_features(self, embeddings: Tensor) -> NextFeatures:
        position_embeddings = iter(embeddings.unbind(1))
        tokens: list[Tensor] = []  # the last ones, up to the largest delay
        caches: list[list[Tensor]] = [[] for _ in self.blocks]

        def next_features(token: Tensor) -> Tensor:
            if not tokens:
                tokens.extend([token] * self.delays[-1])
            tokens.append(token)
            tokens.pop(0)
            neighbors = torch.cat([tokens[-delay] for delay in self.delays], -1)
            h = (self.embed(neighbors) + next(position_embeddings)).unsqueeze(1)
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
    """Build an autoregressive flow of sequences or images by causal Transformers.

    Each layer maps from data to base by x_t = g(y_t; net(y_{<t})) over tokens or patches t, by
    default the affine x_t = exp(s_t) ⊙ y_t + m_t, with ladj = Σ log ∂x/∂y; every second layer
    reverses the order. The density costs one pass of each ``CausalTransformer``, a draw one step
    per token with a cache of keys and values.

    Args:
        shape: (L,) or (L, C) of sequences, or (C, H, W) of images.
        layers: the number of autoregressive layers, 2 by default.
        width: the size of the embeddings, a multiple of ``heads``; 64 by default.
        depth: the number of Transformer blocks of a layer, 2 by default.
        heads: the number of attention heads, 4 by default.
        patch: the side of a patch of an image; 1 by default.
        elementwise: the map g of a coordinate; ``Affine()`` by default.
        context_dim: the size of a context that every network reads too; 0, the default, for none.

    Returns:
        A transform of x, y with that shape.

    Example:
        >>> import bayou.flows as flows
        >>> transform = flows.transformer_flow((1, 8, 8), width=16, depth=1, patch=4)
        >>> flow = flows.Flow(flows.StandardNormal((1, 8, 8)), transform)
        >>> flow.log_prob(flow.sample(10, seed=0)).shape
        torch.Size([10])

    References:
        Zhai et al. 2024, Normalizing Flows are Capable Generative Models.
    """

    return causal_flow(
        CausalTransformer,
        layers,
        elementwise,
        event=shape,
        width=width,
        depth=depth,
        heads=heads,
        patch=patch,
        context_dim=context_dim,
    )
