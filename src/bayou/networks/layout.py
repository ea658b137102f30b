"""What a network of a table knows about its columns: quantiles of numbers, counts of levels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, final

import torch
from torch import Tensor

from bayou.core.specs import Checked, from_json, to_json

MAX_BINS: Final = 4096  # of all columns together, so that a wide table keeps a small first layer
MIN_ROWS_OF_BIN: Final = 10
MAX_QUANTILE_ROWS: Final = 100_000  # evenly spaced rows that decide on the quantiles


@final
@dataclass(frozen=True)
class TableLayout(Checked):
    """The columns of a matrix (N, D): numbers with their bins, and codes of categories.

    ``TableLayout.fit(x)`` reads them from training rows. It is plain data, so that a file can hold
    it and a network can be built again.

    Args:
        edges: of the bins of every column, increasing; none for a column without bins, such as an
            indicator or a code.
        mean: of every column, which is subtracted; 0 for indicators and codes.
        scale: the standard deviation of every column, or 1.
        levels: the number of categories of a column of codes 0, 1, ...; 0 for a column of numbers.

    Raises:
        ValueError: the fields have different lengths, or edges do not increase.

    Example:
        >>> layout = TableLayout.fit(torch.rand(1000, 3), bins=8)
        >>> len(layout.edges[0])
        9
    """

    edges: tuple[tuple[float, ...], ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    levels: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.edges), len(self.mean), len(self.scale), len(self.levels)}
        if len(lengths) > 1 or not self.edges:
            raise ValueError(
                "TableLayout needs edges, mean, scale and levels of every column, got "
                f"{len(self.edges)}, {len(self.mean)}, {len(self.scale)} and {len(self.levels)}"
            )
        for number, edges in enumerate(self.edges):
            if len(edges) == 1 or not _are_increasing(edges):
                raise ValueError(
                    f"TableLayout edges of column {number} must be none, or two or more finite "
                    f"numbers that increase, got {edges!r:.60}"
                )
        numbers_are_finite = all(math.isfinite(value) for value in (*self.mean, *self.scale))
        if not numbers_are_finite or min(self.scale) <= 0:
            raise ValueError("TableLayout mean must be finite, and scale positive and finite")
        if min(self.levels) < 0:
            raise ValueError(f"TableLayout levels must be at least 0, got {min(self.levels)}")

    @property
    def columns(self) -> int:
        """The number of columns D."""
        return len(self.edges)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The indices of the columns of numbers."""
        return tuple(index for index, count in enumerate(self.levels) if not count)

    @property
    def categories(self) -> tuple[int, ...]:
        """The indices of the columns of codes."""
        return tuple(index for index, count in enumerate(self.levels) if count)

    @staticmethod
    def fit(x: Tensor, bins: int = 16, levels: Mapping[int, int] | None = None) -> TableLayout:
        """Return the layout of training rows: bins between quantiles of every column.

        A column of few different values has an edge at each of them. There are fewer bins than
        asked for where there are fewer than ten rows for each, and in very wide tables. Indicators
        (two values) and constant columns have no bins.

        Args:
            x: training rows, (N, D); nan counts as missing.
            bins: of a column, at most; 0 for none.
            levels: the number of categories of every column of codes, by its index; none by
                default.

        Raises:
            ValueError: x is no matrix with rows, or an index of ``levels`` is not a column.
        """
        if x.ndim != 2 or not x.numel():
            raise ValueError(f"a layout needs rows (N, D), got {tuple(x.shape)}")
        level_counts = dict(levels or {})
        columns = x.shape[1]
        unknown = [index for index in level_counts if not 0 <= index < columns]
        if unknown:
            raise ValueError(f"levels has column {unknown[0]}, but x has {columns} columns")
        bins = min(bins, MAX_BINS // columns, len(x) // MIN_ROWS_OF_BIN)
        stride = -(-len(x) // MAX_QUANTILE_ROWS)
        described: list[tuple[tuple[float, ...], float, float]] = []
        for index in range(columns):
            if index in level_counts:
                described.append(((), 0.0, 1.0))
            else:
                described.append(_describe_numbers(x[:, index], bins, stride))
        edges, mean, scale = zip(*described, strict=True)
        counts = tuple(level_counts.get(index, 0) for index in range(columns))
        return TableLayout(edges, mean, scale, counts)

    def to_json(self) -> dict[str, Any]:
        """Return plain values that ``from_json`` reads."""
        values: dict[str, Any] = to_json(self)
        return values

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> TableLayout:
        """Return the layout that ``to_json`` described.

        Args:
            values: plain values.

        Raises:
            ValueError: they do not describe a layout.
        """
        try:
            layout = from_json(values, TableLayout)
        except (TypeError, KeyError, AttributeError) as problem:
            raise ValueError(f"this does not describe a layout of columns: {problem}") from problem
        if not isinstance(layout, TableLayout):
            raise ValueError(f"this does not describe a layout of columns: {values!r:.60}")
        return layout

    def describe(self) -> str:
        """Return a sentence for reports: how many columns have bins and embeddings."""
        counts = [len(edges) - 1 for edges in self.edges if edges]
        parts = []
        if counts:
            columns = "1 column" if len(counts) == 1 else f"{len(counts):,} columns"
            parts.append(f"{columns} of numbers in up to {max(counts)} bins between quantiles")
        plain_count = len(self.numbers) - len(counts)
        if plain_count:
            parts.append(f"{plain_count:,} without bins")
        if self.categories:
            most = max(self.levels)
            parts.append(f"{len(self.categories):,} of categories (up to {most:,}) embedded")
        return ", ".join(parts)


def _are_increasing(edges: Sequence[float]) -> bool:
    """Return whether numbers are finite and each is larger than the one before."""
    if not all(math.isfinite(edge) for edge in edges):
        return False
    return all(low < high for low, high in pairwise(edges))


def _describe_numbers(
    column: Tensor, bins: int, stride: int
) -> tuple[tuple[float, ...], float, float]:
    """Return edges, mean and scale of a column of numbers."""
    values = column[column.isfinite()].double()
    distinct = values[::stride].unique()
    if len(distinct) <= 2:
        is_indicator = bool(((values == 0) | (values == 1)).all())
        mean, scale = (0.0, 1.0) if is_indicator else _mean_and_scale(values)
        return (), mean, scale
    edges: tuple[float, ...] = ()
    if bins >= 2:
        edges = _edges(values[::stride], distinct, bins)
    mean, scale = _mean_and_scale(values)
    return edges, mean, scale


def _edges(values: Tensor, distinct: Tensor, bins: int) -> tuple[float, ...]:
    """Return the different quantiles of a column, or its values where there are few of them.

    They stay different in float32, in which most networks compute.
    """
    if len(distinct) <= bins + 1:
        edges = distinct
    else:
        fractions = torch.linspace(0, 1, bins + 1, dtype=values.dtype, device=values.device)
        edges = torch.quantile(values, fractions)
    return tuple(edges.float().unique().double().tolist()) if len(edges) > 1 else ()


def _mean_and_scale(values: Tensor) -> tuple[float, float]:
    """Return mean and standard deviation; 0 and 1 for no values, the scale 1 for constant ones."""
    if not len(values):
        return 0.0, 1.0
    unit = float(values.abs().max()) or 1.0  # squares of large numbers overflow
    ratios = values / unit
    scale = float(ratios.std(correction=0)) * unit
    is_constant = bool((values == values[0]).all()) or not scale > 0
    return float(ratios.mean()) * unit, 1.0 if is_constant else scale
