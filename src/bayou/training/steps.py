"""The parts of one optimizer step: its learning rates, its gradient, its replay and its undoing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.files import no_grad_state
from bayou.core.progress import spell
from bayou.training.convergence import ConvergenceWarning
from bayou.training.graphs import Replay, capturable, clip_gradients, warmup_stream
from bayou.training.guards import FiniteCheck
from bayou.training.inputs import Batch, Inputs
from bayou.training.problem import Numbers, Problem, Setup
from bayou.training.ranks import Ranks
from bayou.training.seeds import part_seed
from bayou.training.settings import Settings

# A run has become worse if the objective of its first batch fell by more nats than this, per row
# and relative to its first value.
MAX_FALL_PER_ROW = 0.1
MAX_FALL_RATIO = 2.0


class LearningRates:
    """The learning rates of an optimizer, which follow the schedule of the settings.

    Args:
        optimizer: has groups with their initial rates.
        settings: has the schedule.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
        self.optimizer = optimizer
        self.settings = settings
        self.initial_rates: list[float] = [float(group["lr"]) for group in optimizer.param_groups]

    def move_to(self, device: torch.device) -> None:
        """Keep the rates in tensors on a device, at addresses that a CUDA graph can read."""
        for group, rate in zip(self.optimizer.param_groups, self.initial_rates, strict=True):
            group["lr"] = torch.tensor(rate, dtype=torch.float32, device=device)

    def apply(self, fraction: float) -> None:
        """Set the rates after a fraction of the run."""
        factor = self.settings.rate(fraction)
        for group, rate in zip(self.optimizer.param_groups, self.initial_rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor


class StepUndo:
    """Undoes a step that Ctrl-C interrupts before it has changed a parameter.

    The forward pass of such a step may have changed buffers: running statistics. Which buffers
    change is found by comparing their values before and after the first step, since batch norm
    does not change the version counters of its statistics.

    Args:
        module: has the buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.has_changed_parameters: bool = False
        self.buffers: list[Tensor] = []
        self.values_before: list[Tensor] = []
        self._changing_buffers: list[Tensor] | None = None

    def begin(self) -> None:
        """Store the values of the buffers that the step may change."""
        if self._changing_buffers is None:
            self.buffers = persistent_buffers(self.module)
        else:
            self.buffers = self._changing_buffers
        self.values_before = [buffer.clone() for buffer in self.buffers]

    def finish(self) -> None:
        """Mark the step as complete."""
        if self._changing_buffers is None:
            pairs = zip(self.buffers, self.values_before, strict=True)
            self._changing_buffers = [now for now, before in pairs if not torch.equal(now, before)]
        self.values_before = []
        self.has_changed_parameters = False

    def floating_point_changes(self) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of a buffer and its value before the step."""
        pairs = zip(self.buffers, self.values_before, strict=True)
        return [(buffer, before) for buffer, before in pairs if buffer.is_floating_point()]

    def undo(self) -> None:
        """Restore the buffers of an incomplete step."""
        for buffer, value in zip(self._changing_buffers or [], self.values_before, strict=False):
            buffer.copy_(value)


class SharedRows:
    """The rows of every batch, of which several processes compute a share each.

    Args:
        problem: has the gradients.
        ranks: the processes.
        undo: knows the running statistics before the step.
    """

    def __init__(self, problem: Problem, ranks: Ranks, undo: StepUndo) -> None:
        self.problem = problem
        self.ranks = ranks
        self.undo = undo
        self.share: float = 1.0  # of the batch, in this process

    def select(self, batches: Iterator[tuple[Batch, ...]]) -> Iterator[Batch]:
        """Yield the rows of this process of each batch."""
        for (batch,) in batches:
            rows, self.share = self.ranks.rows(batch)
            yield rows

    @torch.no_grad()
    def combine(self, value: Tensor, numbers: Numbers) -> tuple[Tensor, Numbers]:
        """Return the loss and the numbers of the whole batch.

        The gradients and the running statistics become those of the whole batch, too.
        """
        if self.ranks.size == 1:
            return value, numbers
        gradients = [p.grad for p in self.problem.parameters() if p.grad is not None]
        statistics = self.undo.floating_point_changes()
        # A change is exactly 0 where nothing changes.
        changes = [buffer - before for buffer, before in statistics]
        value, *means = self.ranks.mean(
            [value, *numbers.values(), *gradients, *changes], self.share
        )
        numbers = dict(zip(numbers, means, strict=False))
        first_change = len(numbers) + len(gradients)
        for gradient, mean in zip(gradients, means[len(numbers) :], strict=False):
            gradient.copy_(mean)
        for (buffer, before), change in zip(statistics, means[first_change:], strict=True):
            buffer.copy_(before + change)
        return value, numbers


class FirstBatch:
    """The first batch of a run, on which its end is compared with its start.

    Args:
        setup: the run.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._batch: Batch | None = None
        self._numbers: Numbers = {}

    def remember(self, x: Inputs, y: Tensor, numbers: Numbers) -> None:
        """Store the first batch and the terms of its objective before the first step.

        Args:
            x: the inputs of the batch.
            y: its targets.
            numbers: the terms.
        """
        self._batch = (x, y)
        self._numbers = dict(numbers)

    @torch.no_grad()
    def warn_if_worse(self) -> None:
        """Warn if the objective of the first batch has decreased by much."""
        if self._batch is None:
            return
        x, y = self._batch
        problem = self.setup.problem
        buffers = [(buffer, buffer.clone()) for buffer in persistent_buffers(problem)]
        with rng.isolated(part_seed(self.setup.seed, "step", 0), self.setup.device):
            now = sum(map(float, problem.loss(x, y)[1].values()))
        for buffer, value in buffers:
            buffer.copy_(value)
        before = sum(map(float, self._numbers.values()))
        max_fall = MAX_FALL_PER_ROW * self.setup.data.n + MAX_FALL_RATIO * abs(before)
        if not before - now <= max_fall:
            warnings.warn(
                f"{problem.title} ended worse than it started: its objective fell from "
                f"{before:.4g} to {now:.4g} nats on its first batch. "
                f"{spell('lr=', '--lr ')}{self.setup.settings.lr:g} is too large for this network "
                f"and these data; use a smaller one{spell(', or clip=1.0', '')}",
                ConvergenceWarning,
                stacklevel=4,
            )


class EagerStep:
    """One step as PyTorch runs it: loss, gradients, clipping and optimizer.

    Args:
        setup: the run.
        check: detects values that are not finite.
        shared_rows: combines the gradients of several processes.
        undo: is told when the parameters change.
        first_batch: stores the first batch.
        compiled_loss: the compiled loss, if any.
    """

    def __init__(
        self,
        setup: Setup,
        check: FiniteCheck,
        shared_rows: SharedRows,
        undo: StepUndo,
        first_batch: FirstBatch,
        compiled_loss: Callable[..., Any] | None,
    ) -> None:
        self.setup = setup
        self.check = check
        self.shared_rows = shared_rows
        self.undo = undo
        self.first_batch = first_batch
        self.compiled_loss = compiled_loss
        self._compiled_shape: torch.Size | None = None  # of y

    def __call__(self, x: Inputs, y: Tensor, step: int, before_recording: bool) -> Numbers:
        """Take the step and return its numbers, of the rows of all processes.

        Args:
            x: the inputs of the batch.
            y: its targets.
            step: the number of the step.
            before_recording: whether later steps may be recorded as a CUDA graph.
        """
        problem = self.setup.problem
        optimizer = self.setup.optimizer
        after_gradients = self.setup.hooks.after_gradients
        needs_stream = before_recording and self.compiled_loss is None
        with warmup_stream() if needs_stream else nullcontext():
            value, numbers = self._loss_for(y)(x, y)
            if step == 0 and problem.loss_is_stationary:
                self.first_batch.remember(x, y, numbers)
            optimizer.zero_grad(set_to_none=True)
            value.backward()
            value, numbers = self.shared_rows.combine(value, numbers)
            self.check.look(value, step, x, y)
            clip_gradients(optimizer, self.setup.settings.clip, problem.norm, self.check.norm)
            if after_gradients is not None:
                after_gradients(step)
            self.undo.has_changed_parameters = True
            optimizer.step()
        return numbers

    def _loss_for(self, y: Tensor) -> Callable[..., Any]:
        """Return the compiled loss for batches of the first shape, else the plain one.

        A batch of another shape, such as the last of an epoch, would be compiled again.
        """
        if self._compiled_shape is None:
            self._compiled_shape = y.shape
        if self.compiled_loss is not None and y.shape == self._compiled_shape:
            return self.compiled_loss
        return self.setup.problem.loss


class RecordedStep:
    """One step replayed as a CUDA graph, where it can be recorded.

    Args:
        setup: the run. When the version of its loss changes, the step is recorded again.
        check: detects values that are not finite.
        undo: is told when the parameters change.
        compiled_loss: the compiled loss, if any.
        is_shared: whether several processes share the step, which is then not recorded.
    """

    def __init__(
        self,
        setup: Setup,
        check: FiniteCheck,
        undo: StepUndo,
        compiled_loss: Callable[..., Any] | None,
        is_shared: bool,
    ) -> None:
        self.problem: Problem = setup.problem
        self.undo = undo
        self.loss_is_compiled: bool = compiled_loss is not None
        self._replay: Replay | None = None
        loss = compiled_loss
        if compiled_loss is None and self.problem.recordable:
            loss = self.problem.loss
        is_recordable = not is_shared and setup.hooks.after_gradients is None
        if loss is not None and is_recordable and capturable(setup.optimizer, setup.device):
            self._replay = Replay(
                setup.optimizer, loss, setup.settings.clip, check, self.problem.norm
            )

    @property
    def is_possible(self) -> bool:
        """Whether a step of this run may be recorded, now or later."""
        return self._replay is not None

    def __call__(self, x: Inputs, y: Tensor, step: int) -> Numbers | None:
        """Replay the step and return its numbers; None if it must run eagerly."""
        replay = self._replay
        if replay is None or not replay.accepts(x, y):
            return None
        if replay.version != self.problem.version:
            replay.version = self.problem.version
            replay.graph = None
        self.undo.has_changed_parameters = True
        try:
            return replay(x, y, step)
        except RuntimeError:
            if self.loss_is_compiled or replay.graph is not None:
                raise
            # The user's code branches on values: all further steps run eagerly.
            self._replay = None
            self.undo.has_changed_parameters = False
            return None


def persistent_buffers(module: nn.Module) -> list[Tensor]:
    """Return the buffers that a pass may change and a checkpoint has.

    Shared constants of a network are in neither.
    """
    persistent = no_grad_state(module)
    buffers = module.named_buffers(remove_duplicate=False)
    return [value for name, value in buffers if name in persistent]
