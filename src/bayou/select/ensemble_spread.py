"""How far the members of an ensemble are randomized, by the rows that each fold holds out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from bayou.core import params
from bayou.core.params import Params
from bayou.inference.method import Method
from bayou.network.target import Target
from bayou.posteriors import Posterior
from bayou.posteriors.empirical import Empirical
from bayou.select.folds import Fold, held_out_masks, is_within_chance
from bayou.select.judgment import Residuals
from bayou.select.noise import noise_factor
from bayou.select.noise_and_prior import NoiseAndPrior
from bayou.select.ratio import path_to
from bayou.select.regularization_path import follow_path
from bayou.select.search_run import SearchRun, point_posterior, raise_if_stopped
from bayou.training.data import Rows

# Training error of members with anchors, in that of the mode: below, they fit the noise.
MIN_TRAINING_ERROR: Final = 0.5


def select_ensemble_spread(
    settings: NoiseAndPrior,
    method: Method,
    starts: Params,
    target: Target,
    rows: Rows,
    folds: Sequence[Fold],
    run: SearchRun,
) -> NoiseAndPrior:
    """Select how far the members of an ensemble spread.

    The members of all folds are found together, once for each spread.

    Args:
        settings: the settings so far, whose noise is the error of modes on the same rows.
        method: the ensemble.
        starts: the initial weights of its members, a stack.
        target: before the search.
        rows: all rows.
        folds: training and held-out rows.
        run: of the search.

    Returns:
        The settings with this spread, and with the noise for it.

    Raises:
        SearchInterrupted: after Ctrl-C, with the members so far.
    """
    members = params.size(starts)
    masks = (~held_out_masks(rows, folds)[:-1]).repeat_interleave(members, 0)
    all_starts = _repeat(starts, len(folds))
    selected = settings.apply(target)
    path = path_to(settings, target)
    y = next(rows.with_batch_size(rows.n).epoch())[1]
    trials: list[tuple[float, Residuals]] = []
    for spread in method.spreads:
        randomized = method.with_spread(spread).randomize(selected, y, run.seed)
        if randomized is not None:
            anchors, targets = randomized
            all_targets = targets.repeat(len(folds), *[1] * (targets.ndim - 1))
            randomized = _repeat(anchors, len(folds)), all_targets
        ensemble = follow_path(
            path, selected, rows, all_starts, run, randomized=randomized, masks=masks
        )
        raise_if_stopped(ensemble)
        trials.append((spread, _held_out_residuals(ensemble, members, folds, run)))
    return widest_spread(settings, trials)


def _repeat(stack: Params, times: int) -> Params:
    """Return a stack (K, ...) several times one after the other, (times·K, ...)."""
    return {name: value.repeat(times, *[1] * (value.ndim - 1)) for name, value in stack.items()}


def _held_out_residuals(
    ensemble: Empirical, members: int, folds: Sequence[Fold], run: SearchRun
) -> Residuals:
    """Predict the rows that each fold holds out by its own members."""
    squares = []
    variances = []
    for fold, (_, held_out) in enumerate(folds):
        first = fold * members
        stack = {name: value[first : first + members] for name, value in ensemble.stack.items()}
        of_fold = Empirical(ensemble.target, ensemble.network, stack, [])
        residuals = Residuals.of(of_fold, held_out, run.part_seed("check"))
        squares.append(residuals.squares)
        variances.append(residuals.variances)
    return Residuals(torch.cat(squares), torch.cat(variances))


def widest_spread(
    settings: NoiseAndPrior, trials: Sequence[tuple[float, Residuals]]
) -> NoiseAndPrior:
    """Select the widest spread whose −log p of held-out rows is within chance of the lowest.

    Each spread has the noise that suits it, as in ``correct_noise``. Within chance: by at most one
    standard error of the paired difference.

    Args:
        settings: the settings so far, whose noise is the error of modes on the same rows.
        trials: spreads with residuals of held-out rows, the widest spread first.

    Returns:
        The settings with this spread, and with the noise for it.
    """
    candidates = []
    losses = []
    for spread, residuals in trials:
        factor, squares, variances = noise_factor(residuals, settings.noise, mode_error=1.0)
        candidates.append(replace(settings.scale_both(factor), spread=spread))
        total = factor**2 + variances
        losses.append(0.5 * (total.log() + squares / total))
    best = min(losses, key=lambda loss: float(loss.mean()))
    for candidate, loss in zip(candidates, losses, strict=True):
        if is_within_chance(loss, best, errors=1.0):
            return candidate
    return candidates[-1]


def find_members(
    settings: NoiseAndPrior,
    method: Method,
    starts: Params,
    target: Target,
    mode: Params,
    rows: Rows,
    run: SearchRun,
) -> Posterior:
    """Find the members of an ensemble at the end of the path to the selected settings.

    If members with anchors fit the training rows far better than the mode, they fit the noise, and
    anchors are left out. The mode follows a path from a narrow prior, along which units stay alike;
    anchors can lead away from it.

    Args:
        settings: the selected settings.
        method: the ensemble.
        starts: the initial weights of its members, a stack.
        target: before the search.
        mode: the weights of the mode of all rows.
        rows: all rows.
        run: of the search.
    """
    selected = replace(settings.apply(target), n=rows.n)
    path = path_to(settings, target)
    y = next(rows.with_batch_size(rows.n).epoch())[1]
    randomized = method.with_spread(settings.spread).randomize(selected, y, run.seed)
    members = follow_path(path, selected, rows, starts, run, randomized=randomized)
    if randomized is None or members.stopped == "interrupted":
        return members
    error, mode_error = (
        float(Residuals.of(posterior, rows, run.seed).by_row()[0].mean())
        for posterior in (members, point_posterior(selected, mode))
    )
    if not error < MIN_TRAINING_ERROR * mode_error:
        return members
    return follow_path(path, selected, rows, starts, run)
