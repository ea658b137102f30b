"""Rows that are held out together: groups stay whole, and the latest rows are held out."""

from __future__ import annotations

from datetime import date

import numpy as np
import pytest
import torch

from bayou.training.blocks import Blocks
from bayou.training.data import Rows, as_data

GROUPS = torch.arange(12).repeat_interleave(torch.arange(1, 13))  # 78 rows in groups of 1 to 12
TIMES = torch.arange(40) // 2  # 20 times with two rows each


def rows_of_blocks(n: int, blocks: Blocks | None) -> Rows:
    """Return rows whose x is their number."""
    rows = as_data((torch.arange(n, dtype=torch.float64)[:, None], torch.zeros(n, 1)))
    assert isinstance(rows, Rows)
    return rows.with_blocks(blocks)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5, 0.9])
def test_a_split_keeps_groups_whole_and_holds_out_about_the_fraction(
    fraction: float, seed: int
) -> None:
    rows = rows_of_blocks(len(GROUPS), Blocks.of(len(GROUPS), groups=GROUPS))
    training, held_out = rows.split(fraction, seed)
    assert not set(GROUPS[training.index].tolist()) & set(GROUPS[held_out.index].tolist())
    joined = torch.cat([training.index, held_out.index]).sort().values
    assert torch.equal(joined, torch.arange(len(GROUPS)))
    # a larger deviation than half of the largest group could be made smaller by one group
    assert abs(held_out.n - fraction * len(GROUPS)) <= 12 / 2


def test_other_seeds_hold_out_other_groups() -> None:
    rows = rows_of_blocks(len(GROUPS), Blocks.of(len(GROUPS), groups=GROUPS))
    splits = {tuple(rows.split(0.2, seed)[1].index.tolist()) for seed in range(10)}
    assert len(splits) > 3


def test_a_group_with_most_rows_is_not_held_out() -> None:
    groups = ["large"] * 90 + ["a"] * 5 + ["b"] * 5
    rows = rows_of_blocks(100, Blocks.of(100, groups=groups))
    for seed in range(10):
        assert int(rows.split(0.05, seed)[1].index.min()) >= 90


def test_the_latest_rows_are_held_out_and_ties_stay_together() -> None:
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    times = TIMES[shuffled]
    rows = rows_of_blocks(40, Blocks.of(40, times=times))
    training, held_out = rows.split(0.2, seed=3)
    assert sorted(times[held_out.index].tolist()) == [16, 16, 17, 17, 18, 18, 19, 19]
    assert int(times[training.index].max()) == 15
    assert rows.split(0.17, 0)[1].n == 6  # 6.8 rows: six or eight, the nearer number


def test_a_second_split_holds_out_the_latest_of_the_rest() -> None:
    rows = rows_of_blocks(40, Blocks.of(40, times=TIMES))
    training, _ = rows.split(0.5, seed=0)
    rest, latest = training.with_batch_size(7).split(0.5, seed=1)
    assert latest.index.tolist() == list(range(10, 20))
    assert rest.index.tolist() == list(range(10))


def test_one_time_with_most_rows_leaves_both_sides_some() -> None:
    rows = rows_of_blocks(10, Blocks.of(10, times=[0] + [1] * 9))
    training, held_out = rows.split(0.2, seed=0)
    assert (training.n, held_out.n) == (1, 9)


@pytest.mark.parametrize("seed", range(5))
def test_every_group_is_in_one_fold_and_folds_are_of_similar_sizes(seed: int) -> None:
    blocks = Blocks.of(len(GROUPS), groups=GROUPS)
    assert blocks is not None
    masks = torch.stack(blocks.folds(torch.arange(len(GROUPS)), 5, seed))
    assert bool((masks.sum(0) == 1).all())
    for group in range(12):
        assert int(masks[:, group == GROUPS].any(1).sum()) == 1
    sizes = masks.sum(1)
    assert int(sizes.max() - sizes.min()) <= 3  # of 15.6 rows each


def test_three_groups_have_three_folds_and_times_one() -> None:
    groups = Blocks.of(9, groups=list("aaabbbccc"))
    times = Blocks.of(40, times=TIMES)
    assert groups is not None
    assert times is not None
    assert len(groups.folds(torch.arange(9), 5, 0)) == 3
    (mask,) = times.folds(torch.arange(40), 5, 0)
    assert mask.nonzero().flatten().tolist() == list(range(32, 40))


@pytest.mark.parametrize(
    "times",
    [
        np.array(["2024-01-02", "2023-12-31", "2024-02-01"], dtype="datetime64[D]"),
        [date(2024, 1, 2), date(2023, 12, 31), date(2024, 2, 1)],
        torch.tensor([2.0, 1.0, 3.0]),
        [2, 1, 3],
    ],
)
def test_times_may_be_dates_or_numbers(times: object) -> None:
    blocks = Blocks.of(3, times=times)
    assert blocks is not None
    assert blocks.number.tolist() == [1, 0, 2]
    assert blocks.are_ordered


def test_groups_may_be_numbers_and_texts() -> None:
    blocks = Blocks.of(4, groups=np.array([1, "a", 1, "b"], dtype=object))
    assert blocks is not None
    assert blocks.number[0] == blocks.number[2]
    assert blocks.count(torch.arange(4)) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"groups": [1, 2], "times": [1, 2]}, "groups and times; give groups to predict other"),
        ({"groups": [1, 1]}, "groups are 1 in all 2 rows"),
        ({"times": [5.0, 5.0]}, "times are 5.0 in all 2 rows"),
        ({"groups": [1, 2, 3]}, r"one value for each of 2 rows, got \(3,\)"),
        ({"times": [1.0, float("nan")]}, "times are missing in 1 of 2 rows, first in row 1"),
        ({"groups": np.array(["a", None], dtype=object)}, "groups are missing in 1 of 2 rows"),
        ({"times": ["May", "June"]}, "times must be numbers or datetime64"),
    ],
)
def test_unusable_groups_and_times_are_errors(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Blocks.of(2, **arguments)


def test_rows_of_one_group_cannot_be_split() -> None:
    rows = rows_of_blocks(6, Blocks.of(6, groups=[0, 0, 0, 0, 1, 1]))
    with pytest.raises(ValueError, match="all 4 training rows have one group"):
        rows.at(torch.arange(4)).split(0.2, 0)


def test_blocks_are_part_of_the_identity_of_rows() -> None:
    blocks = [None, Blocks.of(6, groups=list("aabbcc")), Blocks.of(6, groups=list("abcabc"))]
    blocks.append(Blocks.of(6, times=[0, 0, 1, 1, 2, 2]))
    prints = {str(rows_of_blocks(6, item).fingerprint()) for item in blocks}
    assert len(prints) == 4
