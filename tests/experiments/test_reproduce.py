"""Published experiments: rows are run once, written down as they finish, and rendered with what was
published.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import bayou
from bayou.app.runs import nets
from bayou.data import CATALOGUE, load
from experiments import reproduce, study
from experiments.experiment import Budget, Experiment, Row, hold_out
from experiments.published import EXPERIMENTS


@pytest.fixture
def tiny(monkeypatch):
    rows = (
        Row("MAP", lambda b: bayou.MAP(**b.settings()), "mlp", published="1.5"),
        Row("FFG", lambda b: bayou.VI(bayou.MeanField(), **b.settings()), "mlp", bayou.Normal(1.0)),
    )
    experiment = Experiment(
        "tiny", "Two moons", ("moons",), lambda data: rows, lambda data: 2, lambda data: bayou.Categorical(),
        ("error", "nll", "ece", "auroc_entropy", "elbo", "kl"), seeds=2, lr=0.01,
    )  # fmt: skip
    monkeypatch.setitem(EXPERIMENTS, "tiny", experiment)
    return experiment


def short(folder, **options):
    """The page and the numbers of one seed and one epoch."""
    defaults = {"seeds": 1, "length": 1, "samples": 2, "tell": str}
    return reproduce.reproduce("tiny", folder, **defaults | options)


def numbers_of(folder):
    return json.loads((folder / "tiny.json").read_text())


def test_table_is_written_and_finished_rows_are_not_run_again(tiny, tmp_path):
    told = []
    options = {"samples": 5, "tell": told.append, "command": "python -m experiments.reproduce tiny"}
    reproduce.reproduce("tiny", tmp_path, seeds=1, **options)
    assert len(told) == 2
    page, numbers = reproduce.reproduce("tiny", tmp_path, **options)
    assert len(told) == 4
    assert numbers == tmp_path / "tiny.json"
    reproduce.reproduce("tiny", tmp_path, **options)
    assert len(told) == 4
    rows = numbers_of(tmp_path)["rows"]
    assert [(row["label"], row["seed"]) for row in rows] == [
        (label, seed) for seed in (0, 1) for label in ("MAP", "FFG")
    ]
    assert rows[0]["elbo"] is None
    assert rows[1]["elbo"] < 0 < rows[1]["kl"]
    table = page.read_text()
    for words in (
        "Two moons",
        "±",
        "| 1.5 | 2 |",
        "python -m experiments.reproduce tiny",
        "2 epochs",
    ):
        assert words in table, words


def test_selected_rows_and_invalid_selections(tiny, tmp_path):
    told = []
    short(tmp_path, only=["FFG"], tell=told.append)
    assert len(told) == 1
    for options, words in (
        ({"only": ["MNF"]}, "no row 'MNF'"),
        ({"data": ["digits"]}, "no data 'digits'"),
    ):
        with pytest.raises(ValueError, match=words):
            short(tmp_path, **options)
    with pytest.raises(ValueError, match="mnist-lenet"):
        reproduce.find("mnist")


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "tiny"])
def test_every_row_of_every_experiment_can_be_built(name):
    experiment = EXPERIMENTS[name]
    for data in experiment.data:
        assert data in CATALOGUE
        for row in experiment.rows(data):
            assert row.net in nets.NETS
            row.method(Budget(**{experiment.unit: experiment.length(data)}))
    committed = Path(__file__).parents[2] / "experiments" / "results" / f"{name}.json"
    found = study.read(experiment, committed.parent)
    assert committed.with_suffix(".md").read_text() == experiment.render(found)


def test_rows_name_the_run_that_made_them(tiny, tmp_path):
    """A file of the first kind is read too, a row made again takes the place of the old one, and
    says by what.
    """
    old = {
        "data": "moons",
        "label": "MAP",
        "seed": 0,
        "length": 1,
        "error": 99.0,
        "nll": 1.0,
        "seconds": 1.0,
    }
    file = tmp_path / "tiny.json"
    file.write_text(
        json.dumps({"rows": [old, old | {"label": "FFG"}], "command": "first", "made": "then"})
    )
    table = short(tmp_path, command="second", only=["MAP"])[0].read_text()
    assert "99.00" in table
    assert "second" not in table
    table = short(tmp_path, command="second", again=True, only=["MAP"])[0].read_text()
    found = numbers_of(tmp_path)
    assert [(row["label"], found["runs"][row["run"]]["command"]) for row in found["rows"]] == [
        ("FFG", "first"),
        ("MAP", "second"),
    ]
    assert table.count("99.00") == 1
    assert "`first`, then,  (FFG)." in table
    assert "`second`" in table
    short(tmp_path, command="third", again=True)
    assert [one["command"] for one in numbers_of(tmp_path)["runs"]] == ["third"]


def test_a_failed_fit_keeps_the_rows_of_the_others(tiny, monkeypatch, tmp_path):
    told = []
    bad = Row("bad", lambda b: bayou.VI(bayou.MNF("no such flow"), **b.settings()), "mlp")
    monkeypatch.setitem(
        EXPERIMENTS, "tiny", replace(tiny, rows=lambda data: (bad, *tiny.rows(data)))
    )
    with pytest.raises(
        study.StudyError, match="1 of 3 fits failed; what the others gave is kept. bad on moons"
    ):
        short(tmp_path, tell=told.append)
    assert [row["label"] for row in numbers_of(tmp_path)["rows"]] == ["MAP", "FFG"]
    assert told[0].startswith("failed: bad on moons, seed 0: ")


def test_settings_are_chosen_without_a_look_at_the_test_rows(tiny, tmp_path):
    """A fifth of the training rows is scored on; test rows and those out of distribution may be
    anything.
    """
    data = load("moons")
    held, fifth = hold_out(data, 5), data.train[0][::5]
    assert held.ood is None
    assert (held.n, len(held.test[1])) == (data.n - len(fifth), len(fifth))
    assert_close(held.test[0], fifth)
    both = torch.cat([held.train[0], held.test[0]]).sort(0).values
    assert_close(both, data.train[0].sort(0).values)
    choice = replace(tiny, held_out=5)
    fit = choice.fits((), ["MAP"], 1, 2)[0]
    scores = choice.measure(fit, "cpu", 3, False)
    assert "auroc_entropy" not in scores
    assert scores["nll"] != tiny.measure(fit, "cpu", 3, False)["nll"]


@pytest.mark.slow
def test_of_rivals_the_better_on_held_out_rows_is_fitted_to_all(tiny, monkeypatch, tmp_path):
    """One of them has a likelihood, and so a number of outputs, of its own."""
    one = Row("one noise", lambda b: bayou.MAP(**b.settings()), "tanh-20")
    head = replace(one, label="head", likelihood=bayou.HeteroscedasticGaussian())
    still = replace(one, label="still", method=lambda b: bayou.MAP(**b.settings(lr=1e-9)))
    rows = (
        one,
        head,
        replace(one, label="any", rivals=(still, one)),
        replace(one, label="some", rivals=(still, head)),
    )
    experiment = replace(
        tiny, data=("cubic",), rows=lambda data: rows, length=lambda data: 100, columns=("rmse", "nll"), seeds=1,
        likelihood=lambda data: bayou.Gaussian(0.5, learn=True),
    )  # fmt: skip
    monkeypatch.setitem(EXPERIMENTS, "tiny", experiment)
    page = reproduce.reproduce("tiny", tmp_path, samples=3, tell=lambda text: None)[0].read_text()
    found = {row["label"]: row for row in json.loads((tmp_path / "tiny.json").read_text())["rows"]}
    for label, chosen in (("any", one), ("some", head)):
        assert found[label]["chosen"] == chosen.label
        assert found[label]["nll"] == found[chosen.label]["nll"]
        assert f"| {label} (1 × {chosen.label}) |" in page
    assert found["one noise"]["nll"] != found["head"]["nll"]
