"""Single precision ten standard deviations from the center: errors are those of rounding, for every
bijection.

A map whose slope is small cannot be inverted accurately by any algorithm: a change of its input in
the last digit changes the result by much more. Errors are therefore compared with the effect, in
double precision, of changes of one unit in the last place of the input, the context and all
parameters.
"""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bayou.core import rng
from bayou.flows import Spline, logistic_mixture
from bayou.flows.checking.check import perturb_parameters, resolve_event
from bayou.flows.core.compose import Direction
from bayou.flows.core.transform import Ladj
from tests.conformance.test_flows import FLOWS, LONG, OTHERS, build, build_map

EPS = torch.finfo(torch.float32).eps
DEVIATIONS = 10.0
DRAWS_OF_ROUNDING = 4
MAX_ROUNDINGS = (
    64.0  # the largest error in units of that of one rounding; 11 were measured, on one machine
)
BIJECTIONS = [
    *FLOWS,
    *(name for name, entry in OTHERS.items() if entry.kind == "bijective" and name not in LONG),
]


def far_points(map_, inverse):
    """Points that are far from the center in one coordinate or in all."""
    event = resolve_event(map_, None)
    if inverse:
        with torch.no_grad():
            event = map_.forward(far_points(map_, False), far_context(map_), seed=0)[0].shape[1:]
    size = math.prod(event)
    near = rng.normal(4, (size,), torch.zeros(()), seed=0)
    masks = torch.cat([torch.eye(size), torch.ones(1, size)]).bool()
    points = [torch.where(mask, far, near) for mask in masks for far in (DEVIATIONS, -DEVIATIONS)]
    low, high = map_.codomain if inverse else map_.domain
    margin = 1e-3 * (high - low) if math.isfinite(high - low) else 0.0
    return torch.cat(points).clamp(low + margin, high - margin).reshape(-1, *event)


def far_context(map_):
    if not map_.context_dim:
        return None
    return rng.normal(1, (map_.context_dim,), torch.zeros(()), seed=1)


def rounded(x, seed):
    """x with relative changes of about one unit in the last place of float32."""
    return x * (1 + EPS * rng.normal(1, x.shape, x, seed)[0])


def by_row(x):
    """The largest magnitude of every row."""
    return x.abs().reshape(len(x), -1).amax(-1)


@torch.no_grad()
@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize("name", BIJECTIONS)
def test_errors_are_those_of_rounding(name, direction):
    single = (build(name, 2) if name in FLOWS else build_map(name)[0]).float().eval()
    perturb_parameters(single, 0.5, 0)
    x = far_points(single, direction == "inverse")
    context = far_context(single)
    noise = single.noise(x, context, inverse=direction == "inverse", seed=0)
    result = Direction(single, direction)(x, context, noise=noise)
    double = copy.deepcopy(single).double()
    inputs, given, noise = tree_map_only(Tensor, Tensor.double, (x, context, noise))
    exact = Direction(double, direction)(inputs, given, noise=noise)
    effects = [torch.zeros(len(x), dtype=torch.float64) for _ in exact]
    for draw in range(DRAWS_OF_ROUNDING):
        moved = copy.deepcopy(double)
        for key, p in moved.named_parameters():
            p.copy_(rounded(p, rng.fold(draw, key)))
        change = None if given is None else rounded(given, rng.fold(draw, "context"))
        nearby = Direction(moved, direction)(
            rounded(inputs, rng.fold(draw, "x")), change, noise=noise
        )
        effects = [
            torch.maximum(effect, by_row(a - b))
            for effect, a, b in zip(effects, nearby, exact, strict=True)
        ]
    compared = (
        1 if single.ladj_kind is Ladj.estimate else 2
    )  # an estimate has other terms after rounding
    for found, expected, effect in list(zip(result, exact, effects, strict=True))[:compared]:
        error = by_row(found.double() - expected)
        allowed = effect + EPS * (1 + by_row(expected))
        assert (error / allowed).max().item() <= MAX_ROUNDINGS


@torch.no_grad()
@pytest.mark.parametrize(
    ("function", "scale", "roundings"),
    [
        (Spline(), 10.0, 32.0),
        (Spline(bins=16, bound=10.0), 20.0, 32.0),
        (Spline(bound=math.pi, circular=True), 10.0, 32.0),
        (logistic_mixture(8), 3.0, 5.0),
        (logistic_mixture(4), 3.0, 5.0),
    ],
)
def test_the_image_of_an_inverse_is_the_input_to_a_few_roundings(function, scale, roundings):
    """The quadratic of a spline lost most digits in steep bins (y was off by 1e-2), roots of a
    mixture one digit.
    """
    is_spline = isinstance(function, Spline)
    rows = 10_000 if is_spline else 2_000
    p = scale * rng.normal(rows, (function.params,), torch.zeros(()), seed=0)
    if not is_spline:
        p[:, :2] = 0.0  # the affine map after it
    elif function.circular:
        p[:, -1] = 0.0  # the shift, by which angles wrap around
    end = function.bound if is_spline else DEVIATIONS
    y = 0.999 * end * (2 * rng.uniform(rows, (), torch.zeros(()), seed=1) - 1)
    x, log_slope = function.inverse(y, p)
    image, _ = function.forward(x.double(), p.double())
    slope = function.inverse(y.double(), p.double())[1].neg().exp()
    # Knots are sums over the box, so that their rounding errors are those of its size.
    size = torch.full_like(slope, end) if is_spline else 1 + y.abs()
    error = (image - y).abs() / (EPS * (size + slope * (size if is_spline else x.abs())))
    assert error.max().item() <= roundings
    assert log_slope.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize("spline", [Spline(), Spline(64), Spline(bound=math.pi, circular=True)])
def test_splines_are_finite_and_inside_their_box_at_knots(spline, direction):
    """Rounding puts a number at a knot outside of its bin, where log-slopes were NaN."""
    p = 30.0 * rng.normal(1_000, (spline.params,), torch.zeros(()), seed=0)
    if spline.circular:
        p[:, -1] = 0.0  # the shift
    lengths = spline._lengths(p)[direction == "inverse"]
    knots = (lengths.cumsum(-1) - spline.bound).clamp(-spline.bound, spline.bound)[:, :-1]
    p = p.unsqueeze(1).expand(*knots.shape, -1)
    y, log_slope = getattr(spline, direction)(knots, p)
    assert log_slope.isfinite().all()
    assert y.abs().max() <= spline.bound * (1 + 4 * EPS)
