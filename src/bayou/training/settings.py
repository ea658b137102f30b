"""The settings of gradient descent, common to all gradient-based methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bayou.specs import Checked
from bayou.training.data import Data, Rows
from bayou.training.seeds import part_seed

Schedule = str | Callable[[float], float]
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    "tail": lambda t: min(1.0, 4 * (1 - t)),  # constant, then down to 0 over the last quarter
}


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """Settings of all gradient-based methods.

    Ctrl-C ends a run after the step at hand and returns the posterior so far,
    ``stopped="interrupted"``.

    Args:
        epochs: how many passes over the data; this or ``steps``.
        steps: how many optimizer steps. Unless one of the two is given, 2,000 steps or 10 epochs,
            whichever is more, and on until the objective has flattened (see ``convergence``), up to
            ten times as many.
        effort: multiplies this default length.
        batch_size: rows in a step.
        lr: the learning rate.
        optimizer: a callable from parameter groups, which have their learning rates, to an
            optimizer; None is Adam.
        schedule: the factor of the learning rates as a function of the fraction of the run that is
            done: "constant", "linear", "cosine", "tail" (down to 0 over the last quarter), or a
                callable.
        clip: the largest norm of the gradient of the loss; None does not clip.
        validation: a fraction of the rows to hold out; their negative log-likelihood selects the
            best epoch.
        patience: so many epochs without a better one stop the run; None does not stop it.
        compile: use torch.compile for the step, on a GPU as one CUDA graph.
        autocast: compute products in bfloat16; parameters and sums keep their dtype.
        log_every: steps between two records of ``posterior.history``.
        checkpoint_every: steps between two checkpoints, if the run has a checkpoint file.
    """

    epochs: int | None = None
    steps: int | None = None
    effort: float = 1.0
    batch_size: int = 128
    lr: float = 1e-3
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    schedule: Schedule = "tail"
    clip: float | None = None
    validation: float = 0.0
    patience: int | None = None
    compile: bool = False
    autocast: bool = False
    log_every: int = 50
    checkpoint_every: int = 200

    def __post_init__(self) -> None:
        me = type(self).__name__
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"give epochs or steps, not both: got epochs={self.epochs}, steps={self.steps}"
            )
        self._check_whole(
            "epochs", "steps", "batch_size", "log_every", "checkpoint_every", "patience"
        )
        self._check_positive("lr", "clip")
        self._check_positive("effort")
        if not 0 <= self.validation < 1:
            raise ValueError(f"{me} needs 0 <= validation < 1, got validation={self.validation}")
        if self.patience is not None and not self.validation:
            raise ValueError(
                f"{me} patience needs a validation split; set validation, for example 0.1"
            )
        if isinstance(self.schedule, str) and self.schedule not in SCHEDULES:
            raise ValueError(
                f"{me} schedule must be one of {', '.join(SCHEDULES)} or a callable, got {self.schedule!r}"
            )

    def total_steps(self, data: Data) -> int:
        """The number of optimizer steps."""
        if self.steps is not None:
            return self.steps
        if self.epochs is not None:
            return self.epochs * data.batches
        return max(1, round(self.effort * max(2000, 10 * data.batches)))

    @property
    def open_ended(self) -> bool:
        """Whether the run continues until convergence: no length was given, and the schedule allows
        it.
        """
        return self.steps is None and self.epochs is None and self.schedule in ("tail", "constant")

    def turn(self, total: int) -> int:
        """The step at which the learning rates start to decrease."""
        return 3 * total // 4 if self.schedule == "tail" else total

    def split(self, data: Data, seed: int) -> tuple[Data, Data | None]:
        """Training data and held-out data."""
        if not self.validation:
            return data, None
        if not isinstance(data, Rows):
            raise ValueError(
                "a validation split needs tensors or a Dataset; split a DataLoader's data yourself"
            )
        return data.split(self.validation, part_seed(seed, "validation"))

    def make_optimizer(self, groups: Any) -> torch.optim.Optimizer:
        """The optimizer of parameter groups with their learning rates."""
        me = type(self).__name__
        if self.optimizer is None:
            like = groups[0]["params"][0]
            recorded = (
                self.compile and like.is_cuda
            )  # a recorded step needs its state on the device
            return torch.optim.Adam(
                groups, fused=True if recorded or like.is_cpu else None, capturable=recorded
            )
        optimizer = self.optimizer(groups)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"{me} optimizer must return a torch optimizer, got {type(optimizer).__name__}"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                f"{me} cannot use LBFGS, which evaluates a step many times; use Adam or SGD"
            )
        return optimizer

    def rate(self, done: float) -> float:
        """The factor of the initial learning rates after a fraction of the run."""
        return (
            SCHEDULES[self.schedule](done)
            if isinstance(self.schedule, str)
            else self.schedule(done)
        )
