"""Weights of labels for a label shift, from a confusion matrix and unlabeled rows (BBSE)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayou.core import rng
from bayou.likelihoods.predictive import Predictive
from bayou.operations.conformal.predictors import Predicts
from bayou.operations.conformal.weights import check_weights
from bayou.training.rows import all_rows, as_unlabeled_data

MIN_SINGULAR_Z = 2.0  # the smallest singular value, in standard errors of its estimate
BATCH_ROWS = 4096  # of unlabeled rows that are predicted at a time


@torch.no_grad()
def label_ratio(
    posterior: Predicts,
    held_out: object,
    unlabeled: object,
    *,
    soft: bool = False,
    samples: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Estimate w(y) = q(y)/p(y), the ratio of label frequencies among new and held-out rows.

    With C_ij = P(predicted i, label j) on labeled held-out rows and μ_i = P(predicted i) on
    unlabeled new rows, w solves C·w = μ, since p(x | y) is the same for both (black box shift
    estimation, Lipton et al. 2018). Negative solutions become 0. No calibration is needed, only a
    posterior whose predictions depend on the label.

    Args:
        posterior: a posterior of classes, or any object with ``predict``.
        held_out: labeled rows (x, y) that are not training rows.
        unlabeled: inputs of new rows, as a tensor or as rows whose y are not used.
        soft: whether probabilities take the place of predicted classes, with less variance; by
            default they do not.
        samples: draws of the weights in a prediction; None: as many as ``predict`` takes.
        seed: of these draws.

    Returns:
        w, float64 (K,), for ``conformal(..., label_weights=w)``.

    Raises:
        ValueError: if y are not classes of one coordinate, or C is singular or cannot be told from
            a singular matrix: its smallest singular value is less than two standard errors.

    Example:
        >>> w = bayou.operations.label_ratio(posterior, (x_held, y_held), x_new)
        >>> c = bayou.conformal(posterior, (x_held, y_held), label_weights=w)

    References:
        Lipton, Wang, Smola: Detecting and correcting for label shift with black box predictors,
        ICML 2018.
    """
    x, y = all_rows(held_out)
    seed = rng.integer(seed)
    predictions = _predictions(posterior.predict(x, samples, seed=seed), soft)  # (n, K)
    classes = predictions.shape[-1]
    if y.shape != predictions.shape[:1]:
        raise ValueError(f"a label shift needs one class for each row, got y {tuple(y.shape)}")
    labels = torch.nn.functional.one_hot(y.long().to(predictions.device), classes).double()
    confusion = predictions.T @ labels / len(labels)
    _check_regular(confusion, predictions, labels)
    frequencies = predictions.new_zeros(classes)
    count = 0
    for batch, _ in as_unlabeled_data(unlabeled, BATCH_ROWS).epoch():
        new_predictions = _predictions(posterior.predict(batch, samples, seed=seed), soft)
        frequencies += new_predictions.sum(0)
        count += len(new_predictions)
    if count == 0:
        raise ValueError("unlabeled has no rows; it needs the inputs of new rows")
    weights = torch.linalg.solve(confusion, frequencies / count)
    return weights.clamp_min(0.0)


def check_label_weights(weights: object, classes: int) -> Tensor:
    """Return weights of labels as float64 (K,), or raise a ValueError.

    Args:
        weights: one finite number ≥ 0 for each class.
        classes: the number of classes K.
    """
    return check_weights(weights, f"labels of {classes} classes", classes)


def _predictions(p: Predictive, soft: bool) -> Tensor:
    """Return predicted classes as indicators, or their probabilities: float64 (B, K)."""
    if p.likelihood.support != "classes":
        raise ValueError("a label shift is for classes, but this posterior predicts numbers")
    probabilities = p.probabilities.double()
    if probabilities.ndim != 2:
        raise ValueError(
            "a label shift needs one class for each row, but predictions have the shape "
            f"{tuple(probabilities.shape[:-1])}"
        )
    if soft:
        return probabilities
    return torch.nn.functional.one_hot(probabilities.argmax(-1), probabilities.shape[-1]).double()


def _check_regular(confusion: Tensor, predictions: Tensor, labels: Tensor) -> None:
    """Raise a ValueError if the confusion matrix is singular as far as the rows can tell.

    The smallest singular value σ = uᵀCv is a mean over rows of (uᵀ prediction)·(vᵀ label), which
    has a standard error.
    """
    left, values, right = torch.linalg.svd(confusion)
    terms = (predictions @ left[:, -1]) * (labels @ right[-1])
    error = float(terms.std(correction=0)) / math.sqrt(len(terms))
    smallest = float(values[-1])
    rounding = len(confusion) * torch.finfo(confusion.dtype).eps * float(values[0])
    if smallest <= rounding or smallest < MIN_SINGULAR_Z * error:
        missing = (labels.sum(0) == 0).nonzero().flatten().tolist()
        hint = f" No held-out row has the class {missing[0]}." if missing else ""
        raise ValueError(
            "the confusion matrix of the held-out rows is singular or cannot be told from a "
            f"singular one (smallest singular value {smallest:.2g} ± {error:.2g}).{hint} The "
            "weights of labels cannot be estimated: give more held-out rows of every class, a "
            "posterior that separates the classes, or label_weights"
        )
