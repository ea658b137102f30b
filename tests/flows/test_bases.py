"""Base distributions: densities, draws, and the gradients of draws."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import distributions as D
from torch.fx.experimental.proxy_tensor import make_fx

from bayou.core import rng
from bayou.flows import DiagonalNormal, GaussianMixture, StandardNormal, Uniform, VonMises
from tests.flows.test_contract import points
from tests.flows.tools import LIKE, close, double, identical, perturb

KAPPAS = [1e-3, 1.0, 20.0, 99.0]


def test_bases_agree_with_torch_distributions():
    x = points(20, 2)
    diagonal = perturb(DiagonalNormal(2, 1.0, 2.0))
    mixture = perturb(GaussianMixture(2, 3))
    components = D.Independent(D.Normal(mixture.mean, mixture.log_std.exp()), 1)
    pairs = [
        (StandardNormal(2), D.Independent(D.Normal(torch.zeros(2).to(x), 1.0), 1)),
        (diagonal, D.Independent(D.Normal(diagonal.mean, diagonal.log_std.exp()), 1)),
        (mixture, D.MixtureSameFamily(D.Categorical(logits=mixture.logits), components)),
        (Uniform(2, -9.0, 7.0), D.Independent(D.Uniform(torch.tensor([-9.0, -9.0]).to(x), 7.0), 1)),
    ]
    for base, peer in pairs:
        close(base.log_prob(x), peer.log_prob(x))
    assert Uniform(2).log_prob(torch.tensor([[0.5, 0.5], [0.5, 1.5]])).tolist() == [0.0, -math.inf]
    assert StandardNormal((2, 3)).log_prob(points(4, 2, 3)).shape == (4,)


def test_moments_of_draws():
    n = 40_000
    diagonal = perturb(DiagonalNormal(2, 1.0, 2.0))
    mixture = perturb(GaussianMixture(2, 3))
    weights = mixture.logits.softmax(-1)
    mean = weights @ mixture.mean
    second = weights @ (mixture.mean.square() + (2 * mixture.log_std).exp())
    expected = [
        (StandardNormal(2).double(), torch.zeros(2), torch.ones(2)),
        (diagonal, diagonal.mean, diagonal.log_std.exp().square()),
        (mixture, mean, second - mean.square()),
        (Uniform(2, -1.0, 3.0).double(), torch.ones(2), torch.full((2,), 16 / 12)),
    ]
    for base, center, variance in expected:
        x = base.draw(n, seed=0).detach()
        assert ((x.mean(0) - center).abs() < 5 * (variance / n).sqrt()).all()
        assert ((x.var(0) / variance - 1).abs() < 5 * math.sqrt(3 / n)).all()
    assert mixture.draw(3, (4, 5), seed=0).shape == (3, 4, 5, 2)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (100.0, 101.0), (-1.0, 0.0)])
def test_draws_from_a_box_lie_inside(low, high):
    x = Uniform(1, low, high).draw(2**16, seed=0)
    assert (x > low).all()
    assert (x < high).all()


# --- von Mises ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kappa", KAPPAS)
def test_the_von_mises_density_is_that_of_torch_and_integrates_to_one(kappa):
    base = VonMises(1, 0.7, kappa).double()
    x = (-math.pi + 2 * math.pi * torch.arange(400, dtype=torch.float64) / 400).unsqueeze(-1)
    mean, concentration = double([0.7, kappa])
    expected = D.VonMises(mean, concentration).log_prob(x).squeeze(-1)
    # torch computes I₀ by a fit of seven digits
    close(base.log_prob(x), expected, atol=2e-6 * kappa + 1e-6)
    assert abs(2 * math.pi * base.log_prob(x).exp().mean().item() - 1) < 1e-12
    turned = base.log_prob(x + 2 * math.pi)
    close(turned, base.log_prob(x), atol=1e-12 * kappa + 1e-14)


@pytest.mark.parametrize("kappa", KAPPAS)
def test_von_mises_draws_invert_the_cdf(kappa):
    base, n = VonMises(1, 0.0, kappa).double(), 50
    x = base.draw(n, seed=3).squeeze(-1)
    u = rng.uniform(n, (1,), LIKE, 3).squeeze(-1)
    nodes, weights = (torch.from_numpy(values) for values in np.polynomial.legendre.leggauss(400))
    half = (x + math.pi) / 2  # the CDF by quadrature on [−π, x]
    angles = -math.pi + half[:, None] * (1 + nodes)
    cdf = half * (weights * base.log_prob(angles.unsqueeze(-1)).exp()).sum(-1)
    close(cdf, u)


def test_von_mises_draws_depend_on_their_index_and_are_around_the_mean():
    base = VonMises((2, 3), 3.0, 5.0).double()
    x = base.draw(100, (4,), seed=0)
    assert x.shape == (100, 4, 2, 3)
    identical(base.draw(3, (4,), seed=0, start=7), x[7:10])
    assert x.abs().max() <= math.pi
    kappa = torch.tensor(5.0)
    resultant = torch.special.i1e(kappa) / torch.special.i0e(kappa)  # E[cos(x − μ)]
    deviation = (1 - resultant / 5 - resultant**2).sqrt() / math.sqrt(x.numel())
    assert abs((x - 3.0).cos().mean() - resultant) < 4 * deviation
    assert abs((x - 3.0).sin().mean()) < 4 * math.sqrt(resultant / 5 / x.numel())


# --- mixtures -----------------------------------------------------------------------------------


def test_mixture_gradients_match_closed_forms():
    """∇E[‖x‖²] and ∇E[x₀² x₁], with E[...] = Σ π_k (μ_k0² + σ_k0²) ... in closed form."""
    base = perturb(GaussianMixture(2, 3, spread=1.0))
    parameters = list(base.parameters())
    weights, second = base.logits.softmax(-1), base.mean.square() + (2 * base.log_std).exp()
    moments = [
        (lambda x: x.square().sum(-1), (weights[:, None] * second).sum()),
        (
            lambda x: x[..., 0].square() * x[..., 1],
            (weights * second[:, 0] * base.mean[:, 1]).sum(),
        ),
    ]

    def gradient(value):
        gradients = torch.autograd.grad(value, parameters, retain_graph=True)
        return torch.cat([g.flatten() for g in gradients])

    for function, closed in moments:
        rows = torch.stack([gradient(function(base.draw(2500, seed=i)).mean()) for i in range(40)])
        error = (rows.mean(0) - gradient(closed)).abs()
        assert (error < 5 * rows.std(0) / math.sqrt(len(rows)) + 1e-12).all()


def test_means_and_stds_of_a_mixture_have_gradients_without_tails():
    """Every draw moves with its own component.

    The transform that moves the weights would move 1 % of the draws by 50 for a mean that moves by
    1, for components of 100 inputs that are half a std apart in each.
    """
    base = GaussianMixture(100, 2).double()
    with torch.no_grad():
        base.mean[1] = base.mean[0] + 0.5 * points(100)
    x = base.draw(100, seed=0)
    slope, logits_slope = torch.autograd.grad(x.sum(), (base.mean, base.logits))
    identical(slope.sum(0), torch.full((100,), 100.0, dtype=torch.float64))
    identical(slope, slope[:, :1].expand(2, 100))
    assert bool((logits_slope != 0).all())


def weight_gradients(base, x):
    """The gradients of the mean of ‖x‖² through the transform of the weights, as one vector."""
    x = x - base._weight_gradient(x, base.mean, base.log_std)
    gradients = torch.autograd.grad(x.square().sum(-1).mean(), list(base.parameters()))
    return torch.cat([g.flatten() for g in gradients])


def test_the_graph_of_a_mixture_grows_with_neither_dimension_nor_components():
    """A loop over the inputs of a layer had made compiling take minutes."""

    def count_operations(dim, components):
        base = GaussianMixture(dim, components)
        graph = make_fx(lambda x: weight_gradients(base, x))(torch.zeros(2, dim)).graph
        return len(graph.nodes)

    assert count_operations(3, 2) == count_operations(50, 2) == count_operations(50, 8)


def test_a_mixture_with_fixed_weights_has_no_gradient_of_them():
    base = GaussianMixture(2, 3)
    base.logits.requires_grad_(False)
    base.draw(5, seed=0).sum().backward()
    assert base.logits.grad is None
    assert base.mean.grad is not None
    learning = GaussianMixture(2, 3)
    close(learning.draw(5, seed=0), base.draw(5, seed=0))
    assert bool((GaussianMixture(2, 1).mean == 0).all())


def test_gradients_of_a_mixture_in_tails_are_those_of_double_precision():
    """At a component 1e5 stds away from the other, and in the lower tail of all."""
    narrow = GaussianMixture(20, 2, spread=0.1)
    with torch.no_grad():
        narrow.log_std.fill_(-2.0)
        narrow.log_std[1, 10] = math.log(1e-6)
        x = narrow.draw(256, seed=0)
    for base, rows in (
        (narrow, x),
        (GaussianMixture(1, 2, spread=1.0), torch.tensor([[-9.0]])),
    ):
        expected = weight_gradients(copy.deepcopy(base).double(), rows.double())
        gradients = weight_gradients(base, rows).double()
        close(gradients, expected, rtol=1e-3, atol=1e-3)
