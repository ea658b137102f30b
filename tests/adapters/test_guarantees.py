"""Estimators with a guarantee: intervals and sets by rows that a fit has not seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_iris

from bayou.adapters.sklearn import BayesClassifier, BayesRegressor

QUICKER: dict[str, Any] = {"steps": 25, "lr": 0.05, "hidden": (10,), "samples": 5}
pytestmark = pytest.mark.usefixtures("short_search")


def test_intervals_with_a_guarantee_are_those_of_the_rows_held_out(tmp_path: Path) -> None:
    """In the units of y; a fit leaves its rows out, and is the same as one that never had them."""
    X, y, fresh = (
        np.linspace(-1, 1, 120)[:, None],
        50 + 7 * np.linspace(-1, 1, 120),
        np.linspace(-1, 1, 11)[:, None],
    )
    y = y + np.random.default_rng(0).normal(size=120)
    model = BayesRegressor("map", conformal=0.25, random_state=0, **QUICKER).fit(X, y)
    assert model.held_x_.shape == (30, 1)
    rest = ~np.isin(X[:, 0], model.held_x_[:, 0])
    assert rest.sum() == 90
    apart = BayesRegressor("map", random_state=0, **QUICKER).fit(X[rest], y[rest])
    np.testing.assert_array_equal(apart.predict(X), model.predict(X))
    with pytest.raises(
        ValueError, match="no rows were held out for a guarantee: fit with conformal=0.2"
    ):
        apart.predict_interval(X, conformal=True)
    low, high = model.predict_interval(fresh, 0.8, conformal=True)
    lower, upper = model.predict_interval(
        X[~rest], 0.8
    )  # the widest errors of the posterior's own, by hand
    reach = np.sort(np.maximum(lower - y[~rest], y[~rest] - upper))[25 - 1]  # ⌈31·.8⌉
    own = model.predict_interval(fresh, 0.8)
    np.testing.assert_allclose(low, own[0] - reach, rtol=1e-9)
    np.testing.assert_allclose(high, own[1] + reach, rtol=1e-9)
    model.save(tmp_path / "m.bayou")
    again = BayesRegressor.load(tmp_path / "m.bayou").predict_interval(fresh, 0.8, conformal=True)
    np.testing.assert_array_equal((low, high), again)
    with pytest.raises(
        ValueError, match="30 held-out rows are too few for level=0.99; it needs at least 99"
    ):
        model.predict_interval(fresh, 0.99, conformal=True)
    assert not hasattr(model.set_params(conformal=None).fit(X, y), "held_x_")


def test_sets_with_a_guarantee(tmp_path: Path) -> None:
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    model = BayesClassifier("map", conformal=0.4, random_state=0, **QUICKER).fit(X, names)
    mask = model.predict_set(X, 0.9)
    assert (mask.shape, mask.dtype) == ((150, 3), np.dtype(bool))
    held = np.isin(np.arange(150), [np.flatnonzero((row == X).all(1))[0] for row in model.held_x_])
    assert (
        mask[held, y[held]].mean() >= 0.9
    )  # of the rows that set the threshold, ⌈61·.9⌉ of 60 at least
    assert model.predict_set(X, 0.9, score="aps", empty=False).any(1).all()
    model.save(tmp_path / "m.bayou")
    np.testing.assert_array_equal(BayesClassifier.load(tmp_path / "m.bayou").predict_set(X), mask)
    for fraction in (1.5, True, 3):
        with pytest.raises(ValueError, match="conformal must be a fraction"):
            BayesClassifier("map", conformal=fraction).fit(X, y)
