"""Checks of a posterior: its predictions, the tightness of its bound, the mixing of its chains."""

from bayou.diagnostics.baselines import baselines
from bayou.diagnostics.bound import BoundGap, Estimate, TensorBound, bound_gap
from bayou.diagnostics.checks import check
from bayou.posteriors.checks import Check, Checks

__all__ = [
    "BoundGap",
    "Check",
    "Checks",
    "Estimate",
    "TensorBound",
    "baselines",
    "bound_gap",
    "check",
]
