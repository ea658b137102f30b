"""Operations on posteriors: one file per operation, each a function of a posterior."""

from bayou.operations.acquire import Acquired, acquire
from bayou.operations.calibrate import Calibration, calibrate
from bayou.operations.compress import Compression, compress
from bayou.operations.conformal import Conformal, conformal
from bayou.operations.continual import Continual, continual
from bayou.operations.distance import (
    FeatureDensity,
    feature_density,
    random_feature_head,
    spectral_normalized,
)
from bayou.operations.distill import Distilled, distill

__all__ = [
    "Acquired",
    "Calibration",
    "Compression",
    "Conformal",
    "Continual",
    "Distilled",
    "FeatureDensity",
    "acquire",
    "calibrate",
    "compress",
    "conformal",
    "continual",
    "distill",
    "feature_density",
    "random_feature_head",
    "spectral_normalized",
]
