"""Roots of increasing functions by bracketed Newton iterations, with implicit derivatives of all
orders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bayou.flows.core.implicit import Equation, attach_solution
from bayou.flows.core.transform import InversionError, concrete

MAX_ITERATIONS = 200
UNROLLED_ITERATIONS = (
    60  # the number of iterations where convergence cannot be tested (compile, vmap)
)

Residual = Callable[..., tuple[Tensor, Tensor]]  # (x, *theta) → (residual, slope)


def solve_increasing(f: Residual, low: Tensor, high: Tensor, *theta: Tensor) -> Tensor:
    """Return x with f(x, θ) = 0, elementwise, for an f that increases in x and has its root in
    [low, high].

    Newton steps, and bisection where a step leaves the bracket or is not at most half the last one
    (Numerical Recipes, rtsafe). Derivatives of all orders in θ follow from the implicit function
    theorem, ∂x/∂θ = −(∂f/∂θ)/f′(x).

    Args:
        f: maps (x, *θ) to the residual and its slope in x. It uses no other tensor that has a
            gradient.
        low: the lower end of the bracket.
        high: the upper end.
        theta: the tensors that the root depends on.

    Raises:
        InversionError: with the residual; in compile and vmap, where nothing can be raised, the
            result is NaN.
    """
    constants = tuple(value.detach() for value in theta)
    with torch.no_grad():
        x, converged, residual = _bracketed_newton(
            lambda x: f(x, *constants), low.detach(), high.detach()
        )
    if concrete(converged.all()) is False:
        worst = residual.abs().where(~converged, 0).max().item()
        raise InversionError(
            f"{int((~converged).sum())} of {converged.numel()} inversions did not converge: largest residual "
            f"{worst:.3e} in {x.dtype}; use float64, or check that the input is in the range of the transform"
        )
    x = torch.where(converged, x, torch.nan)
    return attach_solution(_Increasing(f), x, *theta)


@dataclass(frozen=True)
class _Increasing(Equation):
    """f(x, θ) = 0 elementwise, for an increasing f that returns its slope too."""

    f: Residual

    def linearize(self, x: Tensor, *theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.f(x, *theta)

    def solve(self, derivative: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
        return right / derivative.clamp_min(torch.finfo(right.dtype).tiny)


def _bracketed_newton(
    f: Callable[[Tensor], tuple[Tensor, Tensor]], low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    eps = torch.finfo(low.dtype).eps
    x, step = 0.5 * (low + high), high - low
    scale = torch.maximum(low.abs(), high.abs()).clamp_max(1.0)
    residual, converged = torch.full_like(x, torch.nan), torch.zeros_like(x, dtype=torch.bool)
    newton = x
    open_loop = concrete(converged.any()) is None
    for _ in range(UNROLLED_ITERATIONS if open_loop else MAX_ITERATIONS):
        residual, slope = f(x)
        low, high = torch.where(residual <= 0, x, low), torch.where(residual >= 0, x, high)
        newton = x - residual / slope
        width = 4 * eps * (x.abs() + scale)
        converged = ((newton - x).abs() <= width) | (high - low <= width)
        if not open_loop and bool(converged.all()):
            break
        middle = 0.5 * (low + high)
        trusted = (newton >= low) & (newton <= high) & ((newton - x).abs() <= 0.5 * step.abs())
        following = torch.where(trusted, newton, middle)
        following = torch.where(converged, x, following)
        x, step = following, following - x
    # The tolerance of the last step is several units in the last place; taking that step leaves
    # about one.
    is_inside = (newton >= low) & (newton <= high)
    return torch.where(converged & is_inside, newton, x), converged, residual


def solve_tanh(scale: Tensor, slope: Tensor, offset: Tensor, target: Tensor) -> Tensor:
    """Return x with x + scale·tanh(slope·x + offset) = target, for scale·slope > −1."""
    reach = scale.abs()
    return solve_increasing(
        _tanh_residual, target - reach, target + reach, scale, slope, offset, target
    )


def _tanh_residual(
    x: Tensor, scale: Tensor, slope: Tensor, offset: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """x + scale·tanh(slope·x + offset) − target, and its slope in x as a sum of positive terms."""
    h = torch.tanh(slope * x + offset)
    product = scale * slope
    return x + scale * h - target, h.square() + (1 + product) * (1 - h.square())
