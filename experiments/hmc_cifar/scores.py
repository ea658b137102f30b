"""Predictions that are saved, and their scores beside HMC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bayou import metrics
from bayou.likelihoods.predictive import Predictive
from bayou.truth import class_predictive, fidelity
from experiments.hmc_cifar.images import AWAY, STRENGTHS, Task

ROUNDING = 1e-3  # of a mutual information, in nats
Saved = Mapping[
    str, Any
]  # log P(class) (N, 10) and mutual information (N,) of all inputs, and the cost


def predictive(log_p: Any) -> Predictive:
    """Predictions of log P(class), (N, 10), up to constants of the rows."""
    return class_predictive(torch.as_tensor(log_p))


def scores(found: Saved, task: Task) -> dict[str, Any]:
    """Scores at the test images, distances from HMC, and what the pictures need."""
    p, truth = predictive(found["test"]), predictive(task.hmc.log())
    bins = metrics.reliability(p, task.y)
    compared = fidelity(p, truth, task.y)
    numbers: dict[str, Any] = {
        **compared,
        "accuracy": 100 * compared["accuracy"],
        "people": spearman(p.entropy, torch.special.entr(task.people).sum(-1)),
        "entropy": float(p.entropy.mean()),
    }
    for name in AWAY:
        if name in found:
            numbers[f"{name}_entropy"] = metrics.auroc(p.entropy, predictive(found[name]).entropy)
            inside, outside = found["test information"], found[f"{name} information"]
            if abs(inside).max() > ROUNDING:  # a point has none
                numbers[f"{name}_information"] = metrics.auroc(inside, outside)
    if "corrupted" in found:
        numbers |= corrupted_scores(found, task)
    order = truth.entropy.argsort().tensor_split(10)
    curves = {
        "confidence": bins.confidence.tolist(),
        "hits": bins.accuracy.tolist(),
        "entropies": [
            float(p.entropy[part].mean()) for part in order
        ],  # in tenths by the entropy of HMC
    }
    return numbers | curves


def corrupted_scores(found: Saved, task: Task) -> dict[str, Any]:
    """Scores at each strength of corruption; AUROC of the test images against those of the
    strongest.
    """
    by_strength = [
        predictive(part) for part in torch.as_tensor(found["corrupted"]).tensor_split(STRENGTHS)
    ]
    y, strongest = task.y[: len(by_strength[0].entropy)], by_strength[-1]
    numbers: dict[str, Any] = {
        "corrupted_accuracy": [100 * metrics.accuracy(p, y) for p in by_strength],
        "corrupted_nll": [metrics.nll(p, y) for p in by_strength],
        "corrupted_ece": [metrics.reliability(p, y).ece for p in by_strength],
        "corrupted_entropy": metrics.auroc(predictive(found["test"]).entropy, strongest.entropy),
    }
    inside, outside = found["test information"], found["corrupted information"][-len(y) :]
    return numbers | (
        {"corrupted_information": metrics.auroc(inside, outside)}
        if abs(inside).max() > ROUNDING
        else {}
    )


def spearman(a: Tensor, b: Tensor) -> float:
    """The correlation of ranks; equal values share the mean of theirs."""

    def ranks(values: Tensor) -> Tensor:
        _, place, count = values.unique(return_inverse=True, return_counts=True)
        return (count.cumsum(0) - (count - 1) / 2)[place].double()

    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1])
