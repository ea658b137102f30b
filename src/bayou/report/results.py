"""The contents of a report: results of runs, and the elements that show them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch

from bayou.diagnostics.checks import SURE
from bayou.metrics import standard_error
from bayou.report.charts import Axes

Result = dict[str, Any]
Legend = Sequence[tuple[str, int]]  # names with the numbers of their colors


@dataclass(frozen=True)
class Figure:
    """A chart with its title, legend and the pictures below it (data URLs); the template has a
    caption by the title.
    """

    chart: Axes
    title: str = ""
    legend: Legend = ()
    strip: Sequence[str] = ()


@dataclass(frozen=True)
class Cell:
    """A cell of a table, with an optional standard error."""

    text: str
    se: str = ""
    best: bool = False
    kind: str = ""  # warning, failed or baseline


@dataclass(frozen=True)
class Head:
    """A column of a table: its name, and a hint in small letters."""

    name: str
    hint: str = ""


@dataclass(frozen=True)
class Table:
    """Heads and rows."""

    heads: list[Head]
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Section:
    """One part of the page: the template has its title and text by ``name``, with the numbers in
    ``about``.
    """

    name: str
    table: Table | None = None
    figures: list[Figure] = field(default_factory=list)
    legend: Legend = ()
    notes: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)


class Average(NamedTuple):
    """A mean over seeds and splits, and its standard error: see ``average``."""

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
        return f"{self.value:+.3f} ± {self.error:.3f}"


def average(scores: Iterable[tuple[int, float, float]]) -> Average:
    """The mean of (split, value, standard error over rows), with equal weights for splits and for
    seeds of a split.

    ``error``: the larger of that of one split, √(rows² + seeds²), its root mean square over splits,
    which share rows, so that it does not decrease with their number; and that of the mean over
    splits.
    """
    by_split: dict[int, list[tuple[float, float]]] = {}
    for split, value, error in scores:
        by_split.setdefault(split, []).append((value, error))
    means = [fmean(value for value, _ in mine) for mine in by_split.values()]
    variances = [
        fmean(error for _, error in mine) ** 2
        + (standard_error([value for value, _ in mine]) ** 2 if len(mine) > 1 else 0.0)
        for mine in by_split.values()
    ]
    over_splits = standard_error(means) if len(means) > 1 else 0.0
    return Average(fmean(means), max(math.sqrt(fmean(variances)), over_splits))


def paired(rows: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Mean of the differences of two lists of row scores, and its standard error."""
    difference = torch.tensor(rows, dtype=torch.float64) - torch.tensor(others, dtype=torch.float64)
    return float(difference.mean()), standard_error(difference)


class Results:
    """Results as returned by ``bayou.report.judge``, one for each method, seed and split, and facts
    about the data.

    Numbers that are not finite are null in a file and nan here. ``baselines``: their names, used as
    labels.
    ``reference``: the label that the others are compared with; the first label if there is no such
    one.
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
        first = facts.get("split", 0)
        self.all: list[Result] = [{"split": first} | _numbers(result) for result in results]
        self.facts, self.failures = facts, failures
        self.labels = list(dict.fromkeys(result["label"] for result in self.all))
        self.reference = reference if reference in self.labels else self.labels[0]
        self.colors = {label: number for number, label in enumerate(self.labels)}
        self.classes = self.all[0]["task"] == "classification"
        self.seeds = len({result["seed"] for result in self.all})
        self.splits = sorted({result["split"] for result in self.all})
        by_split = {first: facts} | {
            int(split): known for split, known in facts.get("splits", {}).items()
        }
        self._baselines = [
            _numbers(one) | {"label": name, "seed": 0, "split": split}
            for split in self.splits
            for name, one in by_split.get(split, {}).get("baselines", {}).items()
        ]
        self.baselines = list(dict.fromkeys(one["label"] for one in self._baselines))

    def of(self, label: str) -> list[Result]:
        """All seeds and splits of a method or a baseline."""
        return [result for result in (*self.all, *self._baselines) if result["label"] == label]

    def first(self, key: str) -> list[tuple[str, Any]]:
        """The value of the first seed of each method that has one."""
        found = []
        for label in self.labels:
            value = next((result[key] for result in self.of(label) if result.get(key)), None)
            if value is not None:
                found.append((label, value))
        return found

    def mean(self, label: str, name: str) -> Average | None:
        """The mean of a metric of a method; None if it has none."""
        chosen = [result for result in self.of(label) if name in result["metrics"]]
        errors = [result.get("errors", {}).get(name, 0.0) for result in chosen]
        scores = [
            (r["split"], r["metrics"][name], error) for r, error in zip(chosen, errors, strict=True)
        ]
        return average(scores) if scores else None

    def beside(self, label: str, other: str | None = None, key: str = "rows") -> Average | None:
        """The NLL of a method minus that of another, paired over rows, on the splits and seeds that
        both have.

        ``other``: by default the reference. ``key``: "rows" for the NLL, "losses" for wrong classes
        or |y − mean|.
        """
        other, baseline = other or self.reference, label in self.baselines
        theirs = {(r["split"], r["seed"]): r[key] for r in self.of(other) if r.get(key)}
        mine = {(r["split"], r["seed"]): r[key] for r in self.of(label) if r.get(key)}
        scores = []
        for (split, seed), rows in theirs.items():
            own = mine.get((split, 0 if baseline else seed))
            if label != other and own is not None and len(own) == len(rows):
                scores.append((split, *paired(own, rows)))
        return average(scores) if scores else None

    def flags(self, label: str) -> list[Result]:
        """The checks of a method that are not ok, the worst over its seeds and splits."""
        found: dict[str, Result] = {}
        for flag in (
            flag
            for result in self.of(label)
            for flag in result.get("checks", [])
            if flag["status"] != "ok"
        ):
            if found.get(flag["name"], {}).get("status") != "failed":
                found[flag["name"]] = flag
        return sorted(found.values(), key=lambda flag: flag["status"])  # "failed" < "warning"

    def status(self, label: str) -> str:
        """The worst status of the checks of a method: ok, warning or failed."""
        flags = self.flags(label)
        return str(flags[0]["status"]) if flags else "ok"

    def legend(self, labels: Sequence[str] | None = None) -> Legend:
        """The methods with their colors."""
        return [(label, self.colors[label]) for label in labels or self.labels]


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return math.nan if value is None else value
