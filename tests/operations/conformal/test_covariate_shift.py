"""Weights of inputs restore the coverage that a covariate shift takes; estimates are near them."""

import math

import pytest
import torch
from torch.testing import assert_close

import bayou
from bayou.operations import Conformal, WeightedConformal, density_ratio, recency_weights
from bayou.operations.conformal import EffectiveRowsWarning, RecencyWeights
from tests.operations.conformal.simulated import (
    F64,
    Forecast,
    Logits,
    assert_mean,
    contained,
    covered,
    generator,
)
from tests.operations.fits import fitted

SHIFT = 1.0


def log_ratio(x):
    """log N(x_0; SHIFT, 1) − log N(x_0; 0, 1)."""
    return SHIFT * x[:, 0] - SHIFT**2 / 2


def ratio(x):
    return log_ratio(x).exp()


def draw(rows, g, shift=0.0):
    x = torch.randn(rows, 2, generator=g, dtype=F64)
    x[:, 0] += shift
    return x, (0.3 + x[:, :1].abs()) * torch.randn(rows, 1, generator=g, dtype=F64)


def test_known_weights_restore_the_coverage():
    plain, weighted, by_numbers = [], [], []
    for seed in range(120):
        g = generator(seed)
        held_out, (new, y) = draw(250, g), draw(300, g, SHIFT)
        settings = {"score": "split", "level": 0.9}
        plain.append(covered(bayou.conformal(Forecast(), held_out, **settings).interval(new), y))
        c = bayou.conformal(Forecast(), held_out, weights=ratio, **settings)
        weighted.append(covered(c.interval(new), y))
        c = bayou.conformal(Forecast(), held_out, weights=ratio(held_out[0]), **settings)
        p = Forecast().predict(new)
        by_numbers.append(covered(c.interval(p, weights=ratio(new)), y))
    assert weighted == by_numbers
    assert sum(plain) / len(plain) < 0.83
    assert_mean(weighted, 0.9, 0.9 + 0.015)


def test_known_weights_restore_the_coverage_of_sets():
    """p(y | x) is softmax(3·x) where it says softmax(x) near and softmax(4·x) far from 0."""
    plain, weighted = [], []
    for seed in range(60):
        g = generator(seed)

        def rows(count, shift, g=g):
            x = torch.randn(count, 3, generator=g, dtype=F64)
            x[:, 0] += shift
            noise = -torch.empty(count, 3, dtype=F64).exponential_(generator=g).log()
            scale = torch.where(x[:, :1] > 0.5, 0.2, 2.0)
            return x, (scale * x + noise).argmax(-1)

        held_out, (new, y) = rows(300, 0.0), rows(400, SHIFT)
        for weights, values in ((None, plain), (ratio, weighted)):
            c = bayou.conformal(Logits(), held_out, 0.8, weights=weights)
            values.append(contained(c.set(new), y))
    assert sum(plain) / len(plain) < 0.78
    assert_mean(weighted, 0.8, 0.82)


def test_equal_weights_are_the_plain_method():
    held_out, (new, _) = draw(100, generator(0)), draw(20, generator(1))
    for groups in (None, (held_out[0][:, 0] > 0).tolist()):
        new_groups = None if groups is None else (new[:, 0] > 0).tolist()
        options = {"level": 0.8, "score": "split", "groups": groups}
        plain = bayou.conformal(Forecast(), held_out, **options)
        c = bayou.conformal(Forecast(), held_out, weights=torch.ones(100), **options)
        expected = plain.interval(new, new_groups)
        found = c.interval(new, new_groups, weights=torch.ones(20))
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        assert isinstance(plain, Conformal)
        assert isinstance(c, WeightedConformal)
        assert_close(sum(c.effective_rows), 100.0)


def test_rows_unlike_all_held_out_ones_have_infinite_intervals():
    c = bayou.conformal(Forecast(), draw(50, generator(0)), weights=torch.ones(50))
    new = torch.zeros(3, 2, dtype=F64)
    low, high = c.interval(new, weights=torch.tensor([1.0, 5.0, 50.0]))
    assert (low.isinf() & high.isinf()).flatten().tolist() == [False, False, True]


@pytest.mark.parametrize(
    "by",
    [
        "logistic",
        pytest.param("network", marks=pytest.mark.slow),
        pytest.param("flows", marks=pytest.mark.slow),
    ],
)
def test_estimated_ratios_are_near_the_true_one(by):
    held_out, _ = draw(600, generator(0))
    new, _ = draw(600, generator(1), SHIFT)
    estimate = density_ratio(held_out, new, by=by, folds=2, seed=3)
    truth = ratio(held_out)
    for weights, rows in ((estimate.held_out, held_out), (estimate(new), new)):
        correlation = torch.corrcoef(torch.stack([weights.log(), log_ratio(rows)]))[0, 1]
        assert correlation > {"logistic": 0.99, "network": 0.9, "flows": 0.7}[by]
    assert 0.75 < float(estimate.held_out.mean()) < 1.3
    assert abs(float((estimate.held_out - truth).mean())) < 0.3
    again = density_ratio(held_out, new, by=by, folds=2, seed=3)
    assert torch.equal(again.held_out, estimate.held_out)
    assert torch.equal(again(new), estimate(new))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["network", "flows"])
def test_estimated_ratios_restore_the_coverage_where_a_logistic_regression_cannot(by):
    """New rows lie on both sides of the held-out ones, where the noise is larger."""
    results = {"logistic": [], by: []}
    for seed in range(3):
        g = generator(seed)
        held_out = draw(1200, g)

        def spread(rows, g=g):
            x, _ = draw(rows, g)
            sign = 2.0 * (torch.rand(rows, generator=g) < 0.5) - 1
            x[:, 0] = 1.5 * sign + 0.5 * x[:, 0]
            return x, (0.3 + x[:, :1].abs()) * torch.randn(rows, 1, generator=g, dtype=F64)

        unlabeled, _ = spread(1200)
        new, y = spread(2000)
        for name, values in results.items():
            weights = density_ratio(held_out[0], unlabeled, by=name, seed=seed)
            c = bayou.conformal(Forecast(), held_out, score="split", weights=weights)
            values.append(covered(c.interval(new), y))
    assert sum(results["logistic"]) / 3 < 0.83
    values = torch.tensor(results[by])
    assert 0.88 < float(values.mean()) < 0.92


def test_shift_is_the_logistic_ratio_of_unlabeled_rows():
    held_out, (new, _) = draw(300, generator(0)), draw(200, generator(1), SHIFT)
    c = bayou.conformal(Forecast(), held_out, shift="covariate", unlabeled=new)
    expected = bayou.conformal(
        Forecast(), held_out, weights=density_ratio(held_out[0], new, seed=0)
    )
    assert torch.equal(c.interval(new)[1], expected.interval(new)[1])


def test_clipping_and_small_effective_samples():
    held_out, y = draw(200, generator(0))
    new, _ = draw(200, generator(1), 6.0)
    with pytest.warns(EffectiveRowsWarning, match=r"average 0\.0.* and not about 1"):
        estimate = density_ratio(held_out, new, max_weight=20.0)
    assert float(estimate(new).max()) == pytest.approx(20.0)
    low, high = bayou.conformal(Forecast(), (held_out, y), weights=estimate).interval(new)
    assert bool(low.isinf().all() & high.isinf().all())
    few = torch.full((200,), 1e-3)
    few[:10] = 1.0
    with pytest.warns(EffectiveRowsWarning, match=r"effective sample of 10\.4 of 200 held-out"):
        bayou.conformal(Forecast(), (held_out, y), weights=few)
    weights = torch.tensor([1.0, 1.0, 2.0])
    assert RecencyWeights(weights).effective_rows == pytest.approx(16 / 6)


def test_recency_weights_halve_with_age_and_follow_a_change():
    assert_close(
        recency_weights(5, 2.0).held_out, torch.exp2(torch.arange(-2, 0.1, 0.5, dtype=F64))
    )
    times = torch.tensor([10.0, 30.0, 20.0])
    assert recency_weights(times, 10.0).held_out.tolist() == [0.25, 1.0, 0.5]
    plain, recent = [], []
    for seed in range(150):
        y = torch.randn(800, 1, generator=generator(seed), dtype=F64)
        y[300:] *= 2  # from row 300 on; rows 500 .. 799 are new
        x = torch.zeros_like(y)
        for weights, values in ((None, plain), (recency_weights(500, 40.0), recent)):
            held_out = (x[:500], y[:500])
            c = bayou.conformal(Forecast(), held_out, score="split", weights=weights)
            values.append(covered(c.interval(x[500:]), y[500:]))
    assert sum(plain) / len(plain) < 0.85
    assert_mean(recent, 0.885, 0.91)  # the gap of Barber et al.: old rows weigh 3 %


@pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning")
def test_files(tmp_path):
    posterior, x, y, net = fitted("map", "numbers", rows=240, train=60)
    held_out, new = (x[60:160], y[60:160]), x[160:]
    path = tmp_path / "c.bayou"
    weights = density_ratio(x[60:160], new)
    c = bayou.conformal(posterior, held_out, 0.8, weights=weights, groups=[0, 1] * 50)
    c.save(path)
    groups = [1, 0] * 40
    expected = c.interval(new, groups)
    loaded = WeightedConformal.load(path, net, weights=weights)
    assert torch.equal(loaded.interval(new, groups)[0], expected[0])
    loaded = WeightedConformal.load(path, net)
    assert torch.equal(loaded.interval(new, groups, weights=weights(new))[0], expected[0])
    with pytest.raises(ValueError, match="those of new rows must be given"):
        loaded.interval(new, groups)
    with pytest.raises(ValueError, match="holds a 'weighted conformal', expected a 'conformal'"):
        Conformal.load(path, net)
    c = bayou.conformal(posterior, held_out, 0.8, weights=recency_weights(100, 30.0))
    c.save(path)
    p = posterior.predict(new, seed=0)
    assert torch.equal(WeightedConformal.load(path, net).interval(p)[0], c.interval(new)[0])


def test_invalid_arguments_raise():
    held_out = draw(60, generator(0))
    x = held_out[0]
    ones = torch.ones(60)
    with_groups = bayou.conformal(Forecast(), held_out, weights=ones)
    discrete = x.round()
    for call, message in {
        lambda: bayou.conformal(Forecast(), held_out, weights=ones[:5]): r"\(60,\), got \(5,\)",
        lambda: bayou.conformal(Forecast(), held_out, weights=-ones): "finite and not negative",
        lambda: bayou.conformal(Forecast(), held_out, weights=0 * ones): "have the weight 0",
        lambda: bayou.conformal(
            Forecast(), held_out, weights=ones, shift="covariate", unlabeled=x
        ): "weights= and shift= are two corrections",
        lambda: bayou.conformal(
            Forecast(), held_out, shift="covariate"
        ): "both shift= and unlabeled=",
        lambda: bayou.conformal(Forecast(), held_out, shift="x", unlabeled=x): "or None, got 'x'",
        lambda: bayou.conformal(Forecast(), held_out).interval(
            x, weights=ones
        ): "not for the held-out",
        lambda: with_groups.interval(Forecast().predict(x)): "a prediction was passed; pass x",
        lambda: density_ratio(x, x[:, :1]): "rows of 2 numbers and new of 1",
        lambda: density_ratio(x, x[:10]): "10 new rows are too few",
        lambda: density_ratio(x, x, by="trees"): "logistic, network, flows, got 'trees'",
        lambda: density_ratio(x, x, folds=1): "folds must be a whole number of 2",
        lambda: density_ratio(x, x, max_weight=math.inf): "above 1, got inf",
        lambda: density_ratio(x / 0, x): "held_out has values that are not finite",
        lambda: density_ratio(x.numpy(), x): "must be a tensor of inputs",
        lambda: density_ratio(discrete, discrete, by="flows"): "no density for a flow",
        lambda: density_ratio(x, x)(x[:, :1]): "rows of 2 numbers, got rows of 1",
        lambda: recency_weights(10, 0.0): "half_life must be a positive number",
        lambda: recency_weights(0, 1.0): "number of held-out rows or their times, got 0",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.peers
def test_the_logistic_ratio_is_that_of_scikit_learn():
    from sklearn.linear_model import LogisticRegression

    from bayou.operations.conformal.covariate_shift import LogisticRatio

    held_out, _ = draw(200, generator(0))
    new, _ = draw(300, generator(1), SHIFT)
    labels = torch.arange(500) >= 200
    model = LogisticRegression(C=1.0, tol=1e-12, max_iter=1000)
    model.fit(torch.cat([held_out, new]).numpy(), labels.numpy())
    expected = torch.from_numpy(model.decision_function(new.numpy())) - math.log(300 / 200)
    assert_close(LogisticRatio(held_out, new)(new), expected, rtol=1e-6, atol=1e-6)
