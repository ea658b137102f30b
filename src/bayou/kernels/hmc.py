"""Hamiltonian Monte Carlo (Duane 1987, Neal 2011): leapfrog steps and a Metropolis test."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Density = Callable[[Tensor], tuple[Tensor, Tensor]]  # w (C, D) -> log p (C,), ∇log p (C, D)
POWER = 0.5 * math.pi  # c of ``step``
DIVERGENCE = 1000.0  # the energy error from which a trajectory counts as divergent


class HamiltonianState(NamedTuple):
    """Position (C, D), its log density (C,) and gradient (C, D)."""

    position: Tensor
    log_prob: Tensor
    gradient: Tensor


class Info(NamedTuple):
    """Statistics of a step, (C,) each: mean acceptance probability, divergence, gradients.

    ``gain``: of ``step`` with a number of leapfrogs for each chain, what ``adaptation.lengthen``
    needs.
    """

    accept: Tensor
    divergent: Tensor
    leapfrogs: Tensor
    gain: Tensor | None = None


class PhasePoint(NamedTuple):
    """A point of a trajectory: position, momentum, gradient (C, D) and log density (C,)."""

    position: Tensor
    momentum: Tensor
    gradient: Tensor
    log_prob: Tensor

    @property
    def state(self) -> HamiltonianState:
        """The state of chains that end here."""
        return HamiltonianState(self.position, self.log_prob, self.gradient)


S = TypeVar("S", bound=tuple[Tensor, ...])


def init(position: Tensor, density: Density) -> HamiltonianState:
    """Return chains that start at these positions.

    Args:
        position: (C, D).
        density: log p and its gradient.
    """
    return HamiltonianState(position, *density(position))


def leapfrog(
    point: PhasePoint, density: Density, step_size: Tensor, inverse_mass: Tensor
) -> PhasePoint:
    """Take a step p ← p + ½ε·∇log p(w);  w ← w + ε·M⁻¹p;  p ← p + ½ε·∇log p(w).

    Args:
        point: position w and momentum p.
        density: log p and its gradient.
        step_size: ε, (C, 1).
        inverse_mass: M⁻¹, (C, D) or (D,).
    """
    half = 0.5 * step_size
    momentum = torch.addcmul(point.momentum, half, point.gradient)
    position = torch.addcmul(point.position, step_size * inverse_mass, momentum)
    log_prob, gradient = density(position)
    return PhasePoint(position, torch.addcmul(momentum, half, gradient), gradient, log_prob)


def energy(point: PhasePoint, inverse_mass: Tensor) -> Tensor:
    """Return H = −log p(w) + ½·pᵀM⁻¹p, (C,); infinite where it is not a number.

    Args:
        point: position w and momentum p.
        inverse_mass: M⁻¹, (C, D) or (D,).
    """
    twice = torch.linalg.vecdot(point.momentum, point.momentum * inverse_mass)
    return (0.5 * twice - point.log_prob).nan_to_num(math.inf, math.inf, -math.inf)


def start(state: HamiltonianState, noise: Tensor, inverse_mass: Tensor) -> PhasePoint:
    """Return the start of a trajectory with momentum p = M^½·ξ.

    Args:
        state: the chains.
        noise: ξ ~ N(0, I), (C, D).
        inverse_mass: M⁻¹, (C, D) or (D,).
    """
    return PhasePoint(state.position, noise * inverse_mass.rsqrt(), state.gradient, state.log_prob)


def step(
    state: HamiltonianState,
    density: Density,
    noise: Tensor,
    uniform: Tensor,
    step_size: Tensor,
    inverse_mass: Tensor,
    leapfrogs: int | Tensor,
) -> tuple[HamiltonianState, Info]:
    """Make one trajectory, accepted with probability min(1, exp(H − H')).

    A number of leapfrogs for each chain gives a gain by time of J·t^−c, for the squared jump J =
    (w' − w)ᵀM(w' − w) and its probability a: a·t^(c+1)·d(J·t^−c)/dt = a·(2t·(w' − w)ᵀp' − c·J). In
    a standard normal distribution J is 2·(1 − cos t) per dimension, and with c = π/2 the largest
    J·t^−c is that of an independent draw, t = π/2.

    Args:
        state: the chains.
        density: log p and its gradient.
        noise: ξ ~ N(0, I), (C, D).
        uniform: on [0, 1), (C,).
        step_size: ε, (C,).
        inverse_mass: M⁻¹, (C, D) or (D,).
        leapfrogs: the number of steps, for all or for each chain (C,).
    """
    first = start(state, noise, inverse_mass)
    point = first
    counts = leapfrogs if isinstance(leapfrogs, Tensor) else torch.full_like(step_size, leapfrogs)
    for number in range(leapfrogs if isinstance(leapfrogs, int) else int(leapfrogs.max())):
        new = leapfrog(point, density, step_size.unsqueeze(-1), inverse_mass)
        point = new if isinstance(leapfrogs, int) else choose(number < counts, new, point)
    fall = energy(first, inverse_mass) - energy(point, inverse_mass)
    accept = fall.clamp(max=0).exp()
    info = Info(accept, fall < -DIVERGENCE, counts)
    if isinstance(leapfrogs, Tensor):
        jump = point.position - first.position
        twice_time = 2 * (counts * step_size).unsqueeze(-1)
        slope = twice_time * point.momentum - POWER * jump / inverse_mass
        gain = accept * torch.linalg.vecdot(jump, slope)
        info = info._replace(gain=gain.nan_to_num(0.0, 0.0, 0.0))
    return choose(uniform < accept, point.state, state), info


def choose(mask: Tensor, yes: S, no: S) -> S:
    """Return ``yes`` for chains where the mask is true and ``no`` for the others.

    Args:
        mask: (C,).
        yes: tensors (C,) or (C, D).
        no: tensors of the same shapes.
    """
    column = mask.unsqueeze(-1)
    tensors = [
        torch.where(mask if a.ndim == 1 else column, a, b) for a, b in zip(yes, no, strict=True)
    ]
    return type(yes)(*tensors)


def reasonable_step(
    state: HamiltonianState,
    density: Density,
    noise: Tensor,
    step_size: Tensor,
    inverse_mass: Tensor,
    max_changes: int = 50,
) -> Tensor:
    """Return a step size for each chain whose leapfrog step has an acceptance rate near 0.8.

    It is doubled, or halved, until the probability crosses 0.8 (Hoffman & Gelman 2014, algorithm
    4).

    Args:
        state: the chains.
        density: log p and its gradient.
        noise: ξ ~ N(0, I), (C, D).
        step_size: the first step sizes, (C,).
        inverse_mass: M⁻¹, (C, D) or (D,).
        max_changes: the largest number of factors of two, 50 by default.
    """
    first = start(state, noise, inverse_mass)
    before = energy(first, inverse_mass)
    grows = None
    is_changing = torch.ones_like(step_size, dtype=torch.bool)
    for _ in range(max_changes):
        point = leapfrog(first, density, step_size.unsqueeze(-1), inverse_mass)
        is_small = before - energy(point, inverse_mass) > math.log(0.8)
        grows = is_small if grows is None else grows
        is_changing = is_changing & (is_small == grows)
        if not bool(is_changing.any()):
            break
        changed = torch.where(grows, 2 * step_size, 0.5 * step_size)
        step_size = torch.where(is_changing, changed, step_size)
    return step_size
