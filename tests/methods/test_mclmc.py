"""MCLMC with minibatches: the noise of its gradients is measured, limited and reported."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import bayou
from bayou import MCLMC
from tests.methods.chains import conjugate_draws
from tests.proofs.regression import MEAN, NOISE, PHI, PRECISION, Y, linear, rows

ROWS = len(Y)
BATCH = 7


def fitted(**options):
    """A short run without adaptation, from the posterior mean."""
    settings = {"chains": 2, "warmup": 0, "adapt": False, "steps": 1, "start": None} | options
    method = MCLMC(stochastic=True, **settings)
    likelihood = bayou.Gaussian(NOISE)
    return bayou.fit(linear(MEAN), rows(), method, likelihood=likelihood, progress=False)


def test_noise_of_gradients_is_that_of_minibatches():
    """λ is the largest eigenvalue of N²/M·(N − M)/(N − 1) times the covariance of gradients."""
    step_size = 1e-6  # stays at the start, with unit scales
    posterior = fitted(draws=1, step_size=step_size, dispersal=0.0, batch_size=BATCH)
    gradients = PHI * (Y - PHI @ MEAN)[:, None] / NOISE**2
    covariance = np.cov(gradients.T, bias=True) * ROWS**2 / BATCH * (ROWS - BATCH) / (ROWS - 1)
    measured = posterior.history[-1]["gradient_noise"] / step_size**2
    # two halves of 16 minibatches: a standard error of about 0.26
    assert 0.4 < measured / np.linalg.eigvalsh(covariance)[-1] < 2.0


@pytest.mark.parametrize(("batch_size", "status"), [(BATCH, "warning"), (ROWS, "ok")])
def test_large_noise_of_gradients_is_a_warning(batch_size, status):
    posterior = fitted(draws=3, step_size=0.05, batch_size=batch_size)
    check = posterior.checks["gradient noise"]
    assert check.status == status
    assert ("smaller step_size" in check.text) == (status == "warning")


def eigenvector_variances(method):
    """The variances along the eigenvectors of the precision, 1 if exact."""
    values, vectors = (torch.from_numpy(part) for part in np.linalg.eigh(PRECISION))
    deviations = conjugate_draws(method) - torch.from_numpy(MEAN)
    return ((deviations @ vectors).square() * values).mean((0, 1))


@pytest.mark.slow
def test_minibatches_bias_mclmc_less_at_a_smaller_step():
    method = MCLMC(
        chains=100,
        warmup=10,
        draws=20,
        adapt=False,
        stochastic=True,
        batch_size=BATCH,
        length=0.12,
        dispersal=0.05,
    )
    rough = eigenvector_variances(replace(method, step_size=0.04, steps=3))
    fine = eigenvector_variances(replace(method, step_size=0.01, steps=10))
    assert rough[-1] > 1.7  # the direction with the most noise
    assert rough[0] < 0.7
    assert (fine - 1).abs().max() < 0.3


@pytest.mark.slow
def test_adapted_steps_of_minibatches_have_the_variances_of_the_posterior():
    method = MCLMC(
        chains=64, draws=150, warmup=150, dispersal=0.01, stochastic=True, batch_size=BATCH
    )
    variances = eigenvector_variances(method)
    assert variances.min() > 0.8
    assert variances.max() < 1.2
