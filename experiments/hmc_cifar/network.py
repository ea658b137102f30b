"""The residual network of the reference: filter response normalization, swish, the padding of
JAX.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class FilterResponseNorm(nn.Module):
    """max(γ·x/√(mean_hw x² + 1e-6) + β, τ) of every channel of x (B, C, H, W) (Singh & Krishnan
    2020).

    γ, β and τ are one vector (3·C,), since the cost of a step is partly that of its number of
    tensors. The norm keeps their precision under autocast.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.affine = nn.Parameter(torch.cat([torch.ones(channels), torch.zeros(2 * channels)]))

    def forward(self, x: Tensor) -> Tensor:
        gamma, beta, tau = self.affine.view(3, -1, 1, 1)
        x = x.to(gamma.dtype)
        scale = (x.square().mean((-2, -1), keepdim=True) + 1e-6).rsqrt()
        return torch.maximum(x * (gamma * scale) + beta, tau)


class Convolution(nn.Conv2d):
    """Casts its tensors itself under autocast where ``vmap`` maps over weights: autocast has no
    effect there.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not torch._C._functorch.is_batchedtensor(self.weight):
            return super().forward(input)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        weight, bias = self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        return self._conv_forward(input.to(dtype), weight, bias)


def convolution(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    """A convolution with the padding SAME of JAX (at stride 2 none before and one after), and its
    normalization.
    """
    pad = [nn.ZeroPad2d((0, 1, 0, 1))] if kernel == 3 and stride == 2 else []
    conv = Convolution(inputs, outputs, kernel, stride, padding=kernel // 2 if stride == 1 else 0)
    return [*pad, conv, FilterResponseNorm(outputs)]


class Block(nn.Module):
    """Two convolutions beside a shortcut, which is a 1×1 convolution where the channels change."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        first, second = convolution(inputs, outputs, 3, stride), convolution(outputs, outputs, 3, 1)
        self.body = nn.Sequential(*first, nn.SiLU(), *second)
        self.shortcut = nn.Sequential(
            *(convolution(inputs, outputs, 1, stride) if stride > 1 else ())
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + self.shortcut(x)
        return out


def resnet(width: int = 16, blocks: int = 3) -> nn.Sequential:
    """ResNet-(6·blocks + 2) of images (B, 3, 32, 32): logits (B, 10)."""
    channels = [width] + [width * 2**stage for stage in range(3) for _ in range(blocks)]
    stages = (layer for pair in pairwise(channels) for layer in (Block(*pair), nn.SiLU()))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10))
    return nn.Sequential(*convolution(3, width, 3, 1), nn.SiLU(), *stages, *head)
