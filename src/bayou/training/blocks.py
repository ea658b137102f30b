"""Rows that are held out together: those of a group, or the latest ones."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from bayou.core import rng


@final
@dataclass(frozen=True, eq=False)
class Blocks:
    """The block of every row: a group, or a point in time. No block is split by held-out rows.

    A network that is judged on rows of a group from which it has learned, or on rows between those
    that it has learned from, looks better than it is on new groups and in the future. The held-out
    rows of groups are those of some groups, chosen at random; those of times are the latest ones.

    Args:
        number: the block of each row of a source, from 0, (N,); times count in their order.
        are_ordered: whether blocks are points in time.
    """

    number: Tensor
    are_ordered: bool = False

    @staticmethod
    def of(rows: int, groups: Any = None, times: Any = None) -> Blocks | None:
        """Return the blocks of groups or of times; None without both.

        Args:
            rows: the number of rows.
            groups: the group of each row, numbers or texts (N,); None for none.
            times: the time of each row, numbers or dates (N,); None for none.

        Raises:
            ValueError: for both, another number of rows, missing values or a single block.
        """
        if groups is None and times is None:
            return None
        if groups is not None and times is not None:
            raise ValueError(
                "got groups and times; give groups to predict other groups, or times to predict "
                "later rows of the same groups"
            )
        name = "times" if groups is None else "groups"
        values = _as_array(times if groups is None else groups, name, rows)
        distinct, number = np.unique(values, return_inverse=True)
        if len(distinct) < 2:
            raise ValueError(
                f"{name} are {distinct[0]} in all {rows} rows, so that no rows can be held out; "
                f"give at least two different {name}"
            )
        return Blocks(torch.from_numpy(number.reshape(-1)), groups is None)

    def hold_out(self, index: Tensor, fraction: float, seed: int, kept: int = 1) -> Tensor:
        """Return which of some rows are held out, about a fraction of them, (n,).

        Args:
            index: the numbers of the rows in their source, (n,).
            fraction: of these rows to hold out; at least one block is.
            seed: of the choice of groups.
            kept: how many blocks are not held out, at least; of fewer than one more, one.

        Raises:
            ValueError: if all rows are of one block.
        """
        number, sizes = self._renumber(index)
        target = fraction * len(index)
        most = max(1, len(sizes) - kept)
        if self.are_ordered:
            later_rows = sizes.flip(0).cumsum(0)[:most]  # of the last 1, 2, ... blocks
            count = int((later_rows - target).abs().argmin()) + 1
            return number >= len(sizes) - count
        is_held_out = torch.zeros(len(sizes), dtype=torch.bool)
        total = 0
        for block in rng.permutation(len(sizes), seed).tolist():
            size = int(sizes[block])
            is_nearer = abs(total + size - target) < abs(total - target)
            if is_nearer and int(is_held_out.sum()) < most:
                is_held_out[block] = True
                total += size
        if total == 0:  # every group has more than twice as many rows
            is_held_out[sizes.argmin()] = True
        return is_held_out[number]

    def folds(self, index: Tensor, count: int, seed: int) -> list[Tensor]:
        """Return which of some rows each fold holds out, (n,) each.

        Every group is in one of the folds, which have about equally many rows; there are fewer
        folds than asked for if there are fewer groups. Times have one fold, the latest rows.

        Args:
            index: the numbers of the rows in their source, (n,).
            count: the number of folds.
            seed: of the order of groups of one size.

        Raises:
            ValueError: if all rows are of one block.
        """
        if self.are_ordered:
            return [self.hold_out(index, 1 / count, seed)]
        number, sizes = self._renumber(index)
        count = min(count, len(sizes))
        order = rng.permutation(len(sizes), seed)
        largest_first = order[sizes[order].sort(descending=True, stable=True).indices]
        fold_sizes = [0] * count
        fold_of = torch.zeros(len(sizes), dtype=torch.long)
        for block in largest_first.tolist():
            fold = fold_sizes.index(min(fold_sizes))
            fold_of[block] = fold
            fold_sizes[fold] += int(sizes[block])
        return [fold_of[number] == fold for fold in range(count)]

    def count(self, index: Tensor) -> int:
        """Return how many blocks some rows have.

        Args:
            index: the numbers of the rows in their source, (n,).
        """
        return len(self.number[index].unique())

    def _renumber(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block of each of these rows, from 0 without gaps, and the sizes of blocks."""
        _, number, sizes = self.number[index].unique(return_inverse=True, return_counts=True)
        if len(sizes) < 2:
            kind = "time" if self.are_ordered else "group"
            raise ValueError(
                f"all {len(index)} training rows have one {kind}, so that none can be held out; "
                f"give rows of another {kind}, or fit without {kind}s"
            )
        return number, sizes


def _as_array(values: Any, name: str, rows: int) -> np.ndarray:
    """Return groups or times as an array, or raise a ValueError for what cannot be used."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    if array.shape != (rows,):
        raise ValueError(f"{name} must have one value for each of {rows} rows, got {array.shape}")
    if array.dtype == object:
        array = _uniform(array, name)
    is_missing = np.zeros(rows, bool)
    if array.dtype.kind in "fmM":
        is_missing = np.isnat(array) if array.dtype.kind in "mM" else ~np.isfinite(array)
    if is_missing.any():
        raise ValueError(
            f"{name} are missing in {int(is_missing.sum())} of {rows} rows, first in row "
            f"{int(is_missing.argmax())}; give every row a value, or leave these rows out"
        )
    if name == "times" and array.dtype.kind not in "iufmMb":
        raise ValueError(
            f"times must be numbers or datetime64, got {array.dtype}; convert texts by "
            "np.array(texts, dtype='datetime64[s]')"
        )
    return array


def _uniform(array: np.ndarray, name: str) -> np.ndarray:
    """Return an array of Python objects, such as a column of pandas, with a dtype that sorts."""
    missing = [row for row, value in enumerate(array) if value is None or value != value]
    if missing:
        raise ValueError(
            f"{name} are missing in {len(missing)} of {len(array)} rows, first in row "
            f"{missing[0]}; give every row a value, or leave these rows out"
        )
    if all(isinstance(value, date) for value in array):
        return np.array(array.tolist(), dtype="datetime64[us]")
    plain = np.array(array.tolist())
    return np.array([str(value) for value in array]) if plain.dtype == object else plain
