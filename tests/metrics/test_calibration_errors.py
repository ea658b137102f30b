"""Calibration errors against direct formulas: kernels by image sums, bins by loops, torchmetrics."""

import math

import pytest
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

import bayou
from bayou import metrics
from bayou.likelihoods.predictive import Predictive
from bayou.metrics.estimates import bootstrap
from tests.operations.fits import normal

F64 = torch.float64


def rows(count=300, classes=4, seed=0, factor=1.5):
    """Predictions that are too sure, and labels of the truth."""
    logits = 1.5 * normal(count, classes, seed=seed)
    u = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=F64)
    y = (logits.softmax(-1).cumsum(-1) < u.unsqueeze(1)).sum(1).clamp_max(classes - 1)
    return Predictive(bayou.Categorical().bind(), factor * logits.unsqueeze(0)), y


def direct_smooth_ece(confidence, hits):
    """smECE by image sums of the Gaussian kernel on a grid, at the first σ with smECE_σ ≤ σ."""
    t = (torch.arange(2000, dtype=F64) + 0.5) / 2000
    images = [2 * k + sign * confidence for k in range(-3, 4) for sign in (1, -1)]

    def error(sigma):
        kernel = sum(
            torch.exp(-0.5 * ((t.unsqueeze(1) - image) / sigma).square()) for image in images
        ) / (sigma * math.sqrt(2 * math.pi))
        return float((kernel * (hits - confidence)).mean(1).abs().mean())

    low, high = 1e-3, 1.0
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) > middle else (low, middle)
    return high


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_smooth_ece_against_image_sums(factor):
    p, y = rows(200, factor=factor)
    confidence, hits = metrics.confidence_and_hits(p, y)
    found = metrics.smooth_ece(p, y, draws=2)
    assert found.value == pytest.approx(direct_smooth_ece(confidence, hits), abs=3e-4)


def test_smooth_ece_of_one_confidence_in_closed_form():
    """All rows at ½: the kernel integrates to 1, so that the error is |mean − ½|."""
    hits = torch.cat((torch.ones(80), torch.zeros(20)))
    found = metrics.smooth_calibration_error(torch.full((100,), 0.5), hits)
    assert float(found) == pytest.approx(0.3, abs=1e-6)
    assert found.low < 0.3 < found.high


def test_smooth_ece_is_small_for_calibrated_rows_and_continuous():
    p, y = rows(4000, factor=1.0)
    assert float(metrics.smooth_ece(p, y, draws=2)) < 0.02
    moved = Predictive(p.likelihood, p.outputs + 1e-6 * normal(1, 4000, 4))
    change = metrics.smooth_ece(moved, y, draws=2).value - metrics.smooth_ece(p, y, draws=2).value
    assert abs(change) < 1e-5


def test_classwise_ece_by_loops():
    p, y = rows()
    q = p.probabilities
    total = 0.0
    for c in range(4):
        for k in range(15):
            inside = (q[:, c] > k / 15) & (q[:, c] <= (k + 1) / 15)
            if inside.any():
                gap = (y[inside] == c).double().mean() - q[inside, c].mean()
                total += float(inside.double().mean() * gap.abs()) / 4
    found = metrics.classwise_ece(p, y)
    assert found.value == pytest.approx(total)
    assert 0 <= found.low < found.high  # below the value, whose expectation is too large


def test_classwise_ece_of_one_bin_is_the_difference_of_frequencies():
    p, y = rows()
    frequency = torch.bincount(y, minlength=4).double() / len(y)
    expected = (frequency - p.probabilities.mean(0)).abs().mean()
    assert metrics.classwise_ece(p, y, bins=1).value == pytest.approx(float(expected))


def test_adaptive_ece_by_loops_and_of_one_bin():
    p, y = rows(150)
    confidence, hits = metrics.confidence_and_hits(p, y)
    pairs = sorted(zip(confidence.tolist(), hits.tolist(), strict=True))
    total = 0.0
    for k in range(15):
        group = pairs[10 * k : 10 * k + 10]
        total += abs(sum(hit - sure for sure, hit in group)) / 150
    assert metrics.adaptive_ece(p, y).value == pytest.approx(total)
    whole = metrics.adaptive_ece(p, y, bins=1).value
    torch_ece = multiclass_calibration_error(p.probabilities, y, num_classes=4, n_bins=1)
    assert whole == pytest.approx(float(torch_ece), abs=1e-6)


@pytest.mark.slow
def test_bootstrap_intervals_contain_the_mean_as_often_as_they_say():
    hits = 0
    for seed in range(200):
        values = normal(60, seed=seed)
        found = bootstrap(
            lambda index, values=values: float(values[index].mean()),
            60,
            draws=100,
            bounds=(-9.0, 9.0),
            seed=seed,
        )
        hits += found.low <= 0 <= found.high
    assert 0.82 < hits / 200 < 0.96


def test_invalid_arguments_are_refused():
    p, y = rows(20)
    with pytest.raises(ValueError, match="bins must be"):
        metrics.classwise_ece(p, y, bins=0)
    with pytest.raises(ValueError, match="draws must be"):
        metrics.adaptive_ece(p, y, draws=1)
    with pytest.raises(ValueError, match="level must lie"):
        metrics.adaptive_ece(p, y, level=1.0)
    with pytest.raises(ValueError, match=r"must both be \(N,\)"):
        metrics.smooth_calibration_error(torch.rand(3), torch.ones(4))
    with pytest.raises(ValueError, match="confidence must lie"):
        metrics.smooth_calibration_error(torch.full((3,), 1.2), torch.ones(3))


def test_adaptive_error_of_equal_confidences_does_not_depend_on_the_order_of_rows():
    """Of one confidence it is |accuracy − confidence|, however the rows are sorted."""
    logits = torch.tensor([0.4, 0.0, 0.0]).double().expand(1, 90, 3)
    p = Predictive(bayou.Categorical().bind(), logits)
    confidence = float(torch.softmax(logits[0, 0], -1)[0])
    sorted_y = torch.arange(90) % 3
    for y in (sorted_y, sorted_y.sort().values, sorted_y.sort(descending=True).values):
        value = float(metrics.adaptive_ece(p, y, draws=2))
        assert value == pytest.approx(abs(1 / 3 - confidence), abs=1e-12)
