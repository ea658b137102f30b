"""Held-out rows for the selection of settings, and the modes that are compared on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.params import Params
from bayou.core.progress import Progress, Show
from bayou.inference.modes import Modes
from bayou.inference.prior_scale import rescale_priors
from bayou.likelihoods.continuous import BoundHeteroscedastic
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.metrics import standard_error
from bayou.priors import BoundNormal
from bayou.select.budget import affordable_passes, affordable_scales, shares_passes
from bayou.target import Target
from bayou.training.data import Rows
from bayou.training.loop import move

Factors = dict[str, float | Tensor]  # multipliers of prior precisions by tensor
FOLDS: Final = 5
SINGLE_FOLD_ROWS: Final = 500  # rows, from which one fold is used instead of five
MAX_FULL_BATCH_ROWS: Final = 5000  # rows, above which full passes cost more than the training
PASSES: Final = 40  # over the rows, at every step of a path of regressions
LOG_PROB_PASSES: Final = (
    120  # the same where −log p is compared: there are fewer problems, which converge later
)
NUDGE: Final = 0.1  # of the initial weights, added at every step: units at zero, a saddle of the loss, can return
MIN_SIGNAL: Final = (
    0.95  # of the error of outputs 0 on training rows, above which a network has learned nothing
)
MIN_GAIN: Final = 0.05  # nats that 25 passes must gain to continue
SCALE_FACTOR: Final = math.sqrt(3)  # between two candidate prior scales of classes
MAX_SCALE_STEPS: Final = 2  # such factors from the given scale
MAX_UP_STEPS_RANDOM: Final = 1  # such factors upwards for methods with random weights throughout


def parts(rows: Rows, seed: int, effort: float = 1.0) -> list[tuple[Rows, Rows]]:
    """Training and held-out rows: five folds, fewer with less effort, or only the first where it is
    large enough.
    """
    count = 1 if rows.n >= SINGLE_FOLD_ROWS else max(1, min(FOLDS, round(effort * FOLDS)))
    order = rows.index[rng.permutation(rows.n, seed)]
    folds = [order[k::FOLDS].sort().values for k in range(count)]
    rest = [rows.index[torch.isin(rows.index, fold, invert=True)] for fold in folds]
    return [
        (Rows(rows.source, a, rows.batch_size), Rows(rows.source, b, rows.batch_size))
        for a, b in zip(rest, folds, strict=True)
    ]


def path_passes(target: Target, effort: float) -> int:
    """Return the passes over all rows of every mode at a step of a path."""
    has_one_noise = target.likelihood.gaussian_noise is not None
    return round(max(0.25, effort) * (PASSES if has_one_noise else LOG_PROB_PASSES))


class Path:
    """Modes under a prior that widens in steps, each found from the last one: the regularization
    path of every problem.

    Followed from a narrow prior, modes predict better than those found from a random start under
    the same wide prior (friedman1, 240 rows, five folds: an error of .31 against .33 standard
    deviations of y).

    Args:
        target: with fixed Normal priors, and the noise of a regression fixed.
        rows: all N rows.
        masks: the rows of each problem, (K, N).
        factors: for each problem, multipliers of prior precisions by tensor; 1 for a missing name.
        steps: multipliers of all prior precisions, from large to small.
        stack: the initial weights of each problem, (K, ...); by default those of the network.
        effort: multiplies the passes of a step; at least a quarter of them are made.
        randomized: means of the priors and y of each problem, where they differ
            (``Method.randomize``).
        passes_per_step: instead of the default number of passes.
        report: called with the number of passes of all steps so far, after every pass.
    """

    def __init__(
        self,
        target: Target,
        rows: Rows,
        masks: Tensor,
        factors: Sequence[Factors],
        steps: Sequence[float],
        stack: Params | None = None,
        effort: float = 1.0,
        randomized: tuple[Params, Tensor] | None = None,
        passes_per_step: int | None = None,
        report: Callable[[int], None] | None = None,
    ) -> None:
        self.randomized = randomized or (None, None)
        self.target, self.factors, self.steps = target, list(factors), steps
        self.passes_per_step = passes_per_step or path_passes(target, effort)
        self.report = report
        like = next(target.net.parameters())
        self.rows, self.masks = move(next(rows.cut(rows.n).ordered()), like), masks.to(like.device)
        self.first = stack or {
            name: value.expand(len(masks), *value.shape) for name, value in target.start().items()
        }
        self.stack: Params | None = None
        self.passes = 0  # over the rows, of all problems

    def walk(self) -> Iterator[Tensor]:
        """At every step the errors of all rows, (K, N): squared residuals of one noise for all
        rows, or −log p.
        """
        unit = (
            self.target.likelihood.gaussian_noise is not None
        )  # k times the noise: a loss in units of k² nats
        start = self.first
        for number, step in enumerate(self.steps):
            factors = [
                {name: step * each.get(name, 1.0) for name in self.target.free}
                for each in self.factors
            ]
            gain = MIN_GAIN * step if unit else MIN_GAIN
            modes = Modes(
                self.target, self.rows, self.masks, factors, gain, start, *self.randomized
            )
            self.stack = modes.run(self.passes_per_step, self._reporter(number))
            self.passes += modes.passes
            self.errors = modes.errors().nan_to_num(torch.inf)
            yield self.errors
            # A network at zero is at a saddle of the loss, from which it does not return: it begins
            # again.
            learned = (self.errors * self.masks).sum(1) / self.masks.sum(1)
            lost = ~(learned < MIN_SIGNAL * modes.error_of_zero().mean())
            kept, added = torch.where(lost, 0.0, 1.0), torch.where(lost, 1.0, NUDGE)
            start = {
                name: _times(kept, value) + _times(added, self.first[name])
                for name, value in self.stack.items()
            }

    def _reporter(self, number: int) -> Callable[[int], None] | None:
        """Return what a step calls after every pass."""
        report = self.report
        if report is None:
            return None
        before = number * self.passes_per_step
        return lambda passes: report(before + passes)

    def keep(self, problems: Tensor) -> None:
        """Go on with some of the problems."""
        self.masks, self.factors = self.masks[problems], [self.factors[int(k)] for k in problems]
        assert self.stack is not None
        self.errors = self.errors[problems]
        self.first, self.stack = (
            {name: value[problems] for name, value in stack.items()}
            for stack in (self.first, self.stack)
        )


def _times(factors: Tensor, stack: Tensor) -> Tensor:
    """A stack (K, ...) with a factor for each of its entries."""
    return factors.to(stack).view(-1, *[1] * (stack.ndim - 1)) * stack


def held_out(rows: Rows, folds: Sequence[tuple[Rows, Rows]]) -> Tensor:
    """Which rows each fold holds out, and none in the last row, for a mode of all rows: (F + 1,
    N).
    """
    each = [torch.isin(rows.index, held.index) for _, held in folds]
    return torch.stack([*each, torch.zeros_like(each[0])])


@final
@dataclass(frozen=True)
class Found:
    """The best setting of a search.

    Args:
        which: the index of its factors.
        when: the index of its step.
        errors: of the held-out rows, (M,).
        modes: of each fold and, in a regression, of all rows, (F + 1, ...).
        trials: the mean held-out error by factors and step.
    """

    which: int
    when: int
    errors: Tensor
    modes: Params
    trials: dict[tuple[int, int], float]


def search(
    target: Target,
    rows: Rows,
    folds: Sequence[tuple[Rows, Rows]],
    factors: Sequence[Sequence[Factors]],
    steps: Sequence[float],
    line: Progress,
    effort: float = 1.0,
    passes_per_step: int | None = None,
) -> Found:
    """The factors and the step with the lowest held-out error of modes.

    All factors and folds, and in a regression all rows, follow their paths together. Factors that
    are worse than the best by two standard errors of the difference, paired over rows, are dropped,
    and the path ends after two steps that are worse than the best in the same sense.
    """
    held = held_out(rows, folds)[: None if target.likelihood.gaussian_noise is not None else -1]
    errors_of, modes = dict[tuple[int, int], Tensor](), Params()
    count, left = len(held), list(range(len(factors)))
    passes = passes_per_step or path_passes(target, effort)
    line.start_clock(len(steps) * passes)
    masks = ~held.repeat(len(left), 1)
    every = [f for each in factors for f in each]
    path = Path(
        target, rows, masks, every, steps, None, effort, passes_per_step=passes, report=line.update
    )
    for step, errors in enumerate(path.walk()):
        apart = errors.unflatten(0, (len(left), count)).masked_select(held.to(errors.device))
        each = apart.unflatten(0, (len(left), -1))
        errors_of |= {(which, step): one for which, one in zip(left, each, strict=True)}
        here = min(left, key=lambda one: float(errors_of[one, step].mean()))
        best = min(errors_of, key=lambda one: float(errors_of[one].mean()))
        if best == (here, step):
            assert path.stack is not None
            own = slice(count * left.index(here), count * (left.index(here) + 1))
            modes = {name: value[own].clone() for name, value in path.stack.items()}
        line.update((step + 1) * passes, error=float(errors_of[best].mean()))
        if step - best[1] >= 2 and all(
            _worse(errors_of[here, one], errors_of[best]) for one in (step - 1, step)
        ):
            break
        stay = [
            k
            for k, one in enumerate(left)
            if not _worse(errors_of[one, step], errors_of[here, step])
        ]
        left = [left[k] for k in stay]
        path.keep(torch.tensor([k * count + f for k in stay for f in range(count)]))
    return Found(
        *best, errors_of[best], modes, {one: float(each.mean()) for one, each in errors_of.items()}
    )


def _worse(errors: Tensor, best: Tensor) -> bool:
    """Whether one setting is worse than another by two standard errors of the difference."""
    return float((errors - best).mean()) > 2 * standard_error(errors - best)


def fixed_normal(target: Target) -> bool:
    """Whether all priors are Normal with fixed scales."""
    return all(
        isinstance(p, BoundNormal) and not any(True for _ in p.parameters())
        for p in target.priors.values()
    )


def judged_by_log_prob(target: Target) -> bool:
    """Whether −log p of held-out rows selects the scale of Normal priors: classes, or a network
    with its own noise.
    """
    return fixed_normal(target) and isinstance(
        target.likelihood, FiniteLikelihood | BoundHeteroscedastic
    )


def best_scale(
    target: Target,
    rows: Rows,
    folds: Sequence[tuple[Rows, Rows]],
    progress: Show,
    most: int,
    effort: float = 1.0,
) -> tuple[Target, list[dict[str, float]]]:
    """The target with the factor of all prior scales of the lowest held-out −log p of modes; all
    factors with theirs.

    All modes start at the initial weights, in one batch: those that followed a path of scales
    predicted worse (overlapping moons: .32 against .26 nats). A wide prior overfits classes that
    overlap, and a narrow one is underconfident for classes that do not. ``most``: steps upwards.
    Methods that draw all weights have logits of a hundred under a prior that is adequate for a
    mode: on 480 digits, at a gain of 9, rows that cost a mode 8 nats cost mean field 70.
    """
    scales = [SCALE_FACTOR**step for step in range(-MAX_SCALE_STEPS, most + 1)]
    passes = path_passes(target, effort)
    if not shares_passes(target, rows):
        scales = affordable_scales(scales)
        folds = folds[:1]
        passes = affordable_passes(passes, len(scales))
    factors: list[list[Factors]] = [
        [dict.fromkeys(target.free, scale**-2)] * len(folds) for scale in scales
    ]
    with Progress("choosing the prior", passes, progress) as line:
        line.announce()
        found = search(target, rows, folds, factors, [1.0], line, effort, passes)
    trials = [{"scale": scales[which], "nll": nll} for (which, _), nll in found.trials.items()]
    return rescale_priors(
        target, {} if scales[found.which] == 1 else factors[found.which][0]
    ), trials
