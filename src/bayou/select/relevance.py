"""Which inputs matter: prior scales by input, from the evidence of the network in the limit of many
hidden units.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from bayou import rng
from bayou.training.lbfgs import Lbfgs

Scales = list[tuple[float, ...]]
MAX_ROWS: Final = 300  # of which the evidence is computed
PASSES: Final = 20  # evaluations of the evidence
LOG_STD: Final = 2.0  # of the logs of all scales
LEAST: Final = 0.03  # of the scales of inputs, where their mean square is 1
JITTER: Final = 1e-6


def input_scales(
    x: Tensor, y: Tensor, held: Tensor, seed: int
) -> tuple[Scales, list[dict[str, float]]]:
    """Prior scales of inputs, by their effect on y.

    Args:
        x: inputs, (N, d).
        y: targets, (N, D).
        held: the rows that each of K folds holds out, (K, N).
        seed: of the rows, where there are more than 300.

    Returns:
        The scales of each fold, none where one scale for all inputs predicts the held-out rows
        better; the mean squared errors of both.
    """
    some = rng.permutation(len(x), seed)[:MAX_ROWS].sort().values
    x, y, held = x.detach().cpu().double()[some], y.detach().cpu()[some], held[:, some]
    free = torch.arange(2 * len(held)) >= len(held)
    wide = WideNetworks(x, y, ~held.repeat(2, 1), free)
    equal, each = (float(one[held].mean()) for one in wide.errors().chunk(2))
    size = x.std(0).clamp_min(LEAST * x.std())
    scales = wide.logs[len(held) :, :-4].exp()
    scales = (scales / scales.square().mean(1, keepdim=True).sqrt()).clamp_min(LEAST)
    scales = scales * size.square().mean().sqrt() / size
    trials = [{"by input": 0.0, "mse": equal}, {"by input": 1.0, "mse": each}]
    return [tuple(own) if each < equal else () for own in scales.tolist()], trials


class WideNetworks:
    r"""K Gaussian processes y ~ N(0, s²·k + σ²·I), the limits of networks with many erf units
    (Williams 1997).

    k(x, x') = 2/π·asin(2·u(x, x')/√((1 + 2·u(x, x))·(1 + 2·u(x', x')))), u(x, x') = b² + Σ_i
    a_i²·x_i·x'_i, with prior scales a_i of inputs and b of biases. All maximize the evidence, with
    log-normal priors around equal scales.

    Args:
        x: inputs, (N, d); they are standardized.
        y: targets, (N, D), likewise.
        masks: the rows of each process, (K, N).
        free: whether the scales of the inputs of a process may differ, (K,).
    """

    def __init__(self, x: Tensor, y: Tensor, masks: Tensor, free: Tensor) -> None:
        self.x, self.y, self.masks, self.free = (
            _standardized(x),
            _standardized(y),
            masks.double(),
            free,
        )
        d = self.x.shape[1]
        self.first = self.x.new_zeros(d + 4)  # differences of log a, and log a, b, s and σ
        self.first[d], self.first[-1] = -0.5 * math.log(d), math.log(0.5)
        start = self.first.expand(len(masks), -1).contiguous()
        self.logs = Lbfgs(self._evaluate, start, torch.zeros_like(start[:, 0])).run(PASSES)

    def errors(self) -> Tensor:
        """Mean squared residuals of all rows, (K, N)."""
        k, noises = self._kernel(self.logs, torch.arange(len(self.logs)))
        own = self.masks[:, :, None]
        root = torch.linalg.cholesky(own * k * own.mT + torch.diag_embed(noises))
        return (self.y - (k * own.mT) @ torch.cholesky_solve(own * self.y, root)).square().mean(2)

    def _kernel(self, logs: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        """s²·k of all rows, (K, N, N), and σ² of the rows of a problem, 1 of others, (K, N)."""
        a, b, s, noise = logs[:, -4:].exp().unbind(1)
        z = self.x * ((logs[:, :-4] * self.free[problems, None]).exp() * a[:, None])[:, None]
        u = 2 * (z @ z.mT + b.square()[:, None, None])
        norm = (1 + u.diagonal(dim1=1, dim2=2)).sqrt()
        k = (
            s.square()[:, None, None]
            * (2 / math.pi)
            * torch.asin(u / (norm[:, :, None] * norm[:, None]))
        )
        return k, torch.where(self.masks[problems] > 0, noise.square()[:, None] + JITTER, 1.0)

    def _evaluate(self, points: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        own, logs = self.masks[problems, :, None], points.detach().requires_grad_()
        with torch.enable_grad():
            k, noises = self._kernel(logs, problems)
        root, failed = torch.linalg.cholesky_ex(
            own * k.detach() * own.mT + torch.diag_embed(noises.detach())
        )
        failed = (failed > 0) | ~root.isfinite().all(2).all(
            1
        )  # scales out of range: a trial that is too far
        root = torch.where(failed[:, None, None], torch.eye(len(self.x), dtype=root.dtype), root)
        inverse = torch.cholesky_inverse(root)
        weighted = inverse @ (own * self.y)  # (K, N, D)
        shift, outputs = (points - self.first) / LOG_STD, self.y.shape[1]
        log_det = root.diagonal(dim1=1, dim2=2).log().sum(1)
        outer = (
            own * (outputs * inverse - weighted @ weighted.mT) * own.mT / 2
        )  # the derivative by the covariance
        (gradients,) = torch.autograd.grad(
            (k, noises), logs, (outer, outer.diagonal(dim1=1, dim2=2))
        )
        values = (
            0.5 * (shift.square().sum(1) + (weighted * own * self.y).sum((1, 2)))
            + outputs * log_det
        )
        return values.masked_fill(failed, torch.nan), gradients + shift / LOG_STD


def _standardized(values: Tensor) -> Tensor:
    values = values.double().flatten(1)
    return (values - values.mean(0)) / values.std(0, correction=0).clamp_min(
        torch.finfo(torch.float32).tiny
    )
