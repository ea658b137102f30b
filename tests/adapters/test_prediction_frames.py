"""Data frames of predictions, and the estimators under scikit-learn's metadata routing."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_validate

import bayou
from bayou.adapters.sklearn import BayesClassifier, BayesRegressor

QUICK = {"steps": 25, "lr": 0.05, "hidden": (10,), "samples": 20, "prior": 1.0, "random_state": 0}
NOISE = bayou.Gaussian(0.115)
X = np.random.default_rng(0).standard_normal((60, 3))
WORDS = np.array(["low", "middle", "high"])[np.digitize(X[:, 0], [-0.5, 0.5])]


def test_metadata_is_routed_to_fit() -> None:
    groups = np.arange(60) // 10
    model = BayesRegressor("map", likelihood=NOISE, conformal=0.3, **QUICK)
    with sklearn.config_context(enable_metadata_routing=True):
        with pytest.raises(ValueError, match=r"\[groups\] are passed but are not explicitly set"):
            cross_validate(model, X, X[:, 0], params={"groups": groups}, error_score="raise")
        model.set_fit_request(groups=True, times=False)
        result = cross_validate(
            model,
            X,
            X[:, 0],
            params={"groups": groups},
            cv=GroupKFold(2),
            return_estimator=True,
            error_score="raise",
        )
    # Thirty rows of three groups of ten: whole groups are held out.
    assert [len(fold.held_y_) for fold in result["estimator"]] == [10, 10]
    assert (result["test_score"] > 0.5).all()


def test_a_grid_search_routes_groups_to_its_folds_and_to_the_last_fit() -> None:
    groups = np.arange(60) // 10
    model = BayesRegressor("map", likelihood=NOISE, conformal=0.3, **QUICK)
    with sklearn.config_context(enable_metadata_routing=True):
        model.set_fit_request(groups=True, times=False)
        search = GridSearchCV(model, {"prior": [0.5, 1.0]}, cv=GroupKFold(2), error_score="raise")
        search.fit(X, X[:, 0], groups=groups)
        with pytest.raises(TypeError, match=r"Unexpected args: \{'sample_weight'\} in fit"):
            model.set_fit_request(sample_weight=True)
    assert len(search.best_estimator_.held_y_) == 20  # two whole groups of six
    assert search.best_score_ > 0.5


@pytest.mark.peers
def test_the_frame_of_numbers_has_the_index_of_x() -> None:
    import pandas as pd

    frame = pd.DataFrame(X, columns=list("abc"), index=pd.Index(range(100, 160), name="house"))
    model = BayesRegressor("ffg", likelihood=NOISE, **QUICK).fit(frame, 1000 + 300 * X[:, 0])
    predictions = model.predict_frame(frame[::2], level=0.8)
    assert predictions.index.equals(frame.index[::2])
    assert list(predictions) == ["mean", "std", "epistemic_std", "lower", "upper"]
    mean, std = model.predict(frame[::2], return_std=True)
    lower, upper = model.predict_interval(frame[::2], level=0.8)
    assert_array_equal(predictions["mean"], mean)
    assert_array_equal(predictions["std"], std)
    assert_array_equal(predictions["lower"], lower)
    assert_array_equal(predictions["upper"], upper)
    assert (predictions["epistemic_std"] < predictions["std"]).all()
    assert list(model.feature_names_in_) == ["a", "b", "c"]
    assert isinstance(model.predict(frame), np.ndarray)  # as scikit-learn's estimators


@pytest.mark.peers
@pytest.mark.parametrize("likelihood", [None, "ordinal"])
def test_the_frame_of_classes(likelihood: str | None) -> None:
    order = ["low", "middle", "high"] if likelihood else None
    model = BayesClassifier("ffg", likelihood=likelihood, order=order, **QUICK).fit(X, WORDS)
    predictions = model.predict_frame(X)
    assert_array_equal(predictions["class"], model.predict(X))
    proba = model.predict_proba(X)
    for number, label in enumerate(model.classes_):
        assert_allclose(predictions[f"p[{label}]"], proba[:, number], rtol=1e-12)
    assert_allclose(predictions["probability"], proba.max(1), rtol=1e-12)
    lower, upper = model.predict_interval(X)
    rows = np.arange(60)
    assert_allclose(predictions["lower"], lower[rows, proba.argmax(1)], rtol=1e-9)
    assert_allclose(predictions["upper"], upper[rows, proba.argmax(1)], rtol=1e-9)
    assert (predictions["mutual_information"] > 0).all()
    assert (predictions["mutual_information"] < predictions["entropy"]).all()


@pytest.mark.peers
def test_the_frame_of_several_targets_and_invalid_levels() -> None:
    targets = np.stack([X[:, 0], -X[:, 1]], 1)
    model = BayesRegressor("map", likelihood=NOISE, **QUICK).fit(X, targets)
    predictions = model.predict_frame(X)
    assert list(predictions)[:2] == ["mean[0]", "mean[1]"]
    assert_array_equal(predictions[["mean[0]", "mean[1]"]], model.predict(X))
    assert list(predictions.index) == list(range(60))
    with pytest.raises(ValueError, match="level must lie strictly between 0 and 1, got 1.5"):
        model.predict_frame(X, level=1.5)
