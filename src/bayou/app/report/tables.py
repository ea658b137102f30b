"""The tables of a report: scores, results of the checks, mixing of chains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from bayou.app.report.results import Average, Cell, Head, Results, Section, Table
from bayou.diagnostics.checks import SURE
from bayou.posteriors.checks import describe_flag

# name in the results → (title of the column, which direction is better, digits, factor)
METRICS: dict[str, tuple[str, str, int, float]] = {
    "accuracy": ("accuracy, %", "higher", 2, 100.0),
    "rmse": ("RMSE", "lower", 4, 1.0),
    "nll": ("NLL", "lower", 4, 1.0),
    "brier": ("Brier", "lower", 4, 1.0),
    "ece": ("ECE", "lower", 4, 1.0),
    "crps": ("CRPS", "lower", 4, 1.0),
    "coverage": ("coverage, %", "should be 90", 1, 100.0),
    "width": ("width", "", 3, 1.0),
    "auroc_entropy": ("AUROC, H", "higher", 3, 1.0),
    "auroc_mutual_information": ("AUROC, MI", "higher", 3, 1.0),
    "auroc_std": ("AUROC, std", "higher", 3, 1.0),
    "auroc_epistemic_std": ("AUROC, epistemic", "higher", 3, 1.0),
    "rejection": ("rejection, %", "lower", 3, 100.0),
}
HINTS = {"higher": "higher is better", "lower": "lower is better"}
KEY = {
    True: ("accuracy", "nll", "ece"),
    False: ("rmse", "nll", "coverage"),
}  # of classes, of numbers
MILLIONS = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
MIN_SHORTENED = 1e3  # differences with fewer decimals
MAX_IN_WORDS = 1e15  # larger numbers are powers of ten
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MAX_PAIRED = 4  # methods of which all pairs are shown; with more, each is paired with the reference


def key_numbers(results: Results, label: str) -> list[tuple[Head, Cell]]:
    """The three scores of a method to look at first."""
    names = [name for name in KEY[results.classes] if results.mean(label, name) is not None]
    return [(_head(name), _cell(results.mean(label, name), *METRICS[name][2:])) for name in names]


def _head(name: str) -> Head:
    title, better = METRICS[name][:2]
    return Head(title, HINTS.get(better, better))


def numbers(results: Results) -> Section:
    """The table of scores, with standard errors over rows, seeds and splits."""
    names = [name for name in METRICS if any(name in result["metrics"] for result in results.all)]
    means = {name: {label: results.mean(label, name) for label in results.labels} for name in names}
    best = {
        name: _best(name, [found.value for found in means[name].values() if found is not None])
        for name in names
    }
    beside = len(results.labels) > 1
    rows = []
    for label in (*results.labels, *results.baselines):
        baseline = label in results.baselines
        kind = "baseline" if baseline else results.status(label)
        cells = [Cell(f"{label} (baseline)" if baseline else label, kind=kind)]
        for name in names:
            found = results.mean(label, name) if baseline else means[name][label]
            first = not baseline and found is not None and found.value == best[name]
            cells.append(
                _cell(found, *METRICS[name][2:], best=first, kind="baseline" if baseline else "")
            )
        if beside:
            cells.append(_difference(results.beside(label), "baseline" if baseline else ""))
        seconds = [result["seconds"] for result in results.of(label) if "seconds" in result]
        rows.append([*cells, Cell(f"{sum(seconds) / len(seconds):.1f}" if seconds else "")])
    heads = [Head("method"), *map(_head, names)]
    heads += [Head(f"NLL minus {results.reference}", "below 0 is better")] if beside else []
    notes = _missing_splits(results)
    notes += [f"{name} failed: {why}" for name, why in results.failures.items()]
    about = {"names": names, "beside": beside}
    return Section(
        "scores", Table([*heads, Head("time, s", "to train")], rows), notes=notes, about=about
    )


def pairs(results: Results) -> Section | None:
    """Differences of methods, paired over the test rows, with their standard errors."""
    labels, reference = results.labels, results.reference
    chosen = list(combinations(labels, 2))
    if len(labels) > MAX_PAIRED:
        chosen = [(label, reference) for label in labels if label != reference]
    factor, digits = (100.0, 2) if results.classes else (1.0, 3)
    rows = []
    for one, other in chosen:
        nll, loss = results.beside(one, other), results.beside(one, other, "losses")
        if nll is not None:
            said = Cell(nll.comparison, best=nll.comparison == "better")
            rows.append(
                [
                    Cell(f"{one} minus {other}"),
                    _difference(nll),
                    _difference(loss, "", digits, factor),
                    said,
                ]
            )
    names = "NLL", "wrong classes, %" if results.classes else "absolute error"
    heads = [
        Head("pair"),
        *(Head(name, "below 0 is better") for name in names),
        Head("by NLL, the first is"),
    ]
    return Section("pairs", Table(heads, rows), about={"sure": SURE}) if rows else None


def stages(results: Results) -> Section | None:
    """What the first seed of each method did, in order: selection of settings, fit, evaluation;
    with times.
    """
    rows = []
    for label in results.labels:
        result = results.of(label)[0]
        log, judging = result.get("selection", []), result.get("seconds_to_evaluate")
        for stage in log:
            found = [_trial(trial) for trial in stage["trials"]]
            best = min(found, default=(0.0, "", "–"))
            rows.append(
                [label, stage["stage"], str(len(found)), *best[1:], f"{stage['seconds']:.1f}"]
            )
        rest = result.get("seconds", math.nan) - sum(stage["seconds"] for stage in log)
        if rest > 0:
            rows.append(
                [
                    label,
                    "fit with the selected settings" if log else "fit",
                    "",
                    "",
                    "",
                    f"{rest:.1f}",
                ]
            )
        if judging is not None:
            rows.append([label, "evaluation on the test data", "", "", "", f"{judging:.1f}"])
    heads = [*map(Head, ("method", "stage", "tried", "lowest score", "with", "time, s"))]
    notes = [
        f"{result['label']}, seed {result['seed']}: {result[key]}."
        for result in results.all
        for key in ("plan", "choice")
        if result.get(key)
    ]
    return (
        Section("stages", Table(heads, [[*map(Cell, row)] for row in rows]), notes=notes)
        if rows
        else None
    )


def _trial(trial: dict[str, Any]) -> tuple[float, str, str]:
    """The score of a trial on held-out rows, the same as text, and its settings as text."""
    score = next((name for name in ("nll", "mse") if name in trial), None)
    words = ", ".join(value if isinstance(value, str) else f"{name} {value:.3g}"
                      for name, value in trial.items() if name != score)  # fmt: skip
    return (trial[score], f"{score} {trial[score]:.4g}", words) if score else (0.0, "", words)


def _cell(
    found: Average | None, digits: int, factor: float, *, best: bool = False, kind: str = ""
) -> Cell:
    if found is None or (kind == "baseline" and math.isnan(found.value)):
        return Cell("–", kind=kind)
    return Cell(*format_number(found.value * factor, digits, found.error * factor), best, kind)


def _difference(
    found: Average | None, kind: str = "", digits: int = 3, factor: float = 1.0
) -> Cell:
    """A difference of losses with its sign, marked where it is significant."""
    if found is None or not math.isfinite(found.value):
        return Cell("–", kind=kind)
    kind = kind or ("warning" if found.comparison == "worse" else "")
    value, error = factor * found.value, factor * found.error
    text, error_text = f"{value:,.{digits}f}", f"{error:,.{digits}f}"
    if abs(value) >= MIN_SHORTENED:
        text, error_text = format_number(value, digits, error)
    sign = "+" if found.value >= 0 else ""
    return Cell(f"{sign}{text}", error_text, not kind and found.comparison == "better", kind)


def _missing_splits(results: Results) -> list[str]:
    """Methods whose means are over fewer splits than those of others."""
    counts = {
        label: len({result["split"] for result in results.of(label)}) for label in results.labels
    }
    every = len(results.splits)
    return [
        f"{label}: {count} of {every} splits so far."
        for label, count in counts.items()
        if count < every
    ]


def mixing(results: Results) -> Section | None:
    """R-hat and effective sample sizes of the samplers: the worst over seeds and splits."""
    rows = []
    for label in results.labels:
        found = [
            result["mixing"] for result in results.of(label) if "chains" in result.get("mixing", {})
        ]
        if not found:
            continue
        said = mixing_words(found)
        kind = {"mixed": "", "too few draws": "warning"}.get(said, "failed")
        cells = [Cell(label, kind=kind), Cell(said, kind=kind)]
        for key, worst, form in (("r_hat", max, ",.3f"), ("r_hat_median", max, ",.3f"),
                                 ("ess", min, ",.0f"), ("ess_median", min, ",.0f")):  # fmt: skip
            value = worst(one.get(key, math.nan) for one in found)
            cells.append(Cell(format(value, form) if math.isfinite(value) else "–"))
        rows.append([*cells, Cell(f"{found[0]['chains']} × {found[0]['draws']:,}")])
    if not rows:
        return None
    heads = [Head("method"), Head("state"), Head("R-hat", "the worst"), Head("R-hat", "the median"),
             Head("ESS", "the worst"), Head("ESS", "the median"), Head("chains × draws")]  # fmt: skip
    return Section("mixing", Table(heads, rows))


def mixing_words(found: Sequence[dict[str, Any]]) -> str:
    """Whether chains mixed, by the diagnostics of their samplers: the worst of several."""
    if any(one.get("lost") for one in found):
        return "log joint far below the start"
    if any(one.get("mixed") is False for one in found):
        return "not mixed"
    return "mixed" if all(one.get("mixed") for one in found) else "too few draws"


def checks(results: Results) -> Section | None:
    """Results of the checks: a table, and a sentence for every flag."""
    found = {label: {c["name"]: c["status"] for r in results.of(label) for c in r.get("checks", [])}
             for label in results.labels}  # fmt: skip
    names = list(dict.fromkeys(name for one in found.values() for name in one))
    if not names:
        return None
    rows, notes = [], list[str]()
    for label in results.labels:
        flags = {flag["name"]: flag for flag in results.flags(label)}
        states = [
            flags[name]["status"] if name in flags else found[label].get(name, "") for name in names
        ]
        rows.append(
            [
                Cell(label, kind=results.status(label)),
                *(Cell(state or "–", kind=state) for state in states),
            ]
        )
        notes += [
            f"{label}: {describe_flag(flag['name'], flag['status'], flag['text'])}."
            for flag in flags.values()
        ]
    return Section(
        "checks",
        Table([Head("method"), *map(Head, names)], rows),
        notes=notes or ["No method was flagged."],
    )


def _best(name: str, values: list[float]) -> float:
    """The best of several values; nan if they are all the same."""
    known = [value for value in values if math.isfinite(value)]
    if len(set(known)) < 2 or METRICS[name][1] not in HINTS:
        return math.nan
    return min(known) if METRICS[name][1] == "lower" else max(known)


def format_number(value: float, digits: int, error: float = 0.0) -> tuple[str, str]:
    """A number and its error, if any, for a reader: 0.296, 61,234, 1.26 million.

    Args:
        value: the number.
        digits: decimals, of which large numbers have fewer.
        error: its standard error; 0 for none.
    """
    if not math.isfinite(value):
        return "not finite", ""
    size = abs(value)
    if 0 < size < 10.0**-digits and error < 10.0**-digits:
        return _power_of_ten(value), _power_of_ten(error) if error > 0 else ""
    for divisor, name in MILLIONS:
        if divisor <= size < MAX_IN_WORDS:
            return (
                f"{value / divisor:.2f} {name}",
                f"{error / divisor:.2f} {name}" if error > 0 else "",
            )
    if size >= MAX_IN_WORDS:
        return _power_of_ten(value), _power_of_ten(error) if error > 0 else ""
    kept = min(digits, max(0, 5 - len(str(int(size)))))
    return f"{value:,.{kept}f}", f"{error:,.{kept}f}" if error > 0 else ""


def _power_of_ten(value: float) -> str:
    """A very large or very small number to three digits, such as 3.20 × 10⁻⁷."""
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{mantissa} × 10{str(int(power)).translate(SUPERSCRIPTS)}"
