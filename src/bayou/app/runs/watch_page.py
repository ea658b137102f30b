"""The page of ``bayou watch --out``: verdict, tests and distributions, in the style of reports."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from bayou import __version__
from bayou.app.report.charts import SHAPES, Series, line_chart
from bayou.app.report.results import Figure
from bayou.app.runs.watching import WatchedRows, WatchedRun
from bayou.core.extras import extra
from bayou.core.files import write_text
from bayou.diagnostics import InputColumn, ShiftReport
from bayou.diagnostics.input_columns import columns_of
from bayou.diagnostics.target_scores import target_scores

MAX_FIGURES = 6  # columns that are drawn
CURVE_POINTS = 101
CLASSES = {"as expected": "ok", "cannot tell": "warning"}  # of the style sheet


def write_page(
    path: Path,
    watched: WatchedRun,
    rows: WatchedRows,
    report: ShiftReport,
    commands: Sequence[str],
) -> None:
    """Write the page.

    Args:
        path: the HTML file.
        watched: the run.
        rows: new rows.
        report: of these rows.
        commands: to continue with.
    """
    with extra("lab", "A page"):
        import jinja2
        from markupsafe import Markup as markup

    folder = resources.files("bayou.app.report")
    loader = jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8"))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.get_template("watch.html.j2").render(
        report=report,
        css=CLASSES.get(report.verdict, "failed"),
        tests=sorted(report.tests, key=lambda test: (not test.is_significant, test.adjusted_p)),
        figures=[*_column_figures(watched, rows, report), *_target_figures(watched, rows)],
        commands=commands,
        has_held_out=any(test.family == "calibration" for test in report.tests),
        name=watched.run.folder.name,
        shapes=SHAPES,
        style=markup((folder / "style.css").read_text(encoding="utf-8")),
        version=__version__,
        made=f"{datetime.now():%Y-%m-%d %H:%M}",
    )
    write_text(path, text, through_links=False)


def _column_figures(watched: WatchedRun, rows: WatchedRows, report: ShiftReport) -> list[Figure]:
    """Return the cumulative distributions of columns of numbers, the most different ones first."""
    new: Sequence[InputColumn] = rows.columns or ()
    if rows.columns is None and rows.x is not None:
        new = columns_of(rows.x)
    by_name = {column.name: column for column in new}
    p = {
        test.subject: test.p
        for test in report.tests
        if test.family == "columns" and test.name == "Kolmogorov-Smirnov"
    }
    figures: list[Figure] = []
    for column in sorted(watched.reference.columns, key=lambda item: p.get(item.name, 2.0)):
        if column.name not in p or len(figures) == MAX_FIGURES:
            continue
        training = column.present
        present = by_name[column.name].present
        figures.append(
            _cumulative(column.name, {"training rows": training, "new rows": present}, column.name)
        )
    return figures


def _target_figures(watched: WatchedRun, rows: WatchedRows) -> list[Figure]:
    """Return the distribution of P(Y ≤ y), of numbers with targets."""
    reference = watched.reference
    samples: dict[str, Tensor] = {}
    for name, x, y in (
        ("held-out rows", reference.held_x, reference.held_y),
        ("new rows", rows.x, rows.y),
    ):
        if x is None or y is None:
            continue
        predictive = watched.posterior.predict(x, watched.samples, seed=0)
        pit = target_scores(predictive, y, has_log_score=False).pit
        if pit is not None:
            samples[name] = pit[:, 0]
    if "new rows" not in samples:
        return []
    return [_cumulative("P(Y ≤ y), uniform if calibrated", samples, "P(Y ≤ y)", is_unit=True)]


def _cumulative(
    title: str, samples: dict[str, Tensor], label: str, *, is_unit: bool = False
) -> Figure:
    """Return a chart of empirical distribution functions."""
    pooled = torch.cat(list(samples.values())).double()
    low = 0.0 if is_unit else float(pooled.quantile(0.005))
    high = 1.0 if is_unit else float(pooled.quantile(0.995))
    grid = torch.linspace(low, high, CURVE_POINTS, dtype=torch.float64)
    curves = []
    for color, (name, values) in enumerate(samples.items()):
        share = torch.searchsorted(values.double().sort().values, grid, right=True) / len(values)
        curves.append(Series(name, grid.tolist(), share.tolist(), color))
    chart = line_chart(curves, label, "fraction of rows at most", y_range=(0.0, 1.0))
    if chart is None:
        raise ValueError(f"there are no finite numbers to draw for {title}")
    return Figure(chart, title, tuple((series.name, series.color) for series in curves))
