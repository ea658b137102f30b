"""Microcanonical Langevin Monte Carlo (Robnik, De Luca, Silverstein & Seljak 2023).

A point moves at unit speed and its direction u turns along the gradient: with U = −log p in D
dimensions,

    dw/dt = u,   du/dt = −(I − u·uᵀ)·∇U/(D − 1),

whose stationary density of w is p where the energy U + K is conserved. In scaled coordinates w/s,
the scales s (C, D) take the place of the mass of ``hmc``. Every function works on all chains.
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


class MicrocanonicalState(NamedTuple):
    """Position (C, D), its log density (C,) and gradient (C, D), and the unit velocity (C, D)."""

    position: Tensor
    log_prob: Tensor
    gradient: Tensor
    velocity: Tensor


def unit(v: Tensor) -> Tensor:
    """Return v/‖v‖, (C, D).

    Args:
        v: (C, D).
    """
    return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True)


def turn(velocity: Tensor, gradient: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """Return the velocity under a constant gradient, and the gain of kinetic energy.

    With e = ∇log p/‖∇log p‖, δ = time·‖∇log p‖/(D − 1), c = e·u:
    u' = (u + e·(sinh δ + c·(cosh δ − 1)))/(cosh δ + c·sinh δ),  ΔK = (D − 1)·log(cosh δ + c·sinh
    δ), here with both multiplied by 2·exp(−δ), which cannot overflow.

    Args:
        velocity: u, (C, D).
        gradient: ∇log p, (C, D).
        time: (C, 1).

    Returns:
        u', (C, D), and ΔK, (C,).
    """
    norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    e = gradient / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    dimension = velocity.shape[-1] - 1
    delta = time * norm / dimension
    c = torch.linalg.vecdot(e, velocity).unsqueeze(-1).clamp(-1, 1)
    z = (-delta).exp()
    turned = 2 * z * velocity + e * ((1 - z) * (1 + z + c * (1 - z)))
    gain = dimension * (delta - math.log(2.0) + (1 + c + (1 - c) * z.square()).log())
    return unit(turned), gain.squeeze(-1)


def integrate(
    state: MicrocanonicalState, density: Density, step_size: Tensor, scales: Tensor
) -> tuple[MicrocanonicalState, Tensor]:
    """Take one step of the minimal-norm scheme.

    Args:
        state: the chains.
        density: log p and its gradient.
        step_size: ε, (C,).
        scales: s, (C, D).

    Returns:
        The state, and the energy error ΔU + ΔK, (C,).
    """
    position, log_prob, gradient, velocity = state
    step_size = step_size.unsqueeze(-1)
    kinetic = torch.zeros_like(log_prob)
    for fraction in (MINIMAL_NORM, 1 - 2 * MINIMAL_NORM):
        velocity, gain = turn(velocity, gradient * scales, fraction * step_size)
        position = torch.addcmul(position, 0.5 * step_size * scales, velocity)
        log_prob, gradient = density(position)
        kinetic = kinetic + gain
    velocity, gain = turn(velocity, gradient * scales, MINIMAL_NORM * step_size)
    error = kinetic + gain + state.log_prob - log_prob
    return MicrocanonicalState(position, log_prob, gradient, velocity), error


def refresh(velocity: Tensor, noise: Tensor, step_size: Tensor, length: Tensor) -> Tensor:
    """Return u ← (u + ν·ξ)/‖u + ν·ξ‖ with ν² = (exp(2ε/L) − 1)/D.

    After the decoherence length L the direction is new.

    Args:
        velocity: u, (C, D).
        noise: ξ ~ N(0, I), (C, D).
        step_size: ε, (C,).
        length: L, (C,).
    """
    nu = (torch.expm1(2 * step_size / length) / velocity.shape[-1]).sqrt()
    return unit(torch.addcmul(velocity, nu.unsqueeze(-1), noise))


def step(
    state: MicrocanonicalState,
    density: Density,
    noise: Callable[[int], Tensor],
    step_size: Tensor,
    scales: Tensor,
    length: Tensor,
    steps: int,
) -> tuple[MicrocanonicalState, Tensor, Tensor]:
    """Take steps without a Metropolis test, each followed by a partial refreshment.

    Args:
        state: the chains.
        density: log p and its gradient.
        noise: returns the normal noise of the i-th refreshment, (C, D).
        step_size: ε, (C,).
        scales: s, (C, D).
        length: L, (C,).
        steps: the number of steps.

    Returns:
        The state, the mean of ΔE²/D over the steps (C,), which the bias grows with, and which
        chains diverged (C,): these stay where they were, with a new direction.
    """
    first = state
    squares = torch.zeros_like(state.log_prob)
    largest_error = squares
    for number in range(steps):
        state, error = integrate(state, density, step_size, scales)
        state = state._replace(velocity=refresh(state.velocity, noise(number), step_size, length))
        squares = squares + error.square()
        largest_error = torch.maximum(largest_error, error.abs())
    is_divergent = ~(largest_error < DIVERGENCE)  # also where it is not a number
    restart = first._replace(velocity=unit(noise(0)))
    state = choose(is_divergent, restart, state)
    variance = squares / (steps * state.position.shape[-1])
    return state, variance.nan_to_num(math.inf, math.inf), is_divergent


def adjusted_step(
    state: MicrocanonicalState,
    density: Density,
    noise: Tensor,
    uniform: Tensor,
    step_size: Tensor,
    scales: Tensor,
    steps: Tensor,
) -> tuple[MicrocanonicalState, Info]:
    """Take steps from a new direction, accepted with probability min(1, exp(−ΔE)).

    It is exact at any step size.

    Args:
        state: the chains.
        density: log p and its gradient.
        noise: normal, (C, D).
        uniform: on [0, 1), (C,).
        step_size: ε, (C,).
        scales: s, (C, D).
        steps: the number of steps of each chain, (C,).
    """
    first = state._replace(velocity=unit(noise))
    point = first
    energy = torch.zeros_like(first.log_prob)
    for number in range(int(steps.max())):
        is_moving = number < steps
        proposal, error = integrate(point, density, step_size, scales)
        point = choose(is_moving, proposal, point)
        energy = torch.where(is_moving, energy + error, energy)
    accept = (-energy).nan_to_num(-math.inf, math.inf, -math.inf).clamp(max=0).exp()
    gradients = GRADIENTS * steps.to(accept.dtype)
    return choose(uniform < accept, point, first), Info(accept, ~(energy < DIVERGENCE), gradients)
