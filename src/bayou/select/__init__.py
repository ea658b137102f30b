"""Selection: methods by name, whose settings are selected as a plan before one fit.

A name means the same in ``bayou.fit(net, data, "laplace")``, ``BayesRegressor("laplace")`` and
``bayou train --method laplace``: ``by_name("laplace")`` is a recipe, ``plan`` selects its settings
for a target and rows. A method object means exactly what its fields say. Names are imported when
they are first used: the command line reads names and settings without torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bayou.select.auto import Auto as Auto
    from bayou.select.layers import with_dropout as with_dropout
    from bayou.select.named import by_name as by_name, list_methods as list_methods
    from bayou.select.plans import Plan as Plan
    from bayou.select.recipes import (
        HeldOut as HeldOut,
        NamedMethod as NamedMethod,
        Recipe as Recipe,
        plan as plan,
    )
    from bayou.select.settings import Training as Training
    from bayou.select.stacking import stack as stack
else:
    from bayou.core.lazy import lazy_imports

    _MODULES, __getattr__, __dir__ = lazy_imports(__name__, __file__)
    __all__ = sorted(_MODULES)  # noqa: PLE0605
