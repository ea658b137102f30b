"""Rows that differ in their last digits are fitted alike."""

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import bayou
from bayou.network.target import Target
from bayou.select.rounding import round_initial_noise, round_rows
from bayou.training.data import as_data

F64 = torch.float64


def standardize(values):
    return (values - values.mean(0)) / values.std(0)


def table(seed, rows=50):
    """A regression on two columns, standardized."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, generator=generator, dtype=F64)
    noise = 0.3 * torch.randn(rows, 1, generator=generator, dtype=F64)
    y = (1.5 * x[:, :1]).sin() + 0.5 * x[:, 1:] ** 2 + noise
    return standardize(x), standardize(y)


def small_network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def perturb(values, seed):
    """Change numbers by 1e-15 of themselves, in their sixteenth digit."""
    generator = torch.Generator().manual_seed(seed)
    return values * (1 + 1e-15 * torch.randn(values.shape, generator=generator, dtype=F64))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [("map", 0), ("laplace", 1), ("laplace", 2)])
def test_a_fit_by_name_does_not_move_with_the_last_digits_of_its_rows(name, seed):
    """Before, means moved by up to 5 standard deviations of y, and standard deviations by a factor
    of three.
    """
    x, y = table(seed)
    grid = torch.randn(200, 2, generator=torch.Generator().manual_seed(9), dtype=F64)

    def predict(x, y):
        posterior = bayou.fit(small_network(seed), (x, y), name)
        outputs = posterior.predict(grid, samples=200).outputs
        return outputs.mean(0), outputs.std(0)

    mean, std = predict(x, y)
    for other in ((standardize(x), standardize(y)), (perturb(x, 1), perturb(y, 2))):
        assert not torch.equal(other[0], x)
        other_mean, other_std = predict(*other)
        assert (other_mean - mean).abs().max() < 0.005
        assert ((other_std - std).abs() <= 0.02 * std).all()


def test_one_search_does_not_move_with_the_last_digits_of_its_rows():
    """The same for one fit with little effort, by the bits of its weights."""
    x, y = table(0, 40)
    method = bayou.select.by_name("map", effort=0.1)
    first = bayou.fit(small_network(0), (x, y), method)
    second = bayou.fit(small_network(0), (standardize(x), standardize(y)), method)
    assert torch.equal(first.sample(1)["0.weight"], second.sample(1)["0.weight"])


def test_rows_are_rounded_to_eight_digits_of_the_largest_number_of_a_column():
    x = torch.tensor([[1.23456789012, 4e6 / 3], [-0.000000012345, 0.0], [0.1, -1.0]], dtype=F64)
    rows = round_rows(as_data((x, x[:, 0].clone()), 3))
    rounded, y = rows.source
    assert rounded[:, 0].tolist() == [1.23456789, -0.00000001, 0.1]
    assert rounded[1:, 1].tolist() == [0.0, -1.0]
    assert (rounded[:, 1] - x[:, 1]).abs().max() <= 0.005
    assert torch.equal(y, rounded[:, 0])
    twice, _ = round_rows(rows).source
    assert torch.equal(twice, rounded)


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12, 10.0])
def test_numbers_near_a_power_of_ten_keep_their_grid(scale):
    x = scale * torch.rand(100, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    x[0] = scale
    for seed in range(5):
        first, second = (round_rows(as_data((v, v), 100)).source[0] for v in (x, perturb(x, seed)))
        assert torch.equal(first, second)
        assert (first - x).abs().max() <= 5.01e-9 * 2 * scale


def test_numbers_that_are_not_float64_are_kept():
    x = torch.rand(10, 3)
    y = torch.arange(10)
    rows = round_rows(as_data((x, y), 10))
    assert rows.source[0] is x
    assert rows.source[1] is y
    items = as_data(Subset(TensorDataset(x.double(), y), range(10)), 2)
    assert round_rows(items) is items


def test_only_a_learned_noise_is_rounded():
    net = small_network(0)
    learned = Target.build(net, bayou.Gaussian(1 / 3, learn=True), bayou.Normal(1.0), 10)
    noise = round_initial_noise(learned).likelihood.gaussian_noise
    assert noise == pytest.approx(1 / 3, rel=1e-8)
    assert noise != learned.likelihood.gaussian_noise
    known = Target.build(net, bayou.Gaussian(1 / 3), bayou.Normal(1.0), 10)
    assert round_initial_noise(known) is known
