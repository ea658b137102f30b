"""The rounding of targets of few values, below whose noise no method by name goes."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import bayou
from bayou.inference.rounded_targets import rounding_noise, rounding_noises
from bayou.likelihoods.continuous import StudentT
from bayou.network.target import Target
from bayou.select.likelihood_parameters import likeliest_parameters
from bayou.select.named import by_name
from bayou.select.noise import least_noise
from bayou.select.noise_and_prior import NoiseAndPrior
from bayou.select.predicted_noise import PredictedNoise
from bayou.select.regression import RegressionSearch
from bayou.training.data import as_data

F64 = torch.float64
# −log p of a value that is predicted exactly with the noise of rounding to whole numbers.
LEAST_NLL = 0.5 * math.log(2 * math.pi / 12)


def latent(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 3, generator=generator, dtype=F64)
    noise = torch.randn(rows, 1, generator=generator, dtype=F64)
    return x, 3 * x[:, :1].sin() + 2 * x[:, 1:2] + 0.7 * noise + 4


def repeated_ratings(rows=100):
    """Return whole numbers that a smooth function and its noise give."""
    x, y = latent(rows)
    return x, y.round()


def small_net(columns=3, outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


@pytest.mark.parametrize("step", [1.0, 0.1, 0.25, 1e-3, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_noise_of_rounding_is_that_of_a_uniform_error(step, dtype):
    """The errors of 10⁵ rounded numbers have the standard deviation d/√12, within 1 %."""
    generator = np.random.default_rng(0)
    exact = generator.normal(3 * step, 2 * step, 100_000)
    rounded = np.round(exact / step) * step
    noise = rounding_noise(torch.tensor(rounded).to(dtype))
    assert noise == pytest.approx(step / math.sqrt(12), rel=1e-4)
    assert noise == pytest.approx(float((rounded - exact).std()), rel=0.01)


def test_decimals_that_are_not_exact_are_one_value():
    values = torch.tensor([0.3, 0.1 + 0.2, 0.7, 0.1 * 7, 1.1, 1.1 + 2e-16], dtype=F64)
    assert len(values.unique()) > 3
    assert rounding_noise(values.repeat(2)) == pytest.approx(0.4 / math.sqrt(12))


def test_it_follows_the_units_of_y():
    y = latent(200)[1].round()
    scaled = (y - y.mean()) / y.std()
    assert rounding_noise(scaled) * float(y.std()) == pytest.approx(1 / math.sqrt(12))


@pytest.mark.parametrize(
    "y",
    [
        latent(200)[1],
        torch.arange(30.0),  # whole numbers, each once
        torch.ones(20, 1),
        torch.ones(1),
        latent(3)[1].round(),
    ],
)
def test_numbers_that_hardly_repeat_have_no_rounding(y):
    assert rounding_noise(y) == 0.0


def test_it_is_at_most_the_deviation_of_a_constant_prediction():
    y = torch.zeros(1000, dtype=F64)
    y[:5] = 1.0
    assert rounding_noise(y) == pytest.approx(math.sqrt(0.005 * 0.995))


def test_one_noise_for_all_columns_has_the_mean_of_their_variances():
    _, y = latent(300)
    columns = torch.cat((y.round(), 2 * (y / 2).round(), y), 1)
    expected = torch.tensor([1.0, 2.0, 0.0], dtype=F64) / math.sqrt(12)
    torch.testing.assert_close(rounding_noises(columns), expected)
    assert rounding_noise(columns) == pytest.approx(math.sqrt(5 / 36))


@pytest.mark.parametrize("name", ["wide", "wide-noise"])
def test_rows_that_repeat_with_their_rating_leave_a_noise(name):
    """A density at a value has no limit otherwise: the NLL was below −4."""
    x, y = repeated_ratings()
    method = by_name(name, effort=0.3)
    train = torch.cat((x, x[:60])), torch.cat((y, y[:60]))
    posterior = bayou.fit(small_net(), train, method, seed=0, progress=False)
    prediction = posterior.predict(x[60:])
    assert float(prediction.aleatoric_std.min()) >= 1 / math.sqrt(12) * (1 - 1e-6)
    nll = float(-prediction.log_prob(y[60:]).mean())
    assert LEAST_NLL < nll < 2
    assert "rounding of y" in posterior.plan


def test_files_of_a_wide_network_keep_the_rounding(tmp_path):
    x, y = repeated_ratings(60)
    method = bayou.methods.Wide(draws=2, passes=20, varied_noise=True)
    rows = torch.cat((x, x)), torch.cat((y, y))
    posterior = bayou.fit(small_net(), rows, method, progress=False)
    posterior.save(tmp_path / "p.bayou")
    loaded = bayou.load(tmp_path / "p.bayou", nn.Linear(1, 1))
    assert torch.equal(loaded.predict(x).outputs, posterior.predict(x).outputs)
    exact, functions = posterior.predict(x[:5]), posterior.predict(x[:5], 50, seed=1)
    torch.testing.assert_close(functions.aleatoric_std, exact.aleatoric_std, rtol=0.05, atol=0)


def test_the_noise_at_a_row_is_the_learned_one_and_that_of_rounding():
    """σ²·F(x) + d²/12 in the units of y, for the most probable scales."""
    x, y = latent(80)
    y = 5 * (y / 5 * 2).round()
    method = bayou.methods.Wide(draws=1, passes=30, varied_noise=True)
    posterior = bayou.fit(small_net(), (x, y), method, progress=False)
    variance = (posterior.log_scales[0, -1].exp() * posterior.wide.target_scale).square()
    expected = variance * posterior.noise(x[:5]).exp() + 5**2 / 12
    actual = posterior.predict(x[:5]).aleatoric_std[:, 0].square()
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=0)


def test_a_known_noise_of_a_wide_network_is_kept():
    x, y = repeated_ratings(40)
    method = bayou.methods.Wide(draws=1, passes=5)
    noise = bayou.Gaussian(0.01)
    posterior = bayou.fit(small_net(), (x, y), method, likelihood=noise, progress=False)
    assert float(posterior.predict(x).aleatoric_std.max()) == pytest.approx(0.01)


@pytest.mark.parametrize("name", ["map", "laplace", "linear", "tabm"])
def test_a_selected_noise_is_raised_to_that_of_rounding(name):
    """y is linear in x and exact but for a noise far below its steps."""
    x = torch.arange(8, dtype=F64).repeat(15)[:, None]
    y = 2 * x + 1
    net = nn.Linear(1, 1).double()
    posterior = bayou.fit(net, (x, y), by_name(name, effort=0.3), seed=0, progress=False)
    least = 2 / math.sqrt(12)
    assert posterior.predict(x).aleatoric_std.min() == pytest.approx(least, rel=1e-5)
    assert "raised to that of the rounding of y" in posterior.plan


def test_the_targets_of_a_dataset_are_read_without_a_draw_of_the_global_stream():
    x, y = repeated_ratings(50)

    class Drawn(torch.utils.data.Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, row):
            return x[row] + 1e-9 * torch.randn(3, dtype=F64), y[row]

    state = torch.get_rng_state()
    assert least_noise(as_data(Drawn())) == pytest.approx(1 / math.sqrt(12))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_ratio_of_noise_and_prior_stays():
    search = RegressionSearch(NoiseAndPrior(0.1, 3.0), {}, [])
    raised = search.with_noise_above(0.2)
    assert (raised.settings.noise, raised.settings.scale) == pytest.approx((0.2, 6.0))
    assert raised.is_raised
    assert search.with_noise_above(0.05) is search
    assert search.with_noise_above(0.0) is search


def test_the_noise_of_many_rows_is_not_below_that_of_rounding():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 5, (6000, 1), generator=generator).double()
    method = by_name("map", steps=300, lr=0.05)
    posterior = bayou.fit(nn.Linear(1, 1).double(), (x, 3 * x), method, seed=0, progress=False)
    assert posterior.predict(x[:1]).aleatoric_std.item() == pytest.approx(3 / math.sqrt(12))
    assert "raised to that of the rounding of y" in posterior.plan


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_scale_of_heavy_tails_is_not_below_that_of_rounding(outputs):
    scale = 0.1 if outputs == 1 else (0.1,) * outputs
    likelihood = StudentT(scale=scale, learn=True).bind(dtype=F64)
    y = torch.arange(6, dtype=F64).repeat(10)[:, None].repeat(1, outputs)
    (value,) = likeliest_parameters(likelihood, y + 1e-4, y).values()
    torch.testing.assert_close(value.exp(), torch.full_like(value, 1 / math.sqrt(12)))


def test_a_predicted_noise_is_not_below_that_of_rounding():
    x, y = latent(40)
    y = (y - y.mean()) / y.std()
    y = (2 * y).round() / 2
    target = Target.build(small_net(), bayou.Gaussian(0.5, learn=True), None, len(x))
    recipe = by_name("tabm-noise", epochs=2, members=2)
    assert isinstance(recipe, PredictedNoise)
    plan = bayou.select.plan(recipe, target, (x, y), seed=0, progress=False)
    assert plan.target.likelihood_spec.min_std == pytest.approx(0.5 / math.sqrt(12))
