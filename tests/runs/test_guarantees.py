"""``bayou predict --conformal``: columns that hold y, by a file of rows that the run has not
seen.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bayou.app.cli.app import app
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run
from bayou.app.runs.predictions import write_predictions


def write(path: Path, columns: dict[str, list[object]], rows: slice) -> Path:
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(list(zip(*columns.values(), strict=True))[rows])
    return path


def read(path: Path) -> dict[str, list[str]]:
    with open(path, newline="") as stream:
        rows = list(csv.DictReader(stream))
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.usefixtures("short_search")
@pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning")
@pytest.mark.parametrize("task", ["numbers", "classes"])
def test_conformal_columns_hold_y(task: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(2, 260))
    y = 100 + 20 * a + 10 * generator.normal(size=260)
    kind = np.where(a * b + 0.3 * generator.normal(size=260) > 0, "yes", "no")
    target = [*(kind.tolist() if task == "classes" else y.tolist())]
    columns: dict[str, list[object]] = {"a": [*a.tolist()], "b": [*b.tolist()], "y": target}
    source, held = (
        write(tmp_path / "s.csv", columns, slice(60)),
        write(tmp_path / "h.csv", columns, slice(60, 160)),
    )
    new, out = write(tmp_path / "n.csv", columns, slice(160, 260)), tmp_path / "p.csv"
    Run.create(
        tmp_path / "run", Config(data=str(source), target="y", methods=("map",), steps=60)
    ).work()
    with pytest.raises(ValueError, match="held-out rows are also training rows"):
        write_predictions(tmp_path / "run", new, out, conformal=source)
    assert not out.exists()
    with pytest.raises(
        ValueError, match="100 held-out rows are too few for level=0.995; it needs at least 199"
    ):
        write_predictions(tmp_path / "run", new, out, conformal=held, level=0.995)
    words = [
        "predict",
        tmp_path / "run",
        "--input",
        new,
        "--out",
        out,
        "--conformal",
        held,
        "--level",
        0.8,
    ]
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == 0, done.output
    found = read(out)
    if task == "classes":
        hits = [
            str(truth) in said.split("|")
            for truth, said in zip(target[160:], found["conformal_set"], strict=True)
        ]
    else:
        ends = np.array([found["conformal_lower"], found["conformal_upper"]], dtype=float)
        truth = np.array(target[160:], dtype=float)
        hits = ((ends[0] <= truth) & (truth <= ends[1])).tolist()
        assert 20 < float((ends[1] - ends[0]).mean()) < 40  # 2·1.28·10 were all known
    assert abs(float(np.mean(hits)) - 0.8) < 3 * (0.16 * 2 / 100) ** 0.5
