"""MCLMC with minibatches: the noise of its gradients is measured, limited and reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayou
from bayou import MCLMC, Gaussian, Normal
from tests.methods.chains import conjugate_draws
from tests.proofs.regression import MEAN, PRECISION

ROWS = 60
BATCH = 20
NOISE = 0.5


def regression() -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """A linear network at the posterior mean, its data and the exact covariance of weights and
    bias.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64) * torch.linspace(
        0.3, 2, 5, dtype=torch.float64
    )
    design = torch.cat([x, torch.ones(ROWS, 1, dtype=torch.float64)], 1)
    weights = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    y = design @ weights + NOISE * torch.randn(ROWS, 1, generator=generator, dtype=torch.float64)
    covariance = torch.linalg.inv(design.T @ design / NOISE**2 + torch.eye(6, dtype=torch.float64))
    mean = covariance @ design.T @ y / NOISE**2
    net = nn.Linear(5, 1).double()
    with torch.no_grad():
        net.weight.copy_(mean[:5].T)
        net.bias.copy_(mean[5])
    return net, x, y, covariance


def sample(method: MCLMC) -> tuple[bayou.Posterior, Tensor]:
    """The posterior, and the draws of weights and bias: (draws, 6)."""
    net, x, y, _ = regression()
    posterior = bayou.fit(
        net, (x, y), method, likelihood=Gaussian(NOISE), prior=Normal(1.0), progress=False
    )
    assert posterior.stack is not None
    draws = torch.cat([posterior.stack["weight"].flatten(1), posterior.stack["bias"]], 1)
    return posterior, draws


def test_noise_of_gradients_is_that_of_minibatches() -> None:
    """λ is the largest eigenvalue of N²/M·(N − M)/(N − 1) times the covariance of the rows'
    gradients.
    """
    net, x, y, _ = regression()
    step_size = 1e-6  # stays at the start, with unit scales
    method = MCLMC(
        chains=2, draws=1, warmup=0, adapt=False, steps=1, step_size=step_size, start=None, dispersal=0.0,
        stochastic=True, batch_size=BATCH,
    )  # fmt: skip
    posterior, _ = sample(method)
    design = torch.cat([x, torch.ones(ROWS, 1, dtype=torch.float64)], 1)
    gradients = design * (y - net(x)).detach() / NOISE**2
    covariance = (
        torch.cov(gradients.T, correction=0) * ROWS**2 / BATCH * (ROWS - BATCH) / (ROWS - 1)
    )
    exact = float(torch.linalg.eigvalsh(covariance)[-1])
    measured = posterior.history[-1]["gradient_noise"] / step_size**2
    assert (
        0.4 < measured / exact < 2.0
    )  # two halves of 16 minibatches: a standard error of about 0.26


@pytest.mark.parametrize(("batch_size", "status"), [(BATCH, "warning"), (ROWS, "ok")])
def test_large_noise_of_gradients_is_a_warning(batch_size: int, status: str) -> None:
    method = MCLMC(
        chains=2, draws=3, warmup=0, adapt=False, steps=1, step_size=0.1, start=None, stochastic=True,
        batch_size=batch_size,
    )  # fmt: skip
    posterior, _ = sample(method)
    check = posterior.checks["gradient noise"]
    assert check.status == status
    if status == "warning":
        assert "smaller step_size" in check.text


@pytest.mark.slow
def test_adapted_steps_of_minibatches_have_the_variances_of_linear_regression() -> None:
    """At the adapted step size; without the limit on its noise, eigenvalues were 0.65 to 1.1 of the
    exact ones.
    """
    posterior, draws = sample(
        MCLMC(
            chains=64,
            draws=150,
            warmup=150,
            start=None,
            dispersal=0.01,
            stochastic=True,
            batch_size=BATCH,
        )
    )
    assert posterior.checks["gradient noise"].status == "ok"
    covariance = regression()[3]
    root = torch.linalg.cholesky(covariance)
    whitened = torch.linalg.solve_triangular(
        root, draws.T - draws.T.mean(1, keepdim=True), upper=False
    )
    eigenvalues = torch.linalg.eigvalsh(whitened @ whitened.T / len(draws.T[0]))
    assert float(eigenvalues[0]) > 0.85
    assert float(eigenvalues[-1]) < 1.15


@pytest.mark.slow
def test_minibatches_bias_mclmc_less_at_a_smaller_step() -> None:
    """A third of the rows in each step; the variances along the eigenvectors of the precision, 1 if
    exact.
    """
    values, vectors = (torch.from_numpy(part) for part in np.linalg.eigh(PRECISION))

    def variances(step_size: float, steps: int) -> Tensor:
        method = bayou.MCLMC(
            chains=100, warmup=10, draws=20, adapt=False, stochastic=True, batch_size=7, length=0.12, dispersal=0.05,
            step_size=step_size, steps=steps,
        )  # fmt: skip
        draws = conjugate_draws(method) - torch.from_numpy(MEAN)
        return ((draws @ vectors).square() * values).mean((0, 1))

    rough, fine = variances(0.04, 3), variances(0.01, 10)
    assert float(rough[-1]) > 1.7  # the direction with the most noise
    assert float(rough[0]) < 0.7
    assert float((fine - 1).abs().max()) < 0.3
