"""The recipe of a network that sees numbers in bins."""

import numpy as np
import pytest
import torch
from torch import nn

import bayou
from bayou.networks import TableLayout, TableNetwork
from bayou.select.binned import Binned
from bayou.select.named import by_name
from bayou.training.data import as_data

QUICK = {"effort": 0.3}


def steps(rows, seed):
    """Return rows of a function with steps, with noise of .1, in units of their own."""
    generator = np.random.default_rng(seed)
    x = generator.uniform(-1, 1, (rows, 3))
    y = 1.0 * (x[:, 0] > 0.3) + (x[:, 1] < -0.2) * (x[:, 2] > 0)
    y = y + 0.1 * generator.normal(size=rows)
    return torch.tensor(50 + 10 * x).float(), torch.tensor(1000 * y[:, None]).float()


def smooth_net(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 50), nn.SiLU(), nn.Linear(50, outputs))


@pytest.fixture(scope="module")
def posterior():
    return bayou.fit(smooth_net(), steps(250, 0), "bins", seed=0, progress=False)


def nll(posterior, x, y):
    return float(-posterior.predict(x).log_prob(y).mean())


def test_steps_are_learned_that_a_smooth_network_blurs(posterior):
    x, y = steps(1000, 1)
    smooth = bayou.fit(smooth_net(), steps(250, 0), "laplace", seed=0, progress=False)
    assert nll(posterior, x, y) < nll(smooth, x, y) - 0.1


def test_it_answers_in_the_units_of_the_user_and_covers(posterior):
    x, y = steps(1000, 1)
    prediction = posterior.predict(x)
    assert float((prediction.mean - y).square().mean().sqrt()) < 300
    low, high = prediction.interval(0.9)
    coverage = float(((low <= y) & (y <= high)).double().mean())
    assert 0.75 < coverage <= 1.0  # 250 training rows and a search: far from nominal is a defect
    assert "infinite width with up to 128 thresholds of each column" in posterior.plan


@pytest.fixture(scope="module")
def finite():
    """The network of tables, of finite width, at a mode."""
    recipe = Binned(by_name("map", steps=30))
    return bayou.fit(smooth_net(), steps(60, 0), recipe, seed=0, progress=False)


def test_without_an_exact_method_the_network_has_finite_width(finite):
    assert "network of tables: 3 columns of numbers in up to 6 bins" in finite.plan


@pytest.mark.parametrize("width", ["posterior", "finite"])
def test_its_file_contains_the_network(width, request, tmp_path):
    """Whatever network is passed; and a mixture of it with another needs one network only."""
    posterior = request.getfixturevalue(width)
    x, _ = steps(20, 2)
    posterior.save(tmp_path / "bins.bayou")
    again = bayou.load(tmp_path / "bins.bayou", nn.Linear(3, 1))
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)
    assert again.builds_network
    net = smooth_net()
    other = bayou.fit(net, steps(250, 0), "map", seed=0, progress=False)
    mixture = bayou.Mixture([other, posterior], [0.4, 0.6])
    assert not mixture.builds_network
    mixture.save(tmp_path / "mixture.bayou")
    read = bayou.load(tmp_path / "mixture.bayou", net)
    assert torch.allclose(read.predict(x).mean, mixture.predict(x).mean)


@pytest.mark.slow
def test_points_of_the_network_in_a_file_are_read_beside_another_network(tmp_path):
    """The axes of a stack are those of the network in the file, as where a mode is mixed in."""
    x, y = steps(50, 0)
    net = smooth_net()
    recipe = Binned(by_name("map", steps=5))
    points = bayou.fit(net, (x, y), recipe, progress=False)
    points.save(tmp_path / "points.bayou")
    read = bayou.load(tmp_path / "points.bayou", net)
    assert torch.equal(read.predict(x).mean, points.predict(x).mean)


def test_a_network_of_tables_of_the_user_is_not_in_files(tmp_path):
    x = torch.rand(60, 3)
    y = x[:, :1]
    net = TableNetwork(TableLayout.fit(x), 1, hidden=(8,))
    posterior = bayou.fit(net, (x, y), bayou.MAP(steps=5), progress=False)
    posterior.save(tmp_path / "map.bayou")
    with pytest.raises(ValueError, match="belongs to another network"):
        bayou.load(tmp_path / "map.bayou", nn.Linear(3, 1))


def test_classes_have_as_many_outputs_as_the_given_network():
    x, y = steps(120, 0)
    classes = (y[:, 0] > 500).long()
    posterior = bayou.fit(smooth_net(2), (x, classes), by_name("bins", **QUICK), progress=False)
    assert posterior.predict(x[:5]).mean.shape == (5, 2)
    assert nll(posterior, x, classes) < 0.6


@pytest.mark.parametrize(
    ("net", "x", "options", "words"),
    [
        (smooth_net(), torch.rand(30, 3), {"where": "2.*"}, "is frozen"),
        (TableNetwork(TableLayout.fit(torch.rand(30, 3)), 1), torch.rand(30, 3), {}, "of its own"),
        (smooth_net(), torch.rand(30, 3), {"prior": {"0.*": bayou.Normal(1.0)}}, "one prior"),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 1)), torch.rand(30, 2, 2), {}, r"\(30, 2, 2\)"),
    ],
)
def test_what_it_cannot_replace_is_refused_in_a_sentence(net, x, options, words):
    with pytest.raises(ValueError, match=words):
        bayou.fit(net, (x, torch.rand(30, 1)), "bins", progress=False, **options)


def test_a_description_that_is_none_is_an_error():
    with pytest.raises(ValueError, match="does not describe a network"):
        TableNetwork.from_json({"outputs": 1})
    net = TableNetwork(TableLayout.fit(torch.rand(40, 3)), 2, hidden=(4,), activation="SiLU")
    again = TableNetwork.from_json(net.to_json())
    again.load_state_dict(net.state_dict())
    x = torch.rand(6, 3)
    assert torch.equal(net(x), again(x))


def test_where_the_exact_method_is_not_applicable_the_network_has_finite_width():
    """All rows decide, also for fits to some of them."""
    recipe = by_name("bins")
    build = bayou.network.target.Target.build
    rows = as_data((torch.rand(2900, 3), torch.rand(2900, 1)))
    target = build(smooth_net(), bayou.Gaussian(), None, 2900)
    assert recipe.suited_to(target, rows) is recipe
    more = as_data((torch.rand(3100, 3), torch.rand(3100, 1)))
    assert recipe.suited_to(target, more) == Binned(recipe.recipe)
    classes = build(smooth_net(2), bayou.Categorical(), None, 2900)
    assert recipe.suited_to(classes, rows).exact is None
    prior = build(smooth_net(), bayou.Gaussian(), bayou.Normal(1.0), 2900)
    assert recipe.suited_to(prior, rows).exact is None
    constant = as_data((torch.rand(30, 3), torch.ones(30, 1)))
    assert recipe.suited_to(target, constant).exact is None
    ratings = as_data((torch.rand(30, 3), torch.arange(30.0).remainder(6).unsqueeze(1)))
    assert recipe.suited_to(target, ratings).exact is None
    auto = bayou.select.Auto({"bins": recipe, "map": bayou.MAP()})
    assert auto._suitable_for(target, more).methods["bins"].exact is None
    assert auto._suitable_for(target, rows).methods == auto.methods


def test_a_recipe_without_an_exact_method_keeps_its_identity():
    from bayou.core.specs import to_json

    assert "exact" not in to_json(Binned(by_name("map")))["fields"]
    assert by_name("bins", effort=0.1).exact == bayou.methods.Wide(
        draws=2, passes=4, thresholds=128
    )


def test_auto_leaves_it_out_where_it_is_not_for_the_network():
    recipe = by_name("bins")
    assert isinstance(recipe, Binned)
    rows = as_data((torch.rand(30, 3), torch.rand(30, 1)))
    net = TableNetwork(TableLayout.fit(torch.rand(30, 3)), 1)
    target = bayou.network.target.Target.build(net, bayou.Gaussian(0.1), None, 30)
    with pytest.raises(ValueError, match="of its own"):
        recipe.check_target(target, rows)
    plain = bayou.network.target.Target.build(smooth_net(), bayou.Gaussian(0.1), None, 30)
    recipe.check_target(plain, rows)
