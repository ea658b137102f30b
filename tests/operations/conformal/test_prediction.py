"""Intervals and sets hold y as often as they say: 1,000 resamplings, as coordinates with thresholds
of their own.
"""

import math

import pytest
import torch
from torch.testing import assert_close

import bayou
from bayou.likelihoods.predictive import Predictive
from bayou.operations import Conformal, conformal
from bayou.operations.conformal import SETS, Score
from tests.operations.fits import fitted, normal

F64 = torch.float64
R = 400  # resamplings


class Linear:
    """Three networks that are wrong on purpose: x and twice x, with too little noise; logits that
    are too large.
    """

    def __init__(self, likelihood):
        self.likelihood = likelihood.bind(dtype=F64)

    def predict(self, x, samples=None, *, seed=None):
        return Predictive(self.likelihood, torch.stack([x, 1.5 * x, 2 * x]))


def numbers(rows, seed):
    x = normal(rows, R, seed=seed)
    return x, x + (0.2 + x.abs()) * normal(rows, R, seed=seed + 1)


def classes(rows, seed):
    x = 2 * normal(rows, R, 4, seed=seed)
    gumbel = (
        -torch.empty(rows, R, 4, dtype=F64)
        .exponential_(generator=torch.Generator().manual_seed(seed + 1))
        .log()
    )
    return x, (0.7 * x + gumbel).argmax(-1)


def assert_coverage(hits, n, level):
    """Coverage given what was held out is Beta(k, n + 1 − k), k = ⌈(n + 1)·level⌉ (Vovk 2012): its
    mean, to 4.5 sd.
    """
    k = math.ceil(round((n + 1) * level, 6))
    expected = k / (n + 1)
    assert level - 1e-12 <= expected <= level + 1 / (n + 1)
    spread = expected * (1 - expected) * (1 / (n + 2) + 1 / len(hits))
    assert abs(float(hits.double().mean()) - expected) < 4.5 * math.sqrt(spread / R)


@pytest.mark.parametrize("score", ["cqr", "split"])
@pytest.mark.parametrize(("n", "level"), [(9, 0.9), (50, 0.8), (101, 0.95)])
def test_coverage_of_intervals(score, n, level):
    posterior, (x, y) = Linear(bayou.Gaussian(0.3)), numbers(60, 7)
    low, high = conformal(posterior, numbers(n, 3), level, score=score).interval(x)
    assert_coverage((low <= y) & (y <= high), n, level)
    p = posterior.predict(x)  # which alone is far from its level
    assert abs(float(bayou.metrics.coverage(p, y, level)) - level) > 0.1


@pytest.mark.parametrize(
    ("score", "options"),
    [("lac", {}), ("aps", {}), ("aps", {"randomized": False})],
)
def test_coverage_of_sets(score, options):
    posterior, (x, y) = Linear(bayou.Categorical()), classes(60, 7)
    c = conformal(posterior, classes(40, 3), 0.8, score=score, **options)
    mask = c.set(x)
    assert_coverage(mask.gather(-1, y.unsqueeze(-1)).squeeze(-1), 40, 0.8)
    filled = c.set(x, empty=False)
    assert bool(filled.any(-1).all())
    assert bool((mask <= filled).all())
    assert bool((filled == mask)[mask.any(-1)].all())


def test_coverage_by_group():
    """Rows of two kinds, one with ten times the noise: over all they are held, each by itself only
    by group.
    """
    n, posterior = 40, Linear(bayou.Gaussian(0.3))

    def made(rows, seed):
        x, wide = normal(rows, R, seed=seed), torch.arange(rows) % 2
        return (
            x,
            x + (0.3 + 2.7 * wide).unsqueeze(-1) * normal(rows, R, seed=seed + 1),
            ["ab"[k] for k in wide],
        )

    (x, y, groups), (new, truth, kinds) = made(2 * n, 1), made(30, 5)
    both = conformal(posterior, (x, y), 0.8).interval(new)
    apart = conformal(posterior, (x, y), 0.8, groups=groups)
    assert (apart.groups, apart.rows) == (("a", "b"), (n, n))
    each = apart.interval(new, kinds)
    hits = [(low <= truth) & (truth <= high) for low, high in (both, each)]
    for kind in (0, 1):
        assert_coverage(hits[1][kind::2], n, 0.8)
        assert abs(float(hits[0][kind::2].double().mean()) - 0.8) > 0.1
    assert abs(float(hits[0].double().mean()) - 0.8) < 0.02


def test_scores_by_hand():
    f = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=F64).log()
    p = Predictive(bayou.Categorical().bind(), f.unsqueeze(0))
    made = {kind: Score(kind, 0.9, randomized=False).of_classes(p, 0) for kind in SETS}
    expected = {
        "lac": [[0.5, 0.7, 0.8], [0.9, 0.8, 0.3]],
        "aps": [[0.5, 0.8, 1.0], [1.0, 0.9, 0.7]],
    }
    for kind, score in made.items():
        assert_close(score, torch.tensor(expected[kind], dtype=F64))


def test_thresholds_by_hand():
    """Scores 1 .. 9 of a posterior that says 0 ± 1: with level .9 the 9th, with .5 the 5th."""
    x = torch.zeros(9, 1, dtype=F64)
    y = torch.arange(1.0, 10.0, dtype=F64).unsqueeze(1)
    posterior = Linear(bayou.Gaussian(1.0))
    for level, reach in ((0.9, 9.0), (0.5, 5.0)):
        low, high = conformal(posterior, (x, y), level, score="split").interval(x[:2])
        assert_close(high, torch.full((2, 1), reach, dtype=F64))
        assert_close(low, -high)
    low, high = conformal(posterior, (x, 0 * y), 0.9).interval(
        x[:1]
    )  # quantiles that were too wide shrink to y
    assert_close(torch.cat([low, high]), torch.zeros(2, 1, dtype=F64), atol=1e-12, rtol=0)


# --- posteriors ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning")
@pytest.mark.parametrize(
    ("method", "task"), [("map", "classes"), ("ensemble", "numbers"), ("laplace", "classes")]
)
def test_coverage_of_posteriors_and_files(method, task, tmp_path):
    posterior, x, y, net = fitted(method, task, rows=240, train=60)
    held = (x[60:140], y[60:140])
    groups = (x[:, 0] > 0).tolist()
    train = (x[:60], y[:60])
    c = bayou.conformal(posterior, held, 0.8, groups=groups[60:140], train=train)
    c.save(tmp_path / "c.bayou")
    loaded = Conformal.load(tmp_path / "c.bayou", net)
    assert (loaded.level, loaded.groups, loaded.rows) == (0.8, c.groups, c.rows)
    new = x[140:]
    if task == "classes":
        mask = c.set(new, groups[140:])
        assert torch.equal(mask, loaded.set(new, groups[140:]))
        hits = mask.gather(-1, y[140:].unsqueeze(-1))
    else:
        low, high = c.interval(new, groups[140:])
        assert torch.equal(high, loaded.interval(new, groups[140:])[1])
        hits = (low <= y[140:]) & (y[140:] <= high)
    # Of one set of held-out rows; the smaller group counts.
    spread = math.sqrt(0.16 * (1 / 40 + 1 / 100))
    assert abs(float(hits.double().mean()) - 0.8) < 3 * spread


@pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning")
def test_invalid_arguments_raise(tmp_path):
    posterior, x, y, net = fitted("map", "classes", rows=240, train=60)
    held = (x[60:100], y[60:100])
    c = bayou.conformal(posterior, held)
    for call, said in {
        lambda: bayou.conformal(
            posterior, (x[60:68], y[60:68])
        ): "8 held-out rows are too few for level=0.9.*least 9",
        lambda: bayou.conformal(posterior, held, 0.99): "at least 99, or a lower level",
        lambda: bayou.conformal(
            posterior, held, groups=["a"] * 35 + ["b"] * 5
        ): "5 held-out rows of the group 'b'",
        lambda: bayou.conformal(posterior, held, groups=["a"]): "1 labels for 40 rows",
        lambda: bayou.conformal(posterior, held, 1.0): "strictly between 0 and 1, got 1.0",
        lambda: bayou.conformal(
            posterior, held, score="cqr"
        ): "lac, aps where y are classes, got 'cqr'",
        lambda: bayou.conformal(posterior, (x[60:100], x[60:100])): "needs class indices",
        lambda: bayou.conformal(posterior, (x[60:100], y[60:99])): "x has 40 rows but y has 39",
        lambda: bayou.conformal(posterior, (x[60:100, :1], y[60:100])): "the network cannot take x",
        lambda: bayou.conformal(
            posterior, (x[40:100], y[40:100]), train=(x[:60], y[:60])
        ): "20 of 60 held-out rows",
        lambda: c.interval(x): "classes, which have no order: use set",
        lambda: c.set(x, groups=["a"] * 240): "not for the held-out rows",
        lambda: bayou.conformal(posterior, held, groups=[1] * 40).set(
            x
        ): "pass the group of each row",
        lambda: bayou.conformal(posterior, held, groups=[1] * 40).set(
            x[:1], [2]
        ): "no held-out row is in the group 2",
        lambda: bayou.load(tmp_path / "c.bayou", net): "holds a 'conformal', not a posterior",
    }.items():
        c.save(tmp_path / "c.bayou")
        with pytest.raises(ValueError, match=said):
            call()


def test_repeated_rows_do_not_count_as_training_rows():
    """Rows of few values repeat themselves: some in both parts are what chance brings."""
    x = torch.randint(3, (400, 2), generator=torch.Generator().manual_seed(0)).to(F64)
    posterior = Linear(bayou.Gaussian(1.0))
    conformal(posterior, (x[:100], x[:100]), train=(x[100:], x[100:]))
