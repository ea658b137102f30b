"""Minimization of a smooth function of a few parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_STEPS = 300
GRADIENT_TOLERANCE = 1e-8  # in nats per row
CHANGE_TOLERANCE = 1e-10  # of the parameters and of the value


def minimize(function: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return argmin of a function of a vector, by L-BFGS.

    Args:
        function: maps parameters (P,) to a number.
        start: the initial parameters, (P,) in float64.

    Raises:
        ValueError: if the parameters diverge.
    """
    parameters = start.detach().clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [parameters],
        max_iter=MAX_STEPS,
        tolerance_grad=GRADIENT_TOLERANCE,
        tolerance_change=CHANGE_TOLERANCE,
        line_search_fn="strong_wolfe",
    )

    def evaluate() -> float:
        with torch.enable_grad():
            value = function(parameters)
            (parameters.grad,) = torch.autograd.grad(value, parameters)
        return float(value.detach())

    optimizer.step(evaluate)
    if not bool(parameters.isfinite().all()):
        raise ValueError("the parameters of the map diverge; use map='temperature'")
    return parameters.detach()
