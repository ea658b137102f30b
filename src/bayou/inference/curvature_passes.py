"""A pass over the data at a point, for its curvature and its log-likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from bayou.core.params import Params
from bayou.core.progress import Progress, Show
from bayou.curvature.factor import RowsSum
from bayou.curvature.information import CurvatureType
from bayou.curvature.kronecker import KroneckerSum
from bayou.curvature.structures import DiagonalSum
from bayou.curvature.sweep import Plan, Sum, Sweep
from bayou.likelihoods import BoundLikelihood
from bayou.network import forward_inputs
from bayou.posteriors.empirical import Empirical
from bayou.training.data import Data
from bayou.training.guards import Interrupt
from bayou.training.inputs import Batch
from bayou.training.loop import move
from bayou.training.seeds import part_seed

SUMS: Final[dict[str, type[Sum]]] = {
    "full": RowsSum,
    "diagonal": DiagonalSum,
    "kronecker": KroneckerSum,
}


class CurvatureSettings(Protocol):
    """The settings of a method that a pass for the curvature reads."""

    @property
    def structure(self) -> str:
        """The structure of the curvature: a key of ``SUMS``."""

    @property
    def samples(self) -> int:
        """The number of sampled gradients for a Fisher matrix."""

    def curvature_for(self, outputs: int) -> CurvatureType:
        """Return which curvature is computed for a network with so many outputs."""


@dataclass(frozen=True)
class DataPass:
    """The result of a pass over the data at a point.

    Args:
        tensors: of the curvature, by the names that its structure gives them.
        log_likelihood: Σ log p(y | f).
        residual: Σ (y − f)² of a Gaussian, 0 otherwise.
        count: the number of y of a Gaussian, 0 otherwise.
        interrupted: whether Ctrl-C ended the pass, so that sums over some rows are extrapolated.
    """

    tensors: Params
    log_likelihood: float
    residual: float
    count: int
    interrupted: bool


@dataclass(frozen=True)
class CurvaturePasses:
    """Computes the curvature of the data at any point, for a planned network.

    Args:
        method: the settings of a ``Laplace``.
        plan: how the curvature of each tensor is computed.
        data: the rows.
        check: applied to every batch before it is used; None for no check.
        seed: of the fit.
        progress: whether and how progress is shown.
    """

    method: CurvatureSettings
    plan: Plan
    data: Data
    check: Callable[[Batch], None] | None
    seed: int
    progress: Show

    def at(self, point: Empirical, params: Params) -> DataPass:
        """Make one pass over the data.

        Args:
            point: has the network and the likelihood.
            params: the weights at which the curvature is computed.

        Raises:
            FloatingPointError: if the result is not finite.
        """
        shapes = {name: params[name].shape for name in params if name in self.plan.wanted}
        parameter = next(iter(params.values()))
        likelihood = point.target.likelihood
        sums = SUMS[self.method.structure](shapes, self.plan, parameter)
        tally = Tally(likelihood)
        sweep = Sweep(
            point.network.call,
            params,
            self.plan,
            likelihood,
            self.method.curvature_for(self.plan.outputs),
            self.method.samples,
            part_seed(self.seed, "curvature"),
        )
        interrupted = self._add_batches(sweep, sums, tally, parameter)
        factor = self.data.n / tally.rows
        data_pass = DataPass(
            sums.tensors(factor),
            factor * tally.log_likelihood,
            factor * tally.residual,
            round(factor * tally.count),
            interrupted,
        )
        _check_finite(data_pass)
        return data_pass

    def _add_batches(self, sweep: Sweep, sums: Sum, tally: Tally, parameter: Tensor) -> bool:
        """Add all batches to the sums; return whether Ctrl-C came between two of them."""
        batch_begun = False
        with (
            Progress("curvature", self.data.batches, self.progress) as progress,
            Interrupt() as interrupt,
        ):
            try:
                for number, batch in enumerate(self.data.epoch()):
                    if self.check is not None:
                        self.check(batch)
                    x, y = move(batch, parameter)
                    with interrupt.defer():
                        batch_begun = True
                        for outputs, targets in sweep.batch(forward_inputs(x), y, number, sums):
                            tally.add(outputs, targets)
                        batch_begun = False
                    progress.update(number + 1)
            except KeyboardInterrupt:
                if batch_begun or not tally.rows:
                    raise
                return True
        return False


def _check_finite(data_pass: DataPass) -> None:
    """Raise a FloatingPointError if a pass has a number that is not finite."""
    tensors = data_pass.tensors.items()
    not_finite = [name for name, value in tensors if not bool(value.isfinite().all())]
    if not not_finite and math.isfinite(data_pass.log_likelihood):
        return
    quantity = "the log-likelihood"
    if not_finite:
        quantity = f"the curvature of {not_finite[0].replace('|', ' ')}"
    raise FloatingPointError(
        f"{quantity} is not finite at this point; check the weights, the data and the outputs of "
        "the network, or use standardized inputs, float64, or a start that converges"
    )


class Tally:
    """Sums over the data at the mode: rows, log p(y | f), and Σ (y − f)² of a Gaussian.

    Args:
        likelihood: p(y | f).
    """

    def __init__(self, likelihood: BoundLikelihood) -> None:
        self.likelihood = likelihood
        self.is_gaussian: bool = likelihood.gaussian_noise is not None
        self.rows: int = 0
        self.count: int = 0
        self.log_likelihood: float = 0.0
        self.residual: float = 0.0

    @torch.no_grad()
    def add(self, outputs: Tensor, y: Tensor) -> None:
        """Add a batch of outputs (B, *out) and targets y (B, ...)."""
        self.rows += len(y)
        self.log_likelihood += float(self.likelihood.log_prob(outputs, y).double().sum())
        if self.is_gaussian:
            self.residual += float((y.to(outputs.dtype) - outputs).double().square().sum())
            self.count += y.numel()
