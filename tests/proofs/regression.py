"""Conjugate linear regression, whose posterior and evidence are known (METHODS numbers 1 and 8).

x = linspace(−1, 1, 21), features (1, x, x², x³), y = sin 3x, noise 0.1, prior N(0, I). Everything
here is computed with numpy, independently of bayou.
"""

import math

import numpy as np
import torch
from torch import nn

F64 = torch.float64
NOISE = 0.1
X = np.linspace(-1, 1, 21)
PHI = np.stack([X**k for k in range(4)], 1)
Y = np.sin(3 * X)
ONES = np.ones(4)


def posterior_of(
    precision,
    noise=NOISE,
    mean=0.0,
    rows=slice(None),
):
    """Mean and precision of the posterior of some rows under the prior N(mean, precision⁻¹)."""
    phi = PHI[rows]
    posterior_precision = precision + phi.T @ phi / noise**2
    information = precision @ (mean * ONES) + phi.T @ Y[rows] / noise**2
    return np.linalg.solve(posterior_precision, information), posterior_precision


def gaussian_elbo(mean, covariance):
    """E_q[log p(y | w)] − KL(q ‖ N(0, I)) for q = N(mean, covariance), exactly."""
    n, d = PHI.shape
    misfit = ((Y - PHI @ mean) ** 2).sum() + np.trace(PHI @ covariance @ PHI.T)
    log_likelihood = -0.5 * n * math.log(2 * math.pi * NOISE**2) - 0.5 * misfit / NOISE**2
    kl = 0.5 * (np.trace(covariance) + mean @ mean - d - np.linalg.slogdet(covariance)[1])
    return float(log_likelihood - kl)


def log_evidence():
    """log N(y; 0, σ²·I + Φ·Φᵀ)."""
    covariance = NOISE**2 * np.eye(len(Y)) + PHI @ PHI.T
    misfit = Y @ np.linalg.solve(covariance, Y)
    log_det = np.linalg.slogdet(covariance)[1]
    return float(-0.5 * (misfit + log_det + len(Y) * math.log(2 * math.pi)))


MEAN, PRECISION = posterior_of(np.eye(4))
COVARIANCE = np.linalg.inv(PRECISION)
EVIDENCE = log_evidence()
# the best factorized Gaussian has the diagonal of the precision
MEAN_FIELD_STD = 1 / np.sqrt(np.diag(PRECISION))
MEAN_FIELD = gaussian_elbo(MEAN, np.diag(MEAN_FIELD_STD**2))


def rows(selection=slice(None)):
    """Some rows, features and y."""
    x = torch.from_numpy(PHI[selection].copy())
    return x, torch.from_numpy(Y[selection].copy()).unsqueeze(1)


def linear(weight=None):
    """The network, at these weights or at drawn ones."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(4, 1, bias=False, dtype=F64)
    if weight is not None:
        net.weight.data = torch.from_numpy(weight.copy()).unsqueeze(0)
    return net
