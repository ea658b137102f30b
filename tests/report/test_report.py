"""The page of a run: one file, with what the numbers say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from bayou.app.report.tables import stages
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run

QUICK = {"steps": 12, "samples": 6, "members": 2}


def test_the_report_is_one_self_contained_page(digits: Run) -> None:
    page = (digits.folder / "report.html").read_text()
    for words in ("Scores", "Predictions for a rotated digit", "Uncertainty in and out of distribution",
                  "accuracy, %", "Brier", "AUROC, H", "AUROC, MI", "Test data, cumulative",
                  "Out-of-distribution data, cumulative", "Reliability",
                  "Error and rejection", "Training", "Log-likelihood",
                  "KL to the prior", "±", "prefers-color-scheme: dark",
                  "Checks", "constant (baseline)", "linear (baseline)", "Conclusion",
                  "@media print", digits.config.command()):  # fmt: skip
        assert words in page, words
    assert page.index("Conclusion") < page.index("Scores")
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "<script" not in page
    assert "nan" not in re.sub(r"data:[^\"]*", "", page).lower().replace("finance", "")


def test_a_regression_has_bands_for_any_inputs(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "a,b,price\n"
        + "".join(f"{i % 7},{i % 5},{i % 7 + 2 * (i % 5) + i / 60}\n" for i in range(60))
    )
    run = Run.create(tmp_path / "run", Config(str(path), ("ffg",), target="price", **QUICK))  # type: ignore[arg-type]
    (result,) = run.work()
    shown = result["observed"]
    assert shown["y_label"] == "price"
    assert shown["mean"] == sorted(shown["mean"])
    data, (posterior, _, _) = run.load_data(), run.posterior()
    p = posterior.predict(data.test[0], samples=result["samples"], seed=0)
    order = p.mean[:, 0].argsort()
    for name, expected in zip(
        ("low", "high"), p.interval(0.9), strict=True
    ):  # the level of the coverage in the table
        torch.testing.assert_close(
            torch.tensor(shown[name]),
            data.preprocessor.original(expected[order, 0]),
            atol=1e-4,
            rtol=0,
        )
    width = torch.tensor(shown["epistemic_high"]) - torch.tensor(shown["epistemic_low"])
    torch.testing.assert_close(
        width, 2 * 1.64485 * data.y_scale * p.epistemic_std[order, 0], atol=1e-4, rtol=1e-4
    )
    assert shown["points"]["of"] == 12
    seen = data.preprocessor.original(data.test[1][:, 0]).sort().values
    torch.testing.assert_close(torch.tensor(sorted(shown["points"]["y"])), seen, atol=1e-4, rtol=0)
    page = (run.folder / "report.html").read_text()
    assert "Predictions for test data" in page
    assert "12 of 12 test rows" in page
    assert ">price</text>" in page
    (first, *_, last) = stages(run.report().results).table.rows  # type: ignore[union-attr]
    tried = result["selection"][0]
    best = min(trial["mse"] for trial in tried["trials"])
    assert [cell.text for cell in first[:4]] == [
        "FFG",
        tried["stage"],
        str(len(tried["trials"])),
        f"mse {best:.4g}",
    ]
    assert (last[1].text, last[-1].text) == (
        "evaluation on the test data",
        f"{result['seconds_to_evaluate']:.1f}",
    )
    assert sum(stage["seconds"] for stage in result["selection"]) <= result["seconds"]


def test_numbers_that_are_not_finite_are_shown_as_such(digits: Run) -> None:
    """A null in a file is no reason for a traceback, and no number either."""
    from bayou.app.report.page import RunReport

    results = json.loads(json.dumps(digits.results()))
    broken = results[-1]
    broken["metrics"]["nll"] = None
    broken["error_rejection"]["error"][3] = None
    broken["history"][0]["kl"] = None
    page = RunReport(results, {"data": "digits"}).html()
    assert "not finite" in page
    assert "nan" not in re.sub(r"data:[^\"]*", "", page).lower()


def test_members_of_an_ensemble_are_separate_lines() -> None:
    from bayou.app.report.sections import _history

    rows = [{"step": step, "log_likelihood": 1.0} for _ in range(2) for step in (0, 50, 99)]
    x, y = _history(rows, "log_likelihood", 2.0)
    assert x == [0, 50, 99, 99, 0, 50, 99]
    assert [value != value for value in y] == [False] * 3 + [True] + [False] * 3


def test_small_bins_of_a_reliability_diagram_are_left_out() -> None:
    from bayou.app.report.results import Results
    from bayou.app.report.sections import calibration

    found = {
        "count": [1, 0, 5, 2, 20],
        "confidence": [0.1, 0.0, 0.4, 0.6, 0.9],
        "accuracy": [1.0, 0.0, 0.4, 0.5, 1.0],
    }
    result = {
        "label": "A",
        "seed": 0,
        "task": "classification",
        "metrics": {},
        "reliability": found,
    }
    section = calibration(Results([result], {}, {}))
    assert section is not None
    assert sum(mark.css.startswith("dot") for mark in section.figures[0].chart.marks) == 2
    assert section.about["left_out"] == 3


def test_ticks_of_an_axis_are_readable_and_fit() -> None:
    from bayou.app.report.charts import Axes, tick_labels, ticks

    assert tick_labels(ticks(0, 16e6)) == [
        "0",
        "2.5M",
        "5.0M",
        "7.5M",
        "10.0M",
        "12.5M",
        "15.0M",
    ]  # it was 1.5e+04k
    assert tick_labels(ticks(0, 25_000)) == ["0", "5k", "10k", "15k", "20k", "25k"]
    assert tick_labels(ticks(-3, 3)) == ["−3", "−2", "−1", "0", "1", "2", "3"]
    assert tick_labels([0.0, 1e-5, 2e-5]) == ["0", "1e−5", "2e−5"]
    assert tick_labels([1e15, 2e15]) == ["1e15", "2e15"]
    near = tick_labels(ticks(1e6, 1e6 + 200))
    assert len(set(near)) == len(near)
    axes = Axes(y_range=(1e6, 1e6 + 200))
    assert axes.left >= 20 + 6 * max(map(len, near))  # the name of the axis, and the longest label
    assert axes.px(axes.x_range[0]) == axes.left
    assert Axes().left == 50


def test_numbers_of_a_table_are_readable() -> None:
    from bayou.app.report.tables import format_number

    assert format_number(1.26e6, 4, 3e4) == ("1.26 million", "0.03 million")
    assert format_number(-3.4e9, 4) == ("-3.40 billion", "")
    assert format_number(61_234.5, 4, 120.0) == ("61,234", "120")
    assert format_number(0.29601, 4, 0.0229) == ("0.2960", "0.0229")
    assert format_number(3.2e-7, 4, 1e-8) == ("3.20 × 10⁻⁷", "1.00 × 10⁻⁸")
    assert format_number(2.5e16, 4) == ("2.50 × 10¹⁶", "")
