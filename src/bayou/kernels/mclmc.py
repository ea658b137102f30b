"""Microcanonical Langevin Monte Carlo (Robnik, De Luca, Silverstein & Seljak 2023), all chains at
once.

A point moves at unit speed and its direction u turns along the gradient: with U = −log p in D
dimensions,

    dw/dt = u,   du/dt = −(I − u·uᵀ)·∇U/(D − 1),

whose stationary density of w is p where the energy U + K is conserved. In scaled coordinates w/s,
the scales s (C, D) take the place of the mass of ``hmc``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bayou.kernels.hmc import DIVERGENCE, Density, Info, choose

MINIMAL_NORM = 0.1931833275  # λ of the five-stage scheme of Omelyan, Mryglod & Folk (2003)
GRADIENTS = 2  # of one step of this scheme


class State(NamedTuple):
    """Position (C, D), its log density (C,) and gradient (C, D), and the unit velocity (C, D)."""

    position: Tensor
    log_prob: Tensor
    gradient: Tensor
    velocity: Tensor


def unit(v: Tensor) -> Tensor:
    """v/‖v‖, (C, D)."""
    return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True)


def turn(velocity: Tensor, gradient: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """The velocity after ``time`` (C, 1) under a constant ∇log p (C, D), and the gain ΔK of kinetic
    energy (C,).

    With e = ∇log p/‖∇log p‖, δ = time·‖∇log p‖/(D − 1), c = e·u:
    u' = (u + e·(sinh δ + c·(cosh δ − 1)))/(cosh δ + c·sinh δ),  ΔK = (D − 1)·log(cosh δ + c·sinh
    δ), here with both multiplied by 2·exp(−δ), which cannot overflow.
    """
    norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    e = gradient / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    free = velocity.shape[-1] - 1
    delta = time * norm / free
    c = torch.linalg.vecdot(e, velocity).unsqueeze(-1).clamp(-1, 1)
    z = (-delta).exp()
    new = 2 * z * velocity + e * ((1 - z) * (1 + z + c * (1 - z)))
    gain = free * (delta - math.log(2.0) + (1 + c + (1 - c) * z.square()).log())
    return unit(new), gain.squeeze(-1)


def integrate(
    state: State, density: Density, step_size: Tensor, scales: Tensor
) -> tuple[State, Tensor]:
    """One step of length ε (C,) of the minimal-norm scheme, and the energy error ΔU + ΔK (C,)."""
    position, log_prob, gradient, velocity = state
    step_size, total = step_size.unsqueeze(-1), torch.zeros_like(log_prob)
    for share in (MINIMAL_NORM, 1 - 2 * MINIMAL_NORM):
        velocity, gain = turn(velocity, gradient * scales, share * step_size)
        position = torch.addcmul(position, 0.5 * step_size * scales, velocity)
        log_prob, gradient = density(position)
        total = total + gain
    velocity, gain = turn(velocity, gradient * scales, MINIMAL_NORM * step_size)
    return State(position, log_prob, gradient, velocity), total + gain + state.log_prob - log_prob


def refresh(velocity: Tensor, noise: Tensor, step_size: Tensor, length: Tensor) -> Tensor:
    """u ← (u + ν·ξ)/‖u + ν·ξ‖, ν² = (exp(2ε/L) − 1)/D: after the decoherence length L (C,) the
    direction is new.
    """
    nu = (torch.expm1(2 * step_size / length) / velocity.shape[-1]).sqrt()
    return unit(torch.addcmul(velocity, nu.unsqueeze(-1), noise))


def step(
    state: State,
    density: Density,
    noise: Callable[[int], Tensor],
    step_size: Tensor,
    scales: Tensor,
    length: Tensor,
    steps: int,
) -> tuple[State, Tensor, Tensor]:
    """``steps`` steps without a Metropolis test, each followed by a partial refreshment with
    ``noise(i)`` (C, D).

    Returns the state, the mean of ΔE²/D over the steps (C,), which the bias grows with, and which
    chains diverged (C,): these stay where they were, with a new direction.
    """
    first, squares = state, torch.zeros_like(state.log_prob)
    worst = squares
    for number in range(steps):
        state, error = integrate(state, density, step_size, scales)
        state = state._replace(velocity=refresh(state.velocity, noise(number), step_size, length))
        squares, worst = squares + error.square(), torch.maximum(worst, error.abs())
    divergent = ~(worst < DIVERGENCE)  # also where it is not a number
    stay = first._replace(velocity=unit(noise(0)))
    state = choose(divergent, stay, state)
    variance = squares / (steps * state.position.shape[-1])
    return state, variance.nan_to_num(math.inf, math.inf), divergent


def adjusted_step(
    state: State,
    density: Density,
    noise: Tensor,
    uniform: Tensor,
    step_size: Tensor,
    scales: Tensor,
    steps: Tensor,
) -> tuple[State, Info]:
    """``steps`` (C,) steps from a new direction, accepted with probability min(1, exp(−ΔE)): exact
    at any step size.

    ``noise`` (C, D) normal, ``uniform`` (C,) on [0, 1).
    """
    first = state._replace(velocity=unit(noise))
    point, energy = first, torch.zeros_like(first.log_prob)
    for number in range(int(steps.max())):
        moving = number < steps
        new, error = integrate(point, density, step_size, scales)
        point, energy = choose(moving, new, point), torch.where(moving, energy + error, energy)
    accept = (-energy).nan_to_num(-math.inf, math.inf, -math.inf).clamp(max=0).exp()
    gradients = GRADIENTS * steps.to(accept.dtype)
    return choose(uniform < accept, point, first), Info(accept, ~(energy < DIVERGENCE), gradients)
