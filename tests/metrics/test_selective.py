"""Scores of selective prediction against loops and known curves."""

import math

import pytest
import torch

import bayou
from bayou import metrics
from bayou.likelihoods.predictive import Predictive
from tests.operations.fits import normal

F64 = torch.float64


def rows(count=60, classes=3):
    logits = 2 * normal(count, classes)
    y = (logits + 2 * normal(count, classes, seed=1)).argmax(-1)
    return Predictive(bayou.Categorical().bind(), logits.unsqueeze(0)), y


def curves(p, y):
    """Errors among the k most certain rows over k and over N, by loops."""
    order = sorted(range(len(y)), key=lambda n: float(p.entropy[n]))
    wrong = 0
    selective, generalized = [], []
    for k, n in enumerate(order, 1):
        wrong += int(p.mean[n].argmax() != y[n])
        selective.append(wrong / k)
        generalized.append(wrong / len(y))
    return selective, generalized


def test_areas_by_loops():
    p, y = rows()
    selective, generalized = curves(p, y)
    found = metrics.aurc(p, y)
    assert found.value == pytest.approx(sum(selective) / 60)
    assert found.value == pytest.approx(metrics.error_rejection(p, y).area)
    assert metrics.augrc(p, y).value == pytest.approx(sum(generalized) / 60)
    assert found.low <= found.value <= found.high


def test_augrc_is_a_mean_over_pairs():
    """1/N² Σ_i wrong_i·#{j: u_j ≥ u_i}, from the ranks of the errors alone (Traub et al. 2024)."""
    p, y = rows()
    u = p.entropy
    wrong = p.mean.argmax(-1) != y
    pairs = (u.unsqueeze(0) >= u.unsqueeze(1)).sum(1)  # the j that are not more certain than i
    expected = float((wrong * pairs).sum()) / 60**2
    assert metrics.augrc(p, y).value == pytest.approx(expected)


def test_a_random_order_has_half_of_the_error():
    p, y = rows()
    error = 1 - metrics.accuracy(p, y)
    constant = torch.zeros(60)
    assert metrics.augrc(p, y, constant).value == pytest.approx(error / 2, abs=error / 60)
    assert metrics.aurc(p, y, constant).value == pytest.approx(error)


@pytest.mark.parametrize("coverage", [0.1, 0.5, 1.0])
def test_selective_accuracy_by_loops(coverage):
    p, y = rows()
    selective, _ = curves(p, y)
    expected = 1 - selective[round(60 * coverage) - 1]
    assert metrics.selective_accuracy(p, y, coverage).value == pytest.approx(expected)


def test_areas_of_numbers_are_of_squared_errors():
    f = normal(1, 30, 1)
    y = normal(30, 1, seed=1)
    p = Predictive(bayou.Gaussian(1.0).bind(dtype=F64), f)
    by = torch.arange(30.0)
    squares = (f[0, :, 0] - y[:, 0]).square()
    expected = (squares.cumsum(0) / torch.arange(1, 31)).mean()
    assert metrics.aurc(p, y, by).value == pytest.approx(float(expected))


@pytest.mark.parametrize("tpr", [0.5, 0.8, 0.95, 1.0])
def test_false_positives_by_all_thresholds(tpr):
    inside = (10 * normal(41)).round()
    outside = (10 * normal(50, seed=1)).round() + 6
    rates = []
    for threshold in inside.unique():
        if float((inside <= threshold).double().mean()) >= tpr - 1e-12:
            rates.append(float((outside <= threshold).double().mean()))
    assert metrics.fpr_at_tpr(inside, outside, tpr) == pytest.approx(min(rates))


@pytest.mark.peers
def test_false_positives_of_scikit_learn():
    from sklearn.metrics import roc_curve

    inside = normal(200)
    outside = normal(300, seed=1) + 1
    labels = torch.cat((torch.ones(200), torch.zeros(300)))
    fpr, tpr, _ = roc_curve(labels, -torch.cat((inside, outside)), drop_intermediate=False)
    expected = fpr[tpr >= 0.95].min()
    assert metrics.fpr_at_tpr(inside, outside) == pytest.approx(expected)


def test_invalid_arguments_are_refused():
    p, y = rows()
    with pytest.raises(ValueError, match="coverage must lie"):
        metrics.selective_accuracy(p, y, 0.0)
    numbers = Predictive(bayou.Gaussian(1.0).bind(dtype=F64), normal(1, 5, 1))
    with pytest.raises(ValueError, match="error_rejection"):
        metrics.selective_accuracy(numbers, normal(5, 1))
    with pytest.raises(ValueError, match="both sides"):
        metrics.fpr_at_tpr(torch.ones(0), torch.ones(2))
    with pytest.raises(ValueError, match="nan"):
        metrics.fpr_at_tpr(torch.tensor([float("nan")]), torch.ones(2))
    with pytest.raises(ValueError, match="tpr must lie"):
        metrics.fpr_at_tpr(torch.ones(1), torch.ones(2), 0.0)


def test_ignored_labels_count_neither_as_right_nor_as_rows():
    """Scores of rows half of which are ignored are those of the other half."""
    logits = 2 * torch.randn(
        200, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    y = torch.randint(0, 4, (200,), generator=torch.Generator().manual_seed(6))
    ignored = torch.where(torch.arange(200) < 100, -100, y)
    likelihood = bayou.Categorical(ignore_index=-100).bind()
    some = Predictive(likelihood, logits.unsqueeze(0))
    rest = Predictive(likelihood, logits[100:].unsqueeze(0))
    for score in (metrics.aurc, metrics.augrc, metrics.selective_accuracy):
        value = float(score(some, ignored, draws=2))
        assert value == pytest.approx(float(score(rest, y[100:], draws=2)), abs=1e-12)
    accuracy = metrics.accuracy(some, ignored)
    assert float(metrics.selective_accuracy(some, ignored, 1.0, draws=2)) == pytest.approx(accuracy)
    assert metrics.nll(some, ignored) == pytest.approx(metrics.nll(rest, y[100:]), abs=1e-12)
    area = metrics.error_rejection(some, ignored).area
    assert area == pytest.approx(metrics.error_rejection(rest, y[100:]).area, abs=1e-12)
    for score in (metrics.aurc, metrics.nll):
        with pytest.raises(ValueError, match="no examples to score"):
            score(some, torch.full_like(y, -100))


def test_an_uncertainty_that_is_nan_is_refused():
    p = Predictive(bayou.Categorical().bind(), torch.zeros(1, 3, 2))
    with pytest.raises(ValueError, match="got NaN"):
        metrics.aurc(p, torch.tensor([0, 1, 0]), torch.tensor([0.1, math.nan, 0.2]))
