"""The likelihood of real numbers that predicts held-out rows best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, final

import torch
from torch import Tensor

from bayou.metrics import standard_error
from bayou.posteriors import Posterior
from bayou.posteriors.posterior import Stage
from bayou.select.best_method import (
    FIT_ERRORS,
    HELD_OUT_FRACTION,
    FitComparison,
    compare_fits,
    held_out_nll,
    without_warnings,
)
from bayou.select.search_run import raise_if_stopped, stage_record
from bayou.training.data import Data, Rows
from bayou.training.seeds import part_seed

HEAVY_TAILS: Final = "student-t"
COUNTS: Final = "negative-binomial"
LOGARITHMIC: Final = "lognormal"
CANDIDATES: Final = ("gaussian", HEAVY_TAILS, LOGARITHMIC)  # of continuous y, the simplest first
# Paired standard errors of the held-out NLL by which another one must be better than the first.
MIN_ERRORS: Final = 2.0
MIN_ROWS: Final = 100  # for such a comparison
# Nats a row by which Student-t must be better than Gaussian noise, with which the network of
# infinite width is available.
MIN_GAIN_OF_STUDENT_T: Final = 0.1
# The same of the residuals of Gaussian noise alone, below which Student-t is not fitted.
MIN_GAIN_OF_RESIDUALS: Final = 0.02
DEGREES: Final = (2.0, 3.0, 5.0, 10.0)  # of freedom, of the Student-t of residuals
SCALE_STEPS: Final = 50  # of EM for its scale
# Share of the rows with one value, above which y is not continuous: a density with a narrow peak
# there, as Student-t can have, has a low NLL and tells nothing.
MAX_SHARE_OF_VALUE: Final = 0.05
MAX_SMALLEST_COUNT: Final = 1  # counts begin at 0 or 1; ages of adults and most ratings do not
MAX_LARGEST_COUNT: Final = 250  # the CRPS is a sum over counts, which is slow for larger ones
MIN_ROWS_PER_COUNT: Final = 2  # a mean over the values of y

FitLikelihood = Callable[[str, Rows], Posterior]
"""Fits a network with the likelihood of a name to rows, and predicts y in its units."""
FitVariedNoise = Callable[[Rows], Posterior]
"""Fits Gaussian noise that depends on x to rows, and predicts y in its units."""


@final
@dataclass(frozen=True)
class LikelihoodChoice:
    """A likelihood by name, and the comparison that selected it.

    Args:
        name: of the likelihood.
        comparison: of the candidates on held-out rows; None where there were none to compare.
        stage: the record of the comparison.
    """

    name: str
    comparison: FitComparison | None = None
    stage: Stage | None = None

    @property
    def decision(self) -> str:
        """Return the choice in words, empty without a comparison."""
        if self.comparison is None:
            return ""
        rows = len(self.comparison.nll[self.name])
        count = len(self.comparison.nll)
        return f"likelihood {self.name}, chosen from {count} on {rows:,} held-out rows"


def likelihood_candidates(y: Tensor | None) -> tuple[str, ...]:
    """Return the names of likelihoods that suit real targets: log-normal for positive ones only.

    The negative binomial is added for counts (``are_counts``). Where more than a twentieth of the
    rows have one value, Student-t and log-normal are left out: of counts with many zeros Gaussian
    and the negative binomial remain, of other numbers with ties Gaussian alone.

    Args:
        y: the targets; None if they are not at hand.
    """
    if y is None or not y.is_floating_point() or not len(y):
        return ()
    first, *others = CANDIDATES
    of_counts = (COUNTS,) if are_counts(y) else ()
    if len(y) >= MIN_ROWS and has_frequent_value(y):
        return first, *of_counts
    if not bool((y > 0).all()):
        others.remove(LOGARITHMIC)
    return first, *of_counts, *others


def has_frequent_value(y: Tensor) -> bool:
    """Return whether more than a twentieth of the targets have one value.

    A density with a narrow peak at this value has a low −log p there, and tells nothing.

    Args:
        y: the targets.
    """
    _, rows = y.unique(return_counts=True)
    return int(rows.max()) > max(1, MAX_SHARE_OF_VALUE * y.numel())


def are_counts(y: Tensor) -> bool:
    """Return whether real targets are counts for which a negative binomial is worth a fit.

    They are whole numbers, one a row; the smallest is 0 or 1, the largest 2 to 250; there are at
    least twice as many rows as values; and the variance is not below the mean by more than two
    standard errors, since Var[y] = E Var[y | x] + Var E[y | x] ≥ E[y] for the negative binomial.
    Prices in whole dollars, ages of adults, most ratings and labels 0 or 1 are not counts.

    Args:
        y: the targets, (N,) or (N, 1).
    """
    if y[0].numel() != 1:
        return False
    values = y.detach().double().flatten()
    if not bool((values == values.round()).all()):
        return False
    smallest, largest = float(values.min()), float(values.max())
    if not (0 <= smallest <= MAX_SMALLEST_COUNT and 2 <= largest <= MAX_LARGEST_COUNT):
        return False
    if len(values) < MIN_ROWS_PER_COUNT * len(values.unique()):
        return False
    return _may_vary_as_counts(values - values.mean(), values)


def select_likelihood(
    fit: FitLikelihood,
    rows: Data,
    seed: int,
    candidates: tuple[str, ...] | None = None,
    fit_varied_noise: FitVariedNoise | None = None,
) -> LikelihoodChoice:
    """Select the likelihood of real targets by −log p(y) of a fifth of the rows.

    All densities are those of y in its own units. The probability of a count is such a density: of
    y plus uniform noise between −½ and ½, which is constant on bins of width 1 around the counts.
    The first candidate is kept unless another one is better by more than two paired standard
    errors, so that noise in the comparison does not decide; Student-t must be better by .1 nats as
    well, and better than Gaussian noise that depends on x: residuals of such noise have heavy tails
    together. Student-t is not fitted where residuals of Gaussian noise have no heavy tails
    (``gain_of_heavy_tails``), and the negative binomial where they vary less than counts
    (``residuals_suit_counts``). Rows of other data than tensors, and fewer than 100, keep the first
    candidate.

    Args:
        fit: fits a likelihood by name to rows.
        rows: the training data, in the user's units.
        seed: of the split.
        candidates: names of likelihoods, the simplest first; by default those for the targets.
        fit_varied_noise: fits Gaussian noise that depends on x; by default Student-t is not
            compared with it.

    Returns:
        The name, with the comparison.

    Example:
        >>> choice = select_likelihood(fit, rows, seed=0)  # doctest: +SKIP
        >>> choice.decision  # doctest: +SKIP
        'likelihood lognormal, chosen from 3 on 60 held-out rows'
    """
    names = likelihood_candidates(rows.targets()) if candidates is None else candidates
    if len(names) < 2 or not isinstance(rows, Rows) or rows.n < MIN_ROWS:
        return LikelihoodChoice(names[0] if names else CANDIDATES[0])
    started = time.perf_counter()
    training, held_out = rows.split(HELD_OUT_FRACTION, part_seed(seed, "likelihood"))
    errors: list[Exception] = []
    first: list[Posterior] = []

    def fit_first() -> Posterior:
        try:
            first.append(fit(names[0], training))
        except FIT_ERRORS as error:
            errors.append(error)
            raise
        return first[0]

    def fit_heavy_tails() -> Posterior:
        if first and gain_of_heavy_tails(first[0], held_out, seed) < MIN_GAIN_OF_RESIDUALS:
            raise ValueError("the residuals have no heavy tails")
        return fit(HEAVY_TAILS, training)

    def fit_counts() -> Posterior:
        if first and not residuals_suit_counts(first[0], held_out, seed):
            raise ValueError("the residuals vary less than those of counts")
        return fit(COUNTS, training)

    fits = {name: partial(fit, name, training) for name in names} | {names[0]: fit_first}
    for name, fit_suitable in ((HEAVY_TAILS, fit_heavy_tails), (COUNTS, fit_counts)):
        if name in names[1:]:
            fits[name] = fit_suitable
    try:
        comparison = compare_fits(fits, held_out, seed, stages=(1, len(fits)), errors=MIN_ERRORS)
    except ValueError:
        comparison = None
    if comparison is None or errors:  # what is wrong with the data, and not with a likelihood
        raise errors[0]
    trials = [
        {"likelihood": name, "nll": float(losses.mean())} for name, losses in comparison.nll.items()
    ]
    name = _select(comparison)
    if name == HEAVY_TAILS and fit_varied_noise is not None and names[0] in comparison.nll:
        varied = _nll_of_varied_noise(fit_varied_noise, training, held_out, seed)
        if varied < float(comparison.nll[name].mean()):
            name = names[0]
        trials.append({"likelihood": f"{names[0]}, noise by x", "nll": varied})
    record = stage_record("likelihood", started, trials)
    return LikelihoodChoice(name, comparison, record)


def _nll_of_varied_noise(fit: FitVariedNoise, training: Rows, held_out: Rows, seed: int) -> float:
    """Return the mean −log p of held-out rows; infinity where the fit is not possible."""
    try:
        with without_warnings():
            posterior = fit(training)
    except FIT_ERRORS:
        return math.inf
    raise_if_stopped(posterior)
    return float(held_out_nll(posterior, held_out, seed).mean())


@torch.no_grad()
def gain_of_heavy_tails(posterior: Posterior, held_out: Rows, seed: int) -> float:
    """Return the gain in log p of residuals by the likeliest Student-t instead of a Gaussian.

    Args:
        posterior: whose mean is subtracted from y.
        held_out: the rows.
        seed: of the draws.

    Returns:
        Nats a number, a mean over the rows; both scales are the likeliest ones.
    """
    squares = _residuals(posterior, held_out, seed)[0].square()
    variance = squares.mean()
    if not bool(variance.isfinite()) or not float(variance) > 0:
        return math.inf
    gaussian = -0.5 * math.log(2 * math.pi * math.e * float(variance))
    return max(_student_t_log_prob(squares, degrees) for degrees in DEGREES) - gaussian


@torch.no_grad()
def residuals_suit_counts(posterior: Posterior, held_out: Rows, seed: int) -> bool:
    """Return whether residuals vary at least as those of a Poisson, up to two standard errors.

    A negative binomial has Var[y | x] ≥ E[y | x], so the mean of (y − E[y | x])² − y is at least 0;
    errors of the predicted mean increase it. Where it is negative, as for binomial or rounded
    numbers, the negative binomial has too much noise.

    Args:
        posterior: whose mean is subtracted from y.
        held_out: the rows.
        seed: of the draws.
    """
    return _may_vary_as_counts(*_residuals(posterior, held_out, seed))


def _may_vary_as_counts(residuals: Tensor, y: Tensor) -> bool:
    """Return whether the mean of r² − y is at most two standard errors below 0."""
    excess = residuals.square() - y
    return not float(excess.mean()) < -MIN_ERRORS * standard_error(excess)


def _residuals(posterior: Posterior, held_out: Rows, seed: int) -> tuple[Tensor, Tensor]:
    """Return y minus its predicted mean, and y, of all rows."""
    residuals = []
    targets = []
    for x, y in held_out.epoch():
        residuals.append((y - posterior.predict(x, seed=seed).mean.to(y)).double().flatten())
        targets.append(y.double().flatten())
    return torch.cat(residuals), torch.cat(targets)


def _student_t_log_prob(squares: Tensor, degrees: float) -> float:
    """Return the mean log density of squared residuals under a Student-t of the likeliest scale.

    EM for the scale: σ² ← mean of w·r² with w = (ν + 1)/(ν + r²/σ²).
    """
    variance = squares.mean()
    for _ in range(SCALE_STEPS):
        weights = (degrees + 1) / (degrees + squares / variance)
        variance = (weights * squares).mean()
    noise = torch.distributions.StudentT(degrees, 0.0, variance.sqrt(), validate_args=False)
    return float(noise.log_prob(squares.sqrt()).mean())


def _select(comparison: FitComparison) -> str:
    """Return the best likelihood; Student-t only if it is clearly better than the others."""
    best = comparison.best
    others = {name: losses for name, losses in comparison.nll.items() if name != best}
    if best != HEAVY_TAILS or not others:
        return best
    rival = replace(comparison, nll=others)
    gain = rival.nll[rival.best].mean() - comparison.nll[best].mean()
    return best if float(gain) >= MIN_GAIN_OF_STUDENT_T else rival.best
