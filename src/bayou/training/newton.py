"""A second-order finish: from the end of stochastic descent to an optimum, by L-BFGS.

This is the L-BFGS of torch, whose strong Wolfe line search interpolates: for one problem with an
expensive loss it needs fewer passes than ``bayou.training.lbfgs``, which minimizes many small
problems at once.
"""

from __future__ import annotations

import math
import time
import warnings
from typing import Final

import torch
from torch import Tensor, nn

from bayou.core.progress import Progress, Show, spell
from bayou.training.checkpoints import RunState
from bayou.training.convergence import ConvergenceWarning, negligible
from bayou.training.data import Data
from bayou.training.guards import Interrupt
from bayou.training.loop import move
from bayou.training.problem import Problem
from bayou.training.settings import Settings
from bayou.training.threads import suitable_threads

ROUND: Final = 25  # iterations between two tests of the gain
MIN_PASSES: Final = 50  # over the data; with fewer the finish is skipped
MIN_GAIN: Final = 1e-3  # nats: a round that gains less is the last
PAIRS: Final = 20  # differences of points and gradients that L-BFGS stores


def passes_for(settings: Settings, data: Data) -> int:
    """Return the number of passes over the data at the cost of the initial plan of a run.

    For tensors only: a Dataset may return other rows in another pass.

    Args:
        settings: those of the run.
        data: the rows of the run.

    Returns:
        The number of passes; 0 if they are too few to be useful.
    """
    passes = settings.total_steps(data) // data.batches
    has_default_plan = settings.open_ended and settings.optimizer is None
    if has_default_plan and data.targets() is not None and passes >= MIN_PASSES:
        return passes
    return 0


def finish(problem: Problem, data: Data, passes: int, state: RunState, progress: Show) -> None:
    """Minimize the loss over all data, from the current parameters, by L-BFGS.

    The loss of all data is the mean over batches, weighted by rows. It is deterministic, so that a
    killed run ends at the same point. A record with "step" and the numbers of the problem is added
    to the history.

    Args:
        problem: the module with the loss; its parameters are changed.
        data: the rows.
        passes: about how many evaluations of the loss there may be.
        state: the run, which gets the record.
        progress: how to show the progress.
    """
    start_time = time.monotonic()
    problem.eval()
    loss = _FullLoss(problem, data)
    gain = _minimize(loss, passes, state, progress)
    loss()
    problem.zero_grad(set_to_none=True)
    seconds_before = state.history[-1]["seconds"] if state.history else 0.0
    seconds = seconds_before + time.monotonic() - start_time
    step = float(state.step + loss.evaluations)
    state.history.append({"step": step, **loss.numbers, "seconds": seconds})
    min_gain = max(MIN_GAIN, negligible(sum(p.numel() for p in loss.free)))
    if gain >= min_gain and state.stopped == "finished":
        _warn_of_gain(problem, gain, passes, state)


class _FullLoss:
    """The closure of L-BFGS: the loss of all rows, whose gradients it computes."""

    def __init__(self, problem: Problem, data: Data) -> None:
        self.problem = problem
        self.free = [parameter for parameter in problem.parameters() if parameter.requires_grad]
        self.batches = [move(batch, self.free[0]) for batch in data.epoch()]
        self.rows = sum(len(y) for _, y in self.batches)
        self.evaluations = 0
        self.numbers: dict[str, float] = {}  # of the last evaluation

    @torch.enable_grad()
    def __call__(self) -> Tensor:
        """Compute the loss and its gradients, one batch after the other."""
        self.problem.zero_grad(set_to_none=True)
        total = self.free[0].new_zeros((), dtype=torch.float64)
        numbers: dict[str, float] = {}
        for x, y in self.batches:
            value, batch_numbers = self.problem.loss(x, y)
            weight = len(y) / self.rows
            (value * weight).backward()
            total += value.detach().double() * weight
            for name, number in batch_numbers.items():
                numbers[name] = numbers.get(name, 0.0) + float(number) * weight
        self.numbers = numbers
        self.evaluations += 1
        return total


def _minimize(loss: _FullLoss, passes: int, state: RunState, progress: Show) -> float:
    """Run rounds of L-BFGS, and return the gain of the last one in nats."""
    problem = loss.problem
    optimizer = torch.optim.LBFGS(
        loss.free,
        max_iter=min(ROUND, passes),
        max_eval=2 * ROUND,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        history_size=PAIRS,
        line_search_fn="strong_wolfe",
    )
    previous = math.inf
    gain = math.inf
    with (
        suitable_threads(problem.work),
        Progress(f"{problem.title}, finish", passes, progress) as line,
        Interrupt() as interrupt,
    ):
        try:
            while loss.evaluations < passes and gain >= MIN_GAIN:
                values_before = [parameter.detach().clone() for parameter in loss.free]
                with interrupt.defer():
                    # The loss at the start of the round.
                    current = float(optimizer.step(loss)) * loss.rows
                if not all(bool(parameter.isfinite().all()) for parameter in loss.free):
                    _restore(loss.free, values_before)
                    break
                line.update(min(loss.evaluations, passes), **loss.numbers)
                gain = previous - current
                previous = current
        except KeyboardInterrupt:
            state.stopped = "interrupted"
    return gain


@torch.no_grad()
def _restore(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    """Set parameters to earlier values."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _warn_of_gain(problem: Problem, gain: float, passes: int, state: RunState) -> None:
    """Warn that the objective still rose in the last round, and note its rate."""
    rate = 1000 * gain / ROUND
    state.history[-1]["rising"] = rate
    state.rising = rate
    warnings.warn(
        f"{problem.title} used up its budget of {passes:,} passes while its objective was still "
        f"rising by {gain:.3g} nats in {ROUND} iterations; "
        + spell("standardize the data, or give more steps", "give more --steps"),
        ConvergenceWarning,
        stacklevel=4,
    )
