"""The picture of a report: ``make demo``, then ``python -m docs.report_picture demo-output``.

No browser is needed: the table, the turning digit and the entropies of a run are drawn from what
its page is made of.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

from bayou.app.report.results import Cell, Results
from bayou.app.report.tables import numbers
from bayou.app.runs.folder import Run
from experiments import figures, plots

SHOWN = (
    "method",
    "accuracy, %",
    "NLL",
    "NLL minus MAP",
    "ECE",
    "AUROC, H",
)  # columns that a picture has room for
MARKS = {"failed": "#b3261e", "warning": "#946200", "baseline": figures.SOFT}  # as in the page
BEST = "#1d7a4f"


def draw(folder: Path, path: Path) -> Path:
    """Numbers above, a digit that turns in the middle, entropies of digits and of what is none
    below.
    """
    run = Run.open(folder)
    results = Results(run.results(), run.facts(), run.failures())
    with matplotlib.rc_context(plots.STYLE | {"font.size": 9.5, "axes.titlesize": 11}):
        figure = plots.canvas(11, 9.4)
        facts = (
            f"{results.facts['train']:,} training examples, {results.facts['test']:,} test examples"
        )
        figure.suptitle(
            f"{run.config.data}: {facts}", fontsize=12.5, color=plots.INK, x=0.01, ha="left"
        )
        top, middle, bottom = figure.subfigures(3, 1, height_ratios=(1.0, 1.15, 1.0), hspace=0.03)
        _table(top.subplots(), results)
        _turning(middle, results)
        _entropies(bottom, results)
    return plots.write(figure, path)


def _table(axis: Any, results: Results) -> None:
    axis.set_axis_off()
    table = numbers(results).table
    assert table is not None
    columns = [k for k, head in enumerate(table.heads) if head.name in SHOWN]
    ends = (0.0, 0.34, 0.48, 0.62, 0.72, 0.99)[: len(columns)]
    for line, row in enumerate([None, *table.rows]):
        height = 1 - (line + 0.5) / (len(table.rows) + 1)
        for place, column in zip(ends, columns, strict=True):
            head = table.heads[column]
            cell = Cell(f"{head.name}\n{head.hint}".strip()) if row is None else row[column]
            text = cell.text + (f" ± {cell.se}" if cell.se else "")
            color = (
                figures.SOFT
                if row is None
                else BEST
                if cell.best
                else MARKS.get(cell.css, plots.INK)
            )
            weight = "bold" if cell.best else "normal"
            side = "left" if place == 0 else "right"
            axis.text(
                place, height, text, ha=side, va="center", color=color, weight=weight, fontsize=9
            )
        axis.axhline(1 - (line + 1) / (len(table.rows) + 1), color="#e4e5e1", linewidth=0.8)
    axis.set(xlim=(0, 1), ylim=(0, 1))


def _turning(part: Any, results: Results) -> None:
    shown = results.first("rotation")
    axes = part.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axis, (label, found) in zip(axes, shown, strict=True):
        figures._turning(axis, found | {"image": found["images"][0]}, label)
    axes[0].set_ylabel("probability of a class")


def _entropies(part: Any, results: Results) -> None:
    shown = results.first("entropy")
    axes = part.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axis, (_, found) in zip(axes, shown, strict=True):
        edges = found["edges"]
        for key, name, color in (("in", "test data", 2), ("ood", str(results.facts["ood"]), 1)):
            axis.stairs(
                found[key], edges, fill=True, alpha=0.55, color=figures.COLORS[color], label=name
            )
        axis.set(xlim=(edges[0], edges[-1]), xlabel="entropy, nats")
        figures.plain(axis)
    axes[0].set_ylabel("share")
    axes[0].legend(frameon=False)


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.report_picture", description="Draw what a report shows."
    )
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/pictures/report.png"), help="(%(default)s)"
    )
    options = parser.parse_args(arguments)
    print(f"wrote {draw(options.run, options.out)}")


if __name__ == "__main__":
    main()
