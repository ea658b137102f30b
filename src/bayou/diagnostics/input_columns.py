"""Columns of inputs, and tests of each of them in training rows and new rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bayou.diagnostics.findings import ShiftTest
from bayou.diagnostics.hypothesis import compare_counts, fisher, ks_distance, two_sample_ks

MIN_CONSTANT_ROWS = 10  # equal values that are reported as a constant column
MAX_CONSTANT_SHARE = 0.5  # of training rows with this value, for such a report
POWERS = tuple(k for k in range(-9, 10) if k)  # of ten, of units that may have been confused
MIN_UNIT_DISTANCE = 0.5  # of the distribution functions, before the correction of the unit
MAX_UNIT_RATIO = 0.4  # of the distance after the correction to that before
MAX_NAMED_LEVELS = 3


@final
@dataclass(frozen=True, eq=False)
class InputColumn:
    """The values of one input column.

    Args:
        name: of the column.
        values: numbers, nan where one is missing; or indices of categories, of which
            ``len(levels)`` stands for every category that is not a level: (N,) in float64.
        levels: the categories; empty for numbers.
        singletons: of training rows: the fraction whose category no other training row has, which
            estimates the fraction of new rows with an unknown category (Good 1953).
        unknown: examples of categories that are not levels.
    """

    name: str
    values: Tensor
    levels: tuple[str, ...] = ()
    singletons: float = 0.0
    unknown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.values.ndim != 1:
            raise ValueError(
                f"the values of the column {self.name!r} must be (N,), got "
                f"{tuple(self.values.shape)}"
            )
        object.__setattr__(self, "values", self.values.detach().double().cpu())

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.values)

    @property
    def present(self) -> Tensor:
        """The numbers that are not missing."""
        return self.values[~self.values.isnan()]

    def is_known(self, reference: InputColumn) -> Tensor:
        """Return which rows have a category of training rows, or a number if training rows have.

        Args:
            reference: the column of training rows.
        """
        if reference.levels:
            return self.values < len(reference.levels)
        if len(reference.present) < len(reference):
            return torch.ones(len(self), dtype=torch.bool)
        return ~self.values.isnan()

    def take(self, rows: Tensor) -> InputColumn:
        """Return the column of some rows.

        Args:
            rows: their indices.
        """
        return InputColumn(self.name, self.values[rows], self.levels, self.singletons, self.unknown)


def columns_of(x: Tensor, names: tuple[str, ...] | None = None) -> tuple[InputColumn, ...]:
    """Return the columns of a tensor of inputs.

    Rows of numbers have one column for each number. Arrays, such as images, have two: mean and
    standard deviation of the entries of a row.

    Args:
        x: (N, D), or (N, ...) of arrays.
        names: of the D columns; x1, x2, ... by default.

    Raises:
        ValueError: if the names do not match.
    """
    x = x.detach().double().cpu()
    if x.ndim != 2:
        entries = x.reshape(len(x), -1)
        return (
            InputColumn("mean of the entries", entries.mean(1)),
            InputColumn("std of the entries", entries.std(1, correction=0)),
        )
    if names is None:
        names = tuple(f"x{j + 1}" for j in range(x.shape[1]))
    if len(names) != x.shape[1]:
        raise ValueError(f"{len(names)} names were given for {x.shape[1]} columns of x")
    return tuple(InputColumn(name, x[:, j]) for j, name in enumerate(names))


def compare_column(
    reference: InputColumn, new: InputColumn, draws: int = 9999, seed: int = 0
) -> list[ShiftTest]:
    """Test whether a column of new rows has the distribution of training rows.

    Numbers are compared by the Kolmogorov-Smirnov test, categories by the chi-square test, missing
    values by the exact test of Fisher. So are unknown categories: their number with that of
    training rows whose category no other training row has.

    Args:
        reference: the column of training rows.
        new: the same column of new rows.
        draws: the largest number of draws for a p-value of categories. Default: 9,999.
        seed: of these draws.
    """
    if reference.levels:
        return _compare_categories(reference, new, draws, seed)
    tests = []
    first_count = len(reference) - len(reference.present)
    second_count = len(new) - len(new.present)
    if first_count or second_count:
        evidence = fisher(first_count, len(reference), second_count, len(new))
        shares = f"{first_count / len(reference):.1%} of training rows, "
        text = f"missing in {shares}{second_count / len(new):.1%} of new rows"
        tests.append(
            ShiftTest.of("columns", reference.name, "Fisher, missing values", evidence, text)
        )
    if len(reference.present) and len(new.present):
        evidence = two_sample_ks(reference.present, new.present)
        text = _describe_difference(reference.present, new.present)
        tests.append(ShiftTest.of("columns", reference.name, "Kolmogorov-Smirnov", evidence, text))
    return tests


def _compare_categories(
    reference: InputColumn, new: InputColumn, draws: int, seed: int
) -> list[ShiftTest]:
    """Return the tests of a column of categories."""
    count = len(reference.levels)
    tests = []
    unknown_count = int((new.values >= count).sum())
    expected_count = round(reference.singletons * len(reference))
    # The number of tests, for which p-values are adjusted, must not depend on their result.
    if unknown_count or expected_count:
        evidence = fisher(
            expected_count, len(reference), unknown_count, len(new), more_in_second=True
        )
        names = ", ".join(map(repr, new.unknown[:MAX_NAMED_LEVELS]))
        examples = f" ({names})" if names else ""
        text = f"{unknown_count} of {len(new)} rows have a category of no training row{examples}"
        tests.append(
            ShiftTest.of("columns", reference.name, "Fisher, unknown categories", evidence, text)
        )
    counts = [
        torch.bincount(column.values[column.values < count].long(), minlength=count)
        for column in (reference, new)
    ]
    if all(bool(total.sum()) for total in counts):
        evidence = compare_counts(counts[0], counts[1], draws, seed)
        shares = [total.double() / total.sum() for total in counts]
        k = int((shares[1] - shares[0]).abs().argmax())
        text = (
            f"{reference.levels[k]!r}: {float(shares[0][k]):.1%} of training rows, "
            f"{float(shares[1][k]):.1%} of new rows"
        )
        tests.append(ShiftTest.of("columns", reference.name, "chi-square", evidence, text))
    return tests


def _describe_difference(reference: Tensor, new: Tensor) -> str:
    """Return the medians of both samples, and their difference in standard deviations."""
    first = float(reference.median())
    second = float(new.median())
    text = f"median {first:.4g} in training rows, {second:.4g} in new rows"
    std = float(reference.std(correction=0))
    if std > 0:
        text += f" ({(second - first) / std:+.2g} standard deviations)"
    return text


def describe_mistakes(reference: InputColumn, new: InputColumn) -> list[str]:
    """Return sentences about new values that look like mistakes rather than a shift.

    They are: no value at all, one constant value, and another unit (a factor of 10^k).

    Args:
        reference: the column of training rows.
        new: the same column of new rows.
    """
    name = reference.name
    if reference.levels:
        known = new.values < len(reference.levels)
        if len(new) >= MIN_CONSTANT_ROWS and not bool(known.any()):
            return [f"Column {name!r} has no category of the training rows."]
        return []
    if len(reference.present) and not len(new.present):
        return [f"Column {name!r} has no numbers: all {len(new)} values are missing."]
    if len(new.present) < MIN_CONSTANT_ROWS or not len(reference.present):
        return []
    value = float(new.present[0])
    share = float((reference.present == value).double().mean())
    if bool((new.present == value).all()) and share < MAX_CONSTANT_SHARE:
        return [
            f"Column {name!r} is constant: all {len(new.present)} values are {value:.6g}, "
            f"{share:.0%} of training values are."
        ]
    power = _confused_power(reference.present, new.present)
    if power is None:
        return []
    direction = "larger" if power > 0 else "smaller"
    return [
        f"Column {name!r} looks as if it had another unit: its values are about "
        f"{10.0 ** abs(power):,.0f} times {direction} than in training; divided by "
        f"{10.0**power:g} they have nearly the same distribution."
    ]


def _confused_power(reference: Tensor, new: Tensor) -> int | None:
    """Return the power of ten that new values must be divided by; None if there is none."""
    before = ks_distance(reference, new)
    if before < MIN_UNIT_DISTANCE:
        return None
    distances = {k: ks_distance(reference, new / 10.0**k) for k in POWERS}
    best = min(distances, key=lambda k: distances[k])
    noise = 2 * math.sqrt(1 / len(reference) + 1 / len(new))  # of the distance by chance
    is_close = distances[best] < max(MAX_UNIT_RATIO * before, min(noise, 0.5 * before))
    return best if is_close else None
