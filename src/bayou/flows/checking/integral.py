"""The integral of a density, on a grid in one and two dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bayou.core import rng
from bayou.flows.checking.case import Case
from bayou.flows.checking.report import Result
from bayou.flows.core.bases import Base
from bayou.flows.core.transform import Ladj

GRID_SIZES = {1: (2000, 20000), 2: (64, 128, 256)}  # points per axis, by dimension
CHUNK = 16384  # points of one pass
BOX_DRAWS = 8192  # of y, whose extremes are inside the box
BOX_MARGIN = 0.5  # around them; in the tails it increases distances from the center by e^0.5
MAX_GRID_ERROR = 0.05


@torch.no_grad()
def density(case: Case) -> Iterator[Result]:
    """Integrate the density of the flow, in one and two dimensions: the integral is 1.

    Args:
        case: the map to check.
    """
    base = case.base
    reason = _reason_to_skip(case)
    if reason is not None or base is None:
        reason = reason or f"no base distribution on {case.transform.domain}"
        yield Result.skip("density", reason)
        return
    box = _find_box(case, base)
    limit = case.tolerances["density"]
    integral = math.nan
    error = math.inf
    for n in GRID_SIZES[case.size]:
        integral, error = _integrate(case, base, box, n)
        if max(error, abs(integral - 1)) < limit / 2:
            break
    note = f"integral {integral:.6f}, {n} points per axis, grid error {error:.0e}"
    if error > MAX_GRID_ERROR:
        yield Result.skip("density", f"the grid does not resolve the density; {note}")
    else:
        yield Result.of("density", abs(integral - 1), max(limit, error), note)


def _reason_to_skip(case: Case) -> str | None:
    """Return why the density cannot be integrated on a grid, or None."""
    ladj_kind = case.transform.ladj_kind
    if case.size not in GRID_SIZES:
        return f"{case.size} dimensions are too many for a grid"
    if ladj_kind is not Ladj.exact:
        return f"the ladj is not exact ({ladj_kind.name}); the ladj rows compare it with draws"
    if not case.is_bijective:
        return "not a bijection; the ladj rows compare it with draws"
    return None


@dataclass(frozen=True)
class _Box:
    """A box that contains the mass of y = center + axes · u, where u is in bottom .. top.

    Args:
        center: the median of y, (D,).
        axes: an orthogonal matrix, (D, D).
        scale: the distance of the 10 % and 90 % quantiles along the axes, (D,).
        bottom: the least coordinates, (D,).
        top: the largest coordinates, (D,).
    """

    center: Tensor
    axes: Tensor
    scale: Tensor
    bottom: Tensor
    top: Tensor

    def grid(self, n: int) -> tuple[Tensor, Tensor]:
        """Return n points per axis, (n, ..., D), and their volumes, (n, ...).

        The grid is even in t, with y = center + axes · scale sinh t: fine in the bulk, coarse in
        long tails.
        """
        first = (self.bottom / self.scale).asinh()
        last = (self.top / self.scale).asinh()
        step = (last - first) / n
        t = first + step * (torch.arange(n).to(first)[:, None] + 0.5)  # (n, D)
        coordinates = _outer(self.scale * t.sinh())
        widths = _outer(self.scale * t.cosh() * step)
        return self.center + coordinates @ self.axes.T, widths.prod(-1)


def _outer(columns: Tensor) -> Tensor:
    """Return all combinations of the entries of columns (n, D): (n, ..., D)."""
    return torch.stack(torch.meshgrid(*columns.unbind(-1), indexing="ij"), -1)


def _find_box(case: Case, base: Base) -> _Box:
    """Return a box that contains the mass of y: the extremes of draws, with a margin."""
    f = case.transform
    x = base.draw(BOX_DRAWS, seed=rng.fold(case.seed, "density"))
    draws = f.forward(x, case.single_context())[0].reshape(-1, case.size)
    center = draws.median(0).values
    low, high = f.codomain
    is_unbounded = math.isinf(low) and math.isinf(high)
    # A grid along the principal axes resolves narrow diagonal ridges; it is not possible on a
    # bounded codomain.
    axes = torch.eye(case.size).to(draws)
    if is_unbounded:
        axes = torch.linalg.eigh(draws.T.cov().reshape(case.size, case.size))[1]
    u = (draws - center) @ axes
    scale = u.quantile(0.9, 0) - u.quantile(0.1, 0)
    bottom = scale * ((u.amin(0) / scale).asinh() - BOX_MARGIN).sinh()
    top = scale * ((u.amax(0) / scale).asinh() + BOX_MARGIN).sinh()
    if not is_unbounded:
        bottom = bottom.maximum(low - center)
        top = top.minimum(high - center)
    return _Box(center, axes, scale, bottom, top)


def _integrate(case: Case, base: Base, box: _Box, n: int) -> tuple[float, float]:
    """Return the integral of the density on a grid of n points per axis, and a bound of its error.

    Every second point is a grid with twice the step; the difference bounds the error of this one.
    """
    points, volumes = box.grid(n)
    context = case.single_context()
    densities = []
    for chunk in points.reshape(-1, *case.event).split(CHUNK):
        x, ladj = case.transform.inverse(chunk, context)
        densities.append((base.log_prob(x) + ladj).exp())
    mass = torch.cat(densities).reshape(volumes.shape) * volumes
    integral = mass.sum().item()
    coarse_grids = (mass[(slice(i, None, 2),) * case.size] for i in (0, 1))
    error = max(abs(2**case.size * coarse.sum().item() - integral) for coarse in coarse_grids)
    return integral, error
