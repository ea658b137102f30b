"""Bijections of integers and discrete bases: known values, permutations, straight-through
gradients.
"""

import math
from decimal import Decimal, localcontext
from itertools import product

import pytest
import torch
from torch import nn

from bayou.core import rng
from bayou.flows import (
    MADE,
    Categorical,
    DiscretizedLogistic,
    Flow,
    Groups,
    IntegerCoupling,
    IntegerIdentity,
    ModuloAutoregressive,
    ModuloCoupling,
    OneHot,
    OneHotMADE,
    fit,
    integer,
    modulo,
    quincunx,
    registry,
)
from bayou.flows.discrete.bijections import cnn, straight_through, units
from tests.conformance.flow_properties import check
from tests.flows.tools import close, double, identical, item_is, perturb, refuses, seeded

EVENT = (1, 4, 4)


def every(classes, dim):
    """All of K^D: (K^D, D)."""
    return double(list(product(range(classes), repeat=dim)))


# --- golden numbers -----------------------------------------------------------------------------


def test_units():
    assert (len(units(27)), len(units(256))) == (18, 128)
    assert all(u * pow(u, -1, 27) % 27 == 1 for u in units(27))


def bits(flow, y):
    """The mean of −log₂ p(y)."""
    return -flow.log_prob(y).mean().item() / math.log(2)


def xor_rows():
    """(.45, .05, .05, .45) on 2×2, as twenty rows."""
    return torch.tensor([[0, 0], [1, 1]] * 9 + [[0, 1], [1, 0]], dtype=torch.float32).repeat(10, 1)


@pytest.mark.parametrize("autoregressive", [False, True])
def test_xor_is_found_by_straight_through_gradients(autoregressive):
    """Independent symbols cost 2 bits; z₂ = x₁ + x₂ mod 2 makes it 1.4689956."""
    y = xor_rows()
    independent, flow = (
        Flow(Categorical(2, 2), OneHot(2, 2)),
        Flow(Categorical(2, 2), modulo(2, 2, layers=1, hidden=(8,), autoregressive=autoregressive)),
    )
    assert bits(independent, y) == pytest.approx(2.0)
    with rng.isolated(0, torch.device("cpu")):
        nn.init.normal_(flow.base.table, std=0.1)  # a base that is even has no gradient
        fit(flow, y, steps=150, lr=0.1, validation=0, progress=False, patience=None)
    assert bits(flow, y) == pytest.approx(1.4689956, abs=2e-4)


def logistic_mass(x, mean, scale):
    """log₂ of a logistic mass with 300 digits."""
    with localcontext() as context:
        context.prec = 300

        def below(edge):
            return 1 / (1 + (-(edge - Decimal(mean)) / Decimal(scale)).exp())

        mass = below(x + Decimal("0.5")) - below(x - Decimal("0.5"))
        return float(mass.ln() / Decimal(2).ln())


@pytest.mark.parametrize("x", [85, -85, 0, 3, -40])
@pytest.mark.parametrize(("mean", "scale"), [("0.12", "1"), ("-3.5", "0.3"), ("1.25", "7")])
def test_the_tails_are_accurate(x, mean, scale):
    base = DiscretizedLogistic(1, mean=float(mean), scale=float(scale)).double()
    found = base.log_prob(double([float(x)])).item() / math.log(2)
    assert found == pytest.approx(logistic_mass(x, mean, scale), rel=1e-12)
    single = DiscretizedLogistic(1, mean=float(mean), scale=float(scale))
    assert single.log_prob(torch.tensor([float(x)])).item() / math.log(2) == pytest.approx(
        found, rel=1e-4
    )


# --- masses -------------------------------------------------------------------------------------


def small_groups():
    return Groups(quincunx((1, 2, 2), 1), [cnn(2, (4,), 6)])


BASES = {
    "logistic": (lambda: DiscretizedLogistic(3, 4, bounded=True), 4),
    "logistics": (lambda: DiscretizedLogistic((3, 1), 4, components=3, bounded=True), 4),
    "logistic, autoregressive": (lambda: DiscretizedLogistic(3, 4, 2, MADE(3, 6, (8,)), bounded=True), 4),
    "logistic, backwards": (lambda: DiscretizedLogistic(3, 4, 1, MADE(3, 3, (8,), [2, 0, 1]), bounded=True), 4),
    "logistic, grouped": (lambda: DiscretizedLogistic((1, 2, 2), 3, 2, small_groups(), bounded=True), 3),
    "classes": (lambda: Categorical(3, 4), 4),
    "classes, autoregressive": (lambda: Categorical(3, 4, OneHotMADE(3, 4, 4, (8,))), 4),
    "classes, backwards": (lambda: Categorical(3, 4, OneHotMADE(3, 4, 4, (8,), [1, 2, 0])), 4),
}  # fmt: skip


@pytest.fixture(params=BASES)
def discrete(request):
    """A base, its number of levels and all events, as symbols."""
    build, levels = BASES[request.param]
    base = perturb(build(), 0.5)
    return base, levels, every(levels, base.symbols)


def test_masses_sum_to_one(discrete):
    base, _, symbols = discrete
    log_p = base.log_prob(base.as_event(symbols))
    item_is(log_p.exp().sum(), 1.0, abs=1e-12)
    identical(base.as_symbols(base.as_event(symbols)), symbols)


def test_draws_have_the_masses(discrete):
    base, levels, symbols = discrete
    n = 20_000
    drawn = base.as_symbols(base.draw(n, seed=0))
    codes = levels ** torch.arange(base.symbols).flip(0).double()
    counts = torch.bincount((drawn @ codes).long(), minlength=len(symbols))
    p = base.log_prob(base.as_event(symbols)).exp()
    chi = ((counts - n * p).square() / (n * p).clamp_min(1e-9))[n * p > 5]
    assert chi.mean().item() < 1 + 5 * math.sqrt(2 / len(chi))
    identical(base.draw(4, seed=0), base.draw(9, seed=0)[:4])


def test_stages_equal_the_whole_pass(discrete):
    base, levels, symbols = discrete
    whole, seen = base.params(base.as_event(symbols)).expand(len(symbols), base.symbols, -1), []

    def choose(members, params):
        close(params, whole[:, members])
        k = symbols[:, members]
        tables = [t.detach().numpy() for t in base.tables(params.flatten(0, -2))]
        below = base.below(k.flatten().long().numpy(), *tables)
        above = base.below(k.flatten().long().numpy() + 1, *tables)
        rows = k if not isinstance(base, Categorical) else base.encode_symbols(k)
        mass = base.log_mass(rows, params).exp().flatten()
        inner = (k.flatten() > 0) & (
            k.flatten() < levels - 1
        )  # the ends have all that is beyond them
        close(torch.from_numpy(above - below)[inner], mass[inner])
        seen.extend(members)
        return k

    identical(base.unroll((len(symbols),), choose), symbols)
    assert sorted(seen) == list(range(base.symbols))


def test_an_unbounded_mixture_sums_to_one():
    base = perturb(DiscretizedLogistic(1, 16, components=3), 0.5)
    x = torch.arange(-600.0, 600.0, dtype=torch.float64).unsqueeze(-1)
    item_is(base.log_prob(x).exp().sum(), 1.0, abs=1e-12)
    assert base.log_prob(torch.full((1,), 20.0).double()).isfinite()
    bounded = DiscretizedLogistic(1, 16, bounded=True)
    assert bounded.log_prob(torch.tensor([16.0])).item() == -math.inf


def test_quincunx_goes_from_coarse_to_fine():
    groups = quincunx(EVENT, 2)[0]
    assert groups.tolist() == [[0, 4, 2, 4], [4, 3, 4, 3], [2, 4, 1, 4], [4, 3, 4, 3]]
    assert quincunx((3, 5, 7), 2).shape == (3, 5, 7)


# --- maps ---------------------------------------------------------------------------------------


class Torn(IntegerIdentity):
    """Whole numbers that come back as others in half precision."""

    def _inverse(self, y, context):
        x, term = super()._inverse(y, context)
        return x + (y.dtype is torch.bfloat16), term


class Between(IntegerIdentity):
    """Numbers that are not whole."""

    def _forward(self, x, context):
        return x + 0.5, x.new_zeros(x.shape[:-1])

    def validate(self, x, context=None, inverse=False):
        """It takes what it gives."""

    def _inverse(self, y, context):
        return y - 0.5, y.new_zeros(y.shape[:-1])


def test_check_knows_whole_numbers():
    report = check(
        OneHot(2, 3), skip=["compile"], base=Categorical(2, 3)
    )  # even masses: no error at all is allowed
    report.raise_if_failed()
    assert "straight-through" in report["gradcheck"].note
    for broken, failed in (
        (Torn(2), ["bfloat16"]),
        (Between(2), ["float64", "float32", "bfloat16"]),
    ):
        report = check(broken, only=["dtype"], base=DiscretizedLogistic(2, 4, scale=1.0))
        assert [row.name for row in report.results if not row.passed] == failed, str(report)


@pytest.mark.parametrize(
    ("classes", "dim", "build"),
    [
        (6, 3, lambda: modulo(3, 6, layers=3, hidden=(16,))),
        (5, 3, lambda: modulo(3, 5, layers=2, hidden=(16,), autoregressive=True)),
        (4, 4, lambda: modulo(4, 4, layers=4, hidden=(16,), scale=False)),
        (27, 2, lambda: modulo(2, 27, layers=2, hidden=(16,))),
    ],
)
def test_all_of_them_are_permuted(classes, dim, build):
    chain = perturb(build(), 0.5)
    y = every(classes, dim)
    x = chain.inverse(y)[0].argmax(-1).double()
    assert len(x.unique(dim=0)) == classes**dim
    assert not torch.equal(x, y)
    identical(chain(torch.nn.functional.one_hot(x.long(), classes).double())[0], y)


def test_numbers_that_go_round_are_permuted():
    chain = perturb(integer(3, 6, layers=3, hidden=(8,), wrap=True), 2.0)
    y = every(6, 3)
    x = chain.inverse(y)[0]
    assert (x.min(), x.max(), len(x.unique(dim=0))) == (0, 5, 6**3)
    assert not torch.equal(x, y)
    identical(chain(x)[0], y)


def test_modulo_is_mu_plus_sigma_x():
    coupling = perturb(ModuloCoupling(2, 27, hidden=(8,)), 2.0)
    y = every(27, 2)
    x = OneHot(2, 27).inverse(y)[0]
    logits = coupling.conditioner(x[:, :1].flatten(-2)).reshape(-1, 27 + 18)
    shift = logits[:, :27].argmax(-1)
    scale = torch.tensor(units(27))[logits[:, 27:].argmax(-1)]
    assert len(scale.unique()) > 2
    expected = (shift + scale * y[:, 1]) % 27
    identical(coupling(x)[0].argmax(-1)[:, 1], expected.long())


def test_integers_move_by_whole_numbers_and_gradients_pass():
    t = torch.tensor([0.4, 1.6, -2.5, 1e6 + 0.3], requires_grad=True)
    y = straight_through(t.round(), t)
    identical(y, t.round())
    y.sum().backward()
    identical(t.grad, torch.ones(4))
    flow = Flow(DiscretizedLogistic(EVENT, 16), integer(EVENT, 16, layers=2, hidden=(8,)))
    (-flow.log_prob(torch.full((3, 1, 4, 4), 9.0)).sum()).backward()
    assert all(p.grad is not None for p in flow.parameters())


def test_an_integer_flow_learns_the_dependence_of_the_halves():
    """x₂ = x₁ + small noise: independent symbols pay for both, a flow for one and the noise."""
    first = torch.randint(0, 64, (2000, 1), generator=seeded(0))
    noise = torch.randint(-1, 2, (2000, 1), generator=seeded(1))
    y = torch.cat([first, (first + noise).clamp(0, 63)], -1).float()
    with rng.isolated(0, torch.device("cpu")):
        flow = Flow(
            DiscretizedLogistic(2, 64, components=3), integer(2, 64, layers=1, hidden=(32,))
        )
        fit(flow, y, steps=150, lr=0.03, progress=False, patience=None)
    assert bits(flow, y) < 6 + 3.2 < 12 - 2


# --- bad input ----------------------------------------------------------------------------------


test_bad_input = refuses(
    (
        lambda: OneHot(2, 27).inverse(torch.tensor([3.0, 27.0])),
        "OneHot takes 0 to 26, got 3 to 27",
    ),
    (
        lambda: modulo(2, 3).inverse(torch.tensor([1.0, 3.0])),
        "takes 0 to 2, got 1 to 3; use more levels",
    ),
    (
        lambda: integer(2, 256).inverse(torch.tensor([1.0, 256.0])),
        "takes 0 to 255, got 1 to 256",
    ),
    (
        lambda: integer(2, 256).inverse(torch.tensor([0.5, 1.0])),
        "whole numbers as data, got 0.5",
    ),
    (lambda: IntegerCoupling(2).inverse(torch.tensor([1, 2])), "must be floating point"),
    (
        lambda: IntegerCoupling(EVENT, "channels"),
        'mask must be "half", "alternate" or 16 booleans',
    ),
    (lambda: IntegerCoupling((4, 4)), r"takes vectors or images \(C, H, W\), got \(4, 4\)"),
    (lambda: IntegerCoupling(1), "at least 2 dimensions, got 1"),
    (lambda: Categorical(2, 1), "classes of Categorical: .* at least 2, got 1"),
    (lambda: Categorical(2, 3, OneHotMADE(2, 3, 4)), "build it with dim=2, params=3"),
    (lambda: DiscretizedLogistic(2, 1), "levels of DiscretizedLogistic: .* at least 2, got 1"),
    (
        lambda: Groups(quincunx(EVENT, 2), [nn.Identity()] * 2),
        "one for each of 5 groups; got 2",
    ),
    (lambda: ModuloAutoregressive(OneHotMADE(2, 3, 3), 3), "build it with params=5"),
    (lambda: integer(2, 0), "number of levels: expected a whole number of at least 1, got 0"),
    (lambda: integer(2, 16, layers=0), "number of layers: expected"),
    (lambda: IntegerCoupling(2, scale=0.0), "must be positive, got 0.0; half of the levels"),
    (lambda: modulo(2, 1), "needs 2 classes and a positive temperature, got 1"),
    (
        lambda: registry("nice"),
        "no kind 'nice' of maps; the kinds are vector, bijective, surjective",
    ),
)
