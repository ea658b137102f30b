"""Which rows to label: BatchBALD against enumeration of all outcomes, and what every way is for."""

import itertools
import math

import pytest
import torch

import bayou
from bayou.likelihoods.predictive import Predictive
from bayou.operations.acquire import SCORES, acquire, batch_bald
from tests.operations.fits import fitted

F64 = torch.float64


def made(samples=6, rows=7, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = 2 * torch.randn(samples, rows, classes, generator=generator, dtype=F64)
    return Predictive(bayou.Categorical().bind(), outputs)


def information(p, rows):
    """I[y_1 .. y_b; w] by its definition: every outcome of these rows, one by one."""
    probabilities = p.outputs.softmax(-1)  # (S, B, K)
    joint = [
        torch.stack([probabilities[:, row, k] for row, k in zip(rows, outcome, strict=True)]).prod(
            0
        )
        for outcome in itertools.product(range(p.outputs.shape[-1]), repeat=len(rows))
    ]
    table = torch.stack(joint)  # (K^b, S)
    mixture = table.mean(1)
    return float(-(mixture * mixture.log()).sum() + (table * table.log()).sum(0).mean())


@pytest.mark.parametrize("seed", range(3))
def test_batchbald_is_the_greedy_choice_of_enumeration(seed):
    p = made(seed=seed)
    found = batch_bald(p, 4, seed=0)
    chosen = ()
    for row, gain in zip(found.indices.tolist(), found.scores.tolist(), strict=True):
        every = {r: information(p, (*chosen, r)) for r in range(7) if r not in chosen}
        assert row == max(every, key=lambda r: every[r])
        assert gain == pytest.approx(
            every[row] - (information(p, chosen) if chosen else 0.0), abs=1e-12
        )
        chosen = (*chosen, row)
    assert float(found.scores.sum()) == pytest.approx(information(p, chosen), abs=1e-12)
    best = max(information(p, rows) for rows in itertools.combinations(range(7), 4))
    assert (1 - 1 / math.e) * best <= float(found.scores.sum()) <= best + 1e-12  # Nemhauser 1978


def test_the_first_row_is_that_of_bald():
    p = made(rows=30)
    found = batch_bald(p, 1, seed=0)
    assert int(found.indices[0]) == int(p.mutual_information.argmax())
    assert float(found.scores[0]) == pytest.approx(float(p.mutual_information.max()), abs=1e-12)


def test_sampled_outcomes_agree_with_all_of_them():
    """Where one row is left to choose, 100 of 243 outcomes before it give its information without a
    bias.
    """
    p = made(rows=6)
    repetitions = 150
    exact = batch_bald(p, 6, seed=0, limit=243)
    found = [batch_bald(p, 6, seed=k, limit=100) for k in range(repetitions)]
    assert all(torch.equal(one.indices, exact.indices) for one in found)
    assert all(torch.equal(one.scores[:5], exact.scores[:5]) for one in found)
    last = torch.stack([one.scores[5] for one in found])
    assert float(last.std()) > 0
    assert abs(float(last.mean() - exact.scores[5])) < 4.5 * float(last.std()) / repetitions**0.5
    few = [
        float(batch_bald(p, 6, seed=k, limit=20).scores.sum()) for k in range(20)
    ]  # sampled three times over
    assert few == pytest.approx([float(exact.scores.sum())] * 20, rel=0.1)


def test_batchbald_selects_one_of_two_equal_rows():
    """BALD takes the best row and its copy; given the label, a copy of a row without noise has
    nothing left to say.
    """
    p = made(rows=5)
    sure = 40 * p.outputs
    best = int(Predictive(p.likelihood, sure).mutual_information.argmax())
    twice = Predictive(p.likelihood, torch.cat([sure, sure[:, best : best + 1]], 1))
    top = twice.mutual_information.sort(descending=True, stable=True).indices[:2].tolist()
    assert sorted(top) == [best, 5]
    together = batch_bald(twice, 2, seed=0).indices.tolist()
    assert len({*together} & {best, 5}) == 1


# --- posteriors ---------------------------------------------------------------------------------

pytestmark = [
    pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::bayou.inference.probe.MixingWarning"),
]


def pooled(method, task="classes"):
    posterior, x, _, _ = fitted(method, task, rows=100)
    return posterior, x[40:]


@pytest.mark.parametrize("method", ["ensemble", "laplace"])
def test_scores_are_those_of_predictions(method):
    posterior, pool = pooled(method)
    p = posterior.predict(pool, seed=0)
    scores = {
        "bald": p.mutual_information,
        "variance": p.means.var(0, correction=0).sum(-1),
        "entropy": p.entropy,
    }
    for how in (how for how in SCORES if how not in ("lcmd", "determinant")):
        found = bayou.acquire(posterior, pool, 5, how)
        assert len({*found.indices.tolist()}) == len(found.scores) == 5
        assert torch.equal(found.indices, acquire(posterior, pool, 5, how).indices)
        if how in scores:
            best = scores[how].sort(descending=True).values[:5]
            torch.testing.assert_close(found.scores, best)
            torch.testing.assert_close(scores[how][found.indices], best)
        assert bool((found.scores.diff() <= 1e-6).all())  # the best first


def test_rows_of_numbers_are_selected_where_networks_disagree():
    posterior, pool = pooled("ensemble", "numbers")
    far = torch.cat([0.1 * pool[:10], pool[:10] + 30.0])
    for how in ("bald", "variance", "entropy", "determinant"):
        assert int(acquire(posterior, far, 3, how).indices.min()) >= 10
    assert int(acquire(posterior, far, 3, "lcmd").indices[0]) >= 10  # then another cluster


def test_invalid_arguments_raise():
    posterior, pool = pooled("ensemble")
    numbers, _ = pooled("ensemble", "numbers")
    point, _ = pooled("map")
    for call, said in {
        lambda: acquire(posterior, pool, 61): "the pool has 60 rows, but n = 61",
        lambda: acquire(posterior, pool, 0): "n must be a whole number of at least 1, got 0",
        lambda: acquire(
            posterior, pool, 2, "best"
        ): "score must be one of bald, batchbald, .*, got 'best'",
        lambda: acquire(posterior, pool[:, :1], 2): "the network cannot take x",
        lambda: acquire(
            numbers, pool, 2, "batchbald"
        ): "batchbald is for classes, and y has BoundPaired",
        lambda: acquire(posterior, pool, 2, "lcmd"): "lcmd is for numbers, and y has BoundCat",
        lambda: acquire(posterior, pool, 2, "determinant"): "determinant is for numbers",
        lambda: acquire(posterior, pool, 2, "bald", targets=pool): "targets are for score='epig'",
        lambda: acquire(point, pool, 2, "epig"): "'epig' needs several networks",
        lambda: acquire(point, pool, 2): "this posterior has one; use score='entropy'",
    }.items():
        with pytest.raises(ValueError, match=said):
            call()
    assert len(acquire(point, pool, 60, "entropy").indices) == 60
