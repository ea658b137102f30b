"""Implicit posteriors: bounds of the entropy, the score, and gradients against closed forms."""

import math

import pytest
import torch
from torch import nn

import bayou
from bayou.core import rng
from bayou.diagnostics import bound_gap
from bayou.flows import Side
from bayou.guides.guide import KL
from bayou.guides.implicit import HMCScore
from bayou.priors import DensityPrior

F64 = torch.float64
ENTROPY = 2.223657  # of N(0, 1 + 4)
BOTH = pytest.mark.parametrize("family", [bayou.guides.SIVI, bayou.guides.UIVI])


class Vector(nn.Module):
    """A network that is one vector."""

    def __init__(self, dim):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim, dtype=F64))


def linear(size):
    return nn.Linear(size, size, bias=False)


def guide_of(spec, dim, prior=None):
    bnn = bayou.bayesianize(Vector(dim), {"w": spec}, prior=prior)
    guide = bnn.guides[0]
    return bnn, guide


def number_3(family, draws, **options):
    """q(w|z) = N(z, 1), z = 2ε ~ N(0, 4), against the prior N(0, 5) = q(w), whose KL is 0."""
    prior = bayou.Normal(math.sqrt(5.0))
    bnn, guide = guide_of(
        family(draws=draws, latent=1, network=linear, std=1.0, **options), 1, prior
    )
    with torch.no_grad():
        guide.factor.fill_(1.0)
        guide.network.weight.fill_(2.0)
    return bnn, guide


def test_number_3_both_bounds_of_the_entropy_tighten_in_k():
    """H = E[−log p] − KL: with p = q the ends of the KL are H − (upper, lower) of the entropy."""
    for draws, lower, upper in ((1, 1.747, 5.418), (10, 2.115, 2.411), (100, 2.210, 2.241)):
        bnn, _ = number_3(bayou.guides.SIVI, draws)
        found = bound_gap(bnn, draws=draws, samples=10_000, seed=0).total
        for end, entropy in ((found.lower, upper), (found.upper, lower)):
            assert abs(ENTROPY - end.value - entropy) < 4 * end.standard_error + 1e-3, draws
        assert found.kind == "bound"


@BOTH
def test_the_kl_of_a_draw_is_the_upper_end_for_its_k(family):
    """Shared latents have the expectation of fresh ones: E[kl] = 2.223657 − 2.115 at K = 10, for
    both families.
    """
    _, guide = number_3(family, 10)
    assert (guide.kl_kind, guide.kl_side) == (KL.bound, Side.upper)
    with torch.no_grad():
        means = torch.stack([guide.draw(50, seed=seed).kl.mean() for seed in range(100)])
    error = float(means.std()) / math.sqrt(100)
    assert abs(float(means.mean()) - (ENTROPY - 2.115)) < 4 * error + 1e-3


def moved(guide, made, score, draws=1):
    """The last state of a chain that may jump to one of ``draws`` latents first: (n, R)."""
    others = rng.normal(draws, made.eps.shape, made.z, seed=2)
    with torch.no_grad():
        ratios = guide.log_ratios(made, others)
    return score.sample_latents(guide, made, others, ratios, 1, 0)[-1]


def test_number_4_the_score_by_hmc():
    """∇_w log q(w) at w = 1.5 is −w/5 = −0.3, from chains that begin at ε ~ N(0, 1) and forget
    it.
    """
    _, guide = number_3(bayou.guides.UIVI, 1)
    n, w = 1000, 1.5
    made = guide.draw_with_noise(n, seed=0)
    made = made._replace(noise=w - made.z)  # z and ξ that make this very w
    z = moved(guide, made, HMCScore(20, 5))[:, 0]
    score = -(w - z)
    assert abs(float(score.mean()) + 0.3) < 4 * float(score.std()) / math.sqrt(n)
    assert float(z.var()) == pytest.approx(0.8, rel=4 * math.sqrt(2 / n))  # of q(z|w)


@pytest.mark.parametrize(("make", "draws"), [(linear, 10), (None, 1)], ids=["linear", "nonlinear"])
def test_hmc_leaves_the_posterior_of_the_latents_invariant(make, draws):
    """(ε', w) has the law of (ε, w): moments of z and of z·w agree, draw by draw."""
    _, guide = guide_of(bayou.guides.UIVI(latent=3, network=make, hidden=(8,), spread=3.0), 2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in guide.network.parameters():
            parameter.copy_(0.7 * torch.randn(parameter.shape, generator=generator, dtype=F64))
    n = 20_000
    made = guide.draw_with_noise(n, seed=0)
    after = moved(guide, made, HMCScore(1, 5), draws)
    v = made.z @ guide.factor.mT + made.noise
    with torch.no_grad():
        assert float((after - made.z).square().mean()) > 0.1 * float(made.z.var())  # it does move
        for f in (
            lambda z: z,
            torch.square,
            lambda z: z[:, :2] * v,
            lambda z: z.tanh()[:, 1:] * v.square(),
        ):
            change = f(after) - f(made.z)
            assert (change.mean(0).abs() < 4 * change.std(0) / math.sqrt(n)).all()


def assert_gradient(guide, exact):
    """The mean gradient of the KL over 30 rounds of 400 draws is the exact one."""
    rounds = [
        torch.autograd.grad(guide.draw(400, seed=seed).kl.mean(), list(guide.parameters()))
        for seed in range(30)
    ]
    for (name, _), want, *gradients in zip(guide.named_parameters(), exact, *rounds, strict=True):
        each = torch.stack(gradients)
        error = each.std(0) / math.sqrt(len(each))
        assert ((each.mean(0) - want).abs() < 4.5 * error + 1e-9).all(), name
        assert float(error.max()) < 0.15 * float(want.abs().max()), name


def gaussian_kl(guide):
    """KL(N(c, σ(I + A·B·Bᵀ·Aᵀ)σ) ‖ N(0, I)) of a guide whose network is linear."""
    a, std = guide.factor @ guide.network.weight, guide.log_std.exp()
    covariance = std[:, None] * (torch.eye(len(std), dtype=F64) + a @ a.mT) * std
    return 0.5 * (
        covariance.trace() + guide.center.square().sum() - len(std) - torch.logdet(covariance)
    )


def standard(w):
    """log N(w; 0, I) without its closed-form KL."""
    return -0.5 * (w.square() + math.log(2 * math.pi)).sum(-1)


@pytest.mark.parametrize(
    "prior", [bayou.Normal(1.0), DensityPrior(standard)], ids=["closed", "sampled"]
)
def test_the_gradient_of_uivi_is_that_of_the_kl(prior):
    """Unbiased for every parameter, in a family whose KL is known; K = 1 shows that the bound has
    no part in it.
    """
    dim = 2
    latent = 3
    _, guide = guide_of(
        bayou.guides.UIVI(draws=1, latent=latent, network=linear, spread=3.0, std=0.5), dim, prior
    )
    with torch.no_grad():
        guide.network.weight.copy_(
            torch.randn(latent, latent, generator=torch.Generator().manual_seed(1), dtype=F64)
        )
        guide.center.copy_(torch.linspace(-1, 1, dim, dtype=F64))
    exact = torch.autograd.grad(gaussian_kl(guide), list(guide.parameters()))
    assert_gradient(guide, exact)


def bent(size):
    """z = 1.5·ε + sin 2ε: two bumps, and a slope that changes its sign."""

    class Bent(nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = nn.Parameter(torch.tensor([1.5, 1.0]))

        def forward(self, eps):
            return self.slope[0] * eps + self.slope[1] * (2 * eps).sin()

    return Bent()


@pytest.mark.parametrize(
    "prior", [bayou.Normal(1.0), DensityPrior(standard)], ids=["closed", "sampled"]
)
def test_the_gradient_of_uivi_in_a_curved_family(prior):
    """Against quadrature over ε and w, where q(ε|w) has several modes: HMC alone stays in the one
    it starts in.
    """
    spec = bayou.guides.UIVI(draws=300, latent=1, network=bent, std=0.7)
    _, guide = guide_of(spec, 1, prior)
    with torch.no_grad():
        guide.factor.fill_(2.0)
        guide.center.fill_(0.3)
    eps, w = torch.linspace(-6, 6, 601, dtype=F64), torch.linspace(-12, 12, 1201, dtype=F64)
    weight = torch.softmax(-0.5 * eps.square(), 0)
    std = guide.log_std.exp()
    mean = guide.center + std * guide.factor[0] * guide.network(eps.unsqueeze(-1)).squeeze(-1)
    q = (
        weight
        * torch.exp(-0.5 * ((w[:, None] - mean) / std).square())
        / (std * math.sqrt(2 * math.pi))
    ).sum(1)
    kl = (q * (q.log() - standard(w[:, None]))).sum() * (w[1] - w[0])
    exact = torch.autograd.grad(kl, list(guide.parameters()))
    assert_gradient(guide, exact)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bayou.guides.SIVI(draws=0), "SIVI draws must be a whole number of at least 1"),
        (lambda: bayou.guides.UIVI(latent=2.0), "UIVI latent must be a whole number"),
        (lambda: bayou.guides.SIVI(spread=0.0), "SIVI spread must be positive and finite, got 0.0"),
        (lambda: bayou.guides.UIVI(std=-1.0), "UIVI std must be positive and finite, got -1.0"),
        (lambda: bayou.guides.UIVI(steps=0), "UIVI steps"),
        (
            lambda: guide_of(bayou.guides.SIVI(network=lambda size: nn.Flatten(0)), 2),
            r"must map \(n, 16\) to \(n, R\), got \(16,\)",
        ),
    ],
)
def test_invalid_settings_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@BOTH
def test_any_network_of_noise(family):
    """One whose z is larger than its noise."""

    def network(size):
        return nn.Sequential(nn.Linear(size, 7), nn.Tanh(), nn.Linear(7, 5))

    _, guide = guide_of(family(draws=1000, latent=2, network=network), 3)
    assert guide.factor.shape == (3, 5)
    guide.draw(2, seed=0).kl.mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in guide.parameters())
