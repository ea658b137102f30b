"""Sampling error of scores over test rows, by the bootstrap (Efron 1979)."""

from __future__ import annotations

import torch
from torch import Tensor

from bayou import metrics, rng
from bayou.metrics import row_nll
from bayou.predictive import Predictive

RESAMPLES = 1000
BINS = 15  # of the calibration error
CHUNK_NUMBERS = 2**22


def resampled(values: Tensor, seed: int = 0) -> Tensor:
    """Means over rows drawn with replacement, the same rows for every column: (B, M) to (RESAMPLES, M)."""
    rows, size = len(values), max(1, CHUNK_NUMBERS // max(1, values.numel()))
    found = []
    for start in range(0, RESAMPLES, size):
        u = rng.uniform(min(size, RESAMPLES - start), (rows,), values, rng.fold(seed, "bootstrap"), start)
        found.append(values[(u * rows).long()].mean(1))
    return torch.cat(found)


def row_errors(p: Predictive, y: Tensor, scale: float = 1.0) -> tuple[list[float], dict[str, float]]:
    """−log p(y_n) of every row, and the standard errors over rows of the scores that are functions of row means."""
    nll = row_nll(p, y, scale)
    if p.likelihood.support == "classes":
        names: tuple[str, ...] = ("nll", "accuracy", "brier", "ece")
        confidence, hits = (t.cpu().reshape(len(y), -1).mean(1) for t in metrics.confidence_and_hits(p, y))
        probabilities = p.probabilities.detach().double().cpu()
        wrong = probabilities - torch.nn.functional.one_hot(y.long().cpu(), probabilities.shape[-1])
        brier = wrong.square().sum(-1).reshape(len(y), -1).mean(1)
        bins = torch.nn.functional.one_hot((confidence * BINS).ceil().long().clamp(1, BINS) - 1, BINS)
        drawn = resampled(torch.cat([torch.stack([nll, hits, brier], 1), (hits - confidence)[:, None] * bins], 1))
        scores = torch.cat([drawn[:, :3], drawn[:, 3:].abs().sum(1, keepdim=True)], 1)
    else:
        names = ("nll", "rmse", "coverage")
        low, high = p.interval(0.9)
        inside = ((low <= y) & (y <= high)).double()
        squares = (p.mean.detach().double() - y.double()).square()
        parts = [t.cpu().reshape(len(y), -1).mean(1) for t in (squares, inside)]
        scores = resampled(torch.stack([nll, *parts], 1))
        scores[:, 1] = scale * scores[:, 1].sqrt()
    errors = {name: float(column.std()) for name, column in zip(names, scores.T, strict=True)}
    if "accuracy" in errors:
        errors["error"] = errors["accuracy"]
    return [float(f"{value:.6g}") for value in nll.tolist()], errors
