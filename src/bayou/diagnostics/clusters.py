"""Modes in function space: clusters of the functions of a posterior."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayou import rng
from bayou.diagnostics.dip import TINY, Array, antimode, dip_test

MIN_MODE_FUNCTIONS = 20  # sampled functions in a mode
ROUNDING = 1e-5  # spreads below this share of the largest are noise of float32
MAX_MODES = 8
COMPONENTS = 5  # principal components tried at every split


@dataclass(frozen=True)
class FunctionModes:
    """Clusters of S functions on B inputs, the heaviest first.

    ``labels`` (S,); ``weights`` (k,), the share of each mode; ``means`` (k, B, *out), its mean function; ``p_value`` of
    the hypothesis that there is one mode; ``silhouette`` in [−1, 1] (Rousseeuw 1987), NaN for one mode.
    """

    functions: Tensor
    labels: Tensor
    weights: Tensor
    means: Tensor
    p_value: float
    silhouette: float

    @property
    def count(self) -> int:
        """How many modes there are."""
        return len(self.weights)

    def __str__(self) -> str:
        what = f"functions at {self.functions.shape[1]:,} inputs, {len(self.functions):,} draws"
        p = f"p = {self.p_value:.2g}" if self.p_value >= TINY else f"p < {TINY:g}"
        if self.count == 1:
            return f"{what}: one mode ({p}, dip tests along principal components and 2-means)"
        shares = ", ".join(f"{weight:.3f}" for weight in self.weights.tolist())
        found = f"{self.count} modes ({p}) with weights {shares}"
        return f"{what}: {found}; silhouette {self.silhouette:.2f}"


def function_modes(functions: Tensor, *, level: float = 0.05, seed: rng.Seed = 0) -> FunctionModes:
    """Split functions (S, B, *out) into modes, each split supported by a dip test on a held-out half of the functions.

    A cluster is split at the antimode of its projection on a direction: one of the first principal components, the
    line between the centers of 2-means, or Fisher's discriminant of its two parts. Half of the functions determine the
    directions, the other half is tested along them (Hartigan's dip, Bonferroni over directions), so that the search
    does not bias the p-value. Both parts are then tested recursively at half the level, so ``level`` bounds the
    probability of a false second mode. The dip test is conservative: modes must be some 4 standard deviations apart.
    """
    count = len(functions)
    if functions.ndim < 2 or count < 2 * MIN_MODE_FUNCTIONS:
        least, got = 2 * MIN_MODE_FUNCTIONS, tuple(functions.shape)
        raise ValueError(f"functions must be (S, B, ...) with S ≥ {least} to look for modes, got {got}")
    if not bool(functions.isfinite().all()):
        raise ValueError("some functions have NaN or infinite outputs, so that they have no modes; check the posterior")
    flat = functions.detach().cpu().double().flatten(1).numpy()
    scores = _principal(flat)
    labels, p_value = np.zeros(count, dtype=np.int64), 1.0
    queue, found = [(np.arange(count), level)], 1
    floor = ROUNDING * float(scores.std(0).max())
    while queue:
        queue.sort(key=lambda item: len(item[0]))
        members, alpha = queue.pop()
        p, right = _split(scores[members], floor, seed)
        if len(members) == count:
            p_value = p
        if right is None or p >= alpha or found >= MAX_MODES:
            continue
        labels[members[right]] = found
        found += 1
        queue += [(members[right], alpha / 2), (members[~right], alpha / 2)]
    sizes = np.bincount(labels, minlength=found)
    rank = np.argsort(np.argsort(-sizes, kind="stable"), kind="stable")
    labels = rank[labels]
    assigned = torch.from_numpy(labels).to(functions.device)
    means = torch.stack([functions[assigned == k].mean(0) for k in range(found)])
    weights = torch.from_numpy(np.sort(sizes)[::-1] / count)
    return FunctionModes(functions, assigned, weights, means, p_value, _silhouette(scores, labels))


def _principal(flat: Array) -> Array:
    """Scores in the principal components that carry some variance; through the smaller Gram."""
    centered = flat - flat.mean(0)
    left, values, _ = np.linalg.svd(centered, full_matrices=False) if min(flat.shape) <= 64 else _gram(centered)
    kept = max(1, int((values > ROUNDING * max(values[0], 1e-300)).sum()))
    scores: Array = left[:, :kept] * values[:kept]
    return scores


def _gram(centered: Array, rank: int = 64) -> tuple[Array, Array, None]:
    small = centered @ centered.T if centered.shape[0] <= centered.shape[1] else centered.T @ centered
    values, vectors = np.linalg.eigh(small)
    scale = np.sqrt(np.maximum(values[::-1][:rank], 0.0))
    vectors = vectors[:, ::-1][:, :rank]
    if centered.shape[0] > centered.shape[1]:
        vectors = centered @ vectors / np.maximum(scale, 1e-300)
    return vectors, scale, None


def _split(points: Array, floor: float, seed: rng.Seed) -> tuple[float, Any]:
    """(p-value of one mode, which points (S, P) lie right of the cut); None where no cut is possible.

    Directions along which the points spread no more than ``floor`` are left out: they are rounding errors.
    """
    if len(points) < 2 * MIN_MODE_FUNCTIONS:
        return 1.0, None
    finders, judges = points[::2], points[1::2]
    centered = finders - finders.mean(0)
    few = min(COMPONENTS, points.shape[1], len(finders) - 1)
    directions = list(np.linalg.svd(centered, full_matrices=False)[2][:few])
    if points.shape[1] > 1:
        directions += _two_means(finders, seed)
    directions = [d for d in directions if (finders @ d).std() > floor and (judges @ d).std() > floor]
    if not directions:
        return 1.0, None
    tests = [dip_test(judges @ direction)[1] for direction in directions]
    best = int(np.argmin(tests))
    along = points @ directions[best]
    right = along > antimode(along)
    possible = min(right.sum(), (~right).sum()) >= MIN_MODE_FUNCTIONS
    return min(1.0, tests[best] * len(tests)), right if possible else None


def _two_means(points: Array, seed: rng.Seed, restarts: int = 8) -> list[Array]:
    """Directions from the best of a few runs of 2-means: between centres, and Fisher's discriminant of the parts."""
    best, parts = math.inf, np.arange(len(points)) % 2 == 0
    for run in range(restarts):
        first, second = rng.permutation(len(points), rng.fold(seed, "two means", run))[:2].tolist()
        centers = points[[first, second]]
        for _ in range(50):
            distance = ((points[:, None] - centers) ** 2).sum(-1)
            right = distance[:, 1] < distance[:, 0]
            if right.all() or not right.any():
                break
            moved = np.stack([points[~right].mean(0), points[right].mean(0)])
            if np.allclose(moved, centers):
                break
            centers = moved
        inertia = float(distance.min(1).sum())
        if inertia < best and right.any() and not right.all():
            best, parts = inertia, right
    gap = points[parts].mean(0) - points[~parts].mean(0)
    kept = min(points.shape[1], max(1, len(points) // 10))  # axes whose variance can be estimated from so few points
    within = np.where(parts[:, None], points - points[parts].mean(0), points - points[~parts].mean(0))[:, :kept]
    spread = within.T @ within / len(points)
    spread += 1e-6 * np.trace(spread) * np.eye(kept)
    fisher = np.zeros_like(gap)
    fisher[:kept] = np.linalg.lstsq(spread, gap[:kept], rcond=None)[0]
    return [direction / (np.linalg.norm(direction) or 1.0) for direction in (gap, fisher)]


def _silhouette(points: Array, labels: Any, most: int = 1000) -> float:
    """The mean of (b − a)/max(a, b): a the mean distance to the own cluster, b to the nearest other one."""
    count = int(labels.max()) + 1
    if count == 1:
        return math.nan
    step = max(1, len(points) // most)
    points, labels = points[::step], labels[::step]
    square = (points**2).sum(1)
    distance = np.sqrt(np.maximum(square[:, None] + square - 2 * points @ points.T, 0.0))
    members = labels[:, None] == np.arange(count)
    sizes = members.sum(0)
    means = distance @ members / np.maximum(sizes - members, 1)
    own = means[members]
    other = np.where(members | (sizes == 0), np.inf, means).min(1)
    return float(((other - own) / np.maximum(np.maximum(own, other), 1e-300)).mean())
