"""Rows that are held out to judge settings by, and the prior scale that they choose."""

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
from bayou.priors import BoundNormal
from bayou.progress import Progress, Show
from bayou.target import Target, forward_inputs
from bayou.training.checkpoints import State
from bayou.training.convergence import NotConverged
from bayou.training.data import Rows
from bayou.training.guards import Interrupt
from bayou.training.loop import move
from bayou.training.newton import finish

FOLDS: Final = 5
MANY: Final = 500  # rows, from which one fifth says enough
LARGE: Final = 5000  # rows, from which full passes cost more than the training
PASSES: Final = 120  # over the rows, for a mode whose held-out error is compared
ENOUGH: Final = 0.05  # nats that a round of it must gain to go on: its error is only compared with others
SHARE: Final = 4  # or fewer: one for so many steps of the start
WIDER: Final = math.sqrt(3)  # between two prior scales of classes that are tried
REACH: Final = 2  # such steps from the scale that was given, at most
DRAWN: Final = 1  # steps up, at most, for what draws all weights


def parts(rows: Rows, seed: int) -> list[tuple[Rows, Rows]]:
    """Rows to learn from and to hold out: five folds, or the first of them where it is large enough."""
    order = rows.index[rng.permutation(rows.n, seed)]
    folds = [order[k::FOLDS].sort().values for k in range(FOLDS if rows.n < MANY else 1)]
    rest = [rows.index[torch.isin(rows.index, fold, invert=True)] for fold in folds]
    return [
        (Rows(rows.source, a, rows.batch_size), Rows(rows.source, b, rows.batch_size))
        for a, b in zip(rest, folds, strict=True)
    ]


def held_out_error(start: MAP, target: Target, learned: Rows, held: Rows) -> float:
    """Of a mode on rows that it has not seen: the mean squared residual; without one noise for all, the mean −log p."""
    problem, whole = PointModel(start, replace(target, n=learned.n)), learned.cut(learned.n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConverged)  # it is only compared with others
        state = State()
        passes = min(PASSES, -(-start.total_steps(whole) // SHARE))
        finish(problem, whole, passes, state, False, enough=ENOUGH)
    if state.stopped:
        raise KeyboardInterrupt
    x, y = move(next(held.cut(held.n).ordered()), next(problem.parameters()))
    with torch.no_grad():
        f = problem.outputs(*forward_inputs(x))
        if target.likelihood.gaussian_noise is None:
            return -float(target.likelihood.log_prob(f, y).mean())
        return float((f - y).square().mean())


def fixed_normal(target: Target) -> bool:
    """Whether all priors are Normal, with nothing to learn."""
    return all(isinstance(p, BoundNormal) and not any(True for _ in p.parameters()) for p in target.priors.values())


def judged_by_log_prob(target: Target) -> bool:
    """Whether −log p of held-out rows chooses a scale of Normal priors: classes, or a network that says its noise."""
    return fixed_normal(target) and isinstance(target.likelihood, FiniteLikelihood | BoundHeteroscedastic)


def widened(target: Target, scale: float) -> Target:
    """The target with all prior scales multiplied."""
    return target if scale == 1.0 else rescaled(target, dict.fromkeys(target.free, scale**-2))


def best_scale(
    start: MAP, target: Target, folds: list[tuple[Rows, Rows]], progress: Show, most: int = REACH
) -> float | None:
    """What to multiply prior scales by: down the hill of the held-out −log p of modes; None if it was interrupted.

    Where classes overlap a wide prior learns the rows by heart, and where they do not a narrow one doubts for no
    reason: neither is right for both. ``most``: steps up. What draws all weights has logits of a hundred under a prior
    that a mode is well under: on 480 digits, at a gain of 9, rows that cost a mode 8 nats cost mean field 70.
    """
    errors: dict[int, float] = {}
    left, best = [0], 0
    with Progress("prior", 2 * REACH, progress) as line, Interrupt():
        try:
            while left:
                place = widened(target, WIDER ** left[0])
                error = sum(held_out_error(start, place, *fold) for fold in folds) / len(folds)
                errors[left[0]] = error if math.isfinite(error) else math.inf
                best = min(errors, key=lambda step: errors[step])
                line.update(len(errors), nll=errors[best])
                left = [
                    step for step in (best + 1, best - 1) if -REACH <= step <= min(most, REACH) and step not in errors
                ]
        except KeyboardInterrupt:
            return None
    return WIDER**best
