"""The model card of a posterior: what it is, whether to believe it, and how to load it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bayou import __version__
from bayou.posteriors import Posterior

TAGS = ("bayou", "bayesian-neural-network", "uncertainty-quantification")
KEY_SCORES = ("validation", "nll", "elbo", "log_evidence")  # of the last record of a fit


def model_card(
    posterior: Posterior,
    repo_id: str,
    *,
    scores: Mapping[str, float],
    metadata: Mapping[str, Any],
) -> str:
    """Return the model card of a posterior in Markdown, with the front matter of the Hub.

    Args:
        posterior: to describe.
        repo_id: of the repository or the name of a folder, for the example.
        scores: numbers by name.
        metadata: entries of the front matter; they replace those of the same name.

    Raises:
        ValueError: for scores that are not numbers.
    """
    sections = [
        _front_matter(metadata),
        f"# {repo_id.rpartition('/')[2]}\n\nA distribution over the weights of a neural network "
        f"(a Bayesian neural network), written by bayou {__version__}: every prediction has an "
        "uncertainty.",
        _describe_fit(posterior),
        _describe_checks(posterior),
        _describe_scores(posterior, scores),
        _describe_loading(posterior, repo_id),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(metadata: Mapping[str, Any]) -> str:
    """Return the metadata of the Hub in YAML, whose values are written as JSON."""
    entries = {"library_name": "bayou", "tags": list(TAGS)} | dict(metadata)
    lines = [f"{name}: {json.dumps(value)}" for name, value in entries.items()]
    return "\n".join(("---", *lines, "---"))


def _describe_fit(posterior: Posterior) -> str:
    """Return the table of the method, the likelihood, the prior and the data."""
    target = posterior.target
    weights = sum(value.numel() for value in posterior.template().values())
    rows = {
        "posterior": repr(posterior),
        "likelihood": repr(target.likelihood_spec),
        "prior": repr(target.prior),
        "rows of the fit": f"{target.n:,}",
        "random and learned numbers": f"{weights:,}",
        "end of the fit": posterior.stopped or "finished",
        "reason for the method": posterior.choice,
        "settings selected on held-out rows": posterior.plan,
        "temperature": "" if posterior.temperature == 1.0 else f"{posterior.temperature:.4g}",
        "calibration map": repr(posterior.calibration_map) if posterior.calibration_map else "",
    }
    if target.frozen:
        rows["frozen tensors"] = (
            f"{len(target.frozen)}, which are not in the files: the network needs the same values"
        )
    return "## Fit\n\n" + _table(("", ""), [(name, text) for name, text in rows.items() if text])


def _describe_checks(posterior: Posterior) -> str:
    """Return the table of the checks, the worst first."""
    checks = posterior.checks
    if not len(checks):
        return "## Checks\n\nNothing was checked: `bayou.diagnostics.check(posterior, train, held)`"
    rows = [(check.name, check.status, check.text) for check in checks]
    return "## Checks\n\n" + _table(("check", "result", "in words"), rows)


def _describe_scores(posterior: Posterior, scores: Mapping[str, float]) -> str:
    """Return the table of the scores of the user, and those of the last record of the fit."""
    last = posterior.history[-1] if posterior.history else {}
    rows: list[tuple[str, ...]] = []
    for name, value in scores.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f"scores must be numbers by name, got {name!r}: {value!r:.40}; for a tensor pass "
                "float(value)"
            )
        rows.append((name, f"{value:.6g}", "of the author"))
    for name in KEY_SCORES:
        score = last.get(name)
        if score is not None and math.isfinite(score):
            rows.append((name, f"{score:.6g}", "last record of the fit"))
    return "## Scores\n\n" + _table(("score", "value", "source"), rows) if rows else ""


def _describe_loading(posterior: Posterior, repo_id: str) -> str:
    """Return the code that loads the posterior, and what it needs."""
    net = type(posterior.target.net).__name__
    return f"""## Use

The files hold tensors and settings, and no code. Build the network of the fit (`{net}`), then:

```python
import bayou

posterior = bayou.from_pretrained("{repo_id}", build_network())
print(posterior.checks)
predictive = posterior.predict(x)
predictive.mean, predictive.std, predictive.epistemic_std
```"""


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = (" ".join(cell.replace("|", "\\|").split()) for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
