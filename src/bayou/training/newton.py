"""A second-order finish: from the end of stochastic descent to the optimum of a small problem, by
L-BFGS.
"""

from __future__ import annotations

import math
import time
import warnings
from typing import Final

import torch

from bayou.progress import Progress, Show, spell
from bayou.training.checkpoints import State
from bayou.training.convergence import ConvergenceWarning, negligible
from bayou.training.data import Data
from bayou.training.guards import Interrupt
from bayou.training.loop import Problem, move
from bayou.training.settings import Settings
from bayou.training.threads import suitable_threads

ROUND: Final = 25  # iterations between two tests of the gain
MIN_PASSES: Final = 50  # over the data; with fewer the finish is skipped
MIN_GAIN: Final = 1e-3  # nats: a round that gains less is the last


def passes_for(settings: Settings, data: Data) -> int:
    """Passes over the data at the cost of the initial plan of the run; 0 if they are too few to be
    useful.

    For tensors only: a Dataset may return other rows in another pass.
    """
    passes = settings.total_steps(data) // data.batches
    wanted = settings.open_ended and settings.optimizer is None and data.targets() is not None
    return passes if wanted and passes >= MIN_PASSES else 0


def finish(
    problem: Problem,
    data: Data,
    passes: int,
    state: State,
    progress: Show,
    *,
    enough: float = MIN_GAIN,
) -> None:
    """Minimize the loss over all data, from the current parameters, by L-BFGS with a strong Wolfe
    line search.

    The loss of all data is the mean over batches, weighted by rows. It ends when ``ROUND``
    iterations gain less than ``enough`` nats, or after about ``passes`` passes. It is
    deterministic, so that a killed run ends at the same point. A record with "step" and the numbers
    of the problem is added to the history.
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
                    now = (
                        float(optimizer.step(closure)) * rows
                    )  # the loss at the start of the round
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
    if (
        gain >= max(enough, negligible(sum(p.numel() for p in free)))
        and state.stopped == "finished"
    ):
        state.rising = state.history[-1]["rising"] = 1000 * gain / ROUND
        warnings.warn(
            f"{problem.title} used up its budget of {passes:,} passes while its objective was still rising by "
            f"{gain:.3g} nats in {ROUND} iterations; "
            + spell("standardize the data, or give more steps", "give more --steps"),
            ConvergenceWarning,
            stacklevel=3,
        )
