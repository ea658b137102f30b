"""Fully connected networks for conditioners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

L = TypeVar("L", bound=nn.Module)


class Dense(nn.Linear):
    """A linear layer, x·Wᵀ + b: (..., inputs) to (..., outputs).

    The product with a single row is written as a sum when it is compiled for a GPU: a sum fuses
    with the operations around it, whereas each small matrix product is a separate kernel.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and torch.compiler.is_compiling() and x.shape[:-1].numel() == 1:
            return (x.unsqueeze(-2) * self.weight).sum(-1) + self.bias
        return super().forward(x)


def zero_init(layer: L) -> L:
    """Set all parameters of a layer to 0, and return the layer.

    Args:
        layer: any module.
    """
    for p in layer.parameters():
        nn.init.zeros_(p)
    return layer


def mlp(
    inputs: int,
    hidden: Sequence[int],
    outputs: int,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Build a multilayer perceptron whose last layer starts at zero.

    A conditioner with this network starts a flow at, or near, the identity.

    Args:
        inputs: the size of the last axis of the input.
        hidden: the widths of the hidden layers; () for a linear map.
        outputs: the size of the last axis of the output.
        activation: a constructor of the activation; ``nn.ReLU`` by default.

    Returns:
        A network (..., inputs) → (..., outputs).

    Example:
        >>> import torch
        >>> from bayou.flows import mlp
        >>> mlp(3, (64, 64), 2)(torch.zeros(10, 3)).shape
        torch.Size([10, 2])
    """
    widths = [inputs, *hidden]
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [Dense(fan_in, fan_out), activation()]
    return nn.Sequential(*layers, zero_init(Dense(widths[-1], outputs)))
