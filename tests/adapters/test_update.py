"""``update`` and ``downdate`` of the estimators, with rows in the units of the user."""

import numpy as np
import pytest

import bayou
from bayou.adapters.sklearn import BayesClassifier, BayesRegressor

RNG = np.random.default_rng(0)
X = 50 + 20 * RNG.normal(size=(80, 2))
Y = 1000 + 5 * X[:, 0] - 3 * X[:, 1] + 2 * RNG.normal(size=80)


LAST = bayou.Laplace("full", where="last", start=bayou.MAP(steps=60))


def regressor(method=LAST):
    return BayesRegressor(method, hidden=(8,), random_state=0, likelihood=bayou.Gaussian(0.1))


def test_a_regressor_learns_from_new_rows_in_their_units(tmp_path):
    model = regressor().fit(X[:40], Y[:40])
    first = model.posterior_
    before = float(np.square(model.predict(X[40:]) - Y[40:]).mean())
    assert model.update(X[40:], Y[40:]) is model
    assert model.posterior_.target.n == 80
    assert first.target.n == 40
    assert float(np.square(model.predict(X[40:]) - Y[40:]).mean()) < before
    model.save(tmp_path / "model.bayou")
    loaded = BayesRegressor.load(tmp_path / "model.bayou")
    assert np.array_equal(loaded.predict(X), model.predict(X))
    assert loaded.posterior_.updates.added == 40
    model.downdate(X[40:], Y[40:])
    assert model.posterior_.target.n == 40
    for name, value in model.posterior_.mean().items():
        assert np.allclose(value, first.mean()[name], rtol=1e-8, atol=1e-8)


def test_forgetting_is_passed_on():
    model = regressor().fit(X[:40], Y[:40]).update(X[40:], Y[40:], forget=0.5)
    assert model.posterior_.updates.kept == 0.5


def test_rows_held_out_for_a_guarantee_are_neither_learned_nor_removed():
    model = regressor().fit(X[:40], Y[:40]).conformalize(X[40:60], Y[40:60])
    for change in (model.update, model.downdate):
        with pytest.raises(ValueError, match="20 of 20 held-out rows are also training rows"):
            change(X[40:], Y[40:])
    assert model.posterior_.target.n == 40
    model.update(X[60:], Y[60:])
    lower, upper = model.predict_interval(X[60:], level=0.8, conformal=True)
    assert (lower < upper).all()


def test_new_rows_of_an_estimator_are_checked():
    model = regressor().fit(X[:40], Y[:40])
    with pytest.raises(ValueError, match="features"):
        model.update(X[40:, :1], Y[40:])
    with pytest.raises(ValueError, match=r"y has shape \(40, 1\)"):
        model.update(X[40:], Y[40:, None])
    with pytest.raises(ValueError, match="inconsistent"):
        model.update(X[40:], Y[41:])
    with pytest.raises(ValueError, match="points"):
        regressor(bayou.MAP(steps=5)).fit(X[:40], Y[:40]).update(X[40:], Y[40:])


def test_a_classifier_takes_labels_of_the_fit():
    labels = np.where(Y.mean() < Y, "high", "low")
    model = BayesClassifier("laplace-last", hidden=(8,), random_state=0, steps=50)
    with pytest.raises(ValueError, match="not fitted"):
        model.update(X, labels)
    model.fit(X[:40], labels[:40]).update(X[40:], labels[40:])
    assert model.posterior_.updates.added == 40
    assert model.predict(X).shape == (80,)
    with pytest.raises(ValueError, match="'middle', which is none of the 2 classes"):
        model.update(X[:1], np.array(["middle"]))
