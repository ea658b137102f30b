"""Have the chains mixed? Rank-normalised split R-hat, effective sample sizes, Monte-Carlo standard errors.

All of Vehtari, Gelman, Simpson, Carpenter & Bürkner (2021); draws are (chains C, draws K, ...), results (...).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayou.posteriors.empirical import Empirical
from bayou.posteriors.posterior import evaluating

CHUNK_NUMBERS = 2**22  # numbers that are transformed at a time
LEAST = 4  # draws of a chain


def rhat(draws: Tensor) -> Tensor:
    """Rank-normalised split R-hat: the larger of that of the draws (location) and of |draw − median| (scale)."""
    return _each(draws, lambda x: torch.maximum(_rhat(_scored(_split(x))), _rhat(_scored(_split(_folded(x))))))


def ess_bulk(draws: Tensor) -> Tensor:
    """Effective sample size of the rank-normalised draws: how well the middle of the distribution is known."""
    return _each(draws, lambda x: _ess(_scored(_split(x))))


def ess_tail(draws: Tensor) -> Tensor:
    """The smaller of the effective sample sizes of the 5 % and the 95 % quantile."""

    def tail(x: Tensor) -> Tensor:
        levels = torch.tensor((0.05, 0.95), dtype=x.dtype, device=x.device)
        below, above = (_ess(_split((x <= q).to(x.dtype))) for q in x.flatten(0, 1).quantile(levels, 0))
        return torch.minimum(below, above)

    return _each(draws, tail)


def ess_mean(draws: Tensor) -> Tensor:
    """Effective sample size for the mean: Var[w] / Var[mean of the draws]."""
    return _each(draws, lambda x: _ess(_split(x)))


def mcse(draws: Tensor) -> Tensor:
    """Monte-Carlo standard error of the mean: sd/√ESS."""
    return _each(draws, lambda x: x.flatten(0, 1).std(0) / _ess(_split(x)).sqrt())


def _each(draws: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of (C, K, D) in float64, for draws (C, K, ...), some coordinates at a time."""
    if draws.ndim < 2 or draws.shape[1] < LEAST:
        raise ValueError(f"draws must be (chains, draws, ...) with at least {LEAST} draws, got {tuple(draws.shape)}")
    if not bool(draws.isfinite().all()):
        raise ValueError("the draws have NaN or infinite values")
    flat = draws.detach().flatten(2) if draws.ndim > 2 else draws.detach().unsqueeze(-1)
    size = max(1, CHUNK_NUMBERS // (flat.shape[0] * flat.shape[1]))
    parts = [function(part.double()) for part in flat.split(size, -1)]
    return torch.cat(parts).reshape(draws.shape[2:])


def _split(x: Tensor) -> Tensor:
    """Every chain as two, (2C, K/2, D); of an odd number of draws the middle one is left out."""
    half = x.shape[1] // 2
    return torch.cat((x[:, :half], x[:, -half:]))


def _folded(x: Tensor) -> Tensor:
    """|x − median|, the median of an even number being the mean of two."""
    return (x - x.flatten(0, 1).quantile(0.5, 0)).abs()


def _scored(x: Tensor) -> Tensor:
    """Φ⁻¹((rank − 3/8) / (S + 1/4)) over all S draws of all chains; equal draws share their mean rank."""
    flat = x.flatten(0, 1).T.contiguous()  # (D, S)
    ordered = flat.sort(-1).values
    below = torch.searchsorted(ordered, flat, right=False)
    rank = 0.5 * (below + torch.searchsorted(ordered, flat, right=True) + 1).to(x.dtype)
    return torch.special.ndtri((rank - 0.375) / (flat.shape[1] + 0.25)).T.reshape(x.shape)


def _rhat(x: Tensor) -> Tensor:
    """√(((n − 1)/n·W + B/n) / W): W the mean variance within chains, B/n that of their means; NaN for constants."""
    n = x.shape[1]
    within, between = x.var(1).mean(0), x.mean(1).var(0)
    return ((n - 1) / n + between / within).sqrt()


def _autocovariance(x: Tensor) -> Tensor:
    """1/n Σ_i (x_i − mean)(x_{i+t} − mean) at all lags t, by FFT: (C, n, D)."""
    n = x.shape[1]
    spectrum = torch.fft.rfft(x - x.mean(1, keepdim=True), 2 * n, dim=1)
    return torch.fft.irfft(spectrum.abs().square(), 2 * n, dim=1)[:, :n] / n


def _ess(x: Tensor) -> Tensor:
    """C·n/τ̂, τ̂ = −1 + 2·Σ P_k with Geyer's initial positive and monotone sums P_k = ρ_2k + ρ_2k+1.

    ρ_t = 1 − (W − mean autocovariance_t)/var⁺. The sum ends before the first P_k ≤ 0; that pair's even member counts
    once if it is positive. A constant has the size of its draws.
    """
    chains, n, _ = x.shape
    covariance = _autocovariance(x)
    within = covariance[:, 0].mean(0) * n / (n - 1)
    total = within * (n - 1) / n + (x.mean(1).var(0) if chains > 1 else 0.0)
    rho = 1 - (within - covariance.mean(0)) / total
    rho[0] = 1.0
    last = max((n - 1) // 2, 1)  # pairs 0 .. last − 1 may count
    pairs = rho[: 2 * last].unflatten(0, (last, 2)).sum(1)
    counting = (pairs > 0).cumprod(0)
    counting[-1] = 0  # the last pair ends the sum, whatever it is
    end = counting.sum(0)
    after = rho[: 2 * last : 2].gather(0, end.unsqueeze(0))[0].clamp_min(0)
    tau = -1 + 2 * (pairs.cummin(0).values * counting).sum(0) + after
    ess = chains * n / tau.clamp_min(1 / math.log10(chains * n))
    constant = x.flatten(0, 1).amax(0) - x.flatten(0, 1).amin(0) < 1e-15
    return torch.where(constant, float(chains * n), ess)


@dataclass(frozen=True)
class TensorChains:
    """One tensor of the chains: the worst of its entries. ``constant`` entries, which do not move, do not count."""

    name: str
    entries: int
    constant: int
    rhat: float
    ess_bulk: float
    ess_tail: float
    mcse: float  # the largest standard error of a mean, in units of the entry's standard deviation


@dataclass(frozen=True)
class ChainReport:
    """Every tensor, the least mixed first, and the functions f(x) if inputs were given. ``print`` shows a table."""

    chains: int
    draws: int  # of each chain
    tensors: tuple[TensorChains, ...]
    functions: TensorChains | None = None

    @property
    def rhat(self) -> float:
        """The worst R-hat of a weight; below 1.01 the chains agree."""
        return max((t.rhat for t in self._moving), default=math.nan)

    @property
    def ess(self) -> float:
        """The smallest effective sample size of a weight, bulk or tail."""
        return min((min(t.ess_bulk, t.ess_tail) for t in self._moving), default=math.nan)

    @property
    def _moving(self) -> tuple[TensorChains, ...]:
        return tuple(t for t in self.tensors if t.constant < t.entries)

    @property
    def mixed(self) -> bool:
        """Whether R-hat < 1.01 and ESS > 100 per chain: of the functions, if there are any, else of all weights.

        Functions are what predictions need: weights that can be exchanged never mix, and need not.
        """
        rows = self._moving if self.functions is None else (self.functions,)
        return all(t.rhat < 1.01 and min(t.ess_bulk, t.ess_tail) > 100 * self.chains for t in rows)

    def __str__(self) -> str:
        rows = [*([] if self.functions is None else [self.functions]), *self.tensors]
        width = max(6, *(len(t.name) for t in rows))
        lines = [
            f"{self.chains} chains of {self.draws:,} draws: {'mixed' if self.mixed else 'not mixed'} "
            "(R-hat < 1.01 and ESS > 100 per chain); the worst entry of each tensor",
            f"{'tensor':<{width}}    entries     R-hat   ESS bulk   ESS tail   MCSE/sd",
        ]
        for t in rows:
            if t.constant == t.entries:
                lines.append(f"{t.name:<{width}}  {t.entries:>9,}  constant")
                continue
            still = f"  ({t.constant:,} constant)" if t.constant else ""
            lines.append(
                f"{t.name:<{width}}  {t.entries:>9,}  {t.rhat:>8.4f}  {t.ess_bulk:>9.0f}  {t.ess_tail:>9.0f}  "
                f"{t.mcse:>8.4f}{still}"
            )
        return "\n".join(lines)


@torch.no_grad()
def chains(posterior: Empirical, x: Any = None) -> ChainReport:
    """R-hat, effective sample sizes and standard errors of a posterior of chains, by tensor; with x of its functions.

    x: inputs (B, ...) or a tuple of them; the functions are the network's outputs there, for every draw.
    """
    if not isinstance(posterior, Empirical):
        raise ValueError(f"chains needs the posterior of a sampler such as NUTS(), got {type(posterior).__name__}")
    found = tuple(_summary(name, draws) for name, draws in posterior.by_chain().items())
    functions = None
    if x is not None:
        inputs = posterior._place(x)
        with evaluating(posterior.net):
            outputs = torch.cat([posterior._outputs(stack, inputs, None) for stack in _stacks(posterior)])
        functions = _summary("f(x)", outputs.unflatten(0, (posterior.chains, -1)))
    order = sorted(found, key=lambda t: -math.inf if math.isnan(t.rhat) else t.rhat, reverse=True)
    return ChainReport(posterior.chains, posterior.draws // posterior.chains, tuple(order), functions)


def _stacks(posterior: Empirical, size: int = 100) -> Iterator[dict[str, Tensor]]:
    """The points in order, some at a time, without the parameters of the likelihood."""
    for start in range(0, posterior.draws, size):
        yield {n: v[start : start + size] for n, v in posterior.stack.items() if not n.startswith("likelihood.")}


def _summary(name: str, draws: Tensor) -> TensorChains:
    draws = draws.flatten(2) if draws.ndim > 2 else draws.unsqueeze(-1)
    entries = draws.shape[-1]
    moving = (
        draws[..., draws.flatten(0, 1).amax(0) > draws.flatten(0, 1).amin(0)] if draws.stride(1) else draws[..., :0]
    )
    constant = entries - moving.shape[-1]
    if constant == entries:
        return TensorChains(name, entries, constant, math.nan, math.nan, math.nan, math.nan)
    worst, bulk, tail = rhat(moving).max(), ess_bulk(moving).min(), ess_tail(moving).min()
    error = ess_mean(moving).min().rsqrt()
    return TensorChains(name, entries, constant, float(worst), float(bulk), float(tail), float(error))
