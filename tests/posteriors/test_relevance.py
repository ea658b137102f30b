"""Priors by unit: which inputs matter, by VI and by the evidence of Laplace."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.core import rng
from bayou.priors import UnitNormal

DOUBLE = torch.float64
BY_UNIT = bayou.Normal("fan_in", learn="units")
BY_INPUT = bayou.Normal(1.0, learn="in")
FULL = bayou.Laplace("full", start=None)


def table(columns=6, rows=200):
    """y depends on the first two columns alone."""
    like = torch.zeros((), dtype=DOUBLE)
    x = rng.normal(rows, (columns,), like, seed=0)
    return x, torch.sin(2 * x[:, :1]) + x[:, 1:2] + 0.1 * rng.normal(rows, (1,), like, seed=1)


def make_net(columns=6):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(columns, 10), nn.Tanh(), nn.Linear(10, 1)).to(DOUBLE)


def fit(method, prior=BY_UNIT, net=None, data=None, noise=0.5):
    likelihood = bayou.Gaussian(noise)
    options = {"prior": prior, "likelihood": likelihood, "progress": False}
    return bayou.fit(net or make_net(), data or table(), method, **options)


def linear():
    """Three answers, of which two columns out of four matter; the network is at the least
    squares.
    """
    x, y = table(4, 50)
    y = torch.cat([y, 2 * y, 0.5 * y + x[:, :1]], 1)
    found = nn.Linear(4, 3, bias=False, dtype=DOUBLE)
    with torch.no_grad():
        found.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    return found, (x, y)


def test_vi_learns_the_factors_of_the_closed_form(tmp_path):
    """a_i² = mean_j (m² + σ²)/s²: the scales that make the KL of the fitted q smallest."""
    net, data = linear()
    method = bayou.VI(
        bayou.MeanField(local=False), steps=150, samples=2, lr=3e-2, scale_lr=6e-2, batch_size=50
    )
    posterior = fit(method, BY_INPUT, net, data)
    second = posterior.mean()["weight"].square() + posterior.std()["weight"].square()
    scale = posterior.bound_priors()["weight"].log_scale.exp().detach()
    assert_close(scale[0], second.mean(0).sqrt(), rtol=0.1, atol=0)
    relevance = posterior.relevance()["weight"]
    assert float(relevance.max()) == 1
    assert float(relevance[:2].min()) > 3 * float(relevance[2:].max())
    flat = fit(method, bayou.Normal(1.0, learn=True), net, data)
    with_units, without = (bayou.elbo(q, data, samples=100, seed=0) for q in (posterior, flat))
    assert with_units.value > without.value + 4 * (
        with_units.standard_error + without.standard_error
    )
    posterior.save(tmp_path / "p.bayou")
    loaded = bayou.load(tmp_path / "p.bayou", net)
    assert torch.equal(loaded.relevance()["weight"], relevance)


@pytest.mark.parametrize(
    "guide",
    [
        bayou.MNF(None),
        bayou.LowRank(2),
        bayou.NodeNoise(penalty=True),
        bayou.Inducing(points=4),
    ],
    ids=lambda guide: type(guide).__name__,
)
def test_every_family_learns_a_prior_by_unit(guide):
    posterior = fit(bayou.VI(guide, steps=3))
    relevance = posterior.relevance("*.weight")
    assert {name: value.shape for name, value in relevance.items()} == {
        "0.weight": (6,),
        "2.weight": (10,),
    }
    assert all(
        len(value.unique()) == len(value) for value in relevance.values()
    )  # each of them has moved


def test_an_ensemble_says_the_mean_of_its_members():
    posterior = fit(bayou.Ensemble(2, of=bayou.VI(steps=3)))
    members = [member.relevance()["0.weight"] for member in posterior.components]
    assert_close(posterior.relevance()["0.weight"], torch.stack(members).mean(0))


@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_the_evidence_of_laplace_is_at_mackays_fixed_point(structure):
    """Over s and a: for every input α_i·Σ_j (w_ji² + Σ_ji,ji) = number of its weights, α_i =
    1/(s·a_i)².
    """
    net, data = linear()
    method = bayou.Laplace(structure, start=None)
    posterior = fit(method, BY_INPUT, net, data)
    learned = posterior.target.prior["weight"]
    assert isinstance(learned, UnitNormal)
    bound = posterior.target.priors["weight"]
    second = net.weight.detach().square() + posterior.std()["weight"].square()
    balance = ((-2 * bound.log_scale).exp() * second).sum(0)
    assert_close(balance, torch.full((4,), 3.0, dtype=DOUBLE), rtol=1e-3, atol=0)
    relevance = posterior.relevance()["weight"]
    assert float(relevance[:2].min()) > 3 * float(relevance[2:].max())
    flat = fit(method, bayou.Normal(1.0, learn=True), net, data)
    assert posterior.log_evidence > flat.log_evidence + 1


def test_a_unit_without_weights_has_a_small_scale_not_none():
    """Its evidence has no largest value: the factor stays within bounds."""
    x, y = table(4, 50)
    net = nn.Linear(4, 1, dtype=DOUBLE)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 0.9, 0.0, 0.0]]))
        net.bias.fill_(0.1)
    relevance = fit(FULL, BY_INPUT, net, (x, y)).relevance()["weight"]
    assert relevance.isfinite().all()
    assert float(relevance[2:].max()) < 0.02 < float(relevance[:2].min())


def test_a_kronecker_structure_learns_the_inputs_of_a_linear_regression_as_a_full_one_does():
    """One output and Gaussian noise: A ⊗ G is the whole curvature."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, generator=generator, dtype=DOUBLE)
    y = x @ torch.tensor([[1.0], [0.3], [0.05]], dtype=DOUBLE) + 0.3
    y = y + 0.2 * torch.randn(50, 1, generator=generator, dtype=DOUBLE)
    design = torch.cat([x, torch.ones(50, 1, dtype=DOUBLE)], 1)
    mode = torch.linalg.solve(design.mT @ design + 0.04 * torch.eye(4, dtype=DOUBLE), design.mT @ y)
    net = nn.Linear(3, 1, dtype=DOUBLE)
    with torch.no_grad():
        net.weight.copy_(mode[:3].mT)
        net.bias.copy_(mode[3])
    method = bayou.Laplace("kronecker", curvature="ggn", start=None)
    kronecker = fit(method, BY_INPUT, net, (x, y), noise=0.2)
    relevance = kronecker.relevance()["weight"]
    assert relevance.argsort(descending=True).tolist() == [0, 1, 2]
    # which a full one would tie otherwise: a bias has a scale of its own
    full = fit(FULL, kronecker.target.prior, net, (x, y), noise=0.2)
    assert kronecker.log_evidence == pytest.approx(full.log_evidence, rel=1e-9)
    for name, std in full.std().items():
        assert_close(kronecker.std()[name], std, rtol=1e-8, atol=0)


@pytest.mark.parametrize(
    ("method", "prior", "message"),
    [
        (
            bayou.VI(steps=2),
            bayou.Normal("fan_in", learn=True),
            r"'0.weight' has no factor for each of its inputs.*learn=\"units\"",
        ),
        (
            bayou.Laplace("kronecker", start=bayou.MAP(steps=2)),
            BY_UNIT,
            "Kronecker-factored posterior has one prior scale for all of '0.weight'",
        ),
        (bayou.MAP(steps=2), BY_UNIT, "MAP cannot learn a prior"),
    ],
)
def test_priors_without_factors_have_no_relevance(method, prior, message):
    with pytest.raises(ValueError, match=message):
        fit(method, prior).relevance()
