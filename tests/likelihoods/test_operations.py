"""Operations on posteriors with likelihoods of positive numbers, counts and ordered classes."""

import copy
import functools

import pytest
import torch
from torch import nn

import bayou
from bayou.likelihoods import Gamma, LogNormal, NegativeBinomial, Ordinal, Weibull
from bayou.operations.export import export
from bayou.select.recipes import Standardized

pytestmark = pytest.mark.filterwarnings("ignore::bayou.core.progress.BayouWarning")
F64 = torch.float64
ROWS = 300


def draws(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


X = draws(ROWS, 2)
LOG = X[:, :1] - 0.5 * X[:, 1:]
TARGETS = {
    "lognormal": torch.exp(LOG + 0.4 * draws(ROWS, 1, seed=1)),
    "gamma": Gamma(4.0).bind(dtype=F64).sample(LOG, seed=1),
    "weibull": Weibull(2.0).bind(dtype=F64).sample(LOG, seed=1),
    "negative-binomial": NegativeBinomial(0.5).bind(dtype=F64).sample(LOG + 1, seed=1),
    "ordinal": Ordinal(3, (-1.0, 1.0), learn=False).bind(dtype=F64).sample(LOG, seed=1),
}


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def fitted(name, method="map", rows=100, **settings):
    recipe = bayou.select.by_name(method, **({"steps": 200} | settings))
    data = X[:rows], TARGETS[name][:rows]
    return bayou.fit(network(), data, recipe, likelihood=name, progress=False)


@pytest.fixture(scope="module")
def fit_once():
    """Each likelihood is fitted once, by ``map`` to 100 rows, for tests that leave it as it is."""
    return functools.cache(fitted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lognormal", "gamma", "weibull", "negative-binomial"])
def test_conformal_intervals_have_their_coverage_and_stay_positive(name, fit_once):
    posterior = fit_once(name)
    guarantee = bayou.conformal(posterior, (X[100:200], TARGETS[name][100:200]), level=0.8)
    low, high = guarantee.interval(X[200:])
    y = TARGETS[name][200:]
    share = float(((low <= y) & (y <= high)).double().mean())
    assert share > 0.8 - 4 * (0.16 / 50) ** 0.5
    if name == "negative-binomial":
        assert (low >= 0).all()


def test_conformal_sets_of_ordered_classes_have_their_coverage(fit_once):
    posterior = fit_once("ordinal")
    guarantee = bayou.conformal(posterior, (X[100:200], TARGETS["ordinal"][100:200]), level=0.8)
    members = guarantee.set(X[200:])
    share = float(members.gather(-1, TARGETS["ordinal"][200:, None]).double().mean())
    assert share > 0.8 - 4 * (0.16 / 50) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lognormal", "gamma", "weibull", "ordinal"])
def test_a_temperature_lowers_the_nll_of_its_rows_and_is_filed(name, fit_once, tmp_path):
    posterior = copy.deepcopy(fit_once(name))
    calibration = bayou.calibrate(posterior, (X[100:], TARGETS[name][100:]))
    assert calibration.after <= calibration.before
    posterior.save(tmp_path / "posterior.bayou")
    loaded = bayou.load(tmp_path / "posterior.bayou", network())
    log_prob = posterior.predict(X).log_prob(TARGETS[name])
    assert torch.allclose(loaded.predict(X).log_prob(TARGETS[name]), log_prob)
    assert -float(log_prob[100:].mean()) == pytest.approx(calibration.after, abs=1e-6)


def test_counts_have_no_temperature(fit_once):
    with pytest.raises(ValueError, match="neither logits nor a noise scale"):
        bayou.calibrate(fit_once("negative-binomial"), (X, TARGETS["negative-binomial"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lognormal", "gamma"])
@pytest.mark.parametrize("method", ["ensemble", "mnf", "ivon", "vbll"])
def test_methods_by_name_fit_predict_and_file_positive_targets(name, method, tmp_path):
    """With 10 rows no noise is selected, and chains sample it."""
    for rows in (10, 60):
        posterior = fitted(name, method, rows, steps=20, effort=0.1)
        log_prob = posterior.predict(X).log_prob(TARGETS[name])
        assert log_prob.isfinite().all()
        posterior.save(tmp_path / f"{rows}.bayou")
        loaded = bayou.load(tmp_path / f"{rows}.bayou", network())
        assert torch.allclose(loaded.predict(X).log_prob(TARGETS[name]), log_prob)


@pytest.mark.slow
def test_a_log_normal_posterior_is_exported(fit_once):
    posterior = fit_once("lognormal")
    program = export(posterior, X[:5], 1, answers=("mean", "std"))
    p = posterior.predict(X[:5], 1)
    exported = program.module()(X[:5])
    assert torch.allclose(exported["mean"], p.mean)
    assert torch.allclose(exported["std"], p.std)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lognormal", "ordinal"])
def test_a_student_of_such_a_posterior_is_an_error(name, fit_once):
    with pytest.raises(ValueError, match="distill supports classes and real numbers"):
        bayou.distill(fit_once(name), network(), X, progress=False)


def test_a_censored_fit_without_censored_rows_is_that_of_the_times():
    """A censored fit of rows without censoring is the fit of the times alone."""
    y = TARGETS["lognormal"][:60]
    method = bayou.MAP(steps=50)
    plain = bayou.fit(
        network(), (X[:60], y), method, likelihood=LogNormal(0.5, learn=True), progress=False
    )
    flags = torch.ones_like(y)
    censored = bayou.fit(
        network(),
        (X[:60], torch.cat((y, flags), 1)),
        method,
        likelihood=bayou.likelihoods.Censored(LogNormal(0.5, learn=True)),
        progress=False,
    )
    assert torch.allclose(censored.predict(X).outputs, plain.predict(X).outputs)


@pytest.mark.parametrize("name", ["lognormal", "gamma"])
def test_chains_that_sample_the_noise_in_units_of_the_fit_are_filed(name, tmp_path):
    start = bayou.MAP(steps=10)
    chains = bayou.HMC(draws=3, warmup=3, chains=1, leapfrogs=3, start=start)
    y = 1000 * TARGETS[name][:20]
    method = Standardized(chains)
    posterior = bayou.fit(network(), (X[:20], y), method, likelihood=name, progress=False)
    assert any(key.startswith("likelihood.") for key in posterior.stack)
    log_prob = posterior.predict(X[:20]).log_prob(y)
    assert log_prob.isfinite().all()
    posterior.save(tmp_path / "posterior.bayou")
    loaded = bayou.load(tmp_path / "posterior.bayou", network())
    assert torch.allclose(loaded.predict(X[:20]).log_prob(y), log_prob)


def test_the_network_of_infinite_width_takes_log_normal_targets(tmp_path):
    """It is that of log y: the same functions, and p(y) = p(log y)/y."""
    y = 1000 * TARGETS["lognormal"]
    rows = (X[:40], y[:40])
    of_y = bayou.fit(network(), rows, "wide", likelihood="lognormal", progress=False)
    of_log = bayou.fit(network(), (X[:40], y[:40].log()), "wide", progress=False)
    log_prob = of_y.predict(X[40:60]).log_prob(y[40:60])
    log_y = y[40:60].log()
    expected = of_log.predict(X[40:60]).log_prob(log_y) - log_y.flatten()
    assert torch.allclose(log_prob, expected)
    drawn = of_y.predict(X[40:60], 50)
    assert bool((drawn.quantile(0.05) > 0).all())
    assert drawn.log_prob(y[40:60]).isfinite().all()
    of_y.save(tmp_path / "posterior.bayou")
    loaded = bayou.load(tmp_path / "posterior.bayou", network())
    assert torch.allclose(loaded.predict(X[40:60]).log_prob(y[40:60]), log_prob)
