"""Plans of methods by name."""

from __future__ import annotations

from typing import Any

from bayou.core.files import StrPath
from bayou.core.progress import Show
from bayou.inference.method import Method
from bayou.network.target import Target
from bayou.select.named import by_name
from bayou.select.plans import Fitted, Plan, SearchInterrupted
from bayou.select.recipes import Recipe, plan_method
from bayou.training.data import as_data


def plan(
    name: str | Recipe | Method,
    target: Target,
    rows: Any,
    *,
    seed: int = 0,
    checkpoint: StrPath | None = None,
    progress: Show = True,
) -> Plan:
    """Select the settings of a method by name on held-out rows, without the final fit.

    Depending on the data these are the noise, the prior scale, the scales of the inputs, the random
    layers, the spread of an ensemble, or the method. ``bayou.fit(net, data, "mnf")`` standardizes
    the data, makes this plan and fits it; here x and y are taken as they are.

    Args:
        name: a name of ``bayou.list_methods()``, the result of ``bayou.select.by_name``, or a method
            object, which means exactly what its fields say.
        target: network, likelihood and prior, by ``Target.build``; ``prior=None`` lets the search
            select one.
        rows: a pair of tensors (x, y), or other data as of ``bayou.fit``.
        seed: of the search and of the fit.
        checkpoint: a file of the fit; the search writes beside it and continues from there.
        progress: whether to show progress, or a function that is called with it.

    Returns:
        The plan. After Ctrl-C its method is fitted already: ``fit`` returns the posterior so far,
        whose ``stopped`` is "interrupted".

    >>> print(plan("laplace", target, (x, y), seed=0))  # doctest: +SKIP
    """
    recipe = by_name(name) if isinstance(name, str) else name
    data = as_data(rows, recipe.batch_size)
    try:
        return plan_method(
            recipe, target, data, seed=seed, checkpoint=checkpoint, progress=progress
        )
    except SearchInterrupted as stop:
        return Fitted.plan(None, stop.posterior, data, seed)
