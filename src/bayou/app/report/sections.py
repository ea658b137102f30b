"""The sections of a report, each a function of the results; None where there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

from bayou.app.report.charts import (
    BOTTOM,
    HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Axes,
    Mark,
    Series,
    add_margin,
    line_chart,
    stack_areas,
)
from bayou.app.report.decision_curves import describe_costs
from bayou.app.report.results import Figure, Results, Section
from bayou.app.report.tables import checks, mixing, numbers, pairs, stages

MIN_BIN_ROWS = 5  # predictions in a bin of the reliability diagram


def sections(results: Results) -> list[Section]:
    """Return the sections of the page, without those that have no data.

    Args:
        results: of one run or of several.
    """
    makers: tuple[Callable[[Results], Section | None], ...] = (
        numbers,
        pairs,
        checks,
        mixing,
        rotation,
        bands,
        uncertainty,
        calibration,
        decisions,
        training,
        stages,
    )
    candidates = [make(results) for make in makers]
    return [section for section in candidates if section is not None]


def rotation(results: Results) -> Section | None:
    """Show class probabilities of a rotated digit (the figure of Louizos & Welling 2017).

    Args:
        results: with the key rotation.
    """
    rotations = results.first("rotation")
    if not rotations:
        return None
    first = rotations[0][1]
    figures = []
    for label, curve in rotations:
        axes = stack_areas(
            curve["degrees"],
            curve["probabilities"],
            list(map(str, curve["classes"])),
            "degrees of rotation",
            "probability",
            45,
        )
        figures.append(Figure(axes, label, strip=first.get("images", ())))
    about = {"digit": first["digit"], "rows": results.facts.get("test")}
    return Section("rotation", figures=figures, about=about)


def uncertainty(results: Results) -> Section | None:
    """Show the uncertainty of all methods, cumulative: for test data, and out of distribution.

    Args:
        results: with the key entropy.
    """
    histograms = results.first("entropy")
    if not histograms:
        return None
    name = histograms[0][1].get("label", "entropy, nats")
    figures = []
    for key, title in (
        ("in", "Test data, cumulative"),
        ("ood", "Out-of-distribution data, cumulative"),
    ):
        curves = []
        for label, histogram in histograms:
            if histogram.get(key):
                shares = [0.0, *accumulate(histogram[key])]
                curves.append(Series(label, histogram["edges"], shares, results.colors[label]))
        axes = line_chart(curves, name, "share below", y_range=(0.0, 1.0))
        if axes is not None:
            figures.append(Figure(axes, title))
    about = {
        "quantity": name.split(",")[0],
        "ood": results.facts.get("ood") if len(figures) > 1 else None,
    }
    return Section("uncertainty", figures=figures, legend=results.legend(), about=about)


def calibration(results: Results) -> Section | None:
    """Show the reliability diagram, and the error as the least certain predictions are rejected.

    Args:
        results: with the keys reliability and error_rejection.
    """
    curves = []
    most_left_out = 0
    for label, diagram in results.first("reliability"):
        count = diagram["count"]
        bins = [k for k in range(len(count)) if count[k] >= MIN_BIN_ROWS]
        x = [diagram["confidence"][k] for k in bins]
        y = [diagram["accuracy"][k] for k in bins]
        curves.append(Series(label, x, y, results.colors[label], points=len(bins)))
        most_left_out = max(most_left_out, round(sum(count) - sum(count[k] for k in bins)))
    if not curves:
        return None
    axes = Axes("probability of the interval", "share of y inside")
    if results.classes:
        axes = Axes("confidence", "accuracy")
    diagonal = f"M{axes.left},{HEIGHT - BOTTOM}L{WIDTH - RIGHT},{TOP}"
    axes.marks.append(Mark("rule", diagonal))
    for curve in curves:
        axes.line(curve)
    figures = [Figure(axes, "Reliability")]
    rejection = _rejection_chart(results)
    if rejection is not None:
        figures.append(Figure(rejection, "Error and rejection"))
    about: dict[str, Any] = {"left_out": most_left_out, "least": MIN_BIN_ROWS}
    levels = _level_chart(results)
    if levels is not None:
        figures.append(Figure(levels, "Levels of y"))
        about["p_values"] = [
            (label, histogram["p_value"]) for label, histogram in results.first("pit")
        ]
    return Section("calibration", figures=figures, legend=results.legend(), about=about)


def _level_chart(results: Results) -> Axes | None:
    """Draw the histograms of the levels F(y): flat where the predicted distribution is right."""
    curves = []
    for label, histogram in results.first("pit"):
        edges = histogram["edges"]
        heights = histogram["density"]
        x = [edge for pair in pairwise(edges) for edge in pair]
        y = [height for height in heights for _ in range(2)]
        curves.append(Series(label, x, y, results.colors[label], points=0))
    return line_chart(curves, "level of y in its predicted distribution", "density")


def _rejection_chart(results: Results) -> Axes | None:
    """Draw the error of the predictions that are kept against the share that is rejected."""
    factor = 1.0
    y_label = "RMSE of the others"
    if results.classes:
        factor = 100.0
        y_label = "error of the others, %"
    curves = []
    for label, curve in results.first("error_rejection"):
        x = [100 * share for share in curve["rejected"]]
        y = [factor * error for error in curve["error"]]
        curves.append(Series(label, x, y, results.colors[label]))
    return line_chart(curves, "rejected predictions, least certain first, %", y_label)


def decisions(results: Results) -> Section | None:
    """Show what decisions by the predictions cost, for several ratios of costs.

    Args:
        results: with the key decisions.
    """
    curves = results.first("decisions")
    if not curves:
        return None
    task = curves[0][1]["task"]
    colors = results.colors
    series = []
    for label, costs in curves:
        x = [math.log10(ratio) for ratio in costs["ratio"]]
        share = _relative_costs(costs, "realized")
        series.append(Series(label, x, share, colors[label]))
    axes = line_chart(
        series, "ratio of the two costs, powers of ten", "cost without predictions = 1"
    )
    if axes is None:
        return None
    notes = [describe_costs(label, costs) for label, costs in curves]
    figures = [Figure(axes, "Costs on the test rows")]
    return Section(
        "decisions", figures=figures, legend=results.legend(), notes=notes, about={"task": task}
    )


def _relative_costs(costs: dict[str, Any], name: str) -> list[float]:
    """Return costs as shares of those of the best decision that ignores the predictions."""
    if costs["task"] == "classes":
        references = [min(pair) for pair in zip(costs["none"], costs["all"], strict=True)]
    else:
        references = costs["constant"]
    pairs = zip(costs[name], references, strict=True)
    return [cost / reference if reference > 0 else math.nan for cost, reference in pairs]


def bands(results: Results) -> Section | None:
    """Show mean, epistemic and total bands over one input, or for test rows where there are more.

    Args:
        results: with the key curve or observed.
    """
    name = next((name for name in ("curve", "observed") if results.first(name)), None)
    if name is None:
        return None
    curves = results.first(name)
    points = curves[0][1]["points"]
    about = {"drawn": len(points["y"]), "rows": points.get("of", len(points["y"]))}
    return Section(name, figures=_band_figures(results, curves), about=about)


def _band_figures(results: Results, curves: list[tuple[str, Any]]) -> list[Figure]:
    """Draw one picture per method, all with the scale of the data.

    A band may extend beyond the picture.
    """
    dots = [y for _, curve in curves for y in curve["points"]["y"]]
    low = min(dots)
    high = max(dots)
    margin = 0.4 * ((high - low) or 1.0)
    ends = [y for _, curve in curves for y in (*curve["low"], *curve["high"])]
    drawn = [y for y in ends if low - margin < y < high + margin] + dots
    y_range = add_margin(min(drawn), max(drawn))
    figures = []
    for label, curve in curves:
        color = results.colors[label]
        x = curve["x"]
        x_range = (min(x), max(x))
        axes = Axes(curve.get("x_label", "x"), curve.get("y_label", "y"), x_range, y_range)
        axes.band(x, curve["low"], curve["high"], color, "faint")
        axes.band(x, curve["epistemic_low"], curve["epistemic_high"], color)
        axes.line(Series(label, x, curve["mean"], color, points=0))
        axes.dots(curve["points"]["x"], curve["points"]["y"])
        figures.append(Figure(axes, label))
    return figures


def training(results: Results) -> Section | None:
    """Show training curves: log-likelihood, KL and their difference.

    Args:
        results: with the key history.
    """
    size = results.facts.get("train") or 1
    figures = []
    for key, title, scale in (
        ("log_likelihood", "Log-likelihood, nats per example", size),
        ("kl", "KL to the prior, nats", 1),
        ("elbo", "ELBO, nats per example", size),
    ):
        curves = []
        for name, history in results.first("history"):
            if sum(key in row for row in history) > 1:
                x, y = _history(history, key, scale)
                curves.append(Series(name, x, y, results.colors[name]))
        axes = line_chart(curves, "step", y_range=_range_of_later_steps(curves))
        if axes is not None:
            legend = results.legend([curve.name for curve in curves])
            figures.append(Figure(axes, title, legend=legend))
    return Section("training", figures=figures) if figures else None


def _range_of_later_steps(curves: list[Series]) -> tuple[float, float] | None:
    """Return the range of y without the first steps, which would flatten the rest."""
    values = [y for curve in curves for y in curve.y[len(curve.y) // 10 :] if math.isfinite(y)]
    return add_margin(min(values), max(values)) if values else None


def _history(
    history: list[dict[str, float]],
    key: str,
    scale: float,
) -> tuple[list[float], list[float]]:
    """Return steps and values; a gap where the steps restart, as for the next ensemble member."""
    x: list[float] = []
    y: list[float] = []
    for row in history:
        if key in row:
            if x and row["step"] < x[-1]:
                x.append(x[-1])
                y.append(math.nan)
            x.append(row["step"])
            y.append(row[key] / scale)
    return x, y
