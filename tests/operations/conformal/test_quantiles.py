"""Weighted quantiles beside their definition, by the cumulated masses of sorted scores."""

import math

import pytest
import torch

from bayou.operations.conformal.quantiles import min_rows, rank_quantile, weighted_quantile
from tests.operations.conformal.simulated import F64, generator


def brute_force(scores, weights, new_weight, level):
    """The smallest t with P(S ≤ t) ≥ level under Σ p_i·δ(s_i) + p·δ(∞)."""
    total = sum(weights) + new_weight
    for threshold in sorted(scores):
        mass = sum(w for s, w in zip(scores, weights, strict=True) if s <= threshold)
        if mass >= level * total:
            return threshold
    return math.inf


@pytest.mark.parametrize("level", [0.1, 0.5, 0.83, 0.9])
def test_weighted_quantiles_by_their_definition(level):
    g = generator(0)
    scores = torch.randn(23, 2, 3, generator=g, dtype=F64).mul(4).round()  # with ties
    weights = torch.rand(23, generator=g, dtype=F64)
    new_weights = torch.tensor([0.0, 0.3, 1.0, 5.0, 1e6], dtype=F64)
    thresholds = weighted_quantile(scores, weights, new_weights, level)
    assert thresholds.shape == (5, 2, 3)
    for m, new_weight in enumerate(new_weights.tolist()):
        for i in range(2):
            for j in range(3):
                expected = brute_force(
                    scores[:, i, j].tolist(), weights.tolist(), new_weight, level
                )
                assert float(thresholds[m, i, j]) == expected
    assert bool(thresholds[-1].isinf().all())


@pytest.mark.parametrize("weight", [1.0, 0.1, 7e5])
def test_equal_weights_give_the_rank(weight):
    """Also where (n + 1)·level is a whole number up to rounding."""
    for level in (0.5, 0.7, 0.8, 0.9, 0.95, 0.99):
        for rows in (min_rows(level), 99, 199, 250):
            scores = torch.randn(rows, 2, generator=generator(rows), dtype=F64)
            new = torch.tensor([weight], dtype=F64)
            weights = torch.full((rows,), weight, dtype=F64)
            if rows >= min_rows(level):
                expected = rank_quantile(scores, level)
                assert torch.equal(weighted_quantile(scores, weights, new, level)[0], expected)


def test_weights_by_coordinate():
    scores = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], dtype=F64)
    weights = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=F64)
    thresholds = weighted_quantile(scores, weights, torch.zeros(1, dtype=F64), 0.4)
    assert thresholds.tolist() == [[1.0, 3.0]]
