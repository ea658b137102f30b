"""Roots of increasing functions by bracketed Newton iterations.

The roots have implicit derivatives of all orders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bayou.flows.core.implicit import Equation, attach_solution
from bayou.flows.core.transform import InversionError, Pair, read_flag

MAX_ITERATIONS = 200
UNROLLED_ITERATIONS = 60  # where convergence cannot be tested (compile, vmap)
STEP_TOLERANCE = 4  # of a converged Newton step, in units of the last place

Residual = Callable[..., Pair]  # (x, *theta) → (residual, slope)


def solve_increasing(f: Residual, low: Tensor, high: Tensor, *theta: Tensor) -> Tensor:
    """Return the x in [low, high] with f(x, θ) = 0, elementwise, for an f that increases in x.

    Newton steps, and bisection where a step leaves the bracket or is not at most half the last one
    (Numerical Recipes, rtsafe). Derivatives of all orders in θ follow from the implicit function
    theorem, ∂x/∂θ = −(∂f/∂θ)/f′(x).

    Args:
        f: maps (x, *θ) to the residual and its slope in x. It uses no other tensor that has a
            gradient.
        low: the lower end of the bracket.
        high: the upper end of the bracket.
        theta: the tensors that the root depends on.

    Raises:
        InversionError: with the residual; in compile and vmap, where nothing can be raised, the
            result is NaN.
    """
    constants = tuple(value.detach() for value in theta)
    with torch.no_grad():
        x, has_converged, residual = _solve_bracketed(
            lambda x: f(x, *constants), low.detach(), high.detach()
        )
    if read_flag(has_converged.all()) is False:
        worst = residual.abs().where(~has_converged, 0).max().item()
        raise InversionError(
            f"{int((~has_converged).sum())} of {has_converged.numel()} inversions did not "
            f"converge: largest residual {worst:.3e} in {x.dtype}; use float64, or check that the "
            "input is in the range of the transform"
        )
    x = torch.where(has_converged, x, torch.nan)
    return attach_solution(_IncreasingEquation(f), x, *theta)


@dataclass(frozen=True)
class _IncreasingEquation(Equation):
    """f(x, θ) = 0 elementwise, for an increasing f that returns its slope too."""

    f: Residual

    def linearize(self, x: Tensor, *theta: Tensor) -> Pair:
        return self.f(x, *theta)

    def solve(self, derivative: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
        return right / derivative.clamp_min(torch.finfo(right.dtype).tiny)


def _solve_bracketed(
    f: Callable[[Tensor], Pair],
    low: Tensor,
    high: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the roots of f, whether each has converged, and the residuals."""
    eps = torch.finfo(low.dtype).eps
    x = 0.5 * (low + high)
    step = high - low
    scale = torch.maximum(low.abs(), high.abs()).clamp_max(1.0)
    residual = torch.full_like(x, torch.nan)
    has_converged = torch.zeros_like(x, dtype=torch.bool)
    newton = x
    is_unrolled = read_flag(has_converged.any()) is None
    for _ in range(UNROLLED_ITERATIONS if is_unrolled else MAX_ITERATIONS):
        residual, slope = f(x)
        low = torch.where(residual <= 0, x, low)
        high = torch.where(residual >= 0, x, high)
        newton = x - residual / slope
        tolerance = STEP_TOLERANCE * eps * (x.abs() + scale)
        newton_step = (newton - x).abs()
        has_converged = (newton_step <= tolerance) | (high - low <= tolerance)
        if not is_unrolled and bool(has_converged.all()):
            break
        middle = 0.5 * (low + high)
        is_trusted = (newton >= low) & (newton <= high) & (newton_step <= 0.5 * step.abs())
        next_x = torch.where(is_trusted, newton, middle)
        next_x = torch.where(has_converged, x, next_x)
        step = next_x - x
        x = next_x
    # The tolerance of the last step is several units in the last place; taking that step leaves
    # about one.
    is_inside = (newton >= low) & (newton <= high)
    return torch.where(has_converged & is_inside, newton, x), has_converged, residual


def solve_tanh(scale: Tensor, slope: Tensor, offset: Tensor, target: Tensor) -> Tensor:
    """Return the x with x + scale·tanh(slope·x + offset) = target.

    Args:
        scale: any real number, with scale·slope > −1.
        slope: any real number.
        offset: any real number.
        target: the right-hand side; all four broadcast.
    """
    radius = scale.abs()
    return solve_increasing(
        _tanh_residual, target - radius, target + radius, scale, slope, offset, target
    )


def _tanh_residual(
    x: Tensor,
    scale: Tensor,
    slope: Tensor,
    offset: Tensor,
    target: Tensor,
) -> Pair:
    """Return x + scale·tanh(slope·x + offset) − target, and its slope in x.

    The slope is a sum of positive terms.
    """
    h = torch.tanh(slope * x + offset)
    product = scale * slope
    return x + scale * h - target, h.square() + (1 + product) * (1 - h.square())
