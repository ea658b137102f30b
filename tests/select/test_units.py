"""Methods by name standardize x and y themselves, and what they return speaks the units of the
user.
"""

import copy
import math
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import bayou
from bayou.core.files import FileError, read_file, write_file
from bayou.network.units import Standardization, Units, units_of, with_units
from bayou.operations.export import export
from bayou.select.standardize import (
    UnitsWarning,
    apply_units,
    choose_units,
    describe_columns,
    is_pretrained,
    leave_indices,
)
from bayou.training.data import as_data
from bayou.training.inputs import forward_inputs

F64 = torch.float64

ROWS = 40


def linear_rows(rows=ROWS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator, dtype=F64)
    noise = torch.randn(rows, 1, generator=generator, dtype=F64)
    return x, x @ torch.tensor([[1.0], [2.0], [-1.0]], dtype=F64) + 0.1 * noise


NEW, _ = linear_rows(seed=1)


def network(inputs=3, outputs=1):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def fitted(x, y, name="map", net=None, **options):
    net = network(x.shape[1], y.shape[1]) if net is None else net
    method = bayou.select.by_name(name, effort=0.1)
    return bayou.fit(net, (x, y), method, **options)


def fitted_by(method, data):
    return bayou.fit(network(), data, method, likelihood=bayou.Gaussian(0.1))


@cache
def fitted_to_unit_scale(name="map"):
    return fitted(*linear_rows(), name)


@pytest.mark.parametrize(
    ("name", "scale"), [("map", 1e-9), ("map", 1e9), ("laplace", 1e9), ("mnf", 1e-9)]
)
def test_predictions_scale_with_y(name, scale):
    x, y = linear_rows()
    expected = fitted_to_unit_scale(name).predict(NEW)
    predictive = fitted(x, scale * (y + 1e3), name).predict(NEW)
    # equal up to the rounding of scale·y, which a search of modes amplifies
    assert torch.allclose(predictive.mean / scale - 1e3, expected.mean, atol=5e-3)
    assert torch.allclose(predictive.std / scale, expected.std, rtol=2e-2)
    ends = torch.stack(predictive.interval(0.9))
    expected_ends = torch.stack(expected.interval(0.9))
    assert torch.allclose(ends / scale - 1e3, expected_ends, atol=2e-2)


def test_columns_of_x_may_be_shifted_and_scaled():
    x, y = linear_rows()
    scale = torch.tensor([1e6, 1e-6, 3.0], dtype=F64)
    shift = torch.tensor([-4e6, 2e-5, 2000.0], dtype=F64)
    expected = fitted_to_unit_scale().predict(NEW)
    predictive = fitted(shift + scale * x, y).predict(shift + scale * NEW)
    assert torch.allclose(predictive.mean, expected.mean, atol=2e-3)
    assert torch.allclose(predictive.std, expected.std, rtol=2e-2)


def test_outputs_of_different_units_have_a_noise_each():
    x, y = linear_rows()
    several = torch.cat([1e6 * y, 1e-3 * y + 5], 1)
    predictive = fitted(x, several).predict(x)
    error = (predictive.mean - several).square().mean(0).sqrt()
    assert torch.allclose(predictive.std.mean(0), error, rtol=0.5)
    assert float(predictive.std[0, 0] / predictive.std[0, 1]) == pytest.approx(1e9, rel=1e-6)


def test_files_modules_and_exports_speak_the_units_of_y(tmp_path):
    x, y = linear_rows()
    posterior = fitted(10 * x + 50, 1e4 * y + 2e5)
    new = 10 * NEW + 50
    mean = posterior.predict(new).mean
    assert (mean - 2e5).abs().max() < 2e5
    posterior.save(tmp_path / "prices.bayou")
    loaded = bayou.load(tmp_path / "prices.bayou", network())
    assert torch.equal(loaded.predict(new).mean, mean)
    assert str(loaded.checks) == str(posterior.checks)
    assert torch.allclose(posterior.to_module()(new), mean)
    program = export(posterior, new[:2])
    assert torch.allclose(program.module()(new)["mean"], mean)
    assert torch.allclose(program.module()(new)["std"], posterior.predict(new).std)


def test_operations_take_rows_in_the_units_of_y():
    x, y = linear_rows(80)
    prices = 1e4 * y + 2e5
    posterior = fitted(x[:60], prices[:60])
    intervals = bayou.operations.conformal(posterior, (x[60:], prices[60:]), 0.8)
    low, high = intervals.interval(x)
    assert ((low <= prices) & (prices <= high)).double().mean() > 0.6
    student = bayou.operations.distill(posterior, network(outputs=2), (x, prices), steps=400)
    error = (student.predict(x).mean - posterior.predict(x).mean).square().mean().sqrt()
    assert error < 0.2 * prices.std()


def test_the_bound_and_the_history_are_those_of_y_in_its_units():
    x, y = linear_rows()
    scale = 1e4
    small = fitted(x, y, "laplace")
    large = fitted(x, scale * y, "laplace")
    expected = small.log_evidence - len(y) * math.log(scale)
    assert large.log_evidence == pytest.approx(expected, abs=1)
    with torch.no_grad():
        log_likelihood = float(large.target.log_likelihood(large.to_module()(x), scale * y))
    assert log_likelihood == pytest.approx(large.history[-1]["log_likelihood"], abs=1e-3)


def test_a_given_noise_is_in_the_units_of_y():
    x, y = linear_rows()
    posterior = fitted(x, 1e4 * y, likelihood=bayou.Gaussian(1e3))
    assert posterior.target.likelihood.gaussian_noise == pytest.approx(1e3)
    assert (posterior.predict(x).mean - 1e4 * y).square().mean().sqrt() < 3e3


def test_a_network_with_its_own_noise_has_units_too():
    x, y = linear_rows(80)
    net = network(outputs=2)
    posterior = fitted(x, 1e6 * y - 3e6, net=net, likelihood=bayou.HeteroscedasticGaussian())
    predictive = posterior.predict(x)
    assert (predictive.mean - (1e6 * y - 3e6)).square().mean().sqrt() < 0.2 * 1e6 * y.std()
    assert 1e4 < predictive.std.mean() < 1e6


class Prices(torch.utils.data.Dataset):
    """A map-style data set whose items are in units far from 1."""

    def __init__(self, rows=64):
        self.x, self.y = linear_rows(rows)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return 100 * self.x[index] + 1e3, 1e5 * self.y[index]


@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_batches_of_data_sets_and_loaders_are_standardized(kind):
    rows = as_data(Prices() if kind == "dataset" else DataLoader(Prices(), 16))
    units = choose_units(network(), rows, None)
    batches = list(apply_units(units, rows).epoch())
    x = torch.cat([forward_inputs(x)[0] for x, _ in batches])
    y = torch.cat([y for _, y in batches])
    for values in (x, y):
        assert torch.allclose(values.mean(0), torch.zeros(values.shape[1]).double(), atol=1e-9)
        assert torch.allclose(values.std(0, correction=0), torch.ones(values.shape[1]).double())


def test_a_fit_to_a_loader_predicts_in_its_units():
    data = Prices()
    method = bayou.select.by_name("map", steps=200)
    posterior = bayou.fit(network(), DataLoader(data, 64), method)
    x = 100 * data.x + 1e3
    error = (posterior.predict(x).mean - 1e5 * data.y).square().mean().sqrt()
    assert error < 0.2 * 1e5 * data.y.std()


def test_codes_indicators_and_images_are_left_alone_and_constants_become_one():
    x, _ = linear_rows()
    codes = torch.arange(ROWS, dtype=F64).remainder(7)
    indicator = (x[:, 0] > 0).double()
    constant = torch.full((ROWS,), 5.0, dtype=F64)
    years = torch.arange(ROWS, dtype=F64) + 1980
    table = torch.stack([codes, indicator, constant, years, 1e4 * x[:, 1]], 1)
    columns = describe_columns(network(5), table)
    assert columns.is_standardized.tolist() == [False, False, True, True, True]
    assert (float(columns.shift[2]), float(columns.scale[2])) == (0.0, 5.0)
    assert describe_columns(network(), torch.rand(10, 1, 8, 8)) is None
    assert describe_columns(network(), torch.randint(0, 100, (10, 5))) is None
    pixels = torch.rand(50, 64)
    pixels[0] = 1.0
    pixels[1] = 0.0
    assert describe_columns(network(), pixels) is None


def test_columns_that_are_indices_of_an_embedding_are_left_alone():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 3)
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            return self.head(torch.cat([self.table(x[:, 0].long()), x[:, 1:]], 1))

    net = Embedded().double()
    codes = torch.arange(ROWS, dtype=F64)
    years = 1980 + codes
    x = torch.stack([codes, years], 1)
    columns = leave_indices(net, (x,), {0: describe_columns(net, x)})[0]
    assert columns.is_standardized.tolist() == [False, True]
    y = torch.randn(ROWS, 1, dtype=F64)
    fitted(x, y, net=net).predict(x)


def test_features_of_sequences_are_standardized_along_their_axis():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 5, 2, generator=generator) * torch.tensor([1e3, 1.0])
    recurrent = describe_columns(nn.LSTM(2, 3, batch_first=True), x)
    convolved = describe_columns(nn.Conv1d(5, 3, 1), x)
    assert recurrent.affine().shift.shape == (2,)
    assert convolved.affine().shift.shape == (5, 1)


def test_a_pretrained_network_keeps_its_units():
    x, y = linear_rows()
    prices = 100 * y + 500
    net = nn.Linear(3, 1).double()
    assert not is_pretrained(net, (x,), prices, None)
    solution = torch.linalg.lstsq(
        torch.cat([x, torch.ones(ROWS, 1, dtype=F64)], 1), prices
    ).solution
    with torch.no_grad():
        net.weight.copy_(solution[:3].T)
        net.bias.copy_(solution[3])
    assert is_pretrained(net, (x,), prices, None)
    assert choose_units(net, as_data((x, prices)), None) is None
    assert choose_units(network(), as_data((x, prices)), None) is not None


def test_a_pretrained_classifier_keeps_its_units():
    x, y = linear_rows(100)
    labels = (y[:, 0] > 0).long()
    assert not is_pretrained(network(outputs=2), (x,), labels, None)
    net = nn.Linear(3, 2).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-1.0, -2.0, 1.0], [1.0, 2.0, -1.0]]))
        net.bias.zero_()
    assert is_pretrained(net, (x,), labels, None)


def test_frozen_networks_and_where_keep_their_units():
    x, y = linear_rows()
    net = network()
    net[0].requires_grad_(False)
    assert choose_units(net, as_data((x, 1e4 * y)), None) is None
    posterior = fitted(x, y, where="2.*")
    assert units_of(posterior.target.net) is None


def test_the_network_of_the_user_is_not_changed():
    x, y = linear_rows()
    net = network()
    before = copy.deepcopy(net.state_dict())
    fitted(x, 1e4 * y, net=net)
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_method_object_warns_once_about_units():
    x, y = linear_rows()
    method = bayou.MAP(steps=2)
    fitted_by(method, (x, y))  # a warning is an error in these tests
    x[:, 2] *= 1e5
    with pytest.warns(UnitsWarning, match=r"y has .* and x has .*column 2.*by name") as caught:
        fitted_by(method, (x, 1e4 * y))
    assert sum(isinstance(warning.message, UnitsWarning) for warning in caught) == 1


def test_units_are_switched_on_in_every_copy_of_a_network():
    net = nn.Linear(2, 1).double()
    units = Units(
        [Standardization(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))],
        Standardization(torch.tensor(5.0), torch.tensor(6.0)),
    )
    wrapped = with_units(net, units)
    twin = copy.deepcopy(wrapped)
    x = torch.randn(4, 2, dtype=F64)
    assert torch.equal(twin(x), net(x))
    units.activate(net.weight)
    expected = 5 + 6 * net((x - torch.tensor([1.0, 2.0])) / torch.tensor([3.0, 4.0]))
    assert torch.allclose(twin(x), expected)
    again = Units.from_json(units.to_json())
    again.activate(net.weight)
    assert torch.allclose(with_units(net, again)(x), expected)


def test_damaged_units_in_a_file_raise(tmp_path):
    x, y = linear_rows()
    fitted(x, 1e4 * y).save(tmp_path / "a.bayou")
    tensors, config = read_file(tmp_path / "a.bayou")
    config["units"]["output"]["scale"] = -1.0
    write_file(tmp_path / "b.bayou", tensors, config)
    with pytest.raises(FileError, match="units"):
        bayou.load(tmp_path / "b.bayou", network())


FITTED_METHODS = [
    bayou.Ensemble(2, of=bayou.MAP(steps=50)),
    bayou.VI(bayou.MeanField(), steps=20),
    bayou.HMC(draws=8, warmup=8, leapfrogs=3, chains=2, start=bayou.MAP(steps=50)),
]


@pytest.mark.parametrize("method", FITTED_METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.filterwarnings("ignore:the chains of HMC")
def test_every_fit_is_compared_with_baselines(method):
    x, y = linear_rows()
    posterior = fitted_by(method, (x, y))
    checks = posterior.checks
    assert {"constant", "linear", "mode"} <= {check.name for check in checks}
    assert f"{ROWS} training rows" in checks["linear"].text
    assert checks["linear"].status == "failed"  # in so few steps
    assert {"constant", "linear"} <= {check.name for check in fitted_to_unit_scale().checks}


def test_rows_held_out_for_validation_are_checked():
    method = bayou.MAP(steps=300, validation=0.2)
    posterior = fitted_by(method, linear_rows(100))
    assert "20 held-out rows" in posterior.checks["linear"].text
    assert "coverage" in posterior.checks
