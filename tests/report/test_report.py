"""The page of a run: its sections, tables and charts."""

import json
import re

import pytest
import torch
from torch.testing import assert_close

from bayou.app.report.charts import Axes, tick_labels, ticks
from bayou.app.report.page import RunReport
from bayou.app.report.results import Results, average
from bayou.app.report.sections import calibration, training
from bayou.app.report.tables import format_number, stages
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run
from tests.report.results import score_method

SECTIONS = (
    *("Conclusion", "Scores", "Checks", "Training", "Reliability", "Error and rejection"),
    *("Predictions for a rotated digit", "Uncertainty in and out of distribution"),
    *("Test data, cumulative", "Out-of-distribution data, cumulative"),
    *("Log-likelihood", "KL to the prior", "constant (baseline)", "linear (baseline)"),
    *("accuracy, %", "Brier", "AUROC, H", "AUROC, MI", "±"),
    *("prefers-color-scheme: dark", "@media print"),
)


def without_images(page):
    return re.sub(r"data:[^\"]*", "", page)


def test_the_report_is_one_self_contained_page(digits):
    page = (digits.folder / "report.html").read_text()
    assert [words for words in (*SECTIONS, digits.config.command()) if words not in page] == []
    assert page.index("Conclusion") < page.index("Scores")
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "<script" not in page
    assert "nan" not in without_images(page).lower().replace("finance", "")


@pytest.mark.usefixtures("short_search")
def test_bands_of_a_regression_with_several_inputs(tmp_path):
    path = tmp_path / "t.csv"
    rows = [f"{i % 7},{i % 5},{i % 7 + 2 * (i % 5) + i / 60}" for i in range(60)]
    path.write_text("\n".join(["a,b,price", *rows]))
    config = Config(str(path), ("ffg",), target="price", steps=12, samples=6)
    run = Run.create(tmp_path / "run", config)
    (result,) = run.work()
    bands = {name: torch.tensor(values) for name, values in result["observed"].items()
             if name in ("mean", "low", "high", "epistemic_low", "epistemic_high")}  # fmt: skip
    data = run.load_data()
    predictive = run.posterior()[0].predict(data.test[0], samples=result["samples"], seed=0)
    order = predictive.mean[:, 0].argsort()
    low, high = predictive.interval(0.9)
    close = {"atol": 1e-4, "rtol": 1e-4}
    for name, values in {"mean": predictive.mean, "low": low, "high": high}.items():
        expected = data.preprocessor.original(values[order, 0])
        assert_close(bands[name], expected, **close)
    width = 2 * 1.64485 * data.y_scale * predictive.epistemic_std[order, 0]
    assert_close(bands["epistemic_high"] - bands["epistemic_low"], width, **close)
    observed = data.preprocessor.original(data.test[1][:, 0]).sort().values
    points = torch.tensor(sorted(result["observed"]["points"]["y"]))
    assert_close(points, observed, **close)

    page = (run.folder / "report.html").read_text()
    assert "Predictions for test data" in page
    assert "12 of 12 test rows" in page
    assert ">price</text>" in page
    section = stages(run.report().results)
    (first, *_, last) = section.table.rows
    stage = result["selection"][0]
    score = min(trial["mse"] for trial in stage["trials"])
    expected_cells = ["FFG", stage["stage"], str(len(stage["trials"])), f"mse {score:.4g}"]
    assert [cell.text for cell in first[:4]] == expected_cells
    assert last[1].text == "evaluation on the test data"
    assert last[-1].text == f"{result['seconds_to_evaluate']:.1f}"


def test_numbers_that_are_not_finite_are_shown_as_such(digits):
    results = json.loads(json.dumps(digits.results()))
    results[-1]["metrics"]["nll"] = None
    results[-1]["error_rejection"]["error"][3] = None
    results[-1]["history"][0]["kl"] = None
    page = RunReport(results, {"data": "digits"}).html()
    assert "not finite" in page
    assert "nan" not in without_images(page).lower()


def make_result(**values):
    return {"label": "A", "seed": 0, "task": "classification", "metrics": {}} | values


def test_members_of_an_ensemble_are_separate_lines():
    history = [{"step": step, "elbo": 1.0 + step} for _ in range(2) for step in (0, 50, 99)]
    section = training(Results([make_result(history=history)], {}, {}))
    lines = [m for m in section.figures[0].chart.marks if m.css.startswith("line")]
    assert len(lines) == 2


def test_small_bins_of_a_reliability_diagram_are_left_out():
    bins = {
        "count": [1, 0, 5, 2, 20],
        "confidence": [0.1, 0.0, 0.4, 0.6, 0.9],
        "accuracy": [1.0, 0.0, 0.4, 0.5, 1.0],
    }
    section = calibration(Results([make_result(reliability=bins)], {}, {}))
    assert sum(mark.css.startswith("dot") for mark in section.figures[0].chart.marks) == 2
    assert section.about["left_out"] == 3


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        (ticks(0, 16e6), "0 2.5M 5.0M 7.5M 10.0M 12.5M 15.0M"),
        (ticks(0, 25_000), "0 5k 10k 15k 20k 25k"),
        (ticks(-3, 3), "−3 −2 −1 0 1 2 3"),
        ([0.0, 1e-5, 2e-5], "0 1e−5 2e−5"),
        ([1e15, 2e15], "1e15 2e15"),
    ],
)
def test_labels_of_ticks(values, labels):
    assert " ".join(tick_labels(values)) == labels


def test_the_margin_of_an_axis_has_space_for_its_labels():
    labels = tick_labels(ticks(1e6, 1e6 + 200))
    assert len(set(labels)) == len(labels)
    axes = Axes(y_range=(1e6, 1e6 + 200))
    assert axes.left >= 20 + 6 * max(map(len, labels))
    assert axes.px(axes.x_range[0]) == axes.left
    assert Axes().left == 50


@pytest.mark.parametrize(
    ("value", "error", "texts"),
    [
        (1.26e6, 3e4, ("1.26M", "30k")),
        (-3.4e9, 0.0, ("−3.4bn", "")),
        (61_234.5, 120.0, ("61,234", "120")),
        (0.29601, 0.0229, ("0.2960", "0.0229")),
        (3.2e-7, 1e-8, ("3.2e−7", "1e−8")),
        (float("inf"), 0.0, ("not finite", "")),
    ],
)
def test_numbers_of_a_table(value, error, texts):
    assert format_number(value, 4, error) == texts


def test_standard_errors_of_means_over_rows_seeds_and_splits():
    assert average([(0, 1.0, 0.3)]) == pytest.approx((1.0, 0.3))
    over_seeds = average([(0, 1.0, 0.3), (0, 1.8, 0.3)])
    assert over_seeds == pytest.approx((1.4, 0.5))  # √(0.3² + 0.4²)
    splits_have_equal_weights = average([(0, 1.0, 0.3), (0, 1.8, 0.3), (1, 2.0, 0.1)])
    assert splits_have_equal_weights == pytest.approx(
        ((1.4 + 2.0) / 2, ((0.5**2 + 0.1**2) / 2) ** 0.5)
    )
    over_splits = average([(0, 1.0, 0.1), (1, 2.0, 0.1)])
    assert over_splits.error == pytest.approx(0.5)  # s/√2 = |a − b|/2 of two


def test_every_method_is_compared_with_map():
    generator = torch.Generator().manual_seed(0)
    rows, noise = torch.randn(2, 400, generator=generator).double()
    noise = noise - noise.mean()
    results = [
        score_method("MAP", rows),
        score_method("MNF", rows + 0.2 + 0.1 * noise),
        score_method("FFG", rows + 0.001 + noise),
        score_method("SWAG", rows - 0.001 + noise),
        score_method("Laplace", rows - 0.2 + 0.1 * noise),
    ]
    error = 0.1 * float(noise.std()) / 20
    assert Results(results, {}, {}).difference("MNF") == pytest.approx((0.2, error))
    page = RunReport(results, {"data": "d"}).html()
    cell = f'<td class="warning">+0.200 <span class="se">± {error:.3f}</span></td>'
    assert page.count(cell) == 2  # in the scores and in the pairs
    assert f'<th scope="row">MNF minus MAP</th>{cell}<td>–</td><td>worse</td>' in page
    assert "<td>not significantly different</td>" in page
    assert Results(results[1:], {}, {}).reference == "MNF"
    assert "NLL minus MNF" in RunReport(results[1:], {"data": "d"}).html()


def test_chains_that_have_not_mixed_are_marked():
    rows = torch.arange(50.0).double()
    good = {
        **{"draws": 300, "chains": 2, "mixed": True, "lost": False},
        **{"r_hat": 1.012, "r_hat_median": 1.0, "ess": 210.0, "ess_median": 400.0},
    }
    bad = good | {"r_hat": 1.73, "ess": 4.0, "mixed": False}
    results = [
        score_method("NUTS", rows, mixing=good),
        score_method("SGLD", rows, mixing=good),
        score_method("SGLD", rows, mixing=bad, seed=1),
        score_method("MAP", rows),
    ]
    page = RunReport(results, {"data": "d"}).html()
    table = page[page.index("Mixing of the chains") :]
    assert '<th scope="row">NUTS</th><td>mixed</td><td>1.012</td>' in table
    assert '<th scope="row" class="failed">SGLD</th><td class="failed">not mixed</td>' in table
    assert "<td>1.730</td>" in table  # of the worst seed
    assert "<td>4</td><td>400</td><td>2 × 300</td>" in table
    assert "Mixing of the chains" not in RunReport(results[-1:], {"data": "d"}).html()
