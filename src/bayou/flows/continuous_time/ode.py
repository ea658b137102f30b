"""ODE solvers of ż = f(t, z) with a step size for every row, so that rows do not depend on each
other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from bayou.flows.core.transform import InversionError, read_flag

State = tuple[Tensor, ...]  # tensors (*batch, *event), each with an event of its own
Field = Callable[[Tensor, State], State]  # (t, state) → derivative; t (*batch)

# Dormand & Prince 1980: nodes, stages, and fifth order less fourth.
_C = (0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
_A: tuple[tuple[float, ...], ...] = (
    (),
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_E = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


def rk4(
    field: Field,
    state: State,
    start: float,
    stop: float,
    steps: int,
    checkpoint: bool = False,
    widths: Tensor | None = None,
) -> tuple[State, int]:
    """The classical Runge–Kutta method, with error O(h⁴): the final state and the number of
    evaluations of f.

    The steps are equal, or proportional to ``widths`` (steps,).
    """
    sizes: Sequence[float] | Tensor = [(stop - start) / steps] * steps
    if widths is not None:
        sizes = (stop - start) * widths / widths.sum()

    def step(t: Tensor, h: Any, *now: Tensor) -> State:
        k1 = field(t, now)
        k2 = field(t + h / 2, _moved(now, (k1,), (h / 2,)))
        k3 = field(t + h / 2, _moved(now, (k2,), (h / 2,)))
        k4 = field(t + h, _moved(now, (k3,), (h,)))
        return _moved(now, (k1, k2, k3, k4), (h / 6, h / 3, h / 3, h / 6))

    for i, h in enumerate(sizes):
        t = torch.full_like(state[-1], start) + (i * h if widths is None else sizes[:i].sum())  # type: ignore[union-attr]
        state = _run(step, checkpoint, t, h, *state)
    return state, 4 * steps


def dopri5(
    field: Field,
    state: State,
    start: float,
    stop: float,
    tolerance: float,
    most: int = 1000,
    checkpoint: bool = False,
) -> tuple[State, int]:
    """The fifth-order method of Dormand and Prince, with adaptive steps for every row.

    A step is accepted if the root mean square of error/(tolerance·(1 + |z|)) over the entries of a
    row is at most 1. Steps are found without gradients and repeated with them, so that rejected
    steps are not part of the graph.
    """
    sign = 1.0 if stop > start else -1.0
    with torch.no_grad():
        values, sizes, evaluations = _adapt(
            field, tuple(part.detach() for part in state), start, stop, sign, tolerance, most
        )
    if torch.is_grad_enabled():
        t = torch.full_like(state[-1], start)
        for h in sizes:
            state = _run(lambda t, h, *now: _stages(field, t, h, now)[0], checkpoint, t, h, *state)
            t = t + h
        values, evaluations = state, evaluations + 6 * len(sizes)
    return values, evaluations


def _adapt(
    field: Field, state: State, start: float, stop: float, sign: float, tolerance: float, most: int
) -> tuple[State, list[Tensor], int]:
    """The state at ``stop``, the steps (signed, 0 where rejected), and the number of
    evaluations.
    """
    t = torch.full_like(state[-1], start)
    first = field(t, state)
    h = sign * _first_step(state, first, abs(stop - start), tolerance)
    sizes: list[Tensor] = []
    evaluations = 1
    for _ in range(most):
        left = stop - t
        last = h.abs() >= left.abs() * (1 - 1e-12)
        h = torch.where(last, left, h)
        new, slopes = _stages(field, t, h, state, first)
        evaluations += 6
        error = _norm(
            tuple(sum_products(k, _E, h) for k in zip(*slopes, strict=True)), state, new, tolerance
        )
        accept = (error <= 1) & (left != 0)
        if bool(accept.any()):
            sizes.append(torch.where(accept, h, 0.0))
        state = tuple(torch.where(_like(accept, a), a, b) for a, b in zip(new, state, strict=True))
        first = tuple(
            torch.where(_like(accept, a), a, b) for a, b in zip(slopes[-1], first, strict=True)
        )
        t = torch.where(accept, torch.where(last, torch.full_like(t, stop), t + h), t)
        if bool((t == stop).all()):
            return state, sizes or [torch.zeros_like(t)], evaluations
        grow = (0.9 * error.clamp_min(1e-10) ** -0.2).nan_to_num(nan=0.2).clamp(0.2, 10.0)
        h = h * torch.where(error.isfinite(), grow, 0.2)
        if bool(((t + h == t) & (t != stop)).any()):
            break
    row = int((t.flatten() != stop).nonzero()[0])
    raise InversionError(
        f"the solver stopped at t = {t.flatten()[row].item():.4g} of {stop:g} in row {row} after {len(sizes)} steps, "
        f"with a step of {h.flatten()[row].item():.1e}: the field is stiff or not finite there; use a smoother field "
        f"or a larger tolerance than {tolerance:g}"
    )


def _stages(
    field: Field, t: Tensor, h: Tensor, state: State, first: State | None = None
) -> tuple[State, list[State]]:
    slopes = [field(t, state) if first is None else first]
    new = state
    for c, row in zip(_C[1:], _A[1:], strict=True):
        new = tuple(
            part + sum_products(k, row, h)
            for part, k in zip(state, zip(*slopes, strict=True), strict=True)
        )
        if (
            first is None and c == 1.0 and len(row) == 6
        ):  # the seventh slope is needed only for the error
            break
        slopes.append(field(t + c * h, new))
    return new, slopes


def sum_products(slopes: tuple[Tensor, ...], weights: tuple[float, ...], h: Tensor) -> Tensor:
    """h·Σ w_i·k_i with a step h for every row."""
    total = sum(w * k for w, k in zip(weights, slopes, strict=True) if w)
    return _like(h, slopes[0]) * total


def _moved(state: State, slopes: tuple[State, ...], weights: tuple[Any, ...]) -> State:
    return tuple(
        part + sum(w * k for w, k in zip(weights, own, strict=True))
        for part, own in zip(state, zip(*slopes, strict=True), strict=True)
    )


def _norm(error: State, old: State, new: State, tolerance: float) -> Tensor:
    """Root mean square of error/(tolerance·(1 + |z|)) over all numbers of a row: (*batch)."""
    batch = old[-1].shape
    scaled = [
        (e / (tolerance * (1 + torch.maximum(a.abs(), b.abs())))).reshape(*batch, -1)
        for e, a, b in zip(error, old, new, strict=True)
    ]
    return torch.cat(scaled, -1).square().mean(-1).sqrt()


def _first_step(state: State, slope: State, span: float, tolerance: float) -> Tensor:
    """A hundredth of the time in which the state changes by its own size (Hairer, Nørsett & Wanner
    1993, II.4).
    """
    zeros = tuple(torch.zeros_like(part) for part in state)
    size, speed = _norm(state, zeros, zeros, 1.0), _norm(slope, zeros, zeros, 1.0)
    guess = 0.01 * (1 + size) / speed.clamp_min(1e-10)
    return guess.clamp(max=span * min(1.0, 10 * tolerance**0.2)).clamp_min(1e-6 * span)


def _like(row: Tensor, part: Tensor) -> Tensor:
    return row.reshape(row.shape + (1,) * (part.ndim - row.ndim))


def _run(step: Callable[..., State], checkpoint: bool, *inputs: Any) -> State:
    if (
        checkpoint
        and torch.is_grad_enabled()
        and read_flag(torch.ones((), dtype=torch.bool)) is not None
    ):
        found: State = recompute(step, *inputs, use_reentrant=False)
        return found
    return step(*inputs)
