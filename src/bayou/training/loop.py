"""The training loop of all gradient methods: seeded steps, early stopping, checkpoints, clear
failures.
"""

from __future__ import annotations

import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.files import no_grad_state, restore_state
from bayou.progress import Progress, Show, spell
from bayou.training.checkpoints import Best, Checkpoint, State
from bayou.training.convergence import BUDGET, GROWTH, ConvergenceWarning, cell_width, trend
from bayou.training.data import Batch, Data, batches_from
from bayou.training.graphs import Replay, apart, capturable, compiled
from bayou.training.guards import Interrupt, Watch
from bayou.training.ranks import ALONE, current
from bayou.training.seeds import part_seed
from bayou.training.settings import Settings
from bayou.training.threads import suitable_threads

Numbers = dict[str, Tensor]
MIN_FALL, MIN_FALL_RATIO = (
    0.1,
    2.0,
)  # of the objective of the first batch: nats per row, and relative


class Problem(nn.Module, ABC):
    """The objective of a run: ``loss`` over the parameters of this module. A subclass overrides the
    hooks it needs.

    Values that vary from step to step must be tensors filled by ``before_step``: on a GPU a loss
    that is compiled or ``recordable`` is recorded together with the optimizer and replayed as one
    graph.
    """

    title: str = "fitting"
    dimension: int | None = (
        None  # the number of dimensions of the objective; None: all trained parameters
    )
    work: int | None = (
        None  # multiply-adds of the largest product of a forward pass; None if unknown
    )
    recordable: bool = (
        False  # whether the uncompiled loss has the same operations in every step, without branches
    )
    version: int = 0  # of the loss: when it changes, the step is recorded again
    norm: Tensor | None = None  # the tensor for the norm of the gradients before they are clipped
    steady: bool = False  # whether a batch has the same loss at the same parameters in every step, but for its noise
    warming: bool = False  # whether evaluations do not reduce the patience yet
    check_batch: Callable[[Batch], None] | None = (
        None  # checks the batches of the first epoch before they are used
    )

    @abstractmethod
    def loss(self, x: Any, y: Tensor) -> tuple[Tensor, Numbers]:
        """The loss of a batch, a scalar, and numbers to report."""

    def make_optimizer(self, settings: Settings, steps: int) -> torch.optim.Optimizer:
        """The optimizer of all parameters that are not frozen."""
        free = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not free:
            raise ValueError(
                "every parameter of the network is frozen (requires_grad=False): nothing to learn"
            )
        return settings.make_optimizer([{"params": free, "lr": settings.lr}])

    def before_step(self, step: int, steps: int) -> None:
        """Prepare a step."""

    def after_step(self, numbers: Numbers) -> bool | None:
        """Update state outside the graph after a step; ``numbers`` may be changed before they are
        recorded.

        True ends the run before the planned number of steps.
        """

    def objective(self, numbers: Numbers) -> Tensor | None:
        """The objective of a step, in nats for all data; it increases until the run has
        converged.
        """
        return None

    def name_of(self, name: str) -> str:
        """The user's name for a parameter of this module."""
        return repr(name.removeprefix("net."))


@dataclass(frozen=True)
class Hooks:
    """Functions that a run calls in addition to its problem.

    Args:
        held_out_loss: the validation loss after every epoch; the parameters with the lowest one are
            kept.
        after_gradients: changes the gradients of a step, given its number; such a step is not
            recorded.
        after_record: called with every new record of the history.
    """

    held_out_loss: Callable[[], float] | None = None
    after_gradients: Callable[[int], None] | None = None
    after_record: Callable[[dict[str, float]], None] | None = None


def fit_module(
    problem: Problem,
    data: Data,
    settings: Settings,
    *,
    seed: int,
    checkpoint: Checkpoint | None = None,
    progress: Show = True,
    hooks: Hooks = Hooks(),  # noqa: B008 (frozen)
) -> State:
    """Minimize a problem's loss, to the last step, to an early stop or to Ctrl-C.

    Step t draws its batch and its noise from (seed, t) only, so that a killed run can be resumed
    bit for bit.
    """
    run = _Run(problem, data, settings, seed, checkpoint, hooks)
    state = run.state
    problem.train()
    with (
        suitable_threads(problem.work),
        rng.isolated(part_seed(seed, "run"), run.like.device),
        Progress(problem.title, run.total, progress) as line,
        Interrupt() as interrupt,
    ):
        try:
            for batch in run.batches():
                with interrupt.held():
                    run.step(*batch)
                line.total = run.total
                line.update(state.step, **_shown(state.history[-1]))
        except KeyboardInterrupt:
            state.stopped = "interrupted"
            run.leave()
    run.watch.parameters(state.step)
    state.stopped = state.stopped or "finished"
    run.conclude()
    if run.best is not None:
        restore_state(problem, run.best)
    run.compare()
    problem.eval()
    return state


class _Run:
    """The state of one run."""

    def __init__(
        self,
        problem: Problem,
        data: Data,
        settings: Settings,
        seed: int,
        checkpoint: Checkpoint | None,
        hooks: Hooks,
    ) -> None:
        self.problem, self.data, self.settings, self.seed, self.checkpoint = (
            problem,
            data,
            settings,
            seed,
            checkpoint,
        )
        self.hooks = hooks
        self.ranks, self.share = (
            current() if data.rows_first else ALONE,
            1.0,
        )  # of a batch, in this process
        self.plan = settings.total_steps(data)
        self.optimizer = problem.make_optimizer(settings, self.plan)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.state = State()
        self.best: Best = None
        if checkpoint is not None:
            self.state, self.best = checkpoint.restore(problem, self.optimizer)
        self.state.total = self.state.total or self.plan
        self.like = next(p for p in problem.parameters() if p.requires_grad)
        self.watch = Watch(problem, self.like.device, problem.name_of)
        self.weights = problem.dimension or sum(
            p.numel() for p in problem.parameters() if p.requires_grad
        )
        self.width = cell_width(self.plan, data.batches)
        self.partial = torch.tensor(
            self.state.partial, dtype=torch.float64, device=self.like.device
        )
        kind = data.n, settings.batch_size
        self.fast = compiled(problem.loss, problem, *kind) if settings.compile else None
        self.replay: Replay | None = None
        capture = (
            self.ranks.size == 1
            and capturable(self.optimizer, self.like.device)
            and hooks.after_gradients is None
        )
        loss = problem.loss if self.fast is None and problem.recordable else self.fast
        if loss is not None and capture:
            self.replay = Replay(self.optimizer, loss, settings.clip, self.watch, problem.norm)
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = torch.tensor(rate, dtype=torch.float32, device=self.like.device)
        self.usual: torch.Size | None = None  # the shape of y in the usual batch
        self.first = self.state.step
        history = self.state.history
        self.started = time.monotonic() - (history[-1]["seconds"] if history else 0.0)
        self.began: tuple[Any, Tensor, Numbers] | None = (
            None  # the batch of the first step, and its numbers
        )
        self.half_done = (
            False  # inside a step, between the first change of a parameter and the last
        )
        self.moving: list[Tensor] | None = (
            None  # buffers changed by a forward pass: running statistics
        )
        self.before: list[Tensor] = []  # their values before a step, during it

    @property
    def total(self) -> int:
        """The number of planned steps."""
        return self.state.total

    @property
    def over(self) -> bool:
        return self.state.step >= self.total or bool(self.state.stopped)

    def batches(self) -> Iterator[Batch]:
        """The remaining batches, epoch by epoch, on the device of the parameters."""
        if self.over:
            return

        def seeds(epoch: int) -> list[int]:
            return [part_seed(self.seed, "epoch", epoch)]

        for (raw,) in batches_from(self.state.step, [self.data], seeds, self.problem.check_batch):
            own, self.share = self.ranks.rows(raw)
            yield move(own, self.like)
            if self.over:
                return

    def step(self, x: Any, y: Tensor) -> None:
        """One step: gradient, optimizer, record, evaluation, checkpoint."""
        problem, settings, state, step = self.problem, self.settings, self.state, self.state.step
        buffers = _statistics(problem) if self.moving is None else self.moving
        self.before = [buffer.clone() for buffer in buffers]
        rng.reseed(part_seed(self.seed, "step", step), self.like.device)
        self._set_rates(settings.rate(step / self.total))
        problem.before_step(step, self.plan)
        numbers = self._replayed(x, y)
        if numbers is None:
            loss, self.usual = problem.loss, y.shape if self.usual is None else self.usual
            if self.fast is not None and y.shape == self.usual:  # another shape would be recompiled
                loss = self.fast
            with apart() if self.replay is not None and self.fast is None else nullcontext():
                value, numbers = loss(x, y)
                if step == 0 and problem.steady:
                    self.began = x, y, dict(numbers)
                numbers = self._descend(value, numbers, buffers, x, y)
        enough = bool(problem.after_step(numbers))
        self._observe(problem.objective(numbers), step)
        last = enough or step + 1 == self.total
        held_out_loss = (
            self.hooks.held_out_loss if (step + 1) % self.data.batches == 0 or last else None
        )
        logging = step % settings.log_every == 0 or last or held_out_loss is not None
        if logging:
            self.watch.read()
            record = {name: float(number) for name, number in numbers.items()}
            state.history.append(
                {"step": float(step), **record, "seconds": time.monotonic() - self.started}
            )
        state.step += 1
        if held_out_loss is not None:
            self._judge(held_out_loss)
        if enough:
            state.stopped = state.stopped or "finished"
        if logging and self.hooks.after_record is not None:
            self.hooks.after_record(state.history[-1])
        if (
            self.moving is None
        ):  # batch norm does not change the version counters of its statistics: compare the values
            pairs = zip(buffers, self.before, strict=True)
            self.moving = [now for now, then in pairs if not torch.equal(now, then)]
        self.half_done, self.before = False, []
        if state.step % settings.checkpoint_every == 0 or self.over:
            self._save()

    def _replayed(self, x: Any, y: Tensor) -> Numbers | None:
        """The step as one launch, if it is recorded or can be recorded now."""
        if self.replay is None or not self.replay.takes(x, y):
            return None
        if self.replay.version != self.problem.version:
            self.replay.version, self.replay.graph = self.problem.version, None
        self.half_done = True
        try:
            return self.replay(x, y, self.state.step)
        except RuntimeError:
            if self.fast is not None or self.replay.graph is not None:
                raise
            self.replay, self.half_done = (
                None,
                False,
            )  # the user's code branches on values: run eagerly
            return None

    def _observe(self, objective: Tensor | None, step: int) -> None:
        """Record the objective; plan more steps if the learning rates are about to decrease before
        convergence.
        """
        state, settings = self.state, self.settings
        if objective is None:
            return
        self.partial += objective.detach()
        if (step + 1) % self.width == 0:
            state.cells.append(float(self.partial) / self.width)
            self.partial.zero_()
        if step + 1 == settings.turn(self.total):
            found, most = trend(state.cells, self.width), BUDGET * self.plan
            rising = found is not None and not found.flat(self.weights)
            if (
                not rising and not settings.open_ended
            ):  # a short run may show a trend in thirds only
                found = trend(state.cells, self.width, 3)
                rising = found is not None and not found.flat(self.weights)
            if rising and settings.open_ended and self.total < most:
                state.total = min(most, math.ceil(GROWTH * self.total))
            elif rising and found is not None:
                state.rising = found.rate

    def conclude(self) -> None:
        """Warn if the run ended before convergence."""
        state = self.state
        if state.rising is None or state.stopped == "early":
            return
        state.history[-1]["rising"] = state.rising
        if self.settings.open_ended and state.stopped == "finished":
            warnings.warn(
                f"{self.problem.title} used up its budget of {self.total:,} steps while its objective was still rising "
                f"by {state.rising:.3g} nats in a thousand steps; "
                + spell(
                    "standardize the data, raise lr, or give more steps",
                    "raise --lr, or give more --steps",
                ),
                ConvergenceWarning,
                stacklevel=4,
            )

    @torch.no_grad()
    def compare(self) -> None:
        """Warn if the objective of the first batch has decreased by much."""
        if self.began is None or self.state.stopped == "interrupted":
            return
        x, y, numbers = self.began
        buffers = [(buffer, buffer.clone()) for buffer in _statistics(self.problem)]
        with rng.isolated(part_seed(self.seed, "step", 0), self.like.device):
            now = sum(map(float, self.problem.loss(x, y)[1].values()))
        for buffer, value in buffers:
            buffer.copy_(value)
        before = sum(map(float, numbers.values()))
        if not before - now <= MIN_FALL * self.data.n + MIN_FALL_RATIO * abs(before):
            warnings.warn(
                f"{self.problem.title} ended worse than it started: its objective fell from {before:.4g} to {now:.4g} "
                f"nats on its first batch. {spell('lr=', '--lr ')}{self.settings.lr:g} is too large for this network "
                f"and these data; use a smaller one{spell(', or clip=1.0', '')}",
                ConvergenceWarning,
                stacklevel=4,
            )

    def _set_rates(self, factor: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    def _descend(
        self, value: Tensor, numbers: Numbers, buffers: list[Tensor], x: Any, y: Tensor
    ) -> Numbers:
        """An eager step: gradients, then the optimizer; the numbers, of the rows of all
        processes.
        """
        self.optimizer.zero_grad(set_to_none=True)
        value.backward()
        if self.ranks.size > 1:
            value, numbers = self._of_all_rows(value, numbers, buffers)
        self.watch.look(value, self.state.step, x, y)
        clip, change, place = self.settings.clip, self.hooks.after_gradients, self.problem.norm
        if clip is not None or place is not None:
            free = [
                p
                for group in self.optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            ]
            norm = (
                self.watch.norm
                if self.watch.norm is not None
                else nn.utils.get_total_norm([p.grad for p in free])
            )
            if clip is not None:
                nn.utils.clip_grads_with_norm_(free, clip, norm)
            if place is not None:
                place.copy_(norm)
        if change is not None:
            change(self.state.step)
        self.half_done = True
        self.optimizer.step()
        return numbers

    @torch.no_grad()
    def _of_all_rows(
        self, value: Tensor, numbers: Numbers, buffers: list[Tensor]
    ) -> tuple[Tensor, Numbers]:
        """The loss and the numbers of the whole batch, as are the gradients and running statistics
        afterwards.
        """
        gradients = [p.grad for p in self.problem.parameters() if p.grad is not None]
        moved = [
            (b, before)
            for b, before in zip(buffers, self.before, strict=True)
            if b.is_floating_point()
        ]
        changes = [buffer - before for buffer, before in moved]  # exactly 0 where nothing changes
        value, *found = self.ranks.mean(
            [value, *numbers.values(), *gradients, *changes], self.share
        )
        numbers = dict(zip(numbers, found, strict=False))
        for gradient, mean in zip(gradients, found[len(numbers) :], strict=False):
            gradient.copy_(mean)
        for (buffer, before), change in zip(
            moved, found[len(numbers) + len(gradients) :], strict=True
        ):
            buffer.copy_(before + change)
        return value, numbers

    def _judge(self, held_out_loss: Callable[[], float]) -> None:
        """Keep the parameters with the lowest validation loss; stop when the patience is
        exceeded.
        """
        state = self.state
        self.problem.eval()
        with torch.no_grad():
            score = held_out_loss()
        self.problem.train()
        state.history[-1]["validation"] = score
        if score < state.best:
            state.best, state.waited = score, 0
            self.best = {
                name: tensor.clone() for name, tensor in no_grad_state(self.problem).items()
            }
        elif not self.problem.warming:
            state.waited += 1
        if self.settings.patience is not None and state.waited >= self.settings.patience:
            state.stopped = "early"

    def leave(self) -> None:
        """Ctrl-C: undo an incomplete step and save the state."""
        if not self.half_done and self.state.step > self.first:
            for buffer, value in zip(self.moving or [], self.before, strict=False):
                buffer.copy_(value)
            self._save()

    def _save(self) -> None:
        if self.checkpoint is not None:
            self.watch.parameters(
                self.state.step
            )  # write a checkpoint only if all parameters are finite
            self.state.partial = float(self.partial)
            self.checkpoint.save(self.problem, self.optimizer, self.state, self.best)


def _statistics(module: nn.Module) -> list[Tensor]:
    """The buffers that a pass may change and a checkpoint has; shared constants of a network are in
    neither.
    """
    persistent = no_grad_state(module)
    buffers = module.named_buffers(remove_duplicate=False)
    return [value for name, value in buffers if name in persistent]


def move(batch: Batch, like: Tensor) -> Batch:
    """A batch on the device of the parameters."""
    x, y = batch

    def place(item: Any) -> Any:
        return item.to(like.device) if isinstance(item, Tensor) else item

    return (tuple(place(item) for item in x) if isinstance(x, tuple | list) else place(x)), place(y)


def _shown(record: dict[str, float]) -> dict[str, float]:
    """The numbers of a record for the progress line."""
    shown = {
        name: value
        for name, value in record.items()
        if name not in ("step", "seconds", "log_likelihood")
    }
    return shown | {"nll": -record["log_likelihood"]} if "log_likelihood" in record else shown
