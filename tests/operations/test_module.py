"""Moments of posteriors by name, and a posterior as a plain network."""

import copy

import pytest
import torch
from torch import nn

import bayou
from bayou.inference.start import network_at

X = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X[:, :1] * X[:, 1:]
START = bayou.MAP(steps=5)
METHODS = {
    "MAP": START,
    "ensemble": bayou.Ensemble(3, START),
    "SGLD": bayou.SGLD(steps=20, draws=7, start=START),
    "MeanField": bayou.VI({"0.*": bayou.MeanField(0.3), "*": bayou.Delta()}, steps=5),
    "LowRank": bayou.VI(bayou.LowRank(2, std=0.2), steps=5),
    "IVON": bayou.IVON(steps=5),
    "SWAG": bayou.SWAG(start=START, epochs=5),
    "mixture": bayou.Ensemble(2, bayou.VI(bayou.MeanField(0.3), steps=5)),
    "diagonal": bayou.Laplace("diagonal", start=START),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 5), nn.LayerNorm(5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 1)
    ).double()


def fit(method, network=None):
    return bayou.fit(
        network or net(), (X, Y), method=method, likelihood=bayou.Gaussian(0.1), progress=False
    )


def test_the_mean_of_a_mixture_has_the_noise_that_its_members_learned():
    members = bayou.Ensemble(2, bayou.VI(bayou.MeanField(0.3), steps=5))
    posterior = bayou.fit(
        net(), (X, Y), method=members, likelihood=bayou.Gaussian(0.1, learn=True), progress=False
    )
    noise = torch.stack(
        [member.target.likelihood.log_scale.detach() for member in posterior.components]
    )
    key = "likelihood.log_scale"
    assert {*posterior.sample(2, seed=0)} - {*posterior.mean()} == {"member"}
    assert noise[0] != noise[1]
    assert torch.equal(posterior.mean()[key], noise.mean(0))
    torch.testing.assert_close(posterior.std()[key], (noise[0] - noise[1]).abs() / 2)


@pytest.mark.parametrize(
    "name", ["MAP", "MeanField", "LowRank", "IVON", "SWAG", "diagonal", "dropout"]
)
def test_a_plain_network_predicts_as_the_posterior_at_its_mean(name):
    posterior = fit(bayou.MCDropout(START) if name == "dropout" else METHODS[name])
    plain = posterior.to_module()
    assert type(plain) is nn.Sequential
    assert not plain.training
    assert torch.equal(plain(X), posterior.network.evaluate(posterior.mean(), X))
    if name == "MAP":
        assert torch.equal(plain(X), posterior.predict(X).outputs[0])
    assert torch.equal(posterior.to_module()(X), plain(X))


@pytest.mark.parametrize("name", ["ensemble", "mixture", "SGLD"])
def test_of_several_networks_one_is_chosen_by_a_draw(name):
    network = nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()
    posterior = fit(METHODS[name], network)
    with pytest.raises(ValueError, match="has no one network.*to_module\\(seed=0\\)"):
        posterior.to_module()
    for s in range(3):
        draw = {key: value[0] for key, value in posterior.sample(1, seed=4, start=s).items()}
        before = copy.deepcopy(network.state_dict())
        expected = posterior.call(
            {k: v for k, v in draw.items() if not k.startswith("likelihood.")}, X
        )
        torch.testing.assert_close(posterior.to_module(draw)(X), expected, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


def test_tied_weights_are_moved_together():
    posterior = fit(bayou.MAP(steps=5, lr=0.1), Tied().double())
    expected = posterior.predict(X).outputs[0]
    for plain in (posterior.to_module(), network_at(posterior).eval()):
        assert plain.a.weight is plain.b.weight
        assert torch.equal(plain(X), expected)


def test_a_point_is_no_prior():
    with pytest.raises(ValueError, match="Empirical has no separate density for each tensor"):
        fit(START).as_prior()
