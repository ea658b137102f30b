"""Sampling error of scores over test rows, by the bootstrap (Efron 1979)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bayou import metrics
from bayou.core import rng
from bayou.likelihoods.predictive import Predictive
from bayou.metrics import row_nll

LEVEL = 0.9  # probability of all intervals and bands
RESAMPLES = 1000
CALIBRATION_BINS = 15
MAX_CHUNK_NUMBERS = 2**22


@dataclass(frozen=True)
class _RowScores:
    """The losses of N rows, and resampled scores of the set of rows.

    Args:
        losses: a wrong class or |y − mean| of each row (N,).
        names: of the scores.
        scores: of resampled sets of rows (RESAMPLES, len(names)).
    """

    losses: Tensor
    names: tuple[str, ...]
    scores: Tensor


def resample_means(values: Tensor, seed: int = 0) -> Tensor:
    """Return means over rows drawn with replacement, the same rows for every column.

    Args:
        values: (N, M).
        seed: of the draws.

    Returns:
        Means (RESAMPLES, M).
    """
    rows = len(values)
    chunk_size = max(1, MAX_CHUNK_NUMBERS // max(1, values.numel()))
    means = []
    for start in range(0, RESAMPLES, chunk_size):
        count = min(chunk_size, RESAMPLES - start)
        u = rng.uniform(count, (rows,), values, rng.fold(seed, "bootstrap"), start)
        means.append(values[(u * rows).long()].mean(1))
    return torch.cat(means)


def row_errors(predictive: Predictive, y: Tensor, scale: float = 1.0) -> dict[str, Any]:
    """Return the scores of every row, and standard errors over rows of the mean scores.

    Args:
        predictive: of N rows.
        y: their targets.
        scale: of y, in original units for one standardized unit.

    Returns:
        ``rows``, −log p(y_n); ``losses``, a wrong class or |y_n − mean|; ``errors``, the standard
        errors by the name of the score.
    """
    nll = row_nll(predictive, y, scale)
    if predictive.likelihood.support == "classes":
        scores = _class_scores(predictive, y, nll)
    else:
        scores = _number_scores(predictive, y, nll, scale)
    columns = zip(scores.names, scores.scores.T, strict=True)
    errors = {name: float(column.std()) for name, column in columns}
    if "accuracy" in errors:
        errors["error"] = errors["accuracy"]
    return {"rows": _round(nll), "losses": _round(scores.losses), "errors": errors}


def _class_scores(predictive: Predictive, y: Tensor, nll: Tensor) -> _RowScores:
    """Resample NLL, accuracy, Brier score and calibration error."""
    confidence, hits = (
        values.cpu().reshape(len(y), -1).mean(1)
        for values in metrics.confidence_and_hits(predictive, y)
    )
    probabilities = predictive.probabilities.detach().double().cpu()
    differences = probabilities - one_hot(y.long().cpu(), probabilities.shape[-1])
    brier = differences.square().sum(-1).reshape(len(y), -1).mean(1)
    bin_index = (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1
    gaps = (hits - confidence)[:, None] * one_hot(bin_index, CALIBRATION_BINS)
    means = resample_means(torch.cat([torch.stack([nll, hits, brier], 1), gaps], 1))
    calibration_error = means[:, 3:].abs().sum(1, keepdim=True)
    scores = torch.cat([means[:, :3], calibration_error], 1)
    return _RowScores(1 - hits, ("nll", "accuracy", "brier", "ece"), scores)


def _number_scores(predictive: Predictive, y: Tensor, nll: Tensor, scale: float) -> _RowScores:
    """Resample NLL, RMSE and coverage, the last two over the values that are known."""
    values, is_known = predictive.likelihood.labels(y)
    of_values = Predictive(*predictive.likelihood.for_targets(predictive.outputs, y))
    low, high = of_values.interval(LEVEL)
    is_inside = ((low <= values) & (values <= high)).double()
    errors = (of_values.mean.detach().double() - values.double()).abs()
    known = is_known.double()
    squares, coverage, losses, share = (
        column.cpu().reshape(len(y), -1).mean(1)
        for column in (errors**2 * known, is_inside * known, scale * errors, known)
    )
    means = resample_means(torch.stack([nll, squares, coverage, share], 1))
    rmse = scale * (means[:, 1] / means[:, 3]).sqrt()
    scores = torch.stack([means[:, 0], rmse, means[:, 2] / means[:, 3]], 1)
    return _RowScores(losses, ("nll", "rmse", "coverage"), scores)


def _round(values: Tensor) -> list[float]:
    """Return numbers to six digits."""
    return [float(f"{value:.6g}") for value in values.tolist()]
