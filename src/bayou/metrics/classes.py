"""Scores of predicted classes: accuracy, Brier score, calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bayou.likelihoods.predictive import Predictive


def class_probabilities(predictive: Predictive, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities and the labels of the coordinates of y that are not ignored.

    Args:
        predictive: predictions of B rows, of classes.
        y: their targets, (B, *event).

    Returns:
        P(class), (N, C) in float64, and the labels, (N,).

    Raises:
        ValueError: if y are not classes, or all are ignored.
    """
    likelihood = predictive.likelihood
    if likelihood.support != "classes":
        raise ValueError(
            f"this score is for classes (Categorical, Bernoulli), got {type(likelihood).__name__}"
        )
    likelihood.validate(predictive.outputs.shape[1:], y)
    labels, is_labeled = likelihood.labels(y)
    if not bool(is_labeled.any()):
        raise ValueError("there are no examples to score")
    return predictive.probabilities.detach()[is_labeled].double(), labels[is_labeled].long()


def accuracy(predictive: Predictive, y: Tensor) -> float:
    """Return the fraction of examples whose most probable class is the right one.

    Args:
        predictive: predictions of B rows, of classes.
        y: their targets, (B, *event).
    """
    p, labels = class_probabilities(predictive, y)
    return float((p.argmax(-1) == labels).double().mean())


def brier(predictive: Predictive, y: Tensor) -> float:
    """Compute the Brier score, mean Σ_c (p_c − 1[y = c])², from 0 to 2 (Brier 1950).

    It is summed over all classes also if there are two.

    Args:
        predictive: predictions of B rows, of classes.
        y: their targets, (B, *event).
    """
    p, labels = class_probabilities(predictive, y)
    return float((p - one_hot(labels, p.shape[-1])).square().sum(-1).mean())


def confidence_and_hits(predictive: Predictive, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of the most probable class, and 1 where it is the right one.

    Args:
        predictive: predictions of B rows, of classes.
        y: their targets, (B, *event).

    Returns:
        (N,) each in float64, for the N coordinates of y that are not ignored.
    """
    p, labels = class_probabilities(predictive, y)
    confidence, best_class = p.max(-1)
    return confidence, (best_class == labels).double()


@final
@dataclass(frozen=True)
class Reliability:
    """Confidence and accuracy in bins of confidence; means of an empty bin are NaN.

    Args:
        edges: of the bins, (K + 1,).
        count: the number of examples in each bin, (K,).
        confidence: their mean confidence, (K,).
        accuracy: their accuracy, (K,).
    """

    edges: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def ece(self) -> float:
        """The expected calibration error, Σ_k n_k/N·|accuracy_k − confidence_k|."""
        gap = (self.accuracy - self.confidence).abs().nan_to_num()
        return float((self.count * gap).sum() / self.count.sum())


def reliability(predictive: Predictive, y: Tensor, bins: int = 15) -> Reliability:
    """Compute confidence and accuracy of the most probable class in bins ((k − 1)/K, k/K].

    Args:
        predictive: predictions of B rows, of classes.
        y: their targets, (B, *event).
        bins: K, 15 by default.

    Returns:
        The means in each bin.

    Raises:
        ValueError: if bins is not a whole number of at least 1.
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"bins must be a whole number of at least 1, got {bins!r}")
    confidence, hits = confidence_and_hits(predictive, y)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)
    # edges[i − 1] < confidence ≤ edges[i]
    index = torch.bucketize(confidence, edges[1:-1].contiguous())
    count = torch.bincount(index, minlength=bins).double()
    confidence_sum = torch.bincount(index, confidence, minlength=bins)
    hit_count = torch.bincount(index, hits, minlength=bins)
    return Reliability(edges, count, confidence_sum / count, hit_count / count)


def ece(predictive: Predictive, y: Tensor, bins: int = 15) -> float:
    """Compute the expected calibration error of the most probable class (Guo 2017).

    Σ_k n_k/N·|accuracy_k − confidence_k| over bins of confidence.

    Args:
        predictive: predictions of B rows, of classes.
        y: their targets, (B, *event).
        bins: the number of bins, 15 by default.
    """
    return reliability(predictive, y, bins).ece
