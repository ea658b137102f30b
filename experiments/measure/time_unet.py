"""A vector field v(t, z) of images for ``flows.continuous``: a U-Net with a time (Ho et al.
2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, silu

from bayou.core.modules import Modules
from bayou.flows.continuous_time.fields import time_features
from bayou.flows.core.arguments import check_size
from bayou.flows.core.nets import zero_init

MAX_ATTENTION = 256  # pixels of the lowest resolution up to which there is attention between them


class TimeUNet(nn.Module):
    """v(t, z, context) of images: a U-Net whose blocks are scaled and shifted by t and context (Ho
    et al. 2020).

    The last layer starts at 0, so that a flow starts as the identity.

    Args:
        shape: (C, H, W), with H and W multiples of 2^(number of resolutions − 1).
        channels: of every resolution; each is half of the one before.
        context_dim: the size of the context, 0 for none.
        blocks: per resolution, on the way down and on the way up.
        frequencies: of the Fourier features of t.
    """

    def __init__(
        self,
        shape: Sequence[int],
        channels: Sequence[int] = (32, 64),
        context_dim: int = 0,
        blocks: int = 1,
        frequencies: int = 16,
    ) -> None:
        super().__init__()
        if (
            len(shape) != 3
            or not channels
            or any(side % 2 ** (len(channels) - 1) for side in shape[1:])
        ):
            raise ValueError(
                f"TimeUNet takes images (C, H, W) with H and W multiples of {2 ** (len(channels) - 1)}, for channels "
                f"{tuple(channels)}, got {tuple(shape)}"
            )
        if min(channels) < 2:
            raise ValueError(
                f"TimeUNet normalizes over channels and needs at least 2, got {tuple(channels)}"
            )
        self.frequencies, self.blocks = frequencies, check_size(blocks, "the number of blocks")
        width = 4 * channels[0]
        self.embed = nn.Sequential(
            nn.Linear(2 * frequencies + 1 + context_dim, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.first = nn.Conv2d(shape[0], channels[0], 3, padding=1)
        down, up, now = [], [], channels[0]
        for c in channels:
            down.append(nn.ModuleList(Block(now if i == 0 else c, c, width) for i in range(blocks)))
            now = c
        few = math.prod(shape[1:]) // 4 ** (len(channels) - 1) <= MAX_ATTENTION
        self.middle: Modules[Block] = nn.ModuleList(
            [Block(now, now, width, few), Block(now, now, width)]
        )  # type: ignore[assignment]
        for c in reversed(channels):
            up.append(
                nn.ModuleList(Block(now + c if i == 0 else c, c, width) for i in range(blocks))
            )
            now = c
        self.down: Modules[Modules[Block]] = nn.ModuleList(down)  # type: ignore[assignment]
        self.up: Modules[Modules[Block]] = nn.ModuleList(up)  # type: ignore[assignment]
        self.last = nn.Sequential(
            _norm(now), nn.SiLU(), zero_init(nn.Conv2d(now, shape[0], 3, padding=1))
        )

    def forward(self, t: Tensor, z: Tensor, context: Tensor | None = None) -> Tensor:
        """t (...), z (..., C, H, W), context (..., context_dim) to (..., C, H, W)."""
        batch = z.shape[:-3]
        features = [time_features(t.expand(batch), self.frequencies)]
        if context is not None:
            features.append(context.expand(*batch, -1))
        e = self.embed(torch.cat(features, -1)).reshape(-1, self.embed[-1].out_features)
        h = self.first(z.reshape(-1, *z.shape[-3:]))
        kept: list[Tensor] = []
        for i, level in enumerate(self.down):
            if i:
                h = nn.functional.avg_pool2d(h, 2)
            for block in level:
                h = block(h, e)
            kept.append(h)
        for block in self.middle:
            h = block(h, e)
        for i, level in enumerate(self.up):
            if i:
                h = interpolate(h, scale_factor=2.0, mode="nearest")
            h = torch.cat([h, kept.pop()], 1)
            for block in level:
                h = block(h, e)
        out: Tensor = self.last(h)
        return out.reshape(z.shape)


class Block(nn.Module):
    """h + conv(silu(norm(conv(silu(norm h)))·(1 + scale) + shift)), scale and shift from an
    embedding of the time.
    """

    def __init__(self, inputs: int, outputs: int, embedding: int, attention: bool = False) -> None:
        super().__init__()
        self.norms: Modules[nn.GroupNorm] = nn.ModuleList([_norm(inputs), _norm(outputs)])  # type: ignore[assignment]
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = zero_init(nn.Conv2d(outputs, outputs, 3, padding=1))
        self.modulation = nn.Linear(embedding, 2 * outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.attend = Attention(outputs) if attention else None

    def forward(self, h: Tensor, e: Tensor) -> Tensor:
        """h (B, inputs, H, W), e (B, embedding) to (B, outputs, H, W)."""
        new = self.conv1(silu(self.norms[0](h)))
        scale, shift = self.modulation(silu(e))[..., None, None].chunk(2, -3)
        out: Tensor = self.skip(h) + self.conv2(silu(self.norms[1](new) * (1 + scale) + shift))
        return out if self.attend is None else self.attend(out)


class Attention(nn.Module):
    """h + attention over all pixels, with one head; without fused kernels, which have no second
    derivative.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = _norm(channels), nn.Conv2d(channels, 3 * channels, 1)
        self.out = zero_init(nn.Conv2d(channels, channels, 1))

    def forward(self, h: Tensor) -> Tensor:
        """(B, C, H, W) to the same."""
        q, k, v = self.qkv(self.norm(h)).flatten(-2).chunk(3, -2)  # (B, C, H·W)
        weights = (q.mT @ k / math.sqrt(q.shape[-2])).softmax(-1)
        out: Tensor = h + self.out((v @ weights.mT).reshape(h.shape))
        return out


def _norm(channels: int) -> nn.GroupNorm:
    """Up to 8 groups of at least 4 channels: smaller groups may have variances near 0, where the
    field is too steep.
    """
    return nn.GroupNorm(math.gcd(8, channels, max(1, channels // 4)), channels)
