"""Preconditioned SGLD: the preconditioner of RMSprop (Li et al. 2016)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayou.kernels import sgld
from bayou.kernels.sgld import square_root


class PreconditionedState(NamedTuple):
    """Position and running mean of squared gradients, (C, D) each, and the number of gradients."""

    position: Tensor
    square: Tensor
    steps: int


def init(position: Tensor) -> PreconditionedState:
    """Return chains that start at these positions.

    Args:
        position: (C, D).
    """
    return PreconditionedState(position, torch.zeros_like(position), 0)


def step(
    state: PreconditionedState,
    gradient: Tensor,
    noise: Tensor,
    lr: float,
    temperature: float = 1.0,
    *,
    n: int = 1,
    decay: float = 0.99,
    floor: float = 1e-5,
) -> PreconditionedState:
    """Take a step w ← w + ½·h·G·∇log p(w) + √(h·G·T)·ξ with G = 1/(λ + √V).

    V ← α·V + (1 − α)·(∇log p / n)², divided by 1 − α^t (bias correction). The drift Γ_i =
    ∂G_i/∂w_i is omitted, as in the experiments of the paper: the stationary density is p only if G
    is independent of w, that is if V averages over many autocorrelation times or is dominated by
    the noise of minibatches.

    Args:
        state: the chains.
        gradient: ∇log p(w), (C, D).
        noise: ξ ~ N(0, I), (C, D).
        lr: h.
        temperature: T, 1 by default.
        n: the number of data, 1 by default.
        decay: α, 0.99 by default.
        floor: λ, 1e-5 by default.
    """
    steps = state.steps + 1
    square = decay * state.square + (1 - decay) * (gradient / n).square()
    scale = 1 / (floor + (square / (1 - decay**steps)).sqrt())
    drift = 0.5 * lr * scale * gradient
    position = state.position + drift + math.sqrt(lr * temperature) * scale.sqrt() * noise
    return PreconditionedState(position, square, steps)


def learn(
    state: PreconditionedState,
    gradient: Tensor,
    noise: Tensor,
    lr: float | Tensor,
    temperature: float = 1.0,
    *,
    n: int = 1,
) -> PreconditionedState:
    """Take a step of SGLD that updates V, the mean of (∇log p / n)² over all steps so far.

    Args:
        state: the chains.
        gradient: ∇log p(w), (C, D).
        noise: ξ ~ N(0, I), (C, D).
        lr: h, a number or (C, 1).
        temperature: T, 1 by default.
        n: the number of data, 1 by default.
    """
    steps = state.steps + 1
    square = state.square + ((gradient / n).square() - state.square) / steps
    chains = sgld.LangevinState(state.position)
    position = sgld.step(chains, gradient, noise, lr, temperature).position
    return PreconditionedState(position, square, steps)


def step_with_fixed_scale(
    state: PreconditionedState,
    gradient: Tensor,
    noise: Tensor,
    lr: float | Tensor,
    temperature: float = 1.0,
    *,
    floor: float = 1e-5,
) -> PreconditionedState:
    """Take a step with constant V: Γ = 0, so that the stationary density is p up to O(h).

    Args:
        state: the chains.
        gradient: ∇log p(w), (C, D).
        noise: ξ ~ N(0, I), (C, D).
        lr: h, a number or (C, 1).
        temperature: T, 1 by default.
        floor: λ, 1e-5 by default.
    """
    scale = preconditioner(state, floor)
    drift = 0.5 * lr * scale * gradient
    diffusion = square_root(lr * temperature) * scale.sqrt() * noise
    return state._replace(position=state.position + drift + diffusion)


def preconditioner(state: PreconditionedState, floor: float = 1e-5) -> Tensor:
    """Return G = 1/(λ + √V): (C, D).

    Args:
        state: has V.
        floor: λ, 1e-5 by default.
    """
    return 1 / (floor + state.square.sqrt())
