"""Calibration of predictions by one temperature, learned from held-out rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayou import rng
from bayou.methods import Laplace
from bayou.network import forward_inputs, rows_of
from bayou.operations.module import to_module
from bayou.operations.rows import all_rows, check_held_out
from bayou.posteriors import Posterior
from bayou.predictive import Predictive
from bayou.progress import Show
from bayou.target import Target
from bayou.training.data import as_data

MAX_LOG_TEMPERATURE, STEP = 5.0, 0.25  # log T is searched in ±MAX_LOG_TEMPERATURE, first on a grid of STEP
GOLDEN = (math.sqrt(5.0) - 1) / 2
NARROW = 1e-7  # of log T


class Calibration(NamedTuple):
    """What was learned, and the mean −log p(y | x) of the held-out rows before and after, in nats.

    These rows determined it, which accounts for about 1/2n nats of the difference; evaluate it on others.
    """

    temperature: float
    before: float
    after: float


def calibrate(
    posterior: Posterior, held: Any, *, samples: int | None = None, seed: rng.Seed = 0, train: Any = None
) -> Calibration:
    """Learn one number on held-out rows: a temperature for classes, a scale of the noise for numbers.

    argmin_T −Σ_n log 1/S Σ_s p(y_n | f_s(x_n), T), with softmax(f/T) (below 1 as ``BoundLikelihood.tempered`` says)
    or noise T·σ (Guo 2017). The posterior and its files store it, replacing an earlier one; ``predict`` applies it
    from then on, and ``posterior.temperature = 1.0`` removes it. The ELBO, the evidence and ``sample`` do not change.

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
    found = best_temperature(_plain(posterior).predict(x, samples, seed=seed), y)
    posterior.temperature = found.temperature
    return found


@torch.no_grad()
def best_temperature(p: Predictive, y: Tensor) -> Calibration:
    """The T of argmin_T −mean log 1/S Σ_s p(y | f_s, T), in float64.

    Convex in 1/T for the logits of one function, and in 1/T² for its Gaussian noise. A mixture need not be: the best
    point of a grid brackets the minimum, which golden-section search then finds.
    """
    likelihood, outputs = copy.deepcopy(p.likelihood).double(), p.outputs.double()
    y = y.to(outputs.device)

    def nll(log_t: float) -> float:
        return -float(Predictive(*likelihood.tempered(outputs, math.exp(log_t))).log_prob(y).mean())

    before = nll(0.0)
    if math.isnan(before):
        raise ValueError("no rows, or predictions that are NaN: nothing to calibrate by")
    steps = round(MAX_LOG_TEMPERATURE / STEP)
    grid = [STEP * k for k in range(-steps, steps + 1)]
    middle = min(grid, key=nll)
    if abs(middle) == MAX_LOG_TEMPERATURE:
        small = "below", "they are too few (all predicted correctly, for example), or the draws alone vary too much"
        large = "above", "the predictions are worse than none; check that these rows belong to this task"
        side, why = small if middle < 0 else large
        limit = f"{side} the limit {math.exp(middle):.3g}"
        raise ValueError(f"the best temperature of the {len(y):,} held-out rows is {limit}: {why}")
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


class BestCalibration(NamedTuple):
    """The selected calibration, the NLL of held-out rows for each candidate, and the selected posterior."""

    best: str
    nll: dict[str, float]
    posterior: Posterior


def best_calibration(
    posterior: Posterior,
    held: Any,
    train: Any,
    *,
    samples: int | None = None,
    seed: rng.Seed = 0,
    progress: Show = True,
) -> BestCalibration:
    """A temperature, a last-layer Laplace, or both: the candidate with the lowest NLL of held-out rows.

    "as it is"; "temperature"; for a posterior of one point also "last layer", ``Laplace(where="last")`` there, with the
    scale of its prior by held-out rows, and "last layer, temperature". Each half of the held-out rows evaluates what
    was fitted to the other half. The best candidate is fitted to all of them; ``posterior`` itself is not changed.

    Args:
        held: held-out rows (x, y), a Dataset or a DataLoader.
        train: the training data, which the last-layer Laplace is fitted to.
        samples: draws of the weights; None: as many as ``predict`` takes.
        seed: of the draws.
        progress: whether to show progress.
    """
    check_held_out(held, train)
    x, y = all_rows(held)
    seed, halves = rng.integer(seed), torch.arange(len(y)) % 2 == 0
    makers: dict[str, Callable[[Any, Tensor], Posterior]] = {"": lambda x, y: _plain(posterior)}
    if posterior.stack is not None and posterior.draws == 1:
        makers["last layer"] = lambda x, y: _last_layer(posterior, train, (x, y), seed, progress)

    def fitted(part: str, x: Any, y: Tensor) -> dict[str, Posterior]:
        """The candidates fitted to these rows, without and with a temperature."""
        made = makers[part](x, y)
        tempered = copy.copy(made)
        calibrate(tempered, (x, y), samples=samples, seed=seed)
        return {part or "as it is": made, f"{part}, temperature" if part else "temperature": tempered}

    nll: dict[str, float] = {}
    for test in (halves, ~halves):
        for name, candidate in [pair for part in makers for pair in fitted(part, _picked(x, ~test), y[~test]).items()]:
            p = candidate.predict(_picked(x, test), samples, seed=seed)
            total = -float(p.log_prob(y[test].to(p.outputs.device)).double().sum())
            nll[name] = nll.get(name, 0.0) + total / len(y)
    best = min(nll, key=lambda name: nll[name])
    return BestCalibration(best, nll, fitted("last layer" if "last" in best else "", x, y)[best])


def _picked(x: Any, rows: Tensor) -> Any:
    inputs = forward_inputs(x)
    parts = rows_of(inputs, rows.to(inputs[0].device))
    return parts if len(parts) > 1 else parts[0]


def _plain(posterior: Posterior) -> Posterior:
    found = copy.copy(posterior)
    found.temperature = 1.0
    return found


def _last_layer(posterior: Posterior, train: Any, held: Any, seed: int, progress: Show) -> Posterior:
    """Laplace of the last layer at a point."""
    method, old = Laplace(where="last", start=None, prior="validation"), posterior.target
    rows = as_data(train, method.batch_size)
    target = Target.build(to_module(posterior), old.likelihood_spec, old.prior, rows.n)
    target.likelihood.load_state_dict(old.likelihood.state_dict())
    return method.fit_with_held_out(target, rows, as_data(held, method.batch_size), seed=seed, progress=progress)
