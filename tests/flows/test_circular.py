"""Flows of angles: von Mises bases, splines of the circle, and conditioners that are continuous on
it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, distributions as D, nn

from bayou import rng
from bayou.flows import MADE, Autoregressive, Flow, Spline, VonMises, circular_spline

KAPPAS = [1e-3, 1.0, 20.0, 99.0]


def grid(n: int) -> Tensor:
    """n angles at equal distances: the mean over them is a quadrature that is exact for smooth
    periodic functions.
    """
    return -math.pi + 2 * math.pi * torch.arange(n, dtype=torch.float64) / n


def shaken(module: nn.Module) -> nn.Module:
    module.double()
    with torch.no_grad():
        for key, p in module.named_parameters():
            p.add_(0.15 * rng.normal(1, p.shape, p, rng.fold(0, key))[0])
    return module


def torus(coupling: bool, context_dim: int = 0) -> Flow:
    flow = Flow(
        VonMises(2, 0.5, 2.0),
        circular_spline(2, 3, (16,), context_dim=context_dim, coupling=coupling),
    )
    shaken(flow)
    return flow


@pytest.mark.parametrize("kappa", KAPPAS)
def test_von_mises_is_that_of_torch_and_integrates_to_one(kappa: float) -> None:
    base = VonMises(1, 0.7, kappa).double()
    x = grid(400).unsqueeze(-1)
    expected = (
        D.VonMises(torch.tensor(0.7).double(), torch.tensor(kappa).double()).log_prob(x).squeeze(-1)
    )
    assert torch.allclose(
        base.log_prob(x), expected, atol=2e-6 * kappa + 1e-6
    )  # torch: I₀ by a fit of seven digits
    assert abs(2 * math.pi * base.log_prob(x).exp().mean().item() - 1) < 1e-12
    assert torch.allclose(
        base.log_prob(x + 2 * math.pi), base.log_prob(x), atol=1e-12 * kappa + 1e-14
    )


@pytest.mark.parametrize("kappa", KAPPAS)
def test_von_mises_draws_invert_the_cdf(kappa: float) -> None:
    base, n = VonMises(1, 0.0, kappa).double(), 50
    x = base.draw(n, seed=3).squeeze(-1)
    u = rng.uniform(n, (1,), torch.zeros(()).double(), 3).squeeze(-1)
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(400))
    half = (x + math.pi) / 2  # the CDF by quadrature on [−π, x]
    points = -math.pi + half[:, None] * (1 + nodes)
    cdf = half * (weights * base.log_prob(points.unsqueeze(-1)).exp()).sum(-1)
    assert torch.allclose(cdf, u, atol=1e-12)


def test_von_mises_draws_depend_on_their_index_and_are_around_the_mean() -> None:
    base = VonMises((2, 3), 3.0, 5.0).double()
    x = base.draw(10, (4,), seed=0)
    assert x.shape == (10, 4, 2, 3)
    assert torch.equal(base.draw(3, (4,), seed=0, start=7), x[7:])
    many = base.draw(2000, seed=1)
    assert many.abs().max() <= math.pi
    resultant = torch.special.i1e(torch.tensor(5.0)) / torch.special.i0e(
        torch.tensor(5.0)
    )  # E[cos(x − μ)]
    deviation = (1 - resultant / 5 - resultant**2).sqrt() / math.sqrt(many.numel())
    assert abs((many - 3.0).cos().mean() - resultant) < 4 * deviation
    assert abs((many - 3.0).sin().mean()) < 4 * math.sqrt(resultant / 5 / many.numel())


def test_von_mises_draws_have_the_gradient_of_their_parameters() -> None:
    base, eps = VonMises(1, 0.3, 4.0).double(), 1e-6
    for p in (base.mean, base.logit):
        x = base.draw(20, seed=0)
        slopes = torch.stack(
            [torch.autograd.grad(each, p, retain_graph=True)[0] for each in x.squeeze(-1)]
        )
        ends = []
        for step in (eps, -2 * eps):
            with torch.no_grad():
                p.add_(step)
                ends.append(base.draw(20, seed=0))
        with torch.no_grad():
            p.add_(eps)
        assert torch.allclose(slopes, (ends[0] - ends[1]) / (2 * eps), atol=1e-7)


@pytest.mark.parametrize("kappa", [0.0, -1.0, 100.0, math.nan])
def test_von_mises_refuses_other_concentrations(kappa: float) -> None:
    with pytest.raises(ValueError, match="0 < kappa < 100"):
        VonMises(2, kappa=kappa)


def test_a_circular_spline_is_a_bijection_of_the_circle_without_a_seam() -> None:
    spline = Spline(5, math.pi, circular=True)
    p = rng.normal(200, (spline.params,), torch.zeros(()).double(), 0)
    x = grid(200).roll(7)
    y, log_slope = spline.forward(x, p)
    assert y.abs().max() <= math.pi
    back, opposite = spline.inverse(y, p)
    assert torch.allclose(back, x, atol=1e-12)
    assert torch.allclose(opposite, -log_slope, atol=1e-11)
    again, same = spline.forward(x + 2 * math.pi, p)
    assert torch.allclose(torch.cos(again - y), torch.ones(200).double(), atol=1e-14)
    assert torch.allclose(same, log_slope, atol=1e-12)
    end = torch.full((200,), math.pi, dtype=torch.float64)
    (low, low_slope), (high, high_slope) = spline.forward(-end, p), spline.forward(end - 1e-13, p)
    assert torch.allclose(torch.cos(low - high), torch.ones(200).double(), atol=1e-14)
    assert torch.allclose(low_slope, high_slope, atol=1e-10)
    assert low_slope.abs().min() > 1e-6  # the slope at the seam is a parameter
    zero = torch.zeros(200, spline.params, dtype=torch.float64)
    assert torch.allclose(spline.forward(x, zero)[0], x, atol=1e-14)


@pytest.mark.parametrize("context_dim", [0, 2])
@pytest.mark.parametrize("coupling", [True, False])
def test_densities_on_the_torus_integrate_to_one_and_have_no_seam(
    coupling: bool, context_dim: int
) -> None:
    flow, n = torus(coupling, context_dim), 256
    context = None if not context_dim else torch.tensor([0.4, -1.2]).double()
    x = torch.stack(torch.meshgrid(grid(n), grid(n), indexing="ij"), -1)
    with torch.no_grad():
        mass = (2 * math.pi) ** 2 * flow.log_prob(x, context).exp().mean().item()
        assert abs(mass - 1) < 1e-3  # the density has kinks at the knots: an error of order 1/n²
        for d in (0, 1):
            ends = (
                x[:, :: n // 16, :].reshape(-1, 2)[:64].clone(),
                x[:, :: n // 16, :].reshape(-1, 2)[:64].clone(),
            )
            ends[0][:, d], ends[1][:, d] = -math.pi, math.pi - 1e-12
            low, high = (flow.log_prob(end, context) for end in ends)
            assert torch.allclose(low, high, atol=1e-9)
    y, log_q = flow.sample_and_log_prob(100, context, seed=0)
    assert y.abs().max() <= math.pi
    assert torch.allclose(flow.log_prob(y, context), log_q, atol=1e-9)


def test_angles_need_a_conditioner_of_angles_and_radians() -> None:
    spline = Spline(4, math.pi, circular=True)
    with pytest.raises(
        ValueError, match=r"MADE does not read angles; use MADE\(..., circular=True\)"
    ):
        Autoregressive(spline, MADE(2, spline.params))
    with pytest.raises(
        ValueError, match=r"a circular Spline has bound=math.pi, got 180.0; scale the angles"
    ):
        Spline(4, 180.0, circular=True)
