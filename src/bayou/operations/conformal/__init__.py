"""Conformal prediction: exchangeable rows, shifted inputs or labels, streams, losses."""

from bayou.operations.conformal.covariate_shift import DensityRatio, density_ratio
from bayou.operations.conformal.label_shift import label_ratio
from bayou.operations.conformal.online import OnlineConformal
from bayou.operations.conformal.prediction import Shift, conformal
from bayou.operations.conformal.predictors import (
    Conformal,
    ConformalPredictor,
    Predicts,
    WeightedConformal,
)
from bayou.operations.conformal.risk import RiskControl, control_risk
from bayou.operations.conformal.scores import INTERVALS, SETS, Score, ScoreName
from bayou.operations.conformal.weights import (
    EffectiveRowsWarning,
    RecencyWeights,
    RowWeights,
    recency_weights,
)

__all__ = [
    "INTERVALS",
    "SETS",
    "Conformal",
    "ConformalPredictor",
    "DensityRatio",
    "EffectiveRowsWarning",
    "OnlineConformal",
    "Predicts",
    "RecencyWeights",
    "RiskControl",
    "RowWeights",
    "Score",
    "ScoreName",
    "Shift",
    "WeightedConformal",
    "conformal",
    "control_risk",
    "density_ratio",
    "label_ratio",
    "recency_weights",
]
