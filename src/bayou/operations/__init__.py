"""What one does with a posterior: one file an operation, each a function from a posterior to something useful."""

from bayou.operations.compress import Compression, compress
from bayou.operations.continual import Continual, continual
from bayou.operations.distil import Distilled, distil
from bayou.operations.module import to_module
from bayou.operations.prior import as_prior

__all__ = ["Compression", "Continual", "Distilled", "as_prior", "compress", "continual", "distil", "to_module"]
