"""Objectives: maximum likelihood and flow matching for data, reverse KL for a density."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.progress import BayouWarning
from bayou.flows.continuous_time.continuous import Continuous, refine, varied_steps
from bayou.flows.core.flow import Flow
from bayou.flows.core.transform import check_tensor, read_flag, sum_event

LogDensity = Callable[..., Tensor]
Name = Literal["maximum likelihood", "flow matching", "reverse KL"]

MAX_HELD_OUT = 4096  # rows of validation: enough for 0.02 nats
CHUNK = 1024  # rows that are scored at a time
SCORE_DRAWS = 4096  # draws for the score of reverse KL, with the same noise at every evaluation
SOLVER_TOLERANCE = (
    0.005  # the largest change of the loss, in nats per dimension, by twice as many solver steps
)
SOLVER_ROWS = 256  # rows or draws on which this is tested
GRID = 64  # random widths of solver steps, after which they repeat
REMEDY = "lower lr or clip, standardize the data, or use float64"


class Objective(ABC):
    """An objective to minimize. ``value`` is noisy and differentiable, ``score`` repeatable and
    without gradients.
    """

    measure: str  # what the score is, in words
    name: Name
    version = 0  # of ``value``: it increases when the operations of ``value`` change
    warmed = 1.0  # the part of the warm-up that is done
    recordable = False  # whether ``inputs`` are tensors and ``value`` performs the same operations in every step

    def __init__(self, flow: Flow, context: Tensor | None, seed: int) -> None:
        if not any(p.requires_grad for p in flow.parameters()):
            raise ValueError(
                "the flow has no parameter that requires a gradient; there is nothing to fit"
            )
        self.flow, self.seed = flow, seed
        self.anchor = next(flow.parameters())  # dtype and device follow the parameters
        self.context = context if context is None else context.to(self.anchor)

    @abstractmethod
    def inputs(self, step: int) -> tuple[Any, ...]:
        """The inputs of a step: rows, noise."""

    @abstractmethod
    def value(self, *inputs: Any) -> Tensor:
        """The loss: (). A FloatingPointError names the row or the sample that is not finite."""

    @abstractmethod
    def score(self) -> float:
        """The score for early stopping; lower is better."""

    def _grid(self, step: int) -> tuple[Tensor, ...]:
        """Noise for the steps of solvers, if there are any."""
        if not any(isinstance(part, Continuous) for part in self.flow.modules()):
            return ()
        return (rng.uniform(1, (GRID,), self.anchor, rng.fold(self.seed, "grid", step))[0],)

    def refine(self, loss: Callable[[], Tensor]) -> None:
        """Use more solver steps if their errors change the loss of a continuous flow."""
        allowed = SOLVER_TOLERANCE * math.prod(self.flow.base.event_shape)
        before, steps = refine(self.flow, loss, allowed)
        if steps != before:
            self.version += 1
            warnings.warn(
                f"{before} steps of RK4 are too few for this flow: twice as many change its loss by more than "
                f"{allowed:.2g} nats. Training continues with {steps}; build it with steps={steps} or more, or with "
                'solver="dopri5"',
                BayouWarning,
                stacklevel=2,
            )


class MaximumLikelihood(Objective):
    """−E_data[log q(x | context)] in nats per row, over minibatches without replacement within an
    epoch.
    """

    name: Name = "maximum likelihood"

    def __init__(
        self,
        flow: Flow,
        data: Tensor,
        context: Tensor | None,
        batch_size: int,
        validation: float,
        seed: int,
    ) -> None:
        _check_data(flow, data, context)
        super().__init__(flow, context, seed)
        self.data = data.detach().to(self.anchor)
        rows = len(data)
        held = min(round(validation * rows), MAX_HELD_OUT)
        if validation > 0 and not 1 <= held < rows:
            raise ValueError(
                f"validation={validation} of {rows} rows holds out {held} and trains on {rows - held}; "
                "pass more rows, or validation=0 to stop by the training loss"
            )
        order = rng.permutation(rows, rng.fold(seed, "split")) if held else torch.arange(rows)
        self.held, self.rows = order[:held], order[held:]
        self.measure = "held-out NLL" if held else "training NLL"
        self.batches = _batches(
            len(self.rows), min(batch_size, len(self.rows)), rng.fold(seed, "batches")
        )
        self.chunk = max(batch_size, CHUNK)
        self.recordable = all(getattr(part, "recordable", True) for part in flow.modules())

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        return self.rows[next(self.batches)].to(self.data.device), *self._grid(step)

    def value(self, rows: Tensor, *grid: Tensor) -> Tensor:
        with varied_steps(self.flow, *grid):
            return -self._log_prob(rows).mean()

    def score(self) -> float:
        rows = (self.held if len(self.held) else self.rows[:MAX_HELD_OUT]).to(self.data.device)
        seed = rng.fold(self.seed, "score")
        self.refine(lambda: -self._log_prob(rows[:SOLVER_ROWS], seed).mean())
        found = [
            self._log_prob(part, seed, i * self.chunk)
            for i, part in enumerate(rows.split(self.chunk))
        ]
        return -torch.cat(found).mean().item()

    def _log_prob(self, rows: Tensor, seed: rng.Seed = None, start: int = 0) -> Tensor:
        x = self.data[rows]
        context = None if self.context is None else self.context[rows]
        log_prob = self.flow.log_prob(x, context, seed=seed, start=start)  # (B,)
        bad = ~log_prob.isfinite()
        if read_flag(bad.any()):
            i = int(bad.nonzero()[0])
            raise FloatingPointError(
                f"log q is {log_prob[i].item()} at row {int(rows[i])} of the data, x = {_show(x[i])} "
                f"({int(bad.sum())} of {len(rows)} rows); {REMEDY}"
            )
        return log_prob


class FlowMatching(MaximumLikelihood):
    """E‖v(t, x_t) − ẋ_t‖² over t, base draws x₀ and data x₁, with linear paths x_t = (1 − t)·x₀ +
    t·x₁.

    It needs no solver (Lipman et al. 2023). The minimum is not 0: paths cross, and the field is
    their mean.
    """

    name: Name = "flow matching"

    def __init__(self, flow: Flow, *args: Any) -> None:
        if not isinstance(flow.transform, Continuous):
            raise ValueError(
                f"matching fits a continuous flow, got {type(flow.transform).__name__}; use continuous()"
            )
        super().__init__(flow, *args)
        parts = (
            part for part in flow.modules() if not isinstance(part, Continuous)
        )  # no solver runs
        self.recordable = all(getattr(part, "recordable", True) for part in parts)
        self.pairs = args[2]  # rows that are scored at a time
        self.measure = self.measure.replace("NLL", "matching loss")

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        return self._paths(self.rows[next(self.batches)], rng.fold(self.seed, "step", step))

    def value(self, rows: Tensor, start: Tensor, t: Tensor) -> Tensor:  # type: ignore[override]
        return self._distance(rows, start, t).mean()

    def score(self) -> float:
        rows = self.held if len(self.held) else self.rows[:MAX_HELD_OUT]
        parts = rows.split(self.pairs)
        found = [
            self._distance(*self._paths(part, rng.fold(self.seed, "score", i)))
            for i, part in enumerate(parts)
        ]
        return torch.cat(found).mean().item()

    def _paths(self, rows: Tensor, seed: rng.Seed) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, the starts of their paths, and a time for each."""
        rows = rows.to(self.data.device)
        start = self.flow.base.draw(len(rows), seed=rng.fold(seed, "base")).detach()
        return rows, start, rng.uniform(len(rows), (), start, rng.fold(seed, "time"))

    def _distance(self, rows: Tensor, start: Tensor, t: Tensor) -> Tensor:
        """‖v − ẋ‖² of every row: (B,)."""
        end, dims = self.data[rows], len(self.flow.event_shape)
        context = None if self.context is None else self.context[rows]
        wide = t.reshape(-1, *[1] * dims)
        x, slope = (1 - wide) * start + wide * end, end - start
        field: Continuous = self.flow.transform  # type: ignore[assignment]
        return sum_event((field.velocity(t, x, context) - slope).square(), dims)


class ReverseKL(Objective):
    """E_q[log q(x) − β·log p̃(x)], with β rising from 0.01 to 1 in the warm-up.

    With a context, the mean of this over its rows, for q(x | row) and p̃(x | row).
    """

    name: Name = "reverse KL"
    measure = "−bound + 2 s.e."

    def __init__(
        self,
        flow: Flow,
        log_density: LogDensity,
        context: Tensor | None,
        samples: int,
        batch_size: int,
        seed: int,
    ) -> None:
        _check_context(flow, context)
        super().__init__(flow, context, seed)
        self.log_density, self.samples = log_density, samples
        if self.context is not None:
            self.context = self.context.detach().reshape(-1, self.context.shape[-1])
            rows = len(self.context)
            self.batches = _batches(rows, min(batch_size, rows), rng.fold(seed, "batches"))

    def inputs(self, step: int) -> tuple[int]:
        return (step,)

    def value(self, step: int) -> Tensor:
        context = (
            None
            if self.context is None
            else self.context[next(self.batches).to(self.context.device)]
        )
        with varied_steps(self.flow, *self._grid(step)):
            noise = rng.fold(self.seed, "step", step)
            log_q, log_p = log_ratio(self.flow, self.log_density, self.samples, context, noise)
        return (log_q - max(0.01, self.warmed) * log_p).mean()

    def score(self) -> float:
        # With fixed noise two checks differ only in their parameters.
        draws = SCORE_DRAWS if self.context is None else max(1, SCORE_DRAWS // len(self.context))
        seed = rng.fold(self.seed, "score")
        self.refine(lambda: self._gap(max(1, SOLVER_ROWS * draws // SCORE_DRAWS), seed).mean())
        loss = self._gap(draws, seed)
        # Fixed noise can underestimate the loss by about a standard error, which is 0 at the
        # optimum: compare the upper end of the interval.
        spread = loss.std().item() / loss.numel() ** 0.5 if loss.numel() > 1 else 0.0
        return loss.mean().item() + 2 * spread

    def _gap(self, draws: int, seed: rng.Seed) -> Tensor:
        log_q, log_p = log_ratio(self.flow, self.log_density, draws, self.context, seed)
        return (log_q - log_p).flatten()


@torch.no_grad()
def elbo(
    flow: Flow, log_density: LogDensity, n: int, context: Tensor | None = None, seed: rng.Seed = 0
) -> tuple[float, float]:
    """The evidence lower bound E_q[log p̃(x) − log q(x)] = log Z − KL(q ‖ p) ≤ log Z from n fresh
    draws, and its error.

    With a context (B, context_dim), ``log_density(x, context)`` takes x (n, B, *event), and the
    result is the mean over the rows of the context.
    """
    parts = []
    for start in range(0, n, SCORE_DRAWS):
        log_q, log_p = log_ratio(
            flow, log_density, min(SCORE_DRAWS, n - start), context, rng.fold(seed, start)
        )
        parts.append(
            (log_p - log_q).double().flatten(1).mean(1)
            if context is not None
            else (log_p - log_q).double()
        )
    draws = torch.cat(
        parts
    )  # one number per draw, averaged over the context; draws are independent
    return draws.mean().item(), (draws.std() / n**0.5).item()


def log_ratio(
    flow: Flow, log_density: LogDensity, n: int, context: Tensor | None, seed: rng.Seed
) -> tuple[Tensor, Tensor]:
    """(log q(x), log p̃(x)) at n draws x ~ q, both (n, *batch of the context) and finite."""
    x, log_q = flow.sample_and_log_prob(n, context, seed)
    _check_finite(x.flatten(log_q.ndim).sum(-1), x, "the flow's draw x")
    _check_finite(log_q, x, "log q(x)")
    log_p = log_density(x) if context is None else log_density(x, context)
    if not isinstance(log_p, Tensor):
        raise ValueError(
            f"log_density returned {type(log_p).__name__}; return a tensor of shape {tuple(log_q.shape)}"
        )
    if log_p.shape != log_q.shape:
        raise ValueError(
            f"log_density returned shape {tuple(log_p.shape)} for x of shape {tuple(x.shape)}, "
            f"expected {tuple(log_q.shape)}: one number per draw; sum over the event axes"
        )
    if torch.is_grad_enabled() and x.requires_grad and not log_p.requires_grad:
        raise ValueError(
            "the result of log_density is not differentiable in x, which reverse KL needs; "
            "compute it in torch from x, without detach(), numpy or no_grad"
        )
    _check_finite(log_p, x, "log_density(x)")
    return log_q, log_p.to(log_q)


def _batches(rows: int, size: int, seed: rng.Seed) -> Iterator[Tensor]:
    """An endless stream of row indices (size,): every row once per epoch, all batches full."""
    epoch, order = 0, torch.empty(0, dtype=torch.long)
    while True:
        while len(order) < size:
            order = torch.cat([order, rng.permutation(rows, rng.fold(seed, epoch))])
            epoch += 1
        yield order[:size]
        order = order[size:]


def _check_finite(value: Tensor, x: Tensor, what: str) -> None:
    """Raise a FloatingPointError that names the first draw where value (n, ...) is not finite."""
    bad = ~value.isfinite()
    if not bad.any():
        return
    where = tuple(bad.nonzero()[0].tolist())
    got = value[where].item()
    remedy = REMEDY
    if what.startswith("log_density"):
        remedy = (
            "fix the density there"
            if got != -torch.inf
            else (
                "reverse KL needs p > 0 wherever q > 0: use a flow with the support of p, or a p with soft edges"
            )
        )
    index = where[0] if len(where) == 1 else where
    count = f"{int(bad.sum())} of {bad.numel()} samples"
    raise FloatingPointError(
        f"{what} is {got} at sample {index}, x = {_show(x[where])} ({count}); {remedy}"
    )


def _check_data(flow: Flow, data: Tensor, context: Tensor | None) -> None:
    event = ", ".join(map(str, flow.event_shape))
    check_tensor(data, flow.event_shape, None, "the data")
    if data.ndim != len(flow.event_shape) + 1:
        raise ValueError(
            f"the data has shape {tuple(data.shape)}, expected (rows, {event}); flatten the row axes"
        )
    if len(data) == 0:
        raise ValueError(f"the data has no rows: shape {tuple(data.shape)}; pass at least one")
    _check_context(flow, context)
    if context is not None and context.shape[:-1] != data.shape[:1]:
        raise ValueError(
            f"the data has {len(data)} rows but the context has shape {tuple(context.shape)}; pass one context per row"
        )


def _check_context(flow: Flow, context: Tensor | None) -> None:
    size = flow.transform.context_dim
    if context is None and size:
        raise ValueError(f"the flow is conditional; pass context= of shape (rows, {size})")
    if context is not None:
        if not size:
            raise ValueError(
                "the flow takes no context but context= was given; build the flow with context_dim=..."
            )
        check_tensor(context, (size,), None, "the context")
        if context.ndim != 2 or len(context) == 0:
            raise ValueError(
                f"the context has shape {tuple(context.shape)}, expected (rows, {size}), rows ≥ 1"
            )


def _show(x: Tensor) -> str:
    values = [f"{v:.4g}" for v in x.detach().flatten()[:6].tolist()]
    return "[" + ", ".join(values) + (", ..." if x.numel() > 6 else "") + "]"
