"""The gate: baselines, flags, the verdict, and ``--method auto``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import bayou
from bayou.app.cli.app import app
from bayou.app.runs.folder import Run
from bayou.select import named


def bayou_command(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def test_methods_are_compared_with_baselines_and_failures_are_flagged(digits: Run) -> None:
    """Twelve steps of training: a linear model is far better, and everybody is told."""
    found = digits.facts()["baselines"]
    assert found["constant"]["metrics"]["nll"] == pytest.approx(2.303, abs=0.02)  # log 10
    assert found["linear"]["metrics"]["accuracy"] > 0.9
    result = digits.results()[2]
    assert sum(result["rows"]) / len(result["rows"]) == pytest.approx(
        result["metrics"]["nll"], rel=1e-4
    )
    hits = result["metrics"]["accuracy"]
    binomial = (hits * (1 - hits) / len(result["rows"])) ** 0.5
    assert result["errors"]["accuracy"] == pytest.approx(
        binomial, rel=0.1
    )  # 1,000 resamples: 2 % by chance
    flags = {check["name"]: check for check in result["checks"] if check["status"] != "ok"}
    assert flags["linear"]["status"] == "failed"
    page = (digits.folder / "report.html").read_text()
    assert "MNF: the check &#39;linear&#39; FAILED: worse than a linear model" in page
    assert '<th scope="row" class="failed">MNF' in page
    said = " ".join(digits.report().verdict)
    assert said.startswith("Every method failed a check")
    assert "It is worse than a linear model (by " in said
    assert "Flagged by the checks: MAP " in said


def test_the_conclusion_has_the_best_method_its_lead_and_its_uncertainty() -> None:
    from bayou.app.report.results import Results
    from bayou.app.report.verdict import verdict

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, generator=generator).double()

    def result(label: str, nll: torch.Tensor, status: str = "ok") -> dict[str, Any]:
        checks = [{"name": "mixing", "status": status, "text": "words"}]
        return scored(label, nll, checks=checks)

    noise = 0.1 * torch.randn(200, generator=generator).double()
    best, near, far = result("A", rows), result("B", rows + noise), result("C", rows + 1 + noise)
    facts = {
        "baselines": {
            "linear": {"rows": (rows + 0.5 + noise).tolist(), "metrics": {}, "errors": {}}
        }
    }
    said = verdict(Results([near, far, best], facts, {}))
    lead = float(noise.mean())
    assert said[0].startswith(f"{'A' if lead > 0 else 'B'} is the best by NLL")
    assert any("not significantly better than" in one and "C" not in one for one in said)
    assert any(one.startswith("It is better than a linear model (by 0.5") for one in said)
    assert "No method was flagged." in said
    said = verdict(Results([result("B", rows + 1 + noise), result("A", rows)], facts, {}))
    assert f"the next is B (+{1 + lead:.3f} ± " in said[0]
    assert not any("not significantly" in one for one in said)
    said = verdict(Results([result("A", rows, "failed"), result("MAP", rows + 0.1)], facts, {}))
    assert said[0].startswith("MAP is the only method that failed no check (NLL ")
    assert "Flagged by the checks: A has chains that did not mix." in said


@pytest.mark.slow
def test_flags_are_printed_in_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = bayou_command(
        "train", "moons", "--method", "map", "--steps", "5", "--out", "run", "--samples", "5"
    )
    assert done.exit_code == 0, done.output
    assert "linear: baseline  nll 0.2" in done.stderr
    assert "map-0: failed a check: it is worse than a linear model" in done.stderr
    assert "map-0: the check 'linear' FAILED: worse than a linear model: NLL" in done.stderr
    *_, numbers, conclusion, following = done.stderr.splitlines()
    assert numbers.startswith("MAP: accuracy 8")
    assert conclusion.startswith("Do not use MAP as it is: it is worse than a linear model")
    assert following == "next: bayou compare moons --methods map,laplace,ensemble --out run-compare"
    done = bayou_command("evaluate", "run")
    assert "map-0: the check 'linear' FAILED: worse than a linear model: NLL" in done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_auto_selects_by_held_out_rows_and_explains_its_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a network that never learns, one that does and one that cannot be fitted, the second."""
    from bayou.select import Auto

    class Broken(bayou.methods.Method):
        def fit(self, *args: Any, **options: Any) -> Any:
            raise FloatingPointError("it went to infinity")

    made = Auto(
        {
            "idle": bayou.MAP(steps=1, lr=1e-9),
            "map": bayou.MAP(steps=150, lr=0.01),
            "broken": Broken(),
        }
    )
    monkeypatch.setitem(named.METHODS, "auto", named.Named("auto", "Auto", "", lambda config: made))
    monkeypatch.chdir(tmp_path)
    done = bayou_command("train", "moons", "--method", "auto", "--out", "run", "--samples", "5")
    assert done.exit_code == 0, done.output
    assert "auto-0: map was selected: the lowest NLL on" in done.stderr
    assert "broken failed: it went to infinity" in done.stderr
    assert "map was selected" in Path("run/report.html").read_text()
    posterior, _, _ = Run.open("run").posterior("auto")
    data = Run.open("run").load_data()
    assert posterior.target.n == data.n  # fitted again to all rows
    assert bayou.metrics.accuracy(posterior.predict(data.test[0]), data.test[1]) > 0.8
    broken = Auto({"broken": Broken()})
    with pytest.raises(ValueError, match="no method could be fitted"):
        bayou.fit(torch.nn.Linear(2, 2), data.train, method=broken, progress=False)


def test_errors_over_rows_and_seeds_add_up() -> None:
    from bayou.app.report.results import Results

    results = [{"label": "A", "seed": seed, "task": "regression", "metrics": {"nll": nll}, "errors": {"nll": 0.3}}
               for seed, nll in ((0, 1.0), (1, 1.8))]  # fmt: skip
    one = Results(results[:1], {}, {}).mean("A", "nll")
    assert one is not None
    assert one == pytest.approx((1.0, 0.3))
    two = Results(results, {}, {}).mean("A", "nll")
    assert two == pytest.approx((1.4, 0.5))  # √(0.3² + 0.4²)


def test_splits_have_equal_weights_and_the_larger_standard_error() -> None:
    from bayou.app.report.results import average

    found = average([(0, 1.0, 0.3), (0, 1.8, 0.3), (1, 2.0, 0.1)])
    assert found.value == pytest.approx((1.4 + 2.0) / 2)
    assert found.error == pytest.approx(((0.5**2 + 0.1**2) / 2) ** 0.5)
    assert average([(0, 1.0, 0.1), (1, 2.0, 0.1)]).error == pytest.approx(
        0.5
    )  # over splits: s/√2 = |a − b|/2 of two


def scored(label: str, nll: torch.Tensor, **more: Any) -> dict[str, Any]:
    metrics = {"nll": float(nll.mean())}
    return {"label": label, "seed": 0, "task": "regression", "metrics": metrics, "rows": nll.tolist(), "seconds": 1.0,
            "checks": []} | more  # fmt: skip


def test_every_method_is_compared_with_map() -> None:
    from bayou.app.report.page import RunReport
    from bayou.app.report.results import Results

    generator = torch.Generator().manual_seed(0)
    rows, noise = torch.randn(2, 400, generator=generator).double()
    noise = noise - noise.mean()
    results = [scored("MAP", rows), scored("MNF", rows + 0.2 + 0.1 * noise), scored("FFG", rows + 0.001 + noise),
               scored("SWAG", rows - 0.001 + noise), scored("Laplace", rows - 0.2 + 0.1 * noise)]  # fmt: skip
    found = Results(results, {}, {})
    worse = found.difference("MNF")
    assert worse is not None
    assert worse[:2] == pytest.approx((0.2, 0.1 * float(noise.std()) / 20))
    error = float(noise.std()) / 20
    page = RunReport(results, {"data": "d"}).html()
    cell = f'<td class="warning">+0.200 <span class="se">± {0.1 * error:.3f}</span></td>'
    assert page.count(cell) == 2  # in the scores and in the pairs
    assert f'<th scope="row">MNF minus MAP</th>{cell}<td>–</td><td>worse</td>' in page
    assert "<td>not significantly different</td>" in page
    assert Results(results[1:], {}, {}).reference == "MNF"
    assert "NLL minus MNF" in RunReport(results[1:], {"data": "d"}).html()


def test_the_conclusion_has_the_lead_over_the_splits() -> None:
    from bayou.app.report.results import Results
    from bayou.app.report.verdict import verdict

    generator = torch.Generator().manual_seed(0)
    results = []
    for split, lead in enumerate((0.3, 0.2, -0.1)):
        rows = torch.randn(100, generator=generator).double()
        results += [scored("MAP", rows + lead, split=split), scored("FFG", rows, split=split)]
    said = " ".join(verdict(Results(results, {}, {})))
    assert "on 300 test rows of 3 splits" in said
    assert "the next is MAP (+0.133 ± 0.120)" in said
    assert "not significantly better than MAP" in said
    said = " ".join(verdict(Results(results[:-1], {}, {})))  # FFG has not seen the last split yet
    assert "on 200 test rows of 2 splits" in said


def test_chains_that_have_not_mixed_are_marked_in_the_report() -> None:
    from bayou.app.report.page import RunReport

    rows = torch.arange(50.0).double()
    good = {"draws": 300, "chains": 2, "r_hat": 1.012, "r_hat_median": 1.0, "ess": 210.0, "ess_median": 400.0,
            "mixed": True, "lost": False}  # fmt: skip
    bad = good | {"r_hat": 1.73, "ess": 4.0, "mixed": False}
    results = [scored("NUTS", rows, mixing=good), scored("SGLD", rows, mixing=good),
               scored("SGLD", rows, mixing=bad, seed=1), scored("MAP", rows)]  # fmt: skip
    page = RunReport(results, {"data": "d"}).html()
    part = page[page.index("Mixing of the chains") :]
    assert '<th scope="row">NUTS</th><td>mixed</td><td>1.012</td>' in part
    assert (
        '<th scope="row" class="failed">SGLD</th><td class="failed">not mixed</td><td>1.730</td>'
        in part
    )  # the worst seed
    assert "<td>4</td><td>400</td><td>2 × 300</td>" in part
    assert "Mixing of the chains" not in RunReport(results[-1:], {"data": "d"}).html()


def test_the_terminal_marks_unmixed_chains_and_methods_worse_than_map(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from bayou.app.cli.live import Board
    from bayou.app.report.results import Average

    board = Board(["sgld-0", "ffg-0"])
    board.tell(
        "sgld-0",
        "done",
        {"nll": 0.5, "r_hat": 1.61, "ess": 3.6, "mixed": False, "difference_from_map": None},
    )
    board.tell("ffg-0", "done", {"nll": 0.5, "difference_from_map": Average(0.04, 0.01)})
    board.tell("ffg-1", "failed", {"error": "words"})
    text = capsys.readouterr().err
    assert "1.61 not mixed" in text
    assert "+0.040 ± 0.010 worse" in text
    assert "words" not in text


def test_the_part_that_is_done_is_that_of_all_methods_of_a_comparison(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from bayou.app.cli import live

    board = live.Board(["mle-0", "map-0"])
    for name in ("map-0", "mle-0"):  # MAP is fitted first
        board.tell(name, "fitting", {})
        board.last_line = -live.LINE
        board.show("fitting", 6, 6, {"done": 0.99})
        board.tell(name, "done", {"nll": 0.5})
    shown = [line for line in capsys.readouterr().err.splitlines() if "of the whole" in line]
    assert shown == [
        "map-0 (1 of 2): fitting 6/6  49 % of the whole",
        "mle-0 (2 of 2): fitting 6/6  99 % of the whole",
    ]


def classified(
    label: str, nll: float, accuracy: float, kept: float, auroc: float, **more: Any
) -> dict[str, Any]:
    """A result of 100 test rows; ``kept``: the accuracy without the least certain fifth."""
    metrics = {"nll": nll, "accuracy": accuracy, "auroc_entropy": auroc}
    curve = {"rejected": [0.0, 0.2, 0.4], "error": [1 - accuracy, 1 - kept, 0.0]}
    return {"label": label, "seed": 0, "task": "classification", "metrics": metrics, "rows": [nll] * 100,
            "error_rejection": curve, "checks": []} | more  # fmt: skip


def test_the_first_sentence_is_for_a_manager_and_has_the_worst_number() -> None:
    from bayou.app.report.results import Results
    from bayou.app.report.verdict import verdict

    results = [
        classified("MAP", 0.5, 0.90, 0.95, 0.87),
        classified("MNF", 0.3, 0.92, 0.984, 0.80),
        classified("SWAG", 0.4, 0.91, 0.96, 0.85),
    ]
    said = verdict(Results(results, {"ood": "letters"}, {}))
    assert said[0] == (
        "MNF is right in 92 of 100 test cases; if the least certain 20 % are set aside, in 98 of 100, but in telling "
        "letters from test data it is last of 3 methods (AUROC 0.800, MAP 0.870)."
    )
    assert said[1].startswith("MNF is the best by NLL (0.300")
    flag = {"name": "converged", "status": "warning", "text": "words"}
    said = verdict(Results([classified("MNF", 0.3, 0.997, 0.9, 0.8, checks=[flag])], {}, {}))
    assert said[0] == (
        "MNF is right in more than 99 of 100 test cases; if the least certain 20 % are set aside, it is not right more "
        "often (90 of 100). Use it with care: it may not have converged."
    )
    assert "has a warning (converged)" not in " ".join(said)
    assert (
        verdict(Results([classified("MNF", 0.1, 1.0, 1.0, 0.8)], {}, {}))[0]
        == "MNF is right in all test cases."
    )


def test_the_first_sentence_about_numbers_has_the_typical_error_and_the_share_in_the_intervals() -> (
    None
):
    from bayou.app.report.results import Results
    from bayou.app.report.verdict import verdict

    rows = torch.zeros(5).double()
    metrics = {"nll": 0.0, "rmse": 3.0, "coverage": 0.88}
    result = scored(
        "Laplace",
        rows,
        metrics=metrics,
        losses=[1.0, 2.0, 1.26e6, 9e6, 9e6],
        observed={"y_label": "price"},
    )
    constant = {"rows": (rows + 1).tolist(), "metrics": {}, "errors": {}, "losses": [4e6] * 5}
    linear = {
        "rows": (rows + 1).tolist(),
        "metrics": {"rmse": 2.5},
        "errors": {},
        "losses": [1e6] * 5,
    }
    facts = {"baselines": {"constant": constant, "linear": linear}}
    said = verdict(Results([result], facts, {}))
    assert said[0] == (
        "The typical error of Laplace is 1.26 million in price (4.00 million for a constant prediction); its 90 % "
        "intervals contained 88 of 100 test values, but a linear model has the better RMSE (3.0000, linear 2.5000)."
    )


@pytest.mark.parametrize(("error", "is_named"), [(0.1, True), (0.6, False)])
def test_a_linear_model_is_named_if_it_is_better_by_more_than_chance(
    error: float, is_named: bool
) -> None:
    from bayou.app.report.results import Results
    from bayou.app.report.verdict import verdict

    rows = torch.zeros(5).double()
    metrics = {"nll": 0.0, "rmse": 3.0, "coverage": 0.88}
    result = scored("Laplace", rows, metrics=metrics, errors={"rmse": error}, losses=[1.0] * 5)
    linear = {"rows": rows.tolist(), "metrics": {"rmse": 2.5}, "errors": {}, "losses": [1.0] * 5}
    constant = linear | {"metrics": {}, "losses": [2.0] * 5}
    facts = {"baselines": {"constant": constant, "linear": linear}}
    sentences = verdict(Results([result], facts, {}))
    assert ("a linear model has the better RMSE" in " ".join(sentences)) == is_named


def test_settings_are_spelled_for_their_reader() -> None:
    """The checks of a fit name options in a terminal, and arguments in Python."""
    from bayou.core.progress import command_line_spelling
    from bayou.posteriors.checks import check_history

    data = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    posterior = bayou.fit(torch.nn.Linear(2, 2), data, bayou.MAP(steps=3), progress=False)
    posterior.stopped = "interrupted"
    in_python = str(check_history(posterior))
    assert "give more steps= or epochs=" in in_python
    assert "checkpoint=" in in_python
    with command_line_spelling():
        in_terminal = str(check_history(posterior))
    assert "give more --steps or --epochs" in in_terminal
    assert "`bayou resume`" in in_terminal
    assert "=" not in in_terminal
    assert str(check_history(posterior)) == in_python


def test_a_command_names_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = bayou_command(
        "train", "moons", "--method", "mle", "--steps", "5", "--out", "run", "--samples", "5"
    )
    warning = (
        "mle-0: the check 'converged' gives a WARNING: 5 steps are too few to judge convergence"
    )
    assert f"{warning}; give more --steps or --epochs" in done.stderr
    assert "steps=" not in done.stderr
    assert "steps=" not in Path("run/report.html").read_text()
    done = bayou_command("train", "moons", "--patience", "3")
    assert "--patience needs held-out rows; give --validation too" in done.stderr
