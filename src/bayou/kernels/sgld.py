"""Stochastic gradient Langevin dynamics (Welling & Teh 2011)."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class State(NamedTuple):
    """The position of the chains (C, D)."""

    position: Tensor


def init(position: Tensor) -> State:
    """Chains that start at these positions (C, D)."""
    return State(position)


def step(
    state: State, gradient: Tensor, noise: Tensor, lr: float | Tensor, temperature: float = 1.0
) -> State:
    """w ← w + ½·h·∇log p(w) + √(h·T)·ξ, h = ``lr``, T = ``temperature``, ξ ~ N(0, I) the ``noise``:
    (C, D) each.

    h may be a tensor (C, 1), one for each chain.
    The stationary density is p^(1/T) up to O(h): the variance of N(0, 1) becomes 1/(1 − h/4).
    """
    return State(state.position + 0.5 * lr * gradient + root(lr * temperature) * noise)


def root(value: float | Tensor) -> float | Tensor:
    """√ of a number or of a tensor."""
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)
