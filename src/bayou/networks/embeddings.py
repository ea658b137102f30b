"""Embeddings of columns: bins of numbers, periodic functions of them, and tables of categories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Final

import torch
from torch import Tensor, nn

from bayou.networks.layout import TableLayout

# Standard deviations from the mean, beyond which the linear term of a number grows as a logarithm.
LINEAR_REACH: Final = 4.0
# A standard deviation of the linear term counts as much as two bins, so that smooth functions are
# learned as fast as without bins. Chosen on generated tables.
LINEAR_GAIN: Final = 2.0


class PiecewiseLinear(nn.Module):
    """Numbers as piecewise-linear functions of themselves: (N, D) → (N, D + Σ_j T_j).

    With edges b_0 < ... < b_T of a column, bin t contributes
    e_t(x) = clip((x − b_{t−1})/(b_t − b_{t−1}), 0, 1), less its mean over equally filled bins. A
    linear layer on them is any continuous function that is linear between the edges, for every
    column: no further layer for each column is needed. Each column also contributes a linear term,
    its standardized value (x − mean)/scale times 2, by which the function goes on beyond the outer
    edges; from four standard deviations on it grows as a logarithm, so that an outlier has no
    more leverage than that. There are no parameters; edges, means and scales are buffers.

    Args:
        edges: of every column, increasing; an empty one for a column without bins.
        mean: of every column; 0 by default.
        scale: the standard deviation of every column; 1 by default.

    Example:
        >>> embed = PiecewiseLinear.fit(x, bins=16)
        >>> net = nn.Sequential(embed, nn.Linear(embed.width, 128), nn.ReLU(), nn.Linear(128, 1))

    Paper: Gorishniy et al. 2022, https://arxiv.org/abs/2203.05556.
    """

    takes_raw_inputs: ClassVar[bool] = True
    column: Tensor
    low: Tensor
    bin_width: Tensor
    center: Tensor
    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        edges: Sequence[Sequence[float]],
        mean: Sequence[float] | None = None,
        scale: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        count = len(edges)
        layout = TableLayout(
            tuple(tuple(map(float, column)) for column in edges),
            tuple([0.0] * count if mean is None else mean),
            tuple([1.0] * count if scale is None else scale),
            (0,) * count,
        )
        columns: list[int] = []
        low: list[float] = []
        width: list[float] = []
        center: list[float] = []
        for index, column_edges in enumerate(layout.edges):
            bins = max(0, len(column_edges) - 1)
            columns += [index] * bins
            low += column_edges[:bins]
            width += [high - start for start, high in pairwise(column_edges)]
            center += [(bins - t - 0.5) / bins for t in range(bins)]
        self.inputs = count
        self.width: int = count + len(columns)
        self.register_buffer("column", torch.tensor(columns, dtype=torch.long))
        self.register_buffer("low", _to_buffer(low))
        self.register_buffer("bin_width", _to_buffer(width))
        self.register_buffer("center", _to_buffer(center))
        self.register_buffer("mean", _to_buffer(layout.mean))
        self.register_buffer("scale", _to_buffer(layout.scale))

    @staticmethod
    def fit(x: Tensor, bins: int = 16) -> PiecewiseLinear:
        """Return the embedding with bins between quantiles of training rows.

        Args:
            x: training rows, (N, D).
            bins: of a column, at most.
        """
        layout = TableLayout.fit(x, bins)
        return PiecewiseLinear(layout.edges, layout.mean, layout.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return linear terms and bins.

        Args:
            x: (N, D).
        """
        if x.shape[-1] != self.inputs:
            raise ValueError(f"PiecewiseLinear has {self.inputs} columns, got {tuple(x.shape)}")
        linear = LINEAR_GAIN * compress((x - self.mean) / self.scale)
        position = (x.index_select(-1, self.column) - self.low) / self.bin_width
        return torch.cat([linear, position.clamp(0.0, 1.0) - self.center], -1)

    def extra_repr(self) -> str:
        return f"columns={self.inputs}, width={self.width}"


def compress(z: Tensor) -> Tensor:
    """Return z up to four in absolute value, and beyond that sign(z)·(4 + log(1 + |z| − 4)).

    Args:
        z: standardized numbers.
    """
    excess = (z.abs() - LINEAR_REACH).clamp_min(0.0)
    return z.clamp(-LINEAR_REACH, LINEAR_REACH) + z.sign() * excess.log1p()


def _to_buffer(values: Sequence[float]) -> Tensor:
    """Return numbers in the dtype of new parameters."""
    return torch.tensor(values, dtype=torch.get_default_dtype())


class Periodic(nn.Module):
    """Numbers as trained periodic functions of themselves: (N, D) → (N, D·width).

    Column j has the frequencies c_jk, and its embedding is
    ReLU(A·[cos 2πc_jk·x_j, sin 2πc_jk·x_j, x_j]) with one matrix A for all columns ("PLR lite").
    The best ``std`` depends on the data and decides how rough the functions are;
    ``PiecewiseLinear`` needs no such number.

    Args:
        columns: D; standardized numbers.
        frequencies: of each column, 16 by default.
        std: the standard deviation of their initial values, 0.1 by default.
        width: of the embedding of a column, 8 by default.

    Example:
        >>> net = nn.Sequential(Periodic(10), nn.Linear(80, 128), nn.ReLU(), nn.Linear(128, 1))

    Paper: Gorishniy et al. 2022, https://arxiv.org/abs/2203.05556.
    """

    def __init__(
        self, columns: int, frequencies: int = 16, std: float = 0.1, width: int = 8
    ) -> None:
        super().__init__()
        if min(columns, frequencies, width) < 1 or not 0 < std < math.inf:
            raise ValueError(
                "Periodic needs columns, frequencies and width of at least 1 and a positive std, "
                f"got {columns}, {frequencies}, {width} and {std}"
            )
        self.std = std
        self.width: int = columns * width
        self.frequency: nn.Parameter = nn.Parameter(torch.empty(columns, frequencies))
        self.linear: nn.Linear = nn.Linear(2 * frequencies + 1, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the frequencies from N(0, std²), and the matrix as ``nn.Linear`` does."""
        nn.init.trunc_normal_(self.frequency, 0.0, self.std, -3 * self.std, 3 * self.std)
        self.linear.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Return the embeddings of all columns, one after the other.

        Args:
            x: (N, D).
        """
        columns = self.frequency.shape[-2]
        if x.shape[-1] != columns:
            raise ValueError(f"Periodic has {columns} columns, got {tuple(x.shape)}")
        angle = 2 * math.pi * x.unsqueeze(-1) * self.frequency
        features = torch.cat([angle.cos(), angle.sin(), x.unsqueeze(-1)], -1)
        return self.linear(features).relu().flatten(-2)


class Categories(nn.Module):
    """Codes of categories as trained vectors: (N, C) → (N, C·width).

    All columns share one table of Σ_j (levels_j + 1) vectors; the last one of a column stands for
    codes that are unknown or missing: those outside 0 .. levels_j − 1, and nan.

    Args:
        levels: the number of categories of every column.
        width: of a vector, 8 by default.

    Example:
        >>> embed = Categories([30, 200], width=4)
        >>> embed(torch.tensor([[3.0, 150.0], [29.0, -1.0]])).shape
        torch.Size([2, 8])
    """

    takes_raw_inputs: ClassVar[bool] = True
    levels: Tensor
    offset: Tensor

    def __init__(self, levels: Sequence[int], width: int = 8) -> None:
        super().__init__()
        if not levels or min(levels) < 1 or width < 1:
            raise ValueError(
                "Categories needs the number of categories of every column and a width, each at "
                f"least 1, got {list(levels)} and {width}"
            )
        self.width: int = len(levels) * width
        counts = torch.tensor(list(levels))
        sizes = counts + 1
        self.register_buffer("levels", counts)
        self.register_buffer("offset", sizes.cumsum(0) - sizes)
        self.table: nn.Embedding = nn.Embedding(int(sizes.sum()), width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors from N(0, 1/width)."""
        nn.init.normal_(self.table.weight, 0.0, self.table.embedding_dim**-0.5)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the vectors of all columns, one after the other.

        Args:
            codes: (N, C), whole numbers of any dtype.
        """
        if codes.shape[-1] != len(self.levels):
            raise ValueError(f"Categories has {len(self.levels)} columns, got {tuple(codes.shape)}")
        is_known = (codes >= 0) & (codes <= self.levels - 1)
        index = torch.where(is_known, codes, self.levels.to(codes)).long()
        vectors: Tensor = self.table(index + self.offset)
        return vectors.flatten(-2)
