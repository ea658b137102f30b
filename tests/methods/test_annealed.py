"""Draws that are annealed into the posterior: against a regression whose evidence and posterior are
known exactly.
"""

import math
import signal
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

import bayou
from bayou import VI, flows
from bayou.methods import annealed
from bayou.methods.annealed import Annealed
from bayou.posteriors import Empirical, Guided
from bayou.training.seeds import part_seed

F64 = torch.float64

NOISE = 0.3
SHORT = {"steps": 400, "lr": 3e-2, "schedule": "cosine", "batch_size": 30}
FAMILIES = {
    "MeanField": lambda: VI(bayou.MeanField(), **SHORT),
    "MNF": lambda: VI(bayou.MNF(), **SHORT),
    "MNF, published": lambda: VI(bayou.MNF("iaf", auxiliary="paper"), **SHORT),
    "MNF, mixture": lambda: VI(bayou.MNF(None, components=2), **SHORT),
    "LowRank": lambda: VI(bayou.LowRank(2), **SHORT),
    "JointFlow": lambda: VI(bayou.JointFlow(), **SHORT),
    "Inducing": lambda: VI(bayou.Inducing(5), **SHORT),
    "IVON": lambda: bayou.IVON(**SHORT | {"lr": 0.01}, hessian=100.0),
    "Laplace": lambda: bayou.Laplace("full", start=bayou.MAP(**SHORT)),
    "Laplace, diagonal": lambda: bayou.Laplace("diagonal", start=bayou.MAP(**SHORT)),
}


def regression():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, generator=generator, dtype=F64)
    x[:, 1] += x[:, 0]  # so that the posterior has correlations
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=F64)
    net = nn.Linear(3, 1, bias=False).double()
    nn.init.constant_(net.weight, 0.1)
    return net, (x, y + NOISE * torch.randn(30, 1, generator=generator, dtype=F64))


def exact():
    """log evidence, mean and covariance of the weights under N(0, 1)."""
    _, (x, y) = regression()
    eye = torch.eye(30, dtype=F64)
    evidence = MultivariateNormal(torch.zeros(30, dtype=F64), x @ x.mT + NOISE**2 * eye).log_prob(
        y[:, 0]
    )
    covariance = torch.linalg.inv(x.mT @ x / NOISE**2 + torch.eye(3, dtype=F64))
    return float(evidence), covariance @ (x.mT @ y / NOISE**2)[:, 0], covariance


def fitted(method, net=None, **options):
    linear, data = regression()
    options = {
        "likelihood": bayou.Gaussian(NOISE),
        "prior": bayou.Normal(1.0),
        "progress": False,
    } | options
    return bayou.fit(net or linear, data, method=method, **options)


LONG = ("MNF", "MNF, mixture", "LowRank", "JointFlow", "Inducing", "IVON", "Laplace, diagonal")
REACHED = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in LONG))
    for name in FAMILIES
    if name != "MNF, published"  # which takes long to learn
]


@pytest.mark.parametrize("name", REACHED)
def test_the_evidence_and_the_posterior_are_those_of_the_regression(name):
    """log 1/C Σ w is known to its error, E[log w] is below it, and the draws have the moments of
    the posterior.
    """
    evidence, mean, covariance = exact()
    adapt = name == "MeanField"  # the mass is that of the further chains
    method = Annealed(FAMILIES[name](), draws=200, temperatures=50, leapfrogs=5, adapt=adapt)
    posterior = fitted(method)
    assert isinstance(posterior, Empirical)
    assert posterior.draws == 200
    mixing = posterior.mixing
    assert mixing is not None
    assert abs(mixing["log_evidence"] - evidence) < 4 * mixing["log_evidence_error"] + 1e-4
    assert mixing["elbo"] <= mixing["log_evidence"] + 1e-9
    assert mixing["elbo"] - evidence < 4 * mixing["elbo_error"] + 1e-4
    assert mixing["ess"] > 80
    draws = posterior.sample(200, seed=0)["weight"][:, 0]
    error = torch.linalg.solve_triangular(
        torch.linalg.cholesky(covariance), (draws - mean).mT, upper=False
    )  # standard normal
    assert (error.mean(1).abs() < 5 / math.sqrt(200)).all()
    assert (error @ error.mT / 200 - torch.eye(3, dtype=F64)).abs().max() < 5 * math.sqrt(2 / 200)


@pytest.mark.parametrize(
    "name",
    [
        "MeanField",
        "MNF",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("MNF, published", "Inducing")),
    ],
)
def test_with_one_temperature_the_bound_is_the_elbo_of_the_family(name):
    method = replace(FAMILIES[name](), steps=30)  # the identity holds of any q
    one = fitted(Annealed(method, draws=300, temperatures=1, leapfrogs=1))
    q = fitted(method, seed=part_seed(0, "start"))
    bound = bayou.elbo(q, regression()[1], samples=300, seed=3)
    mixing = one.mixing
    assert abs(mixing["elbo"] - bound.value) < 4 * math.hypot(
        mixing["elbo_error"], bound.standard_error
    )


@pytest.mark.parametrize(
    "options", [{}, {"flow": "iaf"}, {"flow": None, "components": 3}, {"auxiliary": "paper"}]
)
def test_coordinates_of_mnf_have_the_density_by_the_inverse_flow(
    options,
):
    """log q(W, z) by the coordinates, and by log q(z) through the inverse and log N(W; zM, σ²)."""
    posterior = fitted(VI(bayou.MNF(**options), steps=20))
    guide = posterior.bayesian.eval().guides[0]
    drawn, v = guide.coordinates(5, 1)
    assert_close(drawn, guide.sample(5, 1))
    found = guide.unfold(v, {})
    assert_close(found.params, drawn)
    z, ladj = guide.gain.push(v[:, :3])
    w = drawn["weight"]
    normal = torch.distributions.Normal(guide.center * z.unsqueeze(1), guide.log_std.exp())
    log_joint = guide.gain.log_prob(z) + normal.log_prob(w).flatten(1).sum(1)
    assert_close(found.log_q - ladj - guide.log_std.sum(), log_joint)
    log_r = guide.auxiliary.log_density(z, guide.center.mT, guide.log_std.exp().mT, w.mT)
    assert_close(found.extra, log_r - log_joint)


@pytest.mark.slow
def test_more_temperatures_are_a_better_bound():
    method = VI(bayou.MeanField(), steps=200, lr=1e-2)  # which has not arrived
    found = [
        fitted(Annealed(method, draws=200, temperatures=count, leapfrogs=5))
        for count in (1, 5, 400)
    ]
    bounds = [posterior.mixing["elbo"] for posterior in found]
    assert bounds[0] < bounds[1] < bounds[2] < exact()[0]
    assert [posterior.checks["annealing"].status for posterior in found] == [
        "warning",
        "warning",
        "ok",
    ]


def test_learned_noise_and_prior_and_frozen_weights_stay(tmp_path):
    """The noise and the prior of VI are those of the draws, in a file too; a frozen bias is the
    network's.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    net[0].bias.requires_grad_(False)
    data = regression()[1]
    of = VI(bayou.MNF(), steps=15, lr=1e-2)
    options = {
        "likelihood": bayou.Gaussian(0.5, learn=True),
        "prior": bayou.Normal("fan_in", learn="units"),
        "net": net,
    }
    posterior = fitted(Annealed(of, draws=6, temperatures=4), **options)
    q = fitted(of, seed=part_seed(0, "start"), **options)
    assert torch.equal(posterior.target.likelihood.log_scale, q.target.likelihood.log_scale)
    assert not posterior.target.learned_priors
    for name, prior in q.bound_priors().items():
        ours = posterior.bound_priors()[name]
        w = torch.randn(2, *prior.shape, dtype=F64)
        assert_close(ours.log_prob(w), prior.log_prob(w))
    assert torch.equal(posterior.to_module(seed=0)[0].bias, net[0].bias)
    posterior.save(tmp_path / "p.bayou")
    loaded = bayou.load(tmp_path / "p.bayou", net)
    assert loaded.mixing == posterior.mixing
    assert torch.equal(
        loaded.predict(data[0], seed=0).outputs, posterior.predict(data[0], seed=0).outputs
    )


def test_learned_priors_must_be_normal():
    with pytest.raises(ValueError, match="only be kept where it is Normal"):
        fitted(Annealed(VI(steps=10**9)), prior=bayou.priors.ScaleMixture(learn=True))


def test_flows_with_estimated_densities_are_errors():
    def estimated(dim):
        return flows.registry("vector")["residual"].build(dim, determinant="roulette")

    made = estimated(3)
    assert made.label.kind is not flows.Ladj.exact
    with pytest.raises(ValueError, match="no density that is known exactly"):
        fitted(Annealed(VI(bayou.MNF(estimated), steps=2), draws=2, temperatures=2))


def test_ctrl_c_returns_the_family_and_the_same_call_continues(tmp_path, monkeypatch):
    method = Annealed(VI(steps=20), draws=4, temperatures=6, leapfrogs=2, checkpoint_every=2)
    whole = fitted(method)
    plain = annealed.beta_schedule

    def pressed(share):
        if share > 0.5:
            signal.raise_signal(signal.SIGINT)
        return plain(share)

    with monkeypatch.context() as patch:
        patch.setattr(annealed, "beta_schedule", pressed)
        stopped = fitted(method, checkpoint=tmp_path / "run")
    assert isinstance(stopped, Guided)
    assert stopped.stopped == "interrupted"
    again = fitted(method, checkpoint=tmp_path / "run")
    assert torch.equal(again.sample(4, seed=0)["weight"], whole.sample(4, seed=0)["weight"])
