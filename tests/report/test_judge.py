"""The evaluation of a posterior: closed forms are computed, not approximated by draws."""

import math

import pytest
import torch

import bayou
from bayou import metrics
from bayou.app.report.judge import judge, prediction_options
from bayou.data import load
from bayou.methods import Wide


@pytest.fixture(scope="module")
def data():
    """Return a regression of one input."""
    return load("two-bumps")


@pytest.fixture(scope="module")
def wide(data):
    """Return the posterior of a network of infinite width."""
    net = torch.nn.Linear(1, 1)
    return bayou.fit(net, data.train, Wide(draws=2, passes=2), seed=0, progress=False)


def test_a_closed_form_is_scored_by_itself_and_not_by_drawn_functions(data, wide):
    evaluation = judge(wide, data, samples=3)
    assert evaluation["samples"] is None
    x, y = data.test
    exact = metrics.summary(wide.predict(x), y, scale=data.y_scale)["nll"]
    drawn = metrics.summary(wide.predict(x, 3, seed=0), y, scale=data.y_scale)["nll"]
    assert math.isclose(evaluation["metrics"]["nll"], exact, rel_tol=1e-4)
    assert abs(drawn - exact) > 1e-3


def test_functions_are_averaged_as_many_as_there_are(data, wide):
    ensemble = bayou.fit(
        torch.nn.Linear(1, 1),
        data.train,
        bayou.Ensemble(3, of=bayou.MAP(steps=5)),
        likelihood=bayou.Gaussian(0.1),
        progress=False,
    )
    variational = bayou.fit(
        torch.nn.Linear(1, 1),
        data.train,
        bayou.VI(bayou.MeanField(), steps=5),
        likelihood=bayou.Gaussian(0.1),
        progress=False,
    )
    assert ensemble.draws_to_average(100) == 3
    assert ensemble.draws_to_average(2) == 2
    assert variational.draws_to_average(100) == 100
    assert wide.draws_to_average(100) is None
    assert prediction_options(variational, 7, 0)["samples"] == 7
