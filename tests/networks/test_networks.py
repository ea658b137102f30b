"""Embeddings of columns and the network of a table: values, gradients, fits and files."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.networks import Categories, Periodic, PiecewiseLinear, TableLayout, TableNetwork
from bayou.networks.embeddings import LINEAR_GAIN, LINEAR_REACH, compress


@pytest.fixture
def x():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(400, 3, generator=generator, dtype=torch.float64)


@pytest.fixture
def layout(x):
    codes = (x[:, :1] * 3).round().clamp(0, 4)
    return TableLayout.fit(torch.cat([x, codes], 1), bins=8, levels={3: 5})


def test_a_linear_map_of_the_bins_is_linear_interpolation_between_any_values_at_the_edges():
    edges = [-1.0, 0.5, 0.75, 3.0]
    embed = PiecewiseLinear([edges]).double()
    values = np.array([2.0, -1.0, 4.0, 0.5])
    points = torch.linspace(-2, 4, 50, dtype=torch.float64)
    bins = embed(points.unsqueeze(1))[:, 1:]
    at_first_edge = embed(torch.tensor([[edges[0]]], dtype=torch.float64))[:, 1:]
    weights = torch.tensor(np.diff(values))
    function = values[0] + (bins - at_first_edge) @ weights
    assert_close(function, torch.tensor(np.interp(points, edges, values)))


def test_the_linear_term_has_a_continuous_slope_and_grows_as_a_logarithm():
    z = torch.tensor([0.0, 3.9, 4.1, 1e6], dtype=torch.float64, requires_grad=True)
    value = compress(z)
    (slope,) = torch.autograd.grad(value.sum(), z)
    excess = np.array([0.1, 1e6 - LINEAR_REACH])
    known = [0.0, 3.9, *(LINEAR_REACH + np.log1p(excess))]
    assert_close(value.detach(), torch.tensor(known, dtype=torch.float64))
    known_slope = [1.0, 1.0, *(1 / (1 + excess))]
    assert_close(slope, torch.tensor(known_slope, dtype=torch.float64))
    assert_close(compress(-z), -value)
    embed = PiecewiseLinear([[]], mean=[2.0], scale=[4.0]).double()
    assert_close(embed(torch.tensor([[6.0]]).double()), torch.tensor([[LINEAR_GAIN]]).double())


def test_edges_are_quantiles_of_training_rows(x):
    (first, *_) = TableLayout.fit(x, bins=4).edges
    known = np.quantile(x[:, 0].numpy(), [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(first, known, rtol=1e-6)


def test_bins_are_centered_where_they_are_equally_filled():
    x = torch.linspace(3, 5, 10_001, dtype=torch.float64).unsqueeze(1)
    bins = PiecewiseLinear.fit(x, bins=8).double()(x)[:, 1:]
    assert bins.mean(0).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("column", "bins"),
    [
        (torch.zeros(100), 0),  # constant
        (torch.full((100,), torch.nan), 0),  # all missing
        (torch.arange(100) % 2.0, 0),  # an indicator
        (torch.arange(100) % 4.0, 3),  # an edge at every value
        (torch.cat([torch.zeros(90), torch.arange(10.0)]), 1),  # repeated quantiles
        (torch.cat([torch.arange(99.0), torch.tensor([1e12])]), 8),
        (1e10 + torch.arange(100.0), 0),  # values that float32 cannot tell apart
    ],
)
def test_unusual_columns_give_a_finite_embedding(column, bins):
    layout = TableLayout.fit(column.unsqueeze(1).double(), bins=8)
    assert max(0, len(layout.edges[0]) - 1) == bins
    embed = PiecewiseLinear(layout.edges, layout.mean, layout.scale)
    extremes = torch.tensor([[-1e15], [0.0], [1e15]])
    assert bool(embed(extremes).isfinite().all())
    assert embed(extremes).abs().max() < 100


def test_few_rows_and_wide_tables_have_fewer_bins():
    generator = torch.Generator().manual_seed(0)
    few = TableLayout.fit(torch.randn(25, 2, generator=generator))
    assert [len(edges) - 1 for edges in few.edges] == [2, 2]
    wide = TableLayout.fit(torch.randn(50, 5000, generator=generator))
    assert not any(wide.edges)


def test_a_layout_is_the_same_after_json(layout):
    assert TableLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert layout.numbers == (0, 1, 2)
    assert layout.categories == (3,)
    assert "3 columns of numbers in up to 8 bins" in layout.describe()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"edges": ((1.0, 1.0),)}, "increase"),
        ({"edges": ((1.0, float("nan")),)}, "finite"),
        ({"edges": ((1.0,),)}, "two or more"),
        ({"scale": (0.0,)}, "positive"),
        ({"levels": (-1,)}, "at least 0"),
        ({"mean": ()}, "every column"),
    ],
)
def test_an_invalid_layout_is_an_error(fields, message):
    valid = {"edges": ((0.0, 1.0),), "mean": (0.0,), "scale": (1.0,), "levels": (0,)}
    with pytest.raises(ValueError, match=message):
        TableLayout(**valid | fields)


@pytest.mark.parametrize(
    "call",
    [
        lambda: TableLayout.fit(torch.zeros(0, 2)),
        lambda: TableLayout.fit(torch.zeros(5, 2), levels={2: 3}),
        lambda: TableLayout.from_json({"spec": "Normal", "fields": {}}),
        lambda: Categories([]),
        lambda: Categories([3])(torch.zeros(2, 2)),
        lambda: Periodic(0),
        lambda: Periodic(2)(torch.zeros(4, 3)),
        lambda: PiecewiseLinear([[]])(torch.zeros(4, 3)),
    ],
)
def test_invalid_arguments_are_errors(call):
    with pytest.raises(ValueError, match=r"got|needs|columns|names"):
        call()


def test_unknown_and_missing_codes_have_one_vector_for_each_column():
    embed = Categories([3, 2], width=2).double()
    codes = torch.tensor([[0, 0], [2, 1], [3, 2], [-1, torch.nan], [99, 7]], dtype=torch.float64)
    vectors = embed(codes).unflatten(1, (2, 2))
    table = embed.table.weight.detach()
    assert_close(vectors[:2], torch.stack([table[[0, 4]], table[[2, 5]]]))
    for row in range(2, 5):
        assert_close(vectors[row], table[[3, 6]])


def test_periodic_embeddings_are_the_formula_of_the_paper(x):
    embed = Periodic(3, frequencies=4, std=0.3, width=2).double()
    weight, bias = embed.linear.weight, embed.linear.bias
    for column in range(3):
        angle = 2 * np.pi * x[:, column, None] * embed.frequency[column]
        features = torch.cat([angle.cos(), angle.sin(), x[:, column, None]], 1)
        known = (features @ weight.T + bias).clamp_min(0.0)
        assert_close(embed(x)[:, 2 * column : 2 * column + 2], known)


def test_a_new_network_is_an_mlp_on_standardized_columns(x):
    net = TableNetwork(TableLayout.fit(x), 1, hidden=(5,)).double()
    layers = net.layers
    standardized = LINEAR_GAIN * (x - x.mean(0)) / x.std(0, correction=0)
    hidden = torch.relu(standardized @ layers[0].weight[:, :3].T + layers[0].bias)
    assert_close(net(x), layers[2](hidden), rtol=1e-5, atol=1e-5)


def test_gradients_in_inputs_and_weights_are_those_of_finite_differences(layout):
    torch.manual_seed(0)
    net = TableNetwork(layout, 2, hidden=(4,), activation="Tanh").double()
    rows = torch.randn(5, 4, dtype=torch.float64)
    rows[:, 3] = torch.arange(5)
    names, values = zip(*net.named_parameters(), strict=True)

    def call(*weights):
        return torch.func.functional_call(net, dict(zip(names, weights, strict=True)), (rows,))

    assert torch.autograd.gradcheck(call, values)
    stacked = {name: torch.stack([value, 2 * value]) for name, value in zip(names, values)}  # noqa: B905
    outputs = torch.func.vmap(lambda w: torch.func.functional_call(net, w, (rows,)))(stacked)
    assert_close(outputs[0], net(rows))


def make_rows():
    generator = torch.Generator().manual_seed(1)
    numbers = 1000 + 30 * torch.randn(120, 2, generator=generator, dtype=torch.float64)
    codes = torch.randint(30, (120, 1), generator=generator).double()
    rows = torch.cat([numbers, codes], 1)
    y = ((numbers[:, :1] > 1000) + (codes > 15)).double()
    return rows, y + 0.1 * torch.randn(120, 1, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    "method", ["map", "laplace", "laplace-last", "ffg", "mnf", "tabm", "sghmc"]
)
def test_every_kind_of_method_fits_columns_in_their_own_units(method, tmp_path):
    rows, y = make_rows()
    layout = TableLayout.fit(rows, bins=4, levels={2: 30})
    torch.manual_seed(0)
    net = TableNetwork(layout, 1, hidden=(8,), width=3).double()
    recipe = bayou.select.by_name(method, steps=20, effort=0.1)
    posterior = bayou.fit(net, (rows, y), recipe, progress=False)
    mean = posterior.predict(rows, 8, seed=0).mean
    assert mean.shape == (120, 1)
    posterior.save(tmp_path / "posterior.bayou")
    # another layout of the same shape: the edges of the file replace it
    other = TableLayout.fit(rows * 2, bins=4, levels={2: 30})
    again = bayou.load(
        tmp_path / "posterior.bayou", TableNetwork(other, 1, hidden=(8,), width=3).double()
    )
    assert_close(again.predict(rows, 8, seed=0).mean, mean)


def test_bins_in_the_middle_of_another_network_keep_the_units_of_x():
    rows, y = make_rows()
    embed = PiecewiseLinear.fit(rows, bins=4)
    torch.manual_seed(0)
    net = nn.Sequential(embed, nn.Linear(embed.width, 8), nn.SiLU(), nn.Linear(8, 1)).double()
    posterior = bayou.fit(net, (rows, y), "map", progress=False)
    mean = posterior.predict(rows).mean
    assert float((mean - y).square().mean()) < 0.3 * float(y.var())
