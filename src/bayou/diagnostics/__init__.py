"""Checks of a posterior: its predictions, the tightness of its bound, the mixing of its chains.

``watch`` compares new rows with training rows and with what the posterior predicts of them.
"""

from bayou.diagnostics.baselines import baselines
from bayou.diagnostics.bound import BoundGap, Estimate, TensorBound, bound_gap
from bayou.diagnostics.checks import check
from bayou.diagnostics.findings import ShiftReport, ShiftTest
from bayou.diagnostics.input_columns import InputColumn
from bayou.diagnostics.martingale import ShiftMartingale
from bayou.diagnostics.reference import ReferenceRows
from bayou.diagnostics.watch import watch
from bayou.posteriors.checks import Check, Checks

__all__ = [
    "BoundGap",
    "Check",
    "Checks",
    "Estimate",
    "InputColumn",
    "ReferenceRows",
    "ShiftMartingale",
    "ShiftReport",
    "ShiftTest",
    "TensorBound",
    "baselines",
    "bound_gap",
    "check",
    "watch",
]
