"""Prior scales by input, by the evidence of a network in the limit of many hidden units."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.training.lbfgs import Lbfgs

Scales = list[tuple[float, ...]]
MAX_ROWS: Final = 300  # of which the evidence is computed
PASSES: Final = 20  # evaluations of the evidence
LOG_STD: Final = 2.0  # of the logs of all scales
LEAST: Final = 0.03  # of the scales of inputs, where their mean square is 1
JITTER: Final = 1e-6


def input_scales(
    x: Tensor, y: Tensor, held_out: Tensor, seed: int
) -> tuple[Scales, list[dict[str, Any]]]:
    """Select the prior scales of inputs, by their effect on y.

    Args:
        x: inputs, (N, d).
        y: targets, (N, D).
        held_out: the rows that each of K folds holds out, (K, N).
        seed: of the rows, where there are more than 300.

    Returns:
        The scales of each fold, none where one scale for all inputs predicts the held-out rows
        better; the mean squared errors of both.
    """
    rows = rng.permutation(len(x), seed)[:MAX_ROWS].sort().values
    x = x.detach().cpu().double()[rows]
    y = y.detach().cpu()[rows]
    held_out = held_out[:, rows]
    folds = len(held_out)
    has_free_scales = torch.arange(2 * folds) >= folds
    networks = WideNetworks(x, y, ~held_out.repeat(2, 1), has_free_scales)
    equal_errors, free_errors = networks.errors().chunk(2)
    equal_error = float(equal_errors[held_out].mean())
    free_error = float(free_errors[held_out].mean())
    trials: list[dict[str, Any]] = [
        {"scales": "one prior scale for all inputs", "mse": equal_error},
        {"scales": "a prior scale for each input", "mse": free_error},
    ]
    if not free_error < equal_error:
        return [()] * folds, trials
    size = x.std(0).clamp_min(LEAST * x.std())
    scales = networks.logs[folds:, :-4].exp()
    scales = (scales / scales.square().mean(1, keepdim=True).sqrt()).clamp_min(LEAST)
    scales = scales * size.square().mean().sqrt() / size
    return [tuple(of_fold) for of_fold in scales.tolist()], trials


class WideNetworks:
    r"""Gaussian processes that are the limits of networks with many erf units (Williams 1997).

    y ~ N(0, s²·k + σ²·I) with k(x, x') = 2/π·asin(2·u(x, x')/√((1 + 2·u(x, x))·(1 + 2·u(x', x')))),
    u(x, x') = b² + Σ_i a_i²·x_i·x'_i, with prior scales a_i of inputs and b of biases. All K of
    them maximize the evidence, with log-normal priors around equal scales.

    Args:
        x: inputs, (N, d); they are standardized.
        y: targets, (N, D), likewise.
        masks: the rows of each process, (K, N).
        has_free_scales: whether the scales of the inputs of a process may differ, (K,).
    """

    def __init__(self, x: Tensor, y: Tensor, masks: Tensor, has_free_scales: Tensor) -> None:
        self.x = _standardize(x)
        self.y = _standardize(y)
        self.masks = masks.double()
        self.has_free_scales = has_free_scales
        d = self.x.shape[1]
        self.first = self.x.new_zeros(d + 4)  # differences of log a, and log a, b, s and σ
        self.first[d] = -0.5 * math.log(d)
        self.first[-1] = math.log(0.5)
        start = self.first.expand(len(masks), -1).contiguous()
        self.logs = Lbfgs(self._evaluate, start, torch.zeros_like(start[:, 0])).run(PASSES)

    def errors(self) -> Tensor:
        """Return mean squared residuals of all rows, (K, N)."""
        k, noises = self._kernel(self.logs, torch.arange(len(self.logs)))
        masks = self.masks[:, :, None]
        root = torch.linalg.cholesky(masks * k * masks.mT + torch.diag_embed(noises))
        weights = torch.cholesky_solve(masks * self.y, root)
        return (self.y - (k * masks.mT) @ weights).square().mean(2)

    def _kernel(self, logs: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        """Return s²·k of all rows, (K, N, N), and σ² of the rows of a problem, 1 of others."""
        a, b, s, noise = logs[:, -4:].exp().unbind(1)
        scales = (logs[:, :-4] * self.has_free_scales[problems, None]).exp() * a[:, None]
        z = self.x * scales[:, None]
        u = 2 * (z @ z.mT + b.square()[:, None, None])
        norm = (1 + u.diagonal(dim1=1, dim2=2)).sqrt()
        cosines = u / (norm[:, :, None] * norm[:, None])
        k = s.square()[:, None, None] * (2 / math.pi) * torch.asin(cosines)
        noises = torch.where(self.masks[problems] > 0, noise.square()[:, None] + JITTER, 1.0)
        return k, noises

    def _evaluate(self, points: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        """Return −log evidence − log prior of some problems, and its gradient."""
        masks = self.masks[problems, :, None]
        logs = points.detach().requires_grad_()
        with torch.enable_grad():
            k, noises = self._kernel(logs, problems)
        covariance = masks * k.detach() * masks.mT + torch.diag_embed(noises.detach())
        root, info = torch.linalg.cholesky_ex(covariance)
        # scales out of range: a trial that is too far
        has_failed = (info > 0) | ~root.isfinite().all(2).all(1)
        identity = torch.eye(len(self.x), dtype=root.dtype)
        root = torch.where(has_failed[:, None, None], identity, root)
        inverse = torch.cholesky_inverse(root)
        weighted = inverse @ (masks * self.y)  # (K, N, D)
        shift = (points - self.first) / LOG_STD
        outputs = self.y.shape[1]
        log_det = root.diagonal(dim1=1, dim2=2).log().sum(1)
        # the derivative by the covariance
        outer = masks * (outputs * inverse - weighted @ weighted.mT) * masks.mT / 2
        (gradients,) = torch.autograd.grad(
            (k, noises), logs, (outer, outer.diagonal(dim1=1, dim2=2))
        )
        quadratic = shift.square().sum(1) + (weighted * masks * self.y).sum((1, 2))
        values = 0.5 * quadratic + outputs * log_det
        return values.masked_fill(has_failed, torch.nan), gradients + shift / LOG_STD


def _standardize(values: Tensor) -> Tensor:
    """Return columns with mean 0 and standard deviation 1."""
    values = values.double().flatten(1)
    scale = values.std(0, correction=0).clamp_min(torch.finfo(torch.float32).tiny)
    return (values - values.mean(0)) / scale
