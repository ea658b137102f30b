"""Continuous flows: y = z(1) of ż = v(t, z), z(0) = x (Chen et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayou.flows.continuous_time.fields import Pull, TimeMLP
from bayou.flows.continuous_time.ode import Field, State, dopri5, rk4
from bayou.flows.contractive.residual import pullback
from bayou.flows.core.arguments import as_event, check_size
from bayou.flows.core.transform import Cost, Ladj, Pair, Rows, Symmetric, Transform, sum_event

Trace = Literal["exact", "hutchinson"]
Solver = Literal["rk4", "dopri5"]


class Continuous(Symmetric, Transform):
    r"""y = z(1) of ż = v(t, z), z(0) = x, with ladj = ∫ tr ∂v/∂z dt (Chen et al. 2018).

    The two directions are inverse to each other up to the error of the solver; ``accuracy`` is its
    expected size, which a field that is not smooth enough for its steps exceeds (see ``refine``).
    ``evaluations`` is the number of evaluations of the field in the last pass.

    Args:
        event: the size of a vector, or the shape of an event.
        field: v, called as ``field(t, z)`` or, with a context, ``field(t, z, context)``: t (...), z
            (..., \*event).
        context_dim: the size of the context, 0 for none.
        trace: "exact", with one vector-Jacobian product per dimension, or "hutchinson", εᵀ(∂v/∂z)ε
            with one random ε = ±1 per row and pass; the log-density is then an estimate (Grathwohl
            et al. 2019, FFJORD).
        solver: "rk4" with equal steps, which compiles to one graph, or "dopri5", with adaptive
            steps for every row.
        steps: of "rk4".
        tolerance: of "dopri5".
        checkpoint: recompute every step in the backward pass, so that memory does not grow with the
            number of steps.

    Shapes: x, y (..., \*event), context (..., context_dim), ladj (...).
    """

    forward_kind = inverse_kind = Cost.iterative

    def __init__(
        self,
        event: int | Sequence[int],
        field: nn.Module,
        *,
        context_dim: int = 0,
        trace: Trace = "exact",
        solver: Solver = "rk4",
        steps: int = 32,
        tolerance: float = 1e-6,
        checkpoint: bool = False,
    ) -> None:
        super().__init__()
        if trace not in ("exact", "hutchinson"):
            raise ValueError(f'trace must be "exact" or "hutchinson", got {trace!r}')
        if solver not in ("rk4", "dopri5"):
            raise ValueError(f'solver must be "rk4" or "dopri5", got {solver!r}')
        if not 0 < tolerance < 1:
            raise ValueError(f"tolerance must be between 0 and 1, got {tolerance}")
        self.event_shape = as_event(event, "the dimension")
        self.field, self.context_dim, self.trace, self.solver = field, context_dim, trace, solver
        self.steps, self.tolerance, self.checkpoint = (
            check_size(steps, "the number of steps"),
            tolerance,
            checkpoint,
        )
        self.takes_noise, self.recordable = trace == "hutchinson", solver == "rk4"
        self.ladj_kind = Ladj.estimate if self.takes_noise else Ladj.exact
        self.evaluations = 0
        self.widths: Tensor | None = None  # of the steps: see ``varied_steps``

    @property
    def accuracy(self) -> float:  # type: ignore[override]
        """The expected error of the solver for a smooth field: 100 tolerances, or steps⁻⁴ for RK4.
        A field with Fourier features sin ωt has (ω/steps)⁴/2880, on average a fifth of that at the
        largest ω = π·``field.frequencies``."""
        if self.solver == "dopri5":
            return 100 * self.tolerance
        return (
            max(1.0, (math.pi * getattr(self.field, "frequencies", 0)) ** 4 / 14400) / self.steps**4
        )

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return (torch.where(rows.uniform(*self.event_shape) < 0.5, -1.0, 1.0).to(rows.like),)  # type: ignore[arg-type]

    def _both(
        self, z: Tensor, context: Tensor | None, inverse: bool, probe: Tensor | None = None
    ) -> Pair:
        start, stop = (1.0, 0.0) if inverse else (0.0, 1.0)
        batch = z.shape[: z.ndim - len(self.event_shape)]
        if context is not None:
            batch = torch.broadcast_shapes(batch, context.shape[:-1])
            z = z.expand(*batch, *z.shape[z.ndim - len(self.event_shape) :])
        if 0 in batch:
            return z, z.new_zeros(batch)
        state, field = (z, z.new_zeros(batch)), self.derivative(context, probe)
        if self.solver == "rk4":
            (y, ladj), self.evaluations = rk4(
                field, state, start, stop, self.steps, self.checkpoint, self.widths
            )
        else:
            (y, ladj), self.evaluations = dopri5(
                field, state, start, stop, self.tolerance, checkpoint=self.checkpoint
            )
        return y, ladj

    def velocity(self, t: Tensor, z: Tensor, context: Tensor | None = None) -> Tensor:
        """v(t, z), without the trace."""
        v: Tensor = self.field(t, z) if context is None else self.field(t, z, context)
        return v

    def derivative(self, context: Tensor | None, probe: Tensor | None = None) -> Field:
        """(t, (z, ladj)) → (v, tr ∂v/∂z)."""
        dims = len(self.event_shape)
        with_trace: Callable[..., State] | None = getattr(
            self.field, "with_trace", None
        )  # a trace in closed form

        def change(t: Tensor, state: State) -> State:
            z = state[0]
            if probe is None and with_trace is not None:
                return with_trace(t, z) if context is None else with_trace(t, z, context)
            v, pull = self._pullback(t, z, context)
            if probe is not None:
                return v, sum_event(pull(probe) * probe, dims)
            event = z.shape[z.ndim - dims :]
            size = math.prod(event)
            basis = torch.eye(size, dtype=z.dtype, device=z.device).reshape(
                size, *[1] * (z.ndim - dims), *event
            )
            basis = basis.expand(size, *z.shape)
            return v, sum_event((pull(basis) * basis).sum(0), dims)

        return change

    def _pullback(self, t: Tensor, z: Tensor, context: Tensor | None) -> tuple[Tensor, Pull]:
        """v(t, z), and u ↦ uᵀ ∂v/∂z for one u per row, or several along a leading axis."""
        if isinstance(self.field, TimeMLP):
            return self.field.pullback(t, z, context)
        by = _autograd_pullback if self.checkpoint and torch.is_grad_enabled() else pullback
        return by(lambda z: self.velocity(t, z, context), z)


@contextmanager
def varied_steps(module: nn.Module, noise: Tensor | None = None) -> Iterator[None]:
    """Inside, continuous flows in ``module`` use random RK4 steps, for the loss of one training
    step.

    With equal steps a likelihood can exploit the errors of the solver, which differ between random
    grids. ``fit`` uses this.

    Args:
        module: a module with continuous flows.
        noise: uniform numbers (n,), new ones for every loss; with None the steps stay equal.
    """
    if noise is None:
        yield
        return
    solved = _with_rk4(module)
    try:
        for part in solved:
            part.widths = (0.25 + 1.5 * noise).repeat(-(-part.steps // len(noise)))[: part.steps]
        yield
    finally:
        for part in solved:
            part.widths = None


def refine(
    module: nn.Module, loss: Callable[[], Tensor], allowed: float, most: int = 512
) -> tuple[int, int]:
    """Double the RK4 steps of continuous flows until twice as many change the loss by at most
    ``allowed``.

    No fixed number of steps suffices for every field: one that contracts too fast for its steps has
    an arbitrarily high density. ``fit`` therefore calls this at every check; a custom training loop
    should do the same.

    Args:
        module: a module with continuous flows.
        loss: a function without noise, or with the same noise in every call.
        allowed: the largest change of the loss.
        most: the largest number of steps.

    Returns:
        The number of steps before and after, of the flow with the most.
    """
    solved = [(part, part.steps) for part in _with_rk4(module)]
    before, factor = max((steps for _, steps in solved), default=0), 1

    def set_steps(times: int) -> None:
        for part, steps in solved:
            part.steps = times * steps

    try:
        with torch.no_grad():
            coarse = loss().item() if before else 0.0
            while 0 < 2 * factor * before <= most:
                set_steps(2 * factor)
                fine = loss().item()
                if abs(fine - coarse) <= allowed:
                    break
                factor, coarse = 2 * factor, fine
    finally:
        set_steps(factor)
    return before, factor * before


def _with_rk4(module: nn.Module) -> list[Continuous]:
    return [
        part for part in module.modules() if isinstance(part, Continuous) and part.solver == "rk4"
    ]


def _autograd_pullback(f: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Pull]:
    """f(z), and u ↦ uᵀ ∂f/∂z by autograd, which supports checkpoints; torch.func does not."""
    with torch.enable_grad():
        z = z if z.requires_grad else z.detach().requires_grad_()
        v = f(z)

    def pull(u: Tensor) -> Tensor:
        if u.ndim > z.ndim:
            return torch.stack([pull(one) for one in u])
        return torch.autograd.grad(v, z, u, create_graph=True)[0]

    return v, pull


def continuous(
    event: int | Sequence[int],
    hidden: Sequence[int] = (64, 64),
    context_dim: int = 0,
    trace: Trace | None = None,
    solver: Solver = "rk4",
    steps: int = 32,
    tolerance: float = 1e-6,
    checkpoint: bool = False,
    field: nn.Module | None = None,
) -> Continuous:
    """A continuous flow whose field is a network of z and t (Chen et al. 2018; Grathwohl et al.
    2019).

    Args:
        event: a dimension, or the shape (C, H, W) of images.
        hidden: units of the default field ``TimeMLP``.
        context_dim, solver, steps, tolerance, checkpoint: as for ``Continuous``.
        trace: by default "exact", and "hutchinson" for images.
        field: a network v(t, z, context) to use instead of the default; needed for images.
    """
    flat = isinstance(event, int)
    if isinstance(event, int):
        field = field or TimeMLP(check_size(event, "the dimension"), hidden, context_dim)
    elif field is None:
        raise ValueError(
            f"a continuous flow of events {tuple(event)} needs a field=: a network of (t, z, context)"
        )
    return Continuous(
        event, field, context_dim=context_dim, trace=trace or ("exact" if flat else "hutchinson"), solver=solver,
        steps=steps, tolerance=tolerance, checkpoint=checkpoint,
    )  # fmt: skip
