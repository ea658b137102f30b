"""MLE and MAP: closed forms of linear models, and each of the classical regularizers by what it
must do.
"""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn

import bayou
from bayou import MLE
from bayou.inference.point import DECAY, PointModel
from bayou.network.target import Target
from tests.methods.draws import normal

F64 = torch.float64
N, D = 40, 3


def regression():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=F64)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=F64) + 0.3 * torch.randn(
        N, 1, generator=generator, dtype=F64
    )


def linear(bias=False):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(D, 1, bias=bias, dtype=F64)


def fitted(method, likelihood=None, **options):
    return bayou.fit(
        linear(),
        regression(),
        method=method,
        likelihood=likelihood or bayou.Gaussian(0.3),
        progress=False,
        **options,
    )


def weights(posterior):
    return posterior.stack["weight"][0, 0].numpy()


X, Y = (part.numpy() for part in regression())
QUICK = {"steps": 600, "lr": 0.05, "schedule": "cosine"}


def ridge(penalty):
    """argmin ½|y − Xw|² + ½·penalty·|w|²."""
    return np.linalg.solve(X.T @ X + penalty * np.eye(D), X.T @ Y)[:, 0]


def test_mle_is_least_squares_and_its_noise_the_residual():
    posterior = fitted(MLE(**QUICK), bayou.Gaussian(1.0, learn=True))
    assert_allclose(weights(posterior), ridge(0.0), atol=1e-6)
    residual = np.sqrt(np.mean((Y[:, 0] - X @ ridge(0.0)) ** 2))
    scale = posterior.target.likelihood.log_scale.exp()
    assert float(scale.detach()) == pytest.approx(residual, rel=1e-5)
    assert set(posterior.history[-1]) == {"step", "log_likelihood", "seconds"}


def test_map_is_ridge_regression():
    """−log p(w) with N(0, s²) is a penalty of σ²/s²."""
    posterior = fitted(bayou.MAP(**QUICK), prior=bayou.Normal(0.5))
    assert_allclose(weights(posterior), ridge(0.3**2 / 0.5**2), atol=1e-6)


def test_l2_is_weight_decay_on_the_mean_loss_and_the_prior_that_goes_with_it():
    posterior = fitted(bayou.MAP(l2=0.2, **QUICK), prior=bayou.Normal(7.0))
    assert_allclose(weights(posterior), ridge(0.3**2 * N * 0.2), atol=1e-6)
    prior = posterior.target.prior
    assert prior.scale == pytest.approx((N * 0.2) ** -0.5)


def test_max_norm_is_the_best_point_on_the_sphere():
    posterior = fitted(
        MLE(max_norm=1.0, steps=300, lr=0.02, schedule="constant", optimizer=torch.optim.SGD)
    )
    found = weights(posterior)
    assert np.linalg.norm(found) == pytest.approx(1.0, abs=1e-9)
    gradient = X.T @ (X @ found - Y[:, 0])  # at the optimum it points along the weights
    assert abs(gradient @ found) / np.linalg.norm(gradient) == pytest.approx(1.0, abs=1e-4)
    loose = fitted(MLE(max_norm=100.0, **QUICK))
    assert_allclose(weights(loose), ridge(0.0), atol=1e-6)


def test_input_noise_is_ridge_in_the_mean():
    """E|y − (x + s·ε)w|² = |y − xw|² + N·s²·|w|² (Bishop 1995)."""
    posterior = fitted(MLE(steps=1000, lr=0.02, schedule="linear", input_noise=0.5))
    assert_allclose(weights(posterior), ridge(N * 0.25), atol=0.05)
    assert np.abs(ridge(N * 0.25) - ridge(0.0)).max() > 0.2


@pytest.mark.slow
def test_weight_noise_does_not_move_the_optimum_of_a_linear_model():
    posterior = fitted(MLE(steps=1500, lr=0.02, schedule="linear", weight_noise=0.3))
    assert_allclose(weights(posterior), ridge(0.0), atol=0.05)
    before = fitted(MLE(steps=5, weight_noise=0.3)).history[0]["log_likelihood"]
    assert before != fitted(MLE(steps=5)).history[0]["log_likelihood"]


def test_gradient_noise_has_the_given_standard_deviation():
    target = Target.build(nn.Linear(100, 100, dtype=F64), bayou.Gaussian(1.0), None, 10)
    model = PointModel(MLE(gradient_noise=0.2), target)
    for step in (0, 99):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model.add_gradient_noise(step)
        noise = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        expected = 0.2 * (1 + step) ** (-DECAY / 2)
        assert float(noise.std()) == pytest.approx(expected, rel=4 / (2 * len(noise)) ** 0.5)


def test_transposed_convolutions_are_constrained_by_output():
    net = nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Flatten(), nn.Linear(27, 2)).double()
    x, y = (
        normal(12, 2, 2, 2),
        torch.arange(12) % 2,
    )
    posterior = bayou.fit(net, (x, y), method=MLE(steps=60, lr=0.1, max_norm=0.4), progress=False)
    by_output = posterior.stack["0.weight"][0].movedim(1, 0).flatten(1).norm(dim=1)
    assert by_output.max() <= 0.4 + 1e-9
    assert posterior.stack["2.weight"][0].norm(dim=1).max() <= 0.4 + 1e-9
