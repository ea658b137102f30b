"""Prior scales by input, by the evidence of a network in the limit of many hidden units."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.inference.wide_evidence import WideEvidence

Scales = list[tuple[float, ...]]
MAX_ROWS: Final = 300  # of which the evidence is computed
PASSES: Final = 20  # evaluations of the evidence
LOG_STD: Final = 2.0  # of the logs of all scales
LEAST: Final = 0.03  # of the scales of inputs, where their mean square is 1


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
    networks = WideEvidence(
        _standardize(x),
        _standardize(y),
        LOG_STD,
        masks=~held_out.repeat(2, 1),
        has_free_scales=has_free_scales,
    )
    points, _ = networks.maximize(PASSES)
    equal_errors, free_errors = networks.errors(points).chunk(2)
    equal_error = float(equal_errors[held_out].mean())
    free_error = float(free_errors[held_out].mean())
    trials: list[dict[str, Any]] = [
        {"scales": "one prior scale for all inputs", "mse": equal_error},
        {"scales": "a prior scale for each input", "mse": free_error},
    ]
    if not free_error < equal_error:
        return [()] * folds, trials
    size = x.std(0).clamp_min(LEAST * x.std())
    scales = points[folds:, :-4].exp()
    scales = (scales / scales.square().mean(1, keepdim=True).sqrt()).clamp_min(LEAST)
    scales = scales * size.square().mean().sqrt() / size
    return [tuple(of_fold) for of_fold in scales.tolist()], trials


def _standardize(values: Tensor) -> Tensor:
    """Return columns with mean 0 and standard deviation 1."""
    values = values.double().flatten(1)
    scale = values.std(0, correction=0).clamp_min(torch.finfo(torch.float32).tiny)
    return (values - values.mean(0)) / scale
