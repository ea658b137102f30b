"""The column of unusual rows: a p-value among the rows of a run."""

import numpy as np
import pytest
from typer.testing import CliRunner

from bayou.app.cli.app import app
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run
from bayou.app.runs.predictions import write_predictions

QUICK = {"target": "y", "steps": 30, "gain": 1.0, "samples": 10}


def write_rows(path, rows):
    lines = [",".join(row) for row in rows.astype(str)]
    path.write_text("\n".join(["a,b,y", *lines]) + "\n")
    return path


def rows_of(count, task, seed=0, shift=0.0):
    generator = np.random.default_rng(seed)
    a, b, noise = generator.normal(size=(3, count))
    a, b = a + shift, b + shift
    y = (100 + 20 * a + 10 * noise).astype(object)
    if task == "classes":
        y = np.where(a * b + 0.3 * noise > 0, "yes", "no").astype(object)
    return np.stack([a.astype(object), b.astype(object), y], 1)


def unusual(path):
    table = np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8")
    return table["unusual"]


@pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning")
@pytest.mark.parametrize("task", [pytest.param("numbers", marks=pytest.mark.slow), "classes"])
def test_rows_of_another_kind_have_small_p_values(task, tmp_path):
    source = write_rows(tmp_path / "source.csv", rows_of(600, task))
    folder = tmp_path / "run"
    Run.create(folder, Config(str(source), ("map",), **QUICK)).work()
    near = write_rows(tmp_path / "near.csv", rows_of(100, task, seed=1))
    far = write_rows(tmp_path / "far.csv", rows_of(100, task, seed=1, shift=6.0))
    result = CliRunner().invoke(
        app, f"predict {folder} --input {near} --out {tmp_path}/p.csv --ood".split()
    )
    assert result.exit_code == 0, result.output
    p_values = unusual(tmp_path / "p.csv")
    # The fractions of 100 new and of 120 test rows that are below the level.
    spread = (0.2 * 0.8 * (1 / 100 + 1 / 120)) ** 0.5
    assert abs((p_values <= 0.2).mean() - 0.2) < 4 * spread
    notes = write_predictions(folder, far, tmp_path / "q.csv", ood=True)
    assert (unusual(tmp_path / "q.csv") <= 0.05).mean() > 0.9
    assert any("rows have a p-value of 0.01 at most in the column unusual" in n for n in notes)
    plain = write_predictions(folder, near, tmp_path / "r.csv")
    assert not any("unusual" in note for note in plain)
    assert "unusual" not in (tmp_path / "r.csv").read_text()
    source.unlink()
    with pytest.raises(ValueError, match="--ood needs the training rows of the run"):
        write_predictions(folder, near, tmp_path / "s.csv", ood=True)


@pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning")
def test_few_test_rows_are_replaced_by_training_rows(tmp_path):
    source = write_rows(tmp_path / "source.csv", rows_of(300, "classes"))
    folder = tmp_path / "run"
    Run.create(folder, Config(str(source), ("map",), **QUICK)).work()
    notes = write_predictions(folder, source, tmp_path / "p.csv", ood=True)
    assert any("ranks rows among training rows" in note for note in notes)
