"""Scores of a ``Predictive`` for observed y: means over examples, log-probabilities in nats.

``summary(predictive, y)`` computes the usual ones; ``agreement`` and ``total_variation`` compare
two predictions. y has the shape of the targets of the likelihood, (B, *event).
"""

from bayou.metrics.calibration_errors import (
    adaptive_ece,
    classwise_ece,
    smooth_calibration_error,
    smooth_ece,
)
from bayou.metrics.chains import ess_bulk, ess_tail, rhat
from bayou.metrics.classes import (
    Reliability,
    accuracy,
    brier,
    confidence_and_hits,
    ece,
    reliability,
)
from bayou.metrics.distance import agreement, row_total_variation, total_variation
from bayou.metrics.estimates import IntervalEstimate
from bayou.metrics.quantiles import (
    PitHistogram,
    interval_score,
    pinball,
    pit,
    pit_histogram,
    uniformity,
)
from bayou.metrics.regression import coverage, crps, rmse, width
from bayou.metrics.scores import (
    Rejection,
    auroc,
    error_rejection,
    nll,
    row_nll,
    standard_error,
    summary,
)
from bayou.metrics.selective import augrc, aurc, fpr_at_tpr, selective_accuracy

__all__ = [
    "IntervalEstimate",
    "PitHistogram",
    "Rejection",
    "Reliability",
    "accuracy",
    "adaptive_ece",
    "agreement",
    "augrc",
    "aurc",
    "auroc",
    "brier",
    "classwise_ece",
    "confidence_and_hits",
    "coverage",
    "crps",
    "ece",
    "error_rejection",
    "ess_bulk",
    "ess_tail",
    "fpr_at_tpr",
    "interval_score",
    "nll",
    "pinball",
    "pit",
    "pit_histogram",
    "reliability",
    "rhat",
    "rmse",
    "row_nll",
    "row_total_variation",
    "selective_accuracy",
    "smooth_calibration_error",
    "smooth_ece",
    "standard_error",
    "summary",
    "total_variation",
    "uniformity",
    "width",
]
