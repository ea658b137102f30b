"""Calibration of predictions by one temperature, learned from held-out rows."""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayou.core import rng
from bayou.likelihoods.predictive import Predictive
from bayou.posteriors import Posterior
from bayou.training.rows import all_rows, check_held_out

MAX_LOG_TEMPERATURE = 5.0  # log T is searched in ±MAX_LOG_TEMPERATURE
GRID_STEP = 0.25  # of the first grid of log T
MIN_STEP = 1e-7  # of the last grid of log T


class Calibration(NamedTuple):
    """A learned temperature, and the NLL of the held-out rows with and without it.

    These rows determined the temperature, which accounts for about 1/2n nats of the difference;
    evaluate it on other rows.

    Args:
        temperature: T; 1 changes nothing.
        before: the mean −log p(y | x) of the held-out rows at T = 1, in nats.
        after: the same at the learned T.
    """

    temperature: float
    before: float
    after: float


def calibrate(
    posterior: Posterior,
    held_out: object,
    *,
    samples: int | None = None,
    seed: rng.Seed = 0,
    train: object = None,
) -> Calibration:
    """Calibrate predictions by one number: a temperature of classes, a scale of the noise of y.

    argmin_T −Σ_n log 1/S Σ_s p(y_n | f_s(x_n), T), with softmax(f/T) (below 1 as
    ``BoundLikelihood.temper`` says) for classes and noise T·σ for numbers. The posterior and its
    files store T, replacing an earlier one; ``predict`` applies it from then on, and
    ``posterior.temperature = 1.0`` removes it. The ELBO, the evidence and ``sample`` do not change.

    Args:
        posterior: what predicts y. Its ``temperature`` is set.
        held_out: rows (x, y), a Dataset or a DataLoader, that the fit has not seen.
        samples: draws of the weights; None: as many as ``predict`` takes.
        seed: of the draws.
        train: the training data, where they are at hand, to see that no row is in both.

    Returns:
        T, and the NLL of the held-out rows before and after.

    Raises:
        ValueError: if the best T lies at the limit of the search: there are too few rows, or their
            predictions are worse than none.

    Example:
        >>> bayou.calibrate(posterior, (x_held, y_held)).temperature
        1.31

    References:
        Guo, Pleiss, Sun, Weinberger: On calibration of modern neural networks, ICML 2017.
    """
    if train is not None:
        check_held_out(held_out, train)
    x, y = all_rows(held_out)
    uncalibrated = copy.copy(posterior)
    uncalibrated.temperature = 1.0
    calibration = best_temperature(uncalibrated.predict(x, samples, seed=seed), y)
    posterior.temperature = calibration.temperature
    return calibration


@torch.no_grad()
def best_temperature(p: Predictive, y: Tensor) -> Calibration:
    """Find argmin_T −mean log 1/S Σ_s p(y | f_s, T), in float64.

    The NLL is convex in 1/T for the logits of one function, and in 1/T² for its Gaussian noise.
    That of a mixture need not be: the best point of a grid brackets the minimum, which ever finer
    grids then find.

    Args:
        p: predictions of B rows, without a temperature.
        y: their targets.
    """
    likelihood = copy.deepcopy(p.likelihood).double()
    outputs = p.outputs.double()
    y = y.to(outputs.device)

    def nll(log_temperature: float) -> float:
        tempered = likelihood.temper(outputs, math.exp(log_temperature))
        return -float(Predictive(*tempered).log_prob(y).mean())

    before = nll(0.0)
    if math.isnan(before):
        raise ValueError("no rows, or predictions that are NaN: nothing to calibrate by")
    grid_size = round(MAX_LOG_TEMPERATURE / GRID_STEP)
    grid = [GRID_STEP * k for k in range(-grid_size, grid_size + 1)]
    best = min(grid, key=nll)
    if abs(best) == MAX_LOG_TEMPERATURE:
        raise ValueError(_limit_message(best, len(y)))
    step = GRID_STEP
    while step > MIN_STEP:
        step /= 3
        best = min((best + k * step for k in range(-2, 3)), key=nll)
    return Calibration(math.exp(best), before, nll(best))


def _limit_message(log_temperature: float, rows: int) -> str:
    """Return the message for a best temperature at the limit of the search."""
    side = "above"
    reason = "the predictions are worse than none; check that these rows belong to this task"
    if log_temperature < 0:
        side = "below"
        reason = (
            "they are too few (all predicted correctly, for example), or the draws alone vary "
            "too much"
        )
    limit = f"{side} the limit {math.exp(log_temperature):.3g}"
    return f"the best temperature of the {rows:,} held-out rows is {limit}: {reason}"
