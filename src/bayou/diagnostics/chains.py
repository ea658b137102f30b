"""Mixing of chains: R-hat, effective sample sizes and standard errors of every tensor (see ``metrics.chains``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayou.metrics.chains import ess_bulk, ess_mean, ess_tail, mcse, rhat
from bayou.posteriors import Empirical, Posterior
from bayou.posteriors.posterior import NOISE

__all__ = ["ChainReport", "TensorChains", "chains", "ess_bulk", "ess_mean", "ess_tail", "mcse", "rhat"]


@dataclass(frozen=True)
class TensorChains:
    """One tensor of the chains: the worst of its entries, without the ``constant`` ones."""

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

        Predictions depend on the functions only: weights with permutation symmetries need not mix.
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
        functions = _summary("f(x)", outputs_by_chain(posterior, posterior.place(x)))
    order = sorted(found, key=lambda t: -math.inf if math.isnan(t.rhat) else t.rhat, reverse=True)
    return ChainReport(posterior.chains, posterior.draws // posterior.chains, tuple(order), functions)


def outputs_by_chain(posterior: Posterior, inputs: tuple[Any, ...], size: int = 100) -> Tensor:
    """The outputs of all points, ``size`` at a time: (chains, draws, B, *out)."""
    points = posterior.stack or {}
    stack = {name: value for name, value in points.items() if not name.startswith(NOISE)}
    starts = range(0, posterior.draws or 0, size)
    parts = [posterior.outputs({n: v[k : k + size] for n, v in stack.items()}, inputs) for k in starts]
    return torch.cat(parts).unflatten(0, (posterior.chains, -1))


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
