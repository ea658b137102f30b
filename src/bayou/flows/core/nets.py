"""Small networks for conditioners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

L = TypeVar("L", bound=nn.Module)


class Dense(nn.Linear):
    """x·Wᵀ + b: (..., inputs) to (..., outputs).

    A single row that is compiled for a GPU is written as a sum, which fuses with what is around it; the matrix products
    of the flows of a network, one small kernel each, take longer than the rest of them.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and torch.compiler.is_compiling() and x.shape[:-1].numel() == 1:
            return (x.unsqueeze(-2) * self.weight).sum(-1) + self.bias
        return super().forward(x)


def zeroed(layer: L) -> L:
    """The layer with all parameters 0."""
    for p in layer.parameters():
        nn.init.zeros_(p)
    return layer


def mlp(
    inputs: int, hidden: Sequence[int], outputs: int, activation: Callable[[], nn.Module] = nn.ReLU
) -> nn.Sequential:
    """A multilayer perceptron whose last layer starts at zero, so that a flow starts as the identity."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise([inputs, *hidden]):
        layers += [Dense(fan_in, fan_out), activation()]
    return nn.Sequential(*layers, zeroed(Dense([inputs, *hidden][-1], outputs)))
