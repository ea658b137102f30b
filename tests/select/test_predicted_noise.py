"""The recipe of a network that predicts its own noise."""

import math
import signal

import numpy as np
import pytest
import torch
from torch import nn

import bayou
from bayou.likelihoods import HeteroscedasticGaussian
from bayou.likelihoods.continuous import HeteroscedasticStudentT
from bayou.network.target import Target
from bayou.network.units import Standardization, Units
from bayou.networks import TableLayout, TableNetwork
from bayou.select.auto import CANDIDATES, MIN_ROWS_OF_PREDICTED_NOISE
from bayou.select.named import by_name
from bayou.select.predicted_noise import PredictedNoise
from bayou.training.data import as_data

QUICK = {"epochs": 3, "members": 2}
FACTOR = 2.0**20  # a change of units without rounding


def noisy_rows(rows, seed, scale=1.0):
    """Return rows of a sine whose noise is .05 where x₂ < 0 and .5 elsewhere."""
    generator = np.random.default_rng(seed)
    x = generator.uniform(-1, 1, (rows, 3))
    noise = np.where(x[:, 1] < 0, 0.05, 0.5)
    y = np.sin(3 * x[:, 0]) + noise * generator.normal(size=rows)
    return torch.tensor(x).float(), scale * torch.tensor(y[:, None]).float()


def smooth_net(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 20), nn.SiLU(), nn.Linear(20, outputs))


def fit(rows, method="tabm-noise", net=None, **options):
    recipe = by_name(method, **QUICK) if isinstance(method, str) else method
    return bayou.fit(net or smooth_net(), rows, recipe, seed=0, progress=False, **options)


def nll(posterior, x, y):
    return float(-posterior.predict(x).log_prob(y).mean())


@pytest.fixture(scope="module")
def posterior():
    recipe = by_name("tabm-noise", epochs=150)
    return bayou.fit(smooth_net(), noisy_rows(600, 0), recipe, seed=0, progress=False)


def test_it_predicts_the_noise_of_every_row(posterior):
    x, y = noisy_rows(1000, 1)
    prediction = posterior.predict(x)
    std = prediction.std[:, 0]
    is_quiet = x[:, 1] < 0
    assert float(std[is_quiet].median()) < 0.2
    assert 0.35 < float(std[~is_quiet].median()) < 0.75
    low, high = prediction.interval(0.9)
    for rows in (is_quiet, ~is_quiet):
        coverage = float(((low <= y) & (y <= high))[rows].double().mean())
        assert 0.75 < coverage < 1
    assert "a network of tables that predicts its noise" in posterior.plan


def test_one_noise_for_all_rows_predicts_them_worse(posterior):
    x, y = noisy_rows(1000, 1)
    recipe = by_name("tabm", epochs=150)
    net = TableNetwork(TableLayout.fit(x), 1)
    equal = bayou.fit(net, noisy_rows(600, 0), recipe, seed=0, progress=False)
    assert nll(posterior, x, y) < nll(equal, x, y) - 0.3


@pytest.mark.parametrize("scale", [FACTOR, 1 / FACTOR])
def test_predictions_have_the_units_of_y(scale):
    x, _ = noisy_rows(50, 1)
    first = fit(noisy_rows(200, 0)).predict(x)
    scaled = fit(noisy_rows(200, 0, scale)).predict(x)
    assert torch.allclose(scaled.mean, scale * first.mean, rtol=1e-4, atol=1e-5 * scale)
    assert torch.allclose(scaled.std, scale * first.std, rtol=1e-4)


@pytest.mark.parametrize(
    ("likelihood", "expected"),
    [
        (None, HeteroscedasticGaussian),
        (bayou.Gaussian(0.1, learn=True), HeteroscedasticGaussian),
        ("student-t", HeteroscedasticStudentT),
    ],
)
def test_the_family_of_the_noise_is_kept(likelihood, expected):
    posterior = fit(noisy_rows(100, 0, FACTOR), likelihood=likelihood)
    assert isinstance(posterior.target.likelihood_spec, expected)
    x, _ = noisy_rows(20, 1)
    assert 0.1 < float(posterior.predict(x).std.mean() / FACTOR) < 3


def test_positive_targets_can_have_a_logarithm_with_noise_of_every_row(tmp_path):
    x, y = noisy_rows(200, 0)
    positive = fit((x, 1000 * y.exp()), likelihood="lognormal")
    of_log = fit((x, y))
    assert bool((positive.predict(x).sample(5, seed=0) > 0).all())
    difference = nll(positive, x, 1000 * y.exp()) - nll(of_log, x, y)
    assert difference == pytest.approx(math.log(1000) + float(y.mean()), abs=0.02)
    positive.save(tmp_path / "positive.bayou")
    read = bayou.load(tmp_path / "positive.bayou", smooth_net())
    assert torch.equal(read.predict(x).outputs, positive.predict(x).outputs)


def test_targets_that_repeat_have_finite_densities():
    x, _ = noisy_rows(100, 0)
    y = (x[:, :1] > 0).float() * 7.0
    posterior = bayou.fit(
        smooth_net(), (x, y + 1), by_name("tabm-noise", epochs=30), seed=0, progress=False
    )
    assert math.isfinite(nll(posterior, x, y + 1))


def test_its_file_contains_the_network_also_in_a_mixture(posterior, tmp_path):
    x, _ = noisy_rows(20, 2)
    posterior.save(tmp_path / "noise.bayou")
    again = bayou.load(tmp_path / "noise.bayou", nn.Linear(3, 1))
    assert torch.equal(again.predict(x).outputs, posterior.predict(x).outputs)
    net = smooth_net()
    other = fit(noisy_rows(100, 0), "tabm", net)
    mixture = bayou.Mixture([other, posterior], [0.4, 0.6])
    mixture.save(tmp_path / "mixture.bayou")
    read = bayou.load(tmp_path / "mixture.bayou", net)
    expected, prediction = mixture.predict(x), read.predict(x)
    assert torch.allclose(prediction.mean, expected.mean)
    assert torch.allclose(prediction.interval(0.9)[1], expected.interval(0.9)[1])


def test_a_network_of_tables_keeps_its_layout_and_layers():
    x, y = noisy_rows(100, 0)
    net = TableNetwork(TableLayout.fit(x, bins=4), 1, hidden=(8,), activation="SiLU")
    posterior = fit((x, y), net=net)
    replaced = posterior.target.net
    assert replaced.settings == net.settings | {"outputs": 2}
    assert replaced.layout == net.layout
    assert not net.is_in_files


@pytest.mark.parametrize(
    ("net", "x", "options", "words"),
    [
        (smooth_net(), torch.rand(30, 3), {"likelihood": bayou.Gaussian(0.1)}, "that is learned"),
        (smooth_net(2), torch.rand(30, 3), {"likelihood": HeteroscedasticGaussian()}, "use tabm"),
        (smooth_net(), torch.rand(30, 3), {"where": "2.*"}, "tabm-noise replaces .* is frozen"),
        (smooth_net(), torch.rand(30, 3), {"prior": {"0.*": bayou.Normal(1.0)}}, "one prior"),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 1)), torch.rand(30, 2, 2), {}, r"\(30, 2, 2\)"),
    ],
)
def test_what_it_is_not_for_is_refused_in_a_sentence(net, x, options, words):
    with pytest.raises(ValueError, match=words):
        fit((x, torch.rand(30, 1)), net=net, **options)


def test_labels_have_no_noise_to_predict():
    with pytest.raises(ValueError, match=r"got Categorical\(.*use tabm"):
        fit((torch.rand(30, 3), torch.arange(30) % 2), net=smooth_net(2))


@pytest.mark.parametrize(
    ("rows", "likelihood", "is_in"),
    [
        (MIN_ROWS_OF_PREDICTED_NOISE, bayou.Gaussian(0.5, learn=True), True),
        (MIN_ROWS_OF_PREDICTED_NOISE - 1, bayou.Gaussian(0.5, learn=True), False),
        (MIN_ROWS_OF_PREDICTED_NOISE, bayou.Gaussian(0.5), False),
    ],
)
def test_auto_has_it_for_many_rows_with_noise_to_learn(rows, likelihood, is_in):
    auto = by_name("auto")
    assert tuple(auto.methods) == CANDIDATES
    assert isinstance(auto.methods["tabm-noise"], PredictedNoise)
    target = Target.build(smooth_net(), likelihood, None, rows)
    suitable = auto._suitable_for(target, as_data(noisy_rows(rows, 0)))
    assert ("tabm-noise" in suitable.methods) == is_in


@pytest.mark.parametrize("rows", [300, 5100])
def test_auto_mixes_it_with_one_noise_for_all_rows(rows, tmp_path):
    """With fits to all rows, and above 5,000 rows without."""
    methods = {name: by_name(name, **QUICK) for name in ("tabm", "tabm-noise")}
    auto = bayou.select.Auto(methods, pull=1e6)  # equal weights
    net = smooth_net()
    x, _ = noisy_rows(40, 1)
    mixture = fit(noisy_rows(rows, 0, FACTOR), auto, net)
    assert isinstance(mixture, bayou.Mixture)
    assert "0.50 tabm-noise" in mixture.choice
    assert 0.1 < float(mixture.predict(x).std.mean() / FACTOR) < 2
    mixture.save(tmp_path / "auto.bayou")
    read = bayou.load(tmp_path / "auto.bayou", net)
    assert torch.allclose(read.predict(x).std, mixture.predict(x).std)


def test_a_resumed_fit_is_the_same(tmp_path):
    x, _ = noisy_rows(20, 1)
    rows = noisy_rows(200, 0, FACTOR)
    first, again = (fit(rows, checkpoint=tmp_path / "fit").predict(x) for _ in range(2))
    assert torch.equal(first.outputs, again.outputs)


def test_units_of_scales_are_activated_with_those_of_the_network():
    units = Units([None], Standardization(torch.tensor([3.0]), torch.tensor([2.0])))
    of_likelihood = units.with_scales(has_logs=False)
    of_network = units.with_scales(has_logs=True)
    units.activate(torch.zeros(1))
    outputs = torch.tensor([[1.0, 0.0]])
    assert of_likelihood.restore_outputs(outputs).tolist() == [[5.0, 0.0]]
    expected = torch.tensor([[5.0, 2 * math.log(2.0)]])
    assert torch.allclose(of_network.convert_outputs(nn.Identity(), (), outputs), expected)


def test_an_interruption_returns_what_was_fitted_so_far():
    def interrupt(title, step, total, numbers):
        if step >= 20:
            signal.raise_signal(signal.SIGINT)

    recipe = by_name("tabm-noise", epochs=200)
    posterior = bayou.fit(smooth_net(), noisy_rows(300, 0), recipe, progress=interrupt)
    assert posterior.stopped == "interrupted"
    x, y = noisy_rows(50, 1)
    assert math.isfinite(nll(posterior, x, y))
