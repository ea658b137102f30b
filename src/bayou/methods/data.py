"""Data as batches that are a function of (seed, step), so that a run can go on where it was killed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from bayou import rng

Batch = tuple[Any, Tensor]


class Data(ABC):
    """N examples; ``epoch(seed)`` gives its batches in an order that the seed decides."""

    n: int

    @abstractmethod
    def epoch(self, seed: int) -> Iterator[Batch]:
        """The batches (x, y) of one pass, shuffled by the seed."""

    @abstractmethod
    def ordered(self) -> Iterator[Batch]:
        """The batches of one pass, in the order of the data."""

    @property
    @abstractmethod
    def batches(self) -> int:
        """How many batches an epoch has."""


class Rows(Data):
    """Tensors or a map-style Dataset, cut into batches by index."""

    def __init__(self, source: Any, index: Tensor, batch_size: int) -> None:
        self.source, self.index = source, index
        self.n, self.batch_size = len(index), min(batch_size, len(index))

    @property
    def batches(self) -> int:
        return -(-self.n // self.batch_size)

    def _take(self, index: Tensor) -> Batch:
        if isinstance(self.source, tuple):
            x, y = self.source
            rows = tuple(item[index] for item in x) if isinstance(x, tuple) else x[index]
            return rows, y[index]
        x, y = default_collate([self.source[int(i)] for i in index])
        return x, y

    def epoch(self, seed: int) -> Iterator[Batch]:
        order = self.index[rng.permutation(self.n, seed)]
        if self.batch_size == self.n:
            order = self.index  # a full batch has no order, and its rounding should not have one either
        for part in order.split(self.batch_size):
            yield self._take(part)

    def ordered(self) -> Iterator[Batch]:
        for part in self.index.split(self.batch_size):
            yield self._take(part)

    def split(self, fraction: float, seed: int) -> tuple[Rows, Rows]:
        """A training and a validation part."""
        count = round(self.n * fraction)
        if not 0 < count < self.n:
            raise ValueError(f"a validation fraction of {fraction} of {self.n} examples leaves none on one side")
        order = self.index[rng.permutation(self.n, seed)]
        held, rest = order[:count].sort().values, order[count:].sort().values
        return Rows(self.source, rest, self.batch_size), Rows(self.source, held, self.batch_size)


class Loader(Data):
    """The user's DataLoader, iterated as it is; its shuffling draws from torch's global stream, which is seeded."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        try:
            self.n = len(loader.dataset)  # type: ignore[arg-type]
        except TypeError:
            raise ValueError(
                "the DataLoader's dataset has no length, so the KL cannot be weighed; give it __len__"
            ) from None
        if self.n == 0:
            raise ValueError("the DataLoader is empty")
        self.loader = loader

    @property
    def batches(self) -> int:
        return len(self.loader)

    def epoch(self, seed: int) -> Iterator[Batch]:
        with rng.isolated(seed, torch.device("cpu")):
            iterator = iter(self.loader)
        yield from iterator

    def ordered(self) -> Iterator[Batch]:
        return self.epoch(0)


def as_data(data: Any, batch_size: int = 128) -> Data:
    """A pair of tensors, a Dataset or a DataLoader as batches."""
    if isinstance(data, Data):
        return data
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if isinstance(data, DataLoader):
        return Loader(data)
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor):
        x, y = data
        parts = x if isinstance(x, tuple | list) else (x,)
        if not all(isinstance(part, Tensor) for part in parts):
            raise ValueError(
                f"data must be a pair of tensors (x, y), got x of type {type(x).__name__}; use torch.as_tensor"
            )
        lengths = {len(part) for part in parts} | {len(y)}
        if len(lengths) > 1:
            raise ValueError(f"x has {len(parts[0])} rows but y has {len(y)}; they must be the same examples")
        if len(y) == 0:
            raise ValueError("data has no rows")
        for part, name in (*((part, "x") for part in parts), (y, "y")):
            if part.is_floating_point() and not bool(part.isfinite().all()):
                bad = int((~part.isfinite()).sum())
                raise ValueError(f"{name} has {bad} NaN or infinite values; remove or impute them first")
        return Rows((tuple(parts) if isinstance(x, tuple | list) else x, y), torch.arange(len(y)), batch_size)
    if isinstance(data, Dataset):
        if not hasattr(data, "__len__"):
            raise ValueError("the Dataset has no length, so the KL cannot be weighed; give it __len__")
        if len(data) == 0:
            raise ValueError("the Dataset is empty")
        return Rows(data, torch.arange(len(data)), batch_size)
    raise ValueError(f"data must be a pair of tensors (x, y), a Dataset or a DataLoader, got {type(data).__name__}")
