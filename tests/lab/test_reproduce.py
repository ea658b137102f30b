"""Published experiments: rows are run once, written down as they finish, and rendered with what was published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bayou
from bayou.lab import nets, reproduce
from bayou.lab.data import CATALOGUE
from bayou.lab.reproduce import EXPERIMENTS, Budget, Experiment, Row


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Experiment:
    rows = (
        Row("MAP", lambda b: bayou.MAP(**b.settings()), "mlp", published="1.5"),
        Row("FFG", lambda b: bayou.VI(bayou.FFG(), **b.settings()), "mlp", bayou.Normal(1.0)),
    )
    experiment = Experiment(
        "tiny", "Two moons", ("moons",), lambda data: rows, lambda data: 2, lambda data: bayou.Categorical(),
        ("error", "nll", "ece", "auroc_entropy", "elbo", "kl"), seeds=2, lr=0.01,
    )  # fmt: skip
    monkeypatch.setitem(EXPERIMENTS, "tiny", experiment)
    return experiment


def test_a_table_is_written_and_nothing_is_run_twice(tiny: Experiment, tmp_path: Path) -> None:
    told: list[str] = []
    options: dict[str, Any] = {"samples": 5, "tell": told.append, "command": "bayou reproduce tiny"}
    reproduce.reproduce("tiny", tmp_path, seeds=1, **options)
    assert len(told) == 2
    path = reproduce.reproduce("tiny", tmp_path, **options)
    assert len(told) == 4
    reproduce.reproduce("tiny", tmp_path, **options)
    assert len(told) == 4
    rows = json.loads((tmp_path / "tiny.json").read_text())["rows"]
    assert [(row["label"], row["seed"]) for row in rows] == [("MAP", 0), ("FFG", 0), ("MAP", 1), ("FFG", 1)]
    assert rows[0]["elbo"] is None
    assert rows[1]["elbo"] < 0 < rows[1]["kl"]
    table = path.read_text()
    for words in ("Two moons", "±", "| 1.5 | 2 |", "bayou reproduce tiny", "2 epochs"):
        assert words in table, words


def test_rows_and_data_can_be_picked_and_mistakes_are_named(tiny: Experiment, tmp_path: Path) -> None:
    told: list[str] = []
    reproduce.reproduce("tiny", tmp_path, only=["FFG"], seeds=1, length=1, samples=3, tell=told.append)
    assert len(told) == 1
    for options, words in (({"only": ["MNF"]}, "no row 'MNF'"), ({"data": ["digits"]}, "no data 'digits'")):
        with pytest.raises(ValueError, match=words):
            reproduce.reproduce("tiny", tmp_path, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mnist-lenet"):
        reproduce.find("mnist")


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "tiny"])
def test_every_row_of_every_experiment_can_be_built(name: str) -> None:
    experiment = EXPERIMENTS[name]
    for data in experiment.data:
        assert data in CATALOGUE
        for row in experiment.rows(data):
            assert row.net in nets.NETS
            row.method(Budget(**{experiment.unit: experiment.length(data)}))
    committed = Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.json"
    if committed.exists():
        found = json.loads(committed.read_text())
        assert committed.with_suffix(".md").read_text() == reproduce.render(experiment, found)
