"""A method: a frozen dataclass whose ``fit`` turns a target and data into a posterior."""

from __future__ import annotations

import operator
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bayou import rng
from bayou.posteriors.posterior import Posterior
from bayou.progress import Show
from bayou.specs import to_json
from bayou.target import Target
from bayou.training.data import Data, Rows
from bayou.training.loop import SCHEDULES, Schedule


class Method(ABC):
    """Nothing happens in the constructor of a method; ``fit`` does the work."""

    batch_size: int = 128

    @abstractmethod
    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: Show = True,
    ) -> Posterior:
        """The posterior of ``target`` given ``data``."""

    def _whole(self, *names: str, least: int = 1) -> None:
        """A ValueError unless these fields are None or whole numbers of at least ``least``."""
        for name in names:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(
                    f"{type(self).__name__} {name} must be a whole number of at least {least}, got {value!r}"
                )

    def _positive(self, *names: str) -> None:
        """A ValueError unless these fields are None or positive."""
        for name in names:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or not value > 0):
                raise ValueError(f"{type(self).__name__} {name} must be positive, got {value!r}")

    def _one_of(self, name: str, choices: Sequence[str]) -> None:
        """A ValueError unless this field is one of the choices."""
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"{type(self).__name__} {name} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Trained(Method):
    """What all methods that descend a gradient have in common.

    ``epochs`` or ``steps``: how long; 2,000 steps or 10 epochs, whichever is more, unless told. ``optimizer``: a
    callable from parameter groups, Adam by default; the groups bring their rates. ``schedule``: "constant", "linear",
    "cosine", "tail", or a callable from an optimizer to a torch scheduler, which is advanced at every step. ``clip``:
    the largest norm of the gradient of the loss. ``validation``: a fraction held out; its negative log-likelihood picks
    the best epoch, and ``patience`` epochs without a better one stop the run. ``compile``: torch.compile the step,
    on a GPU as one CUDA graph. ``autocast``: products in bfloat16, parameters and sums as they are.
    Every ``log_every`` steps a record goes to ``posterior.history``; every ``checkpoint_every`` steps the run is saved,
    if it has a checkpoint. Ctrl-C ends a run after the step at hand and returns the posterior so far,
    ``stopped="interrupted"``.
    """

    epochs: int | None = None
    steps: int | None = None
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
            raise ValueError(f"give epochs or steps, not both: got epochs={self.epochs}, steps={self.steps}")
        self._whole("epochs", "steps", "batch_size", "log_every", "checkpoint_every", "patience")
        self._positive("lr", "clip")
        if not 0 <= self.validation < 1:
            raise ValueError(f"{me} needs 0 <= validation < 1, got validation={self.validation}")
        if self.patience is not None and not self.validation:
            raise ValueError(f"{me} patience watches a validation split; set validation, for example 0.1")
        if isinstance(self.schedule, str) and self.schedule not in SCHEDULES:
            raise ValueError(
                f"{me} schedule must be one of {', '.join(SCHEDULES)} or a callable, got {self.schedule!r}"
            )

    def total_steps(self, data: Data) -> int:
        """How many optimizer steps the run has."""
        if self.steps is not None:
            return self.steps
        return self.epochs * data.batches if self.epochs is not None else max(2000, 10 * data.batches)

    def _split(self, data: Data, seed: int) -> tuple[Data, Data | None]:
        """The data to learn from, and those held out."""
        if not self.validation:
            return data, None
        if not isinstance(data, Rows):
            raise ValueError("a validation split needs tensors or a Dataset; split a DataLoader's data yourself")
        return data.split(self.validation, part_seed(seed, "validation"))

    def _make_optimizer(self, groups: Any) -> torch.optim.Optimizer:
        me = type(self).__name__
        if self.optimizer is None:
            cuda = self.compile and groups[0]["params"][0].is_cuda  # a step that is recorded needs its state there
            return torch.optim.Adam(groups, fused=True, capturable=True) if cuda else torch.optim.Adam(groups)
        optimizer = self.optimizer(groups)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"{me} optimizer must return a torch optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(f"{me} cannot use LBFGS, which evaluates a step many times; use Adam or SGD")
        return optimizer


def identity(method: Method, target: Target, data: Data, seed: int) -> dict[str, Any]:
    """What tells a run from others; where its weights start and how often it is saved do not."""
    spec = to_json(method)
    spec["fields"].pop("checkpoint_every", None)
    return {
        "method": spec,
        "prior": to_json(target.prior),
        "likelihood": to_json(target.likelihood_spec),
        "network": [
            re.sub("0x[0-9a-f]+", "", repr(target.net)),
            {name: list(value.shape) for name, value in target.net.named_parameters()},
        ],
        "data": data.fingerprint(),
        "seed": seed,
    }


def whole_seed(seed: Any) -> int:
    """The seed of a run as an int, or a ValueError."""
    try:
        if isinstance(seed, bool):
            raise TypeError
        return operator.index(seed)
    except TypeError:
        raise ValueError(f"the seed of a run must be a whole number, got {seed!r}") from None


def part_seed(seed: int, *names: str | int) -> int:
    """The seed of a named part of a run."""
    folded = rng.fold(seed, *names)
    assert isinstance(folded, int)
    return folded
