"""Samplers without a step size: they find one in the burn-in, and say whether the chains have
mixed.
"""

import math

import pytest
import torch
from torch import nn

import bayou
from bayou import metrics
from bayou.core.progress import Progress
from bayou.inference.probe import ChainProbe
from bayou.kernels import Joint
from bayou.network import Network
from bayou.network.target import Target
from bayou.training.data import as_data

F64 = torch.float64
ADAPTING = [bayou.SGLD, bayou.SGHMC, bayou.PSGLD]


def linear_data():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=F64) * torch.tensor(
        [3.0, 1.0, 0.3]
    )
    return x, x.sum(1, keepdim=True)


def logistic_data(weights, rows):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, len(weights), generator=generator, dtype=F64) * torch.linspace(
        1, 2, len(weights), dtype=F64
    )
    odds = x @ torch.tensor(weights, dtype=F64).unsqueeze(1)
    return x, torch.bernoulli(torch.sigmoid(odds), generator=generator)


def fitted(method, net, data, likelihood, **options):
    return bayou.fit(net, data, method, likelihood=likelihood, **options)


def linear(inputs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(inputs, 1, bias=False, dtype=F64)


def linear_fit(method):
    return fitted(method, linear(3), linear_data(), bayou.Gaussian(0.5))


def linear_hessian():
    """XᵀX/σ² + I, and its largest eigenvalue."""
    x, _ = linear_data()
    hessian = x.T @ x / 0.25 + torch.eye(3, dtype=F64)
    return hessian, torch.linalg.eigvalsh(hessian)[-1].item()


def logistic_fit(method, rows, **options):
    return fitted(method, linear(2), rows, bayou.Bernoulli(), **options)


def test_the_curvature_is_the_largest_eigenvalue():
    """Of XᵀX/σ² + I, and of G^½·(XᵀX/σ² + I)·G^½, in every chain."""
    x, y = linear_data()
    net = linear(3)
    target = Target.build(net, bayou.Gaussian(0.5), None, len(x))
    joint = Joint(target, Network(net), target.start())
    w = joint.start + torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    hessian, _ = linear_hessian()
    g = torch.tensor([[0.01, 1.0, 30.0]] * 4, dtype=F64)
    scaled = g[0].sqrt().diag() @ hessian @ g[0].sqrt().diag()
    for batch_size in (40, 7):
        probe = ChainProbe(joint, as_data((x, y), batch_size), 0, w)
        for found, matrix in ((probe.curvature(w, 0), hessian), (probe.curvature(w, 0, g), scaled)):
            torch.testing.assert_close(
                found, torch.linalg.eigvalsh(matrix)[-1].expand(4), rtol=1e-3, atol=0
            )


@pytest.mark.parametrize(("batch_size", "share"), [(40, 0.5), (30, 0.5), (8, 8 / 32)])
def test_the_step_follows_from_curvature_and_batches(batch_size, share):
    """h·λ = min(½, M/(N − M)) for SGLD; a batch of 30 of 40 is one of two, so 20 on average."""
    method = bayou.SGLD(steps=20, draws=2, batch_size=batch_size)
    p = linear_fit(method)
    _, largest = linear_hessian()
    assert p.history[-1]["lr"] * largest == pytest.approx(share, rel=1e-3)
    method = bayou.SGHMC(steps=20, draws=2, batch_size=8, friction=0.2)
    heavy = linear_fit(method)
    assert heavy.history[-1]["lr"] * largest == pytest.approx(0.2 * 8 / 32, rel=1e-3)


def test_a_chain_that_is_lost_in_the_burn_in_goes_on_with_smaller_steps(monkeypatch):
    """A curvature that is 40 times too small means h = 20/λ, where SGLD runs away; it must halve to
    below 4/λ.
    """
    _, largest = linear_hessian()
    true = ChainProbe.curvature
    monkeypatch.setattr(ChainProbe, "curvature", lambda *args: true(*args) / 40)
    method = bayou.SGLD(steps=800, draws=19, chains=2, batch_size=40, start=None)
    p = linear_fit(method)
    assert p.history[0]["lr"] == pytest.approx(20 / largest, rel=1e-3)
    assert p.history[-1]["lr"] < 4 / largest
    assert (p.stack["weight"].flatten(1) - 1).abs().max() < 3


def test_a_killed_run_goes_on_bit_for_bit_in_the_middle_of_its_burn_in(tmp_path, monkeypatch):
    class Stop(BaseException):
        pass

    update = Progress.update

    def stop(self, step, **numbers):
        update(self, step, **numbers)
        if self.title == "PSGLD" and step == 71:
            raise Stop

    rows = logistic_data([1.0, -0.5], 30)
    method = bayou.PSGLD(
        steps=160, draws=5, chains=2, batch_size=8, checkpoint_every=10, start=None
    )
    whole = logistic_fit(method, rows)
    monkeypatch.setattr(Progress, "update", stop)
    with pytest.raises(Stop):
        logistic_fit(method, rows, checkpoint=tmp_path / "run")
    monkeypatch.undo()
    again = logistic_fit(method, rows, checkpoint=tmp_path / "run")
    assert torch.equal(again.stack["weight"], whole.stack["weight"])
    assert again.history[-1]["lr"] == whole.history[-1]["lr"]


def exact_logistic(x, y, reach=6.0):
    """Mean and standard deviation of two weights with the prior N(0, 1), by a sum over a grid."""
    axis = torch.linspace(-reach, reach, 301, dtype=F64)
    w = torch.cartesian_prod(axis, axis)  # (G, 2)
    f = w @ x.T
    log_p = (y.squeeze(1) * f - nn.functional.softplus(f)).sum(1) - 0.5 * w.square().sum(1)
    p = log_p.softmax(0).unsqueeze(1)
    mean = (p * w).sum(0)
    return mean, (p * (w - mean).square()).sum(0).sqrt()


@pytest.mark.parametrize("make", ADAPTING)
@pytest.mark.slow
def test_default_settings_sample_a_logistic_regression(make):
    x, y = logistic_data([1.0, -0.7], 60)
    p = logistic_fit(make(), (x, y))
    mean, std = exact_logistic(x, y)
    w = p.stack["weight"][:, 0]
    assert ((w.mean(0) - mean) / std).abs().max() < 0.3
    assert (w.std(0) / std - 1).abs().max() < 0.25
    assert p.mixing["mixed"]


def sine():
    """The network and the data of the README."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.rand(200, 1) * 4 - 2
        y = torch.sin(2 * x) + 0.1 * torch.randn(200, 1)
        return nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)), (x, y)


@pytest.mark.parametrize(
    ("make", "steps"),
    [(bayou.SGLD, 200), pytest.param(bayou.SGHMC, None, marks=pytest.mark.slow)],
)
@pytest.mark.filterwarnings(
    "ignore::bayou.MixingWarning"
)  # 151 weights do not mix in so few steps, and it says so
def test_the_network_of_the_readme_does_not_run_away(make, steps):
    net, (x, y) = sine()
    p = fitted(make(steps=steps, chains=2), net, (x, y), bayou.Gaussian(0.1))
    assert p.mixing["below_start"] < 151 + 5 * math.sqrt(151 / 2)
    limit = 0.12 if steps is None else 0.3
    assert (p.predict(x).mean - y).square().mean().sqrt() < limit


def friedman(seed, rows):
    """y = 10·sin(π·x₁x₂) + 20·(x₃ − ½)² + 10·x₄ + 5·x₅ + ε, in units of its standard deviation
    (Friedman 1991).
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 10, generator=generator)
    y = (
        10 * torch.sin(math.pi * x[:, 0] * x[:, 1])
        + 20 * (x[:, 2] - 0.5).square()
        + 10 * x[:, 3]
        + 5 * x[:, 4]
    )
    y = y + torch.randn(rows, generator=generator)
    return (x - 0.5) * math.sqrt(12), ((y - 14.4) / 4.9).unsqueeze(1)


def test_a_learned_noise_does_not_start_at_interpolation():
    """601 weights go through 60 rows: chains from a joint mode of weights and noise cover .48 of
    .9, −log p is 3.4.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1))
    x, y = friedman(1, 1000)
    method = bayou.SGLD(steps=250, chains=1, draws=10)
    likelihood = bayou.Gaussian(0.5, learn=True)
    prior = bayou.Normal("fan_in", gain=2.0)
    p = fitted(method, net, friedman(0, 60), likelihood, prior=prior).predict(x)
    assert metrics.coverage(p, y, 0.9) > 0.75
    assert metrics.nll(p, y) < 1.3  # a constant with its own spread has 1.42


def test_mixing_is_kept_with_the_posterior(tmp_path):
    method = bayou.HMC(draws=150, warmup=80, leapfrogs=8, start=None)
    p = linear_fit(method)
    assert p.mixing["mixed"]
    assert p.mixing["r_hat_median"] <= p.mixing["r_hat"] < 1.1
    assert p.mixing["ess_median"] >= p.mixing["ess"] > 50
    assert p.mixing["divergences"] == 0
    assert 0.5 < p.mixing["accept"] <= 1
    assert f"R-hat {p.mixing['r_hat']:.3g}, ESS {p.mixing['ess']:.0f})" in repr(p)
    p.save(tmp_path / "p.bayou")
    loaded = bayou.load(tmp_path / "p.bayou", linear(3))
    assert loaded.mixing == p.mixing


def test_no_verdict_on_a_handful_of_draws():
    p = linear_fit(bayou.SGLD(steps=40, draws=10, lr=1e-9))
    assert not p.mixing["enough"]
    assert "mixed" not in p.mixing


def test_chains_that_stand_still_and_chains_that_are_lost_are_named():
    still = bayou.SGLD(steps=60, draws=30, lr=1e-9, dispersal=1.0)
    with pytest.warns(
        bayou.MixingWarning, match=r"SGLD have not mixed: R-hat is \d+.*effective sample size is \d"
    ):
        p = linear_fit(still)
    assert repr(p).endswith("not mixed)")
    _, largest = linear_hessian()
    wild = bayou.SGLD(
        steps=400, draws=100, lr=3.96 / largest, start=bayou.MAP(steps=300, lr=0.05), batch_size=40
    )
    with pytest.warns(bayou.MixingWarning, match="nats below the start"):
        linear_fit(wild)
