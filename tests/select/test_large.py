"""Regressions of more than 5,000 rows: one fit without the rows that select the noise."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Normal

import bayou
from bayou.adapters.sklearn import BayesClassifier, BayesRegressor
from bayou.inference.baseline_checks import WorseThanModeWarning
from bayou.inference.method import Method
from bayou.network import Network
from bayou.network.target import Target
from bayou.posteriors import Empirical
from bayou.select import NamedMethod, by_name, plan
from bayou.select.judgment import LEVEL, MemberErrors, Residuals, judge
from bayou.select.many_rows import LARGE_BATCH, with_large_steps
from bayou.select.noise import match_noise
from bayou.training.data import as_data
from bayou.training.seeds import part_seed

F64 = torch.float64

NOISE = 0.5


def table(rows):
    torch.manual_seed(1)
    x = torch.randn(rows, 3, dtype=F64)
    return x, x @ x.new_tensor([[1.0], [-0.5], [0.0]]) + NOISE * torch.randn(rows, 1, dtype=F64)


@pytest.mark.parametrize("name", ["laplace", "ensemble", "ensemble of default length"])
def test_the_noise_is_the_likeliest_for_held_out_rows(name):
    x, y = table(6000)
    length = {"effort": 0.03} if name.endswith("length") else {"steps": 80}
    method = by_name(name.split()[0], lr=0.05, members=2, **length)
    posterior = bayou.fit(nn.Linear(3, 1).double(), (x, y), method, seed=3)
    assert posterior.target.n == 5000
    data = as_data((x, y))
    _, held = data.split(1 / 6, part_seed(3, "folds"))
    residuals = Residuals.of(posterior, held, 3)
    noise = posterior.target.likelihood.gaussian_noise
    total = residuals.variances + noise**2
    # equal where all rows have the same variance
    assert float(total.mean()) == pytest.approx(float(residuals.squares.mean()), rel=1e-2)
    if name == "laplace":  # the derivative of the log density
        assert abs(float(((residuals.squares - total) / total.square()).mean())) < 1e-6
    else:
        x_held, y_held = (value[held.index] for value in data.source)
        outputs = posterior.predict(x_held).outputs
        assert abs(slope_of_mixture(outputs, y_held, noise)) < 1e-6
    assert abs(noise - NOISE) < 5 * NOISE / math.sqrt(2 * 1000)  # 1,000 held-out rows
    assert posterior.predict(x[:4]).aleatoric_std.square().mean().item() == pytest.approx(
        noise**2, rel=1e-9
    )
    assert match_noise(posterior, held, 3) == pytest.approx(noise, rel=1e-9)


def slope_of_mixture(outputs, y, noise):
    """The derivative of the log density of a mixture of Gaussians by log σ, by autograd."""
    log_noise = torch.tensor(noise, dtype=F64).log().requires_grad_()
    weights = torch.distributions.Categorical(logits=torch.zeros(len(y), len(outputs), dtype=F64))
    components = torch.distributions.Normal(outputs.squeeze(-1).T, log_noise.exp())
    mixture = torch.distributions.MixtureSameFamily(weights, components)
    (slope,) = torch.autograd.grad(mixture.log_prob(y.squeeze(-1)).mean(), log_noise)
    return float(slope)


def test_the_noise_of_points_fills_the_gaps_between_them():
    """Sixteen members with a spread of 1 around y itself: the mean has almost no error, so that the
    Gaussian of mean and variance needs no noise, but the mixture does.
    """
    generator = torch.Generator().manual_seed(0)
    errors = torch.randn(16, 500, 1, generator=generator, dtype=F64)
    errors = errors - 0.9 * errors.mean(0)
    y = torch.zeros(500, 1, dtype=F64)
    members = MemberErrors(errors.square())
    noise = members.likeliest_noise()
    assert abs(slope_of_mixture(errors, y, noise)) < 1e-6
    expected = torch.stack([Normal(f, noise).log_prob(y.squeeze(-1)) for f in errors.squeeze(-1)])
    expected = math.log(16) - expected.logsumexp(0)
    torch.testing.assert_close(members.log_density_loss(noise), expected)
    gaussian = Residuals(errors.mean(0).square(), errors.var(0, correction=0)).likeliest_noise()
    assert gaussian < 0.01 < 0.1 < noise
    loss = members.log_density_loss(noise).mean()
    assert members.log_density_loss(gaussian).mean() > loss + 10


def test_default_settings_are_those_for_many_rows_and_given_ones_are_kept():
    data = as_data(table(20_000))
    method = with_large_steps(by_name("ensemble"), data)
    assert method.start == method.method.of
    assert (method.start.batch_size, method.start.steps) == (
        LARGE_BATCH,
        40 * math.ceil(20_000 / LARGE_BATCH),
    )
    short = with_large_steps(by_name("map", effort=0.1), data)
    assert short.start.steps == method.start.steps // 10
    for name, settings in (
        ("map", {"steps": 7}),
        ("ffg", {"epochs": 2}),
        ("mnf", {"batch_size": 32}),
    ):
        given = by_name(name, **settings)
        assert with_large_steps(given, data) == given


@pytest.mark.parametrize(("rows", "large"), [(5000, False), (5001, True)])
def test_the_default_network_grows_with_the_rows_of_a_regression(rows, large, tmp_path):
    x, y = (value.numpy() for value in table(rows))
    model = BayesRegressor("mle", steps=2, random_state=0).fit(x, y[:, 0])
    widths = [
        len(value)
        for name, value in model.posterior_.target.net.named_parameters()
        if name.endswith("weight")
    ]
    assert widths == ([128, 128, 1] if large else [50, 1])
    model.save(tmp_path / "model.bayou")
    again = BayesRegressor.load(tmp_path / "model.bayou")
    assert np.array_equal(model.predict(x[:5]), again.predict(x[:5]))
    for given in ({"hidden": (7,)}, {"activation": "Tanh"}):
        own = (
            BayesRegressor("mle", steps=1, random_state=0, **given)
            .fit(x, y[:, 0])
            .posterior_.target.net
        )
        assert next(own.parameters()).shape == (given.get("hidden", (50,))[0], 3)
    classes = BayesClassifier("mle", steps=1, random_state=0).fit(x, y[:, 0] > 0)
    assert next(classes.posterior_.target.net.parameters()).shape == (50, 3)


def uneven_rows():
    """Residuals of 2,000 rows of noise 1, of which 20 have functions with a variance of 400 that
    they do not need.
    """
    generator = torch.Generator().manual_seed(0)
    squares = torch.randn(2000, 1, generator=generator, dtype=F64).square()
    variances = torch.zeros(2000, 1, dtype=F64)
    variances[:20] = 400.0
    return Residuals(squares, variances)


def test_rows_with_a_large_variance_do_not_make_the_intervals_of_the_others_too_narrow():
    found = uneven_rows()
    noise = found.likeliest_noise()
    assert abs(noise - 1) < 5 / math.sqrt(2 * 1980)
    assert abs(found.coverage(noise) - LEVEL) < 5 * math.sqrt(LEVEL * (1 - LEVEL) / 2000)
    # by the means of both, the noise would be at the bound of the variances, and the intervals too
    # narrow
    assert found.variances.mean() > found.squares.mean()
    assert found.coverage(0.5 * math.sqrt(float(found.squares.mean()))) < 0.7


def test_a_posterior_that_is_worse_than_its_mode_or_covers_too_little_is_not_acceptable():
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1000, 1, generator=generator, dtype=F64)
    mode = Residuals(noise.square(), torch.zeros_like(noise))
    comparison, is_acceptable = judge(Residuals(noise.square(), torch.full_like(noise, 0.01)), mode)
    assert is_acceptable
    comparison, is_acceptable = judge(
        Residuals((1.3 * noise).square(), torch.full_like(noise, 0.01)), mode
    )
    assert not is_acceptable
    assert comparison.excess == pytest.approx(math.log(1.3), abs=1e-6)
    # a fifth of the rows far outside
    far = torch.where(torch.arange(1000) < 200, 3.0, 0.01).double().unsqueeze(1)
    narrow = Residuals(far, torch.where(far > 1, 0.0, 10.0).double())
    assert not judge(narrow, mode)[1]
    assert narrow.coverage(narrow.covering_noise()) >= LEVEL
    assert narrow.coverage(0.9 * narrow.covering_noise()) < LEVEL


@dataclass(frozen=True)
class WideDraws(Method):
    """A stub: draws around the network as it is, with a shift of all predictions."""

    shift: float = 0.0
    last_layer: Method | None = None

    def restricted_to(self, names, *, learns_others=False):
        return self.last_layer

    def fit(self, target, data, **options):
        stack = {
            name: value.expand(2, *value.shape).clone() for name, value in target.start().items()
        }
        stack["bias"] += self.shift
        return Empirical(target, Network(target.net), stack, [{"step": 0.0}])


@pytest.mark.parametrize("last_layer", [None, WideDraws()])
def test_held_out_rows_reject_a_posterior_that_is_worse_than_its_mode(last_layer):
    x, y = table(6000)
    draws = WideDraws(0.4, last_layer)
    method = NamedMethod(draws, bayou.MAP(steps=80, lr=0.05), selects_layers=True)
    data = as_data((x, y), 512)
    target = Target.build(nn.Linear(3, 1).double(), bayou.Gaussian(0.5, learn=True), None, 6000)
    if last_layer is None:
        with pytest.warns(WorseThanModeWarning, match="held-out rows"):
            posterior = plan(method, target, data).fit()
        assert posterior.checks["mode"].status == "failed"
        return
    posterior = plan(method, target, data).fit()  # a warning is an error in these tests
    assert posterior.checks["mode"].status == "ok"
    assert posterior.choice.startswith("the last layer is random")
    noise = posterior.target.likelihood.gaussian_noise
    assert abs(noise - NOISE) < 5 * NOISE / math.sqrt(2 * 1000)
