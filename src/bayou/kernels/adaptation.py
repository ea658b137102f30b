"""Warm-up of HMC and NUTS: step sizes, diagonal masses and, for HMC, lengths of trajectories.

Dual averaging (Hoffman & Gelman 2014), Stan's windows of growing length for the mass, and Adam for
the length. Every chain has its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# of dual averaging: μ = log(FIRST_STEP_FACTOR·ε), and γ, t₀, κ of the paper
FIRST_STEP_FACTOR = 10.0
GAMMA = 0.05
OFFSET = 10.0
DECAY = 0.75
LENGTH_RATE = 0.1  # of the steps of a log length
LENGTH_MEMORY = 0.95  # of the mean of squares that scales them
FIRST_LEAPFROGS = 20  # of a length before it is adapted
FIRST_TRANSITIONS = 75  # before the first window
WINDOW_TRANSITIONS = 25  # of the first window
LAST_TRANSITIONS = 50  # after the last window


class AdaptationState(NamedTuple):
    """Dual averaging (C,), a running variance (C, D), and log lengths (C,)."""

    log_step: Tensor
    log_average: Tensor  # of the step sizes
    error: Tensor
    center: Tensor
    tuned: int  # transitions since the restart
    inverse_mass: Tensor
    mean: Tensor
    squares: Tensor
    seen: int  # positions in the running variance
    log_length: Tensor
    log_average_length: Tensor
    square: Tensor  # the mean square of gains


def init(position: Tensor, step_size: Tensor) -> AdaptationState:
    """Return the state before the first transition: these step sizes and unit mass.

    Args:
        position: (C, D).
        step_size: (C,).
    """
    zero = torch.zeros_like(step_size)
    blank = torch.zeros_like(position)
    length = torch.full_like(zero, math.log(FIRST_LEAPFROGS))
    state = AdaptationState(
        log_step=zero,
        log_average=zero,
        error=zero,
        center=zero,
        tuned=0,
        inverse_mass=torch.ones_like(position),
        mean=blank,
        squares=blank,
        seen=0,
        log_length=length,
        log_average_length=length,
        square=zero,
    )
    return restart(state, step_size)


def restart(state: AdaptationState, step_size: Tensor) -> AdaptationState:
    """Restart averages at these step sizes.

    Until the first transition a length is a number of them.

    Args:
        state: the averages.
        step_size: (C,).
    """
    log_step = step_size.log()
    zero = torch.zeros_like(log_step)
    length = state.log_length + log_step - state.log_step
    if state.tuned:
        length = state.log_average_length
    return state._replace(
        log_step=log_step,
        log_average=log_step,
        error=zero,
        center=log_step + math.log(FIRST_STEP_FACTOR),
        tuned=0,
        log_length=length,
        log_average_length=length,
        square=zero,
    )


def tune(state: AdaptationState, accept: Tensor, target: float) -> AdaptationState:
    """Take one step of dual averaging towards an acceptance rate.

    s ← (1 − η)·s + η·(δ − a), η = 1/(t + t₀);  log ε = μ − s·√t/γ;  log ε̄ ← t^−κ·log ε + (1 −
    t^−κ)·log ε̄.

    Args:
        state: the averages.
        accept: a, the acceptance probability of a transition, (C,).
        target: δ.
    """
    tuned = state.tuned + 1
    eta = 1 / (tuned + OFFSET)
    weight = tuned**-DECAY
    error = (1 - eta) * state.error + eta * (target - accept.nan_to_num(0.0))
    log_step = state.center - error * (math.sqrt(tuned) / GAMMA)
    log_average = weight * log_step + (1 - weight) * state.log_average
    return state._replace(log_step=log_step, log_average=log_average, error=error, tuned=tuned)


def lengthen(state: AdaptationState, gain: Tensor, max_leapfrogs: int) -> AdaptationState:
    """Take a step of Adam without momentum on the log lengths T, after ``tune``.

    It ascends E[a·J]·T^−c, squared jumps by length (``hmc.step``), with T in units of the mass.

    Args:
        state: the averages.
        gain: of a transition, (C,).
        max_leapfrogs: the largest length, in step sizes.
    """
    square = LENGTH_MEMORY * state.square + (1 - LENGTH_MEMORY) * gain.square()
    weight = state.tuned**-DECAY
    tiny = torch.finfo(gain.dtype).tiny
    bias_correction = 1 - LENGTH_MEMORY**state.tuned
    scaled_gain = gain * (bias_correction / square.clamp_min(tiny)).sqrt()
    length = state.log_length + LENGTH_RATE * scaled_gain
    length = length.clamp(state.log_average, state.log_average + math.log(max_leapfrogs))
    average = weight * length + (1 - weight) * state.log_average_length
    return state._replace(log_length=length, log_average_length=average, square=square)


def observe(state: AdaptationState, position: Tensor) -> AdaptationState:
    """Update the running variance with a position (Welford).

    Args:
        state: the averages.
        position: (C, D).
    """
    seen = state.seen + 1
    deviation = position - state.mean
    mean = state.mean + deviation / seen
    squares = state.squares + deviation * (position - mean)
    return state._replace(mean=mean, squares=squares, seen=seen)


def settle(state: AdaptationState) -> AdaptationState:
    """Set the inverse mass to the variance of the window, and begin a new window.

    It is shrunk towards 0.001 with the weight of five draws. Lengths are in units of the mass: they
    change by the geometric mean of its changes.

    Args:
        state: the averages.
    """
    n = state.seen
    blank = torch.zeros_like(state.mean)
    variance = state.squares / max(n - 1, 1)
    inverse_mass = variance * (n / (n + 5)) + 1e-3 * (5 / (n + 5))
    length = state.log_length + 0.5 * (state.inverse_mass / inverse_mass).log().mean(-1)
    return state._replace(
        inverse_mass=inverse_mass, mean=blank, squares=blank, seen=0, log_average_length=length
    )


def windows(warmup: int) -> tuple[range, frozenset[int]]:
    """Return the transitions that inform the mass, and the last transition of each window.

    75 transitions for the step size alone, windows of 25, 50, 100, ..., the last one extended to
    the end, and 50 for the step size again; a short warm-up is divided 15 : 75 : 10, and one under
    20 adapts only the step size.

    Args:
        warmup: the number of transitions of the warm-up.
    """
    if warmup < 20:
        return range(0), frozenset()
    first = FIRST_TRANSITIONS
    size = WINDOW_TRANSITIONS
    last = LAST_TRANSITIONS
    if first + size + last > warmup:
        first = int(0.15 * warmup)
        last = int(0.1 * warmup)
        size = warmup - first - last
    ends = set()
    end = first
    stop = warmup - last
    while end < stop:
        end += size
        size *= 2
        if end + size > stop:  # the next one does not fit
            end = stop
        ends.add(end - 1)
    return range(first, stop), frozenset(ends)
