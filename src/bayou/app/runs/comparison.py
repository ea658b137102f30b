"""The report of a run, or one page that compares several runs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.json_files import check_output
from bayou.core.files import StrPath, write_text

if TYPE_CHECKING:
    from bayou.app.report.page import RunReport


def write_report(
    folders: Sequence[StrPath],
    out: StrPath | None = None,
    *,
    force: bool = False,
) -> tuple[Path, list[str]]:
    """Write the report of a run again, or one page that compares several runs.

    Methods of several runs have the names of their folders, and all are compared with the first.

    Args:
        folders: one run folder, or several with the same test rows.
        out: the file to write; by default the report of the run, or comparison.html.
        force: overwrite ``out``.

    Returns:
        The file, and the conclusion in sentences.

    Raises:
        RunError: ``out`` exists, or the runs have no split with the same test rows.
    """
    reports = {str(folder): Run.open(folder).report() for folder in folders}
    name, page = next(iter(reports.items()))
    is_comparison = len(reports) > 1
    path = Path(out or ("comparison.html" if is_comparison else f"{name}/report.html"))
    if is_comparison or out is not None:
        check_output(path, force)
    if is_comparison:
        page = _compare(reports)
    write_text(path, page.html(), through_links=False)
    return path, page.verdict


def _compare(reports: dict[str, RunReport]) -> RunReport:
    """Return one report on the results of several runs, on the splits that all of them have."""
    from bayou.app.report.page import RunReport

    splits = _shared_splits(reports)
    results = []
    for folder, report in reports.items():
        first_seed = report.results.all[0]["seed"]
        for result in report.results.all:
            if result["split"] not in splits:
                continue
            label = folder
            if len(report.results.labels) > 1:
                label = f"{folder}: {result['label']}"
            # The first seeds of two runs are a pair.
            results.append(result | {"label": label, "seed": result["seed"] - first_seed})
    commands = [report.config["command"] for report in reports.values()]
    commands.append(f"bayou report {shlex.join(reports)}")
    first_report = next(iter(reports.values()))
    config = first_report.config | {
        "runs": len(reports),
        "notes": [],
        "failures": {},
        "command": "\n".join(commands),
        "reference": results[0]["label"],
    }
    return RunReport(results, config)


def _shared_splits(reports: dict[str, RunReport]) -> set[int]:
    """Return the splits that all runs have.

    A RunError is raised unless these have the same test rows in the same order.
    """
    targets = {name: _targets_by_split(report.results.facts) for name, report in reports.items()}
    names = list(targets)
    for name in names[1:]:
        for split in targets[names[0]].keys() & targets[name].keys():
            _check_same_rows(names[0], targets[names[0]][split], name, targets[name][split])
    shared = set.intersection(*(set(splits) for splits in targets.values()))
    if not shared:
        have = ", ".join(f"{name} has {sorted(splits)}" for name, splits in targets.items())
        raise RunError(
            f"these runs have no split in common: {have}; train them with the same --split"
        )
    return shared


def _targets_by_split(facts: dict[str, Any]) -> dict[int, list[float]]:
    """Return y of the test rows by the number of their split."""
    splits = {facts["split"]: facts}
    splits |= {int(number): split for number, split in facts["splits"].items()}
    return {number: split.get("targets", []) for number, split in splits.items()}


def _check_same_rows(
    first: str,
    first_targets: list[float],
    name: str,
    targets: list[float],
) -> None:
    """Raise a RunError unless two runs were tested on the same rows, up to rounding."""
    is_same = len(targets) == len(first_targets) > 0 and all(
        math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-9)
        for a, b in zip(targets, first_targets, strict=True)
    )
    if not is_same:
        raise RunError(
            f"{name} was not tested on the rows of {first}: got {_describe_targets(targets)}; "
            f"expected {_describe_targets(first_targets)}; differences are paired over rows: give "
            "runs with the same data, --target, --task and --split"
        )


def _describe_targets(y: list[float]) -> str:
    """Return the number of rows and the first targets as text."""
    values = ", ".join(f"{value:g}" for value in y[:4])
    return f"{len(y):,} rows, y = {values}, ..."
