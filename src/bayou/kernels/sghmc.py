"""Stochastic gradient Hamiltonian Monte Carlo with friction (Chen, Fox & Guestrin 2014)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayou.kernels.sgld import root


class State(NamedTuple):
    """Position and velocity, (C, D) each."""

    position: Tensor
    velocity: Tensor


def init(position: Tensor) -> State:
    """Chains that start at these positions (C, D), at rest."""
    return State(position, torch.zeros_like(position))


def step(
    state: State,
    gradient: Tensor,
    noise: Tensor,
    lr: float | Tensor,
    temperature: float = 1.0,
    *,
    friction: float = 0.1,
) -> State:
    """v ← (1 − α)·v + ½·h·∇log p(w) + √(α·h·T)·ξ;  w ← w + v.

    α = ``friction`` (equation 15 of the paper with its learning rate η = h/2 and β̂ = 0, so that
    the noise has variance 2α·η). With α = 1 this is SGLD with step h.
    """
    velocity = (1 - friction) * state.velocity + 0.5 * lr * gradient
    velocity = velocity + root(friction * lr * temperature) * noise
    return State(state.position + velocity, velocity)
