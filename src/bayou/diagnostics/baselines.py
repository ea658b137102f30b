"""Baselines without a network: a constant and a linear prediction, fitted to the training rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bayou import rng
from bayou.likelihoods import BoundLikelihood, HeteroscedasticGaussian
from bayou.predictive import Predictive

Baseline = Callable[[Any], Predictive]  # inputs (B, ...) to a prediction of one function
ROWS, COLUMNS = (
    10_000,
    4096,
)  # maximum number of training rows used, and of inputs of a linear model
NUMBERS = 2**24  # outputs of all rows up to which classes have baselines
PENALTIES = 61  # candidates for the penalty of the ridge regression


def baselines(
    likelihood: BoundLikelihood, x: Any, y: Tensor, outputs: Sequence[int], seed: int = 0
) -> dict[str, Baseline]:
    """A constant and, for inputs that are one tensor of numbers, a linear prediction of y: in
    float64, on the CPU.

    Numbers: N(mean, variance) of y; a ridge regression whose penalty has the least leave-one-out
    error, with its predictive variance σ²·(1 + xᵀ(XᵀX + λ)⁻¹x). Classes and counts: the
    frequencies; a logistic (Poisson) regression on standardized inputs with a N(0, 1) prior.
    ``outputs``: the shape of the network's outputs for one row. Predictions of numbers have all
    coordinates of y on one axis, (B, K).
    """
    if min(len(y), ROWS) * math.prod(outputs) > NUMBERS and likelihood.support != "real":
        return {}
    if len(y) > ROWS:
        some = rng.permutation(len(y), rng.fold(seed, "baselines"))[:ROWS].to(y.device)
        x, y = x[some.to(x.device)] if isinstance(x, Tensor) else x, y[some]
    y = y.detach().cpu()
    likelihood = copy.deepcopy(likelihood).cpu().double().requires_grad_(False)
    make = _ridge if likelihood.support == "real" else _generalized(likelihood, outputs)
    nothing = _Design(torch.zeros(len(y), 0, dtype=torch.float64))
    found = {"constant": _on(nothing, make(nothing.train, y))}
    if isinstance(x, Tensor) and x.is_floating_point() and 0 < x[0].numel() <= COLUMNS:
        design = _Design(x.detach().cpu().double().flatten(1))
        found["linear"] = _on(design, make(design.train, y))
    return found


class _Design:
    """Inputs standardized by their training rows; a column that does not vary there is left out."""

    def __init__(self, x: Tensor) -> None:
        self.mean = x.mean(0)
        std = (x - self.mean).square().mean(0).sqrt()
        self.kept = std > 1e-9 * (1 + self.mean.abs())
        self.std = std[self.kept]
        self.train = self(x)

    def __call__(self, x: Tensor) -> Tensor:
        if not len(self.mean):
            return torch.zeros(len(x), 0, dtype=torch.float64)
        centered = x.detach().cpu().double().flatten(1) - self.mean
        return centered[:, self.kept] / self.std


def _on(design: _Design, predict: Callable[[Tensor], Predictive]) -> Baseline:
    return lambda x: predict(design(x[0] if isinstance(x, tuple) else x))


def _ridge(x: Tensor, y: Tensor) -> Callable[[Tensor], Predictive]:
    """Ridge regression of standardized x (N, D) on y (N, ...), with an intercept that is not
    penalized.
    """
    target = y.double().reshape(len(y), -1)  # (N, K)
    middle = target.mean(0)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    projected = u.T @ (target - middle)  # (R, K)
    best, penalty = math.inf, 1.0
    for candidate in (len(y) * torch.logspace(-5, 3, PENALTIES, dtype=torch.float64)).tolist():
        shrink = s.square() / (s.square() + candidate)
        leverage = (u.square() * shrink).sum(1, keepdim=True) + 1 / len(y)
        left_out = (target - middle - (u * shrink) @ projected) / (1 - leverage).clamp_min(1e-6)
        error = float(left_out.square().mean())
        if error < best:
            best, penalty = error, candidate
    gain = s / (s.square() + penalty)
    weights = vt.T @ (gain[:, None] * projected)
    effective = float((s * gain).sum()) + 1
    residual = target - middle - x @ weights
    noise = residual.square().sum(0) / max(len(y) - effective, 1.0)
    noise = noise.clamp_min(1e-12 * target.square().mean().clamp_min(1e-12))

    def predict(new: Tensor) -> Predictive:
        mean = middle + new @ weights
        spread = ((new @ vt.T).square() / (s.square() + penalty)).sum(1, keepdim=True) + 1 / len(y)
        variance = noise * (1 + spread)
        outputs = torch.cat([mean, variance.log()], -1).unsqueeze(0)
        return Predictive(HeteroscedasticGaussian().bind(dtype=torch.float64), outputs)

    return predict


def _generalized(
    likelihood: BoundLikelihood, outputs: Sequence[int]
) -> Callable[[Tensor, Tensor], Callable[[Tensor], Predictive]]:
    """The mode of f = W·x + b under this likelihood, W ~ N(0, 1) and b ~ N(0, 10²), by L-BFGS."""

    def fit(x: Tensor, y: Tensor) -> Callable[[Tensor], Predictive]:
        width = math.prod(outputs)
        weights, bias = (
            torch.zeros(n, width, dtype=torch.float64, requires_grad=True) for n in (x.shape[1], 1)
        )
        optimizer = torch.optim.LBFGS([weights, bias], max_iter=200, line_search_fn="strong_wolfe")

        def loss() -> float:
            optimizer.zero_grad()
            f = (x @ weights + bias).reshape(len(x), *outputs)
            prior = 0.5 * weights.square().sum() + 0.005 * bias.square().sum()
            value = prior - likelihood.log_prob(f, y).sum()
            value.backward()
            return float(value.detach())

        with torch.enable_grad():
            optimizer.step(loss)
        w, b = weights.detach(), bias.detach()
        return lambda new: Predictive(likelihood, (new @ w + b).reshape(1, len(new), *outputs))

    return fit
