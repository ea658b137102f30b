"""Maps that are not bijections, or with a random ladj: kinds, sides, noise, and what ``check`` finds.

Closed forms are in ``test_surjections.py`` and ``test_residual.py``.
"""

import copy
import math

import pytest
import torch
from torch import nn

from bayou.flows import (
    Autoencoder,
    Chain,
    Conditional,
    Cost,
    Dequantize,
    DiagonalAffine,
    DiagonalNormal,
    Inverse,
    Label,
    Ladj,
    LULinear,
    Planar,
    Residual,
    Side,
    Slice,
    Transform,
    gated_resampled,
    realnvp,
)
from bayou.flows._registry import autoencoder
from tests.conformance.flow_properties import check
from tests.flows.tools import close, failed, identical, standard

BOUND = Label.of(Ladj.bound)


def roulette(kind=Residual):
    """y = x + B·x, whose ladj is estimated."""
    g = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        g.weight.copy_(torch.tensor([[0.3, -0.5], [0.4, 0.2]]))
    return kind(2, g, 0.7, "roulette")


# --- kinds and sides ----------------------------------------------------------------------------


def test_kinds_and_sides_of_compositions():
    exact, bound, estimate = Label(), BOUND, Label(Ladj.estimate)
    both = bound | estimate
    cases = [
        (realnvp(2), exact, exact),
        (Slice(2, 1), bound, exact),
        (Inverse(Slice(2, 1)), exact, bound),
        (Inverse(Inverse(Slice(2, 1))), bound, exact),
        (autoencoder(2), bound, bound),
        (roulette(), estimate, estimate),
        (gated_resampled(2), bound, bound),
        (Chain(realnvp(2), Slice(2, 1)), bound, exact),
        (Inverse(Chain(realnvp(2), Slice(2, 1))), exact, bound),
        (Chain(roulette(), Slice(2, 1)), both, estimate),
        (Inverse(Chain(roulette(), Slice(2, 1))), estimate, both),
        (Chain(Slice(3, 2), gated_resampled(2)), bound, bound),
        (Chain(Inverse(Slice(3, 2)), LULinear(3)), exact, bound),
        (Conditional(Slice(2, 1), 3), bound, exact),
        (Conditional(LULinear(2), 3), exact, exact),
    ]
    for map_, label, opposite in cases:
        labels = (map_.label, map_.opposite, map_.ladj_kind)
        assert labels == (label, opposite, label.kind), map_
    assert (bound.forward, bound.inverse) == (Side.upper, Side.lower)
    assert (both.kind, both.forward, both.inverse) == (Ladj.estimate, Side.upper, Side.lower)
    assert Side.lower | Side.upper is Side.unknown
    assert [side.opposite for side in Side] == [Side.upper, Side.lower]
    assert Side.equal.opposite is Side.equal


def test_the_events_of_a_chain_are_those_of_its_ends():
    chain = Chain(realnvp(5), Slice(5, 3), Chain(LULinear(3), autoencoder(3)), Planar(4))
    assert (chain.event_in, chain.event_out) == ((5,), (4,))
    assert len(chain.transforms) == 4 + 1 + 2 + 1
    assert (chain.forward_kind, chain.inverse_kind) == (Cost.analytic, Cost.iterative)
    with pytest.raises(ValueError, match=r"link 5 returns \(3,\), link 6 takes \(2,\)"):
        Chain(realnvp(5), Slice(5, 3), LULinear(2))
    with pytest.raises(ValueError, match=r"MapChain input has shape \(4, 3\) .* \(..., 2\)"):
        Chain(realnvp(3), Slice(3, 2)).inverse(torch.zeros(4, 3))


def test_compositions_of_transforms_are_transforms():
    for map_ in (
        Chain(LULinear(2), realnvp(2)),
        Inverse(LULinear(2)),
        Conditional(LULinear(2), 3),
        roulette(),
    ):
        assert isinstance(map_, Transform)
        assert map_.event_in == map_.event_out == map_.event_shape == (2,)
    drop = Slice(2, 1)
    named = Conditional(transform=drop, context_dim=3)
    for general in (Chain(LULinear(2), drop), Inverse(drop), Conditional(drop, 3), named):
        assert not isinstance(general, Transform)
        again = copy.deepcopy(general)
        assert type(again) is type(general)
        assert again.state_dict().keys() == general.state_dict().keys()


# --- noise --------------------------------------------------------------------------------------


def test_links_directions_and_base_have_noise_of_their_own():
    chain = Chain(Slice(3, 2), Slice(2, 1))
    x, _ = chain.inverse(torch.zeros(50, 1), seed=0)
    assert not torch.isclose(x[:, 1], x[:, 2]).any()
    zeros = torch.zeros(50, 2)
    q = standard(realnvp(2, layers=1, context_dim=2))
    square = Autoencoder(q, q)
    (forward,) = square.noise(zeros, seed=0)
    (inverse,) = square.noise(zeros, inverse=True, seed=0)
    assert not torch.isclose(forward, inverse).any()
    augmented = standard(Inverse(Slice(2, 1)))
    assert not torch.isclose(*augmented.sample(50, seed=0).unbind(-1)).any()
    assert LULinear(2).noise(zeros, seed=0) == ()


def test_noise_from_outside_serves_compiled_code():
    chain = Chain(LULinear(3), Slice(3, 2)).double()
    y = torch.ones(4, 2).double()
    noise = chain.noise(y, inverse=True, seed=0)
    expected = chain.inverse(y, noise=noise)
    assert all(torch.equal(a, b) for a, b in zip(chain.inverse(y, seed=0), expected, strict=True))
    step = torch.compile(
        lambda y, noise: chain.inverse(y, noise=noise), fullgraph=True, backend="eager"
    )
    compiled = step(y, noise)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(compiled, expected, strict=True))
    # from the global stream
    draw = torch.compile(lambda y: chain.inverse(y), fullgraph=True, backend="eager")
    assert draw(y)[0].shape == (4, 3)


def test_a_resampled_mask_follows_the_seed():
    flow = gated_resampled(6).train()
    masks = []
    for seed in (0, 1, 0):
        flow(torch.zeros(2, 6), seed=seed)
        masks.append(torch.stack([t.mask for t in flow.transforms]))
    identical(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(*masks[0])


@pytest.mark.parametrize("context", [None, torch.ones(4, 3)])
def test_draws_and_densities_of_a_flow_do_not_depend_on_chunks(context):
    transform = Chain(Slice(3, 2), autoencoder(2))
    if context is not None:
        transform = Conditional(transform, 3)
    flow = standard(transform)
    y, log_q = flow.sample_and_log_prob(10, context, seed=0)
    identical(flow.sample(10, context, seed=0), y)
    chunks = [
        flow.sample_and_log_prob(n, context, seed=0, start=start) for start, n in ((0, 4), (4, 6))
    ]
    close(torch.cat([chunk[0] for chunk in chunks]), y, atol=1e-5)
    close(torch.cat([chunk[1] for chunk in chunks]), log_q, atol=1e-5)
    contexts = None if context is None else context.expand(10, 4, 3)[3:]
    start = 3 if context is None else 12
    log_prob = flow.log_prob(y, context, seed=0)
    close(flow.log_prob(y[3:], contexts, seed=0, start=start), log_prob[3:], atol=1e-5)


def test_a_flow_needs_an_event_of_known_size():
    drop = Slice(2, 1)
    drop.event_out = (None,)
    with pytest.raises(ValueError, match="is not known; build its maps with sizes"):
        standard(drop)


# --- check --------------------------------------------------------------------------------------


def faulty(parent, **changes):
    """A subclass with faults.

    Args:
        parent: a map.
        changes: by the name of a method, a function from the map and the results of the method to
            other ones.
    """

    def wrap(method, change):
        return lambda self, *inputs: change(self, *method(self, *inputs))

    methods = {name: wrap(getattr(parent, name), change) for name, change in changes.items()}
    return type("Faulty", (parent,), methods)


def with_global_noise(map_, noise):
    return (torch.randn_like(noise),)


def with_noise_of_the_first_row(map_, noise):
    return (noise.flatten(0, -2)[:1].expand(noise.shape) if noise.ndim > 1 else noise,)


def with_gradients_of_the_first_row(map_, value, ladj):
    """As in two public implementations."""
    if ladj.requires_grad:
        ladj.register_hook(
            lambda slope: slope[:1, :1].expand_as(slope) if slope.ndim == 2 else slope
        )
    return value, ladj


# log 2 is missing from both terms, so that the round trip agrees.
LostConstant = faulty(
    Slice,
    _forward=lambda map_, y, term: (y, term - math.log(2)),
    _inverse=lambda map_, x, term: (x, term + math.log(2)),
)
LostForward = faulty(Slice, _forward=lambda map_, y, term: (y, term - 0.2))
# Draws from a wider q than the one of its term.
OtherWidth = faulty(Slice, _inverse_noise=lambda map_, noise: (1.5 * noise,))
OneNoise = faulty(Slice, _inverse_noise=with_noise_of_the_first_row)
GlobalNoise = faulty(Slice, _inverse_noise=with_global_noise)
# Only draws show it: there is no round trip.
LostForwardBothRandom = faulty(Autoencoder, _forward=lambda map_, y, term: (y, term - 0.1))
# Two terms of the series for every row: biased.
Truncated = faulty(
    Residual,
    _noise=lambda map_, probe, terms: (probe, torch.full_like(terms, map_.lipschitz**1.5)),
)
DetachedTerm = faulty(Residual, _value_and_ladj=lambda map_, value, ladj: (value, ladj.detach()))
FirstRow = faulty(Residual, _value_and_ladj=with_gradients_of_the_first_row)


class Shifted(Slice):
    """The inverse is not one."""

    def _inverse(self, y, context, noise):
        return super()._inverse(y + 1e-6, context, noise)


class Mislabeled(Slice):
    """The random inverse is labeled as exact."""

    ladj_kind = Ladj.exact
    opposite = BOUND


class TooNoisy(Residual):
    """Unbiased, and of no use: 4,096 draws do not tell."""

    def _value_and_ladj(self, g, x, probe, u):
        value, ladj = super()._value_and_ladj(g, x, probe, u)
        return value, ladj + 10 * probe[..., 0]


def lost_forward_both_random():
    parts = autoencoder(2)
    return LostForwardBothRandom(parts.decoder, parts.encoder)


LADJ = {"ladj forward", "ladj inverse"}
LADJ_GRADIENT = {"ladj forward gradient", "ladj inverse gradient"}
BROKEN = [
    (lambda: LostConstant(2, 1), "ladj", LADJ),
    (lambda: LostForward(2, 1), "ladj", {"ladj opposite", "ladj forward"}),
    (lambda: OtherWidth(2, 1), "ladj", LADJ),
    (lambda: Shifted(2, 1), "inverse", {"forward of inverse"}),
    (lambda: Mislabeled(2, 1), "inverse", {"inverse of forward"}),
    (lambda: OneNoise(2, 1), "batch", {"batch inverse rows"}),
    (lambda: GlobalNoise(2, 1), "batch", {"batch inverse rows", "batch inverse shapes"}),
    (lost_forward_both_random, "ladj", {"ladj forward"}),
    (lambda: roulette(Truncated), "ladj", LADJ | LADJ_GRADIENT),
    (lambda: roulette(DetachedTerm), "ladj", LADJ_GRADIENT),
    (lambda: roulette(FirstRow), "ladj", LADJ_GRADIENT),
    (lambda: roulette(TooNoisy), "ladj", {"ladj forward error", "ladj inverse error"}),
]


@pytest.mark.parametrize(("build", "name", "rows"), BROKEN)
def test_each_fault_fails_its_own_check(build, name, rows):
    report = check(build(), only=[name], perturb=0.0)
    assert failed(report) == rows, str(report)


def test_a_map_on_part_of_its_domain_is_checked_from_a_base_of_its_own():
    class Integers(DiagonalNormal):
        """⌊N(0, 2²)⌋, whose mass is a difference of normal CDFs."""

        def draw(self, *args, **options):
            return super().draw(*args, **options).floor()

        def log_prob(self, x):
            normal = torch.distributions.Normal(self.mean, self.log_std.exp())
            return (normal.cdf(x + 1) - normal.cdf(x)).log().sum(-1)

    map_ = Inverse(Dequantize(2))
    report = check(map_, only=["inverse", "ladj", "batch"], base=Integers(2, 0.0, 2.0))
    report.raise_if_failed()


def test_too_many_dimensions_for_draws_are_reported():
    report = check(Chain(DiagonalAffine(80), Slice(80, 78)), only=["ladj"])
    assert "too few draws for 80 dimensions" in report["ladj inverse"].note
