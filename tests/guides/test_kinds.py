"""The kind and the side of a KL follow from the maps of the guide, and those of ``elbo`` from the
KL.
"""

import math

import pytest
import torch
from torch import nn

import bayou
from bayou import flows
from bayou.flows import Label, Ladj, Map, Side
from bayou.guides.guide import KL

DOUBLE = torch.float64


class Drop(Map):
    """y = x without its last coordinate, which the way back draws from N(½, 1): log q(y) is ⅛ too
    high in the mean.
    """

    takes_noise = True
    ladj_kind = Ladj.bound
    opposite = Label()

    def __init__(self, dim):
        super().__init__()
        self.event_in, self.event_out = (dim + 1,), (dim,)

    def _forward(self, x, context):
        return x[..., :-1], -0.5 * ((x[..., -1] - 0.5).square() + math.log(2 * math.pi))

    def _inverse(self, y, context, eps):
        x = torch.cat([y, 0.5 + eps], -1)
        return x, -self._forward(x, None)[1]

    def _noise(self, rows, inverse):
        return (rows.normal(1),) if inverse else ()


class Estimated(flows.Transform):
    """y = x, with an unbiased estimate of its ladj 0."""

    takes_noise = True
    ladj_kind = Ladj.estimate

    def __init__(self, dim):
        super().__init__()
        self.event_shape = (dim,)

    def _forward(self, x, context, *noise):
        return x, noise[0]

    def _inverse(self, y, context, *noise):
        return y, noise[0]

    def _noise(self, rows, inverse):
        return (rows.normal(),)


class Below(flows.DiagonalAffine):
    """Declares that log q is a lower bound in the forward direction, as for a density that omits
    preimages.
    """

    ladj_kind = Ladj.bound
    label = Label(Ladj.bound, Side.lower, Side.lower)


def both(dim):
    return flows.Chain(flows.gated_resampled(dim), Below(dim))


CASES = [
    (bayou.JointFlow(), KL.exact, Side.equal),
    (bayou.JointFlow("gated_resampled", {}), KL.bound, Side.upper),
    (bayou.JointFlow(Drop), KL.bound, Side.upper),
    (bayou.JointFlow(Estimated), KL.estimate, Side.equal),
    (bayou.JointFlow(lambda dim: flows.Chain(Drop(dim), Estimated(dim))), KL.estimate, Side.upper),
    (bayou.JointFlow(Below), KL.bound, Side.lower),
    (bayou.JointFlow(both), KL.bound, Side.unknown),
    (bayou.MNF(), KL.bound, Side.upper),
    (bayou.MNF(Estimated), KL.estimate, Side.upper),
    (bayou.MNF(Below), KL.bound, Side.unknown),
    (bayou.MNF(Estimated, auxiliary="paper"), KL.estimate, Side.upper),
    (bayou.NodeFlow(), KL.exact, Side.equal),
    (bayou.NodeFlow(Drop, where="both"), KL.bound, Side.upper),
    (bayou.NodeFlow(Estimated), KL.estimate, Side.equal),
    (bayou.NodeFlow(Below, penalty=True), KL.constant, Side.lower),
]


def rules_of(spec):
    return spec if spec.joint else {"weight": spec, "*": bayou.Delta()}


def guide_of(spec, prior=None):
    torch.manual_seed(0)
    net = nn.Linear(3, 2).to(DOUBLE)
    bnn = bayou.bayesianize(net, rules_of(spec), prior=prior)
    (guide,) = (g for g in bnn.guides if "weight" in g.names)
    return guide


@pytest.mark.parametrize(("spec", "kind", "side"), CASES)
def test_the_kind_and_side_of_a_guide_are_those_of_its_maps(spec, kind, side):
    guide = guide_of(spec)
    assert (guide.kl_kind, guide.kl_side) == (kind, side)


SIDES = {Side.equal: "equal", Side.upper: "lower", Side.lower: "upper", Side.unknown: "unknown"}


@pytest.mark.parametrize(("spec", "kind", "side"), CASES[4:8])
def test_the_elbo_has_the_kind_and_side_of_its_guides(spec, kind, side):
    net = nn.Linear(3, 2).to(DOUBLE)
    data = torch.zeros(4, 3, dtype=DOUBLE), torch.zeros(4, 2, dtype=DOUBLE)
    method = bayou.VI(rules_of(spec), steps=1, batch_size=4)
    posterior = bayou.fit(
        net, data, method=method, likelihood=bayou.Gaussian(1.0), seed=0, progress=False
    )
    found = bayou.elbo(posterior, data, 2, seed=0)
    assert (found.kind, found.side) == (kind.value, SIDES[side])
    assert kind.value in str(found)
    assert ("no evidence bound" in str(found)) == (found.side in ("upper", "unknown"))


def test_a_chain_that_drops_a_coordinate_gives_an_upper_bound_of_the_kl():
    """KL(q ‖ p) + E KL(q(b) ‖ N(½, 1)) = KL(q ‖ p) + ⅛, the Gaussian KL in closed form."""
    guide = guide_of(bayou.JointFlow(Drop, std=0.3), bayou.Normal(1.0))
    variance = (2 * guide.log_std).exp()
    exact = 0.5 * (variance + guide.center.square() - 1 - variance.log()).sum()
    kl = guide.draw(20_000, seed=0).kl.detach()
    error = kl.std() / math.sqrt(len(kl))
    assert abs(kl.mean() - exact.detach() - 0.125) < 5 * error < 0.1
    w = guide.sample(20_000, seed=0)
    log_q = guide.log_prob(w).detach()  # the other side: E ≤
    normal = torch.distributions.Normal(guide.center, guide.log_std.exp())
    gap = log_q - normal.log_prob(guide.join(w)).sum(-1).detach()
    assert abs(gap.mean() + 0.125) < 5 * gap.std() / math.sqrt(len(gap))


@pytest.mark.parametrize("family", [bayou.JointFlow, bayou.NodeFlow])
def test_an_estimate_of_the_ladj_does_not_bias_the_kl(family):
    exact, estimated = (
        guide_of(family(flow)).draw(4000, seed=0).kl.detach() for flow in (None, Estimated)
    )
    gap = estimated - exact
    assert gap.std() > 0.5
    assert abs(gap.mean()) < 5 * gap.std() / math.sqrt(len(gap))


NOISY = [bayou.JointFlow(Estimated), bayou.MNF(Estimated, auxiliary="paper"), bayou.NodeFlow(Drop)]


@pytest.mark.parametrize("spec", NOISY)
def test_draws_of_a_guide_with_noise_in_its_maps_depend_on_their_index_alone(spec):
    guide = guide_of(spec)
    before = torch.get_rng_state()
    whole = guide.draw(6, seed=0)
    parts = [guide.draw(n, seed=0, start=start) for start, n in ((0, 2), (2, 4))]
    assert torch.allclose(torch.cat([part.kl for part in parts]), whole.kl)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (
            lambda dim: flows.LULinear(dim + 1),
            r"flow\(8\) must make a map whose events are \(8,\), got events \(9,\)",
        ),
        (lambda dim: nn.Linear(dim, dim), r"must make a map whose events are \(8,\), got Linear"),
    ],
)
def test_a_flow_of_another_size_is_an_error(flow, message):
    with pytest.raises(ValueError, match=message):
        guide_of(bayou.JointFlow(flow))
