"""Selection: methods by name, and methods that choose noise, prior scale, structure or another method by the data.

A name means the same in ``bayou.fit(net, data, "laplace")``, ``BayesRegressor("laplace")`` and ``bayou train --method
laplace``: ``by_name("laplace")``. A method object means exactly what its fields say.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bayou.select.named import by_name, list_methods
from bayou.select.settings import Training

if TYPE_CHECKING:
    from bayou.select.auto import Auto
    from bayou.select.held_out import BySize, HeldOut
    from bayou.select.layers import with_dropout
    from bayou.select.where import Where

# imported when they are used, since they import torch: the command line reads names and settings alone
_HOMES = {
    "Auto": "auto",
    "BySize": "held_out",
    "HeldOut": "held_out",
    "Where": "where",
    "with_dropout": "layers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "Auto",
    "BySize",
    "HeldOut",
    "Training",
    "Where",
    "by_name",
    "list_methods",
    "with_dropout",
]
