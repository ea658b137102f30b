"""The scores of rows as columns: of predictions, and of features averaged over functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayou.network import rows_of
from bayou.operations.ood.feature_scores import (
    ClassDensity,
    FeatureScore,
    Mahalanobis,
    NearestNeighbors,
    RelativeMahalanobis,
    VirtualLogit,
)
from bayou.operations.ood.features import BATCH_ROWS, compute_features, feature_networks
from bayou.operations.ood.output_scores import OUTPUT_SCORES, output_scores
from bayou.operations.ood.typicality import Typicality
from bayou.posteriors import Posterior

FunctionScores = dict[str, FeatureScore]  # of the features of one function, by name
FEATURE_SCORES: dict[str, type[FeatureScore]] = {
    score.name: score
    for score in (
        Mahalanobis,
        RelativeMahalanobis,
        NearestNeighbors,
        VirtualLogit,
        ClassDensity,
        Typicality,
    )
}
SCORES = (*OUTPUT_SCORES, *FEATURE_SCORES)


def output_columns(
    posterior: Posterior,
    inputs: tuple[Any, ...],
    names: Sequence[str],
    samples: int | None,
    seed: int,
) -> dict[str, Tensor]:
    """Compute the scores of predictions of all rows, some rows at a time.

    Args:
        posterior: predicts the rows.
        inputs: the arguments of the network, for B rows.
        names: of scores; those that are no scores of predictions are left out.
        samples: draws of a prediction.
        seed: of the draws.

    Returns:
        (B,) for each name.
    """
    output_names = [name for name in names if name in OUTPUT_SCORES]
    if not output_names:
        return {}
    batches = []
    for first in range(0, len(inputs[0]), BATCH_ROWS):
        batch = rows_of(inputs, slice(first, first + BATCH_ROWS))
        p = posterior.predict(batch, samples, seed=seed)
        batches.append(output_scores(p, output_names))
    return {name: torch.cat([scores[name] for scores in batches]) for name in output_names}


def feature_columns(
    posterior: Posterior,
    inputs: tuple[Any, ...],
    feature_scores: Sequence[FunctionScores],
    layer: str | None,
    seed: int,
) -> dict[str, Tensor]:
    """Compute the scores of features of all rows, averaged over the functions.

    Args:
        posterior: whose functions have the features.
        inputs: the arguments of the network, for B rows.
        feature_scores: the fitted scores of each function.
        layer: whose inputs are the features; None for the last one.
        seed: of the functions.

    Returns:
        (B,) for each name.
    """
    if not feature_scores or not feature_scores[0]:
        return {}
    networks = feature_networks(posterior, len(feature_scores), seed)
    columns = []
    for network, scores in zip(networks, feature_scores, strict=True):
        features = compute_features(posterior, network, inputs, layer, seed)
        columns.append(score_features(scores, features.values))
    return average_columns(columns)


def score_features(scores: FunctionScores, z: Tensor) -> dict[str, Tensor]:
    """Compute all scores of features, some rows at a time.

    Args:
        scores: the fitted scores.
        z: features (B, D).

    Returns:
        (B,) for each name.
    """
    return {
        name: torch.cat([score.of(batch) for batch in z.split(BATCH_ROWS)])
        for name, score in scores.items()
    }


def average_columns(columns: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Average the scores of several functions.

    Args:
        columns: scores by name, (B,) each, of every function.
    """
    return {name: torch.stack([scores[name] for scores in columns]).mean(0) for name in columns[0]}
