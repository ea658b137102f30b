"""What one does with a posterior: one file an operation, each a function from a posterior to something useful."""

from bayou.operations.compress import Compression, compress
from bayou.operations.module import to_module
from bayou.operations.prior import as_prior

__all__ = ["Compression", "as_prior", "compress", "to_module"]
