"""What a user asks of a table: its target, its task, its columns and its split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from bayou.core.specs import nearest
from bayou.data.catalogue import DataError, Entry, Task
from bayou.data.reading import RawTable, quote_names
from bayou.data.splits import SplitRule, rule_of_groups, rule_of_times


@final
@dataclass(frozen=True)
class Options:
    """Options of a table as a data set; see ``bayou.data.load``.

    Args:
        target: the target column.
        task: "classification" or "regression"; None to infer it from the target.
        drop: columns that are not used.
        id: the column that identifies rows.
        group: the column whose groups of rows are not divided; not an input.
        split_by_time: the column by which the latest rows are the test rows.
        split: the number of the random split.
        seed: of all splits.
        test_fraction: of the rows.
        observed: the column that says which rows were observed, not censored.
        order: the classes from low to high; none for sorted ones.
        scale_target: whether the target of a regression is standardized.
    """

    target: str | None = None
    task: Task | None = None
    drop: tuple[str, ...] = ()
    id: str | None = None
    split: int = 0
    seed: int = 0
    test_fraction: float = 0.2
    group: str | None = None
    split_by_time: str | None = None
    observed: str | None = None
    order: tuple[str, ...] = ()
    scale_target: bool = True

    def check_published(self, entry: Entry) -> None:
        """Raise a DataError for options that a data set of the catalogue does not take.

        Args:
            entry: of the catalogue, used as published.
        """
        options_of_files = {
            "--target": self.target,
            "--drop": self.drop,
            "--id": self.id,
            "--group": self.group,
            "--split-by-time": self.split_by_time,
            "--observed": self.observed,
            "--order": self.order,
        }
        for option, value in options_of_files.items():
            if value not in (None, ()):
                raise DataError(f"{entry.name!r} is used as published; {option} is for a file")
        if self.task not in (None, entry.task):
            raise DataError(f"{entry.name!r} is a data set for {entry.task}, not {self.task}")


def class_order(order: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the classes of an ordered target from low to high; none for sorted ones.

    Args:
        order: their names, or a text with commas.
    """
    names = order.split(",") if isinstance(order, str) else (order or ())
    return tuple(name.strip() for name in names)


def find_column(table: RawTable, name: str) -> str:
    """Return the name of a column, or raise a DataError if there is none.

    Args:
        table: the columns.
        name: of one of them.
    """
    if name not in table.columns:
        suggestion = nearest(name, list(table.columns))
        parts = [part.strip() for part in name.split(",")]
        if len(parts) > 1 and all(part in table.columns for part in parts):
            suggestion = "; give the option once for each column"
        message = (
            f"{table.name} has no column {name!r}{suggestion}; its columns are "
            f"{quote_names(table.columns)}. {' '.join(table.notes)}"
        )
        raise DataError(message.rstrip())
    return name


def check_target(table: RawTable, target: str | None) -> str:
    """Return the name of the target column, or raise a DataError if it is not clear.

    Args:
        table: the columns.
        target: the name that was given, if any.
    """
    if target is None:
        raise DataError(
            f"{table.name} needs a target column; give --target, one of "
            f"{quote_names(table.columns)}"
        )
    repeated_name = f"{find_column(table, target)}.2"
    if repeated_name in table.columns and any(repr(target) in note for note in table.notes):
        raise DataError(
            f"{table.name} has several columns named {target!r}; rename all but the target"
        )
    return target


def drop_columns(table: RawTable, target: str, options: Options, notes: list[str]) -> RawTable:
    """Return the table without the columns to drop, the id column and that of groups.

    Args:
        table: the columns.
        target: its name, which cannot be dropped.
        options: the columns to leave out.
        notes: to which those about these columns are added.
    """
    names = [*options.drop, *filter(None, (options.id, options.group))]
    dropped = {find_column(table, name) for name in names}
    if target in dropped:
        raise DataError(f"{target!r} is the target; it cannot be dropped or be the id column")
    if options.drop:
        notes.append(f"Left out, as requested: {', '.join(map(repr, options.drop))}.")
    if options.id is not None:
        notes.append(f"Column {options.id!r} identifies the rows; it is not an input.")
    columns = {name: column for name, column in table.columns.items() if name not in dropped}
    return RawTable(table.name, columns, table.notes)


def split_rule(table: RawTable, target: str, options: Options, notes: list[str]) -> SplitRule:
    """Return the rule of the split that was asked for.

    Args:
        table: the columns.
        target: its name.
        options: the column of groups or of times.
        notes: to which those about groups are added.
    """
    for option, name in (("--group", options.group), ("--split-by-time", options.split_by_time)):
        if name is not None and find_column(table, name) == target:
            raise DataError(f"{target!r} is the target; {option} needs another column")
    if options.group is not None and options.split_by_time is not None:
        raise DataError(
            "got --group and --split-by-time; give --group to predict other groups, or "
            "--split-by-time to predict later rows of the same groups"
        )
    if options.group is not None:
        return rule_of_groups(table.columns[options.group], options.group, notes)
    if options.split_by_time is not None:
        return rule_of_times(table.columns[options.split_by_time], options.split_by_time)
    return SplitRule()
