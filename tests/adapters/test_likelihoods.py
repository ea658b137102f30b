"""``BayesRegressor`` with a likelihood by name."""

import numpy as np
import pytest
import torch

import bayou
from bayou.adapters.sklearn import BayesRegressor

pytestmark = pytest.mark.filterwarnings("ignore::bayou.core.progress.BayouWarning")
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(60, 2))
PRICES = np.exp(8 + X[:, 0] + 0.3 * GENERATOR.normal(size=60))
FLAGS = (np.arange(60) % 3 > 0).astype(float)


@pytest.mark.parametrize(
    "likelihood", ["lognormal", "gamma", "weibull", "heteroscedastic-lognormal"]
)
@pytest.mark.parametrize("method", ["map", bayou.MAP(steps=60)], ids=["name", "object"])
def test_prices_are_predicted_in_their_units(method, likelihood, tmp_path):
    settings = {"steps": 60} if method == "map" else {}
    model = BayesRegressor(method, likelihood=likelihood, random_state=0, **settings)
    model.fit(X, PRICES)
    low, high = model.predict_interval(X)
    mean, std = model.predict(X, return_std=True)
    assert mean.shape == std.shape == low.shape == (60,)
    assert (low > 0).all()
    inside = ((low <= PRICES) & (high >= PRICES)).mean()
    assert inside > 0.6
    model.save(tmp_path / "model.bayou")
    loaded = BayesRegressor.load(tmp_path / "model.bayou")
    np.testing.assert_array_equal(loaded.predict(X), mean)


def test_a_likelihood_object_of_positive_targets_is_fitted_in_their_units():
    likelihood = bayou.likelihoods.LogNormal(0.5, learn=True)
    model = BayesRegressor("map", likelihood=likelihood, steps=60, random_state=0).fit(X, PRICES)
    assert (model.predictive(X).quantile(0.05) > 0).all()
    assert 0.2 * PRICES.mean() < model.predict(X).mean() < 5 * PRICES.mean()


def test_censored_times_have_two_columns():
    y = np.stack((PRICES, FLAGS), 1)
    model = BayesRegressor("map", likelihood="censored-weibull", steps=60, random_state=0).fit(X, y)
    assert model.predict(X).shape == (60, 1)
    assert model.predictive(X).log_prob(torch.as_tensor(y)).isfinite().all()


@pytest.mark.parametrize(
    ("likelihood", "message"),
    [("lognormall", "did you mean 'lognormal'"), ("ordinal", "for classes")],
)
def test_wrong_names_are_errors(likelihood, message):
    with pytest.raises(ValueError, match=message):
        BayesRegressor("map", likelihood=likelihood).fit(X, PRICES)
