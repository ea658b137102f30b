"""Normal-Jeffreys: its KL from the definition, and groups that really go."""

import itertools
import math

import pytest
import torch
from scipy import integrate
from torch import nn
from torch.distributions import Normal, kl_divergence

import bayou


def guide_of(net, prior):
    (guide,) = [
        g
        for g in bayou.bayesianize(net.double(), bayou.NormalJeffreys(), prior=prior).guides
        if g.names[0] == "0.weight"
    ]
    return guide


@pytest.mark.parametrize(("layer", "units"), [(nn.Linear(3, 2), 3), (nn.Conv1d(3, 2, 4), 2)], ids=["inputs", "filters"])
def test_the_kl_is_that_of_the_gains_and_that_of_the_weights(layer, units):
    """KL = Σ_i ∫ q(z_i) log q(z_i)·|z_i| dz_i + c + Σ KL(N(mean, std²) ‖ N(0, 0.7²)), the first within .0094 a gain."""
    guide = guide_of(nn.Sequential(layer), bayou.Normal(0.7))
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in guide.parameters():
            tensor.copy_(torch.randn_like(tensor))
    assert guide.z_mean.shape == (units,)
    weights = Normal(guide.weight.center, guide.weight.log_std.exp())
    expected = kl_divergence(weights, Normal(torch.zeros((), dtype=torch.float64), 0.7)).sum().item()
    constant = 0.5 * (0.5772156649015329 + math.log(2) + math.log(2 * math.pi) + 1)  # KL → 0 as s/|m| → ∞
    for m, s in zip(guide.z_mean.tolist(), guide.z_log_std.exp().tolist(), strict=True):

        def integrand(z, m=m, s=s):
            log_q = -0.5 * ((z - m) / s) ** 2 - math.log(s) - 0.5 * math.log(2 * math.pi)
            return math.exp(log_q) * (log_q + math.log(abs(z) + 1e-300))

        cuts = sorted({m - 10 * s, min(max(0.0, m - 10 * s), m + 10 * s), m + 10 * s})
        parts = itertools.pairwise(cuts)
        expected += constant + sum(integrate.quad(integrand, a, b, limit=200)[0] for a, b in parts)
    assert guide.draw(2).kl.tolist() == pytest.approx([expected] * 2, abs=0.0094 * units)


@pytest.mark.slow
def test_useless_inputs_and_units_go():
    x = torch.randn(600, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = (x[:, :1] * x[:, 1:2]).tanh()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    method = bayou.VI(bayou.NormalJeffreys(), steps=800, lr=0.02)
    posterior = bayou.fit(net, (x[:300], y[:300]), method=method, likelihood=bayou.Gaussian(0.1), progress=False)
    small, full = bayou.compress(posterior), bayou.to_module(posterior)
    assert small[0].out_features < 20
    assert bool((small[0].weight[:, 2:] == 0).all())  # whole inputs, not single weights
    error = [(f(x[300:]) - y[300:]).square().mean().item() for f in (full, small)]
    assert error[1] < error[0] + 0.01 * float(y.var())
