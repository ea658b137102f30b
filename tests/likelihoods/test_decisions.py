"""Decisions by expected utility: the newsvendor in closed form, classes by enumeration, the value of
information by its definition, and probabilities of thresholds beside scipy.
"""

import itertools
import math

import pytest
import scipy.stats
import torch
from torch.testing import assert_close

import bayou
from bayou.likelihoods import (
    Censored,
    HeteroscedasticGaussian,
    KnownNoise,
    LogNormal,
    NegativeBinomial,
    Newsvendor,
    Ordinal,
    Poisson,
    StudentT,
    Weibull,
    decisions,
)
from bayou.likelihoods.continuous import BoundMarginal, UnitGaussian
from bayou.likelihoods.joined import join_samples
from bayou.likelihoods.logarithm import BoundLog
from bayou.likelihoods.predictive import Predictive
from bayou.select import by_name

F64 = torch.float64
NORMAL = scipy.stats.norm


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64)


def predict(likelihood, outputs):
    return Predictive(likelihood.bind(dtype=F64), outputs)


def numbers(samples=8, rows=5, noise=0.5):
    return predict(bayou.Gaussian(noise), 2 * normal(samples, rows, 1))


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shortage", "surplus"), [(9.0, 1.0), (1.0, 1.0), (1.0, 40.0)])
def test_the_newsvendor_of_a_normal_demand(shortage, surplus):
    """E[cost] at the best order is (shortage + surplus)·σ·φ(z), z = Φ⁻¹(q) (Arrow et al. 1951)."""
    level = shortage / (shortage + surplus)
    f = normal(1, 4, 1)
    decision = predict(bayou.Gaussian(0.3), f).decide(Newsvendor(shortage, surplus))
    expected = f[0] + 0.3 * NORMAL.ppf(level)
    assert_close(decision.action, expected, rtol=0, atol=1e-12)
    cost = (shortage + surplus) * 0.3 * NORMAL.pdf(NORMAL.ppf(level))
    assert_close(decision.expected_utility, torch.full((4, 1), -cost, dtype=F64), rtol=1e-3, atol=0)
    assert_close(decision.perfect_information, -decision.expected_utility)
    assert decision.weights_information.isnan().all()  # of one function
    assert decision.expected_utilities.shape == (4, 1, 1)
    assert decision.abstains is None


@pytest.mark.parametrize(("shortage", "surplus"), [(9.0, 1.0), (1.0, 1.0), (1.0, 99.0)])
def test_expected_costs_are_as_accurate_as_the_guide_says(shortage, surplus):
    """E[(a − Y)₊] = a·F(a) − E[Y; Y < a], which has a closed form for these three laws."""
    level = shortage / (shortage + surplus)
    z = NORMAL.ppf(level)
    t = scipy.stats.t(3.0)
    mean = math.exp(0.5)
    cases = [  # likelihood, order, E[Y], E[Y; Y < order], tolerance
        (bayou.Gaussian(1.0), z, 0.0, -NORMAL.pdf(z), 7e-5),
        (LogNormal(1.0), math.exp(z), mean, mean * NORMAL.cdf(z - 1), 2e-4),
        (
            StudentT(3.0, 1.0),
            t.ppf(level),
            0.0,
            -(3 + t.ppf(level) ** 2) / 2 * t.pdf(t.ppf(level)),
            7e-4,
        ),
    ]
    for likelihood, order, expectation, below, tolerance in cases:
        left_over = order * level - below
        missing = left_over - (order - expectation)
        cost = shortage * missing + surplus * left_over
        prediction = predict(likelihood, torch.zeros(1, 1, 1, dtype=F64))
        decision = prediction.decide(Newsvendor(shortage, surplus))
        assert -float(decision.expected_utility) == pytest.approx(cost, rel=tolerance)


def test_what_the_weights_are_worth_to_a_newsvendor():
    """With known weights the demand is normal; before, it has all functions' quantile."""
    prediction = numbers()
    decision = prediction.decide(Newsvendor(4.0, 1.0))
    order = prediction.quantile(0.8)
    assert_close(decision.action, order)

    def cost(mean, std, a):
        z = (a - mean) / std
        left_over = std * (z * NORMAL.cdf(z) + NORMAL.pdf(z))
        missing = left_over - (a - mean)
        return 4.0 * missing + left_over

    for row in range(5):
        means = prediction.outputs[:, row, 0].tolist()
        a = float(order[row])
        before = sum(cost(mean, 0.5, a) for mean in means) / len(means)
        after = 5.0 * 0.5 * NORMAL.pdf(NORMAL.ppf(0.8))
        assert -float(decision.expected_utility[row]) == pytest.approx(before, rel=1e-3)
        gain = float(decision.weights_information[row])
        assert gain == pytest.approx(before - after, rel=2e-3)


def test_squared_errors_are_worth_their_variances():
    """u = −(a − y)²: the mean is best, EVPI the variance, and weights the epistemic variance."""
    prediction = numbers()
    middle = prediction.mean.unsqueeze(0) + 0.1 * torch.arange(-2, 3, dtype=F64).reshape(5, 1, 1)
    decision = prediction.decide(lambda a, y: -((a - y) ** 2), middle)
    assert_close(decision.action, prediction.mean)
    variance = prediction.std.square()
    assert_close(-decision.expected_utility, variance, rtol=1e-3, atol=0)
    wide = torch.linspace(-9, 9, 1801, dtype=F64)
    decision = prediction.decide(lambda a, y: -((a - y) ** 2), wide)
    assert float((decision.action - prediction.mean).abs().max()) <= 0.005 + 1e-4
    assert_close(decision.perfect_information, variance, rtol=2e-3, atol=0)
    epistemic = prediction.epistemic_std.square()
    assert_close(decision.weights_information, epistemic, rtol=2e-3, atol=1e-3)


def test_counts_are_summed():
    rates = [2.0, 7.5]
    prediction = predict(Poisson(), torch.tensor(rates, dtype=F64).log().reshape(1, 2, 1))
    grid = torch.arange(0, 30, dtype=F64)
    decision = prediction.decide(lambda a, y: 5 * torch.minimum(a, y) - 2 * a, grid)
    for row, rate in enumerate(rates):
        demand = scipy.stats.poisson(rate)
        for a in (0, 3, 12):
            sold = sum(min(a, k) * demand.pmf(k) for k in range(200))
            utility = float(decision.expected_utilities[row, 0, a])
            assert utility == pytest.approx(5 * sold - 2 * a, abs=1e-4)
        assert float(decision.action[row]) == demand.ppf(0.6)
        assert float(decision.perfect_information[row]) == pytest.approx(
            3 * rate - float(decision.expected_utility[row]), abs=1e-3
        )


def test_many_counts_share_cells():
    prediction = predict(Poisson(), torch.full((1, 1, 1), math.log(1e5), dtype=F64))
    decision = prediction.decide(Newsvendor(1.0, 1.0))
    counts = torch.arange(97_000, 103_000, dtype=F64)
    mass = torch.from_numpy(scipy.stats.poisson(1e5).pmf(counts.numpy()))
    error = float((mass * (counts - decision.action).abs()).sum())
    assert -float(decision.expected_utility) == pytest.approx(error, rel=5e-3)


def test_closed_forms_over_functions_have_the_worth_of_their_functions():
    """y = F + noise with F ~ N(m, v): known weights leave the noise (one output stands for all)."""
    rows = torch.tensor([[[0.3, math.log(0.4), 0.25]], [[-2.0, math.log(0.1), 4.0]]], dtype=F64)
    prediction = Predictive(BoundMarginal(UnitGaussian()), rows.unsqueeze(0))
    decision = prediction.decide(Newsvendor(4.0, 1.0))
    factor = 5.0 * NORMAL.pdf(NORMAL.ppf(0.8))
    for row, (_, log_noise, variance) in enumerate(rows[:, 0].tolist()):
        noise = math.exp(log_noise)
        total = math.sqrt(noise**2 + variance)
        assert -float(decision.expected_utility[row]) == pytest.approx(factor * total, rel=1e-3)
        gain = float(decision.weights_information[row])
        assert gain == pytest.approx(factor * (total - noise), rel=2e-2)
    logarithms = Predictive(BoundLog(BoundMarginal(UnitGaussian())), rows[:1].unsqueeze(0))
    decision = logarithms.decide(Newsvendor(4.0, 1.0))
    assert torch.equal(decision.action, logarithms.quantile(0.8))
    gain = decision.weights_information
    assert bool((gain > 0).all() & (gain < decision.perfect_information).all())


def test_every_likelihood_of_numbers_decides():
    """The newsvendor's cost by quadrature agrees with its mean over draws of y."""
    flagged = Censored(Weibull(2.0))
    mixed = join_samples(
        [
            (bayou.Gaussian(0.5).bind(dtype=F64), normal(3, 2, 1)),
            (StudentT(3.0, 0.2).bind(dtype=F64), normal(2, 2, 1, seed=1)),
        ]
    )
    cases = [
        predict(StudentT(4.0, 0.5), normal(3, 2, 1)),
        predict(HeteroscedasticGaussian(), normal(3, 2, 2)),
        predict(LogNormal(0.5), normal(3, 2, 1)),
        predict(NegativeBinomial(2.0), normal(3, 2, 1)),
        predict(flagged, normal(3, 2, 1)),
        predict(KnownNoise(), normal(3, 2, 1)),
        Predictive(*mixed),
        predict(bayou.Gaussian((0.1, 0.4)), normal(3, 2, 2)),
    ]
    draws = 4_000
    for prediction in cases:
        utility = Newsvendor(3.0, 1.0)
        decision = prediction.decide(utility)
        y = prediction.sample(draws, seed=0).double()
        values = utility(decision.action, y)
        slack = 5 * values.std(0) / math.sqrt(draws)
        slack = slack + 5e-3 * decision.expected_utility.abs() + 1e-12
        assert bool(((values.mean(0) - decision.expected_utility).abs() < slack).all())
        informed = decision.weights_information
        assert bool((informed >= 0).all())
        assert bool((informed <= decision.perfect_information).all())


def test_row_blocks_change_nothing(monkeypatch):
    prediction = numbers(rows=7)
    grid = normal(11, 7, 1)
    classes = predict(bayou.Categorical(), normal(5, 7, 3))
    matrix = normal(4, 3)
    calls = [
        lambda: prediction.decide(Newsvendor(2.0, 1.0), abstain=0.7),
        lambda: prediction.decide(lambda a, y: -(a - y).abs(), grid),
        lambda: classes.decide(matrix, abstain=0.1),
    ]
    at_once = [call() for call in calls]
    monkeypatch.setattr(decisions, "MAX_BLOCK_NUMBERS", 12_000)
    for expected, call in zip(at_once, calls, strict=True):
        decision = call()
        for name in ("action", "expected_utilities", "perfect_information", "weights_information"):
            assert_close(getattr(decision, name), getattr(expected, name))


# --- classes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("abstain", [None, 0.4])
def test_decisions_of_classes_are_those_of_enumeration(abstain):
    prediction = predict(bayou.Categorical(), 2 * normal(6, 5, 3))
    utilities = normal(4, 3, seed=3)
    decision = prediction.decide(utilities, abstain=abstain, names=list("abcd"))
    by_function = prediction.outputs.softmax(-1)
    floor = -math.inf if abstain is None else -abstain
    for row in range(5):
        p = by_function[:, row].mean(0)
        expected = [sum(u * q for u, q in zip(us, p, strict=True)) for us in utilities]
        best = max(range(4), key=lambda a: float(expected[a]))
        assert int(decision.action[row]) == best
        assert_close(decision.expected_utilities[row], torch.stack(expected))
        utility = max(float(expected[best]), floor)
        assert float(decision.expected_utility[row]) == pytest.approx(utility)
        informed = sum(
            float(p[k]) * max(floor, *(float(utilities[a, k]) for a in range(4))) for k in range(3)
        )
        assert float(decision.perfect_information[row]) == pytest.approx(informed - utility)
        of_weights = [
            max(
                floor,
                *(sum(float(utilities[a, k] * q[row, k]) for k in range(3)) for a in range(4)),
            )
            for q in by_function
        ]
        gain = sum(of_weights) / 6 - utility
        assert float(decision.weights_information[row]) == pytest.approx(gain, abs=1e-12)
        if abstain is None:
            assert decision.abstains is None
            assert decision.labels[row] == "abcd"[best]
        else:
            is_left_out = float(expected[best]) < -abstain
            assert bool(decision.abstains[row]) == is_left_out
            assert decision.labels[row] == ("abstain" if is_left_out else "abcd"[best])
            saved = max(0.0, -abstain - float(expected[best]))
            assert float(decision.abstention_gain[row]) == pytest.approx(saved)


def test_the_best_of_two_costs_is_a_threshold_of_the_probability():
    """A miss costs r and a false alarm 1: flag where p > 1/(1 + r) (Elkan 2001)."""
    logits = torch.linspace(-4, 4, 41, dtype=F64).reshape(1, -1)
    prediction = predict(bayou.Bernoulli(), logits)
    p = logits[0].sigmoid()
    for ratio in (1.0, 10.0, 33.0):
        decision = prediction.decide([[0.0, -ratio], [-1.0, 0.0]])
        assert torch.equal(decision.action == 1, p > 1 / (1 + ratio))
        assert_close(-decision.expected_utility, torch.minimum(ratio * p, 1 - p))


def test_functions_that_agree_have_nothing_to_learn():
    logits = normal(1, 6, 3).expand(4, -1, -1)
    decision = predict(bayou.Categorical(), logits).decide(torch.eye(3))
    assert float(decision.weights_information.abs().max()) < 1e-12
    certain = predict(bayou.Categorical(), 1000 * torch.eye(3, dtype=F64).unsqueeze(1))
    decision = certain.decide(torch.eye(3))  # the functions are certain, and disagree
    assert float(decision.weights_information) == pytest.approx(2 / 3)
    assert float(decision.perfect_information) == pytest.approx(2 / 3)


def test_sequences_and_ordered_classes():
    tokens = predict(bayou.Categorical(), normal(3, 2, 4, 5))
    decision = tokens.decide(torch.eye(5))
    assert torch.equal(decision.action, tokens.mean.argmax(-1))
    ordered = predict(Ordinal(4), normal(3, 6, 1))
    cost = torch.tensor([[abs(a - k) for k in range(4)] for a in range(4)], dtype=F64)
    assert torch.equal(ordered.decide(-cost).action, ordered.quantile(0.5))


def test_invalid_decisions_raise():
    classes = predict(bayou.Categorical(), normal(3, 2, 3))
    prediction = numbers()
    newsvendor = Newsvendor(2.0, 1.0)
    for call, message in {
        lambda: classes.decide(torch.eye(2)): r"must be \(actions, 3\).*got \(2, 2\)",
        lambda: classes.decide(torch.full((2, 3), math.inf)): "utilities must be finite",
        lambda: classes.decide(newsvendor): "the utilities of classes are a matrix",
        lambda: classes.decide(torch.eye(3), [1, 2, 3]): "are the rows of the matrix",
        lambda: classes.decide(torch.eye(3), names=["a", "b"]): "names must be 3 different names",
        lambda: classes.decide(torch.eye(3), abstain=math.nan): "abstain must be a finite cost",
        lambda: classes.decide(torch.eye(3)).labels: "the actions have no names",
        lambda: prediction.decide(torch.eye(3)): "is a function u",
        lambda: prediction.decide(lambda a, y: y - a): "actions must be given",
        lambda: prediction.decide(lambda a, y: a - y, [[1.0]]): r"actions must be \(A,\)",
        lambda: prediction.decide(lambda a, y: a - y, [math.nan]): "actions must be finite",
        lambda: prediction.decide(lambda a, y: y.sum(), [1.0]): "must be elementwise",
        lambda: prediction.decide(lambda a, y: y / 0, [1.0]): "must be finite",
        lambda: prediction.decide(newsvendor, names=["a"]): "names are for a list of actions",
        lambda: Newsvendor(0.0, 1.0): "shortage must be a positive",
        lambda: prediction.exceeds(math.nan): "nan is none",
        lambda: prediction.exceeds(torch.zeros(3)): r"a number or a tensor \(5, 1\)",
        lambda: classes.exceeds(1.0): "classes have no order",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


# --- thresholds ---------------------------------------------------------------------------------


def test_exceeds_is_the_mean_of_scipys_survival_functions():
    f = normal(7, 4, 1)
    means = f.numpy()
    cases = [
        (bayou.Gaussian(0.5), 1.2, scipy.stats.norm(means, 0.5)),
        (StudentT(3.0, 0.5), 1.2, scipy.stats.t(3.0, means, 0.5)),
        (LogNormal(0.5), 1.2, scipy.stats.lognorm(0.5, scale=f.exp().numpy())),
        (LogNormal(0.5), -1.0, scipy.stats.lognorm(0.5, scale=f.exp().numpy())),
        (Poisson(), 2.0, scipy.stats.poisson(f.exp().numpy())),
        (Poisson(), 2.5, scipy.stats.poisson(f.exp().numpy())),
        (Censored(LogNormal(0.5)), 1.2, scipy.stats.lognorm(0.5, scale=f.exp().numpy())),
    ]
    for likelihood, threshold, law in cases:
        expected = torch.from_numpy(law.sf(threshold).mean(0))
        assert_close(predict(likelihood, f).exceeds(threshold), expected, rtol=1e-9, atol=1e-15)


def test_small_probabilities_keep_their_digits():
    prediction = predict(bayou.Gaussian(1.0), torch.zeros(1, 1, 1, dtype=F64))
    assert float(prediction.exceeds(20.0)) == pytest.approx(scipy.stats.norm.sf(20.0), rel=1e-9)


def test_small_probabilities_of_counts_keep_their_digits():
    rate = torch.tensor([[[-1.0]]], dtype=F64)
    for likelihood, law in (
        (Poisson(), scipy.stats.poisson(math.exp(-1.0))),
        (NegativeBinomial(2.0), scipy.stats.nbinom(0.5, 0.5 / (0.5 + math.exp(-1.0)))),
    ):
        p = float(predict(likelihood, rate).exceeds(30.0))
        assert p == pytest.approx(law.sf(30.0), rel=1e-9, abs=0.0)


def test_exceeds_of_all_other_likelihoods_is_the_share_of_draws():
    draws = 4000
    cases = [
        predict(NegativeBinomial(2.0), normal(3, 4, 1)),
        predict(Censored(Weibull(1.5)), normal(3, 4, 1)),
        predict(HeteroscedasticGaussian(), normal(3, 4, 2)),
        predict(KnownNoise(), normal(3, 4, 1)),
        predict(Ordinal(4), normal(3, 4, 1)),
    ]
    for prediction in cases:
        for threshold in (0.0, 1.0):
            p = prediction.exceeds(threshold)
            share = (prediction.sample(draws, seed=1) > threshold).to(F64).mean(0)
            assert bool(((p - share).abs() < 4.5 * (p * (1 - p) / draws).sqrt() + 1e-3).all())


def test_ordered_classes_exceed_by_their_numbers():
    prediction = predict(Ordinal(4), normal(3, 6, 1))
    pmf = prediction.probabilities
    for k in range(4):
        assert_close(prediction.exceeds(k), pmf[:, k + 1 :].sum(-1), rtol=1e-9, atol=1e-12)


def test_thresholds_may_differ_between_rows():
    prediction = numbers()
    thresholds = normal(5, 1, seed=5)
    p = prediction.exceeds(thresholds)
    for row, threshold in itertools.product(range(5), thresholds[:, 0].tolist()):
        if float(thresholds[row]) == threshold:
            assert_close(p[row], prediction.exceeds(threshold)[row])


@pytest.mark.slow
def test_thresholds_have_the_units_of_the_fit():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 2, generator=generator)
    y = 250.0 + 40.0 * x[:, :1] + 10.0 * torch.randn(120, 1, generator=generator)
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.SiLU(), torch.nn.Linear(8, 1))
    posterior = bayou.fit(net, (x, y), by_name("map", steps=60), progress=False, seed=0)
    prediction = posterior.predict(x)
    share = (prediction.sample(2000, seed=0) > 250.0).float().mean(0)
    assert float((prediction.exceeds(250.0) - share).abs().max()) < 0.06
    order = prediction.decide(Newsvendor(9.0, 1.0))
    assert_close(order.action, prediction.quantile(0.9))
    assert 200 < float(order.action.mean()) < 300
