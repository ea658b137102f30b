"""Kernels on densities in closed form: steps, stationary moments, reversibility, adaptation."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayou.core import rng
from bayou.kernels import adaptation, hmc, mclmc, nuts, psgld, sghmc, sgld
from tests.double import double  # noqa: F401

F64 = torch.float64
near = partial(assert_close, rtol=0, atol=1e-12)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gaussian(precision):
    """log N(w; 0, P⁻¹) up to a constant."""

    def density(w):
        gradient = -(w @ precision)
        return 0.5 * (w * gradient).sum(-1), gradient

    return density


def banana(w):
    """−½·x² − ½·(y − x²)²/0.5²: curved, so that a U-turn criterion has something to find."""
    x, y = w[:, 0], w[:, 1]
    r = (y - x.square()) / 0.25
    return -0.5 * x.square() - 0.5 * (y - x.square()) * r, torch.stack((-x + 2 * x * r, -r), -1)


# --- gradient kernels ---------------------------------------------------------------------------


def test_a_step_of_sgld():
    w, g, e = (normal(3, 2, seed=s) for s in range(3))
    position = sgld.step(sgld.init(w), g, e, 0.1, 0.5).position
    assert_close(position, w + 0.05 * g + math.sqrt(0.05) * e)


def test_two_steps_of_psgld():
    """The first has G = 1/(λ + |g|/n), whatever the decay."""
    w, g, e = (normal(3, 2, seed=s) for s in range(3))
    first = psgld.step(psgld.init(w), g, e, 0.1, n=5, decay=0.9, floor=0.01)
    G = 1 / (0.01 + (g / 5).abs())
    assert_close(first.position, w + 0.05 * G * g + (0.1 * G).sqrt() * e)
    second = psgld.step(first, 2 * g, e, 0.1, n=5, decay=0.9, floor=0.01)
    V = (0.9 * 0.1 * (g / 5) ** 2 + 0.1 * (2 * g / 5) ** 2) / (1 - 0.81)
    G = 1 / (0.01 + V.sqrt())
    assert_close(second.position, first.position + 0.1 * G * g + (0.1 * G).sqrt() * e)


def test_a_step_of_sghmc_and_full_friction_is_sgld():
    w, v, g, e = (normal(3, 2, seed=s) for s in range(4))
    found = sghmc.step(sghmc.MomentumState(w, v), g, e, 0.1, 2.0, friction=0.3)
    velocity = 0.7 * v + 0.05 * g + math.sqrt(0.3 * 0.1 * 2.0) * e
    assert_close(found.velocity, velocity)
    assert_close(found.position, w + velocity)
    full = sghmc.step(sghmc.MomentumState(w, v), g, e, 0.1, friction=1.0)
    assert_close(full.position, sgld.step(sgld.init(w), g, e, 0.1).position)


# --- leapfrog and HMC ---------------------------------------------------------------------------

PRECISION = torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=F64)


def test_the_leapfrog_is_reversible_and_keeps_volume():
    density = gaussian(PRECISION)
    mass = torch.tensor([0.5, 2.0])
    state = hmc.init(normal(4, 2), density)
    first = hmc.start(state, normal(4, 2, seed=1), mass)
    step = torch.full((4, 1), 0.2)
    point = first
    for _ in range(7):
        point = hmc.leapfrog(point, density, step, mass)
    for _ in range(7):
        point = hmc.leapfrog(point, density, -step, mass)
    near(point.position, first.position)
    near(point.momentum, first.momentum)

    def once(z):
        at = z[:2].unsqueeze(0)
        value, gradient = banana(at)
        out = hmc.leapfrog(
            hmc.PhasePoint(at, z[2:].unsqueeze(0), gradient, value), banana, step[:1], mass
        )
        return torch.cat((out.position[0], out.momentum[0]))

    jacobian = torch.func.jacrev(once)(normal(4, seed=2))
    assert float(torch.linalg.det(jacobian)) == pytest.approx(1, abs=1e-12)


def test_the_energy_error_is_of_second_order():
    state = hmc.init(normal(1, 2), banana)
    mass = torch.ones(2)
    errors = []
    for size in (0.02, 0.01):
        first = hmc.start(state, normal(1, 2, seed=1), mass)
        point = first
        for _ in range(round(1 / size)):
            point = hmc.leapfrog(point, banana, torch.full((1, 1), size), mass)
        errors.append(abs(float(hmc.energy(point, mass) - hmc.energy(first, mass))))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)


def test_a_divergent_trajectory_is_rejected_and_counted():
    density = gaussian(PRECISION)
    state = hmc.init(normal(3, 2), density)
    size = torch.tensor([0.1, 50.0, 1e200])
    noise = normal(3, 2, seed=1)
    mass = torch.ones(2)

    def uniforms(depth):
        return torch.rand(3, 2**depth + 2)

    for after, info in (
        hmc.step(state, density, noise, torch.zeros(3), size, mass, 5),
        nuts.step(state, density, noise, uniforms, size, mass, 4),
    ):
        assert info.divergent.tolist() == [False, True, True]
        assert torch.equal(after.position[1:], state.position[1:])
        assert not torch.equal(after.position[0], state.position[0])


def test_a_reasonable_step_has_an_acceptance_near_four_fifths():
    density = gaussian(torch.diag(torch.tensor([100.0, 1.0])))
    state, mass = hmc.init(normal(5, 2) * 0.1, density), torch.ones(5, 2)
    noise = normal(5, 2, seed=1)
    found = hmc.reasonable_step(state, density, noise, torch.full((5,), 3.0), mass)
    first = hmc.start(state, noise, mass)

    def accepted(size):
        after = hmc.leapfrog(first, density, size.unsqueeze(-1), mass)
        return hmc.energy(first, mass) - hmc.energy(after, mass) > math.log(0.8)

    assert accepted(found).all()
    assert not accepted(2 * found).any()


# --- MCLMC --------------------------------------------------------------------------------------


def microcanonical(position, density):
    """Chains at these positions, with random velocities."""
    velocity = mclmc.unit(normal(*position.shape, seed=1))
    return mclmc.MicrocanonicalState(*hmc.init(position, density), velocity)


def test_a_turn_of_the_velocity_by_its_formula():
    """D = 3, u = e₁, ∇U = 2·e₂, ε = 0.1; and the hyperbolic functions, in any direction."""
    u, g = torch.tensor([[1.0, 0, 0]]), torch.tensor([[0, -2.0, 0]])
    velocity, gain = mclmc.turn(u, g, torch.tensor([[0.1]]))
    assert_close(velocity, torch.tensor([[0.995021, -0.099668, 0]]), atol=5e-7, rtol=0)
    assert float(gain) == pytest.approx(0.009983, abs=5e-7)
    u, g = mclmc.unit(normal(5, 4)), 3 * normal(5, 4, seed=1)
    velocity, gain = mclmc.turn(u, g, torch.full((5, 1), 0.7))
    size = g.norm(dim=-1, keepdim=True)
    e, delta = g / size, 0.7 * size / 3
    c = (e * u).sum(-1, keepdim=True)
    below = delta.cosh() + c * delta.sinh()
    assert_close(velocity, (u + e * (delta.sinh() + c * (delta.cosh() - 1))) / below)
    assert_close(gain, 3 * below.log().squeeze(-1))
    far, gain = mclmc.turn(u, 1e6 * g, torch.ones(5, 1))  # cosh would overflow
    assert_close(far, e)
    assert gain.isfinite().all()


def test_the_microcanonical_integrator_is_reversible_and_of_second_order():
    """Reversed by −u; the error of ΔE over a fixed time falls with ε² at least."""
    scales = torch.tensor([0.5, 2.0, 1.0])
    density = gaussian(torch.diag(torch.tensor([1.0, 3.0, 0.5])))
    first = microcanonical(normal(4, 3), density)
    errors = []
    for count in (10, 20):
        size = torch.full((4,), 2 / count)
        state = first
        total = torch.zeros(4)
        for _ in range(count):
            state, error = mclmc.integrate(state, density, size, scales)
            total = total + error
        errors.append(total.abs())
        back = state._replace(velocity=-state.velocity)
        for _ in range(count):
            back, error = mclmc.integrate(back, density, size, scales)
            total = total + error
        assert_close(back.position, first.position, rtol=0, atol=1e-11)
        assert float(total.abs().max()) < 1e-11
    assert (errors[1] < errors[0] / 3).all()


def test_microcanonical_draws_have_the_variances_of_a_gaussian():
    """N(0, I) in 30 dimensions: 64 chains of 60 draws; the adjusted step has an error of 0.3."""
    d, chains = 30, 64
    density = gaussian(torch.eye(d))
    first = microcanonical(normal(chains, d), density)
    ones, length = torch.ones(chains, d), torch.full((chains,), d**0.5)
    generator = torch.Generator().manual_seed(2)

    def noise(i=0):
        return torch.randn(chains, d, generator=generator)

    state, found = first, []
    for _ in range(60):
        state, error, divergent = mclmc.step(state, density, noise, length / 4, ones, length, 6)
        found.append(state.position.square().mean(-1))
        assert not divergent.any()
    assert float(error.mean()) < 1e-5
    # a mean square has variance 2/D; draws of a chain are correlated, so chains alone are counted
    # as independent
    assert float(torch.stack(found).mean()) == pytest.approx(1, abs=4.5 * math.sqrt(2 / d / chains))
    state, found, steps = first, [], torch.full((chains,), 2)
    for _ in range(60):
        u = torch.rand(chains, generator=generator)
        state, info = mclmc.adjusted_step(state, density, noise(), u, 2 * length, ones, steps)
        found.append(state.position.square().mean(-1))
    assert 0.2 < float(info.accept.mean()) < 0.95
    assert float(torch.stack(found).mean()) == pytest.approx(1, abs=4.5 * math.sqrt(2 / d / chains))


def test_a_divergent_microcanonical_chain_stays():
    density = gaussian(PRECISION)
    first = microcanonical(normal(3, 2), density)
    size, ones = torch.tensor([0.1, 200.0, math.inf]), torch.ones(3, 2)
    state, _, divergent = mclmc.step(
        first, density, lambda i: normal(3, 2, seed=i), size, ones, ones[:, 0], 5
    )
    assert divergent.tolist() == [False, True, True]
    assert torch.equal(state.position[1:], first.position[1:])
    assert state.velocity.isfinite().all()
    moved, info = mclmc.adjusted_step(
        first, density, normal(3, 2, seed=2), torch.zeros(3), size, ones, torch.full((3,), 5)
    )
    assert info.divergent.tolist() == [False, True, True]
    assert torch.equal(moved.position[1:], first.position[1:])


@pytest.mark.peers
def test_the_microcanonical_step_and_refreshment_are_those_of_blackjax():
    """One step in scaled coordinates, its energy error, and a partial refreshment."""
    import jax
    from blackjax.mcmc import integrators

    precision = torch.tensor([[2.0, 0.3, 0.0], [0.3, 1.0, -0.2], [0.0, -0.2, 0.5]])
    density, scales = gaussian(precision), torch.tensor([0.5, 2.0, 1.0])
    first = microcanonical(normal(4, 3), density)
    sizes, length = torch.tensor([1e-3, 0.1, 0.7, 2.0]), torch.full((4,), 1.7)
    ours, error = mclmc.integrate(first, density, sizes, scales)
    with jax.enable_x64(True):
        P = jax.numpy.array(precision.numpy())
        integrate = integrators.isokinetic_mclachlan(
            lambda w: -0.5 * w @ P @ w, scales.square().numpy()
        )
        keys = jax.random.split(jax.random.key(0), 4)
        noise = torch.tensor(np.array(jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)))
        refreshed = mclmc.refresh(first.velocity, noise, sizes, length)
        for c in range(4):
            begin = integrators.IntegratorState(*(first[i][c].numpy() for i in (0, 3, 1, 2)))
            state, kinetic = integrate(begin, float(sizes[c]))
            for mine, theirs in (
                (ours.position[c], state.position),
                (ours.velocity[c], state.momentum),
                (ours.log_prob[c], state.logdensity),
                (ours.gradient[c], state.logdensity_grad),
                (error[c], kinetic - state.logdensity + begin.logdensity),
                (
                    refreshed[c],
                    integrators.partially_refresh_momentum(
                        begin.momentum, keys[c], float(sizes[c]), 1.7
                    ),
                ),
            ):
                np.testing.assert_allclose(mine.numpy(), np.asarray(theirs), rtol=1e-9, atol=1e-9)


# --- NUTS ---------------------------------------------------------------------------------------


def reference_nuts(q, p, eps, mass, uniforms, most):
    """One chain by the recursive definition: whole trees in lists, each subtree tested."""

    def log_joint(q, p):
        return float(banana(torch.from_numpy(q)[None])[0]) - 0.5 * float((p * p * mass).sum())

    def leap(q, p, e):
        gradient = banana(torch.from_numpy(q)[None])[1][0].numpy()
        p = p + 0.5 * e * gradient
        q = q + e * mass * p
        return q, p + 0.5 * e * banana(torch.from_numpy(q)[None])[1][0].numpy()

    def straight(tree):
        """The criterion of Stan on leaves: all of them, and each half with a leaf of the other."""
        half = len(tree) // 2
        for part in (tree, tree[: half + 1], tree[half - 1 :]):
            rho = sum(leaf[1] for leaf in part) * mass
            if rho @ part[0][1] <= 0 or rho @ part[-1][1] <= 0:
                return False
        return True

    def all_straight(tree):
        if len(tree) == 1:
            return True
        half = len(tree) // 2
        return all_straight(tree[:half]) and all_straight(tree[half:]) and straight(tree)

    h0, tree, sample, log_weight = log_joint(q, p), [(q, p)], q, 0.0
    for depth in range(most):
        u = uniforms[depth]
        forward = u[0] < 0.5
        leaf, new, weights = (tree[-1] if forward else tree[0]), [], []
        for _ in range(2**depth):
            leaf = leap(*leaf, eps if forward else -eps)
            new.append(leaf)
            weights.append(log_joint(*leaf) - h0)
            if weights[-1] < -1000:
                return sample
        if not all_straight(new):
            break
        picked = 0
        for n in range(1, 2**depth):
            if u[1 + n] < math.exp(weights[n] - np.logaddexp.reduce(weights[: n + 1])):
                picked = n
        new_weight = float(np.logaddexp.reduce(weights))
        if u[-1] < math.exp(min(0.0, new_weight - log_weight)):
            sample = new[picked][0]
        log_weight = float(np.logaddexp(log_weight, new_weight))
        tree = tree + new if forward else new[::-1] + tree
        if not straight(tree):
            break
    return sample


@pytest.mark.parametrize("size", [0.05, 0.3])
def test_the_loop_over_leaves_is_the_recursive_tree(size):
    """40 chains at once against one chain at a time, on trees of different depths."""
    chains, most = 40, 6
    q = normal(chains, 2)
    noise = normal(chains, 2, seed=1)
    mass = torch.tensor([0.7, 1.5])
    uniforms = [
        torch.rand(chains, 2**d + 2, generator=torch.Generator().manual_seed(d))
        for d in range(most)
    ]
    sizes = torch.full((chains,), size)
    state, info = nuts.step(
        hmc.init(q, banana), banana, noise, uniforms.__getitem__, sizes, mass, most
    )
    momentum = noise / mass.sqrt()
    expected = []
    for c in range(chains):
        own_uniforms = [u[c].numpy() for u in uniforms]
        start = q[c].numpy(), momentum[c].numpy()
        expected.append(reference_nuts(*start, size, mass.numpy(), own_uniforms, most))
    np.testing.assert_allclose(state.position.numpy(), np.stack(expected), atol=1e-12)
    value, gradient = banana(state.position)
    assert_close(state.log_prob, value)
    assert_close(state.gradient, gradient)
    assert len(info.leapfrogs.unique()) >= 2


def test_nuts_and_hmc_leave_a_curved_density_invariant():
    """20,000 exact draws stay exact after one transition: E y = E x² = 1, Var y = 2 + ¼."""
    count = 20_000
    x = normal(count, seed=1)
    start = hmc.init(torch.stack((x, x.square() + 0.5 * normal(count, seed=2)), -1), banana)
    noise = normal(count, 2, seed=3)
    generator = torch.Generator().manual_seed(4)
    u = torch.rand(count, generator=generator)
    size = torch.full((count,), 0.25)
    mass = torch.ones(2)

    def uniforms(depth):
        return torch.rand(count, 2**depth + 2, generator=generator)

    for state, _ in (
        hmc.step(start, banana, noise, u, size, mass, 6),
        nuts.step(start, banana, noise, uniforms, size, mass, 5),
    ):
        position = state.position
        assert not torch.allclose(position, start.position, atol=0.1)
        a, b = position.T
        for values, exact in (
            (a, 0.0),
            (a.square(), 1.0),
            (b, 1.0),
            ((b - 1).square(), 2.25),
            (a * b, 0.0),
        ):
            assert abs(float(values.mean()) - exact) < 4.5 * float(values.std()) / math.sqrt(count)


def test_chains_of_different_numbers_of_leapfrogs_are_those_of_each_alone():
    q, noise, u = normal(3, 2), normal(3, 2, seed=1), torch.full((3,), 0.3)
    size = torch.full((3,), 0.2)
    mass = torch.tensor([0.5, 2.0])
    counts = [1, 7, 3]
    steps = torch.tensor(counts)
    together, info = hmc.step(hmc.init(q, banana), banana, noise, u, size, mass, steps)
    assert info.leapfrogs.tolist() == counts
    for c, count in enumerate(counts):
        one = slice(c, c + 1)
        alone, _ = hmc.step(
            hmc.init(q[one], banana), banana, noise[one], u[one], size[one], mass, count
        )
        near(alone.position[0], together.position[c])


def test_the_gain_of_a_jump_is_the_derivative_of_its_square_by_time():
    """a·t^(c+1)·d(J·t^−c)/dt with c = π/2, by differences of the time."""
    first, noise, mass = normal(1, 2), normal(1, 2, seed=1), torch.tensor([0.5, 2.0])
    steps = torch.full((1,), 400.0)

    def jump(time):
        moved, info = hmc.step(
            hmc.init(first, banana),
            banana,
            noise,
            torch.zeros(1),
            time / steps,
            mass,
            steps,
        )
        return float(((moved.position - first).square() / mass).sum()) * time ** (
            -math.pi / 2
        ), info

    up, info = jump(0.801)
    down, _ = jump(0.799)
    _, info = jump(0.8)
    found = float(info.accept) * 0.8 ** (math.pi / 2 + 1) * (up - down) / 0.002
    assert float(info.gain) == pytest.approx(found, rel=1e-3)


def test_chains_are_independent():
    q = normal(5, 2)
    noise = normal(5, 2, seed=1)
    size = torch.full((5,), 0.2)
    mass = torch.ones(5, 2)

    def run(first, count):
        rows = slice(first, first + count)
        return nuts.step(
            hmc.init(q[rows], banana),
            banana,
            noise[rows],
            lambda depth: rng.uniform(count, (2**depth + 2,), q, depth, first),
            size[rows],
            mass[rows],
            6,
        )

    together, info = run(0, 5)
    for c in range(5):
        alone, own_info = run(c, 1)
        near(alone.position[0], together.position[c])
        assert float(own_info.leapfrogs) == float(info.leapfrogs[c])


# --- adaptation ---------------------------------------------------------------------------------


def test_dual_averaging_finds_the_rate():
    """An acceptance of exp(−ε·k), k different in every chain: ε = −log(0.8)/k."""
    k = torch.tensor([0.5, 1.0, 20.0])
    state = adaptation.init(torch.zeros(3, 1), torch.full((3,), 1.0))
    for _ in range(2000):
        state = adaptation.tune(state, torch.exp(-state.log_step.exp() * k), 0.8)
    assert_close(state.log_average.exp(), -math.log(0.8) / k, rtol=0.05, atol=0)


def test_the_length_is_a_quarter_of_a_period():
    """The squared jump of normal distributions is 2σ²·(1 − cos(t/σ)): T = π·σ/2."""
    sd = torch.tensor([0.2, 1.0, 5.0])
    state = adaptation.init(torch.zeros(3, 1), torch.full((3,), 0.05))
    assert state.log_length.exp().tolist() == pytest.approx([1.0] * 3)  # of 20 steps
    for tuned in range(1, 301):
        t = state.log_length.exp() / sd
        gain = sd.square() * (2 * t * t.sin() - math.pi * (1 - t.cos()))
        state = adaptation.lengthen(state._replace(tuned=tuned), gain, 1000)
    assert_close(state.log_average_length.exp(), 0.5 * math.pi * sd, rtol=0.05, atol=0)
    for _ in range(100):
        state = adaptation.lengthen(state, torch.ones(3), 10)
    most = torch.full((3,), 0.5)  # ten steps
    assert_close(state.log_length.exp(), most)


def test_the_mass_is_the_regularized_variance_of_a_window():
    draws = normal(30, 2, 3) * torch.tensor([0.1, 1.0, 10.0]) + 5
    state = adaptation.init(draws[0], torch.ones(2))
    for position in draws:
        state = adaptation.observe(state, position)
    state = adaptation.settle(state)
    assert_close(state.inverse_mass, draws.var(0) * (30 / 35) + 1e-3 * (5 / 35))
    assert state.seen == 0
    # The same 20 in units of the new mass.
    length = 20 * state.inverse_mass.log().mean(-1).mul(-0.5).exp()
    assert_close(state.log_average_length.exp(), length)


def test_the_windows_are_those_of_stan():
    informed, ends = adaptation.windows(1000)
    assert (informed.start, informed.stop) == (75, 950)
    assert sorted(ends) == [99, 149, 249, 449, 949]
    informed, ends = adaptation.windows(100)  # too short: 15, 75, 10
    assert (informed.start, informed.stop, sorted(ends)) == (15, 90, [89])
    assert adaptation.windows(10) == (range(0), frozenset())
    for warmup in range(20, 1200, 7):
        informed, ends = adaptation.windows(warmup)
        assert max(ends) == informed.stop - 1
