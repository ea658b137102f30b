"""`bayou calibrate`: the posterior of a run and its report change, and predictions follow."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from bayou.app.cli.app import app
from bayou.app.runs.evaluation import evaluate_run
from bayou.app.runs.folder import Run

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def write_rows(path, rows, seed):
    generator = np.random.default_rng(seed)
    x = generator.uniform(-2, 2, (rows, 2))
    y = x[:, 0] + 0.3 * generator.standard_t(2.5, rows)
    np.savetxt(path, np.c_[x, y], delimiter=",", header="a,b,y", comments="")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_rows(folder / "train.csv", 120, 0)
    write_rows(folder / "held.csv", 100, 1)
    command = ["train", str(folder / "train.csv"), "--target", "y", "--method", "map"]
    result = CliRunner().invoke(
        app, [*command, "--steps", "150", "--out", str(folder / "run"), "-q"]
    )
    assert result.exit_code == 0, result.output
    return folder


def calibrate(folder, *options, rows="held.csv"):
    return CliRunner().invoke(
        app, ["calibrate", str(folder / "run"), "--input", str(folder / rows), *options]
    )


def test_a_map_changes_the_run_and_none_restores_it(run):
    job = run / "run" / "map-0"
    scores = json.loads((job / "result.json").read_text())["metrics"]
    result = calibrate(run, "--map", "isotonic")
    assert result.exit_code == 0, result.output
    assert "that the choice did not use" in result.output
    posterior, _, _ = Run.open(run / "run").posterior()
    assert posterior.calibration_map is not None
    record = json.loads((job / "calibration.json").read_text())
    assert record["map"] == "isotonic"
    assert record["rows"] == 100
    assert record["fresh"]["rows"] == 25
    changed = json.loads((job / "result.json").read_text())
    assert changed["metrics"]["nll"] != scores["nll"]
    assert "isotonic" in (run / "run" / "report.html").read_text()
    result = calibrate(run, "--map", "none")
    assert result.exit_code == 0, result.output
    restored = json.loads((job / "result.json").read_text())["metrics"]
    assert restored["nll"] == pytest.approx(scores["nll"])


def test_the_nll_is_in_the_units_of_the_file(run):
    assert calibrate(run, "--map", "none").exit_code == 0
    ((scores,), _) = evaluate_run(run / "run", run / "held.csv")
    assert calibrate(run, "--map", "temperature").exit_code == 0
    record = json.loads((run / "run" / "map-0" / "calibration.json").read_text())
    assert record["before"] == pytest.approx(scores["nll"], rel=1e-5)
    ((scores,), _) = evaluate_run(run / "run", run / "held.csv")
    assert record["after"] == pytest.approx(scores["nll"], rel=1e-5)


def test_a_temperature_of_another_unit_is_a_note(run):
    x, y = np.split(np.loadtxt(run / "held.csv", delimiter=",", skiprows=1), [2], axis=1)
    rows = np.c_[x, 20 * y]
    np.savetxt(run / "other.csv", rows, delimiter=",", header="a,b,y", comments="")
    result = calibrate(run, "--map", "temperature", rows="other.csv")
    assert result.exit_code == 0, result.output
    assert "are they in the units of the training rows?" in " ".join(result.output.split())
    result = calibrate(run, "--map", "temperature")
    assert "units of the training rows" not in " ".join(result.output.split())


def test_training_rows_and_other_maps_are_refused(run):
    result = calibrate(run, rows="train.csv")
    assert result.exit_code == 2
    assert "also training rows" in result.output
    result = calibrate(run, "--map", "matrix")
    assert result.exit_code == 2
    assert "for numbers" in result.output
