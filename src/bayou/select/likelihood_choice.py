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

from bayou.posteriors import Posterior
from bayou.posteriors.posterior import Stage
from bayou.select.best_method import HELD_OUT_FRACTION, FitComparison, compare_fits
from bayou.select.search_run import stage_record
from bayou.training.data import Data, Rows
from bayou.training.seeds import part_seed

HEAVY_TAILS: Final = "student-t"
CANDIDATES: Final = ("gaussian", HEAVY_TAILS, "lognormal")  # the simplest first
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

FitLikelihood = Callable[[str, Rows], Posterior]
"""Fits a network with the likelihood of a name to rows, and predicts y in its units."""


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

    Of targets with a value that many rows have, such as counts with zeros, it is the first one.

    Args:
        y: the targets; None if they are not at hand.
    """
    if y is None or not y.is_floating_point() or not len(y):
        return ()
    _, counts = y.unique(return_counts=True)
    if len(y) >= MIN_ROWS and int(counts.max()) > MAX_SHARE_OF_VALUE * y.numel():
        return CANDIDATES[:1]
    if bool((y > 0).all()):
        return CANDIDATES
    return CANDIDATES[:2]


def select_likelihood(
    fit: FitLikelihood, rows: Data, seed: int, candidates: tuple[str, ...] | None = None
) -> LikelihoodChoice:
    """Select Gaussian, Student-t or log-normal noise by −log p(y) of a fifth of the rows.

    All densities are those of y in its own units. The first candidate is kept unless another one
    is better by more than two paired standard errors, so that noise in the comparison does not
    decide; Student-t must be better by .1 nats as well, and is not fitted where residuals of
    Gaussian noise have no heavy tails (``gain_of_heavy_tails``). Rows of other data than tensors,
    and fewer than 100, keep the first candidate.

    Args:
        fit: fits a likelihood by name to rows.
        rows: the training data, in the user's units.
        seed: of the split.
        candidates: names of likelihoods, the simplest first; by default those for the targets.

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
        except (ValueError, FloatingPointError, RuntimeError) as error:
            errors.append(error)
            raise
        return first[0]

    def fit_heavy_tails() -> Posterior:
        if first and gain_of_heavy_tails(first[0], held_out, seed) < MIN_GAIN_OF_RESIDUALS:
            raise ValueError("the residuals have no heavy tails")
        return fit(HEAVY_TAILS, training)

    fits = {name: partial(fit, name, training) for name in names} | {names[0]: fit_first}
    if HEAVY_TAILS in fits and names[0] != HEAVY_TAILS:
        fits[HEAVY_TAILS] = fit_heavy_tails
    try:
        comparison = compare_fits(fits, held_out, seed, stages=(1, len(fits)), errors=MIN_ERRORS)
    except ValueError:
        comparison = None
    if comparison is None or errors:  # what is wrong with the data, and not with a likelihood
        raise errors[0]
    trials = [
        {"likelihood": name, "nll": float(losses.mean())} for name, losses in comparison.nll.items()
    ]
    record = stage_record("likelihood", started, trials)
    return LikelihoodChoice(_select(comparison), comparison, record)


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
    residuals = torch.cat(
        [
            (y - posterior.predict(x, seed=seed).mean.to(y)).double().flatten()
            for x, y in held_out.epoch()
        ]
    )
    squares = residuals.square()
    variance = squares.mean()
    if not bool(variance.isfinite()) or not float(variance) > 0:
        return math.inf
    gaussian = -0.5 * math.log(2 * math.pi * math.e * float(variance))
    return max(_student_t_log_prob(squares, degrees) for degrees in DEGREES) - gaussian


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
