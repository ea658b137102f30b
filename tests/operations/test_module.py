"""Moments of posteriors by name, and a posterior as a plain network."""

import pytest
import torch
from torch import nn

import bayou
from bayou.inference.start import network_at

X = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X[:, :1] * X[:, 1:]
START = bayou.MAP(steps=5)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 5), nn.LayerNorm(5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 1)
    ).double()


def fit(method, network=None, learn=False):
    likelihood = bayou.Gaussian(0.1, learn=learn)
    return bayou.fit(network or net(), (X, Y), method, likelihood=likelihood, progress=False)


def test_mean_of_a_mixture_averages_the_noise_of_its_members():
    members = bayou.Ensemble(2, bayou.VI(bayou.MeanField(0.3), steps=5))
    posterior = fit(members, learn=True)
    noise = torch.stack(
        [member.target.likelihood.log_scale.detach() for member in posterior.components]
    )
    key = "likelihood.log_scale"
    assert {*posterior.sample(2, seed=0)} - {*posterior.mean()} == {"member"}
    assert noise[0] != noise[1]
    assert torch.equal(posterior.mean()[key], noise.mean(0))
    torch.testing.assert_close(posterior.std()[key], (noise[0] - noise[1]).abs() / 2)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


def test_tied_weights_stay_tied():
    posterior = fit(bayou.MAP(steps=5, lr=0.1), Tied().double())
    expected = posterior.predict(X).outputs[0]
    for plain in (posterior.to_module(), network_at(posterior).eval()):
        assert plain.a.weight is plain.b.weight
        assert torch.equal(plain(X), expected)


def test_point_as_prior_raises():
    with pytest.raises(ValueError, match="Empirical has no separate density for each tensor"):
        fit(START).as_prior()
