"""The integral of a density, on a grid in one and two dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bayou import rng
from bayou.flows.checking.case import Case
from bayou.flows.checking.report import Result
from bayou.flows.core.bases import Uniform
from bayou.flows.core.transform import Ladj


@torch.no_grad()
def density(case: Case) -> Iterator[Result]:
    """The density of the flow integrates to 1, in one and two dimensions."""
    f = case.transform
    if case.size > 2:
        yield Result.skipped("density", f"{case.size} dimensions are too many for a grid")
        return
    if f.ladj_kind is not Ladj.exact or not case.bijective:
        why = (
            "not a bijection"
            if f.ladj_kind is Ladj.exact
            else f"the ladj is not exact ({f.ladj_kind.name})"
        )
        yield Result.skipped("density", f"{why}; the ladj rows compare it with draws")
        return
    base = case.base
    if base is None:
        yield Result.skipped("density", f"no base distribution on {f.domain}")
        return
    low, high = f.domain
    boundary = _sphere(case.size, case.like)
    if isinstance(base, Uniform):
        boundary = low + (high - low) * (
            0.5 + (0.5 - 1e-9) * boundary / boundary.abs().amax(-1, keepdim=True)
        )
    else:
        boundary = boundary * (9.0 if case.size == 1 else 6.0)  # mass outside: 2e-19, 2e-8
    context = None if f.context_dim == 0 else case.context(1)[0]  # type: ignore[index]
    # A bijection maps the boundary of a region to the boundary of its image: the box around that
    # contains the mass.
    edge = f.forward(boundary.reshape(-1, *case.event), context)[0].reshape(-1, case.size)
    bulk = f.forward(base.draw(512, seed=rng.fold(case.seed, "density")), context)[0].reshape(
        -1, case.size
    )
    center = bulk.median(0).values
    free = all(math.isinf(end) for end in f.codomain)
    # A grid along the principal axes resolves narrow diagonal ridges; it is not possible on a
    # bounded codomain.
    axes = (
        torch.linalg.eigh(bulk.T.cov().reshape(case.size, case.size))[1]
        if free
        else torch.eye(case.size).to(bulk)
    )
    edge, bulk = (edge - center) @ axes, (bulk - center) @ axes
    margin = 0.02 * (edge.amax(0) - edge.amin(0))
    bottom, top = edge.amin(0) - margin, edge.amax(0) + margin
    if math.isfinite(f.codomain[1] - f.codomain[0]):  # all of it: a circle has no boundary
        bottom, top = f.codomain[0] - center, f.codomain[1] - center
    elif not free:
        bottom, top = bottom.maximum(f.codomain[0] - center), top.minimum(f.codomain[1] - center)
    scale = bulk.quantile(0.9, 0) - bulk.quantile(0.1, 0)

    # The grid is even in t, with y = center + axes · scale sinh t: fine in the bulk, coarse in long
    # tails.
    first, last = (bottom / scale).asinh(), (top / scale).asinh()
    limit, integral, error = case.tolerances["density"], math.nan, math.inf
    for n in (2000, 20000) if case.size == 1 else (64, 128, 256):
        step = (last - first) / n
        t = first + step * (torch.arange(n).to(first)[:, None] + 0.5)  # (n, size)
        grid, weight = (
            torch.stack(torch.meshgrid(*part.unbind(-1), indexing="ij"), -1)
            for part in (scale * t.sinh(), scale * t.cosh() * step)
        )
        terms = []
        for points in (center + grid @ axes.T).reshape(-1, *case.event).split(16384):
            x, log_slope = f.inverse(points, context)
            terms.append((base.log_prob(x) + log_slope).exp())
        mass = torch.cat(terms).reshape(weight.shape[:-1]) * weight.prod(-1)
        integral = mass.sum().item()
        # Every second point is a grid with twice the step; the difference bounds the error of this
        # one.
        halves = (
            [mass[i::2] for i in (0, 1)]
            if case.size == 1
            else [mass[i::2, j::2] for i in (0, 1) for j in (0, 1)]
        )
        error = max(abs(half.sum().item() * len(halves) - integral) for half in halves)
        if max(error, abs(integral - 1)) < limit / 2:
            break
    note = f"integral {integral:.6f}, {n} points per axis, grid error {error:.0e}"
    if error > 0.05:
        yield Result.skipped("density", f"the grid does not resolve the density; {note}")
    else:
        yield Result.of("density", abs(integral - 1), max(limit, error), note)


def _sphere(size: int, like: Tensor) -> Tensor:
    """The unit sphere: two points in one dimension, a circle in two."""
    if size == 1:
        return torch.tensor([[-1.0], [1.0]]).to(like)
    angle = torch.arange(512).to(like) * (2 * math.pi / 512)
    return torch.stack([angle.cos(), angle.sin()], -1)
