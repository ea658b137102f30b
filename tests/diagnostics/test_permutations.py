"""Permutation tests against enumeration, and within strata."""

import itertools

import pytest
import torch

from bayou.diagnostics.permutations import (
    count_permutations,
    energy_test,
    largest_differences,
    normal_scores,
    permuted_labels,
    products_of_pairs,
)
from bayou.diagnostics.propensity import (
    MIN_ROWS_OF_SAMPLE,
    fit_logistic,
    propensity_strata,
)


def test_labels_keep_their_number_in_every_stratum():
    strata = torch.tensor([0, 1, 0, 1, 1, 0, 2])
    labels = torch.tensor([True, False, False, True, True, False, False])
    permuted = permuted_labels(labels, strata, 200, 0)
    for stratum in range(3):
        member = strata == stratum
        assert set(permuted[:, member].sum(1).tolist()) == {float(labels[member].sum())}
    assert len({tuple(row) for row in permuted.tolist()}) == 3 * 3  # all orders appear
    assert torch.equal(permuted, permuted_labels(labels, strata, 200, 0))


def test_the_p_value_is_that_of_all_permutations():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    is_second = torch.arange(9) >= 5
    (result,) = largest_differences([values], is_second, 20_000, 0)
    centered = values - values.mean(0)
    centered = centered / centered.norm(dim=0)
    observed = centered[5:].sum(0).abs().max()
    subsets = list(itertools.combinations(range(9), 4))
    extreme = [centered[list(s)].sum(0).abs().max() >= observed - 1e-12 for s in subsets]
    exact = sum(map(bool, extreme)) / len(subsets)
    assert result.evidence.p == pytest.approx(exact, abs=4 * (exact * (1 - exact) / 20_000) ** 0.5)
    assert result.difference == pytest.approx(
        float((values[5:].mean(0) - values[:5].mean(0))[result.column])
    )


def test_a_difference_between_strata_does_not_count():
    generator = torch.Generator().manual_seed(0)
    strata = torch.arange(400) % 2
    # The second sample is mostly in stratum 1, where values are larger.
    is_second = torch.rand(400, generator=generator) < 0.1 + 0.8 * strata
    values = (3.0 * strata + torch.randn(400, generator=generator))[:, None]
    (plain,) = largest_differences([values], is_second, 999, 0)
    (within,) = largest_differences([values], is_second, 999, 0, strata)
    assert plain.evidence.p == 0.001
    assert within.evidence.p > 0.05


def test_a_constant_statistic_is_never_significant():
    (result,) = largest_differences([torch.ones(20, 1)], torch.arange(20) > 9, 99, 0)
    assert result.evidence == (0.0, 1.0)


def test_the_energy_distance_is_that_of_its_definition():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    b = torch.randn(5, 3, generator=generator, dtype=torch.float64) + 1
    across = torch.cdist(a, b).mean()
    within = torch.cdist(a, a).mean() + torch.cdist(b, b).mean()
    assert energy_test(a, b, 9, 0).statistic == pytest.approx(float(2 * across - within))
    far = energy_test(torch.zeros(20, 2), torch.ones(20, 2), 199, 0)
    assert far.p == pytest.approx(1 / 200)


def test_normal_scores_are_quantiles_of_mid_ranks():
    scores = normal_scores(torch.tensor([[3.0], [1.0], [1.0], [8.0]]))
    expected = torch.special.ndtri(torch.tensor([5, 2, 2, 7]).double() / 8)
    assert torch.allclose(scores[:, 0], expected)
    products, pairs = products_of_pairs(torch.tensor([[2.0, 3.0, 5.0]]))
    assert pairs == [(0, 1), (0, 2), (1, 2)]
    assert products.tolist() == [[6.0, 10.0, 15.0]]


def test_there_are_enough_permutations_for_a_significant_p_value():
    for tests, level in ((1, 0.05), (6, 0.0025), (3, 1e-4)):
        assert tests / (count_permutations(tests, level) + 1) <= level / 2


def test_the_logistic_regression_has_a_gradient_of_zero():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    label = (x[:, 0] + torch.randn(200, generator=generator) > 0).double()
    coefficients = fit_logistic(x, label, penalty=2.0)
    p = torch.sigmoid(x @ coefficients[:3] + coefficients[3])
    assert torch.allclose(
        x.T @ (p - label) + 2.0 * coefficients[:3], torch.zeros(3).double(), atol=1e-8
    )
    assert abs(float((p - label).sum())) < 1e-4


def test_strata_have_rows_of_both_samples_with_similar_inputs():
    generator = torch.Generator().manual_seed(0)
    is_second = torch.arange(1000) >= 500
    x = torch.randn(1000, 2, generator=generator, dtype=torch.float64)
    x[:, 0] += 1.5 * is_second
    strata = propensity_strata(x, is_second, 0)
    gaps = []
    for k in strata.unique().tolist():
        member = strata == k
        if k >= 0:
            assert min(int((member & is_second).sum()), int((member & ~is_second).sum())) >= 5
            gaps.append(float(x[member & is_second, 0].mean() - x[member & ~is_second, 0].mean()))
    assert len(gaps) >= 5
    assert max(map(abs, gaps)) < 0.75  # 1.5 without strata
    apart = propensity_strata(x + 20.0 * is_second[:, None], is_second, 0)
    assert (apart == -1).all()


@pytest.mark.parametrize("columns", [0, 1])
def test_rows_with_equal_inputs_are_spread_over_the_strata(columns):
    is_new = torch.arange(600) >= 300
    features = (torch.arange(600) % 2)[:, None].double()[:, :columns]
    strata = propensity_strata(features, is_new, 0)
    assert int((strata >= 0).sum()) == 600
    for stratum in strata.unique():
        new_count = int(is_new[strata == stratum].sum())
        # Of about 60 rows half are new: 4.5 standard deviations.
        assert abs(new_count - 30) < 4.5 * 15**0.5
        assert new_count >= MIN_ROWS_OF_SAMPLE
