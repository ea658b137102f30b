"""From the results of runs to one HTML page: what is shown, in which order, and in which words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from bayou.lab.report.charts import Axes, Series, legend, line_chart, padded, stacked

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
    note: str = ""


# name in the results → (what the column is called, which way is better, digits, factor)
METRICS: dict[str, tuple[str, str, int, float]] = {
    "error": ("error, %", "lower", 2, 100.0),
    "nll": ("NLL", "lower", 4, 1.0),
    "brier": ("Brier", "lower", 4, 1.0),
    "ece": ("ECE", "lower", 4, 1.0),
    "auroc_entropy": ("AUROC, H", "higher", 3, 1.0),
    "auroc_mutual_information": ("AUROC, MI", "higher", 3, 1.0),
    "rejection": ("rejection, %", "lower", 3, 100.0),
    "rmse": ("RMSE", "lower", 4, 1.0),
    "crps": ("CRPS", "lower", 4, 1.0),
    "coverage": ("coverage, %", "", 1, 100.0),
    "width": ("width", "", 3, 1.0),
}


WORDS = {
    "nll": "NLL: mean negative log-likelihood in nats.",
    "ece": "ECE: expected calibration error.",
    "auroc_entropy": "AUROC: how well entropy (H) and mutual information (MI) tell unknown data from known.",
    "rejection": "Rejection: area under the error-rejection curve.",
    "coverage": "Coverage and width: of the central 90 % intervals.",
}


class Report:
    """The page of some results: dicts as ``bayou.lab.judge`` makes them, one for each method and seed."""

    def __init__(self, results: Sequence[Result], config: dict[str, Any], *, version: str, made: str) -> None:
        if not results:
            raise ValueError("there are no results to report on; train something first")
        self.results, self.config, self.version, self.made = list(results), config, version, made
        self.labels = list(dict.fromkeys(result["label"] for result in results))
        self.colours = {label: number for number, label in enumerate(self.labels)}
        self.task = self.results[0]["task"]

    def html(self) -> str:
        """The page."""
        import jinja2
        from markupsafe import Markup as markup

        folder = resources.files("bayou.lab.report")
        loader = jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8"))
        environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
        style = markup((folder / "style.css").read_text(encoding="utf-8"))
        sections = [
            {
                "title": section.title,
                "text": section.text,
                "table": section.table,
                "legend": markup(section.legend),
                "note": section.note,
                "figures": [
                    {"svg": markup(f.svg), "title": f.title, "caption": f.caption, "extra": markup(f.extra)}
                    for f in section.figures
                ],
            }
            for section in self.sections()
        ]
        data = self.config.get("facts", {})
        facts = [
            text
            for text in (
                f"{data.get('train', 0):,} examples to learn from, {data.get('test', 0):,} to judge by" if data else "",
                f"out of distribution: {data['ood']}" if data.get("ood") else "",
                f"network {data['net']}, {data.get('weights', 0):,} weights" if data.get("net") else "",
                f"{self._seeds()} seed{'s' if self._seeds() > 1 else ''}",
            )
            if text
        ]
        return environment.get_template("page.html.j2").render(
            title=f"{self.config.get('data', 'data')}: what {', '.join(self.labels)} know, and what they do not",
            lead=self._lead(),
            facts=facts,
            sections=sections,
            style=style,
            version=self.version,
            made=self.made,
            command=self.config.get("command", ""),
            notes=self.config.get("notes", []),
        )

    def sections(self) -> list[Section]:
        """The parts of the page, those without data left out."""
        makers: list[Callable[[], Section | None]] = [
            self._numbers,
            self._rotation,
            self._entropy,
            self._calibration,
            self._bands,
            self._samples,
            self._training,
            self._bound,
        ]
        return [section for make in makers if (section := make()) is not None]

    # --- parts -------------------------------------------------------------------------------------------------------

    def _seeds(self) -> int:
        return len({result["seed"] for result in self.results})

    def _of(self, label: str) -> list[Result]:
        return [result for result in self.results if result["label"] == label]

    def _lead(self) -> str:
        what = "classes" if self.task == "classification" else "a number"
        return (
            f"{len(self.labels)} ways to learn {what} from the same data with the same network, judged on data that "
            "none of them has seen. A good method is right, says how sure it is, and is right about that too."
        )

    def _numbers(self) -> Section:
        names = [name for name in METRICS if any(name in result["metrics"] for result in self.results)]
        rows = {label: {name: self._mean(label, name) for name in names} for label in self.labels}
        best = {}
        for name in names:
            known = [rows[label][name][0] for label in self.labels if not math.isnan(rows[label][name][0])]
            way = METRICS[name][1]
            best[name] = (min(known) if way == "lower" else max(known)) if known and way else math.nan
        table = []
        for label in self.labels:
            cells = [Cell(label)]
            for name in names:
                (value, error), (_, _, digits, factor) = rows[label][name], METRICS[name]
                text = "–" if math.isnan(value) else f"{value * factor:.{digits}f}"
                se = f"{error * factor:.{digits}f}" if error > 0 else ""
                cells.append(Cell(text, se, len(self.labels) > 1 and value == best[name]))
            seconds = sum(r["seconds"] for r in self._of(label)) / len(self._of(label))
            table.append([*cells, Cell(f"{seconds:.1f}")])
        heads = [Head("method"), *(Head(METRICS[n][0], METRICS[n][1] and f"{METRICS[n][1]} is better") for n in names)]
        seeds = self._seeds()
        note = (
            f"Means over {seeds} seeds, ± one standard error."
            if seeds > 1
            else "One seed: differences of this size may be luck; --seeds 3 gives standard errors."
        )
        words = [WORDS[name] for name in names if name in WORDS]
        return Section("The numbers", table=Table([*heads, Head("time, s")], table), note=" ".join([note, *words]))

    def _mean(self, label: str, name: str) -> tuple[float, float]:
        values = [result["metrics"][name] for result in self._of(label) if name in result["metrics"]]
        if not values:
            return math.nan, 0.0
        mean = sum(values) / len(values)
        if len(values) < 2:
            return mean, 0.0
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        return mean, math.sqrt(variance / len(values))

    def _first(self, label: str, key: str) -> Any:
        """What the first seed of a method has to say."""
        return next((result[key] for result in self._of(label) if result.get(key)), None)

    def _legend(self) -> str:
        return legend(list(self.colours.items()))

    def _rotation(self) -> Section | None:
        shown = [(label, found) for label in self.labels if (found := self._first(label, "rotation"))]
        if not shown:
            return None
        classes = shown[0][1]["classes"]
        strip = shown[0][1].get("images", [])
        images = "".join(f'<img src="{source}" alt="">' for source in strip)
        figures = [
            Figure(
                stacked(found["degrees"], found["probabilities"], "degrees of rotation", "probability", 210.0),
                label,
                found.get("caption", ""),
                f'<div class="strip">{images}</div>' if images else "",
            )
            for label, found in shown
        ]
        return Section(
            "A digit turns",
            f"One {shown[0][1]['digit']} of the test set, turned through 180°. Somewhere on the way it stops "
            "being a digit, and an honest network says so: its probability spreads over many classes. A plain network "
            "goes from one certainty to the next.",
            figures=figures,
            legend=legend([(str(name), number) for number, name in enumerate(classes)]),
        )

    def _entropy(self) -> Section | None:
        figures = []
        for label in self.labels:
            found = self._first(label, "entropy")
            if not found:
                continue
            edges, heights = found["edges"], found["in"] + found.get("ood", [])
            axes = Axes("entropy, nats", "share", (edges[0], edges[-1]), (0.0, max(heights) * 1.08), height=210.0)
            axes.bars(edges, found["in"], 2, "known")
            if found.get("ood"):
                axes.bars(edges, found["ood"], 1, "unknown")
            figures.append(Figure(axes.svg(), label))
        if not figures:
            return None
        curves = []
        for label in self.labels:
            found = self._first(label, "entropy")
            if found and found.get("ood"):
                total, cumulative = 0.0, [0.0]
                for share in found["ood"]:
                    total += share
                    cumulative.append(total)
                curves.append(Series(label, found["edges"], cumulative, self.colours[label]))
        if curves:
            svg = line_chart(curves, "entropy, nats", "share of unknown data below", y_range=(0.0, 1.0))
            figures.append(
                Figure(svg, "Unknown data, cumulative", "Lower and further right is better.", self._legend())
            )
        known = [("test data", 2)] + ([("out of distribution", 1)] if curves else [])
        return Section(
            "Does it know what it does not know?",
            "The entropy of the predictions, for data like those it learned from and for data that are nothing like "
            "them.",
            figures=figures,
            legend=legend(known),
        )

    def _calibration(self) -> Section | None:
        curves = []
        for label in self.labels:
            found = self._first(label, "reliability")
            if found:
                kept = [i for i, count in enumerate(found["count"]) if count]
                x, y = ([found[key][i] for i in kept] for key in ("confidence", "accuracy"))
                curves.append(Series(label, x, y, self.colours[label], points=True))
        if not curves:
            return None
        regression = self.task == "regression"
        axes = Axes(
            "probability of the interval" if regression else "confidence",
            "share of y inside" if regression else "accuracy",
        )
        axes.diagonal()
        for curve in curves:
            axes.line(curve)
        promise = (
            "An interval of probability p should hold a share p of the test data: the dashed line."
            if regression
            else "Of the predictions made with confidence p a share p should be right: the dashed line."
        )
        figures = [Figure(axes.svg(), "Calibration", f"{promise} Below it is overconfident.")]
        rejected = self._rejection()
        if rejected is not None:
            figures.append(rejected)
        return Section("Is it right about being sure?", figures=figures, legend=self._legend())

    def _bands(self) -> Section | None:
        figures = []
        shown = [(label, found) for label in self.labels if (found := self._first(label, "curve"))]
        if not shown:
            return None
        points = shown[0][1].get("points", {"x": [], "y": []})
        ys = [v for _, f in shown for v in (*f["low"], *f["high"])] + points["y"]
        for label, found in shown:
            colour = self.colours[label]
            axes = Axes("x", "y", (min(found["x"]), max(found["x"])), padded(min(ys), max(ys)), height=230.0)
            axes.band(found["x"], found["low"], found["high"], colour, "faint")
            axes.band(found["x"], found["epistemic_low"], found["epistemic_high"], colour)
            axes.line(Series(label, found["x"], found["mean"], colour))
            axes.marks += [
                f'<circle class="data" cx="{axes.px(x):.1f}" cy="{axes.py(y):.1f}" r="1.7"/>'
                for x, y in zip(points["x"], points["y"], strict=True)
            ]
            figures.append(Figure(axes.svg(), label))
        return Section(
            "What it thinks between the data and beyond",
            "Mean, two standard deviations of the function (dark) and of y (light).",
            figures=figures,
        )

    def _rejection(self) -> Figure | None:
        curves = []
        factor = 100.0 if self.task == "classification" else 1.0
        for label in self.labels:
            found = self._first(label, "error_rejection")
            if found:
                error = [factor * e for e in found["error"]]
                curves.append(Series(label, [100 * r for r in found["rejected"]], error, self.colours[label]))
        if not curves:
            return None
        left = "error among the rest, %" if self.task == "classification" else "RMSE of the rest"
        svg = line_chart(curves, "least certain predictions handed to a person, %", left)
        words = "If the least certain predictions go to a person, how wrong are the others?"
        return Figure(svg, "Rejection", words)

    def _samples(self) -> Section | None:
        pictures = []
        keys = (("error", "error, %", 100.0), ("nll", "NLL", 1.0), ("rmse", "RMSE", 1.0))
        for key, y_label, factor in keys:
            curves = []
            for label in self.labels:
                found = self._first(label, "samples_curve")
                if found and key in found and len(found["samples"]) > 1:
                    y = [factor * value for value in found[key]]
                    curves.append(Series(label, found["samples"], y, self.colours[label], points=True))
            if curves:
                svg = line_chart(curves, "samples S", y_label, log_x=True)
                used = legend([(curve.name, curve.colour) for curve in curves])
                pictures.append(Figure(svg, extra=used))
        if not pictures:
            return None
        return Section(
            "How many samples are enough?",
            "Predictions average S networks. The error is soon as low as it gets; the log-likelihood goes on "
            "improving.",
            figures=pictures,
        )

    def _training(self) -> Section | None:
        figures = []
        for key, title in (("log_likelihood", "Log-likelihood per example"), ("kl", "KL to the prior, nats")):
            curves = []
            for label in self.labels:
                history = self._first(label, "history") or []
                rows = [row for row in history if key in row]
                if len(rows) > 1:
                    size = self.config.get("facts", {}).get("train", 1) if key == "log_likelihood" else 1
                    x, y = [row["step"] for row in rows], [row[key] / size for row in rows]
                    curves.append(Series(label, x, y, self.colours[label]))
            if curves:
                values = sorted(v for curve in curves for v in curve.y)
                low = values[len(values) // 20] if key == "log_likelihood" else values[0]
                svg = line_chart(curves, "step", "", y_range=padded(low, values[-1]))
                used = legend([(curve.name, curve.colour) for curve in curves])
                figures.append(Figure(svg, title, extra=used))
        if not figures:
            return None
        return Section(
            "Training",
            "The two parts of the objective apart: how well the data are explained, and what that costs in nats.",
            figures=figures,
        )

    def _bound(self) -> Section | None:
        rows = []
        for label in self.labels:
            found = self._first(label, "bound")
            if found:
                values = [found["bound"], found["low"], found["high"], found["gap_low"], found["gap_high"]]
                rows.append([Cell(label), *(Cell(f"{value:,.2f}") for value in values)])
        if not rows:
            return None
        heads = [Head("method"), Head("KL bound in training"), Head("true KL, at least"), Head("true KL, at most")]
        return Section(
            "How loose is the bound?",
            "The entropy of a multiplicative flow has no formula; training uses a bound on the KL, and here it is "
            "measured (importance-weighted brackets, in nats).",
            table=Table([*heads, Head("gap, at least"), Head("gap, at most")], rows),
        )
