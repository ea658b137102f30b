"""Surjections against closed forms; the conformance suite runs ``check`` on all of them."""

import math

import pytest
import torch
from torch import nn

from bayou.core import rng
from bayou.flows import (
    Abs,
    Argmax,
    BinaryArgmax,
    Chain,
    Dequantize,
    DiagonalAffine,
    DiagonalNormal,
    Flow,
    Inverse,
    InverseCDF,
    Ladj,
    LULinear,
    Max,
    Side,
    Slice,
    Sort,
    StandardNormal,
    Uniform,
    realnvp,
)
from bayou.flows.surjections.maps import log_ndtr
from tests.conformance.variants import Ordered, Positive
from tests.flows.tools import LIKE, close, double, item_is, near, refuses, standard

DRAWS = 20_000


def base(mean, std):
    return DiagonalNormal(1, mean, std).double()


def rows(value, n=DRAWS):
    return double([value]).expand(n, -1)


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("std", "mass", "bound"), [(0.5, -0.3817151, -0.3924580), (0.25, -0.0465679, -0.1993108)]
)
def test_uniform_dequantization(std, mass, bound):
    flow = Flow(base(0.5, std), Dequantize(1))
    near(flow.log_prob(rows([0.0]), seed=0).detach(), bound)
    near(flow.log_prob(rows([0.0]), seed=0).detach().exp(), math.exp(mass))
    assert (flow.kind, flow.label.inverse, flow.label.forward) == (
        Ladj.bound,
        Side.lower,
        Side.upper,
    )


def test_importance_samples_tighten_the_bound():
    flow = Flow(base(0.5, 0.25), Dequantize(1))
    found = flow.log_prob(rows([0.0], 2000), samples=100, seed=0).detach()
    near(found, -0.0473, 5e-5)
    assert found.mean() > -0.0485


def test_the_best_dequantization_is_the_conditional_density():
    normal = torch.distributions.Normal(double(0.5), 0.5)
    low, high = (
        normal.cdf(LIKE),
        normal.cdf(torch.ones((), dtype=torch.float64)),
    )

    class Truncated(InverseCDF):
        """N(.5, .5²) given its bin [0, 1): u = F⁻¹(F(0) + v·(F(1) − F(0)))."""

        domain = codomain = (0.0, 1.0)

        def __init__(self):
            nn.Module.__init__(self)
            self.event_shape = (1,)

        def _forward(self, x, context):
            u = normal.icdf(low + x * (high - low))
            return u, ((high - low).log() - normal.log_prob(u)).sum(-1)

    flow = Flow(base(0.5, 0.5), Dequantize(1, q=Flow(Uniform(1).double(), Truncated())))
    found = flow.log_prob(rows([0.0], 100), seed=0)
    close(found, -0.3817151, atol=1e-6)


def correlated(mean, std):
    """(a, b) of unit variances with correlation .8, of which b is dropped: y ~ N(0, 1).

    The inverse draws b from N(mean, std²).
    """
    linear, q = LULinear(2), DiagonalAffine(1)
    with torch.no_grad():
        linear.weight.lower[1, 0] = 0.8
        linear.weight.log_diagonal[1] = math.log(0.6)
        q.shift.fill_(mean)
        q.log_scale.fill_(math.log(std))
    drop = Slice(2, 1, standard(q))
    return standard(Chain(linear, drop)).double()


def test_augmentation_is_bounded_from_both_sides():
    """inverse side ≤ log p(y) ≤ forward side, at y = 1 with log p(y) = −1.4189385."""
    near(correlated(0.0, 1.0).log_prob(rows([1.0]), seed=0).detach(), -2.6858907)
    flow = correlated(0.3, 0.9)
    below = flow.log_prob(rows([1.0]), seed=0).detach()
    near(below.exp(), math.exp(-1.4189385))
    assert abs(below.mean().item() + 1.985) < 0.02
    # Given y = 1, b is N(.8, .36), and the forward side is log p(x) − term at its x.
    b = 0.8 + 0.6 * rng.normal(DRAWS, (1,), below, 0)
    chain = flow.transform
    x, _ = chain.transforms[0].inverse(torch.cat([rows([1.0]), b], -1))
    y, term = chain.forward(x)
    close(y, torch.ones_like(y))
    above = (flow.base.log_prob(x) - term).detach()
    assert abs(above.mean().item() + 1.137) < 0.02


class Largest(StandardNormal):
    """The largest of three standard normals."""

    def draw(self, n, batch=(), seed=None, start=0):
        return rng.normal(n, (*batch, 3), self.anchor, seed, start).max(-1, keepdim=True).values

    def log_prob(self, x):
        return super().log_prob(x) + math.log(3) + 2 * torch.special.log_ndtr(x).sum(-1)


def test_exact_terms():
    x = double([0.3, -0.5, 1.1])
    item_is(Inverse(Abs(1)).inverse(x[:1])[1], -math.log(2))
    item_is(Inverse(Sort(4)).inverse(torch.tensor([2.0, 1.0, 0.0, 5.0]).double())[1], -3.1780538)
    pooled = Flow(Largest(1).double(), Inverse(Max(3)).double())
    item_is(pooled.log_prob(x), -3.5318156)
    assert pooled.kind is Ladj.exact
    iid = Flow(Ordered(3).double(), Inverse(Sort(3)))
    item_is(iid.log_prob(x), StandardNormal(3).double().log_prob(x).item())
    folded = Flow(Positive(1, 0.0, 1.0).double(), Inverse(Abs(1)))
    item_is(folded.log_prob(x[:1]), base(0.0, 1.0).log_prob(x[:1]).item())


def test_log_ndtr_in_both_tails():
    x = double([-300.0, -30.0, -1.0, 0.0, 1.0, 10.0])
    close(log_ndtr(x), torch.special.log_ndtr(x), rtol=1e-13, atol=1e-16)
    assert log_ndtr(torch.tensor([-5.0], dtype=torch.bfloat16)).dtype == torch.float32


def test_gumbels_that_have_the_locations_of_the_base_give_the_mass_at_every_draw():
    location = double([[0.5, -0.3, 1.0]])
    start, surjection = (
        InverseCDF((1, 3), torch.distributions.Gumbel).double(),
        Argmax(1, 3).double(),
    )
    with torch.no_grad():
        start.loc.copy_(location)
        surjection.location.copy_(location)
    found = Flow(Uniform((1, 3)).double(), Chain(start, surjection)).log_prob(
        rows([1.0], 50), seed=0
    )
    close(found, -1.930773, atol=1e-6)


def test_unused_codes_are_second_codes_of_the_first_classes():
    surjection = BinaryArgmax(1, 27).double()
    assert surjection.bits == 5
    x = torch.tensor(
        [[[(1.0 if code >> bit & 1 else -1.0) for bit in range(5)]] for code in range(32)]
    ).double()
    y = surjection(x)[0].flatten().tolist()
    assert y == [*range(27), *range(5)]
    flow = Flow(StandardNormal((1, 5)).double(), surjection)
    for label, codes in (
        (3.0, 2),
        (20.0, 1),
    ):  # signs of a standard normal: every code has mass 1/32
        near(flow.log_prob(rows([label]), seed=0).detach().exp(), codes / 32)


# --- bad input ----------------------------------------------------------------------------------


test_bad_input = refuses(
    (lambda: Dequantize(1).inverse(torch.tensor([0.5])), "whole numbers as data, got 0.5"),
    (lambda: Dequantize(1, levels=256).inverse(torch.tensor([256.0])), "takes 0 to 255, got 256"),
    (lambda: Dequantize(1).inverse(torch.tensor([1])), "must be floating point"),
    (lambda: Argmax(1, 3).inverse(torch.tensor([3.0])), "takes 0 to 2, got 3"),
    (lambda: BinaryArgmax(1, 27).inverse(torch.tensor([-1.0])), "takes 0 to 26"),
    (lambda: Dequantize(2, q=standard(LULinear(2))), r"needs q on \(0, 1\)"),
    (lambda: Slice(2, 2), "needs 0 < keep <"),
    (lambda: Slice((2, 4, 4), 1), "pass a flow over them"),
    (lambda: Slice(3, 1, standard(LULinear(1))), r"distribution of events \(2,\)"),
    (lambda: Slice(3, 1, standard(realnvp(2, context_dim=2))), "build it with context_dim=1"),
    (lambda: Slice(2, 1, Flow(DiagonalNormal(1), LULinear(1))), "base without parameters"),
    (lambda: Sort(2).inverse(torch.tensor([1.0, 0.0])), r"use Inverse\(Sort\)"),
    (lambda: Max(1), "entries of Max: .* at least 2"),
    (lambda: standard(Dequantize(1)).log_prob(torch.zeros(1), samples=0), "at least 1"),
)  # fmt: skip
