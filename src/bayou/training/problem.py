"""What the training loop minimizes: a module with a loss; and what the parts of a run share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayou.training.checkpoints import RunState
from bayou.training.data import Data
from bayou.training.inputs import Batch
from bayou.training.settings import Settings

Numbers = dict[str, Tensor]  # numbers of a step to report, by name


class Problem(nn.Module, ABC):
    """The objective of a run: ``loss`` over the parameters of this module.

    A subclass overrides the methods that it needs. Values that vary from step to step must be
    tensors filled by ``before_step``: on a GPU a loss that is compiled or ``recordable`` is
    recorded together with the optimizer and replayed as one graph.
    """

    title: str = "fitting"
    # The number of dimensions of the objective; None: all trained parameters.
    dimension: int | None = None
    # The multiply-adds of the largest product of a forward pass; None if they are not known.
    work: int | None = None
    # Whether the uncompiled loss has the same operations in every step, without branches.
    recordable: bool = False
    # The version of the loss: when it changes, the step is recorded again.
    version: int = 0
    # The tensor that receives the norm of the gradients before they are clipped, if any.
    norm: Tensor | None = None
    # Whether the loss of a batch is the same function of the parameters in all steps, up to noise.
    loss_is_stationary: bool = False
    # Whether evaluations do not reduce the patience yet.
    warming: bool = False
    # Checks the batches of the first epoch before they are used.
    check_batch: Callable[[Batch], None] | None = None

    @abstractmethod
    def loss(self, x: Any, y: Tensor) -> tuple[Tensor, Numbers]:
        """Compute the loss of a batch, a scalar, and numbers to report."""

    def make_optimizer(self, settings: Settings, steps: int) -> torch.optim.Optimizer:
        """Build the optimizer of all parameters that are not frozen.

        Args:
            settings: the learning rate and the type of the optimizer.
            steps: the number of planned steps.

        Raises:
            ValueError: if every parameter is frozen.
        """
        free = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not free:
            raise ValueError(
                "every parameter of the network is frozen (requires_grad=False): nothing to learn"
            )
        return settings.make_optimizer([{"params": free, "lr": settings.lr}])

    def before_step(self, step: int, steps: int) -> None:
        """Prepare step number ``step`` of ``steps`` planned ones."""

    def after_step(self, numbers: Numbers) -> bool | None:
        """Update state outside the graph after a step; True ends the run.

        ``numbers`` may be changed before they are recorded.
        """

    def objective(self, numbers: Numbers) -> Tensor | None:
        """Return the objective of a step in nats for all data; None if it is not monitored.

        It increases until the run has converged.
        """
        return None

    def name_of(self, name: str) -> str:
        """Return the user's name for a parameter of this module."""
        return repr(name.removeprefix("net."))


@dataclass(frozen=True)
class Hooks:
    """Functions that a run calls in addition to its problem.

    Args:
        held_out_loss: computes the validation loss after every epoch; the parameters with the
            lowest one are kept. Default: none.
        after_gradients: changes the gradients of a step, given its number; such a step is not
            recorded as a CUDA graph. Default: none.
        after_record: is called with every new record of the history. Default: none.
    """

    held_out_loss: Callable[[], float] | None = None
    after_gradients: Callable[[int], None] | None = None
    after_record: Callable[[dict[str, float]], None] | None = None


@dataclass(frozen=True)
class Setup:
    """What the parts of a run have in common.

    Args:
        problem: the module with the loss.
        data: the batches.
        settings: the length of the run, its optimizer and its schedule.
        seed: the seed of batches and noise.
        hooks: functions that are called during the run.
        optimizer: changes the parameters.
        state: the progress of the run.
        device: that of the parameters.
    """

    problem: Problem
    data: Data
    settings: Settings
    seed: int
    hooks: Hooks
    optimizer: torch.optim.Optimizer
    state: RunState
    device: torch.device
