"""Hartigan's dip test of unimodality, with a correction for multiple tests.

The dip needs no bandwidth, no number of components and no parametric family. A comparison of a mixture with a single
Gaussian classifies every skewed or heavy-tailed weight as multimodal; the null of the dip is *every* unimodal
distribution.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
TINY = 1e-16  # p-values below are shown as such: the tail of the table is extrapolated

# Upper quantiles of √n·dip for n uniform draws, the least favorable unimodal case: 200,000 simulated samples for each
# n up to 1,000, then 50,000 and 20,000.
_LEVELS = np.array([0.99, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001])
_SIZES = np.array([20, 50, 100, 200, 500, 1000, 5000, 20000])
_QUANTILES = np.array(
    [
        [0.2123, 0.2541, 0.2867, 0.3279, 0.3808, 0.4350, 0.4704, 0.5111, 0.5401, 0.5650, 0.5979, 0.6176],
        [0.2220, 0.2669, 0.3004, 0.3457, 0.4006, 0.4589, 0.4968, 0.5417, 0.5732, 0.6034, 0.6401, 0.6696],
        [0.2286, 0.2740, 0.3081, 0.3548, 0.4113, 0.4714, 0.5108, 0.5580, 0.5899, 0.6215, 0.6611, 0.6875],
        [0.2337, 0.2796, 0.3142, 0.3615, 0.4194, 0.4799, 0.5203, 0.5687, 0.6018, 0.6351, 0.6726, 0.7007],
        [0.2376, 0.2852, 0.3204, 0.3681, 0.4266, 0.4889, 0.5293, 0.5778, 0.6141, 0.6458, 0.6862, 0.7148],
        [0.2407, 0.2878, 0.3232, 0.3712, 0.4303, 0.4935, 0.5342, 0.5842, 0.6186, 0.6525, 0.6907, 0.7185],
        [0.2439, 0.2922, 0.3275, 0.3764, 0.4359, 0.4977, 0.5394, 0.5909, 0.6285, 0.6630, 0.7037, 0.7344],
        [0.2457, 0.2940, 0.3296, 0.3792, 0.4378, 0.5034, 0.5461, 0.5956, 0.6349, 0.6632, 0.7089, 0.7468],
    ]
)


def dip_statistic(x: ArrayLike) -> float:
    """min over unimodal G of sup |F_n − G|, the distance of the empirical CDF to unimodality: x (n,).

    Hartigan & Hartigan 1985, The Dip Test of Unimodality: the greatest convex minorant and the least concave majorant
    of F_n are compared on an interval that shrinks to the mode. O(n) after sorting.
    """
    values = np.sort(np.asarray(x, dtype=np.float64).ravel())
    n = len(values)
    if n == 0 or not np.isfinite(values).all():
        raise ValueError(
            f"the dip needs finite values, got {n} values with {int((~np.isfinite(values)).sum())} not finite"
        )
    if values[0] == values[-1]:
        return 0.5 / n
    v: list[float] = values.tolist()
    minorant, majorant = _hull(v, range(n)), _hull(v, range(n - 1, -1, -1))
    low, high, dip = 0, n - 1, 1.0  # the dip in units of 1/2n
    while True:
        gcm, lcm = _trail(minorant, high, low)[::-1], _trail(majorant, low, high)
        distance, left, right = _widest(values, gcm, lcm)
        if distance < dip:
            break
        for knots, sign in ((gcm[gcm <= left], 1), (lcm[lcm >= right], -1)):
            for begin, end in pairwise(knots.tolist()):
                dip = max(dip, _excess(values, begin, end, sign))
        if (low, high) == (left, right):
            break
        low, high = left, right
    return dip / (2 * n)


def _hull(v: list[float], order: range) -> list[int]:
    """For every point, the knot before it (in ``order``) on the convex minorant (or concave majorant) up to it."""
    first, before = order[0], [0] * len(v)
    before[first] = first
    for j in order[1:]:
        a = j - order.step
        while a != first:
            b = before[a]
            if (v[j] - v[a]) * (a - b) < (v[a] - v[b]) * (j - a):
                break
            a = b
        before[j] = a
    return before


def _trail(before: list[int], begin: int, end: int) -> NDArray[np.int64]:
    """The knots from ``begin`` to ``end``."""
    knots = [begin]
    while knots[-1] != end:
        knots.append(before[knots[-1]])
    return np.array(knots)


def _widest(v: Array, gcm: NDArray[np.int64], lcm: NDArray[np.int64]) -> tuple[float, int, int]:
    """The largest distance between majorant and minorant, in units of 1/n, and the knots on either side of it."""
    below = np.interp(v[gcm], v[lcm], lcm) - gcm + 1  # at the knots of the minorant
    above = lcm + 1 - np.interp(v[lcm], v[gcm], gcm)
    below[[0, -1]] = above[[0, -1]] = 0.0  # at the ends, which both have
    if not below.any() and not above.any():
        return 1.0, int(gcm[0]), int(lcm[-1])
    if below.max() > above.max():
        left = gcm[below.argmax()]
        return float(below.max()), int(left), int(lcm[lcm >= left][0])
    right = lcm[above.argmax()]
    return float(above.max()), int(gcm[gcm <= right][-1]), int(right)


def _excess(values: Array, begin: int, end: int, sign: int) -> float:
    """How far F_n leaves the chord between two knots, in units of 1/n."""
    if end - begin <= 1 or values[end] == values[begin]:
        return 1.0
    slope = (end - begin) / (values[end] - values[begin])
    gap = np.arange(end - begin + 1) - (values[begin : end + 1] - values[begin]) * slope
    return max(1.0, float((sign * gap).max()) + 1.0)


def dip_p_value(dip: float, n: int) -> float:
    """P(dip of n uniform draws ≥ dip): a table, linear in 1/√n and log p; beyond p = .001, log p falls as dip²."""
    t = math.sqrt(n) * dip
    where = 1 / np.sqrt(_SIZES)
    row = np.array([np.interp(1 / math.sqrt(n), where[::-1], column[::-1]) for column in _QUANTILES.T])
    if t <= row[0]:
        return float(1 - (1 - _LEVELS[0]) * t / row[0])
    if t <= row[-1]:
        return math.exp(float(np.interp(t, row, np.log(_LEVELS))))
    rate = math.log(_LEVELS[8] / _LEVELS[-1]) / (row[-1] ** 2 - row[8] ** 2)
    return float(_LEVELS[-1] * math.exp(-rate * (t**2 - row[-1] ** 2)))


def dip_test(x: ArrayLike) -> tuple[float, float]:
    """(dip, p-value) against unimodality for independent draws x (n,); conservative for all but the uniform."""
    dip = dip_statistic(x)
    return dip, dip_p_value(dip, np.size(np.asarray(x)))


def holm(p_values: ArrayLike) -> Array:
    """p-values adjusted for multiple tests, (m,) to (m,): the family-wise error rate, any dependence (Holm 1979)."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p)
    found = np.empty(len(p))
    found[order] = np.minimum(np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p)))), 1.0)
    return found


def antimode(x: Array, points: int = 512) -> float:
    """Where to cut x in two: the deepest valley of its density, measured from the lower of the peaks beside it.

    The density is a Gaussian kernel estimate on a grid, whose bandwidth is halved until there is a valley.
    """
    spread = min(float(x.std()), float(np.subtract(*np.percentile(x, [75, 25]))) / 1.34 or math.inf)
    least = max(1e-6 * float(np.ptp(x)), 1e-12 * float(np.abs(x).max()), 1e-300)  # atoms have no width of their own
    for halvings in range(6):
        h = max(0.9 * spread * len(x) ** -0.2 / 2**halvings, least)
        edges = np.linspace(x.min() - 3 * h, x.max() + 3 * h, points + 1)
        step = edges[1] - edges[0]
        half = (points - 1) // 2  # a kernel no longer than the grid, or "same" would shift it
        kernel = np.exp(-0.5 * (np.arange(-half, half + 1) * step / max(h, step / 2)) ** 2)
        p = np.convolve(np.histogram(x, edges)[0], kernel, "same")
        depth = np.minimum(np.maximum.accumulate(p), np.maximum.accumulate(p[::-1])[::-1]) - p
        if depth.max() > 0.02 * p.max():
            deepest = np.flatnonzero(depth >= depth.max() - 1e-3 * p.max())
            place = deepest if np.ptp(deepest) == len(deepest) - 1 else depth.argmax()
            return float(np.mean(edges[place]) + step / 2)
    return float(np.median(x))
