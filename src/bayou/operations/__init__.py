"""What one does with a posterior: one file an operation, each a function from a posterior to something useful."""

from bayou.operations.acquire import Acquired, acquire
from bayou.operations.calibrate import calibrate
from bayou.operations.conformal import Conformal, conformal
from bayou.operations.module import to_module
from bayou.operations.prior import as_prior

__all__ = ["Acquired", "Conformal", "acquire", "as_prior", "calibrate", "conformal", "to_module"]
