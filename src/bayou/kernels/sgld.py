"""Stochastic gradient Langevin dynamics (Welling & Teh 2011)."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class LangevinState(NamedTuple):
    """The position of the chains (C, D)."""

    position: Tensor


def init(position: Tensor) -> LangevinState:
    """Return chains that start at these positions.

    Args:
        position: (C, D).
    """
    return LangevinState(position)


def step(
    state: LangevinState,
    gradient: Tensor,
    noise: Tensor,
    lr: float | Tensor,
    temperature: float = 1.0,
) -> LangevinState:
    """Take a step w ← w + ½·h·∇log p(w) + √(h·T)·ξ.

    The stationary density is p^(1/T) up to O(h): the variance of N(0, 1) becomes 1/(1 − h/4).

    Args:
        state: the chains.
        gradient: ∇log p(w), (C, D).
        noise: ξ ~ N(0, I), (C, D).
        lr: h, a number or (C, 1), one for each chain.
        temperature: T, 1 by default.
    """
    return LangevinState(
        state.position + 0.5 * lr * gradient + square_root(lr * temperature) * noise
    )


def square_root(value: float | Tensor) -> float | Tensor:
    """Return the square root of a number or of a tensor.

    Args:
        value: not negative.
    """
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)
