"""Scores with a confidence interval, by the bootstrap over rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bayou.core import rng

DRAWS = 200  # of the rows, by default
LEVEL = 0.9  # of an interval, by default


@final
@dataclass(frozen=True)
class IntervalEstimate:
    """A score of N rows with a confidence interval; ``float(estimate)`` is the score.

    Args:
        value: the score of all rows.
        low: the lower end of the interval.
        high: the upper end.
        level: the probability with which the interval is to contain the expected score.
    """

    value: float
    low: float
    high: float
    level: float = LEVEL

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


def bootstrap(
    statistic: Callable[[Tensor], float],
    rows: int,
    *,
    draws: int = DRAWS,
    level: float = LEVEL,
    seed: rng.Seed = 0,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> IntervalEstimate:
    """Return a score and its basic bootstrap interval (Davison & Hinkley 1997, section 5.2).

    The interval is [2t − t*_(1 − α), 2t − t*_(α)] for the score t of all rows and the quantiles of
    the scores t* of rows drawn with replacement. A score that is an absolute difference is larger
    for drawn rows than for all, and for all than in expectation: the interval corrects both and
    may lie below the score.

    Args:
        statistic: computes the score of the rows with these numbers.
        rows: N.
        draws: the number of times that N rows are drawn, 200 by default.
        level: of the interval, 0.9 by default.
        seed: of the draws.
        bounds: of the score, to which the interval is cut.

    Returns:
        The score and its interval.

    Raises:
        ValueError: for no rows, fewer than 2 draws or a level outside of (0, 1).
    """
    if rows < 1:
        raise ValueError("there are no examples to score")
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 2:
        raise ValueError(f"draws must be a whole number of at least 2, got {draws!r}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level}")
    value = statistic(torch.arange(rows))
    like = torch.empty(0, dtype=torch.float64)
    scores = []
    for draw in range(draws):
        u = rng.uniform(1, (rows,), like, rng.fold(seed, "bootstrap", draw))[0]
        scores.append(statistic((u * rows).long().clamp_max(rows - 1)))
    levels = torch.tensor([0.5 - level / 2, 0.5 + level / 2], dtype=torch.float64)
    first, last = torch.tensor(scores, dtype=torch.float64).quantile(levels).tolist()
    low = min(max(2 * value - last, bounds[0]), bounds[1])
    high = min(max(2 * value - first, bounds[0]), bounds[1])
    return IntervalEstimate(value, low, high, level)
