"""Run folders and the command line: what a new user would try, and what must not be lost."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import bayou
from bayou.cli.app import app
from bayou.posteriors import Posterior
from bayou.runs import presets
from bayou.runs.config import Config, ConfigError
from bayou.runs.folder import Interrupted, Job, Run, RunError

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
    for words in ("The numbers", "A digit turns", "Does it know what it does not know?", "accuracy, %", "Brier",
                  "AUROC, H", "AUROC, MI", "Test data, cumulative", "From elsewhere, cumulative", "Reliability",
                  "Error and rejection", "How many samples", "Accuracy, %", "Training", "Log-likelihood",
                  "KL to the prior", "How loose is the bound?", "gap, at most", "±", "prefers-color-scheme: dark",
                  "Can it be trusted?", "constant (baseline)", "linear (baseline)", "The verdict",
                  "@media print", digits.config.command()):  # fmt: skip
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
    def broken(plan: Config) -> Any:
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
        ({"data": "moons", "prior": -1.0}, "prior must be a positive number, got -1"),
        ({"data": "moons", "steps": 0}, "steps must be at least 1"),
        ({"data": "moons", "lr": float("nan")}, "lr must be a positive number"),
        ({"data": "moons", "beta": -1.0}, "beta must be at least 0"),
        ({"data": "moons", "warmup": 3.0}, "warmup must be from 0 to 1"),
        ({"data": "moons", "validation": 1.0}, "below 1"),
        ({"data": "moons", "patience": 3}, "validation too"),
        ({"data": "moons", "task": "ranking"}, "classification or regression"),
        ({"steps": 3}, "data"),
    ):
        with pytest.raises(ConfigError, match=words):
            Config.from_json(values)
    if not torch.cuda.is_available():
        with pytest.raises(RunError, match="CUDA"):
            Run(tmp_path, Config("moons", device="cuda")).device


# --- the command line ------------------------------------------------------------------------------------------------


def test_help_answers_at_once_and_needs_no_torch() -> None:
    code = "import sys; import bayou.cli.app; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"COVERAGE": ""})
    for name in get_command(app).commands:  # type: ignore[attr-defined]
        assert bayou_command(name, "--help").exit_code == 0
    assert bayou_command("--help").exit_code == 0


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
    names = ["row", "class", "probability", "entropy", "mutual_information", "p(no)", "p(yes)", "distance"]
    assert list(rows[0]) == names
    assert {row["class"] for row in rows} <= {"yes", "no"}
    assert bayou_command("predict", "run", "--input", str(new), "--out", "p.csv").exit_code == 2  # it exists
    assert bayou_command("predict", "run", "--input", str(new), "--out", "p.csv", "--force").exit_code == 0
    done = bayou_command("evaluate", "run", "--data", str(source), "--json")
    (scores,) = json.loads(done.stdout)
    assert scores["accuracy"] > 0.8
    head, row = bayou_command("evaluate", "run", "--data", str(source)).stdout.splitlines()
    shown = dict(zip(head.split(), row.split(), strict=True))
    assert float(shown["nll"]) == pytest.approx(scores["nll"], rel=1e-5)
    assert set(shown) == set(scores)
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
    assert len(rows) == 2
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
        (["train", "digits", "--heteroscedastic"], "for a regression"),
        (["train", "digits", "--out", "a.txt"], "a.txt is a file"),
        (["train", "moons", "--device", "gpu"], "use cpu, cuda or auto"),
        (["train", "digits", "--net", "lennet"], "did you mean 'lenet'"),
        (["predict", "nowhere", "--input", "x.csv"], "not a run folder"),
        (["train", "--config", "none.json"], "none.json"),
    ],
)
def test_mistakes_get_a_sentence(words: list[str], message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("precious")
    done = bayou_command(*words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["a.txt"]  # nothing half made is in the way of another try


def test_version_and_words_about_flows() -> None:
    assert bayou_command("--version").output == f"bayou {bayou.__version__}\n"
    flows = bayou_command("list", "flows").output
    assert "partial(" not in flows
    assert "form='orthogonal'" in flows


def test_settings_that_say_the_same_once() -> None:
    assert Config("moons", ("map", "ffg", "map")).methods == ("map", "ffg")
    command = Config("my data.csv", ("mnf",), target="y", lr=0.01, compile=True).command()
    assert command == "bayou train 'my data.csv' --method mnf --target y --lr 0.01 --compile"


@pytest.mark.parametrize("methods", [("mnf",), ("map", "mnf")])
def test_every_setting_comes_back_from_the_command_and_from_the_file(
    methods: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a report tells the reader to type, and what a run folder saves, are the settings of the run: all of them."""
    from bayou.cli import app as cli

    by_type = {"int": 3, "float": 0.125, "str": "word", "bool": True, "tuple[str, ...]": ("a", "b")}
    own = {"task": "regression", "precision": "bf16", "prior": 0.75, "steps": None}  # steps exclude epochs
    values = {
        name: by_type[str(one.type).removesuffix(" | None")]
        for name, one in Config.settings().items()
        if name not in own
    }
    config = Config("moons", methods, **values | own)
    same = {name for name, one in Config.settings().items() if getattr(config, name) == one.default}
    assert same == {"steps"}
    seen: list[Config] = []
    monkeypatch.setattr(cli, "_work", lambda run, quiet: seen.append(run.config))
    assert bayou_command(*shlex.split(config.command())[1:], "--out", str(tmp_path / "a")).exit_code == 0
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    done = bayou_command("train", "--config", str(tmp_path / "config.json"), "--out", str(tmp_path / "b"))
    assert done.exit_code == 0
    assert seen == [config, config]


def test_a_run_on_a_file_can_be_used_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "things.csv")
    words = ("--target", "kind", "--method", "map", "--steps", "5", "--samples", "2", "--out", "run")
    assert bayou_command("train", "things.csv", *words).exit_code == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert bayou_command("resume", "../run").exit_code == 0
    assert bayou_command("train", "--config", "../run/config.json", "--out", "again").exit_code == 0
    # scores on the test data are those of the run
    (scores,) = json.loads(bayou_command("evaluate", "../run", "--json").stdout)
    written = json.loads(Path("../run/metrics.json").read_text())[0]["metrics"]
    assert {name: scores[name] for name in ("accuracy", "nll", "ece")} == {
        n: written[n] for n in ("accuracy", "nll", "ece")
    }
    # and one whose file has changed does not go on as if nothing had happened
    table(tmp_path / "things.csv", rows=70)
    done = bayou_command("resume", "../run")
    assert done.exit_code == 2
    assert "has changed since" in done.stderr


def test_predictions_do_not_write_over_their_input_and_make_their_folder(
    digits: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.csv").write_text(",".join(f"p{i}" for i in range(64)) + "\n" + ",".join("3" * 64) + "\n")
    done = bayou_command("predict", str(digits.folder), "--input", "x.csv", "--out", "x.csv", "--force")
    assert done.exit_code == 2
    assert "is the input" in done.stderr
    assert Path("x.csv").read_text().startswith("p0")
    assert bayou_command("predict", str(digits.folder), "--input", "x.csv", "--out", "new/p.csv").exit_code == 0
    assert Path("new/p.csv").read_text().startswith("row,class")
    for words, message in (
        (
            ("predict", str(digits.folder), "--input", "x.csv", "--out", "q.csv", "--seed", "7"),
            "with seed 7; it has map-0",
        ),
        (("predict", str(digits.folder), "--input", "x.csv", "--out", "x.csv/p.csv"), "x.csv"),
        (("evaluate", str(digits.folder), "--method", "ffg"), "no finished ffg; it has map-0, map-1, mnf-0, mnf-1"),
        (("evaluate", str(digits.folder), "--data", "moons"), "is about digits, not moons"),
    ):
        done = bayou_command(*words)
        assert done.exit_code == 2
        assert message in done.stderr


def test_ids_dropped_columns_notes_and_distances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was noticed about a table is said on the terminal; predictions know their rows and how far they are."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"N{i},{7 * i % 60},{i % 10},{i % 7},{i % 2 if i else ''}\n" for i in range(60))
    Path("t.csv").write_text("name,user_id,a,b,y\n" + rows)
    words = ("--target", "y", "--method", "map", "--steps", "5", "--samples", "2", "-q")
    done = bayou_command("train", "t.csv", *words, "--out", "run", "--id", "name", "--drop", "b")
    assert done.exit_code == 0, done.output
    for note in (
        "note: Left out, as asked: 'b'.",
        "note: Column 'name' names the rows; it is no input.",
        "note: 1 of 60 rows have no value in 'y'; left out.",
        "note: Column 'user_id' holds 59 different whole numbers, an identifier by its name; dropped. --id user_id",
        "note: The target 'y' has 2 whole values, taken as classes; --task regression for numbers.",
    ):
        assert note in done.stderr
    assert Run.open("run").load_data().feature_names == ("a",)
    scale = Run.open("run").posterior()[1].columns[0].scale  # type: ignore[attr-defined]
    Path("new.csv").write_text(f"name,a\nin,4\nedge,9\nabove,{9 + 3 * scale:.6f}\nbelow,{-0.5 * scale:.6f}\nnone,\n")
    done = bayou_command("predict", "run", "--input", "new.csv")
    assert "1 of 5 rows lie more than a standard deviation outside the range of the training data" in done.stderr
    with open("predictions.csv", newline="") as stream:
        found = {row["name"]: float(row["distance"]) for row in csv.DictReader(stream)}
    assert found == pytest.approx({"in": 0, "edge": 0, "above": 3, "below": 0.5, "none": 0}, abs=1e-3)
    done = bayou_command("resume", "run", "-q")
    assert "note:" not in done.stderr  # once is enough
    for option, message in ((("--drop", "c"), "no column 'c'"), (("--id", "y"), "'y' is the target")):
        done = bayou_command("train", "t.csv", *words, "--out", "other", *option)
        assert done.exit_code == 2
        assert message in done.stderr


def test_a_run_from_before_predicts_without_distances(digits: Run, tmp_path: Path, monkeypatch: Any) -> None:
    """Preprocessors that were written without the range of their columns."""
    monkeypatch.chdir(tmp_path)
    run = Run.create(tmp_path / "run", Config("two-bumps", ("map",), **QUICK))  # type: ignore[arg-type]
    run.work()
    facts = json.loads((run.folder / "data.json").read_text())
    del (
        facts["preprocessor"]["id"],
        facts["preprocessor"]["columns"][0]["low"],
        facts["preprocessor"]["columns"][0]["high"],
    )
    (run.folder / "data.json").write_text(json.dumps(facts))
    Path("x.csv").write_text("x\n-1.0\n9\n")
    assert bayou_command("predict", "run", "--input", "x.csv").exit_code == 0
    assert Path("predictions.csv").read_text().startswith("row,mean,std")
    assert "distance" not in Path("predictions.csv").read_text()


def test_large_targets_keep_their_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("big.csv").write_text("a,y\n" + "".join(f"{i},{1234567 + i / 4}\n" for i in range(60)))
    assert (
        bayou_command("train", "big.csv", "--target", "y", "--method", "map", "--steps", "5", "--out", "run").exit_code
        == 0
    )
    assert bayou_command("predict", "run", "--input", "big.csv").exit_code == 0
    with open("predictions.csv", newline="") as stream:
        means = {row["mean"] for row in csv.DictReader(stream)}
    assert len(means) > 30


def test_a_page_from_several_runs(digits: Run, tmp_path: Path) -> None:
    """Seeds of the same settings are joined, other settings get the name of their folder."""
    for name, seed, steps in (("more", 2, 12), ("longer", 3, 13)):
        config = Config("digits", ("map",), seed=seed, **(QUICK | {"steps": steps}))  # type: ignore[arg-type]
        Run.create(tmp_path / name, config).work()
    folders = [str(digits.folder), str(tmp_path / "more"), str(tmp_path / "longer"), str(digits.folder)]
    assert bayou_command("report", *folders, "--out", str(tmp_path / "all.html")).exit_code == 0
    page = (tmp_path / "all.html").read_text()
    assert f"MAP ({tmp_path / 'longer'})" in page
    assert f"({tmp_path / 'more'})" not in page
    assert f"({digits.folder})" not in page
    assert "Means over 4 seeds" in page
    Run.create(tmp_path / "moons", Config("moons", ("map",), **QUICK)).work()  # type: ignore[arg-type]
    done = bayou_command("report", str(digits.folder), str(tmp_path / "moons"), "--out", str(tmp_path / "no.html"))
    assert done.exit_code == 2
    assert "the same data" in done.stderr


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each event however long it is, and one now and then in between."""
    from bayou.cli import live

    board = live.LiveTable(["mnf-0"])
    board.tell("mnf-0", "fitting", {})
    board.show("VI(MNF)", 10, 2000, {"elbo": -3.0})
    monkeypatch.setattr(live, "LINE", 0.0)
    board.show("VI(MNF)", 20, 2000, {"elbo": -2.0})
    board.tell("mnf-0", "done", dict.fromkeys(live.SHOWN, 0.12345))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["mnf-0: fitting", "mnf-0: VI(MNF) 20/2,000  elbo -2"]
    assert len(lines) == 3
    assert len(lines[2]) > 100


# --- the report ------------------------------------------------------------------------------------------------------


def test_a_regression_has_bands_for_any_inputs(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,price\n" + "".join(f"{i % 7},{i % 5},{i % 7 + 2 * (i % 5) + i / 60}\n" for i in range(60)))
    run = Run.create(tmp_path / "run", Config(str(path), ("ffg",), target="price", **QUICK))  # type: ignore[arg-type]
    (result,) = run.work()
    shown = result["observed"]
    assert shown["y_label"] == "price"
    assert shown["mean"] == sorted(shown["mean"])
    for row in zip(*(shown[k] for k in ("low", "epistemic_low", "mean", "epistemic_high", "high")), strict=True):
        assert list(row) == sorted(row)
    data = run.load_data()
    seen = data.preprocessor.original(data.test[1][:, 0]).sort().values
    torch.testing.assert_close(torch.tensor(sorted(shown["points"]["y"])), seen, atol=1e-4, rtol=0)
    page = (run.folder / "report.html").read_text()
    assert "What it says about test data" in page
    assert ">price</text>" in page


def test_numbers_that_are_not_finite_are_shown_as_such(digits: Run) -> None:
    """A null in a file is no reason for a traceback, and no number either."""
    from bayou.report.page import Report

    results = json.loads(json.dumps(digits.results()))
    broken = results[-1]
    broken["metrics"]["nll"] = None
    broken["samples_curve"]["nll"][0] = None
    broken["error_rejection"]["error"][3] = None
    broken["history"][0]["kl"] = None
    page = Report(results, {"data": "digits"}, version="0", made="now").html()
    assert "not finite" in page
    assert "nan" not in re.sub(r"data:[^\"]*", "", page).lower()


def test_a_run_judges_its_methods_beside_baselines_and_flags_what_fails(digits: Run) -> None:
    """Twelve steps of training: a linear model is far better, and everybody is told."""
    found = digits.facts()["baselines"]
    assert found["constant"]["metrics"]["nll"] == pytest.approx(2.303, abs=0.02)  # log 10
    assert found["linear"]["metrics"]["accuracy"] > 0.9
    result = digits.results()[2]
    assert sum(result["rows"]) / len(result["rows"]) == pytest.approx(result["metrics"]["nll"], rel=1e-4)
    hits = result["metrics"]["accuracy"]
    binomial = (hits * (1 - hits) / len(result["rows"])) ** 0.5
    assert result["errors"]["accuracy"] == pytest.approx(binomial, rel=0.1)  # 1,000 resamples: 2 % by chance
    flags = {check["name"]: check for check in result["checks"] if check["status"] != "ok"}
    assert flags["linear"]["status"] == "failed"
    page = (digits.folder / "report.html").read_text()
    assert "MNF, linear: worse than a linear model" in page
    assert '<td class="failed">MNF' in page
    said = " ".join(digits.verdict())
    assert said.startswith("Every method failed a check")
    assert "It is worse than a linear model" in said
    assert "Flagged: MAP (" in said


def test_the_verdict_names_the_best_by_how_much_and_how_sure() -> None:
    from bayou.report.results import Results
    from bayou.report.verdict import verdict

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, generator=generator).double()

    def result(label: str, nll: torch.Tensor, status: str = "ok") -> dict[str, Any]:
        checks = [{"name": "mixing", "status": status, "text": "words"}]
        return {"label": label, "seed": 0, "task": "regression", "metrics": {}, "rows": nll.tolist(), "checks": checks}

    noise = 0.1 * torch.randn(200, generator=generator).double()
    best, near, far = result("A", rows), result("B", rows + noise), result("C", rows + 1 + noise)
    facts = {"baselines": {"linear": {"rows": (rows + 0.5 + noise).tolist(), "metrics": {}, "errors": {}}}}
    said = verdict(Results([near, far, best], facts, {}))
    lead = float(noise.mean())
    assert said[0].startswith(f"{'A' if lead > 0 else 'B'} is the best by NLL")
    assert any("cannot tell it from" in one and "C" not in one for one in said)
    assert any(one.startswith("It beats a linear model by 0.5") for one in said)
    assert "No method was flagged." in said
    said = verdict(Results([result("B", rows + 1 + noise), result("A", rows)], facts, {}))
    assert "less than the next, B" in said[0]
    assert "100% of 1,000 bootstrap resamples of the rows: as sure as these rows can be" in said[1]
    said = verdict(Results([result("A", rows, "failed"), result("MAP", rows + 0.1)], facts, {}))
    assert said[0].startswith("MAP, the only method that failed no check")
    assert "Flagged: A (mixing)." in said


def test_the_terminal_says_what_was_flagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = bayou_command("train", "moons", "--method", "map", "--steps", "5", "--out", "run", "--samples", "5")
    assert done.exit_code == 0, done.output
    assert "linear: baseline  nll 0.2" in done.stderr
    assert "map-0: failed a check:" in done.stderr
    assert "map-0: FAILED linear: worse than a linear model: NLL" in done.stderr
    assert "Every method failed a check" in done.stderr
    done = bayou_command("evaluate", "run")
    assert "map-0: FAILED linear: worse than a linear model: NLL" in done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_auto_takes_what_is_best_on_held_out_rows_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a network that never learns, one that does and one that cannot be fitted, the second."""
    from bayou.runs import auto

    class Broken(bayou.Method):
        def fit(self, *args: Any, **options: Any) -> Any:
            raise FloatingPointError("it went to infinity")

    made = auto.Auto(("idle", "map", "broken"), (bayou.MAP(steps=1, lr=1e-9), bayou.MAP(steps=150, lr=0.01), Broken()))
    monkeypatch.setitem(presets.PRESETS, "auto", presets.Preset("auto", "Auto", "", lambda config: made))
    monkeypatch.chdir(tmp_path)
    done = bayou_command("train", "moons", "--method", "auto", "--out", "run", "--samples", "5")
    assert done.exit_code == 0, done.output
    assert "auto-0: map was chosen: the least NLL on" in done.stderr
    assert "broken failed: it went to infinity" in done.stderr
    assert "map was chosen" in Path("run/report.html").read_text()
    posterior, _, _ = Run.open("run").posterior("auto")
    data = Run.open("run").load_data()
    assert posterior.target.n == data.n  # fitted again to all rows
    assert bayou.metrics.accuracy(posterior.predict(data.test[0]), data.test[1]) > 0.8
    broken = auto.Auto(("broken",), (Broken(),))
    with pytest.raises(ValueError, match="no method could be fitted"):
        bayou.fit(torch.nn.Linear(2, 2), data.train, method=broken, progress=False)


def test_errors_over_rows_and_seeds_add_up() -> None:
    from bayou.report.results import Results

    results = [{"label": "A", "seed": seed, "task": "regression", "metrics": {"nll": nll}, "errors": {"nll": 0.3}}
               for seed, nll in ((0, 1.0), (1, 1.8))]  # fmt: skip
    assert Results(results[:1], {}, {}).mean("A", "nll") == pytest.approx((1.0, 0.3))
    assert Results(results, {}, {}).mean("A", "nll") == pytest.approx((1.4, 0.5))  # √(0.3² + 0.4²)


def test_the_members_of_an_ensemble_are_lines_of_their_own() -> None:
    from bayou.report.sections import _history

    rows = [{"step": step, "log_likelihood": 1.0} for _ in range(2) for step in (0, 50, 99)]
    x, y = _history(rows, "log_likelihood", 2.0)
    assert x == [0, 50, 99, 99, 0, 50, 99]
    assert [value != value for value in y] == [False] * 3 + [True] + [False] * 3


def test_small_bins_of_a_reliability_diagram_are_joined() -> None:
    from bayou.report.sections import _merged

    found = {"count": [1, 0, 5, 2, 20], "confidence": [0.1, 0.0, 0.4, 0.6, 0.9], "accuracy": [1.0, 0.0, 0.4, 0.5, 1.0]}
    x, y = _merged(found)
    assert x == pytest.approx([2.1 / 6, 19.2 / 22])
    assert y == pytest.approx([0.5, 21 / 22])


@pytest.mark.slow
def test_verify() -> None:
    done = bayou_command("verify")
    assert done.exit_code == 0
    assert "FAIL" not in done.output
    assert "16 of 16 as they should be" in done.output


def test_a_posterior_of_a_run_is_a_plain_posterior(digits: Run) -> None:
    posterior, preprocessor, job = digits.posterior("mnf", 1)
    assert job == Job("mnf", 1)
    data = digits.load_data()
    p = posterior.predict(data.test[0][:5], samples=4, seed=0)
    assert isinstance(p, bayou.Predictive)
    torch.testing.assert_close(preprocessor.original(torch.zeros(1)), torch.zeros(1))


def test_a_reader_that_has_gone_gets_no_message() -> None:
    """`bayou list nets | head -1`."""
    command = f"{sys.executable} -m bayou list nets | head -1"
    for _ in range(3):  # whether the pipe breaks is a matter of luck
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        assert done.stdout.startswith("linear"), done.stderr
        assert done.stderr == ""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_process_that_is_told_to_end_says_how_to_go_on(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["train", "moons", "--method", "map", "--steps", "1000000", "--out", str(folder), "-q"]
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{listening}; from bayou.cli import app; app.main()"
    process = subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (folder / "map-0" / "checkpoint").exists() and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(getattr(signal, name))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert f"nothing is lost: `bayou resume {folder}` goes on" in said
    assert not (folder / "map-0" / "result.json").exists()
