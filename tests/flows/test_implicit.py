"""Derivatives of all orders through solvers, in every mode of differentiation."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap

from bayou.flows import (
    DiagonalNormal,
    GaussianMixture,
    Residual,
    VonMises,
    continuous,
    residual,
)
from bayou.flows.contractive.contracting import schatten
from bayou.flows.core.implicit import SecondDerivativeError
from bayou.flows.core.roots import solve_increasing
from tests.conformance.flow_properties import check
from tests.flows.tools import close, derivative, double, seeded

RIGHT_SIDES = double([0.0, 1.3, 2.0])


def cubic(x, scale, right):
    """scale·x³ + x − right, and its slope."""
    return scale * x**3 + x - right, 3 * scale * x**2 + 1


def root(scale, right):
    end = torch.full_like(right, 3.0)
    return solve_increasing(cubic, -end, end, scale, right)


def cardano(scale, right):
    """The same root in closed form."""
    half = right / (2 * scale)
    discriminant = (half.square() + 1 / (27 * scale**3)).sqrt()
    above = half + discriminant
    below = discriminant - half
    return above ** (1 / 3) - below ** (1 / 3)


def loss(solve, theta):
    x = solve(theta[0], theta[1:])
    return x.exp().sum() + theta.sum() * x.sum()


THETA = torch.cat([double([0.7]), RIGHT_SIDES])


def test_derivatives_up_to_the_fourth_order_are_those_of_the_closed_form():
    scale = THETA[0]
    for solve in (root, cardano):
        right = RIGHT_SIDES.clone().requires_grad_()
        value = solve(scale, right)
        derivatives = []
        for _ in range(4):
            value = derivative(value.sum(), right, create_graph=True)
            derivatives.append(value.detach())
        if solve is root:
            found = torch.stack(derivatives)
    close(found, torch.stack(derivatives), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "second", [hessian, lambda f: jacrev(jacrev(f)), lambda f: jacfwd(jacfwd(f)), lambda f: jacrev(jacfwd(f))],
    ids=["forward over reverse", "reverse over reverse", "forward over forward", "reverse over forward"],
)  # fmt: skip
def test_every_mode_gives_the_same_second_derivatives(second):
    found = second(lambda theta: loss(root, theta))(THETA)
    expected = hessian(lambda theta: loss(cardano, theta))(THETA)
    close(found, expected, rtol=1e-10)


def test_forward_mode_works_outside_of_functional_transforms():
    tangent = torch.ones_like(RIGHT_SIDES)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(RIGHT_SIDES, tangent)
        found = forward_ad.unpack_dual(root(THETA[0], dual)).tangent
        with torch.no_grad():
            without_graph = forward_ad.unpack_dual(root(THETA[0], dual)).tangent
    expected = 1 / cubic(cardano(THETA[0], RIGHT_SIDES), THETA[0], RIGHT_SIDES)[1]
    close(found, expected, rtol=1e-12)
    close(without_graph, expected, rtol=1e-12)


def test_vmap_of_second_derivatives_and_second_derivatives_of_vmap():
    scales = double([0.5, 1.0, 2.0])

    def single(solve, scale, right):
        return solve(scale, right.unsqueeze(0)).sum()

    mapped = vmap(grad(grad(lambda s, r: single(root, s, r), 1), 1))(scales, RIGHT_SIDES)
    expected = vmap(grad(grad(lambda s, r: single(cardano, s, r), 1), 1))(scales, RIGHT_SIDES)
    close(mapped, expected, rtol=1e-9)
    right = RIGHT_SIDES.clone().requires_grad_()
    total = vmap(lambda s, r: single(root, s, r))(scales, right).sum()
    first = derivative(total, right, create_graph=True)
    second = derivative(first.sum(), right)
    close(second, expected, rtol=1e-9)
    vmap(lambda s, r: single(root, s, r))(scales, right).sum().backward()
    close(right.grad, first.detach(), rtol=1e-14)


@pytest.mark.slow
def test_a_compiled_root_has_second_derivatives_where_the_compiler_allows_them():
    compiled = torch.compile(root, fullgraph=True, backend="eager")
    right = RIGHT_SIDES.clone().requires_grad_()
    (first,) = torch.autograd.grad(compiled(THETA[0], right).sum(), right, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), right)
    (expected,) = torch.autograd.grad(root(THETA[0], right).sum(), right, create_graph=True)
    (again,) = torch.autograd.grad(expected.sum(), right)
    close(first, expected, rtol=1e-12)
    close(second, again, rtol=1e-10)


class Draws(nn.Module):
    """Draws of a base as a module, for ``functional_call``."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self):
        return self.base.draw(5, seed=3)


@pytest.mark.parametrize(
    "build", [lambda: VonMises(2, 0.3, 4.0), lambda: DiagonalNormal(2, 0.5, 2.0)]
)
def test_derivatives_of_draws(build):
    draws = Draws(build()).double()
    names, parameters = zip(*draws.named_parameters(), strict=True)

    def sines(*values):
        x = functional_call(draws, dict(zip(names, values, strict=True)), ())
        return x.sin()

    assert torch.autograd.gradcheck(sines, parameters, rtol=1e-5)
    assert torch.autograd.gradgradcheck(sines, parameters, rtol=1e-5)


def mixture_gradients():
    """Gradients, with a graph, of a function of draws, by the name of the parameter."""
    base = GaussianMixture(2, 3).double()
    x = base.draw(64, seed=0)
    names, parameters = zip(*base.named_parameters(), strict=True)
    gradients = torch.autograd.grad(x.sin().sum(), parameters, create_graph=True)
    return base, dict(zip(names, gradients, strict=True))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("logits", "logits"),
        ("logits", "mean"),
        ("logits", "log_std"),
        ("mean", "logits"),
        ("log_std", "logits"),
    ],
)
def test_second_derivatives_in_the_weights_of_a_mixture_raise(first, second):
    base, gradients = mixture_gradients()
    with pytest.raises(SecondDerivativeError, match=r"logits.requires_grad_\(False\)"):
        torch.autograd.grad(gradients[first].square().sum(), getattr(base, second))


def test_second_derivatives_in_the_means_of_a_mixture_are_those_with_constant_weights():
    base, gradients = mixture_gradients()
    found = derivative(gradients["mean"].square().sum(), base.mean)
    base.logits.requires_grad_(False)
    gradient = derivative(base.draw(64, seed=0).sin().sum(), base.mean, create_graph=True)
    expected = derivative(gradient.square().sum(), base.mean)
    close(found, expected)
    close(gradients["mean"], gradient)


def test_functional_gradients_of_draws_of_a_mixture_are_those_of_autograd():
    draws = Draws(GaussianMixture(2, 3)).double()
    named = {key: p.detach() for key, p in draws.named_parameters()}
    gradients = grad(lambda values: functional_call(draws, values, ()).sin().sum())(named)
    expected = torch.autograd.grad(draws().sin().sum(), list(draws.parameters()))
    for key, gradient in zip(named, expected, strict=True):
        close(gradients[key], gradient)


class Contraction(nn.Module):
    """A network as a user may write it, with a Lipschitz constant below .6."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[0.3, -0.4], [0.2, 0.3]]))

    def forward(self, x):
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("determinant", ["exact", "roulette"])
def test_residual_flows_of_any_network_have_second_derivatives(determinant):
    flow = Residual(2, Contraction(), 0.6, determinant)
    report = check(flow, only=["inverse", "gradcheck", "gradgradcheck"], perturb=0.0)
    report.raise_if_failed()
    for direction in ("forward", "inverse"):
        assert report[f"gradgradcheck {direction}"].value is not None


@pytest.mark.parametrize("determinant", ["exact", "roulette"])
def test_second_derivatives_where_norms_are_above_their_bound(determinant):
    flow = residual(2, 1, (4,), 0.5, determinant)
    with torch.no_grad():
        for name, p in flow.named_parameters():
            if name.endswith("weight"):
                p.mul_(1.7)
    check(flow, only=["gradgradcheck"], perturb=0.05).raise_if_failed()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_second_derivatives_of_the_norm(dtype):
    w = torch.randn(3, 4, generator=seeded(0), dtype=dtype)
    assert torch.autograd.gradgradcheck(schatten, w.requires_grad_(), eps=1e-5, atol=1e-4)


def test_solvers_of_continuous_flows_have_the_same_second_derivatives():
    flow = continuous(2, (8,), steps=16, tolerance=1e-7).double()
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    products = []
    for flow.solver, flow.checkpoint in (("rk4", False), ("rk4", True), ("dopri5", False)):
        y, ladj = flow(x)
        gradient = derivative(y.sin().sum() + ladj.sum(), x, create_graph=True)
        products.append(torch.autograd.grad(gradient.sin().sum(), x)[0])
    kept, recomputed, adaptive = products
    close(recomputed, kept, rtol=1e-10)
    close(adaptive, kept, rtol=1e-3, atol=1e-4)  # errors of the solvers
