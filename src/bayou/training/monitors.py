"""What a run records between its steps: history, validation and convergence."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from bayou.core.files import no_grad_state
from bayou.core.progress import spell
from bayou.training.checkpoints import BestState, RunState
from bayou.training.convergence import (
    MAX_BUDGET_RATIO,
    PLAN_GROWTH,
    ConvergenceWarning,
    cell_width,
    trend,
)
from bayou.training.guards import FiniteCheck
from bayou.training.problem import Numbers, Problem, Setup
from bayou.training.settings import Settings


class History:
    """The records of a run: every ``log_every`` steps, at evaluations and at the last step.

    Args:
        setup: the run, whose state has the records.
        check: detects values that are not finite.
    """

    def __init__(self, setup: Setup, check: FiniteCheck) -> None:
        self.state: RunState = setup.state
        self.log_every: int = setup.settings.log_every
        self.after_record: Callable[[dict[str, float]], None] | None = setup.hooks.after_record
        self.check = check
        previous_seconds = 0.0
        if self.state.history:
            previous_seconds = self.state.history[-1]["seconds"]
        self.start_time: float = time.monotonic() - previous_seconds

    def is_due(self, step: int) -> bool:
        """Return whether a step is recorded because of its number."""
        return step % self.log_every == 0

    def add(self, numbers: Numbers) -> None:
        """Add a record of the current step; raise if a step since the last was not finite."""
        self.check.read()
        record = {name: float(number) for name, number in numbers.items()}
        seconds = time.monotonic() - self.start_time
        self.state.history.append({"step": float(self.state.step), **record, "seconds": seconds})

    def report(self) -> None:
        """Call the hook for new records with the last one."""
        if self.after_record is not None:
            self.after_record(self.state.history[-1])


class Validation:
    """The validation loss after every epoch, and the parameters with the lowest one.

    Args:
        setup: the run; without a loss of held-out rows among its hooks there is no validation.
        best: the parameters with the lowest loss so far, if any.
    """

    def __init__(self, setup: Setup, best: BestState) -> None:
        self.problem: Problem = setup.problem
        self.state: RunState = setup.state
        self.patience: int | None = setup.settings.patience
        self.held_out_loss: Callable[[], float] | None = setup.hooks.held_out_loss
        self.epoch_steps: int = setup.data.batches
        self.best = best

    def is_due(self, steps_done: int, is_last: bool) -> bool:
        """Return whether to evaluate after so many steps."""
        if self.held_out_loss is None:
            return False
        return steps_done % self.epoch_steps == 0 or is_last

    def run(self) -> None:
        """Keep the parameters with the lowest loss; stop when the patience is exceeded."""
        if self.held_out_loss is None:
            return
        state = self.state
        self.problem.eval()
        with torch.no_grad():
            score = self.held_out_loss()
        self.problem.train()
        state.history[-1]["validation"] = score
        if score < state.best:
            state.best = score
            state.waited = 0
            current = no_grad_state(self.problem)
            self.best = {name: tensor.clone() for name, tensor in current.items()}
        elif not self.problem.warming:
            state.waited += 1
        if self.patience is not None and state.waited >= self.patience:
            state.stopped = "early"


class ConvergenceMonitor:
    """Extends a run without a given length until its objective has flattened.

    Args:
        setup: the run, whose planned number of steps is extended.
        planned_steps: the number of steps of the first plan.
    """

    def __init__(self, setup: Setup, planned_steps: int) -> None:
        self.problem: Problem = setup.problem
        self.state: RunState = setup.state
        self.settings: Settings = setup.settings
        self.planned_steps = planned_steps
        self.weight_count: int = self.problem.dimension or sum(
            p.numel() for p in self.problem.parameters() if p.requires_grad
        )
        self.width: int = cell_width(planned_steps, setup.data.batches)
        self.cell_sum: Tensor = torch.tensor(
            self.state.partial, dtype=torch.float64, device=setup.device
        )

    def observe(self, objective: Tensor | None, step: int) -> None:
        """Add the objective of a step, and test it where the learning rates start to decrease."""
        if objective is None:
            return
        self.cell_sum += objective.detach()
        if (step + 1) % self.width == 0:
            self.state.cells.append(float(self.cell_sum) / self.width)
            self.cell_sum.zero_()
        if step + 1 == self.settings.turn(self.state.total):
            self._extend_or_note()

    def _extend_or_note(self) -> None:
        """Plan more steps if the objective still rises; note its rate if there may be no more."""
        state = self.state
        max_steps = MAX_BUDGET_RATIO * self.planned_steps
        change = trend(state.cells, self.width)
        is_rising = change is not None and not change.is_flat(self.weight_count)
        if not is_rising and not self.settings.open_ended:
            # A short run may show a trend in thirds only.
            change = trend(state.cells, self.width, 3)
            is_rising = change is not None and not change.is_flat(self.weight_count)
        if is_rising and self.settings.open_ended and state.total < max_steps:
            state.total = min(max_steps, math.ceil(PLAN_GROWTH * state.total))
        elif is_rising and change is not None:
            state.rising = change.rate

    def warn_if_rising(self) -> None:
        """Warn if the run ended before convergence."""
        state = self.state
        if state.rising is None or state.stopped == "early":
            return
        state.history[-1]["rising"] = state.rising
        if self.settings.open_ended and state.stopped == "finished":
            warnings.warn(
                f"{self.problem.title} used up its budget of {state.total:,} steps while its "
                f"objective was still rising by {state.rising:.3g} nats in a thousand steps; "
                + spell(
                    "standardize the data, raise lr, or give more steps",
                    "raise --lr, or give more --steps",
                ),
                ConvergenceWarning,
                stacklevel=4,
            )
