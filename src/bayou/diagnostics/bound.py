"""Tightness of the KL bounds of MNF, SIVI and UIVI, estimated."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bayou.core import rng
from bayou.flows import Side
from bayou.guides.bayesian import Bayesian, parent_arguments
from bayou.guides.guide import KL, Gain, Guide, Weight, gaussian_log_prob
from bayou.guides.implicit import ImplicitGuide
from bayou.guides.multiplicative import Conjugate, Multiplicative, gain_kl, rows
from bayou.posteriors.posterior import Posterior, check_count
from bayou.priors import BoundNormal

CHUNK_NUMBERS = 2**17  # latents held at a time: small enough to stay in cache
WEIGHT_NUMBERS = 2**22  # weights held at a time


@dataclass(frozen=True)
class Estimate:
    """A Monte-Carlo mean with its standard error."""

    value: float
    standard_error: float = 0.0

    @staticmethod
    def of(each: Tensor) -> Estimate:
        """The mean of independent values (S,)."""
        each = each.double()
        error = float(each.std()) / math.sqrt(len(each)) if len(each) > 1 else math.nan
        return Estimate(float(each.mean()), error)

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.standard_error:.4f}"


class LogMean:
    """log (1/K) Σ_k exp(ℓ_k) for ℓ (K, n) that come in chunks, in float64: (n,)."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.count = 0

    def add(self, terms: Tensor) -> None:
        """Take in terms (k, n)."""
        self.parts.append(terms.double().logsumexp(0))
        self.count += len(terms)

    def value(self) -> Tensor:
        return torch.stack(self.parts).logsumexp(0) - math.log(self.count)

    def value_with(self, own: Tensor) -> Tensor:
        """The same with one more term (n,): that of the latent that made w."""
        both = torch.stack([*self.parts, own.double()]).logsumexp(0)
        return both - math.log(self.count + 1)


@dataclass(frozen=True)
class TensorBound:
    """One tensor (or one group, or the total): the KL used in training and the bracket of the true
    KL(q(W) ‖ p(W)).

    ``lower`` ≤ KL ≤ ``upper`` ≤ ``bound`` in expectation; the gap of the auxiliary, E KL(q(z|W) ‖
    r(z|W)), lies in [``gap_lower``, ``gap_upper``] = [bound − upper, bound − lower], taken draw by
    draw so that common noise cancels.
    ``kind``: "bound" where a bracket was measured; "exact" or "up to a constant" where the KL needs
    none; "bound, not measured" for a bound of another family, whose bracket is then the trivial [0,
    bound].
    """

    names: tuple[str, ...]
    family: str
    kind: str
    size: int
    bound: Estimate
    lower: Estimate
    upper: Estimate
    gap_lower: Estimate
    gap_upper: Estimate


@dataclass(frozen=True)
class BoundGap:
    """The bracket of every tensor, and of all of them together (``total``); ``print`` shows a
    table.
    """

    tensors: tuple[TensorBound, ...]
    total: TensorBound
    draws: int
    samples: int

    def __getitem__(self, name: str) -> TensorBound:
        for tensor in self.tensors:
            if name in tensor.names:
                return tensor
        names = ", ".join(repr(n) for tensor in self.tensors for n in tensor.names)
        raise KeyError(f"no tensor {name!r}; the names are {names}")

    def __str__(self) -> str:
        head = (
            "tensor",
            "family",
            "weights",
            "KL in training",
            "true KL, from",
            "to",
            "gap of r, from",
            "to",
        )
        lines: list[tuple[str, ...]] = [head]
        for t in (*self.tensors, self.total):
            name = (
                t.names[0]
                if len(t.names) == 1
                else f"{t.names[0]} … ({len(t.names)})"
                if t.names
                else "total"
            )
            cells = [
                _cell(t.bound),
                _cell(t.lower),
                _cell(t.upper),
                _cell(t.gap_lower),
                _cell(t.gap_upper),
            ]
            if t.kind in (KL.exact.value, KL.constant.value) and t.names:
                cells[1:] = [t.kind, "", "", ""]
            lines.append((name, t.family, f"{t.size:,}", *cells))
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        text = [
            "  ".join(
                c.ljust(w) if i < 2 else c.rjust(w)
                for i, (c, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        rule = "─" * len(text[0])
        note = f"nats; K = {self.draws:,} latents for each of S = {self.samples:,} weights; ± one standard error"
        if self.total.kind == KL.constant.value:
            note += "\nsome tensor has no density: the total is up to a constant"
        return "\n".join(
            line.rstrip() for line in (text[0], rule, *text[1:-1], rule, text[-1], note)
        )


def _cell(estimate: Estimate) -> str:
    """value ± standard error, to two digits of the error."""
    error = estimate.standard_error
    decimals = 4 if not 0 < error < math.inf else min(4, max(1, 1 - math.floor(math.log10(error))))
    value = f"{estimate.value:,.{decimals}f}"
    return value if error == 0 else f"{value} ± {error:,.{decimals}f}"


@torch.no_grad()
def bound_gap(
    posterior: Posterior | Bayesian, draws: int = 1000, samples: int = 16, *, seed: rng.Seed = None
) -> BoundGap:
    """The KL bound that MNF, SIVI or UIVI has in training, against a bracket of the true KL, per
    tensor and in total.

    With S = ``samples`` draws of (z^0, W), K = ``draws`` latents z^k ~ ρ(z|W) each (the conjugate
    r(z|W) built on the mean and std of q(z)) and Δ_k = log q(W, z^k)/ρ(z^k|W) − log q(W,
    z^0)/r(z^0|W), the gap of the auxiliary r lies between −E log 1/(K+1) Σ_{k=0..K} e^Δ_k and −E
    log 1/K Σ_{k=1..K} e^Δ_k (IWHVI, Sobolev & Vetrov 2019), and KL(q(W) ‖ p(W)) = bound − gap. W =
    z^0·M + σ·ε enters only through R_i = Σ_j ε_ij·M_ij/σ_ij, beside C_i = Σ_j M_ij²/σ_ij²: log
    q(W|z^k) − log q(W|z^0) = Σ_i d_i·R_i − ½·d_i²·C_i with d = z^k − z^0, so all K cost O(|W| +
    K·D). For SIVI and UIVI z^k ~ q(z), and the gap is what K = ``draws`` latents take off the bound
    with the K of the guide. In float64.
    """
    check_count(draws, "draws", 1)
    check_count(samples, "samples", 2)
    bayesian = posterior.bayesian if isinstance(posterior, Posterior) else posterior
    if not isinstance(bayesian, Bayesian):
        raise ValueError(f"bound_gap needs a variational posterior, got {type(posterior).__name__}")
    seed = rng.integer(seed)
    means = bayesian.mean()
    tensors, totals = [], [torch.zeros(samples, dtype=torch.float64) for _ in range(3)]
    for guide in bayesian.guides:
        own = rng.fold(seed, *guide.names)
        if (
            isinstance(guide, Multiplicative) and guide.kl_kind is not KL.estimate
        ):  # exp of an estimate is biased
            parts = _sandwich(copy.deepcopy(guide).double().eval(), draws, samples, own)
            kind = KL.bound.value
        elif isinstance(guide, ImplicitGuide):
            parts = _mixture(copy.deepcopy(guide).double().eval(), draws, samples, own)
            kind = KL.bound.value
        else:
            bound = _training_kl(bayesian, guide, samples, seed)
            none = torch.zeros_like(bound)
            measured = guide.kl_side is Side.equal
            parts = bound, none, none if measured else bound
            kind = guide.kl_kind.value if measured else f"{KL.bound.value}, not measured"
        family = type(bayesian.specs[guide.names[0]]).__name__
        size = sum(means[name].numel() for name in guide.names)
        tensors.append(_record(guide.names, family, kind, size, *parts))
        totals = [total + part.cpu() for total, part in zip(totals, parts, strict=True)]
    kinds = {tensor.kind for tensor in tensors}
    kind = next(
        k.value for k in reversed(KL) if k is KL.exact or any(k.value in found for found in kinds)
    )
    total = _record((), "", kind, sum(tensor.size for tensor in tensors), *totals)
    return BoundGap(tuple(tensors), total, draws, samples)


def _record(
    names: tuple[str, ...],
    family: str,
    kind: str,
    size: int,
    bound: Tensor,
    gap_lower: Tensor,
    gap_upper: Tensor,
) -> TensorBound:
    """From the bound and the two ends of the gap, draw by draw, each (S,)."""
    ends = (bound, bound - gap_upper, bound - gap_lower, gap_lower, gap_upper)
    return TensorBound(names, family, kind, size, *map(Estimate.of, ends))


def _training_kl(bayesian: Bayesian, guide: Guide, samples: int, seed: int) -> Tensor:
    """The KL of ``samples`` draws: (S,), in float64."""
    size = sum(bayesian.mean()[name].numel() for name in guide.names)
    copied, own, found = copy.deepcopy(guide).double().eval(), rng.fold(seed, *guide.names), []
    for start, n in _chunks(samples, size):
        others = bayesian.sample(n, seed, start) if guide.parents else {}
        given = parent_arguments(guide, {name: others[name].double() for name in guide.parents})
        found.append(copied.draw(n, seed=own, start=start, **given).kl.double())
    return torch.cat(found)


def _sandwich(
    guide: Multiplicative, draws: int, samples: int, seed: rng.Seed
) -> tuple[Tensor, Tensor, Tensor]:
    """The training bound and the ends of the gap for every draw of W: (S,) each."""
    mean, std = rows(guide.center, guide.axis), rows(guide.log_std.exp(), guide.axis)  # (D, J)
    r = _moment_matched(guide, seed)
    snr = mean / std
    information = snr.square().sum(1)  # C: (D,)
    bounds, gap_lowers, gap_uppers = [], [], []
    for start, n in _chunks(samples, mean.numel()):
        z, log_q = guide.gain.draw(n, rng.fold(seed, "gain"), start)
        eps = rng.normal(n, mean.shape, mean, rng.fold(seed, "noise"), start)  # (n, D, J)
        weight = torch.addcmul(z.unsqueeze(-1) * mean, std, eps)
        bounds.append(
            _conditional_kl(guide, z, weight) + log_q + guide.auxiliary(z, mean, std, weight)
        )
        residual = (eps * snr).sum(-1)  # Σ_j ε·M/σ: (n, D)
        log_r = guide.auxiliary.log_density(z, mean, std, weight)
        inner = LogMean()
        for begin, k in _chunks(draws, n * len(mean), CHUNK_NUMBERS):
            latent, log_proposal = r.propose(
                k, mean, std, weight, rng.fold(seed, "latents", start), begin
            )
            step = latent - z  # (k, n, D)
            log_ratio = (
                torch.einsum("knd,nd->kn", step, residual) - 0.5 * step.square() @ information
            )
            inner.add(log_ratio + guide.gain.log_prob(latent) - log_q - log_proposal + log_r)
        gap_uppers.append(-inner.value())
        own = log_r - r.log_density(z, mean, std, weight)
        gap_lowers.append(-inner.value_with(own))
    return torch.cat(bounds), torch.cat(gap_lowers), torch.cat(gap_uppers)


def _mixture(
    guide: ImplicitGuide, draws: int, samples: int, seed: rng.Seed
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for q(w) = E_z q(w|z), with fresh latents of q(z) for every w."""
    bounds, lowers, uppers = [], [], []
    for start, n in _chunks(samples, guide.center.numel()):
        made = guide.draw_with_noise(n, seed, start)
        inner, rest, none = LogMean(), guide.conditional_kl(made), made.z.new_zeros(n)
        for begin, k in _chunks(draws, n * guide.latent, CHUNK_NUMBERS):
            latents = rng.normal(
                k, (n, guide.latent), made.z, rng.fold(seed, "latents", start), begin
            )
            inner.add(guide.log_ratios(made, latents))
        bounds.append(guide.draw(n, seed=seed, start=start).kl)  # of the same w
        lowers.append(rest + inner.value())
        uppers.append(rest + inner.value_with(none))
    bound, lower, upper = map(torch.cat, (bounds, lowers, uppers))
    return bound, bound - upper, bound - lower


def _conditional_kl(guide: Multiplicative, z: Tensor, weight: Tensor) -> Tensor:
    """KL(q(W|z) ‖ p(W)) in closed form for a Normal prior, at the drawn weights (n, D, J) for
    others: (n,).
    """
    std = guide.log_std.exp()
    if isinstance(guide.prior, BoundNormal):
        return gain_kl(guide.prior, guide.center, std, z, guide.axis)
    shape = guide.center.movedim(guide.axis, 0).shape
    w = (
        weight.unflatten(2, shape[1:]).movedim(1, guide.axis + 1)
        if len(shape) > 1
        else weight.squeeze(-1)
    )
    center = Weight(guide.center, None, (Gain(guide.axis, z),)).center(len(z))
    return gaussian_log_prob(w, center, std.expand_as(w)) - guide.prior.log_prob(w)


def _moment_matched(guide: Multiplicative, seed: rng.Seed, n: int = 4096) -> Conjugate:
    """The conjugate r(z|W) whose N(a, s²) has the mean and std of q(z)."""
    z, _ = guide.gain.draw(n, rng.fold(seed, "moments"))
    found = Conjugate(z.shape[1], 1.0).to(z)
    found.center.copy_(z.mean(0))
    found.log_std.copy_(z.std(0).log())
    return found


def _chunks(count: int, size: int, numbers: int = WEIGHT_NUMBERS) -> Iterator[tuple[int, int]]:
    """(start, n) of consecutive chunks, each with at most ``numbers`` numbers."""
    each = max(1, numbers // max(size, 1))
    for start in range(0, count, each):
        yield start, min(each, count - start)
