"""Held-out rows for the selection of settings, and the prior scale selected on them."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Final

import torch

from bayou import rng
from bayou.likelihoods.continuous import BoundHeteroscedastic
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.methods.point import MAP, PointModel
from bayou.methods.prior_scale import rescaled
from bayou.network import forward_inputs
from bayou.priors import BoundNormal
from bayou.progress import Progress, Show
from bayou.target import Target
from bayou.training.checkpoints import State
from bayou.training.convergence import ConvergenceWarning
from bayou.training.data import Rows
from bayou.training.guards import Interrupt
from bayou.training.loop import move
from bayou.training.newton import finish

FOLDS: Final = 5
SINGLE_FOLD_ROWS: Final = 500  # rows, from which one fold is used instead of five
MAX_FULL_BATCH_ROWS: Final = 5000  # rows, above which full passes cost more than the training
MAX_PASSES: Final = 120  # over the rows, for a mode whose held-out error is compared
MIN_GAIN: Final = 0.05  # nats that a round must gain to continue: its error is only compared with others
STEPS_PER_PASS: Final = 4  # at most one pass per so many steps of the start
SCALE_FACTOR: Final = math.sqrt(3)  # between two candidate prior scales of classes
MAX_SCALE_STEPS: Final = 2  # such factors from the given scale
MAX_UP_STEPS_RANDOM: Final = 1  # such factors upwards for methods with random weights throughout


def parts(rows: Rows, seed: int) -> list[tuple[Rows, Rows]]:
    """Training and held-out rows: five folds, or only the first where it is large enough."""
    order = rows.index[rng.permutation(rows.n, seed)]
    folds = [order[k::FOLDS].sort().values for k in range(FOLDS if rows.n < SINGLE_FOLD_ROWS else 1)]
    rest = [rows.index[torch.isin(rows.index, fold, invert=True)] for fold in folds]
    return [
        (Rows(rows.source, a, rows.batch_size), Rows(rows.source, b, rows.batch_size))
        for a, b in zip(rest, folds, strict=True)
    ]


def held_out_error(start: MAP, target: Target, learned: Rows, held: Rows) -> float:
    """The held-out error of a mode: the mean squared residual; without one noise for all rows, the mean −log p."""
    problem, whole = PointModel(start, replace(target, n=learned.n)), learned.cut(learned.n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # it is only compared with others
        state = State()
        passes = min(MAX_PASSES, -(-start.total_steps(whole) // STEPS_PER_PASS))
        finish(problem, whole, passes, state, False, enough=MIN_GAIN)
    if state.stopped:
        raise KeyboardInterrupt
    x, y = move(next(held.cut(held.n).ordered()), next(problem.parameters()))
    with torch.no_grad():
        f = problem.outputs(*forward_inputs(x))
        if target.likelihood.gaussian_noise is None:
            return -float(target.likelihood.log_prob(f, y).mean())
        return float((f - y).square().mean())


def fixed_normal(target: Target) -> bool:
    """Whether all priors are Normal with fixed scales."""
    return all(isinstance(p, BoundNormal) and not any(True for _ in p.parameters()) for p in target.priors.values())


def judged_by_log_prob(target: Target) -> bool:
    """Whether −log p of held-out rows selects the scale of Normal priors: classes, or a network with its own noise."""
    return fixed_normal(target) and isinstance(target.likelihood, FiniteLikelihood | BoundHeteroscedastic)


def widened(target: Target, scale: float) -> Target:
    """The target with all prior scales multiplied."""
    return target if scale == 1.0 else rescaled(target, dict.fromkeys(target.free, scale**-2))


def best_scale(
    start: MAP, target: Target, folds: list[tuple[Rows, Rows]], progress: Show, most: int = MAX_SCALE_STEPS
) -> float | None:
    """The factor for all prior scales, by descent on the held-out −log p of modes; None if it was interrupted.

    A wide prior overfits classes that overlap, and a narrow one is underconfident for classes that do not. ``most``:
    steps upwards. Methods that draw all weights have logits of a hundred under a prior that is adequate for a mode: on
    480 digits, at a gain of 9, rows that cost a mode 8 nats cost mean field 70.
    """
    errors: dict[int, float] = {}
    left, best = [0], 0
    with Progress("prior", 2 * MAX_SCALE_STEPS, progress) as line, Interrupt():
        try:
            while left:
                place = widened(target, SCALE_FACTOR ** left[0])
                error = sum(held_out_error(start, place, *fold) for fold in folds) / len(folds)
                errors[left[0]] = error if math.isfinite(error) else math.inf
                best = min(errors, key=lambda step: errors[step])
                line.update(len(errors), nll=errors[best])
                left = [
                    step
                    for step in (best + 1, best - 1)
                    if -MAX_SCALE_STEPS <= step <= min(most, MAX_SCALE_STEPS) and step not in errors
                ]
        except KeyboardInterrupt:
            return None
    return SCALE_FACTOR**best
