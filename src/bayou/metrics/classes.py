"""Scores of predicted classes: accuracy, Brier score, calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bayou.predictive import Predictive


def class_probabilities(predictive: Predictive, y: Tensor) -> tuple[Tensor, Tensor]:
    """P(class) and classes with the N coordinates of y that are not ignored as rows: (N, C)
    float64, (N,).
    """
    likelihood = predictive.likelihood
    if likelihood.support != "classes":
        raise ValueError(
            f"this score is for classes (Categorical, Bernoulli), got {type(likelihood).__name__}"
        )
    likelihood.validate(predictive.outputs.shape[1:], y)
    labels, known = likelihood.labels(y)
    if not bool(known.any()):
        raise ValueError("there are no examples to score")
    return predictive.probabilities.detach()[known].double(), labels[known].long()


def accuracy(predictive: Predictive, y: Tensor) -> float:
    """The fraction of examples whose most probable class is the right one."""
    p, labels = class_probabilities(predictive, y)
    return float((p.argmax(-1) == labels).double().mean())


def brier(predictive: Predictive, y: Tensor) -> float:
    """mean Σ_c (p_c − 1[y = c])², from 0 to 2, summed over all classes also if there are two (Brier
    1950).
    """
    p, labels = class_probabilities(predictive, y)
    return float((p - torch.nn.functional.one_hot(labels, p.shape[-1])).square().sum(-1).mean())


def confidence_and_hits(predictive: Predictive, y: Tensor) -> tuple[Tensor, Tensor]:
    """The probability of the most probable class, and 1 where it is the right one: (N,), (N,)
    float64.
    """
    p, labels = class_probabilities(predictive, y)
    confidence, best = p.max(-1)
    return confidence, (best == labels).double()


@final
@dataclass(frozen=True)
class Reliability:
    """Bins of confidence: edges (K + 1,), and in each bin the number of examples, mean confidence
    and accuracy (K,).

    Means of an empty bin are nan.
    """

    edges: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def ece(self) -> float:
        """Σ_k n_k/N·|accuracy_k − confidence_k|."""
        gap = (self.accuracy - self.confidence).abs().nan_to_num()
        return float((self.count * gap).sum() / self.count.sum())


def reliability(predictive: Predictive, y: Tensor, bins: int = 15) -> Reliability:
    """Confidence and accuracy of the most probable class in the bins ((k − 1)/K, k/K], K =
    ``bins``.
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"bins must be a whole number of at least 1, got {bins!r}")
    confidence, hits = confidence_and_hits(predictive, y)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)
    index = torch.bucketize(
        confidence, edges[1:-1].contiguous()
    )  # edges[i - 1] < confidence ≤ edges[i]
    count = torch.bincount(index, minlength=bins).double()
    total = (
        torch.bincount(index, confidence, minlength=bins),
        torch.bincount(index, hits, minlength=bins),
    )
    return Reliability(edges, count, total[0] / count, total[1] / count)


def ece(predictive: Predictive, y: Tensor, bins: int = 15) -> float:
    """Expected calibration error, Σ_k n_k/N·|accuracy_k − confidence_k|, of the most probable class
    (Guo 2017).
    """
    return reliability(predictive, y, bins).ece
