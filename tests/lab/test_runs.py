"""Run folders and the command line: what a new user would try, and what must not be lost."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import bayou
from bayou.lab import presets
from bayou.lab.cli import app
from bayou.lab.config import Config, ConfigError
from bayou.lab.runs import Interrupted, Job, Run, RunError
from bayou.posteriors import Posterior

QUICK = {"steps": 12, "samples": 6, "members": 2}
runner = CliRunner()


def bayou_command(*words: str) -> Any:
    return runner.invoke(app, list(words), catch_exceptions=False)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    run = Run.create(folder, Config("digits", ("map", "mnf"), seeds=2, **QUICK))  # type: ignore[arg-type]
    run.work()
    return run


@pytest.mark.parametrize("name", [name for name in presets.PRESETS if name not in ("hmc", "nuts")])
def test_every_method_runs_on_the_digits(name: str, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", Config("digits", (name,), **(QUICK | {"steps": 30})))  # type: ignore[arg-type]
    results = run.work()
    assert not run.failures()
    (result,) = results
    assert 0 <= result["metrics"]["error"] <= 1
    assert result["metrics"]["nll"] > 0
    posterior, preprocessor, _ = run.posterior(name)
    assert isinstance(posterior, Posterior)
    assert preprocessor.class_names == tuple("0123456789")


@pytest.mark.parametrize(
    "method",
    [
        bayou.HMC(draws=2, warmup=2, leapfrogs=2, chains=1),
        bayou.NUTS(draws=2, warmup=2, max_depth=2, chains=1),
    ],
    ids=["HMC", "NUTS"],
)
def test_exact_samplers_run_on_the_digits_too(method: Any, digits: Run) -> None:
    data = digits.load_data()
    net = digits.build_net(data.input_shape, data.output_size, "digits", digits.jobs[0])
    posterior = bayou.fit(net, data.train, method=method, progress=False)
    assert posterior.predict(data.test[0]).outputs.shape == (2, len(data.test[1]), 10)


def test_a_run_folder_has_everything(digits: Run) -> None:
    names = {path.name for path in digits.folder.iterdir()}
    assert {"config.json", "data.json", "metrics.json", "report.html", "map-0", "map-1", "mnf-0", "mnf-1"} <= names
    metrics = json.loads((digits.folder / "metrics.json").read_text())
    assert [(row["method"], row["seed"]) for row in metrics] == [("map", 0), ("map", 1), ("mnf", 0), ("mnf", 1)]
    result = digits.results()[2]
    assert {"metrics", "rotation", "entropy", "reliability", "error_rejection", "samples_curve", "bound"} <= set(result)
    assert result["bound"]["low"] <= result["bound"]["bound"]
    assert Config.read(digits.folder / "config.json") == digits.config


def test_the_report_is_one_page_that_needs_nothing(digits: Run) -> None:
    page = (digits.folder / "report.html").read_text()
    for words in ("The numbers", "A digit turns", "Does it know what it does not know?", "Calibration", "Rejection",
                  "How many samples", "Training", "How loose is the bound?", "±", "prefers-color-scheme: dark",
                  "@media print", "bayou train --config"):  # fmt: skip
        assert words in page, words
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "<script" not in page
    assert "nan" not in re.sub(r"data:[^\"]*", "", page).lower().replace("finance", "")


def test_a_run_repeats_itself_and_goes_on_where_it_was(digits: Run, tmp_path: Path, monkeypatch: Any) -> None:
    again = Run.create(tmp_path / "again", digits.config)
    told: list[str] = []

    def interrupt(name: str, what: str, numbers: dict[str, Any]) -> None:
        told.append(f"{name} {what}")
        if name == "mnf-0" and what == "fitting":
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        again.work(tell=interrupt)
    assert (again.folder / "report.html").exists()
    assert len(again.results()) == 2
    with pytest.raises(RunError, match="--resume"):
        Run.create(tmp_path / "again", digits.config)
    resumed = Run.create(tmp_path / "again", digits.config, resume=True)
    results = resumed.work()
    assert [r["metrics"] for r in results] == [r["metrics"] for r in digits.results()]


def test_a_failing_method_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: presets.Plan) -> Any:
        raise FloatingPointError("it went to infinity")

    monkeypatch.setitem(presets.PRESETS, "mle", presets.Preset("mle", "MLE", "", broken))
    run = Run.create(tmp_path / "run", Config("moons", ("mle", "map"), **QUICK))  # type: ignore[arg-type]
    assert [result["method"] for result in run.work()] == ["map"]
    assert "infinity" in run.failures()["mle-0"]
    assert "it went to infinity" in (run.folder / "report.html").read_text()


def test_bad_folders_and_settings(digits: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no config"):
        Run.open(tmp_path)
    with pytest.raises(RunError, match="other settings"):
        Run.create(digits.folder, Config("moons"), resume=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(RunError, match="not empty"):
        Run.create(tmp_path / "mine", Config("moons"))
    for values, words in (
        ({"data": "moons", "stepz": 3}, "not a setting"),
        ({"data": "moons", "steps": "many"}, "steps"),
        ({"data": "moons", "steps": 3, "epochs": 2}, "not both"),
        ({"data": "moons", "prior": "wide"}, "fan_in"),
        ({"steps": 3}, "data"),
    ):
        with pytest.raises(ConfigError, match=words):
            Config.from_json(values)
    if not torch.cuda.is_available():
        with pytest.raises(RunError, match="CUDA"):
            Run(tmp_path, Config("moons", device="cuda")).device


# --- the command line ------------------------------------------------------------------------------------------------


def test_help_answers_at_once_and_needs_no_torch() -> None:
    code = "import sys; import bayou.lab.cli; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"COVERAGE": ""})
    for words in (
        [],
        ["compare"],
        ["train"],
        ["predict"],
        ["evaluate"],
        ["report"],
        ["verify"],
        ["list"],
        ["download"],
    ):
        assert bayou_command(*words, "--help").exit_code == 0


@pytest.mark.parametrize("what", ["data", "methods", "flows", "nets"])
def test_lists(what: str) -> None:
    done = bayou_command("list", what)
    assert done.exit_code == 0
    assert {"data": "digits", "methods": "mnf", "flows": "realnvp", "nets": "lenet"}[what] in done.output
    assert bayou_command("list", "dogs").exit_code == 2


def table(path: Path, rows: int = 80, target: bool = True) -> Path:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, generator=generator)
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["height", "colour", *(["kind"] if target else [])])
        for a, b in x.tolist():
            kind = ["yes" if a > 0 else "no"] if target else []
            writer.writerow([f"{a:.4f}", "red" if b > 0 else "blue", *kind])
    return path


def test_train_predict_evaluate_report_on_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = table(tmp_path / "things.csv")
    done = bayou_command("train", str(source), "--target", "kind", "--method", "map", "--steps", "150", "--out", "run")
    assert done.exit_code == 0, done.output
    new = table(tmp_path / "new.csv", 7, target=False)
    done = bayou_command("predict", "run", "--input", str(new), "--out", "p.csv")
    assert done.exit_code == 0, done.output
    with open("p.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 7
    assert set(rows[0]) == {"row", "class", "probability", "entropy", "mutual_information", "p(no)", "p(yes)"}
    assert {row["class"] for row in rows} <= {"yes", "no"}
    assert bayou_command("predict", "run", "--input", str(new), "--out", "p.csv").exit_code == 2  # it exists
    assert bayou_command("predict", "run", "--input", str(new), "--out", "p.csv", "--force").exit_code == 0
    done = bayou_command("evaluate", "run", "--data", str(source), "--json")
    (scores,) = json.loads(done.stdout)
    assert scores["accuracy"] > 0.8
    assert bayou_command("evaluate", "run").exit_code == 0
    assert bayou_command("report", "run", "--out", "both.html").exit_code == 0
    assert "MAP" in Path("both.html").read_text()
    # every option can come from the saved config
    done = bayou_command("train", "--config", "run/config.json", "--out", "again")
    assert done.exit_code == 0, done.output
    first, second = (json.loads(Path(folder, "metrics.json").read_text())[0]["metrics"] for folder in ("run", "again"))
    assert first == second
    done = bayou_command("train", "--config", "run/config.json", "--seed", "3", "--out", "other")
    assert Config.read("other/config.json").seed == 3
    done = bayou_command("train", str(source), "--target", "kind", "--method", "map", "--out", "run")
    assert done.exit_code == 2


def test_regression_predictions_have_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = bayou_command("train", "two-bumps", "--method", "ffg", "--steps", "60", "--out", "run", "--samples", "20")
    assert done.exit_code == 0, done.output
    page = Path("run/report.html").read_text()
    assert "What it thinks between the data and beyond" in page
    Path("x.csv").write_text("x\n-1.0\n0.5\n")
    done = bayou_command("predict", "run", "--input", "x.csv", "--level", "0.5", "--samples", "20")
    assert done.exit_code == 0, done.output
    with open("predictions.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        assert float(row["25%"]) < float(row["mean"]) < float(row["75%"])
        assert float(row["epistemic_std"]) < float(row["std"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "nothing-here"], "nothing-here"),
        (["train", "digits", "--method", "mnff"], "did you mean 'mnf'"),
        (["train", "digits", "--net", "lenet", "--steps", "1"], "16×16"),
        (["train", "missing.csv", "--target", "y"], "missing.csv"),
        (["train", "digits", "--steps", "3", "--epochs", "2"], "not both"),
        (["train", "digits", "--precision", "half"], "precision"),
        (["predict", "nowhere", "--input", "x.csv"], "not a run folder"),
        (["train", "--config", "none.json"], "none.json"),
    ],
)
def test_mistakes_get_a_sentence(words: list[str], message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    done = bayou_command(*words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_verify() -> None:
    done = bayou_command("verify")
    assert done.exit_code == 0
    assert "FAIL" not in done.output
    assert done.output.count("pass") >= 12


def test_a_posterior_of_a_run_is_a_plain_posterior(digits: Run) -> None:
    posterior, preprocessor, job = digits.posterior("mnf", 1)
    assert job == Job("mnf", 1)
    data = digits.load_data()
    p = posterior.predict(data.test[0][:5], samples=4, seed=0)
    assert isinstance(p, bayou.Predictive)
    torch.testing.assert_close(preprocessor.original(torch.zeros(1)), torch.zeros(1))
