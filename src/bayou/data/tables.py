"""A table of the user as a data set: selection and encoding of columns, and the test split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from bayou.data import reading
from bayou.data.catalogue import DataError, Task
from bayou.data.columns import EXACT, MISSING_LEVEL, Column, label, quote
from bayou.data.dataset import DataSet, Pair
from bayou.data.encoders import Category, Number, inside_range, mean_and_std, not_numbers
from bayou.data.preprocess import ImagePreprocessor, TablePreprocessor
from bayou.data.reading import Table, listed
from bayou.specs import nearest
from bayou.training.sentinels import find_sentinels, valid_range

MAX_LEVELS = 50  # categories of a column; more are an identifier or free text
MAX_CLASSES = 200
MIN_ROWS = 5
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
_ID = re.compile(
    r"(?i:(.*[^a-z])?id([^a-z].*)?)|.*[a-z]I[dD]"
)  # id, customer_id, CustomerId; not humid

Index = NDArray[np.int64]


@final
@dataclass(frozen=True)
class Options:
    """Options of a table as a data set; see ``bayou.data.load``."""

    target: str | None = None
    task: Task | None = None
    drop: tuple[str, ...] = ()
    id: str | None = None
    split: int = 0
    seed: int = 0
    test_fraction: float = 0.2


def load_table(path: str | Path, options: Options) -> DataSet:
    """A CSV, TSV, Parquet or NPZ file as a data set."""
    path = Path(path).expanduser()
    if path.suffix.lower() == ".npz" and path.is_file():
        return _load_npz(path, options)
    return table_dataset(
        reading.read_file(path, () if options.target is None else (options.target,)), options
    )


def table_dataset(
    table: Table, options: Options, test: Table | None = None, ood: Table | None = None
) -> DataSet:
    """Columns as a data set, split at random (classes in proportion) unless ``test`` rows are
    given.
    """
    name, notes, names = _target_name(table, options.target), list(table.notes), list(table.columns)
    table = _with_targets(_without(table, name, options, notes), name, notes)
    if table.rows < MIN_ROWS:
        raise DataError(
            f"{table.name} has {table.rows} rows with a target; at least {MIN_ROWS} are needed to split them"
        )
    goal = table.columns[name]
    task = _decide_task(goal, name, options.task, notes)
    classes = _class_names(goal, name, notes) if task == "classification" else ()
    preprocessor = TablePreprocessor((), name, task, classes, id=options.id)
    train_rows, test_rows = np.arange(table.rows), np.arange(0)
    if test is None:
        groups = preprocessor.targets(goal)[0] if classes else np.zeros(table.rows)
        train_rows, test_rows = split_rows(groups, options, notes)
    if not classes:
        _refuse_sentinels(goal, name)
        y_mean, y_scale = _target_statistics(goal.values[train_rows], name)
        preprocessor = replace(preprocessor, y_mean=y_mean, y_scale=y_scale)
    columns = fit_columns(table, name, train_rows, notes)
    kept = {name, *(column.name for column in columns)}
    preprocessor = replace(
        preprocessor, columns=columns, dropped=tuple(n for n in names if n not in kept)
    )
    odd: list[str] = []
    x = preprocessor.encode(table, odd)
    said = set(notes)
    notes.extend(
        note for note in odd if note not in said
    )  # those of the training rows are there already
    y, _ = preprocessor.targets(goal)

    train: Pair = (x[train_rows], y[train_rows])
    held: Pair = (x[test_rows], y[test_rows])
    if test is not None:
        given = preprocessor.rows(test, need_target=True)
        held = (given.x, given.y)
        notes.extend(given.notes)
    away = None if ood is None else preprocessor.rows(ood).x
    return DataSet.of(table.name, preprocessor, train, held, away, "x_ood", notes)


def split_rows(
    y: NDArray[Any], options: Options, notes: list[str] | None = None
) -> tuple[Index, Index]:
    """Training and test rows, a function of (seed, split): stratified by y, in sorted order."""
    from bayou import rng

    fraction = options.test_fraction
    if not 0 < fraction < 1:
        raise DataError(f"test_fraction must lie strictly between 0 and 1, got {fraction}")
    if options.split < 0:
        raise DataError(f"split counts from 0, got {options.split}")
    order = rng.permutation(len(y), rng.fold(options.seed, "split", options.split)).numpy()
    values, counts = np.unique(y, return_counts=True)
    held = [
        order[y[order] == value][: min(max(round(float(count) * fraction), 1), int(count) - 1)]
        for value, count in zip(values, counts, strict=True)
    ]
    lonely = int((counts < 2).sum())
    if lonely and notes is not None:
        who = "A class has" if lonely == 1 else f"{lonely} classes have"
        notes.append(f"{who} only one example, which is used for training, not for testing.")
    test = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(y)), test), test


def fit_columns(
    table: Table, target: str, rows: Index, notes: list[str]
) -> tuple[Number | Category, ...]:
    """The encoder of each column: its kind from all rows, its statistics from the training rows."""
    fitted = [
        _fit_column(name, column, rows, notes)
        for name, column in table.columns.items()
        if name != target
    ]
    columns = tuple(column for column in fitted if column is not None)
    if not columns:
        why = " ".join(notes) if len(table.columns) > 1 else "the target is its only column."
        raise DataError(f"no column of {table.name} is left as an input: {why}")
    return columns


def _fit_column(
    name: str, column: Column, rows: Index, notes: list[str]
) -> Number | Category | None:
    present = ~column.missing
    if not present.any():
        notes.append(f"Column {name!r} is empty; dropped.")
        return None
    bad, good = int(column.bad.sum()), column.values[~np.isnan(column.values)]
    mostly = (
        bad <= 0.1 * present.sum() and len(np.unique(good)) > 20
    )  # a column of numbers with a few typing errors
    if (bad and not mostly) or column.rounded:
        return _fit_category(name, column, rows, notes)
    if len(good) == len(column) > 10:
        if name.lower() in _ROW_NUMBERS and bool((np.diff(good) == 1).all()):
            notes.append(f"Column {name!r} is a row number; dropped.")
            return None
        if (
            _ID.fullmatch(name)
            and len(np.unique(good)) == len(good)
            and bool((good == np.round(good)).all())
        ):
            notes.append(
                f"Column {name!r} has {len(good)} different whole numbers and the name of an identifier; dropped. "
                f"--id {name} copies it to predictions; to use it as an input, rename it."
            )
            return None
    floor, ceiling = valid_range(column.values)
    train = inside_range(column.values[rows], floor, ceiling)
    lost, seen = np.isnan(train), train[~np.isnan(train)]
    if not len(seen) or (np.ptp(seen) == 0 and not lost.any()):
        notes.append(f"Column {name!r} is constant in training; dropped.")
        return None
    number = Number.fit(name, train, floor, ceiling)
    if bad:
        notes.append(not_numbers(name, column))
    if sentinels := number.describe_sentinels(column):
        notes.append(sentinels)
    if lost.any():
        notes.append(
            f"Column {name!r}: {int(lost.sum())} of {len(train)} training values are missing; replaced by the median, "
            "with an indicator column."
        )
    return number


def _fit_category(name: str, column: Column, rows: Index, notes: list[str]) -> Category | None:
    if column.holds_dates:
        notes.append(
            f"Column {name!r} has dates or times; dropped. To use it, convert it to numbers: year, month, days since "
            "a date."
        )
        return None
    seen = sorted({column.levels[i] for i in rows.tolist()})
    if len(seen) > MAX_LEVELS or len(seen) > max(20, len(rows) // 2):
        notes.append(
            f"Column {name!r} has {len(seen)} different values in {len(rows)} rows (such as {quote(seen[-1])}): an "
            "identifier or free text, dropped. To use it, convert it to numbers or a few groups."
        )
        return None
    if len(seen) < 2:
        notes.append(f"Column {name!r} is constant in training; dropped.")
        return None
    if "" in seen:
        notes.append(f"Column {name!r}: missing values are a separate category.")
        seen = [*(level for level in seen if level), MISSING_LEVEL]
    return Category(name, tuple(seen))


def _find(table: Table, name: str) -> str:
    if name not in table.columns:
        close, said = nearest(name, list(table.columns)), " ".join(table.notes)
        raise DataError(
            f"{table.name} has no column {name!r}{close}; its columns are {listed(table.columns)}. {said}".rstrip()
        )
    return name


def _target_name(table: Table, target: str | None) -> str:
    if target is None:
        raise DataError(
            f"{table.name} needs a target column; give --target, one of {listed(table.columns)}"
        )
    if f"{_find(table, target)}.2" in table.columns and any(
        repr(target) in note for note in table.notes
    ):
        raise DataError(
            f"{table.name} has several columns named {target!r}; rename all but the target"
        )
    return target


def _without(table: Table, target: str, options: Options, notes: list[str]) -> Table:
    """The columns without those to drop and the id column."""
    out = {
        _find(table, name)
        for name in (*options.drop, *([] if options.id is None else [options.id]))
    }
    if target in out:
        raise DataError(f"{target!r} is the target; it cannot be dropped or be the id column")
    if options.drop:
        notes.append(f"Left out, as requested: {', '.join(map(repr, options.drop))}.")
    if options.id is not None:
        notes.append(f"Column {options.id!r} identifies the rows; it is not an input.")
    return Table(
        table.name, {name: c for name, c in table.columns.items() if name not in out}, table.notes
    )


def _with_targets(table: Table, name: str, notes: list[str]) -> Table:
    """The rows that have a target."""
    present = np.array([level != "" for level in table.columns[name].levels])
    lost = int((~present).sum())
    if not lost:
        return table
    if lost > table.rows / 2:
        raise DataError(
            f"{lost} of {table.rows} rows of {table.name} have no value in {name!r}; is it the right column?"
        )
    notes.append(f"{lost} of {table.rows} rows have no value in {name!r}; left out.")
    rows = np.flatnonzero(present)
    return Table(
        table.name, {key: column.take(rows) for key, column in table.columns.items()}, table.notes
    )


def _decide_task(goal: Column, name: str, task: Task | None, notes: list[str]) -> Task:
    if task not in (None, "classification", "regression"):
        raise DataError(f"task must be classification or regression, got {task!r}")
    lost = np.isnan(goal.values)
    row = int(lost.argmax())
    if task == "regression" and lost.any():
        raise DataError(
            f"the target {name!r} is {quote(goal.text(row))} in row {row + 1}, which is not a number; "
            "--task classification?"
        )
    if task is not None:
        return task
    distinct = len(set(goal.levels) if goal.rounded else np.unique(goal.values[~lost]))
    if lost.any():
        if lost.mean() < 0.1 and distinct > 20:
            raise DataError(
                f"the target {name!r} is numeric, but row {row + 1} has {quote(goal.text(row))} ({int(lost.sum())} "
                "such rows); correct these cells, or leave them blank"
            )
        return "classification"
    few = distinct <= min(20, max(2, int(len(goal) ** 0.5)))
    if few and bool((goal.values == np.round(goal.values)).all()):
        notes.append(
            f"The target {name!r} has {distinct} whole values, used as classes; --task regression for numbers."
        )
        return "classification"
    return "regression"


def _class_names(goal: Column, name: str, notes: list[str]) -> tuple[str, ...]:
    if bool((np.abs(goal.values) < EXACT).all()):  # none is missing, and all are exact
        values, counts = np.unique(goal.values, return_counts=True)
        names = [label(value) for value in values.tolist()]
    else:
        if goal.holds_dates:
            raise DataError(
                f"the target {name!r} has dates; convert them to numbers or classes first"
            )
        found, counts = np.unique(np.array(goal.levels), return_counts=True)
        names = [str(level) for level in found.tolist()]
    if len(names) < 2:
        raise DataError(
            f"the target {name!r} has only one class, {quote(names[0])}; a classifier needs two or more"
        )
    if len(names) > MAX_CLASSES or len(names) > max(5, len(goal) / 2):
        raise DataError(
            f"the target {name!r} has {len(names)} different values in {len(goal)} rows, too many for classes "
            f"(such as {quote(names[-1])}); is it the right column, or one for --task regression?"
        )
    if counts.max() > 20 * counts.min():
        rare, often = names[int(counts.argmin())], names[int(counts.argmax())]
        notes.append(
            f"The classes are imbalanced: {int(counts.max())} rows of {quote(often)}, {int(counts.min())} of "
            f"{quote(rare)}; accuracy can be misleading."
        )
    return tuple(names)


def _refuse_sentinels(goal: Column, name: str) -> None:
    """Raise a DataError if a target is so far from the others that they would all be the same
    beside it.
    """
    flags = find_sentinels(goal.values)
    if not flags.any():
        return
    row = int(flags.argmax())
    others = goal.values[~flags & ~np.isnan(goal.values)]
    raise DataError(
        f"the target {name!r} is {goal.values[row]:.12g} in row {row + 1}, far from all others ({others.min():g} to "
        f"{others.max():g}; {int(flags.sum())} such rows); beside it they would all be the same. If it stands for a "
        "missing value, leave the cell blank; if it is right, predict the logarithm of the target"
    )


def _target_statistics(y: NDArray[Any], name: str) -> tuple[float, float]:
    if np.ptp(y) == 0:
        raise DataError(f"the target {name!r} is {float(y.flat[0]):g} in every row; it must vary")
    mean, scale = mean_and_std(y)
    if not 1e-30 < scale < 1e30:
        raise DataError(
            f"the target {name!r} has a standard deviation of {scale:.1e}; give it in other units"
        )
    return mean, scale


def _load_npz(path: Path, options: Options) -> DataSet:
    """Arrays x and y, with optional x_test, y_test, x_ood; or columns by name."""
    found = reading.arrays(path)
    key = reading.input_key(found)
    if key is None:
        return table_dataset(reading.read_file(path), options)
    goal = options.target or next((k for k in reading.TARGET_KEYS if k in found), "y")
    if goal not in found:
        listed = ", ".join(map(repr, found))
        raise DataError(
            f"{path.name} has {key!r}, but no array {goal!r} of targets; its arrays are {listed}"
        )
    x, y = found[key], found[goal]
    y = y.reshape(-1) if y.size == len(y) else y
    if y.ndim != 1 or len(y) != len(x):
        raise DataError(
            f"{key!r} has {len(x)} rows, but {goal!r} has shape {y.shape}; one target for each row is needed"
        )
    x_test, y_test, x_ood = (found.get(k) for k in (f"{key}_test", f"{goal}_test", f"{key}_ood"))
    given = x_test is not None and y_test is not None
    if x.ndim > 2:
        return _image_arrays(path.name, x, y, (x_test, y_test) if given else None, x_ood, options)
    test = reading.npz_rows(path.name, x_test, {goal: y_test}) if given else None
    ood = None if x_ood is None else reading.npz_rows(path.name, x_ood, {})
    return table_dataset(
        reading.npz_rows(path.name, x, {goal: y}), replace(options, target=goal), test, ood
    )


def _image_arrays(
    name: str, x: Any, y: Any, test: tuple[Any, Any] | None, ood: Any, options: Options
) -> DataSet:
    if options.drop or options.id is not None:
        raise DataError(f"{name} contains images; --drop and --id are for columns of a table")
    notes: list[str] = []
    classes = _class_names(Column.of(y), "y", notes)
    images = channels_first(x, name)
    blank = TablePreprocessor((), "y", "classification", classes)
    codes, _ = blank.targets(Column.of(y))
    if test is None:
        rows, held = split_rows(codes, options, notes)
        train, tested = (images[rows], codes[rows]), (images[held], codes[held])
    else:
        train = (images, codes)
        tested = (channels_first(test[0], name), blank.targets(Column.of(test[1].reshape(-1)))[0])
    white = 255.0 if x.dtype == np.uint8 or float(x.max()) > 16 else float(x.max()) or 1.0
    preprocessor = ImagePreprocessor.fit(train[0], classes, white)
    notes.append(f"Pixels were divided by {white:g} and standardized by the training images.")
    away = None if ood is None else channels_first(ood, name)
    return preprocessor.dataset(name, train, tested, away, "x_ood", notes)


def channels_first(x: NDArray[Any], name: str, channels: Sequence[int] = (1, 3, 4)) -> NDArray[Any]:
    """Images (N, H, W), (N, H, W, C) or (N, C, H, W) as (N, C, H, W)."""
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[1] in channels:
        return x
    if x.ndim == 4 and x.shape[3] in channels:
        return x.transpose(0, 3, 1, 2)
    raise DataError(
        f"the images of {name} have shape {x.shape}; (N, H, W), (N, H, W, C) or (N, C, H, W) is needed"
    )
