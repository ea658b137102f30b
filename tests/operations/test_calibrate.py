"""A temperature and a scale of the noise: closed forms, stationarity by autograd, files, every way
to predict.
"""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.core.files import read_file, write_file
from bayou.likelihoods.predictive import Predictive
from bayou.operations.calibrate import best_temperature
from bayou.operations.export import export
from tests.operations.fits import METHODS, START, fitted, normal

F64 = torch.float64
pytestmark = [
    pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::bayou.inference.probe.MixingWarning"),
]


def tempered(f, t):
    """log p_s of every class at a temperature: p_s^(1/T), or below 1 p_s·(Π_r p_r^(1/S))^(1/T − 1),
    normalized.
    """
    log_p = f.log_softmax(-1)
    return (log_p / t if t >= 1 else log_p + (1 / t - 1) * log_p.mean(0)).log_softmax(-1)


def test_temperature_of_constant_logits_in_closed_form():
    """Logits (f, 0) everywhere and a share a of right rows: softmax(f/T) = a at T = f/log(a/(1 −
    a)).
    """
    f, rows, right = 4.0, 100, 80
    logits = torch.tensor([f, 0.0], dtype=F64).expand(1, rows, 2)
    y = (torch.arange(rows) >= right).long()
    found = best_temperature(Predictive(bayou.Categorical().bind(), logits), y)
    assert found.temperature == pytest.approx(f / math.log(0.8 / 0.2), rel=1e-6)
    assert found.after == pytest.approx(-0.8 * math.log(0.8) - 0.2 * math.log(0.2), rel=1e-9)
    assert found.before == pytest.approx(math.log1p(math.exp(-f)) + 0.2 * f, rel=1e-9)


@pytest.mark.parametrize("paired", [False, True])
def test_noise_scale_in_closed_form(paired):
    """T² = mean ((y − f)/σ)², whether σ is one for all or of the network."""
    f, y = normal(50, 1), normal(50, 1, seed=1)
    log_variance = (
        0.3 * normal(50, 1, seed=2) if paired else torch.full((50, 1), math.log(0.04), dtype=F64)
    )
    spec = bayou.HeteroscedasticGaussian() if paired else bayou.Gaussian(0.2)
    outputs = torch.cat([f, log_variance], -1) if paired else f
    p = Predictive(spec.bind(dtype=F64), outputs.unsqueeze(0))
    expected = ((y - f).square() / log_variance.exp()).mean().sqrt()
    found = best_temperature(p, y)
    assert found.temperature == pytest.approx(float(expected), rel=1e-6)
    assert found.after < found.before


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "gaussian"])
@pytest.mark.parametrize("doubt", [6.0, 0.6])
def test_temperature_of_a_mixture_is_stationary_and_the_best_of_a_grid(kind, doubt):
    """d NLL/d log T = 0 by autograd of the formula itself, and no T of a fine grid is better."""
    f, noise = 3 * normal(5, 80, 1), doubt * normal(80, 1, seed=1)
    spec = {
        "categorical": bayou.Categorical(),
        "bernoulli": bayou.Bernoulli(),
        "gaussian": bayou.Gaussian(0.3),
    }[kind]
    if kind == "categorical":
        f = 3 * normal(5, 80, 4)
        y = (f.mean(0) + doubt * normal(80, 4, seed=3)).argmax(-1)
    else:
        y = (f.mean(0) + noise > 0).to(F64) if kind == "bernoulli" else f[0] + 0.02 * noise

    def nll(log_t):
        t = log_t.exp()
        if kind == "categorical":
            each = torch.distributions.Categorical(logits=tempered(f, t)).log_prob(y)
        elif kind == "bernoulli":
            both = tempered(torch.stack([torch.zeros_like(f), f], -1), t)
            each = torch.distributions.Categorical(logits=both).log_prob(y).squeeze(-1)
        else:
            each = torch.distributions.Normal(f, 0.3 * t).log_prob(y).squeeze(-1)
        return -(each.logsumexp(0) - math.log(5)).mean()

    found = best_temperature(Predictive(spec.bind(dtype=F64), f), y)
    log_t = torch.tensor(math.log(found.temperature), dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(nll(log_t), log_t)
    assert abs(float(slope)) < 1e-6
    if kind in ("categorical", "bernoulli"):
        assert (found.temperature > 1) == (doubt > 1)
    assert found.after == pytest.approx(float(nll(log_t.detach())), rel=1e-9)
    assert (
        found.after
        <= min(float(nll(torch.tensor(k / 50, dtype=F64))) for k in range(-240, 241)) + 1e-9
    )


CASES = [(method, "classes") for method in METHODS] + [("map", "heteroscedastic")]
CASES += [(method, "numbers") for method in ("ensemble", "laplace")]


@pytest.mark.parametrize(("method", "task"), CASES)
def test_predictions_and_files_have_the_temperature(method, task, tmp_path):
    posterior, x, y, net = fitted(method, task, seed=1)
    before = posterior.predict(x[100:], seed=0)
    found = bayou.calibrate(posterior, (x[40:100], y[40:100]))
    assert posterior.temperature == found.temperature != 1.0
    assert found.after < found.before
    p = posterior.predict(x[100:], seed=0)
    t = found.temperature
    if task == "classes":
        assert_close(p.mean, tempered(before.outputs, t).exp().mean(0))
    else:
        assert_close(p.mean, before.mean)
        assert_close(p.aleatoric_std, t * before.aleatoric_std)
        assert_close(p.epistemic_std, before.epistemic_std)
    posterior.save(tmp_path / "p.bayou")
    again = bayou.load(tmp_path / "p.bayou", net)
    assert again.temperature == found.temperature
    assert torch.equal(again.predict(x[100:], seed=0).log_prob(y[100:]), p.log_prob(y[100:]))
    assert (
        bayou.calibrate(posterior, (x[40:100], y[40:100])) == found
    )  # from what it was, not from what it is
    posterior.temperature = 1.0
    assert torch.equal(
        posterior.predict(x[100:], seed=0).log_prob(y[100:]), before.log_prob(y[100:])
    )


def test_probit_predictions_have_the_temperature():
    posterior, x, _, _ = fitted("laplace", "classes")
    before = posterior.using("probit").predict(x)
    posterior.temperature = 2.0
    assert_close(posterior.using("probit").predict(x).outputs, before.outputs / 2)


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_exported_programs_have_the_temperature(task):
    posterior, x, y, _ = fitted("ensemble" if task == "classes" else "map", task)
    bayou.calibrate(posterior, (x[40:100], y[40:100]))
    p, found = posterior.predict(x, seed=0), export(posterior, x[:3]).module()(x)
    assert_close(found["mean"], p.mean)
    assert_close(found["std"], p.std)


def test_files_without_a_temperature_load_and_invalid_ones_raise(tmp_path):
    posterior, _, _, net = fitted("map", "numbers")
    posterior.save(tmp_path / "plain.bayou")
    tensors, config = read_file(tmp_path / "plain.bayou")
    assert "temperature" not in config  # as before
    assert bayou.load(tmp_path / "plain.bayou", net).temperature == 1.0
    for odd in (0.0, -1.0, math.inf, math.nan, "warm"):
        write_file(tmp_path / "odd.bayou", tensors, config | {"temperature": odd})
        with pytest.raises(
            bayou.posteriors.FileError, match="temperature.*expected a positive number"
        ):
            bayou.load(tmp_path / "odd.bayou", net)


def test_failed_calibration_raises_and_changes_nothing():
    posterior, x, y, _ = fitted("map", "classes")
    right = posterior.predict(x).mean.argmax(-1)
    train = (x[:40], y[:40])
    for held_out, message in (
        ((x, right), "below the limit .*: they are too few"),
        ((x[20:100], y[20:100]), "20 of 80 held-out rows are also training rows"),
        ((x, x[:, 0]), "needs class indices"),
        ((x, y[:9]), "x has 160 rows but y has 9"),
        ((x, 1 - right), "above the limit .*: the predictions are worse"),
    ):
        with pytest.raises(ValueError, match=message):
            bayou.calibrate(posterior, held_out, train=train if len(held_out[0]) == 80 else None)
    assert posterior.temperature == 1.0
    data = (x, y.unsqueeze(1))
    counts = bayou.fit(nn.Linear(2, 1), data, START, likelihood=bayou.Poisson(), progress=False)
    with pytest.raises(ValueError, match="neither logits nor a noise scale"):
        bayou.calibrate(counts, data)
    found = bayou.calibrate(posterior, (x[40:], y[40:]), train=train)
    assert posterior.temperature == found.temperature
