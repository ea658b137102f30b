"""The command line: what a new user would try."""

from __future__ import annotations

import csv
import dataclasses
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

import numpy as np
import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import bayou
from bayou.app.cli.app import app
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run

QUICK = {"steps": 12, "samples": 6, "members": 2}
runner = CliRunner()
pytestmark = pytest.mark.usefixtures("short_search")


def bayou_command(*words: str) -> Any:
    return runner.invoke(app, list(words), catch_exceptions=False)


def table(path: Path, rows: int = 80, target: bool = True) -> Path:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, generator=generator)
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["height", "color", *(["kind"] if target else [])])
        for a, b in x.tolist():
            kind = ["yes" if a > 0 else "no"] if target else []
            writer.writerow([f"{a:.4f}", "red" if b > 0 else "blue", *kind])
    return path


def test_help_does_not_import_torch() -> None:
    code = "import sys; import bayou.app.cli.app; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"COVERAGE": ""})
    for name in get_command(app).commands:  # type: ignore[attr-defined]
        assert bayou_command(name, "--help").exit_code == 0
    assert bayou_command("--help").exit_code == 0


def test_without_arguments_the_command_lists_the_next_steps() -> None:
    done = bayou_command()
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert len(lines) == 7
    assert max(map(len, lines)) <= 120
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert all(line.split()[1] in commands for line in lines[1:-1])


def test_without_the_lab_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bayou.__main__ import main

    monkeypatch.delitem(sys.modules, "bayou.app.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(
        SystemExit, match=r"needs typer, which is not installed: pip install 'bayou\[lab\]'"
    ):
        main()


def test_a_missing_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Run.create(tmp_path / "run", Config("moons", ("map",), **QUICK)).work()  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "jinja2", None)
    done = bayou_command("resume", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert "A report needs jinja2, which is not installed: pip install 'bayou[lab]'" in " ".join(
        done.output.split()
    )


@pytest.mark.parametrize("what", ["data", "methods", "flows", "nets"])
def test_lists(what: str) -> None:
    done = bayou_command("list", what)
    assert done.exit_code == 0
    assert {"data": "digits", "methods": "mnf", "flows": "realnvp", "nets": "lenet"}[
        what
    ] in done.output
    assert bayou_command("list", "dogs").exit_code == 2


def test_train_predict_evaluate_report_on_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = table(tmp_path / "things.csv")
    done = bayou_command(
        "train",
        str(source),
        "--target",
        "kind",
        "--method",
        "map",
        "--steps",
        "150",
        "--out",
        "run",
    )
    assert done.exit_code == 0, done.output
    assert done.stdout == "wrote run/report.html\n"
    *_, numbers, conclusion, following = done.stderr.splitlines()
    assert re.match(
        r"MAP: accuracy [\d.]+ .*% \(higher is better\), NLL [\d.]+ .*, ECE [\d.]+ .*\(lower is better\)$",
        numbers,
    )
    assert conclusion.startswith("MAP is right in ")
    assert following == "next: bayou predict run --input new.csv"
    new = table(tmp_path / "new.csv", 7, target=False)
    done = bayou_command("predict", "run", "--input", str(new), "--out", "p.csv")
    assert done.exit_code == 0, done.output
    with open("p.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 7
    names = [
        "row",
        "class",
        "probability",
        "entropy",
        "mutual_information",
        "p(no)",
        "p(yes)",
        "distance",
    ]
    assert list(rows[0]) == names
    assert {row["class"] for row in rows} <= {"yes", "no"}
    assert (
        bayou_command("predict", "run", "--input", str(new), "--out", "p.csv").exit_code == 2
    )  # it exists
    assert (
        bayou_command("predict", "run", "--input", str(new), "--out", "p.csv", "--force").exit_code
        == 0
    )
    done = bayou_command("evaluate", "run", "--data", str(source), "--json")
    (scores,) = json.loads(done.stdout)
    assert scores["accuracy"] > 0.8
    head, row = bayou_command("evaluate", "run", "--data", str(source)).stdout.splitlines()
    shown = dict(zip(head.split(), row.split(), strict=True))
    assert float(shown["nll"]) == pytest.approx(scores["nll"], rel=1e-5)
    assert set(shown) == set(scores)
    assert bayou_command("evaluate", "run").exit_code == 0
    assert "MAP" in Path("run/report.html").read_text()
    # every option can come from the saved config
    done = bayou_command("train", "--config", "run/config.json", "--out", "again")
    assert done.exit_code == 0, done.output
    first, second = (
        json.loads(Path(folder, "metrics.json").read_text())[0]["metrics"]
        for folder in ("run", "again")
    )
    assert first == second
    done = bayou_command("train", "--config", "run/config.json", "--seed", "3", "--out", "other")
    assert Config.read("other/config.json").seed == 3
    check_comparison(source)
    done = bayou_command(
        "train", str(source), "--target", "kind", "--method", "map", "--out", "run"
    )
    assert done.exit_code == 2


def check_comparison(source: Path) -> None:
    """``bayou report`` of three runs in this folder: paired differences, and an error for other
    test rows.
    """
    done = bayou_command("report", "run", "other", "again")
    assert done.exit_code == 0, done.output
    assert done.stdout == "wrote comparison.html\n"
    rows = [
        json.loads(Path(f"{name}/map-{seed}/result.json").read_text())
        for name, seed in (("run", 0), ("other", 3))
    ]
    nll, wrong = (np.subtract(rows[1][key], rows[0][key]) for key in ("rows", "losses"))
    page = Path("comparison.html").read_text()
    assert "things.csv: comparison of 3 runs" in page
    assert "NLL minus run" in page
    cells = page[page.index("run minus other") :].partition("</tr>")[0].replace(",", "")
    numbers = [float(number) for number in re.findall(r"[+-]?\d+\.\d+", cells)]
    error = nll.std(ddof=1) / len(nll) ** 0.5
    assert numbers[:2] == pytest.approx([-nll.mean(), error], abs=6e-4)
    assert numbers[2] == pytest.approx(-100 * wrong.mean(), abs=6e-3)
    done = bayou_command("report", "run", "other")
    assert done.exit_code == 2
    assert "comparison.html already exists" in done.stderr
    for options, words in (
        (["--split", "1"], "no split in common"),
        (["--target", "color"], "got "),
    ):
        target = [] if "--target" in options else ["--target", "kind"]
        quick = (
            "--method",
            "map",
            "--steps",
            "3",
            "--gain",
            "1",
            "--out",
            f"elsewhere{len(words)}",
        )
        done = bayou_command("train", str(source), *target, *quick, *options)
        assert done.exit_code == 0, done.output
        done = bayou_command("report", "run", quick[-1], "--out", "none.html")
        assert done.exit_code == 2
        assert words in " ".join(done.stderr.split())
        assert not Path("none.html").exists()
    before = Path("run/report.html").read_text()
    Path("run/report.html").unlink()
    assert bayou_command("report", "run").exit_code == 0
    made = re.compile(r"on \d{4}-\d\d-\d\d \d\d:\d\d")
    assert made.sub("", Path("run/report.html").read_text()) == made.sub("", before)


def test_regression_predictions_have_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = bayou_command(
        "train", "two-bumps", "--method", "ffg", "--steps", "60", "--out", "run", "--samples", "20"
    )
    assert done.exit_code == 0, done.output
    page = Path("run/report.html").read_text()
    assert "Predictions inside and outside the range of the data" in page
    Path("x.csv").write_text("x\n-1.0\n0.5\n")
    done = bayou_command("predict", "run", "--input", "x.csv", "--level", "0.5", "--samples", "20")
    assert done.exit_code == 0, done.output
    with open("predictions.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 2
    for row in rows:
        assert float(row["25%"]) < float(row["mean"]) < float(row["75%"])
        assert float(row["epistemic_std"]) < float(row["std"])
        share = (float(row["epistemic_std"]) / float(row["std"])) ** 2
        assert float(row["epistemic_share_of_variance"]) == pytest.approx(share, rel=1e-4)
        assert "mutual_information" not in row  # of densities, whose entropies can be below it


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "nothing-here"], "nothing-here"),
        (["train", "digits", "--method", "mnff"], "did you mean 'mnf'"),
        (["train", "digits", "--net", "lenet", "--steps", "1"], "16×16"),
        (["train", "missing.csv", "--target", "y"], "missing.csv"),
        (["train", "digits", "--steps", "3", "--epochs", "2"], "not both"),
        (["train", "digits", "--fast", "--patient"], "give one of --fast, --patient"),
        (["compare", "digits", "--fast", "--effort", "2"], "give one of --effort, --fast"),
        (["train", "digits", "--precision", "half"], "precision"),
        (["train", "digits", "--heteroscedastic"], "for regression"),
        (["train", "digits", "--out", "a.txt"], "a.txt is a file"),
        (["train", "moons", "--device", "gpu"], "use cpu, cuda or auto"),
        (["train", "digits", "--net", "lennet"], "did you mean 'lenet'"),
        (["predict", "nowhere", "--input", "x.csv"], "not a run folder"),
        (["train", "--config", "none.json"], "none.json"),
    ],
)
def test_user_errors_are_one_sentence(
    words: list[str], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("precious")
    done = bayou_command(*words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == [
        "a.txt"
    ]  # nothing half made is in the way of another try


def test_version_and_descriptions_of_flows() -> None:
    assert bayou_command("--version").output == f"bayou {bayou.__version__}\n"
    flows = bayou_command("list", "flows").output
    assert "partial(" not in flows
    assert "form='orthogonal'" in flows


@pytest.mark.parametrize("methods", [("mnf",), ("map", "mnf")])
def test_every_setting_comes_back_from_the_command_and_from_the_file(
    methods: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a report tells the reader to type, and what a run folder saves, are the settings of the
    run: all of them.
    """
    from bayou.app.cli import app as cli

    by_type = {"int": 3, "float": 0.125, "str": "word", "bool": True, "tuple[str, ...]": ("a", "b")}
    own = {
        "task": "regression",
        "precision": "bf16",
        "prior": 0.75,
        "steps": None,
    }  # steps exclude epochs
    values = {
        name: by_type[str(one.type).removesuffix(" | None")]
        for name, one in Config.settings().items()
        if name not in own
    }
    config = Config("moons", methods, **values | own)
    same = {name for name, one in Config.settings().items() if getattr(config, name) == one.default}
    assert same == {"steps"}
    seen: list[Config] = []
    monkeypatch.setattr(cli, "_work", lambda run, quiet, executor: seen.append(run.config))
    assert (
        bayou_command(*shlex.split(config.command())[1:], "--out", str(tmp_path / "a")).exit_code
        == 0
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    done = bayou_command(
        "train", "--config", str(tmp_path / "config.json"), "--out", str(tmp_path / "b")
    )
    assert done.exit_code == 0
    for word, effort in (
        ("--fast", 0.1),
        ("--patient", 10.0),
    ):  # short for a setting, also over that of a file
        words = (
            "train",
            "--config",
            str(tmp_path / "config.json"),
            word,
            "--out",
            str(tmp_path / word),
        )
        assert bayou_command(*words).exit_code == 0
        assert seen.pop() == dataclasses.replace(config, effort=effort)
    assert seen == [config, config]


def test_a_run_on_a_file_can_be_used_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "things.csv")
    words = (
        "--target",
        "kind",
        "--method",
        "map",
        "--steps",
        "5",
        "--samples",
        "2",
        "--out",
        "run",
    )
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


def test_predictions_do_not_overwrite_their_input_and_create_their_folder(
    digits: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("x.npz", x=np.full((1, 8, 8), 3.0))
    before = Path("x.npz").read_bytes()
    done = bayou_command(
        "predict", str(digits.folder), "--input", "x.npz", "--out", "x.npz", "--force"
    )
    assert done.exit_code == 2
    assert "is the input" in done.stderr
    assert Path("x.npz").read_bytes() == before
    assert (
        bayou_command(
            "predict", str(digits.folder), "--input", "x.npz", "--out", "new/p.csv"
        ).exit_code
        == 0
    )
    assert Path("new/p.csv").read_text().startswith("row,class")
    for words, message in (
        (
            ("predict", str(digits.folder), "--input", "x.npz", "--out", "q.csv", "--seed", "7"),
            "with seed 7; it has map-0",
        ),
        (("predict", str(digits.folder), "--input", "x.npz", "--out", "x.npz/p.csv"), "x.npz"),
        (
            ("evaluate", str(digits.folder), "--method", "ffg"),
            "no finished ffg; it has map-0, map-1, mnf-0, mnf-1",
        ),
        (("evaluate", str(digits.folder), "--data", "moons"), "was trained on digits, not moons"),
    ):
        done = bayou_command(*words)
        assert done.exit_code == 2
        assert message in done.stderr


def test_ids_dropped_columns_notes_and_distances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was noticed about a table is said on the terminal; predictions know their rows and how
    far they are.
    """
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"N{i},{7 * i % 60},{i % 10},{i % 7},{i % 2 if i else ''}\n" for i in range(60))
    Path("t.csv").write_text("name,user_id,a,b,y\n" + rows)
    words = ("--target", "y", "--method", "map", "--steps", "5", "--samples", "2", "-q")
    done = bayou_command("train", "t.csv", *words, "--out", "run", "--id", "name", "--drop", "b")
    assert done.exit_code == 0, done.output
    for note in (
        "note: Left out, as requested: 'b'.",
        "note: Column 'name' identifies the rows; it is not an input.",
        "note: 1 of 60 rows have no value in 'y'; left out.",
        "note: Column 'user_id' has 59 different whole numbers and the name of an identifier; dropped. --id user_id",
        "note: The target 'y' has 2 whole values, used as classes; --task regression for numbers.",
    ):
        assert note in done.stderr
    assert Run.open("run").load_data().feature_names == ("a",)
    scale = Run.open("run").posterior()[1].columns[0].scale  # type: ignore[attr-defined]
    Path("new.csv").write_text(
        f"name,a\nin,4\nedge,9\nabove,{9 + 3 * scale:.6f}\nbelow,{-0.5 * scale:.6f}\nnone,\n"
    )
    done = bayou_command("predict", "run", "--input", "new.csv")
    assert (
        "1 of 5 rows lie more than a standard deviation outside the range of the training data"
        in done.stderr
    )
    with open("predictions.csv", newline="") as stream:
        found = {row["name"]: float(row["distance"]) for row in csv.DictReader(stream)}
    assert found == pytest.approx(
        {"in": 0, "edge": 0, "above": 3, "below": 0.5, "none": 0}, abs=1e-3
    )
    done = bayou_command("resume", "run", "-q")
    assert "note:" not in done.stderr  # once is enough
    for option, message in (
        (("--drop", "c"), "no column 'c'"),
        (("--id", "y"), "'y' is the target"),
    ):
        done = bayou_command("train", "t.csv", *words, "--out", "other", *option)
        assert done.exit_code == 2
        assert message in done.stderr


def test_large_targets_keep_their_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("big.csv").write_text("a,y\n" + "".join(f"{i},{1234567 + i / 4}\n" for i in range(60)))
    assert (
        bayou_command(
            "train", "big.csv", "--target", "y", "--method", "map", "--steps", "5", "--out", "run"
        ).exit_code
        == 0
    )
    assert bayou_command("predict", "run", "--input", "big.csv").exit_code == 0
    with open("predictions.csv", newline="") as stream:
        means = {row["mean"] for row in csv.DictReader(stream)}
    assert len(means) > 30


def test_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for each event however long it is, and one now and then in between."""
    from bayou.app.cli import live

    board = live.Board(["mnf-0"])
    board.tell("mnf-0", "fitting", {})
    board.show("VI(MNF)", 10, 2000, {"elbo": -3.0})
    monkeypatch.setattr(live, "LINE", 0.0)
    board.show("VI(MNF)", 20, 2000, {"elbo": -2.0})
    several = live.Board(["map-0", "mnf-0"])
    several.tell("map-0", "done", {})
    several.tell("mnf-0", "fitting", {})
    several.show("2 of 3: held out, MAP", 5, 10, {"nll": 1.0, "seconds_left": 6.0, "done": 0.5})
    board.tell("mnf-0", "done", dict.fromkeys(live.SHOWN, 0.12345))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["mnf-0: fitting", "mnf-0: VI(MNF) 20/2,000  elbo -2"]
    told = "2 of 3: held out, MAP 5/10  nll 1  about 6 s  75 % of the whole"  # half of the second
    assert lines[2:5] == ["map-0: done", "mnf-0: fitting", f"mnf-0 (2 of 2): {told}"]
    assert len(lines) == 6
    assert len(lines[5]) > 100


@pytest.mark.slow
def test_verify() -> None:
    done = bayou_command("verify")
    *checks, total = done.output.splitlines()
    assert done.exit_code == 0
    assert {line.split()[0] for line in checks} == {"pass"}  # at least one, and no other mark
    assert total == f"{len(checks)} of {len(checks)} checks passed"


def test_a_closed_pipe_prints_no_error() -> None:
    """`bayou list nets | head -1`."""
    command = f"{sys.executable} -m bayou list nets | head -1"
    for _ in range(3):  # whether the pipe breaks is a matter of luck
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        assert done.stdout.startswith("linear"), done.stderr
        assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_terminated_run_prints_how_to_resume(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [
        "train",
        "moons",
        "--method",
        "map",
        "--gain",
        "3",
        "--steps",
        "1000000",
        "--out",
        str(folder),
        "-q",
    ]
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{listening}; from bayou.app.cli import app; app.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 60
    while not (folder / "map-0" / "checkpoint").exists() and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(getattr(signal, name))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert f"interrupted; `bayou resume {folder}` continues" in said
    assert not (folder / "map-0" / "result.json").exists()


def test_a_prediction_imports_only_what_it_uses(tmp_path: Path) -> None:
    source, new, out = (
        table(tmp_path / "t.csv"),
        table(tmp_path / "new.csv", 10, target=False),
        tmp_path / "p.csv",
    )
    Run.create(
        tmp_path / "run", Config(data=str(source), target="kind", methods=("map",), **QUICK)
    ).work()
    words = ["bayou", "predict", str(tmp_path / "run"), "--input", str(new), "--out", str(out)]
    code = f"import sys; sys.argv = {words}; from bayou.app.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True
    )
    assert len(out.read_text().splitlines()) == 11
    names = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    unused = ("sklearn", "scipy", "pandas", "matplotlib", "jinja2", "rich", *(f"bayou.{name}" for name in (
        "adapters", "report", "diagnostics", "operations", "methods", "inference", "select.recipes",
        "flows._registry", "flows.models", "flows.discrete", "flows.continuous_time", "flows.contractive",
    )))  # fmt: skip
    assert "bayou.posteriors" in names
    assert not [name for name in names for one in unused if f"{name}.".startswith(f"{one}.")]
