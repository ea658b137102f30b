"""Strata of rows in which two samples have similar inputs, by an estimated propensity score."""

from __future__ import annotations

import torch
from torch import Tensor

from bayou.core import rng

FOLDS = 5
PENALTY = 10.0  # of the squared coefficients: 1 at a coefficient of 0.45
NEWTON_STEPS = 8
MAX_LOGIT = 12.0  # of a fitted probability, so that a Newton step stays finite
ROWS_OF_STRATUM = 50  # in both samples together, at least
MAX_STRATA = 10
MIN_ROWS_OF_SAMPLE = 5  # of each sample in a stratum; fewer have nothing to be compared with


def fit_logistic(x: Tensor, label: Tensor, penalty: float = PENALTY) -> Tensor:
    """Fit a logistic regression with a penalty on its coefficients, by Newton's method.

    min_β Σ_i log(1 + exp(−s_i·x_iᵀβ)) + penalty/2·|β|², s = ±1, without a penalty on the constant,
    which is the last coefficient.

    Args:
        x: (N, D) in float64.
        label: 0 or 1, (N,).
        penalty: a positive number. Default: 10.

    Returns:
        Coefficients (D + 1,).
    """
    x = torch.cat((x, torch.ones_like(x[:, :1])), 1)
    ridge = torch.full((x.shape[1],), penalty, dtype=x.dtype)
    ridge[-1] = 1e-6
    coefficients = torch.zeros(x.shape[1], dtype=x.dtype)
    for _ in range(NEWTON_STEPS):
        probability = torch.sigmoid((x @ coefficients).clamp(-MAX_LOGIT, MAX_LOGIT))
        gradient = x.T @ (probability - label) + ridge * coefficients
        weight = probability * (1 - probability)
        hessian = x.T @ (weight[:, None] * x) + torch.diag(ridge)
        coefficients = coefficients - torch.linalg.solve(hessian, gradient)
    return coefficients


def propensity_strata(features: Tensor, is_second: Tensor, seed: rng.Seed) -> Tensor:
    """Return strata of rows whose probability to be of the second sample is similar.

    The logit of e(x) = P(second sample | x) is fitted to the features and their squares, for each
    fold of the rows on the other folds, and cut at its quantiles. If y depends on x alone, then y
    and the sample are independent given e(x) (Rosenbaum & Rubin, The central role of the propensity
    score, 1983), so that within a stratum rows of both samples are nearly exchangeable.

    Args:
        features: functions of the inputs in a similar scale, (N, D).
        is_second: whether each row belongs to the second sample, (N,).
        seed: of the folds.

    Returns:
        The stratum of each row, (N,); −1 in a stratum with fewer than 5 rows of one of the samples,
        where nothing can be compared.
    """
    rows = len(features)
    logit = torch.zeros(rows, dtype=torch.float64)
    if features.shape[1]:
        logit = _cross_fitted_logit(features, is_second, seed)
    count = min(max(rows // ROWS_OF_STRATUM, 1), MAX_STRATA)
    # Equal rows are in random order: else those of the first sample would come first.
    shuffled = rng.permutation(rows, rng.fold(seed, "ties"))
    rank = shuffled[logit[shuffled].argsort(stable=True)].argsort()
    strata = rank * count // rows
    second_count = torch.bincount(strata[is_second], minlength=count)
    first_count = torch.bincount(strata[~is_second], minlength=count)
    is_compared = torch.minimum(first_count, second_count) >= MIN_ROWS_OF_SAMPLE
    return torch.where(is_compared[strata], strata, torch.full_like(strata, -1))


def _cross_fitted_logit(features: Tensor, is_second: Tensor, seed: rng.Seed) -> Tensor:
    """Return the logit of P(second sample | x) of each row, by a fit to the other folds, (N,)."""
    x = torch.cat((features, features.square()), 1).double()
    x = (x - x.mean(0)) / x.std(0).clamp_min(1e-9)
    label = is_second.double()
    fold = torch.empty(len(x), dtype=torch.long)
    for value in (False, True):
        index = (is_second == value).nonzero()[:, 0]
        order = rng.permutation(len(index), rng.fold(seed, "fold", int(value)))
        fold[index[order]] = torch.arange(len(index)) % FOLDS
    logit = torch.empty(len(x), dtype=torch.float64)
    for k in range(FOLDS):
        is_test = fold == k
        coefficients = fit_logistic(x[~is_test], label[~is_test])
        logit[is_test] = x[is_test] @ coefficients[:-1] + coefficients[-1]
    return logit
