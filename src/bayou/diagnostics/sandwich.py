"""Bounds on the entropy of a distribution that is known only through a latent: q(w) = ∫ q(w|z) q(z) dz."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from bayou import rng
from bayou.posteriors.posterior import check_count

CHUNK_NUMBERS = 2**17  # latents held at a time: small enough to stay in cache


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
class EntropySandwich:
    """``lower`` ≤ H[q] ≤ ``upper`` in expectation, both with standard errors; both tighten as ``draws`` grows."""

    lower: Estimate
    upper: Estimate
    draws: int
    samples: int

    def __str__(self) -> str:
        return f"{self.lower} ≤ H ≤ {self.upper} nats (K = {self.draws}, S = {self.samples})"


@torch.no_grad()
def entropy_sandwich(
    latent: Distribution | Any,
    conditional: Callable[[Tensor], Distribution],
    reverse: Callable[[Tensor], Distribution] | None = None,
    *,
    draws: int = 1000,
    samples: int = 1000,
    seed: rng.Seed = None,
) -> EntropySandwich:
    """H[q] = −E log q(w) of an implicit posterior q(w) = ∫ q(w|z) q(z) dz, bracketed with K = ``draws`` latents.

    −E log 1/(K+1) Σ_{k=0..K} ρ(z^k) ≤ H ≤ −E log 1/K Σ_{k=1..K} ρ(z^k),  ρ(z) = q(w|z)·q(z)/r(z|w),
    where z^0 made w and z^1..z^K ~ r(z|w) (IWHVI, Sobolev & Vetrov 2019). Without ``reverse``, r = q(z) and only
    draws of q(z) are needed, no density (SIVI, Yin & Zhou 2018).

    ``latent``: q(z), a ``torch.distributions`` object (a flow's ``as_distribution()``), or anything with
    ``sample(shape)``. ``conditional(z)`` and ``reverse(w)``: distributions whose ``log_prob`` sums over the event
    (``Independent``). Shapes: z (K, S, *latent event), w (S, *event).
    """
    check_count(draws, "draws", 1)
    check_count(samples, "samples", 2)
    seed = rng.integer(seed)
    with rng.isolated(seed, torch.device("cpu")):
        device = latent.sample((1,)).device
    with rng.isolated(seed, device):
        own = latent.sample((samples,))
        w = conditional(own).sample()
        r = None if reverse is None else reverse(w)

        def log_ratio(z: Tensor) -> Tensor:
            found = conditional(z).log_prob(w)
            if r is not None:
                found = found + latent.log_prob(z) - r.log_prob(z)
            if found.shape != z.shape[: found.ndim] or found.shape[-1:] != (samples,):
                raise ValueError(
                    f"log_prob gave shape {tuple(found.shape)} for {samples} draws of w; it must sum over the event: "
                    "wrap the distribution in torch.distributions.Independent"
                )
            return found

        mean = LogMean()
        size = max(1, CHUNK_NUMBERS // max(own.numel(), w.numel()))
        for start in range(0, draws, size):
            k = min(size, draws - start)
            mean.add(log_ratio(latent.sample((k, samples)) if r is None else r.sample((k,))))
        upper, lower = Estimate.of(-mean.value()), Estimate.of(-mean.value_with(log_ratio(own)))
    return EntropySandwich(lower, upper, draws, samples)
