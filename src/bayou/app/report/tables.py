"""The tables of a report: scores, results of the checks, mixing of chains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from bayou.app.report.charts import short
from bayou.app.report.results import Average, Cell, Head, ReportTable, Result, Results, Section
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
KEY_NUMBERS_OF_CLASSES = ("accuracy", "nll", "ece")
KEY_NUMBERS_OF_REGRESSION = ("rmse", "nll", "coverage")
MIN_SHORTENED = 1e3  # differences with fewer decimals
MAX_PLAIN = 1e6  # larger numbers have a unit
MAX_PAIRED = 4  # methods of which all pairs are shown; more are paired with the reference only


class _Trial(NamedTuple):
    """A trial of a selection, ordered by its score on held-out rows."""

    score: float
    score_text: str
    settings: str


def key_numbers(results: Results, label: str) -> list[tuple[Head, Cell]]:
    """Return the three scores of a method to look at first.

    Args:
        results: of one run or of several.
        label: the method.
    """
    names = KEY_NUMBERS_OF_CLASSES if results.classes else KEY_NUMBERS_OF_REGRESSION
    numbers = []
    for name in names:
        mean = results.mean(label, name)
        if mean is not None:
            numbers.append((_head(name), _cell(mean, *METRICS[name][2:])))
    return numbers


def _head(name: str) -> Head:
    """Return the column of a score."""
    title, better = METRICS[name][:2]
    return Head(title, HINTS.get(better, better))


def numbers(results: Results) -> Section:
    """Return the table of scores, with standard errors over rows, seeds and splits.

    Args:
        results: of one run or of several.
    """
    names = [name for name in METRICS if any(name in result["metrics"] for result in results.all)]
    best = {name: _best_value(results, name) for name in names}
    has_differences = len(results.labels) > 1
    rows = [
        _score_row(results, label, best, has_differences)
        for label in (*results.labels, *results.baselines)
    ]
    heads = [Head("method"), *map(_head, names)]
    if has_differences:
        heads.append(Head(f"NLL minus {results.reference}", "below 0 is better"))
    heads.append(Head("time, s", "to train"))
    notes = _missing_splits(results)
    notes += [f"{name} failed: {error}" for name, error in results.failures.items()]
    about = {"names": names, "has_differences": has_differences}
    return Section("scores", ReportTable(heads, rows), notes=notes, about=about)


def _score_row(
    results: Results,
    label: str,
    best: dict[str, float],
    has_differences: bool,
) -> list[Cell]:
    """Return the row of a method or baseline in the table of scores."""
    is_baseline = label in results.baselines
    css = "baseline" if is_baseline else ""
    first = Cell(label, css=results.status(label))
    if is_baseline:
        first = Cell(f"{label} (baseline)", css=css)
    cells = [first]
    for name, best_value in best.items():
        mean = results.mean(label, name)
        is_best = not is_baseline and mean is not None and mean.value == best_value
        cells.append(_cell(mean, *METRICS[name][2:], best=is_best, css=css))
    if has_differences:
        cells.append(_difference(results.difference(label), css))
    seconds = [result["seconds"] for result in results.of(label) if "seconds" in result]
    cells.append(Cell(f"{sum(seconds) / len(seconds):.1f}" if seconds else ""))
    return cells


def _best_value(results: Results, name: str) -> float:
    """Return the best mean of a score; nan if all methods have the same, or it ranks none."""
    better = METRICS[name][1]
    means = [results.mean(label, name) for label in results.labels]
    values = [mean.value for mean in means if mean is not None and math.isfinite(mean.value)]
    if len(set(values)) < 2 or better not in HINTS:
        return math.nan
    return min(values) if better == "lower" else max(values)


def pairs(results: Results) -> Section | None:
    """Return differences of methods, paired over the test rows, with their standard errors.

    Args:
        results: of one run or of several.
    """
    labels = results.labels
    reference = results.reference
    chosen = list(combinations(labels, 2))
    if len(labels) > MAX_PAIRED:
        chosen = [(label, reference) for label in labels if label != reference]
    factor = 1.0
    digits = 3
    loss_name = "absolute error"
    if results.classes:
        factor = 100.0
        digits = 2
        loss_name = "wrong classes, %"
    rows = []
    for first, second in chosen:
        nll = results.difference(first, second)
        loss = results.difference(first, second, "losses")
        if nll is not None:
            comparison = nll.comparison
            rows.append(
                [
                    Cell(f"{first} minus {second}"),
                    _difference(nll),
                    _difference(loss, "", digits, factor),
                    Cell(comparison, best=comparison == "better"),
                ]
            )
    if not rows:
        return None
    heads = [
        Head("pair"),
        Head("NLL", "below 0 is better"),
        Head(loss_name, "below 0 is better"),
        Head("by NLL, the first is"),
    ]
    return Section("pairs", ReportTable(heads, rows), about={"sure": SURE})


def stages(results: Results) -> Section | None:
    """Return what the first seed of each method did, in order, with times.

    The stages are the selection of settings, the fit and the evaluation.

    Args:
        results: of one run or of several.
    """
    rows = []
    for label in results.labels:
        rows += _stage_rows(label, results.of(label)[0])
    if not rows:
        return None
    heads = [*map(Head, ("method", "stage", "tried", "lowest score", "with", "time, s"))]
    notes = [
        f"{result['label']}, seed {result['seed']}: {result[key]}."
        for result in results.all
        for key in ("plan", "choice", "calibration")
        if result.get(key)
    ]
    cells = [[*map(Cell, row)] for row in rows]
    return Section("stages", ReportTable(heads, cells), notes=notes)


def _stage_rows(label: str, result: Result) -> list[list[str]]:
    """Return the stages of one result as text."""
    rows = []
    selection = result.get("selection", [])
    for stage in selection:
        trials = [_read_trial(trial) for trial in stage["trials"]]
        best = min(trials, default=_Trial(0.0, "", "–"))
        count = str(len(trials))
        seconds = f"{stage['seconds']:.1f}"
        rows.append([label, stage["stage"], count, best.score_text, best.settings, seconds])
    fit_seconds = result.get("seconds", math.nan) - sum(stage["seconds"] for stage in selection)
    if fit_seconds > 0:
        title = "fit with the selected settings" if selection else "fit"
        rows.append([label, title, "", "", "", f"{fit_seconds:.1f}"])
    judging_seconds = result.get("seconds_to_evaluate")
    if judging_seconds is not None:
        title = "evaluation on the test data"
        rows.append([label, title, "", "", "", f"{judging_seconds:.1f}"])
    return rows


def _read_trial(trial: dict[str, Any]) -> _Trial:
    """Return the score of a trial on held-out rows, the same as text, and its settings as text."""
    score_name = next((name for name in ("nll", "mse") if name in trial), None)
    words = []
    for name, value in trial.items():
        if name != score_name:
            words.append(value if isinstance(value, str) else f"{name} {value:.3g}")
    settings = ", ".join(words)
    if score_name is None:
        return _Trial(0.0, "", settings)
    score = trial[score_name]
    return _Trial(score, f"{score_name} {score:.4g}", settings)


def _cell(
    mean: Average | None,
    digits: int,
    factor: float,
    *,
    best: bool = False,
    css: str = "",
) -> Cell:
    """Return the cell of a score."""
    if mean is None or (css == "baseline" and math.isnan(mean.value)):
        return Cell("–", css=css)
    text, error_text = format_number(mean.value * factor, digits, mean.error * factor)
    return Cell(text, error_text, best, css)


def _difference(
    difference: Average | None,
    css: str = "",
    digits: int = 3,
    factor: float = 1.0,
) -> Cell:
    """Return the cell of a difference of losses with its sign, marked where it is significant."""
    if difference is None or not math.isfinite(difference.value):
        return Cell("–", css=css)
    if not css and difference.comparison == "worse":
        css = "warning"
    value = factor * difference.value
    error = factor * difference.error
    if abs(value) >= MIN_SHORTENED:
        text, error_text = format_number(value, digits, error)
    else:
        text = f"{value:,.{digits}f}"
        error_text = f"{error:,.{digits}f}"
    sign = "+" if difference.value >= 0 else ""
    is_best = not css and difference.comparison == "better"
    return Cell(f"{sign}{text}", error_text, is_best, css)


def _missing_splits(results: Results) -> list[str]:
    """Return notes about methods whose means are over fewer splits than those of the rest."""
    total = len(results.splits)
    notes = []
    for label in results.labels:
        count = len({result["split"] for result in results.of(label)})
        if count < total:
            notes.append(f"{label}: {count} of {total} splits so far.")
    return notes


def mixing(results: Results) -> Section | None:
    """Return R-hat and effective sample sizes of the samplers: the worst over seeds and splits.

    Args:
        results: of one run or of several.
    """
    rows = []
    for label in results.labels:
        diagnostics = [
            result["mixing"] for result in results.of(label) if "chains" in result.get("mixing", {})
        ]
        if diagnostics:
            rows.append(_mixing_row(label, diagnostics))
    if not rows:
        return None
    heads = [
        Head("method"),
        Head("state"),
        Head("R-hat", "the worst"),
        Head("R-hat", "the median"),
        Head("ESS", "the worst"),
        Head("ESS", "the median"),
        Head("chains × draws"),
    ]
    return Section("mixing", ReportTable(heads, rows))


def _mixing_row(label: str, diagnostics: Sequence[dict[str, Any]]) -> list[Cell]:
    """Return the row of a sampler in the table of mixing."""
    state = mixing_state(diagnostics)
    css = {"mixed": "", "too few draws": "warning"}.get(state, "failed")
    cells = [Cell(label, css=css), Cell(state, css=css)]
    for key, worst, number_format in (
        ("r_hat", max, ",.3f"),
        ("r_hat_median", max, ",.3f"),
        ("ess", min, ",.0f"),
        ("ess_median", min, ",.0f"),
    ):
        value = worst(seed.get(key, math.nan) for seed in diagnostics)
        cells.append(Cell(format(value, number_format) if math.isfinite(value) else "–"))
    first = diagnostics[0]
    return [*cells, Cell(f"{first['chains']} × {first['draws']:,}")]


def mixing_state(diagnostics: Sequence[dict[str, Any]]) -> str:
    """Return in words whether chains mixed: the worst of several samplers.

    Args:
        diagnostics: of the samplers.
    """
    if any(seed.get("lost") for seed in diagnostics):
        return "log joint far below the start"
    if any(seed.get("mixed") is False for seed in diagnostics):
        return "not mixed"
    if all(seed.get("mixed") for seed in diagnostics):
        return "mixed"
    return "too few draws"


def checks(results: Results) -> Section | None:
    """Return results of the checks: a table, and a sentence for every flag.

    Args:
        results: of one run or of several.
    """
    statuses: dict[str, dict[str, str]] = {}
    for label in results.labels:
        statuses[label] = {
            check["name"]: check["status"]
            for result in results.of(label)
            for check in result.get("checks", [])
        }
    names = list(dict.fromkeys(name for by_name in statuses.values() for name in by_name))
    if not names:
        return None
    rows = []
    notes: list[str] = []
    for label in results.labels:
        flags = {flag["name"]: flag for flag in results.flags(label)}
        cells = [Cell(label, css=results.status(label))]
        for name in names:
            status = statuses[label].get(name, "")
            if name in flags:
                status = flags[name]["status"]
            cells.append(Cell(status or "–", css=status))
        rows.append(cells)
        for name, flag in flags.items():
            notes.append(f"{label}: {describe_flag(name, flag['status'], flag['text'])}.")
    table = ReportTable([Head("method"), *map(Head, names)], rows)
    return Section("checks", table, notes=notes or ["No method was flagged."])


def format_number(value: float, digits: int, error: float = 0.0) -> tuple[str, str]:
    """Return a number and its error, if any, as text: 0.296, 61,234, 1.26M.

    Args:
        value: the number.
        digits: decimals, of which large numbers have fewer.
        error: its standard error; 0 for none.
    """
    if not math.isfinite(value):
        return "not finite", ""
    size = abs(value)
    is_small = 0 < size < 10.0**-digits and error < 10.0**-digits
    if is_small or size >= MAX_PLAIN:
        return short(value), short(error) if error > 0 else ""
    decimals = min(digits, max(0, 5 - len(str(int(size)))))
    return f"{value:,.{decimals}f}", f"{error:,.{decimals}f}" if error > 0 else ""
