"""The contents of a report: results of runs, and the elements that show them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch

from bayou.app.report.charts import Axes
from bayou.diagnostics.checks import SURE
from bayou.metrics import standard_error

Result = dict[str, Any]
Legend = Sequence[tuple[str, int]]  # names with the numbers of their colors


@dataclass(frozen=True)
class Figure:
    """A chart; the template has a caption by its title.

    Args:
        chart: the axes with their marks.
        title: above the chart.
        legend: names and colors.
        strip: pictures below the chart, as data URLs.
    """

    chart: Axes
    title: str = ""
    legend: Legend = ()
    strip: Sequence[str] = ()


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: the value.
        se: its standard error, if any.
        best: whether it is the best of its column.
        css: the CSS class: warning, failed or baseline.
    """

    text: str
    se: str = ""
    best: bool = False
    css: str = ""


@dataclass(frozen=True)
class Head:
    """A column of a table.

    Args:
        name: of the column.
        hint: in small letters below it.
    """

    name: str
    hint: str = ""


@dataclass(frozen=True)
class ReportTable:
    """A table of the page.

    Args:
        heads: the columns.
        rows: one cell for each column.
    """

    heads: list[Head]
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Section:
    """A section of the page.

    Args:
        name: by which the template has the title and the text.
        table: its table, if any.
        figures: its charts.
        legend: of all charts.
        notes: sentences below.
        about: numbers in the text.
    """

    name: str
    table: ReportTable | None = None
    figures: list[Figure] = field(default_factory=list)
    legend: Legend = ()
    notes: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)


class Average(NamedTuple):
    """A mean over seeds and splits: see ``average``.

    Args:
        value: the mean.
        error: its standard error.
    """

    value: float
    error: float

    @property
    def is_significant(self) -> bool:
        """Whether a difference is larger than chance explains."""
        return abs(self.value) > SURE * self.error

    @property
    def comparison(self) -> str:
        """For the loss of a method minus that of another: better, worse, or neither."""
        if not self.is_significant:
            return "not significantly different"
        return "better" if self.value < 0 else "worse"

    def __str__(self) -> str:
        """Return the mean with its sign, and the error."""
        return f"{self.value:+.3f} ± {self.error:.3f}"


def average(scores: Iterable[tuple[int, float, float]]) -> Average:
    """Return the mean of scores, with equal weights for splits and for seeds of a split.

    Its error is the larger of two. That of one split is √(rows² + seeds²), its root mean square
    over splits: these share rows, so that it does not decrease with their number. The second is
    that of the mean over splits.

    Args:
        scores: (split, value, standard error over rows).
    """
    by_split: dict[int, list[tuple[float, float]]] = {}
    for split, value, error in scores:
        by_split.setdefault(split, []).append((value, error))
    means = []
    variances = []
    for seeds in by_split.values():
        values = [value for value, _ in seeds]
        variance = fmean(error for _, error in seeds) ** 2
        if len(seeds) > 1:
            variance += standard_error(values) ** 2
        means.append(fmean(values))
        variances.append(variance)
    error_over_splits = standard_error(means) if len(means) > 1 else 0.0
    return Average(fmean(means), max(math.sqrt(fmean(variances)), error_over_splits))


def mean_difference(
    rows: Sequence[float],
    reference_rows: Sequence[float],
) -> tuple[float, float]:
    """Return the mean of the differences of two lists of row scores, and its standard error.

    Args:
        rows: the scores of a method.
        reference_rows: those of another on the same rows.
    """
    difference = torch.tensor(rows, dtype=torch.float64)
    difference = difference - torch.tensor(reference_rows, dtype=torch.float64)
    return float(difference.mean()), standard_error(difference)


class Results:
    """Results of methods, one for each method, seed and split, and facts about the data.

    Numbers that are not finite are null in a file and nan here. ``baselines`` are their names, used
    as labels.

    Args:
        results: as returned by ``bayou.app.report.judge``.
        facts: sizes and shapes of the data, and the scores of the baselines.
        failures: error messages of failed jobs by name.
        reference: the label that the rest is compared with; the first one if there is no such
            label.

    Raises:
        ValueError: there are no results.
    """

    def __init__(
        self,
        results: Sequence[Result],
        facts: dict[str, Any],
        failures: dict[str, str],
        reference: str = "MAP",
    ) -> None:
        if not results:
            raise ValueError("there are no results to report; train a method first")
        first_split = facts.get("split", 0)
        self.all: list[Result] = [
            {"split": first_split} | _null_to_nan(result) for result in results
        ]
        self.facts = facts
        self.failures = failures
        self.labels: list[str] = list(dict.fromkeys(result["label"] for result in self.all))
        self.reference: str = reference if reference in self.labels else self.labels[0]
        self.colors: dict[str, int] = {label: number for number, label in enumerate(self.labels)}
        self.classes: bool = self.all[0]["task"] == "classification"
        self.seeds: int = len({result["seed"] for result in self.all})
        self.splits: list[int] = sorted({result["split"] for result in self.all})
        facts_by_split = {first_split: facts}
        for split, split_facts in facts.get("splits", {}).items():
            facts_by_split[int(split)] = split_facts
        self._baseline_results: list[Result] = []
        for split in self.splits:
            evaluations = facts_by_split.get(split, {}).get("baselines", {})
            for name, evaluation in evaluations.items():
                names = {"label": name, "seed": 0, "split": split}
                self._baseline_results.append(_null_to_nan(evaluation) | names)
        self.baselines: list[str] = list(
            dict.fromkeys(result["label"] for result in self._baseline_results)
        )

    def of(self, label: str) -> list[Result]:
        """Return all seeds and splits of a method or a baseline.

        Args:
            label: its name.
        """
        results = (*self.all, *self._baseline_results)
        return [result for result in results if result["label"] == label]

    def first(self, key: str) -> list[tuple[str, Any]]:
        """Return the value of the first seed of each method that has one.

        Args:
            key: of a result.
        """
        values = []
        for label in self.labels:
            value = next((result[key] for result in self.of(label) if result.get(key)), None)
            if value is not None:
                values.append((label, value))
        return values

    def mean(self, label: str, name: str) -> Average | None:
        """Return the mean of a score of a method; None if it has none.

        Args:
            label: the method or baseline.
            name: of the score.
        """
        scores = []
        for result in self.of(label):
            if name in result["metrics"]:
                error = result.get("errors", {}).get(name, 0.0)
                scores.append((result["split"], result["metrics"][name], error))
        return average(scores) if scores else None

    def difference(
        self,
        label: str,
        reference: str | None = None,
        key: str = "rows",
    ) -> Average | None:
        """Return the loss of a method minus that of another, paired over rows.

        It is a mean over the splits and seeds that both have; None if there are none.

        Args:
            label: the method or baseline.
            reference: by default that of the results.
            key: "rows" for the NLL, "losses" for wrong classes or |y − mean|.
        """
        reference = reference or self.reference
        if label == reference:
            return None
        has_seeds = label not in self.baselines
        rows = self._by_split_and_seed(label, key)
        scores = []
        for (split, seed), reference_rows in self._by_split_and_seed(reference, key).items():
            own_rows = rows.get((split, seed if has_seeds else 0))
            if own_rows is not None and len(own_rows) == len(reference_rows):
                scores.append((split, *mean_difference(own_rows, reference_rows)))
        return average(scores) if scores else None

    def _by_split_and_seed(self, label: str, key: str) -> dict[tuple[int, int], list[float]]:
        """Return the row scores of a method by split and seed."""
        return {
            (result["split"], result["seed"]): result[key]
            for result in self.of(label)
            if result.get(key)
        }

    def flags(self, label: str) -> list[Result]:
        """Return the checks of a method that are not ok, the worst over its seeds and splits.

        Args:
            label: the method.
        """
        flags: dict[str, Result] = {}
        for result in self.of(label):
            for check in result.get("checks", []):
                known = flags.get(check["name"], {})
                if check["status"] != "ok" and known.get("status") != "failed":
                    flags[check["name"]] = check
        return sorted(flags.values(), key=lambda flag: flag["status"])  # "failed" < "warning"

    def status(self, label: str) -> str:
        """Return the worst status of the checks of a method: ok, warning or failed.

        Args:
            label: the method.
        """
        flags = self.flags(label)
        return str(flags[0]["status"]) if flags else "ok"

    def legend(self, labels: Sequence[str] | None = None) -> Legend:
        """Return methods with their colors.

        Args:
            labels: which methods; all by default.
        """
        return [(label, self.colors[label]) for label in labels or self.labels]


def _null_to_nan(value: Any) -> Any:
    """Return plain values with nan for null, at any depth."""
    if isinstance(value, dict):
        return {key: _null_to_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_null_to_nan(item) for item in value]
    return math.nan if value is None else value
