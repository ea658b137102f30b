"""The tables of a report: scores, results of the checks, mixing of chains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bayou.report.results import Average, Cell, Head, Results, Section, Table

# name in the results → (title of the column, which direction is better, digits, factor)
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
    "brier": "Brier: squared distance of the probabilities from the observed class.",
    "ece": "ECE: expected calibration error.",
    "crps": "CRPS: distance of the predictive distribution from the observation, in units of y.",
    "coverage": "Coverage and width: of the central 90 % intervals.",
    "auroc_entropy": "AUROC: how well entropy (H) and mutual information (MI) separate out-of-distribution data from "
    "test data; 0.5 is chance.",
    "auroc_std": "AUROC: how well the standard deviation, and its epistemic part alone, separate out-of-distribution "
    "inputs from test data; 0.5 is chance.",
    "rejection": "Rejection: area under the error-rejection curve.",
}


def numbers(results: Results) -> Section:
    """The table of scores, with standard errors over rows, seeds and splits."""
    names = [name for name in METRICS if any(name in result["metrics"] for result in results.all)]
    means = {name: {label: results.mean(label, name) for label in results.labels} for name in names}
    best = {name: _best(name, [found.value for found in means[name].values() if found is not None]) for name in names}
    beside = "MAP" in results.labels and len(results.labels) > 1
    rows = []
    for label in (*results.labels, *results.baselines):
        baseline = label in results.baselines
        kind = "baseline" if baseline else results.status(label)
        cells = [Cell(f"{label} (baseline)" if baseline else label, kind=kind)]
        for name in names:
            found = results.mean(label, name) if baseline else means[name][label]
            first = not baseline and len(results.labels) > 1 and found is not None and found.value == best[name]
            cells.append(_cell(found, *METRICS[name][2:], best=first, kind="baseline" if baseline else ""))
        if beside:
            cells.append(_beside(results.beside(label), baseline))
        seconds = [result["seconds"] for result in results.of(label) if "seconds" in result]
        rows.append([*cells, Cell(f"{sum(seconds) / len(seconds):.1f}" if seconds else "")])
    heads = [Head("method"), *(Head(METRICS[n][0], HINTS.get(METRICS[n][1], METRICS[n][1])) for n in names)]
    heads += [Head("NLL minus MAP", "below 0 is better")] if beside else []
    words = [WORDS[name] for name in names if name in WORDS]
    if beside:
        words.append("NLL minus MAP: the difference to MAP, paired over test rows.")
    notes = [" ".join([_which_errors(results), *words]), *_missing_splits(results)]
    notes += [f"{r['label']}, seed {r['seed']}: {r['choice']}." for r in results.all if r.get("choice")]
    notes += [f"{name} failed: {why}" for name, why in results.failures.items()]
    return Section("Scores", table=Table([*heads, Head("time, s", "to train")], rows), notes=notes)


def _cell(found: Average | None, digits: int, factor: float, *, best: bool = False, kind: str = "") -> Cell:
    if found is None or (kind == "baseline" and math.isnan(found.value)):
        return Cell("–", kind=kind)
    return Cell(*_number(found.value * factor, digits, found.error * factor), best, kind)


def _beside(found: Average | None, baseline: bool) -> Cell:
    """A difference to MAP, with its interpretation."""
    if found is None:
        return Cell("–")
    kind = "baseline" if baseline else "warning" if found.comparison == "worse" else ""
    return Cell(f"{found.comparison}: {found.value:+.3f}", f"{found.error:.3f}", kind=kind)


def _which_errors(results: Results) -> str:
    """What each ± means."""
    seeds = f"{results.seeds} seeds" if results.seeds > 1 else "one seed"
    rows = "over the test rows (bootstrap)" if results.seeds == 1 else "over the test rows (bootstrap) and over seeds"
    if len(results.splits) > 1:
        return (
            f"Means over {len(results.splits)} splits of the data, {seeds} each, ± the larger of two standard errors: "
            f"of a single split, {rows}, and of the mean over splits. The figures below show the first split."
        )
    if results.seeds > 1:
        return f"Means over {seeds} of one split ± one standard error {rows}; the figures below show the first seed."
    return f"One seed, one split, ± one standard error {rows}; --seeds 3 and --splits 3 add the variation over them."


def _missing_splits(results: Results) -> list[str]:
    """Methods whose means are over fewer splits than those of others."""
    counts = {label: len({result["split"] for result in results.of(label)}) for label in results.labels}
    every = len(results.splits)
    return [f"{label}: {count} of {every} splits so far." for label, count in counts.items() if count < every]


def mixing(results: Results) -> Section | None:
    """R-hat and effective sample sizes of the samplers: the worst over seeds and splits."""
    rows = []
    for label in results.labels:
        found = [result["mixing"] for result in results.of(label) if "chains" in result.get("mixing", {})]
        if not found:
            continue
        said = mixing_words(found)
        kind = {"mixed": "", "too few draws": "warning"}.get(said, "failed")
        worst = (
            max(one.get("r_hat", math.nan) for one in found),
            max(one.get("r_hat_median", math.nan) for one in found),
        )
        least = min(one.get("ess", math.nan) for one in found), min(one.get("ess_median", math.nan) for one in found)
        rows.append(
            [
                Cell(label, kind=kind),
                Cell(said, kind=kind),
                *(Cell(_number(value, 3)[0] if math.isfinite(value) else "–") for value in worst),
                *(Cell(f"{value:,.0f}" if math.isfinite(value) else "–") for value in least),
                Cell(f"{found[0]['chains']} × {found[0]['draws']:,}"),
            ]
        )
    if not rows:
        return None
    heads = [Head("method"), Head(""), Head("R-hat", "the worst"), Head("R-hat", "the median"),
             Head("ESS", "the worst"), Head("ESS", "the median"), Head("chains × draws")]  # fmt: skip
    return Section(
        "Mixing of the chains",
        "Split R-hat and bulk effective sample size of the predictions E[y | x, w] on training rows and of the log "
        "joint. Chains that agree have an R-hat near 1. Chains that have not mixed are not a sample of the posterior, "
        "and their spread is not its uncertainty.",
        table=Table(heads, rows),
    )


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
        states = [flags[name]["status"] if name in flags else found[label].get(name, "") for name in names]
        rows.append([Cell(label, kind=results.status(label)), *(Cell(state or "–", kind=state) for state in states)])
        notes += [f"{label}, {flag['name']}: {flag['text']}." for flag in flags.values()]
    return Section(
        "Checks",
        "Every method is compared with a constant, a linear model and its own mean network, paired over rows. Its "
        "intervals or confidences must agree with the observations within chance, chains must have mixed, and "
        "training must have converged.",
        table=Table([Head("method"), *map(Head, names)], rows),
        notes=notes or ["No method was flagged."],
    )


def _best(name: str, values: list[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    if not known or METRICS[name][1] not in HINTS:
        return math.nan
    return min(known) if METRICS[name][1] == "lower" else max(known)


def _number(value: float, digits: int, error: float = 0.0) -> tuple[str, str]:
    """A number and its error, if any: ``digits`` decimals, fewer for large numbers, else scientific notation."""
    if not math.isfinite(value):
        return "not finite", ""
    if abs(value) >= 1e6 or 0 < abs(value) < 10.0**-digits:
        return f"{value:.3g}", f"{error:.1g}" if error > 0 else ""
    kept = min(digits, max(0, 5 - len(str(int(abs(value))))))
    return f"{value:,.{kept}f}", f"{error:,.{kept}f}" if error > 0 else ""
