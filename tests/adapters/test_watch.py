"""The estimators compare new rows with the rows of their fit."""

import numpy as np
import pytest

from bayou.adapters.frames import TableWarning
from bayou.adapters.sklearn import BayesClassifier, BayesRegressor


def rows(count, seed, shift=0.0, noise=0.3):
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(count, 3))
    X[:, 1] += shift
    y = X @ np.array([1.0, -1.0, 0.5]) * 10 + 50 + 10 * noise * generator.normal(size=count)
    return X, y


def test_a_regressor_watches_rows_in_their_units(tmp_path):
    X, y = rows(600, 0)
    model = BayesRegressor("map", steps=200, conformal=0.3, random_state=0).fit(X, y)
    assert model.watch(*rows(150, 1)).verdict == "as expected"
    assert model.watch(*rows(150, 2, noise=0.9)).verdict == "the relation has changed"
    report = model.watch(rows(150, 3, shift=1.0)[0])
    assert (report.verdict, report.relation) == ("inputs have shifted", "cannot tell")
    assert report.significant[0].subject == "x2"
    model.save(tmp_path / "model.bayou")
    loaded = BayesRegressor.load(tmp_path / "model.bayou")
    with pytest.raises(ValueError, match="X_train"):
        loaded.watch(X)
    new = rows(150, 2, noise=0.9)
    assert loaded.watch(*new, X_train=X).verdict == "the relation has changed"


def test_a_classifier_watches_labels():
    X, y = rows(600, 0)
    labels = np.where(y > 50, "high", "low")
    model = BayesClassifier("map", steps=200, conformal=0.3, random_state=0).fit(X, labels)
    new, y_new = rows(150, 1)
    assert model.watch(new, np.where(y_new > 50, "high", "low")).verdict == "as expected"
    report = model.watch(new, np.where(y_new > 65, "high", "low"))
    assert report.verdict == "the relation has changed"
    with pytest.raises(ValueError, match="'middle', which is none of the 2 classes"):
        model.watch(new, np.full(150, "middle"))


@pytest.mark.peers
def test_a_data_frame_has_its_columns_tested():
    import pandas

    X, y = rows(400, 0)
    generator = np.random.default_rng(0)
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    frame["city"] = generator.choice(["u", "v"], len(X))
    model = BayesRegressor("map", steps=50, random_state=0).fit(frame, y)
    new = frame[:100].copy()
    new.loc[:30, "city"] = "w"
    with pytest.warns(TableWarning, match="not in the training data"):
        report = model.watch(new)
    assert report.significant[0].subject == "city"


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
def test_text_in_a_column_of_numbers_is_wrong_for_certain():
    import pandas

    X, y = rows(400, 0)
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    frame["city"] = np.random.default_rng(0).choice(["u", "v"], len(X))
    model = BayesRegressor("map", steps=50, random_state=0).fit(frame, y)
    new = frame[:12].copy()
    new["a"] = "large"
    with pytest.warns(TableWarning):
        report = model.watch(new)
    assert report.verdict == "inputs have shifted"
    assert "has text where training has numbers" in report.findings[0]
    assert model.watch(frame[:100].to_numpy()).verdict == "as expected"  # without names
