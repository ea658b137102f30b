"""Values of a column that stand for a missing one are told from measurements."""

import sys

import numpy as np
import pytest

from bayou.training.sentinels import find_sentinels, valid_range


def normal(n=200, seed=0):
    return np.random.default_rng(seed).normal(5.0, 2.0, n)


def found(values):
    """The rows of the sentinels."""
    return np.flatnonzero(find_sentinels(values)).tolist()


@pytest.mark.parametrize(
    "sentinel", [999999999.0, -9999.0, 2147483647.0, 1e30, -1e300, 123456789.0]
)
def test_one_far_value_is_found(sentinel):
    values = normal()
    values[17] = sentinel
    assert found(values) == [17]
    floor, ceiling = valid_range(values)
    assert not floor < sentinel < ceiling
    others = np.delete(values, 17)
    assert floor < others.min() < others.max() < ceiling


def test_a_side_without_sentinels_has_no_limit():
    values = normal()
    assert valid_range(values) == (-sys.float_info.max, sys.float_info.max)
    values[3] = 999999999.0
    assert valid_range(values)[0] == -sys.float_info.max
    values[4] = -999999999.0
    assert find_sentinels(values)[[3, 4]].all()
    assert max(map(abs, valid_range(values))) < 1e6


def test_the_median_of_mostly_equal_values_has_no_spread():
    values = np.zeros(200)
    values[:20] = np.arange(20) % 3 + 1
    assert not find_sentinels(values).any()
    values[50] = 999999999.0
    assert found(values) == [50]
    values[50] = 123456789.0
    assert found(values) == [50]


def test_an_answer_of_99_on_a_scale_from_1_to_5_is_found():
    values = np.tile(np.arange(1.0, 6.0), 20)
    values[[7, 30]] = 99.0
    assert found(values) == [7, 30]


@pytest.mark.parametrize(
    "values",
    [
        np.arange(200.0),
        np.zeros(200),
        np.eye(1, 200)[0],  # an indicator of one row
        1e9 * np.eye(1, 200)[0],
        np.where(np.arange(200) % 2, 1000.0, 0.001 * np.arange(200)),  # two regimes
        np.where(
            np.arange(1000) % 25, 0.001 * np.arange(1000), 1e5 + np.arange(1000)
        ),  # one of them rare
        np.where(
            np.arange(200) < 190, 0.0, [0.001 if i == 190 else 5000.0 + i for i in range(200)]
        ),  # mostly zeros
        np.array([1.0, 2.0, np.nan, 3.0, 999999999.0]),  # too few to tell
        np.array([0.0, 20.0, 40.0, 60.0, 80.0, 99.0, 10.0, 999.0]),  # codes, but near the others
        np.full(50, np.nan),
    ],
    ids=[
        "even",
        "constant",
        "indicator",
        "large indicator",
        "two regimes",
        "rare regime",
        "zeros",
        "few",
        "near",
        "nan",
    ],
)
def test_no_alarm(values):
    assert not find_sentinels(values).any()


@pytest.mark.parametrize(("spread", "rate"), [(0.5, 0.0), (1.0, 0.0), (1.5, 0.0), (2.0, 0.002)])
def test_no_alarm_on_incomes(spread, rate):
    """Log-normal columns of 200 rows: at σ = 2 the ratio of the two largest exceeds 1,000 once in
    10,000 columns.
    """
    generator = np.random.default_rng(0)
    columns = np.exp(spread * generator.normal(size=(1000, 200)))
    assert np.mean([find_sentinels(column).any() for column in columns]) <= rate


def test_values_that_are_not_finite_are_left_alone():
    values = normal()
    values[[1, 2, 3]] = np.nan, np.inf, 999999999.0
    assert found(values) == [3]


@pytest.mark.parametrize("sentinel", [1e30, -1e30, 1.7e308, 1e6, -9999.0])
@pytest.mark.parametrize("count", [3, 20, 80])
def test_one_number_far_from_all_others_may_be_repeated(sentinel, count):
    values = normal()
    values[:count] = sentinel
    assert found(values) == list(range(count))


def test_a_price_beside_a_few_flags_is_no_sentinel():
    values = np.zeros(200)
    values[:60] = 1.0
    values[60:80] = 5000.0
    assert not find_sentinels(values).any()
