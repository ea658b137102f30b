"""New rows for a finished run: what the updated folder holds, what it predicts, what is refused,
and that nothing is lost.
"""

import csv
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bayou
from bayou.app.runs import staging, update as update_module
from bayou.app.runs.calibration import calibrate_run
from bayou.app.runs.config import Config
from bayou.app.runs.evaluation import evaluate_run
from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.predictions import write_predictions
from bayou.app.runs.service import Service
from bayou.app.runs.update import update_run
from bayou.posteriors import Posterior

QUICK = {"steps": 12, "samples": 4, "members": 2, "chains": 1, "gain": 1.0}
HEADER = ["area", "heating", "built", "price"]


pytestmark = pytest.mark.usefixtures("short_searches")


def write_flats(path: Path, rows: int, seed: int, shift: float = 0.0, columns=HEADER) -> Path:
    """Write a table of numbers, categories and dates, whose prices may be shifted."""
    numbers = random.Random(seed)
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        for _ in range(rows):
            area = numbers.uniform(30, 120)
            heating = numbers.choice(["gas", "district"])
            price = 40 + 2.2 * area - 15 * (heating == "gas") + numbers.gauss(0, 12) + shift
            row = {
                "area": round(area, 1),
                "heating": heating,
                "built": f"20{numbers.randint(10, 20)}-0{numbers.randint(1, 9)}-11",
                "price": round(price, 1),
                "kind": "large" if price > 190 else "small",
            }
            writer.writerow([row[name] for name in columns])
    return path


def train(folder: Path, table: Path, *methods: str, **settings) -> Run:
    run = Run.create(folder, Config(str(table), methods, **({"target": "price"} | settings)))
    run.work()
    assert not run.failures()
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory, short_searches):
    """A run of a last layer and of a point, and the folder that it is in."""
    root = tmp_path_factory.mktemp("update")
    table = write_flats(root / "flats.csv", 120, seed=0)
    return train(root / "run", table, "laplace-last", "map", **QUICK)


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run, which a test may change."""
    shutil.copytree(trained.folder, tmp_path / "run")
    return Run.open(tmp_path / "run")


@pytest.fixture
def new(tmp_path):
    return write_flats(tmp_path / "new.csv", 30, seed=1)


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files of a folder, without locks."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def rows_of(run: Run, table: Path) -> tuple[torch.Tensor, torch.Tensor]:
    rows = run.preprocessor().rows(table, need_target=True)
    return run.convert(rows.x, rows.y)


def test_the_new_folder_has_the_updated_posterior_and_the_old_one_stays(run, new, tmp_path):
    before = contents(run.folder)
    path, (row,), notes = update_run(run.folder, new, method="laplace-last")
    assert path == tmp_path / "run-updated"
    assert contents(run.folder) == before
    assert notes == []
    assert sorted(os.listdir(tmp_path)) == ["new.csv", "run", "run-updated"]

    x, y = rows_of(run, new)
    old, preprocessor, _ = run.posterior("laplace-last")
    expected = old.update((x, y))
    updated_run = Run.open(path)
    assert updated_run.config.methods == ("laplace-last",)
    updated, _, _ = updated_run.posterior()
    assert (row["rows_before"], row["rows_after"]) == (96, 126)
    assert updated.target.n == expected.target.n == 126
    assert torch.equal(updated.predict(x).outputs, expected.predict(x).outputs)
    assert not torch.equal(updated.predict(x).mean, old.predict(x).mean)

    predictive = old.predict(x, 4, seed=0)  # of the rows before they were learned
    scale = preprocessor.y_scale
    nll = -predictive.log_prob(y).double() + torch.tensor(scale).log()
    entropy = predictive.entropy.double() + torch.tensor(scale).log()
    assert row["nll"] == pytest.approx(float(nll.mean()), rel=1e-5)
    assert row["expected"] == pytest.approx(float(entropy.mean()), rel=1e-5)
    error = float((nll - entropy).std()) / 30**0.5
    assert row["standard_error"] == pytest.approx(error, rel=1e-4)
    assert row["seconds"] > 0

    (record,) = updated_run.updates()
    assert record["input"] == str(new)
    assert record["jobs"][0]["rows_after"] == 126
    assert len(record["rows"]) == 30
    assert "30 rows of new.csv were learned after the fit." in updated_run.facts()["notes"]
    (result,) = updated_run.results()
    test = updated_run.load_data().test
    assert result["metrics"]["nll"] != run.results()[0]["metrics"]["nll"]
    assert len(result["rows"]) == len(test[1])
    assert "30 rows of new.csv were learned" in (path / "report.html").read_text()


def test_an_updated_run_predicts_evaluates_serves_and_is_updated_again(run, new, tmp_path):
    path, _, _ = update_run(run.folder, new, method="laplace-last", out=tmp_path / "second")
    unlabeled = write_flats(tmp_path / "unlabeled.csv", 5, seed=2, columns=HEADER[:3])
    assert write_predictions(path, unlabeled, tmp_path / "out.csv") == []
    with open(tmp_path / "out.csv") as stream:
        predictions = list(csv.DictReader(stream))
    posterior, preprocessor, _ = Run.open(path).posterior()
    mean = posterior.predict(preprocessor.transform(unlabeled), 4).mean[:, 0]
    assert [float(row["mean"]) for row in predictions] == pytest.approx(
        preprocessor.original(mean).tolist(), rel=1e-5
    )
    scores, _ = evaluate_run(path, str(new))
    assert scores[0]["method"] == "laplace-last-0"
    assert evaluate_run(path, None)[0][0]["nll"] == pytest.approx(
        Run.open(path).results()[0]["metrics"]["nll"]
    )
    service = Service.of(path)
    query = service.read(
        json.dumps({"rows": [{"area": 70, "heating": "gas", "built": "2015-03-11"}]}).encode()
    )
    assert len(json.loads(service.predict([query])[0])["predictions"]) == 1
    newer = write_flats(tmp_path / "newer.csv", 10, seed=3)
    _, (row,), _ = update_run(path, newer, out=tmp_path / "third", forget=0.9)
    assert (row["rows_before"], row["rows_after"]) == (126, 136)
    third = Run.open(tmp_path / "third")
    assert [record["forget"] for record in third.updates()] == [None, 0.9]
    assert "--forget 0.9" in third.facts()["notes"][-1]
    with pytest.raises(RunError, match="were updated by new rows"):
        third.work()


def test_in_place_the_run_is_replaced_and_other_methods_stay(run, new):
    old = contents(run.folder)
    path, rows, notes = update_run(run.folder, new, force=True)
    assert path == run.folder
    assert [row["method"] for row in rows] == ["laplace-last-0"]
    assert any(note.startswith("map-0 stays as it was: ") for note in notes)
    now = contents(run.folder)
    assert now["map-0/posterior.bayou"] == old["map-0/posterior.bayou"]
    assert now["laplace-last-0/posterior.bayou"] != old["laplace-last-0/posterior.bayou"]
    assert set(now) == {*old, "updates.json"}
    assert sorted(os.listdir(run.folder.parent)) == ["new.csv", "run"]
    assert {result["method"] for result in Run.open(run.folder).results()} == {
        "laplace-last",
        "map",
    }


def test_rows_that_were_learned_are_removed_and_others_are_not(run, new, tmp_path):
    run = Run.open(update_run(run.folder, new, out=tmp_path / "learned")[0])
    original, _, _ = Run.open(tmp_path / "run").posterior("laplace-last")
    _, (row,), _ = update_run(run.folder, new, remove=True, force=True)
    assert (row["rows_before"], row["rows_after"]) == (126, 96)
    restored, _, _ = run.posterior()
    x, _ = rows_of(run, new)
    mean, variance = original.function(x)
    restored_mean, restored_variance = restored.function(x)
    torch.testing.assert_close(restored_mean, mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(restored_variance, variance, rtol=1e-2, atol=1e-5)
    with pytest.raises(RunError, match="30 of 30 rows of .* are neither training rows"):
        update_run(run.folder, new, remove=True, force=True)
    # Training rows can be removed, test rows were never learned.
    table = Path(run.config.data)
    with pytest.raises(RunError, match="24 of 120 rows"):
        update_run(run.folder, table, remove=True, force=True)


def test_training_rows_of_a_fit_that_held_some_out_are_not_removed(run, new, tmp_path):
    """A fit to many rows holds some out for good: a removal of these would be of rows not in it."""
    posterior, _, job = run.posterior("laplace-last")
    rows = len(run.load_data().train[0])
    assert posterior.target.n == rows
    posterior.target = replace(posterior.target, n=rows - 10)
    posterior.save(run.job_folder(job) / "posterior.bayou")
    header, *lines = Path(run.config.data).read_text().splitlines()
    messages = []
    for line in lines[:6]:  # training rows, and perhaps a test row
        (tmp_path / "one.csv").write_text(f"{header}\n{line}\n")
        with pytest.raises(RunError) as caught:
            update_run(run.folder, tmp_path / "one.csv", remove=True)
        messages.append(str(caught.value))
    assert any(f"held out 10 of the {rows} training rows" in message for message in messages)
    path, _, _ = update_run(run.folder, new)
    update_run(path, new, remove=True)  # rows of an update are known to be in it


def test_rows_that_an_update_learned_neither_calibrate_nor_guarantee(run, new, tmp_path):
    """They are not in the training file, but the posterior is better on them than on others."""
    path, _, _ = update_run(run.folder, new)
    message = "30 of 30 rows of .*new.csv were learned by `bayou update`"
    with pytest.raises(RunError, match=message):
        calibrate_run(path, new)
    options = {"conformal": new, "level": 0.8}
    with pytest.raises(RunError, match=message):
        write_predictions(path, new, tmp_path / "out.csv", **options)
    others = write_flats(tmp_path / "others.csv", 30, seed=9)
    calibrate_run(path, others)
    write_predictions(path, new, tmp_path / "out.csv", **options | {"conformal": others})
    without, _, _ = update_run(path, new, remove=True)  # which it no longer knows
    write_predictions(without, others, tmp_path / "out-2.csv", **options)


def test_rows_that_are_known_and_rows_that_are_not_expected_have_notes(run, new, tmp_path):
    path, _, notes = update_run(run.folder, new, method="laplace-last")
    assert notes == []
    _, _, notes = update_run(path, new, force=True)
    assert notes == ["30 of 30 rows equal rows that were learned before; each of them counts once "
                     "more now."]  # fmt: skip
    _, _, notes = update_run(
        run.folder, run.config.data, method="laplace-last", out=tmp_path / "again"
    )
    assert "96 of 120 rows equal rows that were learned before" in notes[0]
    assert "24 of 120 rows equal test rows of the run" in notes[1]
    shifted = write_flats(tmp_path / "shifted.csv", 30, seed=4, shift=300.0)
    _, _, notes = update_run(run.folder, shifted, method="laplace-last", out=tmp_path / "shift")
    assert any("higher than expected by more than 2.5 standard errors" in note for note in notes)


def test_what_cannot_be_done_is_one_sentence_and_nothing_is_written(run, new, tmp_path):
    before = contents(tmp_path)
    unlabeled = write_flats(tmp_path / "unlabeled.csv", 5, seed=2, columns=HEADER[:3])
    narrow = write_flats(tmp_path / "narrow.csv", 5, seed=2, columns=["area", "price"])
    (tmp_path / "taken").mkdir()
    cases = [
        ({"source": unlabeled}, "has no target column 'price'"),
        ({"source": narrow}, "has no column 'heating', 'built'"),
        (
            {"method": "map"},
            "map-0: .*cannot be updated.*To fit laplace-last again to old and new rows, "
            f"`bayou label {run.folder} --labeled {new}`.*posteriors of laplace-last, vbll.*wide",
        ),
        ({"method": "mnf"}, "no finished mnf"),
        ({"out": tmp_path / "taken"}, "taken already exists"),
        ({"out": tmp_path / "missing" / "run"}, "does not exist; create it first"),
        ({"out": tmp_path / "x", "force": True}, "not both"),
        ({"remove": True, "forget": 0.9}, "omit it with --remove"),
        ({"forget": 1.5}, "forget must be the weight"),
    ]
    for options, message in cases:
        source = options.pop("source", new)
        with pytest.raises(ValueError, match=message):
            update_run(run.folder, source, **options)
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert not (tmp_path / "run-updated").exists()


@pytest.mark.parametrize("interrupted", ["save", "judge", "first rename", "second rename"])
def test_after_ctrl_c_the_run_is_as_it_was(interrupted, run, new, monkeypatch, tmp_path):
    before = contents(run.folder)
    calls = []
    rename = os.rename

    def press(*arguments):
        raise KeyboardInterrupt

    def press_at(source, target):
        calls.append(source)
        if len(calls) == (1 if interrupted == "first rename" else 2):
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        if interrupted == "save":
            patch.setattr(Posterior, "save", press)
        elif interrupted == "judge":
            patch.setattr(Run, "write_summary", press)
        else:
            patch.setattr(staging.os, "rename", press_at)
        with pytest.raises(KeyboardInterrupt):
            update_run(run.folder, new, force=True)
    assert contents(run.folder) == before
    assert sorted(os.listdir(tmp_path)) == ["new.csv", "run"]
    update_run(run.folder, new, force=True)
    assert Run.open(run.folder).posterior("laplace-last")[0].target.n == 126


def test_without_the_training_data_there_are_predictions_and_no_scores(run, new, tmp_path):
    table = tmp_path / "gone.csv"
    shutil.copy(run.config.data, table)
    config = json.loads((run.folder / "config.json").read_text()) | {"data": str(table)}
    (run.folder / "config.json").write_text(json.dumps(config))
    table.unlink()
    path, (row,), notes = update_run(run.folder, new, method="laplace-last")
    assert row["rows_after"] == 126
    assert any("no scores on test rows and no report" in note for note in notes)
    assert not (path / "report.html").exists()
    unlabeled = write_flats(tmp_path / "unlabeled.csv", 5, seed=2, columns=HEADER[:3])
    assert write_predictions(path, unlabeled, tmp_path / "out.csv") == []


@pytest.mark.slow
def test_an_unfinished_run_and_one_of_several_splits(run, new, tmp_path):
    result = run.folder / "laplace-last-0" / "result.json"
    text = result.read_text()
    result.unlink()
    with pytest.raises(RunError, match="is not finished: laplace-last-0; `bayou resume"):
        update_run(run.folder, new)
    result.write_text(text)
    table = Path(run.config.data)
    split = train(tmp_path / "split", table, "laplace-last", splits=2, **QUICK)
    with pytest.raises(RunError, match="has 2 splits"):
        update_run(split.folder, new, force=True)
    path, _, _ = update_run(split.folder, new, out=tmp_path / "first")
    first = Run.open(path)
    assert first.config.splits == 1
    assert [job.name for job in first.jobs] == ["laplace-last-0"]
    assert first.unfinished_jobs() == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["laplace-last", "vbll", "laplace", "ffg"])
def test_classes_learn_new_rows_by_the_methods_that_the_error_names(method, tmp_path):
    columns = [*HEADER[:3], "kind"]
    table = write_flats(tmp_path / "t.csv", 80, seed=5, columns=columns)
    new = write_flats(tmp_path / "new.csv", 20, seed=6, columns=columns)
    run = train(tmp_path / "run", table, method, **QUICK, target="kind")
    path, (row,), _ = update_run(run.folder, new)
    assert row["rows_after"] == row["rows_before"] + 20
    posterior, preprocessor, _ = Run.open(path).posterior()
    assert posterior.predict(preprocessor.transform(new)).mean.shape == (20, 2)
    assert method in update_module.UPDATABLE_METHODS
    with pytest.raises(RunError, match="Fit again without these rows"):
        update_run(path, new, remove=True, force=True)


def test_the_name_of_a_method_that_was_refused_is_not_recommended(run, new):
    last_layer, _, job = run.posterior("laplace-last")
    mode, _, _ = run.posterior("map")
    mixture = bayou.Mixture([last_layer, mode], torch.tensor([0.5, 0.5]))
    mixture.save(run.job_folder(job) / "posterior.bayou")
    words = (
        "laplace-last-0: component 1 of this mixture: .* posteriors of vbll, laplace, ffg, wide can "
        "be updated"
    )
    with pytest.raises(RunError, match=words):
        update_run(run.folder, new, method="laplace-last")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vbll", "wide", "laplace", "ffg"])
def test_numbers_learn_new_rows_and_exact_methods_lose_them(method, tmp_path, new):
    table = write_flats(tmp_path / "t.csv", 80, seed=5)
    settings = {"effort": 0.05} if method == "wide" else QUICK
    run = train(tmp_path / "run", table, method, **settings)
    path, (row,), _ = update_run(run.folder, new)
    assert row["rows_after"] == row["rows_before"] + 30
    is_exact = method in (*update_module.EXACT_METHODS, update_module.EXACT_METHOD_OF_NUMBERS)
    if not is_exact:
        names = "laplace-last, vbll, wide"
        with pytest.raises(RunError, match=f"posteriors of {names} can lose rows"):
            update_run(path, new, remove=True, force=True)
        return
    if method == "wide":
        with pytest.raises(RunError, match="of laplace-last, vbll, laplace, ffg can be updated$"):
            update_run(path, new, forget=0.9, force=True)
    update_run(path, new, remove=True, force=True)
    x, _ = rows_of(run, new)
    mean, variance = run.posterior()[0].function(x)
    restored_mean, restored_variance = Run.open(path).posterior()[0].function(x)
    torch.testing.assert_close(restored_mean, mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(restored_variance, variance, rtol=1e-2, atol=1e-5)
