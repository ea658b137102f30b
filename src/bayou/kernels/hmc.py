"""Hamiltonian Monte Carlo (Duane 1987, Neal 2011): leapfrog steps and a Metropolis test, all chains
at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Density = Callable[[Tensor], tuple[Tensor, Tensor]]  # w (C, D) -> log p (C,), ∇log p (C, D)
POWER = 0.5 * math.pi  # c of ``step``
DIVERGENCE = 1000.0  # the energy error from which a trajectory counts as divergent


class State(NamedTuple):
    """Position (C, D), its log density (C,) and gradient (C, D)."""

    position: Tensor
    log_prob: Tensor
    gradient: Tensor


class Info(NamedTuple):
    """Statistics of a step, (C,) each: mean acceptance probability, divergence, number of
    gradients.

    ``gain``: of ``step`` with a number of leapfrogs for each chain, what ``adaptation.lengthen``
    needs.
    """

    accept: Tensor
    divergent: Tensor
    leapfrogs: Tensor
    gain: Tensor | None = None


class Point(NamedTuple):
    """A point of a trajectory: position, momentum, gradient (C, D) and log density (C,)."""

    position: Tensor
    momentum: Tensor
    gradient: Tensor
    log_prob: Tensor


S = TypeVar("S", bound=tuple[Tensor, ...])


def init(position: Tensor, density: Density) -> State:
    """Chains that start at these positions (C, D)."""
    return State(position, *density(position))


def leapfrog(point: Point, density: Density, step_size: Tensor, inverse_mass: Tensor) -> Point:
    """p ← p + ½ε·∇log p(w);  w ← w + ε·M⁻¹p;  p ← p + ½ε·∇log p(w).  ε (C, 1), M⁻¹ (C, D) or
    (D,).
    """
    half = 0.5 * step_size
    momentum = torch.addcmul(point.momentum, half, point.gradient)
    position = torch.addcmul(point.position, step_size * inverse_mass, momentum)
    log_prob, gradient = density(position)
    return Point(position, torch.addcmul(momentum, half, gradient), gradient, log_prob)


def energy(point: Point, inverse_mass: Tensor) -> Tensor:
    """H = −log p(w) + ½·pᵀM⁻¹p, (C,); infinite where it is not a number."""
    twice = torch.linalg.vecdot(point.momentum, point.momentum * inverse_mass)
    return (0.5 * twice - point.log_prob).nan_to_num(math.inf, math.inf, -math.inf)


def start(state: State, noise: Tensor, inverse_mass: Tensor) -> Point:
    """The start of a trajectory with momentum p = M^½·ξ."""
    return Point(state.position, noise * inverse_mass.rsqrt(), state.gradient, state.log_prob)


def step(
    state: State,
    density: Density,
    noise: Tensor,
    uniform: Tensor,
    step_size: Tensor,
    inverse_mass: Tensor,
    leapfrogs: int | Tensor,
) -> tuple[State, Info]:
    """One trajectory of ``leapfrogs`` steps, accepted with probability min(1, exp(H − H')).

    ``noise`` (C, D) normal, ``uniform`` (C,) on [0, 1), ``step_size`` (C,), ``inverse_mass`` M⁻¹
    (C, D) or (D,), ``leapfrogs`` one number or (C,). These give a gain by time of J·t^−c, for the
    squared jump J = (w' − w)ᵀM(w' − w)
    and its probability a: a·t^(c+1)·d(J·t^−c)/dt = a·(2t·(w' − w)ᵀp' − c·J). In a standard normal
    distribution J is 2·(1 − cos t) per dimension, and with c = π/2 the largest J·t^−c is that of an
    independent draw, t = π/2.
    """
    first = point = start(state, noise, inverse_mass)
    counts = leapfrogs if isinstance(leapfrogs, Tensor) else torch.full_like(step_size, leapfrogs)
    for number in range(leapfrogs if isinstance(leapfrogs, int) else int(leapfrogs.max())):
        new = leapfrog(point, density, step_size.unsqueeze(-1), inverse_mass)
        point = new if isinstance(leapfrogs, int) else choose(number < counts, new, point)
    fall = energy(first, inverse_mass) - energy(point, inverse_mass)
    accept = fall.clamp(max=0).exp()
    info = Info(accept, fall < -DIVERGENCE, counts)
    if isinstance(leapfrogs, Tensor):
        jump, twice = point.position - first.position, 2 * (counts * step_size).unsqueeze(-1)
        gain = accept * torch.linalg.vecdot(
            jump, twice * point.momentum - POWER * jump / inverse_mass
        )
        info = info._replace(gain=gain.nan_to_num(0.0, 0.0, 0.0))
    return choose(
        uniform < accept, State(point.position, point.log_prob, point.gradient), state
    ), info


def choose(mask: Tensor, yes: S, no: S) -> S:
    """Chain by chain, ``yes`` where the mask (C,) is true and ``no`` elsewhere."""
    wide = mask.unsqueeze(-1)
    return type(yes)(
        *(torch.where(mask if a.ndim == 1 else wide, a, b) for a, b in zip(yes, no, strict=True))
    )


def reasonable_step(
    state: State,
    density: Density,
    noise: Tensor,
    step_size: Tensor,
    inverse_mass: Tensor,
    most: int = 50,
) -> Tensor:
    """A step size for each chain (C,) whose single leapfrog step is accepted with probability near
    0.8.

    It is doubled, or halved, until the probability crosses 0.8 (Hoffman & Gelman 2014, algorithm
    4).
    """
    first = start(state, noise, inverse_mass)
    before = energy(first, inverse_mass)
    grows, running = None, torch.ones_like(step_size, dtype=torch.bool)
    for _ in range(most):
        point = leapfrog(first, density, step_size.unsqueeze(-1), inverse_mass)
        good = before - energy(point, inverse_mass) > math.log(0.8)
        grows = good if grows is None else grows
        running = running & (good == grows)
        if not bool(running.any()):
            break
        step_size = torch.where(
            running, torch.where(grows, 2 * step_size, 0.5 * step_size), step_size
        )
    return step_size
