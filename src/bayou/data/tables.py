"""A table of the user as a data set: selection and encoding of columns, and the test split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from bayou.core.specs import nearest
from bayou.data import reading
from bayou.data.catalogue import DataError, Task
from bayou.data.columns import EXACT, MISSING_LEVEL, Column, label, quote
from bayou.data.dataset import DataSet, Pair
from bayou.data.encoders import (
    Category,
    Number,
    inside_range,
    mean_and_std,
)
from bayou.data.preprocess import ImagePreprocessor, TablePreprocessor
from bayou.data.reading import RawTable, quote_names
from bayou.training.sentinels import find_sentinels, valid_range

MAX_LEVELS = 50  # categories of a column; more are an identifier or free text
MAX_CLASSES = 200
MIN_ROWS = 5
MIN_IDENTIFIER_ROWS = 11  # of a column of row numbers or identifiers
MAX_TEXT_SHARE = 0.1  # cells of a column of numbers that are typing errors
MIN_DISTINCT_NUMBERS = 21  # in a column or target of numbers that has typing errors
_ROW_NUMBERS = (
    "c1",
    "id",
    "index",
    "no",
    "nr",
    "obs",
    "row",
    "rowid",
    "row_id",
    "rownames",
    "row.names",
    "unnamed: 0",
)
# id, customer_id, CustomerId; not humid
_ID = re.compile(r"(?i:(.*[^a-z])?id([^a-z].*)?)|.*[a-z]I[dD]")

Index = NDArray[np.int64]


@final
@dataclass(frozen=True)
class Options:
    """Options of a table as a data set; see ``bayou.data.load``.

    Args:
        target: the target column.
        task: "classification" or "regression"; None to infer it from the target.
        drop: columns that are not used.
        id: the column that identifies rows.
        split: the number of the random split.
        seed: of all splits.
        test_fraction: of the rows.
    """

    target: str | None = None
    task: Task | None = None
    drop: tuple[str, ...] = ()
    id: str | None = None
    split: int = 0
    seed: int = 0
    test_fraction: float = 0.2


def load_table(path: str | Path, options: Options) -> DataSet:
    """Load a CSV, TSV, Parquet or NPZ file as a data set.

    Args:
        path: the file.
        options: the target, the task and the split.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() == ".npz" and path.is_file():
        return _load_npz(path, options)
    known = () if options.target is None else (options.target,)
    return table_dataset(reading.read_file(path, known), options)


def table_dataset(
    table: RawTable,
    options: Options,
    test: RawTable | None = None,
    ood: RawTable | None = None,
) -> DataSet:
    """Return columns as a data set.

    Args:
        table: rows with their target.
        options: the target, the task and the split.
        test: the test rows; by default a random part of the table, classes in proportion.
        ood: out-of-distribution rows.
    """
    target_name = _check_target(table, options.target)
    all_names = list(table.columns)
    notes = list(table.notes)
    table = _drop_columns(table, target_name, options, notes)
    table = _drop_rows_without_target(table, target_name, notes)
    if table.rows < MIN_ROWS:
        raise DataError(
            f"{table.name} has {table.rows} rows with a target; at least {MIN_ROWS} are needed to "
            "split them"
        )
    target = table.columns[target_name]
    task = _decide_task(target, target_name, options.task, notes)
    classes: tuple[str, ...] = ()
    if task == "classification":
        classes = _class_names(target, target_name, notes)
    preprocessor = TablePreprocessor((), target_name, task, classes, id=options.id)
    train_rows = np.arange(table.rows)
    test_rows = np.arange(0)
    if test is None:
        groups = preprocessor.targets(target)[0] if classes else np.zeros(table.rows)
        train_rows, test_rows = split_rows(groups, options, notes)
    if not classes:
        _refuse_sentinels(target, target_name)
        y_mean, y_scale = _target_statistics(target.values[train_rows], target_name)
        preprocessor = replace(preprocessor, y_mean=y_mean, y_scale=y_scale)
    columns = fit_columns(table, target_name, train_rows, notes)
    used = {target_name, *(column.name for column in columns)}
    dropped = tuple(name for name in all_names if name not in used)
    preprocessor = replace(preprocessor, columns=columns, dropped=dropped)
    x = preprocessor.encode(table, notes)
    y, _ = preprocessor.targets(target)

    train_pair: Pair = (x[train_rows], y[train_rows])
    test_pair: Pair = (x[test_rows], y[test_rows])
    if test is not None:
        prepared = preprocessor.rows(test, need_target=True)
        test_pair = (prepared.x, prepared.y)
        notes += prepared.notes
    ood_inputs = None if ood is None else preprocessor.rows(ood).x
    return DataSet.of(table.name, preprocessor, train_pair, test_pair, ood_inputs, "x_ood", notes)


def split_rows(
    y: NDArray[Any],
    options: Options,
    notes: list[str] | None = None,
) -> tuple[Index, Index]:
    """Split rows into training and test rows, stratified by y, in sorted order.

    The split is a function of the seed and its number.

    Args:
        y: classes (N,), or zeros.
        options: the seed, the split and the fraction of test rows.
        notes: to which one about classes of a single row is added.

    Returns:
        The indices of the training rows, and of the test rows.
    """
    from bayou.core import rng

    fraction = options.test_fraction
    if not 0 < fraction < 1:
        raise DataError(f"test_fraction must lie strictly between 0 and 1, got {fraction}")
    if options.split < 0:
        raise DataError(f"split counts from 0, got {options.split}")
    order = rng.permutation(len(y), rng.fold(options.seed, "split", options.split)).numpy()
    values, counts = np.unique(y, return_counts=True)
    test_groups = []
    for value, count in zip(values, counts, strict=True):
        test_count = max(round(float(count) * fraction), 1)
        test_count = min(test_count, int(count) - 1)
        test_groups.append(order[y[order] == value][:test_count])
    single_count = int((counts < 2).sum())
    if single_count and notes is not None:
        subject = "A class has" if single_count == 1 else f"{single_count} classes have"
        notes.append(f"{subject} only one example, which is used for training, not for testing.")
    test_rows = np.sort(np.concatenate(test_groups))
    return np.setdiff1d(np.arange(len(y)), test_rows), test_rows


def fit_columns(
    table: RawTable,
    target: str,
    rows: Index,
    notes: list[str],
) -> tuple[Number | Category, ...]:
    """Return the encoder of each column: its type by all rows, its statistics by training rows.

    Args:
        table: all rows.
        target: the name of the target, which is left out.
        rows: indices of the training rows.
        notes: to which those about columns are added.
    """
    encoders = [
        _fit_column(name, column, rows, notes)
        for name, column in table.columns.items()
        if name != target
    ]
    columns = tuple(encoder for encoder in encoders if encoder is not None)
    if not columns:
        reason = " ".join(notes) if len(table.columns) > 1 else "the target is its only column."
        raise DataError(f"no column of {table.name} is left as an input: {reason}")
    return columns


def _fit_column(
    name: str,
    column: Column,
    rows: Index,
    notes: list[str],
) -> Number | Category | None:
    """Return the encoder of a column; None with a note for one that is no input."""
    is_present = ~column.missing
    if not is_present.any():
        notes.append(f"Column {name!r} is empty; dropped.")
        return None
    bad_count = int(column.bad.sum())
    numbers = column.values[~np.isnan(column.values)]
    is_mostly_numbers = (
        bad_count <= MAX_TEXT_SHARE * is_present.sum()
        and len(np.unique(numbers)) >= MIN_DISTINCT_NUMBERS
    )
    if (bad_count and not is_mostly_numbers) or column.loses_digits:
        return _fit_category(name, column, rows, notes)
    note = _describe_identifier(name, column, numbers)
    if note:
        notes.append(note)
        return None
    return _fit_number(name, column, rows, notes)


def _describe_identifier(name: str, column: Column, numbers: NDArray[np.float64]) -> str:
    """Return a note about a column of row numbers or identifiers; empty for other columns."""
    if not len(numbers) == len(column) >= MIN_IDENTIFIER_ROWS:
        return ""
    if name.lower() in _ROW_NUMBERS and bool((np.diff(numbers) == 1).all()):
        return f"Column {name!r} is a row number; dropped."
    are_distinct = len(np.unique(numbers)) == len(numbers)
    if _ID.fullmatch(name) and are_distinct and bool((numbers == np.round(numbers)).all()):
        return (
            f"Column {name!r} has {len(numbers)} different whole numbers and the name of an "
            f"identifier; dropped. --id {name} copies it to predictions; to use it as an input, "
            "rename it."
        )
    return ""


def _fit_number(name: str, column: Column, rows: Index, notes: list[str]) -> Number | None:
    """Return the encoder of a column of numbers; None with a note for a constant one."""
    floor, ceiling = valid_range(column.values)
    train = inside_range(column.values[rows], floor, ceiling)
    is_missing = np.isnan(train)
    present = train[~is_missing]
    if not len(present) or (np.ptp(present) == 0 and not is_missing.any()):
        notes.append(f"Column {name!r} is constant in training; dropped.")
        return None
    encoder = Number.fit(name, train, floor, ceiling)
    if is_missing.any():
        notes.append(
            f"Column {name!r}: {int(is_missing.sum())} of {len(train)} training values are "
            "missing; replaced by the median, with an indicator column."
        )
    return encoder


def _fit_category(name: str, column: Column, rows: Index, notes: list[str]) -> Category | None:
    """Return the encoder of a column of categories; None with a note for dates, text and ids."""
    if column.holds_dates:
        notes.append(
            f"Column {name!r} has dates or times; dropped. To use it, convert it to numbers: year, "
            "month, days since a date."
        )
        return None
    levels = sorted({column.levels[i] for i in rows.tolist()})
    if len(levels) > MAX_LEVELS or len(levels) > max(20, len(rows) // 2):
        notes.append(
            f"Column {name!r} has {len(levels)} different values in {len(rows)} rows (such as "
            f"{quote(levels[-1])}): an identifier or free text, dropped. To use it, convert it to "
            "numbers or a few groups."
        )
        return None
    if len(levels) < 2:
        notes.append(f"Column {name!r} is constant in training; dropped.")
        return None
    if "" in levels:
        notes.append(f"Column {name!r}: missing values are a separate category.")
        levels = [*(level for level in levels if level), MISSING_LEVEL]
    return Category(name, tuple(levels))


def _check_column(table: RawTable, name: str) -> str:
    """Return the name of a column, or raise a DataError if there is none."""
    if name not in table.columns:
        suggestion = nearest(name, list(table.columns))
        message = (
            f"{table.name} has no column {name!r}{suggestion}; its columns are "
            f"{quote_names(table.columns)}. {' '.join(table.notes)}"
        )
        raise DataError(message.rstrip())
    return name


def _check_target(table: RawTable, target: str | None) -> str:
    """Return the name of the target column, or raise a DataError if it is not clear."""
    if target is None:
        raise DataError(
            f"{table.name} needs a target column; give --target, one of "
            f"{quote_names(table.columns)}"
        )
    repeated_name = f"{_check_column(table, target)}.2"
    if repeated_name in table.columns and any(repr(target) in note for note in table.notes):
        raise DataError(
            f"{table.name} has several columns named {target!r}; rename all but the target"
        )
    return target


def _drop_columns(table: RawTable, target: str, options: Options, notes: list[str]) -> RawTable:
    """Return the table without the columns to drop and the id column."""
    names = list(options.drop)
    if options.id is not None:
        names.append(options.id)
    dropped = {_check_column(table, name) for name in names}
    if target in dropped:
        raise DataError(f"{target!r} is the target; it cannot be dropped or be the id column")
    if options.drop:
        notes.append(f"Left out, as requested: {', '.join(map(repr, options.drop))}.")
    if options.id is not None:
        notes.append(f"Column {options.id!r} identifies the rows; it is not an input.")
    columns = {name: column for name, column in table.columns.items() if name not in dropped}
    return RawTable(table.name, columns, table.notes)


def _drop_rows_without_target(table: RawTable, name: str, notes: list[str]) -> RawTable:
    """Return the rows that have a target."""
    is_present = np.array([level != "" for level in table.columns[name].levels])
    missing_count = int((~is_present).sum())
    if not missing_count:
        return table
    if missing_count > table.rows / 2:
        raise DataError(
            f"{missing_count} of {table.rows} rows of {table.name} have no value in {name!r}; is "
            "it the right column?"
        )
    notes.append(f"{missing_count} of {table.rows} rows have no value in {name!r}; left out.")
    rows = np.flatnonzero(is_present)
    columns = {key: column.take(rows) for key, column in table.columns.items()}
    return RawTable(table.name, columns, table.notes)


def _decide_task(target: Column, name: str, task: Task | None, notes: list[str]) -> Task:
    """Return the requested task, or infer it from the target."""
    if task not in (None, "classification", "regression"):
        raise DataError(f"task must be classification or regression, got {task!r}")
    is_missing = np.isnan(target.values)
    if task == "regression" and is_missing.any():
        raise DataError(
            f"the target {name!r} must be a number, got {target.describe_first(is_missing)}; "
            "--task classification?"
        )
    if task is not None:
        return task
    values = set(target.levels) if target.loses_digits else np.unique(target.values[~is_missing])
    distinct_count = len(values)
    if is_missing.any():
        if is_missing.mean() < MAX_TEXT_SHARE and distinct_count >= MIN_DISTINCT_NUMBERS:
            raise DataError(
                f"the target {name!r} must be a number, got {target.describe_first(is_missing)} "
                f"({int(is_missing.sum())} such rows); correct these cells, or leave them blank"
            )
        return "classification"
    most_classes = min(20, max(2, int(len(target) ** 0.5)))
    are_whole = bool((target.values == np.round(target.values)).all())
    if distinct_count <= most_classes and are_whole:
        notes.append(
            f"The target {name!r} has {distinct_count} whole values, used as classes; "
            "--task regression for numbers."
        )
        return "classification"
    return "regression"


def _class_names(target: Column, name: str, notes: list[str]) -> tuple[str, ...]:
    """Return the classes of a target in sorted order, or raise a DataError for too many."""
    names, counts = _count_classes(target, name)
    if len(names) < 2:
        raise DataError(
            f"the target {name!r} has only one class, {quote(names[0])}; a classifier needs two or "
            "more"
        )
    if len(names) > MAX_CLASSES or len(names) > max(5, len(target) / 2):
        raise DataError(
            f"the target {name!r} has {len(names)} different values in {len(target)} rows, too "
            f"many for classes (such as {quote(names[-1])}); is it the right column, or one for "
            "--task regression?"
        )
    if counts.max() > 20 * counts.min():
        rare = quote(names[int(counts.argmin())])
        frequent = quote(names[int(counts.argmax())])
        notes.append(
            f"The classes are imbalanced: {int(counts.max())} rows of {frequent}, "
            f"{int(counts.min())} of {rare}; accuracy can be misleading."
        )
    return tuple(names)


def _count_classes(target: Column, name: str) -> tuple[list[str], NDArray[np.int64]]:
    """Return the different values of a target as text, and how many rows have each."""
    # A comparison with nan is false: then a value is missing, and the cells are text.
    if bool((np.abs(target.values) < EXACT).all()):
        values, counts = np.unique(target.values, return_counts=True)
        return [label(value) for value in values.tolist()], counts
    if target.holds_dates:
        raise DataError(f"the target {name!r} has dates; convert them to numbers or classes first")
    levels, counts = np.unique(np.array(target.levels), return_counts=True)
    return [str(level) for level in levels.tolist()], counts


def _refuse_sentinels(target: Column, name: str) -> None:
    """Raise a DataError if a target is so far from the rest that they would all be the same."""
    is_sentinel = find_sentinels(target.values)
    if not is_sentinel.any():
        return
    row = int(is_sentinel.argmax())
    regular = target.values[~is_sentinel & ~np.isnan(target.values)]
    raise DataError(
        f"the target {name!r} is {target.values[row]:.12g} in row {row + 1}, far from all others "
        f"({regular.min():g} to {regular.max():g}; {int(is_sentinel.sum())} such rows); beside it "
        "they would all be the same. If it stands for a missing value, leave the cell blank; if it "
        "is right, predict the logarithm of the target"
    )


def _target_statistics(y: NDArray[Any], name: str) -> tuple[float, float]:
    """Return the mean and the standard deviation of a target, or raise a DataError."""
    if np.ptp(y) == 0:
        raise DataError(f"the target {name!r} is {float(y.flat[0]):g} in every row; it must vary")
    mean, scale = mean_and_std(y)
    if not 1e-30 < scale < 1e30:
        raise DataError(
            f"the target {name!r} has a standard deviation of {scale:.1e}; give it in other units"
        )
    return mean, scale


def _load_npz(path: Path, options: Options) -> DataSet:
    """Load arrays x and y, with optional x_test, y_test, x_ood; or columns by name."""
    arrays = reading.arrays(path)
    key = reading.input_key(arrays)
    if key is None:
        return table_dataset(reading.read_file(path), options)
    target = options.target
    if not target:
        target = next((name for name in reading.TARGET_KEYS if name in arrays), "y")
    if target not in arrays:
        names = ", ".join(map(repr, arrays))
        raise DataError(
            f"{path.name} has {key!r}, but no array {target!r} of targets; its arrays are {names}"
        )
    x = arrays[key]
    y = arrays[target]
    if y.size == len(y):
        y = y.reshape(-1)
    if y.ndim != 1 or len(y) != len(x):
        raise DataError(
            f"{key!r} has {len(x)} rows, but {target!r} has shape {y.shape}; one target for each "
            "row is needed"
        )
    test_arrays = None
    if f"{key}_test" in arrays and f"{target}_test" in arrays:
        test_arrays = (arrays[f"{key}_test"], arrays[f"{target}_test"])
    x_ood = arrays.get(f"{key}_ood")
    if x.ndim > 2:
        return _image_dataset(path.name, x, y, test_arrays, x_ood, options)
    table = reading.npz_rows(path.name, x, {target: y})
    test = None
    if test_arrays is not None:
        test = reading.npz_rows(path.name, test_arrays[0], {target: test_arrays[1]})
    ood = None if x_ood is None else reading.npz_rows(path.name, x_ood, {})
    return table_dataset(table, replace(options, target=target), test, ood)


def _image_dataset(
    name: str,
    x: NDArray[Any],
    y: NDArray[Any],
    test: tuple[NDArray[Any], NDArray[Any]] | None,
    ood: NDArray[Any] | None,
    options: Options,
) -> DataSet:
    """Return arrays of images and their classes as a data set."""
    if options.drop or options.id is not None:
        raise DataError(f"{name} contains images; --drop and --id are for columns of a table")
    notes: list[str] = []
    classes = _class_names(Column.of(y), "y", notes)
    images = channels_first(x, name)
    target_encoder = TablePreprocessor((), "y", "classification", classes)
    codes, _ = target_encoder.targets(Column.of(y))
    if test is None:
        train_rows, test_rows = split_rows(codes, options, notes)
        train_pair = (images[train_rows], codes[train_rows])
        test_pair = (images[test_rows], codes[test_rows])
    else:
        train_pair = (images, codes)
        test_codes, _ = target_encoder.targets(Column.of(test[1].reshape(-1)))
        test_pair = (channels_first(test[0], name), test_codes)
    largest = float(x.max())
    white = largest or 1.0
    if x.dtype == np.uint8 or largest > 16:
        white = 255.0
    preprocessor = ImagePreprocessor.fit(train_pair[0], classes, white)
    notes.append(f"Pixels were divided by {white:g} and standardized by the training images.")
    ood_images = None if ood is None else channels_first(ood, name)
    return preprocessor.dataset(name, train_pair, test_pair, ood_images, "x_ood", notes)


def channels_first(x: NDArray[Any], name: str, channels: Sequence[int] = (1, 3, 4)) -> NDArray[Any]:
    """Return images (N, H, W), (N, H, W, C) or (N, C, H, W) as (N, C, H, W).

    Args:
        x: the images.
        name: of their file, for a message.
        channels: the numbers of channels that images can have.
    """
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[1] in channels:
        return x
    if x.ndim == 4 and x.shape[3] in channels:
        return x.transpose(0, 3, 1, 2)
    raise DataError(
        f"the images of {name} have shape {x.shape}; (N, H, W), (N, H, W, C) or (N, C, H, W) is "
        "needed"
    )
