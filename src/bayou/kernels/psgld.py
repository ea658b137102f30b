"""Preconditioned SGLD: the preconditioner of RMSprop (Li et al. 2016)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayou.kernels import sgld
from bayou.kernels.sgld import root


class State(NamedTuple):
    """Position and running mean of squared gradients, (C, D) each, and how many gradients it has
    seen.
    """

    position: Tensor
    square: Tensor
    steps: int


def init(position: Tensor) -> State:
    """Chains that start at these positions (C, D)."""
    return State(position, torch.zeros_like(position), 0)


def step(
    state: State,
    gradient: Tensor,
    noise: Tensor,
    lr: float,
    temperature: float = 1.0,
    *,
    n: int = 1,
    decay: float = 0.99,
    floor: float = 1e-5,
) -> State:
    """w ← w + ½·h·G·∇log p(w) + √(h·G·T)·ξ, G = 1/(λ + √V), V the running mean of (∇log p / n)².

    V ← α·V + (1 − α)·(∇log p / n)², α = ``decay``, λ = ``floor``, n the number of data; V is
    divided by 1 − α^t (bias correction). The drift Γ_i = ∂G_i/∂w_i is omitted, as in the
    experiments of the paper: the stationary density is p only if G is independent of w, that is if
    V averages over many autocorrelation times or is dominated by the noise of minibatches.
    """
    steps = state.steps + 1
    square = decay * state.square + (1 - decay) * (gradient / n).square()
    preconditioner = 1 / (floor + (square / (1 - decay**steps)).sqrt())
    drift = 0.5 * lr * preconditioner * gradient
    return State(
        state.position + drift + math.sqrt(lr * temperature) * preconditioner.sqrt() * noise,
        square,
        steps,
    )


def learn(
    state: State,
    gradient: Tensor,
    noise: Tensor,
    lr: float | Tensor,
    temperature: float = 1.0,
    *,
    n: int = 1,
) -> State:
    """A step of SGLD that updates V, the mean of (∇log p / n)² over all steps so far."""
    steps = state.steps + 1
    square = state.square + ((gradient / n).square() - state.square) / steps
    return State(
        sgld.step(sgld.State(state.position), gradient, noise, lr, temperature).position,
        square,
        steps,
    )


def fixed(
    state: State,
    gradient: Tensor,
    noise: Tensor,
    lr: float | Tensor,
    temperature: float = 1.0,
    *,
    floor: float = 1e-5,
) -> State:
    """A step with constant V: Γ = 0, so that the stationary density is p up to O(h)."""
    g = preconditioner(state, floor)
    return state._replace(
        position=state.position
        + 0.5 * lr * g * gradient
        + root(lr * temperature) * g.sqrt() * noise
    )


def preconditioner(state: State, floor: float = 1e-5) -> Tensor:
    """G = 1/(λ + √V): (C, D)."""
    return 1 / (floor + state.square.sqrt())
