"""Scores of any prediction and of its uncertainty, and the summary of all scores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from torch import Tensor

from bayou.likelihoods.predictive import Predictive
from bayou.metrics.classes import accuracy, brier, class_probabilities, ece
from bayou.metrics.regression import coverage, crps, rmse, width

By = Literal["entropy", "mutual_information", "std", "epistemic_std"]
UNCERTAINTIES: tuple[By, ...] = get_args(By)
ROUNDING = 1e-9  # tolerance of fraction·N, for whole numbers with rounding errors


def nll(predictive: Predictive, y: Tensor, scale: float = 1.0) -> float:
    """Compute −1/N Σ_n log p(y_n | x_n), the mean over examples, jointly over their coordinates.

    Examples all of whose labels are ignored are not among the N.

    Args:
        predictive: predictions of B rows.
        y: their targets, (B, *event).
        scale: the number that a continuous y was divided by; log p in original units is smaller by
            log scale per coordinate with a density: not for a censored one.

    Raises:
        ValueError: if there are no rows, or the scale is not positive or not defined for y.
    """
    if len(y) == 0:
        raise ValueError("there are no examples to score")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be a positive finite number, got {scale}")
    if scale != 1 and predictive.likelihood.support != "real":
        raise ValueError(
            f"only a continuous y has a scale, got {type(predictive.likelihood).__name__}; "
            "use scale=1"
        )
    shift = math.log(scale) * float(_count_densities(predictive, y).mean())
    log_prob = predictive.log_prob(y).detach().double()
    if predictive.likelihood.support == "classes":
        is_labeled = predictive.likelihood.labels(y)[1].reshape(len(y), -1).any(1)
        if not bool(is_labeled.any()):
            raise ValueError("there are no examples to score")
        log_prob = log_prob[is_labeled.to(log_prob.device)]
    return shift - float(log_prob.mean())


def row_nll(predictive: Predictive, y: Tensor, scale: float = 1.0) -> Tensor:
    """Return −log p(y_n | x_n) of each row, (B,) in float64 on the CPU.

    Args:
        predictive: predictions of B rows.
        y: their targets, in any shape that holds the coordinates of the predictions.
        scale: the number that y was divided by.
    """
    shape = predictive.likelihood.target_shape(predictive.outputs.shape[1:])
    y = y.to(predictive.outputs.device).reshape(shape)
    shift = math.log(scale) * _count_densities(predictive, y).cpu()
    return shift - predictive.log_prob(y).detach().double().cpu()


def _count_densities(predictive: Predictive, y: Tensor) -> Tensor:
    """Return how many coordinates of each row have a density, (B,) in float64.

    The noise of a value has none, and neither has a censored value, which has a probability.
    """
    is_known = predictive.likelihood.labels(y)[1]
    return is_known.reshape(len(y), -1).double().sum(1)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Compute P(a score of ``outside`` exceeds one of ``inside``), ties counting half.

    This is the area under the ROC curve. It is computed from ranks (Mann & Whitney 1947), exact in
    every dtype: scores need not lie in [0, 1] and are not rounded.

    Args:
        inside: scores of known examples, such as uncertainties of test rows.
        outside: scores of examples to detect.

    Raises:
        ValueError: if one of them is empty or has NaN.
    """
    a = inside.detach().flatten().double()
    b = outside.detach().flatten().double().to(inside.device)
    if not len(a) or not len(b):
        raise ValueError(f"auroc needs scores on both sides, got {len(a)} and {len(b)}")
    if bool(a.isnan().any() | b.isnan().any()):
        raise ValueError("auroc got scores that are nan")
    ordered = a.sort().values
    smaller = torch.searchsorted(ordered, b)
    smaller_or_equal = torch.searchsorted(ordered, b, right=True)
    return float((smaller + smaller_or_equal).double().mean() / (2 * len(a)))


@final
@dataclass(frozen=True)
class Rejection:
    """The error of the examples that are kept when the least certain are rejected.

    ``area`` = 1/N Σ_k error[k] (Geifman & El-Yaniv 2017). Among equal uncertainties the order is
    random, and its expectation is taken.

    Args:
        kept: the fractions of the N examples with a known y that are kept, from 1/N to 1: (N,).
        error: the error at each fraction, (N,).
        area: the mean of the errors.
        best: the area of the order that rejects errors first.
    """

    kept: Tensor
    error: Tensor
    area: float
    best: float

    def at(self, fraction: float) -> float:
        """Return the error when a fraction of the examples is kept.

        Args:
            fraction: in (0, 1].
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"the fraction kept must lie in (0, 1], got {fraction}")
        count = math.ceil(fraction * len(self.error) - ROUNDING)
        return float(self.error[max(count, 1) - 1])


def error_rejection(predictive: Predictive, y: Tensor, by: By | Tensor | None = None) -> Rejection:
    """Compute the error as a function of the fraction of examples kept, the most certain first.

    The error is 0 or 1 for classes, (E[y] − y)² for numbers (means over the coordinates of an
    example). Examples whose labels are all ignored, or whose values are censored, are left out.

    Args:
        predictive: predictions of B rows.
        y: their targets, (B, *event).
        by: the uncertainty: a name, or a tensor (B,); by default the entropy for classes, the
            standard deviation for numbers.

    Returns:
        The error at each fraction, and the area under it.

    Raises:
        ValueError: if the uncertainty is not one number per example, or no y is known.
    """
    loss, uncertainty = errors_and_uncertainties(predictive, y, by)
    count = torch.arange(1, len(loss) + 1, dtype=torch.float64)
    error = mean_over_ties(loss, uncertainty).cumsum(0) / count
    best = loss.sort().values.cumsum(0) / count
    return Rejection(count / len(loss), error, float(error.mean()), float(best.mean()))


def errors_and_uncertainties(
    predictive: Predictive, y: Tensor, by: By | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the error and the uncertainty of the rows whose y is known, (N,) each on the CPU.

    Args:
        predictive: predictions of B rows.
        y: their targets, (B, *event).
        by: of ``error_rejection``.
    """
    uncertainty = row_uncertainty(predictive, y, by).cpu()
    loss = row_errors(predictive, y).cpu()
    is_known = ~loss.isnan()
    if not bool(is_known.any()):
        raise ValueError("there are no examples to score")
    return loss[is_known], uncertainty[is_known]


def mean_over_ties(values: Tensor, key: Tensor) -> Tensor:
    """Return values in the order of a key; those of equal keys become their mean.

    It is the expectation over a random order of equal keys, so that results do not depend on the
    order of the rows.

    Args:
        values: of the rows, (N,).
        key: by which they are sorted, (N,).
    """
    _, group = key.unique(return_inverse=True)
    mean = torch.bincount(group, values) / torch.bincount(group)
    return mean[group.sort().values]


def row_uncertainty(predictive: Predictive, y: Tensor, by: By | Tensor | None = None) -> Tensor:
    """Return the uncertainty by which rows are ordered, (B,) in float64.

    Args:
        predictive: predictions of B rows.
        y: their targets, (B, *event).
        by: a name, or a tensor (B,); by default the entropy for classes, the standard deviation
            for numbers.

    Raises:
        ValueError: if the uncertainty is not one number per example.
    """
    if by is None:
        by = "entropy" if predictive.likelihood.support == "classes" else "std"
    uncertainty = uncertainties(predictive, by) if isinstance(by, str) else by.detach().double()
    if uncertainty.shape != (len(y),):
        raise ValueError(
            f"by must be one number per example, ({len(y)},), got {tuple(uncertainty.shape)}"
        )
    if bool(uncertainty.isnan().any()):
        raise ValueError("by must be one number per example, got NaN")
    return uncertainty


def row_errors(predictive: Predictive, y: Tensor) -> Tensor:
    """Return the error of each row, NaN where all its coordinates are ignored: (B,).

    Args:
        predictive: predictions of B rows.
        y: their targets, (B, *event).

    Returns:
        The fraction of wrong classes, or the mean of (E[y] − y)², in float64.
    """
    if predictive.likelihood.support == "classes":
        p, labels = class_probabilities(predictive, y)
        is_labeled = predictive.likelihood.labels(y)[1]
        loss = torch.full(y.shape, math.nan, dtype=p.dtype, device=p.device)
        loss[is_labeled] = (p.argmax(-1) != labels).double()
    else:
        predictive.likelihood.validate(predictive.outputs.shape[1:], y)
        values, is_known = predictive.likelihood.labels(y)
        loss = (predictive.mean.detach().double() - values.double()).square()
        loss = torch.where(is_known, loss, math.nan)
    return loss.reshape(len(y), -1).nanmean(1)


def uncertainties(predictive: Predictive, by: By) -> Tensor:
    """Return the uncertainty of each row, (B,) in float64.

    Args:
        predictive: predictions of B rows.
        by: "entropy" or "mutual_information" in nats, "std" or "epistemic_std" averaged over
            coordinates.
    """
    if by not in UNCERTAINTIES:
        raise ValueError(
            f"by must be entropy, mutual_information, std or epistemic_std, got {by!r}"
        )
    f = predictive.outputs
    has_one_function = bool((f == f[:1]).all()) and not isinstance(
        predictive.likelihood.function_variance(f), Tensor
    )
    if by in ("mutual_information", "epistemic_std") and has_one_function:
        # Exactly 0, without rounding errors that would rank rows.
        return torch.zeros(f.shape[1], dtype=torch.float64, device=f.device)
    value: Tensor = getattr(predictive, by).detach().double()
    return value.flatten(1).mean(1) if value.ndim > 1 else value


def standard_error(values: Iterable[float] | Tensor) -> float:
    """Compute s/√n with s² = Σ (v − mean)²/(n − 1), of values over seeds or splits.

    Args:
        values: n numbers.

    Returns:
        The standard error of their mean; NaN for one value.

    Raises:
        ValueError: if there are no values.
    """
    numbers = values if isinstance(values, Tensor) else list(values)
    sample = torch.as_tensor(numbers, dtype=torch.float64).flatten()
    if not len(sample):
        raise ValueError("standard_error of no values")
    if len(sample) == 1:
        return math.nan
    return float(sample.std(correction=1)) / math.sqrt(len(sample))


def summary(
    predictive: Predictive,
    y: Tensor,
    ood: Predictive | None = None,
    *,
    scale: float = 1.0,
    level: float = 0.9,
) -> dict[str, float]:
    """Compute the usual scores.

    Classes: accuracy, nll, brier, ece, rejection (area of the error-rejection curve), entropy and
    mutual_information (means); of ordered ones crps, the ranked probability score, too. Numbers:
    rmse, nll, crps, coverage, width, std and epistemic_std (means).

    Args:
        predictive: predictions of B rows.
        y: their targets, (B, *event).
        ood: predictions for out-of-distribution inputs, for the AUROC of their detection
            (``auroc_entropy``, ...) and their mean uncertainty (``entropy_ood``, ...).
        scale: the number that y was divided by; scores of numbers are in original units.
        level: the probability of the intervals, 0.9 by default.

    Returns:
        Scores by name.
    """
    is_class = predictive.likelihood.support == "classes"
    names: tuple[By, By] = ("std", "epistemic_std")
    unit = scale
    if is_class:
        names = ("entropy", "mutual_information")
        unit = 1.0
    inside = {name: uncertainties(predictive, name) for name in names}
    if is_class:
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
    if is_class and predictive.likelihood.is_ordered:
        scores["crps"] = crps(predictive, y)
    for name, value in inside.items():
        scores[name] = float(value.mean()) * unit
    if ood is not None:
        for name, value in inside.items():
            outside = uncertainties(ood, name)
            scores[f"{name}_ood"] = float(outside.mean()) * unit
            scores[f"auroc_{name}"] = auroc(value, outside)
    return scores
