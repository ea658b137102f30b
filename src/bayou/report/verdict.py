"""The conclusion of a report in sentences: the best method, its lead and the uncertainty of that lead."""

from __future__ import annotations

import math

from bayou.report.results import Results


def best_label(results: Results) -> str | None:
    """The method with the lowest mean NLL among those that failed no check, or among all if every one did."""
    results = on_shared_splits(results)
    means = {label: found.value for label in results.labels if (found := results.mean(label, "nll")) is not None}
    known = {label: value for label, value in means.items() if math.isfinite(value)}
    sound = {label: value for label, value in known.items() if results.status(label) != "failed"} or known
    return min(sound, key=sound.__getitem__) if sound else None


def verdict(results: Results) -> list[str]:
    """Sentences, the conclusion first: the best method by test NLL, its lead paired over rows, and the flagged ones."""
    results, best = on_shared_splits(results), best_label(results)
    nll = results.mean(best, "nll") if best else None
    if best is None or nll is None:
        return []
    count = sum({result["split"]: len(result.get("rows", ())) for result in results.of(best)}.values())
    splits = f" of {len(results.splits)} splits" if len(results.splits) > 1 else ""
    size = f"{nll.value:.3f} ± {nll.error:.3f} on {count:,} test rows{splits}"
    sound = [label for label in results.labels if results.status(label) != "failed"]
    leads = {label: lead for label in results.labels if (lead := results.beside(label, best)) is not None}
    others = sorted((label for label in leads if label in (sound or leads)), key=lambda label: leads[label].value)
    flags = {label: ", ".join(flag["name"] for flag in results.flags(label)) for label in results.labels}
    clauses = _clauses(results, best)
    if len(results.labels) == 1:
        status = results.status(best)
        named = ", ".join(flag["name"] for flag in results.flags(best) if flag["status"] == status)
        state = {"ok": f"{best} passed every check", "warning": f"{best} has a warning ({named})",
                 "failed": f"Do not use {best} as it is: it failed a check ({named})"}  # fmt: skip
        against = f" and {clauses.pop('linear')}" if "linear" in clauses else ""
        said = [f"{state[status]}{against}; NLL {size}."]
    elif not sound:
        said = [f"Every method failed a check: use none of them as it is. The best by NLL is {best} ({size})."]
    elif others:
        said = [f"{best} is the best by NLL ({size}); the next is {others[0]} ({leads[others[0]]})."]
    else:
        said = [f"{best} is the only method that failed no check (NLL {size})."]
    if tied := [label for label in others if "chance" in leads[label].comparison]:
        said.append(f"On these rows it is not significantly better than {_and(tied)}.")
    said += [f"It {clause}." for clause in clauses.values()]
    if len(results.labels) > 1:
        flagged = [f"{label} ({names})" for label, names in flags.items() if names]
        said.append(f"Flagged: {_and(flagged)}." if flagged else "No method was flagged.")
    return said


def _clauses(results: Results, best: str) -> dict[str, str]:
    """How the best method compares with each baseline."""
    found = {}
    for name in results.baselines:
        lead, what = results.beside(name, best), f"a {name} {'model' if name == 'linear' else 'prediction'}"
        if lead is None or not math.isfinite(lead.value):
            continue
        chance = "not significantly " * ("chance" in lead.comparison)
        side = f"{chance}{'better' if lead.value > 0 else 'worse'}"
        found[name] = f"is {side} than {what} (by {abs(lead.value):.3f} ± {lead.error:.3f} nats)"
    return found


def on_shared_splits(results: Results) -> Results:
    """The results on the splits that every method was evaluated on; all results if there is no such split."""
    shared = set.intersection(*({result["split"] for result in results.of(label)} for label in results.labels))
    kept = [result for result in results.all if result["split"] in shared] or results.all
    return Results(kept, results.facts, results.failures, results.reference)


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
