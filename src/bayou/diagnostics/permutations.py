"""Permutation tests of two samples: linear statistics, within strata, and the energy distance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayou.core import rng
from bayou.diagnostics.hypothesis import Significance

MAX_ENTRIES = 20_000_000  # of the labels of all permutations, held in memory at a time
ROUNDING = 1e-9  # relative tolerance for statistics that are equal up to rounding


class LargestDifference(NamedTuple):
    """The result of a test of several columns at once.

    Args:
        evidence: the largest standardized difference of a column, and its p-value.
        column: the index of this column.
        difference: mean of the second sample minus that of the first in this column.
    """

    evidence: Significance
    column: int
    difference: float


def count_permutations(tests: int, level: float, least: int = 999) -> int:
    """Return how many permutations make the smallest p-value significant among several tests.

    The smallest p-value is 1/(permutations + 1), and Holm multiplies it with the number of tests.

    Args:
        tests: how many p-values are adjusted together.
        level: of these tests.
        least: the smallest number of permutations. Default: 999.
    """
    return max(least, math.ceil(2 * tests / level))


def permuted_labels(
    is_second: Tensor, strata: Tensor | None, permutations: int, seed: rng.Seed
) -> Tensor:
    """Return random permutations of labels, each within the strata: (permutations, N) of 0 and 1.

    Args:
        is_second: whether each row belongs to the second sample, (N,).
        strata: the stratum of each row, whole numbers (N,); None for one stratum.
        permutations: their number.
        seed: of the permutations.
    """
    if strata is None:
        strata = torch.zeros_like(is_second, dtype=torch.long)
    order = strata.argsort(stable=True)
    keys = rng.uniform(permutations, (len(order),), torch.empty(0, dtype=torch.float64), seed)
    # A stratum keeps its places, and its labels get a random order there.
    shuffled = (strata[order] + keys).argsort(1)
    labels = is_second[order].double()[shuffled]
    return torch.empty_like(labels).scatter_(1, order.expand_as(labels), labels)


@torch.no_grad()
def largest_differences(
    statistics: Sequence[Tensor],
    is_second: Tensor,
    permutations: int,
    seed: rng.Seed,
    strata: Tensor | None = None,
) -> list[LargestDifference]:
    """Compare the means of two samples by permutation tests, each of several columns at once.

    For the values v of a statistic, T_j = Σ_i g_i·(v_ij − mean of v_j in the stratum of row i),
    with g_i = 1 in the second sample. It is tested by max_j |T_j|/std_j, with the standard
    deviation of T_j over permutations, which has a closed form. The p-value is
    (1 + #{permutations at least as extreme})/(1 + permutations). It is exact if the rows of a
    stratum are exchangeable.

    Args:
        statistics: values (N, K) each, with any K. They share the permutations.
        is_second: whether each row belongs to the second sample, (N,).
        permutations: their number.
        seed: of the permutations.
        strata: the stratum of each row, whole numbers (N,); one stratum by default.

    Returns:
        For each statistic its value, p-value, the column with the largest difference, and this
        difference.

    Raises:
        ValueError: if one of the samples has no rows.
    """
    is_second = is_second.cpu()
    if strata is None:
        strata = torch.zeros(len(is_second), dtype=torch.long)
    if bool(is_second.all()) or not bool(is_second.any()):
        raise ValueError("a comparison needs rows of both samples")
    tensors = [values.detach().double().cpu() for values in statistics]
    scaled = [_scale_within_strata(values, is_second, strata) for values in tensors]
    observed = [(is_second.double() @ values).abs() for values in scaled]
    extreme_counts = [0] * len(scaled)
    chunk = max(1, MAX_ENTRIES // max(len(is_second), *(v.shape[1] for v in scaled)))
    for start in range(0, permutations, chunk):
        count = min(chunk, permutations - start)
        labels = permuted_labels(is_second, strata, count, rng.fold(seed, "labels", start))
        for k, values in enumerate(scaled):
            threshold = float(observed[k].max()) * (1 - ROUNDING)
            extreme_counts[k] += int(((labels @ values).abs().amax(1) >= threshold).sum())
    results = []
    for values, statistic, extreme_count in zip(tensors, observed, extreme_counts, strict=True):
        column = int(statistic.argmax())
        p = (1 + extreme_count) / (1 + permutations)
        difference = values[is_second, column].mean() - values[~is_second, column].mean()
        evidence = Significance(float(statistic[column]), p)
        results.append(LargestDifference(evidence, column, float(difference)))
    return results


def _scale_within_strata(values: Tensor, is_second: Tensor, strata: Tensor) -> Tensor:
    """Return v − mean of the stratum, divided by the standard deviation of T_j: (N, K)."""
    groups = int(strata.max()) + 1
    size = torch.bincount(strata, minlength=groups).double()
    second_count = torch.bincount(strata[is_second], minlength=groups).double()
    total = torch.zeros(groups, values.shape[1], dtype=values.dtype).index_add_(0, strata, values)
    centered = values - (total / size.clamp_min(1)[:, None])[strata]
    # A constant column differs from its mean by rounding alone.
    is_rounding = centered.abs() <= ROUNDING * values.abs().amax(0)
    centered = torch.where(is_rounding, torch.zeros_like(centered), centered)
    squares = torch.zeros_like(total).index_add_(0, strata, centered.square())
    factor = second_count * (size - second_count) / (size * (size - 1)).clamp_min(1)
    std = (factor[:, None] * squares).sum(0).sqrt()
    return torch.where(std > 0, centered / std, torch.zeros_like(centered))


@torch.no_grad()
def energy_test(a: Tensor, b: Tensor, permutations: int, seed: rng.Seed) -> Significance:
    """Compare two multivariate samples by the energy distance (Székely & Rizzo 2004).

    E = 2·mean|a − b| − mean|a − a'| − mean|b − b'| ≥ 0, which is 0 in expectation only for equal
    distributions. The p-value is that of a permutation test.

    Args:
        a: the first sample, (n, D).
        b: the second sample, (m, D).
        permutations: their number.
        seed: of the permutations.

    Returns:
        E and the p-value.
    """
    pooled = torch.cat((a, b)).detach().double().cpu()
    distance = torch.cdist(pooled, pooled)
    is_second = torch.arange(len(pooled)) >= len(a)
    observed = float(_energy(distance, is_second.double()[None])[0])
    extreme_count = 0
    chunk = max(1, MAX_ENTRIES // len(pooled))
    for start in range(0, permutations, chunk):
        count = min(chunk, permutations - start)
        labels = permuted_labels(is_second, None, count, rng.fold(seed, "labels", start))
        energies = _energy(distance, labels)
        extreme_count += int((energies >= observed * (1 - ROUNDING)).sum())
    return Significance(observed, (1 + extreme_count) / (1 + permutations))


def _energy(distance: Tensor, labels: Tensor) -> Tensor:
    """Return the energy distance of each assignment of rows to samples: (B, N) to (B,)."""
    m = float(labels[0].sum())
    n = labels.shape[1] - m
    sums = labels @ distance  # of the distances from the second sample to each row
    within_second = (sums * labels).sum(1)
    across = (sums * (1 - labels)).sum(1)
    within_first = distance.sum() - within_second - 2 * across
    return 2 * across / (n * m) - within_second / (m * m) - within_first / (n * n)


def normal_scores(values: Tensor) -> Tensor:
    """Return the ranks of each column as quantiles of a normal distribution: (N, D).

    Equal values have the mean of their ranks.

    Args:
        values: (N, D).
    """
    values = values.detach().double().cpu().T.contiguous()
    ordered = values.sort(1).values
    below = torch.searchsorted(ordered, values)
    up_to = torch.searchsorted(ordered, values, right=True)
    return torch.special.ndtri((below + up_to).double() / (2 * values.shape[1])).T


def products_of_pairs(values: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return the products of all pairs of columns, and the pairs: (N, D·(D − 1)/2).

    Their means are the correlations of standardized columns.

    Args:
        values: (N, D), D ≥ 2.
    """
    first, second = torch.triu_indices(values.shape[1], values.shape[1], 1)
    pairs = list(zip(first.tolist(), second.tolist(), strict=True))
    return values[:, first] * values[:, second], pairs
