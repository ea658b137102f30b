"""Operations on posteriors: one file per operation, each a function of a posterior."""

from bayou.operations.acquire import Acquired, acquire
from bayou.operations.augment import Augment
from bayou.operations.calibrate import Calibration, calibrate
from bayou.operations.certify import certify
from bayou.operations.compress import Compression, compress
from bayou.operations.conformal import (
    Conformal,
    DensityRatio,
    EffectiveRowsWarning,
    OnlineConformal,
    RecencyWeights,
    RiskControl,
    WeightedConformal,
    conformal,
    control_risk,
    density_ratio,
    label_ratio,
    recency_weights,
)
from bayou.operations.continual import Continual, continual
from bayou.operations.distance import (
    FeatureDensity,
    feature_density,
    random_feature_head,
    spectral_normalized,
)
from bayou.operations.distill import Distilled, distill
from bayou.operations.stored import StoredPredictions

__all__ = [
    "Acquired",
    "Augment",
    "Calibration",
    "Compression",
    "Conformal",
    "Continual",
    "DensityRatio",
    "Distilled",
    "EffectiveRowsWarning",
    "FeatureDensity",
    "OnlineConformal",
    "RecencyWeights",
    "RiskControl",
    "StoredPredictions",
    "WeightedConformal",
    "acquire",
    "calibrate",
    "certify",
    "compress",
    "conformal",
    "continual",
    "control_risk",
    "density_ratio",
    "distill",
    "feature_density",
    "label_ratio",
    "random_feature_head",
    "recency_weights",
    "spectral_normalized",
]
