"""A table of the user's own as a data set: which columns are used, how, and what is held back to test on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayou.data import reading
from bayou.data.catalogue import DataError, Task, nearest
from bayou.data.cells import MISSING_LEVEL, Cells, as_cells, label, levels, look_like_dates, parse
from bayou.data.dataset import DataSet
from bayou.data.preprocess import Category, ImagePreprocessor, Number, TablePreprocessor
from bayou.data.reading import Table

MAX_LEVELS = 50  # categories of a column; more are an identifier or free text
MAX_CLASSES = 200
FEW_ROWS = 5
_ROW_NUMBERS = ("c1", "id", "index", "no", "nr", "obs", "row", "rowid", "row_id", "rownames", "row.names", "unnamed: 0")

Index = NDArray[np.int64]


def load_table(
    path: str | Path,
    target: str | None = None,
    *,
    split: int = 0,
    seed: int = 0,
    test_fraction: float = 0.2,
    task: Task | None = None,
) -> DataSet:
    """A CSV, TSV, Parquet or NPZ file as a data set; see ``bayou.data.load``."""
    path = Path(path).expanduser()
    if path.suffix.lower() == ".npz" and path.is_file():
        return _load_npz(path, target, split, seed, test_fraction, task)
    table = reading.read_file(path, () if target is None else (target,))
    return table_dataset(table, target, split=split, seed=seed, test_fraction=test_fraction, task=task)


def table_dataset(
    table: Table,
    target: str | None,
    *,
    split: int = 0,
    seed: int = 0,
    test_fraction: float = 0.2,
    task: Task | None = None,
    test: Table | None = None,
    ood: Table | None = None,
) -> DataSet:
    """Columns as a data set, split at random (classes in proportion) unless ``test`` rows are given."""
    import torch

    name, notes = _target_name(table, target), list(table.notes)
    table = _with_targets(table, name, notes)
    if table.rows < FEW_ROWS:
        raise DataError(
            f"{table.name} has {table.rows} rows with a target; at least {FEW_ROWS} are needed to split them"
        )
    task = _decide_task(table, name, task, notes)
    classes = _class_names(table, name, notes) if task == "classification" else ()
    cells = table.columns[name]
    blank = TablePreprocessor((), name, task, classes)
    groups = blank.targets(cells, table.decimal_comma)[0] if classes else np.zeros(table.rows)
    if test is None:
        train_rows, test_rows = split_rows(groups, test_fraction, seed, split, notes)
    else:
        train_rows, test_rows = np.arange(table.rows), np.arange(0)
    y_mean, y_scale = (
        (0.0, 1.0) if classes else _target_statistics(parse(cells, table.decimal_comma).values[train_rows], name)
    )
    columns = fit_columns(table, name, train_rows, notes)
    kept = {column.name for column in columns}
    dropped = tuple(column for column in table.columns if column not in kept and column != name)
    preprocessor = TablePreprocessor(columns, name, task, classes, y_mean, y_scale, dropped)
    odd: list[str] = []
    x = preprocessor.encode(table, odd)
    notes.extend(note for note in odd if note not in notes)  # about rows to test on: training has said its own
    y, _ = preprocessor.targets(cells, table.decimal_comma)

    def pair(rows: Index) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(x[rows]), torch.from_numpy(y[rows])

    held = pair(test_rows)
    if test is not None:
        given = preprocessor.rows(test, need_target=True)
        assert given.y is not None
        held = (given.x, given.y)
        notes.extend(given.notes)
    away = None if ood is None else preprocessor.rows(ood)
    return DataSet(
        table.name,
        task,
        pair(train_rows),
        held,
        preprocessor,
        None if away is None else away.x,
        None if away is None else "x_ood",
        classes,
        preprocessor.feature_names,
        notes,
    )


def split_rows(
    y: NDArray[Any], test_fraction: float, seed: int, split: int, notes: list[str] | None = None
) -> tuple[Index, Index]:
    """Rows to train and to test on, a function of (seed, split): each value of y in proportion, in sorted order."""
    from bayou import rng

    if not 0 < test_fraction < 1:
        raise DataError(f"test_fraction must lie strictly between 0 and 1, got {test_fraction}")
    if split < 0:
        raise DataError(f"split counts from 0, got {split}")
    order = rng.permutation(len(y), rng.fold(seed, "split", split)).numpy()
    held: list[Index] = []
    lonely = []
    for value, count in zip(*np.unique(y, return_counts=True), strict=True):
        size = round(float(count) * test_fraction)
        if count < 2:
            lonely.append(value)
            continue
        held.append(order[y[order] == value][: min(max(size, 1), int(count) - 1)])
    if lonely and notes is not None:
        who = "A class has" if len(lonely) == 1 else f"{len(lonely)} classes have"
        notes.append(f"{who} one example only: it is trained on, and never tested.")
    test = np.sort(np.concatenate(held)) if held else np.arange(0)
    return np.setdiff1d(np.arange(len(y)), test), test


def fit_columns(table: Table, target: str, rows: Index, notes: list[str]) -> tuple[Number | Category, ...]:
    """How each column becomes numbers: its kind from all rows, its statistics from the training rows."""
    columns: list[Number | Category] = []
    for name, cells in table.columns.items():
        if name != target:
            column = _fit_column(name, cells, table.decimal_comma, rows, notes)
            if column is not None:
                columns.append(column)
    if not columns:
        why = " ".join(notes) if len(table.columns) > 1 else "the target is its only column."
        raise DataError(f"no column of {table.name} is left to learn from: {why}")
    return tuple(columns)


def _fit_column(name: str, cells: Cells, comma: bool, rows: Index, notes: list[str]) -> Number | Category | None:
    parsed = parse(cells, comma)
    present = ~parsed.missing
    if not present.any():
        notes.append(f"Column {name!r} is empty; dropped.")
        return None
    bad, good = int(parsed.bad.sum()), parsed.values[present & ~parsed.bad]
    mostly = bad <= 0.1 * present.sum() and len(np.unique(good)) > 20  # a column of numbers with typing errors
    if bad and not mostly:
        return _fit_category(name, cells, rows, notes)
    if name.lower() in _ROW_NUMBERS and len(good) == len(cells) > 10 and bool((np.diff(good) == 1).all()):
        notes.append(f"Column {name!r} only numbers the rows; dropped.")
        return None
    train = parsed.values[rows]
    lost, seen = np.isnan(train), train[~np.isnan(train)]
    if not len(seen) or (np.ptp(seen) == 0 and not lost.any()):
        notes.append(f"Column {name!r} is constant in training; dropped.")
        return None
    if bad:
        row = int(parsed.bad.argmax())
        assert isinstance(cells, list)
        notes.append(
            f"Column {name!r}: {bad} cells are not numbers (row {row + 1}: {cells[row]!r}); they count as missing."
        )
    if lost.any():
        notes.append(
            f"Column {name!r}: {int(lost.sum())} of {len(train)} training values are missing; median and a flag."
        )
    median = float(np.median(seen))
    mean, scale = _mean_and_std(np.where(lost, median, train))
    return Number(name, mean, scale or 1.0, median, bool(lost.any()))


def _fit_category(name: str, cells: Cells, rows: Index, notes: list[str]) -> Category | None:
    assert isinstance(cells, list)
    if look_like_dates(cells):
        notes.append(
            f"Column {name!r} holds dates or times; dropped. To use it, turn it into numbers: year, month, days since "
            "a date."
        )
        return None
    found = levels(cells)
    seen = sorted({found[i] for i in rows.tolist()})
    if len(seen) > MAX_LEVELS or len(seen) > max(20, len(rows) // 2):
        notes.append(
            f"Column {name!r} has {len(seen)} different values in {len(rows)} rows (such as {seen[-1]!r}): an "
            "identifier or free text, dropped. To use it, make a number of it, or a few groups."
        )
        return None
    if len(seen) < 2:
        notes.append(f"Column {name!r} is constant in training; dropped.")
        return None
    if "" in seen:
        notes.append(f"Column {name!r}: missing values are a category of their own.")
        seen = [*(level for level in seen if level), MISSING_LEVEL]
    return Category(name, tuple(seen))


def _target_name(table: Table, target: str | None) -> str:
    names = list(table.columns)
    listed = ", ".join(map(repr, names[:40])) + (", ..." if len(names) > 40 else "")
    said = " ".join(table.notes)
    if target is None:
        raise DataError(f"which column of {table.name} is to be predicted? Name it with --target, one of {listed}")
    if target not in table.columns:
        raise DataError(
            f"{table.name} has no column {target!r}{nearest(target, names)}; its columns are {listed}. {said}".rstrip()
        )
    if f"{target}.2" in table.columns and any(repr(target) in note for note in table.notes):
        raise DataError(f"{table.name} has several columns named {target!r}; rename all but the target")
    return target


def _with_targets(table: Table, name: str, notes: list[str]) -> Table:
    """The rows that have a target."""
    blank = np.array([level == "" for level in levels(table.columns[name])])
    lost = int(blank.sum())
    if not lost:
        return table
    if lost > table.rows / 2:
        raise DataError(
            f"{lost} of {table.rows} rows of {table.name} have no value in {name!r}; is it the right column?"
        )
    notes.append(f"{lost} of {table.rows} rows have no value in {name!r}; left out.")
    rows = np.flatnonzero(~blank)
    columns = {key: _take(cells, rows) for key, cells in table.columns.items()}
    return Table(table.name, columns, table.notes, table.decimal_comma)


def _take(cells: Cells, rows: Index) -> Cells:
    return cells[rows] if isinstance(cells, np.ndarray) else [cells[i] for i in rows.tolist()]


def _decide_task(table: Table, name: str, task: Task | None, notes: list[str]) -> Task:
    if task not in (None, "classification", "regression"):
        raise DataError(f"task must be classification or regression, got {task!r}")
    cells = table.columns[name]
    parsed = parse(cells, table.decimal_comma)
    lost = parsed.bad | parsed.missing
    if task == "regression" and lost.any():
        row = int(lost.argmax())
        shown = cells[row] if isinstance(cells, list) else float(cells[row])
        raise DataError(
            f"the target {name!r} is {shown!r} in row {row + 1}, which is not a number; --task classification?"
        )
    if task is not None:
        return task
    if lost.any():
        if lost.mean() < 0.1 and len(np.unique(parsed.values[~lost])) > 20:
            row = int(lost.argmax())
            shown = cells[row] if isinstance(cells, list) else float(cells[row])
            raise DataError(
                f"the target {name!r} holds numbers, but row {row + 1} holds {shown!r} ({int(lost.sum())} such rows); "
                "correct them, or leave their cells blank"
            )
        return "classification"
    distinct = len(np.unique(parsed.values))
    few = distinct <= min(20, max(2, int(len(cells) ** 0.5)))
    if few and bool((parsed.values == np.round(parsed.values)).all()):
        notes.append(
            f"The target {name!r} has {distinct} whole values, taken as classes; --task regression for numbers."
        )
        return "classification"
    return "regression"


def _class_names(table: Table, name: str, notes: list[str]) -> tuple[str, ...]:
    cells = table.columns[name]
    parsed = parse(cells, table.decimal_comma)
    if not (parsed.bad | parsed.missing).any():
        values, counts = np.unique(parsed.values, return_counts=True)
        names = [label(value) for value in values.tolist()]
    else:
        if isinstance(cells, list) and look_like_dates(cells):
            raise DataError(f"the target {name!r} holds dates; turn them into numbers or classes first")
        found, counts = np.unique(np.array(levels(cells)), return_counts=True)
        names = [str(level) for level in found.tolist()]
    if len(names) < 2:
        raise DataError(f"the target {name!r} has one class only, {names[0]!r}; there is nothing to tell apart")
    if len(names) > MAX_CLASSES or len(names) > max(5, table.rows / 2):
        raise DataError(
            f"the target {name!r} has {len(names)} different values in {table.rows} rows, too many for classes "
            f"(such as {names[-1]!r}); is it the right column, or one for --task regression?"
        )
    if counts.max() > 20 * counts.min():
        rare, often = names[int(counts.argmin())], names[int(counts.argmax())]
        notes.append(
            f"The classes are uneven: {int(counts.max())} rows of {often!r}, {int(counts.min())} of {rare!r}; "
            "read accuracy with care."
        )
    return tuple(names)


def _target_statistics(y: NDArray[Any], name: str) -> tuple[float, float]:
    if np.ptp(y) == 0:
        raise DataError(f"the target {name!r} is {float(y.flat[0]):g} in every row; there is nothing to learn")
    mean, scale = _mean_and_std(y)
    if not 1e-30 < scale < 1e30:
        raise DataError(f"the target {name!r} has a standard deviation of {scale:.1e}; give it in other units")
    return mean, scale


def _mean_and_std(x: NDArray[Any]) -> tuple[float, float]:
    """Mean and standard deviation, whose squares neither overflow nor vanish."""
    unit = float(np.abs(x).max()) or 1.0
    return float((x / unit).mean()) * unit, float((x / unit).std()) * unit


def _load_npz(
    path: Path, target: str | None, split: int, seed: int, test_fraction: float, task: Task | None
) -> DataSet:
    """Arrays x and y, with x_test, y_test, x_ood where they are there; or columns by name."""
    found = reading.arrays(path)
    key = reading.input_key(found)
    if key is None:
        table = reading.read_file(path)
        return table_dataset(table, target, split=split, seed=seed, test_fraction=test_fraction, task=task)
    goal = target if target is not None else next((k for k in reading.TARGET_KEYS if k in found), None)
    if goal is None or goal not in found:
        listed = ", ".join(map(repr, found))
        raise DataError(f"{path.name} has no array {goal or 'y'!r} of targets beside {key!r}; its arrays are {listed}")
    x, y = found[key], found[goal]
    y = y.reshape(-1) if y.size == len(y) else y
    if y.ndim != 1 or len(y) != len(x):
        raise DataError(
            f"{key!r} has {len(x)} rows, but {goal!r} has shape {y.shape}; one target for each row is needed"
        )
    x_test, y_test, x_ood = (found.get(k) for k in (f"{key}_test", f"{goal}_test", f"{key}_ood"))
    given = x_test is not None and y_test is not None
    if x.ndim > 2:
        return _image_arrays(path.name, x, y, (x_test, y_test) if given else None, x_ood, split, seed, test_fraction)
    test = reading.npz_rows(path.name, x_test, {goal: y_test}) if given else None
    ood = None if x_ood is None else reading.npz_rows(path.name, x_ood, {})
    table = reading.npz_rows(path.name, x, {goal: y})
    return table_dataset(
        table, goal, split=split, seed=seed, test_fraction=test_fraction, task=task, test=test, ood=ood
    )


def _image_arrays(
    name: str, x: Any, y: Any, test: tuple[Any, Any] | None, ood: Any, split: int, seed: int, fraction: float
) -> DataSet:
    import torch

    notes: list[str] = []
    labels = Table(name, {"y": as_cells(y)})
    classes = _class_names(labels, "y", notes)
    images = channels_first(x, name)
    blank = TablePreprocessor((), "y", "classification", classes)
    codes, _ = blank.targets(labels.columns["y"], False)
    rows = np.arange(len(x))
    held = rows[:0]
    if test is None:
        rows, held = split_rows(codes, fraction, seed, split, notes)
    white = 255.0 if x.dtype == np.uint8 or float(x.max()) > 16 else float(x.max()) or 1.0
    preprocessor = ImagePreprocessor.fit(images[rows], classes, white)
    notes.append(f"Pixels were divided by {white:g} and standardised by the training images.")

    def encode(part: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(preprocessor.encode(part))

    pair = (encode(images[held]), torch.from_numpy(codes[held]))
    if test is not None:
        test_codes, _ = blank.targets(as_cells(test[1].reshape(-1)), False)
        pair = (encode(channels_first(test[0], name)), torch.from_numpy(test_codes))
    return DataSet(
        name,
        "classification",
        (encode(images[rows]), torch.from_numpy(codes[rows])),
        pair,
        preprocessor,
        None if ood is None else encode(channels_first(ood, name)),
        None if ood is None else "x_ood",
        classes,
        (),
        notes,
    )


def channels_first(x: NDArray[Any], name: str, channels: Sequence[int] = (1, 3, 4)) -> NDArray[Any]:
    """Images (N, H, W), (N, H, W, C) or (N, C, H, W) as (N, C, H, W)."""
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[1] in channels:
        return x
    if x.ndim == 4 and x.shape[3] in channels:
        return x.transpose(0, 3, 1, 2)
    raise DataError(f"the images of {name} have shape {x.shape}; (N, H, W), (N, H, W, C) or (N, C, H, W) is needed")
