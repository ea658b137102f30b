"""A test of convergence of a noisy objective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles, variance

from bayou.progress import BayouWarning

BUDGET = 10  # times the first plan of a run without a given length
GROWTH = 1.6  # of the plan, where the objective is not flat yet
EPOCHS = 20  # in the first plan, from which on the means are of whole epochs
CELLS = 48  # means of the objective that the first plan is cut into
SPREAD = 0.1  # a gain below this part of √(D/2) is none: the log joint itself varies by √(D/2) nats under the posterior
WINDOW = 225  # steps that the last fifth before the rates fall has at least, in a run whose length is not given
JUDGED = 12  # minimum number of steps for a test


class ConvergenceWarning(BayouWarning):
    """A fit came to the end of its budget while its objective was still rising, or lower than it
    had been.
    """


@dataclass(frozen=True)
class Trend:
    """The change of an objective between the last two parts of a run: ``gain`` ± ``error`` nats in
    ``steps`` steps.
    """

    gain: float
    error: float
    steps: int

    @property
    def rate(self) -> float:
        """Nats per thousand steps."""
        return 1000 * self.gain / self.steps

    def flat(self, weights: int) -> bool:
        """Whether the gain is within its noise, or negligible compared with the spread of the log
        joint of D weights.

        The gain of a short run is extrapolated at its rate.
        """
        return self.gain < max(2 * self.error, negligible(weights) * min(1.0, self.steps / WINDOW))


def negligible(weights: int) -> float:
    """Nats that are negligible compared with the spread of the log joint of D weights."""
    return SPREAD * math.sqrt(weights / 2)


def cell_width(plan: int, epoch: int) -> int:
    """The number of steps whose objectives are averaged: whole epochs, if there are enough of
    them.
    """
    width = max(1, plan // CELLS)
    return max(1, width // epoch) * epoch if plan >= EPOCHS * epoch else width


def trend(cells: Sequence[float], width: int, parts: int = 5) -> Trend | None:
    """The trend of means over ``width`` steps each, from one fifth to the next; None if there are
    too few.
    """
    part = len(cells) // parts
    if part < 3:
        return None
    before, last = cells[-2 * part : -part], cells[-part:]
    error = math.sqrt((variance(before) + variance(last)) / part)
    return Trend(fmean(last) - fmean(before), error, part * width)


def fallen(values: Sequence[float]) -> float:
    """How far a noisy objective ended below its maximum; 0 if that is within its noise.

    The quartiles of the last and of the best fifth must not overlap, and the medians must differ by
    more than the interquartile range of the best. Single bad steps have no effect.
    """
    part = len(values) // 5
    if part < 8:
        return 0.0
    fifths = [quantiles(values[len(values) - i * part :][:part], n=4) for i in range(1, 6)]
    last, best = fifths[0], max(fifths, key=lambda quartiles: quartiles[1])
    gap = best[1] - last[1]
    return gap if last[2] < best[0] and gap > best[2] - best[0] else 0.0
