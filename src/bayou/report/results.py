"""What a page is made of: results of runs, and the pieces that they are shown as."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bayou.report.charts import legend

Result = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A picture with its words; ``svg`` and ``extra`` are markup, the rest is text."""

    svg: str
    title: str = ""
    caption: str = ""
    extra: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table, with a standard error where there is one."""

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
    """One part of the page."""

    title: str
    text: str = ""
    table: Table | None = None
    figures: list[Figure] = field(default_factory=list)
    legend: str = ""
    notes: list[str] = field(default_factory=list)


class Results:
    """Results as ``bayou.report.judge`` makes them, one for each method and seed, and what is known about their data.

    Numbers that are not finite are null in a file; here they are nan.
    """

    def __init__(self, results: Sequence[Result], facts: dict[str, Any], failures: dict[str, str]) -> None:
        if not results:
            raise ValueError("there are no results to report on; train something first")
        self.all: list[Result] = [_numbers(result) for result in results]
        self.facts, self.failures = facts, failures
        self.labels = list(dict.fromkeys(result["label"] for result in self.all))
        self.colours = {label: number for number, label in enumerate(self.labels)}
        self.classes = self.all[0]["task"] == "classification"
        self.seeds = len({result["seed"] for result in self.all})
        self.baselines: dict[str, Result] = _numbers(facts.get("baselines", {}))

    def of(self, label: str) -> list[Result]:
        """All seeds of a method."""
        return [result for result in self.all if result["label"] == label]

    def first(self, key: str) -> list[tuple[str, Any]]:
        """What the first seed of every method has to say, of those that say something."""
        found = []
        for label in self.labels:
            value = next((result[key] for result in self.of(label) if result.get(key)), None)
            if value is not None:
                found.append((label, value))
        return found

    def mean(self, label: str, name: str) -> tuple[float, float] | None:
        """Mean of a metric over the seeds of a method, and its standard error over rows and seeds; None without it."""
        chosen = [result for result in self.of(label) if name in result["metrics"]]
        if not chosen:
            return None
        values = [result["metrics"][name] for result in chosen]
        mean = sum(values) / len(values)
        variance = (sum(result.get("errors", {}).get(name, 0.0) for result in chosen) / len(chosen)) ** 2  # of rows
        if len(values) > 1:
            variance += sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
        return mean, math.sqrt(variance)

    def flags(self, label: str) -> list[Result]:
        """What the checks of a method found that is not ok, the worst over its seeds."""
        found: dict[str, Result] = {}
        for flag in (flag for result in self.of(label) for flag in result.get("checks", []) if flag["status"] != "ok"):
            if found.get(flag["name"], {}).get("status") != "failed":
                found[flag["name"]] = flag
        return sorted(found.values(), key=lambda flag: flag["status"])  # "failed" < "warning"

    def status(self, label: str) -> str:
        """The worst finding about a method: ok, warning or failed."""
        flags = self.flags(label)
        return str(flags[0]["status"]) if flags else "ok"

    def legend(self, labels: Sequence[str] | None = None) -> str:
        """The methods with their colours."""
        return legend([(label, self.colours[label]) for label in labels or self.labels])


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return math.nan if value is None else value
