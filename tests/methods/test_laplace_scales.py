"""Laplace by name on tables of unusual scale: the answer, and its time relative to a mode."""

import time

import pytest
import torch
from torch import nn

import bayou
from bayou.curvature.factor import LowRankPrecision
from bayou.curvature.kronecker import Kronecker


def table(rows, columns, classes, seed=0):
    """Classes by a linear function of the columns, with every class in at least one row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    weight = torch.randn(columns, classes, generator=generator) / columns**0.5
    noise = torch.rand(rows, classes, generator=generator)
    y = (3 * x @ weight - torch.log(-torch.log(noise))).argmax(1)
    y[:classes] = torch.arange(classes)
    return x, y


def network(columns, classes):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, 50), nn.ReLU(), nn.Linear(50, classes))


def timed_fit(name, x, y, classes):
    """A posterior and its processor seconds."""
    started = time.process_time()
    posterior = bayou.fit(network(x.shape[1], classes), (x, y), name, progress=False)
    return posterior, time.process_time() - started


# rows, columns, classes, covariance, how much longer than the fit of a mode
SCALES = {
    "few rows, many columns": (165, 60, 2, LowRankPrecision, 15),
    "more columns than a full structure takes": (150, 1000, 2, Kronecker, 15),
    "many classes": (600, 8, 250, Kronecker, 15),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALES)
def test_the_fit_is_finite_normalized_and_fast(name):
    rows, columns, classes, covariance, most = SCALES[name]
    x, y = table(rows, columns, classes)
    timed_fit("map", *table(20, 3, 2), 2)  # imports
    mode, mode_seconds = timed_fit("map", x, y, classes)
    posterior, seconds = timed_fit("laplace", x, y, classes)
    assert isinstance(posterior.covariance, covariance)
    assert seconds < 5 + most * mode_seconds
    predictive = posterior.predict(x, 20)
    assert predictive.mean.isfinite().all()
    torch.testing.assert_close(predictive.mean.sum(-1), torch.ones(rows))
    guess = torch.log(torch.tensor(float(classes)))
    assert -predictive.log_prob(y).mean() < guess
    assert torch.tensor(posterior.log_evidence).isfinite()
    assert mode.predict(x).mean.isfinite().all()
