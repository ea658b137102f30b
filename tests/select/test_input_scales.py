"""Prior scales of inputs by the evidence of wide networks."""

import torch
from torch import nn

import bayou
from bayou.network.target import Target
from bayou.priors import Normal, UnitNormal
from bayou.select.input_scales import input_scales
from bayou.select.noise_and_prior import NoiseAndPrior, takes_columns

F64 = torch.float64


def table(count, columns=5):
    """y depends on the first column only."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, columns, generator=generator, dtype=F64)
    return x, (2 * x[:, :1]).sin() + 0.1 * torch.randn(count, 1, generator=generator, dtype=F64)


def network(columns=5):
    with bayou.core.rng.isolated(0, torch.device("cpu")):
        return nn.Sequential(nn.Linear(columns, 10), nn.SiLU(), nn.Linear(10, 1)).double()


def target_of(net, prior=None):
    likelihood = bayou.Gaussian(0.5, learn=True)
    return Target.build(net, likelihood, prior or Normal("fan_in"), 60)


def test_inputs_without_effect_get_narrow_priors_whatever_the_units_of_x():
    x, y = table(80)
    held = torch.arange(80) % 5 == torch.arange(6)[:, None]  # the last holds out none
    scales, trials = input_scales(x, y, held, seed=0)
    assert [trial["scales"] for trial in trials] == [
        "one prior scale for all inputs",
        "a prior scale for each input",
    ]
    assert trials[1]["mse"] < 0.5 * trials[0]["mse"]
    assert all(own[0] > 3 * max(own[1:]) for own in scales)
    units = torch.tensor([1.0, 10.0, 0.1, 1.0, 5.0], dtype=F64)
    other, _ = input_scales(x * units, 7 * y + 3, held, seed=0)
    effects = torch.tensor(other, dtype=F64) * units
    assert (effects[:, 0] > 3 * effects[:, 1:].amax(1)).all()


def test_inputs_of_equal_effect_keep_one_scale():
    """Forty rows for twenty columns: scales of their own overfit."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 20, generator=generator, dtype=F64)
    y = x.sum(1, keepdim=True) + torch.randn(40, 1, generator=generator, dtype=F64)
    scales, trials = input_scales(x, y, torch.arange(40) % 5 == torch.arange(6)[:, None], seed=0)
    assert trials[0]["mse"] < trials[1]["mse"]
    assert scales == [()] * 6


def test_the_prior_of_a_choice_has_the_precisions_of_its_search():
    target = target_of(network(), Normal("fan_in", gain=2.0))
    settings = NoiseAndPrior(0.2, 1.3, 10.0, 2.0, input_scales=(2.0, 0.5, 0.1, 1.0, 3.0))
    applied = settings.apply(target)
    for name, factor in settings.multipliers(target).items():
        before, after = target.priors[name], applied.priors[name]
        expected = torch.exp(-2 * before.log_scale) * factor * torch.ones(before.shape, dtype=F64)
        torch.testing.assert_close(torch.exp(-2 * after.log_scale).expand(before.shape), expected)


def test_a_name_selects_scales_of_inputs_and_keeps_them_in_its_file(tmp_path):
    x, y = table(60)
    posterior = bayou.fit(network(), (x, y), bayou.select.by_name("map", effort=0.25))
    assert [record["stage"] for record in posterior.selection] == [
        "prior by input",
        "noise and prior",
    ]
    posterior.save(tmp_path / "p.bayou")
    loaded = bayou.load(tmp_path / "p.bayou", network())
    prior = loaded.target.priors["0.weight"]
    assert prior.log_scale[0, 0] > float(prior.log_scale[0, 1:].max()) + 1
    assert any(isinstance(spec, UnitNormal) for spec in loaded.target.prior.values())


def test_only_networks_with_a_weight_for_each_column_are_asked():
    target = target_of(network())
    x, _ = table(60)
    assert takes_columns(target, x)
    assert not takes_columns(target, x[:, :4])
    assert not takes_columns(target, x[:, :, None])
    assert not takes_columns(target, (x, x))
    assert not takes_columns(target_of(network(1)), x[:, :1])
    given = {"0.weight": UnitNormal(inputs=(1, 2, 3, 4, 5)), "*": Normal()}
    assert not takes_columns(target_of(network(), given), x)
