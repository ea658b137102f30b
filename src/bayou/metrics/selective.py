"""Scores of predictions some of which are refused, the least certain first."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayou.core import rng
from bayou.likelihoods.predictive import Predictive
from bayou.metrics.estimates import DRAWS, LEVEL, IntervalEstimate, bootstrap
from bayou.metrics.scores import ROUNDING, By, errors_and_uncertainties, mean_over_ties


def aurc(
    predictive: Predictive,
    y: Tensor,
    by: By | Tensor | None = None,
    *,
    draws: int = DRAWS,
    level: float = LEVEL,
    seed: rng.Seed = 0,
) -> IntervalEstimate:
    """Compute the area under the risk-coverage curve, 1/N Σ_k error of the k most certain rows.

    It is ``error_rejection(predictive, y, by).area`` (Geifman & El-Yaniv 2017), with an interval.

    Args:
        predictive: predictions of B rows.
        y: their targets, (B, *event).
        by: the uncertainty: a name, or a tensor (B,); by default the entropy for classes, the
            standard deviation for numbers.
        draws: of the rows, for the interval.
        level: of the interval, 0.9 by default.
        seed: of the draws.

    Returns:
        The area and its confidence interval.
    """
    loss, uncertainty = errors_and_uncertainties(predictive, y, by)
    fractions = torch.arange(1, len(loss) + 1, dtype=torch.float64) / len(loss)

    def statistic(index: Tensor) -> float:
        return float((_sorted_losses(loss, uncertainty, index) / fractions).mean())

    return bootstrap(
        statistic, len(loss), draws=draws, level=level, seed=seed, bounds=_bounds(predictive)
    )


def augrc(
    predictive: Predictive,
    y: Tensor,
    by: By | Tensor | None = None,
    *,
    draws: int = DRAWS,
    level: float = LEVEL,
    seed: rng.Seed = 0,
) -> IntervalEstimate:
    """Compute the area under the generalized risk-coverage curve (Traub et al. 2024).

    1/N Σ_k P(a row is among the k most certain and wrong): the mean risk of errors that are not
    detected. Unlike in ``aurc``, a confident error does not weigh more than its share. Without
    errors it is 0, for a random order half of the error.

    Args:
        predictive: predictions of B rows.
        y: their targets, (B, *event).
        by: the uncertainty, as of ``aurc``.
        draws: of the rows, for the interval.
        level: of the interval, 0.9 by default.
        seed: of the draws.

    Returns:
        The area and its confidence interval.

    References:
        Traub et al.: Overcoming common flaws in the evaluation of selective classification
        systems, NeurIPS 2024.
    """
    loss, uncertainty = errors_and_uncertainties(predictive, y, by)

    def statistic(index: Tensor) -> float:
        return float(_sorted_losses(loss, uncertainty, index).mean())

    return bootstrap(
        statistic, len(loss), draws=draws, level=level, seed=seed, bounds=_bounds(predictive)
    )


def selective_accuracy(
    predictive: Predictive,
    y: Tensor,
    coverage: float = 0.8,
    by: By | Tensor | None = None,
    *,
    draws: int = DRAWS,
    level: float = LEVEL,
    seed: rng.Seed = 0,
) -> IntervalEstimate:
    """Compute the accuracy of the most certain rows.

    Args:
        predictive: predictions of B rows, of classes.
        y: their targets, (B, *event).
        coverage: the fraction of rows that are kept, in (0, 1]; 0.8 by default.
        by: the uncertainty, as of ``aurc``.
        draws: of the rows, for the interval.
        level: of the interval, 0.9 by default.
        seed: of the draws.

    Returns:
        The accuracy and its confidence interval.

    Raises:
        ValueError: for numbers, or a coverage outside of (0, 1].
    """
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage must lie in (0, 1], got {coverage}")
    if predictive.likelihood.support != "classes":
        raise ValueError(
            f"accuracy is for classes, got {type(predictive.likelihood).__name__}; for numbers use "
            "error_rejection(predictive, y).at(coverage)"
        )
    loss, uncertainty = errors_and_uncertainties(predictive, y, by)
    count = max(math.ceil(coverage * len(loss) - ROUNDING), 1)

    def statistic(index: Tensor) -> float:
        sums = _sorted_losses(loss, uncertainty, index)
        return 1 - float(sums[count - 1]) * len(index) / count

    return bootstrap(statistic, len(loss), draws=draws, level=level, seed=seed)


def fpr_at_tpr(inside: Tensor, outside: Tensor, tpr: float = 0.95) -> float:
    """Compute the share of unknown examples that are accepted where most known ones are.

    The threshold is the smallest score of ``inside`` that at least a fraction ``tpr`` of them does
    not exceed; an example is accepted if its score does not exceed the threshold. At 0.95 it is
    "FPR at 95 % TPR" (Hendrycks & Gimpel 2017), 0 for perfect detection.

    Args:
        inside: scores of known examples, such as uncertainties of test rows.
        outside: scores of examples to detect, which should be larger.
        tpr: in (0, 1], 0.95 by default.

    Raises:
        ValueError: if one of them is empty or has NaN.
    """
    if not 0 < tpr <= 1:
        raise ValueError(f"tpr must lie in (0, 1], got {tpr}")
    known = inside.detach().flatten().double()
    unknown = outside.detach().flatten().double().to(known.device)
    if not len(known) or not len(unknown):
        raise ValueError(
            f"fpr_at_tpr needs scores on both sides, got {len(known)} and {len(unknown)}"
        )
    if bool(known.isnan().any() | unknown.isnan().any()):
        raise ValueError("fpr_at_tpr got scores that are nan")
    threshold = known.sort().values[max(math.ceil(tpr * len(known) - ROUNDING), 1) - 1]
    return float((unknown <= threshold).double().mean())


def _bounds(predictive: Predictive) -> tuple[float, float]:
    """Return the range of a mean error."""
    return (0.0, 1.0 if predictive.likelihood.support == "classes" else math.inf)


def _sorted_losses(loss: Tensor, uncertainty: Tensor, index: Tensor) -> Tensor:
    """Return 1/N Σ of the losses of the k most certain rows, in expectation over ties: (N,)."""
    return mean_over_ties(loss[index], uncertainty[index]).cumsum(0) / len(index)
