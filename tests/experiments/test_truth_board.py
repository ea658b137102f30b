"""The files of the package are those that the committed results give."""

import numpy as np
import pytest
import torch

from bayou import truth
from experiments import truth_board


@pytest.mark.parametrize("name", list(truth.REFERENCES))
def test_committed_rows_are_those_of_the_results(name):
    path = truth_board.PACKAGE / f"{name}.json"
    assert path.read_text(encoding="utf-8") == truth_board.boards()[name], (
        "run `python -m experiments.truth_board`"
    )


def test_the_reference_of_digits_is_that_of_the_chains():
    reference = truth.reference("hmc-digits")
    tensors = truth_board.digits_reference()
    assert torch.equal(reference.log_probs, tensors["log_probs"].double())
    assert torch.equal(reference.y, tensors["y"])


def test_the_rows_of_digits_have_the_order_of_the_data():
    from bayou.data import load

    assert np.array_equal(load("digits").test[1], truth.reference("hmc-digits").y)


def test_an_entry_is_a_row_of_its_board(tmp_path, monkeypatch):
    reference = truth.reference("hmc-digits")
    path = tmp_path / "one.npz"
    truth.write_predictions(path, reference.log_probs.exp() * 0.9 + 0.01, name="Other")
    entry = truth.score(path, "hmc-digits").entry()
    (tmp_path / "truth_entries.json").write_text(truth_board.json.dumps([entry]))
    monkeypatch.setattr(truth_board, "HERE", tmp_path)
    (row,) = truth_board.entries("hmc-digits")
    assert (row.label, truth_board.entries("hmc-cifar10")) == ("Other", [])
