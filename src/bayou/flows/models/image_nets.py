"""Convolutional networks of image flows. The last layer of a conditioner starts at 0, so that a
coupling starts as the identity."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou.flows.core.nets import zero_init
from bayou.flows.layers.squeeze import squeeze_blocks

Shape = tuple[int, int, int]  # channels, height, width
NetFactory = Callable[
    [Shape, int], nn.Module
]  # of the input's shape and the number of output channels


class ImageNet(nn.Sequential):
    """A sequence of layers for images with any batch axes: (..., C, H, W) to (..., outputs, H',
    W').

    Args:
        layers: modules of (N, C, H, W).
        half: compute all but the last layer in bfloat16; a coupling stays exact, since both
            directions evaluate the same network on the same numbers.
        gain: a factor of the output.
    """

    def __init__(self, *layers: nn.Module, half: bool = False, gain: float = 1.0) -> None:
        super().__init__(*layers)
        self.half_precision, self.gain = half, gain

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[:-3]
        y = x.reshape(math.prod(batch), *x.shape[-3:])
        *layers, last = self
        with (
            torch.autocast(x.device.type, torch.bfloat16) if self.half_precision else nullcontext()
        ):
            for layer in layers:
                y = layer(y)
        y = last(y.to(x.dtype)) * self.gain
        return y.reshape(*batch, *y.shape[1:])


def _output_gain(hidden: int) -> float:
    """A gain with which a step of Adam changes the outputs by the same amount for any number of
    hidden channels.

    With a gain of 1, a Glow of CIFAR-10 with 48 couplings of 256 channels was infinite after two
    steps.
    """
    return min(1.0, 64 / hidden)


def conv_net(shape: Shape, outputs: int, hidden: int = 64, half: bool = False) -> ImageNet:
    """3×3, 1×1 and 3×3 convolutions with ReLU (Kingma & Dhariwal 2018, Glow)."""
    return ImageNet(
        nn.Conv2d(shape[0], hidden, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(hidden, hidden, 1),
        nn.ReLU(inplace=True),
        zero_init(nn.Conv2d(hidden, outputs, 3, padding=1)),
        half=half,
        gain=_output_gain(hidden),
    )


def gated_net(
    shape: Shape,
    outputs: int,
    hidden: int = 64,
    blocks: int = 2,
    heads: int = 4,
    half: bool = False,
) -> ImageNet:
    """Gated residual convolutions, each followed by self-attention over all pixels (Ho et al. 2019,
    Flow++).

    ``heads=0``: convolutions alone.
    """
    layers: list[nn.Module] = [nn.Conv2d(shape[0], hidden, 3, padding=1)]
    for _ in range(blocks):
        layers.append(GatedConv(hidden))
        if heads:
            layers.append(GatedAttention((hidden, *shape[1:]), heads))
    last = zero_init(nn.Conv2d(hidden, outputs, 3, padding=1))
    return ImageNet(*layers, last, half=half, gain=_output_gain(hidden))


def feature_net(
    shape: Shape, features: int, levels: int, blocks: int = 2, half: bool = False
) -> ImageNet:
    """Features of images 0 .. levels − 1 for a dequantizer: (..., C, H, W) to (..., features, H/2,
    W/2).
    """
    convolutions = [GatedConv(features) for _ in range(blocks)]
    first = nn.Conv2d(4 * shape[0], features, 3, padding=1)
    return ImageNet(_Centered(levels), first, *convolutions, half=half)


class _Centered(nn.Module):
    """Integers 0 .. levels − 1 scaled to (−1, 1), and squeezed."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, x: Tensor) -> Tensor:
        return squeeze_blocks((2 * x + 1) / self.levels - 1)


class _Residual(nn.Module):
    """norm(x + change), the norm over channels at every pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def _add(self, x: Tensor, change: Tensor) -> Tensor:
        out: Tensor = self.norm((x + change).movedim(1, -1))
        return out.movedim(-1, 1)


class GatedConv(_Residual):
    """x ← norm(x + a·sigmoid(b)), (a, b) from convolutions of elu(x)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.first, self.second = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.Conv2d(channels, 2 * channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self._add(x, F.glu(self.second(F.elu(self.first(F.elu(x)))), 1))


class GatedAttention(_Residual):
    """x ← norm(x + a·sigmoid(b)), (a, b) from attention over all pixels with learned position
    embeddings.
    """

    def __init__(self, shape: Shape, heads: int) -> None:
        channels, height, width = shape
        super().__init__(channels)
        if channels % heads:
            raise ValueError(
                f"the number of channels must be a multiple of the number of heads, got {channels} and {heads}"
            )
        self.heads = heads
        self.place = nn.Parameter(torch.zeros(height * width, channels))
        self.read, self.write = nn.Linear(channels, 3 * channels), nn.Linear(channels, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2).mT + self.place  # (N, H·W, C)
        q, k, v = (
            self.read(rows).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )  # (N, heads, H·W, C/heads)
        if x.is_cuda:
            seen = F.scaled_dot_product_attention(q, k, v)
        else:  # the fused kernel does not support vmap on a CPU
            seen = (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1) @ v
        seen = seen.transpose(1, 2).flatten(2)
        return self._add(x, F.glu(self.write(seen), -1).mT.unflatten(-1, x.shape[2:]))
