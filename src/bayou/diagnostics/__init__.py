"""Is the bound tight, and does the posterior have several modes?"""

from bayou.diagnostics.bound import BoundGap, TensorBound, bound_gap
from bayou.diagnostics.chains import ChainReport, TensorChains, chains
from bayou.diagnostics.clusters import FunctionModes, function_modes
from bayou.diagnostics.dip import dip_test
from bayou.diagnostics.modes import Coordinate, Modes, modes
from bayou.diagnostics.sandwich import EntropySandwich, Estimate, entropy_sandwich

__all__ = [
    "BoundGap",
    "ChainReport",
    "Coordinate",
    "EntropySandwich",
    "Estimate",
    "FunctionModes",
    "Modes",
    "TensorBound",
    "TensorChains",
    "bound_gap",
    "chains",
    "dip_test",
    "entropy_sandwich",
    "function_modes",
    "modes",
]
