"""One number that makes predictions fit rows that were held out: a temperature, or a scale of the noise."""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayou.predictive import Predictive

MAX_LOG_TEMPERATURE, STEP = 5.0, 0.25  # log T is searched in ±MAX_LOG_TEMPERATURE, first on a grid of STEP
GOLDEN = (math.sqrt(5.0) - 1) / 2
NARROW = 1e-7  # of log T


class Calibration(NamedTuple):
    """What was learned, and the mean −log p(y | x) of the held-out rows before and after, in nats.

    Of the same rows that taught it, so that some 1/2n nats of the difference are their own; judge it on others.
    """

    temperature: float
    before: float
    after: float


@torch.no_grad()
def best_temperature(p: Predictive, y: Tensor) -> Calibration:
    """The T of argmin_T −mean log 1/S Σ_s p(y | f_s, T), in float64.

    Convex in 1/T for the logits of one function, and in 1/T² for its Gaussian noise; a mixture need not be, so that
    a grid finds the valley before its bottom is searched for by golden sections.
    """
    likelihood, outputs = copy.deepcopy(p.likelihood).double(), p.outputs.double()
    y = y.to(outputs.device)

    def nll(log_t: float) -> float:
        return -float(Predictive(*likelihood.tempered(outputs, math.exp(log_t))).log_prob(y).mean())

    before = nll(0.0)
    if math.isnan(before):
        raise ValueError("no rows, or predictions that are not numbers: nothing to calibrate by")
    steps = round(MAX_LOG_TEMPERATURE / STEP)
    grid = [STEP * k for k in range(-steps, steps + 1)]
    middle = min(grid, key=nll)
    if abs(middle) == MAX_LOG_TEMPERATURE:
        small = "smaller and smaller", "they are too few (all of them right, say), or the draws alone spread too wide"
        large = "larger and larger", "the posterior says nothing true about them; are they of this task?"
        side, why = small if middle < 0 else large
        raise ValueError(f"the {len(y):,} held-out rows want {side} temperatures, beyond {math.exp(middle):.3g}: {why}")
    low, high = middle - STEP, middle + STEP
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = nll(left), nll(right)
    while high - low > NARROW:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = nll(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = nll(right)
    best = (low + high) / 2
    return Calibration(math.exp(best), before, nll(best))
