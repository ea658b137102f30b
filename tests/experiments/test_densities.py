"""The potentials integrate to their log Z; the samplers draw what they say."""

import math

import pytest
import torch

from experiments.densities import POTENTIALS, checkerboard, rings, two_moons


def _grid(reach, points):
    line = torch.linspace(-reach, reach, points, dtype=torch.float64)
    return torch.cartesian_prod(line, line).reshape(points, points, 2), (
        line[1] - line[0]
    ).item() ** 2


@pytest.mark.parametrize("name", POTENTIALS)
def test_log_z_by_quadrature(name):
    # The trapezoidal rule converges exponentially on a smooth density that vanishes at the edge.
    z, cell = _grid(8.0, 1001)
    log_z = POTENTIALS[name].log_density(z).flatten().logsumexp(0).item() + math.log(cell)
    assert log_z == pytest.approx(POTENTIALS[name].log_z, abs=1e-5)


def test_u1_log_z_is_the_published_number():
    assert POTENTIALS["u1"].log_z == 1.877502


def test_two_moons_lie_on_two_half_circles():
    x = two_moons(4000, noise=0.0)
    upper = x + torch.tensor([0.5, 0.25])
    lower = x - torch.tensor([0.5, 0.25])
    on_upper = (upper.norm(dim=-1) - 1).abs() < 1e-5
    on_lower = (lower.norm(dim=-1) - 1).abs() < 1e-5
    assert (on_upper | on_lower).all()
    assert (upper[on_upper & ~on_lower, 1] >= -1e-6).all()
    assert (lower[on_lower & ~on_upper, 1] <= 1e-6).all()
    assert on_upper.double().mean().item() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(4000))
    assert x.mean(0).abs().max() < 4 / math.sqrt(4000)


def test_rings_have_their_radii():
    radius = rings(3000, noise=0.0).norm(dim=-1)
    counts = torch.stack([((radius - r).abs() < 1e-5).sum() for r in (1, 2, 3)])
    assert counts.sum() == 3000
    assert ((counts / 3000 - 1 / 3).abs() < 4 * math.sqrt(2 / 9 / 3000)).all()


def test_checkerboard_fills_the_dark_squares():
    x = checkerboard(8000)
    cell = ((x + 4) / 2).floor()
    assert x.abs().max() <= 4
    assert ((cell[:, 0] + cell[:, 1]) % 2 == 0).all()
    counts = torch.bincount((4 * cell[:, 0] + cell[:, 1]).long(), minlength=16)
    assert ((counts > 0).sum(), counts.sum()) == (8, 8000)
    assert ((counts[counts > 0] - 1000).abs() < 5 * math.sqrt(1000 * 7 / 8)).all()
