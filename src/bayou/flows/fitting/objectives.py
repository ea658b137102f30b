"""Objectives: maximum likelihood and flow matching for data, reverse KL for a density."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.progress import BayouWarning
from bayou.flows.continuous_time.continuous import Continuous, refine, varied_steps
from bayou.flows.core.flow import Flow
from bayou.flows.core.transform import check_tensor, read_flag, sum_event

LogDensity = Callable[..., Tensor]
Name = Literal["maximum likelihood", "flow matching", "reverse KL"]

MAX_VALIDATION_ROWS = 4096  # enough for 0.02 nats
SCORE_DRAWS = 4096  # draws for the score of reverse KL, with the same noise at every evaluation
# Largest change of the loss, in nats per dimension, by twice as many solver steps.
MAX_SOLVER_ERROR = 0.005
SOLVER_CHECK_ROWS = 256  # rows or draws on which this is tested
SOLVER_WIDTHS = 64  # random widths of solver steps, after which they repeat
REMEDY = "lower lr or clip, standardize the data, or use float64"


class Objective(ABC):
    """A loss to minimize and a score that selects the parameters.

    ``value`` is noisy and differentiable, ``score`` repeatable and without gradients.

    Args:
        flow: the flow that is fitted.
        context: the context of the rows, (rows, context_dim); None for a flow without one.
        seed: the seed of batches and noise.

    Attributes:
        name: the objective in words.
        measure: what the score is, in words.
        version: a number that increases when the operations of ``value`` change.
        warmed: the fraction of the warm-up that is done.
        recordable: whether ``inputs`` are tensors and ``value`` performs the same operations in
            every step, so that a GPU can record them.
    """

    measure: str
    name: Name
    version: int = 0
    warmed: float = 1.0
    recordable = False

    def __init__(self, flow: Flow, context: Tensor | None, seed: int) -> None:
        if not any(p.requires_grad for p in flow.parameters()):
            raise ValueError(
                "the flow has no parameter that requires a gradient; there is nothing to fit"
            )
        self.flow = flow
        self.seed = seed
        self.anchor: nn.Parameter = next(
            flow.parameters()
        )  # dtype and device follow the parameters
        self.context: Tensor | None = None if context is None else context.to(self.anchor)

    @abstractmethod
    def inputs(self, step: int) -> tuple[Tensor, ...]:
        """Return the inputs of a step: rows and noise."""

    @abstractmethod
    def value(self, *inputs: Tensor) -> Tensor:
        """Return the loss, a scalar.

        Raises:
            FloatingPointError: names the row or the sample that is not finite.
        """

    @abstractmethod
    def score(self) -> float:
        """Return the score for early stopping; lower is better."""

    def _solver_widths(self, step: int) -> tuple[Tensor, ...]:
        """Draw the widths of solver steps, if the flow has a solver."""
        if not any(isinstance(module, Continuous) for module in self.flow.modules()):
            return ()
        return (
            rng.uniform(1, (SOLVER_WIDTHS,), self.anchor, rng.fold(self.seed, "grid", step))[0],
        )

    def refine(self, loss: Callable[[], Tensor]) -> None:
        """Use more solver steps if their errors change the loss of a continuous flow."""
        max_change = MAX_SOLVER_ERROR * math.prod(self.flow.base.event_shape)
        previous_steps, steps = refine(self.flow, loss, max_change)
        if steps != previous_steps:
            self.version += 1
            warnings.warn(
                f"{previous_steps} steps of RK4 are too few for this flow: twice as many change "
                f"its loss by more than {max_change:.2g} nats. Training continues with {steps}; "
                f'build it with steps={steps} or more, or with solver="dopri5"',
                BayouWarning,
                stacklevel=2,
            )


class MaximumLikelihood(Objective):
    """The negative log-likelihood −E_data[log q(x | context)], in nats per row.

    A minibatch has rows that its epoch has not used yet.

    Args:
        flow: the flow q.
        data: the rows, (rows, *event).
        context: one for each row, (rows, context_dim), or None.
        batch_size: rows in a step.
        validation: the fraction of the rows that is held out for the score; 0 scores the training
            rows.
        seed: the seed of the split, the batches and the noise.
    """

    name: Name = "maximum likelihood"
    loss_name = "NLL"
    min_scored_rows = 1024  # rows that are scored at a time, or a batch if it is larger

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
        self.data: Tensor = data.detach().to(self.anchor)
        rows = len(data)
        held_out = min(round(validation * rows), MAX_VALIDATION_ROWS)
        if validation > 0 and not 1 <= held_out < rows:
            raise ValueError(
                f"validation={validation} of {rows} rows holds out {held_out} and trains on "
                f"{rows - held_out}; pass more rows, or validation=0 to stop by the training loss"
            )
        order = torch.arange(rows)
        if held_out:
            order = rng.permutation(rows, rng.fold(seed, "split"))
        self.held_out_rows: Tensor = order[:held_out]
        self.rows: Tensor = order[held_out:]
        self.measure: str = f"{'held-out' if held_out else 'training'} {self.loss_name}"
        batch_size_used = min(batch_size, len(self.rows))
        self.batches: Iterator[Tensor] = _batches(
            len(self.rows), batch_size_used, rng.fold(seed, "batches")
        )
        self.batch_size = batch_size
        self.recordable: bool = all(
            getattr(module, "recordable", True) for module in self._modules_in_a_step()
        )

    def _modules_in_a_step(self) -> Iterable[nn.Module]:
        """Return the modules that compute the loss."""
        return self.flow.modules()

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        return self.rows[next(self.batches)].to(self.data.device), *self._solver_widths(step)

    def value(self, rows: Tensor, *widths: Tensor) -> Tensor:  # type: ignore[override]
        with varied_steps(self.flow, *widths):
            return -self._log_prob(rows).mean()

    def score(self) -> float:
        rows = self._scored_rows().to(self.data.device)
        seed = rng.fold(self.seed, "score")
        self.refine(lambda: -self._log_prob(rows[:SOLVER_CHECK_ROWS], seed).mean())
        chunk_rows = max(self.batch_size, self.min_scored_rows)
        log_probs = [
            self._log_prob(chunk, seed, i * chunk_rows)
            for i, chunk in enumerate(rows.split(chunk_rows))
        ]
        return -torch.cat(log_probs).mean().item()

    def _scored_rows(self) -> Tensor:
        """Return the rows of the score: those held out or, without any, the first training rows."""
        if len(self.held_out_rows) > 0:
            return self.held_out_rows
        return self.rows[:MAX_VALIDATION_ROWS]

    def _log_prob(self, rows: Tensor, seed: rng.Seed = None, start: int = 0) -> Tensor:
        """Return log q of rows by index, (B,), or name the first that is not finite."""
        x = self.data[rows]
        context = None if self.context is None else self.context[rows]
        log_prob = self.flow.log_prob(x, context, seed=seed, start=start)
        _check_finite(log_prob, x, "log q", rows)
        return log_prob


class FlowMatching(MaximumLikelihood):
    """The matching loss E‖v(t, x_t) − ẋ_t‖² over linear paths x_t = (1 − t)·x₀ + t·x₁.

    The expectation is over t, base draws x₀ and data x₁. It needs no solver (Lipman et al. 2023).
    The minimum is not 0: paths cross, and the field is their mean.

    Args:
        flow: a flow whose transform is ``Continuous``.
        data: the rows x₁, (rows, *event).
        context: one for each row, (rows, context_dim), or None.
        batch_size: rows in a step, and rows that are scored at a time.
        validation: the fraction of the rows that is held out for the score.
        seed: the seed of the split, the batches and the paths.
    """

    name: Name = "flow matching"
    loss_name = "matching loss"

    def _modules_in_a_step(self) -> Iterable[nn.Module]:
        # No solver runs, so that one that cannot be recorded does not matter.
        return (module for module in self.flow.modules() if module is not self.flow.transform)

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        return self._paths(self.rows[next(self.batches)], rng.fold(self.seed, "step", step))

    def value(self, rows: Tensor, start: Tensor, t: Tensor) -> Tensor:  # type: ignore[override]
        return self._distance(rows, start, t).mean()

    def score(self) -> float:
        chunks = self._scored_rows().split(self.batch_size)
        distances = [
            self._distance(*self._paths(chunk, rng.fold(self.seed, "score", i)))
            for i, chunk in enumerate(chunks)
        ]
        return torch.cat(distances).mean().item()

    def _paths(self, rows: Tensor, seed: rng.Seed) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, the starts of their paths, and a time for each."""
        rows = rows.to(self.data.device)
        start = self.flow.base.draw(len(rows), seed=rng.fold(seed, "base")).detach()
        return rows, start, rng.uniform(len(rows), (), start, rng.fold(seed, "time"))

    def _distance(self, rows: Tensor, start: Tensor, t: Tensor) -> Tensor:
        """Compute ‖v − ẋ‖² of every row, (B,)."""
        end = self.data[rows]
        event_dims = len(self.flow.event_shape)
        context = None if self.context is None else self.context[rows]
        broadcast_t = t.reshape(-1, *[1] * event_dims)
        x = (1 - broadcast_t) * start + broadcast_t * end
        slope = end - start
        field: Continuous = self.flow.transform  # type: ignore[assignment]
        return sum_event((field.velocity(t, x, context) - slope).square(), event_dims)


class ReverseKL(Objective):
    """The reverse KL E_q[log q(x) − β·log p̃(x)], with β rising from 0.01 to 1 in the warm-up.

    With a context, the mean of this over its rows, for q(x | row) and p̃(x | row).

    Args:
        flow: the flow q.
        log_density: log p̃, a function of x (n, *event) or of (x, context).
        context: the rows of the context, (rows, context_dim), or None.
        samples: draws in a step.
        batch_size: rows of the context in a step.
        seed: the seed of the batches and the draws.
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
        self.log_density = log_density
        self.samples = samples
        if self.context is not None:
            self.context: Tensor = self.context.detach().reshape(-1, self.context.shape[-1])
            rows = len(self.context)
            self.batches: Iterator[Tensor] = _batches(
                rows, min(batch_size, rows), rng.fold(seed, "batches")
            )

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        self.step = step
        return ()

    def value(self) -> Tensor:  # type: ignore[override]
        context = None
        if self.context is not None:
            context = self.context[next(self.batches).to(self.context.device)]
        with varied_steps(self.flow, *self._solver_widths(self.step)):
            step_seed = rng.fold(self.seed, "step", self.step)
            log_q, log_p = log_ratio(self.flow, self.log_density, self.samples, context, step_seed)
        return (log_q - max(0.01, self.warmed) * log_p).mean()

    def score(self) -> float:
        # With fixed noise two checks differ only in their parameters.
        draws = SCORE_DRAWS
        if self.context is not None:
            draws = max(1, SCORE_DRAWS // len(self.context))
        seed = rng.fold(self.seed, "score")
        self.refine(
            lambda: self._gap(max(1, SOLVER_CHECK_ROWS * draws // SCORE_DRAWS), seed).mean()
        )
        loss = self._gap(draws, seed)
        # Fixed noise can underestimate the loss by about a standard error, which is 0 at the
        # optimum: compare the upper end of the interval.
        standard_error = 0.0
        if loss.numel() > 1:
            standard_error = loss.std().item() / loss.numel() ** 0.5
        return loss.mean().item() + 2 * standard_error

    def _gap(self, draws: int, seed: rng.Seed) -> Tensor:
        """Return log q − log p̃ of draws, one axis."""
        log_q, log_p = log_ratio(self.flow, self.log_density, draws, self.context, seed)
        return (log_q - log_p).flatten()


@torch.no_grad()
def elbo(
    flow: Flow, log_density: LogDensity, n: int, context: Tensor | None = None, seed: rng.Seed = 0
) -> tuple[float, float]:
    """Estimate the evidence lower bound E_q[log p̃(x) − log q(x)] = log Z − KL(q ‖ p) ≤ log Z.

    Args:
        flow: the flow q.
        log_density: log p̃. With a context it takes (x, context), x (n, B, *event).
        n: the number of fresh draws.
        context: (B, context_dim), or None. The bound is the mean over its rows.
        seed: the seed of the draws.

    Returns:
        The bound and its standard error.
    """
    chunks = []
    for start in range(0, n, SCORE_DRAWS):
        draws = min(SCORE_DRAWS, n - start)
        log_q, log_p = log_ratio(flow, log_density, draws, context, rng.fold(seed, start))
        gain = (log_p - log_q).double()
        if context is not None:
            gain = gain.flatten(1).mean(1)  # rows of the context share a draw
        chunks.append(gain)
    gains = torch.cat(chunks)
    return gains.mean().item(), (gains.std() / n**0.5).item()


def log_ratio(
    flow: Flow, log_density: LogDensity, n: int, context: Tensor | None, seed: rng.Seed
) -> tuple[Tensor, Tensor]:
    """Return log q(x) and log p̃(x) at n draws x ~ q, both (n, *batch of the context) and finite."""
    x, log_q = flow.sample_and_log_prob(n, context, seed)
    _check_finite(x.flatten(log_q.ndim).sum(-1), x, "the flow's draw x")
    _check_finite(log_q, x, "log q(x)")
    log_p = log_density(x) if context is None else log_density(x, context)
    if not isinstance(log_p, Tensor):
        raise ValueError(
            f"log_density returned {type(log_p).__name__}; "
            f"return a tensor of shape {tuple(log_q.shape)}"
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
    """Yield row indices (size,) without end: every row once per epoch, all batches full."""
    epoch = 0
    order = torch.empty(0, dtype=torch.long)
    while True:
        while len(order) < size:
            order = torch.cat([order, rng.permutation(rows, rng.fold(seed, epoch))])
            epoch += 1
        yield order[:size]
        order = order[size:]


def _check_finite(value: Tensor, x: Tensor, name: str, rows: Tensor | None = None) -> None:
    """Raise a FloatingPointError that names the first draw where value (n, ...) is not finite.

    With ``rows``, (n,), x are these rows of the data instead of draws.
    """
    is_bad = ~value.isfinite()
    if not read_flag(is_bad.any()):
        return
    position = tuple(is_bad.nonzero()[0].tolist())
    number = value[position].item()
    remedy = REMEDY
    if name.startswith("log_density"):
        remedy = "fix the density there"
        if number == -torch.inf:
            remedy = (
                "reverse KL needs p > 0 wherever q > 0: use a flow with the support of p, "
                "or a p with soft edges"
            )
    index = position[0] if len(position) == 1 else position
    subject = f"sample {index}"
    unit = "samples"
    if rows is not None:
        subject = f"row {int(rows[index])} of the data"
        unit = "rows"
    raise FloatingPointError(
        f"{name} is {number} at {subject}, x = {_format_values(x[position])} "
        f"({int(is_bad.sum())} of {is_bad.numel()} {unit}); {remedy}"
    )


def _check_data(flow: Flow, data: Tensor, context: Tensor | None) -> None:
    """Raise a ValueError unless the data are rows of events, with a context each if needed."""
    event = ", ".join(map(str, flow.event_shape))
    check_tensor(data, flow.event_shape, None, "the data")
    if data.ndim != len(flow.event_shape) + 1:
        raise ValueError(
            f"the data has shape {tuple(data.shape)}, expected (rows, {event}); "
            "flatten the row axes"
        )
    if len(data) == 0:
        raise ValueError(f"the data has no rows: shape {tuple(data.shape)}; pass at least one")
    _check_context(flow, context)
    if context is not None and context.shape[:-1] != data.shape[:1]:
        raise ValueError(
            f"the data has {len(data)} rows but the context has shape {tuple(context.shape)}; "
            "pass one context per row"
        )


def _check_context(flow: Flow, context: Tensor | None) -> None:
    """Raise a ValueError unless there is a context exactly if the flow takes one."""
    size = flow.transform.context_dim
    if context is None and size:
        raise ValueError(f"the flow is conditional; pass context= of shape (rows, {size})")
    if context is not None:
        if not size:
            raise ValueError(
                "the flow takes no context but context= was given; "
                "build the flow with context_dim=..."
            )
        check_tensor(context, (size,), None, "the context")
        if context.ndim != 2 or len(context) == 0:
            raise ValueError(
                f"the context has shape {tuple(context.shape)}, expected (rows, {size}), rows ≥ 1"
            )


def _format_values(x: Tensor) -> str:
    """Format the first six values of a tensor."""
    values = [f"{value:.4g}" for value in x.detach().flatten()[:6].tolist()]
    ellipsis = ", ..." if x.numel() > 6 else ""
    return f"[{', '.join(values)}{ellipsis}]"
