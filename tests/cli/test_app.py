"""The command line: what a new user would try."""

import csv
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import bayou
from bayou import truth
from bayou.app.cli import app as commands
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run
from bayou.posteriors import Mixture
from bayou.posteriors.checks import check_history
from bayou.select import Auto, named

# A given gain: the prior is not searched for.
QUICK = {"steps": 12, "samples": 6, "gain": 1.0}


def run_bayou(line):
    """Run a command as it is typed after ``bayou``."""
    return CliRunner().invoke(commands.app, shlex.split(line), catch_exceptions=False)


def succeed(line):
    """Run a command that must succeed."""
    result = run_bayou(line)
    assert result.exit_code == 0, result.output
    return result


def fail(line, message):
    """Run a command that must end with an error in one sentence."""
    result = run_bayou(line)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def read_table(path):
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))


def write_table(path, rows=80, target=True):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, generator=generator)
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["height", "color", *(["kind"] if target else [])])
        for a, b in x.tolist():
            kind = ["yes" if a > 0 else "no"] if target else []
            writer.writerow([f"{a:.4f}", "red" if b > 0 else "blue", *kind])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_help_does_not_import_torch():
    code = "import sys; import bayou.app.cli.app; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"COVERAGE": ""})
    for name in ("", *get_command(commands.app).commands):
        succeed(f"{name} --help")


def test_without_arguments_the_command_lists_the_next_steps():
    lines = succeed("").output.splitlines()
    assert len(lines) == 7
    assert max(map(len, lines)) <= 120
    names = get_command(commands.app).commands
    assert all(line.split()[1] in names for line in lines[1:-1])


def test_missing_packages_are_named(folder, monkeypatch):
    from bayou.__main__ import main

    Run.create("run", Config("moons", ("map",), **QUICK)).work()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    fail("resume run", "A report needs jinja2, which is not installed: pip install 'bayou[lab]'")
    monkeypatch.delitem(sys.modules, "bayou.app.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"needs typer, .*: pip install 'bayou\[lab\]'"):
        main()


@pytest.mark.parametrize(
    ("topic", "name"),
    [
        ("data", "digits"),
        ("methods", "mnf"),
        ("flows", "form='orthogonal'"),
        ("nets", "lenet"),
        ("references", "hmc-digits"),
    ],
)
def test_lists(topic, name):
    output = succeed(f"list {topic}").output
    assert name in output
    assert "partial(" not in output
    assert run_bayou("list dogs").exit_code == 2


def test_score_puts_predictions_among_the_committed_rows(folder):
    reference = truth.reference("hmc-digits")
    probs = 0.9 * reference.log_probs.exp() + 0.01
    truth.write_predictions("wide.npz", probs, name="Wide HMC", epochs=3)
    result = succeed("score wide.npz --against hmc-digits --out entry.json")
    (line,) = (line for line in result.stdout.splitlines() if "Wide HMC" in line)
    assert line.startswith("→ Wide HMC")
    assert "place" in result.stderr
    row = truth.score("wide.npz", "hmc-digits").row
    assert f"{row.total_variation:.4f}" in line
    entry = json.loads(Path("entry.json").read_text())
    assert (entry["against"], entry["row"]["total_variation"]) == (
        "hmc-digits",
        row.total_variation,
    )
    rows = json.loads(succeed("score wide.npz --against hmc-digits --json").stdout)
    assert [one["label"] for one in rows if one["scored"]] == ["Wide HMC"]
    fail("score wide.npz --against hmc-digits --out entry.json", "already exists")
    fail("score wide.npz --against hmc", "there is no reference 'hmc'; the names are hmc-cifar10,")
    fail("score none.npz --against hmc-digits", "none.npz: No such file")


def test_the_weight_of_the_kl_is_a_number_or_selected(folder, monkeypatch):
    from bayou.select import kl_weight

    monkeypatch.setattr(kl_weight, "KL_WEIGHTS", (1.0, 0.1))
    write_table(folder / "things.csv")
    train = "train things.csv --target kind --method lowrank --gain 5 --steps 5"
    fail(f"{train} --beta cold", "--beta must be at least 0, or validation, got 'cold'")
    result = succeed(f"{train} --beta validation --out run")
    assert "was selected" in result.stderr
    config = json.loads(Path("run/config.json").read_text())
    assert config["beta"] == "validation"
    assert "--beta validation" in Config.from_json(config).command()
    assert Config("digits", beta="0.5").beta == 0.5
    stages = json.loads(Path("run/lowrank-0/result.json").read_text())["selection"]
    assert [trial["beta"] for trial in stages[0]["trials"]] == [1.0, 0.1]


def test_version():
    assert succeed("--version").output == f"bayou {bayou.__version__}\n"


def test_train_predict_evaluate_report_on_a_file(folder):
    write_table(folder / "things.csv")
    train = "train things.csv --target kind --method map --gain 5"
    result = succeed(f"{train} --steps 150 --out run")
    assert result.stdout == "wrote run/report.html\n"
    *_, numbers, conclusion, following = result.stderr.splitlines()
    scores = r"accuracy [\d.]+ .*% \(higher is better\), NLL [\d.]+ .*, ECE [\d.]+ .*"
    assert re.fullmatch(rf"MAP: {scores}\(lower is better\)", numbers)
    assert conclusion.startswith("MAP is right in ")
    assert following == "next: bayou predict run --input new.csv"
    assert "MAP" in Path("run/report.html").read_text()
    fail(f"{train} --out run", "already contains a run")

    write_table(folder / "new.csv", 7, target=False)
    predict = "predict run --input new.csv --out p.csv"
    succeed(predict)
    rows = read_table("p.csv")
    assert len(rows) == 7
    assert ",".join(rows[0]) == (
        "row,class,probability,entropy,mutual_information,p(no),p(yes),distance"
    )
    assert {row["class"] for row in rows} <= {"yes", "no"}
    fail(predict, "p.csv already exists")
    succeed(f"{predict} --force")

    (scores,) = json.loads(succeed("evaluate run --data things.csv --json").stdout)
    assert scores["accuracy"] > 0.8
    head, row = succeed("evaluate run --data things.csv").stdout.splitlines()
    shown = dict(zip(head.split(), row.split(), strict=True))
    assert float(shown["nll"]) == pytest.approx(scores["nll"], rel=1e-5)
    assert set(shown) == set(scores)

    # Every option can come from the saved config.
    succeed("train --config run/config.json --out again")
    first, second = (
        json.loads(Path(name, "metrics.json").read_text())[0]["metrics"]
        for name in ("run", "again")
    )
    assert first == second
    succeed("train --config run/config.json --seed 3 --out other")
    assert Config.read("other/config.json").seed == 3
    check_comparison()


def check_comparison():
    """Compare the three runs in this folder, and runs with other test rows."""
    assert succeed("report run other again").stdout == "wrote comparison.html\n"
    run, other = (
        json.loads(Path(f"{name}/result.json").read_text()) for name in ("run/map-0", "other/map-3")
    )
    nll, wrong = (np.subtract(other[key], run[key]) for key in ("rows", "losses"))
    page = Path("comparison.html").read_text()
    assert "things.csv: comparison of 3 runs" in page
    assert "NLL minus run" in page
    cells = page[page.index("run minus other") :].partition("</tr>")[0].replace(",", "")
    numbers = [float(number) for number in re.findall(r"[+-]?\d+\.\d+", cells)]
    error = nll.std(ddof=1) / len(nll) ** 0.5
    assert numbers[:2] == pytest.approx([-nll.mean(), error], abs=6e-4)
    assert numbers[2] == pytest.approx(-100 * wrong.mean(), abs=6e-3)
    fail("report run other", "comparison.html already exists")
    train = "train things.csv --method map --steps 3 --gain 1"
    succeed(f"{train} --target kind --split 1 --out split")
    fail("report run split --out none.html", "no split in common")
    succeed(f"{train} --target color --out color")
    fail("report run color --out none.html", "got ")
    assert not Path("none.html").exists()
    before = Path("run/report.html").read_text()
    Path("run/report.html").unlink()
    succeed("report run")
    date = re.compile(r"on \d{4}-\d\d-\d\d \d\d:\d\d")
    assert date.sub("", Path("run/report.html").read_text()) == date.sub("", before)


def test_regression_predictions_have_intervals(folder):
    succeed("train two-bumps --method ffg --steps 60 --gain 1 --out run --samples 20")
    page = Path("run/report.html").read_text()
    assert "Predictions inside and outside the range of the data" in page
    Path("x.csv").write_text("x\n-1.0\n0.5\n")
    succeed("predict run --input x.csv --level 0.5 --samples 20")
    rows = read_table("predictions.csv")
    assert len(rows) == 2
    for row in rows:
        assert "mutual_information" not in row  # of densities, whose entropies can be below it
        numbers = {name: float(value) for name, value in row.items()}
        assert numbers["25%"] < numbers["mean"] < numbers["75%"]
        ratio = numbers["epistemic_std"] / numbers["std"]
        assert ratio < 1
        assert numbers["epistemic_share_of_variance"] == pytest.approx(ratio**2, rel=1e-4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train nothing-here", "nothing-here"),
        ("train digits --method mnff", "did you mean 'mnf'"),
        ("train digits --net lenet --steps 1", "16×16"),
        ("train missing.csv --target y", "missing.csv"),
        ("train digits --steps 3 --epochs 2", "not both"),
        ("train digits --fast --patient", "give one of --fast, --patient"),
        ("compare digits --fast --effort 2", "give one of --effort, --fast"),
        ("train digits --precision half", "precision"),
        ("train digits --heteroscedastic", "for regression"),
        ("train digits --out a.txt", "a.txt is a file"),
        ("train moons --device gpu", "use cpu, cuda or auto"),
        ("train moons --patience 3", "--patience needs held-out rows; give --validation too"),
        ("train digits --net lennet", "did you mean 'lenet'"),
        ("predict nowhere --input x.csv", "not a run folder"),
        ("train --config none.json", "none.json"),
    ],
)
def test_user_errors_are_one_sentence(line, message, folder):
    Path("a.txt").write_text("precious")
    fail(line, message)
    assert [path.name for path in folder.rglob("*")] == ["a.txt"]


def test_flags_and_options_are_printed(folder):
    """A flag names options in a terminal, and arguments in Python."""
    stderr = succeed("train moons --method mle --steps 5 --samples 5 --out run").stderr
    assert "linear: baseline  nll 0.2" in stderr
    assert "mle-0: failed a check: it is worse than a linear model" in stderr
    assert "mle-0: the check 'linear' FAILED: worse than a linear model: NLL" in stderr
    warning = "5 steps are too few to judge convergence; give more --steps or --epochs"
    assert f"mle-0: the check 'converged' gives a WARNING: {warning}" in stderr
    assert "steps=" not in stderr
    assert "steps=" not in Path("run/report.html").read_text()
    assert "steps=" in str(check_history(Run.open("run").posterior()[0]))
    *_, numbers, conclusion, following = stderr.splitlines()
    assert numbers.startswith("MLE: accuracy ")
    assert conclusion.startswith("Do not use MLE as it is: it is worse than a linear model")
    assert following == "next: bayou compare moons --methods map,laplace,ensemble --out run-compare"
    result = succeed("evaluate run")
    assert "mle-0: the check 'linear' FAILED: worse than a linear model: NLL" in result.stderr
    assert len(result.stdout.splitlines()) == 2


def test_auto_selects_by_held_out_rows_and_explains_its_choice(folder, monkeypatch):
    """Of a network that never learns, one that does and one that cannot be fitted, the second."""

    class Broken(bayou.methods.Method):
        def fit(self, *args, **options):
            raise FloatingPointError("it went to infinity")

    methods = {
        "idle": bayou.MAP(steps=1, lr=1e-9),
        "map": bayou.MAP(steps=150, lr=0.01),
        "broken": Broken(),
    }
    auto = named.Named("auto", "Auto", "", lambda config: Auto(methods))
    monkeypatch.setitem(named.METHODS, "auto", auto)
    stderr = succeed("train moons --method auto --out run --samples 5").stderr
    assert "auto-0: map was selected: it has nearly all the weight in the best mixture" in stderr
    assert "broken failed: it went to infinity" in stderr
    assert "map was selected" in Path("run/report.html").read_text()
    posterior, _, _ = Run.open("run").posterior("auto")
    data = Run.open("run").load_data()
    assert posterior.target.n == data.n  # fitted again to all rows
    assert bayou.metrics.accuracy(posterior.predict(data.test[0]), data.test[1]) > 0.8
    with pytest.raises(ValueError, match="no method could be fitted"):
        bayou.fit(torch.nn.Linear(2, 2), data.train, Auto({"broken": Broken()}), progress=False)


@pytest.mark.slow
def test_a_run_of_auto_predicts_and_reports_with_its_mixture(folder, monkeypatch):
    """Two methods that are equally good: the run has their mixture, which predicts and is served
    like any posterior.
    """
    methods = {"short": bayou.MAP(steps=100, lr=0.01), "long": bayou.MAP(steps=120, lr=0.01)}
    auto = named.Named("auto", "Auto", "", lambda config: Auto(methods))
    monkeypatch.setitem(named.METHODS, "auto", auto)
    stderr = succeed("train moons --method auto --out run --samples 20").stderr
    assert "auto-0: the mixture 0." in stderr
    report = Path("run/report.html").read_text()
    assert "the mixture 0." in report
    posterior, preprocessor, _ = Run.open("run").posterior("auto")
    assert isinstance(posterior, Mixture)
    assert posterior.members == 2
    data = Run.open("run").load_data()
    np.savez("x.npz", x=data.test[0].numpy())
    succeed("predict run --input x.npz --out p.csv --samples 20")
    lines = Path("p.csv").read_text().splitlines()
    assert len(lines) == len(data.test[0]) + 1
    expected = posterior.predict(preprocessor.transform("x.npz").float(), 20).mean
    probabilities = [i for i, name in enumerate(lines[0].split(",")) if name.startswith("p(")]
    first = float(lines[1].split(",")[probabilities[1]])
    assert first == pytest.approx(float(expected[0, 1]), abs=1e-3)


@pytest.mark.parametrize("methods", [("mnf",), ("map", "mnf")])
def test_settings_are_the_same_from_the_command_and_from_the_file(methods, folder, monkeypatch):
    """The command of a report and the file of a run folder have all settings of the run."""
    by_type = {"int": 3, "float": 0.125, "str": "word", "bool": True, "tuple[str, ...]": ("a", "b")}
    by_type["float | str"] = 0.125
    values = {
        name: by_type[str(setting.type).removesuffix(" | None")]
        for name, setting in Config.settings().items()
        if name not in ("task", "precision", "prior", "steps", "noise")
    }  # steps exclude epochs, and noise a heteroscedastic likelihood
    config = Config(
        "moons", methods, task="regression", precision="bf16", prior=0.75, steps=None, **values
    )
    fields = Config.settings().items()
    defaults = {name for name, field in fields if getattr(config, name) == field.default}
    assert defaults == {"steps", "noise"}
    configs = []
    monkeypatch.setattr(commands, "_work", lambda run, quiet, executor: configs.append(run.config))
    Path("config.json").write_text(json.dumps(config.to_json()))
    succeed(f"{config.command().removeprefix('bayou ')} --out a")
    succeed("train --config config.json --out b")
    # Short for a setting, also over that of a file.
    succeed("train --config config.json --fast --out c")
    succeed("train --config config.json --patient --out d")
    efforts = [dataclasses.replace(config, effort=effort) for effort in (0.1, 10.0)]
    assert configs == [config, config, *efforts]


def test_a_run_on_a_file_can_be_used_from_any_folder(folder, monkeypatch):
    write_table(folder / "things.csv")
    succeed("train things.csv --target kind --method map --steps 5 --samples 2 --gain 1 --out run")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    succeed("resume ../run")
    succeed("train --config ../run/config.json --out again")
    # Scores on the test data are those of the run.
    (scores,) = json.loads(succeed("evaluate ../run --json").stdout)
    written = json.loads(Path("../run/metrics.json").read_text())[0]["metrics"]
    assert {name: scores[name] for name in ("accuracy", "nll", "ece")} == {
        name: written[name] for name in ("accuracy", "nll", "ece")
    }
    write_table(folder / "things.csv", rows=70)
    fail("resume ../run", "has changed since")


def test_predictions_do_not_overwrite_their_input_and_create_their_folder(digits, folder):
    np.savez("x.npz", x=np.full((1, 8, 8), 3.0))
    before = Path("x.npz").read_bytes()
    predict = f"predict {digits.folder} --input x.npz --out"
    fail(f"{predict} x.npz --force", "is the input")
    assert Path("x.npz").read_bytes() == before
    succeed(f"{predict} new/p.csv")
    assert Path("new/p.csv").read_text().startswith("row,class")
    fail(f"{predict} q.csv --seed 7", "with seed 7; it has map-0")
    fail(f"{predict} x.npz/p.csv", "x.npz")
    evaluate = f"evaluate {digits.folder}"
    fail(f"{evaluate} --method ffg", "no finished ffg; it has map-0, map-1, mnf-0, mnf-1")
    fail(f"{evaluate} --data moons", "was trained on digits, not moons")


def test_ids_dropped_columns_notes_and_distances(folder):
    rows = [f"N{i},{7 * i % 60},{i % 10},{i % 7},{i % 2 if i else ''}" for i in range(60)]
    Path("t.csv").write_text("\n".join(["name,user_id,a,b,y", *rows]))
    train = "train t.csv --target y --method map --steps 5 --samples 2 --gain 1 -q"
    stderr = succeed(f"{train} --out run --id name --drop b").stderr
    for note in (
        "note: Left out, as requested: 'b'.",
        "note: Column 'name' identifies the rows; it is not an input.",
        "note: 1 of 60 rows have no value in 'y'; left out.",
        "note: Column 'user_id' has 59 different whole numbers and the name of an identifier",
        "note: The target 'y' has 2 whole values, used as classes; --task regression for numbers.",
    ):
        assert note in stderr
    assert Run.open("run").load_data().feature_names == ("a",)
    scale = Run.open("run").posterior()[1].columns[0].scale
    cells = {"in": 4, "edge": 9, "above": 9 + 3 * scale, "below": -0.5 * scale, "none": ""}
    lines = [f"{name},{cell}" for name, cell in cells.items()]
    Path("new.csv").write_text("\n".join(["name,a", *lines]))
    stderr = succeed("predict run --input new.csv").stderr
    assert "1 of 5 rows lie more than a standard deviation outside the range of the" in stderr
    distances = {row["name"]: float(row["distance"]) for row in read_table("predictions.csv")}
    expected = {"in": 0, "edge": 0, "above": 3, "below": 0.5, "none": 0}
    assert distances == pytest.approx(expected, abs=1e-3)
    assert "note:" not in succeed("resume run -q").stderr  # at the start only
    fail(f"{train} --out other --drop c", "no column 'c'")
    fail(f"{train} --out other --id y", "'y' is the target")


def test_large_targets_keep_their_digits(folder):
    Path("big.csv").write_text("a,y\n" + "".join(f"{i},{1234567 + i / 4}\n" for i in range(60)))
    succeed("train big.csv --target y --method map --steps 5 --gain 1 --out run")
    succeed("predict run --input big.csv")
    assert len({row["mean"] for row in read_table("predictions.csv")}) > 30


@pytest.mark.slow
def test_verify() -> None:
    *checks, total = succeed("verify").output.splitlines()
    assert {line.split()[0] for line in checks} == {"pass"}  # at least one, and no other mark
    assert total == f"{len(checks)} of {len(checks)} checks passed"


def test_a_closed_pipe_prints_no_error():
    command = f"{sys.executable} -m bayou list nets | head -1"
    for _ in range(3):  # whether the pipe breaks is a matter of luck
        result = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        assert result.stdout.startswith("linear"), result.stderr
        assert result.stderr == ""


@pytest.mark.slow
def test_a_terminated_run_prints_how_to_resume(folder: Path) -> None:
    words = "train moons --method map --gain 3 --steps 1000000 --out run -q"
    command = [sys.executable, "-m", "bayou", *shlex.split(words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not Path("run/map-0/checkpoint").exists() and time.monotonic() < end:
        time.sleep(0.1)
    process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "interrupted; `bayou resume run` continues" in stderr
    assert not Path("run/map-0/result.json").exists()


UNUSED_BY_PREDICTIONS = (
    *("sklearn", "scipy", "pandas", "matplotlib", "jinja2", "rich"),
    *("bayou.adapters", "bayou.app.report", "bayou.diagnostics", "bayou.operations"),
    *("bayou.methods", "bayou.inference", "bayou.select.recipes", "bayou.flows.models"),
    *("bayou.flows.discrete", "bayou.flows.continuous_time", "bayou.flows.contractive"),
)


def test_a_prediction_imports_only_what_it_uses(folder):
    write_table(folder / "t.csv")
    write_table(folder / "new.csv", 10, target=False)
    Run.create("run", Config("t.csv", ("map",), target="kind", **QUICK)).work()
    words = shlex.split("bayou predict run --input new.csv --out p.csv")
    code = f"import sys; sys.argv = {words}; from bayou.app.cli.app import main; main()"
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True
    )
    assert len(read_table("p.csv")) == 10
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    names = {line.rpartition("|")[2].strip() for line in lines}
    assert "bayou.posteriors" in names
    assert not [
        name
        for name in names
        for unused in UNUSED_BY_PREDICTIONS
        if f"{name}.".startswith(f"{unused}.")
    ]


def test_update_prints_what_changed_and_writes_a_run(folder, short_search):
    write_table("table.csv")
    write_table("new.csv", rows=20)
    write_table("unlabeled.csv", rows=3, target=False)
    succeed("train table.csv --target kind --method laplace-last --steps 12 --gain 1 -q --out run")
    result = succeed("update run --input new.csv --out second")
    header, line = result.stdout.splitlines()[:2]
    assert header.split() == [
        "method", "rows_before", "rows_after", "nll", "expected", "standard_error", "seconds"
    ]  # fmt: skip
    cells = line.split()
    assert (cells[0], int(cells[2]) - int(cells[1])) == ("laplace-last-0", 20)
    assert result.stdout.splitlines()[-1] == "wrote second"
    assert "equal rows that were learned before" in result.stderr  # the first rows of one table
    (row,) = json.loads(succeed("update second --input new.csv --force --json").stdout)
    assert row["rows_after"] == int(cells[2]) + 20
    succeed("predict second --input unlabeled.csv")
    succeed("evaluate second")
    fail("update run --input unlabeled.csv", "has no target column 'kind'")
    fail("update run --input new.csv --out second", "second already exists")
    fail("update run --input new.csv --remove", "of 20 rows of new.csv are neither training rows")
    fail("resume second", "were updated by new rows")
