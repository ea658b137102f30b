"""Maps from predictive distributions to calibrated ones, which a posterior has with its files."""

from bayou.calibration.classes import DirichletMap, MatrixMap, VectorMap
from bayou.calibration.curves import IsotonicMap, SplineMap
from bayou.calibration.maps import (
    CLASS_MAPS,
    MAPS,
    NUMBER_MAPS,
    CalibrationMap,
    map_named,
    restore_map,
)
from bayou.calibration.pooling import isotonic_regression
from bayou.calibration.quantiles import QuantileMap

__all__ = [
    "CLASS_MAPS",
    "MAPS",
    "NUMBER_MAPS",
    "CalibrationMap",
    "DirichletMap",
    "IsotonicMap",
    "MatrixMap",
    "QuantileMap",
    "SplineMap",
    "VectorMap",
    "isotonic_regression",
    "map_named",
    "restore_map",
]
