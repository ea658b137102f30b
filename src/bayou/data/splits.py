"""The split of the rows of a table into training and test rows, and what another would say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from numpy.typing import NDArray

from bayou.core import rng
from bayou.data.catalogue import DataError
from bayou.data.times import times_of
from bayou.training.seeds import part_seed

if TYPE_CHECKING:
    from torch import Tensor

    from bayou.data.columns import Column
    from bayou.training.blocks import Blocks

Index = NDArray[np.int64]

MIN_BLOCKS: Final = 3  # groups or times: for testing, for the selection of settings and to learn
MAX_REFERENCE_ROWS: Final = 2000  # training rows of a reference model, and test rows
MAX_REFERENCE_COLUMNS: Final = 500
MAX_REFERENCE_CLASSES: Final = 50
NEIGHBORS: Final = 5
REFERENCE_SPLITS: Final = 5  # random ones, whose mean is compared
MAX_PLAIN: Final = 1e9  # errors that are written without an exponent
SIMILAR: Final = 0.05  # relative difference of errors that is called about the same


@final
@dataclass(frozen=True, eq=False)
class EncodedRows:
    """All rows of a table as a reference model takes them.

    Args:
        x: inputs (N, D), standardized.
        y: classes (N,), or standardized numbers (N, 1).
        is_classification: whether y are classes.
        unit: of y.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    is_classification: bool = False
    unit: float = 1.0

    def outputs(self) -> NDArray[np.float64]:
        """Return what a reference model predicts: numbers, or 1 for the class of a row, (N, K)."""
        if self.is_classification:
            return np.eye(int(self.y.max()) + 1)[self.y]
        return self.y.reshape(len(self.y), -1).astype(np.float64)

    def error(self, predicted: NDArray[Any], outputs: NDArray[Any]) -> float:
        """Return the percentage of wrong classes, or the root mean squared error.

        Args:
            predicted: outputs of the model, (B, K).
            outputs: the observed ones.
        """
        if self.is_classification:
            return 100 * float((predicted.argmax(1) != outputs.argmax(1)).mean())
        return self.unit * float(np.sqrt(np.square(predicted - outputs).mean()))

    def format(self, error: float) -> str:
        """Return an error as text.

        Args:
            error: of ``error``.
        """
        if self.is_classification:
            return f"{error:.1f} %"
        return f"{error:,.0f}" if 1e4 <= error < MAX_PLAIN else f"{error:.4g}"


@final
@dataclass(frozen=True)
class SplitRule:
    """How rows are split.

    Args:
        kind: "random", "group" or "time".
        column: the column of groups or of times; "" for random rows.
        blocks: the rows that stay together; None for random rows.
    """

    kind: str = "random"
    column: str = ""
    blocks: Blocks | None = None

    def describe(self) -> str:
        """Return the rule in words that follow "split", with its option."""
        if self.kind == "group":
            return f"by group (--group {self.column})"
        if self.kind == "time" and self.column:
            return f"by time (--split-by-time {self.column})"
        return "by the order of rows" if self.kind == "time" else "at random"

    def of_rows(self, index: Index) -> tuple[Tensor | None, Tensor | None]:
        """Return the groups and the times of some rows, for ``bayou.fit``; None without any.

        Args:
            index: the numbers of the rows.
        """
        import torch

        if self.blocks is None:
            return None, None
        number = self.blocks.number[torch.from_numpy(index)]
        return (None, number) if self.kind == "time" else (number, None)

    def split(self, count: int, fraction: float, seed: int) -> tuple[Index, Index]:
        """Return the training and the test rows, in sorted order.

        Args:
            count: the number of rows.
            fraction: of the test rows.
            seed: of the choice of rows or groups.
        """
        import torch

        if self.blocks is None:
            order = rng.permutation(count, seed).numpy()
            test_rows = np.sort(order[: max(1, round(fraction * count))])
            return np.setdiff1d(np.arange(count), test_rows), test_rows
        rows = torch.arange(count)
        is_test = self.blocks.hold_out(rows, fraction, seed, MIN_BLOCKS - 1).numpy()
        return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def rule_of_groups(column: Column, name: str, notes: list[str]) -> SplitRule:
    """Return the rule by which all rows of a group are on one side.

    Args:
        column: the group of each row; a row without one is a group of its own.
        name: of the column.
        notes: to which those about groups are added.
    """
    from bayou.training.blocks import Blocks

    groups = np.array(column.levels, dtype=object)
    is_missing = groups == ""
    if is_missing.any():
        groups[is_missing] = [f"\0{row}" for row in np.flatnonzero(is_missing)]
        notes.append(
            f"{int(is_missing.sum())} rows have no value in {name!r}: each is a group of its own."
        )
    _check_count(len(set(groups.tolist())), "groups", "--group", name)
    notes.append(f"Column {name!r} tells the groups of rows; it is not an input.")
    return SplitRule("group", name, Blocks.of(len(groups), groups=groups))


def rule_of_times(column: Column, name: str) -> SplitRule:
    """Return the rule by which the latest rows are the test rows, ties together.

    Args:
        column: numbers or dates.
        name: of the column.
    """
    from bayou.training.blocks import Blocks

    times = times_of(column, name)
    _check_count(len(np.unique(times)), "times", "--split-by-time", name)
    return SplitRule("time", name, Blocks.of(len(times), times=times))


def rule_of_row_order(count: int) -> SplitRule:
    """Return the rule by which the last rows of a file are the test rows.

    Args:
        count: the number of rows.
    """
    from bayou.training.blocks import Blocks

    return SplitRule("time", "", Blocks.of(count, times=np.arange(count)))


def _check_count(count: int, what: str, option: str, name: str) -> None:
    """Raise a DataError for too few groups or times."""
    if count < MIN_BLOCKS:
        raise DataError(
            f"column {name!r} has {count} different {what}, but {option} needs at least "
            f"{MIN_BLOCKS}: for testing, for the selection of settings, and to learn from; choose "
            "another column"
        )


def split_rows(
    y: NDArray[Any],
    *,
    split: int = 0,
    seed: int = 0,
    test_fraction: float = 0.2,
    rule: SplitRule | None = None,
    notes: list[str] | None = None,
) -> tuple[Index, Index]:
    """Split rows into training and test rows, in sorted order.

    Random rows are stratified by y. The split is a function of the seed and its number.

    Args:
        y: classes (N,), or zeros.
        split: the number of the split.
        seed: of all splits.
        test_fraction: of the rows.
        rule: random rows by default.
        notes: to which those about classes are added.

    Returns:
        The indices of the training rows, and of the test rows.
    """
    if not 0 < test_fraction < 1:
        raise DataError(f"test_fraction must lie strictly between 0 and 1, got {test_fraction}")
    if split < 0:
        raise DataError(f"split counts from 0, got {split}")
    split_seed = part_seed(seed, "split", split)
    if rule is not None and rule.blocks is not None:
        if rule.kind == "time" and split:
            raise DataError(f"there is one split by time, 0; got {split}")
        train_rows, test_rows = rule.split(len(y), test_fraction, split_seed)
        _note_unseen_classes(y, train_rows, notes)
        return train_rows, test_rows
    return _split_in_proportion(y, split_seed, test_fraction, notes)


def _split_in_proportion(
    y: NDArray[Any], seed: int, fraction: float, notes: list[str] | None
) -> tuple[Index, Index]:
    """Split rows at random, every class in proportion."""
    order = rng.permutation(len(y), seed).numpy()
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


def _note_unseen_classes(y: NDArray[Any], train_rows: Index, notes: list[str] | None) -> None:
    """Add a note about classes that no training row has."""
    unseen_count = len(np.setdiff1d(y, y[train_rows]))
    if unseen_count and notes is not None:
        subject = "A class has" if unseen_count == 1 else f"{unseen_count} classes have"
        notes.append(f"{subject} test rows, but no training rows, with this split.")


def explain_split(
    used: SplitRule,
    others: Sequence[SplitRule],
    rows: EncodedRows,
    fraction: float,
    seed: int,
    test_rows: Index,
) -> list[str]:
    """Return in words how rows were split, and what changes with another split.

    Args:
        used: the split of the data set.
        others: the splits to compare it with.
        rows: all rows.
        fraction: of the test rows.
        seed: of the splits.
        test_rows: the indices of the test rows.
    """
    sentences = [_describe_used(used, rows, test_rows)]
    model, errors = compare_splits(rows, [used, *others], fraction=fraction, seed=seed)
    if model:
        here = errors.pop(used.describe())
        sentences += [
            _describe_error(name, error, here, rows, model) for name, error in errors.items()
        ]
    return sentences


def _describe_used(used: SplitRule, rows: EncodedRows, test_rows: Index) -> str:
    """Return in words how rows were split."""
    count = f"{len(test_rows):,} of {len(rows.y):,} rows"
    if used.blocks is None:
        proportion = ", every class in proportion" if rows.is_classification else ""
        return f"Test rows: {count}, at random{proportion} (--split)."
    inside = "; rows that select settings inside the fit are held out in the same way"
    if used.kind == "time":
        return f"Test rows: {count}, the latest by {used.column!r}{inside}."
    groups = used.blocks.number.numpy()
    test_count = len(np.unique(groups[test_rows]))
    total = len(np.unique(groups))
    return (
        f"Test rows: {count}, all those of {test_count:,} of {total:,} groups of "
        f"{used.column!r}{inside}."
    )


def _describe_error(name: str, error: float, here: float, rows: EncodedRows, model: str) -> str:
    """Return in words how the error of the reference model changes with another split."""
    comparison = "higher" if error > here else "lower"
    if abs(error - here) <= SIMILAR * max(error, here):
        comparison = "about the same"
    measure = "error" if rows.is_classification else "RMSE"
    return (
        f"Split {name}, the {measure} of a reference model ({model}) is {rows.format(error)} "
        f"instead of {rows.format(here)}: {comparison}."
    )


def compare_splits(
    rows: EncodedRows, rules: Sequence[SplitRule], *, fraction: float = 0.2, seed: int = 0
) -> tuple[str, dict[str, float]]:
    """Return the error of a quick reference model under different splits of the same rows.

    The model is the better one, under random splits, of a linear model and of the mean of the five
    nearest neighbors: the first follows a trend over time, the second finds copies and rows of the
    same group. Errors are means over five random splits, or of the one by time.

    Args:
        rows: all rows.
        rules: the splits, of which one is random.
        fraction: of the test rows.
        seed: of the splits.

    Returns:
        The name of the model and its error for each split in words; nothing for a single split, or
        for tables of more than 500 inputs or 50 classes.
    """
    x = rows.x.reshape(len(rows.x), -1).astype(np.float64)
    y = rows.outputs()
    if len(rules) < 2 or x.shape[1] > MAX_REFERENCE_COLUMNS or y.shape[1] > MAX_REFERENCE_CLASSES:
        return "", {}
    models = {"linear": _predict_linear, "mean of 5 neighbors": _predict_by_neighbors}
    errors: dict[str, dict[str, float]] = {name: {} for name in models}
    for rule in rules:
        scores: dict[str, list[float]] = {name: [] for name in models}
        for number in range(1 if rule.kind == "time" else REFERENCE_SPLITS):
            split = rule.split(len(y), fraction, part_seed(seed, "reference", number))
            train, test = (_thin(index) for index in split)
            for name, predict in models.items():
                predicted = predict(x[train], y[train], x[test])
                scores[name].append(rows.error(predicted, y[test]))
        for name in models:
            errors[name][rule.describe()] = float(np.mean(scores[name]))
    random = next(rule for rule in rules if rule.blocks is None).describe()
    best = min(models, key=lambda name: errors[name][random])
    return best, errors[best]


def _thin(index: Index) -> Index:
    """Return at most ``MAX_REFERENCE_ROWS`` rows, evenly spaced."""
    if len(index) <= MAX_REFERENCE_ROWS:
        return index
    return index[np.linspace(0, len(index) - 1, MAX_REFERENCE_ROWS).round().astype(int)]


def _predict_linear(x: NDArray[Any], y: NDArray[Any], new_x: NDArray[Any]) -> NDArray[Any]:
    """Predict by a ridge regression, with a prior of unit variance for standardized inputs."""
    mean = x.mean(0)
    level = y.mean(0)
    centered = x - mean
    gram = centered.T @ centered + np.eye(x.shape[1])
    weights = np.linalg.solve(gram, centered.T @ (y - level))
    return np.asarray(level + (new_x - mean) @ weights)


def _predict_by_neighbors(x: NDArray[Any], y: NDArray[Any], new_x: NDArray[Any]) -> NDArray[Any]:
    """Predict by the mean y of the nearest training rows."""
    count = min(NEIGHBORS, len(x))
    squares = np.square(x).sum(1)[None] - 2 * new_x @ x.T  # + |new_x|², the same for all
    nearest = np.argpartition(squares, count - 1, axis=1)[:, :count]
    return np.asarray(y[nearest].mean(1))
