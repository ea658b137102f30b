"""The prior scale of classes, and of networks that predict their own noise."""

from __future__ import annotations

import math
import time
from typing import Final

from bayou.core.progress import Progress
from bayou.inference.prior_scale import rescale_priors
from bayou.network.target import Target
from bayou.posteriors.posterior import Stage
from bayou.select.budget import affordable_passes, shares_passes
from bayou.select.folds import describe_folds, split_folds
from bayou.select.regularization_path import Multipliers, path_passes, search_paths
from bayou.select.search_run import SearchRun, stage_record, stop_at_network
from bayou.training.data import Rows
from bayou.training.guards import Interrupt

SCALE_FACTOR: Final = math.sqrt(3)  # between two candidate prior scales of classes
MAX_SCALE_STEPS: Final = 2  # such factors from the given scale
MAX_UP_STEPS_RANDOM: Final = 1  # such factors upwards for methods with random weights throughout


def select_prior_scale(
    target: Target, rows: Rows, run: SearchRun, *, draws_all_weights: bool
) -> tuple[Target, Stage, str]:
    """Select a factor of all prior scales by the held-out −log p of modes.

    All modes start at the initial weights, in one batch: those that followed a path of scales
    predicted worse. A wide prior overfits classes that overlap, and a narrow one is underconfident
    for classes that do not.

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
    scales = [SCALE_FACTOR**step for step in range(-MAX_SCALE_STEPS, max_up + 1)]
    folds = split_folds(rows, run.part_seed("folds"), run.effort)
    passes = path_passes(target, run.effort)
    if not shares_passes(target, rows):
        scales = sorted({min(scales), 1.0, max(scales)})
        folds = folds[:1]
        passes = affordable_passes(passes, len(scales))
    factors: list[Multipliers] = [dict.fromkeys(target.free, scale**-2) for scale in scales]
    with Interrupt(), Progress("choosing the prior", passes, run.progress) as line:
        line.announce()
        multipliers = [[factor] * len(folds) for factor in factors]
        try:
            search = search_paths(target, rows, folds, multipliers, [1.0], line, passes)
        except KeyboardInterrupt:
            raise stop_at_network(target) from None
    trials = [{"scale": scales[prior], "nll": nll} for (prior, _), nll in search.trials.items()]
    scale = scales[search.prior]
    if scale != 1:
        target = rescale_priors(target, factors[search.prior])
    decision = f"{describe_scale(scale)}, chosen from {len(trials)} {describe_folds(folds)}"
    return target, stage_record("prior scale", started, trials), decision


def describe_scale(scale: float, *, is_prior_given: bool = False) -> str:
    """Return a factor of the prior scales in words.

    Args:
        scale: the factor.
        is_prior_given: whether it is a factor of a prior of the user.
    """
    prior = "given prior" if is_prior_given else "default"
    return f"prior scale {scale:.3g} of the {prior}"
