"""Numbers that judge a ``Predictive`` against what happened. All in nats; means over examples unless a name says sum.

``summary(predictive, y)`` gives the usual ones at once. Entries of y are the targets of the likelihood, (B, *event).
"""

from bayou.metrics.classes import Reliability, accuracy, brier, confidence_and_hits, ece, reliability
from bayou.metrics.regression import coverage, crps, rmse, width
from bayou.metrics.scores import Rejection, auroc, error_rejection, log_predictive, nll, standard_error, summary

__all__ = [
    "Rejection",
    "Reliability",
    "accuracy",
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
    "standard_error",
    "summary",
    "width",
]
