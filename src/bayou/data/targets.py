"""The target of a table: its task, its classes, its units."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayou.data.catalogue import DataError, Task
from bayou.data.column_types import MAX_TEXT_SHARE, MIN_DISTINCT_NUMBERS, Index
from bayou.data.columns import EXACT, Column, label, quote
from bayou.data.encoders import mean_and_std
from bayou.data.options import Options, find_column
from bayou.data.preprocess import TablePreprocessor
from bayou.data.reading import RawTable
from bayou.training.sentinels import find_sentinels

MAX_CLASSES = 200
MAX_CLASSES_ASKED_FOR = 5000  # with --task classification


def fit_target(table: RawTable, name: str, options: Options, notes: list[str]) -> TablePreprocessor:
    """Return the preprocessor of the target: its task, classes and events, without inputs.

    Args:
        table: with the target, and the column of observed rows.
        name: of the target.
        options: the task, the order of the classes, and the columns of identifiers and events.
        notes: to which those about the target are added.
    """
    target = table.columns[name]
    task = _decide_task(target, name, options.task, notes)
    classes: tuple[str, ...] = ()
    if task == "classification":
        most = _most_classes(options.task)
        classes = class_names_of(target, name, notes, options.order, most)
    elif options.order:
        raise DataError(
            f"--order is for classes, but the target {name!r} has numbers; leave it out, or give "
            "--task classification"
        )
    event = ""
    if options.observed is not None:
        event = _find_event(table, options.observed, name, task, notes)
    return TablePreprocessor(
        (), name, task, classes, id=options.id, observed=options.observed, event=event
    )


def with_target_units(
    preprocessor: TablePreprocessor, target: Column, train_rows: Index, options: Options
) -> TablePreprocessor:
    """Return the preprocessor of a regression, which standardizes the target where that is asked.

    Args:
        preprocessor: of the target.
        target: its column.
        train_rows: the rows whose mean and standard deviation are taken.
        options: whether the target is standardized.
    """
    _refuse_sentinels(target, preprocessor.target)
    y_mean, y_scale = _target_statistics(target.values[train_rows], preprocessor.target)
    if options.scale_target and options.observed is None:
        return replace(preprocessor, y_mean=y_mean, y_scale=y_scale)
    return preprocessor


def drop_rows_without_target(table: RawTable, name: str, notes: list[str]) -> RawTable:
    """Return the rows that have a target.

    Args:
        table: all rows.
        name: of the target.
        notes: to which one about rows without a target is added.
    """
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


def _most_classes(task: Task | None) -> int:
    """Return how many classes a table may have: more if the user asked for classes."""
    return MAX_CLASSES if task is None else MAX_CLASSES_ASKED_FOR


def _find_event(table: RawTable, name: str, target: str, task: Task, notes: list[str]) -> str:
    """Return the value of the column of observed rows that means that the event happened."""
    column = table.columns[find_column(table, name)]
    if name == target or task != "regression":
        raise DataError(
            f"--observed {name} is for a target of times, numbers, and another column than it"
        )
    levels = set(column.levels)
    if len(levels) != 2 or "" in levels:
        raise DataError(
            f"the column {name!r} must have two values, such as 1 (observed) and 0 (censored), in "
            f"every row, got {', '.join(sorted(map(quote, levels))[:5])}"
        )
    if np.isnan(column.values).any():
        event = max(levels, key=str.lower)
    else:
        event = column.levels[int(column.values.argmax())]
    (other,) = levels - {event}
    count = sum(level == event for level in column.levels)
    notes.append(
        f"Rows with {name} = {event} were observed ({count} of {table.rows}); those with {other} "
        "were censored."
    )
    return event


def class_names_of(
    target: Column,
    name: str,
    notes: list[str],
    order: tuple[str, ...] = (),
    most: int = MAX_CLASSES,
) -> tuple[str, ...]:
    """Return the classes of a target, sorted or as ordered, or raise a DataError for too many.

    Args:
        target: its column.
        name: of the target, for messages.
        notes: to which one about imbalanced classes is added.
        order: the classes from low to high; none for sorted ones.
        most: the number of classes allowed.
    """
    names, counts = _count_classes(target, name)
    if len(names) < 2:
        raise DataError(
            f"the target {name!r} has only one class, {quote(names[0])}; a classifier needs two or "
            "more"
        )
    if len(names) > most or len(names) > max(5, len(target) / 2):
        ways_out = "--task regression?"
        if MAX_CLASSES < len(names) <= min(MAX_CLASSES_ASKED_FOR, len(target) / 2):
            ways_out = f"--task regression, or --task classification for {len(names)} classes?"
        raise DataError(
            f"the target {name!r} has {len(names)} different values in {len(target)} rows, too "
            f"many for classes (such as {quote(names[-1])}); is it the right column, or one for "
            f"{ways_out}"
        )
    if counts.max() > 20 * counts.min():
        rare = quote(names[int(counts.argmin())])
        frequent = quote(names[int(counts.argmax())])
        notes.append(
            f"The classes are imbalanced: {int(counts.max())} rows of {frequent}, "
            f"{int(counts.min())} of {rare}; accuracy can be misleading."
        )
    if not order:
        return tuple(names)
    if sorted(order) != sorted(names):
        raise DataError(
            f"--order must have every class of {name!r} once, {', '.join(map(quote, names))}; got "
            f"{', '.join(map(quote, order))}"
        )
    return order


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
