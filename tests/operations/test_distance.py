"""Bounded weights, random features and densities of features against singular values, kernels and
scipy.
"""

import copy
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.network.layout import fan_ins
from bayou.operations import (
    FeatureDensity,
    feature_density,
    random_feature_head,
    spectral_normalized,
)


@pytest.fixture(autouse=True)
def _doubles():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Residual(nn.Module):
    """x + g(x) with two linear layers."""

    def __init__(self, units):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(units, 32), nn.Tanh(), nn.Linear(32, units))

    def forward(self, x):
        out = x + self.g(x)
        return out


def norm(weight):
    return float(torch.linalg.matrix_norm(weight.detach().flatten(1), ord=2))


def test_the_spectral_norm_is_bounded_and_smaller_weights_stay():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 5), nn.Linear(5, 4)
    )
    with torch.no_grad():
        net[0].weight *= 10
        net[4].weight *= 0.1
    before = {name: value.clone() for name, value in net.state_dict().items()}
    made = spectral_normalized(net, 0.7)
    for place in (0, 3):
        assert (
            0.7 * 8 ** (-1 / 258) - 1e-12 <= norm(made[place].weight) <= 0.7 + 1e-12
        )  # an upper bound
    assert_close(made[4].weight, net[4].weight, rtol=0, atol=0)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(made[0].parametrizations.weight.original, net[0].weight)
    with pytest.raises(ValueError, match="bound must be positive, got 0"):
        spectral_normalized(net, 0)


def test_the_gradient_is_that_of_the_bounded_weight():
    made = spectral_normalized(nn.Linear(4, 3), 0.5)
    x, weight = torch.randn(6, 4), made.parametrizations.weight.original.detach()
    assert norm(weight) > 0.5

    def loss(w):
        order = torch.linalg.svdvals(w).pow(258).sum().pow(1 / 258)
        return nn.functional.linear(x, w * 0.5 / order, made.bias).sin().sum()

    made(x).sin().sum().backward()
    expected = torch.func.grad(loss)(weight)
    assert_close(made.parametrizations.weight.original.grad, expected)


def test_a_residual_block_keeps_distances_within_its_bounds():
    block = spectral_normalized(Residual(5), 0.9)
    a, b = torch.randn(2, 500, 5)
    ratio = (block(a) - block(b)).detach().norm(dim=-1) / (a - b).norm(dim=-1)
    assert 1 - 0.81 <= float(ratio.min()) < float(ratio.max()) <= 1 + 0.81


def test_fan_ins_of_parametrized_weights():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 6, 2), nn.Flatten(), nn.Linear(6, 2)
    )
    plain, made = fan_ins(net), fan_ins(spectral_normalized(net))
    assert {
        n.replace("parametrizations.weight.original", "weight"): v for n, v in made.items()
    } == plain


@pytest.mark.parametrize("features", [400, 40_000])
def test_random_features_have_the_kernel(features):
    x = torch.randn(12, 3)
    phi = random_feature_head(nn.Linear(3, 1), features, 1.7)[0][0](x).detach()
    expected = (-0.5 * torch.cdist(x, x).square() / 1.7**2).exp()
    error = (phi @ phi.mT - expected).abs().max()
    assert float(error) < 4 / math.sqrt(
        features
    )  # of 78 pairs; a term 2·cos·cos has a standard deviation of 1 at most


def test_random_feature_head_replaces_the_last_linear_layer():
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    new, same, other = (random_feature_head(net, 50, 2.0, seed=seed) for seed in (0, 0, 1))
    names = ["0.weight", "0.bias", "2.1.weight"]
    assert [name for name, value in new.named_parameters() if value.requires_grad] == names
    assert torch.equal(new[2][0].weight, same[2][0].weight)
    assert not torch.equal(new[2][0].weight, other[2][0].weight)
    assert isinstance(net[2], nn.Linear)
    assert random_feature_head(nn.Linear(3, 2), 50)(torch.randn(4, 3)).shape == (4, 2)
    with pytest.raises(ValueError, match="has no nn.Linear"):
        random_feature_head(nn.Conv2d(1, 1, 1))


FEATURES = 500


def test_sngp_is_the_gaussian_process(tmp_path):
    x = torch.randn(30, 2)
    y = x[:, :1].sin() + 0.1 * torch.randn(30, 1)
    body = spectral_normalized(nn.Sequential(Residual(2), nn.Linear(2, 1)), 0.9)
    net = random_feature_head(body, FEATURES, 1.0)
    method = bayou.Laplace("full", where="last", start=None, predictive="exact")
    given = {
        "likelihood": bayou.Gaussian(0.1),
        "prior": bayou.Normal(1.5),
        "progress": False,
        "seed": 0,
    }
    posterior = bayou.fit(net, (x, y), method, **given)

    def phi(rows):
        made = net[1][0](net[0](rows))
        return made.detach()

    new = torch.randn(8, 2)
    k, cross = 1.5**2 * phi(x) @ phi(x).mT + 0.01 * torch.eye(30), 1.5**2 * phi(new) @ phi(x).mT
    expected = (
        1.5**2 * phi(new).square().sum(-1) - (cross @ torch.linalg.solve(k, cross.mT)).diagonal()
    )
    assert_close(posterior.function(new)[1].flatten(), expected)
    assert float(posterior.function(x)[1].max()) < 0.1**2
    far = 100 * nn.functional.normalize(torch.randn(50, 2), dim=-1)
    at_far = posterior.function(far)[1].flatten() / 1.5**2
    # the prior's variance, |φ|² = 1 ± √(1/2M), less what 30 of the random directions explain
    assert float(at_far.min()) > 1 - 30 / FEATURES * 2 - 4 * math.sqrt(0.5 / FEATURES)
    assert float(at_far.max()) < 1 + 4 * math.sqrt(0.5 / FEATURES)

    posterior.save(tmp_path / "sngp.bayou")
    again = bayou.load(tmp_path / "sngp.bayou", random_feature_head(body, FEATURES, 1.0))
    assert_close(again.predict(new).mean, posterior.predict(new).mean)
    with pytest.raises(bayou.core.files.FileError):  # other features
        bayou.load(tmp_path / "sngp.bayou", random_feature_head(body, FEATURES, 1.0, seed=7))
    assert_close(posterior.to_module()(new), net(new))
    assert_close(copy.deepcopy(net)(new), net(new))


def classified(rows=300):
    y = torch.arange(rows) % 3
    x = torch.randn(rows, 4) + 2 * torch.nn.functional.one_hot(y, 4)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), x, y


def test_feature_densities_are_those_of_scipy(tmp_path):
    stats = pytest.importorskip("scipy.stats")
    net, x, y = classified()
    z = net[:2](x).detach().numpy()
    density = feature_density(net, (x, y), jitter=1e-3)
    added = 1e-3 * z.var(0, ddof=1).mean() * np.eye(5)
    terms = [
        np.log(1 / 3) + stats.multivariate_normal(part.mean(0), np.cov(part.T) + added).logpdf(z)
        for part in (z[y.numpy() == label] for label in range(3))
    ]
    np.testing.assert_allclose(density(x).numpy(), np.logaddexp.reduce(terms), rtol=1e-9)
    single = feature_density(net, (x, x[:, :1]), jitter=0.0)
    np.testing.assert_allclose(
        single(x).numpy(), stats.multivariate_normal(z.mean(0), np.cov(z.T)).logpdf(z)
    )

    save_file(density.state_dict(), tmp_path / "density.safetensors")
    again = FeatureDensity(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), 3)
    again.load_state_dict(load_file(tmp_path / "density.safetensors"))
    assert torch.equal(again(x), density(x))
    assert torch.equal(copy.deepcopy(density)(x), density(x))
    with torch.no_grad():
        net[0].weight.zero_()
    assert torch.equal(again(x), density(x))  # it has a network of its own


def test_features_without_a_density_raise():
    _, x, y = classified(30)
    with pytest.raises(ValueError, match="two rows of each class"):
        feature_density(nn.Linear(4, 3), (x, torch.tensor([2] + 29 * [0])))
    with pytest.raises(ValueError, match=r"features \(B, D\), got \(30, 4, 1\)"):
        feature_density(
            nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Linear(1, 1), nn.Flatten()), (x, y)
        )
