"""Small networks that conditioners are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn


def mlp(
    inputs: int, hidden: Sequence[int], outputs: int, activation: Callable[[], nn.Module] = nn.ReLU
) -> nn.Sequential:
    """A multilayer perceptron whose last layer starts at zero, so that a flow starts as the identity."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise([inputs, *hidden]):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    last = nn.Linear([inputs, *hidden][-1], outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)
