"""Convolutional networks of image flows.

The last layer of a conditioner starts at 0, so that a coupling starts as the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou.flows.core.nets import zero_init
from bayou.flows.layers.squeeze import squeeze_blocks
from bayou.flows.models.transformer import attend

Shape = tuple[int, int, int]  # channels, height, width
# From the shape of the input and the number of output channels to a network.
NetFactory = Callable[[Shape, int], nn.Module]
MAX_FULL_GAIN_CHANNELS = 64  # hidden channels up to which the gain of the output is 1


class ImageNet(nn.Sequential):
    r"""A sequence of layers for images with any batch axes.

    The output is gain·last(...first(x)), with the batch axes flattened for the layers.

    Args:
        layers: modules of images (N, C, H, W).
        half: whether to compute all but the last layer in bfloat16; False by default. A coupling
            stays exact, since both directions evaluate the same network on the same numbers.
        gain: a factor of the output; 1 by default.

    Shapes: x (..., C, H, W), output (..., outputs, H', W').

    Example:
        >>> import torch
        >>> from bayou.flows import ImageNet
        >>> net = ImageNet(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU())
        >>> net(torch.zeros(2, 5, 3, 4, 4)).shape
        torch.Size([2, 5, 8, 4, 4])
    """

    def __init__(self, *layers: nn.Module, half: bool = False, gain: float = 1.0) -> None:
        super().__init__(*layers)
        self.half_precision = half
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for images with any batch axes.

        Args:
            x: (..., C, H, W).
        """
        batch = x.shape[:-3]
        y = x.reshape(math.prod(batch), *x.shape[-3:])
        *layers, last = self
        precision: AbstractContextManager[object] = nullcontext()
        if self.half_precision:
            precision = torch.autocast(x.device.type, torch.bfloat16)
        with precision:
            for layer in layers:
                y = layer(y)
        y = last(y.to(x.dtype)) * self.gain
        return y.reshape(*batch, *y.shape[1:])


def _output_gain(hidden: int) -> float:
    """Return a gain with which a wide network learns at the speed of a narrow one.

    A step of Adam then changes the outputs by the same amount for any number of hidden channels.
    With a gain of 1, a Glow with 48 couplings of 256 channels diverges after two steps.
    """
    return min(1.0, MAX_FULL_GAIN_CHANNELS / hidden)


def conv_net(shape: Shape, outputs: int, hidden: int = 64, half: bool = False) -> ImageNet:
    """Build the CNN of a coupling of Glow: 3×3, 1×1 and 3×3 convolutions with ReLU.

    Args:
        shape: (C, H, W) of the input.
        outputs: the number of output channels.
        hidden: the number of hidden channels, 64 by default.
        half: whether to compute all but the last layer in bfloat16; False by default.

    Returns:
        A network (..., C, H, W) → (..., outputs, H, W), whose output starts at 0.

    Example:
        >>> import torch
        >>> from bayou.flows import conv_net
        >>> conv_net((3, 8, 8), outputs=6)(torch.zeros(10, 3, 8, 8)).shape
        torch.Size([10, 6, 8, 8])

    References:
        Kingma & Dhariwal 2018, Glow: Generative Flow with Invertible 1x1 Convolutions.
    """
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
    """Build the CNN of a coupling of Flow++.

    It consists of gated residual convolutions, each followed by self-attention over all pixels.

    Args:
        shape: (C, H, W) of the input.
        outputs: the number of output channels.
        hidden: the number of hidden channels, 64 by default; a multiple of ``heads``.
        blocks: the number of gated convolutions, 2 by default.
        heads: the number of attention heads, 4 by default; 0 for convolutions alone.
        half: whether to compute all but the last layer in bfloat16; False by default.

    Returns:
        A network (..., C, H, W) → (..., outputs, H, W), whose output starts at 0.

    Raises:
        ValueError: unless the heads divide the hidden channels.

    Example:
        >>> import torch
        >>> from bayou.flows import gated_net
        >>> gated_net((3, 8, 8), outputs=6, hidden=16)(torch.zeros(10, 3, 8, 8)).shape
        torch.Size([10, 6, 8, 8])

    References:
        Ho, Chen, Srinivas, Duan & Abbeel 2019, Flow++: Improving Flow-Based Generative Models with
        Variational Dequantization and Architecture Design.
    """
    layers: list[nn.Module] = [nn.Conv2d(shape[0], hidden, 3, padding=1)]
    for _ in range(blocks):
        layers.append(GatedConv(hidden))
        if heads:
            layers.append(GatedAttention((hidden, *shape[1:]), heads))
    last = zero_init(nn.Conv2d(hidden, outputs, 3, padding=1))
    return ImageNet(*layers, last, half=half, gain=_output_gain(hidden))


def feature_net(
    shape: Shape,
    features: int,
    levels: int,
    blocks: int = 2,
    half: bool = False,
) -> ImageNet:
    """Build a network of features of images 0 .. levels − 1, for a dequantizer.

    Args:
        shape: (C, H, W) of the images, with even H and W.
        features: the number of output channels.
        levels: the number of levels of the images.
        blocks: the number of gated convolutions, 2 by default.
        half: whether to compute all but the last layer in bfloat16; False by default.

    Returns:
        A network (..., C, H, W) → (..., features, H/2, W/2).
    """
    convolutions = [GatedConv(features) for _ in range(blocks)]
    first = nn.Conv2d(4 * shape[0], features, 3, padding=1)
    return ImageNet(_CenteredPixels(levels), first, *convolutions, half=half)


class _CenteredPixels(nn.Module):
    """A layer that scales integers 0 .. levels − 1 to (−1, 1) and squeezes them."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, x: Tensor) -> Tensor:
        return squeeze_blocks((2 * x + 1) / self.levels - 1)


class _NormalizedResidual(nn.Module):
    """A layer norm(x + change), with the norm over channels at every pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def _add(self, x: Tensor, change: Tensor) -> Tensor:
        """Return norm(x + change) of images (N, C, H, W)."""
        out: Tensor = self.norm((x + change).movedim(1, -1))
        return out.movedim(-1, 1)


class GatedConv(_NormalizedResidual):
    """A layer x ← norm(x + a·sigmoid(b)), with (a, b) from convolutions of elu(x).

    Args:
        channels: the number of channels C.

    Shapes: x, output (N, C, H, W).
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.first: nn.Conv2d = nn.Conv2d(channels, channels, 3, padding=1)
        self.second: nn.Conv2d = nn.Conv2d(channels, 2 * channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer.

        Args:
            x: (N, C, H, W).
        """
        hidden = F.elu(self.first(F.elu(x)))
        return self._add(x, F.glu(self.second(hidden), 1))


class GatedAttention(_NormalizedResidual):
    """A layer x ← norm(x + a·sigmoid(b)), with (a, b) from attention over all pixels.

    Every pixel has a learned position embedding.

    Args:
        shape: (C, H, W) of the input.
        heads: the number of attention heads; it divides C.

    Shapes: x, output (N, C, H, W).

    Raises:
        ValueError: unless the heads divide the channels.
    """

    def __init__(self, shape: Shape, heads: int) -> None:
        channels, height, width = shape
        super().__init__(channels)
        if channels % heads:
            raise ValueError(
                "the number of channels must be a multiple of the number of heads, got "
                f"{channels} and {heads}"
            )
        self.heads = heads
        self.place: nn.Parameter = nn.Parameter(torch.zeros(height * width, channels))
        self.read: nn.Linear = nn.Linear(channels, 3 * channels)
        self.write: nn.Linear = nn.Linear(channels, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer.

        Args:
            x: (N, C, H, W).
        """
        pixels = x.flatten(2).mT + self.place  # (N, H·W, C)
        qkv = self.read(pixels).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (N, heads, H·W, C/heads)
        attended = attend(q, k, v, causal=False).transpose(1, 2).flatten(2)
        return self._add(x, F.glu(self.write(attended), -1).mT.unflatten(-1, x.shape[2:]))
