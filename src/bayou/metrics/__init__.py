"""Scores of a ``Predictive`` for observed y: means over examples, log-probabilities in nats.

``summary(predictive, y)`` computes the usual ones; ``agreement`` and ``total_variation`` compare
two predictions. y has the shape of the targets of the likelihood, (B, *event).
"""

from bayou.metrics.chains import ess_bulk, ess_tail, rhat
from bayou.metrics.classes import (
    Reliability,
    accuracy,
    brier,
    confidence_and_hits,
    ece,
    reliability,
)
from bayou.metrics.distance import agreement, total_variation
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

__all__ = [
    "Rejection",
    "Reliability",
    "accuracy",
    "agreement",
    "auroc",
    "brier",
    "confidence_and_hits",
    "coverage",
    "crps",
    "ece",
    "error_rejection",
    "ess_bulk",
    "ess_tail",
    "nll",
    "reliability",
    "rhat",
    "rmse",
    "row_nll",
    "standard_error",
    "summary",
    "total_variation",
    "width",
]
