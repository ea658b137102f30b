"""A test of convergence of a noisy objective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles, variance

from bayou.core.progress import BayouWarning

MAX_BUDGET_RATIO = 10  # steps of a run without a given length, as a multiple of the first plan
PLAN_GROWTH = 1.6  # factor of the plan where the objective is not flat yet
MIN_EPOCHS = 20  # epochs in the first plan from which on the means are of whole epochs
CELLS = 48  # number of means of the objective in the first plan
# A gain below this fraction of √(D/2) is negligible: under the posterior the log joint of D weights
# itself varies by √(D/2) nats.
NEGLIGIBLE_FRACTION = 0.1
# The smallest number of steps in the last fifth before the learning rates fall, in a run without a
# given length.
MIN_FIFTH_STEPS = 225
MIN_TESTED_STEPS = 12  # the smallest number of steps for a test
MIN_CELLS_IN_SECTION = 3  # for a standard error
MIN_VALUES_IN_FIFTH = 8  # for quartiles


class ConvergenceWarning(BayouWarning):
    """Warns that a fit used up its budget while its objective was still rising, or fell."""


@dataclass(frozen=True)
class Trend:
    """The change of an objective between the last two sections of a run.

    Args:
        gain: the difference of the means of the sections, in nats.
        error: the standard error of the gain.
        steps: the number of steps from one section to the next.
    """

    gain: float
    error: float
    steps: int

    @property
    def rate(self) -> float:
        """The gain in nats per thousand steps."""
        return 1000 * self.gain / self.steps

    def is_flat(self, weights: int) -> bool:
        """Return whether the gain is within its noise, or negligible for so many weights.

        The gain of a short run is extrapolated at its rate.
        """
        fraction_of_window = min(1.0, self.steps / MIN_FIFTH_STEPS)
        return self.gain < max(2 * self.error, negligible(weights) * fraction_of_window)


def negligible(weights: int) -> float:
    """Return the nats that are negligible beside the spread of the log joint of D weights."""
    return NEGLIGIBLE_FRACTION * math.sqrt(weights / 2)


def cell_width(plan: int, epoch: int) -> int:
    """Return the number of steps whose objectives are averaged: whole epochs, if there are enough.

    Args:
        plan: the number of planned steps.
        epoch: the number of steps in an epoch.
    """
    width = max(1, plan // CELLS)
    if plan >= MIN_EPOCHS * epoch:
        return max(1, width // epoch) * epoch
    return width


def trend(cells: Sequence[float], width: int, sections: int = 5) -> Trend | None:
    """Return the change from the last section but one of a run to its last.

    Args:
        cells: means of the objective.
        width: the number of steps of each mean.
        sections: the number of sections of the run; by default fifths are compared.

    Returns:
        The trend; None if there are too few means.
    """
    size = len(cells) // sections
    if size < MIN_CELLS_IN_SECTION:
        return None
    previous = cells[-2 * size : -size]
    last = cells[-size:]
    error = math.sqrt((variance(previous) + variance(last)) / size)
    return Trend(fmean(last) - fmean(previous), error, size * width)


def fall_from_maximum(values: Sequence[float]) -> float:
    """Return how far a noisy objective ended below its maximum; 0 if that is within its noise.

    The quartiles of the last and of the best fifth must not overlap, and the medians must differ by
    more than the interquartile range of the best. Single bad steps have no effect.

    Args:
        values: the objective at equally spaced steps.
    """
    size = len(values) // 5
    if size < MIN_VALUES_IN_FIFTH:
        return 0.0
    fifths = [quantiles(values[len(values) - i * size :][:size], n=4) for i in range(1, 6)]
    last = fifths[0]
    best = max(fifths, key=lambda quartiles: quartiles[1])
    gap = best[1] - last[1]
    is_significant = last[2] < best[0] and gap > best[2] - best[0]
    return gap if is_significant else 0.0
