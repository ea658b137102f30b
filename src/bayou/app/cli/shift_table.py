"""The output of ``bayou watch`` in a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from bayou.diagnostics import ShiftReport, ShiftTest

COLORS = {"as expected": "green", "cannot tell": "yellow"}  # red for all other verdicts
TITLES = {
    "columns": "Columns",
    "joint": "All inputs together",
    "relation": "Targets, against held-out rows of similar inputs",
    "calibration": "Targets, against the predictions alone",
}


def print_shift(report: ShiftReport, commands: Sequence[str], as_json: bool) -> None:
    """Print the verdict on new rows, its reasons, all tests and the next commands.

    Args:
        report: of the new rows.
        commands: to continue with.
        as_json: whether to print JSON.
    """
    if as_json:
        typer.echo(json.dumps(report.to_json() | {"next": list(commands)}, indent=1))
        return
    color = COLORS.get(report.verdict, "red")
    typer.secho(f"{report.verdict} ({report.rows:,} rows)", fg=color, bold=True)
    for sentence in (*report.findings, *report.reasons):
        typer.echo(sentence)
    if report.tests:
        _print_tests(report.tests)
    for command in commands:
        typer.echo(f"next: {command}")


def _print_tests(tests: Sequence[ShiftTest]) -> None:
    """Print tests by family: as a table of rich in a terminal, where it is installed, else text."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ModuleNotFoundError:
            pass
        else:
            table = Table("tested", "test", "p", "difference", title="tests (p adjusted by Holm)")
            for test in tests:
                style = "bold red" if test.is_significant else ""
                cells = (test.subject, test.name, f"{test.adjusted_p:.2g}", test.text)
                table.add_row(*cells, style=style)
            Console().print(table)
            return
    widths = [
        max(len(test.subject) for test in tests),
        max(len(test.name) for test in tests),
    ]
    titles = dict(TITLES)
    if not any(test.family == "calibration" for test in tests):  # too few held-out rows
        titles["relation"] = titles["calibration"]
    for family, title in titles.items():
        members = [test for test in tests if test.family == family]
        if members:
            typer.echo(f"\n{title} (p adjusted for {len(members)} tests)")
        for test in sorted(members, key=lambda test: test.adjusted_p):
            mark = "*" if test.is_significant else " "
            typer.echo(
                f"{mark} {test.subject:<{widths[0]}}  {test.name:<{widths[1]}}  "
                f"p = {test.adjusted_p:<7.2g}  {test.text}"
            )
    typer.echo()
