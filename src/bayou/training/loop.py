"""The training loop that methods share: seeded steps, early stopping, checkpoints, clear failures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from bayou import rng
from bayou.files import no_grad_state
from bayou.progress import Progress, Show
from bayou.training.checkpoints import Best, Checkpoint, State
from bayou.training.data import Batch, Data
from bayou.training.graphs import Replay, capturable
from bayou.training.guards import Interrupt, Watch

Schedule = str | Callable[[torch.optim.Optimizer], LRScheduler]
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    "tail": lambda t: min(1.0, 4 * (1 - t)),  # constant, then down to 0 over the last quarter
}
Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class Loop:
    """How to run: what a step minimises comes from outside."""

    steps: int
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    clip: float | None
    seed: int
    log_every: int
    patience: int | None
    checkpoint: Checkpoint | None
    checkpoint_every: int
    progress: Show
    title: str = "fitting"


@dataclass(frozen=True)
class Task:
    """What to run. ``loss(x, y, step) -> (scalar, numbers to report)`` is minimised over the parameters of ``module``.

    ``check`` sees every batch of the first epoch; ``settle`` sees the numbers of a step once it is done, for state that
    moves outside the graph; ``validate`` is called once per epoch, and the parameters that make it least are kept.
    ``graded`` is called between the backward pass and the optimizer, ``prepare`` before a step, with its number.
    ``fast`` is a compiled ``loss``, for batches of the usual shape; on a GPU it is recorded together with the optimizer
    and replayed as one graph, so what changes from step to step must be tensors that ``prepare`` fills.
    """

    module: nn.Module
    loss: Callable[[Any, Tensor, int], tuple[Tensor, Numbers]]
    validate: Callable[[], float] | None = None
    check: Callable[[Batch], None] | None = None
    settle: Callable[[Numbers], None] | None = None
    name_of: Callable[[str], str] = str
    graded: Callable[[int], None] | None = None
    prepare: Callable[[int], object] | None = None
    fast: Callable[[Any, Tensor, int], tuple[Tensor, Numbers]] | None = None


def move(batch: Batch, like: Tensor) -> Batch:
    """A batch on the device of the parameters."""
    x, y = batch

    def place(item: Any) -> Any:
        return item.to(like.device) if isinstance(item, Tensor) else item

    return (tuple(place(item) for item in x) if isinstance(x, tuple | list) else place(x)), place(y)


def run(loop: Loop, task: Task, data: Data) -> State:
    """Run to the last step, to an early stop or to Ctrl-C.

    Step t draws its batch and its noise from (seed, t) alone, so a killed run goes on bit for bit.
    """
    return _Run(loop, task, data).run()


class _Run:
    def __init__(self, loop: Loop, task: Task, data: Data) -> None:
        self.loop, self.task, self.data, self.module = loop, task, data, task.module
        self.scheduler = None if isinstance(loop.schedule, str) else _scheduler(loop.schedule, loop.optimizer)
        self.rates = [float(group["lr"]) for group in loop.optimizer.param_groups]
        self.state = State()
        self.best: Best = None
        if loop.checkpoint is not None:
            self.state, self.best = loop.checkpoint.restore(self.module, loop.optimizer, self.scheduler)
        self.like = next(p for p in self.module.parameters() if p.requires_grad)
        self.watch = Watch(self.module, self.like.device, task.name_of)
        self.replay: Replay | None = None
        if task.fast is not None and task.graded is None and capturable(loop.optimizer, self.like.device):
            self.replay = Replay(loop.optimizer, task.fast, loop.clip, self.watch)
            for group, rate in zip(loop.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = torch.tensor(rate, dtype=torch.float32, device=self.like.device)
        self.shape: Any = None  # of the usual batch
        self.first = self.state.step
        history = self.state.history
        self.started = time.monotonic() - (history[-1]["seconds"] if history else 0.0)
        self.torn = False  # inside a step, between the first change of a parameter and the last
        self.moving: list[Tensor] | None = None  # buffers that a forward pass moves: running statistics
        self.still: list[Tensor] = []  # their values before a step, during it

    @property
    def over(self) -> bool:
        return self.state.step >= self.loop.steps or bool(self.state.stopped)

    def run(self) -> State:
        loop, state = self.loop, self.state
        self.module.train()
        with (
            rng.isolated(_int(rng.fold(loop.seed, "run")), self.like.device),
            Progress(loop.title, loop.steps, loop.progress) as progress,
            Interrupt() as interrupt,
        ):
            try:
                while not self.over:
                    self._epoch(progress, interrupt)
            except KeyboardInterrupt:
                state.stopped = "interrupted"
                if not self.torn and state.step > self.first:
                    for buffer, value in zip(self.moving or [], self.still, strict=False):
                        buffer.copy_(value)
                    self._save()
        self.watch.parameters(state.step)
        state.stopped = state.stopped or "finished"
        if self.best is not None:
            self.module.load_state_dict(self.best)
        self.module.eval()
        return state

    def _epoch(self, progress: Progress, interrupt: Interrupt) -> None:
        """The batches of one epoch that are still to do."""
        epoch, done = divmod(self.state.step, self.data.batches)
        before = self.state.step
        for raw in self.data.epoch(_int(rng.fold(self.loop.seed, "epoch", epoch)), done):
            if self.task.check is not None and epoch == 0:
                self.task.check(raw)
            with interrupt.held():
                self._step(*move(raw, self.like))
            progress.update(self.state.step, **_shown(self.state.history[-1]))
            if self.over:
                return
        if self.state.step == before:
            raise ValueError(f"the data gave {done} batches in an epoch, but said they have {self.data.batches}")

    def _step(self, x: Any, y: Tensor) -> None:
        loop, state, task = self.loop, self.state, self.task
        buffers = list(self.module.buffers()) if self.moving is None else self.moving
        self.still = [buffer.clone() for buffer in buffers]
        rng.reseed(_int(rng.fold(loop.seed, "step", state.step)), self.like.device)
        if isinstance(loop.schedule, str):
            factor = SCHEDULES[loop.schedule](state.step / loop.steps)
            for group, rate in zip(loop.optimizer.param_groups, self.rates, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate * factor)
                else:
                    group["lr"] = rate * factor
        if task.prepare is not None:
            task.prepare(state.step)
        if self.replay is not None and self.replay.takes(x, y):
            self.torn = True
            report = self.replay(x, y, state.step)
        else:
            report = self._eager(x, y)
        if self.scheduler is not None:
            self.scheduler.step()
        if task.settle is not None:
            task.settle(report)
        end_of_epoch = (state.step + 1) % self.data.batches == 0 or state.step + 1 == loop.steps
        judging = end_of_epoch and task.validate is not None
        if state.step % loop.log_every == 0 or state.step + 1 == loop.steps or judging:
            self.watch.read()
            record = {name: float(number.detach()) for name, number in report.items()}
            seconds = time.monotonic() - self.started
            state.history.append({"step": float(state.step), **record, "seconds": seconds})
        state.step += 1
        if judging:
            self._judge()
        if self.moving is None:  # batch norm does not move the version counters of its statistics: compare the values
            pairs = zip(buffers, self.still, strict=True)
            self.moving = [now for now, then in pairs if not torch.equal(now, then)]
        self.torn, self.still = False, []
        if state.step % loop.checkpoint_every == 0 or self.over:
            self._save()

    def _eager(self, x: Any, y: Tensor) -> Numbers:
        """Loss, gradients and the optimizer, one after another."""
        loop, task, step = self.loop, self.task, self.state.step
        loss = task.loss
        if task.fast is not None:
            self.shape = y.shape if self.shape is None else self.shape
            loss = task.fast if y.shape == self.shape else task.loss  # another shape would be compiled anew
        value, report = loss(x, y, step)
        loop.optimizer.zero_grad(set_to_none=True)
        value.backward()
        self.watch.look(value, step, x, y)
        if loop.clip is not None:
            nn.utils.clip_grad_norm_((p for g in loop.optimizer.param_groups for p in g["params"]), loop.clip)
        if task.graded is not None:
            task.graded(step)
        self.torn = True
        loop.optimizer.step()
        return report

    def _judge(self) -> None:
        """Keep the parameters if held-out data like them best; stop if they have not for long."""
        assert self.task.validate is not None
        state = self.state
        score = self.task.validate()
        self.module.train()
        state.history[-1]["validation"] = score
        if score < state.best:
            state.best, state.waited = score, 0
            self.best = {name: tensor.clone() for name, tensor in no_grad_state(self.module).items()}
            return
        state.waited += 1
        if self.loop.patience is not None and state.waited >= self.loop.patience:
            state.stopped = "early"

    def _save(self) -> None:
        checkpoint = self.loop.checkpoint
        if checkpoint is not None:
            self.watch.parameters(self.state.step)  # a checkpoint is good, or it is not written
            checkpoint.save(self.module, self.loop.optimizer, self.scheduler, self.state, self.best)


def _shown(record: dict[str, float]) -> dict[str, float]:
    """The numbers of a record that a progress line has room for."""
    shown = {name: value for name, value in record.items() if name not in ("step", "seconds", "log_likelihood")}
    return shown | {"nll": -record["log_likelihood"]} if "log_likelihood" in record else shown


def _scheduler(
    schedule: Callable[[torch.optim.Optimizer], LRScheduler], optimizer: torch.optim.Optimizer
) -> LRScheduler:
    scheduler = schedule(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError("ReduceLROnPlateau waits for a number; give a schedule of steps, such as 'cosine' or StepLR")
    if not callable(getattr(scheduler, "step", None)) or not hasattr(scheduler, "state_dict"):
        raise ValueError(f"schedule must return a torch LR scheduler, got {type(scheduler).__name__}")
    return scheduler


def _int(seed: rng.Seed) -> int:
    assert isinstance(seed, int)
    return seed


SCALES = ("log_std", "logit_p", "log_scale", "log_scale1", "log_scale2")


def parameter_groups(module: nn.Module, lr: float, scale_lr: float) -> list[dict[str, Any]]:
    """Two groups: the log-stds and rates of guides with a learning rate of their own, and everything else."""
    scales: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            leaf, inside_flow = name.rpartition(".")[2], ".transform." in name
            (scales if leaf in SCALES and not inside_flow else rest).append(parameter)
    groups: Iterable[dict[str, Any]] = ({"params": rest, "lr": lr}, {"params": scales, "lr": scale_lr})
    return [group for group in groups if group["params"]]
