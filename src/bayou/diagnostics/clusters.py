"""Modes in function space: clusters of the functions of a posterior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayou.diagnostics.dip import TINY, Array, antimode, dip_test

MIN_MODE_FUNCTIONS = 20  # sampled functions in a mode
ROUNDING = 1e-5  # spreads below this share of the largest are noise of float32
MAX_MODES = 8
MAX_COMPONENTS = 64
COMPONENTS = 5  # principal components tried at every split


@dataclass(frozen=True)
class FunctionModes:
    """Clusters of S functions on B inputs, the heaviest first.

    ``labels`` (S,); ``weights`` (k,), the share of each mode; ``means`` (k, B, *out), its mean function; ``p_value`` of
    the hypothesis that there is one mode.
    """

    functions: Tensor
    labels: Tensor
    weights: Tensor
    means: Tensor
    p_value: float

    @property
    def count(self) -> int:
        """How many modes there are."""
        return len(self.weights)

    def __str__(self) -> str:
        what = f"functions at {self.functions.shape[1]:,} inputs, {len(self.functions):,} draws"
        p = f"p = {self.p_value:.2g}" if self.p_value >= TINY else f"p < {TINY:g}"
        if self.count == 1:
            return f"{what}: one mode ({p}, dip tests along principal components and discriminants)"
        shares = ", ".join(f"{weight:.3f}" for weight in self.weights.tolist())
        return f"{what}: {self.count} modes ({p}) with weights {shares}"


def function_modes(functions: Tensor, *, level: float = 0.05) -> FunctionModes:
    """Split functions (S, B, *out) into modes, each split supported by a dip test on a held-out half of the functions.

    A cluster is split at the antimode of its projection on one of its first five principal components, or on Fisher's
    discriminant of the two parts along one of them. Half of the functions determine these directions, the other half is
    tested along them (Hartigan's dip, Bonferroni), so that the search does not bias the p-value. Both parts
    are then tested recursively at half the level, so ``level`` bounds the probability of a false second mode. The dip
    test is conservative: modes must be some 4 standard deviations apart.
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
        p, right = _split(scores[members], floor)
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
    return FunctionModes(functions, assigned, weights, means, p_value)


def _principal(flat: Array) -> Array:
    """Scores in the principal components that carry some variance, by the Gram matrix of the functions."""
    centered = flat - flat.mean(0)
    values, vectors = np.linalg.eigh(centered @ centered.T)
    scale = np.sqrt(np.maximum(values, 0.0))
    kept = scale > ROUNDING * max(scale[-1], 1e-300)
    kept[-1] = True
    return np.asarray((vectors * scale)[:, kept][:, : -MAX_COMPONENTS - 1 : -1])


def _split(points: Array, floor: float) -> tuple[float, Any]:
    """(p-value of one mode, which points (S, P) lie right of the cut); None where no cut is possible.

    Directions along which the points spread no more than ``floor`` are left out: they are rounding errors.
    """
    if len(points) < 2 * MIN_MODE_FUNCTIONS:
        return 1.0, None
    finders, judges = points[::2], points[1::2]
    centered = finders - finders.mean(0)
    few = min(COMPONENTS, points.shape[1], len(finders) - 1)
    directions = list(np.linalg.svd(centered, full_matrices=False)[2][:few])
    directions += [_discriminant(finders, d) for d in directions if few > 1]
    directions = [d for d in directions if (finders @ d).std() > floor and (judges @ d).std() > floor]
    if not directions:
        return 1.0, None
    tests = [dip_test(judges @ direction)[1] for direction in directions]
    best = int(np.argmin(tests))
    along = points @ directions[best]
    right = along > antimode(along)
    possible = min(right.sum(), (~right).sum()) >= MIN_MODE_FUNCTIONS
    return min(1.0, tests[best] * len(tests)), right if possible else None


def _discriminant(points: Array, direction: Array) -> Array:
    """Fisher's discriminant of the parts of points (S, P) on either side of their antimode along a direction: (P,)."""
    right = points @ direction > antimode(points @ direction)
    if right.all() or not right.any():
        return direction
    centers = points[right].mean(0), points[~right].mean(0)
    kept = min(points.shape[1], max(1, len(points) // 10))  # axes whose variance can be estimated from so few points
    within = np.where(right[:, None], points - centers[0], points - centers[1])[:, :kept]
    spread = within.T @ within / len(points)
    spread += 1e-6 * np.trace(spread) * np.eye(kept)
    found = np.zeros_like(direction)
    found[:kept] = np.linalg.lstsq(spread, (centers[0] - centers[1])[:kept], rcond=None)[0]
    return np.asarray(found / (np.linalg.norm(found) or 1.0))
