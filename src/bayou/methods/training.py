"""The training loop that variational methods share: seeded steps, early stopping, checkpoints, clear failures."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from bayou import rng
from bayou.methods.data import Batch, Data
from bayou.posteriors.files import FileError, join, no_grad_state, read_file, split, write_file
from bayou.progress import Progress, Show

Schedule = str | Callable[[torch.optim.Optimizer], LRScheduler]
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    "tail": lambda t: min(1.0, 4 * (1 - t)),  # constant, then down to 0 over the last quarter
}


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
    checkpoint: str | os.PathLike[str] | None
    checkpoint_every: int
    progress: Show
    title: str = "fitting"


@dataclass
class State:
    """Where a run is; together with the module and the optimizer, all that a checkpoint holds."""

    step: int = 0
    best: float = math.inf
    waited: int = 0
    stopped: str = ""
    history: list[dict[str, float]] = field(default_factory=list)


def fingerprint(config: Any) -> str:
    """A short hash of what a run was asked to do, so that a checkpoint of another run is refused."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def move(batch: Batch, like: Tensor) -> Batch:
    """A batch on the device of the parameters."""
    x, y = batch

    def place(item: Any) -> Any:
        return item.to(like.device) if isinstance(item, Tensor) else item

    return (tuple(place(item) for item in x) if isinstance(x, tuple | list) else place(x)), place(y)


def run(
    loop: Loop,
    module: nn.Module,
    data: Data,
    loss: Callable[[Any, Tensor, int], tuple[Tensor, dict[str, Tensor]]],
    validate: Callable[[], float] | None,
    identity: Any,
    name_of: Callable[[str], str] = str,
) -> State:
    """Minimise ``loss(x, y, step) -> (scalar, numbers to report)`` over the parameters of ``module``.

    Step t draws its batch and its noise from (seed, t) alone, so a killed run goes on bit for bit. ``validate`` is
    called once per epoch, and the best parameters by it are the ones kept.
    """
    state, best = State(), None
    scheduler = None if isinstance(loop.schedule, str) else loop.schedule(loop.optimizer)
    rates = [float(group["lr"]) for group in loop.optimizer.param_groups]
    key = fingerprint(identity)
    if loop.checkpoint is not None and Path(loop.checkpoint).exists():
        state, best = _restore(loop, module, scheduler, key)
    like = next(p for p in module.parameters() if p.requires_grad)
    started, first = time.monotonic(), state.step
    module.train()
    with rng.isolated(loop.seed, like.device), Progress(loop.title, loop.steps, loop.progress) as progress:
        try:
            while state.step < loop.steps and not state.stopped:
                epoch, done = divmod(state.step, data.batches)
                for index, raw in enumerate(data.epoch(_int(rng.fold(loop.seed, "epoch", epoch)))):
                    if index < done:
                        continue  # a run that was killed inside this epoch has done these
                    x, y = move(raw, like)
                    rng.reseed(_int(rng.fold(loop.seed, "step", state.step)), like.device)
                    if isinstance(loop.schedule, str):
                        factor = SCHEDULES[loop.schedule](state.step / loop.steps)
                        for group, rate in zip(loop.optimizer.param_groups, rates, strict=True):
                            group["lr"] = rate * factor
                    value, report = loss(x, y, state.step)
                    logging = state.step % loop.log_every == 0 or state.step + 1 == loop.steps
                    _step(loop, module, value, state.step, name_of, look=logging or like.device.type == "cpu")
                    if scheduler is not None:
                        scheduler.step()
                    if logging:
                        record = {name: float(number.detach()) for name, number in report.items()}
                        seconds = time.monotonic() - started
                        state.history.append({"step": float(state.step), **record, "seconds": seconds})
                        progress.update(state.step + 1, **record)
                    state.step += 1
                    last_of_epoch = index + 1 == data.batches
                    if last_of_epoch and validate is not None:
                        best = _judge(loop, module, validate, state, best)
                    if loop.checkpoint is not None and (
                        state.step % loop.checkpoint_every == 0 or state.step == loop.steps or state.stopped
                    ):
                        _save(loop, module, scheduler, state, best, key)
                    if state.step >= loop.steps or state.stopped:
                        break
        except KeyboardInterrupt:
            # The parameters are those of the last whole step: optimizers update in place, and a torn update is possible
            # only between two of its kernels, which a checkpoint never sees.
            state.stopped = "interrupted"
            if loop.checkpoint is not None and state.step > first:
                _save(loop, module, scheduler, state, best, key)
    state.stopped = state.stopped or "finished"
    if best is not None:
        module.load_state_dict(best)
    module.eval()
    return state


def _int(seed: rng.Seed) -> int:
    assert isinstance(seed, int)
    return seed


def _step(loop: Loop, module: nn.Module, value: Tensor, step: int, name_of: Callable[[str], str], look: bool) -> None:
    loop.optimizer.zero_grad(set_to_none=True)
    value.backward()
    if loop.clip is not None:
        nn.utils.clip_grad_norm_((p for g in loop.optimizer.param_groups for p in g["params"]), loop.clip)
    if look and not bool(value.isfinite()):
        raise FloatingPointError(_blame(module, step, float(value.detach()), name_of))
    if look and step % loop.log_every == 0:
        bad = [
            name for name, p in module.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())
        ]
        if bad:
            raise FloatingPointError(_blame(module, step, float(value.detach()), name_of))
    loop.optimizer.step()


def _blame(module: nn.Module, step: int, value: float, name_of: Callable[[str], str]) -> str:
    """Which tensor is not finite: a parameter before a gradient."""
    found = "the loss itself: check the data and the likelihood"
    for name, p in module.named_parameters():
        if not bool(p.isfinite().all()):
            found = f"the parameter {name_of(name)}"
            break
    else:
        for name, p in module.named_parameters():
            if p.grad is not None and not bool(p.grad.isfinite().all()):
                found = f"the gradient of {name_of(name)}"
                break
    return (
        f"step {step}: the loss is {value}; the first tensor that is not finite is {found}. The last checkpoint is "
        "untouched; try a smaller lr, clip=1.0 or standardised inputs"
    )


def _judge(
    loop: Loop, module: nn.Module, validate: Callable[[], float], state: State, best: dict[str, Tensor] | None
) -> dict[str, Tensor] | None:
    score = validate()
    module.train()
    if state.history:
        state.history[-1]["validation"] = score
    if score < state.best:
        state.best, state.waited = score, 0
        return {name: tensor.clone() for name, tensor in no_grad_state(module).items()}
    state.waited += 1
    if loop.patience is not None and state.waited >= loop.patience:
        state.stopped = "early"
    return best


def _save(
    loop: Loop,
    module: nn.Module,
    scheduler: LRScheduler | None,
    state: State,
    best: dict[str, Tensor] | None,
    key: str,
) -> None:
    tensors, tree = split(loop.optimizer.state_dict(), "optimizer")
    tensors |= {f"module.{name}": tensor for name, tensor in no_grad_state(module).items()}
    tensors |= {f"best.{name}": tensor for name, tensor in (best or {}).items()}
    config: dict[str, Any] = {
        "kind": "checkpoint",
        "key": key,
        "optimizer": tree,
        "scheduler": None if scheduler is None else split(scheduler.state_dict(), "")[1],
        "state": {name: getattr(state, name) for name in ("step", "best", "waited", "history")},
        "stopped": state.stopped if state.stopped == "early" else "",
    }
    assert loop.checkpoint is not None
    write_file(loop.checkpoint, tensors, config)


def _restore(
    loop: Loop, module: nn.Module, scheduler: LRScheduler | None, key: str
) -> tuple[State, dict[str, Tensor] | None]:
    assert loop.checkpoint is not None
    tensors, config = read_file(loop.checkpoint, "checkpoint")
    if config["key"] != key:
        raise FileError(
            f"the checkpoint {loop.checkpoint} belongs to another run (method, network, data, prior, likelihood "
            "or seed); delete it, or pass the arguments it was started with"
        )
    module.load_state_dict({k.removeprefix("module."): v for k, v in tensors.items() if k.startswith("module.")})
    loop.optimizer.load_state_dict(join(tensors, config["optimizer"]))
    if scheduler is not None:
        scheduler.load_state_dict(join(tensors, config["scheduler"]))
    best = {k.removeprefix("best."): v for k, v in tensors.items() if k.startswith("best.")}
    state = State(**config["state"], stopped=config["stopped"])
    return state, best or None


def parameter_groups(module: nn.Module, lr: float, scale_lr: float) -> list[dict[str, Any]]:
    """Two groups: the log-stds and rates of guides with a learning rate of their own, and everything else."""
    scales: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            leaf, inside_flow = name.rpartition(".")[2], ".transform." in name
            (scales if leaf in ("log_std", "logit_p", "log_scale") and not inside_flow else rest).append(parameter)
    groups: Iterable[dict[str, Any]] = ({"params": rest, "lr": lr}, {"params": scales, "lr": scale_lr})
    return [group for group in groups if group["params"]]
