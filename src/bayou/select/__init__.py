"""Selection: methods by name, and methods that choose noise, prior scale, structure or another
method by the data.

A name means the same in ``bayou.fit(net, data, "laplace")``, ``BayesRegressor("laplace")`` and
``bayou train --method
laplace``: ``by_name("laplace")``. A method object means exactly what its fields say.
"""

from bayou.lazy import lazy

_homes, __getattr__, __dir__ = lazy(
    __name__, __file__
)  # the command line reads names and settings without torch
__all__ = sorted(_homes)  # noqa: PLE0605
