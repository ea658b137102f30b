"""The no-U-turn sampler, multinomial as in Stan (Hoffman & Gelman 2014, Betancourt 2017), all
chains at once.

Trajectories grow by doubling, in all chains together. The tree is a loop over leaves n, whose
binary digits determine the subtrees that end there, so that one call of the density serves all
chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bayou.kernels.hmc import (
    DIVERGENCE,
    Density,
    Info,
    Point,
    State,
    choose,
    energy,
    init,
    leapfrog,
    start,
)

__all__ = ["Info", "State", "init", "step"]

Uniforms = Callable[[int], Tensor]  # depth -> (C, 2^depth + 2) on [0, 1)


class Subtree(NamedTuple):
    """2^depth new leaves: first momentum, last point, Σ momenta, log Σ weights, the leaf drawn,
    which are valid.
    """

    first: Tensor
    last: Point
    total: Tensor
    log_weight: Tensor
    picked: State
    valid: Tensor
    accepts: Tensor  # Σ over leaves of min(1, exp(H₀ − H))
    leaves: Tensor
    divergent: Tensor


def step(
    state: State,
    density: Density,
    noise: Tensor,
    uniforms: Uniforms,
    step_size: Tensor,
    inverse_mass: Tensor,
    max_depth: int = 10,
) -> tuple[State, Info]:
    """One transition: double the trajectory until it turns back, and draw a leaf with probability ∝
    exp(−H).

    Inside a subtree leaves are drawn by weight; between the old tree and the new half the new one
    is preferred (biased progressive sampling). A trajectory turns where M⁻¹ρ·p ≤ 0 at one of its
    ends, ρ = Σ p over its leaves; each subtree is tested, and each with the neighboring leaf of its
    sibling, as in Stan. ``noise`` (C, D), ``step_size`` (C,), ``inverse_mass`` (C, D) or (D,). An
    energy error over 1000 is a divergence and ends the trajectory.
    """
    origin = left = right = start(state, noise, inverse_mass)
    before = energy(origin, inverse_mass)
    total, log_weight = origin.momentum, torch.zeros_like(before)
    running = torch.ones_like(before, dtype=torch.bool)
    accepts, leaves, divergent = torch.zeros_like(before), torch.zeros_like(before), ~running
    for depth in range(max_depth):
        u = uniforms(depth)
        log_u, forward = u[:, 1:].log(), u[:, 0] < 0.5
        near, far = choose(forward, right, left), choose(forward, left, right)
        signed = torch.where(forward, step_size, -step_size).unsqueeze(-1)
        tree = _subtree(near, density, signed, inverse_mass, log_u, running, before, depth)
        accepts, leaves, divergent = (
            accepts + tree.accepts,
            leaves + tree.leaves,
            divergent | tree.divergent,
        )
        valid = tree.valid
        state = choose(valid & (log_u[:, -1] < tree.log_weight - log_weight), tree.picked, state)
        left, right = (
            choose(valid & ~forward, tree.last, left),
            choose(valid & forward, tree.last, right),
        )
        ends = [(total + tree.total, far.momentum, tree.last.momentum)]
        if depth:  # with two leaves all three are one
            ends.append((total + tree.first, far.momentum, tree.first))
            ends.append((near.momentum + tree.total, near.momentum, tree.last.momentum))
        running = valid & _straight(ends, inverse_mass)
        total, log_weight = total + tree.total, torch.logaddexp(log_weight, tree.log_weight)
        if not bool(running.any()):
            break
    return state, Info(accepts / leaves, divergent, leaves)


def _subtree(
    point: Point, density: Density, step_size: Tensor, inverse_mass: Tensor, log_u: Tensor, running: Tensor,
    before: Tensor, depth: int,
) -> Subtree:  # fmt: skip
    """2^depth leapfrog steps from a point; a subtree with a U-turn or a divergence is invalid."""
    zero = torch.zeros_like(before)
    total, log_weight = torch.zeros_like(point.momentum), torch.full_like(before, -math.inf)
    valid, accepts, leaves, divergent = running, zero, zero, torch.zeros_like(running)
    seen: dict[int, tuple[Tensor, Tensor]] = {}  # leaf → its momentum, and Σ momenta up to it
    picked = State(point.position, point.log_prob, point.gradient)
    for n in range(2**depth):
        point = leapfrog(point, density, step_size, inverse_mass)
        total = total + point.momentum
        seen[n] = point.momentum, total
        gain = before - energy(point, inverse_mass)
        accepts = torch.addcmul(accepts, gain.clamp(max=0).exp(), valid)
        leaves = leaves + valid
        lost = gain < -DIVERGENCE
        divergent, valid = divergent | (valid & lost), valid & ~lost
        log_weight = torch.logaddexp(log_weight, gain)
        new = State(point.position, point.log_prob, point.gradient)
        picked = new if n == 0 else choose(log_u[:, n] < gain - log_weight, new, picked)
        size, ends = 2, []
        while (n + 1) % size == 0:
            ends += _ends(seen, n + 1 - size, n)
            size *= 2
        if ends:
            valid = valid & _straight(ends, inverse_mass)
        for inner in range(
            n + 2 - size // 2, n
        ):  # of a whole subtree only its ends are needed again
            seen.pop(inner, None)
        if not bool(valid.any()):
            break
    return Subtree(seen[0][0], point, total, log_weight, picked, valid, accepts, leaves, divergent)


def _ends(
    seen: dict[int, tuple[Tensor, Tensor]], a: int, b: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(ρ, first and last momentum) of leaves a..b, and of each half with the next leaf of the
    other.
    """
    p_a, sum_a = seen[a]
    p_b, sum_b = seen[b]
    found = [(sum_b - sum_a + p_a, p_a, p_b)]
    if b - a > 1:
        m = (a + b) // 2  # the last leaf of the left half
        (p_m, sum_m), (p_next, sum_next) = seen[m], seen[m + 1]
        found += [(sum_next - sum_a + p_a, p_a, p_next), (sum_b - sum_m + p_m, p_m, p_b)]
    return found


def _straight(ends: list[tuple[Tensor, Tensor, Tensor]], inverse_mass: Tensor) -> Tensor:
    """Whether M⁻¹ρ·p > 0 at both ends of all these trajectories: (C,)."""
    good = None
    for rho, first, last in ends:
        sharp = rho * inverse_mass
        both = (
            torch.minimum(torch.linalg.vecdot(sharp, first), torch.linalg.vecdot(sharp, last)) > 0
        )
        good = both if good is None else good & both
    assert good is not None
    return good
