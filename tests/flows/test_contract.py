"""Composition, flows as distributions, open intervals, and errors for bad input."""

import math
from statistics import NormalDist

import pytest
import torch
from torch import distributions as D, nn

from bayou.flows import (
    MADE,
    Affine,
    Autoregressive,
    BatchNorm,
    Chain,
    Conditional,
    Cost,
    Coupling,
    Dequantize,
    DiagonalAffine,
    DiagonalNormal,
    Flow,
    GaussianMixture,
    Inverse,
    InverseCDF,
    InversionError,
    LULinear,
    Permutation,
    Planar,
    Sigmoid,
    Slice,
    Spline,
    StandardNormal,
    Uniform,
    VonMises,
    maf,
    realnvp,
    reverse,
)
from bayou.flows.core.roots import solve_increasing
from tests.flows.tools import close, identical, item_is, perturb, refuses, seeded, standard

BASES = {
    "standard normal": lambda: StandardNormal(2),
    "diagonal normal": lambda: DiagonalNormal(2, 1.0, 2.0),
    "uniform": lambda: Uniform(2),
    "mixture": lambda: GaussianMixture(2, 3),
}
each_base = pytest.mark.parametrize("base", BASES)


def points(*shape):
    return torch.randn(*shape, generator=seeded(1), dtype=torch.float64)


# --- composition --------------------------------------------------------------------------------


def test_a_chain_applies_its_links_in_order_and_adds_their_ladjs():
    f, g = perturb(DiagonalAffine(3)), perturb(LULinear(3))
    x = points(4, 3)
    y, ladj = Chain(f, g)(x)
    middle, first = f(x)
    expected, second = g(middle)
    identical(y, expected)
    identical(ladj, first + second)


def test_chains_are_flat_and_as_costly_as_their_worst_link():
    chain = Chain(Chain(reverse(2), realnvp(2, layers=1)), maf(2, layers=2), Planar(2))
    links = [Permutation, Coupling, Inverse, Inverse, Planar]
    assert [type(t) for t in chain.transforms] == links
    assert (chain.forward_kind, chain.inverse_kind) == (Cost.autoregressive, Cost.iterative)
    assert Chain(InverseCDF(2), LULinear(2)).domain == (0.0, 1.0)


def test_an_inverse_exchanges_the_directions():
    f = perturb(realnvp(2))
    x = points(3, 2)
    for pair, expected in (
        (Inverse(f)(x), f.inverse(x)),
        (Inverse(f).inverse(x), f(x)),
        (Inverse(Inverse(f))(x), f(x)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(pair, expected, strict=True))
    assert Inverse(Planar(2)).forward_kind is Cost.iterative
    inverse = Inverse(InverseCDF(1))
    assert (inverse.domain, inverse.codomain) == ((-math.inf, math.inf), (0.0, 1.0))


def test_conditional_starts_as_the_transform_itself_and_learns():
    f = perturb(LULinear(2))
    conditional = Conditional(f, context_dim=3).double()
    x, context = points(4, 2), points(4, 3)
    close(conditional(x, context)[0], f(x)[0], atol=1e-14)
    conditional(x, context)[0].square().sum().backward()
    assert all(p.grad is not None for p in conditional.parameters())
    assert len(conditional.state_dict()) == len(f.state_dict()) + 4  # no tensor is saved twice
    y, _ = perturb(conditional)(x[0], context)
    assert y.shape == (4, 2)
    assert not torch.allclose(y[0], y[1])


def test_batch_norm_is_that_of_torch():
    layer, module = BatchNorm(3), nn.BatchNorm1d(3)
    x = 2 * points(20, 3).float() + 1
    for _ in range(2):
        y, ladj = layer(x)
        close(y, module(x), atol=1e-5)
        slopes = (module(x)[1] - module(x)[0]) / (x[1] - x[0])
        close(ladj, slopes.log().sum().expand(20), atol=1e-5)
    close(layer.running_mean, 0.19 * x.mean(0), atol=1e-6)


# --- flows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", sorted(BASES.keys() - {"uniform"}))
def test_the_two_ways_to_a_log_density_agree(base):
    flow = perturb(Flow(BASES[base](), realnvp(2)))
    y, log_prob = flow.sample_and_log_prob(50, seed=0)
    close(flow.log_prob(y), log_prob, atol=1e-9)
    identical(flow.sample(50, seed=0), y.detach())
    assert y.requires_grad
    assert not flow.sample(2).requires_grad


@pytest.mark.parametrize("n", [(), 0, 3, (2, 3)])
@pytest.mark.parametrize("batch", [None, (), (4,), (2, 1)])
def test_shapes_of_samples(n, batch):
    context_dim = 0 if batch is None else 3
    context = None if batch is None else torch.zeros(*batch, 3)
    coupling = realnvp(5, layers=1, context_dim=context_dim)
    maps = [(coupling, 5), (Chain(coupling, Slice(5, 4)), 4)]
    expected = ((n,) if isinstance(n, int) else n) + (batch or ())
    for transform, size in maps:
        flow = standard(transform)
        y, log_prob = flow.sample_and_log_prob(n, context, seed=0)
        assert y.shape == flow.sample(n, context, seed=0).shape == (*expected, size)
        assert log_prob.shape == flow.log_prob(y, context, seed=0).shape == expected


@each_base
def test_draws_depend_on_the_seed_and_their_index(base):
    flow = perturb(Flow(BASES[base](), LULinear(2)))
    ten = flow.sample(10, seed=0)
    for other in (
        flow.sample(6000, seed=0)[:10],
        flow.sample((2, 5), seed=0).reshape(10, 2),
        torch.cat([flow.sample(4, seed=0), flow.sample(6, seed=0, start=4)]),
    ):
        torch.testing.assert_close(other, ten, rtol=1e-12, atol=1e-12)
    assert not torch.equal(ten, flow.sample(10, seed=1))
    draws = [flow.sample(10, seed=seeded(4)) for _ in range(2)]
    assert torch.equal(*draws)
    with torch.random.fork_rng():
        draws = [(torch.manual_seed(3), flow.sample(10))[1] for _ in range(2)]
    assert torch.equal(*draws)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@each_base
def test_dtype_follows_the_flow(base, dtype):
    flow = Flow(BASES[base](), reverse(2)).to(dtype)
    y, log_prob = flow.sample_and_log_prob(5, seed=0)
    assert y.dtype == log_prob.dtype == flow.log_prob(y).dtype == dtype
    assert bool(log_prob.isfinite().all())


# --- open intervals, where rounding would reach an end ------------------------------------------


@pytest.mark.parametrize("levels", [3, 256, 1000, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dequantized_numbers_stay_in_their_bins(levels, dtype):
    f = Dequantize(1, levels=levels)
    y = torch.arange(-300, 300) if levels is None else torch.arange(levels)
    y = y.to(dtype).unsqueeze(-1)
    for u in (0.0, 1e-9, 1 - torch.finfo(dtype).eps / 2):  # the ends of what rng.uniform draws
        x, _ = f.inverse(y, noise=(torch.full_like(y, u),))
        identical(f(x)[0], y)
        assert levels is None or (x.min() > 0 and x.max() < 1)


def test_a_density_of_white_pixels_is_finite():
    y = torch.full((1, 8), 255.0)
    noise = ((), (torch.full_like(y, 1 - 2.0**-24),))
    for onto in (Inverse(InverseCDF(8)), Sigmoid((8,))):
        x, term = Chain(onto, Dequantize(8, levels=256)).inverse(y, noise=noise)
        assert x.isfinite().all()
        assert term.isfinite().all()


@pytest.mark.parametrize("x", [-12.0, -7.0, -1.0, 5.2])
def test_the_normal_cdf_keeps_its_lower_tail(x):
    f = InverseCDF(1)
    u, _ = f.inverse(torch.tensor([x]))
    item_is(u, NormalDist().cdf(x), rel=1e-4)
    item_is(f(u)[0], x, rel=1e-2 if x > 5 else 1e-5)  # 1 − u has few digits


@pytest.mark.parametrize("family", [D.Normal, D.Laplace, D.Gumbel, D.Cauchy])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ends_of_an_inverse_cdf_are_finite(family, dtype):
    f = InverseCDF(1, family).to(dtype)
    limits = torch.finfo(dtype)
    y, ladj = f(torch.tensor([[limits.tiny], [1 - limits.eps / 2]], dtype=dtype))
    assert y.isfinite().all()
    assert ladj.isfinite().all()
    u, _ = f.inverse(torch.tensor([[-1000.0], [1000.0]], dtype=dtype))
    assert (u[0] > 0) & (u[1] < 1)


@pytest.mark.parametrize("margin", [0.0, 0.05])
def test_a_saturated_sigmoid_can_be_inverted(margin):
    f = Sigmoid((2,), margin)
    y, _ = f(torch.tensor([-200.0, 200.0]))
    x, ladj = f.inverse(y)  # which refuses the ends of the interval
    assert x.isfinite().all()
    assert ladj.isfinite()
    assert x[1] > 15 > -15 > x[0]


# --- bad input ----------------------------------------------------------------------------------

FLOW = realnvp(3, layers=1)
WITH_CONTEXT = realnvp(3, layers=1, context_dim=2)
GOOD = torch.zeros(4, 3)
NAN = torch.tensor([0, math.nan, 0])
ANGLES = Spline(4, math.pi, circular=True)


@pytest.mark.parametrize(
    ("transform", "arguments", "message"),
    [
        (FLOW, (torch.zeros(4, 2),), r"shape \(4, 2\) but the last 1 axes must be \(\.\.\., 3\); move"),
        (FLOW, (torch.zeros(()),), r"shape \(\) but the last 1 axes must be \(\.\.\., 3\)"),
        (FLOW, (GOOD.long(),), r"floating point, got torch.int64; use x.float\(\), or dequantize"),
        (FLOW, ([[0.0, 0.0, 0.0]],), r"must be a tensor \(\.\.\., 3\), got list; use torch.as_tensor"),
        (FLOW, (GOOD.double(),), r"torch.float64 but the parameters are torch.float32; call .to\("),
        (FLOW, (GOOD + NAN,), r"4 NaN or infinite values of 12; remove or impute"),
        (FLOW, (GOOD - math.inf,), r"12 NaN or infinite values of 12; remove or impute"),
        (FLOW, (GOOD, torch.zeros(4, 2)), r"no context but got one of shape \(4, 2\); build it with"),
        (WITH_CONTEXT, (GOOD,), r"needs a context \(\.\.\., 2\) but got none; pass context="),
        (WITH_CONTEXT, (GOOD, torch.zeros(4, 5)), r"context has shape \(4, 5\) but the last 1 axes"),
        (WITH_CONTEXT, (GOOD, torch.zeros(5, 2)), r"batch \(4,\) but a context with batch \(5,\)"),
        (WITH_CONTEXT, (GOOD, torch.full((4, 2), math.nan)), r"context has 8 NaN or infinite values"),
        (WITH_CONTEXT, (GOOD, torch.zeros(4, 2).int()), r"context must be floating point, got"),
    ],
)  # fmt: skip
def test_bad_input_is_a_clear_error_with_a_remedy(transform, arguments, message):
    flow = standard(transform)
    for method in (transform, transform.inverse, flow.log_prob):
        with pytest.raises(ValueError, match=message):
            method(*arguments)


test_arguments_that_do_not_fit_are_refused = refuses(
    (lambda: Chain(), "no transforms; pass at least one"),
    (lambda: Chain(LULinear(2), LULinear(3)), "do not match"),
    (lambda: Chain(realnvp(2, context_dim=1), realnvp(2, context_dim=2)), r"different sizes \[1, 2\]"),
    (lambda: Conditional(reverse(2), 3), "no parameters that could depend on a context"),
    (lambda: Conditional(realnvp(2, context_dim=2), 3), "already takes a context; use it without"),
    (lambda: Coupling(3, Affine(), [True, False]), r"3 booleans .*got torch.bool of shape \(2,\)"),
    (lambda: Coupling(3, Affine(), torch.tensor([1, 0, 1])), r"got torch.int64 .*use mask.bool\(\)"),
    (lambda: Coupling(3, Affine(), [True] * 3), "must keep some coordinates and change others, got all True"),
    (lambda: Coupling(3, Affine(), [False] * 3), "got all False"),
    (lambda: Coupling(3, Affine(), "checkers"), r"\"half\", \"alternate\" or 3 booleans, got 'checkers'"),
    (lambda: Autoregressive(ANGLES, MADE(2, ANGLES.params)), r"use MADE\(..., circular=True\)"),
    (lambda: Spline(4, 180.0, circular=True), "has bound=math.pi, got 180.0; scale the angles"),
    (lambda: Flow(StandardNormal(2), FLOW), r"events \(2,\) but the transform takes \(3,\)"),
    (lambda: Flow(FLOW, StandardNormal(3)), r"got Flow\(Chain, StandardNormal\); expected Flow\(base"),
    (lambda: standard(FLOW).sample(-1), "cannot draw -1 samples"),
    (lambda: standard(FLOW).sample(2, seed="0"), "seed must be"),
    (lambda: StandardNormal(0), "expected a whole number of at least 1"),
    (lambda: StandardNormal(()), "expected an event with at least one axis"),
    (lambda: DiagonalNormal(2, std=0.0), "needs a finite mean and a positive and finite std"),
    (lambda: Uniform(2, 1.0, 1.0), "needs low < high"),
    (lambda: GaussianMixture(2, components=0), "the components of GaussianMixture"),
    (lambda: VonMises(2, kappa=0.0), "0 < kappa < 100"),
    (lambda: VonMises(2, kappa=100.0), "0 < kappa < 100"),
    (lambda: VonMises(2, kappa=math.nan), "0 < kappa < 100"),
)  # fmt: skip


def test_an_inversion_that_fails_raises_with_its_residual():
    ones = torch.ones(2, dtype=torch.float64)
    with pytest.raises(
        InversionError, match=r"2 of 2 inversions did not converge: largest residual .*float64"
    ):
        solve_increasing(lambda x: (x * math.nan, x), -ones, ones)
