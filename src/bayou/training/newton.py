"""A second-order finish: from where a stochastic descent left off to the optimum of a small problem, by L-BFGS."""

from __future__ import annotations

import math
import time
import warnings
from typing import Final

import torch

from bayou.progress import Progress, Show
from bayou.training.checkpoints import State
from bayou.training.convergence import NotConverged, negligible
from bayou.training.data import Data
from bayou.training.guards import Interrupt
from bayou.training.loop import Problem, move
from bayou.training.settings import Settings
from bayou.training.threads import suitable_threads

ROUND: Final = 25  # iterations between two looks at the gain
LEAST: Final = 50  # passes over the data without which it is not worth a begin
ENOUGH: Final = 1e-3  # nats: a round that gains less is the last


def passes_for(settings: Settings, data: Data) -> int:
    """Passes over the data that cost as much as the first plan of the run; 0 where they are too few to get anywhere.

    For tensors only: a Dataset may give other rows in another pass.
    """
    passes = settings.total_steps(data) // data.batches
    wanted = settings.open_ended and settings.optimizer is None and data.targets() is not None
    return passes if wanted and passes >= LEAST else 0


def finish(problem: Problem, data: Data, passes: int, state: State, progress: Show, *, enough: float = ENOUGH) -> None:
    """Minimise the loss over all data at once, from where the problem is, by L-BFGS with a strong Wolfe search.

    The loss of all data is the mean of those of the batches by their rows. It ends when ``ROUND`` iterations gain less
    than ``enough`` nats, or after about ``passes`` passes. Everything is deterministic, so that a
    killed run ends in the same point. A record with "step" and what the problem reports is added to the history.
    """
    free = [p for p in problem.parameters() if p.requires_grad]
    batches = [move(batch, free[0]) for batch in data.ordered()]
    rows = sum(len(y) for _, y in batches)
    started, numbers, used = time.monotonic(), dict[str, float](), 0

    def closure() -> torch.Tensor:
        nonlocal numbers, used
        optimizer.zero_grad(set_to_none=True)
        total, numbers = free[0].new_zeros((), dtype=torch.float64), {}
        for x, y in batches:
            value, report = problem.loss(x, y)
            (value * (len(y) / rows)).backward()
            total += value.detach().double() * (len(y) / rows)
            for name, number in report.items():
                numbers[name] = numbers.get(name, 0.0) + float(number) * (len(y) / rows)
        used += 1
        return total

    problem.eval()
    optimizer = torch.optim.LBFGS(
        free, max_iter=min(ROUND, passes), max_eval=2 * ROUND, tolerance_grad=0.0, tolerance_change=0.0,
        history_size=20, line_search_fn="strong_wolfe",
    )  # fmt: skip
    last = gain = math.inf
    with (
        suitable_threads(problem.work),
        Progress(f"{problem.title}, finish", passes, progress) as line,
        Interrupt() as interrupt,
    ):
        try:
            while used < passes:
                before = [p.detach().clone() for p in free]
                with interrupt.held():
                    now = float(optimizer.step(closure)) * rows  # the loss where the round began
                if not all(bool(p.isfinite().all()) for p in free):
                    with torch.no_grad():
                        for parameter, value in zip(free, before, strict=True):
                            parameter.copy_(value)
                    break
                line.update(min(used, passes), **numbers)
                gain, last = last - now, now
                if gain < enough:
                    break
        except KeyboardInterrupt:
            state.stopped = "interrupted"
    with torch.enable_grad():
        closure()
    optimizer.zero_grad(set_to_none=True)
    seconds = (state.history[-1]["seconds"] if state.history else 0.0) + time.monotonic() - started
    state.history.append({"step": float(state.step + used), **numbers, "seconds": seconds})
    if gain >= max(enough, negligible(sum(p.numel() for p in free))) and state.stopped == "finished":
        state.rising = state.history[-1]["rising"] = 1000 * gain / ROUND
        warnings.warn(
            f"{problem.title} used up its budget of {passes:,} passes while its objective was still rising by "
            f"{gain:.3g} nats in {ROUND} iterations; standardise the data, or give it more steps",
            NotConverged,
            stacklevel=3,
        )
