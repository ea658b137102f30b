"""Modes under a prior that widens in steps, of many priors and folds together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor

from bayou.core import params
from bayou.core.params import Params
from bayou.core.progress import Progress
from bayou.inference.modes import Modes
from bayou.metrics import standard_error
from bayou.network import Network
from bayou.network.target import Target
from bayou.posteriors.empirical import Empirical
from bayou.select.folds import Fold, held_out_masks
from bayou.select.search_run import SearchRun
from bayou.training.data import Rows
from bayou.training.guards import Interrupt
from bayou.training.loop import move

Multipliers = dict[str, float | Tensor]  # of prior precisions, by tensor
PASSES: Final = 40  # over the rows, at every step of a path of regressions
# The same where −log p is compared: there are fewer problems, which converge later.
LOG_PROB_PASSES: Final = 120
# Of the initial weights, added at every step: units at zero, a saddle of the loss, can return.
NUDGE: Final = 0.1
# Of the error of outputs 0 on training rows, above which a network has learned nothing.
MIN_SIGNAL: Final = 0.95
MIN_GAIN: Final = 0.05  # nats that 25 passes must gain to continue


def path_passes(target: Target, effort: float) -> int:
    """Return the passes over all rows of every mode at a step of a path.

    Args:
        target: a regression with one noise, or a target that is judged by −log p.
        effort: multiplies the passes; at least a quarter of them are made.
    """
    has_one_noise = target.likelihood.gaussian_noise is not None
    return round(max(0.25, effort) * (PASSES if has_one_noise else LOG_PROB_PASSES))


@final
@dataclass(frozen=True)
class PathSpec:
    """A path that ends at the modes of a target.

    Args:
        target: with fixed Normal priors, and the noise of a regression fixed.
        multipliers: of its prior precisions, by tensor; 1 for a missing name.
        steps: multipliers of all of them, from large to small.
    """

    target: Target
    multipliers: Multipliers = field(default_factory=dict)
    steps: Sequence[float] = (1.0,)


class Path:
    """Modes under a prior that widens in steps, each found from the previous one.

    This is the regularization path of every problem. Followed from a narrow prior, modes predict
    better than those found from a random start under the same wide prior.

    Args:
        target: with fixed Normal priors, and the noise of a regression fixed.
        rows: all N rows.
        masks: the rows of each problem, (K, N).
        multipliers: of prior precisions by tensor, for each problem; 1 for a missing name.
        steps: multipliers of all prior precisions, from large to small.
        passes: over the rows at every step.
        report: is called with the number of passes after every pass.
        starts: the initial weights of each problem, (K, ...); by default those of the network.
        randomized: means of the priors and y of each problem, where they differ
            (``Method.randomize``).
    """

    def __init__(
        self,
        target: Target,
        rows: Rows,
        masks: Tensor,
        multipliers: Sequence[Multipliers],
        steps: Sequence[float],
        passes: int,
        report: Callable[[int], None] | None = None,
        *,
        starts: Params | None = None,
        randomized: tuple[Params, Tensor] | None = None,
    ) -> None:
        self.target = target
        self.multipliers: list[dict[str, float | Tensor]] = list(multipliers)
        self.steps = steps
        self.passes_per_step = passes
        self.report = report
        self.randomized: tuple[dict[str, Tensor], Tensor] | tuple[None, None] = randomized or (
            None,
            None,
        )
        weight = next(target.net.parameters())
        self.rows: tuple[Any, Tensor] = move(next(rows.with_batch_size(rows.n).epoch()), weight)
        self.masks: Tensor = masks.to(weight.device)
        self.first: dict[str, Tensor] = starts or {
            name: value.expand(len(masks), *value.shape) for name, value in target.start().items()
        }
        self.stack: Params = {}  # the modes of the last step
        self.passes: int = 0  # over the rows, of all problems

    def walk(self) -> Iterator[Tensor]:
        """Yield the errors of all rows at every step, (K, N).

        They are squared residuals where all rows have one noise, otherwise −log p.
        """
        has_one_noise = self.target.likelihood.gaussian_noise is not None
        start = self.first
        for number, step in enumerate(self.steps):
            multipliers = [
                {name: step * by_name.get(name, 1.0) for name in self.target.free}
                for by_name in self.multipliers
            ]
            # with k times the noise the loss is in units of k² nats
            gain = MIN_GAIN * step if has_one_noise else MIN_GAIN
            modes = Modes(
                self.target, self.rows, self.masks, multipliers, gain, start, *self.randomized
            )
            self.stack = modes.run(self.passes_per_step, self._reporter(number))
            self.passes += modes.passes
            self.errors: Tensor = modes.errors().nan_to_num(torch.inf)
            yield self.errors
            start = self._next_start(self.stack, float(modes.error_of_zero().mean()))

    def _next_start(self, stack: Params, error_of_zero: float) -> Params:
        """Return where the next step begins: near the last modes.

        A network at zero is at a saddle of the loss, from which it does not return: it begins
        again.
        """
        training_error = (self.errors * self.masks).sum(1) / self.masks.sum(1)
        is_lost = ~(training_error < MIN_SIGNAL * error_of_zero)
        kept = torch.where(is_lost, 0.0, 1.0)
        added = torch.where(is_lost, 1.0, NUDGE)
        return {
            name: _times(kept, value) + _times(added, self.first[name])
            for name, value in stack.items()
        }

    def _reporter(self, number: int) -> Callable[[int], None] | None:
        """Return what a step calls after every pass."""
        report = self.report
        if report is None:
            return None
        before = number * self.passes_per_step
        return lambda passes: report(before + passes)

    def keep(self, problems: Tensor) -> None:
        """Continue with some of the problems, after a step.

        Args:
            problems: their numbers, (K',).
        """
        self.masks = self.masks[problems]
        self.multipliers = [self.multipliers[int(k)] for k in problems]
        self.errors = self.errors[problems]
        self.first = {name: value[problems] for name, value in self.first.items()}
        self.stack = {name: value[problems] for name, value in self.stack.items()}


def follow_path(
    spec: PathSpec,
    target: Target,
    rows: Rows,
    starts: Params,
    run: SearchRun,
    *,
    randomized: tuple[Params, Tensor] | None = None,
    masks: Tensor | None = None,
) -> Empirical:
    """Find the modes from each of the starts at the end of a path, in one batch.

    Args:
        spec: the path.
        target: that of the posterior, with the same modes as the end of the path.
        rows: all rows.
        starts: the initial weights of each mode, (K, ...).
        run: of the search, whose effort multiplies the passes.
        randomized: see ``Method.randomize``.
        masks: the rows of each mode, (K, N), if not all.

    Returns:
        The modes, those so far if interrupted.
    """
    count = params.size(starts)
    if masks is None:
        masks = torch.ones(count, rows.n, dtype=torch.bool)
    passes = path_passes(spec.target, run.effort)
    path = Path(
        spec.target,
        rows,
        masks,
        [spec.multipliers] * count,
        spec.steps,
        passes,
        starts=starts,
        randomized=randomized,
    )
    stack = {name: value.expand(count, *value.shape) for name, value in target.start().items()}
    stopped = "finished"
    title = f"{count} mode{'s' if count > 1 else ''}"
    with Progress(title, len(spec.steps) * passes, run.progress) as line, Interrupt():
        path.report = line.update
        try:
            line.announce()
            for step, errors in enumerate(path.walk()):
                line.update((step + 1) * passes, error=float(errors.mean()))
        except KeyboardInterrupt:
            stopped = "interrupted"
    posterior = Empirical(target, Network(target.net), stack | path.stack, [])
    posterior.stopped = stopped
    return posterior


def _times(factors: Tensor, stack: Tensor) -> Tensor:
    """Return a stack (K, ...) with a factor for each of its entries."""
    return factors.to(stack).view(-1, *[1] * (stack.ndim - 1)) * stack


@final
@dataclass(frozen=True)
class PathSearch:
    """The best prior and step of a search along paths.

    Args:
        prior: the index of its multipliers.
        step: the index of its step.
        errors: of the held-out rows, (M,).
        modes: of each fold and, in a regression, of all rows, (F + 1, ...).
        trials: the mean held-out error by prior and step.
    """

    prior: int
    step: int
    errors: Tensor
    modes: Params
    trials: dict[tuple[int, int], float]


def search_paths(
    target: Target,
    rows: Rows,
    folds: Sequence[Fold],
    multipliers: Sequence[Sequence[Multipliers]],
    steps: Sequence[float],
    line: Progress,
    passes: int,
) -> PathSearch:
    """Select the prior and the step with the lowest held-out error of modes.

    All priors and folds, and in a regression all rows, follow their paths together. Priors that
    are worse than the best by two standard errors of the difference, paired over rows, are dropped,
    and the path ends after two steps that are worse than the best in the same sense.

    Args:
        target: with fixed Normal priors, and the noise of a regression fixed.
        rows: all rows.
        folds: training and held-out rows.
        multipliers: for each prior those of every fold and, in a regression, of all rows.
        steps: multipliers of all prior precisions, from large to small.
        line: the progress line.
        passes: over the rows at every step.
    """
    masks = held_out_masks(rows, folds)
    if target.likelihood.gaussian_noise is None:
        masks = masks[:-1]
    count = len(masks)
    remaining = list(range(len(multipliers)))
    line.start_clock(len(steps) * passes)
    all_multipliers = [of_fold for of_prior in multipliers for of_fold in of_prior]
    all_masks = ~masks.repeat(len(remaining), 1)
    path = Path(target, rows, all_masks, all_multipliers, steps, passes, line.update)
    errors_of: dict[tuple[int, int], Tensor] = {}
    modes: Params = {}
    best = (0, 0)
    for step, errors in enumerate(path.walk()):
        by_prior = errors.unflatten(0, (len(remaining), count))
        held_out = by_prior.masked_select(masks.to(errors.device)).unflatten(
            0, (len(remaining), -1)
        )
        for prior, prior_errors in zip(remaining, held_out, strict=True):
            errors_of[prior, step] = prior_errors
        best_prior = min(remaining, key=lambda prior: float(errors_of[prior, step].mean()))
        best = min(errors_of, key=lambda trial: float(errors_of[trial].mean()))
        if best == (best_prior, step):
            first = count * remaining.index(best_prior)
            modes = {
                name: value[first : first + count].clone() for name, value in path.stack.items()
            }
        line.update((step + 1) * passes, error=float(errors_of[best].mean()))
        if _has_passed_minimum(errors_of, best, best_prior, step):
            break
        best_errors = errors_of[best_prior, step]
        kept = [
            index
            for index, prior in enumerate(remaining)
            if not _is_worse(errors_of[prior, step], best_errors)
        ]
        remaining = [remaining[index] for index in kept]
        path.keep(torch.tensor([index * count + fold for index in kept for fold in range(count)]))
    trials = {trial: float(errors.mean()) for trial, errors in errors_of.items()}
    return PathSearch(best[0], best[1], errors_of[best], modes, trials)


def _has_passed_minimum(
    errors_of: Mapping[tuple[int, int], Tensor], best: tuple[int, int], prior: int, step: int
) -> bool:
    """Return whether the last two steps of a prior are clearly worse than the best trial."""
    return step - best[1] >= 2 and all(
        _is_worse(errors_of[prior, last], errors_of[best]) for last in (step - 1, step)
    )


def _is_worse(errors: Tensor, best: Tensor) -> bool:
    """Return whether a setting is worse than another by two standard errors of the difference.

    One whose errors are infinite is not: it may recover at the next step.
    """
    return float((errors - best).mean()) > 2 * standard_error(errors - best)
