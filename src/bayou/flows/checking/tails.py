"""The check of the tails: far from the origin, results are finite and found again."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bayou.core import rng
from bayou.flows.checking.case import DIRECTIONS, Case
from bayou.flows.checking.report import Result
from bayou.flows.core.transform import Map

Interval = tuple[float, float]
FAR_VALUES = (1e3, -1e3, 1e4, -1e4)
INTERVAL_MARGIN = 1e-6  # between points and the ends of an interval, in units of its width


@torch.no_grad()
def tails(case: Case) -> Iterator[Result]:
    """Check that results far from the origin, in one coordinate or all, are finite.

    Those of a bijection with an unbounded image are also compared with the image of their inverse,
    f(f⁻¹(y)) = y. Slopes may be as small as e⁻³⁰, where no float has an accurate inverse, but this
    holds.

    Args:
        case: the map to check.
    """
    if case.is_discrete:
        yield Result.skip("tails", "integers")
        return
    for name, opposite in (DIRECTIONS, DIRECTIONS[::-1]):
        yield _check_tails(case, name, opposite)


def _check_tails(case: Case, name: str, opposite: str) -> Result:
    """Check one direction."""
    interval = case.transform.domain
    image = case.transform.codomain
    if name == "inverse":
        interval, image = image, interval
    context = case.context(1)
    x = _far_points(case)
    if not case.is_bijective and _is_valid(case.transform, x, context) == (name == "inverse"):
        x = case.run(opposite, _clamp_inside(x, image), context)[0]
    x = _clamp_inside(x, interval)
    y, log_det = case.run(name, x, context)
    if not (y.isfinite().all() and log_det.isfinite().all()):
        count = int((~y.isfinite()).sum() + (~log_det.isfinite()).sum())
        return Result(f"tails {name}", False, note=f"{count} values are not finite")
    if not case.is_bijective:
        return Result(f"tails {name}", True, note="finite")
    if any(math.isfinite(end) for end in (*interval, *image)):
        note = "finite; not inverted, since the image is bounded"
        return Result(f"tails {name}", True, note=note)
    x_again, log_det = case.run(opposite, y, context)
    gap = math.inf
    if x_again.isfinite().all() and log_det.isfinite().all():
        gap = _relative_error(case.run(name, x_again, context)[0], y).max().item()
    return Result.of(f"tails {name}", gap, case.with_solver_error(case.tolerances["tails"]))


def _far_points(case: Case) -> Tensor:
    """Return points with one coordinate, or all, far from the origin: (4·(D + 1), *event)."""
    near = rng.normal(1, (case.size,), case.reference, rng.fold(case.seed, "tails"))[0]
    is_single = torch.eye(case.size).to(near).bool()
    is_far = torch.cat([is_single, torch.ones_like(is_single[:1])])
    x = torch.cat([torch.where(is_far, value, near) for value in FAR_VALUES])
    return x.reshape(-1, *case.event)


def _is_valid(transform: Map, x: Tensor, context: Tensor | None) -> bool:
    """Return whether x is a valid input of forward; that of an inverse sort must be sorted."""
    try:
        transform.validate(x, context)
    except ValueError:
        return False
    return True


def _relative_error(values: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference in each event, relative to its largest magnitude: (n,)."""
    magnitude = expected.flatten(1).abs().amax(-1)
    return (values - expected).flatten(1).abs().amax(-1) / magnitude


def _clamp_inside(x: Tensor, interval: Interval) -> Tensor:
    """Clamp points into the interval, close to its ends."""
    low, high = interval
    width = high - low if math.isfinite(high - low) else 1.0
    return x.clamp(low + INTERVAL_MARGIN * width, high - INTERVAL_MARGIN * width)
