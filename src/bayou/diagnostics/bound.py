"""Estimates of how tight the KL bounds of MNF, SIVI and UIVI are."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayou.core import rng
from bayou.flows import Side
from bayou.guides.conditional import gain_kl, rows
from bayou.guides.guide import KL, Gain, Guide, Weight, gaussian_log_prob
from bayou.guides.implicit import ImplicitGuide
from bayou.guides.multiplicative import Conjugate, Multiplicative
from bayou.metrics import standard_error
from bayou.posteriors.guided import Bayesian
from bayou.posteriors.posterior import Posterior, check_count
from bayou.priors import BoundNormal

MAX_CHUNK_LATENTS = 2**17  # numbers of latents held at a time: few enough to stay in cache
MAX_CHUNK_WEIGHTS = 2**22  # weights held at a time
MOMENT_DRAWS = 4096  # of a gain, for the mean and std of q(z)
NOT_MEASURED = f"{KL.bound.value}, not measured"


@dataclass(frozen=True)
class Estimate:
    """A Monte-Carlo mean with its standard error.

    Args:
        value: the mean.
        standard_error: of the mean; 0 for an exact value.
    """

    value: float
    standard_error: float = 0.0

    @staticmethod
    def of(each: Tensor) -> Estimate:
        """Estimate the mean of independent values.

        Args:
            each: the values (S,).
        """
        return Estimate(float(each.double().mean()), standard_error(each))

    def __float__(self) -> float:
        """Return the mean."""
        return self.value

    def __str__(self) -> str:
        """Return the mean and its standard error with four decimals."""
        return f"{self.value:.4f} ± {self.standard_error:.4f}"


class LogMeanExp:
    """The value log (1/K) Σ_k exp(ℓ_k), in float64, of terms ℓ (K, n) that come in chunks."""

    def __init__(self) -> None:
        self.chunk_sums: list[Tensor] = []  # logarithms of sums
        self.count: int = 0

    def add(self, terms: Tensor) -> None:
        """Add the terms (k, n) of a chunk.

        Args:
            terms: ℓ, (k, n).
        """
        self.chunk_sums.append(terms.double().logsumexp(0))
        self.count += len(terms)

    def value(self) -> Tensor:
        """Return the value of all terms: (n,)."""
        return torch.stack(self.chunk_sums).logsumexp(0) - math.log(self.count)

    def value_with(self, term: Tensor) -> Tensor:
        """Return the value with one more term (n,), that of the latent from which w was drawn.

        Args:
            term: ℓ of the further latent, (n,).
        """
        total = torch.stack([*self.chunk_sums, term.double()]).logsumexp(0)
        return total - math.log(self.count + 1)


@dataclass(frozen=True)
class TensorBound:
    """The KL bound used in training and a bracket of the true KL(q(W) ‖ p(W)).

    ``lower`` ≤ KL ≤ ``upper`` ≤ ``bound`` in expectation; the gap of the auxiliary,
    E KL(q(z|W) ‖ r(z|W)), lies in [``gap_lower``, ``gap_upper``] = [bound − upper, bound − lower],
    taken draw by draw so that common noise cancels.

    Args:
        names: the tensors, one or a group; none for the total.
        family: the class of the family.
        kind: "bound" if a bracket was measured; "exact" or "up to a constant" if the KL needs none;
            "bound, not measured" for a bound of another family, whose bracket is then the trivial
            [0, bound].
        size: the number of weights.
        bound: the KL in training, in nats.
        lower: the lower end of the true KL.
        upper: the upper end of the true KL.
        gap_lower: the lower end of the gap.
        gap_upper: the upper end of the gap.
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

    def row(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        name = "total"
        if len(self.names) == 1:
            name = self.names[0]
        elif self.names:
            name = f"{self.names[0]} … ({len(self.names)})"
        ends = (self.lower, self.upper, self.gap_lower, self.gap_upper)
        cells = [_format_cell(end) for end in ends]
        if self.kind in (KL.exact.value, KL.constant.value) and self.names:
            cells = [self.kind, "", "", ""]
        return (name, self.family, f"{self.size:,}", _format_cell(self.bound), *cells)


TABLE_HEAD = (
    "tensor",
    "family",
    "weights",
    "KL in training",
    "true KL, from",
    "to",
    "gap of r, from",
    "to",
)
TEXT_COLUMNS = 2  # the first columns of the table, which are aligned to the left


@dataclass(frozen=True)
class BoundGap:
    """The bracket of every tensor, and of all of them together; ``print`` shows a table.

    Args:
        tensors: the bracket of each tensor or group of tensors.
        total: that of all of them.
        draws: K, the latents for each draw of the weights.
        samples: S, the draws of the weights.
    """

    tensors: tuple[TensorBound, ...]
    total: TensorBound
    draws: int
    samples: int

    def __getitem__(self, name: str) -> TensorBound:
        """Return the bracket of a tensor by its name."""
        for tensor in self.tensors:
            if name in tensor.names:
                return tensor
        names = ", ".join(repr(known) for tensor in self.tensors for known in tensor.names)
        raise KeyError(f"no tensor {name!r}; the names are {names}")

    def __str__(self) -> str:
        """Format the brackets as a table."""
        rows = [TABLE_HEAD, *(tensor.row() for tensor in (*self.tensors, self.total))]
        widths = [max(len(row[i]) for row in rows) for i in range(len(TABLE_HEAD))]
        lines = []
        for row in rows:
            cells = [
                cell.ljust(width) if i < TEXT_COLUMNS else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells))
        rule = "─" * len(lines[0])
        note = (
            f"nats; K = {self.draws:,} latents for each of S = {self.samples:,} weights; "
            "± one standard error"
        )
        if self.total.kind == KL.constant.value:
            note += "\nsome tensor has no density: the total is up to a constant"
        text = (lines[0], rule, *lines[1:-1], rule, lines[-1], note)
        return "\n".join(line.rstrip() for line in text)


def _format_cell(estimate: Estimate) -> str:
    """Format value ± standard error, to two digits of the error."""
    error = estimate.standard_error
    decimals = 4
    if 0 < error < math.inf:
        decimals = min(4, max(1, 1 - math.floor(math.log10(error))))
    value = f"{estimate.value:,.{decimals}f}"
    return value if error == 0 else f"{value} ± {error:,.{decimals}f}"


class _Bracket(NamedTuple):
    """The bound in training and the ends of its gap, for every draw of the weights: (S,) each."""

    bound: Tensor
    gap_lower: Tensor
    gap_upper: Tensor

    def summarize(self, names: tuple[str, ...], family: str, kind: str, size: int) -> TensorBound:
        """Return the means over the draws."""
        return TensorBound(
            names,
            family,
            kind,
            size,
            bound=Estimate.of(self.bound),
            lower=Estimate.of(self.bound - self.gap_upper),
            upper=Estimate.of(self.bound - self.gap_lower),
            gap_lower=Estimate.of(self.gap_lower),
            gap_upper=Estimate.of(self.gap_upper),
        )


@torch.no_grad()
def bound_gap(
    posterior: Posterior | Bayesian, draws: int = 1000, samples: int = 16, *, seed: rng.Seed = None
) -> BoundGap:
    """Compare the KL bound that MNF, SIVI or UIVI has in training with a bracket of the true KL.

    With S = ``samples`` draws of (z^0, W), K = ``draws`` latents z^k ~ ρ(z|W) each (the conjugate
    r(z|W) built on the mean and std of q(z)) and Δ_k = log q(W, z^k)/ρ(z^k|W) − log
    q(W, z^0)/r(z^0|W), the gap of the auxiliary r lies between −E log 1/(K+1) Σ_{k=0..K} e^Δ_k and
    −E log 1/K Σ_{k=1..K} e^Δ_k (IWHVI), and KL(q(W) ‖ p(W)) = bound − gap.

    W = z^0·M + σ·ε enters only through R_i = Σ_j ε_ij·M_ij/σ_ij, with C_i = Σ_j M_ij²/σ_ij²:
    log q(W|z^k) − log q(W|z^0) = Σ_i d_i·R_i − ½·d_i²·C_i with d = z^k − z^0, so all K cost
    O(|W| + K·D). For SIVI and UIVI z^k ~ q(z), and the gap is what K = ``draws`` latents take off
    the bound with the K of the guide. In float64.

    Args:
        posterior: a variational posterior, or its network.
        draws: K, the latents for each draw of the weights.
        samples: S, the draws of the weights.
        seed: of all draws.

    Returns:
        The bracket of every tensor and of all of them together.

    Raises:
        ValueError: if the posterior is not variational.

    Example:
        >>> print(bayou.diagnostics.bound_gap(posterior, draws=1000))

    References:
        Sobolev, Vetrov: Importance weighted hierarchical variational inference, NeurIPS 2019.
    """
    check_count(draws, "draws", 1)
    check_count(samples, "samples", 2)
    bayesian = posterior.bayesian if isinstance(posterior, Posterior) else posterior
    if not isinstance(bayesian, Bayesian):
        raise ValueError(f"bound_gap needs a variational posterior, got {type(posterior).__name__}")
    seed = rng.integer(seed)
    means = bayesian.mean()
    tensors: list[TensorBound] = []
    total = _Bracket(*(torch.zeros(samples, dtype=torch.float64) for _ in range(3)))
    for guide in bayesian.guides:
        bracket, kind = _measure_guide(bayesian, guide, draws, samples, seed)
        family = type(bayesian.specs[guide.names[0]]).__name__
        size = sum(means[name].numel() for name in guide.names)
        tensors.append(bracket.summarize(guide.names, family, kind, size))
        total = _Bracket(
            *(total_end + end.cpu() for total_end, end in zip(total, bracket, strict=True))
        )
    total_kind = _weakest_kind({tensor.kind for tensor in tensors})
    total_size = sum(tensor.size for tensor in tensors)
    total_bound = total.summarize((), "", total_kind, total_size)
    return BoundGap(tuple(tensors), total_bound, draws, samples)


def _measure_guide(
    bayesian: Bayesian, guide: Guide, draws: int, samples: int, seed: int
) -> tuple[_Bracket, str]:
    """Return the bracket of a guide, and what its KL in training is."""
    guide_seed = rng.fold(seed, *guide.names)
    # The exp of an estimate is biased, so that a guide whose KL is one has no bracket.
    if isinstance(guide, Multiplicative) and guide.kl_kind is not KL.estimate:
        copied = copy.deepcopy(guide).double().eval()
        return _bracket_multiplicative(copied, draws, samples, guide_seed), KL.bound.value
    if isinstance(guide, ImplicitGuide):
        copied_implicit = copy.deepcopy(guide).double().eval()
        return _bracket_implicit(copied_implicit, draws, samples, guide_seed), KL.bound.value
    bound = _training_kl(bayesian, guide, samples, seed)
    zeros = torch.zeros_like(bound)
    if guide.kl_side is Side.equal:
        return _Bracket(bound, zeros, zeros), guide.kl_kind.value
    return _Bracket(bound, zeros, bound), NOT_MEASURED


def _weakest_kind(kinds: set[str]) -> str:
    """Return what a sum of KLs of these kinds is: exact only if all of them are."""
    for kind in reversed(KL):
        if kind is KL.exact or any(kind.value in name for name in kinds):
            return kind.value
    return KL.exact.value


def _training_kl(bayesian: Bayesian, guide: Guide, samples: int, seed: int) -> Tensor:
    """Return the KL in training of ``samples`` draws: (S,), in float64."""
    size = sum(bayesian.mean()[name].numel() for name in guide.names)
    copied = copy.deepcopy(guide).double().eval()
    guide_seed = rng.fold(seed, *guide.names)
    kls = []
    for start, count in _chunks(samples, size, MAX_CHUNK_WEIGHTS):
        weights = bayesian.sample(count, seed, start) if guide.parents else {}
        conditions = guide.parent_arguments(
            {name: weights[name].double() for name in guide.parents}
        )
        draw = copied.draw(count, seed=guide_seed, start=start, **conditions)
        kls.append(draw.kl.double())
    return torch.cat(kls)


def _bracket_multiplicative(
    guide: Multiplicative, draws: int, samples: int, seed: rng.Seed
) -> _Bracket:
    """Measure the bound of MNF, with latents of a conjugate proposal."""
    mean = rows(guide.center, guide.axis)  # M: (D, J)
    std = rows(guide.log_std.exp(), guide.axis)
    proposal = _match_moments(guide, seed)
    signal_to_noise = mean / std
    information = signal_to_noise.square().sum(1)  # C: (D,)
    brackets: list[_Bracket] = []
    for start, count in _chunks(samples, mean.numel(), MAX_CHUNK_WEIGHTS):
        z, log_q = guide.gain.draw(count, rng.fold(seed, "gain"), start)
        eps = rng.normal(count, mean.shape, mean, rng.fold(seed, "noise"), start)  # (n, D, J)
        weight = torch.addcmul(z.unsqueeze(-1) * mean, std, eps)
        auxiliary_term = guide.auxiliary(z, mean, std, weight)
        bound = _conditional_kl(guide, z, weight) + log_q + auxiliary_term
        residual = (eps * signal_to_noise).sum(-1)  # R = Σ_j ε·M/σ: (n, D)
        log_r = guide.auxiliary.log_density(z, mean, std, weight)
        log_ratios = LogMeanExp()
        latent_seed = rng.fold(seed, "latents", start)
        for begin, latent_count in _chunks(draws, count * len(mean), MAX_CHUNK_LATENTS):
            latent, log_proposal = proposal.propose(
                latent_count, mean, std, weight, latent_seed, begin
            )
            step = latent - z  # d: (k, n, D)
            linear_term = torch.einsum("knd,nd->kn", step, residual)
            log_ratio = linear_term - 0.5 * step.square() @ information
            log_gain = guide.gain.log_prob(latent)
            log_ratios.add(log_ratio + log_gain - log_q - log_proposal + log_r)
        first_term = log_r - proposal.log_density(z, mean, std, weight)
        brackets.append(_Bracket(bound, -log_ratios.value_with(first_term), -log_ratios.value()))
    return _Bracket(*map(torch.cat, zip(*brackets, strict=True)))


def _bracket_implicit(guide: ImplicitGuide, draws: int, samples: int, seed: rng.Seed) -> _Bracket:
    """Measure the bound of SIVI and UIVI, q(w) = E_z q(w|z), with fresh latents of q(z)."""
    brackets: list[_Bracket] = []
    for start, count in _chunks(samples, guide.center.numel(), MAX_CHUNK_WEIGHTS):
        drawn = guide.draw_with_noise(count, seed, start)
        log_ratios = LogMeanExp()
        conditional_kl = guide.conditional_kl(drawn)
        first_term = drawn.z.new_zeros(count)
        latent_seed = rng.fold(seed, "latents", start)
        for begin, latent_count in _chunks(draws, count * guide.latent, MAX_CHUNK_LATENTS):
            latents = rng.normal(latent_count, (count, guide.latent), drawn.z, latent_seed, begin)
            log_ratios.add(guide.log_ratios(drawn, latents))
        bound = guide.draw(count, seed=seed, start=start).kl  # of the same w
        lower = conditional_kl + log_ratios.value()
        upper = conditional_kl + log_ratios.value_with(first_term)
        brackets.append(_Bracket(bound, bound - upper, bound - lower))
    return _Bracket(*map(torch.cat, zip(*brackets, strict=True)))


def _conditional_kl(guide: Multiplicative, z: Tensor, weight: Tensor) -> Tensor:
    """Compute KL(q(W|z) ‖ p(W)) of each draw: (n,).

    In closed form for a Normal prior, at the drawn weights (n, D, J) for others.
    """
    std = guide.log_std.exp()
    if isinstance(guide.prior, BoundNormal):
        return gain_kl(guide.prior, guide.center, std, z, guide.axis)
    w = _reshape_rows(weight, guide)
    center = Weight(guide.center, None, (Gain(guide.axis, z),)).center(len(z))
    return gaussian_log_prob(w, center, std.expand_as(w)) - guide.prior.log_prob(w)


def _reshape_rows(weight: Tensor, guide: Multiplicative) -> Tensor:
    """Return drawn weights (n, D, J) in the shape of the tensor."""
    shape = guide.center.movedim(guide.axis, 0).shape
    if len(shape) == 1:
        return weight.squeeze(-1)
    return weight.unflatten(2, shape[1:]).movedim(1, guide.axis + 1)


def _match_moments(guide: Multiplicative, seed: rng.Seed) -> Conjugate:
    """Build the conjugate r(z|W) whose N(a, s²) has the mean and std of q(z)."""
    z, _ = guide.gain.draw(MOMENT_DRAWS, rng.fold(seed, "moments"))
    proposal = Conjugate(z.shape[1], 1.0).to(z)
    proposal.center.copy_(z.mean(0))
    proposal.log_std.copy_(z.std(0).log())
    return proposal


def _chunks(count: int, size: int, max_numbers: int) -> Iterator[tuple[int, int]]:
    """Yield (start, n) of consecutive chunks of items of a size, each within ``max_numbers``."""
    chunk = max(1, max_numbers // max(size, 1))
    for start in range(0, count, chunk):
        yield start, min(chunk, count - start)
