"""P-values of classical tests: Kolmogorov-Smirnov, chi-square, binomial, Fisher, and Holm.

All are computed in float64 on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MAX_EXACT_CELLS = 4_000_000  # rows of one sample times rows of the other, for an exact p-value
MAX_EXACT_ROWS = 1000  # of a sample that is compared with a distribution
MIN_EXACT = 1e-9  # smaller p-values lose digits in 1 − (1 − p); the asymptotic formula has them
MAX_MATRIX_ORDER = 200  # of Durbin's matrix
SERIES_TERMS = 100  # of the limiting distribution of Kolmogorov
ROUNDING = 1e-7  # relative tolerance for probabilities that are equal up to rounding
MIN_ASYMPTOTIC_P = 0.05  # of a chi-square test; smaller ones are simulated
ENOUGH_EXTREME = 20  # draws as extreme as the observed counts, after which no more are drawn
CHUNK_DRAWS = 10_000  # of counts, held in memory at a time
TIE = 1e-10  # tolerance for distances of empirical distribution functions that are equal


class Significance(NamedTuple):
    """The statistic of a test and its p-value.

    Args:
        statistic: of the test.
        p: probability of a statistic at least as extreme, if the null hypothesis is true.
    """

    statistic: float
    p: float


def _as_sample(values: Tensor, name: str) -> Tensor:
    """Return a sample in float64 on the CPU, sorted; a ValueError if it is empty or not finite."""
    sample = torch.as_tensor(values).detach().double().cpu().reshape(-1)
    if not len(sample):
        raise ValueError(f"{name} has no values; a test needs one or more")
    if not bool(sample.isfinite().all()):
        raise ValueError(f"{name} has values that are not finite; leave them out")
    return sample.sort().values


def two_sample_ks(a: Tensor, b: Tensor) -> Significance:
    """Compare two samples of numbers by the Kolmogorov-Smirnov test.

    D = sup_t |F_a(t) − F_b(t)| of the empirical distribution functions. The p-value counts lattice
    paths (Hodges 1958) up to ``MAX_EXACT_CELLS``, and is asymptotic for larger samples. Ties make
    the test conservative.

    Args:
        a: the first sample, (n,).
        b: the second sample, (m,).

    Returns:
        D and the two-sided p-value.

    Raises:
        ValueError: for an empty sample, or numbers that are not finite.

    Example:
        >>> two_sample_ks(torch.arange(10.0), torch.arange(10.0) + 5).p  # doctest: +ELLIPSIS
        0.167...
    """
    statistic = ks_distance(a, b)
    n = a.numel()
    m = b.numel()
    if n * m <= MAX_EXACT_CELLS:
        p = _exact_two_sample_p(min(n, m), max(n, m), statistic)
        if p > MIN_EXACT:
            return Significance(statistic, p)
    return Significance(statistic, kolmogorov_survival(statistic * math.sqrt(n * m / (n + m))))


def ks_distance(a: Tensor, b: Tensor) -> float:
    """Return D = sup_t |F_a(t) − F_b(t)| of two empirical distribution functions.

    Args:
        a: the first sample, (n,).
        b: the second sample, (m,).
    """
    first = _as_sample(a, "the first sample")
    second = _as_sample(b, "the second sample")
    points = torch.cat((first, second))
    # Whole numbers over n·m, so that equal distances are equal.
    gaps = torch.searchsorted(first, points, right=True) * len(second)
    gaps = gaps - torch.searchsorted(second, points, right=True) * len(first)
    return float(gaps.abs().max()) / (len(first) * len(second))


def _exact_two_sample_p(n: int, m: int, statistic: float) -> float:
    """Return P(D ≥ statistic) of samples of n ≤ m rows without ties.

    The order of the pooled sample is a path from (0, 0) to (n, m), all of which are equally likely;
    D is below the statistic if |i/n − j/m| is at every point (i, j). ``inside[j]`` is the number of
    such paths to (i, j), divided by the number of all paths to (i, m), which keeps it finite.
    """
    if statistic <= 0:
        return 1.0
    column = torch.arange(m + 1, dtype=torch.float64) / m
    inside = (column < statistic - TIE).double()  # i = 0: one path to each j
    for i in range(1, n + 1):
        is_allowed = (column - i / n).abs() < statistic - TIE
        inside = torch.where(is_allowed, inside, torch.zeros_like(inside)).cumsum(0)
        inside = torch.where(is_allowed, inside, torch.zeros_like(inside))
        inside = inside * (i / (m + i))  # all paths to (i − 1, m), divided by those to (i, m)
    return min(max(1.0 - float(inside[m]), 0.0), 1.0)


def kolmogorov_survival(x: float) -> float:
    """Return P(K > x) = 2·Σ_k (−1)^(k−1)·exp(−2k²x²) of the limiting distribution.

    Args:
        x: √n·D of one sample, or √(n·m/(n + m))·D of two.
    """
    if x < 0.2:  # 1 to 10 digits, where the series converges slowly
        return 1.0
    k = torch.arange(1, SERIES_TERMS + 1, dtype=torch.float64)
    terms = 2 * (-1.0) ** (k - 1) * (-2 * k.square() * x * x).exp()
    return min(max(float(terms.sum()), 0.0), 1.0)


def uniform_ks(u: Tensor) -> Significance:
    """Compare a sample with the uniform distribution on [0, 1] by the Kolmogorov-Smirnov test.

    D = sup_t |F_n(t) − t|. The p-value is exact up to ``MAX_EXACT_ROWS`` rows, by the matrix of
    Durbin (Marsaglia, Tsang & Wang, Evaluating Kolmogorov's distribution, 2003), else that of
    √n·D with the correction of Stephens (1970).

    Args:
        u: numbers in [0, 1], (n,), such as the probability integral transform of targets.

    Returns:
        D and the two-sided p-value.

    Raises:
        ValueError: for an empty sample, or numbers outside [0, 1].
    """
    sample = _as_sample(u, "the sample")
    n = len(sample)
    if float(sample[0]) < 0 or float(sample[-1]) > 1:
        raise ValueError(
            f"uniform_ks compares numbers from 0 to 1, got {float(sample[0])} to "
            f"{float(sample[-1])}"
        )
    rank = torch.arange(n, dtype=torch.float64)
    statistic = float(torch.maximum((rank + 1) / n - sample, sample - rank / n).max())
    if n <= MAX_EXACT_ROWS and 2 * math.floor(n * statistic) + 1 <= MAX_MATRIX_ORDER:
        p = 1.0 - _durbin_cdf(n, statistic)
        if p > MIN_EXACT:
            return Significance(statistic, min(p, 1.0))
    root = math.sqrt(n)
    return Significance(statistic, kolmogorov_survival(statistic * (root + 0.12 + 0.11 / root)))


def _durbin_cdf(n: int, statistic: float) -> float:
    """Return P(D < statistic) of n uniform numbers: n!/nⁿ times an entry of the n-th power of H."""
    k = math.floor(n * statistic) + 1
    order = 2 * k - 1
    h = k - n * statistic
    row = torch.arange(order)
    matrix = (row[:, None] - row[None, :] + 1 >= 0).double()
    powers = torch.tensor([h ** (i + 1) for i in range(order)], dtype=torch.float64)
    matrix[:, 0] -= powers
    matrix[-1] -= powers.flip(0)
    if 2 * h - 1 > 0:
        matrix[-1, 0] += (2 * h - 1) ** order
    difference = (row[:, None] - row[None, :] + 1).clamp_min(0).double()
    matrix = matrix * (-torch.lgamma(difference + 1)).exp()
    power = torch.eye(order, dtype=torch.float64)
    log_scale = 0.0
    base = matrix
    base_log_scale = 0.0
    exponent = n
    while exponent:
        if exponent % 2:
            power = power @ base
            log_scale += base_log_scale
            power, shift = _normalize(power)
            log_scale += shift
        base, shift = _normalize(base @ base)
        base_log_scale = 2 * base_log_scale + shift
        exponent //= 2
    entry = float(power[k - 1, k - 1])
    if entry <= 0:
        return 0.0
    return math.exp(math.log(entry) + log_scale + math.lgamma(n + 1) - n * math.log(n))


def _normalize(matrix: Tensor) -> tuple[Tensor, float]:
    """Return a matrix divided by its largest entry, and the logarithm of that entry."""
    largest = float(matrix.abs().max())
    return matrix / largest, math.log(largest)


def chi_square_survival(statistic: float, degrees: int) -> float:
    """Return P(X > statistic) of a chi-square distribution.

    Args:
        statistic: a number that is not negative.
        degrees: of freedom, 1 or more.
    """
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    value = torch.tensor(max(statistic, 0.0) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, value))


def chi_square(a: Tensor, b: Tensor, min_expected: float = 5.0) -> Significance:
    """Compare the counts of categories in two samples by the chi-square test of homogeneity.

    Σ (observed − expected)²/expected over both samples and all categories. Categories whose
    expected count is below ``min_expected`` in one of the samples are joined, the rarest first.
    The p-value is that of the limiting distribution, which is too small far in the tail unless
    all expected counts are large; ``compare_counts`` has another one.

    Args:
        a: counts of the K categories in the first sample, (K,).
        b: counts in the second sample, (K,).
        min_expected: the least expected count of a category. Default: 5.

    Returns:
        The statistic and the p-value; a p-value of 1 where one category is left.

    Raises:
        ValueError: if the counts do not match, are negative, or one of the samples is empty.
    """
    counts = _join_rare(a, b, min_expected)
    categories = counts.shape[1]
    if categories < 2:
        return Significance(0.0, 1.0)
    statistic = float(_chi_square_statistic(counts[1], counts))
    return Significance(statistic, chi_square_survival(statistic, categories - 1))


def compare_counts(a: Tensor, b: Tensor, draws: int, seed: int) -> Significance:
    """Compare the counts of categories in two samples, with a p-value that holds for rare ones.

    The statistic is that of ``chi_square``. Given the totals of the categories, the counts of the
    second sample are hypergeometric if both samples have one distribution. The p-value of two
    categories is that of Fisher. Of more it is (1 + #{draws at least as extreme})/(1 + draws), or
    20/l if the l-th draw is the 20th such one (Besag & Clifford, Sequential Monte Carlo p-values,
    1991); the limiting distribution is used where it has a p-value above 5 %.

    Args:
        a: counts of the K categories in the first sample, (K,).
        b: counts in the second sample, (K,).
        draws: the largest number of draws.
        seed: of the draws.

    Raises:
        ValueError: as of ``chi_square``.
    """
    counts = _join_rare(a, b, 5.0)
    evidence = chi_square(*counts)
    categories = counts.shape[1]
    if categories < 2:
        return evidence
    if categories == 2:
        first, second = counts.long().tolist()
        exact = fisher(first[0], sum(first), second[0], sum(second))
        return Significance(evidence.statistic, exact.p)
    if evidence.p > MIN_ASYMPTOTIC_P:
        return evidence
    generator = np.random.default_rng(seed)
    totals = counts.sum(0).long().numpy()
    threshold = evidence.statistic * (1 - ROUNDING)
    extreme_count = 0
    for start in range(0, draws, CHUNK_DRAWS):
        size = min(CHUNK_DRAWS, draws - start)
        drawn = generator.multivariate_hypergeometric(
            totals, int(counts[1].sum()), size, method="marginals"
        )
        statistics = _chi_square_statistic(torch.from_numpy(drawn).double(), counts)
        extreme = (statistics >= threshold).nonzero()[:, 0]
        if extreme_count + len(extreme) >= ENOUGH_EXTREME:
            last = start + int(extreme[ENOUGH_EXTREME - extreme_count - 1]) + 1
            return Significance(evidence.statistic, ENOUGH_EXTREME / last)
        extreme_count += len(extreme)
    return Significance(evidence.statistic, (1 + extreme_count) / (1 + draws))


def _join_rare(a: Tensor, b: Tensor, min_expected: float) -> Tensor:
    """Return the counts of both samples, (2, K), with rare categories joined."""
    counts = torch.stack((torch.as_tensor(a).double(), torch.as_tensor(b).double())).cpu()
    if counts.ndim != 2 or bool((counts < 0).any()) or not bool((counts.sum(1) > 0).all()):
        raise ValueError(
            "two samples of counts (K,) are needed, each with one row or more, got "
            f"{tuple(torch.as_tensor(a).shape)} and {tuple(torch.as_tensor(b).shape)}"
        )
    share = float(counts.sum(1).min() / counts.sum())  # of the smaller sample
    counts = counts[:, counts.sum(0).argsort(stable=True)]
    total = counts.sum(0)
    rare_count = int((total * share < min_expected).sum())
    if not rare_count:
        return counts
    # The joined category takes frequent ones too until it is large enough.
    while rare_count < len(total) and float(total[:rare_count].sum()) * share < min_expected:
        rare_count += 1
    joined = counts[:, :rare_count].sum(1, keepdim=True)
    return torch.cat((joined, counts[:, rare_count:]), 1)


def _chi_square_statistic(second: Tensor, counts: Tensor) -> Tensor:
    """Return Σ (observed − expected)²/expected of both samples, with the totals of ``counts``.

    Args:
        second: counts of the second sample, (..., K).
        counts: of both samples, (2, K), whose totals are those of ``second`` and its complement.
    """
    total = counts.sum(0)
    share = counts[1].sum() / counts.sum()
    squares = (second - share * total).square() / total
    return squares.sum(-1) * (1 / share + 1 / (1 - share))


def binomial(successes: int, n: int, probability: float) -> Significance:
    """Test the number of successes of n independent trials, exactly and two-sided.

    p = Σ P(k) over all k that are at most as probable as the observed number.

    Args:
        successes: the observed number, 0 to n.
        n: the number of trials, 1 or more.
        probability: of a success under the null hypothesis, between 0 and 1.

    Returns:
        The fraction of successes and the p-value.

    Raises:
        ValueError: for numbers that are not possible.
    """
    if not 0 <= successes <= n or n < 1 or not 0 < probability < 1:
        raise ValueError(
            "binomial needs 0 <= successes <= n, n >= 1 and a probability between 0 and 1, got "
            f"{successes}, {n} and {probability}"
        )
    k = torch.arange(n + 1, dtype=torch.float64)
    log_mass = _log_choose(float(n), k) + k * math.log(probability)
    log_mass = log_mass + (n - k) * math.log1p(-probability)
    return Significance(successes / n, _two_sided(log_mass, successes))


def fisher(a: int, n: int, b: int, m: int, *, more_in_second: bool = False) -> Significance:
    """Compare two frequencies by the exact test of Fisher.

    Given a + b, the number in the second sample is hypergeometric if both frequencies are equal.

    Args:
        a: successes in the first sample, 0 to n.
        n: rows of the first sample, 1 or more.
        b: successes in the second sample, 0 to m.
        m: rows of the second sample, 1 or more.
        more_in_second: whether only a higher frequency in the second sample counts as extreme;
            two-sided by default.

    Returns:
        The difference of the frequencies, second minus first, and the p-value.

    Raises:
        ValueError: for numbers that are not possible.
    """
    if not (0 <= a <= n and 0 <= b <= m and n >= 1 and m >= 1):
        raise ValueError(f"fisher needs 0 <= a <= n and 0 <= b <= m, got {a}, {n}, {b} and {m}")
    total = a + b
    low = max(0, total - n)
    k = torch.arange(low, min(m, total) + 1, dtype=torch.float64)
    log_mass = _log_choose(float(m), k) + _log_choose(float(n), total - k)
    log_mass = log_mass - _log_choose(float(n + m), torch.tensor(float(total)).double())
    difference = b / m - a / n
    if more_in_second:
        p = float(log_mass[b - low :].exp().sum())
        return Significance(difference, min(p, 1.0))
    return Significance(difference, _two_sided(log_mass, b - low))


def _log_choose(n: float, k: Tensor) -> Tensor:
    """Return log(n choose k)."""
    top = torch.tensor(n, dtype=torch.float64)
    return torch.lgamma(top + 1) - torch.lgamma(k + 1) - torch.lgamma(top - k + 1)


def _two_sided(log_mass: Tensor, index: int) -> float:
    """Return the sum of the probabilities that are at most that of an index, at most 1."""
    is_extreme = log_mass <= log_mass[index] + ROUNDING
    return min(float(log_mass[is_extreme].exp().sum()), 1.0)


def normal_p(z: float) -> float:
    """Return the two-sided p-value of a standard normal statistic.

    Args:
        z: the statistic.
    """
    return math.erfc(abs(z) / math.sqrt(2))


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p-values for their number (Holm 1979).

    The adjusted value of the k-th smallest of m is max_{i ≤ k} (m − i + 1)·p_(i), at most 1. To
    reject those of at most α has a probability of at most α for one or more false rejections,
    however the tests depend on each other.

    Args:
        p: p-values in any order.

    Returns:
        Adjusted p-values in the same order.
    """
    adjusted = [1.0] * len(p)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min((len(p) - rank) * p[index], 1.0))
        adjusted[index] = largest
    return adjusted
