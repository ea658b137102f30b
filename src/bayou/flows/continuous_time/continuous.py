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
from bayou.flows.contractive.residual import pullback, unit_events
from bayou.flows.core.arguments import as_event, check_size
from bayou.flows.core.transform import (
    Cost,
    Event,
    Ladj,
    Pair,
    Rows,
    Symmetric,
    Transform,
    batch_shape,
    broadcast_context,
    sum_event,
)

Trace = Literal["exact", "hutchinson"]
Solver = Literal["rk4", "dopri5"]

MIN_RANDOM_WIDTH = 0.25  # of a random RK4 step, relative to an equal one
RANDOM_WIDTH_RANGE = 1.5


class Continuous(Symmetric, Transform):
    r"""A continuous flow, y = z(1) of ż = v(t, z), z(0) = x.

    ladj = ∫ tr ∂v/∂z dt along the path (Chen et al. 2018). The two directions are inverse to each
    other up to the error of the solver; ``accuracy`` is its expected size, which a field that is
    not smooth enough for its steps exceeds (see ``refine``). ``evaluations`` is the number of
    evaluations of the field in the last pass.

    Args:
        event: the size of a vector, or the shape of an event.
        field: v, called as ``field(t, z)`` or, with a context, ``field(t, z, context)``: t (...), z
            (..., \*event). It may have a method ``pullback`` and a property ``with_trace``, as
            ``TimeMLP`` has; autograd is used otherwise.
        context_dim: the size of the context; 0, the default, for none.
        trace: "exact" (the default), with one vector-Jacobian product per dimension, or
            "hutchinson", εᵀ(∂v/∂z)ε with one random ε = ±1 per row and pass; the log-density is
            then an estimate (Grathwohl et al. 2019, FFJORD).
        solver: "rk4" (the default) with equal steps, which compiles to one graph, or "dopri5", with
            adaptive steps for every row.
        steps: the number of steps of "rk4"; 32 by default.
        tolerance: the error of a step of "dopri5"; 1e-6 by default.
        checkpoint: whether to recompute every step in the backward pass, so that memory does not
            grow with the number of steps; False by default.

    Shapes: x, y (..., \*event), context (..., context_dim), ladj (...).

    Example:
        >>> import torch
        >>> from bayou.flows import Continuous, TimeMLP
        >>> y, ladj = Continuous(2, TimeMLP(2), steps=16)(torch.zeros(10, 2))
        >>> y.shape, ladj.shape
        (torch.Size([10, 2]), torch.Size([10]))
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
        self.event_shape: Event = as_event(event, "the dimension")
        self.field = field
        self.context_dim = context_dim
        self.trace = trace
        self.solver = solver
        self.steps: int = check_size(steps, "the number of steps")
        self.tolerance = tolerance
        self.checkpoint = checkpoint
        self.takes_noise: bool = trace == "hutchinson"
        self.recordable: bool = solver == "rk4"
        self.has_fixed_steps: bool = solver == "rk4"
        self.ladj_kind = Ladj.estimate if self.takes_noise else Ladj.exact
        self.evaluations: int = 0
        self.widths: Tensor | None = None  # of the steps: see ``varied_steps``

    @property
    def accuracy(self) -> float:  # type: ignore[override]
        """The expected error of the solver for a smooth field.

        100 tolerances, or steps⁻⁴ for RK4. A field with Fourier features sin ωt has
        (ω/steps)⁴/2880, on average a fifth of that at the largest ω = π·``field.frequencies``.
        """
        if self.solver == "dopri5":
            return 100 * self.tolerance
        max_frequency = math.pi * getattr(self.field, "frequencies", 0)
        return max(1.0, max_frequency**4 / 14400) / self.steps**4

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        """Draw the probe ε = ±1 (*batch, *event)."""
        return (rows.signs(*self.event_shape),)  # type: ignore[arg-type]

    def _both(
        self,
        z: Tensor,
        context: Tensor | None,
        inverse: bool,
        probe: Tensor | None = None,
    ) -> Pair:
        start, stop = (1.0, 0.0) if inverse else (0.0, 1.0)
        z, context = broadcast_context(z, context, len(self.event_shape))
        batch = batch_shape(z, self.event_shape)
        if 0 in batch:
            return z, z.new_zeros(batch)
        state = (z, z.new_zeros(batch))
        derivative = self.derivative(context, probe)
        if self.solver == "rk4":
            (y, ladj), self.evaluations = rk4(
                derivative, state, start, stop, self.steps, self.checkpoint, self.widths
            )
        else:
            (y, ladj), self.evaluations = dopri5(
                derivative, state, start, stop, self.tolerance, checkpoint=self.checkpoint
            )
        return y, ladj

    def velocity(self, t: Tensor, z: Tensor, context: Tensor | None = None) -> Tensor:
        r"""Return v(t, z), without the trace.

        Args:
            t: times (...).
            z: states (..., \*event).
            context: (..., context_dim), for a flow with a context.
        """
        v: Tensor = self.field(t, z) if context is None else self.field(t, z, context)
        return v

    def derivative(self, context: Tensor | None, probe: Tensor | None = None) -> Field:
        r"""Return the function (t, (z, ladj)) → (v, tr ∂v/∂z) that a solver integrates.

        Args:
            context: (..., context_dim), or None.
            probe: ε = ±1 (..., \*event) for an estimate of the trace; exact by default.
        """
        dims = len(self.event_shape)
        inputs = () if context is None else (context,)
        # v and its trace in closed form
        with_trace: Callable[..., State] | None = getattr(self.field, "with_trace", None)

        def v_and_trace(t: Tensor, state: State) -> State:
            z = state[0]
            if probe is None and with_trace is not None:
                return with_trace(t, z, *inputs)
            v, pull = self._pullback(t, z, context)
            if probe is not None:
                return v, sum_event(pull(probe) * probe, dims)
            basis = unit_events(z, self.event_shape)
            return v, sum_event((pull(basis) * basis).sum(0), dims)

        return v_and_trace

    def _pullback(self, t: Tensor, z: Tensor, context: Tensor | None) -> tuple[Tensor, Pull]:
        """Return v(t, z), and u ↦ uᵀ ∂v/∂z.

        u is one vector per row, or several along a leading axis.
        """
        if hasattr(self.field, "pullback"):
            field: Any = self.field
            v_and_pull: tuple[Tensor, Pull] = field.pullback(t, z, context)
            return v_and_pull
        if self.checkpoint and torch.is_grad_enabled():
            return _autograd_pullback(lambda z: self.velocity(t, z, context), z)
        return pullback(lambda z: self.velocity(t, z, context), z)


@contextmanager
def varied_steps(module: nn.Module, noise: Tensor | None = None) -> Iterator[None]:
    """Use random RK4 steps in continuous flows, for the loss of one training step.

    With equal steps a likelihood can exploit the errors of the solver, which differ between random
    grids. ``fit`` uses this.

    Args:
        module: a module with continuous flows.
        noise: uniform numbers (n,), new ones for every loss; with None, the default, the steps stay
            equal.

    Example:
        >>> import torch, bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(2), flows.continuous(2))
        >>> with flows.varied_steps(flow, torch.rand(64)):
        ...     loss = -flow.log_prob(torch.zeros(100, 2)).mean()
    """
    if noise is None:
        yield
        return
    rk4_flows = _flows_with_rk4(module)
    widths = MIN_RANDOM_WIDTH + RANDOM_WIDTH_RANGE * noise
    try:
        for flow in rk4_flows:
            repeats = -(-flow.steps // len(noise))
            flow.widths = widths.repeat(repeats)[: flow.steps]
        yield
    finally:
        for flow in rk4_flows:
            flow.widths = None


def refine(
    module: nn.Module,
    loss: Callable[[], Tensor],
    allowed: float,
    most: int = 512,
) -> tuple[int, int]:
    """Double the RK4 steps of continuous flows until they are accurate.

    That is the case when twice as many change the loss by at most ``allowed``. No fixed number of
    steps suffices for every field: one that contracts too fast for its steps has an arbitrarily
    high density. ``fit`` therefore calls this at every check; a custom training loop should do the
    same.

    Args:
        module: a module with continuous flows.
        loss: a function without noise, or with the same noise in every call.
        allowed: the largest change of the loss.
        most: the largest number of steps; 512 by default.

    Returns:
        The number of steps before and after, of the flow with the most.
    """
    rk4_flows = _flows_with_rk4(module)
    initial_steps = [flow.steps for flow in rk4_flows]
    before = max(initial_steps, default=0)
    factor = 1

    def multiply_steps(multiple: int) -> None:
        for flow, steps in zip(rk4_flows, initial_steps, strict=True):
            flow.steps = multiple * steps

    try:
        with torch.no_grad():
            coarse_loss = loss().item() if before else 0.0
            while 0 < 2 * factor * before <= most:
                multiply_steps(2 * factor)
                fine_loss = loss().item()
                if abs(fine_loss - coarse_loss) <= allowed:
                    break
                factor = 2 * factor
                coarse_loss = fine_loss
    finally:
        multiply_steps(factor)
    return before, factor * before


def _flows_with_rk4(module: nn.Module) -> list[Continuous]:
    """Return the continuous flows of a module that are solved with equal steps."""
    return [
        flow for flow in module.modules() if isinstance(flow, Continuous) and flow.solver == "rk4"
    ]


def _autograd_pullback(f: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Pull]:
    """Return f(z), and u ↦ uᵀ ∂f/∂z by autograd.

    It supports checkpoints, which torch.func does not.
    """
    with torch.enable_grad():
        z = z if z.requires_grad else z.detach().requires_grad_()
        v = f(z)

    def pull(u: Tensor) -> Tensor:
        if u.ndim > z.ndim:
            return torch.stack([pull(row) for row in u])
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
    """Build a continuous flow whose field is a network of z and t.

    y = z(1) of ż = v(t, z), z(0) = x, with ladj = ∫ tr ∂v/∂z dt along the path. Both directions
    solve an ordinary differential equation.

    Args:
        event: a dimension, or the shape (C, H, W) of images.
        hidden: the widths of the hidden layers of the default field ``TimeMLP``; (64, 64) by
            default.
        context_dim: the size of a context that the field reads too; 0, the default, for none.
        trace: "exact", the default for vectors, or "hutchinson", an estimate, for images.
        solver: "rk4" (the default) with equal steps, or "dopri5", with adaptive steps for every
            row.
        steps: the number of steps of "rk4"; 32 by default.
        tolerance: the error of a step of "dopri5"; 1e-6 by default.
        checkpoint: whether to recompute every step in the backward pass, so that memory does not
            grow with the number of steps; False by default.
        field: a network v(t, z, context) to use instead of the default; needed for images.

    Returns:
        A transform of x, y (..., *event).

    Example:
        >>> import torch, bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(2), flows.continuous(2, steps=16))
        >>> flow.log_prob(torch.zeros(100, 2)).shape
        torch.Size([100])

    References:
        Chen, Rubanova, Bettencourt & Duvenaud 2018, Neural Ordinary Differential Equations;
        Grathwohl, Chen, Bettencourt, Sutskever & Duvenaud 2019, FFJORD.
    """
    if isinstance(event, int):
        field = field or TimeMLP(check_size(event, "the dimension"), hidden, context_dim)
        trace = trace or "exact"
    elif field is None:
        raise ValueError(
            f"a continuous flow of events {tuple(event)} needs a field=: a network of (t, z, "
            "context)"
        )
    return Continuous(
        event,
        field,
        context_dim=context_dim,
        trace=trace or "hutchinson",
        solver=solver,
        steps=steps,
        tolerance=tolerance,
        checkpoint=checkpoint,
    )
