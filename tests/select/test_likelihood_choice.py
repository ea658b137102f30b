"""The likelihood that is selected on held-out rows."""

import math
import types

import pytest
import torch
from torch import nn

import bayou
from bayou.likelihoods import Gaussian, Log, NegativeBinomial, StudentT
from bayou.likelihoods.predictive import Predictive
from bayou.select.likelihood_choice import (
    are_counts,
    gain_of_heavy_tails,
    likelihood_candidates,
    residuals_suit_counts,
    select_likelihood,
)
from bayou.training.data import as_data

pytestmark = pytest.mark.filterwarnings("ignore::bayou.core.progress.BayouWarning")
F64 = torch.float64
ROWS = 400


def linear_rows(kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 2, generator=generator, dtype=F64)
    noise = torch.randn(ROWS, 1, generator=generator, dtype=F64)
    y = x @ torch.tensor([[1.0], [-0.5]], dtype=F64)
    if kind == "lognormal":
        return x, torch.exp(y + 0.3 * noise + 5)
    if kind == "student-t":
        far = 20 * noise.roll(1) * (torch.arange(ROWS) % 9 == 0).unsqueeze(1)
        return x, y + 0.1 * noise + far
    return x, y + 0.3 * noise + 20


def fit_linear(name, rows):
    """A mode of a linear network, standardized, by a short search."""
    torch.manual_seed(0)
    method = bayou.select.by_name("map", effort=0.2)
    data = rows.source[0][rows.index], rows.source[1][rows.index]
    return bayou.fit(nn.Linear(2, 1).double(), data, method, likelihood=name, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gaussian", "student-t", "lognormal"])
def test_the_likelihood_of_generated_rows_is_selected(kind):
    rows = as_data(linear_rows(kind), 100)
    choice = select_likelihood(fit_linear, rows, seed=0)
    assert choice.name == kind
    assert choice.stage["stage"] == "likelihood"
    compared = {trial["likelihood"] for trial in choice.stage["trials"]}
    # Student-t is fitted where residuals have heavy tails.
    left_out = set() if kind == "student-t" else {"student-t"}
    assert compared == set(likelihood_candidates(rows.targets())) - left_out


def test_an_error_of_the_first_likelihood_is_raised():
    def fail(name, rows):
        if name == "gaussian":
            raise ValueError("the network takes 3 columns")
        return fit_linear(name, rows)

    with pytest.raises(ValueError, match="takes 3 columns"):
        select_likelihood(fail, as_data(linear_rows("gaussian"), 100), seed=0)


def test_few_rows_keep_the_first_likelihood():
    x, y = linear_rows("lognormal")
    choice = select_likelihood(fit_linear, as_data((x[:50], y[:50]), 50), seed=0)
    assert (choice.name, choice.decision) == ("gaussian", "")


@pytest.mark.parametrize(
    ("y", "names"),
    [
        (torch.tensor([0.5, 2.0]), ("gaussian", "student-t", "lognormal")),
        (torch.tensor([0.0, 2.0]), ("gaussian", "student-t")),
        (torch.tensor([0, 1]), ()),
        (None, ()),
    ],
)
def test_candidates_suit_the_targets(y, names):
    assert likelihood_candidates(y) == names


@pytest.mark.slow
def test_auto_fits_the_selected_likelihood_to_all_rows():
    x, y = linear_rows("lognormal")
    posterior = bayou.fit(
        nn.Linear(2, 1).double(),
        (x[:200], y[:200]),
        bayou.select.by_name("map", effort=0.1),
        likelihood="auto",
        progress=False,
    )
    assert isinstance(posterior.target.likelihood_spec, Log)
    assert posterior.plan.startswith("likelihood lognormal, chosen from 2 on 40 held-out rows")
    assert posterior.selection[0]["stage"] == "likelihood"
    assert posterior.target.n == 200
    assert not isinstance(posterior.target.likelihood_spec, Gaussian | StudentT)


def test_targets_with_a_frequent_value_are_not_compared_with_student_t() -> None:
    """A peak of Student-t at the zeros of counts has a low NLL, and says nothing."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.poisson(torch.full((500, 1), 0.5), generator=generator)
    assert likelihood_candidates(counts) == ("gaussian", "negative-binomial")
    assert likelihood_candidates(counts / 2) == ("gaussian",)
    assert likelihood_candidates(torch.rand(500, 1, generator=generator)) == (
        "gaussian",
        "student-t",
        "lognormal",
    )


@pytest.mark.parametrize(
    ("noise", "low", "high"),
    [
        (torch.distributions.Normal(0.0, 2.0), -0.02, 0.01),
        (torch.distributions.Laplace(0.0, 2.0), 0.04, 0.12),
        (torch.distributions.StudentT(3.0, 0.0, 2.0), 0.1, 0.6),
    ],
)
def test_heavy_tails_are_seen_in_the_residuals(noise, low, high):
    """Of the best t and the best Gaussian: Laplace noise gains about .07 nats, t of 3 more."""
    torch.manual_seed(0)
    y = noise.sample((4000, 1)).double()
    zero = types.SimpleNamespace(
        predict=lambda x, seed: types.SimpleNamespace(mean=torch.zeros(len(x), 1))
    )
    rows = as_data((torch.zeros(4000, 1), y))
    assert low < gain_of_heavy_tails(zero, rows, 0) < high


def test_student_t_is_not_fitted_without_heavy_tails():
    """The comparison has the Gaussian and, of positive targets, the log-normal."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(300, 2, generator=generator)
    y = 5 + x[:, :1] + 0.1 * torch.randn(300, 1, generator=generator)
    fitted = []

    def fit(name, training):
        fitted.append(name)
        return bayou.fit(
            torch.nn.Linear(2, 1),
            training,
            bayou.select.by_name("map"),
            likelihood=name,
            progress=False,
        )

    choice = select_likelihood(fit, as_data((x, y)), 0)
    assert choice.name == "gaussian"
    assert fitted == ["gaussian", "lognormal"]


def counts(kind, n=400):
    """Return inputs and targets, each with one number a row."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, generator=generator)
    mean = torch.exp(0.8 * x[:, :1] - 0.4 * x[:, 1:])
    if kind == "overdispersed":
        torch.manual_seed(2)
        factor = torch.distributions.Gamma(1.5, 1.5).sample((n, 1))
        return x, torch.poisson(2 * mean * factor, generator=generator)
    if kind == "zeros":
        is_counted = torch.rand(n, 1, generator=generator) > 0.5
        return x, torch.poisson(3 * mean, generator=generator) * is_counted
    if kind == "poisson":
        return x, torch.poisson(3 * mean, generator=generator)
    noise = torch.randn(n, 1, generator=generator)
    return x, (9 + 4 * x[:, :1] + noise).round().clamp(0, 30)  # "rounded"


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kind", ["poisson", "overdispersed", "zeros"])
def test_counts_are_recognized(kind, dtype):
    y = counts(kind)[1].to(dtype)
    assert are_counts(y)
    assert are_counts(y.flatten())
    assert likelihood_candidates(y)[:2] == ("gaussian", "negative-binomial")


@pytest.mark.parametrize(
    "y",
    [
        torch.arange(400).remainder(71) + 20,  # ages of adults
        1000 * torch.arange(400).remainder(97),  # prices, some of them 0
        torch.arange(200),  # without ties
        torch.arange(400).remainder(6) + 3,  # ratings
        torch.arange(400).remainder(5) + 1,
        torch.arange(400).remainder(9) == 0,  # labels
        torch.arange(400).remainder(40) - 1,  # a negative one
        torch.arange(400).remainder(40) / 2,
        torch.cat((torch.arange(400.0).remainder(40), torch.tensor([torch.nan]))),
        torch.cat((torch.arange(400.0).remainder(40), torch.tensor([torch.inf]))),
        torch.zeros(400),
        torch.arange(400).remainder(40).reshape(200, 2),
    ],
)
def test_other_whole_numbers_are_no_counts(y):
    y = y.float()
    assert not are_counts(y)
    assert "negative-binomial" not in likelihood_candidates(y)


def selected_and_fitted(rows):
    """Return the selected likelihood of rows, and the names of those that were fitted."""
    fitted = []

    def fit(name, training):
        fitted.append(name)
        return bayou.fit(
            torch.nn.Linear(2, 1),
            training,
            bayou.select.by_name("map"),
            likelihood=name,
            progress=False,
        )

    return select_likelihood(fit, as_data(rows), 0).name, fitted


def known_fit(name, training):
    """Return p(y | x) of overdispersed counts, or Gaussian noise around their mean."""
    likelihood = Gaussian(3.0)
    if name == "negative-binomial":
        likelihood = NegativeBinomial(1 / 1.5)

    def predict(x, seed):
        log_mean = math.log(2.0) + 0.8 * x[:, :1] - 0.4 * x[:, 1:]
        f = log_mean if name == "negative-binomial" else log_mean.exp()
        return Predictive(likelihood.bind(), f.unsqueeze(0))

    return types.SimpleNamespace(predict=predict, stopped="finished")


def test_the_densities_of_counts_are_compared_with_those_of_real_numbers():
    choice = select_likelihood(known_fit, as_data(counts("overdispersed")), 0)
    assert choice.decision == "likelihood negative-binomial, chosen from 2 on 80 held-out rows"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["overdispersed", "zeros"])
def test_counts_select_the_negative_binomial(kind):
    name, fitted = selected_and_fitted(counts(kind))
    assert name == "negative-binomial"
    assert fitted[:2] == ["gaussian", "negative-binomial"]


@pytest.mark.slow
def test_numbers_that_vary_less_than_counts_given_x_are_not_fitted_as_counts():
    """y itself varies more than a Poisson, and its residuals do not."""
    x, y = counts("rounded")
    assert are_counts(y)
    name, fitted = selected_and_fitted((x, y))
    assert name == "gaussian"
    assert "negative-binomial" not in fitted


def test_residuals_of_a_poisson_suit_counts():
    torch.manual_seed(0)
    y = torch.poisson(torch.full((500, 1), 4.0))

    def predict(x, seed):
        return types.SimpleNamespace(mean=torch.full((len(x), 1), 4.0))

    posterior = types.SimpleNamespace(predict=predict)
    x = torch.zeros(500, 1)
    assert residuals_suit_counts(posterior, as_data((x, y)), 0)
    assert not residuals_suit_counts(posterior, as_data((x, 2 + y.clamp(2, 4))), 0)


@pytest.mark.slow
def test_a_posterior_of_selected_counts_predicts_counts(tmp_path):
    """From real-typed y to intervals, scores and a file."""
    x, y = counts("overdispersed", 200)
    methods = {
        "laplace": bayou.select.by_name("laplace", effort=0.1),
        "bins": bayou.select.by_name("bins", effort=0.1),
    }
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
    posterior = bayou.fit(net, (x, y), bayou.select.Auto(methods), progress=False)
    assert posterior.plan.startswith("likelihood negative-binomial, chosen from 2")
    predictive = posterior.predict(x[:20], seed=0)
    low, high = predictive.interval(0.9)
    assert bool((low >= 0).all() and (high == high.round()).all())
    scores = bayou.metrics.summary(predictive, y[:20])
    assert all(math.isfinite(scores[name]) for name in ("nll", "crps", "rmse", "coverage"))
    posterior.save(tmp_path / "counts.bayou")
    loaded = bayou.load(tmp_path / "counts.bayou", net)
    assert torch.equal(loaded.predict(x[:20], seed=0).mean, predictive.mean)


@pytest.mark.parametrize(("slope", "expected"), [(2.0, "gaussian"), (-2.0, "student-t")])
def test_student_t_must_beat_gaussian_noise_that_depends_on_x(slope, expected):
    """y = exp(2x)·ε has heavy tails in all, and none given x; a fit with another sign is no rival.

    The posteriors predict given distributions, so that nothing is fitted.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 1, generator=generator, dtype=F64)
    y = torch.exp(2 * x) * torch.randn(ROWS, 1, generator=generator, dtype=F64)
    rows = as_data((x, y), 100)

    def law(likelihood, log_variance):
        def predict(x, seed=0):
            outputs = log_variance(x) if log_variance else torch.zeros_like(x)
            return Predictive(likelihood.bind(dtype=F64), outputs[None])

        return types.SimpleNamespace(predict=predict, stopped="finished")

    def fit(name, training):
        likelihood = {"gaussian": Gaussian(float(y.std())), "student-t": StudentT(2.0, 1.0)}
        return law(likelihood[name], None)

    def fit_varied_noise(training):
        def outputs(x):
            return torch.cat([torch.zeros_like(x), 2 * slope * x], 1)

        return law(bayou.HeteroscedasticGaussian(), outputs)

    names = ("gaussian", "student-t")
    choice = select_likelihood(fit, rows, 0, names, fit_varied_noise=fit_varied_noise)
    assert choice.stage["trials"][-1]["likelihood"] == "gaussian, noise by x"
    assert choice.name == expected
    assert select_likelihood(fit, rows, 0, names).name == "student-t"
