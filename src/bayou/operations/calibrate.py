"""Calibration of predictions by one temperature, learned from held-out rows."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayou.core import rng
from bayou.posteriors import Posterior
from bayou.predictive import Predictive
from bayou.training.rows import all_rows, check_held_out

MAX_LOG_TEMPERATURE, STEP = (
    5.0,
    0.25,
)  # log T is searched in ±MAX_LOG_TEMPERATURE, first on a grid of STEP
NARROW = 1e-7  # of log T


class Calibration(NamedTuple):
    """What was learned, and the mean −log p(y | x) of the held-out rows before and after, in nats.

    These rows determined it, which accounts for about 1/2n nats of the difference; evaluate it on
    others.
    """

    temperature: float
    before: float
    after: float


def calibrate(
    posterior: Posterior,
    held: Any,
    *,
    samples: int | None = None,
    seed: rng.Seed = 0,
    train: Any = None,
) -> Calibration:
    """Learn one number on held-out rows: a temperature for classes, a scale of the noise for
    numbers.

    argmin_T −Σ_n log 1/S Σ_s p(y_n | f_s(x_n), T), with softmax(f/T) (below 1 as
    ``BoundLikelihood.temper`` says) or noise T·σ (Guo 2017). The posterior and its files store
    it, replacing an earlier one; ``predict`` applies it from then on, and
    ``posterior.temperature = 1.0`` removes it. The ELBO, the evidence and ``sample`` do not change.

    Args:
        posterior: what predicts y.
        held: rows (x, y), a Dataset or a DataLoader, that the fit has not seen.
        samples: draws of the weights; None: as many as ``predict`` takes.
        seed: of the draws.
        train: the training data, where they are at hand, to see that no row is in both.
    """
    if train is not None:
        check_held_out(held, train)
    x, y = all_rows(held)
    plain = copy.copy(posterior)
    plain.temperature = 1.0
    found = best_temperature(plain.predict(x, samples, seed=seed), y)
    posterior.temperature = found.temperature
    return found


@torch.no_grad()
def best_temperature(p: Predictive, y: Tensor) -> Calibration:
    """The T of argmin_T −mean log 1/S Σ_s p(y | f_s, T), in float64.

    Convex in 1/T for the logits of one function, and in 1/T² for its Gaussian noise. A mixture need
    not be: the best point of a grid brackets the minimum, which ever finer grids then find.
    """
    likelihood, outputs = copy.deepcopy(p.likelihood).double(), p.outputs.double()
    y = y.to(outputs.device)

    def nll(log_t: float) -> float:
        return -float(Predictive(*likelihood.temper(outputs, math.exp(log_t))).log_prob(y).mean())

    before = nll(0.0)
    if math.isnan(before):
        raise ValueError("no rows, or predictions that are NaN: nothing to calibrate by")
    steps = round(MAX_LOG_TEMPERATURE / STEP)
    grid = [STEP * k for k in range(-steps, steps + 1)]
    middle = min(grid, key=nll)
    if abs(middle) == MAX_LOG_TEMPERATURE:
        small = (
            "below",
            "they are too few (all predicted correctly, for example), or the draws alone vary too much",
        )
        large = (
            "above",
            "the predictions are worse than none; check that these rows belong to this task",
        )
        side, why = small if middle < 0 else large
        limit = f"{side} the limit {math.exp(middle):.3g}"
        raise ValueError(f"the best temperature of the {len(y):,} held-out rows is {limit}: {why}")
    best, step = middle, STEP
    while step > NARROW:
        step /= 3
        best = min((best + k * step for k in range(-2, 3)), key=nll)
    return Calibration(math.exp(best), before, nll(best))
