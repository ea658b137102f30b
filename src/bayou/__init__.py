"""bayou: honest uncertainty from neural networks, with posteriors as rich as normalizing flows.

Names are imported when they are first used, so that ``import bayou`` and the command line cost
nothing until they need torch. The list of names is in ``__init__.pyi``, which type checkers read.
"""

from bayou.lazy import lazy

__version__ = "0.1.0"

_HOMES, __getattr__, __dir__ = lazy(__name__, __file__)
# ``import *`` must work without the lab extra
__all__ = sorted(name for name, home in _HOMES.items() if not home.startswith("bayou.adapters"))  # noqa: PLE0605
