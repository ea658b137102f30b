"""How far the members of an ensemble are randomized, by the rows that each fold holds out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import torch
from torch import Tensor

from bayou.core import params
from bayou.core.params import Params
from bayou.inference.method import Method
from bayou.metrics import standard_error
from bayou.network.target import Target
from bayou.posteriors import Posterior
from bayou.posteriors.empirical import Empirical
from bayou.select.folds import Fold, held_out_masks
from bayou.select.full_batch import modes_along_path
from bayou.select.noise import MORE_ROWS, PSEUDO_ROWS, residuals
from bayou.select.noise_and_prior import NoiseAndPrior
from bayou.select.ratio import path_to
from bayou.select.search_run import SearchRun, point_posterior, raise_if_stopped
from bayou.training.data import Rows

# Training error of members with anchors, in that of the mode: below, they fit the noise.
MIN_TRAINING_ERROR: Final = 0.5


@final
@dataclass(frozen=True)
class SpreadTrial:
    """Held-out rows under an ensemble with one spread of its members.

    Args:
        spread: of anchors and targets.
        squares: squared residuals of the mean function, (M,).
        variances: of the functions, (M,).
    """

    spread: float
    squares: Tensor
    variances: Tensor


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
    all_starts = {name: _repeat(value, len(folds)) for name, value in starts.items()}
    selected = settings.apply(target)
    path_target, multipliers, steps = path_to(settings, target)
    y = next(rows.with_batch_size(rows.n).epoch())[1]
    trials: list[SpreadTrial] = []
    for spread in method.spreads:
        randomized = method.with_spread(spread).randomize(selected, y, run.seed)
        if randomized is not None:
            anchors, targets = randomized
            all_anchors = {name: _repeat(value, len(folds)) for name, value in anchors.items()}
            randomized = all_anchors, _repeat(targets, len(folds))
        ensemble = modes_along_path(
            path_target,
            selected,
            multipliers,
            steps,
            rows,
            all_starts,
            run.effort,
            run.progress,
            randomized,
            masks,
        )
        raise_if_stopped(ensemble)
        trials.append(_judge_spread(spread, ensemble, members, folds, run))
    return widest_spread(settings, trials)


def _judge_spread(
    spread: float, ensemble: Empirical, members: int, folds: Sequence[Fold], run: SearchRun
) -> SpreadTrial:
    """Predict the rows that each fold holds out by its own members."""
    squares = []
    variances = []
    for fold, (_, held_out) in enumerate(folds):
        first = fold * members
        stack = {name: value[first : first + members] for name, value in ensemble.stack.items()}
        of_fold = Empirical(ensemble.target, ensemble.network, stack, [])
        fold_squares, fold_variances = residuals(of_fold, held_out, run.part_seed("check"))
        squares.append(fold_squares)
        variances.append(fold_variances)
    return SpreadTrial(spread, torch.cat(squares), torch.cat(variances))


def widest_spread(settings: NoiseAndPrior, trials: Sequence[SpreadTrial]) -> NoiseAndPrior:
    """Select the widest spread whose −log p of held-out rows is within chance of the lowest.

    Each spread has the noise that suits it, as in ``correct_noise``. Within chance: by at most one
    standard error of the paired difference.

    Args:
        settings: the settings so far, whose noise is the error of modes on the same rows.
        trials: the widest spread first.

    Returns:
        The settings with this spread, and with the noise for it.
    """
    pseudo = PSEUDO_ROWS / len(trials[0].squares)
    candidates = []
    losses = []
    for trial in trials:
        squares = trial.squares / settings.noise**2
        variances = MORE_ROWS * trial.variances / settings.noise**2
        factor = math.sqrt(float(((squares + pseudo) / (1 + variances)).mean()) / (1 + pseudo))
        candidates.append(settings.with_spread(trial.spread).scale_both(factor))
        total = factor**2 + variances
        losses.append(0.5 * (total.log() + squares / total))
    best = min(losses, key=lambda loss: float(loss.mean()))
    for candidate, loss in zip(candidates, losses, strict=True):
        excess = loss - best
        if float(excess.mean()) <= standard_error(excess):
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
    anchors are left out.

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
    path_target, multipliers, steps = path_to(settings, target)
    ensemble = method.with_spread(settings.spread)
    randomized = ensemble.randomize(
        selected, next(rows.with_batch_size(rows.n).epoch())[1], run.seed
    )
    path = (path_target, selected, multipliers, steps, rows, starts, run.effort, run.progress)
    members = modes_along_path(*path, randomized)
    if randomized is None or members.stopped == "interrupted":
        return members
    if not _is_overfitted(members, point_posterior(selected, mode), rows, run.seed):
        return members
    return modes_along_path(*path)


def _is_overfitted(members: Posterior, mode: Posterior, rows: Rows, seed: int) -> bool:
    """Return whether members have a far smaller error on their training rows than the mode.

    The mode follows a path from a narrow prior, along which units stay alike. Anchors can lead away
    from it to modes that fit the noise.
    """
    error = float(residuals(members, rows, seed)[0].mean())
    return error < MIN_TRAINING_ERROR * float(residuals(mode, rows, seed)[0].mean())


def _repeat(stack: Tensor, times: int) -> Tensor:
    """Return a stack (K, ...) several times one after the other, (times·K, ...)."""
    return stack.repeat(times, *[1] * (stack.ndim - 1))
