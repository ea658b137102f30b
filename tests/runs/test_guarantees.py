"""Conformal columns of predictions: they contain y, by held-out rows of a file."""

import numpy as np
import pytest
from typer.testing import CliRunner

from bayou.app.cli.app import app
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run
from bayou.app.runs.predictions import write_predictions


def write_rows(path, rows):
    lines = [",".join(row) for row in rows.astype(str)]
    path.write_text("\n".join(["a,b,y", *lines]) + "\n")
    return path


@pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning")
@pytest.mark.parametrize("task", ["numbers", "classes"])
def test_conformal_columns_contain_y(task, tmp_path):
    generator = np.random.default_rng(0)
    a, b, noise = generator.normal(size=(3, 260))
    y = (100 + 20 * a + 10 * noise).astype(object)
    if task == "classes":
        y = np.where(a * b + 0.3 * noise > 0, "yes", "no").astype(object)
    rows = np.stack([a.astype(object), b.astype(object), y], 1)
    source = write_rows(tmp_path / "source.csv", rows[:60])
    held_out = write_rows(tmp_path / "held_out.csv", rows[60:160])
    new = write_rows(tmp_path / "new.csv", rows[160:])
    out = tmp_path / "out.csv"
    folder = tmp_path / "run"
    Run.create(folder, Config(str(source), ("map",), target="y", steps=60, gain=1.0)).work()
    for options, message in (
        ({"conformal": source}, "held-out rows are also training rows"),
        ({"conformal": held_out, "level": 0.995}, "100 held-out rows are too few .* least 199"),
    ):
        with pytest.raises(ValueError, match=message):
            write_predictions(folder, new, out, **options)
    assert not out.exists()

    line = f"predict {folder} --input {new} --out {out} --conformal {held_out} --level 0.8"
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
    table = np.genfromtxt(out, delimiter=",", names=True, dtype=None, encoding="utf-8")
    truth = rows[160:, 2]
    if task == "classes":
        sets = table["conformal_set"]
        hits = [name in names.split("|") for name, names in zip(truth, sets, strict=True)]
    else:
        low, high = table["conformal_lower"], table["conformal_upper"]
        hits = (low <= truth) & (truth <= high)
        assert 20 < float((high - low).mean()) < 40  # 2·1.28·10 were all known
    assert abs(np.mean(hits) - 0.8) < 3 * (0.16 * 2 / 100) ** 0.5


@pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning")
def test_conformal_columns_by_group_and_under_a_shift(tmp_path):
    """The noise is three times as large where a > 1, as it is in half of the new rows."""
    generator = np.random.default_rng(0)
    a = generator.normal(size=1300)
    a[700:] += 1.0
    kind = np.where(a > 1, "far", "near")
    y = 100 + 20 * a + np.where(a > 1, 30, 10) * generator.normal(size=1300)
    rows = np.stack([a.astype(object), kind.astype(object), y.astype(object)], 1)

    def write(name, part):
        return write_rows(tmp_path / name, part)

    source = write("source.csv", rows[:100])
    held_out, new = write("held_out.csv", rows[100:700]), write("new.csv", rows[700:])
    folder, out = tmp_path / "run", tmp_path / "out.csv"
    config = Config(str(source), ("map",), target="y", drop=("b",), steps=60, gain=1.0)
    Run.create(folder, config).work()

    def coverage(options=""):
        line = f"predict {folder} --input {new} --out {out} --force --conformal {held_out}"
        result = CliRunner().invoke(app, [*line.split(), *options.split()])
        assert result.exit_code == 0, result.output
        table = np.genfromtxt(out, delimiter=",", names=True, dtype=None, encoding="utf-8")
        truth = rows[700:, 2].astype(float)
        hits = (table["conformal_lower"] <= truth) & (truth <= table["conformal_upper"])
        return hits.mean(), result.output

    assert coverage()[0] < 0.83
    covered, output = coverage("--conformal-shift covariate")
    assert "the weights of the covariate shift leave an effective sample of" in output
    assert abs(covered - 0.9) < 3 * (0.09 * (1 / 220 + 1 / 600)) ** 0.5
    assert abs(coverage("--conformal-groups b")[0] - 0.9) < 3 * (0.09 * (1 / 95 + 1 / 600)) ** 0.5
    for options, message in (
        ({"conformal_groups": "c", "conformal": held_out}, "has no column 'c' of groups"),
        ({"conformal_groups": "b"}, "needs labeled rows"),
        ({"conformal_shift": "x", "conformal": held_out}, "must be covariate or label, got 'x'"),
        ({"conformal_shift": "label", "conformal": held_out}, "for classes"),
    ):
        with pytest.raises(ValueError, match=message):
            write_predictions(folder, new, out, force=True, **options)
