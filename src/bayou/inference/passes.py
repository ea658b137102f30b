"""A pass over the data at a point for its curvature and log-likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from bayou.core.params import Params
from bayou.core.progress import Progress, Show
from bayou.curvature.kronecker import KroneckerSum
from bayou.curvature.structures import DiagonalSum, FullSum, Sum
from bayou.curvature.sweep import Plan, Sweep
from bayou.likelihoods import BoundLikelihood
from bayou.network import forward_inputs
from bayou.posteriors.empirical import Empirical
from bayou.training.data import Batch, Data
from bayou.training.guards import Interrupt
from bayou.training.loop import move
from bayou.training.seeds import part_seed

SUMS: Final[dict[str, type[Sum]]] = {
    "full": FullSum,
    "diagonal": DiagonalSum,
    "kronecker": KroneckerSum,
}


@dataclass(frozen=True)
class DataPass:
    """The result of a pass over the data at a point."""

    tensors: Params
    log_likelihood: float
    residual: float
    count: int
    interrupted: bool


@dataclass(frozen=True)
class Passes:
    """The curvature of the data at any point, for a planned network and the settings of a
    ``Laplace``.
    """

    method: Any
    plan: Plan
    data: Data
    check: Callable[[Batch], None] | None
    seed: int
    progress: Show

    def at(self, point: Empirical, params: Params) -> DataPass:
        """One pass over the data; a FloatingPointError where its result is not finite."""
        shapes = {name: params[name].shape for name in params if name in self.plan.wanted}
        like, likelihood = next(iter(params.values())), point.target.likelihood
        method, total = self.method, Tally(likelihood)
        sums = SUMS[method.structure](shapes, self.plan, like)
        seed, kind = part_seed(self.seed, "curvature"), method.curvature_for(self.plan.outputs)
        sweep = Sweep(point.network.call, params, self.plan, likelihood, kind, method.samples, seed)
        interrupted = half_done = False
        with (
            Progress("curvature", self.data.batches, self.progress) as progress,
            Interrupt() as interrupt,
        ):
            try:
                for number, raw in enumerate(self.data.ordered()):
                    if self.check is not None:
                        self.check(raw)
                    x, y = move(raw, like)
                    with interrupt.held():
                        half_done = True
                        for f, own in sweep.batch(forward_inputs(x), y, number, sums):
                            total.add(f, own)
                        half_done = False
                    progress.update(number + 1)
            except KeyboardInterrupt:
                interrupted = True
                if half_done or not total.rows:
                    raise
        factor = self.data.n / total.rows
        found = DataPass(sums.tensors(factor), *total.scaled(factor), interrupted)
        bad = [name for name, value in found.tensors.items() if not bool(value.isfinite().all())]
        if bad or not math.isfinite(found.log_likelihood):
            what = f"the curvature of {bad[0].replace('|', ' ')}" if bad else "the log-likelihood"
            raise FloatingPointError(
                f"{what} is not finite at this point; check the weights, the data and the outputs of the network, or "
                "use standardized inputs, float64, or a start that converges"
            )
        return found


class Tally:
    """Sums over the data at the mode: rows, log p(y | f), and Σ (y − f)² of a Gaussian."""

    def __init__(self, likelihood: BoundLikelihood) -> None:
        self.likelihood, self.gaussian = likelihood, likelihood.gaussian_noise is not None
        self.rows = self.count = 0
        self.log_likelihood = self.residual = 0.0

    @torch.no_grad()
    def add(self, f: Tensor, y: Tensor) -> None:
        """A batch."""
        self.rows += len(y)
        self.log_likelihood += float(self.likelihood.log_prob(f, y).double().sum())
        if self.gaussian:
            self.residual += float((y.to(f.dtype) - f).double().square().sum())
            self.count += y.numel()

    def scaled(self, factor: float) -> tuple[float, float, int]:
        """Scaled to all data, if only some were used."""
        return factor * self.log_likelihood, factor * self.residual, round(factor * self.count)
