"""The prior scale of classes, and of networks that predict their own noise."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from bayou.core.progress import Progress, Show
from bayou.inference.prior_scale import rescale_priors
from bayou.network.target import Target
from bayou.posteriors.posterior import Stage
from bayou.select.budget import affordable_passes, affordable_scales, shares_passes
from bayou.select.folds import Fold, describe_folds, split_folds
from bayou.select.regularization_path import Multipliers, path_passes, search_paths
from bayou.select.search_run import SearchRun, stage_record, stop_at_network
from bayou.training.data import Rows
from bayou.training.guards import Interrupt

SCALE_FACTOR: Final = math.sqrt(3)  # between two candidate prior scales of classes
MAX_SCALE_STEPS: Final = 2  # such factors from the given scale
MAX_UP_STEPS_RANDOM: Final = 1  # such factors upwards for methods with random weights throughout


@final
@dataclass(frozen=True)
class PriorScale:
    """A factor of all prior scales, selected on held-out rows.

    Args:
        target: the target with this prior.
        trials: all factors with their mean −log p of held-out rows.
        scale: the selected factor.
        folds: how held-out rows were used, in words.
    """

    target: Target
    trials: list[dict[str, float]]
    scale: float = 1.0
    folds: str = ""

    @property
    def decision(self) -> str:
        """The decision in words."""
        scale = describe_scale(self.scale)
        return f"{scale}, chosen from {len(self.trials)} {self.folds}"


def describe_scale(scale: float, *, is_prior_given: bool = False) -> str:
    """Return a factor of the prior scales in words."""
    prior = "given prior" if is_prior_given else "default"
    return f"prior scale {scale:.3g} of the {prior}"


def select_prior_scale(
    target: Target, rows: Rows, run: SearchRun, *, draws_all_weights: bool
) -> tuple[Target, Stage, str]:
    """Select the prior scale on held-out rows, for a method.

    Args:
        target: the target, with Normal priors.
        rows: all rows.
        run: of the search.
        draws_all_weights: whether every weight is random in the posterior of the method. Such a
            posterior has logits of a hundred under a prior that is adequate for a mode.

    Returns:
        The target with this prior, the record of the stage and the decision in words.

    Raises:
        SearchInterrupted: after Ctrl-C, with the network as given.
    """
    started = time.perf_counter()
    max_up = MAX_UP_STEPS_RANDOM if draws_all_weights else MAX_SCALE_STEPS
    folds = split_folds(rows, run.part_seed("folds"), run.effort)
    try:
        with Interrupt():
            best = best_prior_scale(target, rows, folds, run.progress, max_up, run.effort)
    except KeyboardInterrupt:
        raise stop_at_network(target) from None
    return best.target, stage_record("prior scale", started, list(best.trials)), best.decision


def best_prior_scale(
    target: Target,
    rows: Rows,
    folds: Sequence[Fold],
    progress: Show,
    max_up: int,
    effort: float = 1.0,
) -> PriorScale:
    """Compare factors of all prior scales by the held-out −log p of modes.

    All modes start at the initial weights, in one batch: those that followed a path of scales
    predicted worse. A wide prior overfits classes that overlap, and a narrow one is underconfident
    for classes that do not.

    Args:
        target: the target, with Normal priors.
        rows: all rows.
        folds: training and held-out rows.
        progress: whether to show progress.
        max_up: how many factors above 1 are tried.
        effort: multiplies the passes.
    """
    scales = [SCALE_FACTOR**step for step in range(-MAX_SCALE_STEPS, max_up + 1)]
    passes = path_passes(target, effort)
    if not shares_passes(target, rows):
        scales = affordable_scales(scales)
        folds = folds[:1]
        passes = affordable_passes(passes, len(scales))
    multipliers: list[list[Multipliers]] = [
        [dict.fromkeys(target.free, scale**-2)] * len(folds) for scale in scales
    ]
    with Progress("choosing the prior", passes, progress) as line:
        line.announce()
        search = search_paths(target, rows, folds, multipliers, [1.0], line, effort, passes)
    trials = [{"scale": scales[prior], "nll": nll} for (prior, _), nll in search.trials.items()]
    scale = scales[search.prior]
    changed = {} if scale == 1 else multipliers[search.prior][0]
    return PriorScale(rescale_priors(target, changed), trials, scale, describe_folds(folds))
