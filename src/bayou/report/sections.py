"""The parts of a page, each a function of the results; None where there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from bayou.report.charts import SMALL, Axes, Series, legend, line_chart, padded, relevance_chart, stacked
from bayou.report.results import Figure, Results, Section
from bayou.report.tables import annealing, bound, checks, mixing, numbers

FEWEST = 5  # predictions in a bin of the reliability diagram


def sections(results: Results) -> list[Section]:
    """The parts of the page, those without data left out."""
    makers: tuple[Callable[[Results], Section | None], ...] = (
        numbers, checks, mixing, annealing, rotation, bands, observed, uncertainty, calibration, samples, relevance,
        training, bound,
    )  # fmt: skip
    return [section for make in makers if (section := make(results)) is not None]


def rotation(results: Results) -> Section | None:
    """Class probabilities of a digit that turns (the figure of Louizos & Welling 2017)."""
    shown = results.first("rotation")
    if not shown:
        return None
    strip = "".join(f'<img src="{source}" alt="">' for source in shown[0][1].get("images", []))
    figures = []
    for label, found in shown:
        svg = stacked(found["degrees"], found["probabilities"], "degrees of rotation", "probability", every=45)
        figures.append(Figure(svg, label, extra=f'<div class="strip">{strip}</div>' if strip else ""))
    return Section(
        "A digit turns",
        f"One {shown[0][1]['digit']} of the test set, turned through 180°. Somewhere on the way it stops being a "
        "digit, and an honest network says so: its probability spreads over many classes, where a plain network goes "
        "from one certainty to the next.",
        figures=figures,
        legend=legend([(str(name), number) for number, name in enumerate(shown[0][1]["classes"])]),
    )


def uncertainty(results: Results) -> Section | None:
    """Histograms of the uncertainty in and out of distribution, and both cumulative."""
    shown = results.first("entropy")
    if not shown:
        return None
    away = any(found.get("ood") for _, found in shown)
    name = shown[0][1].get("label", "entropy, nats")
    figures = []
    for label, found in shown:
        edges, heights = found["edges"], found["in"] + found.get("ood", [])
        axes = Axes(name, "share", (edges[0], edges[-1]), (0.0, max(heights) * 1.08), **SMALL)
        axes.bars(edges, found["in"], 2, "test data")
        if found.get("ood"):
            axes.bars(edges, found["ood"], 1, "from elsewhere")
        figures.append(Figure(axes.svg(), label))
    for key, title, words in (
        ("in", "Test data, cumulative", "Higher is surer."),
        ("ood", "From elsewhere, cumulative", "Lower is more cautious, and better: nothing here is known."),
    ):
        curves = [
            Series(label, found["edges"], _cumulative(found[key]), results.colours[label])
            for label, found in shown
            if found.get(key)
        ]
        if curves and (away or len(curves) > 1):
            svg = line_chart(curves, name, "share below", y_range=(0.0, 1.0), **SMALL)
            figures.append(Figure(svg, title, words, results.legend([curve.name for curve in curves])))
    what = name.split(",")[0]
    if away:
        title = "Does it know what it does not know?"
        text = f"The {what} of the predictions, for test data and for data from elsewhere ({results.facts.get('ood')})."
    else:
        title, text = "How sure is it?", f"The {what} of the predictions for the test data."
    keys = [("test data", 2)] + ([("from elsewhere", 1)] if away else [])
    return Section(title, text, figures=figures, legend=legend(keys) if away else "")


def _cumulative(shares: Sequence[float]) -> list[float]:
    found = [0.0]
    for share in shares:
        found.append(found[-1] + share)
    return found


def calibration(results: Results) -> Section | None:
    """The reliability diagram, and the error when the least certain predictions are handed on."""
    curves = []
    for label, found in results.first("reliability"):
        x, y = _merged(found) if results.classes else (found["confidence"], found["accuracy"])
        curves.append(Series(label, x, y, results.colours[label], points=True))
    if not curves:
        return None
    axes = (
        Axes("confidence", "accuracy") if results.classes else Axes("probability of the interval", "share of y inside")
    )
    axes.diagonal()
    for curve in curves:
        axes.line(curve)
    promise = (
        f"Of the predictions made with confidence p a share p should be right: the dashed line. A dot stands for at "
        f"least {FEWEST} predictions. Below the line is overconfident."
        if results.classes
        else "An interval of probability p should hold a share p of the test data: the dashed line. Below it is "
        "overconfident."
    )
    figures = [Figure(axes.svg(), "Reliability", promise)]
    factor, left = (100.0, "error among the rest, %") if results.classes else (1.0, "RMSE of the rest")
    rejected = [
        Series(label, [100 * r for r in f["rejected"]], [factor * e for e in f["error"]], results.colours[label])
        for label, f in results.first("error_rejection")
    ]
    svg = line_chart(rejected, "least certain predictions handed to a person, %", left)
    if svg:
        words = "If the least certain predictions go to a person, how wrong are the others? A line that falls is good."
        figures.append(Figure(svg, "Error and rejection", words))
    return Section("Is it right about being sure?", figures=figures, legend=results.legend())


def _merged(found: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Bins joined from the left until each holds enough predictions to say something."""
    x, y = list[float](), list[float]()
    weight = confidence = accuracy = 0.0
    for count, p, share in zip(found["count"], found["confidence"], found["accuracy"], strict=True):
        weight, confidence, accuracy = weight + count, confidence + count * p, accuracy + count * share
        if weight >= FEWEST:
            x.append(confidence / weight)
            y.append(accuracy / weight)
            weight = confidence = accuracy = 0.0
    return (x, y) if x or not weight else ([confidence / weight], [accuracy / weight])


def bands(results: Results) -> Section | None:
    """Mean, epistemic and total bands over one input."""
    shown = results.first("curve")
    if not shown:
        return None
    return Section(
        "What it thinks between the data and beyond",
        "Mean, two standard deviations of the function (strong: what more data would settle) and of y (pale: with the "
        "noise). Dots are training data.",
        figures=_band_figures(results, shown),
    )


def observed(results: Results) -> Section | None:
    """The same bands for test rows, whatever the inputs."""
    shown = results.first("observed")
    if not shown:
        return None
    return Section(
        "What it says about test data",
        "Test rows from the smallest prediction to the largest: mean, two standard deviations of the function (strong: "
        "what more data would settle) and of y (pale: with the noise). Dots are what was observed; some 95 % should "
        "lie in the pale band.",
        figures=_band_figures(results, shown),
    )


def _band_figures(results: Results, shown: list[tuple[str, Any]]) -> list[Figure]:
    """One picture for each method, all with the same scale, which the data set: a band may leave the picture."""
    dots = [y for _, found in shown for y in found["points"]["y"]]
    low, high = min(dots), max(dots)
    air = 0.4 * ((high - low) or 1.0)
    known = [v for _, f in shown for v in (*f["low"], *f["high"]) if low - air < v < high + air] + dots
    y_range = padded(min(known), max(known))
    figures = []
    for label, found in shown:
        colour, x = results.colours[label], found["x"]
        axes = Axes(found.get("x_label", "x"), found.get("y_label", "y"), (min(x), max(x)), y_range, **SMALL)
        axes.band(x, found["low"], found["high"], colour, "faint")
        axes.band(x, found["epistemic_low"], found["epistemic_high"], colour)
        axes.line(Series(label, x, found["mean"], colour))
        axes.dots(found["points"]["x"], found["points"]["y"])
        figures.append(Figure(axes.svg(), label))
    return figures


def samples(results: Results) -> Section | None:
    """Accuracy and NLL against the number of networks that are averaged."""
    shown = [(label, found) for label, found in results.first("samples_curve") if len(found["samples"]) > 1]
    figures = []
    for key, title, value in (
        ("error", "Accuracy, %", lambda error: 100 * (1 - error)),
        ("rmse", "RMSE", float),
        ("nll", "NLL", float),
    ):
        curves = [
            Series(label, f["samples"], [value(v) for v in f[key]], results.colours[label], points=True)
            for label, f in shown
            if key in f
        ]
        svg = line_chart(curves, "samples S", log_x=True)
        if svg:
            figures.append(Figure(svg, title, extra=results.legend([curve.name for curve in curves])))
    if not figures:
        return None
    soon = "The accuracy is soon as high" if results.classes else "The RMSE is soon as low"
    return Section(
        "How many samples are enough?",
        f"Predictions average S networks. {soon} as it gets; the likelihood often goes on improving.",
        figures=figures,
    )


def relevance(results: Results) -> Section | None:
    """Which inputs matter, where a prior by unit was learned."""
    figures = []
    for label, found in results.first("relevance"):
        shape = tuple(found["shape"]) if "shape" in found else None
        figures.append(Figure(relevance_chart(found["values"], found.get("names", ()), shape), label))
    if not figures:
        return None
    return Section(
        "Which inputs matter?",
        "The prior scale that was learned for the weights of every input, the largest 1: near 0 the network does not "
        "use it. Inputs that say the same share what they say.",
        figures=figures,
    )


def training(results: Results) -> Section | None:
    """Training curves: log-likelihood and KL apart, and their sum."""
    size = results.facts.get("train") or 1
    figures = []
    for key, title, scale in (
        ("log_likelihood", "Log-likelihood, nats an example", size),
        ("kl", "KL to the prior, nats", 1),
        ("elbo", "The ELBO, nats an example", size),
    ):
        curves = [
            Series(name, *_history(history, key, scale), results.colours[name])
            for name, history in results.first("history")
            if sum(key in row for row in history) > 1
        ]
        values = sorted(v for curve in curves for v in curve.y if math.isfinite(v))
        if values:
            log = key == "kl" and values[0] > 0
            later = [v for curve in curves for v in curve.y[len(curve.y) // 10 :] if math.isfinite(v)]
            low = min(later, default=values[0])  # without the first steps, which would flatten the rest
            y_range = (values[0] / 1.15, values[-1] * 1.15) if log else padded(low, values[-1])
            svg = line_chart(curves, "step", y_range=y_range, log_y=log, **SMALL)
            figures.append(Figure(svg, title, extra=results.legend([curve.name for curve in curves])))
    if not figures:
        return None
    apart = "The parts of the objective apart: how well the data are explained, and what that costs in nats."
    return Section("Training", apart if len(figures) > 1 else "How well the data are explained.", figures=figures)


def _history(history: list[dict[str, float]], key: str, scale: float) -> tuple[list[float], list[float]]:
    """Steps and values; a gap where the steps begin again, as with the next member of an ensemble."""
    x, y = list[float](), list[float]()
    for row in history:
        if key in row:
            if x and row["step"] < x[-1]:
                x.append(x[-1])
                y.append(math.nan)
            x.append(row["step"])
            y.append(row[key] / scale)
    return x, y
