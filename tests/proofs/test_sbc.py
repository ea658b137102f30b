"""Simulation-based calibration (Talts et al. 2018) of the exact samplers.

Draw θ from the prior and y from the model, sample θ_1..θ_L | y, and rank θ among them: the rank is
uniform on 0..L if and only if (in expectation over y) the sampler is right. The 1,000 simulations
are 1,000 chains of one kernel, each with data of its own.
"""

import math

import pytest
import torch
from scipy.stats import chi2

from bayou.kernels import hmc, nuts

F64 = torch.float64
SIMULATIONS, DRAWS, BINS = 1000, 31, 16
LEVEL = 1e-3
NOISE = 0.5
X = torch.linspace(-1, 1, 6, dtype=F64)
PHI = torch.stack((torch.ones_like(X), X, X.square()), -1)  # (6, 3)


def simulate(seed=0):
    """θ (S, 3) from N(0, I) and y (S, 6) from N(Φθ, ½²)."""
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(SIMULATIONS, 3, generator=generator, dtype=F64)
    noise = torch.randn(SIMULATIONS, len(X), generator=generator, dtype=F64)
    return theta, theta @ PHI.T + NOISE * noise


def joint(y):
    """log p(y, w) of every simulation by autograd, not by the conjugate formula."""

    def log_joint(w, y):
        return -0.5 * w.square().sum() - 0.5 * ((y - PHI @ w) / NOISE).square().sum()

    graded = torch.func.vmap(torch.func.grad_and_value(log_joint))

    def density(w):
        gradient, value = graded(w, y)
        return value, gradient

    return density


def p_value(theta, draws):
    """The smallest p-value of χ² tests that ranks of θ among draws (L, S, D) are uniform,
    Bonferroni over D.
    """
    rank = (draws < theta).sum(0)  # 0 .. L
    found = []
    for i in range(theta.shape[1]):
        counts = torch.bincount(rank[:, i] * BINS // (DRAWS + 1), minlength=BINS).double()
        expected = SIMULATIONS / BINS
        found.append(
            float(chi2.sf(float(((counts - expected).square() / expected).sum()), BINS - 1))
        )
    return min(1.0, min(found) * theta.shape[1])


def run(
    y,
    transition,
    thin,
):
    """Draws (L, S, 3): from the origin, 30 transitions of burn-in, then every ``thin``-th."""
    density = joint(y)
    state = hmc.init(torch.zeros(SIMULATIONS, 3, dtype=F64), density)
    generator = torch.Generator().manual_seed(1)
    kept = []
    for t in range(30 + thin * DRAWS):
        noise = torch.randn(SIMULATIONS, 3, generator=generator, dtype=F64)
        state = transition(state, density, noise, t)
        if t >= 30 and (t - 30) % thin == thin - 1:
            kept.append(state.position)
    return torch.stack(kept)


INVERSE_MASS = 1 / (1 + PHI.square().sum(0) / NOISE**2)


def by_hmc(state, density, noise, t):
    u = torch.rand(2, SIMULATIONS, generator=torch.Generator().manual_seed(t), dtype=F64)
    return hmc.step(state, density, noise, u[0], 0.5 + 0.4 * u[1], INVERSE_MASS, 4)[0]


def by_nuts(state, density, noise, t):
    generator = torch.Generator().manual_seed(t)

    def uniforms(depth):
        return torch.rand(SIMULATIONS, 2**depth + 2, generator=generator, dtype=F64)

    size = torch.full((SIMULATIONS,), 0.8, dtype=F64)
    return nuts.step(state, density, noise, uniforms, size, INVERSE_MASS, 5)[0]


@pytest.mark.parametrize(
    ("transition", "thin"),
    [(by_hmc, 3), pytest.param(by_nuts, 2, marks=pytest.mark.slow)],
    ids=["HMC", "NUTS"],
)
def test_ranks_of_exact_samplers_are_uniform(
    transition,
    thin,
):
    theta, y = simulate()
    assert p_value(theta, run(y, transition, thin)) > LEVEL


def exact(y, scale=1.0, shift=0.0):
    """Draws of the conjugate posterior with its standard deviations scaled and its mean shifted by
    so many of them.
    """
    precision = torch.eye(3, dtype=F64) + PHI.T @ PHI / NOISE**2
    factor = torch.linalg.cholesky(torch.linalg.inv(precision))
    mean = torch.linalg.solve(precision, (y @ PHI / NOISE**2).T).T
    noise = torch.randn(
        DRAWS, SIMULATIONS, 3, generator=torch.Generator().manual_seed(2), dtype=F64
    )
    return mean + shift * factor.square().sum(-1).sqrt() + scale * noise @ factor.T


def test_the_test_accepts_the_posterior_and_rejects_what_is_not():
    """A spread of 0.8, or 1.25, or a shift by 0.3 standard deviations is found by the same test at
    the same level.
    """
    theta, y = simulate()
    assert p_value(theta, exact(y)) > LEVEL
    assert p_value(theta, exact(y, scale=0.8)) < LEVEL
    assert p_value(theta, exact(y, scale=1.25)) < LEVEL
    assert p_value(theta, exact(y, shift=0.3)) < LEVEL


def test_the_test_rejects_a_sampler_with_a_bias():
    """Leapfrog steps without the Metropolis test: too wide by 1/√(1 − ε²/4) in each direction."""

    def unchecked(state, density, noise, t):
        size = torch.full((SIMULATIONS, 1), 1.5, dtype=F64)
        point = hmc.start(state, noise, INVERSE_MASS)
        for _ in range(2):
            point = hmc.leapfrog(point, density, size, INVERSE_MASS)
        return hmc.HamiltonianState(point.position, point.log_prob, point.gradient)

    theta, y = simulate()
    draws = run(y, unchecked, 2)
    assert math.isfinite(float(draws.sum()))
    assert p_value(theta, draws) < LEVEL
