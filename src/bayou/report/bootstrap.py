"""Sampling error of scores over test rows, by the bootstrap (Efron 1979)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayou import metrics, rng
from bayou.metrics import row_nll
from bayou.predictive import Predictive

LEVEL = 0.9  # of all intervals and bands
RESAMPLES = 1000
BINS = 15  # of the calibration error
CHUNK_NUMBERS = 2**22


def resampled(values: Tensor, seed: int = 0) -> Tensor:
    """Means over rows drawn with replacement, the same rows for every column: (B, M) to (RESAMPLES,
    M).
    """
    rows, size = len(values), max(1, CHUNK_NUMBERS // max(1, values.numel()))
    found = []
    for start in range(0, RESAMPLES, size):
        u = rng.uniform(
            min(size, RESAMPLES - start), (rows,), values, rng.fold(seed, "bootstrap"), start
        )
        found.append(values[(u * rows).long()].mean(1))
    return torch.cat(found)


def row_errors(p: Predictive, y: Tensor, scale: float = 1.0) -> dict[str, Any]:
    """Of every row −log p(y_n) and the loss, a wrong class or |y_n − mean|; standard errors over
    rows of the scores.
    """
    nll = row_nll(p, y, scale)
    if p.likelihood.support == "classes":
        names: tuple[str, ...] = ("nll", "accuracy", "brier", "ece")
        confidence, hits = (
            t.cpu().reshape(len(y), -1).mean(1) for t in metrics.confidence_and_hits(p, y)
        )
        probabilities = p.probabilities.detach().double().cpu()
        wrong = probabilities - torch.nn.functional.one_hot(y.long().cpu(), probabilities.shape[-1])
        brier = wrong.square().sum(-1).reshape(len(y), -1).mean(1)
        bins = torch.nn.functional.one_hot(
            (confidence * BINS).ceil().long().clamp(1, BINS) - 1, BINS
        )
        drawn = resampled(
            torch.cat([torch.stack([nll, hits, brier], 1), (hits - confidence)[:, None] * bins], 1)
        )
        scores, losses = (
            torch.cat([drawn[:, :3], drawn[:, 3:].abs().sum(1, keepdim=True)], 1),
            1 - hits,
        )
    else:
        names = ("nll", "rmse", "coverage")
        low, high = p.interval(LEVEL)
        inside = ((low <= y) & (y <= high)).double()
        wrong = (p.mean.detach().double() - y.double()).abs()
        squares, inside, losses = (
            t.cpu().reshape(len(y), -1).mean(1) for t in (wrong**2, inside, scale * wrong)
        )
        scores = resampled(torch.stack([nll, squares, inside], 1))
        scores[:, 1] = scale * scores[:, 1].sqrt()
    errors = {name: float(column.std()) for name, column in zip(names, scores.T, strict=True)}
    if "accuracy" in errors:
        errors["error"] = errors["accuracy"]
    rows, lost = ([float(f"{value:.6g}") for value in values.tolist()] for values in (nll, losses))
    return {"rows": rows, "losses": lost, "errors": errors}
