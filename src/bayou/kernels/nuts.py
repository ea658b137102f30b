"""The no-U-turn sampler, multinomial as in Stan (Hoffman & Gelman 2014, Betancourt 2017).

Trajectories grow by doubling, in all chains together. The tree is a loop over leaves n, whose
binary digits determine the subtrees that end there, so that one call of the density serves all
chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from bayou.kernels.hmc import (
    DIVERGENCE,
    Density,
    HamiltonianState,
    Info,
    PhasePoint,
    choose,
    energy,
    init,
    leapfrog,
    start,
)

__all__ = ["HamiltonianState", "Info", "init", "step"]

Uniforms = Callable[[int], Tensor]  # depth -> (C, 2^depth + 2) on [0, 1)
Leaves = dict[int, tuple[Tensor, Tensor]]  # leaf → its momentum, and Σ momenta up to it
Ends = tuple[Tensor, Tensor, Tensor]  # Σ momenta ρ, first and last momentum of a trajectory


class Subtree(NamedTuple):
    """The 2^depth leaves of a new half of a trajectory."""

    first: Tensor  # the first momentum
    last: PhasePoint
    total: Tensor  # Σ momenta
    log_weight: Tensor  # log Σ weights
    selected: HamiltonianState  # the leaf that was drawn
    is_valid: Tensor
    accepts: Tensor  # Σ over leaves of min(1, exp(H₀ − H))
    leaves: Tensor  # their number
    is_divergent: Tensor


def step(
    state: HamiltonianState,
    density: Density,
    noise: Tensor,
    uniforms: Uniforms,
    step_size: Tensor,
    inverse_mass: Tensor,
    max_depth: int = 10,
) -> tuple[HamiltonianState, Info]:
    """Double a trajectory until it turns back, and draw a leaf with probability ∝ exp(−H).

    Inside a subtree leaves are drawn by weight; between the old tree and the new half the new one
    is preferred (biased progressive sampling). A trajectory turns where M⁻¹ρ·p ≤ 0 at one of its
    ends, ρ = Σ p over its leaves; each subtree is tested, and each with the neighboring leaf of its
    sibling, as in Stan. An energy error over 1000 is a divergence and ends the trajectory.

    Args:
        state: the chains.
        density: log p and its gradient.
        noise: of the momentum, normal, (C, D).
        uniforms: returns uniform noise on [0, 1) of a depth, (C, 2^depth + 2).
        step_size: ε, (C,).
        inverse_mass: M⁻¹, (C, D) or (D,).
        max_depth: at most 2^max_depth steps; 10 by default.
    """
    origin = start(state, noise, inverse_mass)
    left = origin
    right = origin
    initial_energy = energy(origin, inverse_mass)
    total = origin.momentum
    log_weight = torch.zeros_like(initial_energy)
    is_running = torch.ones_like(initial_energy, dtype=torch.bool)
    accepts = torch.zeros_like(initial_energy)
    leaves = torch.zeros_like(initial_energy)
    is_divergent = ~is_running
    for depth in range(max_depth):
        u = uniforms(depth)
        log_u = u[:, 1:].log()
        is_forward = u[:, 0] < 0.5
        near = choose(is_forward, right, left)
        far = choose(is_forward, left, right)
        signed_step = torch.where(is_forward, step_size, -step_size).unsqueeze(-1)
        tree = _grow_subtree(
            near, density, signed_step, inverse_mass, log_u, is_running, initial_energy, depth
        )
        accepts = accepts + tree.accepts
        leaves = leaves + tree.leaves
        is_divergent = is_divergent | tree.is_divergent
        is_valid = tree.is_valid
        is_selected = is_valid & (log_u[:, -1] < tree.log_weight - log_weight)
        state = choose(is_selected, tree.selected, state)
        left = choose(is_valid & ~is_forward, tree.last, left)
        right = choose(is_valid & is_forward, tree.last, right)
        ends = [(total + tree.total, far.momentum, tree.last.momentum)]
        if depth:  # with two leaves all three are one
            ends.append((total + tree.first, far.momentum, tree.first))
            ends.append((near.momentum + tree.total, near.momentum, tree.last.momentum))
        is_running = is_valid & _is_straight(ends, inverse_mass)
        total = total + tree.total
        log_weight = torch.logaddexp(log_weight, tree.log_weight)
        if not bool(is_running.any()):
            break
    return state, Info(accepts / leaves, is_divergent, leaves)


def _grow_subtree(
    point: PhasePoint,
    density: Density,
    step_size: Tensor,
    inverse_mass: Tensor,
    log_u: Tensor,
    is_running: Tensor,
    initial_energy: Tensor,
    depth: int,
) -> Subtree:
    """Take 2^depth leapfrog steps from a point.

    A subtree with a U-turn or a divergence is not valid.
    """
    zero = torch.zeros_like(initial_energy)
    total = torch.zeros_like(point.momentum)
    log_weight = torch.full_like(initial_energy, -math.inf)
    is_valid = is_running
    accepts = zero
    leaves = zero
    is_divergent = torch.zeros_like(is_running)
    momenta: Leaves = {}
    selected = point.state
    for n in range(2**depth):
        point = leapfrog(point, density, step_size, inverse_mass)
        total = total + point.momentum
        momenta[n] = point.momentum, total
        gain = initial_energy - energy(point, inverse_mass)
        accepts = torch.addcmul(accepts, gain.clamp(max=0).exp(), is_valid)
        leaves = leaves + is_valid
        diverges = gain < -DIVERGENCE
        is_divergent = is_divergent | (is_valid & diverges)
        is_valid = is_valid & ~diverges
        log_weight = torch.logaddexp(log_weight, gain)
        selected = choose(log_u[:, n] < gain - log_weight, point.state, selected)
        size = 2
        ends: list[Ends] = []
        while (n + 1) % size == 0:
            ends += _subtree_ends(momenta, n + 1 - size, n)
            size *= 2
        if ends:
            is_valid = is_valid & _is_straight(ends, inverse_mass)
        # of a complete subtree only its ends are needed again
        for inner in range(n + 2 - size // 2, n):
            momenta.pop(inner, None)
        if not bool(is_valid.any()):
            break
    first = momenta[0][0]
    return Subtree(
        first, point, total, log_weight, selected, is_valid, accepts, leaves, is_divergent
    )


def _subtree_ends(momenta: Leaves, a: int, b: int) -> list[Ends]:
    """Return the ends of leaves a..b, and of each half with the next leaf of the other."""
    p_a, sum_a = momenta[a]
    p_b, sum_b = momenta[b]
    ends = [(sum_b - sum_a + p_a, p_a, p_b)]
    if b - a > 1:
        middle = (a + b) // 2  # the last leaf of the left half
        p_m, sum_m = momenta[middle]
        p_next, sum_next = momenta[middle + 1]
        ends.append((sum_next - sum_a + p_a, p_a, p_next))
        ends.append((sum_b - sum_m + p_m, p_m, p_b))
    return ends


def _is_straight(ends: list[Ends], inverse_mass: Tensor) -> Tensor:
    """Return whether M⁻¹ρ·p > 0 at both ends of all these trajectories: (C,)."""
    tests = []
    for rho, first, last in ends:
        velocity = rho * inverse_mass
        at_first = torch.linalg.vecdot(velocity, first)
        at_last = torch.linalg.vecdot(velocity, last)
        tests.append(torch.minimum(at_first, at_last) > 0)
    return reduce(torch.logical_and, tests)
