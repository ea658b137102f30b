"""Scores of several rows jointly: EPIG by enumeration and for Gaussians, the greedy determinant
beside a search over all subsets, LCMD by its definition.
"""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

import bayou
from bayou.likelihoods import KnownNoise, Ordinal, StudentT
from bayou.likelihoods.continuous import BoundMarginal, BoundPaired, UnitGaussian
from bayou.likelihoods.predictive import Predictive
from bayou.operations import batch_scores
from bayou.operations.acquire import acquire
from bayou.operations.batch_scores import epig, select_by_clusters, select_by_determinant
from tests.operations.fits import fitted

F64 = torch.float64

pytestmark = [
    pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::bayou.inference.probe.MixingWarning"),
]


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64)


def functions_with(covariance, samples=12):
    """Functions (S, N) whose mean is 0 and whose covariance is exactly this one."""
    rows = len(covariance)
    start = normal(samples, rows)
    basis, _ = torch.linalg.qr(start - start.mean(0))  # orthogonal to a constant, too
    return math.sqrt(samples) * basis @ torch.linalg.cholesky(covariance).T


def covariance_of(rows, seed=0, rank=4):
    root = normal(rows, rank, seed=seed)
    return root @ root.T + 0.05 * torch.eye(rows, dtype=F64)


def numbers(functions, noise):
    """Predictions of one number in each row, with a noise for each."""
    log_scale = torch.as_tensor(noise, dtype=F64).log().expand_as(functions)
    return Predictive(BoundPaired(UnitGaussian()), torch.stack((functions, log_scale), -1))


# --- EPIG ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3])
def test_epig_of_classes_is_that_of_all_pairs_of_outcomes(classes, monkeypatch):
    outputs = 2 * normal(5, 9, classes)
    bound = bayou.Categorical().bind()
    pool = Predictive(bound, outputs[:, :5])
    targets = Predictive(bound, outputs[:, 5:])
    scores = epig(pool, targets)
    p = outputs.softmax(-1)

    def information(row, target):
        total = 0.0
        for y, y_target in itertools.product(range(classes), repeat=2):
            joint = sum(float(p[s, row, y] * p[s, target, y_target]) for s in range(5)) / 5
            marginal = float(p[:, row, y].mean())
            target_marginal = float(p[:, target, y_target].mean())
            total += joint * math.log(joint / (marginal * target_marginal))
        return total

    for row in range(5):
        expected = sum(information(row, target) for target in range(5, 9)) / 4
        assert float(scores[row]) == pytest.approx(expected, abs=1e-12)
    monkeypatch.setattr(batch_scores, "MAX_CHUNK_NUMBERS", 80)
    assert_close(epig(pool, targets), scores)


def test_epig_of_ordered_and_binary_classes():
    ordered = Predictive(Ordinal(3).bind(dtype=F64), normal(4, 6, 1))
    binary = Predictive(bayou.Bernoulli().bind(), normal(4, 6))
    for prediction in (ordered, binary):
        scores = epig(prediction, prediction)
        assert scores.shape == (6,)
        assert bool((scores >= 0).all() & (scores <= prediction.mutual_information + 1e-9).all())


def test_epig_of_gaussians_is_their_mutual_information():
    covariance = covariance_of(7)
    functions = functions_with(covariance)
    noise = torch.linspace(0.2, 0.8, 7, dtype=F64)
    pool = numbers(functions[:, :4], noise[:4])
    targets = numbers(functions[:, 4:], noise[4:])
    scores = epig(pool, targets)
    total = covariance + noise.square().diag()
    for row in range(4):
        informations = []
        for target in range(4, 7):
            pair = total[[row, target]][:, [row, target]]
            entropies = total[row, row].log() + total[target, target].log()
            informations.append(0.5 * (entropies - torch.logdet(pair)))
        assert float(scores[row]) == pytest.approx(float(sum(informations) / 3), abs=1e-12)


def test_a_row_that_says_nothing_about_the_targets_has_no_epig():
    """BALD takes the row with the largest variance; EPIG one that is correlated with the targets."""
    covariance = torch.eye(3, dtype=F64)
    covariance[0, 0] = 25.0
    covariance[1, 2] = covariance[2, 1] = 0.9
    prediction = numbers(functions_with(covariance), 0.1)
    targets = numbers(functions_with(covariance)[:, 2:], 0.1)
    scores = epig(prediction, targets)
    assert int(scores[:2].argmax()) == 1
    assert float(scores[0]) < 1e-12
    assert int(prediction.mutual_information[:2].argmax()) == 0


def test_epig_of_several_numbers_is_the_sum():
    functions = normal(8, 5, 2)
    both = Predictive(bayou.Gaussian((0.2, 0.5)).bind(dtype=F64), functions)
    total = epig(both, both)
    single = [
        epig(prediction, prediction)
        for prediction in (numbers(functions[..., 0], 0.2), numbers(functions[..., 1], 0.5))
    ]
    assert_close(total, single[0] + single[1])


# --- determinants -------------------------------------------------------------------------------


def log_determinant(covariance, noise, rows):
    rows = list(rows)
    scaled = covariance[rows][:, rows] / torch.outer(noise[rows], noise[rows])
    return float(0.5 * torch.logdet(torch.eye(len(rows), dtype=F64) + scaled))


@pytest.mark.parametrize("seed", range(3))
def test_the_determinant_is_the_greedy_choice_of_a_search(seed):
    covariance = covariance_of(7, seed)
    noise = torch.linspace(0.3, 0.9, 7, dtype=F64)
    indices, scores = select_by_determinant(numbers(functions_with(covariance), noise), 4)
    chosen = ()
    for row, gain in zip(indices.tolist(), scores.tolist(), strict=True):
        before = log_determinant(covariance, noise, chosen) if chosen else 0.0
        gains = {
            candidate: log_determinant(covariance, noise, (*chosen, candidate)) - before
            for candidate in range(7)
            if candidate not in chosen
        }
        assert row == max(gains, key=gains.get)
        assert gain == pytest.approx(gains[row], abs=1e-9)
        chosen = (*chosen, row)
    best = max(
        log_determinant(covariance, noise, rows) for rows in itertools.combinations(range(7), 4)
    )
    assert (1 - 1 / math.e) * best <= float(scores.sum()) <= best + 1e-9  # Nemhauser 1978


def test_with_equal_noise_the_next_row_has_the_largest_conditional_variance():
    covariance = covariance_of(6)
    indices, scores = select_by_determinant(numbers(functions_with(covariance), 0.4), 3)
    chosen = []
    for row, score in zip(indices.tolist(), scores.tolist(), strict=True):
        conditional = covariance.diagonal().clone()
        if chosen:
            known = covariance[chosen][:, chosen] + 0.16 * torch.eye(len(chosen), dtype=F64)
            cross = covariance[:, chosen]
            conditional -= (cross @ torch.linalg.inv(known) * cross).sum(1)
        conditional[chosen] = -math.inf
        assert row == int(conditional.argmax())
        assert score == pytest.approx(0.5 * math.log1p(float(conditional[row]) / 0.16), abs=1e-9)
        chosen.append(row)


def test_the_determinant_of_rows_with_several_numbers():
    functions = functions_with(covariance_of(8)).reshape(12, 4, 2)  # 4 rows of 2 numbers
    noise = torch.tensor([0.3, 0.6], dtype=F64)
    prediction = Predictive(bayou.Gaussian((0.3, 0.6)).bind(dtype=F64), functions)
    indices, scores = select_by_determinant(prediction, 3)
    flat = functions.reshape(12, 8)
    covariance = flat.T @ flat / 12
    coordinates = [k for row in indices.tolist() for k in (2 * row, 2 * row + 1)]
    expected = log_determinant(covariance, noise.repeat(4), coordinates)
    assert float(scores.sum()) == pytest.approx(expected, abs=1e-9)
    first = [
        log_determinant(covariance, noise.repeat(4), (2 * row, 2 * row + 1)) for row in range(4)
    ]
    assert int(indices[0]) == max(range(4), key=lambda row: first[row])


# --- LCMD ---------------------------------------------------------------------------------------


def cluster_choice(points, n):
    """LCMD as the paper describes it, with a first center at 0, in loops."""
    centers = [[0.0] * len(points[0])]
    chosen = []

    def squared(a, b):
        return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))

    for _ in range(n):
        clusters = [[] for _ in centers]
        for row, point in enumerate(points):
            if row not in chosen:
                distances = [squared(point, center) for center in centers]
                nearest = distances.index(min(distances))
                clusters[nearest].append((distances[nearest], row))
        largest = max((c for c in clusters if c), key=lambda c: sum(d for d, _ in c))
        distance, row = max(largest)
        chosen.append(row)
        centers.append(points[row])
        yield row, distance


@pytest.mark.parametrize("seed", range(4))
def test_lcmd_is_its_definition(seed):
    functions = normal(5, 12, seed=seed)
    indices, scores = select_by_clusters(numbers(functions, 0.1), 8)
    points = ((functions - functions.mean(0)) / math.sqrt(5)).T.tolist()
    expected = list(cluster_choice(points, 8))
    assert indices.tolist() == [row for row, _ in expected]
    assert scores.tolist() == pytest.approx([distance for _, distance in expected])


def test_batches_avoid_copies():
    """Single scores take the best row and its copies; joint scores take each once."""
    functions = normal(6, 4)
    copies = torch.cat((functions, functions, functions), 1)
    prediction = numbers(copies, 1e-3)
    variance = prediction.epistemic_std.square()
    top = variance.argsort(descending=True, stable=True)[:3].tolist()
    assert len({row % 4 for row in top}) == 1
    for select in (select_by_clusters, select_by_determinant):
        indices, _ = select(prediction, 4)
        assert {row % 4 for row in indices.tolist()} == {0, 1, 2, 3}
    indices, _ = select_by_clusters(prediction, 12)  # all rows, of distance 0 at last
    assert sorted(indices.tolist()) == list(range(12))


# --- posteriors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ensemble", "laplace", "mixture", "dropout"])
def test_scores_of_posteriors(method):
    posterior, x, _, _ = fitted(method, "numbers", rows=100)
    pool = x[40:]
    prediction = posterior.predict(pool, seed=0)
    assert_close(
        acquire(posterior, pool, 60, "epig").scores,
        epig(prediction, prediction).sort(descending=True).values,
    )
    targets = 0.1 * pool[:7]
    near = acquire(posterior, pool, 5, "epig", targets=targets)
    expected = epig(prediction, posterior.predict(targets, seed=0))
    assert_close(near.scores, expected.sort(descending=True).values[:5])
    for score in ("lcmd", "determinant"):
        rows = acquire(posterior, pool, 6, score)
        assert len({*rows.indices.tolist()}) == 6
        again = acquire(posterior, pool, 3, score)
        assert torch.equal(again.indices, rows.indices[:3])


def test_a_closed_form_of_rows_is_refused_and_drawn_where_it_can_be():
    outputs = torch.rand(1, 5, 1, 3, dtype=F64)
    closed = Predictive(BoundMarginal(UnitGaussian()), outputs)
    with pytest.raises(ValueError, match="epig needs functions at all rows"):
        epig(closed, closed)
    posterior, x, _, _ = fitted("laplace", "numbers", rows=60)
    exact = posterior.using("exact")
    for score in ("epig", "lcmd", "determinant"):
        assert len(acquire(exact, x[40:], 3, score).indices) == 3


def test_what_has_no_covariances_is_refused():
    with pytest.raises(ValueError, match="the noise, which is 0 here"):
        select_by_determinant(Predictive(KnownNoise().bind(), normal(4, 5, 1)), 2)
    heavy = Predictive(StudentT(1.5).bind(dtype=F64), normal(4, 5, 1))
    with pytest.raises(ValueError, match="needs finite means and variances"):
        epig(heavy, heavy)
    tokens = Predictive(bayou.Categorical().bind(), normal(4, 5, 3, 2))
    with pytest.raises(ValueError, match="epig is for one class in each row"):
        epig(tokens, tokens)
