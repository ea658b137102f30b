"""The conclusion of a report in sentences: the best method, its lead and the uncertainty of that lead."""

from __future__ import annotations

import torch
from torch import Tensor

from bayou.report.bootstrap import resampled
from bayou.report.results import Results


def verdict(results: Results) -> list[str]:
    """Sentences: the best method by test NLL, its lead with a paired bootstrap interval, and the flagged methods."""
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
        """The NLL of a method minus that of the best: mean and a 90 % interval."""
        difference = drawn[:, names.index(name)] - drawn[:, names.index(best)]
        low, high = difference.quantile(torch.tensor([0.05, 0.95], dtype=difference.dtype)).tolist()
        return means[name] - means[best], low, high

    splits = _shared_splits(results)
    size = f"{len(rows[best]):,} test rows" + (f" of {len(splits)} splits" if len(splits) > 1 else "")
    said = [] if sound else ["Every method failed a check: use none of them as it is. The lowest NLL:"]
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
        if tied := [label for label in others if lead(label)[1] < 0]:
            said.append(f"On these rows it is not significantly better than {_and(tied)}.")
        if len(splits) > 1 and (ahead := results.beside(others[0], best)) is not None:
            said.append(f"Over the splits its lead over {others[0]} is {ahead} nats (one standard error).")
    for name in results.baselines:
        if name in rows:
            gap, low, high = lead(name)
            what = f"a {name} {'model' if name == 'linear' else 'prediction'}"
            interval = f"({low:+.3f} to {high:+.3f})"
            if low > 0:
                said.append(f"It is better than {what} by {gap:.3f} nats {interval}.")
            elif high < 0:
                said.append(f"It is worse than {what} by {-gap:.3f} nats {interval}: use the baseline instead.")
            else:
                said.append(f"It does not differ significantly from {what}: {gap:+.3f} nats {interval}.")
    said += beside_map(results)
    flagged = [f"{label} ({', '.join(flag['name'] for flag in results.flags(label))})" for label in labels
               if results.flags(label)]  # fmt: skip
    said.append(f"Flagged: {_and(flagged)}." if flagged else "No method was flagged.")
    single = {"seed": results.seeds == 1, "split of the data": len(results.splits) == 1}
    if few := [f"one {what}" for what, only in single.items() if only]:
        more = " and ".join(option for option, only in zip(("--seeds 3", "--splits 3"), single.values(), strict=True)
                            if only)  # fmt: skip
        said.append(f"These results are from {_and(few)}; {more} would measure the variation.")
    return said


def beside_map(results: Results) -> list[str]:
    """Whether each method is better or worse than MAP, by how much, and whether that is within chance."""
    others = [label for label in results.labels if label != "MAP"]
    if "MAP" not in results.labels:
        missing = "MAP is not among these methods, so they are not compared with a point estimate; add map."
        return [missing] if others else []
    found = {label: one for label in others if (one := results.beside(label)) is not None}
    groups: dict[str, list[str]] = {}
    for label, one in found.items():
        groups.setdefault(one.comparison, []).append(f"{label} ({one})")
    order = ("worse", "worse, within chance", "better, within chance", "better")
    said = [f"{word}: {_and(groups[word])}" for word in order if word in groups]
    start = "Compared with MAP, by NLL paired over the test rows (± one standard error)"
    return [f"{start}: {'; '.join(said)}."] if said else []


def _shared_splits(results: Results) -> list[int]:
    """The splits that every method was evaluated on; if there is none, the first."""
    by_label = [{result["split"] for result in results.of(label) if result.get("rows")} for label in results.labels]
    judged = [splits for splits in by_label if splits]
    return sorted(set.intersection(*judged)) or results.splits[:1] if judged else []


def _split_rows(results: Results, label: str, split: int) -> Tensor | None:
    """NLL of the test rows of a split, the mean over seeds: (B,)."""
    mine = [r["rows"] for r in results.of(label) if r.get("rows") and r["split"] == split]
    if not mine or len({len(rows) for rows in mine}) > 1:
        return None
    return torch.tensor(mine, dtype=torch.float64).mean(0)


def _rows(results: Results) -> dict[str, Tensor]:
    """NLL of every test row of the shared splits, of every method and of the baselines: (B,) each."""
    found = {}
    for label in (*results.labels, *results.baselines):
        parts = [_split_rows(results, label, split) for split in _shared_splits(results)]
        known = [part for part in parts if part is not None]
        if known and len(known) == len(parts):
            found[label] = torch.cat(known)
    size = max((len(one) for one in found.values()), default=0)
    return {name: one for name, one in found.items() if len(one) == size and bool(one.isfinite().all())}


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
