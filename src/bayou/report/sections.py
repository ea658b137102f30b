"""The sections of a report, each a function of the results; None where there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from bayou.report.charts import SMALL, Axes, Series, legend, line_chart, padded, stacked
from bayou.report.results import Figure, Results, Section
from bayou.report.tables import checks, mixing, numbers

MIN_BIN_ROWS = 5  # predictions in a bin of the reliability diagram


def sections(results: Results) -> list[Section]:
    """The sections of the page, without those that have no data."""
    makers: tuple[Callable[[Results], Section | None], ...] = (
        numbers, checks, mixing, rotation, bands, uncertainty, calibration, training,
    )  # fmt: skip
    return [section for make in makers if (section := make(results)) is not None]


def rotation(results: Results) -> Section | None:
    """Class probabilities of a rotated digit (the figure of Louizos & Welling 2017)."""
    shown = results.first("rotation")
    if not shown:
        return None
    strip = "".join(f'<img src="{source}" alt="">' for source in shown[0][1].get("images", []))
    figures = []
    for label, found in shown:
        svg = stacked(found["degrees"], found["probabilities"], "degrees of rotation", "probability", every=45)
        figures.append(Figure(svg, label, extra=f'<div class="strip">{strip}</div>' if strip else ""))
    return Section(
        "Predictions for a rotated digit",
        f"One {shown[0][1]['digit']} of the test set, rotated from 0° to 180°. At intermediate angles the image is not "
        "a digit. A calibrated predictive distribution then spreads over several classes; a point estimate tends to "
        "switch from one confident prediction to another.",
        figures=figures,
        legend=legend([(str(name), number) for number, name in enumerate(shown[0][1]["classes"])]),
    )


def uncertainty(results: Results) -> Section | None:
    """The uncertainty of all methods, cumulative: for test data, and out of distribution."""
    shown = results.first("entropy")
    if not shown:
        return None
    name = shown[0][1].get("label", "entropy, nats")
    figures = []
    for key, title, words in (
        ("in", "Test data, cumulative", "Higher: more confident predictions."),
        ("ood", "Out-of-distribution data, cumulative", "Lower is better: predictions should be uncertain here."),
    ):
        curves = [
            Series(label, found["edges"], [0.0, *accumulate(found[key])], results.colors[label])
            for label, found in shown
            if found.get(key)
        ]
        if curves:
            figures.append(Figure(line_chart(curves, name, "share below", y_range=(0.0, 1.0)), title, words))
    what = name.split(",")[0]
    title, text = "Predictive uncertainty", f"The {what} of the predictions for the test data."
    if len(figures) > 1:
        title, ood = "Uncertainty in and out of distribution", f"out-of-distribution data ({results.facts.get('ood')})"
        text = f"The {what} of the predictions, for test data and for {ood}."
    return Section(title, text, figures=figures, legend=results.legend())


def calibration(results: Results) -> Section | None:
    """The reliability diagram, and the error as the least certain predictions are rejected."""
    curves = []
    for label, found in results.first("reliability"):
        kept = [k for k, count in enumerate(found["count"]) if count >= MIN_BIN_ROWS]
        x, y = ([found[key][k] for k in kept] for key in ("confidence", "accuracy"))
        curves.append(Series(label, x, y, results.colors[label], points=True))
    if not curves:
        return None
    axes = (
        Axes("confidence", "accuracy") if results.classes else Axes("probability of the interval", "share of y inside")
    )
    axes.diagonal()
    for curve in curves:
        axes.line(curve)
    caption = (
        f"Of the predictions made with confidence p, a fraction p should be correct (dashed line). Each dot is the "
        f"mean of at least {MIN_BIN_ROWS} predictions. Points below the line are overconfident."
        if results.classes
        else "An interval of probability p should contain a fraction p of the test data (dashed line). Points below "
        "the line are overconfident."
    )
    figures = [Figure(axes.svg(), "Reliability", caption)]
    factor, left = (100.0, "error of the others, %") if results.classes else (1.0, "RMSE of the others")
    rejected = [
        Series(label, [100 * r for r in f["rejected"]], [factor * e for e in f["error"]], results.colors[label])
        for label, f in results.first("error_rejection")
    ]
    svg = line_chart(rejected, "rejected predictions, least certain first, %", left)
    if svg:
        words = "The error of the remaining predictions as the least certain ones are rejected. It should decrease."
        figures.append(Figure(svg, "Error and rejection", words))
    return Section("Calibration", figures=figures, legend=results.legend())


def bands(results: Results) -> Section | None:
    """Mean, epistemic and total bands over one input, or for test rows where there are more."""
    words = (
        "mean with bands of two standard deviations, epistemic (dark: reducible by more data) and total (light: with "
        "observation noise)."
    )
    if shown := results.first("curve"):
        title, text = "Predictions inside and outside the range of the data", f"The {words} Dots are training data."
    elif shown := results.first("observed"):
        title, text = "Predictions for test data", f"Test rows sorted by prediction: {words} Dots are observations; "
        text += "about 95 % should lie in the light band."
    else:
        return None
    return Section(title, text, figures=_band_figures(results, shown))


def _band_figures(results: Results, shown: list[tuple[str, Any]]) -> list[Figure]:
    """One picture per method, all with the scale of the data: a band may extend beyond the picture."""
    dots = [y for _, found in shown for y in found["points"]["y"]]
    low, high = min(dots), max(dots)
    margin = 0.4 * ((high - low) or 1.0)
    known = [v for _, f in shown for v in (*f["low"], *f["high"]) if low - margin < v < high + margin] + dots
    y_range = padded(min(known), max(known))
    figures = []
    for label, found in shown:
        color, x = results.colors[label], found["x"]
        axes = Axes(found.get("x_label", "x"), found.get("y_label", "y"), (min(x), max(x)), y_range, **SMALL)
        axes.band(x, found["low"], found["high"], color, "faint")
        axes.band(x, found["epistemic_low"], found["epistemic_high"], color)
        axes.line(Series(label, x, found["mean"], color))
        axes.dots(found["points"]["x"], found["points"]["y"])
        figures.append(Figure(axes.svg(), label))
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
        if later:
            svg = line_chart(curves, "step", y_range=padded(min(later), max(later)), **SMALL)
            figures.append(Figure(svg, title, extra=results.legend([curve.name for curve in curves])))
    if not figures:
        return None
    text = "The terms of the objective during training." if len(figures) > 1 else "The objective during training."
    return Section("Training", text, figures=figures)


def _history(history: list[dict[str, float]], key: str, scale: float) -> tuple[list[float], list[float]]:
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
