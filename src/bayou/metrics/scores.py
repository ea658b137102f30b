"""Scores of any prediction and of its uncertainty, and the summary of all scores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from bayou.metrics.classes import accuracy, brier, class_probabilities, ece
from bayou.metrics.regression import coverage, crps, rmse, width
from bayou.predictive import Predictive

By = Literal["entropy", "mutual_information", "std", "epistemic_std"]


def nll(predictive: Predictive, y: Tensor, scale: float = 1.0) -> float:
    """−1/N Σ_n log p(y_n | x_n), the mean over examples, jointly over their coordinates.

    ``scale``: the number that a continuous y was divided by; log p in original units is smaller by
    log scale per coordinate.
    """
    if len(y) == 0:
        raise ValueError("there are no examples to score")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be a positive finite number, got {scale}")
    if scale != 1 and predictive.likelihood.support != "real":
        raise ValueError(
            f"only a continuous y has a scale, got {type(predictive.likelihood).__name__}; use scale=1"
        )
    shift = math.log(scale) * y[0].numel()
    return shift - float(predictive.log_prob(y).detach().double().mean())


def row_nll(predictive: Predictive, y: Tensor, scale: float = 1.0) -> Tensor:
    """−log p(y_n | x_n), (B,) in float64 on the CPU; y in any shape that holds the coordinates of
    the predictions.
    """
    shape = predictive.likelihood.target_shape(predictive.outputs.shape[1:])
    y = y.to(predictive.outputs.device).reshape(shape)
    return math.log(scale) * y[0].numel() - predictive.log_prob(y).detach().double().cpu()


def auroc(inside: Tensor, outside: Tensor) -> float:
    """P(a score of ``outside`` exceeds one of ``inside``), ties counting half: the area under the
    ROC curve.

    From ranks (Mann & Whitney 1947), exact in every dtype: scores need not lie in [0, 1] and are
    not rounded.
    """
    a, b = inside.detach().flatten().double(), outside.detach().flatten().double().to(inside.device)
    if not len(a) or not len(b):
        raise ValueError(f"auroc needs scores on both sides, got {len(a)} and {len(b)}")
    if bool(a.isnan().any() | b.isnan().any()):
        raise ValueError("auroc got scores that are nan")
    ordered = a.sort().values
    below, upto = torch.searchsorted(ordered, b), torch.searchsorted(ordered, b, right=True)
    return float((below + upto).double().mean() / (2 * len(a)))


@final
@dataclass(frozen=True)
class Rejection:
    """The error of the examples that are kept when the least certain are rejected: ``error[k]`` at
    ``kept[k]``, (N,).

    ``kept`` runs from 1/N to 1. ``area`` = 1/N Σ_k error[k] (Geifman & El-Yaniv 2017); ``best`` is
    the area of the order that rejects errors first. Among equal uncertainties the order is random,
    and its expectation is taken.
    """

    kept: Tensor
    error: Tensor
    area: float
    best: float

    def at(self, fraction: float) -> float:
        """The error when this fraction of the examples is kept."""
        if not 0 < fraction <= 1:
            raise ValueError(f"the fraction kept must lie in (0, 1], got {fraction}")
        return float(self.error[max(math.ceil(fraction * len(self.error) - 1e-9), 1) - 1])


def error_rejection(predictive: Predictive, y: Tensor, by: By | Tensor | None = None) -> Rejection:
    """The error as a function of the fraction of examples kept, rejecting the least certain first.

    The error is 0 or 1 for classes, (E[y] − y)² for numbers (means over the coordinates of an
    example). ``by`` is the
    uncertainty: a name, or a tensor (B,); by default the entropy for classes, the standard
    deviation for numbers.
    """
    finite = predictive.likelihood.support == "classes"
    by = ("entropy" if finite else "std") if by is None else by
    uncertainty = uncertainties(predictive, by) if isinstance(by, str) else by.detach().double()
    if uncertainty.shape != (len(y),):
        raise ValueError(
            f"by must be one number per example, ({len(y)},), got {tuple(uncertainty.shape)}"
        )
    if finite:
        p, labels = class_probabilities(predictive, y)
        known = predictive.likelihood.labels(y)[1]
        loss = torch.full(y.shape, math.nan, dtype=p.dtype, device=p.device)
        loss[known] = (p.argmax(-1) != labels).double()
    else:
        predictive.likelihood.validate(predictive.outputs.shape[1:], y)
        loss = (predictive.mean.detach().double() - y.double()).square()
    loss = loss.reshape(len(y), -1).nanmean(1).nan_to_num()  # 0 where all are ignored
    _, group = uncertainty.unique(return_inverse=True)  # sorted: the most certain first
    expected = torch.bincount(group, loss) / torch.bincount(group)
    count = torch.arange(1, len(y) + 1, dtype=torch.float64, device=loss.device)
    error = expected[group.sort().values].cumsum(0) / count
    best = loss.sort().values.cumsum(0) / count
    return Rejection(count / len(y), error, float(error.mean()), float(best.mean()))


def uncertainties(predictive: Predictive, by: By) -> Tensor:
    """One number per example, (B,) float64: entropies in nats, standard deviations averaged over
    coordinates.
    """
    if by not in ("entropy", "mutual_information", "std", "epistemic_std"):
        raise ValueError(
            f"by must be entropy, mutual_information, std or epistemic_std, got {by!r}"
        )
    f = predictive.outputs
    one = bool((f == f[:1]).all()) and not isinstance(
        predictive.likelihood.function_variance(f), Tensor
    )
    if by in ("mutual_information", "epistemic_std") and one:
        return torch.zeros(
            f.shape[1], dtype=torch.float64, device=f.device
        )  # one network: no rounding to rank by
    value: Tensor = getattr(predictive, by).detach().double()
    return value.flatten(1).mean(1) if value.ndim > 1 else value


def standard_error(values: Iterable[float] | Tensor) -> float:
    """s/√n with s² = Σ (v − mean)²/(n − 1), of results over seeds or splits; nan for one value."""
    given = torch.as_tensor(
        list(values) if not isinstance(values, Tensor) else values, dtype=torch.float64
    ).flatten()
    if not len(given):
        raise ValueError("standard_error of no values")
    return math.nan if len(given) == 1 else float(given.std(correction=1)) / math.sqrt(len(given))


def summary(
    predictive: Predictive,
    y: Tensor,
    ood: Predictive | None = None,
    *,
    scale: float = 1.0,
    level: float = 0.9,
) -> dict[str, float]:
    """The usual scores; with ``ood``, predictions for out-of-distribution inputs, also the AUROC of
    their detection.

    Classes: accuracy, nll, brier, ece, rejection (area of the error-rejection curve), entropy and
    mutual_information (means). Numbers: rmse, nll, crps, coverage, width, in original units for a
    ``scale`` that y was divided by.
    """
    classes = predictive.likelihood.support == "classes"
    names: tuple[By, By] = (
        ("entropy", "mutual_information") if classes else ("std", "epistemic_std")
    )
    inside = {name: uncertainties(predictive, name) for name in names}
    if classes:
        scores = {
            "accuracy": accuracy(predictive, y),
            "nll": nll(predictive, y),
            "brier": brier(predictive, y),
            "ece": ece(predictive, y),
            "rejection": error_rejection(predictive, y, inside["entropy"]).area,
        }
    else:
        scores = {
            "rmse": rmse(predictive, y, scale),
            "nll": nll(predictive, y, scale),
            "crps": crps(predictive, y, scale),
            "coverage": coverage(predictive, y, level),
            "width": width(predictive, level, scale),
        }
    for name, value in inside.items():
        scores[name] = float(value.mean()) * (1.0 if classes else scale)
    if ood is not None:
        for name, value in inside.items():
            away = uncertainties(ood, name)
            scores[f"{name}_ood"] = float(away.mean()) * (1.0 if classes else scale)
            scores[f"auroc_{name}"] = auroc(value, away)
    return scores
