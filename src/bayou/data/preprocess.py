"""Preprocessing from raw rows to network inputs, by statistics of the training rows only."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np
from numpy.typing import NDArray

from bayou.core.specs import Checked, from_json, later_field, nearest, to_json
from bayou.data import reading
from bayou.data.catalogue import DataError, Task
from bayou.data.cell_notes import CellNotes
from bayou.data.columns import EXACT, Column, label, quote
from bayou.data.dataset import DataSet, Pair
from bayou.data.dates import Date
from bayou.data.encoders import Category, Number
from bayou.data.reading import RawTable, quote_names

if TYPE_CHECKING:
    from torch import Tensor

Matrix = NDArray[np.float32]


@final
@dataclass(frozen=True)
class PreparedRows:
    """New rows as network inputs.

    Args:
        x: (N, *shape).
        y: the targets; None without any.
        kept: indices of the rows in their source.
        notes: sentences about the preprocessing.
        ids: their identifiers, if the table has an id column.
        distance: from the range of the training rows,
            max_j max(low_j − x_j, x_j − high_j, 0)/std_j; None for images.
    """

    x: Tensor
    y: Tensor | None
    kept: list[int]
    notes: list[str]
    ids: list[str] | None = None
    distance: NDArray[np.float64] | None = None

    def part(self, start: int, count: int) -> PreparedRows:
        """Return some of the rows.

        Args:
            start: the index of the first.
            count: their number, or fewer at the end.
        """
        part = slice(start, start + count)
        return PreparedRows(
            self.x[part],
            None if self.y is None else self.y[part],
            self.kept[part],
            self.notes,
            None if self.ids is None else self.ids[part],
            None if self.distance is None else self.distance[part],
        )


@final
class RowBlocks:
    """New rows as network inputs, block by block, in their order, once.

    Args:
        rows: the number of all rows.
        blocks: the rows of each; ``kept`` counts from the first row of the source.
        notes: gives the sentences about all rows when they are read.
        close: closes the file; by default there is none.
    """

    def __init__(
        self,
        rows: int,
        blocks: Iterator[PreparedRows],
        notes: Callable[[], list[str]],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.rows = rows
        self._blocks = blocks
        self._notes = notes
        self.close = close

    def __iter__(self) -> Iterator[PreparedRows]:
        """Return the blocks."""
        return self._blocks

    @property
    def notes(self) -> list[str]:
        """Sentences about the preprocessing, complete when all blocks were taken."""
        return self._notes()


def encode_columns(
    encoders: Sequence[Number | Category | Date], table: RawTable, notes: CellNotes
) -> NDArray[np.float64]:
    """Return the inputs of every row, (N, features).

    Args:
        encoders: of the columns, in their order.
        table: with all these columns.
        notes: to which unusual values are added.
    """
    inputs: list[NDArray[np.float64]] = []
    for encoder in encoders:
        inputs += encoder.encode(table.columns[encoder.name], notes)
    return np.stack(inputs, axis=1)


class Preprocessor(Checked, ABC):
    """The preprocessing of inputs and targets, for new rows.

    Args:
        task: "classification" or "regression".
        class_names: in the order of their codes; empty for a regression.
        y_mean: what is subtracted from a regression target.
        y_scale: what a regression target is divided by.
        id: the column that identifies rows, if any.
    """

    task: Task
    class_names: tuple[str, ...]
    y_mean: float
    y_scale: float
    id: str | None = None

    def __post_init__(self) -> None:
        """Check the types and ranges of the fields."""
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
    def describe(self) -> dict[str, Any]:
        """Return what new rows must have, as plain values."""

    @abstractmethod
    def rows(self, source: object, *, need_target: bool = False) -> PreparedRows:
        """Return new rows as network inputs.

        Args:
            source: a path, columns, or an array.
            need_target: leave out rows without a target; a missing target column is an error.
        """

    def blocks(self, source: object, size: int) -> RowBlocks:
        """Return new rows as network inputs, block by block.

        Of a table in a file only a block is in memory, of any other source all rows are.

        Args:
            source: a path, columns, or an array.
            size: rows of a block; the last one may have fewer.
        """
        rows = self.rows(source)
        starts = range(0, len(rows.x), size)
        return RowBlocks(
            len(rows.x), (rows.part(start, size) for start in starts), lambda: rows.notes
        )

    def transform(self, source: object) -> Tensor:
        """Return the inputs of new rows, float32 (N, *shape).

        Args:
            source: a path, columns, or an array.
        """
        return self.rows(source).x

    def to_json(self) -> dict[str, Any]:
        """Return plain values that ``from_json`` reads."""
        values: dict[str, Any] = to_json(self)
        return values

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Preprocessor:
        """Return the preprocessor that ``to_json`` described.

        Args:
            values: plain values.

        Raises:
            DataError: the values do not describe a preprocessor.
        """
        try:
            preprocessor = from_json(values, Preprocessor, Number, Category, Date)
        except (TypeError, KeyError, ValueError, AttributeError) as problem:
            raise DataError(f"this does not describe a preprocessor: {problem}") from problem
        if not isinstance(preprocessor, Preprocessor):
            raise DataError(f"this does not describe a preprocessor: {values!r:.60}")
        return preprocessor

    def original(self, y: Tensor) -> Tensor:
        """Return a standardized regression target in its original units: y·y_scale + y_mean.

        Args:
            y: standardized.
        """
        return y * self.y_scale + self.y_mean

    def targets(self, column: Column) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Encode targets; an unknown class or invalid number is an error.

        Args:
            column: the cells of the target.

        Returns:
            The codes of classes (N,) or standardized numbers (N, 1), and which cells have a target.
        """
        if self.task == "regression":
            return self._encode_numbers(column)
        return self._encode_classes(column)

    def _encode_numbers(self, column: Column) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Standardize the targets of a regression."""
        if column.bad.any():
            raise DataError(f"the target must be a number, got {column.describe_first(column.bad)}")
        scaled = (column.values - self.y_mean) / self.y_scale
        return scaled.astype(np.float32)[:, None], ~column.missing

    def _encode_classes(self, column: Column) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Encode the targets of a classification as the indices of their classes."""
        index = {name: i for i, name in enumerate(self.class_names)}
        names = column.levels
        is_present = np.array([name != "" for name in names])
        if not all(name in index for name in names if name):
            # A class that is written in another notation, such as 3.0 for 3.
            names = [
                label(value) if name not in index and abs(value) < EXACT else name
                for name, value in zip(names, column.values.tolist(), strict=True)
            ]
        unknown = sorted(
            {column.text(i) for i, name in enumerate(names) if is_present[i] and name not in index}
        )
        if unknown:
            known = ", ".join(map(quote, self.class_names))
            raise DataError(f"{quote(unknown[0])} is not one of the classes {known}")
        return np.array([index.get(name, -1) for name in names], np.int64), is_present


@final
@dataclass(frozen=True)
class TablePreprocessor(Preprocessor):
    """Columns of numbers standardized, of categories one-hot, of dates as their parts.

    Args:
        columns: the encoders of the inputs, in order.
        target: the name of the target column.
        task: "classification" or "regression".
        class_names: in the order of their codes; empty for a regression.
        y_mean: what is subtracted from a regression target.
        y_scale: what a regression target is divided by.
        dropped: columns of the training data that are not used.
        id: the column that identifies rows, if any.
        observed: the column that says which targets were observed, not censored, if any.
        event: its value for observed rows.
    """

    columns: tuple[Number | Category | Date, ...]
    target: str
    task: Task
    class_names: tuple[str, ...] = ()
    y_mean: float = 0.0
    y_scale: float = 1.0
    dropped: tuple[str, ...] = ()
    id: str | None = None
    observed: str | None = later_field(None)
    event: str = later_field("")

    def __post_init__(self) -> None:
        """Check the types of the fields, and that columns have different names."""
        super().__post_init__()
        self._check_kind(str, "target")
        self._check_words("dropped")
        names = [column.name for column in self.columns]
        if len({*names, self.target}) < len(names) + 1:
            raise ValueError(
                "columns and target must have different names, got "
                f"{quote_names([*names, self.target])}"
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """A name for every number of an input."""
        return tuple(name for column in self.columns for name in column.features)

    def describe(self) -> dict[str, Any]:
        """Return the names of the columns and of the target."""
        return {"columns": [column.name for column in self.columns], "target": self.target}

    def encode(self, table: RawTable, notes: list[str]) -> Matrix:
        """Return the inputs of every row: float32 (N, features).

        Args:
            table: with all columns of the inputs.
            notes: to which those about unusual values are added.
        """
        cell_notes = CellNotes()
        x = encode_columns(self.columns, table, cell_notes).astype(np.float32)
        notes += cell_notes.sentences()
        return x

    def rows(self, source: object, *, need_target: bool = False) -> PreparedRows:
        """Return new rows as network inputs.

        Args:
            source: a path, columns, or an array (N, features).
            need_target: leave out rows without a target; a missing target column is an error.
        """
        import torch

        table = reading.read(self._named(source), self._known_names())
        notes = list(table.notes)
        self._check_columns(table, notes)
        x = self.encode(table, notes)
        kept = np.arange(table.rows)
        y = None
        if self.target in table.columns:
            codes, is_present = self._encode_target(table, need_target)
            if need_target:
                if not is_present.all():
                    missing_count = int((~is_present).sum())
                    notes.append(f"{missing_count} rows without a target were left out.")
                x = x[is_present]
                kept = kept[is_present]
            if is_present[kept].all() and len(kept):
                y = torch.from_numpy(codes[kept])
        if need_target and y is None:
            raise DataError(
                f"{table.name} has no target column {self.target!r} with values; its columns are "
                f"{quote_names(table.columns)}"
            )
        notes += self._describe_missing_ids(table)
        ids = self._row_ids(table, kept)
        distance = self._distance(table)[kept]
        return PreparedRows(torch.from_numpy(x), y, kept.tolist(), notes, ids, distance)

    def blocks(self, source: object, size: int) -> RowBlocks:
        """Return new rows as network inputs without targets, block by block.

        Args:
            source: a path, columns, or an array (N, features).
            size: rows of a block; the last one may have fewer.
        """
        blocks = reading.read_blocks(self._named(source), self._known_names(), size)
        first = next(blocks.tables)
        first_notes = list(first.notes)
        try:
            self._check_columns(first, first_notes)
        except DataError:
            blocks.tables.close()  # so that the file is not open until the error is forgotten
            raise
        cell_notes = CellNotes()
        last_notes = self._describe_missing_ids(first)

        def prepare() -> Iterator[PreparedRows]:
            import torch

            start = 0
            for table in itertools.chain([first], blocks.tables):
                x = encode_columns(self.columns, table, cell_notes).astype(np.float32)
                rows = np.arange(table.rows)
                ids = self._row_ids(table, rows)
                kept = (start + rows).tolist()
                yield PreparedRows(torch.from_numpy(x), None, kept, [], ids, self._distance(table))
                start += table.rows

        return RowBlocks(
            blocks.rows,
            prepare(),
            lambda: first_notes + cell_notes.sentences() + last_notes,
            blocks.tables.close,
        )

    def _named(self, source: object) -> object:
        """Return a source of rows; the columns of a matrix get their names."""
        if isinstance(source, np.ndarray) or hasattr(source, "detach"):
            return self._name_columns(np.asarray(source), [column.name for column in self.columns])
        return source

    def _known_names(self) -> list[str]:
        """Return the names that are expected in a header."""
        flags = () if self.observed is None else (self.observed,)
        return [*(column.name for column in self.columns), self.target, *flags]

    def _check_columns(self, table: RawTable, notes: list[str]) -> None:
        """Raise a DataError for a missing column, and add a note about unknown ones."""
        names = [column.name for column in self.columns]
        known = {*names, self.target, self.observed, *self.dropped}
        unknown = [name for name in table.columns if name not in known]
        missing = [name for name in names if name not in table.columns]
        if missing:
            suggestion = nearest(missing[0], unknown)
            message = (
                f"{table.name} has no column {quote_names(missing)}{suggestion}; its columns are "
                f"{quote_names(table.columns)}. {' '.join(table.notes)}"
            )
            raise DataError(message.rstrip())
        if unknown:
            notes.append(
                f"Columns that are not in the training data are ignored: {quote_names(unknown)}."
            )

    def _encode_target(
        self,
        table: RawTable,
        need_target: bool,
    ) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Encode the target column; an unusable one counts as missing unless it is needed."""
        try:
            return self.table_targets(table)
        except DataError:
            if need_target:
                raise
            return np.empty(0), np.zeros(table.rows, bool)

    def table_targets(self, table: RawTable) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Encode the targets of a table, with a flag for each if they may be censored.

        Args:
            table: with the target column, and that of observed rows.

        Returns:
            As for ``targets``; with flags numbers are (N, 2), times and 1 or 0.
        """
        codes, is_present = self.targets(table.columns[self.target])
        if self.observed is None:
            return codes, is_present
        if self.observed not in table.columns:
            raise DataError(
                f"{table.name} has no column {self.observed!r}, which says which rows were observed"
            )
        levels = table.columns[self.observed].levels
        flags = np.array([[level == self.event] for level in levels], codes.dtype)
        is_known = np.array([level != "" for level in levels])
        return np.concatenate((codes, flags), axis=1), is_present & is_known

    def _row_ids(self, table: RawTable, kept: NDArray[np.int64]) -> list[str] | None:
        """Return the identifiers of rows; None if their column is missing."""
        column = table.columns.get(self.id or "")
        return None if column is None else [column.text(row) for row in kept.tolist()]

    def _describe_missing_ids(self, table: RawTable) -> list[str]:
        """Return a note if the column of identifiers is missing."""
        if self.id is None or self.id in table.columns:
            return []
        return [f"{table.name} has no column {self.id!r}, the id column of the training data."]

    def _distance(self, table: RawTable) -> NDArray[np.float64]:
        """Return the distance of each row from the range of the training rows."""
        distances = [np.zeros(table.rows)]
        distances += [encoder.distance(table.columns[encoder.name]) for encoder in self.columns]
        largest: NDArray[np.float64] = np.max(distances, axis=0)
        return largest

    def pair(self, columns: Mapping[str, Any]) -> Pair:
        """Return x and y of columns that include the target.

        Args:
            columns: by name.
        """
        rows = self.rows(columns, need_target=True)
        return rows.x, rows.y

    def _name_columns(self, array: NDArray[Any], names: Sequence[str]) -> dict[str, Any]:
        """Return the columns of a matrix by name."""
        if array.ndim != 2 or array.shape[1] != len(names):
            raise DataError(
                f"rows of numbers must be (N, {len(names)}) for {', '.join(names)}, got "
                f"{array.shape}"
            )
        return {name: array[:, i] for i, name in enumerate(names)}


@final
@dataclass(frozen=True)
class ImagePreprocessor(Preprocessor):
    """Images (channels, height, width): (pixel/white − mean)/scale.

    Args:
        shape: (channels, height, width) of one image.
        white: the largest pixel.
        mean: of pixel/white in each channel.
        scale: the standard deviation of pixel/white in each channel.
        class_names: in the order of their codes.
        task: "classification".
        y_mean: 0 for classes.
        y_scale: 1 for classes.
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
        """Check the ranges of the fields, and that each channel has a mean and a scale."""
        super().__post_init__()
        self._check_finite("white")
        self._check_positive("white")
        is_shape = len(self.shape) == 3 and all(
            isinstance(size, int) and size > 0 for size in self.shape
        )
        if not is_shape or not len(self.mean) == len(self.scale) == self.shape[0]:
            raise ValueError(
                f"images of shape {self.shape} need a mean and a scale for each channel"
            )
        for mean, scale in zip(self.mean, self.scale, strict=True):
            Number("a channel", mean, scale)  # which validates them

    @staticmethod
    def fit(
        images: NDArray[Any],
        class_names: Sequence[str],
        white: float = 255.0,
    ) -> ImagePreprocessor:
        """Fit the preprocessing to training images.

        Args:
            images: (N, C, H, W).
            class_names: in the order of their codes.
            white: the largest pixel.
        """
        pixels = images.reshape(len(images), images.shape[1], -1)
        mean = [float(pixels[:, c].mean(dtype=np.float64)) / white for c in range(images.shape[1])]
        scale = [_std(pixels[:, c]) / white or 1.0 for c in range(images.shape[1])]
        shape = cast(tuple[int, int, int], tuple(images.shape[1:]))
        return ImagePreprocessor(shape, white, tuple(mean), tuple(scale), tuple(class_names))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Nothing: pixels have no names."""
        return ()

    def describe(self) -> dict[str, Any]:
        """Return the shape of an image and the largest pixel."""
        return {"shape": self.shape, "white": self.white}

    def encode(self, images: NDArray[Any]) -> Matrix:
        """Return pixels as network inputs.

        Args:
            images: pixels 0 .. white, (N, C, H, W) or anything that reshapes to it.
        """
        images = images.reshape(-1, *self.shape)
        out = np.empty(images.shape, np.float32)
        for c in range(self.shape[0]):
            factor = 1 / (self.white * self.scale[c])
            shift = self.mean[c] / self.scale[c]
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
        """Return arrays of pixels (N, C, H, W) and of classes as a data set.

        Args:
            name: of the data set.
            train: images and classes.
            test: images and classes.
            ood: out-of-distribution images, if any.
            ood_name: what they are.
            notes: sentences about the preprocessing.
        """
        train = (self.encode(train[0]), train[1].astype(np.int64))
        test = (self.encode(test[0]), test[1].astype(np.int64))
        ood_inputs = None if ood is None else self.encode(ood)
        return DataSet.of(name, self, train, test, ood_inputs, ood_name, notes)

    def pixels(self, x: Tensor) -> Tensor:
        """Return inputs of the network as pixels from 0 (black) to 1 (white).

        Args:
            x: (N, C, H, W).
        """
        view = (-1, 1, 1)
        return x * x.new_tensor(self.scale).view(view) + x.new_tensor(self.mean).view(view)

    def rows(self, source: object, *, need_target: bool = False) -> PreparedRows:
        """Return new images as network inputs.

        Args:
            source: the path of an NPZ file, or an array of images.
            need_target: missing targets are an error.
        """
        import torch

        y = None
        targets = None
        notes: list[str] = []
        if isinstance(source, str | Path):
            arrays = reading.arrays(Path(source))
            key = reading.input_key(arrays)
            if key is None:
                raise DataError(
                    f"{source} has no array of images; it needs x of shape (N, *{self.shape})"
                )
            source = arrays[key]
            targets = next((arrays[name] for name in reading.TARGET_KEYS if name in arrays), None)
        images = self._channels_first(np.asarray(source))
        largest = float(images.max()) if images.size else 0.0
        if largest > 1.01 * self.white or (largest <= 1 < self.white):
            notes.append(
                f"The largest pixel is {largest:g}; in training pixels ranged from 0 to "
                f"{self.white:g}."
            )
        if targets is not None:
            codes, is_present = self.targets(Column.of(targets))
            if is_present.all():
                y = torch.from_numpy(codes)
        if need_target and y is None:
            raise DataError("these images have no targets; an NPZ file needs arrays x and y")
        x = torch.from_numpy(self.encode(images))
        return PreparedRows(x, y, list(range(len(images))), notes)

    def _channels_first(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return images in any common arrangement as (N, C, H, W)."""
        channels, height, width = self.shape
        shape = images.shape
        if images.dtype.kind not in "iufb" or images.ndim == 0:
            raise DataError(f"images must be numbers, got {images.dtype}")
        if images.ndim == 4 and shape[1:] == (height, width, channels) != self.shape:
            return images.transpose(0, 3, 1, 2)
        is_gray = channels == 1
        if shape == self.shape or (shape == (height, width) and is_gray):
            return images.reshape(1, *self.shape)
        usable: list[tuple[int, ...]] = [self.shape, (channels * height * width,)]
        if is_gray:
            usable.append((height, width))
        if shape[1:] not in usable:
            raise DataError(
                f"images must be (N, {channels}, {height}, {width}), pixels 0 to {self.white:g}, "
                f"got {shape}"
            )
        return images.reshape(-1, *self.shape)


def _std(pixels: NDArray[Any]) -> float:
    """Return the standard deviation of pixels."""
    if pixels.dtype == np.uint8:  # by a histogram, without a floating-point copy
        counts = np.bincount(pixels.reshape(-1), minlength=256).astype(np.float64)
        value = np.arange(256.0)
        mean = (counts * value).sum() / counts.sum()
        return float(np.sqrt((counts * (value - mean) ** 2).sum() / counts.sum()))
    return float(pixels.std(dtype=np.float64))
