"""What the tests of samplers share: draws of a known posterior, and a check of their moments."""

import importlib
from dataclasses import replace

import torch

import bayou
from tests.proofs.regression import MEAN, NOISE, linear, rows

measures = importlib.import_module("bayou.metrics.chains")
ERRORS = 4.5  # standard errors of a Monte-Carlo estimate


def conjugate_draws(method):
    """Draws (C, K, 4) of the conjugate regression, from its mode."""
    posterior = bayou.fit(
        linear(MEAN),
        rows(),
        replace(method, start=None),
        likelihood=bayou.Gaussian(NOISE),
        progress=False,
    )
    assert posterior.history[-1].get("divergences", 0) == 0
    return posterior.by_chain()["weight"][:, :, 0]


def check_moments(draws, mean, covariance, min_ess=1000):
    """Compare means and second moments of draws (C, K, D) with the truth, by standard errors."""
    dimension = draws.shape[-1]
    assert measures.ess_mean(draws).min() >= min_ess
    centered = draws - torch.from_numpy(mean)
    moments = [(centered[..., i], 0.0) for i in range(dimension)]
    for i in range(dimension):
        for j in range(i + 1):
            moments.append((centered[..., i] * centered[..., j], covariance[i, j]))
    for values, exact in moments:
        assert measures.ess_mean(values) >= min_ess / 2
        assert abs(values.mean() - exact) < ERRORS * float(measures.mcse(values))
