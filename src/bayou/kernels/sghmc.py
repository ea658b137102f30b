"""Stochastic gradient Hamiltonian Monte Carlo with friction (Chen, Fox & Guestrin 2014)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayou.kernels.sgld import square_root


class MomentumState(NamedTuple):
    """Position and velocity, (C, D) each."""

    position: Tensor
    velocity: Tensor


def init(position: Tensor) -> MomentumState:
    """Return chains that start at these positions, at rest.

    Args:
        position: (C, D).
    """
    return MomentumState(position, torch.zeros_like(position))


def step(
    state: MomentumState,
    gradient: Tensor,
    noise: Tensor,
    lr: float | Tensor,
    temperature: float = 1.0,
    *,
    friction: float = 0.1,
) -> MomentumState:
    """Take a step v ← (1 − α)·v + ½·h·∇log p(w) + √(α·h·T)·ξ;  w ← w + v.

    This is equation 15 of the paper with its learning rate η = h/2 and β̂ = 0, so that the noise
    has variance 2α·η. With α = 1 it is SGLD with step h.

    Args:
        state: the chains.
        gradient: ∇log p(w), (C, D).
        noise: ξ ~ N(0, I), (C, D).
        lr: h, a number or (C, 1).
        temperature: T, 1 by default.
        friction: α, 0.1 by default.
    """
    velocity = (1 - friction) * state.velocity + 0.5 * lr * gradient
    velocity = velocity + square_root(friction * lr * temperature) * noise
    return MomentumState(state.position + velocity, velocity)
