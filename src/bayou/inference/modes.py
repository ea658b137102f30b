"""Modes of one network under many priors and on many subsets of its rows, found together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from bayou.network import VmapOrLoop, forward_inputs
from bayou.params import Params
from bayou.priors import BoundNormal
from bayou.target import Target
from bayou.training.lbfgs import Lbfgs

MAX_NUMBERS: Final = 2**24  # in the largest activation of all problems of one call


@final
class Modes:
    """K modes, argmin_w −Σ_n m_kn·log p(y_n | x_n, w) + ½·Σ_i c_ki·((w_i − μ_i)/s_i)², by L-BFGS on
    all of them.

    The target must have fixed Normal priors, N(μ, s²), and a network whose outputs are a
    deterministic function of its weights.

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
        self.target, (self.x, self.y), self.names = target, rows, target.free
        given = target.start()
        self.sizes = [given[name].numel() for name in self.names]
        self.shapes = [given[name].shape for name in self.names]
        first = start or {
            name: given[name].expand(len(masks), *given[name].shape) for name in self.names
        }
        flat = torch.cat([first[name].flatten(1) for name in self.names], 1)
        self.masks = masks.to(flat)
        precisions, means = [], []
        for name in self.names:
            prior = target.priors[name]
            assert isinstance(prior, BoundNormal)
            precisions.append(
                torch.exp(-2 * prior.log_scale.detach()).expand(prior.shape).flatten()
            )
            means.append(prior.mean.detach().expand(prior.shape).flatten())
        shapes = list(zip(self.names, self.shapes, strict=True))
        self.means = torch.cat(means).expand_as(flat)
        if anchors is not None:
            self.means = torch.cat([anchors[name].flatten(1) for name in self.names], 1).to(flat)
        self.targets = targets
        each = [
            [flat.new_ones(shape) * factor.get(name, 1.0) for name, shape in shapes]
            for factor in factors
        ]
        self.precisions = torch.stack(
            [torch.cat([one.flatten() for one in every]) for every in each]
        )
        self.precisions *= torch.cat(precisions)
        numbers = target.network.dry_run(lambda: given, forward_inputs(self.x)).numbers
        self.chunk = max(1, MAX_NUMBERS // max(1, numbers * len(self.y)))
        own_targets = () if targets is None else (0,)
        self._losses = VmapOrLoop(self._loss, (0, 0, 0, 0, *own_targets))
        self._outputs = VmapOrLoop(self._forward, (0,))
        gains = torch.as_tensor(enough, dtype=torch.float64, device=flat.device).expand(len(flat))
        self.optimizer = Lbfgs(self._evaluate, flat.contiguous(), gains)

    def run(self, passes: int, report: Callable[[int], None] | None = None) -> Params:
        """The weights after at most ``passes`` evaluations of every problem in all: a stack (K,
        ...).

        Args:
            passes: evaluations of each problem, including those of earlier calls.
            report: called with the number of passes so far after every pass.
        """
        return self._tensors(self.optimizer.run(passes, report))

    @property
    def passes(self) -> int:
        """Evaluations of the loss of one problem so far, of all problems."""
        return self.optimizer.evaluations

    @torch.no_grad()
    def errors(self) -> Tensor:
        """The errors of all rows, (K, N): squared residuals where all rows have one noise, −log p
        otherwise.
        """
        points = self.optimizer.run(0)
        return self._errors(torch.cat([self._outputs(part) for part in points.split(self.chunk)]))

    def error_of_zero(self) -> Tensor:
        """The same of outputs 0, (N,)."""
        return self._errors(torch.zeros_like(self._forward(self.optimizer.points[0])).unsqueeze(0))[
            0
        ]

    def _errors(self, f: Tensor) -> Tensor:
        if self.target.likelihood.gaussian_noise is None:
            return -self.target.likelihood.log_prob(f, self.y).double()
        return (f - self.y).square().flatten(2).mean(2).double()

    def _tensors(self, flat: Tensor) -> Params:
        parts = flat.split(self.sizes, -1)
        return {n: part.unflatten(-1, shape or (1,)).reshape(*flat.shape[:-1], *shape)
                for n, part, shape in zip(self.names, parts, self.shapes, strict=True)}  # fmt: skip

    def _forward(self, flat: Tensor) -> Tensor:
        return self.target.network.evaluate(self._tensors(flat), *forward_inputs(self.x))

    def _loss(
        self, flat: Tensor, mask: Tensor, precision: Tensor, mean: Tensor, y: Tensor | None = None
    ) -> Tensor:
        if y is None:
            y = self.y
        log_likelihood = (mask * self.target.likelihood.log_prob(self._forward(flat), y)).sum()
        return 0.5 * (precision * (flat - mean).square()).sum() - log_likelihood

    @torch.enable_grad()
    def _evaluate(self, points: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        values, gradients = list[Tensor](), list[Tensor]()
        for some, index in zip(
            points.detach().split(self.chunk), problems.split(self.chunk), strict=True
        ):
            own_targets = () if self.targets is None else (self.targets[index],)
            each = self._losses(
                some.requires_grad_(),
                self.masks[index],
                self.precisions[index],
                self.means[index],
                *own_targets,
            )
            gradients += torch.autograd.grad(
                each.sum(), some
            )  # the points of a problem are in its own loss only
            values.append(each.detach())
        return torch.cat(values), torch.cat(gradients)
