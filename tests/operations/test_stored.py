"""Stored predictions: moments of the mixture, students that learn from them, and their errors."""

import math

import pytest
import torch
from torch.testing import assert_close

import bayou
from bayou.likelihoods import Categorical
from bayou.likelihoods.predictive import Predictive
from bayou.operations import StoredPredictions
from tests.operations.test_distill import EYE, student, teacher

F64 = torch.float64
DRAWS = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(1))


def test_moments_are_those_of_the_draws():
    """Two fits of three draws each are, with equal weights, a mixture of six draws."""
    posterior = teacher(3, Categorical(), draws=6)
    p = posterior.predict(EYE)
    whole = StoredPredictions.of(posterior, EYE)
    assert_close(whole.probabilities, p.probabilities.float())
    assert_close(whole.mutual_information, p.mutual_information.float())
    square_sum = p.outputs.softmax(-1).square().sum(-1).mean(0)
    assert_close(whole.square_sum, square_sum.float())
    parts = []
    for draws in DRAWS.split(3):
        part = Predictive(Categorical().bind(), draws)
        squares = draws.softmax(-1).square().sum(-1).mean(0)
        parts.append(
            StoredPredictions(part.probabilities.log(), None, squares, part.mutual_information)
        )
    joined = StoredPredictions.join(parts)
    expected = Predictive(Categorical().bind(), DRAWS)
    assert_close(joined.probabilities, expected.probabilities)
    assert_close(joined.mutual_information, expected.mutual_information)
    assert_close(joined.square_sum, DRAWS.softmax(-1).square().sum(-1).mean(0))


def test_weights_are_those_of_the_mixture():
    parts = [StoredPredictions(draws) for draws in DRAWS[:2]]
    joined = StoredPredictions.join(parts, [3.0, 1.0])
    expected = 0.75 * DRAWS[0].softmax(-1) + 0.25 * DRAWS[1].softmax(-1)
    assert_close(joined.probabilities, expected)
    assert_close(StoredPredictions(DRAWS[:2], [3.0, 1.0]).probabilities, expected)
    nested = StoredPredictions.join([joined, parts[0]], [1.0, 1.0])
    assert_close(nested.probabilities, 0.5 * expected + 0.5 * DRAWS[0].softmax(-1))


def test_half_precision_is_enough():
    log_p = DRAWS.log_softmax(-1)
    stored = StoredPredictions(log_p.half())
    assert_close(stored.probabilities, log_p.exp().mean(0), atol=1e-3, rtol=0)
    assert_close(stored.probabilities.sum(-1), torch.ones(4))
    impossible = StoredPredictions(torch.tensor([[0.0, -math.inf]]))
    assert_close(impossible.probabilities, torch.tensor([[1.0, 0.0]]))
    assert bool(impossible.mutual_information.isfinite().all())


@pytest.mark.parametrize("keep", [None, "epistemic"])
def test_students_of_stored_predictions_are_those_of_the_posterior(keep):
    posterior = teacher(3, Categorical(), draws=6)
    options = {"steps": 60, "lr": 0.05, "batch_size": 4, "keep": keep, "progress": False}
    net = student(3)
    direct = bayou.distill(posterior, net, EYE, **options)
    stored = bayou.distill(StoredPredictions.of(posterior, EYE), net, EYE, **options)
    points = [found.point if keep else found for found in (direct, stored)]
    assert_close(points[0].stack["weight"], points[1].stack["weight"], atol=1e-5, rtol=1e-4)


SINGLE = StoredPredictions(DRAWS[0])
NUMBERS = teacher(1, bayou.Gaussian(0.5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: StoredPredictions(torch.zeros(3)), r"\(fits, rows, classes\), got \(3,\)"),
        (lambda: StoredPredictions(torch.full((2, 2), math.nan)), "NaN"),
        (lambda: StoredPredictions(DRAWS, [1.0]), "6 fits need 6 weights"),
        (lambda: StoredPredictions(DRAWS[0], [-1.0]), "not negative"),
        (lambda: StoredPredictions(DRAWS, None, torch.ones(5, 4)), r"square_sums .* \(6, 4\)"),
        (lambda: StoredPredictions.join([]), "got no parts"),
        (lambda: StoredPredictions.join([SINGLE, StoredPredictions(DRAWS[0, :2])]), "same rows"),
        (lambda: StoredPredictions.of(NUMBERS, EYE), "one class for each row.*BoundHomoscedastic"),
        (lambda: bayou.distill(SINGLE, student(3), EYE[:3]), "4 rows, but x has 3"),
        (lambda: bayou.distill(SINGLE, student(3), EYE, keep="epistemic"), "one function"),
        (lambda: bayou.distill(SINGLE, student(3), EYE, samples=3), "samples= is for a posterior"),
        (lambda: bayou.distill(SINGLE, student(2), EYE), r"needs \(B, \*\(3,\)\)"),
        (
            lambda: bayou.distill(SINGLE, student(3), EYE, augment=bayou.operations.Augment()),
            "store those at augment.inputs",
        ),
    ],
)
def test_invalid_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()
