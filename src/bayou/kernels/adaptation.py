"""Warm-up of HMC and NUTS: a step size, a diagonal mass and, for HMC, a length of trajectories for
each chain.

Dual averaging (Hoffman & Gelman 2014), Stan's windows of growing length for the mass, and Adam for
the length.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

SHRINK, FAST, OFFSET, DECAY = 10.0, 0.05, 10.0, 0.75  # μ = log(10·ε), and γ, t₀, κ of the paper
RATE, MEMORY = (
    0.1,
    0.95,
)  # of the steps of a log length, and of the mean of squares that scales them
FIRST_LEAPFROGS = 20  # of a length before it is adapted
FIRST, WINDOW, LAST = (
    75,
    25,
    50,
)  # transitions before the first window, in it, and after the last one


class State(NamedTuple):
    """Dual averaging (C,), a running variance (C, D), log lengths, their average and the mean
    square of gains (C,).
    """

    log_step: Tensor
    log_average: Tensor
    error: Tensor
    center: Tensor
    tuned: int
    inverse_mass: Tensor
    mean: Tensor
    squares: Tensor
    seen: int
    log_length: Tensor
    log_average_length: Tensor
    square: Tensor


def init(position: Tensor, step_size: Tensor) -> State:
    """Before the first transition: these step sizes (C,), unit mass."""
    zero = torch.zeros_like(step_size)
    blank = torch.zeros_like(position)
    length = torch.full_like(zero, math.log(FIRST_LEAPFROGS))
    state = State(
        zero, zero, zero, zero, 0, torch.ones_like(position), blank, blank, 0, length, length, zero
    )
    return restart(state, step_size)


def restart(state: State, step_size: Tensor) -> State:
    """Restart averages at these step sizes (C,); until the first transition a length is a number of
    them.
    """
    log_step = step_size.log()
    zero = torch.zeros_like(log_step)
    length = (
        state.log_average_length if state.tuned else state.log_length + log_step - state.log_step
    )
    return State(
        log_step, log_step, zero, log_step + math.log(SHRINK), 0, *state[5:9], length, length, zero
    )


def tune(state: State, accept: Tensor, target: float) -> State:
    """One step of dual averaging towards the acceptance rate ``target``.

    s ← (1 − η)·s + η·(δ − a), η = 1/(t + t₀);  log ε = μ − s·√t/γ;  log ε̄ ← t^−κ·log ε + (1 −
    t^−κ)·log ε̄.
    """
    tuned = state.tuned + 1
    eta, weight = 1 / (tuned + OFFSET), tuned**-DECAY
    error = (1 - eta) * state.error + eta * (target - accept.nan_to_num(0.0))
    log_step = state.center - error * (math.sqrt(tuned) / FAST)
    log_average = weight * log_step + (1 - weight) * state.log_average
    return state._replace(log_step=log_step, log_average=log_average, error=error, tuned=tuned)


def lengthen(state: State, gain: Tensor, most: int) -> State:
    """After ``tune``: a step of Adam without momentum on log T, at most ``most`` step sizes, by a
    gain (C,).

    It ascends E[a·J]·T^−c, squared jumps by length (``hmc.step``), with T in units of the mass.
    """
    square, weight = MEMORY * state.square + (1 - MEMORY) * gain.square(), state.tuned**-DECAY
    scaled = (
        gain * ((1 - MEMORY**state.tuned) / square.clamp_min(torch.finfo(gain.dtype).tiny)).sqrt()
    )
    length = state.log_length + RATE * scaled
    length = length.clamp(state.log_average, state.log_average + math.log(most))
    average = weight * length + (1 - weight) * state.log_average_length
    return state._replace(log_length=length, log_average_length=average, square=square)


def observe(state: State, position: Tensor) -> State:
    """Update the running variance with a position (C, D) (Welford)."""
    seen = state.seen + 1
    deviation = position - state.mean
    mean = state.mean + deviation / seen
    return state._replace(
        mean=mean, squares=state.squares + deviation * (position - mean), seen=seen
    )


def settle(state: State) -> State:
    """The inverse mass from the variance of the window, shrunk towards 0.001 with the weight of
    five draws.

    Lengths are in units of the mass: they change by the geometric mean of its changes.
    """
    n, blank = state.seen, torch.zeros_like(state.mean)
    variance = state.squares / max(n - 1, 1)
    inverse_mass = variance * (n / (n + 5)) + 1e-3 * (5 / (n + 5))
    length = state.log_length + 0.5 * (state.inverse_mass / inverse_mass).log().mean(-1)
    return state._replace(
        inverse_mass=inverse_mass, mean=blank, squares=blank, seen=0, log_average_length=length
    )


def windows(warmup: int) -> tuple[range, frozenset[int]]:
    """The transitions that inform the mass, and the last transition of each window.

    75 transitions for the step size alone, windows of 25, 50, 100, ..., the last one extended to
    the end, and 50 for the step size again; a short warm-up is divided 15 : 75 : 10, and one under
    20 adapts only the step size.
    """
    if warmup < 20:
        return range(0), frozenset()
    first, size, last = FIRST, WINDOW, LAST
    if first + size + last > warmup:
        first, last = int(0.15 * warmup), int(0.1 * warmup)
        size = warmup - first - last
    ends, end, stop = set(), first, warmup - last
    while end < stop:
        end += size
        size *= 2
        if end + size > stop:  # the next one does not fit
            end = stop
        ends.add(end - 1)
    return range(first, stop), frozenset(ends)
