"""One draw of a weight is the same at every position: convolutions and sequences train on the bound
that predicts.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayou
from bayou.core import rng

DOUBLE = torch.float64
NOISE = 0.1


class Pooled(nn.Module):
    """A linear 3×3 convolution whose outputs are averaged: f(x) = w·φ(x), φ the mean patch."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, bias=False, dtype=DOUBLE)

    def forward(self, x):
        return self.conv(x).mean((2, 3))


class Averaged(nn.Module):
    """The same along a sequence of patches, in one call of a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Linear(9, 1, bias=False, dtype=DOUBLE)

    def forward(self, x):
        return self.conv(F.unfold(x, 3).mT).mean(1)


class Flattened(Averaged):
    """The same with the positions among the rows."""

    def forward(self, x):
        patches = F.unfold(x, 3).mT  # (B, T, 9)
        return self.conv(patches.flatten(0, 1)).unflatten(0, patches.shape[:2]).mean(1)


class Recurrent(Averaged):
    """The same, position by position."""

    def forward(self, x):
        patches = F.unfold(x, 3).mT
        total = patches.new_zeros(len(x), 1)
        for t in range(patches.shape[1]):
            total = total + self.conv(patches[:, t]) / patches.shape[1]
        return total


NETS = [Pooled, Flattened, Recurrent]


def images():
    """Smooth images, whose neighbors are alike, and answers."""
    like = torch.zeros((), dtype=DOUBLE)
    x = F.avg_pool2d(rng.normal(30, (1, 10, 10), like, seed=1), 5, stride=1) * 5
    w, noise = rng.normal(1, (9, 1), like, seed=2)[0], rng.normal(30, (1,), like, seed=3)
    return x, features(x) @ w + NOISE * noise


def features(x):
    return F.unfold(x, 3).mean(2)


def closed_form(x, y):
    """Log evidence of y = Φw + ε, w ~ N(0, I); the ELBO, mean and std of the best factorized
    Gaussian (Bishop 10.1).
    """
    phi = features(x)
    covariance = phi @ phi.T + NOISE**2 * torch.eye(len(y), dtype=DOUBLE)
    zero = torch.zeros(len(y), dtype=DOUBLE)
    evidence = torch.distributions.MultivariateNormal(zero, covariance).log_prob(y[:, 0])
    precision = phi.T @ phi / NOISE**2 + torch.eye(9, dtype=DOUBLE)
    mean = torch.linalg.solve(precision, phi.T @ y / NOISE**2)[:, 0]
    gap = 0.5 * (precision.diagonal().log().sum() - torch.logdet(precision))
    return float(evidence), float(evidence - gap), mean, precision.diagonal().rsqrt()


def at_the_best(net, x, family):
    bnn = bayou.bayesianize(net, family, example=x)
    _, _, mean, std = closed_form(*images())
    with torch.no_grad():
        bnn.guides[0].center.copy_(mean.reshape(bnn.guides[0].center.shape))
        bnn.guides[0].log_std.copy_(std.log().reshape(bnn.guides[0].center.shape))
    return bnn


@torch.no_grad()
def training_elbo(bnn, x, y, n=1000):
    """What the steps of a training run would log on average, and its error."""
    torch.manual_seed(0)
    draw = bnn.draw(n)
    each = torch.distributions.Normal(draw(x), NOISE).log_prob(y).sum((1, 2)) - draw.kl
    return float(each.mean()), float(each.std()) / math.sqrt(n)


@pytest.mark.parametrize("make", NETS)
def test_the_training_bound_is_the_bound_of_the_network_that_predicts(make):
    x, y = images()
    evidence, best, _, _ = closed_form(x, y)
    assert best < evidence - 10
    bnn = at_the_best(make(), x, bayou.MeanField())
    assert bnn.local_names == frozenset()
    value, error = training_elbo(bnn, x, y)
    assert abs(value - best) < 4 * error
    posterior = bnn.posterior(bayou.Gaussian(NOISE), len(y))
    measured = bayou.elbo(posterior, (x, y), samples=300, seed=0)
    assert abs(measured.value - best) < 4 * measured.standard_error
    assert (measured.kind, measured.side) == ("exact", "equal")


@pytest.mark.parametrize("make", [Pooled])
def test_noise_per_position_is_labeled_an_approximation(make, tmp_path):
    x, y = images()
    _, best, _, _ = closed_form(x, y)
    bnn = at_the_best(make(), x, bayou.MeanField(local="positions"))
    assert bnn.position_names == bnn.local_names == {"conv.weight"}
    value, error = training_elbo(bnn, x, y)
    assert value > best + 10 * error  # averaged over positions, the noise is all but gone
    method = bayou.VI(bayou.MeanField(local="positions"), steps=2)
    posterior = bayou.fit(
        make(), (x, y), method=method, likelihood=bayou.Gaussian(NOISE), progress=False
    )
    posterior.save(tmp_path / "p.bayou")
    for q in (posterior, bayou.load(tmp_path / "p.bayou", make())):
        assert "an approximation: noise per position" in repr(q)
    plain = bayou.fit(
        make(), (x, y), method=bayou.VI(steps=2), likelihood=bayou.Gaussian(NOISE), progress=False
    )
    assert "approximation" not in repr(plain)


def test_gains_are_the_same_at_all_positions_so_they_stay_local():
    x, _ = images()
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(48, 2)).to(DOUBLE)
    weights = {"0.weight", "2.weight"}
    assert bayou.bayesianize(net, bayou.NodeNoise(z="example"), example=x).local_names >= weights
    assert bayou.bayesianize(net, bayou.Dropout(), example=x).local_names >= weights
    assert bayou.bayesianize(net, bayou.MNF(), example=x).local_names == {"2.weight", "2.bias"}
    assert bayou.bayesianize(net, bayou.SparseVD(), example=x).local_names == {"2.weight", "2.bias"}
    assert bayou.bayesianize(net, bayou.MNF()).local_names == {
        "2.weight",
        "2.bias",
    }  # before the dry run
    both = bayou.bayesianize(net, bayou.MNF(local="positions"), example=x)
    assert both.local_names == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert both.position_names == {"0.weight", "0.bias"}


def test_an_unknown_value_of_local_is_an_error():
    with pytest.raises(
        ValueError,
        match="local of 'conv.weight' must be True, False or \"positions\", got 'position'",
    ):
        bayou.bayesianize(Pooled(), bayou.MeanField(local="position"))
