"""Normal-Jeffreys and the horseshoe: KLs from the definition, noise, and pruned groups."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from scipy import integrate, stats
from torch import nn
from torch.distributions import Normal, kl_divergence

import bayou
from bayou.guides.groups import LogNormals
from bayou.guides.guide import Gain, Weight
from bayou.guides.local import sample_outputs

DOUBLE = torch.float64


def guide_of(net, prior):
    (guide,) = [
        g
        for g in bayou.bayesianize(net.double(), bayou.guides.NormalJeffreys(), prior=prior).guides
        if g.names[0] == "0.weight"
    ]
    return guide


@pytest.mark.parametrize(
    ("layer", "units"), [(nn.Linear(3, 2), 3), (nn.Conv1d(3, 2, 4), 2)], ids=["inputs", "filters"]
)
def test_the_kl_is_that_of_the_gains_and_that_of_the_weights(layer, units):
    """KL = Σ_i ∫ q(z_i) log q(z_i)·|z_i| dz_i + c + Σ KL(N(mean, std²) ‖ N(0, 0.7²)), the first
    within .0094 a gain.
    """
    guide = guide_of(nn.Sequential(layer), bayou.Normal(0.7))
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in guide.parameters():
            tensor.copy_(torch.randn_like(tensor))
    assert guide.z_mean.shape == (units,)
    weights = Normal(guide.weight.center, guide.weight.log_std.exp())
    expected = (
        kl_divergence(weights, Normal(torch.zeros((), dtype=torch.float64), 0.7)).sum().item()
    )
    constant = 0.5 * (
        0.5772156649015329 + math.log(2) + math.log(2 * math.pi) + 1
    )  # KL → 0 as s/|m| → ∞
    for m, s in zip(guide.z_mean.tolist(), guide.z_log_std.exp().tolist(), strict=True):

        def integrand(z, m=m, s=s):
            log_q = -0.5 * ((z - m) / s) ** 2 - math.log(s) - 0.5 * math.log(2 * math.pi)
            return math.exp(log_q) * (log_q + math.log(abs(z) + 1e-300))

        cuts = sorted({m - 10 * s, min(max(0.0, m - 10 * s), m + 10 * s), m + 10 * s})
        parts = itertools.pairwise(cuts)
        expected += constant + sum(integrate.quad(integrand, a, b, limit=200)[0] for a, b in parts)
    assert guide.draw(2).kl.tolist() == pytest.approx([expected] * 2, abs=0.0094 * units)


@pytest.mark.parametrize("k", [1.0, 0.3])
def test_the_kl_of_log_normals_to_the_factors_of_a_half_cauchy(k):
    """∫ q log(q/p) of a to Gamma(½, k²) and of b to the inverse Gamma(½, 1); √(a·b) ~ C⁺(0, k)
    under p.
    """
    found = LogNormals(torch.zeros((), dtype=DOUBLE), 3, k, 0.1)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in found.parameters():
            tensor.copy_(0.7 * torch.randn_like(tensor))
    priors = stats.gamma(0.5, scale=k**2), stats.invgamma(0.5)
    expected = 0.0
    for prior, means, stds in zip(
        priors, found.log_median.tolist(), found.log_std.exp().tolist(), strict=True
    ):
        for m, s in zip(means, stds, strict=True):
            q = stats.norm(m, s)  # of u = log a; the density of u under p is e^u·p(e^u)
            integrand = lambda u, q=q, p=prior: q.pdf(u) * (q.logpdf(u) - u - p.logpdf(math.exp(u)))  # noqa: E731
            expected += integrate.quad(integrand, m - 10 * s, m + 10 * s, limit=200)[0]
    assert found.kl().item() == pytest.approx(expected, rel=1e-7)
    root = (priors[0].rvs(20_000, random_state=0) * priors[1].rvs(20_000, random_state=1)) ** 0.5
    assert stats.kstest(root, stats.halfcauchy(scale=k).cdf).pvalue > 0.01


def test_the_horseshoe_starts_at_the_network_and_its_kl_is_a_sum():
    layer = nn.Linear(3, 2).double()
    bnn = bayou.bayesianize(
        nn.Sequential(layer), bayou.guides.HalfCauchy(scale=1e-3), prior=bayou.Normal(0.7)
    )
    guide = next(g for g in bnn.guides if g.names[0] == "0.weight")
    assert torch.allclose(guide.mean()["0.weight"], layer.weight, rtol=1e-3)
    weights = Normal(guide.weight.center, guide.weight.log_std.exp())
    expected = (
        kl_divergence(weights, Normal(torch.zeros((), dtype=DOUBLE), 0.7)).sum()
        + guide.each.kl()
        + guide.all.kl()
    )
    assert torch.allclose(guide.draw(2).kl, expected.expand(2), rtol=1e-12)


@pytest.mark.parametrize(
    ("family", "layer", "shape"),
    [
        (bayou.guides.NormalJeffreys, nn.Linear(3, 2), (3,)),
        (bayou.guides.HalfCauchy, nn.Conv1d(3, 2, 4), (3, 4)),  # at one position
    ],
    ids=["Jeffreys", "horseshoe"],
)
def test_noise_at_the_output_has_the_moments_of_drawn_weights(family, layer, shape):
    x = torch.randn(2, *shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    spec = family(std=0.4, z_std=0.5, local="positions", z="example")
    bnn = bayou.bayesianize(nn.Sequential(layer).double(), spec, example=x)
    assert bnn.local_names == {"0.weight", "0.bias"}
    torch.manual_seed(0)
    n = 20_000
    with torch.no_grad():
        given = bnn.draw(n)(x).flatten(1)
        drawn = torch.func.vmap(lambda params: bnn.call(params, x))(bnn.sample(n, seed=0)).flatten(
            1
        )
    for k, power in enumerate((1, 2)):
        a, b = (
            values**power if k == 0 else (values - drawn.mean(0)).square()
            for values in (given, drawn)
        )
        error = ((a.var(0) + b.var(0)) / n).sqrt()
        assert bool(((a.mean(0) - b.mean(0)).abs() < 5 * error).all())


def test_one_gain_for_all_rows_multiplies_mean_and_noise():
    """y ~ N(x·(z ⊙ M), x²·(z² ⊙ σ²))."""
    torch.manual_seed(0)
    mean, std, z, x = (
        torch.rand(*size, dtype=DOUBLE) + 0.1 for size in ((2, 3), (2, 3), (1, 3), (3,))
    )
    n = 20_000
    weight = Weight(mean, std, (Gain(1, z),), on_noise=True)
    y = sample_outputs(lambda means: F.linear(x.expand(n, 3), means["w"]), {"w": weight})
    spread = ((x * z).square() @ std.square().mT).sqrt()[0]
    assert bool(((y.mean(0) - (x * z) @ mean.mT).abs() < 5 * spread / n**0.5).all())
    assert torch.allclose(y.std(0), spread, rtol=5 / (2 * n) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [bayou.guides.NormalJeffreys(), bayou.guides.HalfCauchy()],
    ids=["Jeffreys", "horseshoe"],
)
def test_irrelevant_inputs_and_units_are_pruned(family):
    x = torch.randn(600, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = (x[:, :1] * x[:, 1:2]).tanh()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    method = bayou.VI(family, steps=800, lr=0.02)
    posterior = bayou.fit(
        net, (x[:300], y[:300]), method=method, likelihood=bayou.Gaussian(0.1), progress=False
    )
    small, full = bayou.compress(posterior, 1.0), posterior.to_module()
    assert small[0].out_features < 20
    read = (small[0].weight != 0).any(0)
    assert bool(read[:2].all())
    assert int(read[2:].sum()) <= (
        0 if isinstance(family, bayou.guides.NormalJeffreys) else 4
    )  # whole inputs, not weights
    error = [(f(x[300:]) - y[300:]).square().mean().item() for f in (full, small)]
    assert error[1] < error[0] + 0.01 * float(y.var())
