"""Settings are selected on held-out rows of whole groups, or of the latest times, where asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bayou
from bayou.select.folds import describe_folds, split_folds
from bayou.training.blocks import Blocks
from bayou.training.data import Rows, as_data

GROUPS = 20
ROWS_PER_GROUP = 6
LEVEL = 0.9


def grouped_rows(groups: int, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of groups, whose features tell the group but nothing of its level of y.

    y = x₄ + level + N(0, 0.1²) with a standard normal level: what can be known of a row of a new
    group has a standard deviation of 1, and of a known group of 0.1.
    """
    generator = torch.Generator().manual_seed(seed)
    number = torch.arange(groups).repeat_interleave(size)
    features = torch.randn(groups, 3, generator=generator, dtype=torch.float64)
    levels = torch.randn(groups, 1, generator=generator, dtype=torch.float64)
    inner = torch.randn(groups * size, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(groups * size, 1, generator=generator, dtype=torch.float64)
    x = torch.cat([features[number], inner], 1)
    return x, inner + levels[number] + 0.1 * noise, number


def network(inputs: int) -> nn.Module:
    """Return a small network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 20), nn.SiLU(), nn.Linear(20, 1)).double()


def coverage_of_new_groups(predict: Callable[[Tensor], tuple[Tensor, Tensor]]) -> float:
    """Return the share of rows of new groups inside their 90 % intervals."""
    x, y, _ = grouped_rows(200, 3, 1)
    low, high = predict(x)
    return float(((low < y) & (y < high)).double().mean())


@pytest.mark.parametrize("name", ["map", "laplace"])
def test_intervals_cover_rows_of_new_groups_only_if_groups_are_given(name: str) -> None:
    x, y, groups = grouped_rows(GROUPS, ROWS_PER_GROUP, 0)
    coverage = {}
    for is_grouped in (True, False) if name == "map" else (True,):
        posterior = bayou.fit(
            network(4),
            (x, y),
            bayou.select.by_name(name, effort=0.5),
            groups=groups if is_grouped else None,
            progress=False,
        )
        coverage[is_grouped] = coverage_of_new_groups(
            lambda x, posterior=posterior: posterior.predict(x, seed=0).interval(LEVEL)
        )
    # The level of 20 groups is known to 1/√40 = 16 %: an interval of 90 % may cover 82 to 95 %.
    assert 0.8 < coverage[True] < 0.98
    if name == "map":
        assert coverage[False] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ensemble", "mnf", "auto"])
def test_slower_methods_cover_rows_of_new_groups(name: str) -> None:
    x, y, groups = grouped_rows(GROUPS, ROWS_PER_GROUP, 0)
    method = bayou.select.by_name(name, effort=0.3)
    posterior = bayou.fit(network(4), (x, y), method, groups=groups, progress=False)
    covered = coverage_of_new_groups(lambda x: posterior.predict(x, seed=0).interval(LEVEL))
    assert 0.8 < covered < 0.99
    assert "of whole groups" in posterior.plan


def test_the_noise_of_a_random_walk_is_that_of_later_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 1, 120, dtype=torch.float64)[:, None]
    y = torch.randn(120, 1, generator=generator, dtype=torch.float64).cumsum(0)
    noise = {}
    for times in (None, x[:, 0]):
        posterior = bayou.fit(
            network(1),
            (x, y),
            bayou.select.by_name("map", effort=0.3),
            times=times,
            progress=False,
        )
        noise[times is None] = float(posterior.predict(x[:1], seed=0).std)
    # Between its neighbors a walk is known to about 1, twelve steps ahead to √12 = 3.5.
    assert noise[False] > 1.5 * noise[True]


def masks(rows: Rows) -> list[tuple[set[int], set[int]]]:
    """Return the numbers of the training and held-out rows of each fold."""
    return [
        (set(training.index.tolist()), set(held_out.index.tolist()))
        for training, held_out in split_folds(rows, 0)
    ]


@pytest.mark.parametrize(("groups", "size", "folds"), [(20, 5, 5), (20, 40, 5), (600, 2, 1)])
def test_folds_hold_out_whole_groups(groups: int, size: int, folds: int) -> None:
    x, y, number = grouped_rows(groups, size, 0)
    rows = as_data((x, y))
    assert isinstance(rows, Rows)
    rows = rows.with_blocks(Blocks.of(rows.n, groups=number))
    splits = masks(rows)
    assert len(splits) == folds
    for training, held_out in splits:
        assert len(training) + len(held_out) == rows.n
        assert not {int(number[i]) for i in training} & {int(number[i]) for i in held_out}
        assert abs(len(held_out) - rows.n / 5) <= size


def test_the_fold_of_times_is_the_latest_fifth_and_is_described() -> None:
    x = torch.zeros(50, 1)
    rows = as_data((x, x))
    assert isinstance(rows, Rows)
    rows = rows.with_blocks(Blocks.of(50, times=torch.arange(50).flip(0)))
    folds = split_folds(rows, 0)
    assert describe_folds(folds) == "on the latest 10 rows, held out"
    assert folds[0][1].index.tolist() == list(range(10))


@pytest.mark.parametrize(
    "method",
    [
        bayou.MAP(steps=20, validation=0.2),
        bayou.VI(steps=20, validation=0.2),
        bayou.Laplace(prior="validation", start=bayou.MAP(steps=20)),
    ],
)
def test_validation_of_a_method_object_holds_out_whole_groups(
    method: bayou.methods.Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, groups = grouped_rows(GROUPS, 4, 0)
    held_out_groups: list[set[int]] = []
    split = Rows.split

    def record(rows: Rows, fraction: float, seed: int) -> tuple[Rows, Rows]:
        training, held_out = split(rows, fraction, seed)
        assert not set(groups[training.index].tolist()) & set(groups[held_out.index].tolist())
        held_out_groups.append(set(groups[held_out.index].tolist()))
        return training, held_out

    monkeypatch.setattr(Rows, "split", record)
    bayou.fit(network(4), (x, y), method, groups=groups, progress=False)
    assert held_out_groups
    assert all(0 < len(held_out) < GROUPS for held_out in held_out_groups)


def test_checks_after_a_fit_use_the_rows_of_held_out_groups() -> None:
    x, y, groups = grouped_rows(GROUPS, ROWS_PER_GROUP, 0)
    rows = as_data((x, y), 128)
    assert isinstance(rows, Rows)
    rows = rows.with_blocks(Blocks.of(rows.n, groups=groups))
    index = bayou.MAP(steps=20, validation=0.2).held_out_index(rows, 0)
    assert index is not None
    kept = rows.without(index)
    assert not set(groups[index].tolist()) & set(groups[kept.index].tolist())


def test_batches_have_no_groups() -> None:
    x = torch.zeros(8, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x), batch_size=4)
    with pytest.raises(ValueError, match="give tensors"):
        bayou.fit(network(1), loader, groups=list(range(8)), progress=False)
