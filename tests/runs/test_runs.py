"""Run folders: every method by its name, what a folder holds, and what must not be lost."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import bayou
from bayou.app.runs.comparison import write_report
from bayou.app.runs.config import Config
from bayou.app.runs.evaluation import evaluate_run
from bayou.app.runs.folder import Interrupted, Job, Run, RunError
from bayou.app.runs.json_files import write_json
from bayou.app.runs.predictions import write_predictions
from bayou.core import files
from bayou.data import reading
from bayou.inference import probe
from bayou.posteriors import Posterior
from bayou.select import named
from bayou.select.settings import ConfigError

QUICK = {"steps": 12, "samples": 6, "members": 2}
pytestmark = pytest.mark.usefixtures("short_search")


@pytest.mark.parametrize("half", [0, 1])  # for two processes
def test_every_method_runs_on_the_digits(
    half: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "POWER_ITERATIONS", 2)  # any step of a sampler will do here
    names = tuple(
        name for name in named.METHODS if name not in ("hmc", "nuts", "mclmc", "annealed")
    )[half::2]
    run = Run.create(tmp_path / "run", Config("digits-few", names, **(QUICK | {"steps": 30})))  # type: ignore[arg-type]
    results = run.work()
    assert not run.failures()
    assert tuple(result["method"] for result in results) == names
    for result in results:
        assert 0 <= result["metrics"]["error"] <= 1
        assert result["metrics"]["nll"] > 0
        posterior, preprocessor, _ = run.posterior(result["method"])
        assert isinstance(posterior, Posterior)
        assert preprocessor.class_names == tuple("0123456789")


@pytest.mark.parametrize(
    "method",
    [
        bayou.HMC(draws=2, warmup=2, leapfrogs=2, chains=1),
        bayou.NUTS(draws=2, warmup=2, max_depth=2, chains=1),
        bayou.MCLMC(draws=2, warmup=2, steps=2, chains=1),
        bayou.Annealed(bayou.VI(steps=5), draws=2, temperatures=2, leapfrogs=2),
    ],
    ids=["HMC", "NUTS", "MCLMC", "Annealed"],
)
def test_exact_samplers_run_on_the_digits_too(method: Any, digits: Run) -> None:
    data = digits.load_data()
    net = digits.build_net(data.input_shape, data.output_size, "digits", digits.jobs[0])
    posterior = bayou.fit(net, data.train, method=method, progress=False)
    assert posterior.predict(data.test[0]).outputs.shape == (2, len(data.test[1]), 10)


def test_a_run_folder_has_everything(digits: Run) -> None:
    names = {path.name for path in digits.folder.iterdir()}
    assert {
        "config.json",
        "data.json",
        "metrics.json",
        "report.html",
        "map-0",
        "map-1",
        "mnf-0",
        "mnf-1",
    } <= names
    metrics = json.loads((digits.folder / "metrics.json").read_text())
    assert [(row["method"], row["seed"]) for row in metrics] == [
        ("map", 0),
        ("map", 1),
        ("mnf", 0),
        ("mnf", 1),
    ]
    result = digits.results()[2]
    assert {"metrics", "rotation", "entropy", "reliability", "error_rejection"} <= set(result)
    assert Config.read(digits.folder / "config.json") == digits.config


@pytest.mark.slow
def test_a_run_repeats_itself_and_goes_on_where_it_was(
    digits: Run, tmp_path: Path, monkeypatch: Any
) -> None:
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
    for one, other in zip(results, digits.results(), strict=True):
        assert one["metrics"] == pytest.approx(
            other["metrics"], rel=1e-5
        )  # torch may change kernels within a process


def test_numbers_of_an_interrupted_run_have_a_note(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", Config("moons", ("mle",), seeds=2, **QUICK))  # type: ignore[arg-type]

    def interrupt(name: str, what: str, numbers: dict[str, Any]) -> None:
        if name == "mle-1" and what == "judging":  # its posterior is saved by then
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run.work(tell=interrupt)
    source = tmp_path / "new.csv"
    source.write_text("x1,x2\n0.1,0.2\n")
    expected = (
        f"The run in {run.folder} is not finished: 1 of 2 fits are, mle-1 not. These are numbers of mle-0. "
        f"`bayou resume {run.folder}` continues the run."
    )
    assert write_predictions(run.folder, source, tmp_path / "a.csv") == [expected]
    (note,) = write_predictions(run.folder, source, tmp_path / "b.csv", seed=1)
    assert "numbers of mle-1. It is saved, but was not evaluated and not checked." in note
    assert expected in evaluate_run(run.folder, None)[1]


def test_numbers_of_an_interrupted_fit_have_a_note(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", Config("moons", ("mle",), **QUICK))  # type: ignore[arg-type]
    run.work()
    source = tmp_path / "new.csv"
    source.write_text("x1,x2\n0.1,0.2\n")
    assert write_predictions(run.folder, source, tmp_path / "a.csv") == []
    posterior, _, job = run.posterior()
    posterior.stopped = "interrupted"
    posterior.save(run.job_folder(job) / "posterior.bayou")
    start = "mle-0: its fit was interrupted before its end"
    assert [
        note.startswith(start) for note in write_predictions(run.folder, source, tmp_path / "b.csv")
    ] == [True]
    assert any(note.startswith(start) for note in evaluate_run(run.folder, None)[1])


def test_the_time_of_a_run_is_estimated_by_its_methods_and_its_length() -> None:
    from bayou.app.runs.duration import describe_duration, estimate_seconds

    def estimate(*methods: str, **settings: Any) -> float:
        return estimate_seconds(methods, Config("moons", methods, **settings), 400, (1e-3, 2e-3))

    assert estimate("map") == pytest.approx(3.5 * 2)  # thousands of passes over all rows
    assert estimate("mnf") == pytest.approx(3.5 * 2 + 8.2)  # and of steps on a batch
    assert estimate("map", "mnf") == pytest.approx(estimate("map") + estimate("mnf"))
    assert estimate("mnf", steps=2400) == pytest.approx(3.5 * 2 + 2 * 8.2)
    assert estimate("mnf", epochs=600) == pytest.approx(
        estimate("mnf", steps=2400)
    )  # four batches an epoch
    assert estimate("mnf", effort=10.0) == pytest.approx(10 * estimate("mnf"))
    assert estimate("mle", steps=12) == pytest.approx(0.01 * estimate("mle"))
    assert estimate("hmc") == 0
    assert describe_duration(["map", "hmc"], 150.0, 1438) == (
        "2 fits on 1,438 rows: roughly 2 min, not counting hmc, if this machine stays as fast as it is now"
    )


def test_the_time_of_a_run_is_announced_before_its_first_fit(tmp_path: Path) -> None:
    heard: list[str] = []
    run = Run.create(tmp_path / "run", Config("moons", ("mle",), **QUICK))  # type: ignore[arg-type]
    run.work(tell=lambda name, what, numbers: heard.append(f"{name} {what}"), announce=heard.append)
    first = heard.index("mle-0 fitting")
    assert heard[first - 1].startswith("1 fit on 400 rows: roughly ")
    heard.clear()
    run.work(announce=heard.append)  # nothing is left to do
    assert heard == []


@pytest.mark.slow
def test_splits_are_fitted_judged_and_resumed_like_seeds(tmp_path: Path) -> None:
    config = Config("moons", ("ffg", "map"), split=1, splits=2, **QUICK)  # type: ignore[arg-type]
    plain = Run.create(tmp_path / "plain", config)
    told: list[str] = []
    results = plain.work(
        tell=lambda name, what, numbers: told.append(name) if what == "fitting" else None
    )
    assert told == [
        "map-0",
        "ffg-0",
        "map-0-split-2",
        "ffg-0-split-2",
    ]  # MAP first: others are held against it
    assert [(r["method"], r["split"]) for r in results] == [
        ("ffg", 1),
        ("map", 1),
        ("ffg", 2),
        ("map", 2),
    ]
    single = Run.create(tmp_path / "single", Config("moons", ("map",), split=2, **QUICK))  # type: ignore[arg-type]
    assert (
        single.work()[0]["metrics"] == results[3]["metrics"]
    )  # a split of several is that split alone
    assert single.facts()["baselines"] == plain.facts()["splits"]["2"]["baselines"]
    page = (plain.folder / "report.html").read_text()
    assert (
        "Means over 2 splits of the data, one seed each, ± the larger of two standard errors: of a single"
        in page
    )
    assert "1 seed · 2 splits" in page
    mean = sum(r["metrics"]["nll"] for r in results if r["method"] == "ffg") / 2
    assert f"{mean:.4f} <span" in page
    assert [job.name for job in plain.finished_jobs()] == [
        "ffg-0",
        "map-0",
    ]  # new rows go through the first split's scales
    run = Run.create(tmp_path / "run", config)

    def interrupt(name: str, what: str, numbers: dict[str, Any]) -> None:
        if name == "ffg-0-split-2" and what == "judging":
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run.work(tell=interrupt)
    assert "FFG: 1 of 2 splits so far." in (run.folder / "report.html").read_text()
    resumed = Run.create(tmp_path / "run", config, resume=True).work()
    assert [r["metrics"] for r in resumed] == [r["metrics"] for r in results]
    with pytest.raises(ValueError, match="one split"):
        Run.create(tmp_path / "cubic", Config("cubic", ("map",), splits=2, **QUICK)).work()  # type: ignore[arg-type]
    assert not (tmp_path / "cubic").exists()


def test_a_failing_method_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(plan: Config) -> Any:
        raise FloatingPointError("it went to infinity")

    monkeypatch.setitem(named.METHODS, "mle", named.Named("mle", "MLE", "", broken))
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


def test_a_second_process_gets_a_sentence_and_no_results_are_lost(tmp_path: Path) -> None:
    first, second = (
        Run.create(tmp_path / "run", Config("moons", ("map",), seed=seed, **QUICK))  # type: ignore[arg-type]
        for seed in (0, 1)
    )
    if files.fcntl is not None:
        with (
            files.lock_file(tmp_path / "run" / ".lock"),
            pytest.raises(RunError, match="another process .*another --out"),
        ):
            first.work()
        assert os.listdir(tmp_path / "run") == [
            ".lock"
        ]  # which is no run: the folder is as good as empty
    first = Run.create(tmp_path / "run", first.config)
    (result,) = first.work()
    with pytest.raises(RunError, match="contains a run with other settings"):
        second.work()
    assert Run.open(tmp_path / "run").config == first.config
    assert Run.open(tmp_path / "run").results()[0]["seed"] == result["seed"] == 0


@pytest.mark.parametrize("name", ["config.json", "data.json", os.path.join("map-0", "result.json")])
def test_a_file_of_a_run_that_was_edited_says_so(name: str, digits: Run, tmp_path: Path) -> None:
    shutil.copytree(digits.folder, tmp_path / "run")
    path = tmp_path / "run" / name
    text = path.read_text()
    path.write_text(re.sub(r'("(samples|train)": )\d+', r"\g<1>7", text, count=1))
    ask = Run.results if path.name == "result.json" else Run.posterior
    with pytest.raises(RunError, match=rf"{path.name} has been modified.*remove its .digest"):
        ask(Run.open(tmp_path / "run"))
    values = json.loads(path.read_text())
    del values["digest"]
    path.write_text(json.dumps(values))  # meant so
    ask(Run.open(tmp_path / "run"))
    path.write_text(text)
    assert Config.read(tmp_path / "run" / "config.json") == digits.config


ODD: list[tuple[str, list[str | int], Any, str]] = [
    (
        "data.json",
        ["preprocessor", "fields", "scale", "tuple", 0],
        -5,
        "scale must be positive and finite, got -5",
    ),
    (
        "data.json",
        ["preprocessor", "fields", "scale", "tuple", 0],
        None,
        "Number scale must be a finite number, got None",
    ),
    (
        "data.json",
        ["preprocessor", "fields", "scale"],
        {"tuple": []},
        "a mean and a scale for each channel",
    ),
    (
        "data.json",
        ["preprocessor", "fields", "white"],
        "bright",
        "white must be a finite number, got 'bright'",
    ),
    ("data.json", ["preprocessor", "fields", "shape"], {"tuple": [1, -8, 8]}, "images of shape"),
    (
        "data.json",
        ["preprocessor", "fields", "task"],
        [],
        "task must be one of classification, regression",
    ),
    (
        "data.json",
        ["preprocessor", "fields", "class_names", "tuple", 0],
        "1",
        "class_names must be different words",
    ),
    (
        "data.json",
        ["preprocessor", "fields", "class_names", "tuple", 0],
        {},
        "does not describe a preprocessor",
    ),
    ("data.json", ["preprocessor", "fields", "y_scale"], 0, "y_scale must be positive"),
    ("data.json", ["preprocessor", "spec"], "Tree", "names 'Tree', which is unknown"),
    ("data.json", ["preprocessor"], [], "preprocessor = .*expected dict"),
    ("data.json", ["input_shape", 0], 1.5, "must be positive whole numbers"),
    ("data.json", ["output_size"], True, "output_size = True, expected int"),
    ("data.json", ["net"], {}, "net = .*expected str"),
    ("config.json", ["methods"], [3], "'methods' must be"),
    ("config.json", ["precision"], [], "'precision' must be"),
    (os.path.join("map-0", "result.json"), ["metrics"], None, "metrics = None, expected dict"),
]


@pytest.mark.parametrize(("name", "keys", "value", "says"), ODD)
def test_odd_json_of_a_run_is_a_sentence(
    name: str, keys: list[Any], value: Any, says: str, digits: Run
) -> None:
    """Without a digest, as after an edit, keys and types are checked."""
    path = digits.folder / name
    text = path.read_text()
    values = json.loads(text)
    del values["digest"]
    inner = values
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    try:
        path.write_text(json.dumps(values))
        with pytest.raises((RunError, ConfigError), match=says):
            (Run.results if path.name == "result.json" else Run.posterior)(Run.open(digits.folder))
    finally:
        path.write_text(text)


def test_settings_that_say_the_same_once() -> None:
    assert Config("moons", ("map", "ffg", "map")).methods == ("map", "ffg")
    command = Config("my data.csv", ("mnf",), target="y", lr=0.01, compile=True).command()
    assert command == "bayou train 'my data.csv' --method mnf --lr 0.01 --compile --target y"


def test_a_posterior_of_a_run_is_a_plain_posterior(digits: Run) -> None:
    posterior, preprocessor, job = digits.posterior("mnf", 1)
    assert job == Job("mnf", 1)
    data = digits.load_data()
    p = posterior.predict(data.test[0][:5], samples=4, seed=0)
    assert isinstance(p, bayou.Predictive)
    torch.testing.assert_close(preprocessor.original(torch.zeros(1)), torch.zeros(1))


def small_table(folder: Path) -> Path:
    lines = [f"{n % 7},{n % 3}" for n in range(40)]
    (folder / "table.csv").write_text("\n".join(["x,y", *lines]) + "\n")
    return folder / "table.csv"


@pytest.mark.skipif(os.name != "posix", reason="symbolic links")
def test_files_of_a_run_are_not_written_through_symbolic_links(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = Config(str(small_table(tmp_path)), ("map",), target="y", **QUICK)  # type: ignore[arg-type]
    Run.create(folder, config).work()
    names = ("report.html", "metrics.json", "config.json", "data.json")
    for name in names:
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    (tmp_path / "report.html").write_text("of the user")
    inodes = {name: (tmp_path / name).stat().st_ino for name in names}
    write_report([folder])
    assert not (folder / "report.html").is_symlink()
    (folder / "report.html").unlink()
    (folder / "report.html").symlink_to(tmp_path / "report.html")
    Run.open(folder).work()
    assert {name: (tmp_path / name).stat().st_ino for name in names} == inodes
    assert (tmp_path / "report.html").read_text() == "of the user"
    assert not any((folder / name).is_symlink() for name in names)


@pytest.mark.skipif(os.name != "posix", reason="symbolic links")
@pytest.mark.parametrize("name", ["map-0", "map-0/posterior.bayou", "map-0/checkpoint"])
def test_a_fit_does_not_write_through_symbolic_links(name: str, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    folder = tmp_path / "run"
    config = Config(str(small_table(tmp_path)), ("map",), target="y", **QUICK)  # type: ignore[arg-type]
    run = Run.create(folder, config)
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(tmp_path / "target")
    with pytest.raises(
        RunError, match=f"{name} is a symbolic link to .*target; a fit would write through it"
    ):
        run.work()
    assert not list((tmp_path / "target").iterdir())


@pytest.mark.skipif(os.name != "posix", reason="symbolic links")
def test_predictions_and_reports_are_not_written_through_symbolic_links(tmp_path: Path) -> None:
    table = small_table(tmp_path)
    folder = tmp_path / "run"
    Run.create(folder, Config(str(table), ("map",), target="y", **QUICK)).work()  # type: ignore[arg-type]
    out = folder / "predictions.csv"
    out.symlink_to(tmp_path / "nothing yet")
    with pytest.raises(RunError, match=r"predictions.csv already exists"):
        write_predictions(folder, table, out)
    with pytest.raises(RunError, match=r"predictions.csv already exists"):
        write_report([folder], out)
    for write in (
        lambda: write_predictions(folder, table, out, force=True),
        lambda: write_report([folder], out, force=True),
    ):
        (tmp_path / "own").write_text("of the user")
        out.unlink()
        out.symlink_to(tmp_path / "own")
        write()
        assert (tmp_path / "own").read_text() == "of the user"
        assert out.is_file()
        assert not out.is_symlink()
    assert not (tmp_path / "nothing yet").exists()


def test_texts_that_spreadsheets_run_are_escaped_in_predictions(tmp_path: Path) -> None:
    classes = ("=1+1", "-dash", "plain")
    lines = [f"@row{n},{n % 3},{classes[n % 3]}" for n in range(60)]
    (tmp_path / "table.csv").write_text("\n".join(["+name,x,y", *lines]) + "\n")
    config = Config(str(tmp_path / "table.csv"), ("map",), target="y", id="+name", **QUICK)  # type: ignore[arg-type]
    Run.create(tmp_path / "run", config).work()
    (tmp_path / "new.csv").write_text('+name,x\n=cmd(),0\n-5,1\n+4.5e3,2\n"\ttab",0\nsafe,1\n')
    write_predictions(tmp_path / "run", tmp_path / "new.csv", tmp_path / "out.csv")
    with open(tmp_path / "out.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["'+name"] for row in rows] == ["'=cmd()", "-5", "+4.5e3", "'\ttab", "safe"]
    escaped = {"'=1+1", "'-dash", "plain"}
    assert {row["class"] for row in rows} <= escaped
    assert all(float(row["p(=1+1)"]) >= 0 for row in rows)
    assert reading.read_file(tmp_path / "out.csv").columns["'+name"].levels == [
        row["'+name"].strip() for row in rows
    ]


@pytest.mark.parametrize("name", ["seeds", "splits"])
def test_a_config_of_a_billion_jobs_is_refused(name: str, digits: Run, tmp_path: Path) -> None:
    values = digits.config.to_json() | {name: 10**9}
    write_json(tmp_path / "config.json", values)
    with pytest.raises(ConfigError, match=f"{name} must be from 1 to 1,000, got 1000000000"):
        Run.open(tmp_path)
