"""What a user gets without an option: one default in all places, which covers and finishes without
a warning.
"""

import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import bayou
from bayou.adapters.sklearn import BayesClassifier, BayesRegressor
from bayou.app.cli.app import app
from bayou.app.runs.config import Config, default_method
from bayou.app.runs.evaluation import evaluate_run
from bayou.app.runs.folder import Run
from bayou.core.progress import BayouWarning
from bayou.select.settings import DEFAULT_METHOD, DEFAULT_METHOD_OF_FILES
from bayou.training.data import as_data


def test_a_config_and_the_estimators_have_the_same_default():
    assert Config(data="table.csv").methods == (DEFAULT_METHOD,)
    assert BayesRegressor().method == BayesClassifier().method == DEFAULT_METHOD
    assert {DEFAULT_METHOD, DEFAULT_METHOD_OF_FILES} <= set(bayou.list_methods())


@pytest.mark.parametrize(
    ("data", "method"),
    [
        ("houses.csv", DEFAULT_METHOD_OF_FILES),
        ("folder/Houses.CSV", DEFAULT_METHOD_OF_FILES),
        ("houses.tsv.gz", DEFAULT_METHOD_OF_FILES),
        ("houses.parquet", DEFAULT_METHOD_OF_FILES),
        ("images.npz", DEFAULT_METHOD),
        ("digits", DEFAULT_METHOD),
    ],
)
def test_the_command_mixes_methods_for_a_file_of_rows(data, method, monkeypatch):
    """Without --method, and not where a method is given."""
    chosen = []
    monkeypatch.setattr("bayou.app.cli.app._start", lambda ctx, methods: chosen.append(methods))
    runner = CliRunner()
    for arguments in (["train", data], ["train", data, "--method", "map"]):
        assert runner.invoke(app, arguments).exit_code == 0
    assert default_method(data) == method
    assert chosen == [(method,), ("map",)]


@pytest.mark.parametrize(("rows", "planned"), [(40, 300), (600, 600)])
def test_variational_methods_run_from_a_mode_until_they_have_converged(rows, planned):
    data = as_data((torch.zeros(rows, 1), torch.zeros(rows, 1)), 128)
    method = bayou.VI(bayou.MNF()).at_mode(0.3, data)
    assert method.start == "network"
    assert method.open_ended
    assert method.total_steps(as_data(data, method.batch_size)) == planned
    assert method.with_planned_length(data).steps == planned
    assert bayou.VI(bayou.MNF(), steps=7).at_mode(0.3, data).steps == 7


def write_table(path, rows, seed):
    """Write rows of three numbers, a category of 12 levels and a target with noise 0.5."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator)
    level = torch.randint(12, (rows,), generator=generator)
    y = x[:, 0] - x[:, 1] * (level % 3) + 0.5 * torch.randn(rows, generator=generator)
    lines = [
        f"{a:.6f},{b:.6f},{c:.6f},level {k},{z:.6f}"
        for (a, b, c), k, z in zip(x, level, y, strict=True)
    ]
    path.write_text("\n".join(["a,b,c,group,y", *lines]) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "rows"),
    [
        (DEFAULT_METHOD, 25),
        (DEFAULT_METHOD, 250),
        (DEFAULT_METHOD_OF_FILES, 25),
        (DEFAULT_METHOD_OF_FILES, 250),
        ("mnf", 250),
    ],
)
def test_a_table_is_fitted_without_a_warning(method: str, rows: int, tmp_path: Path) -> None:
    """The intervals contain 90 % of 1,000 fresh rows, up to the noise of so few training rows."""
    write_table(tmp_path / "table.csv", rows, 0)
    write_table(tmp_path / "fresh.csv", 1000, 1)
    run = Run.create(
        tmp_path / "run", Config(data=str(tmp_path / "table.csv"), target="y", methods=(method,))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", BayouWarning)
        (result,) = run.work()
    assert [
        check for check in result["checks"] if check["name"] in ("converged", "mode", "collapse")
    ]
    assert not [
        check
        for check in result["checks"]
        if check["name"] == "converged" and check["status"] != "ok"
    ]
    ((scores,), _) = evaluate_run(run.folder, str(tmp_path / "fresh.csv"))
    chance = (
        3 * 0.25 / (0.8 * rows) ** 0.5
    )  # the noise of n rows is known to 1/√(2n), and with it the coverage
    assert 0.9 - chance < scores["coverage"] < 0.9 + min(chance, 0.09)
