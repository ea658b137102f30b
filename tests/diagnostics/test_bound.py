"""The sandwich around the true KL of MNF (number 2)."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal

import bayou
from bayou.diagnostics import bound, bound_gap
from bayou.flows import naf
from bayou.guides.multiplicative import Conjugate

F64 = torch.float64

MEAN = torch.tensor([[1.5], [-0.7], [0.2]], dtype=F64)


def number_2(auxiliary="conjugate"):
    """One input, three outputs: M = (1.5, −.7, .2), z ~ N(1, .5²), σ = .3."""
    net = nn.Linear(1, 3, bias=False).double()
    bnn = bayou.bayesianize(
        net, {"weight": bayou.MNF(flow=None, auxiliary=auxiliary)}, prior=bayou.Normal(1.0)
    )
    guide = bnn.guides[0]
    with torch.no_grad():
        guide.center.copy_(MEAN)
        guide.log_std.fill_(math.log(0.3))
        guide.gain.base.log_std.fill_(math.log(0.5))
        if auxiliary == "conjugate":
            guide.auxiliary.log_std.fill_(math.log(0.5))
        else:  # r(z|W) = N(0, 1), whatever W
            for parameter in (guide.auxiliary.c, guide.auxiliary.b1, guide.auxiliary.b2):
                parameter.zero_()
    return bnn, guide


def r_is_q(guide):
    """r(z|W) = q(z) = N(1, .5²): the flow (z − 1)/.5 onto the N(0, 1) of a Published auxiliary that
    ignores W.
    """
    affine = bayou.flows.DiagonalAffine(1).double()
    with torch.no_grad():
        z, _ = affine(torch.tensor([[0.0], [1.0]], dtype=F64))
        assert torch.allclose(z, torch.tensor([[0.0], [1.0]], dtype=F64))
        affine.shift.fill_(-2.0)
        affine.log_scale.fill_(math.log(2.0))
    guide.auxiliary.transform = affine


def assert_near(end, value, slack=0.0):
    assert abs(end.value - value) < 4 * end.standard_error + slack


def test_number_2_conjugate_closes_the_gap():
    bnn, _ = number_2()
    found = bound_gap(bnn, draws=10, samples=40_000, seed=0)["weight"]
    for end in (found.bound, found.lower, found.upper):
        assert_near(end, 2.901481)
        assert end.standard_error < 0.01
    assert abs(found.gap_lower.value) < 1e-3
    assert abs(found.gap_upper.value) < 1e-3


def test_number_2_with_r_equal_to_q():
    bnn, guide = number_2("paper")
    r_is_q(guide)
    found = bound_gap(bnn, draws=100, samples=20_000, seed=0)["weight"]
    assert_near(found.bound, 3.984418)
    for gap in (found.gap_lower, found.gap_upper):
        assert_near(gap, 1.082937, slack=1e-3)
    for end in (found.lower, found.upper):
        assert_near(end, 2.901481)


def test_bracket_tightens_monotonically_and_holds_the_truth(monkeypatch):
    """With latents of a poor proposal: any of them gives a valid bracket."""
    bnn, _ = number_2("paper")
    poor = Conjugate(1, 0.4).double().requires_grad_(False)
    poor.center.fill_(0.0)
    monkeypatch.setattr(bound, "_match_moments", lambda guide, seed: poor)
    lowers, uppers = [], []
    for draws in (1, 10, 100, 1000):
        found = bound_gap(bnn, draws=draws, samples=4000, seed=0).total
        assert found.lower.value <= 2.901481 + 4 * found.lower.standard_error
        assert found.upper.value >= 2.901481 - 4 * found.upper.standard_error
        assert found.upper.value < found.bound.value
        lowers.append(found.lower.value)
        uppers.append(found.upper.value)
    assert lowers == sorted(lowers)
    assert uppers == sorted(uppers, reverse=True)
    assert uppers[-1] - lowers[-1] < 0.02


def log_q_by_quadrature(guide, weight):
    """log ∫∫ q(W|z) q(z) dz for two gains on a fine grid, with the density of q(z) by the inverse
    of its flow.
    """
    line = torch.linspace(-2, 5, 141, dtype=F64)
    z = torch.cartesian_prod(line, line)
    given = Normal(guide.center * z.unsqueeze(1), guide.log_std.exp())  # (grid, 2, 2)
    log_q = guide.gain.log_prob(z)
    cell = 2 * math.log(float(line[1] - line[0]))
    assert abs(float(log_q.logsumexp(0)) + cell) < 1e-3  # the grid holds all of q(z)
    each = [(given.log_prob(w).flatten(1).sum(1) + log_q).logsumexp(0) for w in weight]
    return torch.stack(each) + cell


@pytest.mark.parametrize("components", [1, 2])
@pytest.mark.parametrize("auxiliary", ["conjugate", "paper"])
def test_brute_force_of_a_tiny_layer(auxiliary, components):
    """A 2 × 2 layer with a strong flow: E[log q(W) − log p(W)] by quadrature is in the bracket."""
    torch.manual_seed(0)  # the flow starts at random
    net = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.9, -0.5], [0.4, 1.1]]))
    small = {"layers": 2, "hidden": (8,)}
    spec = bayou.MNF(
        "realnvp", small, std=0.25, z_std=0.3, auxiliary=auxiliary, components=components
    )
    bnn = bayou.bayesianize(net, {"weight": spec})
    guide = bnn.guides[0]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in guide.gain.transform.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=F64))
        weight = bnn.sample(150, seed=1)["weight"]
        each = log_q_by_quadrature(guide, weight) - Normal(0.0, 1.0).log_prob(weight).flatten(
            1
        ).sum(1)
    error = float(each.std()) / math.sqrt(len(each))
    found = bound_gap(bnn, draws=300, samples=400, seed=0).total
    tolerance = 4 * math.hypot(error, found.upper.standard_error)
    assert found.lower.value - tolerance < each.mean() < found.upper.value + tolerance
    assert found.gap_lower.value > -4 * found.gap_lower.standard_error
    assert found.upper.value - found.lower.value < 0.1


def test_density_of_a_drawn_gain():
    bnn = bayou.bayesianize(
        nn.Linear(3, 2).double(), {"weight": bayou.MNF(lambda dim: naf(dim)), "*": bayou.Delta()}
    )
    gain = bnn.guides[0].gain
    z, log_q = gain.draw(20, seed=0)
    assert torch.allclose(gain.log_prob(z), log_q, atol=1e-7)


@pytest.mark.parametrize("prior", [bayou.Normal(0.7, mean=0.2), bayou.priors.ScaleMixture()])
def test_total_is_the_kl_of_elbo(prior):
    """Convolution and dense MNF, MeanField biases: tensors sum to the total, and the total is
    elbo's KL.
    """
    net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)).double()
    x, y = torch.randn(8, 1, 4, 4, dtype=F64), torch.arange(8) % 2
    rules = {"*.weight": bayou.MNF(std=0.1), "*.bias": bayou.MeanField(std=0.1)}
    posterior = bayou.fit(net, (x, y), bayou.VI(rules, steps=3), prior=prior)
    found, elbo = (
        bound_gap(posterior, draws=50, samples=200, seed=0),
        bayou.elbo(posterior, (x, y), 60, seed=0),
    )
    assert [t.kind for t in found.tensors] == ["bound", "exact", "bound", "exact"]
    for end in ("bound", "lower", "upper", "gap_lower", "gap_upper"):
        parts = sum(getattr(t, end).value for t in found.tensors)
        assert getattr(found.total, end).value == pytest.approx(parts, rel=1e-9, abs=1e-9)
    assert found.total.lower.value <= found.total.upper.value <= found.total.bound.value
    spread = 4 * math.hypot(elbo.standard_error, found.total.bound.standard_error)
    assert abs(found.total.bound.value - elbo.kl) < spread + 1e-6 * abs(elbo.kl)
    text = str(found)
    assert "0.weight" in text
    assert "exact" in text
    assert "total" in text


def test_seed_decides_and_errors_say_what_to_do():
    bnn, _ = number_2()
    assert bound_gap(bnn, 5, 4, seed=3) == bound_gap(bnn, 5, 4, seed=3)
    assert bound_gap(bnn, 5, 4, seed=3) != bound_gap(bnn, 5, 4, seed=4)
    with pytest.raises(ValueError, match="draws must be a whole number of at least 1, got 0"):
        bound_gap(bnn, 0)
    with pytest.raises(ValueError, match="needs a variational posterior"):
        bound_gap(nn.Linear(1, 1))
    with pytest.raises(KeyError, match="the names are 'weight'"):
        bound_gap(bnn, 5, 4)["bias"]
