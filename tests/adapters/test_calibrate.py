"""`calibrate` of the estimators: labels, units, files."""

import numpy as np
import pytest

from bayou.adapters.sklearn import BayesClassifier, BayesRegressor

pytestmark = [pytest.mark.filterwarnings("ignore")]


def rows(count, seed):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, 2))
    return x, x[:, 0] + 0.5 * generator.normal(size=count)


def test_a_classifier_is_calibrated_by_its_labels(tmp_path):
    x, y = rows(160, 0)
    names = np.where(y > 0, "yes", "no")
    model = BayesClassifier("mle", steps=200, random_state=0).fit(x[:60], names[:60])
    before = model.predict_proba(x[60:])
    result = model.calibrate(x[60:], names[60:], map="vector")
    after = model.predict_proba(x[60:])
    right = np.searchsorted(model.classes_, names[60:])
    nll = -np.log(after[np.arange(100), right]).mean()
    assert nll == pytest.approx(result.after)
    assert result.after < -np.log(before[np.arange(100), right]).mean()
    model.save(tmp_path / "model.bayou")
    loaded = BayesClassifier.load(tmp_path / "model.bayou")
    assert np.array_equal(loaded.predict_proba(x[60:]), after)
    with pytest.raises(ValueError, match="is none of the"):
        model.calibrate(x[60:], np.full(100, "maybe"))


def test_a_regressor_is_calibrated_in_the_units_of_y(tmp_path):
    x, y = rows(160, 0)
    y = 100 * y + 7
    model = BayesRegressor("map", steps=100, random_state=0).fit(x[:60], y[:60])
    result = model.calibrate(x[60:], y[60:], map="isotonic")
    assert result.map == "isotonic"
    low, high = model.predict_interval(x[60:], 0.8)
    inside = (low <= y[60:]) & (y[60:] <= high)
    assert inside.mean() == pytest.approx(0.8, abs=0.1)
    assert (high - low).mean() > 50
    model.save(tmp_path / "model.bayou")
    loaded = BayesRegressor.load(tmp_path / "model.bayou")
    assert np.array_equal(loaded.predict_interval(x[60:], 0.8)[0], low)
