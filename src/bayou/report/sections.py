"""The parts of a page, each a function of the results; None where there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from bayou.report.charts import SMALL, Axes, Series, legend, line_chart, padded, stacked
from bayou.report.results import Cell, Figure, Head, Results, Section, Table

# name in the results → (what the column is called, which way is better, digits, factor)
METRICS: dict[str, tuple[str, str, int, float]] = {
    "accuracy": ("accuracy, %", "higher", 2, 100.0),
    "rmse": ("RMSE", "lower", 4, 1.0),
    "nll": ("NLL", "lower", 4, 1.0),
    "brier": ("Brier", "lower", 4, 1.0),
    "ece": ("ECE", "lower", 4, 1.0),
    "crps": ("CRPS", "lower", 4, 1.0),
    "coverage": ("coverage, %", "near 90", 1, 100.0),
    "width": ("width", "", 3, 1.0),
    "auroc_entropy": ("AUROC, H", "higher", 3, 1.0),
    "auroc_mutual_information": ("AUROC, MI", "higher", 3, 1.0),
    "auroc_std": ("AUROC, std", "higher", 3, 1.0),
    "auroc_epistemic_std": ("AUROC, epistemic", "higher", 3, 1.0),
    "rejection": ("rejection, %", "lower", 3, 100.0),
}
HINTS = {"higher": "higher is better", "lower": "lower is better"}
WORDS = {
    "nll": "NLL: mean negative log-likelihood of the test data, in nats.",
    "brier": "Brier: squared distance of the probabilities from what happened.",
    "ece": "ECE: expected calibration error.",
    "crps": "CRPS: distance of the predicted distribution from what happened, in units of y.",
    "coverage": "Coverage and width: of the central 90 % intervals.",
    "auroc_entropy": "AUROC: how well entropy (H) and mutual information (MI) tell data from elsewhere from test data; "
    "0.5 is chance.",
    "auroc_std": "AUROC: how well the standard deviation, and its epistemic part alone, tell inputs from elsewhere "
    "from test data; 0.5 is chance.",
    "rejection": "Rejection: area under the error-rejection curve.",
}
FEWEST = 5  # predictions in a bin of the reliability diagram


def sections(results: Results) -> list[Section]:
    """The parts of the page, those without data left out."""
    makers: tuple[Callable[[Results], Section | None], ...] = (
        numbers, checks, rotation, bands, observed, uncertainty, calibration, samples, training, bound,
    )  # fmt: skip
    return [section for make in makers if (section := make(results)) is not None]


def numbers(results: Results) -> Section:
    """The table of scores, with standard errors over seeds."""
    names = [name for name in METRICS if any(name in result["metrics"] for result in results.all)]
    means = {name: {label: results.mean(label, name) for label in results.labels} for name in names}
    best = {name: _best(name, [value[0] for value in means[name].values() if value is not None]) for name in names}
    rows = []
    for label in results.labels:
        cells = [Cell(label, kind=results.status(label))]
        for name in names:
            found, (_, _, digits, factor) = means[name][label], METRICS[name]
            if found is None:
                cells.append(Cell("–"))
                continue
            value, error = found
            text, se = _number(value * factor, digits, error * factor)
            cells.append(Cell(text, se, len(results.labels) > 1 and value == best[name]))
        seconds = [result["seconds"] for result in results.of(label)]
        rows.append([*cells, Cell(f"{sum(seconds) / len(seconds):.1f}")])
    for label, scores in results.baselines.items():
        cells = [Cell(f"{label} (baseline)", kind="baseline")]
        for name in names:
            digits, factor = METRICS[name][2:]
            value, error = (factor * scores[part].get(name, math.nan) for part in ("metrics", "errors"))
            text, se = ("–", "") if math.isnan(value) else _number(value, digits, error)
            cells.append(Cell(text, se, kind="baseline"))
        rows.append([*cells, Cell("")])
    heads = [Head("method"), *(Head(METRICS[n][0], HINTS.get(METRICS[n][1], METRICS[n][1])) for n in names)]
    luck = "One seed, ± one standard error over the test rows (bootstrap); --seeds 3 gives that over seeds too."
    over = f"Means over {results.seeds} seeds ± one standard error over seeds and test rows (bootstrap); the pictures "
    over += "below show the first seed."
    words = [WORDS[name] for name in names if name in WORDS]
    notes = [" ".join([over if results.seeds > 1 else luck, *words])]
    notes += [f"{r['label']}, seed {r['seed']}: {r['choice']}." for r in results.all if r.get("choice")]
    notes += [f"{name} failed: {why}" for name, why in results.failures.items()]
    return Section("The numbers", table=Table([*heads, Head("time, s", "to train")], rows), notes=notes)


def checks(results: Results) -> Section | None:
    """What the gate found: a table, and a sentence for every flag."""
    found = {label: {c["name"]: c["status"] for r in results.of(label) for c in r.get("checks", [])}
             for label in results.labels}  # fmt: skip
    names = list(dict.fromkeys(name for one in found.values() for name in one))
    if not names:
        return None
    rows, notes = [], list[str]()
    for label in results.labels:
        flags = {flag["name"]: flag for flag in results.flags(label)}
        states = [flags[name]["status"] if name in flags else found[label].get(name, "") for name in names]
        rows.append([Cell(label, kind=results.status(label)), *(Cell(state or "–", kind=state) for state in states)])
        notes += [f"{label}, {flag['name']}: {flag['text']}." for flag in flags.values()]
    return Section(
        "Can it be trusted?",
        "Every method is held against a constant, a linear model and its own mean network, paired row by row, and its "
        "intervals or confidences against what chance allows; chains must agree, and training must have come to its "
        "end.",
        table=Table([Head("method"), *map(Head, names)], rows),
        notes=notes or ["No method was flagged."],
    )


def _best(name: str, values: list[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    if not known or METRICS[name][1] not in HINTS:
        return math.nan
    return min(known) if METRICS[name][1] == "lower" else max(known)


def _number(value: float, digits: int, error: float = 0.0) -> tuple[str, str]:
    """A number and its error, if it has one: as many digits, fewer of large ones, powers of ten where none would do."""
    if not math.isfinite(value):
        return "not finite", ""
    if abs(value) >= 1e6 or 0 < abs(value) < 10.0**-digits:
        return f"{value:.3g}", f"{error:.1g}" if error > 0 else ""
    kept = min(digits, max(0, 5 - len(str(int(abs(value))))))
    return f"{value:,.{kept}f}", f"{error:,.{kept}f}" if error > 0 else ""


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


def bound(results: Results) -> Section | None:
    """The KL bound of MNF and its measured gap."""
    rows = []
    for label, found in results.first("bound"):
        keys = ("bound", "low", "high", "gap_low", "gap_high")
        cells = [Cell(*_number(found[key], 2, found.get(f"{key}_se", 0.0))) for key in keys]
        share = 100 * found["gap_high"] / found["high"] if found["high"] else math.nan
        rows.append([Cell(label), *cells, Cell(_number(share, 2)[0])])
    if not rows:
        return None
    names = ("method", "KL bound in training", "true KL, at least", "true KL, at most", "gap, at least", "gap, at most",
             "gap, % of KL")  # fmt: skip
    return Section(
        "How loose is the bound?",
        "The entropy of a multiplicative flow has no formula. Training uses a bound on the KL, and here its gap is "
        "measured: importance-weighted brackets, in nats, ± one standard error. A gap near 0 is a tight bound.",
        table=Table([Head(name) for name in names], rows),
    )
