"""The same intervals, sets and thresholds as MAPIE for split conformal prediction and its risks."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import bayou
from bayou.operations import control_risk
from tests.operations.conformal.simulated import F64, Forecast, Logits, generator
from tests.operations.conformal.test_risk import Labels, draw

pytestmark = pytest.mark.peers


def estimator(base, **values):
    """A fitted estimator of scikit-learn that returns x, or a function of it."""
    from sklearn.base import BaseEstimator

    methods = {name: staticmethod(value) for name, value in values.items() if callable(value)}
    fitted = type("Fitted", (base, BaseEstimator), {"fit": lambda self, X, y: self, **methods})()
    fitted.fitted_ = True
    for name, value in values.items():
        if not callable(value):
            setattr(fitted, name, value)
    return fitted


@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_intervals_of_absolute_residuals(level):
    from mapie.regression import SplitConformalRegressor
    from sklearn.base import RegressorMixin

    x = torch.randn(73, 1, generator=generator(0), dtype=F64)
    y = 2 * torch.randn(73, 1, generator=generator(1), dtype=F64)
    model = estimator(RegressorMixin, predict=lambda X: np.zeros(len(X)))
    peer = SplitConformalRegressor(model, confidence_level=level)
    peer.conformalize(x.numpy(), y[:, 0].numpy())
    _, ends = peer.predict_interval(x[:5].numpy())
    low, high = bayou.conformal(Forecast(), (x, y), level, score="split").interval(x[:5])
    assert_close(torch.cat([low, high], 1), torch.from_numpy(ends[:, :, 0]))


@pytest.mark.parametrize("level", [0.8, 0.9])
def test_sets_of_lac(level):
    from mapie.classification import SplitConformalClassifier
    from sklearn.base import ClassifierMixin

    x = torch.randn(120, 4, generator=generator(0), dtype=F64)
    y = torch.randint(4, (120,), generator=generator(1))

    def probabilities(X):
        return torch.from_numpy(X).softmax(-1).numpy()

    model = estimator(
        ClassifierMixin,
        predict=lambda X: X.argmax(1),
        predict_proba=probabilities,
        classes_=np.arange(4),
    )
    peer = SplitConformalClassifier(model, confidence_level=level, conformity_score="lac")
    peer.conformalize(x[:80].numpy(), y[:80].numpy())
    _, sets = peer.predict_set(x[80:].numpy())
    c = bayou.conformal(Logits(), (x[:80], y[:80]), level)
    assert torch.equal(c.set(x[80:]), torch.from_numpy(sets[:, :, 0]))


def test_false_negatives_of_several_labels():
    """MAPIE searches a grid of λ: ours is at most one step of the grid away."""
    from mapie.risk_control import MultiLabelClassificationController

    x, y = draw(300, generator(0))
    has_label = y.sum(-1) > 0  # a row without labels has no recall
    x, y = x[has_label], y[has_label]

    def probabilities(X):
        return Labels().predict(torch.from_numpy(X)).mean.numpy()

    peer = MultiLabelClassificationController(
        predict_function=probabilities, risk="recall", method="crc", target_level=0.8
    )
    peer.calibrate(x.numpy(), y.numpy())
    control = control_risk(Labels(), (x, y), "false negatives", 0.2)
    smallest_probability = 1 - control.threshold
    assert abs(float(np.ravel(peer.best_predict_param)[0]) - smallest_probability) < 0.0101
