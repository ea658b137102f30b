"""Calibration of predictions by a map with few parameters, learned from held-out rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor

from bayou.calibration import CLASS_MAPS, MAPS, NUMBER_MAPS, CalibrationMap, map_named
from bayou.core import rng
from bayou.core.specs import nearest
from bayou.likelihoods.predictive import Predictive
from bayou.metrics import row_nll, standard_error
from bayou.posteriors import Posterior
from bayou.training.rows import all_rows, check_held_out

MAX_LOG_TEMPERATURE = 5.0  # log T is searched in ±MAX_LOG_TEMPERATURE
GRID_STEP = 0.25  # of the first grid of log T
MIN_STEP = 1e-7  # of the last grid of log T
MIN_ROWS = 40  # held-out rows, to choose a map or to report its change on fresh rows
FRESH_SHARE = 0.25  # of the held-out rows, on which the change is measured
FOLDS = 5  # of the other rows, by which a map is chosen
IDENTITY = "none"  # the choice to change nothing


class Fresh(NamedTuple):
    """The NLL of held-out rows that neither chose the map nor determined its parameters.

    The map that these numbers belong to was chosen and fitted on the other held-out rows. The map
    of the posterior is then chosen and fitted in the same way with all of them.

    Args:
        rows: the number of these rows.
        before: the mean −log p(y | x) without the map, in nats.
        after: the same with it.
        standard_error: of after − before, paired over the rows.
        map: the map that the other rows chose.
    """

    rows: int
    before: float
    after: float
    standard_error: float
    map: str


@final
@dataclass(frozen=True)
class Calibration:
    """A learned map, and the NLL of the held-out rows with and without it.

    These rows determined the map, which accounts for about P/2n nats of the difference with P
    parameters; ``fresh`` is free of it.

    Args:
        temperature: T; 1 changes nothing.
        before: the mean −log p(y | x) of the held-out rows without the map, in nats.
        after: the same with it.
        map: the name of the map; "none" if "auto" chose to change nothing.
        fresh: the change on rows that the choice and the fit did not use; None with fewer than 40
            held-out rows.
        scores: the NLL of each candidate of "auto" minus that without a map, cross-validated;
            empty for any other map.
    """

    temperature: float
    before: float
    after: float
    map: str = "temperature"
    fresh: Fresh | None = None
    scores: Mapping[str, float] = field(default_factory=dict)

    def describe(self) -> str:
        """Return a sentence that says what was learned, and what it changes."""
        name = "no map (predictions stay as they are)" if self.map == IDENTITY else self.map
        if self.map == "temperature":
            name = f"temperature {self.temperature:.3g}"
        elif self.map != IDENTITY and self.temperature != 1.0:
            name = f"{name}, temperature {self.temperature:.3g}"
        if self.fresh is None:
            return f"{name}; NLL of these rows {self.before:.4f} before, {self.after:.4f} after"
        fresh = self.fresh
        change = fresh.after - fresh.before
        return (
            f"{name}; NLL of {fresh.rows:,} rows that the choice did not use {fresh.before:.4f} "
            f"before, {fresh.after:.4f} after ({change:+.4f} ± {fresh.standard_error:.4f})"
        )


class FittedMap(NamedTuple):
    """A temperature, and the map that follows it.

    Args:
        name: of the map.
        temperature: T, 1 for none.
        calibration_map: what is applied after the temperature; None for nothing.
    """

    name: str
    temperature: float = 1.0
    calibration_map: CalibrationMap | None = None

    def apply(self, p: Predictive) -> Predictive:
        """Return the calibrated prediction.

        Args:
            p: a prediction without a map.
        """
        likelihood = p.likelihood
        outputs = p.outputs
        if self.temperature != 1.0:
            likelihood, outputs = likelihood.temper(outputs, self.temperature)
        if self.calibration_map is not None:
            likelihood, outputs = self.calibration_map.apply(likelihood, outputs)
        return Predictive(likelihood, outputs)


def calibrate(
    posterior: Posterior,
    held_out: object,
    *,
    map: str = "temperature",
    samples: int | None = None,
    seed: rng.Seed = 0,
    train: object = None,
) -> Calibration:
    """Calibrate predictions by a map that maximizes the likelihood of held-out rows.

    By default it is one number: argmin_T −Σ_n log 1/S Σ_s p(y_n | f_s(x_n), T), with softmax(f/T)
    (below 1 as ``BoundLikelihood.temper`` says) for classes and noise T·σ for numbers. The
    posterior and its files store the map, replacing an earlier one; ``predict`` applies it from
    then on. ``posterior.temperature = 1.0`` and ``posterior.calibration_map = None`` remove it. The
    ELBO, the evidence and ``sample`` do not change.

    Maps of classes are "temperature", "vector" (a factor and a shift for each class), "matrix",
    "dirichlet" (linear in log p), "isotonic" and "spline"; of numbers "temperature" and "isotonic":
    a temperature and then an increasing map of quantile levels (``bayou.calibration``). "none"
    changes nothing. "auto"
    cross-validates all of them and changing nothing. Of those whose NLL exceeds the lowest by less
    than its standard error it takes the one with the fewest parameters.

    Args:
        posterior: what predicts y. Its ``temperature`` and ``calibration_map`` are set.
        held_out: rows (x, y), a Dataset or a DataLoader, that the fit has not seen.
        map: the name of the map; "temperature" by default.
        samples: draws of the weights; None: as many as ``predict`` takes.
        seed: of the draws, and of the folds.
        train: the training data, where they are at hand, to see that no row is in both.

    Returns:
        The map, the NLL of the held-out rows before and after, and that of rows that it was not
        fitted to.

    Raises:
        ValueError: if the best T lies at the limit of the search: there are too few rows, or their
            predictions are worse than none; or if the map is not for such a y.

    Example:
        >>> bayou.calibrate(posterior, (x_held, y_held)).temperature
        1.31
        >>> bayou.calibrate(posterior, (x_held, y_held), map="auto").map
        'vector'

    References:
        Guo, Pleiss, Sun, Weinberger: On calibration of modern neural networks, ICML 2017.
    """
    check_map(map)
    if train is not None:
        check_held_out(held_out, train)
    x, y = all_rows(held_out)
    uncalibrated = copy.copy(posterior)
    uncalibrated.temperature = 1.0
    uncalibrated.calibration_map = None
    p = uncalibrated.predict(x, samples, seed=seed)
    result, fitted = fit_map(p, y, map, seed=seed)
    posterior.temperature = fitted.temperature
    posterior.calibration_map = fitted.calibration_map
    return result


def check_map(name: str) -> None:
    """Raise a ValueError unless this is "auto" or the name of a map.

    Args:
        name: of the map.
    """
    if name not in MAPS:
        raise ValueError(
            f"map must be one of {', '.join(MAPS)}, got {name!r}{nearest(str(name), MAPS)}"
        )


@torch.no_grad()
def fit_map(
    p: Predictive, y: Tensor, name: str, *, seed: rng.Seed = 0
) -> tuple[Calibration, FittedMap]:
    """Fit a map, or choose one, and measure what it changes.

    Args:
        p: predictions of B rows, without a map.
        y: their targets, (B, *event).
        name: of the map, or "auto".
        seed: of the rows on which the change is measured, and of the folds.

    Returns:
        The result of ``calibrate``, and the map.
    """
    y = y.to(p.outputs.device)
    p.likelihood.validate(p.outputs.shape[1:], y)
    rows = len(y)
    if name == "auto" and rows < MIN_ROWS:
        raise ValueError(
            f"map='auto' chooses by cross-validation, which needs {MIN_ROWS} held-out rows or "
            f"more, got {rows}; use map='temperature', or hold out more rows"
        )
    if name != "auto":
        fitted = fit_named(name, p, y)
        scores: dict[str, float] = {}
    else:
        fitted, scores = choose_map(p, y, seed)
    before = float(_losses(p, y).mean())
    after = float(_losses(fitted.apply(p), y).mean())
    fresh = None if rows < MIN_ROWS else _measure_fresh(p, y, name, seed)
    return Calibration(fitted.temperature, before, after, fitted.name, fresh, scores), fitted


def fit_named(name: str, p: Predictive, y: Tensor) -> FittedMap:
    """Fit a map by name to predictions.

    Args:
        name: of the map, or "none".
        p: predictions of B rows, without a map.
        y: their targets.
    """
    if name == IDENTITY:
        return FittedMap(IDENTITY)
    cls = map_named(name, p.likelihood.support)
    if cls is None:
        return FittedMap(name, best_temperature(p, y).temperature)
    if cls.support == "classes":
        return FittedMap(name, 1.0, cls.fit(p, y))
    scaled = FittedMap(name, best_temperature(p, y).temperature)
    return FittedMap(name, scaled.temperature, cls.fit(scaled.apply(p), y))


def choose_map(p: Predictive, y: Tensor, seed: rng.Seed) -> tuple[FittedMap, dict[str, float]]:
    """Choose a map by cross-validation, with a pull to do nothing.

    Args:
        p: predictions of B rows, without a map.
        y: their targets.
        seed: of the folds.

    Returns:
        The chosen map, fitted to all rows, and the NLL of each candidate minus that without a map.
    """
    names = CLASS_MAPS if p.likelihood.support == "classes" else NUMBER_MAPS
    losses = {IDENTITY: _losses(p, y)}
    for name in names:
        row_losses = _cross_validate(name, p, y, rng.fold(seed, "folds"))
        if row_losses is not None:
            losses[name] = row_losses
    best = min(losses, key=lambda name: float(losses[name].mean()))
    chosen = next(name for name in losses if _is_as_good(losses[name], losses[best]))
    scores = {
        name: float((row_losses - losses[IDENTITY]).mean())
        for name, row_losses in losses.items()
        if name != IDENTITY
    }
    return fit_named(chosen, p, y), scores


def _is_as_good(losses: Tensor, lowest: Tensor) -> bool:
    """Return whether losses exceed the lowest by at most the standard error of the difference."""
    excess = losses - lowest
    return bool(excess.abs().max() == 0) or float(excess.mean()) <= standard_error(excess)


def _cross_validate(name: str, p: Predictive, y: Tensor, seed: rng.Seed) -> Tensor | None:
    """Return −log p of every row under a map fitted to other rows; None if a fit is refused."""
    rows = len(y)
    order = rng.permutation(rows, seed).to(y.device)
    losses = torch.empty(rows, dtype=torch.float64)
    for fold in range(FOLDS):
        test = order[fold::FOLDS]
        train = order[torch.arange(rows, device=y.device) % FOLDS != fold]
        try:
            fitted = fit_named(name, _at(p, train), y[train])
            losses[test.cpu()] = _losses(fitted.apply(_at(p, test)), y[test])
        except ValueError:  # too few rows for this map, or a y that it is not for
            return None
    return losses if bool(losses.isfinite().all()) else None


def _measure_fresh(p: Predictive, y: Tensor, name: str, seed: rng.Seed) -> Fresh | None:
    """Choose and fit a map on most rows, and score it on the rest; None if the fit is refused."""
    rows = len(y)
    order = rng.permutation(rows, rng.fold(seed, "fresh")).to(y.device)
    count = round(FRESH_SHARE * rows)
    test = order[:count]
    train = order[count:]
    try:
        if name == "auto":
            fitted, _ = choose_map(_at(p, train), y[train], seed)
        else:
            fitted = fit_named(name, _at(p, train), y[train])
    except ValueError:
        return None
    before = _losses(_at(p, test), y[test])
    after = _losses(fitted.apply(_at(p, test)), y[test])
    change = after - before
    return Fresh(
        count, float(before.mean()), float(after.mean()), standard_error(change), fitted.name
    )


def _at(p: Predictive, index: Tensor) -> Predictive:
    """Return the predictions of some rows."""
    return Predictive(p.likelihood, p.outputs[:, index])


def _losses(p: Predictive, y: Tensor) -> Tensor:
    """Return −log p of every row, (B,) in float64."""
    likelihood = copy.deepcopy(p.likelihood).double()
    return row_nll(Predictive(likelihood, p.outputs.double()), y)


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
        if nll(-best) == nll(best):
            raise ValueError(
                "a temperature changes nothing: every row has the same probability for every class"
            )
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
