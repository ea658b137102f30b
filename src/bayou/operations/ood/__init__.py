"""Unusual inputs: scores of predictions and features, their p-values, and a combination.

detector = bayou.ood.fit(posterior, (x, y), held_out=(x_held, y_held))
rows = detector.score(x_new)        # rows.p_value, rows.scores["energy"], rows.p_values["knn"]
bayou.ood.score(posterior, x_new, data=(x, y)).p_value
"""

from bayou.operations.ood.detector import Detector, UnusualRows, load
from bayou.operations.ood.feature_scores import UnsupportedScore
from bayou.operations.ood.fitting import InexactRanksWarning, fit, score
from bayou.operations.ood.ranks import ConformalRanks

__all__ = [
    "ConformalRanks",
    "Detector",
    "InexactRanksWarning",
    "UnsupportedScore",
    "UnusualRows",
    "fit",
    "load",
    "score",
]
