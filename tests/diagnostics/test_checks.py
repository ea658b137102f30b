"""The gate: what is wrong is found and named, what is right passes."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, RidgeCV

import bayou
from bayou.diagnostics import baselines, check
from bayou.diagnostics.checks import _CheckedNll, _training_row_error
from bayou.metrics import row_nll
from bayou.network import Network
from bayou.network.target import Target
from bayou.posteriors import Empirical, Guided
from bayou.posteriors.guided import Bayesian

F64 = torch.float64

WEIGHT = torch.tensor([[1.0, -0.5, 0.0]], dtype=F64)


def regression(n, seed, noise=0.3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=F64)
    return x, x @ WEIGHT.T + noise * torch.randn(n, 1, generator=generator, dtype=F64)


def classes(n, seed, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=F64)
    p = torch.sigmoid(sharpness * x @ WEIGHT.T)[:, 0]
    return x, (torch.rand(n, generator=generator, dtype=F64) < p).long()


def points(likelihood, *weights, chains=1, n=100):
    """The posterior that is made of these weights of a linear network."""
    net = torch.nn.Linear(3, len(weights[0]), bias=False, dtype=F64)
    target = Target.build(net, likelihood, None, n)
    return Empirical(target, Network(net), {"weight": torch.stack(weights)}, chains=chains)


def line(noise=0.3, weight=WEIGHT, **options):
    """The linear network whose weights the data have, with this noise."""
    return points(bayou.Gaussian(noise), weight, **options)


def logits(scale):
    """The weights of a network of two classes, the second of which has so many times WEIGHT·x."""
    return torch.cat([0 * WEIGHT, scale * WEIGHT])


def classifier(*scales):
    return points(bayou.Categorical(), *map(logits, scales))


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


TRAIN, HELD = regression(100, 0), regression(200, 1)
CLASSES = classes(100, 0)


def test_the_constant_baseline_is_the_normal_distribution_of_y():
    x, y = regression(50, 0)
    posterior = line()
    p = baselines(posterior.target.likelihood, x, y, (1,))["constant"](x)
    expected = torch.distributions.Normal(y.mean(), y.std() * math.sqrt(1 + 1 / 50))
    torch.testing.assert_close(row_nll(p, y), -expected.log_prob(y[:, 0]))


@pytest.mark.parametrize(("rows", "columns"), [(40, 5), (20, 60)])
def test_the_linear_baseline_is_the_ridge_regression_of_the_least_leave_one_out_error(
    rows, columns
):
    generator = torch.Generator().manual_seed(0)
    x, new = (torch.randn(n, columns, generator=generator, dtype=F64) * 3 + 1 for n in (rows, 7))
    y = x[:, :2].sum(1, keepdim=True) + torch.randn(rows, 1, generator=generator, dtype=F64)
    p = baselines(bayou.Gaussian().bind(), x, y, (1,))["linear"](new)
    mean, std = x.mean(0), x.std(0, correction=0)
    ridge = RidgeCV(rows * np.logspace(-5, 3, 61)).fit(((x - mean) / std).numpy(), y[:, 0].numpy())
    torch.testing.assert_close(
        p.mean[:, 0], torch.tensor(ridge.predict(((new - mean) / std).numpy()))
    )
    assert (p.std > 0).all()


def test_the_linear_baseline_of_classes_is_a_logistic_regression():
    x, y = classes(300, 0)
    y = y + (x[:, 2] > 0.5).long()  # three classes
    found = baselines(bayou.Categorical().bind(), 5 * x + 2, y, (3,))
    design = ((x - x.mean(0)) / x.std(0, correction=0)).numpy()
    expected = LogisticRegression(C=1.0, tol=1e-8).fit(design, y.numpy()).predict_proba(design)
    torch.testing.assert_close(
        found["linear"](5 * x + 2).mean, torch.tensor(expected), atol=1e-3, rtol=0
    )
    frequency = torch.bincount(y).double() / len(y)
    torch.testing.assert_close(found["constant"](x).mean[0], frequency, atol=1e-3, rtol=0)


def test_inputs_that_are_no_numbers_have_a_constant_alone():
    tokens, y = torch.arange(20).reshape(10, 2), torch.tensor([0, 1] * 5)
    assert set(baselines(bayou.Categorical().bind(), tokens, y, (2,))) == {"constant"}
    assert set(baselines(bayou.Poisson().bind(), torch.randn(10, 2), y.double(), ())) == {
        "constant",
        "linear",
    }


def test_the_true_model_passes_every_check():
    found = check(posterior := line(), TRAIN, HELD)
    assert found.status == "ok", str(found)
    assert {"constant", "linear", "coverage"} <= {one.name for one in found}
    assert posterior.checks is found
    found = check(
        classifier(2),
        CLASSES,
        classes(200, 1),
    )
    assert found.status == "ok", str(found)
    assert "calibration" in found


def test_worse_than_a_constant_and_than_a_line():
    found = check(line(weight=-WEIGHT), TRAIN, HELD)
    assert found["constant"].status == found["linear"].status == "failed"
    assert "do not use it" in found["constant"].text
    assert "200 held-out rows" in found["linear"].text
    found = check(line(1.16, 0 * WEIGHT), TRAIN)  # without held-out rows, on the training rows
    assert found["constant"].status == "warning"
    assert "100 training rows" in found["constant"].text
    assert "coverage" not in found


@pytest.mark.parametrize(
    ("noise", "status", "word"),
    [(0.1, "failed", "narrow"), (0.22, "warning", "narrow"), (0.6, "warning", "wide")],
)
def test_coverage_that_chance_does_not_explain(noise, status, word):
    found = check(line(noise), TRAIN, regression(400, 1))["coverage"]
    assert found.status == status
    assert f"too {word}" in found.text
    few = check(line(0.22), TRAIN, regression(10, 1))["coverage"]
    assert few.status == "ok"  # ten rows cannot tell


def test_a_wide_interval_of_residuals_that_are_not_normal_is_not_blamed_on_the_noise():
    x, y = regression(400, 1, noise=0.0)
    phase = 2 * math.pi * torch.rand(400, 1, generator=torch.Generator().manual_seed(2), dtype=F64)
    noise = 0.05 * normal(3, 400, 1)
    posterior = line(math.hypot(0.2 / math.sqrt(2), 0.05))
    found = check(posterior, TRAIN, (x, y + 0.2 * phase.sin() + noise))["coverage"]
    assert found.status == "ok"
    assert "not normal" in found.text
    assert "conformal" in found.text
    found = check(posterior, TRAIN, (x, y + 0.2 * phase.sin()))["coverage"]
    assert found.status == "warning"  # all of them are inside
    assert "smaller noise" not in found.text


def test_a_negligible_difference_to_the_mode_or_a_linear_model_is_no_warning():
    held = regression(4000, 1, noise=0.3)
    p = line().predict(held[0])
    own = row_nll(p, held[1])
    jitter = 1e-3 * normal(0, len(own)).to(own.dtype)
    comparison = _CheckedNll(own, 0.0, "4,000 held-out rows")
    assert comparison.check(own - 0.003 + jitter, "mode", "its mode", "use the mode").status == "ok"
    assert (
        comparison.check(own - 0.02 + jitter, "mode", "its mode", "use the mode").status
        == "warning"
    )


def test_confidence_that_chance_does_not_explain():
    held = classes(400, 1)
    found = check(classifier(12), CLASSES, held)["calibration"]
    assert (found.status, found.text.split(":")[0]) == ("failed", "overconfident")
    found = check(classifier(0.5), CLASSES, held)["calibration"]
    assert found.text.startswith("underconfident")


def test_the_true_model_is_hardly_ever_flagged_by_chance():
    """At most one fit in 20 is flagged though it is right: 2 of 40 expected, more than 6 hardly
    possible.
    """
    alarms = 0
    for seed in range(40):
        posterior = classifier(2)
        alarms += bool(check(posterior, classes(60, 2 * seed), classes(80, 2 * seed + 1)).flags)
    assert alarms <= 6


def test_luck_is_half_of_what_the_training_rows_do_to_least_squares():
    """NLL of w + δ over that of w is δᵀδ/2σ² for x ~ N(0, I): χ²_D/2N over training sets, to first
    order in D/N.
    """
    generator = torch.Generator().manual_seed(0)
    rows, weights = 400, 5
    x = torch.randn(2000, rows, weights, generator=generator, dtype=F64)
    noise = torch.randn(2000, rows, 1, generator=generator, dtype=F64)
    excess = torch.linalg.lstsq(x, noise).solution.square().sum((1, 2)) / 2
    assert float(excess.std()) == pytest.approx(
        2 * _training_row_error(x[0], 1, rows), rel=0.1
    )  # 2,000 draws of χ²: 3 %; D/N: 2 %


def test_what_training_rows_do_by_luck_is_no_finding_however_many_rows_are_held_out():
    held = regression(20_000, 1)
    near = {"linear": lambda x: line().predict(x)}
    shifted = WEIGHT + torch.tensor([[0.06, 0.0, 0.0]])  # δᵀδ/2σ² = 0.02 nats worse
    for rows, status in ((30, "ok"), (30_000, "warning")):
        found = check(line(weight=shifted, n=rows), None, held, against=near)["linear"]
        assert found.status == status, found


def test_too_few_rows_to_tell_a_fit_from_a_constant_are_no_finding():
    train, few = CLASSES, classes(8, 1)
    own = classifier(2)
    constant = {"constant": lambda x: classifier(0).predict(x)}
    for seed in range(20):
        found = check(own, train, classes(8, 10 + seed), against=constant)["constant"]
        assert found.status != "warning", found
    idle = classifier(0.001)
    assert (
        check(idle, train, few, against=constant)["constant"].status == "warning"
    )  # it is the constant


def test_confidences_that_are_off_together_as_far_as_functions_differ_are_chance():
    """Truth is one of the functions that the posterior holds for possible."""
    train, held = classes(100, 0, 4.0), classes(2000, 1, 4.0)
    assert check(classifier(0.5, 1.0, 2.0, 4.0), train, held)["calibration"].status == "ok"
    assert check(classifier(1.0), train, held)["calibration"].status == "failed"


def guided(mean, std, noise):
    """N(mean, std²) over the weights of a linear network."""
    net = torch.nn.Linear(3, 1, bias=False, dtype=F64)
    with torch.no_grad():
        net.weight.copy_(mean)
    return Guided(
        Target.build(net, bayou.Gaussian(noise), None, 100), Bayesian(net, bayou.MeanField(std))
    )


def test_a_posterior_worse_than_its_own_mean_is_said_to_be():
    found = check(guided(WEIGHT, 1.0, 0.3), TRAIN, HELD)["mode"]
    assert found.status == "failed", found
    assert "network at its own mean" in found.text
    assert check(guided(WEIGHT, 0.02, 0.3), TRAIN, HELD).status == "ok"


def test_chains_that_disagree_in_what_they_predict():
    noise = 0.05 * normal(0, 100, 1, 3)
    same = points(bayou.Gaussian(0.3), *(WEIGHT + noise), chains=2)
    apart = points(
        bayou.Gaussian(0.3),
        *(WEIGHT + noise + 0.5 * (torch.arange(100) < 50).reshape(-1, 1, 1)),
        chains=2,
    )
    held = regression(50, 1)
    assert check(same, TRAIN, held)["mixing"].status == "ok"
    assert check(apart, TRAIN, held)["mixing"].status == "failed"
    still = points(bayou.Gaussian(0.3), *[WEIGHT] * 8, chains=2)
    assert "did not move" in check(still, TRAIN, held)["mixing"].text


def test_q_that_ignores_x_where_a_line_does_not():
    found = check(guided(0 * WEIGHT, 0.01, 1.2), TRAIN, regression(50, 1))
    assert found["collapse"].status == "failed"


def test_what_the_history_tells_needs_no_data_and_is_in_files(tmp_path):
    posterior = line()
    assert str(posterior.checks).startswith("nothing was checked")
    row = {"log_likelihood": -3.0, "seconds": 1.0}
    rising = row | {"step": 9.0, "rising": 41.6}
    posterior.history = [rising, row | {"step": 19.0}]  # a second-order finish that came to its end
    assert posterior.checks["converged"].status == "ok"
    for history in (
        [rising],
        [
            rising,
            {"step": 10.0, "log_likelihood": -3.0, "log_evidence": -5.0},
        ],  # Laplace at this point
        [rising, row | {"step": 1.0}, row | {"step": 12.0}],  # the next member of an ensemble
        [row | {"step": 1.0}, rising],
    ):
        posterior.history = history
        assert posterior.checks["converged"].status == "warning", history
    assert "41.6 nats" in str(posterior.checks)
    posterior.save(tmp_path / "p.bayou")
    assert bayou.load(tmp_path / "p.bayou", posterior.target.net).checks == posterior.checks
    posterior.history = [{"step": 9, "log_joint": -3.0, "divergences": 2.0}]
    assert [one.name for one in posterior.checks.flags] == ["divergences"]
    posterior.history = [{"step": 9, "elbo": -3.0, "kl": 0.2}]
    assert posterior.checks["collapse"].status == "failed"
    posterior.stopped = "interrupted"
    assert posterior.checks["end"].status == "warning"
    for mixing, status, words in (
        (
            {"r_hat": 1.2, "ess": 30.0, "mixed": False, "lost": False},
            "warning",
            "1.20 (effective sample size 30)",
        ),
        ({"r_hat": 1.02, "ess": 30.0, "mixed": False, "lost": False}, "warning", "too few"),
        ({"r_hat": 1.02, "ess": 300.0, "mixed": True, "lost": False}, "ok", "1.020"),
        (
            {"r_hat": 1.02, "ess": 300.0, "mixed": False, "lost": True, "below_start": 2000.0},
            "failed",
            "2,000 nats",
        ),
    ):
        posterior.mixing = mixing
        assert posterior.checks["mixing"].status == status
        assert words in posterior.checks["mixing"].text
    with pytest.raises(KeyError, match="there are collapse"):
        posterior.checks["coverage"]
