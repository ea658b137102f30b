"""Flows of angles: splines of the circle, and conditioners that are continuous on it."""

import math

import pytest
import torch

from bayou.core import rng
from bayou.flows import Flow, Spline, VonMises, circular_spline
from tests.flows.tools import LIKE, close, perturb


def grid(n):
    """n angles at equal distances: the mean over them is a quadrature that is exact for smooth
    periodic functions.
    """
    return -math.pi + 2 * math.pi * torch.arange(n, dtype=torch.float64) / n


def torus(coupling, context_dim=0):
    transform = circular_spline(2, 3, (16,), context_dim=context_dim, coupling=coupling)
    return perturb(Flow(VonMises(2, 0.5, 2.0), transform), 0.15)


def test_a_circular_spline_is_a_bijection_of_the_circle_without_a_seam():
    spline = Spline(5, math.pi, circular=True)
    p = rng.normal(200, (spline.params,), LIKE, 0)
    x = grid(200).roll(7)
    y, log_slope = spline.forward(x, p)
    assert y.abs().max() <= math.pi
    again, same = spline.forward(x + 2 * math.pi, p)
    close(torch.cos(again - y), 1, atol=1e-14)
    close(same, log_slope)
    end = torch.full((200,), math.pi, dtype=torch.float64)
    (low, low_slope), (high, high_slope) = spline.forward(-end, p), spline.forward(end - 1e-13, p)
    close(torch.cos(low - high), 1, atol=1e-14)
    close(low_slope, high_slope, atol=1e-10)
    assert low_slope.abs().min() > 1e-6  # the slope at the seam is a parameter
    zero = torch.zeros(200, spline.params, dtype=torch.float64)
    close(spline.forward(x, zero)[0], x, atol=1e-14)


@pytest.mark.parametrize("context_dim", [0, 2])
@pytest.mark.parametrize("coupling", [True, False])
def test_densities_on_the_torus_integrate_to_one_and_have_no_seam(coupling, context_dim):
    flow, n = torus(coupling, context_dim), 256
    context = None if not context_dim else torch.tensor([0.4, -1.2]).double()
    x = torch.stack(torch.meshgrid(grid(n), grid(n), indexing="ij"), -1)
    with torch.no_grad():
        mass = (2 * math.pi) ** 2 * flow.log_prob(x, context).exp().mean().item()
        assert abs(mass - 1) < 1e-3  # the density has kinks at the knots: an error of order 1/n²
        for d in (0, 1):
            edge = x[:, :: n // 16, :].reshape(-1, 2)[:64]
            ends = (edge.clone(), edge.clone())
            ends[0][:, d], ends[1][:, d] = -math.pi, math.pi - 1e-12
            low, high = (flow.log_prob(end, context) for end in ends)
            close(low, high, atol=1e-9)
    assert flow.sample(100, context, seed=0).abs().max() <= math.pi
