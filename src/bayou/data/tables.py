"""A table as a data set: its target, its inputs and its test rows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from bayou.data.catalogue import DataError
from bayou.data.column_types import IDENTIFIER, MAX_LEVELS, Index, fit_columns
from bayou.data.columns import Column
from bayou.data.dataset import DataSet, Pair
from bayou.data.exchangeable import describe_copies, describe_order
from bayou.data.options import Options, check_target, drop_columns, split_rule
from bayou.data.preprocess import TablePreprocessor
from bayou.data.reading import RawTable
from bayou.data.splits import (
    MIN_BLOCKS,
    EncodedRows,
    SplitRule,
    explain_split,
    rule_of_groups,
    rule_of_row_order,
    rule_of_times,
    split_rows,
)
from bayou.data.targets import drop_rows_without_target, fit_target, with_target_units
from bayou.data.times import times_of

MAX_OTHER_RULES = 3  # splits by other columns that a random one is compared with
MIN_ROWS = 5


@final
@dataclass(frozen=True)
class EncodedTable:
    """The rows of a table as network inputs and targets, and which of them are test rows.

    Args:
        table: the columns, without those that were left out.
        preprocessor: what encoded them.
        x: inputs (N, features).
        y: targets, (N,) codes or (N, D) numbers.
        train_rows: indices of the training rows.
        test_rows: indices of the test rows.
    """

    table: RawTable
    preprocessor: TablePreprocessor
    x: NDArray[np.float32]
    y: NDArray[Any]
    train_rows: Index
    test_rows: Index

    def pair(self, rows: Index) -> Pair:
        """Return inputs and targets of some rows.

        Args:
            rows: their indices.
        """
        return self.x[rows], self.y[rows]


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
        test: the test rows; by default a part of the table: random with classes in proportion,
            whole groups, or the latest rows.
        ood: out-of-distribution rows.
    """
    target_name = check_target(table, options.target)
    notes = list(table.notes)
    table = drop_rows_without_target(table, target_name, notes)
    all_columns = table.columns
    rule = split_rule(table, target_name, options, notes)
    table = drop_columns(table, target_name, options, notes)
    if table.rows < MIN_ROWS:
        raise DataError(
            f"{table.name} has {table.rows} rows with a target; at least {MIN_ROWS} are needed to "
            "split them"
        )
    target_encoder = fit_target(table, target_name, options, notes)
    train_rows = np.arange(table.rows)
    test_rows = np.arange(0)
    if test is None:
        target = table.columns[target_name]
        train_rows, test_rows = _split(target_encoder, target, options, rule, notes)
    preprocessor = fit_inputs(target_encoder, table, train_rows, options, notes, tuple(all_columns))
    x = preprocessor.encode(table, notes)
    y, _ = preprocessor.table_targets(table)
    encoded = EncodedTable(table, preprocessor, x, y, train_rows, test_rows)
    if test is None:
        test_pair = encoded.pair(test_rows)
        split_notes = _describe_split(encoded, all_columns, rule, options, notes)
    else:
        prepared = preprocessor.rows(test, need_target=True)
        test_pair = (prepared.x, prepared.y)
        notes += prepared.notes
        split_notes = []
    ood_inputs = None if ood is None else preprocessor.rows(ood).x
    data = DataSet.of(
        table.name, preprocessor, encoded.pair(train_rows), test_pair, ood_inputs, "x_ood", notes
    )
    groups, times = rule.of_rows(train_rows)
    return replace(data, groups=groups, times=times, split_notes=split_notes)


def fit_inputs(
    target_encoder: TablePreprocessor,
    table: RawTable,
    train_rows: Index,
    options: Options,
    notes: list[str],
    all_columns: tuple[str, ...],
) -> TablePreprocessor:
    """Return the preprocessor of a table: that of its target, with the encoders of its inputs.

    Args:
        target_encoder: see ``fit_target``.
        table: all rows.
        train_rows: indices of the training rows, whose statistics are taken.
        options: whether the target is standardized, and the column of observed rows.
        notes: to which those about columns are added.
        all_columns: the names of all columns, also of those that were left out.
    """
    name = target_encoder.target
    preprocessor = target_encoder
    if not preprocessor.class_names:
        preprocessor = with_target_units(preprocessor, table.columns[name], train_rows, options)
    columns = fit_columns(_without(table, options.observed), name, train_rows, notes)
    used = {name, options.observed, *(column.name for column in columns)}
    dropped = tuple(column for column in all_columns if column not in used)
    return replace(preprocessor, columns=columns, dropped=dropped)


def _describe_split(
    encoded: EncodedTable,
    all_columns: Mapping[str, Column],
    rule: SplitRule,
    options: Options,
    notes: list[str],
) -> list[str]:
    """Return sentences about the split, and what changes with another.

    Args:
        encoded: the rows, with the inputs and targets of the network.
        all_columns: by name, also those that are no inputs.
        rule: of the split.
        options: the columns that are left out, the fraction of test rows and the seed.
        notes: to which those about copies and the order of the rows are added.
    """
    preprocessor = encoded.preprocessor
    target = preprocessor.target
    notes += describe_copies(encoded.x, encoded.y, encoded.train_rows, encoded.test_rows)
    order_note = ""
    if not rule.blocks:
        used = set(encoded.table.columns) - set(preprocessor.dropped)
        numbers = _numbers(encoded.table, target, used)
        order_note = describe_order(numbers, times=_time_columns(encoded.table, target))
    if order_note:
        notes.append(order_note)
    alternatives = _alternative_rules(
        all_columns, target, rule, options, is_ordered=bool(order_note)
    )
    y = encoded.y if options.observed is None else encoded.y[:, :1]  # times without their flags
    rows = EncodedRows(encoded.x, y, bool(preprocessor.class_names), preprocessor.y_scale)
    return explain_split(
        rule, alternatives, rows, options.test_fraction, options.seed, encoded.test_rows
    )


def _split(
    preprocessor: TablePreprocessor,
    target: Column,
    options: Options,
    rule: SplitRule,
    notes: list[str],
) -> tuple[Index, Index]:
    """Return training and test rows, with classes in proportion where the rule is random."""
    labels = np.zeros(len(target))
    if preprocessor.class_names:
        labels = preprocessor.targets(target)[0]
    return split_rows(
        labels,
        split=options.split,
        seed=options.seed,
        test_fraction=options.test_fraction,
        rule=rule,
        notes=notes,
    )


def _without(table: RawTable, name: str | None) -> RawTable:
    """Return a table without a column; the table itself for none."""
    if name is None:
        return table
    columns = {key: column for key, column in table.columns.items() if key != name}
    return RawTable(table.name, columns, table.notes)


def _alternative_rules(
    columns: Mapping[str, Column],
    target: str,
    rule: SplitRule,
    options: Options,
    *,
    is_ordered: bool,
) -> list[SplitRule]:
    """Return the splits to compare with a random one: by dates, identifiers, the order of rows.

    Args:
        columns: all columns of the table, by name.
        target: the name of the target.
        rule: the split of the data set, with which a random one is compared.
        options: columns that are left out are not used.
        is_ordered: whether the rows look ordered.
    """
    if rule.blocks is not None:
        return [SplitRule()]
    rules: list[SplitRule] = []
    for name, column in columns.items():
        if name == target or name in options.drop or len(rules) == MAX_OTHER_RULES:
            continue
        with suppress(DataError):
            if column.holds_dates:
                rules.append(rule_of_times(column, name))
            elif _looks_like_groups(name, column):
                rules.append(rule_of_groups(column, name, []))
    if is_ordered and not any(other.kind == "time" for other in rules):
        rules.append(rule_of_row_order(len(columns[target])))
    return rules


def _looks_like_groups(name: str, column: Column) -> bool:
    """Return whether a column has identifiers that several rows share, such as of patients."""
    is_named_so = bool(IDENTIFIER.fullmatch(name))
    if not is_named_so and not column.bad.any():
        return False
    fewest = MIN_BLOCKS if is_named_so else MAX_LEVELS + 1
    return fewest <= len(set(column.levels)) <= len(column) / 2


def _time_columns(table: RawTable, target: str) -> list[str]:
    """Return the names of the columns that can split the rows by time: all numbers, or dates."""
    return [
        name
        for name, column in table.columns.items()
        if name != target and (column.holds_dates or not column.bad.any())
    ]


def _numbers(table: RawTable, target: str, used: set[str]) -> dict[str, NDArray[np.float64]]:
    """Return the target, the inputs and the dates as numbers, categories in alphabetical order."""
    names = [target, *(name for name in table.columns if name != target)]
    numbers: dict[str, NDArray[np.float64]] = {}
    for name in names:
        column = table.columns[name]
        if column.holds_dates:
            with suppress(DataError):
                numbers[name] = times_of(column, name)
        elif name in used and column.bad.any():
            codes = np.unique(np.array(column.levels), return_inverse=True)[1]
            numbers[name] = codes.reshape(-1).astype(np.float64)
        elif name in used:
            numbers[name] = column.values
    return numbers
