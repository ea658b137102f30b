"""SWAG: moments of a path that is known, its covariance against a dense one, statistics of batch
norm.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.curvature.swag import LowRankPlusDiagonal
from tests.methods.draws import normal

F64 = torch.float64


def data():
    x = normal(30, 2)
    return x, x.sum(1, keepdim=True)


def fitted(net, method):
    return bayou.fit(net, data(), method, likelihood=bayou.Gaussian(1.0), progress=False)


def test_moments_are_those_of_the_iterates_of_gradient_descent():
    """Full batches make SGD a recursion that numpy repeats: v ← μ·v + g, w ← w − lr·v."""
    x, y = data()
    net = nn.Linear(2, 1, bias=False, dtype=F64)
    w0 = net.weight.detach().numpy()[0].copy()
    method = bayou.SWAG(start=None, steps=40, every=4, rank=5, lr=0.05, momentum=0.8, batch_size=30)
    posterior = fitted(net, method)
    features, target = x.numpy(), y.numpy()[:, 0]
    w, v, path = w0, np.zeros(2), []
    for step in range(40):
        gradient = (features.T @ (features @ w - target) + w) / 30
        v = 0.8 * v + gradient
        w = w - 0.05 * v
        if (step + 1) % 4 == 0:
            path.append(w)
    iterates = np.array(path)
    running = np.cumsum(iterates, 0) / np.arange(1, 11)[:, None]
    mean, variance = iterates.mean(0), iterates.var(0)
    factor = (iterates - running)[-5:]
    covariance = 0.5 * (np.diag(variance) + factor.T @ factor / 4)
    np.testing.assert_allclose(posterior.mean()["weight"].numpy()[0], mean, rtol=1e-10)
    draws = posterior.sample(10_000, seed=0)["weight"][:, 0].numpy()
    error = np.sqrt((np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2) / 10_000)
    assert np.abs((np.cov(draws.T) - covariance) / error).max() < 4.5
    dense = torch.distributions.MultivariateNormal(
        torch.from_numpy(mean), torch.from_numpy(covariance)
    )
    at = {"weight": torch.from_numpy(draws[:5]).unsqueeze(1)}
    assert_close(
        posterior.log_prob(at), dense.log_prob(torch.from_numpy(draws[:5])), rtol=1e-8, atol=0
    )


def test_low_rank_plus_diagonal_is_the_dense_gaussian():
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": torch.Size([2, 3]), "b": torch.Size([]), "c": torch.Size([4])}
    tensors = {}
    for name, shape in shapes.items():
        tensors[f"std.{name}"] = torch.rand(shape, generator=generator, dtype=F64) + 0.1
        tensors[f"factor.{name}"] = torch.randn(3, *shape, generator=generator, dtype=F64)
    covariance = LowRankPlusDiagonal(shapes, tensors)
    std = torch.cat([tensors[f"std.{name}"].flatten() for name in shapes])
    factor = torch.cat([tensors[f"factor.{name}"].reshape(3, -1) for name in shapes], 1)
    dense = torch.distributions.MultivariateNormal(
        torch.zeros(11, dtype=F64), std.square().diag() + factor.mT @ factor
    )
    draws = covariance.sample(9, seed=1)
    flat = torch.cat([draws[name].reshape(9, -1) for name in shapes], 1)
    assert_close(covariance.log_prob(draws), dense.log_prob(flat), rtol=1e-10, atol=0)
    rows = torch.randn(2, 11, generator=generator, dtype=F64)
    jacobian = dict(zip(shapes, rows.split([6, 1, 4], 1), strict=True))
    spread = covariance.spread(
        {name: value.reshape(2, *shapes[name]) for name, value in jacobian.items()}
    )
    assert_close(spread @ spread.mT, rows @ dense.covariance_matrix @ rows.mT)


def test_batch_norm_gets_the_statistics_of_every_draw():
    x, _ = data()
    net = nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()
    method = bayou.SWAG(
        start=bayou.MAP(steps=20), steps=20, every=2, rank=3, lr=0.05, draws=4, batch_size=15
    )
    posterior = fitted(net, method)
    assert posterior.draws == 4
    for draw in range(4):
        w, b = posterior.stack["0.weight"][draw], posterior.stack["0.bias"][draw]
        hidden = x @ w.T + b
        assert_close(posterior.stack["1.running_mean"][draw], hidden.mean(0), rtol=1e-9, atol=1e-12)
        halves = torch.stack([half.var(0) for half in hidden.split(15)]).mean(0)
        assert_close(posterior.stack["1.running_var"][draw], halves, rtol=1e-9, atol=1e-12)
    assert not torch.equal(
        posterior.stack["1.running_mean"][0], posterior.stack["1.running_mean"][1]
    )


def test_too_few_iterates_are_an_error():
    with pytest.raises(ValueError, match="iterates"):
        fitted(nn.Linear(2, 1).double(), bayou.SWAG(start=None, steps=3, every=2))
