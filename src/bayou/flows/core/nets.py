"""Fully connected networks for conditioners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

L = TypeVar("L", bound=nn.Module)


class Dense(nn.Linear):
    """x·Wᵀ + b: (..., inputs) to (..., outputs).

    The product with a single row is written as a sum when it is compiled for a GPU: a sum fuses
    with the operations around it, whereas each small matrix product is a separate kernel.
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
    """A multilayer perceptron whose last layer starts at zero, so that a flow starts as the
    identity.

    Args:
        inputs, outputs: sizes of the last axis.
        hidden: the widths of the hidden layers.
        activation: a constructor of the activation, ReLU by default.
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise([inputs, *hidden]):
        layers += [Dense(fan_in, fan_out), activation()]
    return nn.Sequential(*layers, zeroed(Dense([inputs, *hidden][-1], outputs)))
