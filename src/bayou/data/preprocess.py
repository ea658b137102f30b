"""Preprocessing from raw rows to network inputs, by statistics of the training rows only; to JSON
and back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np
from numpy.typing import NDArray

from bayou.data import reading
from bayou.data.catalogue import DataError, Task
from bayou.data.columns import EXACT, Column, label, quote
from bayou.data.dataset import DataSet, Pair
from bayou.data.encoders import Category, Number
from bayou.data.reading import Table, listed
from bayou.specs import Checked, from_json, nearest, to_json

if TYPE_CHECKING:
    from torch import Tensor

Matrix = NDArray[np.float32]


@final
@dataclass(frozen=True)
class Rows:
    """New rows as network inputs; ``kept`` are their indices in the source, y is None without a
    target.

    ``ids``: their identifiers, if the table has an id column. ``distance``: from the range of the
    training rows, max_j max(low_j − x_j, x_j − high_j, 0)/std_j; None for images.
    """

    x: Tensor
    y: Tensor | None
    kept: list[int]
    notes: list[str]
    ids: list[str] | None = None
    distance: NDArray[np.float64] | None = None


class Preprocessor(Checked, ABC):
    """The preprocessing of inputs and targets, for new rows."""

    task: Task
    class_names: tuple[str, ...]
    y_mean: float
    y_scale: float
    id: str | None = None  # the column that identifies the rows

    def __post_init__(self) -> None:
        self._check_choice("task", ("classification", "regression"))
        self._check_words("class_names")
        self._check_finite("y_mean", "y_scale")
        self._check_positive("y_scale")
        if self.id is not None:
            self._check_kind(str, "id")

    @property
    @abstractmethod
    def feature_names(self) -> tuple[str, ...]:
        """A name for every number of an input; empty for images."""

    @abstractmethod
    def rows(self, source: Any, *, need_target: bool = False) -> Rows:
        """New rows (a path, columns, or an array): x, y if the target is present, and notes.

        With ``need_target`` rows without a target are left out, and a missing target column is an
        error.
        """

    def transform(self, source: Any) -> Tensor:
        """The inputs of new rows, float32 (N, *shape)."""
        return self.rows(source).x

    def to_json(self) -> dict[str, Any]:
        """Plain values that ``from_json`` reads."""
        found: dict[str, Any] = to_json(self)
        return found

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Preprocessor:
        """The preprocessor that ``to_json`` described."""
        try:
            found = from_json(values, Preprocessor, Number, Category)
        except (TypeError, KeyError, ValueError, AttributeError) as problem:
            raise DataError(f"this does not describe a preprocessor: {problem}") from problem
        if not isinstance(found, Preprocessor):
            raise DataError(f"this does not describe a preprocessor: {values!r:.60}")
        return found

    def original(self, y: Tensor) -> Tensor:
        """A standardized regression target in its original units: y·y_scale + y_mean."""
        return y * self.y_scale + self.y_mean

    def targets(self, column: Column) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Encoded targets, and which cells have one; an unknown class or invalid number is an
        error.
        """
        if self.task == "regression":
            if column.bad.any():
                row = int(column.bad.argmax())
                raise DataError(
                    f"the target of row {row + 1} is {quote(column.text(row))}, which is not a number"
                )
            scaled = (column.values - self.y_mean) / self.y_scale
            return scaled.astype(np.float32)[:, None], ~column.missing
        index = {name: i for i, name in enumerate(self.class_names)}
        found = column.levels
        present = np.array([name != "" for name in found])
        if not all(name in index for name in found if name):
            pairs = zip(found, column.values.tolist(), strict=True)
            found = [
                label(v) if name not in index and abs(v) < EXACT else name for name, v in pairs
            ]
        unknown = sorted(
            {column.text(i) for i, name in enumerate(found) if present[i] and name not in index}
        )
        if unknown:
            raise DataError(
                f"{quote(unknown[0])} is not one of the classes {', '.join(map(quote, self.class_names))}"
            )
        return np.array([index.get(name, -1) for name in found], np.int64), present


@final
@dataclass(frozen=True)
class TablePreprocessor(Preprocessor):
    """Columns of numbers standardized, of categories one-hot."""

    columns: tuple[Number | Category, ...]
    target: str
    task: Task
    class_names: tuple[str, ...] = ()
    y_mean: float = 0.0
    y_scale: float = 1.0
    dropped: tuple[str, ...] = ()
    id: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_kind(str, "target")
        self._check_words("dropped")
        names = [column.name for column in self.columns]
        if len({*names, self.target}) < len(names) + 1:
            raise ValueError(
                f"columns and target must have different names, got {listed([*names, self.target])}"
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(name for column in self.columns for name in column.features)

    def encode(self, table: Table, notes: list[str]) -> Matrix:
        """The inputs of every row: float32 (N, features)."""
        parts = [part for c in self.columns for part in c.encode(table.columns[c.name], notes)]
        return np.stack(parts, axis=1).astype(np.float32)

    def rows(self, source: Any, *, need_target: bool = False) -> Rows:
        import torch

        names = [column.name for column in self.columns]
        if isinstance(source, np.ndarray) or hasattr(source, "detach"):
            source = self._named(np.asarray(source), names)
        table = reading.read(source, [*names, self.target])
        known = {*names, self.target, *self.dropped}
        missing = [name for name in names if name not in table.columns]
        if missing:
            close = nearest(missing[0], [name for name in table.columns if name not in known])
            raise DataError(
                f"{table.name} has no column {listed(missing)}{close}; its columns are "
                f"{listed(table.columns)}. {' '.join(table.notes)}".rstrip()
            )
        notes = list(table.notes)
        extra = [name for name in table.columns if name not in known]
        if extra:
            notes.append(f"Columns that are not in the training data are ignored: {listed(extra)}.")
        x, y, kept = self.encode(table, notes), None, np.arange(table.rows)
        if self.target in table.columns:
            try:
                encoded, present = self.targets(table.columns[self.target])
            except DataError:
                if need_target:
                    raise
                encoded, present = np.empty(0), np.zeros(table.rows, bool)
            if need_target:
                if not present.all():
                    notes.append(f"{int((~present).sum())} rows without a target were left out.")
                x, kept = x[present], kept[present]
            y = torch.from_numpy(encoded[kept]) if present[kept].all() and len(kept) else None
        if need_target and y is None:
            raise DataError(
                f"{table.name} has no target column {self.target!r} with values; its columns are "
                f"{listed(table.columns)}"
            )
        ids = table.columns.get(self.id or "")
        if self.id is not None and ids is None:
            notes.append(
                f"{table.name} has no column {self.id!r}, the id column of the training data."
            )
        names_of_rows = None if ids is None else [ids.text(row) for row in kept.tolist()]
        far = [c.beyond(table.columns[c.name]) for c in self.columns if isinstance(c, Number)]
        distance = np.max([np.zeros(table.rows), *far], axis=0)
        return Rows(torch.from_numpy(x), y, kept.tolist(), notes, names_of_rows, distance[kept])

    def pair(self, columns: Mapping[str, Any]) -> Pair:
        """x and y of columns that include the target."""
        rows = self.rows(columns, need_target=True)
        return rows.x, rows.y

    def _named(self, array: NDArray[Any], names: Sequence[str]) -> dict[str, Any]:
        if array.ndim != 2 or array.shape[1] != len(names):
            raise DataError(
                f"rows of numbers must be (N, {len(names)}) for {', '.join(names)}, got {array.shape}"
            )
        return {name: array[:, i] for i, name in enumerate(names)}


@final
@dataclass(frozen=True)
class ImagePreprocessor(Preprocessor):
    """Images (channels, height, width): (pixel/white − mean)/scale, one mean and one scale for each
    channel.
    """

    shape: tuple[int, int, int]
    white: float
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    class_names: tuple[str, ...] = ()
    task: Task = "classification"
    y_mean: float = 0.0
    y_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_finite("white")
        self._check_positive("white")
        whole = len(self.shape) == 3 and all(
            isinstance(size, int) and size > 0 for size in self.shape
        )
        if not whole or not len(self.mean) == len(self.scale) == self.shape[0]:
            raise ValueError(
                f"images of shape {self.shape} need a mean and a scale for each channel"
            )
        for mean, scale in zip(self.mean, self.scale, strict=True):
            Number("a channel", mean, scale)  # which validates them

    @staticmethod
    def fit(
        images: NDArray[Any], class_names: Sequence[str], white: float = 255.0
    ) -> ImagePreprocessor:
        """Statistics of training images (N, C, H, W)."""
        pixels = images.reshape(len(images), images.shape[1], -1)
        mean = [float(pixels[:, c].mean(dtype=np.float64)) / white for c in range(images.shape[1])]
        scale = [_std(pixels[:, c]) / white or 1.0 for c in range(images.shape[1])]
        shape = cast(tuple[int, int, int], tuple(images.shape[1:]))
        return ImagePreprocessor(shape, white, tuple(mean), tuple(scale), tuple(class_names))

    @property
    def feature_names(self) -> tuple[str, ...]:
        return ()

    def encode(self, images: NDArray[Any]) -> Matrix:
        """Pixels 0 .. white, (N, C, H, W) or anything that reshapes to it, as network inputs."""
        images = images.reshape(-1, *self.shape)
        out = np.empty(images.shape, np.float32)
        for c in range(self.shape[0]):
            factor, shift = 1 / (self.white * self.scale[c]), self.mean[c] / self.scale[c]
            np.multiply(images[:, c], np.float32(factor), out=out[:, c], casting="unsafe")
            out[:, c] -= np.float32(shift)
        return out

    def dataset(
        self,
        name: str,
        train: Pair,
        test: Pair,
        ood: NDArray[Any] | None,
        ood_name: str | None,
        notes: list[str],
    ) -> DataSet:
        """Arrays of pixels (N, C, H, W) and of classes as a data set."""
        first, second = ((self.encode(x), y.astype(np.int64)) for x, y in (train, test))
        return DataSet.of(
            name, self, first, second, None if ood is None else self.encode(ood), ood_name, notes
        )

    def pixels(self, x: Tensor) -> Tensor:
        """Inputs of the network as pixels from 0 (black) to 1 (white)."""
        view = (-1, 1, 1)
        return x * x.new_tensor(self.scale).view(view) + x.new_tensor(self.mean).view(view)

    def rows(self, source: Any, *, need_target: bool = False) -> Rows:
        import torch

        y, targets, notes = None, None, list[str]()
        if isinstance(source, str | Path):
            found = reading.arrays(Path(source))
            key = reading.input_key(found)
            if key is None:
                raise DataError(
                    f"{source} has no array of images; it needs x of shape (N, *{self.shape})"
                )
            source = found[key]
            targets = next((found[key] for key in reading.TARGET_KEYS if key in found), None)
        images = self._arranged(np.asarray(source))
        top = float(images.max()) if images.size else 0.0
        if top > 1.01 * self.white or (top <= 1 < self.white):
            notes.append(
                f"The largest pixel is {top:g}; in training pixels ranged from 0 to {self.white:g}."
            )
        if targets is not None:
            encoded, present = self.targets(Column.of(targets))
            y = torch.from_numpy(encoded) if present.all() else None
        if need_target and y is None:
            raise DataError("these images have no targets; an NPZ file needs arrays x and y")
        return Rows(torch.from_numpy(self.encode(images)), y, list(range(len(images))), notes)

    def _arranged(self, images: NDArray[Any]) -> NDArray[Any]:
        channels, height, width = self.shape
        got = images.shape
        if images.dtype.kind not in "iufb" or images.ndim == 0:
            raise DataError(f"images must be numbers, got {images.dtype}")
        if images.ndim == 4 and got[1:] == (height, width, channels) and got[1:] != self.shape:
            return images.transpose(0, 3, 1, 2)
        if got == self.shape or (got == (height, width) and channels == 1):
            return images.reshape(1, *self.shape)
        fits = got[1:] in (self.shape, (channels * height * width,)) or (
            channels == 1 and got[1:] == (height, width)
        )
        if not fits:
            raise DataError(
                f"images must be (N, {channels}, {height}, {width}), pixels 0 to {self.white:g}, got {got}"
            )
        return images.reshape(-1, *self.shape)


def _std(pixels: NDArray[Any]) -> float:
    if pixels.dtype == np.uint8:  # by a histogram, without a floating-point copy
        counts = np.bincount(pixels.reshape(-1), minlength=256).astype(np.float64)
        value = np.arange(256.0)
        mean = (counts * value).sum() / counts.sum()
        return float(np.sqrt((counts * (value - mean) ** 2).sum() / counts.sum()))
    return float(pixels.std(dtype=np.float64))
