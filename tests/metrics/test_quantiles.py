"""Quantile losses, interval scores and tests of uniformity against closed forms and scipy."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.testing import assert_close

import bayou
from bayou import metrics
from bayou.likelihoods.predictive import Predictive
from tests.operations.fits import normal

F64 = torch.float64
NORMAL = stats.norm()


def numbers(rows=50, std=0.7):
    f = normal(1, rows, 1)
    return Predictive(bayou.Gaussian(std).bind(dtype=F64), f), f[0] + normal(rows, 1, seed=1)


@pytest.mark.parametrize("q", [0.05, 0.5, 0.9])
def test_pinball_with_quantiles_of_scipy(q):
    p, y = numbers()
    quantile = p.outputs[0] + 0.7 * NORMAL.ppf(q)
    total = sum((q if float(d) > 0 else q - 1) * float(d) for d in (y - quantile).flatten())
    assert metrics.pinball(p, y, q, scale=2.0) == pytest.approx(2 * total / 50)


def test_the_mean_of_pinball_losses_is_half_of_the_crps():
    p, y = numbers(10)
    levels = [(k + 0.5) / 400 for k in range(400)]
    assert 2 * metrics.pinball(p, y, levels) == pytest.approx(metrics.crps(p, y), abs=1e-3)


@pytest.mark.peers
def test_pinball_of_scikit_learn():
    from sklearn.metrics import mean_pinball_loss

    p, y = numbers()
    expected = mean_pinball_loss(y, p.quantile(0.2), alpha=0.2)
    assert metrics.pinball(p, y, 0.2) == pytest.approx(expected)


def test_interval_score_is_of_two_quantile_losses():
    """α/2 of it is the sum of the pinball losses at both ends (Gneiting & Raftery 2007)."""
    p, y = numbers()
    pinballs = metrics.pinball(p, y, 0.1) + metrics.pinball(p, y, 0.9)
    assert metrics.interval_score(p, y, 0.8, scale=3.0) == pytest.approx(3 * pinballs * 2 / 0.2)


def test_crps_of_a_normal_in_closed_form():
    p, y = numbers()
    z = ((y - p.outputs[0]) / 0.7).flatten().numpy()
    expected = 0.7 * (z * (2 * NORMAL.cdf(z) - 1) + 2 * NORMAL.pdf(z) - 1 / math.sqrt(math.pi))
    assert metrics.crps(p, y) == pytest.approx(expected.mean())


def test_levels_are_those_of_scipy():
    p, y = numbers()
    expected = NORMAL.cdf(((y - p.outputs[0]) / 0.7).numpy()).flatten()
    assert_close(metrics.pit(p, y), torch.as_tensor(expected))


def test_randomized_levels_of_counts_are_uniform():
    f = normal(1, 4000, 1)
    generator = torch.Generator().manual_seed(0)
    y = torch.poisson(f[0].exp(), generator=generator)
    p = Predictive(bayou.Poisson().bind(), f)
    levels = metrics.pit(p, y)
    assert torch.equal(levels, metrics.pit(p, y))
    assert stats.kstest(levels.numpy(), "uniform").pvalue > 0.001
    assert metrics.pit_histogram(p, y).p_value > 0.001


def test_the_test_of_the_histogram_is_that_of_scipy():
    p, y = numbers(400)
    histogram = metrics.pit_histogram(p, y, bins=10)
    expected = stats.chisquare(histogram.count.numpy())
    assert histogram.statistic == pytest.approx(expected.statistic)
    assert histogram.p_value == pytest.approx(expected.pvalue, rel=1e-8)
    assert float(histogram.density.mean()) == pytest.approx(1.0)
    levels = metrics.pit(p, y).numpy()
    counts, _ = __import__("numpy").histogram(levels, bins=10, range=(0, 1))
    assert histogram.count.tolist() == counts.tolist()


@pytest.mark.parametrize("power", [1.0, 1.2, 2.0])
def test_uniformity_is_the_test_of_kolmogorov_and_smirnov(power):
    generator = torch.Generator().manual_seed(1)
    levels = torch.rand(80, generator=generator, dtype=F64) ** power
    distance, p_value = metrics.uniformity(levels)
    expected = stats.kstest(levels.numpy(), "uniform")
    assert distance == pytest.approx(expected.statistic)
    assert p_value == pytest.approx(expected.pvalue, abs=0.01)


def test_censored_rows_are_left_out():
    likelihood = bayou.likelihoods.Censored(bayou.likelihoods.Weibull()).bind(dtype=F64)
    y = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.5, 1.0]], dtype=F64)
    p = Predictive(likelihood, torch.zeros(1, 3, 1, dtype=F64))
    assert len(metrics.pit(p, y)) == 2
    assert metrics.interval_score(p, y) > 0


def test_invalid_arguments_are_refused():
    p, y = numbers()
    classes = Predictive(bayou.Categorical().bind(), normal(1, 5, 3))
    for score in (metrics.pinball, metrics.interval_score, metrics.pit, metrics.pit_histogram):
        with pytest.raises(ValueError, match="is for numbers"):
            score(classes, torch.zeros(5).long())
    with pytest.raises(ValueError, match="one level or more"):
        metrics.pinball(p, y, [])
    with pytest.raises(ValueError, match="level must lie"):
        metrics.interval_score(p, y, 1.0)
    with pytest.raises(ValueError, match="bins must be"):
        metrics.pit_histogram(p, y, 1)
    with pytest.raises(ValueError, match="levels in"):
        metrics.uniformity(torch.tensor([1.5]))


def test_levels_of_the_pinball_loss_may_be_of_numpy_or_tensors():
    p = Predictive(bayou.Gaussian(1.0).bind(), torch.zeros(1, 5, 1))
    y = torch.linspace(-1, 1, 5).unsqueeze(1)
    expected = metrics.pinball(p, y, 0.5)
    assert metrics.pinball(p, y, np.float32(0.5)) == expected
    assert metrics.pinball(p, y, torch.tensor([0.5])) == expected
