"""Networks of infinite width: kernels against random networks, and units of x and y."""

import math

import pytest
import torch

from bayou.network.wide import (
    PriorScales,
    WideNetwork,
    activate,
    find_thresholds,
    wide_kernel,
    wide_variance,
)

F64 = torch.float64
UNITS = pytest.mark.parametrize("units", ["erf", "relu"])
DRAWS = 20_000


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.fixture
def scales():
    return PriorScales.from_logs(torch.tensor([0.3, -0.5, 0.1, 0.2, 0.4, -1.0], dtype=F64))


@UNITS
def test_the_kernel_is_the_covariance_of_a_network_of_many_units(units, scales):
    """Of 20,000 hidden units: five standard errors of the mean of their products."""
    x = noise(6, 3)
    weights = noise(DRAWS, 3, seed=1) * scales.inputs
    bias = noise(DRAWS, 1, seed=2) * scales.bias
    hidden = activate(units, x @ weights.T + bias.T) * scales.output  # (6, units)
    products = hidden[:, None] * hidden[None]
    error = 5 * products.std(-1) / math.sqrt(DRAWS)
    kernel = wide_kernel(units, x, x, scales)
    assert ((products.mean(-1) - kernel).abs() < error).all()


@UNITS
def test_the_variance_is_the_diagonal_and_leading_axes_are_networks(units):
    logs = noise(2, 6)
    x = noise(5, 3, seed=1)
    kernels = wide_kernel(units, x, x, PriorScales.from_logs(logs))
    variances = wide_variance(units, x, PriorScales.from_logs(logs))
    for number in range(2):
        kernel = wide_kernel(units, x, x, PriorScales.from_logs(logs[number]))
        torch.testing.assert_close(kernels[number], kernel)
        torch.testing.assert_close(variances[number], kernel.diagonal(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(kernels, kernels.mT)


@UNITS
def test_the_kernel_is_differentiable_in_scales_and_inputs(units, scales):
    logs = torch.cat([scales.inputs, torch.stack(scales[1:])]).log().requires_grad_()
    x = noise(3, 3).requires_grad_()
    other = noise(4, 3, seed=1)
    assert torch.autograd.gradcheck(
        lambda logs, x: wide_kernel(units, x, other, PriorScales.from_logs(logs)), (logs, x)
    )


def test_rows_and_targets_are_standardized_inside():
    x = 100 + 7 * noise(30, 4)
    x[:, 2] = 5.0  # a constant column
    y = -3 + 4 * noise(30, 2, seed=1)
    net = WideNetwork("erf", x, y, torch.tensor([1.0, 2.0]), torch.float32)
    means = net.inputs.mean(0)
    torch.testing.assert_close(means, torch.zeros(4, dtype=F64), rtol=0, atol=1e-12)
    deviations = net.inputs.std(0, correction=0)
    torch.testing.assert_close(deviations, torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=F64))
    torch.testing.assert_close(net.outputs.square().mean(), torch.ones((), dtype=F64))
    ratio = net.target_scale[1] / net.target_scale[0]
    assert ratio == 2
    torch.testing.assert_close(net.restore(net.outputs), y)
    with pytest.raises(ValueError, match=r"4 columns; give \(rows, 4\)"):
        net(x[:, :3].float())


def test_thresholds_are_middles_between_values_evenly_by_rows():
    few = torch.tensor([3.0, 1.0, 1.0, 7.0], dtype=F64)
    assert find_thresholds(few, 5).tolist() == [2.0, 5.0]
    assert not len(find_thresholds(few, 0))
    assert not len(find_thresholds(torch.tensor([0.0, 1.0, 1.0], dtype=F64), 5))
    column = noise(100)
    thresholds = find_thresholds(column, 4)
    above = (column > thresholds[:, None]).sum(1)
    assert above.tolist() == [79, 59, 39, 19]
    middles = column.sort().values.unfold(0, 2, 1).mean(1)
    assert torch.isin(thresholds, middles).all()
    ties = torch.cat([torch.zeros(95, dtype=F64), torch.arange(5, dtype=F64)])
    assert find_thresholds(ties, 3).tolist() == [0.5]


def test_units_see_columns_and_what_they_are_above():
    x = torch.tensor([[0.0, 5.0], [2.0, 7.0], [4.0, 5.0], [6.0, 7.0]], dtype=F64).repeat(3, 1)
    net = WideNetwork("erf", x, noise(12, 1), torch.ones(()), F64, thresholds=3)
    # 12 rows allow two thresholds; the second column has two values
    assert net.threshold.tolist() == [3.0, 5.0]
    assert net.columns.tolist() == [0, 1, 0, 0]
    assert net.groups.tolist() == [0, 1, 2, 2]
    inputs = net.standardize(torch.tensor([[4.0, 7.0]], dtype=F64))
    torch.testing.assert_close(inputs[0], torch.tensor([5**-0.5, 1.0, 0.5, -0.5], dtype=F64))
    assert net.hidden_weight.shape == (1000, 4)
    assert net.log_scales.shape == (7,)


def test_a_wide_table_has_fewer_thresholds():
    net = WideNetwork("erf", noise(60, 200), noise(60, 1), torch.ones(()), F64, thresholds=12)
    assert len(net.threshold) == 200 * 5
    assert not len(WideNetwork("erf", noise(60, 2), noise(60, 1), torch.ones(()), F64).threshold)


def test_a_network_without_draws_predicts_the_mean_of_y():
    y = noise(10, 2, 3)  # an event of two axes
    net = WideNetwork("relu", noise(10, 1, 2), y, torch.ones(()), F64)
    outputs = net(noise(4, 1, 2))
    torch.testing.assert_close(outputs, y.mean(0).expand(4, 2, 3))
