"""ODE solvers of ż = f(t, z) with a step size for every row.

Rows do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from bayou.flows.core.transform import InversionError, read_flag

State = tuple[Tensor, ...]  # tensors (*batch, *event); the events may differ
Field = Callable[[Tensor, State], State]  # (t, state) → derivative; t (*batch)

# Dormand & Prince 1980: nodes, stages, and fifth order less fourth.
_NODES = (0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
_STAGES: tuple[tuple[float, ...], ...] = (
    (),
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_ERROR_WEIGHTS = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)

EVALUATIONS_PER_STEP = 6  # of dopri5, which reuses the last slope of the step before
STEP_SAFETY = 0.9  # factor of the step that the error estimate suggests
MIN_STEP_CHANGE = 0.2
MAX_STEP_CHANGE = 10.0
MIN_ERROR = 1e-10  # of the estimate, for the next step


def rk4(
    field: Field,
    state: State,
    start: float,
    stop: float,
    steps: int,
    checkpoint: bool = False,
    widths: Tensor | None = None,
) -> tuple[State, int]:
    """Solve an ODE by the classical Runge–Kutta method, with error O(h⁴).

    Args:
        field: f.
        state: z at ``start``.
        start: the first time.
        stop: the last time.
        steps: the number of steps.
        checkpoint: whether to recompute every step in the backward pass; False by default.
        widths: positive numbers (steps,) that the steps are proportional to; equal by default.

    Returns:
        The state at ``stop``, and the number of evaluations of f.
    """
    sizes: Sequence[float] | Tensor = [(stop - start) / steps] * steps
    if widths is not None:
        sizes = (stop - start) * widths / widths.sum()

    def step(t: Tensor, h: Any, *state: Tensor) -> State:
        k1 = field(t, state)
        k2 = field(t + h / 2, _advance(state, (k1,), (h / 2,)))
        k3 = field(t + h / 2, _advance(state, (k2,), (h / 2,)))
        k4 = field(t + h, _advance(state, (k3,), (h,)))
        return _advance(state, (k1, k2, k3, k4), (h / 6, h / 3, h / 3, h / 6))

    for i, h in enumerate(sizes):
        elapsed = i * h if widths is None else sizes[:i].sum()  # type: ignore[union-attr]
        t = torch.full_like(state[-1], start) + elapsed
        state = _run_step(step, checkpoint, t, h, *state)
    return state, 4 * steps


def dopri5(
    field: Field,
    state: State,
    start: float,
    stop: float,
    tolerance: float,
    max_steps: int = 1000,
    checkpoint: bool = False,
) -> tuple[State, int]:
    """Solve an ODE by the method of Dormand and Prince, with adaptive steps for every row.

    A step is accepted if the root mean square of error/(tolerance·(1 + |z|)) over the entries of a
    row is at most 1. The steps are chosen without gradients and repeated with them, so that
    rejected steps are not part of the graph.

    Args:
        field: f.
        state: z at ``start``.
        start: the first time.
        stop: the last time.
        tolerance: of the error of a step.
        max_steps: the largest number of steps, with rejected ones; 1000 by default.
        checkpoint: whether to recompute every step in the backward pass; False by default.

    Returns:
        The state at ``stop``, and the number of evaluations of f.

    Raises:
        InversionError: if a row does not reach ``stop``.
    """
    with torch.no_grad():
        constants = tuple(tensor.detach() for tensor in state)
        final, sizes, evaluations = _choose_steps(
            field, constants, start, stop, tolerance, max_steps
        )
    if not torch.is_grad_enabled():
        return final, evaluations
    t = torch.full_like(state[-1], start)
    for h in sizes:
        state = _run_step(
            lambda t, h, *state: _take_step(field, t, h, state)[0], checkpoint, t, h, *state
        )
        t = t + h
    return state, evaluations + EVALUATIONS_PER_STEP * len(sizes)


def _choose_steps(
    field: Field,
    state: State,
    start: float,
    stop: float,
    tolerance: float,
    max_steps: int,
) -> tuple[State, list[Tensor], int]:
    """Return the state at ``stop``, the steps of every row, and the number of evaluations.

    Steps are signed, and 0 where one was rejected.
    """
    sign = 1.0 if stop > start else -1.0
    t = torch.full_like(state[-1], start)
    slope = field(t, state)
    h = sign * _first_step(state, slope, abs(stop - start), tolerance)
    sizes: list[Tensor] = []
    evaluations = 1
    for _ in range(max_steps):
        remaining = stop - t
        is_last = h.abs() >= remaining.abs() * (1 - 1e-12)
        h = torch.where(is_last, remaining, h)
        new_state, slopes = _take_step(field, t, h, state, slope)
        evaluations += EVALUATIONS_PER_STEP
        error = _step_error(slopes, h, state, new_state, tolerance)
        is_accepted = (error <= 1) & (remaining != 0)
        if bool(is_accepted.any()):
            sizes.append(torch.where(is_accepted, h, 0.0))
        state = _select_rows(is_accepted, new_state, state)
        slope = _select_rows(is_accepted, slopes[-1], slope)
        new_t = torch.where(is_last, torch.full_like(t, stop), t + h)
        t = torch.where(is_accepted, new_t, t)
        if bool((t == stop).all()):
            return state, sizes or [torch.zeros_like(t)], evaluations
        h = h * _step_change(error)
        has_vanished = (t + h == t) & (t != stop)
        if bool(has_vanished.any()):
            break
    row = int((t.flatten() != stop).nonzero()[0])
    raise InversionError(
        f"the solver stopped at t = {t.flatten()[row].item():.4g} of {stop:g} in row {row} after "
        f"{len(sizes)} steps, with a step of {h.flatten()[row].item():.1e}: the field is stiff or "
        f"not finite there; use a smoother field or a larger tolerance than {tolerance:g}"
    )


def _take_step(
    field: Field,
    t: Tensor,
    h: Tensor,
    state: State,
    first_slope: State | None = None,
) -> tuple[State, list[State]]:
    """Return the state after a step, and the slopes of its stages.

    Args:
        field: f.
        t: times (*batch).
        h: steps (*batch).
        state: z at t.
        first_slope: f(t, z); without it, it is computed, and the last slope, which is needed only
            for the error, is not.
    """
    slopes = [field(t, state) if first_slope is None else first_slope]
    new_state = state
    for node, weights in zip(_NODES[1:], _STAGES[1:], strict=True):
        new_state = tuple(
            tensor + sum_products(tensor_slopes, weights, h)
            for tensor, tensor_slopes in zip(state, zip(*slopes, strict=True), strict=True)
        )
        is_final = node == 1.0 and len(weights) == len(_STAGES) - 1
        if first_slope is None and is_final:
            break
        slopes.append(field(t + node * h, new_state))
    return new_state, slopes


def sum_products(slopes: tuple[Tensor, ...], weights: tuple[float, ...], h: Tensor) -> Tensor:
    """Return h·Σ w_i·k_i with a step h for every row.

    Args:
        slopes: k_i (*batch, *event).
        weights: w_i.
        h: steps (*batch).
    """
    total = sum(weight * k for weight, k in zip(weights, slopes, strict=True) if weight)
    return _per_row(h, slopes[0]) * total


def _advance(state: State, slopes: tuple[State, ...], steps: tuple[Any, ...]) -> State:
    """Return z + Σ h_i·k_i."""
    return tuple(
        tensor + sum(h * k for h, k in zip(steps, tensor_slopes, strict=True))
        for tensor, tensor_slopes in zip(state, zip(*slopes, strict=True), strict=True)
    )


def _select_rows(condition: Tensor, accepted: State, rejected: State) -> State:
    """Return the accepted state in some rows, and the rejected one in the rest."""
    return tuple(
        torch.where(_per_row(condition, a), a, b) for a, b in zip(accepted, rejected, strict=True)
    )


def _step_error(
    slopes: list[State],
    h: Tensor,
    state: State,
    new_state: State,
    tolerance: float,
) -> Tensor:
    """Return the error of a step in units of the tolerance: (*batch)."""
    error = tuple(
        sum_products(tensor_slopes, _ERROR_WEIGHTS, h)
        for tensor_slopes in zip(*slopes, strict=True)
    )
    return _norm(error, state, new_state, tolerance)


def _step_change(error: Tensor) -> Tensor:
    """Return the factor of the next step, (1/error)^(1/5) within limits."""
    change = (STEP_SAFETY * error.clamp_min(MIN_ERROR) ** -0.2).nan_to_num(nan=MIN_STEP_CHANGE)
    change = change.clamp(MIN_STEP_CHANGE, MAX_STEP_CHANGE)
    return torch.where(error.isfinite(), change, MIN_STEP_CHANGE)


def _norm(values: State, old: State, new: State, tolerance: float) -> Tensor:
    """Return the root mean square of values/(tolerance·(1 + |z|)) over a row: (*batch)."""
    batch = old[-1].shape
    scaled = [
        (value / (tolerance * (1 + torch.maximum(a.abs(), b.abs())))).reshape(*batch, -1)
        for value, a, b in zip(values, old, new, strict=True)
    ]
    return torch.cat(scaled, -1).square().mean(-1).sqrt()


def _first_step(state: State, slope: State, span: float, tolerance: float) -> Tensor:
    """Return a hundredth of the time in which the state changes by its own size.

    Hairer, Nørsett & Wanner 1993, II.4.
    """
    zeros = tuple(torch.zeros_like(tensor) for tensor in state)
    size = _norm(state, zeros, zeros, 1.0)
    speed = _norm(slope, zeros, zeros, 1.0)
    guess = 0.01 * (1 + size) / speed.clamp_min(1e-10)
    return guess.clamp(max=span * min(1.0, 10 * tolerance**0.2)).clamp_min(1e-6 * span)


def _per_row(values: Tensor, tensor: Tensor) -> Tensor:
    """Return values (*batch) of rows with axes of size 1 for the event of a tensor."""
    return values.reshape(values.shape + (1,) * (tensor.ndim - values.ndim))


def _run_step(step: Callable[..., State], checkpoint: bool, *inputs: Any) -> State:
    """Return the result of a step, recomputed in the backward pass if it is a checkpoint."""
    if not (checkpoint and torch.is_grad_enabled()):
        return step(*inputs)
    if read_flag(torch.ones((), dtype=torch.bool)) is None:  # compiled or recorded
        return step(*inputs)
    state: State = recompute(step, *inputs, use_reentrant=False)
    return state
