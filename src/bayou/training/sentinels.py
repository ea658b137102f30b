"""Sentinels: numbers that stand for a missing value, such as 999999999 or −9999."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_VALUES = 5  # with fewer there are no sentinels
# The smallest ratio of the distances from the median of a sentinel and of the farthest other value.
MIN_JUMP = 1000.0
MIN_JUMP_OF_CODES = 20.0  # the same for values that are common codes: 999, −9999, 32767
# The largest fraction of values that can be sentinels without being common codes or all the same.
MAX_SHARE = 0.01
# The smallest number of different distances among the other values of a repeated sentinel.
MIN_DISTANCES = 5
MIN_CODE = 99.0  # the smallest number whose digits 9 make it a code
INTEGER_LIMITS = (2.0**15 - 1, 2.0**15, 2.0**16 - 1, 2.0**31 - 1, 2.0**31, 2.0**32 - 1, 2.0**63)


def is_code(value: float) -> bool:
    """Return whether a number is a common code for a missing one: all digits 9, or a limit.

    Args:
        value: the number; its sign does not matter.
    """
    size = abs(value)
    if size in INTEGER_LIMITS:
        return True
    digits = f"{size:.12g}".replace(".", "")
    return size >= MIN_CODE and set(digits) == {"9"}


def find_sentinels(
    values: NDArray[Any], is_code: Callable[[float], bool] = is_code
) -> NDArray[np.bool_]:
    """Find the values of a column that are too far from all others to be measurements.

    A single 999999999 among ordinary numbers makes the standard deviation of a column so large that
    the standardized others are all the same. Values count as sentinels if there is a jump before
    them: in the order of distances from the median, the next one is 1,000 times as far as the one
    before, and at most 1 % of the values lie beyond (one in any case, or up to half of the values
    if all of them are the same number). For common codes (all digits are 9, or a limit of an
    integer type) a factor of 20 is enough, and they may be as many as half of the values.
    Heavy-tailed columns such as incomes have no such jump: of 20,000 columns of 200 log-normal
    values with σ = 2, none had a jump of 1,000.

    The distances of a column with mostly equal values are those from that value, among the values
    that differ.

    Args:
        values: the numbers of a column, (N,); those that are not finite are never sentinels.
        is_code: whether a value is a common code; by default that of numbers.

    Returns:
        Flags (N,), True for a sentinel.

    >>> find_sentinels(np.array([3.0, 1.0, 2.0, 5.0, 4.0, 999999999.0])).tolist()
    [False, False, False, False, False, True]
    """
    values = np.asarray(values, np.float64)
    flags = np.zeros(values.shape, np.bool_)
    present = np.isfinite(values)
    if present.sum() < MIN_VALUES:
        return flags
    distances = _distances(values[present])
    limit = _distance_limit(values[present], distances, is_code)
    flags[present] = distances > limit
    return flags


def valid_range(
    values: NDArray[Any], is_code: Callable[[float], bool] = is_code
) -> tuple[float, float]:
    """Return the range outside of which a value of this column counts as a sentinel.

    An end lies between the sentinels on its side and the other values, at the geometric mean of
    their distances from the median; without sentinels it is the largest finite number.

    Args:
        values: as of ``find_sentinels``.
        is_code: the same.

    Returns:
        The ends of the range.
    """
    values = np.asarray(values, np.float64)
    flags = find_sentinels(values, is_code)
    floor = -sys.float_info.max
    ceiling = sys.float_info.max
    if not flags.any():
        return floor, ceiling
    finite = np.isfinite(values)
    median = float(np.median(values[finite]))
    largest_distance = np.abs(values[finite & ~flags] - median).max()
    below = values[flags & (values < median)]
    above = values[flags & (values > median)]
    if len(below):
        distance = float(np.sqrt(largest_distance) * np.sqrt(median - below.max()))
        floor = max(floor, median - distance)
    if len(above):
        distance = float(np.sqrt(largest_distance) * np.sqrt(above.min() - median))
        ceiling = min(ceiling, median + distance)
    return floor, ceiling


def _distances(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the distances from the median."""
    with np.errstate(over="ignore"):
        distances: NDArray[np.float64] = np.abs(values - np.median(values))
    return distances


def _distance_limit(
    values: NDArray[np.float64],
    distances: NDArray[np.float64],
    is_code: Callable[[float], bool],
) -> float:
    """Return the distance from the median beyond which values are sentinels, or infinity."""
    differing = np.unique(distances[distances > 0])
    with np.errstate(over="ignore"):
        jumps = np.flatnonzero(differing[1:] >= MIN_JUMP_OF_CODES * differing[:-1])
    for index in jumps.tolist():
        limit = float(differing[index])
        outside = distances > limit
        count = int(outside.sum())
        if count > len(values) / 2:
            continue
        if all(map(is_code, np.unique(values[outside]).tolist())):
            return limit
        is_far = differing[index + 1] >= MIN_JUMP * limit
        is_rare = count <= max(1.0, MAX_SHARE * len(values))
        is_one_value = len(np.unique(values[outside])) == 1 and index + 1 >= MIN_DISTANCES
        inside_that_differ = int((distances > 0).sum()) - count
        if is_far and (is_rare or is_one_value) and count <= inside_that_differ:
            return limit
    return float("inf")
