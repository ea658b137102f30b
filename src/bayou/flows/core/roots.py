"""Roots of increasing functions by bracketed Newton iterations, with implicit gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bayou.flows.core.transform import InversionError, concrete

MAX_ITERATIONS = 200
UNROLLED_ITERATIONS = 60  # the number of iterations where convergence cannot be tested (compile, vmap)


def solve_increasing(f: Callable[[Tensor], tuple[Tensor, Tensor]], low: Tensor, high: Tensor) -> Tensor:
    """x with f(x) = 0, elementwise, for an increasing f with its root in [low, high]; f returns (residual, slope).

    Newton steps, and bisection where a step leaves the bracket or is not at most half the last one (Numerical Recipes,
    rtsafe). The gradient is ∂x/∂θ = −(∂f/∂θ)/f′(x), by the implicit function theorem, and costs one evaluation of f.
    Raises an InversionError with the residual; in compile and vmap, where nothing can be raised, returns NaN.
    """
    with torch.no_grad():
        x, converged, residual = _bracketed_newton(f, low.detach(), high.detach())
    if concrete(converged.all()) is False:
        worst = residual.abs().where(~converged, 0).max().item()
        raise InversionError(
            f"{int((~converged).sum())} of {converged.numel()} inversions did not converge: largest residual "
            f"{worst:.3e} in {x.dtype}; use float64, or check that the input is in the range of the transform"
        )
    x = torch.where(converged, x, torch.nan)
    residual, slope = f(x)
    # The second term is zero; its gradient is ∂x/∂θ = −(∂f/∂θ)/f′.
    return x - (residual - residual.detach()) / slope.detach().clamp_min(torch.finfo(x.dtype).tiny)


def _bracketed_newton(
    f: Callable[[Tensor], tuple[Tensor, Tensor]], low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    eps = torch.finfo(low.dtype).eps
    x, step = 0.5 * (low + high), high - low
    scale = torch.maximum(low.abs(), high.abs()).clamp_max(1.0)
    residual, converged = torch.full_like(x, torch.nan), torch.zeros_like(x, dtype=torch.bool)
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
    return x, converged, residual


def solve_tanh(scale: Tensor, slope: Tensor, offset: Tensor, target: Tensor) -> Tensor:
    """x with x + scale·tanh(slope·x + offset) = target, for scale·slope > −1."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(slope * x + offset)
        product = scale * slope
        return x + scale * h - target, h.square() + (1 + product) * (1 - h.square())

    reach = scale.abs()
    return solve_increasing(f, target - reach, target + reach)
