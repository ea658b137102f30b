"""The noise of a regression, by the residuals of held-out rows."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.progress import stage
from bayou.inference.rounded_targets import rounding_noise
from bayou.network.target import Target
from bayou.posteriors import Posterior
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.posterior import NOISE, Stage
from bayou.select.folds import Fold
from bayou.select.full_batch import has_fixed_normal_priors
from bayou.select.judgment import MemberErrors, Residuals
from bayou.select.noise_and_prior import NoiseAndPrior
from bayou.select.search_run import SearchRun, stage_record
from bayou.training.data import Data, Rows
from bayou.training.rows import some_rows

# Of a variance between functions, (4/5)²: with all rows it is smaller than with four fifths.
MORE_ROWS: Final = 0.64
UNITS_OF_FIT: Final = "in the units of the fit"  # of a noise, in the words of a plan
RAISED: Final = "raised to that of the rounding of y"  # the same
MAX_READ_ROWS: Final = 5_000  # of a Dataset, whose targets show their steps
PSEUDO_ROWS: Final = 10  # prior count of rows on which a method is as good as its mode


def has_noise_to_select(target: Target) -> bool:
    """Return whether there are a Gaussian noise to learn and Normal priors to scale with it.

    Args:
        target: has the likelihood and the priors.
    """
    likelihood = target.likelihood
    is_learned = any(True for _ in likelihood.parameters())
    return likelihood.gaussian_noise is not None and is_learned and has_fixed_normal_priors(target)


def least_noise(rows: Data) -> float:
    """Return the noise below which none is selected: that of the rounding of y, if it is rounded.

    Args:
        rows: the training rows.
    """
    y = rows.targets()
    if y is None:
        with rng.isolated(0, torch.device("cpu")):  # which random transforms of rows draw from
            _, y = some_rows(rows, MAX_READ_ROWS)
    return rounding_noise(y)


def describe_rounding(target: Target, rows: Data) -> tuple[str, ...]:
    """Return the rounding of y in words, for a method that learns its own noise; none without.

    Args:
        target: has the likelihood.
        rows: the training rows.
    """
    learns_noise = any(True for _ in target.likelihood.parameters())
    least = least_noise(rows) if learns_noise else 0.0
    if not least:
        return ()
    return (f"the noise includes that of the rounding of y, {least:.3g} {UNITS_OF_FIT}",)


def describe_likeliest(noise: float, held_out: Rows) -> str:
    """Return the result of ``match_noise`` in words.

    Args:
        noise: the result.
        held_out: the rows that decided it.
    """
    text = f"noise {noise:.3g} {UNITS_OF_FIT}, the likeliest for {held_out.n:,} held-out rows"
    return f"{text}, {RAISED}" if noise == least_noise(held_out) else text


def initial_noise(target: Target) -> float:
    """Return the noise at which a search begins.

    Args:
        target: has a Gaussian likelihood.
    """
    noise = target.likelihood.gaussian_noise
    if noise is None:
        raise ValueError("the likelihood has no Gaussian noise")
    return noise


def select_noise_of_modes(
    target: Target, folds: Sequence[Fold], run: SearchRun
) -> tuple[NoiseAndPrior, Stage]:
    """Select the held-out error of modes as the noise, and keep the priors.

    The modes learn their own noise, by minibatches.

    Args:
        target: with a learned noise.
        folds: training and held-out rows.
        run: of the search.

    Returns:
        The settings, and the record of the stage.
    """
    started = time.perf_counter()
    errors = []
    for number, (training, held_out) in enumerate(folds):
        with stage(number + 1, len(folds), unit="fold"):
            mode = run.fit(run.start, target, training, f"first{number}")
        squares, _ = Residuals.of(mode, held_out, run.seed).by_row()
        errors.append(float(squares.mean()))
    noise = math.sqrt(sum(errors) / len(errors))
    settings = NoiseAndPrior(noise, fold_error=errors[0])
    return settings, stage_record("noise", started, [{"noise": noise}])


def correct_noise(
    settings: NoiseAndPrior, posterior: Posterior, held_out: Rows, seed: int
) -> NoiseAndPrior:
    """Select the noise that suits a method itself, with the ratio to the prior scale as it is.

    With residuals r and variances v of functions in units of the noise σ so far, the noise becomes
    σ²·mean(r²/(1 + 0.64·v))/mean(r₀²), with the residuals r₀ of the mode: the width of a
    posterior is proportional to its noise, so that the predictive variance matches the error.

    Args:
        settings: the settings of the mode.
        posterior: of the method under them, without the held-out rows.
        held_out: the rows.
        seed: of the draws.
    """
    mode_error = settings.fold_error / settings.noise**2
    residuals = Residuals.of(posterior, held_out, seed)
    factor, _, _ = noise_factor(residuals, settings.noise, mode_error)
    return settings.scale_both(factor)


def noise_factor(
    residuals: Residuals, noise: float, mode_error: float
) -> tuple[float, Tensor, Tensor]:
    """Return the factor of a noise that suits a method, as in ``correct_noise``.

    Args:
        residuals: of the method on held-out rows.
        noise: so far.
        mode_error: the mean squared residual of the mode, in units of the noise.

    Returns:
        The factor; squared residuals and variances with all rows, in units of the noise, (M,) each.
    """
    squares, variances = (value / noise**2 for value in residuals.by_row())
    variances = variances * MORE_ROWS
    pseudo = PSEUDO_ROWS / len(squares)
    error = float(((squares + pseudo) / (1 + variances)).mean())
    return math.sqrt(error / (mode_error + pseudo)), squares, variances


def match_noise(posterior: Posterior, held_out: Rows, seed: int) -> float:
    """Set the noise of a posterior that is likeliest for held-out rows.

    The density is that of the prediction: of points their mixture, else a Gaussian. If the
    intervals contain too little, the noise is the smallest one that covers. It is not below that of
    the rounding of y.

    Args:
        posterior: is changed; a record of the stage is added to its ``selection``.
        held_out: rows that it has not learned from.
        seed: of the draws.

    Returns:
        The noise.
    """
    started = time.perf_counter()
    if isinstance(posterior, Empirical):
        posterior.stack = {
            name: value for name, value in posterior.stack.items() if not name.startswith(NOISE)
        }
    residuals = Residuals.of(posterior, held_out, seed)
    if posterior.members > 1 and posterior.draws is not None:
        noise = MemberErrors.of(posterior, held_out, seed).likeliest_noise()
    else:
        noise = residuals.likeliest_noise()
    if residuals.covers_too_little(noise):
        noise = residuals.covering_noise()
    noise = max(noise, least_noise(held_out))
    posterior.target = NoiseAndPrior(noise).apply(posterior.target)
    posterior.selection = [stage_record("noise", started, [{"noise": noise}]), *posterior.selection]
    return noise
