"""The settings of gradient descent, common to all gradient-based methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bayou.core.specs import Checked
from bayou.training.data import Data, Rows
from bayou.training.seeds import part_seed

Schedule = str | Callable[[float], float]
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    "tail": lambda t: min(1.0, 4 * (1 - t)),  # constant, then down to 0 over the last quarter
}
# The default length of a run: whichever is more.
MIN_DEFAULT_STEPS = 2000
MIN_DEFAULT_EPOCHS = 10


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """Settings of all gradient-based methods.

    Ctrl-C ends a run after the current step and returns the posterior so far,
    ``stopped="interrupted"``.

    Args:
        epochs: the number of passes over the data; this or ``steps``. Default: None.
        steps: the number of optimizer steps. Unless one of the two is given, 2,000 steps or 10
            epochs, whichever is more, and on until the objective has flattened (see
            ``convergence``), up to ten times as many.
        effort: multiplies this default length. Default: 1.
        batch_size: rows in a step. Default: 128.
        lr: the learning rate. Default: 0.001.
        optimizer: a callable from parameter groups, which have their learning rates, to an
            optimizer; None is Adam. Default: None.
        schedule: the factor of the learning rates as a function of the fraction of the run that is
            done: "constant", "linear", "cosine", "tail" (down to 0 over the last quarter), or a
            callable. Default: "tail".
        clip: the largest norm of the gradient of the loss; None does not clip. Default: None.
        validation: a fraction of the rows to hold out; their negative log-likelihood selects the
            best epoch. Default: 0.
        patience: so many epochs without a better one stop the run; None does not stop it. Default:
            None.
        compile: use torch.compile for the step, on a GPU as one CUDA graph. Default: False.
        autocast: compute products in bfloat16; parameters and sums keep their dtype. Default:
            False.
        log_every: steps between two records of ``posterior.history``. Default: 50.
        checkpoint_every: steps between two checkpoints, if the run has a checkpoint file. Default:
            200.
    """

    epochs: int | None = None
    steps: int | None = None
    effort: float = 1.0
    batch_size: int = 128
    lr: float = 1e-3
    optimizer: Callable[[Any], torch.optim.Optimizer] | str | None = None
    schedule: Schedule = "tail"
    clip: float | None = None
    validation: float = 0.0
    patience: int | None = None
    compile: bool = False
    autocast: bool = False
    log_every: int = 50
    checkpoint_every: int = 200
    named_optimizers: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        class_name = type(self).__name__
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"give epochs or steps, not both: got epochs={self.epochs}, steps={self.steps}"
            )
        self._check_whole(
            "epochs", "steps", "batch_size", "log_every", "checkpoint_every", "patience"
        )
        self._check_positive("lr", "clip")
        self._check_positive("effort")
        if isinstance(self.optimizer, str) and self.optimizer not in self.named_optimizers:
            names = "".join(f", {name!r}" for name in self.named_optimizers)
            raise ValueError(
                f"{class_name} optimizer must be a callable or None{names}, got {self.optimizer!r}"
            )
        if not 0 <= self.validation < 1:
            raise ValueError(
                f"{class_name} needs 0 <= validation < 1, got validation={self.validation}"
            )
        if self.patience is not None and not self.validation:
            raise ValueError(
                f"{class_name} patience needs a validation split; set validation, for example 0.1"
            )
        if isinstance(self.schedule, str) and self.schedule not in SCHEDULES:
            raise ValueError(
                f"{class_name} schedule must be one of {', '.join(SCHEDULES)} or a callable, got "
                f"{self.schedule!r}"
            )

    def total_steps(self, data: Data) -> int:
        """Return the number of planned optimizer steps for these data."""
        if self.steps is not None:
            return self.steps
        if self.epochs is not None:
            return self.epochs * data.batches
        default_steps = max(MIN_DEFAULT_STEPS, MIN_DEFAULT_EPOCHS * data.batches)
        return max(1, round(self.effort * default_steps))

    @property
    def open_ended(self) -> bool:
        """Whether the run continues until convergence.

        So it does if no length was given and the schedule allows it.
        """
        return self.steps is None and self.epochs is None and self.schedule in ("tail", "constant")

    def turn(self, total: int) -> int:
        """Return the step at which the learning rates start to decrease, of ``total`` steps."""
        return 3 * total // 4 if self.schedule == "tail" else total

    def split(self, data: Data, seed: int) -> tuple[Data, Data | None]:
        """Split data into training data and held-out data, if ``validation`` is set.

        Args:
            data: all rows.
            seed: the seed of the run.

        Returns:
            Training data and held-out data, which are None if ``validation`` is 0.
        """
        if not self.validation:
            return data, None
        if not isinstance(data, Rows):
            raise ValueError(
                "a validation split needs tensors or a Dataset; split a DataLoader's data yourself"
            )
        return data.split(self.validation, part_seed(seed, "validation"))

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Build the optimizer.

        Args:
            groups: groups of parameters with their learning rates.

        Raises:
            ValueError: if ``optimizer`` returned something else than an optimizer of single steps.
        """
        class_name = type(self).__name__
        if self.optimizer is None:
            first = groups[0]["params"][0]
            # The state of a step that is recorded must be on the device.
            is_recorded = self.compile and first.is_cuda
            is_fused = True if is_recorded or first.is_cpu else None
            return torch.optim.Adam(groups, fused=is_fused, capturable=is_recorded)
        if isinstance(self.optimizer, str):
            raise ValueError(f"{class_name} makes the optimizer {self.optimizer!r} itself")
        optimizer = self.optimizer(groups)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"{class_name} optimizer must return a torch optimizer, got "
                f"{type(optimizer).__name__}"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                f"{class_name} cannot use LBFGS, which evaluates a step many times; use Adam or SGD"
            )
        return optimizer

    def rate(self, fraction: float) -> float:
        """Return the factor of the initial learning rates after a fraction of the run."""
        if isinstance(self.schedule, str):
            return SCHEDULES[self.schedule](fraction)
        return self.schedule(fraction)
