"""Baselines without a network: a constant and a linear prediction, fitted to the training rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bayou.core import rng
from bayou.likelihoods import BoundLikelihood, BoundLog, HeteroscedasticGaussian, Log
from bayou.likelihoods.predictive import Predictive

Baseline = Callable[[Any], Predictive]  # inputs (B, ...) to a prediction of one function
DesignBaseline = Callable[[Tensor], Predictive]  # standardized inputs (B, D) to a prediction
MAX_ROWS = 10_000  # training rows that are used
MAX_COLUMNS = 4096  # inputs of a linear model
MAX_NUMBERS = 2**24  # outputs of all rows up to which classes have baselines
PENALTY_CANDIDATES = 61  # of the ridge regression
MIN_RELATIVE_STD = 1e-9  # of a column that varies


def baselines(
    likelihood: BoundLikelihood, x: Any, y: Tensor, outputs: Sequence[int], seed: int = 0
) -> dict[str, Baseline]:
    """Fit a constant and, for inputs that are one tensor of numbers, a linear prediction of y.

    Numbers: N(mean, variance) of y; a ridge regression whose penalty has the least leave-one-out
    error, with its predictive variance σ²·(1 + xᵀ(XᵀX + λ)⁻¹x); of a log-normal y the same for
    log y. Classes, counts, times: the frequencies; a logistic (Poisson, Weibull, ...) regression on
    standardized inputs with a N(0, 1) prior. In float64, on the CPU.

    Args:
        likelihood: p(y | f) of the posterior that is compared with them.
        x: the training inputs (N, ...).
        y: the training targets (N, *event); at most 10,000 random rows are used.
        outputs: the shape of the network's outputs for one row.
        seed: of the random rows.

    Returns:
        "constant" and "linear", functions from inputs to predictions; no "linear" if x are not one
        tensor of at most 4,096 numbers, nothing if y has too many classes. Predictions of numbers
        have all coordinates of y on one axis, (B, K).
    """
    output_numbers = min(len(y), MAX_ROWS) * math.prod(outputs)
    if output_numbers > MAX_NUMBERS and likelihood.support != "real":
        return {}
    if len(y) > MAX_ROWS:
        indices = rng.permutation(len(y), rng.fold(seed, "baselines"))[:MAX_ROWS].to(y.device)
        if isinstance(x, Tensor):
            x = x[indices.to(x.device)]
        y = y[indices]
    y = y.detach().cpu()
    likelihood = copy.deepcopy(likelihood).cpu().double()
    fit = _generalized_fit(likelihood, outputs)
    if isinstance(likelihood, BoundLog):
        fit = _fit_log_ridge
    elif likelihood.support == "real" and likelihood.is_linear_in_y:
        fit = _fit_ridge
    no_inputs = _Design(torch.zeros(len(y), 0, dtype=torch.float64))
    fitted = {"constant": _predict_on(no_inputs, fit(no_inputs.train, y))}
    if isinstance(x, Tensor) and x.is_floating_point() and 0 < x[0].numel() <= MAX_COLUMNS:
        design = _Design(x.detach().cpu().double().flatten(1))
        fitted["linear"] = _predict_on(design, fit(design.train, y))
    return fitted


class _Design:
    """Inputs standardized by their training rows, without the columns that do not vary there.

    Args:
        x: the training inputs (N, D).
    """

    def __init__(self, x: Tensor) -> None:
        self.mean = x.mean(0)
        std = (x - self.mean).square().mean(0).sqrt()
        self.varies = std > MIN_RELATIVE_STD * (1 + self.mean.abs())
        self.std = std[self.varies]
        self.train = self(x)

    def __call__(self, x: Tensor) -> Tensor:
        """Standardize inputs (B, ...): (B, columns that vary)."""
        if not len(self.mean):
            return torch.zeros(len(x), 0, dtype=torch.float64)
        centered = x.detach().cpu().double().flatten(1) - self.mean
        return centered[:, self.varies] / self.std


def _predict_on(design: _Design, predict: DesignBaseline) -> Baseline:
    """Return the prediction for inputs that are not standardized yet."""
    return lambda x: predict(design(x[0] if isinstance(x, tuple) else x))


def _fit_ridge(x: Tensor, y: Tensor) -> DesignBaseline:
    """Fit a ridge regression of y (N, ...) on standardized x (N, D), its intercept unpenalized."""
    target = y.double().reshape(len(y), -1)  # (N, K)
    intercept = target.mean(0)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    projected = u.T @ (target - intercept)  # (R, K)
    least_error = math.inf
    penalty = 1.0
    penalties = len(y) * torch.logspace(-5, 3, PENALTY_CANDIDATES, dtype=torch.float64)
    for candidate in penalties.tolist():
        shrinkage = s.square() / (s.square() + candidate)
        leverage = (u.square() * shrinkage).sum(1, keepdim=True) + 1 / len(y)
        residual = target - intercept - (u * shrinkage) @ projected
        left_out_residual = residual / (1 - leverage).clamp_min(1e-6)
        error = float(left_out_residual.square().mean())
        if error < least_error:
            least_error = error
            penalty = candidate
    gain = s / (s.square() + penalty)
    weights = vt.T @ (gain[:, None] * projected)
    effective_weights = float((s * gain).sum()) + 1
    residual = target - intercept - x @ weights
    noise = residual.square().sum(0) / max(len(y) - effective_weights, 1.0)
    noise = noise.clamp_min(1e-12 * target.square().mean().clamp_min(1e-12))

    def predict(new_x: Tensor) -> Predictive:
        mean = intercept + new_x @ weights
        leverage = ((new_x @ vt.T).square() / (s.square() + penalty)).sum(1, keepdim=True)
        variance = noise * (1 + (leverage + 1 / len(y)))
        outputs = torch.cat([mean, variance.log()], -1).unsqueeze(0)
        return Predictive(HeteroscedasticGaussian().bind(dtype=torch.float64), outputs)

    return predict


def _fit_log_ridge(x: Tensor, y: Tensor) -> DesignBaseline:
    """Fit a ridge regression of log y."""
    predict_log = _fit_ridge(x, y.double().log())
    likelihood = Log(HeteroscedasticGaussian()).bind(dtype=torch.float64)
    return lambda new_x: Predictive(likelihood, predict_log(new_x).outputs)


def _generalized_fit(
    likelihood: BoundLikelihood, outputs: Sequence[int]
) -> Callable[[Tensor, Tensor], DesignBaseline]:
    """Return the fit of f = W·x + b under a likelihood: its mode by L-BFGS.

    The prior is W ~ N(0, 1) and b ~ N(0, 10²). Parameters of the likelihood that are learned are
    learned here, too.
    """

    def fit(x: Tensor, y: Tensor) -> DesignBaseline:
        width = math.prod(outputs)
        of_rows = copy.deepcopy(likelihood)
        learned = [value for value in of_rows.parameters() if value.requires_grad]
        weights = torch.zeros(x.shape[1], width, dtype=torch.float64, requires_grad=True)
        bias = torch.zeros(1, width, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [weights, bias, *learned], max_iter=200, line_search_fn="strong_wolfe"
        )

        def loss() -> float:
            optimizer.zero_grad()
            f = (x @ weights + bias).reshape(len(x), *outputs)
            prior = 0.5 * weights.square().sum() + 0.005 * bias.square().sum()
            value = prior - of_rows.log_prob(f, y).sum()
            value.backward()
            return float(value.detach())

        with torch.enable_grad():
            optimizer.step(loss)
        of_rows.requires_grad_(False)
        mode_weights = weights.detach()
        mode_bias = bias.detach()

        def predict(new_x: Tensor) -> Predictive:
            f = new_x @ mode_weights + mode_bias
            return Predictive(of_rows, f.reshape(1, len(new_x), *outputs))

        return predict

    return fit
