"""Which method, by how much, how sure: the end of a page, in words."""

from __future__ import annotations

import torch
from torch import Tensor

from bayou.report.bootstrap import RESAMPLES, resampled
from bayou.report.results import Results

SURE, LIKELY = 0.95, 0.8  # shares of the resamples in which a method is the best


def verdict(results: Results) -> list[str]:
    """Sentences: the best method by test NLL, its lead with a paired bootstrap interval, and what was flagged."""
    rows = _rows(results)
    labels = [label for label in results.labels if label in rows]
    if not labels:
        return []
    sound = [label for label in labels if results.status(label) != "failed"]
    candidates = sound or labels
    means = {name: float(values.mean()) for name, values in rows.items()}
    best = min(candidates, key=means.__getitem__)
    names = list(rows)
    drawn = resampled(torch.stack([rows[name] for name in names], 1))

    def lead(name: str) -> tuple[float, float, float]:
        """How much more NLL another has than the best: mean and a 90 % interval."""
        difference = drawn[:, names.index(name)] - drawn[:, names.index(best)]
        low, high = difference.quantile(torch.tensor([0.05, 0.95], dtype=difference.dtype)).tolist()
        return means[name] - means[best], low, high

    size = f"{len(rows[best]):,} test rows"
    said = [] if sound else ["Every method failed a check: none should be used as it is. The least bad by NLL:"]
    others = sorted((label for label in candidates if label != best), key=means.__getitem__)
    if not others:
        alone = "" if len(labels) == 1 else ", the only method that failed no check"
        said.append(f"{best}{alone}: NLL {means[best]:.3f} nats on {size}.")
    else:
        gap, low, high = lead(others[0])
        said.append(
            f"{best} is the best by NLL: {means[best]:.3f} nats on {size}, {gap:.3f} less than the next, {others[0]} "
            f"(90 % interval of the difference {low:+.3f} to {high:+.3f})."
        )
        columns = drawn[:, [names.index(label) for label in (best, *others)]]
        share = float((columns.argmin(1) == 0).double().mean())
        said.append(f"It is the best in {share:.0%} of {RESAMPLES:,} bootstrap resamples of the rows: {_sure(share)}.")
        if tied := [label for label in others if lead(label)[1] < 0]:
            said.append(f"These rows cannot tell it from {_and(tied)}.")
    for name in results.baselines:
        if name in rows:
            gap, low, high = lead(name)
            what = f"a {name} {'model' if name == 'linear' else 'prediction'}"
            interval = f"({low:+.3f} to {high:+.3f})"
            if low > 0:
                said.append(f"It beats {what} by {gap:.3f} nats {interval}.")
            elif high < 0:
                said.append(f"It is worse than {what}, by {-gap:.3f} nats {interval}: use that instead.")
            else:
                said.append(f"It cannot be told from {what}: {gap:+.3f} nats {interval}.")
    if "MAP" in rows and (worse := [label for label in labels if means[label] > means["MAP"]]):
        said.append(f"Worse than MAP in mean NLL: {_and(worse)}.")
    flagged = [f"{label} ({', '.join(flag['name'] for flag in results.flags(label))})" for label in labels
               if results.flags(label)]  # fmt: skip
    said.append(f"Flagged: {_and(flagged)}." if flagged else "No method was flagged.")
    if results.seeds == 1:
        said.append("All of this holds for one seed and one split of the data; --seeds 3 tells how much they matter.")
    return said


def _rows(results: Results) -> dict[str, Tensor]:
    """NLL of every test row, of every method (the mean over its seeds) and of the baselines: (B,) each."""
    found = {}
    for label in results.labels:
        rows = [torch.tensor(r["rows"], dtype=torch.float64) for r in results.of(label) if r.get("rows")]
        if rows and len({len(one) for one in rows}) == 1:
            found[label] = torch.stack(rows).mean(0)
    found |= {name: torch.tensor(one["rows"], dtype=torch.float64) for name, one in results.baselines.items()}
    size = max((len(one) for one in found.values()), default=0)
    return {name: one for name, one in found.items() if len(one) == size and bool(one.isfinite().all())}


def _sure(share: float) -> str:
    if share >= SURE:
        return "as sure as these rows can be"
    return "likely, not certain" if share >= LIKELY else "not settled"


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
