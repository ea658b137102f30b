"""The conclusion of a report in sentences.

They say what to expect of the best method, its lead and the uncertainty of that.
"""

from __future__ import annotations

import math
from statistics import fmean, median

from bayou.app.report.results import Average, Result, Results
from bayou.app.report.tables import HINTS, METRICS, format_number
from bayou.posteriors.checks import concern

SET_ASIDE_SHARE = 0.2  # of the predictions, the least certain, in the first sentence
NOMINAL_COVERAGE = 0.9
AUROCS = ("auroc_entropy", "auroc_mutual_information", "auroc_std", "auroc_epistemic_std")


def best_label(results: Results) -> str | None:
    """Return the method with the lowest mean NLL among those that failed no check.

    If every method failed one, it is the best of all; None if no NLL is finite.

    Args:
        results: of one run or of several.
    """
    results = on_shared_splits(results)
    means = _finite_means(results, "nll")
    sound = {label: value for label, value in means.items() if results.status(label) != "failed"}
    candidates = sound or means
    return min(candidates, key=candidates.__getitem__) if candidates else None


def verdict(results: Results) -> list[str]:
    """Conclude in sentences: what to expect of the best method, its lead, and the flagged methods.

    The first entry can stand alone and needs no statistics: how often the method is right, or how
    far it is off, what its uncertainty is good for, its weakest score, and a warning if a check
    failed.

    Args:
        results: of one run or of several.
    """
    results = on_shared_splits(results)
    best = best_label(results)
    nll = results.mean(best, "nll") if best else None
    if best is None or nll is None:
        return []
    comparison = _comparison(results, best, nll)
    expectation = _expectation(results, best)
    if expectation is None:
        return comparison
    sentence = f"{expectation}{_weakness(results, best)}."
    status = results.status(best)
    if status == "ok":
        return [sentence, *comparison]
    flags = [flag for flag in results.flags(best) if flag["status"] == status]
    concerns = _join([concern(flag["name"]) for flag in flags])
    if status == "warning":
        return [f"{sentence} Use it with care: it {concerns}.", *comparison]
    if len(results.labels) > 1:
        refusal = (
            "Every method failed a check: use none of them as it is. The best one, "
            f"{best}, {concerns}."
        )
    else:
        refusal = f"Do not use {best} as it is: it {concerns}."
    return [f"{refusal} {sentence}", *comparison]


def _expectation(results: Results, best: str) -> str | None:
    """Say how often the method is right, or how far it is off, and what its uncertainty gives."""
    if results.classes:
        return _expect_classes(results, best)
    return _expect_numbers(results, best)


def _expect_classes(results: Results, best: str) -> str | None:
    """Say how often the class is right, of all rows and of those that are kept."""
    accuracy = results.mean(best, "accuracy")
    if accuracy is None or not math.isfinite(accuracy.value):
        return None
    if accuracy.value == 1:
        return f"{best} is right in all test cases"
    right = f"{best} is right in {percentage(accuracy.value)} of the test cases"
    accuracies = [_accuracy_of_kept(result) for result in results.of(best)]
    known = [value for value in accuracies if value is not None]
    if not known:
        return right
    kept_accuracy = fmean(known)
    share = f"if the least certain {SET_ASIDE_SHARE:.0%} are set aside".replace("%", " %")
    if kept_accuracy <= accuracy.value:
        return f"{right}; {share}, it is not right more often ({percentage(kept_accuracy)})"
    return f"{right}; {share}, in {percentage(kept_accuracy)}"


def _accuracy_of_kept(result: Result) -> float | None:
    """Return the accuracy of the predictions that are kept when the least certain are rejected."""
    curve = result.get("error_rejection") or {"rejected": [], "error": []}
    for share, error in zip(curve["rejected"], curve["error"], strict=True):
        if math.isclose(share, SET_ASIDE_SHARE) and math.isfinite(error):
            return 1.0 - float(error)
    return None


def _expect_numbers(results: Results, best: str) -> str | None:
    """Say how far predictions are off, and how often the intervals contain y."""
    error = _typical_error(results, best)
    coverage = results.mean(best, "coverage")
    if error is None or coverage is None:
        return None
    first = results.of(best)[0]
    bands = first.get("curve") or first.get("observed") or {}
    target = bands.get("y_label", "y")
    constant_error = _typical_error(results, "constant")
    constant = ""
    if constant_error is not None:
        constant = f" ({_in_data_units(constant_error)} for a constant prediction)"
    intervals = f"{NOMINAL_COVERAGE:.0%} intervals".replace("%", " %")
    return (
        f"The typical error of {best} is {_in_data_units(error)} in {target}{constant}; its "
        f"{intervals} contained {percentage(coverage.value)} of the test values"
    )


def _typical_error(results: Results, label: str) -> float | None:
    """Return the median of |y − mean| over the test rows, averaged over seeds and splits."""
    medians = [median(result["losses"]) for result in results.of(label) if result.get("losses")]
    known = [value for value in medians if math.isfinite(value)]
    return fmean(known) if known else None


def _weakness(results: Results, best: str) -> str:
    """Name the score with the method's worst rank, or one in which a linear model is better."""
    ranks = {name: _rank(results, best, name) for name in METRICS}
    ranked = [(rank, name) for name, rank in ranks.items() if rank is not None]
    if not ranked:
        return _linear_advantage(results, best)
    rank, name = max(ranked, key=lambda pair: (pair[0], pair[1] in AUROCS))
    if rank == 1:
        return ""
    values = _finite_means(results, name)
    leader = min(values, key=lambda label: _loss(name, values[label]))
    scores = f"{_score(name, values[best])}, {leader} {_score(name, values[leader])}"
    rank_name = "last" if rank == len(values) else f"number {rank}"
    position = f"{rank_name} of {len(values)} methods"
    if name in AUROCS:
        ood = results.facts.get("ood") or "out-of-distribution data"
        return f", but in telling {ood} from test data it is {position} (AUROC {scores})"
    return f", but by {_short_title(name)} it is {position} ({scores})"


def _linear_advantage(results: Results, best: str) -> str:
    """Name the first score in which a linear model is better by more than a standard error."""
    for name in METRICS:
        mean = results.mean(best, name)
        linear = results.mean("linear", name)
        if mean is None or linear is None or METRICS[name][1] not in HINTS:
            continue
        is_known = math.isfinite(mean.value) and math.isfinite(linear.value)
        if is_known and _loss(name, mean.value) - mean.error > _loss(name, linear.value):
            scores = f"{_score(name, mean.value)}, linear {_score(name, linear.value)}"
            return f", but a linear model has the better {_short_title(name)} ({scores})"
    return ""


def _short_title(name: str) -> str:
    """Return the title of a score without its unit."""
    return METRICS[name][0].partition(",")[0]


def _rank(results: Results, best: str, name: str) -> int | None:
    """Return the rank of a method by a score, 1 for the best of several.

    It is None for a score that does not rank methods. Methods that are better by less than a
    standard error do not count.
    """
    values = _finite_means(results, name)
    if best not in values or len(values) < 2 or METRICS[name][1] == "":
        return None
    mean = results.mean(best, name)
    error = 0.0 if mean is None else mean.error
    threshold = _loss(name, values[best]) - error
    return 1 + sum(_loss(name, value) < threshold for value in values.values())


def _finite_means(results: Results, name: str) -> dict[str, float]:
    """Return the means of a score by method, where they are finite."""
    means = {label: results.mean(label, name) for label in results.labels}
    return {
        label: mean.value
        for label, mean in means.items()
        if mean is not None and math.isfinite(mean.value)
    }


def _loss(name: str, value: float) -> float:
    """Return a score with its sign or distance such that less is better."""
    if name == "coverage":
        return abs(value - NOMINAL_COVERAGE)
    return -value if METRICS[name][1] == "higher" else value


def _score(name: str, value: float) -> str:
    """Return a score as in the table, with its unit."""
    title, _, digits, factor = METRICS[name]
    unit = " %" if title.endswith("%") else ""
    return f"{format_number(value * factor, digits)[0]}{unit}"


def _in_data_units(value: float) -> str:
    """Return a number in the units of the data, to three digits."""
    if 1e-3 <= abs(value) < 1e3:
        return f"{value:.3g}"
    return format_number(value, 3)[0]


def percentage(share: float) -> str:
    """Return a share in words: "92 %", but never "100 %" for less than all.

    Args:
        share: from 0 to 1.
    """
    count = round(100 * share)
    if count == 100 and share < 1:
        return "more than 99 %"
    if count == 0 and share > 0:
        return "less than 1 %"
    return f"{count} %"


def _comparison(results: Results, best: str, nll: Average) -> list[str]:
    """Describe the lead of the best method by NLL, paired over rows, and the flagged methods."""
    size = _describe_nll(results, best, nll)
    baseline_clauses = _compare_with_baselines(results, best)
    sound = [label for label in results.labels if results.status(label) != "failed"]
    differences = {label: results.difference(label, best) for label in results.labels}
    leads = {label: lead for label, lead in differences.items() if lead is not None}
    rivals = [label for label in leads if label in (sound or leads)]
    rivals.sort(key=lambda label: leads[label].value)
    if len(results.labels) == 1:
        sentences = [_describe_single(results, best, baseline_clauses, size)]
    elif not sound:
        sentences = [f"The best by NLL is {best} ({size})."]
    elif rivals:
        next_best = f"the next is {rivals[0]} ({leads[rivals[0]]})"
        sentences = [f"{best} is the best by NLL ({size}); {next_best}."]
    else:
        sentences = [f"{best} is the only method that failed no check (NLL {size})."]
    tied = [label for label in rivals if not leads[label].is_significant]
    if tied:
        sentences.append(f"On these rows it is not significantly better than {_join(tied)}.")
    sentences += [f"It {clause}." for clause in baseline_clauses.values()]
    if len(results.labels) > 1:
        sentences.append(_describe_flags(results))
    return sentences


def _describe_nll(results: Results, best: str, nll: Average) -> str:
    """Return the NLL of a method and the rows that it is a mean over."""
    rows_by_split = {result["split"]: len(result.get("rows", ())) for result in results.of(best)}
    rows = sum(rows_by_split.values())
    splits = f" of {len(results.splits)} splits" if len(results.splits) > 1 else ""
    return f"{nll.value:.3f} ± {nll.error:.3f} on {rows:,} test rows{splits}"


def _describe_flags(results: Results) -> str:
    """Return the sentence about the methods that checks flagged."""
    clauses = []
    for label in results.labels:
        concerns = [concern(flag["name"]) for flag in results.flags(label)]
        if concerns:
            clauses.append(f"{label} {_join(concerns)}")
    if not clauses:
        return "No method was flagged."
    return f"Flagged by the checks: {'; '.join(clauses)}."


def _describe_single(
    results: Results,
    best: str,
    baseline_clauses: dict[str, str],
    size: str,
) -> str:
    """Return the sentence about the checks of the only method.

    It takes the clause about the linear model out of ``baseline_clauses``.
    """
    linear = baseline_clauses.pop("linear", "")
    flags = results.flags(best)
    if not flags:
        return f"{best} passed every check{linear and f' and {linear}'}; NLL {size}."
    concerns = _join([concern(flag["name"]) for flag in flags])
    return f"By its checks {best} {concerns}{linear and f'; it {linear}'}; NLL {size}."


def _compare_with_baselines(results: Results, best: str) -> dict[str, str]:
    """Return a clause about the best method and each baseline."""
    clauses = {}
    for name in results.baselines:
        lead = results.difference(name, best)
        if lead is None or not math.isfinite(lead.value):
            continue
        noun = "model" if name == "linear" else "prediction"
        chance = "" if lead.is_significant else "not significantly "
        comparison = "better" if lead.value > 0 else "worse"
        size = f"{abs(lead.value):.3f} ± {lead.error:.3f} nats"
        clauses[name] = f"is {chance}{comparison} than a {name} {noun} (by {size})"
    return clauses


def on_shared_splits(results: Results) -> Results:
    """Return the results on the splits that every method was evaluated on.

    If there is no such split, all results are returned.

    Args:
        results: of one run or of several.
    """
    splits = [{result["split"] for result in results.of(label)} for label in results.labels]
    shared = set.intersection(*splits)
    kept = [result for result in results.all if result["split"] in shared] or results.all
    return Results(kept, results.facts, results.failures, results.reference)


def _join(words: list[str]) -> str:
    """Join words by commas and "and"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
