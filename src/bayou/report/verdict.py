"""The conclusion of a report in sentences: what to expect of the best method, its lead and the
uncertainty of that.
"""

from __future__ import annotations

import math
from statistics import fmean, median

from bayou.posteriors.checks import concern
from bayou.report.results import Average, Result, Results
from bayou.report.tables import HINTS, METRICS, format_number

SET_ASIDE = 0.2  # of the predictions, the least certain: the share in the first sentence
NOMINAL_COVERAGE = 0.9
AUROCS = ("auroc_entropy", "auroc_mutual_information", "auroc_std", "auroc_epistemic_std")
ORDINALS = ("the best", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


def best_label(results: Results) -> str | None:
    """The method with the lowest mean NLL among those that failed no check, or among all if every
    one did.
    """
    results = on_shared_splits(results)
    means = {
        label: found.value
        for label in results.labels
        if (found := results.mean(label, "nll")) is not None
    }
    known = {label: value for label, value in means.items() if math.isfinite(value)}
    sound = {
        label: value for label, value in known.items() if results.status(label) != "failed"
    } or known
    return min(sound, key=sound.__getitem__) if sound else None


def verdict(results: Results) -> list[str]:
    """Conclude in sentences: what to expect of the best method, then its lead paired over rows, and
    the flagged ones.

    The first entry can stand alone and needs no statistics: how often the method is right, or how
    far it is off, what its uncertainty is good for, its weakest score, and a warning if a check
    failed.

    Args:
        results: of one run or of several.
    """
    results, best = on_shared_splits(results), best_label(results)
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
    concerns = _join(
        [concern(flag["name"]) for flag in results.flags(best) if flag["status"] == status]
    )
    if status == "warning":
        return [f"{sentence} Use it with care: it {concerns}.", *comparison]
    if len(results.labels) > 1:
        refusal = f"Every method failed a check: use none of them as it is. The best one, {best}, {concerns}."
    else:
        refusal = f"Do not use {best} as it is: it {concerns}."
    return [f"{refusal} {sentence}", *comparison]


def _expectation(results: Results, best: str) -> str | None:
    """How often the method is right, or how far it is off, and what its uncertainty is good for."""
    return _expected_classes(results, best) if results.classes else _expected_numbers(results, best)


def _expected_classes(results: Results, best: str) -> str | None:
    accuracy = results.mean(best, "accuracy")
    if accuracy is None or not math.isfinite(accuracy.value):
        return None
    if accuracy.value == 1:
        return f"{best} is right in all test cases"
    right = f"{best} is right in {of_hundred(accuracy.value)} test cases"
    kept = [_accuracy_of_kept(result) for result in results.of(best)]
    known = [value for value in kept if value is not None]
    if not known:
        return right
    share = f"if the least certain {SET_ASIDE:.0%} are set aside".replace("%", " %")
    if fmean(known) <= accuracy.value:
        return f"{right}; {share}, it is not right more often ({of_hundred(fmean(known))})"
    return f"{right}; {share}, in {of_hundred(fmean(known))}"


def _accuracy_of_kept(result: Result) -> float | None:
    """The accuracy of the predictions that are kept when the least certain are set aside."""
    curve = result.get("error_rejection") or {"rejected": [], "error": []}
    for share, error in zip(curve["rejected"], curve["error"], strict=True):
        if math.isclose(share, SET_ASIDE) and math.isfinite(error):
            return 1.0 - float(error)
    return None


def _expected_numbers(results: Results, best: str) -> str | None:
    off, coverage = _typical_error(results, best), results.mean(best, "coverage")
    if off is None or coverage is None:
        return None
    shown = [result.get("curve") or result.get("observed") or {} for result in results.of(best)]
    target = shown[0].get("y_label", "y")
    constant = _typical_error(results, "constant")
    beside = "" if constant is None else f" ({_plain(constant)} for a constant prediction)"
    return (
        f"The typical error of {best} is {_plain(off)} in {target}{beside}; its {NOMINAL_COVERAGE:.0%} intervals "
        f"contained {of_hundred(coverage.value)} test values"
    ).replace("% intervals", " % intervals")


def _typical_error(results: Results, label: str) -> float | None:
    """The median of |y − mean| over the test rows, averaged over seeds and splits."""
    medians = [median(result["losses"]) for result in results.of(label) if result.get("losses")]
    known = [value for value in medians if math.isfinite(value)]
    return fmean(known) if known else None


def _weakness(results: Results, best: str) -> str:
    """The score in which the method has the worst rank among the methods, or is behind a linear
    model.
    """
    ranked = [(rank, name) for name in METRICS if (rank := _rank(results, best, name)) is not None]
    if not ranked:
        return _behind_linear(results, best)
    rank, name = max(ranked, key=lambda pair: (pair[0], pair[1] in AUROCS))
    if rank == 1:
        return ""
    values = _finite_means(results, name)
    leader = min(values, key=lambda label: _loss(name, values[label]))
    numbers = f"{_score(name, values[best])}, {leader} {_score(name, values[leader])}"
    place = (
        "last"
        if rank == len(values)
        else ORDINALS[rank - 1]
        if rank <= len(ORDINALS)
        else f"number {rank}"
    )
    of = f"{place} of {len(values)} methods"
    if name in AUROCS:
        ood = results.facts.get("ood") or "out-of-distribution data"
        return f", but in telling {ood} from test data it is {of} (AUROC {numbers})"
    return f", but by {METRICS[name][0].partition(',')[0]} it is {of} ({numbers})"


def _behind_linear(results: Results, best: str) -> str:
    for name in METRICS:
        own, other = results.mean(best, name), results.mean("linear", name)
        if (
            own is None
            or other is None
            or not (math.isfinite(own.value) and math.isfinite(other.value))
        ):
            continue
        if METRICS[name][1] in HINTS and _loss(name, own.value) > _loss(name, other.value):
            title = METRICS[name][0].partition(",")[0]
            numbers = f"{_score(name, own.value)}, linear {_score(name, other.value)}"
            return f", but a linear model has the better {title} ({numbers})"
    return ""


def _rank(results: Results, best: str, name: str) -> int | None:
    """The rank of a method by a score, 1 for the best of several; None for a score that does not
    rank methods.

    Methods that are better by less than a standard error do not count.
    """
    values = _finite_means(results, name)
    if best not in values or len(values) < 2 or METRICS[name][1] == "":
        return None
    own = results.mean(best, name)
    error = 0.0 if own is None else own.error
    return 1 + sum(
        _loss(name, value) < _loss(name, values[best]) - error for value in values.values()
    )


def _finite_means(results: Results, name: str) -> dict[str, float]:
    means = {label: results.mean(label, name) for label in results.labels}
    return {
        label: mean.value
        for label, mean in means.items()
        if mean is not None and math.isfinite(mean.value)
    }


def _loss(name: str, value: float) -> float:
    """A score turned so that less is better."""
    if name == "coverage":
        return abs(value - NOMINAL_COVERAGE)
    return -value if METRICS[name][1] == "higher" else value


def _score(name: str, value: float) -> str:
    """A score as in the table, with its unit."""
    title, _, digits, factor = METRICS[name]
    unit = " %" if title.endswith("%") else ""
    return f"{format_number(value * factor, digits)[0]}{unit}"


def _plain(value: float) -> str:
    """A number in the units of the data, to three digits."""
    if 1e-3 <= abs(value) < 1e3:
        return f"{value:.3g}"
    return format_number(value, 3)[0]


def of_hundred(share: float) -> str:
    """A share in words: "92 of 100", but never "100 of 100" for less than all.

    Args:
        share: from 0 to 1.
    """
    count = round(100 * share)
    if count == 100 and share < 1:
        return "more than 99 of 100"
    if count == 0 and share > 0:
        return "fewer than 1 of 100"
    return f"{count} of 100"


def _comparison(results: Results, best: str, nll: Average) -> list[str]:
    """The lead of the best method by NLL, paired over rows, and the flagged methods."""
    count = sum(
        {result["split"]: len(result.get("rows", ())) for result in results.of(best)}.values()
    )
    splits = f" of {len(results.splits)} splits" if len(results.splits) > 1 else ""
    size = f"{nll.value:.3f} ± {nll.error:.3f} on {count:,} test rows{splits}"
    sound = [label for label in results.labels if results.status(label) != "failed"]
    leads = {
        label: lead for label in results.labels if (lead := results.beside(label, best)) is not None
    }
    others = sorted(
        (label for label in leads if label in (sound or leads)),
        key=lambda label: leads[label].value,
    )
    clauses = _clauses(results, best)
    if len(results.labels) == 1:
        sentences = [_single(results, best, clauses, size)]
    elif not sound:
        sentences = [f"The best by NLL is {best} ({size})."]
    elif others:
        sentences = [
            f"{best} is the best by NLL ({size}); the next is {others[0]} ({leads[others[0]]})."
        ]
    else:
        sentences = [f"{best} is the only method that failed no check (NLL {size})."]
    if tied := [label for label in others if not leads[label].is_significant]:
        sentences.append(f"On these rows it is not significantly better than {_join(tied)}.")
    sentences += [f"It {clause}." for clause in clauses.values()]
    if len(results.labels) > 1:
        concerns = {
            label: [concern(flag["name"]) for flag in results.flags(label)]
            for label in results.labels
        }
        flagged = [f"{label} {_join(named)}" for label, named in concerns.items() if named]
        sentences.append(
            f"Flagged by the checks: {'; '.join(flagged)}." if flagged else "No method was flagged."
        )
    return sentences


def _single(results: Results, best: str, clauses: dict[str, str], size: str) -> str:
    """The sentence about the checks of the only method."""
    linear = clauses.pop("linear", "")
    flags = results.flags(best)
    if not flags:
        return f"{best} passed every check{linear and f' and {linear}'}; NLL {size}."
    concerns = _join([concern(flag["name"]) for flag in flags])
    return f"By its checks {best} {concerns}{linear and f'; it {linear}'}; NLL {size}."


def _clauses(results: Results, best: str) -> dict[str, str]:
    """How the best method compares with each baseline."""
    found = {}
    for name in results.baselines:
        lead, what = (
            results.beside(name, best),
            f"a {name} {'model' if name == 'linear' else 'prediction'}",
        )
        if lead is None or not math.isfinite(lead.value):
            continue
        chance = "" if lead.is_significant else "not significantly "
        side = f"{chance}{'better' if lead.value > 0 else 'worse'}"
        found[name] = f"is {side} than {what} (by {abs(lead.value):.3f} ± {lead.error:.3f} nats)"
    return found


def on_shared_splits(results: Results) -> Results:
    """The results on the splits that every method was evaluated on; all results if there is no such
    split.
    """
    shared = set.intersection(
        *({result["split"] for result in results.of(label)} for label in results.labels)
    )
    kept = [result for result in results.all if result["split"] in shared] or results.all
    return Results(kept, results.facts, results.failures, results.reference)


def _join(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
