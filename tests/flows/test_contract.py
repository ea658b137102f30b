"""Composition, flows as distributions, and errors for bad input."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, distributions as D, nn
from torch.fx.experimental.proxy_tensor import make_fx

from bayou.flows import (
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
    Ladj,
    LULinear,
    Planar,
    Sigmoid,
    StandardNormal,
    Transform,
    Uniform,
    maf,
    realnvp,
    reverse,
)
from bayou.flows.core.roots import solve_increasing

T = TypeVar("T", bound=nn.Module)


def shaken(module: T, scale: float = 0.3) -> T:
    """In double precision, with parameters away from where they start."""
    module.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return module


def points(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# --- composition -----------------------------------------------------------------------------------------------------


def test_a_chain_applies_its_parts_in_order_and_adds_their_ladjs() -> None:
    f, g = shaken(DiagonalAffine(3)), shaken(LULinear(3))
    x = points(4, 3)
    y, ladj = Chain(f, g)(x)
    middle, first = f(x)
    expected, second = g(middle)
    assert torch.equal(y, expected)
    assert torch.equal(ladj, first + second)
    back, opposite = Chain(f, g).inverse(y)
    assert torch.allclose(back, x, atol=1e-12)
    assert torch.allclose(opposite, -ladj, atol=1e-12)


def test_chains_are_flat_and_as_costly_as_their_worst_link() -> None:
    chain = Chain(Chain(reverse(2), realnvp(2, layers=1)), maf(2, layers=2), Planar(2))
    assert [type(t).__name__ for t in chain.transforms] == [
        "Permutation",
        "Coupling",
        "Inverse",
        "Inverse",
        "Planar",
    ]
    assert (chain.forward_kind, chain.inverse_kind) == (Cost.autoregressive, Cost.iterative)
    assert chain.ladj_kind is Ladj.exact
    assert Chain(InverseCDF(2), LULinear(2)).domain == (0.0, 1.0)


def test_a_chain_gives_its_context_to_those_that_take_one() -> None:
    chain = shaken(Chain(reverse(2), realnvp(2, layers=2, context_dim=3), LULinear(2)))
    assert chain.context_dim == 3
    x, context = points(4, 1, 2), points(5, 3)
    y, ladj = chain(x, context)
    assert y.shape == (4, 5, 2)
    assert ladj.shape == (4, 5)
    assert torch.allclose(chain.inverse(y, context)[0], x.expand(4, 5, 2), atol=1e-10)


def test_chains_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="no transforms; pass at least one"):
        Chain()
    with pytest.raises(ValueError, match="do not match"):
        Chain(LULinear(2), LULinear(3))
    with pytest.raises(ValueError, match=r"contexts of different sizes \[1, 2\]"):
        Chain(realnvp(2, context_dim=1), realnvp(2, context_dim=2))


def test_an_inverse_exchanges_the_directions() -> None:
    f = shaken(realnvp(2))
    x = points(3, 2)
    for got, expected in (
        (Inverse(f)(x), f.inverse(x)),
        (Inverse(f).inverse(x), f(x)),
        (Inverse(Inverse(f))(x), f(x)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert Inverse(Planar(2)).forward_kind is Cost.iterative
    assert (Inverse(InverseCDF(1)).domain, Inverse(InverseCDF(1)).codomain) == (
        (-math.inf, math.inf),
        (0.0, 1.0),
    )


def test_conditional_starts_as_the_transform_itself_and_learns() -> None:
    f = shaken(LULinear(2))
    conditional = Conditional(f, context_dim=3).double()
    x, context = points(4, 2), points(4, 3)
    assert torch.allclose(conditional(x, context)[0], f(x)[0], atol=1e-14)
    conditional(x, context)[0].square().sum().backward()
    assert all(p.grad is not None for p in conditional.parameters())
    assert len(conditional.state_dict()) == len(f.state_dict()) + 4  # no tensor is saved twice
    y, _ = shaken(conditional)(x[0], context)
    assert y.shape == (4, 2)
    assert not torch.allclose(y[0], y[1])


def test_conditional_needs_parameters_and_no_context() -> None:
    with pytest.raises(ValueError, match="no parameters that could depend on a context"):
        Conditional(reverse(2), 3)
    with pytest.raises(ValueError, match="already takes a context; use it without Conditional"):
        Conditional(realnvp(2, context_dim=2), 3)


# --- bad input -------------------------------------------------------------------------------------------------------

FLOW = realnvp(3, layers=1)
WITH_CONTEXT = realnvp(3, layers=1, context_dim=2)
GOOD = torch.zeros(4, 3)

BAD_INPUT: list[tuple[Transform, tuple[Any, ...], str]] = [
    (
        FLOW,
        (torch.zeros(4, 2),),
        r"shape \(4, 2\) but the last 1 axes must be \(\.\.\., 3\); move .*or build",
    ),
    (FLOW, (torch.zeros(()),), r"shape \(\) but the last 1 axes must be \(\.\.\., 3\)"),
    (
        FLOW,
        (torch.zeros(4, 3, dtype=torch.long),),
        r"floating point, got torch.int64; use x.float\(\), or dequantize",
    ),
    (FLOW, (torch.zeros(4, 3, dtype=torch.bool),), r"floating point, got torch.bool"),
    (FLOW, ([[0.0, 0.0, 0.0]],), r"must be a tensor \(\.\.\., 3\), got list; use torch.as_tensor"),
    (
        FLOW,
        (torch.zeros(4, 3).double(),),
        r"is torch.float64 but the parameters are torch.float32; call .to\(",
    ),
    (
        FLOW,
        (GOOD + torch.tensor([0, math.nan, 0]),),
        r"4 NaN or infinite values of 12; remove or impute",
    ),
    (
        FLOW,
        (GOOD + torch.tensor([0, 0, -math.inf]),),
        r"4 NaN or infinite values of 12; remove or impute",
    ),
    (
        FLOW,
        (GOOD, torch.zeros(4, 2)),
        r"takes no context but got one of shape \(4, 2\); build it with context_dim=",
    ),
    (WITH_CONTEXT, (GOOD,), r"needs a context \(\.\.\., 2\) but got none; pass context="),
    (
        WITH_CONTEXT,
        (GOOD, torch.zeros(4, 5)),
        r"context has shape \(4, 5\) but the last 1 axes must be \(\.\.\., 2\)",
    ),
    (
        WITH_CONTEXT,
        (GOOD, torch.zeros(5, 2)),
        r"batch \(4,\) but a context with batch \(5,\); make the two broadcast",
    ),
    (
        WITH_CONTEXT,
        (GOOD, torch.full((4, 2), math.nan)),
        r"context has 8 NaN or infinite values of 8",
    ),
    (
        WITH_CONTEXT,
        (GOOD, torch.zeros(4, 2, dtype=torch.int)),
        r"context must be floating point, got torch.int32",
    ),
]


@pytest.mark.parametrize(
    ("transform", "arguments", "message"), BAD_INPUT, ids=[m[:25] for _, _, m in BAD_INPUT]
)
def test_bad_input_is_a_clear_error_with_a_remedy(
    transform: Transform, arguments: tuple[Any, ...], message: str
) -> None:
    flow = Flow(StandardNormal(3), transform)
    for method in (transform, transform.forward, transform.inverse, flow.log_prob):
        with pytest.raises(ValueError, match=message):
            method(*arguments)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([True, False], r"mask must be 3 booleans .*got torch.bool of shape \(2,\)"),
        (torch.tensor([1, 0, 1]), r"got torch.int64 of shape \(3,\); use mask.bool\(\)"),
        ([True, True, True], r"must keep some coordinates and change others, got all True"),
        ([False, False, False], r"got all False"),
        ("checkers", r"\"half\", \"alternate\" or 3 booleans, got 'checkers'"),
    ],
)
def test_an_odd_mask_is_named(mask: Any, message: str) -> None:
    from bayou.flows import Affine

    with pytest.raises(ValueError, match=message):
        Coupling(3, Affine(), mask)


def test_an_inversion_that_fails_raises_with_its_residual() -> None:
    def cube(x: Tensor) -> tuple[Tensor, Tensor]:
        return x**3 + 10, 3 * x**2

    one = torch.ones(2, dtype=torch.float64)
    assert torch.allclose(
        solve_increasing(cube, -5 * one, one), torch.tensor(-(10 ** (1 / 3)), dtype=torch.float64)
    )
    with pytest.raises(
        InversionError, match=r"2 of 2 inversions did not converge: largest residual .*float64"
    ):
        solve_increasing(lambda x: (x * math.nan, x), -one, one)


def test_flows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"base has events \(2,\) but the transform takes \(3,\)"):
        Flow(StandardNormal(2), FLOW)
    with pytest.raises(
        ValueError, match=r"got Flow\(Chain, StandardNormal\); expected Flow\(base, transform\)"
    ):
        Flow(FLOW, StandardNormal(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot draw -1 samples"):
        Flow(StandardNormal(3), FLOW).sample(-1)
    with pytest.raises(ValueError, match="seed must be"):
        Flow(StandardNormal(3), FLOW).sample(2, seed="0")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "build",
    [
        lambda: StandardNormal(0),
        lambda: StandardNormal(()),
        lambda: DiagonalNormal(2, std=0.0),
        lambda: Uniform(2, 1.0, 1.0),
        lambda: GaussianMixture(2, components=0),
    ],
)
def test_bases_refuse_what_is_no_distribution(build: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="needs|expected"):
        build()


# --- flows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "base", [StandardNormal(2), DiagonalNormal(2, 1.0, 2.0), GaussianMixture(2, 3)]
)
def test_the_two_ways_to_a_log_density_agree(base: nn.Module) -> None:
    flow = shaken(Flow(base, realnvp(2)))  # type: ignore[arg-type]
    y, log_prob = flow.sample_and_log_prob(50, seed=0)
    assert torch.allclose(flow.log_prob(y), log_prob, atol=1e-9)
    assert torch.equal(flow.sample(50, seed=0), y.detach())
    assert y.requires_grad
    assert not flow.sample(2).requires_grad


@pytest.mark.parametrize("n", [(), 0, 1, 3, (2, 3), (0, 2)])
@pytest.mark.parametrize("batch", [None, (), (4,), (2, 1)])
def test_shapes_of_samples(n: int | tuple[int, ...], batch: tuple[int, ...] | None) -> None:
    flow = Flow(StandardNormal(2), realnvp(2, layers=1, context_dim=0 if batch is None else 3))
    context = None if batch is None else torch.zeros(*batch, 3)
    expected = ((n,) if isinstance(n, int) else n) + (batch or ())
    y, log_prob = flow.sample_and_log_prob(n, context, seed=0)
    assert y.shape == flow.sample(n, context, seed=0).shape == (*expected, 2)
    assert log_prob.shape == flow.log_prob(y, context).shape == expected


@pytest.mark.parametrize(
    "base", [StandardNormal(2), DiagonalNormal(2), Uniform(2), GaussianMixture(2, 3)]
)
def test_a_seed_names_each_draw(base: nn.Module) -> None:
    flow = shaken(Flow(base, LULinear(2)))  # type: ignore[arg-type]
    ten = flow.sample(10, seed=0)
    for other in (
        flow.sample(100, seed=0)[:10],
        flow.sample(6000, seed=0)[:10],
        flow.sample((2, 5), seed=0),
    ):
        torch.testing.assert_close(
            other.reshape(10, 2), ten, rtol=1e-12, atol=1e-12
        )  # the noise is the same
    assert not torch.equal(flow.sample(10, seed=0), flow.sample(10, seed=1))
    draws = [flow.sample(10, seed=torch.Generator().manual_seed(4)) for _ in range(2)]
    assert torch.equal(*draws)
    with torch.random.fork_rng():
        draws = [(torch.manual_seed(3), flow.sample(10))[1] for _ in range(2)]
    assert torch.equal(*draws)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "base", [StandardNormal(2), DiagonalNormal(2), Uniform(2), GaussianMixture(2, 3)]
)
def test_dtype_follows_the_flow(base: nn.Module, dtype: torch.dtype) -> None:
    flow = Flow(base, reverse(2)).to(dtype)  # type: ignore[arg-type]
    y, log_prob = flow.sample_and_log_prob(5, seed=0)
    assert y.dtype == log_prob.dtype == flow.log_prob(y).dtype == dtype
    assert bool(log_prob.isfinite().all())


# --- base distributions ----------------------------------------------------------------------------------------------


def test_bases_agree_with_torch_distributions() -> None:
    x = points(20, 2)
    diagonal = shaken(DiagonalNormal(2, 1.0, 2.0))
    mixture = shaken(GaussianMixture(2, 3))
    components = D.Independent(D.Normal(mixture.mean, mixture.log_std.exp()), 1)
    pairs: list[tuple[Any, D.Distribution]] = [
        (StandardNormal(2), D.Independent(D.Normal(torch.zeros(2).to(x), 1.0), 1)),
        (diagonal, D.Independent(D.Normal(diagonal.mean, diagonal.log_std.exp()), 1)),
        (mixture, D.MixtureSameFamily(D.Categorical(logits=mixture.logits), components)),
        (Uniform(2, -9.0, 7.0), D.Independent(D.Uniform(torch.tensor([-9.0, -9.0]).to(x), 7.0), 1)),
    ]
    for base, peer in pairs:
        assert torch.allclose(base.log_prob(x), peer.log_prob(x), atol=1e-12)
    assert Uniform(2).log_prob(torch.tensor([[0.5, 0.5], [0.5, 1.5]])).tolist() == [0.0, -math.inf]
    assert StandardNormal((2, 3)).log_prob(points(4, 2, 3)).shape == (4,)


def test_moments_of_base_draws() -> None:
    n = 40_000
    diagonal, mixture = shaken(DiagonalNormal(2, 1.0, 2.0)), shaken(GaussianMixture(2, 3))
    weights, std = mixture.logits.softmax(-1), mixture.log_std.exp()
    mean = weights @ mixture.mean
    second = weights @ (mixture.mean.square() + std.square())
    expected: list[tuple[Any, Any, Any]] = [
        (StandardNormal(2).double(), torch.zeros(2), torch.ones(2)),
        (diagonal, diagonal.mean, diagonal.log_std.exp().square()),
        (mixture, mean, second - mean.square()),
        (Uniform(2, -1.0, 3.0).double(), torch.ones(2), torch.full((2,), 16 / 12)),
    ]
    for base, centre, variance in expected:
        x = base.draw(n, seed=0).detach()
        assert x.dtype == torch.float64
        assert ((x.mean(0) - centre).abs() < 5 * (variance / n).sqrt()).all()
        assert ((x.var(0) / variance - 1).abs() < 5 * math.sqrt(3 / n)).all()
    u = Uniform(3).draw(10_000, seed=0)
    assert (u > 0).all()
    assert (u < 1).all()
    assert mixture.draw(3, (4, 5), seed=0).shape == (3, 4, 5, 2)


def test_mixture_gradients_match_closed_forms() -> None:
    """∇E[‖x‖²] and ∇E[x₀² x₁], with E[...] = Σ π_k (μ_k0² + σ_k0²) ... in closed form."""
    base = shaken(GaussianMixture(2, 3, spread=1.0))
    parameters = list(base.parameters())
    weights, second = base.logits.softmax(-1), base.mean.square() + (2 * base.log_std).exp()
    moments: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda x: x.square().sum(-1), (weights[:, None] * second).sum()),
        (
            lambda x: x[..., 0].square() * x[..., 1],
            (weights * second[:, 0] * base.mean[:, 1]).sum(),
        ),
    ]
    for function, closed in moments:
        exact = torch.autograd.grad(closed, parameters, retain_graph=True)
        chunks = []
        for i in range(40):
            estimate = function(base.draw(2500, seed=i)).mean()
            chunks.append(
                torch.cat([g.flatten() for g in torch.autograd.grad(estimate, parameters)])
            )
        rows = torch.stack(chunks)
        error = (rows.mean(0) - torch.cat([g.flatten() for g in exact])).abs()
        assert (error < 5 * rows.std(0) / math.sqrt(len(rows)) + 1e-12).all()


def test_mixture_gradients_keep_every_conditional_cdf_fixed() -> None:
    """∂x/∂θ of a draw against finite differences of the explicit inverse of u_d = F(x_d |
    x_{<d}).
    """
    base = shaken(GaussianMixture(4, 3, spread=1.0))
    shapes = [p.shape for p in base.parameters()]
    theta = torch.cat([p.detach().flatten() for p in base.parameters()])

    def conditionals(x: Tensor, d: int, theta: Tensor) -> Tensor:
        """F(x_d | x_{<d}): (n,)."""
        parts = [
            v.reshape(s)
            for v, s in zip(theta.split([s.numel() for s in shapes]), shapes, strict=True)
        ]
        mean, log_std, logits = parts
        normal = D.Normal(mean, log_std.exp())
        log_weight = logits + normal.log_prob(x[:, None, :])[..., :d].sum(-1)
        return (log_weight.softmax(-1) * normal.cdf(x[:, None, :])[..., d]).sum(-1)

    def invert(u: list[Tensor], theta: Tensor) -> Tensor:
        x = torch.zeros(len(u[0]), 4, dtype=torch.float64)
        for d in range(4):
            low, high = torch.full_like(u[d], -20), torch.full_like(u[d], 20)
            for _ in range(100):
                x[:, d] = 0.5 * (low + high)
                below = conditionals(x, d, theta) < u[d]
                low, high = torch.where(below, x[:, d], low), torch.where(below, high, x[:, d])
        return x

    assert [name for name, _ in base.named_parameters()] == ["mean", "log_std", "logits"]
    x = base.draw(20, seed=3).detach()
    x = x - base._weight_gradient(x, base.mean, base.log_std)
    u = [conditionals(x.detach(), d, theta) for d in range(4)]
    assert torch.allclose(invert(u, theta), x, atol=1e-9)
    weights = points(20, 4)
    gradient = torch.autograd.grad((weights * x).sum(), list(base.parameters()))
    direction = points(len(theta))
    eps = 1e-5
    numeric = (
        (invert(u, theta + eps * direction) - invert(u, theta - eps * direction)) * weights
    ).sum() / (2 * eps)
    analytic = torch.cat([g.flatten() for g in gradient]) @ direction
    assert abs(numeric.item() - analytic.item()) < 1e-5 * max(1.0, abs(analytic.item()))


def test_means_and_stds_of_a_mixture_have_gradients_without_tails() -> None:
    """Components of 200 inputs, half a std apart in each: the transform that moves their weights
    would move 1 % of the draws by 50 and one in a thousand by 200 for a mean that moves by 1."""
    base = GaussianMixture(200, 2).double()
    with torch.no_grad():
        base.mean[1] = (
            base.mean[0]
            + 0.5 * torch.randn(200, generator=torch.Generator().manual_seed(0)).double()
        )
    x = base.draw(300, seed=0)
    slope = torch.autograd.grad(x.sum(), base.mean, retain_graph=True)[0]
    assert torch.equal(
        slope.sum(0), torch.full((200,), 300.0, dtype=torch.float64)
    )  # every draw by its own component
    assert torch.equal(slope, slope[:, :1].expand(2, 200))
    (of_weights,) = torch.autograd.grad(x.sum(), base.logits)
    assert bool((of_weights != 0).all())


def test_the_graph_of_a_mixture_grows_with_neither_dimension_nor_components() -> None:
    """Draw and gradient as operations: a loop over the inputs of a layer had made compiling take
    minutes.
    """

    def operations(dim: int, components: int) -> int:
        base = GaussianMixture(dim, components)

        def gradient(u: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(
                base._weight_gradient(u, base.mean, base.log_std).sum(), list(base.parameters())
            )

        return len(make_fx(gradient)(torch.zeros(2, dim)).graph.nodes)

    assert operations(3, 2) == operations(50, 2) == operations(50, 8)


def test_a_mixture_with_fixed_weights_leaves_them_alone() -> None:
    base = GaussianMixture(2, 3)
    base.logits.requires_grad_(False)
    base.draw(5, seed=0).sum().backward()
    assert base.logits.grad is None
    assert base.mean.grad is not None
    learning = GaussianMixture(2, 3)
    assert torch.allclose(learning.draw(5, seed=0), base.draw(5, seed=0))
    assert bool((GaussianMixture(2, 1).mean == 0).all())


def test_the_gradient_of_a_mixture_with_a_narrow_component_is_that_of_double_precision() -> None:
    def slopes(base: GaussianMixture, x: Tensor) -> Tensor:
        loss = (x - base._weight_gradient(x, base.mean, base.log_std)).square().sum(-1).mean()
        return torch.cat(
            [g.flatten().double() for g in torch.autograd.grad(loss, tuple(base.parameters()))]
        )

    base = GaussianMixture(20, 2, spread=0.1)
    with torch.no_grad():
        base.log_std.fill_(-2.0)
        base.log_std[1, 10] = math.log(1e-6)  # 1e5 stds away from the other
        x = base.draw(256, seed=0)
    expected = slopes(copy.deepcopy(base).double(), x.double())
    assert torch.allclose(slopes(base, x), expected, rtol=1e-3, atol=1e-3)


# --- open intervals, where rounding would reach an end ---------------------------------------------------------------


@pytest.mark.parametrize("levels", [3, 49, 256, 1000, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dequantized_numbers_stay_in_their_bins(levels: int | None, dtype: torch.dtype) -> None:
    f = Dequantize(1, levels=levels)
    y = (
        torch.arange(levels, dtype=dtype)[:, None]
        if levels
        else torch.arange(-300, 300, dtype=dtype)[:, None]
    )
    for u in (0.0, 1e-9, 1 - torch.finfo(dtype).eps / 2):  # the ends of what rng.uniform draws
        x, _ = f.inverse(y, noise=(torch.full_like(y, u),))
        assert torch.equal(f(x)[0], y)
        assert levels is None or (x.min() > 0 and x.max() < 1)


def test_a_density_of_white_pixels_is_finite() -> None:
    y = torch.full((1, 8), 255.0)
    noise = ((), (torch.full_like(y, 1 - 2.0**-24),))
    for onto in (Inverse(InverseCDF(8)), Sigmoid((8,))):
        x, term = Chain(onto, Dequantize(8, levels=256)).inverse(y, noise=noise)
        assert x.isfinite().all()
        assert term.isfinite().all()


@pytest.mark.parametrize("x", [-12.0, -7.0, -5.6, -1.0, 5.2])
def test_the_normal_cdf_keeps_its_lower_tail(x: float) -> None:
    f = InverseCDF(1)
    u, _ = f.inverse(torch.tensor([x]))
    assert u.item() == pytest.approx(NormalDist().cdf(x), rel=1e-4)
    assert f(u)[0].item() == pytest.approx(x, rel=1e-2 if x > 5 else 1e-5)  # 1 − u has few digits


@pytest.mark.parametrize("family", [D.Normal, D.Laplace, D.Gumbel, D.Cauchy])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ends_of_an_inverse_cdf_are_finite(
    family: Callable[..., D.Distribution], dtype: torch.dtype
) -> None:
    f = InverseCDF(1, family).to(dtype)
    y, ladj = f(
        torch.tensor([[torch.finfo(dtype).tiny], [1 - torch.finfo(dtype).eps / 2]], dtype=dtype)
    )
    assert y.isfinite().all()
    assert ladj.isfinite().all()
    u, _ = f.inverse(torch.tensor([[-1000.0], [1000.0]], dtype=dtype))
    assert (u[0] > 0) & (u[1] < 1)


@pytest.mark.parametrize("margin", [0.0, 0.05])
def test_a_saturated_sigmoid_can_be_inverted(margin: float) -> None:
    f = Sigmoid((2,), margin)
    y, _ = f(torch.tensor([-200.0, 200.0]))
    x, ladj = f.inverse(y)  # which refuses the ends of the interval
    assert x.isfinite().all()
    assert ladj.isfinite()
    assert x[1] > 15 > -15 > x[0]


def test_draws_from_a_box_lie_inside() -> None:
    for low, high in ((0.0, 1.0), (100.0, 101.0), (-1.0, 0.0)):
        x = Uniform(1, low, high).draw(2**16, seed=0)
        assert (x > low).all()
        assert (x < high).all()


def test_the_gradient_of_a_mixture_in_its_lower_tail_is_that_of_double_precision() -> None:
    def slope(base: GaussianMixture) -> Tensor:
        x = torch.tensor([[-9.0]]).to(base.mean)
        return torch.autograd.grad(
            base._weight_gradient(x, base.mean.detach(), base.log_std.detach()).sum(), base.logits
        )[0]

    base = GaussianMixture(1, 2, spread=1.0)
    found, expected = slope(base), slope(copy.deepcopy(base).double())
    assert expected.abs().max() > 1e-4
    assert torch.allclose(found.double(), expected, rtol=1e-3)
