"""Multimodality: the dip test, its correction, and the answers about posteriors."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import nn

import bayou
from bayou.diagnostics import dip_test, modes
from bayou.diagnostics.dip import _LEVELS, _QUANTILES, _SIZES, antimode, dip_p_value, dip_statistic, holm


def dip_by_linear_program(x: np.ndarray) -> float:
    """min d over unimodal G with |F_n − G| ≤ d: for each mode x_m, G convex before, concave after, a jump allowed."""
    x = np.sort(x)
    n, best = len(x), 1.0
    for m in range(n):  # variables: G(x_i), G(x_m−), d
        rows: list[tuple[dict[int, float], float]] = [({n: 1, m: -1}, 0.0)]
        for i in range(n):
            rows += [({i: -1, n + 1: -1}, -(i + 1) / n), ({n if i == m else i: 1, n + 1: -1}, i / n)]
        before = [*((x[i], i) for i in range(m)), (x[m], n)]
        after = [(x[i], i) for i in range(m, n)]
        for points, sign in ((before, 1), (after, -1)):
            rows += [({a: 1, b: -1}, 0.0) for (_, a), (_, b) in pairwise(points)]
            for (xa, a), (xb, b), (xc, c) in zip(points, points[1:], points[2:], strict=False):
                left, right = sign / (xb - xa), sign / (xc - xb)
                rows.append(({a: -left, b: left + right, c: -right}, 0.0))
        matrix = np.zeros((len(rows), n + 2))
        for k, (entries, _) in enumerate(rows):
            for j, value in entries.items():
                matrix[k, j] = value
        cost = np.eye(n + 2)[-1]
        best = min(best, linprog(cost, A_ub=matrix, b_ub=[b for _, b in rows], bounds=(0, 1)).fun)
    return best


@pytest.mark.parametrize("n", [3, 5, 8])
def test_dip_is_the_distance_to_unimodality(n: int) -> None:
    generator = np.random.default_rng(n)
    for x in (generator.normal(size=n), generator.normal(size=n) * 0.2 + 3 * (np.arange(n) % 2)):
        assert dip_statistic(x) == pytest.approx(dip_by_linear_program(x), abs=1e-8)


def test_dip_of_known_samples() -> None:
    assert dip_statistic([0.0] * 50 + [1.0] * 50) == 0.25
    assert dip_statistic(np.arange(100.0)) == pytest.approx(1 / 200)
    assert dip_statistic([3.0] * 7) == pytest.approx(1 / 14)
    x = np.random.default_rng(0).normal(size=200)
    assert dip_statistic(-5 * x + 2) == pytest.approx(dip_statistic(x))
    with pytest.raises(ValueError, match="finite"):
        dip_statistic([0.0, math.nan])


def test_p_values_follow_the_table_and_fall() -> None:
    for n, row in zip(_SIZES, _QUANTILES, strict=True):
        for level, quantile in zip(_LEVELS, row, strict=True):
            assert dip_p_value(quantile / math.sqrt(n), int(n)) == pytest.approx(level)
    falling = [dip_p_value(t / math.sqrt(700), 700) for t in np.linspace(0, 2, 60)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] == 1.0
    assert 3e-5 < dip_p_value(0.8094 / math.sqrt(1000), 1000) < 3e-4  # the simulated 1e-4 quantile, beyond the table


def test_false_positive_rate() -> None:
    """5 % for the uniform, the least favorable case; next to none for shapes that a Gaussian comparison would flag."""
    generator = np.random.default_rng(0)
    p = np.array([dip_test(generator.uniform(size=150))[1] for _ in range(1500)])
    for level in (0.5, 0.1, 0.05):
        assert abs((p < level).mean() - level) < 4 * math.sqrt(level * (1 - level) / len(p))
    shapes = (generator.normal, generator.exponential, lambda size: generator.standard_t(2, size))
    assert not any(dip_test(draw(size=300))[1] < 0.05 for draw in shapes for _ in range(60))


def test_power() -> None:
    """Two Gaussians four standard deviations apart, 60 : 40, are found in 300 draws; five apart, 80 : 20, in 1,000."""
    generator = np.random.default_rng(0)
    for size, share, apart in ((300, 0.4, 4), (1000, 0.2, 5)):
        x = [generator.normal(size=size) + apart * (generator.uniform(size=size) < share) for _ in range(40)]
        assert np.mean([dip_test(v)[1] < 0.05 for v in x]) > 0.8
    cut = antimode(x[0])
    assert 1.0 < cut < 3.0


def test_the_correction_of_holm() -> None:
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])


def mixture(z_std: float = 0.05, spread: float = 1.0) -> bayou.guides.Bayesian:
    net = nn.Linear(3, 2)
    bnn = bayou.bayesianize(net, {"weight": bayou.MNF(None, components=2, std=0.01, z_std=z_std), "*": bayou.Delta()})
    with torch.no_grad():
        nn.init.constant_(bnn.guides[0].center, 1.0)
        bnn.guides[0].gain.base.mean.copy_(torch.tensor([[1.0], [-1.0]]) * spread)
        bnn.guides[0].gain.base.logits.copy_(torch.tensor([0.7, 0.3]).log())
    return bnn


def test_modes_of_a_mixture() -> None:
    bnn = mixture()
    found = modes(bnn, samples=400)
    assert len(found.multimodal) == 6
    assert found.constant == 2  # the biases are points
    for coordinate in found.multimodal:
        assert abs(coordinate.antimode) < 0.5
        assert abs(coordinate.left - 0.3) < 0.08
    assert "6 multimodal" in str(found)
    with torch.no_grad():
        drawn = bnn.sample(400, seed=0)["weight"][:, 1, 2].double()
    found = modes(bnn, names="weight", samples=400)
    place = [coordinate.name for coordinate in found.coordinates].index("weight[1, 2]")
    assert torch.equal(found.values[:, place], drawn)


def test_unimodal_posterior_has_no_modes() -> None:
    net = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 3))
    x, y = torch.randn(32, 8), torch.arange(32) % 3
    posterior = bayou.fit(net, (x, y), method=bayou.VI(bayou.MNF(), steps=2), progress=False)
    found = modes(posterior, names=["*.weight", "0.bias"], max_coordinates=60, samples=300)
    assert not found.multimodal
    assert len(found.coordinates) == 60
    assert found.total == 8 * 20 + 20 * 3 + 20
    assert str(found).count("unimodal") == 10


def test_errors_say_what_to_do() -> None:
    bnn = bayou.bayesianize(nn.Linear(2, 1), bayou.MeanField())
    with pytest.raises(ValueError, match="matches no name"):
        modes(bnn, names="fc*")
    with pytest.raises(ValueError, match="samples must be a whole number of at least 40"):
        modes(bnn, samples=10)


def test_import_stays_cheap() -> None:
    code = "import sys, bayou; print([m for m in ('matplotlib', 'scipy', 'sklearn') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
