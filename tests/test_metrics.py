"""Metrics against independent computations: numpy loops, scikit-learn, scipy's integrals."""

import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import sklearn.metrics
import torch

from bayou import metrics
from bayou.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    StudentT,
)
from bayou.likelihoods.predictive import Predictive
from tests.test_likelihoods import F64, doubles, labels, noise, predictive

same = partial(pytest.approx, rel=1e-9)


CLASSES = predictive(Categorical(), 2 * noise(9, 300, 4))
LABELS = labels(4, 300)
NUMBERS = predictive(Gaussian(1.0), noise(1, 300, 1))


# --- classes ------------------------------------------------------------------------------------


def test_accuracy_nll_and_brier_against_loops():
    p = CLASSES.outputs.softmax(-1).mean(0).numpy()
    hits, losses, squares = [], [], []
    for row, label in zip(p, LABELS.tolist(), strict=True):
        hits.append(int(np.argmax(row)) == label)
        losses.append(-math.log(row[label]))
        squares.append(sum((row[c] - (c == label)) ** 2 for c in range(4)))
    assert metrics.accuracy(CLASSES, LABELS) == same(np.mean(hits))
    assert metrics.nll(CLASSES, LABELS) == same(np.mean(losses))
    assert metrics.nll(CLASSES, LABELS) == same(sklearn.metrics.log_loss(LABELS, p))
    assert metrics.brier(CLASSES, LABELS) == same(np.mean(squares))


def test_bernoulli_is_two_classes():
    """The same prediction said with one logit and with two."""
    f = noise(5, 200)
    y = (noise(200, seed=3) > 0).double()
    one = predictive(Bernoulli(), f)
    two = predictive(Categorical(), torch.stack((0 * f, f), -1))
    for score in (metrics.accuracy, metrics.brier, metrics.ece, metrics.nll):
        assert score(one, y) == same(score(two, y.long()))
    p = f.sigmoid().mean(0)
    assert metrics.brier(one, y) == same(2 * sklearn.metrics.brier_score_loss(y, p))


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_of_equal_width_against_a_loop(bins):
    confidence, hits = (t.numpy() for t in metrics.confidence_and_hits(CLASSES, LABELS))
    expected = 0.0
    for low, high in pairwise(k / bins for k in range(bins + 1)):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            gap = hits[inside].mean() - confidence[inside].mean()
            expected += inside.mean() * abs(gap)
    assert metrics.ece(CLASSES, LABELS, bins) == same(expected)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # of its imports
def test_ece_agrees_with_torchmetrics_away_from_one():
    from torchmetrics.functional import classification as functional

    p = CLASSES.mean
    theirs = functional.multiclass_calibration_error(p, LABELS, num_classes=4, n_bins=15)
    assert metrics.ece(CLASSES, LABELS) == pytest.approx(float(theirs), abs=1e-6)


def test_a_confidence_of_one_is_in_the_last_bin():
    """Confidences .95 (right) and 1 (wrong) share a bin: |½ − .975|; a separate bin for 1 would
    give .525.
    """
    p = doubles([[0.95, 0.05], [1.0, 0.0]])
    sure = predictive(Categorical(), p.clamp_min(1e-300).log().unsqueeze(0))
    assert float(sure.mean.max()) == 1.0
    assert metrics.ece(sure, torch.tensor([0, 1])) == same(0.475)


def test_classes_on_a_map_are_scored_in_every_place():
    f = noise(4, 6, 3, 5, 5)
    y = labels(3, 6, 5, 5)
    maps = predictive(Categorical(class_axis=-3), f)
    best = f.softmax(2).mean(0).argmax(1)
    assert metrics.accuracy(maps, y) == same(float((best == y).double().mean()))
    assert set(metrics.summary(maps, y)) >= {"accuracy", "nll", "brier", "ece", "rejection"}


# --- uncertainty --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"), [([1, 1, 2], [1, 3]), ([-5, 0, 0, 4], [0]), ([100], [200, 300])]
)
def test_auroc_against_scikit_learn_with_ties(a, b):
    expected = sklearn.metrics.roc_auc_score([0] * len(a) + [1] * len(b), a + b)
    assert metrics.auroc(torch.tensor(a), torch.tensor(b)) == same(expected)


def test_error_rejection_against_a_loop():
    curve = metrics.error_rejection(CLASSES, LABELS)
    p = CLASSES.mean.numpy()
    wrong = p.argmax(1) != LABELS.numpy()
    order = np.argsort(-(p * np.log(p)).sum(1))
    expected = [wrong[order[:k]].mean() for k in range(1, 301)]
    np.testing.assert_allclose(curve.error, expected, atol=1e-12)
    assert curve.area == same(np.mean(expected))
    assert curve.best == same(np.mean([np.sort(wrong)[:k].mean() for k in range(1, 301)]))
    assert curve.best <= curve.area
    assert curve.at(1.0) == same(1 - metrics.accuracy(CLASSES, LABELS))
    assert curve.at(0.5) == same(expected[149])
    assert float(curve.kept[0]) == pytest.approx(1 / 300)


def test_error_rejection_averages_over_the_order_of_ties():
    """All equally uncertain: the expected error is the same however many are kept."""
    curve = metrics.error_rejection(CLASSES, LABELS, by=torch.zeros(300))
    error = 1 - metrics.accuracy(CLASSES, LABELS)
    torch.testing.assert_close(
        curve.error, torch.full((300,), error, dtype=F64), atol=1e-12, rtol=0
    )


def test_error_rejection_of_numbers_uses_squared_errors():
    f, y = noise(8, 50, 1), noise(50, 1, seed=2)
    p = predictive(HeteroscedasticGaussian(), torch.cat((f, noise(8, 50, 1, seed=4)), -1))
    curve = metrics.error_rejection(p, y)
    assert curve.at(1.0) == same(metrics.rmse(p, y) ** 2)
    order = p.std.squeeze(1).argsort()
    loss = (p.mean - y).square().squeeze(1)[order]
    assert curve.at(0.2) == same(float(loss[:10].mean()))


def test_standard_error():
    values = [0.1, 0.4, 0.25, 0.9]
    assert metrics.standard_error(values) == same(scipy.stats.sem(values))
    assert math.isnan(metrics.standard_error([1.0]))


# --- numbers ------------------------------------------------------------------------------------


def crps_by_integral(p, y, reach=60.0, points=100_001):
    """∫ (F(t) − 1[t ≥ y])² dt by Simpson's rule on either side of y, over examples."""
    total = []
    for i, goal in enumerate(y.flatten().tolist()):
        for low, high, above in ((goal - reach, goal, 0.0), (goal, goal + reach, 1.0)):
            t = torch.linspace(low, high, points, dtype=F64)
            one = Predictive(p.likelihood, p.outputs[:, i : i + 1].expand(-1, points, -1))
            gap = (one.cdf(t.unsqueeze(1)).squeeze(1) - above).square()
            total.append(scipy.integrate.simpson(gap.numpy(), x=t.numpy()))
    return float(np.sum(total)) / len(y)


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [
        (Gaussian(0.7), noise(6, 5, 1)),
        (Gaussian(0.05), 3 * noise(1, 5, 1)),
        (HeteroscedasticGaussian(), noise(6, 5, 2)),
    ],
)
def test_crps_of_gaussian_mixtures_against_the_integral(likelihood, outputs):
    p, y = predictive(likelihood, outputs), 2 * noise(5, 1, seed=9)
    assert metrics.crps(p, y) == pytest.approx(crps_by_integral(p, y), rel=1e-6)


@pytest.mark.parametrize("likelihood", [StudentT(5.0, 0.7), Poisson()])
def test_crps_from_draws_against_the_integral(likelihood):
    """The mean of 5 estimates from 20,000 draws; the tolerance is 4 of its standard errors (sd of
    |Y − y| < 3).
    """
    p = predictive(likelihood, noise(6, 5, 1))
    y = doubles([[0.0], [1.0], [4.0], [2.0], [1.0]])
    draws = 20_000
    assert metrics.crps(p, y, draws=draws) == pytest.approx(
        crps_by_integral(p, y, points=2001), abs=4 * 3 / math.sqrt(5 * draws)
    )


def test_coverage_and_width_of_the_truth():
    """y drawn from the prediction: 90 % intervals hold 90 %, within 4 standard errors, and are
    3.29·σ wide.
    """
    n = 4000
    p, y = predictive(Gaussian(0.5), torch.zeros(1, n, 1, dtype=F64)), 0.5 * noise(n, 1, seed=5)
    assert metrics.coverage(p, y, 0.9) == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / n))
    assert metrics.width(p, 0.9) == same(2 * 1.6448536269514722 * 0.5)
    assert metrics.coverage(p, 3 * y, 0.9) < 0.5


def test_scores_in_original_units():
    """Scaling y, the outputs and the noise by 7 is the same as passing scale=7."""
    f, y, scale = noise(5, 40, 2), noise(40, 2, seed=1), 7.0
    small, large = predictive(Gaussian(0.3), f), predictive(Gaussian(2.1), scale * f)
    for score in (metrics.rmse, metrics.crps, metrics.nll):
        assert score(small, y, scale) == same(score(large, scale * y))
    ours, theirs = metrics.summary(small, y, scale=scale), metrics.summary(large, scale * y)
    assert ours == pytest.approx(theirs, rel=1e-6)


# --- all at once --------------------------------------------------------------------------------


def test_summary_of_classes():
    away = predictive(Categorical(), 0.3 * noise(9, 80, 4, seed=7))
    scores = metrics.summary(CLASSES, LABELS, away)
    assert scores["accuracy"] == metrics.accuracy(CLASSES, LABELS)
    assert scores["auroc_entropy"] == metrics.auroc(CLASSES.entropy, away.entropy)
    assert scores["auroc_mutual_information"] == metrics.auroc(
        CLASSES.mutual_information, away.mutual_information
    )
    assert scores["entropy_ood"] > scores["entropy"]
    assert all(isinstance(value, float) and math.isfinite(value) for value in scores.values())


def test_a_single_network_has_no_epistemic_uncertainty():
    """A point estimate, said once or thrice: AUROC ½ and not that of rounding errors."""
    for times in (1, 3):
        near, far = (
            predictive(Categorical(), noise(1, 50, 4, seed=s).float().expand(times, -1, -1))
            for s in (1, 2)
        )
        scores = metrics.summary(near, LABELS[:50], far)
        assert scores["mutual_information"] == 0.0
        assert scores["auroc_mutual_information"] == 0.5


def test_summary_of_numbers():
    near, far = (predictive(Gaussian(0.3), scale * noise(5, 40, 1)) for scale in (0.1, 3))
    y = noise(40, 1, seed=3)
    scores = metrics.summary(near, y, far)
    assert list(scores)[:5] == ["rmse", "nll", "crps", "coverage", "width"]
    assert scores["auroc_epistemic_std"] > 0.99
    assert metrics.summary(near, y).keys() < scores.keys()


# --- two predictions ----------------------------------------------------------------------------


def test_agreement_and_total_variation_of_classes_against_loops():
    other = predictive(Categorical(), 2 * noise(4, 300, 4, seed=5))
    p, q = (one.outputs.softmax(-1).mean(0).numpy() for one in (CLASSES, other))
    alike = [int(np.argmax(a)) == int(np.argmax(b)) for a, b in zip(p, q, strict=True)]
    distances = [
        0.5 * sum(abs(x - y) for x, y in zip(a, b, strict=True)) for a, b in zip(p, q, strict=True)
    ]
    assert metrics.agreement(CLASSES, other) == same(np.mean(alike))
    assert metrics.total_variation(CLASSES, other) == same(np.mean(distances))
    assert metrics.total_variation(CLASSES, CLASSES) == 0
    assert metrics.agreement(CLASSES, CLASSES) == 1


def test_total_variation_of_a_bernoulli_is_the_difference_of_its_probabilities():
    a, b = predictive(Bernoulli(), noise(5, 200)), predictive(Bernoulli(), noise(3, 200, seed=1))
    expected = (a.outputs.sigmoid().mean(0) - b.outputs.sigmoid().mean(0)).abs().mean()
    assert metrics.total_variation(a, b) == same(float(expected))


@pytest.mark.parametrize("shift", [0.01, 0.5, 3.0, 40.0])
def test_total_variation_of_two_gaussians_is_the_textbook_one(shift):
    """2Φ(|m − m'|/2σ) − 1, in every row alike: p − q changes its sign once."""
    a, b = (
        predictive(Gaussian(0.5), torch.full((1, 7, 1), mean, dtype=F64)) for mean in (0.0, shift)
    )
    assert metrics.total_variation(a, b) == pytest.approx(
        2 * scipy.stats.norm.cdf(shift) - 1, abs=1e-4
    )
    assert metrics.total_variation(b, a) == same(metrics.total_variation(a, b))


def test_total_variation_of_mixtures_against_the_integral():
    """1 − ∫ min(p, q): a mixture of narrow Gaussians beside one of wide ones, which a plain grid
    would miss.
    """
    means, log_scales, spots = 2 * noise(6, 3, 1), noise(6, 3, 1, seed=2), noise(4, 3, 1, seed=3)
    wide = predictive(HeteroscedasticGaussian(), torch.cat((means, 2 * log_scales), -1))
    narrow = predictive(Gaussian(0.01), spots)
    for row in range(3):
        parts = [
            Predictive(one.likelihood, one.outputs[:, row : row + 1]) for one in (wide, narrow)
        ]
        y = np.unique(
            [np.linspace(spot - 0.08, spot + 0.08, 3001) for spot in spots[:, row, 0].tolist()]
        )
        p = scipy.stats.norm.pdf(y, means[:, row].numpy(), log_scales[:, row].exp().numpy()).mean(0)
        q = scipy.stats.norm.pdf(y, spots[:, row].numpy(), 0.01).mean(0)
        exact = 1 - scipy.integrate.trapezoid(np.minimum(p, q), y)
        assert exact - 1e-3 < metrics.total_variation(*parts) < exact + 1e-6


def test_total_variation_of_counts_is_a_sum():
    a, b = predictive(Poisson(), noise(3, 20)), predictive(Poisson(), noise(2, 20, seed=1))
    k = np.arange(200)[:, None, None]
    p, q = (scipy.stats.poisson.pmf(k, one.outputs.exp().numpy()).mean(1) for one in (a, b))
    expected = 0.5 * np.abs(p - q).sum(0).mean()
    assert expected - 2e-3 < metrics.total_variation(a, b) <= expected + 1e-9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.accuracy(NUMBERS, noise(300, 1)), "for classes"),
        (lambda: metrics.rmse(CLASSES, LABELS), "for numbers, got classes"),
        (lambda: metrics.brier(CLASSES, LABELS[:5]), r"y has shape \(5,\)"),
        (lambda: metrics.ece(CLASSES, LABELS, bins=0), "bins must be"),
        (lambda: metrics.nll(CLASSES, LABELS, scale=2.0), "only a continuous y has a scale"),
        (lambda: metrics.auroc(torch.zeros(0), torch.zeros(3)), "both sides, got 0 and 3"),
        (lambda: metrics.standard_error([]), "no values"),
        (lambda: metrics.auroc(torch.tensor([math.nan]), torch.zeros(3)), "nan"),
        (
            lambda: metrics.error_rejection(CLASSES, LABELS, by=torch.zeros(3)),
            "one number per example",
        ),
        (lambda: metrics.error_rejection(CLASSES, LABELS, by="variance"), "got 'variance'"),
        (lambda: metrics.error_rejection(CLASSES, LABELS).at(0.0), r"in \(0, 1\]"),
        (
            lambda: metrics.agreement(CLASSES, predictive(Categorical(), noise(1, 7, 4))),
            r"got \(300, 4\) and \(7, 4\); predict",
        ),
        (lambda: metrics.total_variation(CLASSES, NUMBERS), "one kind of likelih"),
        (lambda: metrics.agreement(NUMBERS, NUMBERS), "use total_variation"),
    ],
)
def test_errors_state_the_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()
