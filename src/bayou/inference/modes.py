"""Modes of one network under many priors and on many subsets of its rows, optimized together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from bayou.core.params import Params
from bayou.inference.prior_scale import require_normal
from bayou.network import VmapOrLoop, forward_inputs
from bayou.network.target import Target
from bayou.training.lbfgs import Lbfgs

MAX_NUMBERS: Final = 2**24  # in the largest activation of all problems of one call


@final
class Modes:
    """K modes of −Σ_n m_kn·log p(y_n | x_n, w) + ½·Σ_i c_ki·((w_i − μ_i)/s_i)², by L-BFGS.

    All problems are evaluated together, as one stack of weights. The target must have fixed Normal
    priors, N(μ, s²), and a network whose outputs are a deterministic function of its weights.

    Args:
        target: network, likelihood and prior; at its current weights all problems start.
        rows: x and y of all N rows.
        masks: m, (K, N): the rows of each problem.
        factors: c: for each problem, multipliers of prior precisions by tensor name, numbers or
            tensors that are broadcast to its shape; 1 for a missing name.
        enough: the gain within 25 passes below which a problem has ended, a number or (K,).
        start: initial weights of each problem, a stack (K, ...).
        anchors: means of the priors of each problem, a stack (K, ...), instead of μ.
        targets: y of each problem, (K, N, ...), instead of those of the rows.
    """

    x: Any
    y: Tensor

    def __init__(
        self,
        target: Target,
        rows: tuple[Any, Tensor],
        masks: Tensor,
        factors: Sequence[Mapping[str, float | Tensor]],
        enough: float | Tensor,
        start: Params | None = None,
        anchors: Params | None = None,
        targets: Tensor | None = None,
    ) -> None:
        self.target = target
        self.x, self.y = rows
        self.targets = targets
        self.names: list[str] = target.free
        weights = target.start()
        self.shapes: list[torch.Size] = [weights[name].shape for name in self.names]
        if not start:
            start = {
                name: weights[name].expand(len(masks), *weights[name].shape) for name in self.names
            }
        flat_start = self._flatten(start)
        self.masks: Tensor = masks.to(flat_start)
        self._set_prior(factors, anchors, flat_start)
        numbers = target.network.dry_run(lambda: weights, forward_inputs(self.x)).numbers
        self.chunk: int = max(1, MAX_NUMBERS // max(1, numbers * len(self.y)))
        target_axes = () if targets is None else (0,)
        self._losses = VmapOrLoop(self._loss, (0, 0, 0, 0, *target_axes))
        self._outputs = VmapOrLoop(self._forward, (0,))
        gains = torch.as_tensor(enough, dtype=torch.float64, device=flat_start.device)
        gains = gains.expand(len(flat_start))
        self.optimizer: Lbfgs = Lbfgs(self._evaluate, flat_start.contiguous(), gains)

    def _set_prior(
        self,
        factors: Sequence[Mapping[str, float | Tensor]],
        anchors: Params | None,
        flat_start: Tensor,
    ) -> None:
        """Set the means and precisions of the prior of each problem, (K, D)."""
        means: Params = {}
        precisions: Params = {}
        for name, prior in require_normal(self.target.priors, self.names).items():
            means[name] = prior.mean.detach().expand(1, *prior.shape)
            precision = torch.exp(-2 * prior.log_scale.detach())
            precisions[name] = precision.expand(1, *prior.shape)
        self.means: Tensor = self._flatten(means if anchors is None else anchors)
        self.means = self.means.to(flat_start).expand_as(flat_start)
        rows = []
        for factor in factors:
            row = {name: value * factor.get(name, 1.0) for name, value in precisions.items()}
            rows.append(self._flatten(row))
        self.precisions: Tensor = torch.cat(rows)

    def run(self, passes: int, report: Callable[[int], None] | None = None) -> Params:
        """Optimize, and return the weights of each problem: a stack (K, ...).

        Args:
            passes: the largest number of evaluations of each problem, including those of earlier
                calls.
            report: called with the number of passes so far after every pass.
        """
        return self._tensors(self.optimizer.run(passes, report))

    @property
    def passes(self) -> int:
        """Evaluations of the loss of one problem so far, of all problems."""
        return self.optimizer.evaluations

    @torch.no_grad()
    def errors(self) -> Tensor:
        """Compute the errors of all rows at the current modes, (K, N).

        Squared residuals where all rows have one noise, −log p otherwise.
        """
        points = self.optimizer.run(0)
        outputs = [self._outputs(chunk) for chunk in points.split(self.chunk)]
        return self._errors(torch.cat(outputs))

    def error_of_zero(self) -> Tensor:
        """Compute the same errors of outputs 0, (N,)."""
        outputs = torch.zeros_like(self._forward(self.optimizer.points[0]))
        return self._errors(outputs.unsqueeze(0))[0]

    def _errors(self, outputs: Tensor) -> Tensor:
        """Compute the errors of outputs (K, N, *out): (K, N)."""
        if self.target.likelihood.gaussian_noise is None:
            return -self.target.likelihood.log_prob(outputs, self.y).double()
        return (outputs - self.y).square().flatten(2).mean(2).double()

    def _flatten(self, stack: Params) -> Tensor:
        """Join the tensors of each problem to one vector: (K, D)."""
        return torch.cat([stack[name].flatten(1) for name in self.names], 1)

    def _tensors(self, flat: Tensor) -> Params:
        """Divide vectors (..., D) into tensors by name."""
        sizes = [math.prod(shape) for shape in self.shapes]
        vectors = flat.split(sizes, -1)
        tensors: Params = {}
        for name, vector, shape in zip(self.names, vectors, self.shapes, strict=True):
            unflattened = vector.unflatten(-1, shape or (1,))
            tensors[name] = unflattened.reshape(*flat.shape[:-1], *shape)
        return tensors

    def _forward(self, flat: Tensor) -> Tensor:
        """Compute the outputs of all rows with the weights of one problem, (D,)."""
        return self.target.network.evaluate(self._tensors(flat), *forward_inputs(self.x))

    def _loss(
        self, flat: Tensor, mask: Tensor, precision: Tensor, mean: Tensor, y: Tensor | None = None
    ) -> Tensor:
        """Compute the objective of one problem, a scalar."""
        if y is None:
            y = self.y
        log_likelihood = (mask * self.target.likelihood.log_prob(self._forward(flat), y)).sum()
        return 0.5 * (precision * (flat - mean).square()).sum() - log_likelihood

    @torch.enable_grad()
    def _evaluate(self, points: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        """Compute losses (P,) and gradients (P, D) of some problems, given by their numbers."""
        losses: list[Tensor] = []
        gradients: list[Tensor] = []
        point_chunks = points.detach().split(self.chunk)
        index_chunks = problems.split(self.chunk)
        for chunk, index in zip(point_chunks, index_chunks, strict=True):
            targets = () if self.targets is None else (self.targets[index],)
            chunk_losses = self._losses(
                chunk.requires_grad_(),
                self.masks[index],
                self.precisions[index],
                self.means[index],
                *targets,
            )
            # The weights of a problem are in its own loss only.
            gradients += torch.autograd.grad(chunk_losses.sum(), chunk)
            losses.append(chunk_losses.detach())
        return torch.cat(losses), torch.cat(gradients)
