"""Operations on posteriors: one file per operation, each a function of a posterior."""

from bayou.operations.acquire import Acquired, acquire
from bayou.operations.calibrate import BestCalibration, Calibration, best_calibration, calibrate
from bayou.operations.compress import Compression, compress
from bayou.operations.conformal import Conformal, conformal
from bayou.operations.continual import Continual, continual
from bayou.operations.distill import Distilled, distill
from bayou.operations.flow import to_flow
from bayou.operations.module import to_module

__all__ = [
    "Acquired",
    "BestCalibration",
    "Calibration",
    "Compression",
    "Conformal",
    "Continual",
    "Distilled",
    "acquire",
    "best_calibration",
    "calibrate",
    "compress",
    "conformal",
    "continual",
    "distill",
    "to_flow",
    "to_module",
]
