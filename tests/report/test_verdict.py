"""The conclusion of a report: the best method, its lead and what the checks flagged."""

import pytest
import torch

from bayou.app.report.results import Results
from bayou.app.report.verdict import verdict
from tests.report.results import score_method

ZEROS = torch.zeros(5).double()


def test_methods_worse_than_baselines_are_flagged(digits):
    """After twelve steps of training a linear model is far better."""
    baselines = digits.facts()["baselines"]
    assert baselines["constant"]["metrics"]["nll"] == pytest.approx(2.303, abs=0.02)  # log 10
    assert baselines["linear"]["metrics"]["accuracy"] > 0.9
    result = digits.results()[2]
    rows = len(result["rows"])
    assert sum(result["rows"]) / rows == pytest.approx(result["metrics"]["nll"], rel=1e-4)
    accuracy = result["metrics"]["accuracy"]
    binomial = (accuracy * (1 - accuracy) / rows) ** 0.5
    # 1,000 resamples: 2 % by chance
    assert result["errors"]["accuracy"] == pytest.approx(binomial, rel=0.1)
    statuses = {check["name"]: check["status"] for check in result["checks"]}
    assert statuses["linear"] == "failed"
    page = (digits.folder / "report.html").read_text()
    assert "MNF: the check &#39;linear&#39; FAILED: worse than a linear model" in page
    assert '<th scope="row" class="failed">MNF' in page
    conclusion = " ".join(digits.report().verdict)
    assert conclusion.startswith("Every method failed a check")
    assert "It is worse than a linear model (by " in conclusion
    assert "Flagged by the checks: MAP " in conclusion


def test_the_lead_of_the_best_method():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, generator=generator).double()
    noise = 0.1 * torch.randn(200, generator=generator).double()
    lead = float(noise.mean())
    linear = {"rows": (rows + 0.5 + noise).tolist(), "metrics": {}, "errors": {}}
    facts = {"baselines": {"linear": linear}}
    a = score_method("A", rows)
    c = score_method("C", rows + 1 + noise)

    sentences = verdict(Results([score_method("B", rows + noise), c, a], facts, {}))
    assert sentences[0].startswith(f"{'A' if lead > 0 else 'B'} is the best by NLL")
    (tied,) = [sentence for sentence in sentences if "not significantly better than" in sentence]
    assert "C" not in tied
    assert any(s.startswith("It is better than a linear model (by 0.5") for s in sentences)
    assert "No method was flagged." in sentences

    sentences = verdict(Results([c, a], facts, {}))
    assert f"the next is C (+{1 + lead:.3f} ± " in sentences[0]
    assert not any("not significantly" in sentence for sentence in sentences)

    failed = [{"name": "mixing", "status": "failed", "text": "words"}]
    best = score_method("A", rows, checks=failed)
    sentences = verdict(Results([best, score_method("MAP", rows + 0.1)], facts, {}))
    assert sentences[0].startswith("MAP is the only method that failed no check (NLL ")
    assert "Flagged by the checks: A has chains that did not mix." in sentences


def test_the_lead_over_splits():
    generator = torch.Generator().manual_seed(0)
    results = []
    for split, lead in enumerate((0.3, 0.2, -0.1)):
        rows = torch.randn(100, generator=generator).double()
        results.append(score_method("MAP", rows + lead, split=split))
        results.append(score_method("FFG", rows, split=split))
    conclusion = " ".join(verdict(Results(results, {}, {})))
    assert "on 300 test rows of 3 splits" in conclusion
    assert "the next is MAP (+0.133 ± 0.120)" in conclusion
    assert "not significantly better than MAP" in conclusion
    conclusion = " ".join(verdict(Results(results[:-1], {}, {})))  # FFG has two of the splits
    assert "on 200 test rows of 2 splits" in conclusion


def score_classifier(label, nll, accuracy, kept, auroc, **values):
    """Return a result of 100 test rows.

    ``kept`` is the accuracy without the least certain fifth.
    """
    rows = torch.full((100,), nll)
    metrics = {"nll": nll, "accuracy": accuracy, "auroc_entropy": auroc}
    curve = {"rejected": [0.0, 0.2, 0.4], "error": [1 - accuracy, 1 - kept, 0.0]}
    result = {"task": "classification", "metrics": metrics, "error_rejection": curve}
    return score_method(label, rows, **result, **values)


def test_the_first_sentence_about_classes():
    results = [
        score_classifier("MAP", 0.5, 0.90, 0.95, 0.87),
        score_classifier("MNF", 0.3, 0.92, 0.984, 0.80),
        score_classifier("SWAG", 0.4, 0.91, 0.96, 0.85),
    ]
    sentences = verdict(Results(results, {"ood": "letters"}, {}))
    assert sentences[0] == (
        "MNF is right in 92 % of the test cases; if the least certain 20 % are set aside, in 98 %, "
        "but in telling letters from test data it is last of 3 methods (AUROC 0.800, MAP 0.870)."
    )
    assert sentences[1].startswith("MNF is the best by NLL (0.300")
    flag = {"name": "converged", "status": "warning", "text": "words"}
    result = score_classifier("MNF", 0.3, 0.997, 0.9, 0.8, checks=[flag])
    assert verdict(Results([result], {}, {}))[0] == (
        "MNF is right in more than 99 % of the test cases; if the least certain 20 % are set "
        "aside, it is not right more often (90 %). Use it with care: it may not have converged."
    )
    result = score_classifier("MNF", 0.1, 1.0, 1.0, 0.8)
    assert verdict(Results([result], {}, {}))[0] == "MNF is right in all test cases."


@pytest.mark.parametrize(("error", "is_significant"), [(0.1, True), (0.6, False)])
def test_the_first_sentence_about_numbers(error, is_significant):
    """A linear model is named where it is better by more than a standard error."""
    result = score_method(
        "Laplace",
        ZEROS,
        metrics={"nll": 0.0, "rmse": 3.0, "coverage": 0.88},
        errors={"rmse": error},
        losses=[1.0, 2.0, 1.26e6, 9e6, 9e6],
        observed={"y_label": "price"},
    )
    baseline = {"rows": (ZEROS + 1).tolist(), "metrics": {}, "errors": {}}
    constant = baseline | {"losses": [4e6] * 5}
    linear = baseline | {"metrics": {"rmse": 2.5}, "losses": [1e6] * 5}
    facts = {"baselines": {"constant": constant, "linear": linear}}
    advantage = ", but a linear model has the better RMSE (3.0000, linear 2.5000)"
    assert verdict(Results([result], facts, {}))[0] == (
        "The typical error of Laplace is 1.26M in price (4M for a constant prediction); its 90 % "
        f"intervals contained 88 % of the test values{advantage if is_significant else ''}."
    )
