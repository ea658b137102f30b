"""Run folders: every method by its name, what a folder holds, and what must not be lost."""

import csv
import json
import os
from pathlib import Path

import pytest
import torch

import bayou
from bayou.app.runs.comparison import write_report
from bayou.app.runs.config import Config
from bayou.app.runs.duration import describe_duration, estimate_seconds
from bayou.app.runs.evaluation import evaluate_run
from bayou.app.runs.folder import Interrupted, Job, Run, RunError
from bayou.app.runs.predictions import write_predictions
from bayou.core import files
from bayou.data import reading
from bayou.posteriors import Posterior
from bayou.select import named
from bayou.select.settings import ConfigError

# A given gain: the prior is not searched for.
QUICK = {"steps": 12, "samples": 4, "members": 2, "chains": 1, "gain": 1.0}
LONGER = ("hmc", "nuts", "mclmc", "annealed", "csgld")  # at least 100 draws by name
OF_NUMBERS = ("wide", "wide-noise", "tabm-noise")  # not for classes


def test_every_method_runs_by_its_name(tmp_path):
    names = tuple(name for name in named.METHODS if name not in (*LONGER, *OF_NUMBERS, "auto"))
    run = Run.create(tmp_path / "run", Config("moons", names, **QUICK))
    results = run.work()
    assert not run.failures()
    assert tuple(result["method"] for result in results) == names
    for result in results:
        assert 0 <= result["metrics"]["error"] <= 1
        assert result["metrics"]["nll"] > 0
        posterior, preprocessor, _ = run.posterior(result["method"])
        assert isinstance(posterior, Posterior)
        assert preprocessor.class_names == ("upper", "lower")


def write_steps(path, rows, with_target=True):
    """Write two columns of numbers, one of dates, and two classes."""
    lines = ["a,b,when" + ",y" * with_target]
    for i in range(rows):
        cells = [f"{i % 17 / 3:.4f}", f"{i % 29}", f"20{10 + i % 12}-0{1 + i % 9}-11"]
        cells += ["high" if i % 17 > 8 else "low"] * with_target
        lines.append(",".join(cells))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_network_of_tables_keeps_its_columns_in_the_run(tmp_path):
    table = write_steps(tmp_path / "t.csv", 120)
    config = Config(str(table), ("map", "tabm"), target="y", net="table", splits=2, **QUICK)
    run = Run.create(tmp_path / "run", config)
    run.work()
    assert not run.failures()
    facts = run.facts()
    assert facts["net"] == "table"
    assert any("columns of numbers in up to" in note for note in facts["notes"])
    assert any("'when' has dates" in note for note in facts["notes"])
    new = write_steps(tmp_path / "new.csv", 30, with_target=False)
    posterior, preprocessor, _ = Run.open(tmp_path / "run").posterior("tabm")
    mean = posterior.predict(preprocessor.transform(new)).mean
    layout = facts["layout"]["fields"]["edges"]["tuple"]
    edges = posterior.target.net.numbers.low
    assert edges.tolist() == pytest.approx(
        [edge for column in layout for edge in column.get("tuple", [])[:-1]]
    )
    again, _, _ = Run.open(tmp_path / "run").posterior("tabm")
    assert torch.equal(again.predict(preprocessor.transform(new)).mean, mean)


@pytest.mark.slow
def test_a_large_table_has_the_network_of_held_out_rows_and_says_so(tmp_path):
    table = write_steps(tmp_path / "t.csv", 2600)
    run = Run.create(tmp_path / "run", Config(str(table), ("map",), target="y", **QUICK))
    run.work()
    facts = run.facts()
    trials = {trial["net"]: trial["nll"] for trial in facts["net_choice"]["trials"]}
    assert facts["net"] == min(trials, key=trials.get)
    assert set(trials) == {"mlp", "table"}
    (note,) = [note for note in facts["notes"] if note.startswith("Network:")]
    assert facts["net"] in note
    assert note in (run.folder / "report.html").read_text(encoding="utf-8")
    Run.open(run.folder).work()
    assert run.facts() == facts


@pytest.mark.parametrize(
    "method",
    [
        bayou.SGLD(draws=2, steps=60, schedule="cyclical", chains=1),
        bayou.HMC(draws=2, warmup=2, leapfrogs=2, chains=1),
        bayou.NUTS(draws=2, warmup=2, max_depth=2, chains=1),
        bayou.MCLMC(draws=2, warmup=2, steps=2, chains=1),
        bayou.Annealed(bayou.VI(steps=5), draws=2, temperatures=2, leapfrogs=2),
    ],
    ids=["cyclical", "HMC", "NUTS", "MCLMC", "Annealed"],
)
def test_samplers_run_on_the_digits(method, digits):
    data = digits.load_data()
    net = digits.build_net(data.input_shape, data.output_size, "digits", digits.jobs[0])
    posterior = bayou.fit(net, data.train, method=method, progress=False)
    assert posterior.predict(data.test[0]).outputs.shape == (2, len(data.test[1]), 10)


def test_a_run_folder_is_complete(digits):
    names = {path.name for path in digits.folder.iterdir()}
    jobs = [("map", 0), ("map", 1), ("mnf", 0), ("mnf", 1)]
    assert {"config.json", "data.json", "metrics.json", "report.html"} <= names
    assert {f"{method}-{seed}" for method, seed in jobs} <= names
    metrics = json.loads((digits.folder / "metrics.json").read_text())
    assert [(row["method"], row["seed"]) for row in metrics] == jobs
    result = digits.results()[2]
    assert {"metrics", "rotation", "entropy", "reliability", "error_rejection"} <= set(result)
    assert Config.read(digits.folder / "config.json") == digits.config
    posterior, preprocessor, job = digits.posterior("mnf", 1)
    assert job == Job("mnf", 1)
    predictive = posterior.predict(digits.load_data().test[0][:5], samples=4, seed=0)
    assert isinstance(predictive, bayou.Predictive)
    torch.testing.assert_close(preprocessor.original(torch.zeros(1)), torch.zeros(1))


def interrupt_at(job, event):
    """Return a receiver of events that presses Ctrl-C at one of them."""

    def interrupt(name, current, numbers):
        if (name, current) == (job, event):
            raise KeyboardInterrupt

    return interrupt


def test_an_interrupted_run_is_resumed_and_its_numbers_have_a_note(tmp_path):
    config = Config("moons", ("mle",), seeds=2, **QUICK)
    expected = Run.create(tmp_path / "plain", config).work()
    run = Run.create(tmp_path / "run", config)
    with pytest.raises(Interrupted):
        run.work(tell=interrupt_at("mle-1", "judging"))  # its posterior is saved by then
    assert (run.folder / "report.html").exists()
    source = tmp_path / "new.csv"
    source.write_text("x1,x2\n0.1,0.2\n")
    note = (
        f"The run in {run.folder} is not finished: 1 of 2 fits are, mle-1 not. These are numbers "
        f"of mle-0. `bayou resume {run.folder}` continues the run."
    )
    assert write_predictions(run.folder, source, tmp_path / "a.csv") == [note]
    (other_note,) = write_predictions(run.folder, source, tmp_path / "b.csv", seed=1)
    assert "numbers of mle-1. It is saved, but was not evaluated and not checked." in other_note
    assert note in evaluate_run(run.folder, None)[1]
    with pytest.raises(RunError, match="--resume"):
        Run.create(tmp_path / "run", config)
    results = Run.create(tmp_path / "run", config, resume=True).work()
    assert [result["metrics"] for result in results] == [result["metrics"] for result in expected]
    assert write_predictions(run.folder, source, tmp_path / "c.csv") == []

    posterior, _, job = run.posterior()
    posterior.stopped = "interrupted"  # as if Ctrl-C had ended the fit
    posterior.save(run.job_folder(job) / "posterior.bayou")
    start = "mle-0: its fit was interrupted before its end"
    (note,) = write_predictions(run.folder, source, tmp_path / "d.csv")
    assert note.startswith(start)
    assert any(note.startswith(start) for note in evaluate_run(run.folder, None)[1])


def test_the_time_of_a_run_is_estimated_by_its_methods_and_its_length():
    def estimate(*methods, **settings):
        return estimate_seconds(methods, Config("moons", methods, **settings), 400, (1e-3, 2e-3))

    search = 3.5 * 2  # thousands of passes over all rows
    assert estimate("map") == pytest.approx(search)
    assert estimate("mnf") == pytest.approx(search + 8.2)  # and of steps on a batch
    assert estimate("map", "mnf") == pytest.approx(2 * search + 8.2)
    assert estimate("mnf", steps=2400) == pytest.approx(search + 2 * 8.2)
    assert estimate("mnf", epochs=600) == pytest.approx(search + 2 * 8.2)  # four batches an epoch
    assert estimate("mnf", effort=10.0) == pytest.approx(10 * estimate("mnf"))
    assert estimate("mle", steps=12) == pytest.approx(0.01 * estimate("mle"))
    assert estimate("hmc") == 0
    assert describe_duration(["map", "hmc"], 150.0, 1438) == (
        "2 fits on 1,438 rows: roughly 2 min, not counting hmc, if this machine stays as fast as "
        "it is now"
    )


def test_a_failed_method_does_not_stop_the_next_ones(tmp_path, monkeypatch):
    def fail(config):
        raise FloatingPointError("it went to infinity")

    monkeypatch.setitem(named.METHODS, "mle", named.Named("mle", "MLE", "", fail))
    run = Run.create(tmp_path / "run", Config("moons", ("mle", "map"), **QUICK))
    events = []
    results = run.work(
        tell=lambda name, event, numbers: events.append(f"{name} {event}"), announce=events.append
    )
    assert [result["method"] for result in results] == ["map"]
    assert "infinity" in run.failures()["mle-0"]
    assert "it went to infinity" in (run.folder / "report.html").read_text()
    first = events.index("map-0 fitting")
    assert events[first - 1].startswith("2 fits on 400 rows: roughly ")


@pytest.mark.slow
def test_splits_are_fitted_judged_and_resumed_like_seeds(tmp_path: Path) -> None:
    config = Config("moons", ("ffg", "map"), split=1, splits=2, **QUICK)
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
    single = Run.create(tmp_path / "single", Config("moons", ("map",), split=2, **QUICK))
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
    with pytest.raises(Interrupted):
        run.work(tell=interrupt_at("ffg-0-split-2", "judging"))
    assert "FFG: 1 of 2 splits so far." in (run.folder / "report.html").read_text()
    resumed = Run.create(tmp_path / "run", config, resume=True).work()
    assert [r["metrics"] for r in resumed] == [r["metrics"] for r in results]
    with pytest.raises(ValueError, match="one split"):
        Run.create(tmp_path / "cubic", Config("cubic", ("map",), splits=2, **QUICK)).work()
    assert not (tmp_path / "cubic").exists()


def test_unusable_folders_are_errors(digits, tmp_path):
    with pytest.raises(RunError, match="no config"):
        Run.open(tmp_path)
    with pytest.raises(RunError, match="other settings"):
        Run.create(digits.folder, Config("moons"), resume=True)
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(RunError, match="not empty"):
        Run.create(tmp_path, Config("moons"))
    if not torch.cuda.is_available():
        with pytest.raises(RunError, match="CUDA"):
            Run(tmp_path, Config("moons", device="cuda")).device


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stepz": 3}, "not a setting"),
        ({"steps": "many"}, "steps"),
        ({"methods": [3]}, "'methods' must be"),
        ({"steps": 3, "epochs": 2}, "not both"),
        ({"prior": "wide"}, "fan_in"),
        ({"prior": -1.0}, "prior must be a positive number, got -1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"lr": float("nan")}, "lr must be a positive number"),
        ({"beta": -1.0}, "beta must be at least 0"),
        ({"warmup": 3.0}, "warmup must be from 0 to 1"),
        ({"validation": 1.0}, "below 1"),
        ({"patience": 3}, "validation too"),
        ({"task": "ranking"}, "classification or regression"),
        ({"seeds": 10**9}, "seeds must be from 1 to 1,000, got 1000000000"),
        ({"splits": 10**9}, "splits must be from 1 to 1,000"),
    ],
)
def test_invalid_settings_are_errors(settings, message):
    with pytest.raises(ConfigError, match=message):
        Config.from_json({"data": "moons"} | settings)


def test_settings_are_plain_values_and_a_command():
    with pytest.raises(ConfigError, match="data"):
        Config.from_json({"steps": 3})
    assert Config("moons", ("map", "ffg", "map")).methods == ("map", "ffg")
    command = Config("my data.csv", ("mnf",), target="y", lr=0.01, compile=True).command()
    assert command == "bayou train 'my data.csv' --method mnf --lr 0.01 --compile --target y"


def test_a_second_process_is_refused_and_no_results_are_lost(tmp_path):
    first, second = (
        Run.create(tmp_path / "run", Config("moons", ("map",), seed=seed, **QUICK))
        for seed in (0, 1)
    )
    if files.fcntl is not None:
        with (
            files.lock_file(tmp_path / "run" / ".lock"),
            pytest.raises(RunError, match="another process .*another --out"),
        ):
            first.work()
        assert os.listdir(tmp_path / "run") == [".lock"]  # as good as empty
    first = Run.create(tmp_path / "run", first.config)
    (result,) = first.work()
    with pytest.raises(RunError, match="contains a run with other settings"):
        second.work()
    assert Run.open(tmp_path / "run").config == first.config
    assert Run.open(tmp_path / "run").results()[0]["seed"] == result["seed"] == 0


PREPROCESSOR = ["preprocessor", "fields"]


@pytest.mark.parametrize(
    ("name", "keys", "value", "message"),
    [
        ("data.json", [*PREPROCESSOR, "scale", "tuple", 0], -5, "scale must be positive"),
        ("data.json", [*PREPROCESSOR, "scale"], {"tuple": []}, "a mean and a scale for each"),
        ("data.json", [*PREPROCESSOR, "white"], "bright", "white must be a finite number"),
        ("data.json", [*PREPROCESSOR, "shape"], {"tuple": [1, -8, 8]}, "images of shape"),
        ("data.json", [*PREPROCESSOR, "task"], [], "one of classification, regression"),
        ("data.json", [*PREPROCESSOR, "y_scale"], 0, "y_scale must be positive"),
        ("data.json", ["preprocessor", "spec"], "Tree", "names 'Tree', which is unknown"),
        ("data.json", ["preprocessor"], [], "preprocessor = .*expected dict"),
        ("data.json", ["input_shape", 0], 1.5, "must be positive whole numbers"),
        ("data.json", ["output_size"], True, "output_size = True, expected int"),
        (os.path.join("map-0", "result.json"), ["metrics"], None, "metrics = None, expected dict"),
    ],
)
def test_invalid_json_of_a_run_is_one_sentence(name, keys, value, message, digits):
    path = digits.folder / name
    text = path.read_text()
    values = json.loads(text)
    inner = values
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    read = Run.results if path.name == "result.json" else Run.posterior
    try:
        path.write_text(json.dumps(values | {"digest": "of an older version"}))
        with pytest.raises(RunError, match=message):
            read(Run.open(digits.folder))
    finally:
        path.write_text(text)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table of small numbers."""
    path = tmp_path_factory.mktemp("table") / "table.csv"
    lines = [f"{n % 7},{n % 3}" for n in range(40)]
    path.write_text("\n".join(["x,y", *lines]) + "\n")
    return path


@pytest.mark.skipif(os.name != "posix", reason="symbolic links")
def test_files_of_a_run_are_not_written_through_symbolic_links(table, tmp_path):
    folder = tmp_path / "run"
    config = Config(str(table), ("map",), target="y", **QUICK)
    Run.create(folder, config).work()
    names = ("report.html", "metrics.json", "config.json", "data.json")
    for name in names:
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    (tmp_path / "report.html").write_text("of the user")
    inodes = {name: (tmp_path / name).stat().st_ino for name in names}
    Run.open(folder).work()
    assert {name: (tmp_path / name).stat().st_ino for name in names} == inodes
    assert (tmp_path / "report.html").read_text() == "of the user"
    assert not any((folder / name).is_symlink() for name in names)

    out = folder / "predictions.csv"
    target = tmp_path / "target"
    out.symlink_to(target)
    with pytest.raises(RunError, match=r"predictions.csv already exists"):
        write_predictions(folder, table, out)
    with pytest.raises(RunError, match=r"predictions.csv already exists"):
        write_report([folder], out)
    assert not target.exists()
    for write in (
        lambda: write_predictions(folder, table, out, force=True),
        lambda: write_report([folder], out, force=True),
    ):
        target.write_text("of the user")
        out.unlink()
        out.symlink_to(target)
        write()
        assert target.read_text() == "of the user"
        assert out.is_file()
        assert not out.is_symlink()


@pytest.mark.skipif(os.name != "posix", reason="symbolic links")
@pytest.mark.parametrize("name", ["map-0", "map-0/posterior.bayou", "map-0/checkpoint"])
def test_a_fit_does_not_write_through_symbolic_links(name, table, tmp_path):
    (tmp_path / "target").mkdir()
    folder = tmp_path / "run"
    run = Run.create(folder, Config(str(table), ("map",), target="y", **QUICK))
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(tmp_path / "target")
    with pytest.raises(RunError, match=f"{name} is a symbolic link to .*a fit would write through"):
        run.work()
    assert not list((tmp_path / "target").iterdir())


def test_texts_that_spreadsheets_run_are_escaped_in_predictions(tmp_path):
    classes = ("=1+1", "-dash", "plain")
    lines = [f"@row{n},{n % 3},{classes[n % 3]}" for n in range(60)]
    (tmp_path / "table.csv").write_text("\n".join(["+name,x,y", *lines]) + "\n")
    config = Config(str(tmp_path / "table.csv"), ("map",), target="y", id="+name", **QUICK)
    Run.create(tmp_path / "run", config).work()
    (tmp_path / "new.csv").write_text('+name,x\n=cmd(),0\n-5,1\n+4.5e3,2\n"\ttab",0\nsafe,1\n')
    write_predictions(tmp_path / "run", tmp_path / "new.csv", tmp_path / "out.csv")
    with open(tmp_path / "out.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["'+name"] for row in rows] == ["'=cmd()", "-5", "+4.5e3", "'\ttab", "safe"]
    assert {row["class"] for row in rows} <= {"'=1+1", "'-dash", "plain"}
    assert all(float(row["p(=1+1)"]) >= 0 for row in rows)
    names = [row["'+name"].strip() for row in rows]
    assert reading.read_file(tmp_path / "out.csv").columns["'+name"].levels == names
