"""The verdict on new rows: its false alarms, its power, and what it says."""

import math

import pytest
import scipy.stats
import torch

import bayou
from bayou.diagnostics import InputColumn, ReferenceRows, watch
from bayou.diagnostics.input_columns import compare_column, describe_mistakes
from bayou.diagnostics.relation import calibration_tests
from bayou.diagnostics.target_scores import target_scores
from bayou.likelihoods.predictive import Predictive
from tests.diagnostics.watched_worlds import LogisticPosterior, World


def largest_count(n, rate):
    """Return a count that n trials with this rate exceed with a probability of 0.1 %."""
    return int(scipy.stats.binom.ppf(0.999, n, rate))


def verdicts(sets, change, alpha=0.05, rows=120, **world):
    """Return the reports on simulated sets of new rows."""
    reports = []
    for seed in range(sets):
        simulation = World(seed, **world)
        x, y = change(simulation, simulation.inputs(rows))
        reports.append(
            watch(simulation.posterior, simulation.reference, x, y, alpha=alpha, seed=seed)
        )
    return reports


def clean(world, x):
    return x, world.targets(x)


def wider_noise(world, x):
    return x, world.targets(x, noise=2 * world.noise)


def other_slope(world, x):
    weights = world.weights.clone()
    weights[1] += 0.6
    return x, world.targets(x, weights)


def shifted_mean(world, x):
    x[:, 2] += 0.5
    return x, world.targets(x)


def correlated(world, x):
    x[:, 1] = 0.7 * x[:, 0] + math.sqrt(0.51) * x[:, 1]
    return x, world.targets(x)


def far_inputs(world, x):
    x[:, 0] += 1.0
    return x, world.targets(x)


def other_units(world, x):
    y = world.targets(x)
    x[:, 3] *= 1000
    return x, y


@pytest.mark.slow
def test_clean_rows_raise_a_false_alarm_at_the_rate_that_was_promised():
    reports = verdicts(200, clean, alpha=0.05, rows=60, columns=3, train=100, held_out=60)
    false_alarms = sum(not report.is_expected for report in reports)
    assert false_alarms <= largest_count(200, 0.05)


@pytest.mark.slow
def test_shifted_inputs_do_not_look_like_a_changed_relation_even_for_a_wrong_model():
    reports = verdicts(40, far_inputs, misfit=0.3, columns=3, train=150, held_out=150, rows=150)
    assert all(report.inputs == "shifted" for report in reports)
    false_alarms = sum(report.relation == "changed" for report in reports)
    assert false_alarms <= largest_count(40, 0.025)


def test_clean_rows_are_as_expected():
    reports = verdicts(2, clean, alpha=0.01)
    assert [report.verdict for report in reports] == ["as expected"] * 2
    assert all(report.relation == report.inputs == "as expected" for report in reports)


@pytest.mark.parametrize(
    ("change", "columns", "verdict", "subject"),
    [
        (wider_noise, 4, "the relation has changed", "spread of y"),
        (other_slope, 4, "the relation has changed", "residuals by input"),
        (shifted_mean, 10, "inputs have shifted", "x3"),
        (correlated, 4, "inputs have shifted", "correlations"),
        (other_units, 4, "inputs have shifted", "x4"),
    ],
)
def test_a_shift_is_found_and_named(change, columns, verdict, subject):
    reports = verdicts(1, change, alpha=0.01, rows=300, columns=columns, train=400, held_out=200)
    for report in reports:
        assert report.verdict == verdict
        assert subject in [test.subject for test in report.significant]
        assert verdict in str(report)


def test_a_changed_slope_names_its_input():
    (report,) = verdicts(1, other_slope, rows=300, held_out=300)
    (test,) = (test for test in report.significant if test.subject == "residuals by input")
    assert "x2" in test.text


def test_a_unit_is_named_and_the_relation_is_not_judged_outside_the_range():
    (report,) = verdicts(1, other_units, rows=200)
    assert "about 1,000 times larger" in report.findings[0]
    assert report.relation == "cannot tell"


def test_few_rows_cannot_be_judged_and_rows_without_targets_by_their_inputs_only():
    world = World(0)
    x = world.inputs(10)
    assert watch(world.posterior, world.reference, x).verdict == "cannot tell"
    missing = watch(world.posterior, world.reference, x, mistakes=["Column 'a' is missing."])
    assert missing.verdict == "inputs have shifted"
    report = watch(world.posterior, world.reference, world.inputs(50))
    assert (report.verdict, report.relation) == ("as expected", "cannot tell")
    assert not [test for test in report.tests if test.family in ("relation", "calibration")]


def test_without_held_out_rows_the_predictions_decide():
    world = World(0)
    reference = ReferenceRows.of(world.inputs(200))
    x = world.inputs(200)
    assert watch(world.posterior, reference, x, world.targets(x)).relation == "as expected"
    report = watch(world.posterior, reference, x, world.targets(x, noise=1.0))
    assert report.relation == "changed"
    assert "never calibrated" in " ".join(report.reasons)


def test_a_posterior_that_was_never_calibrated_has_no_changed_relation():
    world = World(0)
    world.posterior.likelihood = bayou.Gaussian(0.2).bind(dtype=torch.float64)
    x = world.inputs(200)
    report = watch(world.posterior, world.reference, x, world.targets(x))
    assert report.verdict == "as expected"
    assert any(test.family == "calibration" for test in report.significant)
    assert "calibrate" in " ".join(report.advice)


def test_a_trend_is_found_if_rows_are_in_order():
    world = World(0, held_out=200)
    x = world.inputs(200)
    drift = torch.linspace(-0.4, 0.4, 200, dtype=torch.float64)[:, None]
    y = world.targets(x) + drift
    assert watch(world.posterior, world.reference, x, y).relation == "as expected"
    report = watch(world.posterior, world.reference, x, y, in_order=True)
    assert report.significant[0].subject == "trend of location of y"


def test_classes_are_compared():
    world = World(0, held_out=300)
    posterior = LogisticPosterior(2 * world.weights)

    def labels(x, weights):
        u = torch.rand(len(x), generator=world.generator, dtype=torch.float64)
        return (u < torch.sigmoid(x @ weights)).long()

    x_held = world.inputs(300)
    reference = ReferenceRows.of(world.inputs(300), (x_held, labels(x_held, 2 * world.weights)))
    x = world.inputs(300)
    report = watch(posterior, reference, x, labels(x, 2 * world.weights))
    assert report.verdict == "as expected"
    report = watch(posterior, reference, x, labels(x, 0.3 * world.weights))
    assert report.verdict == "the relation has changed"


def test_arrays_are_compared_by_the_outputs_of_the_network():
    world = World(0, columns=12)

    class Flat:
        def predict(self, x, samples=None, *, seed=0):
            return world.posterior.predict(x.flatten(1), samples, seed=seed)

    def images(x):
        return x.reshape(-1, 1, 3, 4)

    x_held = world.inputs(200)
    reference = ReferenceRows.of(images(world.inputs(300)), (images(x_held), world.targets(x_held)))
    report = watch(Flat(), reference, images(world.inputs(200)))
    assert report.is_expected
    assert {test.subject for test in report.tests} >= {"outputs of the network"}
    bright = images(world.inputs(200)) + 1.0
    subjects = [test.subject for test in watch(Flat(), reference, bright).significant]
    assert "mean of the entries" in subjects


def test_categories_missing_values_and_unknown_levels_are_tested():
    codes = torch.tensor([0.0] * 60 + [1.0] * 40)
    reference = InputColumn("city", codes, ("a", "b"))
    (same,) = compare_column(reference, InputColumn("city", codes[::2], ("a", "b")))
    assert same.p > 0.9
    values = torch.cat((codes, torch.full((10,), 2.0)))
    unknown, _ = compare_column(reference, InputColumn("city", values, ("a", "b"), unknown=("z",)))
    assert unknown.name == "Fisher, unknown categories"
    assert unknown.p == pytest.approx(scipy.stats.hypergeom.sf(9, 210, 10, 110), rel=1e-9)
    assert "'z'" in unknown.text
    numbers = torch.arange(100.0)
    holes = numbers.clone()
    holes[:30] = float("nan")
    missing, ks = compare_column(InputColumn("n", numbers), InputColumn("n", holes))
    assert missing.p == pytest.approx(
        scipy.stats.fisher_exact([[0, 100], [30, 70]]).pvalue, rel=1e-9
    )
    assert ks.p < 0.01


def test_expected_unknown_categories_are_no_alarm():
    # A tenth of the training rows has a category of its own: so will new rows.
    codes = torch.cat((torch.zeros(90), torch.arange(1.0, 11.0)))
    levels = tuple(map(str, range(11)))
    reference = InputColumn("shop", codes, levels, singletons=0.1)
    new = InputColumn("shop", torch.cat((torch.zeros(92), torch.full((8,), 11.0))), levels)
    unknown = compare_column(reference, new)[0]
    assert unknown.p > 0.5


def test_mistakes_are_described():
    numbers = InputColumn("area", torch.rand(200) * 50 + 20)
    assert describe_mistakes(numbers, numbers) == []
    constant = InputColumn("area", torch.full((30,), 42.0))
    assert "is constant" in describe_mistakes(numbers, constant)[0]
    empty = InputColumn("area", torch.full((30,), float("nan")))
    assert "has no numbers" in describe_mistakes(numbers, empty)[0]
    smaller = InputColumn("area", numbers.values[:80] / 100)
    assert "100 times smaller" in describe_mistakes(numbers, smaller)[0]
    moved = InputColumn("area", numbers.values + 60)
    assert describe_mistakes(numbers, moved) == []


def test_scores_have_their_expectation_under_the_predictive():
    torch.manual_seed(0)
    outputs = torch.randn(5, 2000, 1, dtype=torch.float64)
    p = Predictive(bayou.Gaussian(0.7).bind(dtype=torch.float64), outputs)
    y = torch.cat([p.sample(1, seed)[0, i : i + 1] for i, seed in enumerate(range(2000))])
    scores = target_scores(p, y)
    for values in (scores.location, scores.spread, scores.log_score):
        assert abs(float(values.mean())) < 4 * float(values.std()) / 2000**0.5
    assert float(scores.log_score.std()) == pytest.approx(1.0, abs=0.1)
    assert scipy.stats.kstest(scores.pit[:, 0].numpy(), "uniform").pvalue > 0.001
    assert min(test.p for test in calibration_tests(scores)) > 0.001


def test_sure_predictions_of_few_rows_are_tested_exactly():
    # 20 rows with a probability of 0.02, of which 3 occur: the normal distribution has 2e-5.
    p = Predictive(
        bayou.Categorical().bind(),
        torch.tensor([0.98, 0.02], dtype=torch.float64).log().expand(1, 20, 2),
    )
    y = torch.zeros(20, dtype=torch.long)
    y[:3] = 1
    expected = scipy.stats.binom.sf(2, 20, 0.02)
    tests = calibration_tests(target_scores(p, y), simulations=20_000)
    assert len(tests) == 3
    for test in tests:
        assert test.p == pytest.approx(expected, abs=4 * (expected / 20_000) ** 0.5)


@pytest.mark.slow
def test_log_scores_of_few_rows_are_exchangeable_with_those_of_draws():
    # The mean of 20 log scores of a Poisson with a small rate is far from normal.
    likelihood = bayou.likelihoods.Poisson().bind()
    p = Predictive(likelihood, torch.full((1, 20, 1), -3.0, dtype=torch.float64))
    p_values = []
    for seed in range(400):
        scores = target_scores(p, p.sample(1, seed)[0], seed)
        p_values.append(calibration_tests(scores, 199, seed)[-1].p)
    for level in (0.01, 0.05, 0.2):
        rate = sum(p <= level for p in p_values) / 400
        assert rate <= level + 3.5 * (level * (1 - level) / 400) ** 0.5


def test_without_held_out_rows_no_test_is_reported_twice():
    world = World(0)
    posterior = world.posterior
    x = world.inputs(60)
    report = watch(posterior, ReferenceRows.of(world.inputs(200)), x, world.targets(x))
    assert {test.family for test in report.tests} >= {"relation"}
    assert "calibration" not in {test.family for test in report.tests}


def test_counts_have_uniform_transforms():
    torch.manual_seed(0)
    likelihood = bayou.likelihoods.Poisson().bind()
    p = Predictive(likelihood, torch.full((1, 3000, 1), 0.5, dtype=torch.float64))
    y = p.sample(1, 0)[0]
    scores = target_scores(p, y)
    assert scipy.stats.kstest(scores.pit[:, 0].numpy(), "uniform").pvalue > 0.001


def test_censored_times_have_uniform_transforms():
    torch.manual_seed(0)
    likelihood = bayou.likelihoods.Censored(bayou.likelihoods.Weibull()).bind()
    outputs = torch.full((1, 3000, 1), 0.3, dtype=torch.float64)
    p = Predictive(likelihood, outputs)
    time = Predictive(likelihood.of, outputs).sample(1, 0)[0]
    limit = torch.rand(3000, 1, dtype=torch.float64) * 3
    y = torch.cat((torch.minimum(time, limit), (time <= limit).double()), 1)
    scores = target_scores(p, y)
    assert scores.log_score is None
    assert scipy.stats.kstest(scores.pit[:, 0].numpy(), "uniform").pvalue > 0.001


def test_a_reference_is_saved_and_keeps_a_sample(tmp_path):
    world = World(0)
    reference = ReferenceRows.of(
        world.inputs(500), (world.inputs(80), torch.zeros(80, 1)), max_rows=100, names="abcd"
    )
    assert (len(reference.x), len(reference.held_x), reference.rows) == (100, 80, 500)
    reference.save(tmp_path / "reference.bayou")
    loaded = ReferenceRows.load(tmp_path / "reference.bayou")
    assert torch.equal(loaded.x, reference.x)
    assert torch.equal(loaded.held_y, reference.held_y)
    assert [column.name for column in loaded.columns] == ["a", "b", "c", "d"]
    assert (loaded.names, loaded.rows) == (reference.names, 500)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.ones(30, 5)}, "rows of shape"),
        ({"x": torch.ones(30, 4), "y": torch.ones(29, 1)}, "30 rows"),
        ({"x": torch.full((30, 4), float("nan"))}, "not finite"),
        ({"x": torch.ones(30, 4), "alpha": 1.5}, "alpha"),
        ({"x": None}, "columns"),
        ({"x": torch.ones(30, 4), "columns": [InputColumn("q", torch.ones(30))]}, "no columns q"),
    ],
)
def test_what_does_not_match_is_an_error(arguments, message):
    world = World(0)
    with pytest.raises(ValueError, match=message):
        watch(world.posterior, world.reference, **arguments)


def test_a_report_is_plain_values():
    (report,) = verdicts(1, wider_noise)
    plain = report.to_json()
    assert plain["verdict"] == "the relation has changed"
    assert {test["family"] for test in plain["tests"]} == {
        "columns",
        "joint",
        "relation",
        "calibration",
    }
