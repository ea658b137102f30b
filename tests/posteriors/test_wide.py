"""The posterior of a network of infinite width: closed forms, and draws as networks."""

import math

import pytest
import torch
from torch import nn

import bayou
from bayou.network import Network
from bayou.network.target import Target
from bayou.network.wide import PriorScales, WideNetwork, wide_kernel
from bayou.posteriors import FileError, WidePosterior
from bayou.priors import Normal

F64 = torch.float64
DRAWS = 600
UNITS = pytest.mark.parametrize("units", ["erf", "relu", "thresholds"])


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


X = noise(12, 2)
Y = 5 + 3 * torch.stack([X[:, 0].sin(), X.prod(1)], 1) + 0.3 * noise(12, 2, seed=1)
NEW = noise(4, 2, seed=2)


def posterior_of(units="erf", draws=2):
    """Draws of the scales at random; y has two columns with units 1 and 2.

    "thresholds" are erf units that see two thresholds of each column, too.
    """
    thresholds = 2 if units == "thresholds" else 0
    kind = "erf" if thresholds else units
    net = WideNetwork(kind, X, Y, torch.tensor([1.0, 2.0], dtype=F64), F64, thresholds)
    likelihood = bayou.Gaussian(0.5, learn=True, units=(1.0, 2.0))
    target = Target.build(net, likelihood, Normal(1.0), 12)
    center = torch.tensor([0.2, -0.1, *[0.1] * len(net.threshold), 0.0, 0.3, -1.0], dtype=F64)
    logs = center + 0.3 * noise(draws, len(center), seed=3)
    posterior = WidePosterior(target, Network(target.net), logs)
    posterior.stopped = "finished"
    posterior.network.net.eval()
    posterior.set_noise()
    return posterior


def joint(posterior, index):
    """Mean (4, 2) and covariance (4, 4) of standardized outputs given one draw of the scales."""
    wide = posterior.wide
    scales = PriorScales.from_logs(posterior.log_scales[index])
    x = wide.standardize(NEW)
    inputs = wide.inputs
    k = wide_kernel(wide.units, inputs, inputs, scales)
    inverse = torch.linalg.inv(k + scales.noise_variance * torch.eye(12, dtype=F64))
    cross = wide_kernel(wide.units, x, inputs, scales)
    prior = wide_kernel(wide.units, x, x, scales)
    return cross @ inverse @ wide.outputs, prior - cross @ inverse @ cross.T


@UNITS
def test_predictions_are_those_of_a_gaussian_process_for_each_draw_of_the_scales(units):
    posterior = posterior_of(units)
    predictive = posterior.predict(NEW)
    factors = posterior.wide.target_spread * torch.tensor([1.0, 2.0], dtype=F64)
    means = []
    variances = []
    for index in range(2):
        mean, covariance = joint(posterior, index)
        means.append(mean * factors + Y.mean(0))
        sigma = posterior.log_scales[index, -1].exp()
        variance = covariance.diagonal()[:, None] + sigma.square()
        variances.append(variance * factors.square())
        epistemic = covariance.diagonal()[:, None] * factors.square()
        torch.testing.assert_close(posterior.function(NEW)[1][index], epistemic, rtol=1e-6, atol=0)
    means = torch.stack(means)
    variances = torch.stack(variances)
    torch.testing.assert_close(predictive.means, means)
    torch.testing.assert_close(predictive.mean, means.mean(0))
    total = variances.mean(0) + means.var(0, correction=0)
    torch.testing.assert_close(predictive.std.square(), total, rtol=1e-6, atol=0)
    y = means[0] + 1.0
    density = torch.distributions.Normal(means, variances.sqrt()).log_prob(y).sum(-1)
    expected = density.logsumexp(0) - math.log(2)
    torch.testing.assert_close(predictive.log_prob(y), expected, rtol=1e-5, atol=1e-5)


@UNITS
def test_draws_have_the_mean_and_the_covariance_of_the_process(units):
    """600 functions at four rows: five standard errors."""
    posterior = posterior_of(units, draws=1)
    functions = posterior.predict(NEW, DRAWS, seed=1).outputs[..., 0]
    assert functions.shape == (DRAWS, 4, 2)
    factors = posterior.wide.target_spread * torch.tensor([1.0, 2.0], dtype=F64)
    mean, covariance = joint(posterior, 0)
    values = (functions - Y.mean(0)) / factors
    error = covariance.diagonal().sqrt()[:, None] / math.sqrt(DRAWS)
    assert ((values.mean(0) - mean).abs() < 5 * error).all()
    for output in range(2):
        deviations = values[..., output] - mean[:, output]
        products = deviations[:, :, None] * deviations[:, None]
        error = 5 * products.std(0) / math.sqrt(DRAWS)
        assert ((products.mean(0) - covariance).abs() < error).all()
    across = (values[..., 0] - mean[:, 0]) * (values[..., 1] - mean[:, 1])
    assert (across.mean(0).abs() < 5 * across.std(0) / math.sqrt(DRAWS)).all()


def test_draws_are_functions_of_seed_and_index_and_moments_are_of_the_draws():
    posterior = posterior_of()
    draws = posterior.sample(6, seed=5)
    later = posterior.sample(2, seed=5, start=4)
    for name, value in draws.items():
        torch.testing.assert_close(later[name], value[4:], rtol=1e-9, atol=1e-9)
    assert posterior.sample(0, seed=5)["row_weight"].shape == (0, 12, 2)
    many = posterior.sample(1000, seed=1)
    mean = posterior.mean()
    std = posterior.std()
    assert {*mean} == {*std} == {*many}
    for name, value in many.items():
        deviations = value - mean[name]
        # The scales alternate, which makes their means exact.
        allowed = 6 / math.sqrt(1000)
        assert (deviations.mean(0).abs() <= allowed * std[name] + 1e-9).all(), name
        squares = deviations.square()
        difference = (squares.mean(0) - std[name].square()).abs()
        assert (difference <= allowed * squares.std(0) + 1e-9).all(), name


def test_the_network_of_the_mean_is_the_mean_function():
    posterior = posterior_of(draws=1)
    net = posterior.to_module()
    torch.testing.assert_close(net(NEW), posterior.predict(NEW).mean)
    with pytest.raises(ValueError, match=r"to_module\(seed=0\)"):
        posterior_of(draws=2).to_module()


def test_a_draw_is_a_differentiable_function_of_x():
    posterior = posterior_of()
    draw = {name: value[0] for name, value in posterior.sample(1, seed=0).items()}
    draw.pop("likelihood.log_scale")
    x = NEW.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: posterior.call(draw, x), x)


def test_blocks_of_rows_change_nothing():
    posterior = posterior_of()
    expected = posterior.predict(NEW).outputs
    outputs = posterior.predict(NEW, batch_size=3).outputs
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)


@UNITS
def test_a_file_holds_the_rows_and_needs_no_network_of_its_own(units, tmp_path):
    posterior = posterior_of(units)
    posterior.save(tmp_path / "p.bayou")
    loaded = bayou.load(tmp_path / "p.bayou", nn.Linear(3, 4))
    assert torch.equal(loaded.predict(NEW).outputs, posterior.predict(NEW).outputs)
    expected = posterior.predict(NEW, 3, seed=1).outputs
    assert torch.equal(loaded.predict(NEW, 3, seed=1).outputs, expected)
    assert repr(loaded) == repr(posterior)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"units_of_network": "step"}, "units_of_network.*erf or relu"),
        ({"thresholds": -1}, "thresholds.*a whole number"),
    ],
)
def test_a_file_with_other_units_is_refused(entry, words, tmp_path):
    from bayou.core.files import read_file, write_file

    posterior_of().save(tmp_path / "p.bayou")
    tensors, config = read_file(tmp_path / "p.bayou")
    write_file(tmp_path / "p.bayou", tensors, config | entry)
    with pytest.raises(FileError, match=words):
        bayou.load(tmp_path / "p.bayou", nn.Linear(1, 1))


def test_a_file_of_an_earlier_version_has_no_thresholds(tmp_path):
    from bayou.core.files import read_file, write_file

    posterior_of().save(tmp_path / "p.bayou")
    tensors, config = read_file(tmp_path / "p.bayou")
    config.pop("thresholds")
    write_file(tmp_path / "p.bayou", tensors, config)
    loaded = bayou.load(tmp_path / "p.bayou", nn.Linear(1, 1))
    assert torch.equal(loaded.predict(NEW).outputs, posterior_of().predict(NEW).outputs)


def test_a_mixture_with_itself_predicts_as_before(tmp_path):
    posterior = posterior_of(draws=1)
    mixture = bayou.posteriors.Mixture([posterior, posterior])
    outputs = mixture.predict(NEW, 200).means
    exact = posterior.predict(NEW)
    assert ((outputs.mean(0) - exact.mean).abs() < 6 * exact.epistemic_std / 200**0.5).all()


def test_other_columns_and_no_rows_are_errors():
    posterior = posterior_of()
    with pytest.raises(ValueError, match="2 columns"):
        posterior.predict(torch.zeros(3, 5, dtype=F64))
    with pytest.raises(ValueError, match="2 columns"):
        posterior.predict(torch.zeros(3, 5, dtype=F64), 4)
    with pytest.raises(ValueError, match="omit where"):
        posterior.relevance("0.weight")


def test_relevance_is_that_of_the_prior_scales():
    posterior = posterior_of(draws=1)
    scales = posterior.log_scales[0, :2].exp()
    relevance = posterior.relevance()["hidden_weight"]
    torch.testing.assert_close(relevance, scales / scales.max())


def test_the_relevance_of_a_column_counts_its_thresholds():
    """The standard deviation of the inputs of a unit that a column causes."""
    posterior = posterior_of("thresholds", draws=1)
    wide = posterior.wide
    parts = (wide.inputs * posterior.log_scales[0, :-3].exp()).var(0, correction=0)
    columns = [parts[wide.columns == number].sum().sqrt() for number in range(2)]
    relevance = posterior.relevance()["hidden_weight"]
    torch.testing.assert_close(relevance, torch.stack(columns) / max(columns))


def test_a_function_with_thresholds_jumps_there_only():
    posterior = posterior_of("thresholds")
    threshold = posterior.wide.threshold[0]
    x = NEW[:1].repeat(4, 1)
    x[:, 0] = threshold + torch.tensor([-2e-9, -1e-9, 1e-9, 2e-9], dtype=F64)
    mean = posterior.predict(x).mean[:, 0]
    steps = mean.diff().abs()
    assert steps[1] > 1e-3
    assert max(steps[0], steps[2]) < 1e-6
