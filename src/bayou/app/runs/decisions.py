"""Columns of a prediction file that prepare a decision: a threshold, and costs of actions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from bayou.app.runs.json_files import RunError
from bayou.core.files import StrPath
from bayou.core.progress import spell
from bayou.data import reading
from bayou.data.columns import number, quote
from bayou.data.preprocess import Preprocessor
from bayou.data.reading import quote_names
from bayou.likelihoods.predictive import Predictive


@final
@dataclass(frozen=True, eq=False)
class CostTable:
    """The costs of actions for every class.

    Args:
        actions: their names.
        costs: one row for each action, one column for each class in the order of the run: (A, K).
    """

    actions: tuple[str, ...]
    costs: Tensor

    @staticmethod
    def read(path: StrPath, preprocessor: Preprocessor) -> CostTable:
        """Read a table whose first column has the names of actions, the others those of classes.

        Args:
            path: a CSV file.
            preprocessor: has the names of the classes.

        Raises:
            RunError: a class has no column, a column is no class, or a cell is no number.
        """
        if preprocessor.task != "classification":
            raise RunError(
                f"{spell('costs', '--costs')} is a table of costs for each class, and the target "
                "is a number; use predictive.decide in Python"
            )
        classes = preprocessor.class_names
        table = reading.read(Path(path), classes)
        first, *names = table.columns
        missing = [name for name in classes if name not in names]
        unknown = [name for name in names if name not in classes]
        if missing or unknown:
            problem = f"no column {quote_names(missing)}"
            if not missing:
                problem = f"a column {quote_names(unknown)}, which is no class"
            raise RunError(
                f"{path} has {problem}; its first column must name the actions, and the others the "
                f"classes {quote_names(classes)}"
            )
        columns = [table.columns[name] for name in classes]
        for name, column in zip(classes, columns, strict=True):
            is_invalid = column.bad | column.missing
            if is_invalid.any():
                raise RunError(
                    f"{path}, column {quote(name)}: a cost must be a number, got "
                    f"{column.describe_first(is_invalid)}"
                )
        actions = tuple(table.columns[first].text(row) for row in range(table.rows))
        if len({*actions, ""}) != len(actions) + 1:
            raise RunError(f"{path}: every action needs its own name, got {quote_names(actions)}")
        costs = np.stack([column.values for column in columns], axis=1)
        return CostTable(actions, torch.from_numpy(costs))

    def columns(self, predictive: Predictive) -> dict[str, list[str] | Tensor]:
        """Return the action with the lowest expected cost, this cost, and what it is worth to know
        the class, of every row.

        Args:
            predictive: of the rows.
        """
        decision = predictive.decide(-self.costs, names=self.actions)
        return {
            "decision": decision.labels,
            "expected_cost": -decision.expected_utility,
            "value_of_information": decision.perfect_information,
        }


@final
@dataclass(frozen=True)
class Threshold:
    """A value that y may exceed.

    Args:
        text: as it was given.
        value: in the units of the predictions; of ordered classes the number of a class.
    """

    text: str
    value: float

    @staticmethod
    def parse(text: str, preprocessor: Preprocessor) -> Threshold:
        """Return a threshold in the units of the predictions of a run.

        Args:
            text: a number in the units of the target, or the name of an ordered class.
            preprocessor: has the units and the names of the classes.

        Raises:
            RunError: it is neither.
        """
        option = spell("exceeds", "--exceeds")
        if preprocessor.task == "classification":
            if text not in preprocessor.class_names:
                raise RunError(
                    f"{option} must be one of the classes {quote_names(preprocessor.class_names)}, "
                    f"got {quote(text)}"
                )
            return Threshold(text, preprocessor.class_names.index(text))
        value = number(text)
        if value is None or not np.isfinite(value):
            raise RunError(f"{option} must be a number in the units of y, got {quote(text)}")
        return Threshold(text, (value - preprocessor.y_mean) / preprocessor.y_scale)

    def columns(self, predictive: Predictive) -> dict[str, list[str] | Tensor]:
        """Return the probability that y exceeds the threshold, of every row.

        Args:
            predictive: of the rows, in standardized units.
        """
        return {f"p(>{self.text})": predictive.exceeds(self.value).flatten()}
