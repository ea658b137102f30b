"""The likelihood that is selected on held-out rows."""

import types

import pytest
import torch
from torch import nn

import bayou
from bayou.likelihoods import Gaussian, Log, StudentT
from bayou.select.likelihood_choice import (
    gain_of_heavy_tails,
    likelihood_candidates,
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


def test_targets_with_a_frequent_value_keep_gaussian_noise() -> None:
    """A peak of Student-t at the zeros of counts has a low NLL, and says nothing."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.poisson(torch.full((500, 1), 0.5), generator=generator)
    assert likelihood_candidates(counts) == ("gaussian",)
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
