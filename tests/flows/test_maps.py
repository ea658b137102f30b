"""Maps that are not bijections, or with a random ladj: kinds, sides, noise, and their ``check``.

The maps are those of Nielsen et al. 2020 (SurVAE) and Chen et al. 2019 (residual flows), for cases
with a closed form.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from bayou import flows
from bayou.flows import (
    Chain,
    Conditional,
    Cost,
    DiagonalAffine,
    DiagonalNormal,
    Flow,
    Inverse,
    Label,
    Ladj,
    LULinear,
    Map,
    Planar,
    Rows,
    Side,
    StandardNormal,
    Transform,
    gated_resampled,
    realnvp,
)
from bayou.flows.checking.report import Report
from tests.conformance.flow_properties import check
from tests.conformance.training import check_trained

Pair = tuple[Tensor, Tensor]
BOUND = Label.of(Ladj.bound)


def normal_log_prob(x: Tensor, mean: Any, std: Any) -> Tensor:
    return torch.distributions.Normal(mean, std, validate_args=False).log_prob(x).sum(-1)


class Floor(Map):
    """y = ⌊x⌋; back, x = y + u with u uniform: V = 0."""

    takes_noise = True
    ladj_kind = Ladj.bound
    opposite = Label()

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.event_in = self.event_out = (dim,)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        return x.floor(), x.new_zeros(x.shape[:-1])

    def _inverse(self, y: Tensor, context: Tensor | None, u: Tensor) -> Pair:
        return y + u, y.new_zeros(y.shape[:-1])

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return (rows.uniform(*self.event_in),) if inverse else ()


class Drop(Map):
    """y = the first coordinates of x; back, the others are drawn from N(mean, std²): V = −log q."""

    takes_noise = True
    ladj_kind = Ladj.bound
    opposite = Label()

    def __init__(
        self, kept: int = 1, dropped: int = 1, mean: float = 0.0, std: float = 1.0
    ) -> None:
        super().__init__()
        self.event_in, self.event_out = (kept + dropped,), (kept,)
        self.mean = nn.Parameter(torch.full((dropped,), mean))
        self.log_std = nn.Parameter(torch.full((dropped,), math.log(std)))

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        y, rest = x.split([self.event_out[0], len(self.mean)], -1)  # type: ignore[list-item]
        return y, normal_log_prob(rest, self.mean, self.log_std.exp())

    def _inverse(self, y: Tensor, context: Tensor | None, eps: Tensor) -> Pair:
        rest = self.mean + self.log_std.exp() * eps
        return torch.cat([y, rest], -1), -normal_log_prob(rest, self.mean, self.log_std.exp())

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return (rows.normal(len(self.mean)),) if inverse else ()


class Decoder(Map):
    """y ~ N(W·x + b, s²); back, x ~ N(A·y + c, S): V = log p(y|x) − log r(x|y), exact where r is
    the posterior.
    """

    takes_noise = True
    ladj_kind = Ladj.bound

    def __init__(self, weight: Tensor, bias: Tensor, variance: float, off: float = 0.0) -> None:
        super().__init__()
        self.event_in, self.event_out = (weight.shape[1],), (weight.shape[0],)
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.std = math.sqrt(variance)
        precision = torch.eye(weight.shape[1]).to(weight) + weight.T @ weight / variance
        self.register_buffer("scale", torch.linalg.cholesky(torch.linalg.inv(precision)))
        self.register_buffer("gain", torch.linalg.solve(precision, weight.T) / variance)
        self.register_buffer("shift", -self.gain @ bias + off)

    def term(self, x: Tensor, y: Tensor) -> Tensor:
        likelihood = normal_log_prob(y, x @ self.weight.mT + self.bias, self.std)
        eps = torch.linalg.solve_triangular(
            self.scale, (x - y @ self.gain.mT - self.shift).unsqueeze(-1), upper=False
        )
        posterior = normal_log_prob(eps.squeeze(-1), 0.0, 1.0) - self.scale.diagonal().log().sum()
        return likelihood - posterior

    def _forward(self, x: Tensor, context: Tensor | None, eps: Tensor) -> Pair:
        y = x @ self.weight.mT + self.bias + self.std * eps
        return y, -self.term(x, y)

    def _inverse(self, y: Tensor, context: Tensor | None, eps: Tensor) -> Pair:
        x = y @ self.gain.mT + self.shift + eps @ self.scale.mT
        return x, self.term(x, y)

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return (rows.normal(*(self.event_in if inverse else self.event_out)),)  # type: ignore[arg-type]


def ppca(off: float = 0.0) -> Decoder:
    weight = torch.tensor([[1.0, 0.5], [-0.3, 0.8], [0.2, -1.0]], dtype=torch.float64)
    return Decoder(weight, torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64), 0.25, off)


class Residual(Transform):
    """y = x + B·x; log|det(I + B)| = Σ_k (−1)^(k+1) tr(B^k)/k by Russian roulette, one probe for
    each row.
    """

    takes_noise = True
    ladj_kind = Ladj.estimate
    stop = 0.36  # of the roulette: 1 − ‖B‖
    terms = 20

    def __init__(self) -> None:
        super().__init__()
        self.event_shape = (2,)
        self.b = nn.Parameter(torch.tensor([[0.3, -0.5], [0.4, 0.2]]))

    def estimate(self, probe: Tensor, u: Tensor) -> Tensor:
        """Σ_k (−1)^(k+1)/k · vᵀ·B^k·v · 1{N ≥ k}/P(N ≥ k), N geometric."""
        count = 1 + (u.log() / math.log(1 - self.stop)).floor()
        total, v = torch.zeros_like(u), probe
        for k in range(1, self.terms + 1):
            v = v @ self.b.mT
            weight = torch.where(
                count >= k, (1 - self.stop) ** (1 - k) * (-1) ** (k + 1) / k, 0.0
            ).to(v)
            total = total + weight * (probe * v).sum(-1)
        return total

    def _forward(self, x: Tensor, context: Tensor | None, *noise: Tensor) -> Pair:
        return x + x @ self.b.mT, self.estimate(*noise)

    def _inverse(self, y: Tensor, context: Tensor | None, *noise: Tensor) -> Pair:
        a, b, c, d = self.b.flatten()
        adjugate = torch.stack([1 + d, -b, -c, 1 + a]).reshape(2, 2)
        return y @ adjugate.mT / ((1 + a) * (1 + d) - b * c), -self.estimate(*noise)

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        signs = rows.fold("probe").uniform(2) - 0.5
        return signs.sign(), 1 - rows.fold("roulette").uniform()


def mean_and_error(draws: Tensor) -> tuple[float, float]:
    return draws.mean().item(), draws.std().item() / math.sqrt(len(draws))


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("std", "mass", "bound"), [(0.5, -0.3817151, -0.3924580), (0.25, -0.0465679, -0.1993108)]
)
def test_uniform_dequantization(std: float, mass: float, bound: float) -> None:
    """E[log p(y + u)] is the bound and log E[p(y + u)] the mass of N(½, σ²) on [0, 1)."""
    flow = Flow(DiagonalNormal(1, 0.5, std), Floor(1)).double()
    n = 20_000
    draws = flow.log_prob(torch.zeros(n, 1).double(), seed=0).detach()
    mean, error = mean_and_error(draws)
    assert abs(mean - bound) < 5 * error < 0.05
    mean, error = mean_and_error(draws.exp())
    assert abs(mean - math.exp(mass)) < 5 * error < 0.02
    y = flow.sample(n, seed=1)
    assert abs((y == 0).double().mean() - math.exp(mass)) < 5 * math.sqrt(0.25 / n)


def correlated(drop: Drop) -> Flow:
    """(y, b) of unit variances with correlation .8, of which b is dropped: y ~ N(0, 1)."""
    linear = LULinear(2)
    with torch.no_grad():
        linear.weight.lower[1, 0] = 0.8
        linear.weight.log_diagonal[1] = math.log(0.6)
    return Flow(StandardNormal(2), Chain(linear, drop)).double()


def test_augmentation_is_bounded_from_both_sides() -> None:
    """inverse side ≤ log p(y) ≤ forward side, at y = 1 with log p(y) = −1.4189385."""
    one = torch.ones(40_000, 1).double()
    mean, error = mean_and_error(correlated(Drop()).log_prob(one, seed=0).detach())
    assert abs(mean + 2.6858907) < 5 * error < 0.1
    flow = correlated(Drop(mean=0.3, std=0.9))
    below, error = mean_and_error(flow.log_prob(one, seed=0).detach())
    assert abs(below + 1.985) < 5 * error + 5e-4
    # The forward side at y = 1: b given y is N(.8, .36) there, and log p(x) − term is what forward
    # says at that x.
    b = 0.8 + 0.6 * torch.randn(
        40_000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    x, _ = flow.transform.transforms[0].inverse(torch.cat([one, b], -1))  # type: ignore[union-attr, index]
    y, term = flow.transform.forward(x)
    assert torch.allclose(y, one)
    above, error = mean_and_error((flow.base.log_prob(x) - term).detach())
    assert abs(above + 1.137) < 5 * error + 5e-4
    assert below < -1.4189385 < above
    assert flow.kind is Ladj.bound
    assert (flow.label.forward, flow.label.inverse) == (Side.upper, Side.lower)


def test_an_exact_posterior_gives_the_density_at_every_draw() -> None:
    flow = Flow(StandardNormal(2), ppca()).double()
    y = torch.tensor([0.7, -0.4, 1.2], dtype=torch.float64).expand(100, 3)
    assert torch.allclose(
        flow.log_prob(y, seed=0), torch.tensor(-3.4082298, dtype=torch.float64), atol=1e-7
    )
    y, forward = flow.sample_and_log_prob(100, seed=0)
    assert torch.allclose(forward, flow.log_prob(y, seed=1), atol=1e-12)
    loose = Flow(StandardNormal(2), ppca(off=0.3)).double()
    y, forward = loose.sample_and_log_prob(20_000, seed=0)
    inverse, exact = loose.log_prob(y, seed=1), flow.log_prob(y)
    for draws, side in ((forward - exact, 1), (inverse - exact, -1)):
        mean, error = mean_and_error(draws.detach())
        assert side * mean > 5 * error


def test_russian_roulette_has_the_mean_and_the_gradient_of_the_log_determinant() -> None:
    residual = Residual().double()
    draws = residual(torch.zeros(40_000, 2).double(), seed=0)[1]
    mean, error = mean_and_error(draws.detach())
    assert abs(mean - 0.5653138) < 5 * error < 0.01
    parts = draws.split(1000)
    rows = torch.stack(
        [torch.autograd.grad(part.mean(), residual.b, retain_graph=True)[0] for part in parts]
    )
    expected = torch.tensor([[0.681818, -0.227273], [0.284091, 0.738636]], dtype=torch.float64)
    assert ((rows.mean(0) - expected).abs() < 5 * rows.std(0) / math.sqrt(len(rows))).all()


# --- kinds and sides -------------------------------------------------------------------------------------------------


def test_kinds_and_sides_of_compositions() -> None:
    exact, bound, estimate = Label(), BOUND, Label(Ladj.estimate)
    assert (bound.forward, bound.inverse) == (Side.upper, Side.lower)
    cases: list[tuple[Map, Label, Label]] = [
        (realnvp(2), exact, exact),
        (Drop(), bound, exact),
        (Inverse(Drop()), exact, bound),
        (Inverse(Inverse(Drop())), bound, exact),
        (ppca(), bound, bound),
        (Residual(), estimate, estimate),
        (gated_resampled(2), bound, bound),
        (Chain(realnvp(2), Drop()), bound, exact),
        (Inverse(Chain(realnvp(2), Drop())), exact, bound),
        (Chain(Residual(), Drop()), bound | estimate, estimate),
        (Inverse(Chain(Residual(), Drop())), estimate, bound | estimate),
        (Chain(Drop(2, 1), gated_resampled(2)), bound, bound),
        (Chain(Inverse(Drop(2, 1)), LULinear(3)), exact, bound),
        (Conditional(Drop(), 3), bound, exact),
        (Conditional(LULinear(2), 3), exact, exact),
    ]
    for found, label, opposite in cases:
        assert (found.label, found.opposite, found.ladj_kind) == (label, opposite, label.kind), (
            found
        )
    both = bound | estimate
    assert (both.kind, both.forward, both.inverse) == (Ladj.estimate, Side.upper, Side.lower)
    assert Side.lower | Side.upper is Side.unknown
    assert [side.opposite for side in Side] == [Side.upper, Side.lower]
    assert Side.equal.opposite is Side.equal


def test_maps_join_out_to_in() -> None:
    chain = Chain(realnvp(5), Drop(3, 2), Chain(LULinear(3), ppca_like(3, 4)), Planar(4))
    assert (chain.event_in, chain.event_out) == ((5,), (4,))
    assert not isinstance(chain, Transform)
    assert len(chain.transforms) == 4 + 1 + 2 + 1
    assert (chain.forward_kind, chain.inverse_kind) == (Cost.analytic, Cost.iterative)
    with pytest.raises(
        ValueError, match=r"do not match: link 5 returns \(3,\), link 6 takes \(2,\)"
    ):
        Chain(realnvp(5), Drop(3, 2), LULinear(2))


def ppca_like(inputs: int, outputs: int) -> Decoder:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    return Decoder(weight, torch.zeros(outputs), 0.5)


def test_what_is_made_of_transforms_is_a_transform() -> None:
    for made in (
        Chain(LULinear(2), realnvp(2)),
        Inverse(LULinear(2)),
        Conditional(LULinear(2), 3),
        Residual(),
    ):
        assert isinstance(made, Transform)
        assert made.event_in == made.event_out == made.event_shape == (2,)
    named = Conditional(transform=Drop(), context_dim=3)
    for general in (Chain(LULinear(2), Drop()), Inverse(Drop()), Conditional(Drop(), 3), named):
        assert not isinstance(general, Transform)
        again = copy.deepcopy(general)
        assert type(again) is type(general)
        assert again.state_dict().keys() == general.state_dict().keys()


# --- noise -----------------------------------------------------------------------------------------------------------

NOISY: dict[str, Callable[[], Map]] = {
    "floor": lambda: Floor(2),
    "drop": lambda: Drop(2, 1),
    "slice": lambda: Inverse(Drop(2, 1)),
    "decoder": ppca,
    "residual": Residual,
    "chain": lambda: Chain(Inverse(Drop(2, 1)), LULinear(3), ppca_like(3, 3), Drop(2, 1)),
    "conditional": lambda: Conditional(Chain(ppca_like(2, 3), Drop(2, 1)), 3),
}
noisy = pytest.mark.parametrize("name", NOISY)


def context_for(found: Map, n: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(n, 3, generator=generator, dtype=torch.float64) if found.context_dim else None
    )


@noisy
def test_noise_is_by_row_and_seed(name: str) -> None:
    found = NOISY[name]().double()
    generator = torch.Generator().manual_seed(1)
    before = torch.get_rng_state()
    for direction, event in ((found.forward, found.event_in), (found.inverse, found.event_out)):
        x = torch.randn(10, *event, generator=generator, dtype=torch.float64)  # type: ignore[arg-type]
        context = context_for(found, 10)
        whole = direction(x, context, seed=5)
        assert all(
            torch.equal(a, b) for a, b in zip(whole, direction(x, context, seed=5), strict=True)
        )
        for part in (slice(0, 3), slice(3, 4), slice(4, 10)):
            cut = direction(
                x[part], None if context is None else context[part], seed=5, start=part.start
            )
            assert all(
                torch.allclose(a, b[part], atol=1e-12) for a, b in zip(cut, whole, strict=True)
            )
        other = x.clone()
        other[1:] = 0.3
        moved = direction(other, context, seed=5)
        assert all(
            torch.allclose(a[0], b[0], atol=1e-12) for a, b in zip(moved, whole, strict=True)
        )
    assert torch.equal(before, torch.get_rng_state())
    changed = [
        not all(torch.equal(a, b) for a, b in zip(f(x, c, seed=5), f(x, c, seed=6), strict=True))
        for f, x, c in (
            (found.forward, torch.ones(3, *found.event_in).double(), context_for(found, 3)),  # type: ignore[arg-type]
            (found.inverse, torch.ones(3, *found.event_out).double(), context_for(found, 3)),  # type: ignore[arg-type]
        )
    ]
    assert any(changed)


def test_links_directions_and_base_have_noise_of_their_own() -> None:
    chain = Chain(Drop(2, 1), Drop(1, 1))
    x, _ = chain.inverse(torch.zeros(50, 1), seed=0)
    assert not torch.isclose(x[:, 1], x[:, 2]).any()
    decoder = ppca_like(2, 2)
    zeros = torch.zeros(50, 2)
    (there,), (back,) = decoder.noise(zeros, seed=0), decoder.noise(zeros, inverse=True, seed=0)
    assert not torch.isclose(there, back).any()
    slice_ = Inverse(Drop(1, 1))
    assert not torch.isclose(*Flow(StandardNormal(1), slice_).sample(50, seed=0).unbind(-1)).any()
    assert LULinear(2).noise(zeros, seed=0) == ()


def test_noise_from_outside_compiles_maps_and_repeats() -> None:
    chain = Chain(LULinear(3), Drop(2, 1)).double()
    y = torch.ones(4, 2).double()
    noise = chain.noise(y, inverse=True, seed=0)
    expected = chain.inverse(y, noise=noise)
    assert all(torch.equal(a, b) for a, b in zip(chain.inverse(y, seed=0), expected, strict=True))
    mapped = vmap(lambda y, noise: chain.inverse(y, noise=noise))(y, noise)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(mapped, expected, strict=True))
    step = torch.compile(
        lambda y, noise: chain.inverse(y, noise=noise), fullgraph=True, backend="eager"
    )
    assert all(
        torch.allclose(a, b, atol=1e-12) for a, b in zip(step(y, noise), expected, strict=True)
    )
    drawn = torch.compile(lambda y: chain.inverse(y), fullgraph=True, backend="eager")(
        y
    )  # the global stream
    assert drawn[0].shape == (4, 3)


def test_a_resampled_mask_follows_the_seed() -> None:
    flow = gated_resampled(6).train()
    masks = []
    for seed in (0, 1, 0):
        flow(torch.zeros(2, 6), seed=seed)
        masks.append([t.mask.clone() for t in flow.transforms])
    assert all(torch.equal(a, b) for a, b in zip(masks[0], masks[2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(masks[0], masks[1], strict=True))
    assert not torch.equal(*masks[0])


# --- flows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [(), 3, (2, 3), 0])
@pytest.mark.parametrize("batch", [None, (), (4,)])
def test_flows_through_maps_have_the_event_of_the_data(
    n: Any, batch: tuple[int, ...] | None
) -> None:
    found: Map = Chain(Drop(2, 3), ppca_like(2, 4))
    found = found if batch is None else Conditional(found, 3)
    flow = Flow(StandardNormal(5), found)
    context = None if batch is None else torch.zeros(*batch, 3)
    expected = ((n,) if isinstance(n, int) else n) + (batch or ())
    y, log_prob = flow.sample_and_log_prob(n, context, seed=0)
    assert flow.event_shape == (4,)
    assert y.shape == flow.sample(n, context, seed=0).shape == (*expected, 4)
    assert torch.equal(flow.sample(n, context, seed=0), y.detach())
    assert log_prob.shape == flow.log_prob(y, context, seed=0).shape == expected
    assert flow.kind is Ladj.bound


@pytest.mark.parametrize("context", [None, torch.ones(4, 3)])
def test_draws_and_scores_do_not_depend_on_chunks(context: Tensor | None) -> None:
    found: Map = Chain(Drop(2, 3), ppca_like(2, 4))
    flow = Flow(StandardNormal(5), found if context is None else Conditional(found, 3)).double()
    context = None if context is None else context.double()
    y, log_q = flow.sample_and_log_prob(10, context, seed=0)
    parts = [
        flow.sample_and_log_prob(n, context, seed=0, start=start) for start, n in ((0, 4), (4, 6))
    ]
    assert torch.allclose(torch.cat([part[0] for part in parts]), y, atol=1e-12)
    assert torch.allclose(torch.cat([part[1] for part in parts]), log_q, atol=1e-12)
    rows, contexts = (
        y.flatten(0, -2),
        None if context is None else context.expand(10, 4, 3).flatten(0, 1),
    )
    score = flow.log_prob(rows, contexts, seed=0)
    cut = flow.log_prob(rows[3:], None if contexts is None else contexts[3:], seed=0, start=3)
    assert torch.allclose(cut, score[3:], atol=1e-12)


def test_flows_need_events_that_fit_and_are_known() -> None:
    with pytest.raises(ValueError, match=r"base has events \(2,\) but the transform takes \(3,\)"):
        Flow(StandardNormal(2), Drop(2, 1))
    drop = Drop(1, 1)
    drop.event_out = (None,)
    with pytest.raises(ValueError, match="is not known; build its maps with sizes"):
        Flow(StandardNormal(2), drop)
    with pytest.raises(
        ValueError,
        match=r"MapChain input has shape \(4, 3\) but the last 1 axes must be \(..., 2\)",
    ):
        Chain(realnvp(3), Drop(2, 1)).inverse(torch.zeros(4, 3))


# --- check -----------------------------------------------------------------------------------------------------------


@noisy
def test_correct_maps_pass(name: str) -> None:
    skip = [
        "compile",
        *(["dtype"] if name in ("decoder", "chain", "conditional") else []),
    ]  # no solver in bfloat16
    report = check_trained(NOISY[name](), skip=skip, train_steps=0 if name == "floor" else 3)
    report.raise_if_failed()
    if name == "residual":
        assert report["ladj forward error"].value < 0.01  # type: ignore[operator]
        assert report["ladj inverse gradient"].passed
    else:
        assert report["ladj inverse"].value is not None
        assert report["ladj forward"].value is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "build", [lambda: Chain(LULinear(3), Drop(2, 1)), lambda: Conditional(Drop(), 3)]
)
def test_maps_compile_to_one_graph(build: Callable[[], Map]) -> None:
    check(build(), only=["compile"], compile_backend="aot_eager").raise_if_failed()


def test_a_bound_transform_is_compared_with_draws() -> None:
    report = check_trained(gated_resampled(2), only=["ladj", "density"], train_steps=5)
    report.raise_if_failed()
    assert report["ladj inverse"].value is not None
    assert "not exact (bound)" in report["density"].note


class LostConstant(Drop):
    """log 2 is missing, both ways alike, so that the round trip agrees."""

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        y, term = super()._forward(x, context)
        return y, term - math.log(2)

    def _inverse(self, y: Tensor, context: Tensor | None, eps: Tensor) -> Pair:
        x, term = super()._inverse(y, context, eps)
        return x, term + math.log(2)


class LostForward(Drop):
    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        y, term = super()._forward(x, context)
        return y, term - 0.2


class OtherWidth(Drop):
    """Draws from a wider q than the one it scores."""

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return tuple(1.5 * part for part in super()._noise(rows, inverse))


class Shifted(Drop):
    """No way home."""

    def _inverse(self, y: Tensor, context: Tensor | None, eps: Tensor) -> Pair:
        return super()._inverse(y + 1e-6, context, eps)


class Mislabeled(Drop):
    """The way back is random, and it says that it is exact."""

    ladj_kind = Ladj.exact
    opposite = BOUND


class OneNoise(Drop):
    """All rows of a batch get the noise of its first."""

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        parts = super()._noise(rows, inverse)
        return tuple(
            part.flatten(0, -2)[:1].expand(part.shape) if part.ndim > 1 else part for part in parts
        )


class GlobalNoise(Drop):
    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return (torch.randn(*rows.batch, 1).to(rows.like),) if inverse else ()


class LostForwardBothRandom(Decoder):
    """Nothing but draws can tell: there is no round trip."""

    def _forward(self, x: Tensor, context: Tensor | None, eps: Tensor) -> Pair:
        y, term = super()._forward(x, context, eps)
        return y, term - 0.1


class Truncated(Residual):
    """Two terms of the series, without a roulette: biased."""

    stop, terms = 1e-9, 2


class DetachedTerm(Residual):
    def estimate(self, probe: Tensor, u: Tensor) -> Tensor:
        return super().estimate(probe, u).detach()


class FirstRow(Residual):
    """The gradient of every row is weighted with that of the first, as in two public
    implementations.
    """

    def estimate(self, probe: Tensor, u: Tensor) -> Tensor:
        term = super().estimate(probe, u)
        if term.requires_grad:
            term.register_hook(
                lambda slope: slope[:1, :1].expand_as(slope) if slope.ndim == 2 else slope
            )
        return term


class TooNoisy(Residual):
    """Unbiased, and of no use: 4,096 draws cannot tell."""

    def estimate(self, probe: Tensor, u: Tensor) -> Tensor:
        return super().estimate(probe, u) + 10 * probe[..., 0]


BROKEN: list[tuple[Callable[[], Map], str, set[str]]] = [
    (LostConstant, "ladj", {"ladj inverse", "ladj forward"}),
    (LostForward, "ladj", {"ladj opposite", "ladj forward"}),
    (OtherWidth, "ladj", {"ladj inverse", "ladj forward"}),
    (Shifted, "inverse", {"forward of inverse"}),
    (Mislabeled, "inverse", {"inverse of forward"}),
    (OneNoise, "batch", {"batch inverse rows"}),
    (GlobalNoise, "batch", {"batch inverse rows", "batch inverse shapes"}),
    (lambda: LostForwardBothRandom(*decoder_parts()), "ladj", {"ladj forward"}),
    (
        Truncated,
        "ladj",
        {"ladj forward", "ladj inverse", "ladj forward gradient", "ladj inverse gradient"},
    ),
    (DetachedTerm, "ladj", {"ladj forward gradient", "ladj inverse gradient"}),
    (FirstRow, "ladj", {"ladj forward gradient", "ladj inverse gradient"}),
    (TooNoisy, "ladj", {"ladj forward error", "ladj inverse error"}),
]


def decoder_parts() -> tuple[Tensor, Tensor, float, float]:
    return torch.tensor([[1.0, 0.5], [-0.3, 0.8]]), torch.zeros(2), 0.25, 0.2


@pytest.mark.parametrize(("broken", "name", "rows"), BROKEN)
def test_each_fault_fails_its_own_check(
    broken: Callable[[], Map], name: str, rows: set[str]
) -> None:
    report: Report = check(broken(), only=[name], perturb=0.0)
    assert {result.name for result in report.failures} == rows, str(report)


def test_a_map_on_part_of_its_domain_is_checked_from_a_base_of_its_own() -> None:
    class Integers(DiagonalNormal):
        """⌊N(0, 2²)⌋, whose mass is a difference of normal CDFs."""

        def draw(self, *args: Any, **options: Any) -> Tensor:
            return super().draw(*args, **options).floor()

        def log_prob(self, x: Tensor) -> Tensor:
            normal = torch.distributions.Normal(self.mean, self.log_std.exp())
            return (normal.cdf(x + 1) - normal.cdf(x)).log().sum(-1)

    slice_ = Inverse(Floor(2))
    assert not check(slice_, only=["inverse"])  # a normal base draws what is no integer
    check(slice_, only=["inverse", "ladj", "batch"], base=Integers(2, 0.0, 2.0)).raise_if_failed()


def test_the_map_of_the_flows_page_is_correct() -> None:
    page = (Path(__file__).parents[2] / "docs" / "flows.md").read_text(encoding="utf-8")
    (block,) = (
        code
        for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "class Drop(Map)" in code
    )
    names: dict[str, Any] = {"torch": torch, **vars(flows)}
    names["check"] = lambda found: check(found, skip=["compile"])
    exec(compile(block, "flows.md", "exec"), names)
    assert names["flow"].kind is Ladj.bound


def test_too_many_dimensions_for_draws_are_reported() -> None:
    report = check(Chain(DiagonalAffine(80), Drop(78, 2)), only=["ladj"])
    assert "too few draws for 80 dimensions" in report["ladj inverse"].note
