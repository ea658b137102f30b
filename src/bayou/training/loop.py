"""The training loop of all gradient methods: seeded steps that a killed run repeats bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.files import restore_state
from bayou.core.progress import Progress, Show
from bayou.training.checkpoints import BestState, Checkpoint, RunState
from bayou.training.data import Data, batches_from
from bayou.training.graphs import compile_loss
from bayou.training.guards import FiniteCheck, Interrupt
from bayou.training.inputs import Batch, Inputs
from bayou.training.monitors import ConvergenceMonitor, History, Validation
from bayou.training.problem import Hooks, Numbers, Problem, Setup
from bayou.training.ranks import ALONE, current
from bayou.training.seeds import part_seed
from bayou.training.settings import Settings
from bayou.training.steps import (
    EagerStep,
    FirstBatch,
    LearningRates,
    RecordedStep,
    SharedRows,
    StepUndo,
)
from bayou.training.threads import suitable_threads


def fit_module(
    problem: Problem,
    data: Data,
    settings: Settings,
    *,
    seed: int,
    checkpoint: Checkpoint | None = None,
    progress: Show = True,
    hooks: Hooks = Hooks(),  # noqa: B008 (frozen)
) -> RunState:
    """Minimize a problem's loss, to the last step, to an early stop or to Ctrl-C.

    Step t draws its batch and its noise from (seed, t) only, so that a killed run can be resumed
    bit for bit.

    Args:
        problem: the module with the loss; its parameters are changed.
        data: the batches.
        settings: the length of the run, its optimizer and its schedule.
        seed: the seed of batches and noise.
        checkpoint: the file that the run is saved to and resumed from; None: no file.
        progress: how to show the progress.
        hooks: functions that are called during the run; by default none.

    Returns:
        The history of the run, and how it ended.

    Raises:
        FloatingPointError: if the loss, a gradient or a parameter is not finite.
    """
    run = TrainingRun(problem, data, settings, seed, checkpoint, hooks)
    state = run.state
    problem.train()
    with (
        suitable_threads(problem.work),
        rng.isolated(part_seed(seed, "run"), run.device),
        Progress(problem.title, state.total, progress) as line,
        Interrupt() as interrupt,
    ):
        try:
            for batch in run.batches():
                with interrupt.defer():
                    run.step(*batch)
                line.total = state.total
                line.update(state.step, **_progress_numbers(state.history[-1]))
        except KeyboardInterrupt:
            state.stopped = "interrupted"
            run.leave()
    run.check.check_parameters(state.step)
    state.stopped = state.stopped or "finished"
    run.convergence.warn_if_rising()
    if run.validation.best is not None:
        restore_state(problem, run.validation.best)
    if state.stopped != "interrupted":
        run.first_batch.warn_if_worse()
    problem.eval()
    return state


class TrainingRun:
    """One run: its state, and a collaborator for every concern of a step.

    Args:
        problem: the module with the loss.
        data: the batches.
        settings: the length of the run, its optimizer and its schedule.
        seed: the seed of batches and noise.
        checkpoint: the file that the run is saved to and resumed from; None: no file.
        hooks: functions that are called during the run.
    """

    def __init__(
        self,
        problem: Problem,
        data: Data,
        settings: Settings,
        seed: int,
        checkpoint: Checkpoint | None,
        hooks: Hooks,
    ) -> None:
        self.problem = problem
        self.settings = settings
        self.seed = seed
        self.checkpoint = checkpoint
        self.planned_steps: int = settings.total_steps(data)
        self.optimizer: torch.optim.Optimizer = problem.make_optimizer(settings, self.planned_steps)
        # The initial rates are those before a checkpoint restores the rates of its step.
        self.learning_rates: LearningRates = LearningRates(self.optimizer, settings)
        self.state: RunState = RunState()
        best: BestState = None
        if checkpoint is not None:
            self.state, best = checkpoint.restore(problem, self.optimizer)
        self.state.total = self.state.total or self.planned_steps
        self.first_step: int = self.state.step
        self.free_parameter: nn.Parameter = next(p for p in problem.parameters() if p.requires_grad)
        self.device: torch.device = self.free_parameter.device
        setup = Setup(problem, data, settings, seed, hooks, self.optimizer, self.state, self.device)
        self.data = data
        self.check: FiniteCheck = FiniteCheck(problem, self.device, problem.name_of)
        self.undo: StepUndo = StepUndo(problem)
        self.history: History = History(setup, self.check)
        self.validation: Validation = Validation(setup, best)
        self.convergence: ConvergenceMonitor = ConvergenceMonitor(setup, self.planned_steps)
        self.first_batch: FirstBatch = FirstBatch(setup)
        ranks = current() if data.rows_first else ALONE
        self.shared_rows: SharedRows = SharedRows(problem, ranks, self.undo)
        compiled_loss = None
        if settings.compile:
            compiled_loss = compile_loss(problem.loss, problem, data.n, settings.batch_size)
        self.recorded_step: RecordedStep = RecordedStep(
            setup, self.check, self.undo, compiled_loss, is_shared=ranks.size > 1
        )
        if self.recorded_step.is_possible:
            self.learning_rates.move_to(self.device)
        self.eager_step: EagerStep = EagerStep(
            setup, self.check, self.shared_rows, self.undo, self.first_batch, compiled_loss
        )

    @property
    def is_over(self) -> bool:
        """Whether the last step is done."""
        return self.state.step >= self.state.total or bool(self.state.stopped)

    def batches(self) -> Iterator[Batch]:
        """Yield the remaining batches, epoch by epoch, on the device of the parameters."""
        if self.is_over:
            return

        def seeds(epoch: int) -> list[int]:
            return [part_seed(self.seed, "epoch", epoch)]

        remaining = batches_from(self.state.step, [self.data], seeds, self.problem.check_batch)
        for rows in self.shared_rows.select(remaining):
            yield move(rows, self.free_parameter)
            if self.is_over:
                return

    def step(self, x: Inputs, y: Tensor) -> None:
        """Take one optimizer step, then record, validate and save where they are due."""
        step = self.state.step
        self.undo.begin()
        rng.reseed(part_seed(self.seed, "step", step), self.device)
        self.learning_rates.apply(step / self.state.total)
        self.problem.before_step(step, self.planned_steps)
        numbers = self.recorded_step(x, y, step)
        if numbers is None:
            numbers = self.eager_step(x, y, step, before_recording=self.recorded_step.is_possible)
        ends_run = bool(self.problem.after_step(numbers))
        self.convergence.observe(self.problem.objective(numbers), step)
        self._record(numbers, ends_run)
        self.undo.finish()
        if self.state.step % self.settings.checkpoint_every == 0 or self.is_over:
            self._save()

    def _record(self, numbers: Numbers, ends_run: bool) -> None:
        """Count the step, and add its record and its validation loss where they are due."""
        step = self.state.step
        is_last = ends_run or step + 1 == self.state.total
        validates = self.validation.is_due(step + 1, is_last)
        has_record = self.history.is_due(step) or is_last or validates
        if has_record:
            self.history.add(numbers)
        self.state.step += 1
        if validates:
            self.validation.run()
        if ends_run:
            self.state.stopped = self.state.stopped or "finished"
        if has_record:
            self.history.report()

    def leave(self) -> None:
        """Undo an incomplete step after Ctrl-C, and save the state."""
        if not self.undo.has_changed_parameters and self.state.step > self.first_step:
            self.undo.undo()
            self._save()

    def _save(self) -> None:
        """Write the checkpoint, if there is one and all parameters are finite."""
        if self.checkpoint is None:
            return
        self.check.check_parameters(self.state.step)
        self.state.partial = float(self.convergence.cell_sum)
        self.checkpoint.save(self.problem, self.optimizer, self.state, self.validation.best)


def move(batch: Batch, like: Tensor) -> Batch:
    """Return a batch on the device of a parameter.

    Args:
        batch: the pair (x, y); items of x that are no tensors remain as they are.
        like: the parameter.
    """

    def place(item: Any) -> Any:
        return item.to(like.device) if isinstance(item, Tensor) else item

    x, y = batch
    if isinstance(x, tuple | list):
        return tuple(place(item) for item in x), place(y)
    return place(x), place(y)


def _progress_numbers(record: dict[str, float]) -> dict[str, float]:
    """Return the numbers of a record for the progress line."""
    hidden = ("step", "seconds", "log_likelihood")
    numbers = {name: value for name, value in record.items() if name not in hidden}
    if "log_likelihood" in record:
        numbers["nll"] = -record["log_likelihood"]
    return numbers
