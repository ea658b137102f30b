"""A rough estimate of how long a run takes, before its first fit."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from bayou.app.runs.config import Config
from bayou.core.progress import duration
from bayou.likelihoods import BoundLikelihood
from bayou.select.full_batch import MAX_FULL_BATCH_ROWS
from bayou.select.named import find

# Cost of the search of the prior with its modes, in thousands of passes over all rows.
SEARCH_COST: Final = 3.5
MEASURED_STEPS: Final = 1200  # of the fits behind the measured costs, on average
MAX_SEARCH_BATCH_ROWS: Final = 512  # rows of a step where there are too many for full batches
MIN_SEARCH_EFFORT: Final = 0.25  # a small effort shortens the search by no more
MAX_TIMED_STEPS: Final = 20
MAX_TIMED_SECONDS: Final = 0.2


def estimate_seconds(
    methods: Sequence[str],
    config: Config,
    rows: int,
    seconds: tuple[float, float],
) -> float:
    """Estimate the time of fits one after the other, if the machine stays as fast as it is now.

    Args:
        methods: their names, one for each fit; those without a known cost count as nothing.
        config: the length of the fits.
        rows: training rows.
        seconds: of one optimizer step on a batch, and of one on the rows of a step of the search.
    """
    batch_seconds, search_seconds = seconds
    length = _relative_length(config, rows)
    search_effort = max(config.effort, MIN_SEARCH_EFFORT)
    total = 0.0
    for name in methods:
        method = find(name)
        cost = method.cost or 0.0
        search_cost = min(cost, SEARCH_COST) if method.selects_prior else 0.0
        total += 1000 * search_cost * search_effort * search_seconds
        total += 1000 * (cost - search_cost) * length * batch_seconds
    return total


def describe_duration(methods: Sequence[str], seconds: float, rows: int) -> str:
    """Return a sentence about the time of a run.

    Args:
        methods: the names of all fits.
        seconds: as estimated.
        rows: training rows.
    """
    fits = "1 fit" if len(methods) == 1 else f"{len(methods)} fits"
    unknown = [name for name in dict.fromkeys(methods) if find(name).cost is None]
    without = f", not counting {', '.join(unknown)}" if unknown else ""
    return (
        f"{fits} on {rows:,} rows: roughly {duration(max(seconds, 1.0))}{without}, if this machine "
        "stays as fast as it is now"
    )


def step_seconds(net: nn.Module, likelihood: BoundLikelihood, x: Tensor, y: Tensor) -> float:
    """Measure the time of one step of Adam; the network is changed.

    Args:
        net: the network.
        likelihood: of its outputs.
        x: the inputs of the step.
        y: their targets.
    """
    optimizer = torch.optim.Adam(net.parameters())
    step = 0
    start = time.monotonic()
    while True:
        optimizer.zero_grad()
        loss = -likelihood.log_prob(net(x), y).mean()
        loss.backward()
        optimizer.step()
        now = time.monotonic()
        if step == 0:
            start = now  # the first step sets up buffers
        elif step >= MAX_TIMED_STEPS or now - start > MAX_TIMED_SECONDS:
            return (now - start) / step
        step += 1


def search_rows(rows: int) -> int:
    """Return how many rows a step of the search has.

    Args:
        rows: training rows.
    """
    return rows if rows <= MAX_FULL_BATCH_ROWS else MAX_SEARCH_BATCH_ROWS


def _relative_length(config: Config, rows: int) -> float:
    """Return the length of the fits in units of those behind the measured costs."""
    if config.steps is not None:
        return config.steps / MEASURED_STEPS
    if config.epochs is not None:
        return config.epochs * math.ceil(rows / config.batch_size) / MEASURED_STEPS
    return config.effort
