"""P-values against scipy."""

import numpy as np
import pytest
import scipy.stats
import torch

from bayou.diagnostics.hypothesis import (
    binomial,
    chi_square,
    compare_counts,
    fisher,
    holm,
    kolmogorov_survival,
    two_sample_ks,
    uniform_ks,
)


@pytest.mark.parametrize(("n", "m"), [(1, 5), (7, 23), (40, 40), (300, 500)])
def test_the_two_sample_test_is_exact(n, m):
    generator = np.random.default_rng(n)
    a = generator.normal(size=n)
    b = generator.normal(size=m) + 0.2
    evidence = two_sample_ks(torch.tensor(a), torch.tensor(b))
    expected = scipy.stats.ks_2samp(a, b, method="exact")
    assert evidence.statistic == pytest.approx(expected.statistic, rel=1e-12)
    assert evidence.p == pytest.approx(expected.pvalue, rel=1e-9)


def test_large_samples_and_small_p_values_have_the_limiting_distribution():
    generator = np.random.default_rng(0)
    a = generator.normal(size=3000)
    b = generator.normal(size=2000) + 0.04
    evidence = two_sample_ks(torch.tensor(a), torch.tensor(b))
    assert evidence.p == pytest.approx(scipy.stats.ks_2samp(a, b, method="asymp").pvalue, rel=0.05)
    far = two_sample_ks(torch.tensor(a[:300]), torch.tensor(a[:300] + 5))
    assert 0 < far.p < 1e-30
    assert kolmogorov_survival(1.2) == pytest.approx(scipy.stats.kstwobign.sf(1.2), rel=1e-10)


def test_ties_make_the_two_sample_test_conservative():
    a = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0])
    assert two_sample_ks(a, a).p == 1.0
    expected = scipy.stats.ks_2samp([0, 0, 1, 1, 1], [1, 1, 1, 1], method="exact")
    assert two_sample_ks(a, torch.ones(4)).p == pytest.approx(expected.pvalue)


@pytest.mark.parametrize("n", [1, 5, 20, 100, 700])
def test_the_test_of_uniformity_is_exact(n):
    u = np.random.default_rng(n).uniform(size=n) ** 1.1
    evidence = uniform_ks(torch.tensor(u))
    expected = scipy.stats.kstest(u, "uniform", method="exact")
    assert evidence.statistic == pytest.approx(expected.statistic, rel=1e-12)
    assert evidence.p == pytest.approx(expected.pvalue, rel=1e-7)


def test_many_rows_have_an_approximation():
    u = np.random.default_rng(0).uniform(size=5000) ** 1.02
    expected = scipy.stats.kstest(u, "uniform").pvalue
    assert uniform_ks(torch.tensor(u)).p == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("k", "n", "p"), [(3, 40, 0.2), (0, 7, 0.5), (880, 1000, 0.9), (7, 7, 0.9)]
)
def test_the_binomial_test_is_that_of_scipy(k, n, p):
    assert binomial(k, n, p).p == pytest.approx(scipy.stats.binomtest(k, n, p).pvalue, rel=1e-9)


@pytest.mark.parametrize(("a", "n", "b", "m"), [(3, 100, 12, 90), (0, 50, 4, 20), (9, 9, 3, 9)])
def test_the_test_of_fisher_is_that_of_scipy(a, n, b, m):
    table = [[a, n - a], [b, m - b]]
    assert fisher(a, n, b, m).p == pytest.approx(scipy.stats.fisher_exact(table).pvalue, rel=1e-9)
    one_sided = scipy.stats.fisher_exact(table, alternative="less").pvalue
    assert fisher(a, n, b, m, more_in_second=True).p == pytest.approx(one_sided, rel=1e-9)


def test_the_chi_square_test_is_that_of_scipy():
    counts = np.array([[30, 40, 50, 20], [10, 30, 60, 40]])
    evidence = chi_square(*torch.tensor(counts))
    expected = scipy.stats.chi2_contingency(counts, correction=False)
    assert evidence.statistic == pytest.approx(expected.statistic)
    assert evidence.p == pytest.approx(expected.pvalue)


def test_rare_categories_are_joined():
    first = torch.tensor([100, 50, 1, 2, 0])
    second = torch.tensor([80, 60, 2, 0, 1])
    joined = np.array([[100, 50, 3], [80, 60, 3]])
    # The three rare ones have an expected count of 3 together: they join the smallest other one.
    expected = scipy.stats.chi2_contingency(
        np.array([[100, 53], [80, 63]]), correction=False
    ).pvalue
    assert joined.sum(1).tolist() == [int(first.sum()), int(second.sum())]
    assert chi_square(first, second).p == pytest.approx(expected)
    assert chi_square(torch.tensor([5]), torch.tensor([9])).p == 1.0


def test_holm_is_the_step_down_procedure():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: two_sample_ks(torch.empty(0), torch.ones(3)),
        lambda: two_sample_ks(torch.tensor([float("nan")]), torch.ones(3)),
        lambda: uniform_ks(torch.tensor([1.5])),
        lambda: binomial(5, 4, 0.5),
        lambda: fisher(5, 4, 0, 3),
        lambda: chi_square(torch.tensor([1, 2]), torch.tensor([0, 0])),
    ],
)
def test_what_cannot_be_tested_is_an_error(call):
    with pytest.raises(ValueError, match=r"no values|not finite|numbers from|needs|needed"):
        call()


def test_two_categories_are_compared_by_the_test_of_fisher():
    # The chi-square distribution has 2.7e-3 for an expected count of 5.
    first = torch.tensor([1900, 100])
    second = torch.tensor([87, 13])
    expected = scipy.stats.fisher_exact([[1900, 87], [100, 13]]).pvalue
    assert compare_counts(first, second, 0, 0).p == pytest.approx(expected, rel=1e-9)


def test_rare_categories_have_the_p_value_of_all_tables():
    first = np.array([60, 20, 25])
    second = np.array([20, 8, 1])
    totals = first + second
    tables = [
        (i, j, 29 - i - j)
        for i in range(30)
        for j in range(30 - i)
        if i <= totals[0] and j <= totals[1] and 29 - i - j <= totals[2]
    ]

    def statistic(row):
        expected = totals * 29 / totals.sum()
        return ((row - expected) ** 2 / expected).sum()

    mass = scipy.stats.multivariate_hypergeom.pmf(tables, m=totals, n=29)
    is_extreme = [statistic(np.array(row)) >= statistic(second) - 1e-9 for row in tables]
    expected = mass[is_extreme].sum()
    p = compare_counts(torch.tensor(first), torch.tensor(second), 200_000, 0).p
    # 20 extreme draws have a relative standard deviation of 1/√20.
    assert p == pytest.approx(expected, rel=3 / 20**0.5)
    assert expected < 0.05
    far = compare_counts(torch.tensor([500, 500, 500]), torch.tensor([900, 5, 5]), 999, 0)
    assert far.p == 1 / 1000
