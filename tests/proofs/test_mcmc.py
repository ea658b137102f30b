"""Samplers against densities known in closed form: conjugate regression (METHODS 1), Gaussians
(METHODS 7), two modes.

Tolerances are 4.5 Monte-Carlo standard errors, from the effective sample size of what is averaged.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayou
from bayou.kernels import psgld, sghmc, sgld
from bayou.methods.langevin import Constant, Cyclical, GradientSampler
from bayou.posteriors import Empirical

measures = importlib.import_module("bayou.metrics.chains")
F64 = torch.float64
NOISE, ERRORS = 0.1, 4.5
X = np.linspace(-1, 1, 21)
PHI = np.stack([X**k for k in range(4)], 1)
PRECISION = np.eye(4) + PHI.T @ PHI / NOISE**2
MEAN = np.linalg.solve(PRECISION, PHI.T @ np.sin(3 * X) / NOISE**2)
COVARIANCE = np.linalg.inv(PRECISION)


def fitted(method: Any, seed: int = 0) -> Empirical:
    """From the mode, where the network is."""
    net = nn.Linear(4, 1, bias=False, dtype=F64)
    with torch.no_grad():
        net.weight.copy_(torch.from_numpy(MEAN))
    data = torch.from_numpy(PHI), torch.from_numpy(np.sin(3 * X)).unsqueeze(1)
    method = replace(method, start=None)
    posterior = bayou.fit(
        net, data, method=method, likelihood=bayou.Gaussian(NOISE), seed=seed, progress=False
    )
    assert isinstance(posterior, Empirical)
    return posterior


def agrees(draws: Tensor, mean: np.ndarray, covariance: np.ndarray, least: float = 1000) -> None:
    """Means and all second moments of draws (C, K, D) within Monte-Carlo error; every mean at an
    ESS of ``least``.
    """
    d = draws.shape[-1]
    assert float(measures.ess_mean(draws).min()) >= least
    centered = draws - torch.from_numpy(mean)
    for values, exact in (
        *((centered[..., i], 0.0) for i in range(d)),
        *(
            (centered[..., i] * centered[..., j], covariance[i, j])
            for i in range(d)
            for j in range(i + 1)
        ),
    ):
        assert float(measures.ess_mean(values)) >= least / 2
        assert abs(float(values.mean()) - exact) < ERRORS * float(measures.mcse(values))


def test_the_reference_is_that_of_methods() -> None:
    np.testing.assert_allclose(MEAN, [0, 2.532311, 0, -2.470425], atol=5e-7)
    np.testing.assert_allclose(
        np.sqrt(np.diag(COVARIANCE)), [0.032737, 0.089850, 0.066598, 0.125263], atol=5e-7
    )


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(
            bayou.HMC(chains=24, draws=100, warmup=150, leapfrogs=8, dispersal=0.5), id="HMC"
        ),
        pytest.param(bayou.HMC(chains=24, draws=250, warmup=150, dispersal=0.5), id="HMC, adapted"),
        pytest.param(
            bayou.MCLMC(chains=32, draws=100, warmup=150, adjusted=True, dispersal=0.1),
            id="MCLMC, adjusted",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            bayou.HMC(chains=8, draws=500, warmup=300, leapfrogs=8, dispersal=1.0),
            id="HMC, long",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            bayou.NUTS(chains=16, draws=250, warmup=300, dispersal=1.0),
            id="NUTS, long",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_exact_samplers_find_the_conjugate_posterior(method: Any) -> None:
    """Chains begin apart, far out in the tails of the posterior; the warm-up must find its way and
    its scales.
    """
    posterior = fitted(method)
    agrees(posterior.by_chain()["weight"][:, :, 0], MEAN, COVARIANCE)
    assert posterior.history[-1]["divergences"] == 0
    draws = posterior.by_chain()["weight"]
    assert float(measures.ess_bulk(draws).min()) > 1000
    assert float(measures.ess_tail(draws).min()) > 1000
    assert float(measures.rhat(draws).max()) < 1.03


@pytest.mark.filterwarnings("ignore::bayou.MixingWarning")
def test_a_learned_length_crosses_a_narrow_valley() -> None:
    """Two weights whose sum has a standard deviation 50 times that of their difference, which no
    diagonal mass mends.

    A step is as short as the narrow direction; twenty of them are a third of the wide one.
    """
    net, noise = nn.Linear(2, 1, bias=False, dtype=F64), math.sqrt(2 / 2499)
    nn.init.zeros_(net.weight)
    data = torch.tensor([[1.0, -1.0]], dtype=F64), torch.zeros(1, 1, dtype=F64)
    covariance = np.linalg.inv(np.eye(2) + np.array([[1, -1], [-1, 1]]) / noise**2)
    assert np.linalg.cond(covariance) == pytest.approx(2500)
    ess = {}
    for leapfrogs in (None, 20):
        method = bayou.HMC(
            chains=16, draws=40, warmup=100, leapfrogs=leapfrogs, start=None, log_every=1
        )
        posterior = bayou.fit(
            net,
            data,
            method,
            likelihood=bayou.Gaussian(noise),
            prior=bayou.Normal(1.0),
            progress=False,
        )
        assert isinstance(posterior, Empirical)
        draws = posterior.by_chain()["weight"][:, :, 0]
        ess[leapfrogs] = float(measures.ess_mean(draws).min())
        if leapfrogs is None:
            agrees(draws, np.zeros(2), covariance, least=200)
            lengths = [record["length"] for record in posterior.history]
            assert 1.5 < lengths[-1] < 4  # a quarter of the period is 2.2 in units of the mass
            assert len(set(lengths[99:])) == 1  # fixed after the warm-up
        else:
            assert "length" not in posterior.history[-1]
    assert ess[None] > 5 * ess[20]


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
        draws = fitted(method).by_chain()["weight"][:, :, 0] - torch.from_numpy(MEAN)
        return ((draws @ vectors).square() * values).mean((0, 1))

    rough, fine = variances(0.04, 3), variances(0.01, 10)
    assert float(rough[-1]) > 1.7  # the direction with the most noise
    assert float(rough[0]) < 0.7
    assert float((fine - 1).abs().max()) < 0.3


def test_a_cold_posterior_has_a_smaller_variance() -> None:
    """p^(1/T) of a Gaussian has T times its covariance."""
    posterior = fitted(bayou.HMC(chains=24, draws=100, warmup=150, leapfrogs=8, temperature=0.25))
    agrees(posterior.by_chain()["weight"][:, :, 0], MEAN, 0.25 * COVARIANCE)


def test_sgld_has_the_covariance_of_its_step() -> None:
    """w ← (I − ½hP)·w + √h·ξ is stationary at (P − ¼hP²)⁻¹: 25 % too wide in the stiffest direction
    at h = 0.8/λ.
    """
    largest = float(np.linalg.eigvalsh(PRECISION)[-1])
    h = 0.8 / largest
    posterior = fitted(
        bayou.SGLD(chains=500, steps=1000, burn_in=600, draws=4, lr=h, batch_size=21, dispersal=0.1)
    )
    exact = np.linalg.inv(PRECISION - 0.25 * h * PRECISION @ PRECISION)
    agrees(posterior.by_chain()["weight"][:, :, 0], MEAN, exact)


def simulated(step: Any, state: Any, precision: Tensor, steps: int, **options: Any) -> Any:
    """Independent chains (C, D) on N(0, diag(1/precision)) after many steps."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        noise = torch.randn(state.position.shape, generator=generator, dtype=F64)
        state = step(state, -precision * state.position, noise, **options)
    return state


def variance_is(values: Tensor, exact: float, bias: float = 0.0) -> None:
    """The variance of independent Gaussians (n,), whose estimate has a standard error of √(2/n) of
    it.
    """
    assert (
        abs(float(values.square().mean()) / exact - 1) < ERRORS * math.sqrt(2 / len(values)) + bias
    )


def test_sgld_on_a_unit_gaussian_has_the_variance_of_methods() -> None:
    """h = 0.4: 1/(1 − h/4) = 1.1111, not 1."""
    one = torch.ones(1, dtype=F64)
    state = simulated(sgld.step, sgld.init(torch.zeros(100_000, 1, dtype=F64)), one, 60, lr=0.4)
    variance_is(state.position[:, 0], 1 / (1 - 0.4 / 4))
    assert pytest.approx(1.1111, abs=5e-5) == 1 / (1 - 0.4 / 4)
    cold = simulated(
        sgld.step, sgld.init(torch.zeros(100_000, 1, dtype=F64)), one, 60, lr=0.4, temperature=0.3
    )
    variance_is(cold.position[:, 0], 0.3 / (1 - 0.4 / 4))


@pytest.mark.slow
def test_psgld_finds_every_scale() -> None:
    """Where V averages over far more steps than the chain remembers, G = σ/(1 + O(h)) and h·G/σ² is
    the step of SGLD.

    The fluctuation of V over 3,000 steps leaves up to 3 % (the dropped Γ among it).
    """
    std = torch.tensor([0.25, 1.0, 3.0], dtype=F64)
    start = torch.randn(3000, 3, generator=torch.Generator().manual_seed(1), dtype=F64) * std
    state = simulated(psgld.step, psgld.init(start), std**-2, 3000, lr=0.1, decay=0.9999)
    for i, s in enumerate(std.tolist()):
        variance = s**2
        for _ in range(20):  # G = σ²/√(stationary variance)
            variance = s**2 / (1 - 0.1 * (s**2 / math.sqrt(variance)) / (4 * s**2))
        variance_is(state.position[:, i], variance, bias=0.03)


@pytest.mark.parametrize(("h", "friction"), [(0.2, 0.1), (0.02, 0.05), (0.4, 0.5)])
def test_sghmc_has_the_variance_of_its_recursion(h: float, friction: float) -> None:
    """(w, v) is a linear recursion; its stationary covariance S = A·S·Aᵀ + Q, solved by numpy; 1 as
    h → 0.
    """
    a = np.array(
        [[1 - 0.5 * h, 1 - friction], [-0.5 * h, 1 - friction]]
    )  # w' = w + v', v' = (1 − α)v − ½h·w + noise
    q = friction * h * np.ones((2, 2))
    covariance = np.linalg.solve(np.eye(4) - np.kron(a, a), q.ravel()).reshape(2, 2)
    start = torch.randn(40_000, 1, generator=torch.Generator().manual_seed(1), dtype=F64)
    one = torch.ones(1, dtype=F64)
    state = simulated(sghmc.step, sghmc.init(start), one, 400, lr=h, friction=friction)
    variance_is(state.position[:, 0], covariance[0, 0])
    variance_is(state.velocity[:, 0], covariance[1, 1])
    assert covariance[0, 0] == pytest.approx(1, abs=0.6 * h)


def in_two_modes(method: GradientSampler, steps: int, lr: float, chains: int = 64) -> Tensor:
    """The kept draws (K, C) on ½·N(−2, ½²) + ½·N(2, ½²), all chains started in the right mode."""

    def gradient(w: Tensor) -> Tensor:
        return (2 * torch.tanh(8 * w) - w) / 0.25

    sizes, kept, draws = method.step_sizes, set(method._draw_steps(steps)), []
    state = sgld.init(torch.full((chains, 1), 2.0, dtype=F64))
    generator = torch.Generator().manual_seed(0)
    for t in range(steps):
        noise = torch.randn(chains, 1, generator=generator, dtype=F64)
        h = lr * sizes.factor(t, steps)
        state = sgld.step(state, gradient(state.position), noise, h, float(sizes.noisy(t, steps)))
        if t in kept:
            draws.append(state.position[:, 0])
    return torch.stack(draws)


def test_cyclical_steps_find_both_modes_and_constant_ones_do_not() -> None:
    """The density on the barrier is e⁻⁸. Every chain of 10 cycles sees both modes; a safe constant
    step stays.
    """
    steps = 3000
    constant = in_two_modes(bayou.SGLD(schedule=Constant(), draws=100), steps, lr=0.01)
    assert float((constant < 0).double().mean()) < 0.05
    cyclical = in_two_modes(
        bayou.SGLD(schedule=Cyclical(cycles=10, explore=0.7), draws=100), steps, lr=0.9
    )
    left = (cyclical < 0).double()
    assert bool(((left.mean(0) > 0) & (left.mean(0) < 1)).all())
    assert abs(float(left.mean()) - 0.5) < ERRORS * 0.5 / math.sqrt(
        64 * 10
    )  # a cycle is one draw of a mode
    assert float((cyclical.abs() - 2).std()) == pytest.approx(0.5, rel=0.15)


def test_partial_kernels_are_what_methods_use() -> None:
    """The settings of a method arrive in its kernel."""
    _, step = bayou.SGHMC(friction=0.3)._kernel(7)
    assert isinstance(step, partial)
    assert step.keywords == {"friction": 0.3}
    _, step = bayou.PSGLD(decay=0.5)._kernel(7)
    assert isinstance(step, partial)
    assert step.keywords == {"n": 7, "decay": 0.5, "floor": 1e-5}
