"""Fits with likelihoods by name and by object: units, noises of outputs and rows, files."""

import math

import pytest
import torch
from torch import nn

import bayou
from bayou.likelihoods import (
    Censored,
    Gamma,
    Gaussian,
    HeteroscedasticGaussian,
    KnownNoise,
    Log,
    LogNormal,
    NegativeBinomial,
    Ordinal,
    Weibull,
    list_likelihoods,
)

pytestmark = pytest.mark.filterwarnings("ignore::bayou.core.progress.BayouWarning")
F64 = torch.float64
ROWS = 40


def draws(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


X = draws(ROWS, 2)
SLOPES = torch.tensor([[0.5], [-0.3]], dtype=F64)
TIMES = 50 * torch.exp(X @ SLOPES + 0.3 * draws(ROWS, 1, seed=1))
FLAGS = (torch.arange(ROWS) % 3 > 0).to(F64).unsqueeze(1)
NEW = draws(5, 2, seed=2)


def network(outputs=1, hidden=4):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def fit_by_name(likelihood, y, outputs=1, method="map", **options):
    recipe = bayou.select.by_name(method, steps=60)
    data = (X, y)
    return bayou.fit(
        network(outputs), data, recipe, likelihood=likelihood, progress=False, **options
    )


TARGETS = {
    "gaussian": TIMES,
    "gaussian-per-output": torch.cat((TIMES, TIMES + draws(ROWS, 1)), 1),
    "heteroscedastic": TIMES,
    "heteroscedastic-softplus": TIMES,
    "student-t": TIMES,
    "lognormal": TIMES,
    "heteroscedastic-lognormal": TIMES,
    "gamma": TIMES,
    "weibull": TIMES,
    "censored-weibull": torch.cat((TIMES, FLAGS), 1),
    "censored-lognormal": torch.cat((TIMES, FLAGS), 1),
    "poisson": TIMES.round(),
    "negative-binomial": TIMES.round(),
    "known-noise": torch.cat((TIMES, 0.1 * TIMES), 1),
    "categorical": (TIMES[:, 0] > 50).long(),
    "bernoulli": (TIMES > 50).to(F64),
    "ordinal": torch.bucketize(TIMES[:, 0], torch.tensor([35.0, 60.0], dtype=F64)),
}
OUTPUTS = {"gaussian-per-output": 2, "categorical": 2}


@pytest.mark.parametrize("name", TARGETS)
def test_a_likelihood_by_name_is_fitted_saved_and_loaded(name, tmp_path):
    y = TARGETS[name]
    outputs = 2 if name.startswith("hetero") else OUTPUTS.get(name, 1)
    posterior = fit_by_name(name, y, outputs)
    predictive = posterior.predict(X)
    assert predictive.log_prob(y).isfinite().all()
    assert {check.status for check in posterior.checks} <= {"ok", "warning", "failed"}
    posterior.save(tmp_path / "posterior.bayou")
    loaded = bayou.load(tmp_path / "posterior.bayou", network(outputs))
    assert torch.equal(loaded.predict(NEW).outputs, posterior.predict(NEW).outputs)
    assert torch.equal(loaded.predict(X).log_prob(y), predictive.log_prob(y))


def test_all_names_are_tested():
    assert set(TARGETS) == set(list_likelihoods())


def test_a_log_normal_by_name_is_the_gaussian_of_log_y():
    """The same functions, p(y) = p(log y)/y, and an evidence with the same Jacobian."""
    of_log = fit_by_name("gaussian", TIMES.log(), method="laplace")
    of_y = fit_by_name("lognormal", TIMES, method="laplace")
    assert isinstance(of_y.target.likelihood_spec, Log)
    expected = of_log.predict(NEW)
    predictive = of_y.predict(NEW)
    assert torch.allclose(predictive.outputs, expected.outputs)
    y = torch.tensor([[20.0], [40.0], [50.0], [80.0], [200.0]], dtype=F64)
    jacobian = y.log().flatten()
    assert torch.allclose(predictive.log_prob(y), expected.log_prob(y.log()) - jacobian)
    assert torch.allclose(predictive.quantile(0.9), expected.quantile(0.9).exp())
    log_evidence = of_log.log_evidence - float(TIMES.log().sum())
    assert of_y.log_evidence == pytest.approx(log_evidence, abs=1e-6)
    assert "standard deviations of log y" in of_y.plan


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("lognormal", 1),
        ("heteroscedastic-lognormal", 2),
        ("heteroscedastic-softplus", 2),
        ("gamma", 1),
        ("weibull", 1),
    ],
)
def test_predictions_scale_with_y(name, outputs):
    p = fit_by_name(name, TIMES, outputs).predict(NEW)
    scaled = fit_by_name(name, 1024 * TIMES, outputs).predict(NEW)
    for q in (0.1, 0.5, 0.9):
        assert torch.allclose(scaled.quantile(q), 1024 * p.quantile(q), rtol=1e-3)
    assert torch.allclose(scaled.std, 1024 * p.std, rtol=1e-3)


def test_censored_times_have_units_and_their_history_has_the_jacobian():
    y = torch.cat((TIMES, FLAGS), 1)
    scaled_y = torch.cat((1024 * TIMES, FLAGS), 1)
    posterior = fit_by_name("censored-lognormal", y)
    scaled = fit_by_name("censored-lognormal", scaled_y)
    assert torch.allclose(scaled.predict(NEW).mean, 1024 * posterior.predict(NEW).mean, rtol=1e-3)
    last = posterior.history[-1]["log_likelihood"]
    total = float(posterior.predict(X).log_prob(y).sum())
    assert last == pytest.approx(total, abs=0.2)
    shift = scaled.history[-1]["log_likelihood"] - last
    assert shift == pytest.approx(-math.log(1024) * float(FLAGS.sum()), abs=0.2)


@pytest.mark.slow
def test_known_noise_is_weighted_least_squares():
    """The posterior of a linear network: precision XᵀWX + I, W = diag(1/std²)."""
    net = nn.Linear(2, 1).double()
    std = 0.2 + draws(ROWS, 1, seed=3).abs()
    value = X @ SLOPES + 0.7 + std * draws(ROWS, 1, seed=4)
    y = torch.cat((value, std), 1)
    method = bayou.Laplace("full", start=bayou.MAP(steps=2000, lr=0.05))
    posterior = bayou.fit(
        net, (X, y), method, likelihood=KnownNoise(), prior=bayou.Normal(1.0), progress=False
    )
    design = torch.cat((X, torch.ones(ROWS, 1, dtype=F64)), 1)
    precision = design.T @ (design / std.square()) + torch.eye(3, dtype=F64)
    covariance = precision.inverse()
    mean = covariance @ design.T @ (value / std.square())
    new = torch.cat((NEW, torch.ones(5, 1, dtype=F64)), 1)
    predictive = posterior.using("exact").predict(NEW)
    assert torch.allclose(predictive.mean, new @ mean, atol=2e-3)
    variance = ((new @ covariance) * new).sum(1, keepdim=True)
    assert torch.allclose(predictive.std, variance.sqrt(), rtol=1e-4)
    noise = torch.full((5, 1), 0.3, dtype=F64)
    log_prob = predictive.log_prob(torch.cat((predictive.mean, noise), 1))
    expected = torch.distributions.Normal(0.0, (variance + 0.09).sqrt()).log_prob(new @ mean * 0)
    assert torch.allclose(log_prob, expected.flatten(), atol=1e-4)


@pytest.mark.slow
def test_each_output_learns_its_noise():
    stds = torch.tensor([0.1, 1.0], dtype=F64)
    x = draws(400, 2, seed=5)
    y = x @ torch.tensor([[1.0, -1.0], [0.5, 2.0]], dtype=F64) + stds * draws(400, 2, seed=6)
    posterior = bayou.fit(
        nn.Linear(2, 2).double(),
        (x, y),
        bayou.MAP(steps=1500, lr=0.02),
        likelihood=Gaussian((0.5, 0.5), learn=True),
        prior=bayou.Normal(10.0),
        progress=False,
    )
    residual = (y - posterior.predict(x).mean).square().mean(0).sqrt()
    learned = posterior.target.likelihood.log_scale.detach().exp()
    assert torch.allclose(learned, residual, rtol=0.02)
    assert torch.allclose(learned, stds, rtol=0.15)


METHODS = {
    "vi": bayou.VI(bayou.MeanField(), steps=20),
    "laplace": bayou.Laplace("full", start=bayou.MAP(steps=20)),
    "hmc": bayou.HMC(draws=3, warmup=3, chains=1, leapfrogs=4, start=bayou.MAP(steps=20)),
    "ensemble": bayou.Ensemble(2, of=bayou.MAP(steps=20)),
}
SPECS = {
    "two noises": (Gaussian((0.5, 0.7), learn=True), TARGETS["gaussian-per-output"] / 50, 2),
    "lognormal": (LogNormal(0.5, learn=True), TIMES / 50, 1),
    "gamma": (Gamma(2.0, learn=True), TIMES / 50, 1),
    "weibull": (Censored(Weibull(2.0, learn=True)), torch.cat((TIMES / 50, FLAGS), 1), 1),
    "negative binomial": (NegativeBinomial(1.0, learn=True, unit=50.0), TIMES.round(), 1),
    "ordinal": (Ordinal(3), TARGETS["ordinal"], 1),
    "softplus": (HeteroscedasticGaussian(transform="softplus"), TIMES / 50, 2),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SPECS)
def test_every_kind_of_method_fits_and_files_the_likelihood(name, method, tmp_path):
    spec, y, outputs = SPECS[name]
    posterior = bayou.fit(
        network(outputs), (X, y), METHODS[method], likelihood=spec, progress=False
    )
    log_prob = posterior.predict(X).log_prob(y)
    assert log_prob.isfinite().all()
    posterior.save(tmp_path / "posterior.bayou")
    loaded = bayou.load(tmp_path / "posterior.bayou", network(outputs))
    assert torch.allclose(loaded.predict(X).log_prob(y), log_prob)


@pytest.mark.parametrize(
    ("likelihood", "y", "message"),
    [
        ("log-normal", TIMES, r"no likelihood 'log-normal' \(did you mean 'lognormal'\?\)"),
        ("lognormal", TIMES - 50, "needs y > 0"),
        ("gamma", TIMES - 50, "needs y > 0"),
        ("censored-lognormal", TIMES, r"two numbers for each value .* \(40, 1\)"),
        ("known-noise", TIMES, r"two numbers for each value .* \(40, 1\)"),
    ],
)
def test_wrong_names_and_targets_are_errors(likelihood, y, message):
    with pytest.raises(ValueError, match=message):
        fit_by_name(likelihood, y)
