"""SGLD, PSGLD and SGHMC: which steps are kept, and densities known in closed form."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import bayou
from bayou import SGLD
from bayou.kernels import Joint, psgld, sghmc, sgld
from bayou.methods.langevin import Constant, Cyclical
from bayou.training.data import as_data
from tests.methods.chains import ERRORS, check_moments, conjugate_draws
from tests.methods.draws import normal
from tests.proofs.regression import MEAN, PRECISION

F64 = torch.float64
ROWS = 24


def curve():
    """Three inputs and the sine of the first."""
    x = normal(ROWS, 3)
    return x, torch.sin(x[:, :1])


def test_which_steps_are_kept():
    assert SGLD(draws=5)._draw_steps(20) == [11, 13, 15, 17, 19]
    assert SGLD(draws=4, burn_in=0)._draw_steps(20) == [4, 9, 14, 19]
    assert SGLD(draws=3, burn_in=2)._draw_steps(20) == [7, 13, 19]
    assert SGLD(burn_in=0.9)._draw_steps(40) == [36, 37, 38, 39]  # fewer than 100: all
    cyclical = SGLD(schedule=Cyclical(cycles=2, explore=0.5), draws=4)
    assert cyclical._draw_steps(20) == [7, 9, 17, 19]
    for schedule in (Constant(), bayou.methods.Decaying(b=5, gamma=1.0), Cyclical(cycles=3)):
        kept = SGLD(schedule=schedule, draws=37, burn_in=0)._draw_steps(400)
        assert len(set(kept)) == len(kept) == 37
        assert kept == sorted(kept)
        assert 0 <= kept[0] <= kept[-1] < 400
    with pytest.raises(ValueError, match="10 steps for 11 draws"):
        SGLD(draws=11)._draw_steps(20)


def test_draws_of_decaying_steps_are_evenly_spread_over_the_sum_of_steps():
    schedule = bayou.methods.Decaying(b=100, gamma=0.8)
    h = np.array([schedule.factor(t, 5000) for t in range(5000)])
    assert h[0] == 1
    assert h[900] == pytest.approx(0.1**0.8)
    kept = SGLD(schedule=schedule, draws=50, burn_in=0)._draw_steps(5000)
    time = np.cumsum(h)[kept]
    np.testing.assert_allclose(np.diff(time), time[-1] / 50, atol=2 * h[kept].max())


def test_cyclical_steps_are_a_cosine_with_noise_at_the_end():
    schedule = Cyclical(cycles=4, explore=0.5, noise=False)
    assert [schedule.factor(t, 80) for t in (0, 20, 60)] == [1, 1, 1]
    assert schedule.factor(10, 80) == pytest.approx(0.5)
    assert schedule.factor(19, 80) < 0.01
    assert [schedule.noisy(t, 80) for t in (0, 9, 10, 19, 20)] == [False, False, True, True, False]


def test_at_temperature_0_cyclical_steps_are_a_snapshot_ensemble():
    """The end of each cycle of w ← w + ½·h·∇log p(w, D), whatever the seed."""
    x = torch.linspace(-1, 1, 20, dtype=F64).unsqueeze(1)
    y, net = torch.sin(2 * x), nn.Linear(1, 1, dtype=F64)
    method = SGLD(
        temperature=0,
        schedule=Cyclical(3),
        draws=3,
        steps=30,
        chains=1,
        lr=0.02,
        start=None,
        dispersal=0.0,
    )
    found = [
        bayou.fit(net, (x, y), method, seed=seed, progress=False, likelihood=bayou.Gaussian(1.0))
        for seed in (0, 1)
    ]
    w, snapshots = torch.cat([net.weight.flatten(), net.bias]).detach(), []
    for step in range(30):
        residual = y - w[0] * x - w[1]
        gradient = torch.cat([(residual * x).sum().reshape(1), residual.sum().reshape(1)]) - w
        w = w + 0.5 * 0.02 * method.step_sizes.factor(step, 30) * gradient
        snapshots += [w] if step % 10 == 9 else []
    for posterior in found:
        draws = posterior.stack
        assert_close(
            torch.cat((draws["weight"].flatten(1), draws["bias"]), 1), torch.stack(snapshots)
        )


def test_epochs_count_batches():
    rows = as_data(curve(), 8)
    assert SGLD(epochs=4, draws=2, batch_size=8)._plan(rows) == (12, [8, 11])
    assert SGLD()._plan(rows)[0] == 10_000


@pytest.mark.parametrize("method", [SGLD, bayou.PSGLD, bayou.SGHMC])
def test_steps_of_all_rows_are_those_of_one_batch(method, monkeypatch):
    """500 steps or more are worth a trace of the density, which does not call the joint."""
    calls = []
    plain = Joint.__call__
    monkeypatch.setattr(
        Joint, "__call__", lambda *args, **options: calls.append(1) or plain(*args, **options)
    )
    method = method(chains=2, steps=500, burn_in=0, draws=5, lr=1e-4, batch_size=ROWS)
    options = {"likelihood": bayou.Gaussian(0.3), "progress": False}
    net = nn.Linear(3, 1, dtype=F64)
    whole = bayou.fit(net, curve(), method, **options)
    assert len(calls) == 6  # the log joints of draws and start
    each = bayou.fit(net, DataLoader(TensorDataset(*curve()), ROWS), method, **options)
    assert len(calls) == 512
    assert_close(whole.sample(10, seed=0), each.sample(10, seed=0))


def test_sgld_has_the_covariance_of_its_step():
    """w ← (I − ½hP)·w + √h·ξ is stationary at (P − ¼hP²)⁻¹."""
    largest = float(np.linalg.eigvalsh(PRECISION)[-1])
    h = 0.8 / largest
    method = SGLD(chains=500, steps=1000, burn_in=600, draws=4, lr=h, batch_size=21, dispersal=0.1)
    exact = np.linalg.inv(PRECISION - 0.25 * h * PRECISION @ PRECISION)
    check_moments(conjugate_draws(method), MEAN, exact)


def simulated(step, state, precision, steps, **options):
    """Independent chains (C, D) on N(0, diag(1/precision)) after many steps."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        noise = torch.randn(state.position.shape, generator=generator, dtype=F64)
        state = step(state, -precision * state.position, noise, **options)
    return state


def check_variance(values, exact, bias=0.0):
    """Compare the variance of independent Gaussians (n,), of relative error √(2/n)."""
    tolerance = ERRORS * math.sqrt(2 / len(values)) + bias
    assert abs(float(values.square().mean()) / exact - 1) < tolerance


def test_sgld_on_a_unit_gaussian_has_the_variance_of_methods():
    """h = 0.4: 1/(1 − h/4) = 1.1111, not 1."""
    one = torch.ones(1, dtype=F64)
    for temperature in (1.0, 0.3):
        start = sgld.init(torch.zeros(50_000, 1, dtype=F64))
        state = simulated(sgld.step, start, one, 60, lr=0.4, temperature=temperature)
        check_variance(state.position[:, 0], temperature / (1 - 0.4 / 4))


@pytest.mark.slow
def test_psgld_finds_every_scale():
    """With a long memory of V, G = σ/(1 + O(h)) and h·G/σ² is the step of SGLD."""
    std = torch.tensor([0.25, 1.0, 3.0], dtype=F64)
    start = normal(3000, 3, seed=1) * std
    state = simulated(psgld.step, psgld.init(start), std**-2, 3000, lr=0.1, decay=0.9999)
    for i, s in enumerate(std.tolist()):
        variance = s**2
        for _ in range(20):  # G = σ²/√(stationary variance)
            variance = s**2 / (1 - 0.1 * (s**2 / math.sqrt(variance)) / (4 * s**2))
        check_variance(state.position[:, i], variance, bias=0.03)


@pytest.mark.parametrize(("h", "friction"), [(0.2, 0.1), (0.02, 0.05), (0.4, 0.5)])
def test_sghmc_has_the_variance_of_its_recursion(h, friction):
    """(w, v) is a linear recursion; its stationary covariance S = A·S·Aᵀ + Q, solved by numpy; 1 as
    h → 0.
    """
    a = np.array(
        [[1 - 0.5 * h, 1 - friction], [-0.5 * h, 1 - friction]]
    )  # w' = w + v', v' = (1 − α)v − ½h·w + noise
    q = friction * h * np.ones((2, 2))
    covariance = np.linalg.solve(np.eye(4) - np.kron(a, a), q.ravel()).reshape(2, 2)
    start = normal(10_000, 1, seed=1)
    one = torch.ones(1, dtype=F64)
    state = simulated(sghmc.step, sghmc.init(start), one, 400, lr=h, friction=friction)
    check_variance(state.position[:, 0], covariance[0, 0])
    check_variance(state.velocity[:, 0], covariance[1, 1])
    assert covariance[0, 0] == pytest.approx(1, abs=0.6 * h)


def in_two_modes(method, steps, lr, chains=64):
    """The kept draws (K, C) on ½·N(−2, ½²) + ½·N(2, ½²), all chains started in the right mode."""

    def gradient(w):
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


def test_cyclical_steps_find_both_modes_and_constant_ones_do_not():
    """The density on the barrier is e⁻⁸."""
    steps = 3000
    constant = in_two_modes(SGLD(schedule=Constant(), draws=100), steps, lr=0.01)
    assert (constant < 0).double().mean() < 0.05
    cyclical = in_two_modes(
        SGLD(schedule=Cyclical(cycles=10, explore=0.7), draws=100), steps, lr=0.9
    )
    left = (cyclical < 0).double()
    assert ((left.mean(0) > 0) & (left.mean(0) < 1)).all()
    assert abs(left.mean() - 0.5) < ERRORS * 0.5 / math.sqrt(
        64 * 10
    )  # a cycle is one draw of a mode
    assert float((cyclical.abs() - 2).std()) == pytest.approx(0.5, rel=0.15)
