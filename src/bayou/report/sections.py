"""The sections of a report, each a function of the results; None where there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from bayou.report.charts import (
    BOTTOM,
    HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Axes,
    Mark,
    Series,
    line_chart,
    padded,
    stacked,
)
from bayou.report.results import Figure, Results, Section
from bayou.report.tables import checks, mixing, numbers, pairs, stages

MIN_BIN_ROWS = 5  # predictions in a bin of the reliability diagram


def sections(results: Results) -> list[Section]:
    """The sections of the page, without those that have no data."""
    makers: tuple[Callable[[Results], Section | None], ...] = (
        numbers, pairs, checks, mixing, rotation, bands, uncertainty, calibration, training, stages,
    )  # fmt: skip
    return [section for make in makers if (section := make(results)) is not None]


def rotation(results: Results) -> Section | None:
    """Class probabilities of a rotated digit (the figure of Louizos & Welling 2017)."""
    shown = results.first("rotation")
    if not shown:
        return None
    first = shown[0][1]
    figures = []
    for label, found in shown:
        names = list(map(str, found["classes"]))
        axes = stacked(
            found["degrees"],
            found["probabilities"],
            names,
            "degrees of rotation",
            "probability",
            45,
        )
        figures.append(Figure(axes, label, strip=first.get("images", ())))
    return Section(
        "rotation",
        figures=figures,
        about={"digit": first["digit"], "rows": results.facts.get("test")},
    )


def uncertainty(results: Results) -> Section | None:
    """The uncertainty of all methods, cumulative: for test data, and out of distribution."""
    shown = results.first("entropy")
    if not shown:
        return None
    name = shown[0][1].get("label", "entropy, nats")
    figures = []
    for key, title in (
        ("in", "Test data, cumulative"),
        ("ood", "Out-of-distribution data, cumulative"),
    ):
        curves = [
            Series(label, found["edges"], [0.0, *accumulate(found[key])], results.colors[label])
            for label, found in shown
            if found.get(key)
        ]
        if axes := line_chart(curves, name, "share below", y_range=(0.0, 1.0)):
            figures.append(Figure(axes, title))
    about = {
        "what": name.split(",")[0],
        "ood": results.facts.get("ood") if len(figures) > 1 else None,
    }
    return Section("uncertainty", figures=figures, legend=results.legend(), about=about)


def calibration(results: Results) -> Section | None:
    """The reliability diagram, and the error as the least certain predictions are rejected."""
    curves, left_out = [], 0
    for label, found in results.first("reliability"):
        kept = [k for k, count in enumerate(found["count"]) if count >= MIN_BIN_ROWS]
        x, y = ([found[key][k] for k in kept] for key in ("confidence", "accuracy"))
        curves.append(Series(label, x, y, results.colors[label], points=len(kept)))
        left_out = max(left_out, round(sum(found["count"]) - sum(found["count"][k] for k in kept)))
    if not curves:
        return None
    names = (
        ("confidence", "accuracy")
        if results.classes
        else ("probability of the interval", "share of y inside")
    )
    axes = Axes(*names)
    axes.marks.append(
        Mark("rule", f"M{axes.left},{HEIGHT - BOTTOM}L{WIDTH - RIGHT},{TOP}")
    )  # y = x
    for curve in curves:
        axes.line(curve)
    figures = [Figure(axes, "Reliability")]
    factor, left = (
        (100.0, "error of the others, %") if results.classes else (1.0, "RMSE of the others")
    )
    rejected = [
        Series(
            label,
            [100 * r for r in f["rejected"]],
            [factor * e for e in f["error"]],
            results.colors[label],
        )
        for label, f in results.first("error_rejection")
    ]
    if below := line_chart(rejected, "rejected predictions, least certain first, %", left):
        figures.append(Figure(below, "Error and rejection"))
    about = {"left_out": left_out, "least": MIN_BIN_ROWS}
    return Section("calibration", figures=figures, legend=results.legend(), about=about)


def bands(results: Results) -> Section | None:
    """Mean, epistemic and total bands over one input, or for test rows where there are more."""
    name = next((name for name in ("curve", "observed") if results.first(name)), None)
    if name is None:
        return None
    shown = results.first(name)
    points = shown[0][1]["points"]
    about = {"drawn": len(points["y"]), "rows": points.get("of", len(points["y"]))}
    return Section(name, figures=_band_figures(results, shown), about=about)


def _band_figures(results: Results, shown: list[tuple[str, Any]]) -> list[Figure]:
    """One picture per method, all with the scale of the data: a band may extend beyond the
    picture.
    """
    dots = [y for _, found in shown for y in found["points"]["y"]]
    low, high = min(dots), max(dots)
    margin = 0.4 * ((high - low) or 1.0)
    known = [
        v for _, f in shown for v in (*f["low"], *f["high"]) if low - margin < v < high + margin
    ] + dots
    y_range = padded(min(known), max(known))
    figures = []
    for label, found in shown:
        color, x = results.colors[label], found["x"]
        axes = Axes(found.get("x_label", "x"), found.get("y_label", "y"), (min(x), max(x)), y_range)
        axes.band(x, found["low"], found["high"], color, "faint")
        axes.band(x, found["epistemic_low"], found["epistemic_high"], color)
        axes.line(Series(label, x, found["mean"], color, points=0))
        axes.dots(found["points"]["x"], found["points"]["y"])
        figures.append(Figure(axes, label))
    return figures


def training(results: Results) -> Section | None:
    """Training curves: log-likelihood, KL and their difference."""
    size = results.facts.get("train") or 1
    figures = []
    for key, title, scale in (
        ("log_likelihood", "Log-likelihood, nats per example", size),
        ("kl", "KL to the prior, nats", 1),
        ("elbo", "ELBO, nats per example", size),
    ):
        curves = [
            Series(name, *_history(history, key, scale), results.colors[name])
            for name, history in results.first("history")
            if sum(key in row for row in history) > 1
        ]
        # without the first steps, which would flatten the rest
        later = [v for curve in curves for v in curve.y[len(curve.y) // 10 :] if math.isfinite(v)]
        axes = line_chart(curves, "step", y_range=padded(min(later), max(later)) if later else None)
        if axes is not None:
            figures.append(
                Figure(axes, title, legend=results.legend([curve.name for curve in curves]))
            )
    return Section("training", figures=figures) if figures else None


def _history(
    history: list[dict[str, float]], key: str, scale: float
) -> tuple[list[float], list[float]]:
    """Steps and values; a gap where the steps restart, as for the next member of an ensemble."""
    x, y = list[float](), list[float]()
    for row in history:
        if key in row:
            if x and row["step"] < x[-1]:
                x.append(x[-1])
                y.append(math.nan)
            x.append(row["step"])
            y.append(row[key] / scale)
    return x, y
