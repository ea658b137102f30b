"""What a run records between its steps: history, validation, convergence and checkpoints."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from bayou.core.files import no_grad_state
from bayou.core.progress import spell
from bayou.training.checkpoints import BestState, Checkpoint, RunState
from bayou.training.convergence import (
    MAX_BUDGET_RATIO,
    PLAN_GROWTH,
    ConvergenceWarning,
    cell_width,
    trend,
)
from bayou.training.guards import FiniteCheck
from bayou.training.problem import Hooks, Numbers, Problem
from bayou.training.settings import Settings


class History:
    """The records of a run: every ``log_every`` steps, at evaluations and at the last step.

    Args:
        state: the run, which has the records.
        settings: says how often to record.
        check: detects values that are not finite.
        hooks: may be called with every record.
    """

    def __init__(
        self, state: RunState, settings: Settings, check: FiniteCheck, hooks: Hooks
    ) -> None:
        self.state = state
        self.settings = settings
        self.check = check
        self.hooks = hooks
        previous_seconds = 0.0
        if state.history:
            previous_seconds = state.history[-1]["seconds"]
        self.start_time = time.monotonic() - previous_seconds

    def is_due(self, step: int) -> bool:
        """Return whether a step is recorded because of its number."""
        return step % self.settings.log_every == 0

    def add(self, numbers: Numbers) -> None:
        """Add a record of the current step; raise if a step since the last was not finite."""
        self.check.read()
        record = {name: float(number) for name, number in numbers.items()}
        seconds = time.monotonic() - self.start_time
        self.state.history.append({"step": float(self.state.step), **record, "seconds": seconds})

    def report(self) -> None:
        """Call the hook for new records with the last one."""
        if self.hooks.after_record is not None:
            self.hooks.after_record(self.state.history[-1])


class Validation:
    """The validation loss after every epoch, and the parameters with the lowest one.

    Args:
        problem: has the parameters.
        state: the run, which has the lowest loss.
        settings: has the patience.
        held_out_loss: computes the loss; None: no validation.
        epoch_steps: the number of steps in an epoch.
        best: the parameters with the lowest loss so far, if any.
    """

    def __init__(
        self,
        problem: Problem,
        state: RunState,
        settings: Settings,
        held_out_loss: Callable[[], float] | None,
        epoch_steps: int,
        best: BestState,
    ) -> None:
        self.problem = problem
        self.state = state
        self.settings = settings
        self.held_out_loss = held_out_loss
        self.epoch_steps = epoch_steps
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
        if self.settings.patience is not None and state.waited >= self.settings.patience:
            state.stopped = "early"


class ConvergenceMonitor:
    """Extends a run without a given length until its objective has flattened.

    Args:
        problem: states the objective.
        state: the run, whose planned number of steps is extended.
        settings: the schedule, and whether the length was given.
        planned_steps: the number of steps of the first plan.
        epoch_steps: the number of steps in an epoch.
        device: that of the parameters.
    """

    def __init__(
        self,
        problem: Problem,
        state: RunState,
        settings: Settings,
        planned_steps: int,
        epoch_steps: int,
        device: torch.device,
    ) -> None:
        self.problem = problem
        self.state = state
        self.settings = settings
        self.planned_steps = planned_steps
        self.weight_count = problem.dimension or sum(
            p.numel() for p in problem.parameters() if p.requires_grad
        )
        self.width = cell_width(planned_steps, epoch_steps)
        self.cell_sum = torch.tensor(state.partial, dtype=torch.float64, device=device)

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


class CheckpointWriter:
    """Writes the checkpoint of a run, if it has a file.

    Args:
        checkpoint: the file; None: nothing is written.
        problem: has the parameters and buffers.
        optimizer: the optimizer.
        state: the progress.
        settings: says how often to write.
        check: detects parameters that are not finite, which are not written.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        problem: Problem,
        optimizer: torch.optim.Optimizer,
        state: RunState,
        settings: Settings,
        check: FiniteCheck,
    ) -> None:
        self.checkpoint = checkpoint
        self.problem = problem
        self.optimizer = optimizer
        self.state = state
        self.settings = settings
        self.check = check

    def is_due(self, steps_done: int) -> bool:
        """Return whether to write after so many steps."""
        return steps_done % self.settings.checkpoint_every == 0

    def write(self, cell_sum: Tensor, best: BestState) -> None:
        """Write the run, if all parameters are finite.

        Args:
            cell_sum: the sum of the objectives after the last cell of the convergence test.
            best: the parameters with the lowest validation loss, if any.
        """
        if self.checkpoint is None:
            return
        self.check.check_parameters(self.state.step)
        self.state.partial = float(cell_sum)
        self.checkpoint.save(self.problem, self.optimizer, self.state, best)
