"""Values of tensors and arrays that cannot be measurements are named before a fit by name."""

import numpy as np
import pytest
import torch
from torch import nn

import bayou
from bayou.likelihoods import StudentT
from bayou.select.far_values import SentinelWarning, flag_sentinels, replace_in_array
from bayou.select.standardize import column_scales

QUICK = bayou.select.by_name("map", effort=0.2)


def linear_rows(count=60):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 3, generator=generator)
    y = x[:, :1] - 2 * x[:, 1:2] + 0.1 * torch.randn(count, 1, generator=generator)
    return x, y


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize(("value", "count"), [(999999999.0, 1), (-999.0, 5), (1e30, 1)])
def test_a_fit_by_name_names_the_sentinels_of_x(value, count):
    x, y = linear_rows()
    x[7 : 7 + count, 2] = value
    with pytest.warns(
        SentinelWarning, match=r"x is .* in row 7 of column 2.* far from all others"
    ) as caught:
        posterior = bayou.fit(network(), (x, y), QUICK)
    assert sum(isinstance(one.message, SentinelWarning) for one in caught) == 1
    new, truth = linear_rows()
    error = (posterior.predict(new).mean - truth)[7 + count :].square().mean().sqrt()
    assert error / truth.std() < 0.5


@pytest.mark.parametrize(("value", "rows"), [(999999999.0, [5]), (-999.0, [5, 8, 9])])
def test_a_fit_by_name_refuses_targets_far_from_all_others(value, rows):
    x, y = linear_rows()
    y[rows] = value
    with pytest.raises(ValueError, match=r"y is .* in row 5.* far from all others"):
        bayou.fit(network(), (x, y), QUICK)


def test_a_given_likelihood_fits_such_targets_with_a_warning():
    x, y = linear_rows()
    y[5] = 999999999.0
    with pytest.warns(SentinelWarning, match="y is"):
        posterior = bayou.fit(network(), (x, y), QUICK, likelihood=StudentT(3.0, 0.1, learn=True))
    assert posterior.predict(x).mean.abs().max() < 1e4


def test_heavy_tails_indicators_and_constant_columns_have_no_sentinels():
    generator = torch.Generator().manual_seed(0)
    incomes = (2.0 * torch.randn(200, 50, generator=generator)).exp()
    indicators = (torch.rand(200, 5, generator=generator) < 0.02).float()
    assert not flag_sentinels(torch.cat([incomes, indicators, torch.ones(200, 1)], 1)).any()


def test_scales_of_columns_leave_common_codes_out():
    columns = torch.randn(200, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = columns[2:, 0].mean(), columns[2:, 0].std(correction=0)
    columns[:2, 0] = -999.0
    shift, scale = column_scales(columns)
    torch.testing.assert_close((shift[0], scale[0]), expected)


def test_estimators_name_sentinels_in_the_units_of_the_user():
    x, y = (item.double().numpy() for item in linear_rows())
    x = 50 + 10 * x
    x[4, 1] = 999999999.0
    estimator = bayou.BayesRegressor("map", effort=0.2)
    with pytest.warns(SentinelWarning, match=r"x is 999999999 in row 4 of column 1") as caught:
        estimator.fit(x, y[:, 0])
    assert sum(isinstance(one.message, SentinelWarning) for one in caught) == 1
    assert 5 < estimator.x_scale_[1] < 20
    clean = np.delete(x, 4, axis=0)
    error = np.sqrt(np.mean((estimator.predict(clean) - np.delete(y[:, 0], 4)) ** 2))
    assert error < 0.5 * y.std()
    y[3] = 999999999.0
    with pytest.raises(ValueError, match="y is 999999999 in row 3"):
        bayou.BayesRegressor("map").fit(clean, np.delete(y[:, 0], 4))


@pytest.mark.filterwarnings("error")
def test_estimators_take_arrays_that_cannot_be_written_to():
    x, y = (item.double().numpy() for item in linear_rows())
    x.setflags(write=False)
    y.setflags(write=False)
    replace_in_array(x, y, refuses_targets=True)
