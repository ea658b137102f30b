"""Numbers that judge a ``Predictive`` against what happened. All in nats; means over examples unless a name says sum.

``summary(predictive, y)`` gives the usual ones at once; ``agreement`` and ``total_variation`` compare two predictions.
Entries of y are the targets of the likelihood, (B, *event).
"""

from bayou.metrics.classes import Reliability, accuracy, brier, confidence_and_hits, ece, reliability
from bayou.metrics.distance import agreement, total_variation
from bayou.metrics.regression import coverage, crps, rmse, width
from bayou.metrics.scores import (
    Rejection,
    auroc,
    error_rejection,
    log_predictive,
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
    "log_predictive",
    "nll",
    "reliability",
    "rmse",
    "row_nll",
    "standard_error",
    "summary",
    "total_variation",
    "width",
]
